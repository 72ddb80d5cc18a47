// The main loop of a computing warpgroup: sum[128 rows, N columns] = A B over the stages of one tile.
#pragma once

#include "executors/cuda/sm90_pass.cuh"

namespace moelith::executors::cuda::sm90 {

// One tile's sums: block m holds rows 64 m to 64 m + 63, laid out as product() says.
template <int N>
struct Sums {
  float value[2][N / 2];

  // Done while the other warpgroup multiplies. Registers that still held an earlier tile's sums would make the compiler
  // wait for every single product.
  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) value[m][i] = 0.0f;
      hold(value[m]);
    }
  }
};

// Adds to `Blocks` blocks of 64 rows. One 16-deep product follows the other through k, whatever N and Blocks, so an
// element's sum does not depend on the tile it is in.
template <int Blocks, int N, Major A, Major B>
__device__ inline void multiply_blocks(SharedMemory<N>& shared, Sums<N>& sums, std::uint32_t first_step, int k_steps, int lane) {
  using Shape = BlockShape<N>;
  RingPosition<Shape::stages> ring(first_step);
  std::uint32_t previous = 0;
  for (int k = 0; k < k_steps; ++k) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    const std::uint32_t stage = shared_address(shared.stage[ring.slot]);
    const std::uint64_t a = operand_descriptor<A>(stage), b = operand_descriptor<B>(stage + Shape::a_bytes);
    product_fence();
#pragma unroll
    for (int kk = 0; kk < depth / 16; ++kk) {
#pragma unroll
      for (int m = 0; m < Blocks; ++m) {
        product<N, A, B>(sums.value[m], a + kk * k_step_units<A> + m * (8192 >> 4), b + kk * k_step_units<B>, true);
      }
    }
    product_commit();
    product_wait<1>();
    if (k > 0 && lane == 0) barrier_arrive(previous);
    previous = shared_address(&shared.empty[ring.slot]);
    ring.next();
  }
  product_wait<0>();
#pragma unroll
  for (int m = 0; m < Blocks; ++m) hold(sums.value[m]);
  if (k_steps > 0 && lane == 0) barrier_arrive(previous);
}

template <int N, Major A, Major B>
__device__ inline void multiply(SharedMemory<N>& shared, Sums<N>& sums, int rows, std::uint32_t first_step, int k_steps,
                                int lane) {
  if (rows > 64) {
    multiply_blocks<2, N, A, B>(shared, sums, first_step, k_steps, lane);
  } else {
    multiply_blocks<1, N, A, B>(shared, sums, first_step, k_steps, lane);
  }
}

}  // namespace moelith::executors::cuda::sm90
