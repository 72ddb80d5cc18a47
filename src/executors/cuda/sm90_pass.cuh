// The shape that all blocks of the sm_90a executor have, its shared memory, and what travels through it.
//
// Two blocks that lie side by side (a cluster) share a tile: each has one half of its columns. Both need the same rows
// of A, so each loads half of them and the copy engine writes them into both ("multicast"). A block is one warpgroup
// that fetches and two that compute ("ping-pong": while one multiplies, the other writes out its last tile, so that
// short sums do not leave the tensor cores idle):
//   warp 0      of the first block takes tiles and waits for their inputs
//   warp 1      has the copy engine load A
//   warp 2      has it load B
//   warp 3      hands each tile on as Work, and copies rows that later tiles read (sm90_pack.cuh)
//   warps 4-7, 8-11  each takes every other tile of the block
// Operands go through a ring of stages, each 64 deep in k: A of 128 rows (16 KiB) and B of N columns (N * 128 bytes),
// in the layouts of sm90_primitives.cuh. The two rings of a cluster run in step: a stage is free when both blocks are
// done with it.
#pragma once

#include <cstddef>

#include "executors/cuda/pass_data.hpp"
#include "executors/cuda/sm90_primitives.cuh"
#include "schedule/tile_order.hpp"

namespace moelith::executors::cuda::sm90 {

using schedule::Stage;

inline constexpr int threads = 384, first_consumer = 128, consumer_threads = 128;
inline constexpr int cluster_blocks = 2;
inline constexpr int rows_per_tile = 128, depth = 64;  // rows of A, k of a stage
inline constexpr int product_depth = 16;               // k of one product
// In the order of tiles (schedule/tile_order.hpp), and row blocks that are packed before those of routed experts (sm90_pack.cuh).
inline constexpr int group_blocks = 192, raster_blocks = 24, first_packed_blocks = 32;
static_assert(first_packed_blocks >= raster_blocks);
inline constexpr int box_rows = 32;                    // of A: half of the 64 rows that one product takes

// Tensor maps of a group, with the boxes that the stages load: 64 columns (128 bytes) by ..
struct GroupMaps {
  CUtensorMap x, dy;             // [rows, H], packed, or the tokens themselves (shared experts): 32 rows
  CUtensorMap x_columns;         // x again, as B of its weight gradient: 64 rows
  CUtensorMap gate_up_proj;      // forward [experts, F, I, H]: 32 rows of each half, or 64; backward [experts, F I, H]: 64
  CUtensorMap down_proj;         // [experts, H, I]: 64 rows
  CUtensorMap activated;         // [rows, I]: forward 32 rows, backward 64
  CUtensorMap d_pre_activation;  // [rows, F I]: 32 rows, backward
  CUtensorMap gate_up_again;     // gate_up_proj as forward has it, backward when recomputing
  CUtensorMap pre_activation;    // [rows, F I]: 32 rows, backward
  CUtensorMap slots;             // [T k, H], of the routed experts: slot_rows<N> rows
  // In the place of the weights' maps, one for each expert, in device memory; null where the experts are stacked.
  const CUtensorMap *gate_up_apart, *down_apart, *gate_up_again_apart;
};

struct Parameters {
  PassData data;
  schedule::CounterMap counter_map;
  GroupMaps maps[1 + schedule::max_shared_experts];
  bool beside_previous;  // this kernel may have started before the one in front of it has ended
};

// A tile, worked out (sm90_tiles.cuh): what is alike for both blocks of the cluster.
struct alignas(16) TileDescription {
  Stage stage;
  std::uint8_t pack_first = 0;           // of the rows to pack beside it, those of the first of their row blocks
  std::uint16_t raised_ranks = 0;        // a bit for each rank whose arrival counter the tile raises
  std::int16_t group;
  std::uint16_t n;        // columns of a block's product: 64, 128, .. N (gate_up: 32 of gate, 32 of up and so on)
  std::int32_t slot, expert;             // slot: schedule::Tile's expert; expert: index within the group's tensors
  std::int32_t row_block, column_block;  // of the tile
  std::int32_t rows;                     // of the output tile, 1 to 128; tokens of a combine tile
  // The tile's first row, of a weight gradient the first of its sum, as a row of the group; where that lies in the row
  // buffers; and where it lies among the packed rows. Without rounds all are alike.
  std::int32_t row_begin, held_begin, packed_begin;
  std::int32_t output_row;               // weight gradients: first row of the output
  std::int32_t sum_rows;                 // weight gradients: rows summed over
  std::int32_t k_steps;                  // stages of the ring that the tile uses
  std::int32_t column;                   // output columns of the tile,
  std::uint16_t columns;                 // of Work those of one block
  std::uint16_t half;                    // of these, how many the first block has at most
  std::uint8_t round = 0;                // not 0: of a round after the first, lowest bit as that has it
  bool goes_on_from = false, goes_on = false;  // gradients: from the sums of the round before; in the next round
  std::uint8_t unused = 0;               // it is copied as whole words
  // Waits: `awaited_count` local counters from `awaited` on, for both halves to reach a target,
  std::int32_t awaited, awaited_count;
  std::uint32_t low_target, high_target;
  struct Arrival {  // and two arrival counters, for their low halves; target 0: none
    std::int32_t counter;
    std::uint32_t target;
  } arrival, second_arrival;
  Arrival round_before;                                 // another local counter, likewise
  std::int32_t raised = -1, raised_arrival = -1, raised_round = -1;  // counters that it raises (the first and last local), or -1
  std::int32_t pack_block = -1, pack_row, pack_rows;    // rows to pack beside it, and the row block of the first; -1: none
};
static_assert(limits::device_ranks <= 16);  // bits of raised_ranks
static_assert(offsetof(TileDescription, awaited) % 16 == 0 && offsetof(TileDescription, arrival) % 16 == 0);
static_assert(offsetof(TileDescription, round_before) % 8 == 0 && sizeof(TileDescription) == 128);

// A tile as the warps of a block hand it on, with the columns of this block's half.
struct Work : TileDescription {
  bool last;                 // no tile: the block is done
  std::uint32_t first_step;  // the first stage of the ring that the tile uses, counted since the block began
  std::int32_t row_index[rows_per_tile];  // route of each row, or token of a shared expert
  // Several ranks: where that which becomes of each row goes, at its token's rank: to its slot, or (down_dgrad) to its sums
  // of dprob.
  void* row_place[rows_per_tile];
};

template <int N>
struct BlockShape {
  static_assert(N == 128 || N == 192);
  static constexpr int a_bytes = rows_per_tile * 128, b_bytes = N * 128, stage_bytes = a_bytes + b_bytes;
  static constexpr int stages = N == 192 ? 4 : 5;
  // Of a thread, and of one that computes; together 504 for one and two. Beside the sums of 128 x 192 few are left.
  static constexpr int fetch_registers = N == 192 ? 56 : 72, compute_registers = N == 192 ? 224 : 216;
  static constexpr int down_dgrad_columns = 128;  // its epilogue needs more registers than the others
  static constexpr int works = 4;
  // A pair takes its next tile when it has at most so many stages left to load of those that it has: enough to hide what
  // taking one costs. With more of them the pairs would not be at work on tiles that follow each other in the order, which read
  // the same rows and weights, and at a pass's end some would have tiles left that others could have begun. A tile counts as
  // `least_stages` at least, so that these are few tiles, too.
  static constexpr int lead_stages = 14, least_stages = 5;
  static constexpr int ask_stages = 12;  // before a tile's end what its epilogue reads is asked for
  static constexpr int staging_bytes = 2048;  // of each computing warp: 16 rows of 128 bytes
  static constexpr int pack_bytes = 32768, pack_piece = 4096;  // rows that are packed go through these, in pieces
};

template <int N>
struct SharedMemory {
  using Shape = BlockShape<N>;
  std::uint8_t stage[Shape::stages][Shape::stage_bytes];
  std::uint8_t staging[8][Shape::staging_bytes];
  std::uint8_t packing[Shape::pack_bytes];
  Work work[Shape::works];
  std::uint64_t full[Shape::stages], empty[Shape::stages];
  std::uint64_t work_full[Shape::works], work_empty[Shape::works];
  std::uint64_t mail_full[Shape::works], mail_empty[Shape::works];
  std::uint64_t packing_full[2];
  std::int64_t mail[Shape::works];  // the tiles that the first block has taken; -1: no more
  // Copies of what the launch brought. Read from there, values would be kept in registers from tile to tile, together
  // with all that follows from them, and the computing warps have none to spare.
  alignas(16) std::uint8_t data_copy[sizeof(PassData)];
  alignas(16) std::uint8_t map_copy[sizeof(schedule::CounterMap)];
  alignas(16) std::uint8_t peers_copy[sizeof(Peers)];  // of several ranks
  // The arrays of the Layout, where there is room: a tile's description is worked out by a chain of reads of them. The
  // copy of PassData then points here.
  static constexpr int layout_words = 1000;
  std::int64_t layout_header[layout_words];
  std::int64_t tiles;         // of the pass
  std::int64_t pulled_parts;  // sm90_pack.cuh; of several ranks
  __device__ const PassData& data() const { return *reinterpret_cast<const PassData*>(data_copy); }
  __device__ const schedule::CounterMap& map() const {
    return *reinterpret_cast<const schedule::CounterMap*>(map_copy);
  }
  __device__ const Peers& peers() const { return *reinterpret_cast<const Peers*>(peers_copy); }

  std::uint32_t loaded_stages;  // whose B is under way, counted as lead_stages says since the block began; read in the first block
  std::uint32_t moment[2][4];  // of the timeline: what would otherwise take registers of the computing warps
};
template <int N>
inline constexpr int shared_bytes = sizeof(SharedMemory<N>);
static_assert(shared_bytes<128> <= 232448 && shared_bytes<192> <= 232448);

// Arrivals that complete a phase.
inline constexpr int full_arrivals = 2;  // the loading warps
inline constexpr int empty_arrivals = 4 * cluster_blocks;  // the warps of the warpgroups that used the stage
// Descriptions of tiles are read and written by ordinary accesses, and whoever made one arrives for itself: a warp that
// let one lane speak for all would save nothing that can be measured, and tools that look for races could not follow.
inline constexpr int work_full_arrivals = 32;                          // the warp that hands tiles on
inline constexpr int work_empty_arrivals = 2 * 32 + consumer_threads;  // the loading warps, the computing warpgroup
inline constexpr int mail_empty_arrivals = 32 * cluster_blocks;        // the warps that hand tiles on

// Hardware barriers (0 is __syncthreads). turn + w: warpgroup w may multiply; own + w: the warps of w among themselves.
inline constexpr int barrier_turn = 1, barrier_own = 3, barrier_end = 5;
inline constexpr int end_threads = 2 * consumer_threads + 32;  // all that raise counters: they, and warp 3

// Position in a ring of `Slots`, from a running count.
template <int Slots>
struct RingPosition {
  std::uint32_t slot, parity;
  __device__ explicit RingPosition(std::uint32_t count) : slot(count % Slots), parity((count / Slots) & 1) {}
  __device__ void next() {
    if (++slot == Slots) slot = 0, parity ^= 1;
  }
};

// --- combine ---------------------------------------------------------------------------------------------------------

// Slots of a tile's tokens come through the ring too: a box is 64 columns of the slots of as many whole tokens as a stage
// has room for.
template <int N>
inline constexpr int slot_rows = BlockShape<N>::stage_bytes / (N / 64) / 1024 * 8;
template <int N>
MOELITH_HD constexpr int combine_tokens(int top_k) {
  return slot_rows<N> / top_k;
}
// Tokens of a combine tile. All its slots are in the ring at a time, since a computing warpgroup must have seen all
// stages of its tile before the other may go on; so a tile takes up half of it.
inline constexpr int combine_rows = 64;
template <int N>
constexpr int combine_tile_tokens(int top_k) {
  const int room = combine_tokens<N>(top_k) * (BlockShape<N>::stages / 2);
  return room < combine_rows ? room : combine_rows;
}

}  // namespace moelith::executors::cuda::sm90
