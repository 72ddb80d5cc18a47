// Gradients of weights: what a tile's sums become, and what they are added to.
//
// A caller's main gradient is read and written once, by the tile that owns the element. A warp that asks for 1 KiB at a time and
// waits for it would get 1 byte a cycle from memory, so the old values are on their way long before: by `cp.async`, which
// takes no registers, into the memory that rows are packed through (no rows are packed beside weight gradients), two steps
// ahead (OldValues). And 8 lanes write 128 bytes of a row together: a store of 16 bytes that leaves the other half of a
// sector to the next one has the second-level cache put the two together.
#pragma once

#include "executors/cuda/sm90_epilogue.cuh"

namespace moelith::executors::cuda::sm90 {

// An expert's gradient, of which a tile has a part.
struct WeightGradient {
  GradientTarget target;  // false: not wanted
  std::int64_t n = 0;     // columns

  // of: Work, or what has its stage, group and expert.
  template <class Of>
  __device__ __forceinline__ WeightGradient(const PassData& data, const Of& of) {
    const ExpertGroup& tensors = data.groups[of.group];
    const std::int64_t hidden = data.pass.sizes.hidden_size;
    if (of.stage == Stage::gate_up_wgrad) {
      n = hidden;
      if (tensors.gate_up_grad) target = tensors.gate_up_grad.of(of.expert, data.pass.sizes.gate_up_factor * tensors.width * n);
    } else {
      n = tensors.width;
      if (tensors.down_grad) target = tensors.down_grad.of(of.expert, hidden * n);
    }
  }
  __device__ __forceinline__ char* at(std::int64_t row, std::int64_t column) const {
    return static_cast<char*>(target.data) + (row * n + column) * (target.is_float ? 4 : 2);
  }
};

// A warp's part of a tile in steps of 16 rows by 32 columns; a lane has 4 columns of four rows.
struct GradientSteps {
  static constexpr int lane_rows = 4;
  int rows, columns, slabs, row, column;  // of the tile; columns in steps of 32; this lane's first

  __device__ __forceinline__ GradientSteps(const Work& work, const Warp& warp)
      : rows(work.rows),
        columns(work.columns),
        slabs((work.columns + 31) / 32),
        row(warp.index * 16 + warp.lane / 8),
        column(warp.lane % 8 * 4) {}
  __device__ __forceinline__ int count() const { return (rows > 64 ? 2 : 1) * slabs; }
  __device__ __forceinline__ int block_of(int step) const { return step >= slabs ? 1 : 0; }
  __device__ __forceinline__ int slab_of(int step) const { return step >= slabs ? step - slabs : step; }
  // Row and column of the lane's values in its i-th row. False: they are not there.
  __device__ __forceinline__ bool place(int step, int i, int& r, int& c) const {
    r = block_of(step) * 64 + row + 4 * i, c = slab_of(step) * 32 + column;
    return r < rows && c < columns;
  }
};

// The old values of two steps, in 4 KiB of the warp's own. A lane reads what it asked for itself.
class OldValues {
 public:
  template <class Memory>
  __device__ __forceinline__ OldValues(Memory& shared) {
    const int thread = thread_now() - first_consumer;
    place_ = shared_address(shared.packing) + thread / 32 * 4096 + thread % 32 * 16;
    static_assert(sizeof(shared.packing) >= 8 * 4096);
  }
  __device__ __forceinline__ void ask(const WeightGradient& gradient, const Work& work, const GradientSteps& steps, int step) {
    if (step < steps.count()) {
#pragma unroll
      for (int i = 0; i < GradientSteps::lane_rows; ++i) {
        int r, c;
        if (!steps.place(step, i, r, c)) continue;
        const char* from = gradient.at(work.output_row + r, work.column + c);
        if (gradient.target.is_float) {
          copy_async<16>(of(step, i), from);
        } else {
          copy_async<8>(of(step, i), from);
        }
      }
    }
    copies_commit();  // an empty one too: they are counted
  }
  // Once the step's have come; those of the next step may still be on their way.
  __device__ __forceinline__ void add(const GradientTarget& target, int step, int i, float (&f)[4]) const {
    const uint4 old = load_shared_16(of(step, i));
    if (target.is_float) {
      f[0] += __uint_as_float(old.x), f[1] += __uint_as_float(old.y), f[2] += __uint_as_float(old.z), f[3] += __uint_as_float(old.w);
    } else {
      f[0] += low_bfloat16(old.x), f[1] += high_bfloat16(old.x), f[2] += low_bfloat16(old.y), f[3] += high_bfloat16(old.y);
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t of(int step, int i) const { return place_ + step % 2 * 2048 + i * 512; }

  std::uint32_t place_;
};

// An expert without rows leaves what it would add to as it is.
__device__ __forceinline__ bool adds_to_old(const WeightGradient& gradient, const Work& work) {
  return gradient.target && gradient.target.accumulate && work.sum_rows > 0;
}
// Before a tile's products.
template <class Memory>
__device__ __forceinline__ void ask_for_old_values(Memory& shared, const PassData& data, const Work& work) {
  const WeightGradient gradient(data, work);
  if (!adds_to_old(gradient, work)) return;
  const GradientSteps steps(work, Warp::now(shared));
  OldValues old(shared);
  old.ask(gradient, work, steps, 0), old.ask(gradient, work, steps, 1);
}

// out[output_row + r, column ..] (+)= sum. Without rows the sum is 0.
template <int N, class Memory>
__device__ __forceinline__ void store_weight_gradient(Memory& shared, const PassData& data, const Sums<N>& sums,
                                                      const Work& work, const Warp& warp) {
  const WeightGradient gradient(data, work);
  const bool adds = adds_to_old(gradient, work);
  if (!gradient.target || (gradient.target.accumulate && !adds)) return;
  if (!gradient.target.is_float && !adds) {
    bf16* out = reinterpret_cast<bf16*>(gradient.at(work.output_row, work.column));
    store_rounded(RoundedSums<N>(sums), work.rows, work.columns, warp, [&](int row) { return out + row * gradient.n; });
    return;
  }
  constexpr int all_slabs = N / 32;
  const GradientSteps steps(work, warp);
  OldValues old(shared);
#pragma unroll 1
  for (int step = 0; step < steps.count(); ++step) {
    with_constant<2 * all_slabs>(steps.block_of(step) * all_slabs + steps.slab_of(step), [&](auto constant) {
      constexpr int m = constant.value / all_slabs, group = constant.value % all_slabs * 4;
      deposit_float<N, m, 0>(sums, group, warp.staging, warp.lane);
      deposit_float<N, m, 1>(sums, group, warp.staging + 8 * 128, warp.lane);
    });
    __syncwarp();
    if (adds) copies_wait<1>();
#pragma unroll 1
    for (int i = 0; i < GradientSteps::lane_rows; ++i) {
      int r, c;
      if (!steps.place(step, i, r, c)) continue;
      float f[4];
      staged_floats(warp.staging, warp.lane / 8 + 4 * i, warp.lane % 8, f);
      if (adds) old.add(gradient.target, step, i, f);
      char* to = gradient.at(work.output_row + r, work.column + c);
      if (gradient.target.is_float) {
        *reinterpret_cast<float4*>(to) = {f[0], f[1], f[2], f[3]};
      } else {
        *reinterpret_cast<uint2*>(to) = {pack_bfloat16(f[0], f[1]), pack_bfloat16(f[2], f[3])};
      }
    }
    __syncwarp();
    if (adds) old.ask(gradient, work, steps, step + 2);
  }
}

}  // namespace moelith::executors::cuda::sm90
