// Tiles without a matrix product: combine, and the bias gradients. Each is done by one warpgroup, `thread` of 128.
#pragma once

#include "executors/cuda/sm90_gradients.cuh"

namespace moelith::executors::cuda::sm90 {

// dprob of a tile's routes, and of its tokens' shared experts: the sum over their groups.
__device__ __forceinline__ void combine_dprob(const PassData& data, const Work& work, int thread) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const std::int64_t valid = *data.pass.layout.valid_tokens;
  const int k = sizes.top_k;
  auto sum_of = [](const float* partial, int groups) {
    float total = 0.0f;
#pragma unroll 4
    for (int g = 0; g < groups; ++g) total += __ldcg(partial + g);
    return total;
  };
  for (int n = thread; n < work.rows * k; n += consumer_threads) {
    const std::int64_t route = work.row_begin * k + n, token = work.row_begin + n / k;
    const bool there = token < valid && data.topk_ids[route] >= 0;
    const ExpertGroup& group = data.groups[0];
    data.d_topk_weights[route] = there ? sum_of(group.dprob + route * group.dprob_groups, group.dprob_groups) : 0.0f;
  }
  if (!data.d_shared_gates) return;
  for (int n = thread; n < work.rows * sizes.shared_experts; n += consumer_threads) {
    const std::int64_t token = work.row_begin + n / sizes.shared_experts;
    const int s = n % sizes.shared_experts;
    const ExpertGroup& group = data.groups[1 + s];
    data.d_shared_gates[token * sizes.shared_experts + s] =
        token < valid ? sum_of(group.dprob + token * group.dprob_groups, group.dprob_groups) : 0.0f;
  }
}

// What combine has to know of a block's tokens, in the warpgroup's shared memory.
struct CombineSlots {
  std::uint32_t masks, weights;  // of token n: which slots are there, as bits; of slot j of it: its weight
  int top_k;

  __device__ CombineSlots(std::uint32_t staging, int k) : masks(staging), weights(staging + 4 * combine_rows), top_k(k) {}
  __device__ __forceinline__ void fill(const PassData& data, const Work& work, std::int64_t valid, int thread) const {
    const bool weighted = data.pass.sizes.direction == schedule::Direction::forward && data.weight_after_down;
    const std::int64_t first = work.row_begin * std::int64_t(top_k);
    for (int n = thread; n < work.rows; n += consumer_threads) {
      std::uint32_t mask = 0;
#pragma unroll 8
      for (int j = 0; j < top_k; ++j) {
        if (__ldg(data.topk_ids + first + n * top_k + j) >= 0) mask |= 1u << j;
      }
      store_shared_4(masks + n * 4, work.row_begin + n < valid ? mask : 0);
    }
    for (int n = thread; n < work.rows * top_k; n += consumer_threads) {
      store_shared_4(weights + n * 4, __float_as_uint(weighted ? __ldg(data.topk_weights + first + n) : 1.0f));
    }
  }
  __device__ std::uint32_t mask(int token) const { return load_shared_4(masks + token * 4); }
  __device__ bool all(std::uint32_t mask) const { return mask == ~0u >> (32 - top_k); }
  __device__ float weight(int token, int slot) const {
    return __uint_as_float(load_shared_4(weights + (token * top_k + slot) * 4));
  }
};

// Adds shared experts to a token's sum of 8 columns, and stores it.
__device__ __forceinline__ void finish_token(const PassData& data, std::int64_t token, bool valid, std::int64_t column,
                                             float (&sum)[8]) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool gated = sizes.direction == schedule::Direction::forward && data.shared_gates;
  for (int s = 0; valid && s < sizes.shared_experts; ++s) {
    const float gate = gated ? data.shared_gates[token * sizes.shared_experts + s] : 1.0f;
    float f[8];
    unpack(load_16_shared_by_sms(data.groups[1 + s].slots + token * sizes.hidden_size + column), f);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(gate, f[i], sum[i]);
  }
  store_16(data.out + token * data.out_stride + column, pack(sum));
}

// out[t, columns] = rounded sum over the token's routes in slot order, then its shared experts, of weight * slot row,
// one fused multiply-add each; backward: the plain sum, and (with the first columns) dprob from its groups. `my_turn`
// waits for the warpgroup's turn in the ring, `your_turn` passes it on.
template <int N, class MyTurn, class YourTurn>
__device__ __forceinline__ void combine(SharedMemory<N>& shared, const Work& work, int group, MyTurn&& my_turn,
                                        YourTurn&& your_turn) {
  using Shape = BlockShape<N>;
  const PassData& data = shared.data();
  const schedule::Sizes& sizes = data.pass.sizes;
  const int thread = thread_now() % consumer_threads, k = sizes.top_k, pieces = work.columns / 8;
  const std::int64_t valid = *data.pass.layout.valid_tokens;
  const CombineSlots slots(shared_address(shared.staging[4 * group]), k);
  if (work.k_steps > 0) {
    slots.fill(data, work, valid, thread);
    named_barrier_sync(barrier_own + group, consumer_threads);
  }
  my_turn();
  RingPosition<Shape::stages> ring(work.first_step);
  for (int step = 0; step < work.k_steps; ++step, ring.next()) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);  // all, before the other may go on in the ring
  }
  your_turn();
  if (sizes.direction == schedule::Direction::backward && work.column_block == 0 && cluster_rank() == 0) {
    combine_dprob(data, work, thread);
  }
  const int tokens = combine_tokens<N>(k);
  ring = RingPosition<Shape::stages>(work.first_step);
#pragma unroll 1
  for (int step = 0; step < work.k_steps; ++step, ring.next()) {
    const int first = step * tokens, here = work.rows - first < tokens ? work.rows - first : tokens;
    const std::uint32_t stage = shared_address(shared.stage[ring.slot]);
#pragma unroll 1
    for (int n = thread; n < here * pieces; n += consumer_threads) {
      const int token = n / pieces, piece = n % pieces;
      const std::uint32_t place = stage + piece / 8 * (slot_rows<N> * 128), mask = slots.mask(first + token);
      float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      auto add = [&](int j) {
        const int row = token * k + j;
        const float weight = slots.weight(first + token, j);
        float f[8];
        unpack(load_shared_16(place + row * 128 + ((piece % 8 ^ (row & 7)) << 4)), f);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, f[i], sum[i]);
      };
      if (slots.all(mask)) {
#pragma unroll 8
        for (int j = 0; j < k; ++j) add(j);
      } else {
#pragma unroll 1
        for (int j = 0; j < k; ++j) {
          if (mask >> j & 1) add(j);
        }
      }
      const std::int64_t t = work.row_begin + first + token;
      finish_token(data, t, t < valid, work.column + piece * 8, sum);
    }
    __syncwarp();
    release_stage(shared_address(&shared.empty[ring.slot]));
  }
}

// 8 values to, or onto, a gradient tensor.
__device__ __forceinline__ void store_gradient(const GradientTarget& target, std::int64_t at, float (&f)[8]) {
  if (target.is_float) {
    float4* out = reinterpret_cast<float4*>(static_cast<float*>(target.data) + at);
    float4 a{f[0], f[1], f[2], f[3]}, b{f[4], f[5], f[6], f[7]};
    if (target.accumulate) {
      const float4 c = out[0], d = out[1];
      a = {c.x + a.x, c.y + a.y, c.z + a.z, c.w + a.w};
      b = {d.x + b.x, d.y + b.y, d.z + b.z, d.w + b.w};
    }
    out[0] = a, out[1] = b;
  } else {
    bf16* out = static_cast<bf16*>(target.data) + at;
    if (target.accumulate) {
      float old[8];
      unpack(load_16(out), old);
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] += old[j];
    }
    store_16(out, pack(f));
  }
}

// A row of what a bias gradient sums: weight * values[column].
struct alignas(16) WeightedRow {
  const bf16* values;
  float weight;
};

// The gradient of a bias of `columns` columns: over the rows of an expert, 64 at a time from its first, then over those
// sums in order. row_of(r): the r-th of the tile's rows. round_sums: where the sums of an expert lie that goes on in another round,
// [columns] in each of two places. By one warpgroup, whose shared memory takes 64 rows at a time, so
// that many values are on their way at once and not behind a chain of look-ups each.
template <class RowOf>
__device__ __forceinline__ void bias_gradient(const GradientTarget& targets, const Work& work, std::int64_t columns,
                                              WeightedRow* staging, float* const (&round_sums)[2], int group, int thread, RowOf&& row_of) {
  if (!targets || (work.sum_rows == 0 && targets.accumulate)) return;
  constexpr int together = 64;
  const GradientTarget target = targets.of(work.expert, columns);
#pragma unroll 1
  for (std::int64_t pass = std::int64_t(cluster_rank()) * consumer_threads * 8; pass < columns;
       pass += cluster_blocks * consumer_threads * 8) {
    const std::int64_t column = pass + thread * 8;
    float total[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (work.goes_on_from && column < columns) {
#pragma unroll
      for (int c = 0; c < 8; ++c) total[c] = __ldcg(round_sums[schedule::sum_place(work.round - 1)] + column + c);
    }
#pragma unroll 1
    for (int begin = 0; begin < work.sum_rows; begin += together) {
      const int count = min(together, work.sum_rows - begin);
      named_barrier_sync(barrier_own + group, consumer_threads);  // the rows before have been read
      if (thread < count) staging[thread] = row_of(begin + thread);
      named_barrier_sync(barrier_own + group, consumer_threads);
      if (column >= columns) continue;
      float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 16  // loads under way, all from memory
      for (int r = 0; r < count; ++r) {
        const WeightedRow row = staging[r];
        float f[8];
        unpack(load_16_shared_by_sms(row.values + column), f);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] = fmaf(row.weight, f[c], sum[c]);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) total[c] += sum[c];
    }
    if (column >= columns) continue;
    if (work.goes_on) {
#pragma unroll
      for (int c = 0; c < 8; ++c) round_sums[schedule::sum_place(work.round)][column + c] = total[c];
    } else {
      store_gradient(target, column, total);
    }
  }
}
__device__ __forceinline__ void gate_up_bias_gradient(const PassData& data, const Work& work, WeightedRow* staging,
                                                      int group, int thread) {
  const ExpertGroup& tensors = data.groups[work.group];
  const std::int64_t columns = data.pass.sizes.gate_up_factor * tensors.width;
  bias_gradient(tensors.gate_up_bias_grad, work, columns, staging, data.round_sums.gate_up_bias, group, thread,
                [&](int r) { return WeightedRow{tensors.d_pre_activation + (work.held_begin + std::int64_t(r)) * columns, 1.0f}; });
}
template <bool Ranks>
__device__ __forceinline__ void down_bias_gradient(const PassData& data, const Work& work, WeightedRow* staging,
                                                   int group, int thread) {
  const schedule::Sizes& sizes = data.pass.sizes;
  bias_gradient(data.groups[work.group].down_bias_grad, work, sizes.hidden_size, staging, data.round_sums.down_bias, group, thread,
                [&](int r) {
                  const std::int64_t row = work.row_begin + std::int64_t(r);
                  const std::int64_t index = work.group == 0 ? data.pass.layout.row_route[row] : row;
                  float weight = 1.0f;
                  if (work.group == 0) {
                    if (data.weight_after_down) weight = Ranks ? data.row_weight[row] : data.topk_weights[index];
                  } else if (data.shared_gates) {
                    weight = data.shared_gates[row * sizes.shared_experts + work.group - 1];
                  }
                  return WeightedRow{dy_of_row(data, work, work.packed_begin + std::int64_t(r)), weight};
                });
}

}  // namespace moelith::executors::cuda::sm90
