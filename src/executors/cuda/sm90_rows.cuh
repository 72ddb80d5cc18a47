// Tiles without a matrix product: combine, and the bias gradients. Each is done by one warpgroup, `thread` of 128.
#pragma once

#include "executors/cuda/sm90_epilogue.cuh"

namespace moelith::executors::cuda::sm90 {

// out[t, columns] = rounded sum over the token's routes in slot order, then its shared experts, of weight * slot row, one
// fused multiply-add each; backward: the plain sum, and (with the first columns) dprob from its groups.
__device__ __forceinline__ void combine(const PassData& data, const Work& work, int tile_columns, int thread) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool forward = sizes.direction == schedule::Direction::forward;
  const std::int64_t valid = *data.pass.layout.valid_tokens, hidden = sizes.hidden_size;
  const int k = sizes.top_k;
  if (!forward && work.column_block == 0) {
    const int groups = data.groups[0].dprob_groups;
    for (int n = thread; n < work.rows * k; n += consumer_threads) {
      const std::int64_t route = work.row_begin * k + n, token = work.row_begin + n / k;
      float total = 0.0f;
      if (token < valid && data.topk_ids[route] >= 0) {
        const float* partial = data.groups[0].dprob + route * groups;
        for (int g = 0; g < groups; ++g) total += __ldcg(partial + g);
      }
      data.d_topk_weights[route] = total;
    }
    if (data.d_shared_gates) {
      for (int n = thread; n < work.rows * sizes.shared_experts; n += consumer_threads) {
        const std::int64_t token = work.row_begin + n / sizes.shared_experts;
        const int s = n % sizes.shared_experts;
        const ExpertGroup& group = data.groups[1 + s];
        float total = 0.0f;
        for (int g = 0; token < valid && g < group.dprob_groups; ++g) total += __ldcg(group.dprob + token * group.dprob_groups + g);
        data.d_shared_gates[token * sizes.shared_experts + s] = total;
      }
    }
  }
  if (!data.out) return;
  const int pieces = static_cast<int>((schedule::min_of(tile_columns, hidden - work.column) + 7) / 8);
  for (int n = thread; n < work.rows * pieces; n += consumer_threads) {
    const std::int64_t token = work.row_begin + n / pieces, column = work.column + n % pieces * 8;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    auto add = [&](uint4 row, float weight) {
      float f[8];
      unpack(row, f);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] = fmaf(weight, f[j], sum[j]);
    };
    if (token < valid) {
      constexpr int batch = 8;  // rows in flight
      for (int first = 0; first < k; first += batch) {
        uint4 row[batch];
        float weight[batch];
        bool there[batch];
#pragma unroll
        for (int j = 0; j < batch; ++j) {
          const std::int64_t route = token * k + first + j;
          there[j] = first + j < k;
          if (there[j]) {
            row[j] = load_16_shared_by_sms(data.groups[0].slots + route * hidden + column);
            weight[j] = forward && data.weight_after_down ? __ldg(data.topk_weights + route) : 1.0f;
            there[j] = __ldg(data.topk_ids + route) >= 0;  // otherwise what was loaded is not used
          }
        }
#pragma unroll
        for (int j = 0; j < batch; ++j) {
          if (there[j]) add(row[j], weight[j]);
        }
      }
      for (int s = 0; s < sizes.shared_experts; ++s) {
        const float gate = forward && data.shared_gates ? data.shared_gates[token * sizes.shared_experts + s] : 1.0f;
        add(load_16_shared_by_sms(data.groups[1 + s].slots + token * hidden + column), gate);
      }
    }
    store_16(data.out + token * data.out_stride + column, pack(sum));
  }
}

// Sum of `value(row, column)` rows over the expert, 64 rows at a time from its first, then over those sums in order.
template <class Value>
__device__ __forceinline__ void bias_gradient(const GradientTarget& targets, const Work& work, std::int64_t columns, int thread,
                                     Value&& value) {
  if (!targets || (work.sum_rows == 0 && targets.accumulate)) return;
  const GradientTarget target = targets.of(work.expert, columns);
  for (std::int64_t column = thread; column < columns; column += consumer_threads) {
    float total = 0.0f;
    for (int begin = 0; begin < work.sum_rows; begin += 64) {
      float group = 0.0f;
      const int end = min(begin + 64, work.sum_rows);
#pragma unroll 4
      for (int r = begin; r < end; ++r) group = value(work.row_begin + r, column, group);
      total += group;
    }
    if (target.is_float) {
      float& out = static_cast<float*>(target.data)[column];
      out = target.accumulate ? out + total : total;
    } else {
      bf16& out = static_cast<bf16*>(target.data)[column];
      out = numerics::to_bfloat16(target.accumulate ? numerics::to_float(out) + total : total);
    }
  }
}
__device__ __forceinline__ float load_one(const bf16* source) {
  return __uint_as_float(std::uint32_t(__ldcg(reinterpret_cast<const unsigned short*>(source))) << 16);
}
__device__ __forceinline__ void gate_up_bias_gradient(const PassData& data, const Work& work, int thread) {
  const ExpertGroup& tensors = data.groups[work.group];
  const std::int64_t columns = data.pass.sizes.gate_up_factor * tensors.width;
  bias_gradient(tensors.gate_up_bias_grad, work, columns, thread, [&](std::int64_t row, std::int64_t column, float sum) {
    return sum + load_one(tensors.d_pre_activation + row * columns + column);
  });
}
__device__ __forceinline__ void down_bias_gradient(const PassData& data, const Work& work, int thread) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const ExpertGroup& tensors = data.groups[work.group];
  bias_gradient(tensors.down_bias_grad, work, sizes.hidden_size, thread, [&](std::int64_t row, std::int64_t column, float sum) {
    float weight = 1.0f;
    std::int64_t token = row;
    if (work.group == 0) {
      const std::int64_t route = data.pass.layout.row_route[row];
      token = route / sizes.top_k;
      if (data.weight_after_down) weight = data.topk_weights[route];
    } else if (data.shared_gates) {
      weight = data.shared_gates[row * sizes.shared_experts + work.group - 1];
    }
    return fmaf(weight, load_one(data.dy + token * data.dy_stride + column), sum);
  });
}

}  // namespace moelith::executors::cuda::sm90
