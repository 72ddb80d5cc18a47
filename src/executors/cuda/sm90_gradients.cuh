// Gradients of weights: what a tile's sums become, and what they are added to.
//
// A caller's main gradient is read and written once, by the tile that owns the element. A thread reads and writes the pairs
// of columns that it has sums of (four threads 32 bytes of a row): through shared memory rows would come in larger pieces,
// but a warp of an epilogue is alone on its scheduler, and each step through there is a chain of latencies. The old values
// are on their way two steps before they are needed, by `cp.async`, which takes no registers, in the memory that rows are
// packed through (no rows are packed beside weight gradients, but for rounds, where they are read late).
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

// A thread's part of a tile in steps of 16 rows (of a warp) by 32 columns: pairs of columns 8 g + 2 (lane % 4) of rows
// lane / 4 and 8 below. Steps count through N columns and two blocks of 64 rows, whether they are there or not.
template <int N>
struct GradientSteps {
  static constexpr int slabs = N / 32, count = 2 * slabs, pairs = 8;
  char* first;            // the thread's first pair
  std::int64_t below;     // bytes from a row to the one 8 below
  int size, rows, columns;  // bytes of a value; rows from the thread's first on; columns of the tile

  __device__ __forceinline__ GradientSteps(const WeightGradient& gradient, const Work& work, const Warp& warp) {
    const int row = warp.index * 16 + warp.lane / 4;
    first = gradient.at(work.output_row + row, work.column + warp.lane % 4 * 2);
    size = gradient.target.is_float ? 4 : 2;
    below = 8 * gradient.n * size;
    rows = work.rows - row, columns = work.columns;
  }
  static constexpr int block(int step) { return step / slabs; }
  static constexpr int group(int step, int pair) { return step % slabs * 4 + pair / 2; }  // of 8 columns
  __device__ __forceinline__ bool there(int step, int pair) const {
    return block(step) * 64 + pair % 2 * 8 < rows && group(step, pair) * 8 < columns;
  }
  __device__ __forceinline__ char* at(int step, int pair) const {
    return first + (block(step) * 8 + pair % 2) * below + group(step, pair) * 8 * size;
  }
};

// The old values of `ahead` steps. A thread reads what it asked for itself.
class OldValues {
 public:
  static constexpr int ahead = 2;

  template <class Memory>
  explicit __device__ __forceinline__ OldValues(Memory& shared) {
    const int thread = thread_now() - first_consumer;
    static_assert(sizeof(shared.packing) >= 8 * ahead * bytes);
    place_ = shared_address(shared.packing) + thread / 32 * (ahead * bytes) + thread % 32 * 8;
  }
  template <int N>
  __device__ __forceinline__ void ask(const GradientSteps<N>& steps, int step) {
    if (step < GradientSteps<N>::count) {
#pragma unroll
      for (int pair = 0; pair < GradientSteps<N>::pairs; ++pair) {
        if (!steps.there(step, pair)) continue;
        if (steps.size == 4) {
          copy_async<8>(of(step, pair), steps.at(step, pair));
        } else {
          copy_async<4>(of(step, pair), steps.at(step, pair));
        }
      }
    }
    copies_commit();  // an empty one too: they are counted
  }
  // Once the step's have come; those of later steps may still be on their way.
  __device__ __forceinline__ float2 float_pair(int step, int pair) const { return load_shared_8(of(step, pair)); }
  __device__ __forceinline__ std::uint32_t bfloat16_pair(int step, int pair) const { return load_shared_4(of(step, pair)); }

 private:
  static constexpr int bytes = 2048;  // of a warp's step: 8 pairs of 32 threads

  __device__ __forceinline__ std::uint32_t of(int step, int pair) const {
    return place_ + step % ahead * bytes + pair * 256;
  }

  std::uint32_t place_;
};

// An expert without rows leaves what it would add to as it is.
__device__ __forceinline__ bool adds_to_old(const WeightGradient& gradient, const Work& work) {
  return gradient.target && gradient.target.accumulate && work.sum_rows > 0;
}
// Whether they are read where they are added: rows of a later round may be packed just then.
template <bool Ranks>
__device__ __forceinline__ bool reads_old_late(const PassData& data) { return Ranks && data.pass.sizes.has_rounds(); }
// Before a tile's products.
template <int N, bool Ranks, class Memory>
__device__ __forceinline__ void ask_for_old_values(Memory& shared, const PassData& data, const Work& work) {
  const WeightGradient gradient(data, work);
  if (!adds_to_old(gradient, work) || reads_old_late<Ranks>(data)) return;
  const GradientSteps<N> steps(gradient, work, Warp::now(shared));
  OldValues old(shared);
#pragma unroll
  for (int step = 0; step < OldValues::ahead; ++step) old.ask(steps, step);
}

// out[output_row + r, column ..] (+)= sum. Without rows the sum is 0.
template <int N, bool Ranks, class Memory>
__device__ __forceinline__ void store_weight_gradient(Memory& shared, const PassData& data, Sums<N>& sums, const Work& work,
                                                      const Warp& warp) {
  const WeightGradient gradient(data, work);
  const bool adds = adds_to_old(gradient, work), late = reads_old_late<Ranks>(data), is_float = gradient.target.is_float;
  if (!gradient.target || (gradient.target.accumulate && !adds)) return;
  if (is_float || adds) {
    const GradientSteps<N> steps(gradient, work, warp);
    OldValues old(shared);
#pragma unroll
    for (int step = 0; step < GradientSteps<N>::count; ++step) {
      if (adds && !late) copies_wait<OldValues::ahead - 1>();
#pragma unroll
      for (int pair = 0; pair < GradientSteps<N>::pairs; ++pair) {
        if (!steps.there(step, pair)) continue;
        float* v = sums.value[GradientSteps<N>::block(step)] + GradientSteps<N>::group(step, pair) * 4 + pair % 2 * 2;
        if (adds && is_float) {
          const float2 before = late ? *reinterpret_cast<const float2*>(steps.at(step, pair)) : old.float_pair(step, pair);
          v[0] += before.x, v[1] += before.y;
        } else if (adds) {
          const std::uint32_t before = late ? *reinterpret_cast<const std::uint32_t*>(steps.at(step, pair)) : old.bfloat16_pair(step, pair);
          v[0] += low_bfloat16(before), v[1] += high_bfloat16(before);
        }
        if (is_float) *reinterpret_cast<float2*>(steps.at(step, pair)) = {v[0], v[1]};
      }
      if (adds && !late) old.ask(steps, step + OldValues::ahead);
    }
  }
  if (!is_float) {
    bf16* out = reinterpret_cast<bf16*>(gradient.at(work.output_row, work.column));
    store_rounded(RoundedSums<N>(sums), work.rows, work.columns, warp, [&](int row) { return out + row * gradient.n; });
  }
}

// Sums of an expert whose rows go on in the next round, as the threads hold them: 16 bytes of each thread side by side. The round
// after reads the place that the round before it wrote, and its products go on from there.
template <int N>
__device__ __forceinline__ float4* round_sums_of(const PassData& data, const Work& work, int place) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool of_gate_up = work.stage == Stage::gate_up_wgrad;
  const std::int64_t n = of_gate_up ? sizes.hidden_size : sizes.intermediate_size;
  const std::int64_t tile = work.row_block * schedule::ceil_div(n, 2 * N) + work.column_block;
  float* const all = (of_gate_up ? data.round_sums.gate_up : data.round_sums.down)[place];
  return reinterpret_cast<float4*>(all) + (tile * cluster_blocks + cluster_rank()) * (rows_per_tile * N / 4) + thread_now() % consumer_threads;
}
// Zeros of any other tile: read as well, since the compiler would not have products add to registers that are set in two ways.
__device__ const float4 no_sums{};
template <int N>
__device__ __forceinline__ void read_round_sums(const PassData& data, Sums<N>& sums, const Work& work) {
  const float4* const from = work.goes_on_from ? round_sums_of<N>(data, work, schedule::sum_place(work.round - 1)) : &no_sums;
  const int stride = work.goes_on_from ? consumer_threads : 0;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float4 v = __ldcg(from + (m * (N / 8) + i) * stride);
      float* to = sums.value[m] + i * 4;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
    hold(sums.value[m]);
  }
}
template <int N>
__device__ __forceinline__ void write_round_sums(const PassData& data, const Sums<N>& sums, const Work& work) {
  float4* to = round_sums_of<N>(data, work, schedule::sum_place(work.round));
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float* v = sums.value[m] + i * 4;
      to[(m * (N / 8) + i) * consumer_threads] = {v[0], v[1], v[2], v[3]};
    }
  }
}

}  // namespace moelith::executors::cuda::sm90
