// The shape that all blocks of the sm_90a executor have, its shared memory, and what travels through it.
//
// A block is one warpgroup that fetches and two that compute ("ping-pong": while one multiplies, the other writes out its
// last tile, so that short sums do not leave the tensor cores idle):
//   warp 0      takes tiles, waits for their inputs, publishes them as Work
//   warp 1      one thread issues the copy engine's loads
//   warps 2, 3  16-byte copies of gathered rows (four warps were slower)
//   warps 4-7, 8-11  each takes every other tile of the block
// Operands go through a ring of stages, each 64 deep in k: A of 128 rows (16 KiB) and B of N columns (N * 128 bytes), in
// the layouts of sm90_primitives.cuh.
#pragma once

#include "executors/cuda/pass_data.hpp"
#include "executors/cuda/sm90_primitives.cuh"
#include "schedule/tile_order.hpp"

namespace moelith::executors::cuda::sm90 {

using schedule::Stage;

inline constexpr int threads = 384, first_consumer = 128, consumer_threads = 128;
inline constexpr int rows_per_tile = 128, depth = 64;   // rows of A, k of a stage
inline constexpr int gather_warps = 2, gather_threads = 32 * gather_warps;

// Tensor maps of a group, with the boxes that the stages load: 64 columns (128 bytes) by ..
struct GroupMaps {
  CUtensorMap gate_up_proj;      // [experts, F I, H]: forward N / 2 rows, backward 64
  CUtensorMap down_proj;         // [experts, H, I]: forward N rows, backward 64
  CUtensorMap activated;         // [rows, I]: 64 rows
  CUtensorMap d_pre_activation;  // [rows, F I]: 64 rows, backward
  CUtensorMap gate_up_again;     // [experts, F I, H]: N / 2 rows, backward when recomputing
  // In the place of the weights' maps, one for each expert, in device memory; null where the experts are stacked.
  const CUtensorMap *gate_up_apart, *down_apart, *gate_up_again_apart;
};

struct Parameters {
  PassData data;
  schedule::CounterMap counter_map;
  GroupMaps maps[1 + schedule::max_shared_experts];
};

inline constexpr std::uint32_t absent_row = ~0u;

// A tile, decoded, as the warps of a block hand it on.
struct Work {
  Stage stage;
  bool last;                   // no tile: the block is done
  std::int32_t group, expert;  // expert: index within the group's stacked tensors
  std::int32_t column_block;
  std::int32_t rows;           // of the output tile, 1 to 128; tokens of a combine tile
  std::int32_t column;         // first output column
  std::int64_t row_begin;      // first row of A (a row of the group); of a weight gradient, first row of the sum
  std::int32_t output_row;     // weight gradients: first row of the output
  std::int32_t sum_rows;       // weight gradients: rows summed over
  std::int32_t k_steps;        // stages of the ring that the tile uses,
  std::uint32_t first_step;    // from this one on, counted since the block began
  schedule::Tile tile;
  std::int32_t row_index[rows_per_tile];    // route of each row, or token of a shared expert
  std::uint32_t row_offset[rows_per_tile];  // where its row of x or dY begins, in 16 bytes; absent_row past the tile's end
};

template <int N>
struct BlockShape {
  static_assert(N == 64 || N == 128);  // beside the sums of 128 x 192, too few registers are left for all else
  static constexpr int a_bytes = rows_per_tile * 128, b_bytes = N * 128, stage_bytes = a_bytes + b_bytes;
  static constexpr int stages = N == 64 ? 8 : 6;
  static constexpr int fetch_registers = 72, compute_registers = 216;  // of a thread; 504 for one and two
  static constexpr int works = 4;
  static constexpr int staging_bytes = 2048;  // of each computing warp: 16 rows of 128 bytes
};

template <int N>
struct SharedMemory {
  using Shape = BlockShape<N>;
  std::uint8_t stage[Shape::stages][Shape::stage_bytes];
  std::uint8_t staging[8][Shape::staging_bytes];
  Work work[Shape::works];
  std::uint64_t full[Shape::stages], empty[Shape::stages];
  std::uint64_t work_full[Shape::works], work_empty[Shape::works];
  std::uint32_t moment[2][4];  // of the timeline: what would otherwise take registers of the computing warps
};
template <int N>
inline constexpr int shared_bytes = sizeof(SharedMemory<N>) + 1024;  // dynamic shared memory may start off alignment

// Arrivals that complete a phase.
inline constexpr int full_arrivals = 1 + gather_threads;         // the copy engine's thread, the gathering threads
inline constexpr int empty_arrivals = 4;                         // the warps of the warpgroup that used the stage
inline constexpr int work_full_arrivals = 32;                      // each lane of the warp that takes tiles, for its own writes
inline constexpr int work_empty_arrivals = 1 + gather_threads + 1; // copy thread, gathering threads, the computing warpgroup

// Hardware barriers (0 is __syncthreads). turn + w: warpgroup w may multiply; own + w: the warps of w among themselves.
inline constexpr int barrier_turn = 1, barrier_own = 3, barrier_end = 5;

// Position in a ring of `Slots`, from a running count.
template <int Slots>
struct RingPosition {
  std::uint32_t slot, parity;
  __device__ explicit RingPosition(std::uint32_t count) : slot(count % Slots), parity((count / Slots) & 1) {}
  __device__ void next() {
    if (++slot == Slots) slot = 0, parity ^= 1;
  }
};

__device__ inline bool is_gathered(Stage stage) {
  return stage == Stage::gate_up || stage == Stage::down_dgrad || stage == Stage::gate_up_wgrad || stage == Stage::down_wgrad;
}

}  // namespace moelith::executors::cuda::sm90
