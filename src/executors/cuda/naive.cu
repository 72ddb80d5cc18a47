#include "executors/cuda/naive.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "moelith/tensor.hpp"
#include "numerics/elementary.hpp"

namespace moelith::executors::cuda {
namespace {

using numerics::load;
using numerics::store;
using schedule::Direction;
using schedule::RowRange;

constexpr int side = 32;  // of a block's tile

// One group of experts and the pass it belongs to.
struct Scene {
  PassData data;
  int group;
  __device__ const ExpertGroup& tensors() const { return data.groups[group]; }
  __device__ RowRange rows(int expert) const {
    return data.pass.expert_rows(group == 0 ? expert : data.pass.sizes.local_experts + group - 1);
  }
  __device__ std::int64_t pre_width() const { return data.pass.sizes.gate_up_factor * tensors().width; }
  __device__ std::int64_t hidden() const { return data.pass.sizes.hidden_size; }
  __device__ std::int64_t index(std::int64_t row) const { return group == 0 ? data.pass.layout.row_route[row] : row; }
  __device__ std::int64_t token(std::int64_t row) const { return group == 0 ? index(row) / data.pass.sizes.top_k : row; }
  __device__ bool after_down() const { return group > 0 || data.weight_after_down; }
  __device__ float weight(std::int64_t row) const {
    if (group == 0) return data.topk_weights[index(row)];
    return data.shared_gates ? data.shared_gates[row * data.pass.sizes.shared_experts + group - 1] : 1.0f;
  }
};

// The products. m(), n(), k(): extents for one expert; a, b: elements; store: what becomes of a sum.
struct GateUp : Scene {
  __device__ std::int64_t m(int e) const { return rows(e).size(); }
  __device__ std::int64_t n(int) const { return pre_width(); }
  __device__ std::int64_t k(int) const { return hidden(); }
  __device__ float a(int e, std::int64_t m, std::int64_t k) const {
    return load(data.x[token(rows(e).begin + m) * data.x_stride + k]);
  }
  __device__ float b(int e, std::int64_t n, std::int64_t k) const {
    return load(tensors().gate_up_proj.of(e, pre_width() * hidden())[n * hidden() + k]);
  }
  __device__ void store_sum(int e, std::int64_t m, std::int64_t n, float sum) const {
    if (tensors().gate_up_bias) sum += load(tensors().gate_up_bias.of(e, pre_width())[n]);
    tensors().pre_activation[(rows(e).begin + m) * pre_width() + n] = store<bfloat16>(sum);
  }
};
struct Down : Scene {
  __device__ std::int64_t m(int e) const { return rows(e).size(); }
  __device__ std::int64_t n(int) const { return hidden(); }
  __device__ std::int64_t k(int) const { return tensors().width; }
  __device__ float a(int e, std::int64_t m, std::int64_t k) const {
    return load(tensors().activated[(rows(e).begin + m) * tensors().width + k]);
  }
  __device__ float b(int e, std::int64_t n, std::int64_t k) const {
    return load(tensors().down_proj.of(e, hidden() * tensors().width)[n * tensors().width + k]);
  }
  __device__ void store_sum(int e, std::int64_t m, std::int64_t n, float sum) const {
    if (tensors().down_bias) sum += load(tensors().down_bias.of(e, hidden())[n]);
    tensors().slots[index(rows(e).begin + m) * hidden() + n] = store<bfloat16>(sum);
  }
};
struct DownDgrad : Scene {
  float* d_activated;
  __device__ std::int64_t m(int e) const { return rows(e).size(); }
  __device__ std::int64_t n(int) const { return tensors().width; }
  __device__ std::int64_t k(int) const { return hidden(); }
  __device__ float a(int e, std::int64_t m, std::int64_t k) const {
    return load(data.dy[token(rows(e).begin + m) * data.dy_stride + k]);
  }
  __device__ float b(int e, std::int64_t n, std::int64_t k) const {
    return load(tensors().down_proj.of(e, hidden() * tensors().width)[k * tensors().width + n]);
  }
  __device__ void store_sum(int e, std::int64_t m, std::int64_t n, float sum) const {
    d_activated[(rows(e).begin + m) * tensors().width + n] = sum;
  }
};
struct GateUpDgrad : Scene {
  __device__ std::int64_t m(int e) const { return rows(e).size(); }
  __device__ std::int64_t n(int) const { return hidden(); }
  __device__ std::int64_t k(int) const { return pre_width(); }
  __device__ float a(int e, std::int64_t m, std::int64_t k) const {
    return load(tensors().d_pre_activation[(rows(e).begin + m) * pre_width() + k]);
  }
  __device__ float b(int e, std::int64_t n, std::int64_t k) const {
    return load(tensors().gate_up_proj.of(e, pre_width() * hidden())[k * hidden() + n]);
  }
  __device__ void store_sum(int e, std::int64_t m, std::int64_t n, float sum) const {
    tensors().slots[index(rows(e).begin + m) * hidden() + n] = store<bfloat16>(sum);
  }
};
__device__ void store_gradient(const GradientTarget& target, std::int64_t at, float sum, bool empty) {
  if (!target || (empty && target.accumulate)) return;
  if (target.is_float) {
    float& out = static_cast<float*>(target.data)[at];
    out = target.accumulate ? out + sum : sum;
  } else {
    bfloat16& out = static_cast<bfloat16*>(target.data)[at];
    out = store<bfloat16>(target.accumulate ? load(out) + sum : sum);
  }
}
struct GateUpWgrad : Scene {
  __device__ std::int64_t m(int) const { return pre_width(); }
  __device__ std::int64_t n(int) const { return hidden(); }
  __device__ std::int64_t k(int e) const { return rows(e).size(); }
  __device__ float a(int e, std::int64_t m, std::int64_t k) const {
    return load(tensors().d_pre_activation[(rows(e).begin + k) * pre_width() + m]);
  }
  __device__ float b(int e, std::int64_t n, std::int64_t k) const {
    return load(data.x[token(rows(e).begin + k) * data.x_stride + n]);
  }
  __device__ void store_sum(int e, std::int64_t m, std::int64_t n, float sum) const {
    store_gradient(tensors().gate_up_grad.of(e, pre_width() * hidden()), m * hidden() + n, sum, rows(e).size() == 0);
  }
};
struct DownWgrad : Scene {
  __device__ std::int64_t m(int) const { return hidden(); }
  __device__ std::int64_t n(int) const { return tensors().width; }
  __device__ std::int64_t k(int e) const { return rows(e).size(); }
  __device__ float a(int e, std::int64_t m, std::int64_t k) const {
    return load(data.dy[token(rows(e).begin + k) * data.dy_stride + m]);
  }
  __device__ float b(int e, std::int64_t n, std::int64_t k) const {
    return load(tensors().activated[(rows(e).begin + k) * tensors().width + n]);
  }
  __device__ void store_sum(int e, std::int64_t m, std::int64_t n, float sum) const {
    store_gradient(tensors().down_grad.of(e, hidden() * tensors().width), m * tensors().width + n, sum, rows(e).size() == 0);
  }
};

// Grid: x over the columns, y over the rows in strides, z over the experts. Each thread sums one element.
template <class Product>
__global__ void multiply(const __grid_constant__ Product p) {
  __shared__ float a[side][side + 1], b[side][side + 1];
  const int e = blockIdx.z, tx = threadIdx.x, ty = threadIdx.y;
  const std::int64_t ms = p.m(e), ns = p.n(e), ks = p.k(e), n0 = std::int64_t(blockIdx.x) * side;
  for (std::int64_t m0 = std::int64_t(blockIdx.y) * side; m0 < ms; m0 += std::int64_t(gridDim.y) * side) {
    float sum = 0.0f;
    for (std::int64_t k0 = 0; k0 < ks; k0 += side) {
      a[ty][tx] = m0 + ty < ms && k0 + tx < ks ? p.a(e, m0 + ty, k0 + tx) : 0.0f;
      b[ty][tx] = n0 + ty < ns && k0 + tx < ks ? p.b(e, n0 + ty, k0 + tx) : 0.0f;
      __syncthreads();
      for (int k = 0; k < side; ++k) sum = fmaf(a[ty][k], b[tx][k], sum);
      __syncthreads();
    }
    if (m0 + ty < ms && n0 + tx < ns) p.store_sum(e, m0 + ty, n0 + tx, sum);
  }
}

__global__ void activate(const __grid_constant__ Scene s, std::int64_t room) {
  const ExpertGroup& g = s.tensors();
  const bool gated = s.data.pass.sizes.gate_up_factor == 2;
  const std::int64_t rows = s.group == 0 ? s.rows(g.experts - 1).end : s.rows(0).end;
  for (std::int64_t n = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; n < min(rows, room) * g.width;
       n += std::int64_t(gridDim.x) * blockDim.x) {
    const std::int64_t row = n / g.width, c = n % g.width;
    const bfloat16* z = g.pre_activation + row * s.pre_width() + c;
    const float factor = s.after_down() ? 1.0f : s.weight(row);
    numerics::with_activation_kind(s.data.activation.kind, [&]<ActivationKind Kind>() {
      const float up = gated ? load(z[g.width]) : 0.0f;
      g.activated[n] = store<bfloat16>(factor * numerics::activation<Kind>(numerics::ActivationParameters<float>(s.data.activation), load(z[0]), up).value);
    });
  }
}

// One thread for 64 columns of a row.
__global__ void activate_backward(const __grid_constant__ Scene s, const float* d_activated, std::int64_t room) {
  const ExpertGroup& g = s.tensors();
  const bool gated = s.data.pass.sizes.gate_up_factor == 2;
  const std::int64_t rows = min(room, s.group == 0 ? s.rows(g.experts - 1).end : s.rows(0).end), groups = (g.width + 63) / 64;
  for (std::int64_t n = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; n < rows * groups;
       n += std::int64_t(gridDim.x) * blockDim.x) {
    const std::int64_t row = n / groups, first = n % groups * 64;
    const float weight = s.weight(row);
    float dot = 0.0f;
    numerics::with_activation_kind(s.data.activation.kind, [&]<ActivationKind Kind>() {
      const numerics::ActivationParameters<float> parameters(s.data.activation);
      for (std::int64_t c = first; c < min(first + 64, g.width); ++c) {
        const bfloat16* z = g.pre_activation + row * s.pre_width() + c;
        bfloat16* dz = g.d_pre_activation + row * s.pre_width() + c;
        const float d = d_activated[row * g.width + c];
        const auto act = numerics::activation<Kind>(parameters, load(z[0]), gated ? load(z[g.width]) : 0.0f);
        const float rounded = numerics::rounded<bfloat16>(act.value);
        dot += d * rounded;
        dz[0] = store<bfloat16>(weight * d * act.d_gate);
        if (gated) dz[g.width] = store<bfloat16>(weight * d * act.d_up);
        g.activated[row * g.width + c] = store<bfloat16>(weight * (s.after_down() ? rounded : act.value));
      }
    });
    g.dprob[s.index(row) * g.dprob_groups + n % groups] = dot;
    if (g.down_bias && first == 0) {
      float share = 0.0f;
      int e = 0;
      while (s.group == 0 && row >= s.rows(e).end) ++e;
      for (std::int64_t c = 0; s.after_down() && c < s.hidden(); ++c) {
        share += load(s.data.dy[s.token(row) * s.data.dy_stride + c]) * load(g.down_bias.of(e, s.hidden())[c]);
      }
      g.dprob[s.index(row) * g.dprob_groups + g.dprob_groups - 1] = share;
    }
  }
}

// One block for an expert, one thread a column. of_gate_up: the sum of dz, otherwise of weight * dY.
__global__ void bias_gradient(const __grid_constant__ Scene s, bool of_gate_up) {
  const int e = blockIdx.x;
  const RowRange rows = s.rows(e);
  const std::int64_t columns = of_gate_up ? s.pre_width() : s.hidden();
  for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    float total = 0.0f;
    for (std::int64_t begin = rows.begin; begin < rows.end; begin += 64) {
      float sum = 0.0f;
      for (std::int64_t r = begin; r < min(begin + 64, rows.end); ++r) {
        const float factor = of_gate_up || !s.after_down() ? 1.0f : s.weight(r);
        sum = fmaf(factor, of_gate_up ? load(s.tensors().d_pre_activation[r * columns + c])
                                      : load(s.data.dy[s.token(r) * s.data.dy_stride + c]), sum);
      }
      total += sum;
    }
    const GradientTarget& target = of_gate_up ? s.tensors().gate_up_bias_grad : s.tensors().down_bias_grad;
    store_gradient(target.of(e, columns), c, total, rows.size() == 0);
  }
}

__global__ void combine(const __grid_constant__ PassData data) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool forward = sizes.direction == Direction::forward;
  const std::int64_t valid = *data.pass.layout.valid_tokens, h = sizes.hidden_size, k = sizes.top_k;
  const std::int64_t first = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x, step = std::int64_t(gridDim.x) * blockDim.x;
  auto sum_groups = [](const float* partial, int groups) {
    float total = 0.0f;
    for (int g = 0; g < groups; ++g) total += partial[g];
    return total;
  };
  if (!forward) {
    for (std::int64_t r = first; r < sizes.tokens * k; r += step) {
      const bool there = r / k < valid && data.topk_ids[r] >= 0;
      const int groups = data.groups[0].dprob_groups;
      data.d_topk_weights[r] = there ? sum_groups(data.groups[0].dprob + r * groups, groups) : 0.0f;
    }
    for (std::int64_t n = first; data.d_shared_gates && n < sizes.tokens * sizes.shared_experts; n += step) {
      const ExpertGroup& g = data.groups[1 + n % sizes.shared_experts];
      const std::int64_t t = n / sizes.shared_experts;
      data.d_shared_gates[n] = t < valid ? sum_groups(g.dprob + t * g.dprob_groups, g.dprob_groups) : 0.0f;
    }
  }
  if (!data.out) return;
  for (std::int64_t n = first; n < sizes.tokens * h; n += step) {
    const std::int64_t t = n / h, c = n % h;
    float sum = 0.0f;
    for (int j = 0; t < valid && j < k; ++j) {
      if (data.topk_ids[t * k + j] < 0) continue;
      const float weight = forward && data.weight_after_down ? data.topk_weights[t * k + j] : 1.0f;
      sum = fmaf(weight, load(data.groups[0].slots[(t * k + j) * h + c]), sum);
    }
    for (int s = 0; t < valid && s < sizes.shared_experts; ++s) {
      const float gate = forward && data.shared_gates ? data.shared_gates[t * sizes.shared_experts + s] : 1.0f;
      sum = fmaf(gate, load(data.groups[1 + s].slots[t * h + c]), sum);
    }
    data.out[t * data.out_stride + c] = store<bfloat16>(sum);
  }
}

void check(const char* what) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) throw Error(Status::device_error, std::string("naive ") + what + ": " + cudaGetErrorString(status));
}

template <class Product>
void run(const Product& product, std::int64_t columns, std::int64_t rows, int experts, cudaStream_t stream) {
  if (columns == 0 || rows == 0 || experts == 0) return;
  const dim3 grid(unsigned((columns + side - 1) / side), unsigned(std::min<std::int64_t>((rows + side - 1) / side, 64)), experts);
  multiply<<<grid, dim3(side, side), 0, stream>>>(product);
  check("product");
}

}  // namespace

void naive_run_pass(const PassData& data, float* scratch, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool forward = sizes.direction == Direction::forward;
  for (int g = 0; g <= sizes.shared_experts; ++g) {
    const ExpertGroup& group = data.groups[g];
    if (group.experts == 0 || sizes.tokens == 0) continue;
    const Scene scene{data, g};
    const std::int64_t room = g == 0 ? data.total_rows : sizes.tokens, pre_width = sizes.gate_up_factor * group.width;
    if (forward || sizes.recompute) run(GateUp{scene}, pre_width, sizes.tokens, group.experts, stream);
    if (forward) {
      activate<<<1024, 256, 0, stream>>>(scene, room);
      check("activation");
      run(Down{scene}, sizes.hidden_size, sizes.tokens, group.experts, stream);
      continue;
    }
    run(DownDgrad{{scene}, scratch}, group.width, sizes.tokens, group.experts, stream);
    activate_backward<<<1024, 256, 0, stream>>>(scene, scratch, room);
    check("activation backward");
    if (sizes.want_dx) run(GateUpDgrad{scene}, sizes.hidden_size, sizes.tokens, group.experts, stream);
    if (group.gate_up_grad) run(GateUpWgrad{scene}, sizes.hidden_size, pre_width, group.experts, stream);
    if (group.down_grad) run(DownWgrad{scene}, group.width, sizes.hidden_size, group.experts, stream);
    if (group.gate_up_bias_grad) bias_gradient<<<group.experts, 256, 0, stream>>>(scene, true);
    if (group.down_bias_grad) bias_gradient<<<group.experts, 256, 0, stream>>>(scene, false);
    check("bias gradients");
  }
  combine<<<1024, 256, 0, stream>>>(data);
  check("combine");
}

}  // namespace moelith::executors::cuda
