// The main loop of a computing warpgroup: sum[128 rows, N columns] = A B over the stages of one tile.
#pragma once

#include "executors/cuda/sm90_pass.cuh"

namespace moelith::executors::cuda::sm90 {

// One tile's sums: block m holds rows 64 m to 64 m + 63, laid out as product() says.
template <int N>
struct Sums {
  float value[2][N / 2];

  // Every value must be set for every tile: one that might still be an earlier tile's would occupy its register all
  // through the others' main loops.
  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) value[m][i] = 0.0f;
      hold(value[m]);
    }
  }
};

// The warps of both blocks tell both that they are done with a stage.
__device__ __forceinline__ void release_stage(std::uint32_t empty) {
  const std::uint32_t lane = static_cast<std::uint32_t>(thread_now()) % 32;
  if (lane < cluster_blocks) barrier_arrive_at(address_in(lane, empty));
}

// Zeros in rows `first` and following, up to the next multiple of product_depth, of `Count` blocks of 64 x 64 in the layout
// mn_major, by a warpgroup: the first `a_blocks` lie at `a`, the others at `b`.
template <int Count>
__device__ __forceinline__ void clear_rows(std::uint32_t a, std::uint32_t b, int a_blocks, int first) {
  static_assert(consumer_threads == product_depth * 8);
  const int thread = thread_now() % consumer_threads, row = first / product_depth * product_depth + thread / 8;
  if (row < first) return;
#pragma unroll
  for (int block = 0; block < Count; ++block) {
    const std::uint32_t place = block < a_blocks ? a + block * mn_block_bytes : b + (block - a_blocks) * mn_block_bytes;
    store_shared_16(place + row * 128 + thread % 8 * 16, uint4{0, 0, 0, 0});
  }
}

// Sums `Blocks` blocks of 64 rows and n columns. One 16-deep product follows the other through k, whatever n and
// Blocks, so an element's sum does not depend on the tile it is in.
template <int Blocks, int n, Major A, Major B, int N, int RingN>
__device__ __forceinline__ void multiply_stages(SharedMemory<RingN>& shared, Sums<N>& sums, const Work& work,
                                                int your_turn) {
  using Shape = BlockShape<RingN>;
  // Of a weight gradient k are rows, and what follows the last one in memory are rows of the next expert.
  const int last_rows = A == Major::mn ? work.sum_rows % depth : 0, whole_steps = work.k_steps - (last_rows > 0 ? 1 : 0);
  RingPosition<Shape::stages> ring(work.first_step);
  std::uint32_t previous = 0;
  auto products = [&](std::uint32_t a, int kk) {
#pragma unroll
    for (int m = 0; m < Blocks; ++m) {
      product<n, A, B>(sums.value[m], operand_descriptor<A>(a + kk * k_step_bytes<A> + m * mn_block_bytes),
                       operand_descriptor<B>(a + Shape::a_bytes + kk * k_step_bytes<B>));
    }
  };
  auto give_back_previous = [&] {
    if (previous != 0) release_stage(previous);
    previous = shared_address(&shared.empty[ring.slot]);
  };
#pragma unroll 1
  for (int k = 0; k < whole_steps; ++k) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    const std::uint32_t a = shared_address(shared.stage[ring.slot]);
    product_fence();
#pragma unroll
    for (int kk = 0; kk < depth / product_depth; ++kk) products(a, kk);
    product_commit();
    product_wait<1>();
    give_back_previous();
    ring.next();
  }
  if (A == Major::mn && last_rows > 0) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    const std::uint32_t a = shared_address(shared.stage[ring.slot]);
    if (last_rows % product_depth != 0) {
      clear_rows<Blocks + n / 64>(a, a + Shape::a_bytes, Blocks, last_rows);
      fence_async_shared();
      named_barrier_sync(barrier_own + (thread_now() - first_consumer) / consumer_threads, consumer_threads);
    }
    // A fence before each: with one in front of the loop the compiler lets every product of the kernel wait for the one before.
#pragma unroll 1
    for (int kk = 0; kk < (last_rows + product_depth - 1) / product_depth; ++kk) {
      product_fence();
      products(a, kk);
      product_commit();
    }
    product_wait<1>();
    give_back_previous();
  }
  named_barrier_arrive(your_turn, 2 * consumer_threads);
  product_wait<0>();
#pragma unroll
  for (int m = 0; m < 2; ++m) hold(sums.value[m]);
  if (previous != 0) release_stage(previous);
}

// `my_turn` and `your_turn`: barriers of the two warpgroups. begin(): sets all sums to what they begin with, while the other
// warpgroup multiplies.
template <Major A, Major B, int N, int RingN, class Begin>
__device__ __forceinline__ void multiply(SharedMemory<RingN>& shared, Sums<N>& sums, const Work& work, int my_turn,
                                         int your_turn, Begin&& begin) {
  begin();
  named_barrier_sync(my_turn, 2 * consumer_threads);
  const int n = work.n;
  if (work.rows > 64) {
    if (n == 64)
      multiply_stages<2, 64, A, B>(shared, sums, work, your_turn);
    else if (N == 128 || n == 128)
      multiply_stages<2, 128, A, B>(shared, sums, work, your_turn);
    else
      multiply_stages<2, N, A, B>(shared, sums, work, your_turn);
  } else {
    if (n == 64)
      multiply_stages<1, 64, A, B>(shared, sums, work, your_turn);
    else if (N == 128 || n == 128)
      multiply_stages<1, 128, A, B>(shared, sums, work, your_turn);
    else
      multiply_stages<1, N, A, B>(shared, sums, work, your_turn);
  }
}

}  // namespace moelith::executors::cuda::sm90
