// The main loop of a computing warpgroup: sum[128 rows, N columns] = A B over the stages of one tile.
#pragma once

#include "executors/cuda/sm90_pass.cuh"

namespace moelith::executors::cuda::sm90 {

// One tile's sums: block m holds rows 64 m to 64 m + 63, laid out as product() says.
template <int N>
struct Sums {
  float value[2][N / 2];

  // Every value must be set for every tile: one that might still be an earlier tile's would occupy its register all through
  // the others' main loops.
  template <int Begin, int End>
  __device__ void clear() {
#pragma unroll
    for (int m = Begin; m < End; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) value[m][i] = 0.0f;
      hold(value[m]);
    }
  }
};

// Sums `Blocks` blocks of 64 rows. One 16-deep product follows the other through k, whatever N and Blocks, so an
// element's sum does not depend on the tile it is in. `my_turn` and `your_turn`: barriers of the two warpgroups.
template <int Blocks, Major A, Major B, int N, int RingN>
__device__ __forceinline__ void multiply_blocks(SharedMemory<RingN>& shared, Sums<N>& sums, std::uint32_t first_step, int k_steps,
                                                bool gathered, int my_turn, int your_turn) {
  using Shape = BlockShape<RingN>;
  sums.template clear<0, Blocks>();  // while the other warpgroup multiplies
  RingPosition<Shape::stages> ring(first_step);
  std::uint32_t previous = 0;
  named_barrier_sync(my_turn, 2 * consumer_threads);
#pragma unroll 1
  for (int k = 0; k < k_steps; ++k) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    const std::uint32_t a = shared_address(shared.stage[ring.slot]), b = a + Shape::a_bytes;
#ifndef MOELITH_SM90_NO_GATHER_FENCE
    if (gathered) fence_async_shared();  // copies of 16 bytes are ordinary writes
#endif
    product_fence();
#pragma unroll
    for (int kk = 0; kk < depth / 16; ++kk) {
#pragma unroll
      for (int m = 0; m < Blocks; ++m) {
        product<N, A, B>(sums.value[m], operand_descriptor<A>(a + kk * k_step_bytes<A> + m * 8192),
                         operand_descriptor<B>(b + kk * k_step_bytes<B>), true);
      }
    }
    product_commit();
    product_wait<1>();
    if (k > 0 && thread_now() % 32 == 0) barrier_arrive(previous);
    previous = shared_address(&shared.empty[ring.slot]);
    ring.next();
  }
  named_barrier_arrive(your_turn, 2 * consumer_threads);
  product_wait<0>();
#pragma unroll
  for (int m = 0; m < Blocks; ++m) hold(sums.value[m]);
  sums.template clear<Blocks, 2>();
  if (k_steps > 0 && thread_now() % 32 == 0) barrier_arrive(previous);
}

template <Major A, Major B, int N, int RingN>
__device__ __forceinline__ void multiply(SharedMemory<RingN>& shared, Sums<N>& sums, int rows, std::uint32_t first_step, int k_steps,
                                         bool gathered, int my_turn, int your_turn) {
  if (rows > 64) {
    multiply_blocks<2, A, B>(shared, sums, first_step, k_steps, gathered, my_turn, your_turn);
  } else {
    multiply_blocks<1, A, B>(shared, sums, first_step, k_steps, gathered, my_turn, your_turn);
  }
}

}  // namespace moelith::executors::cuda::sm90
