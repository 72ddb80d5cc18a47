// All that one pass on a GPU reads and writes, for one rank. Filled by src/layer/ on the host; every pointer is device
// memory that stays valid until the pass has finished on its stream. Storage is bfloat16, sums are float.
// Symbols as in schedule/extents.hpp; F = gate_up_factor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "moelith/limits.hpp"
#include "numerics/activation.hpp"
#include "numerics/bfloat16.hpp"
#include "numerics/host_device.hpp"
#include "schedule/dependencies.hpp"
#include "schedule/extents.hpp"

namespace moelith::executors::cuda {

using numerics::bfloat16;

// A tensor of each expert of a group: stacked, or each at a place of its own.
struct ExpertTensors {
  const bfloat16* stacked = nullptr;
  const bfloat16* const* apart = nullptr;  // [experts], in device memory

  ExpertTensors() = default;
  ExpertTensors(const bfloat16* data) : stacked(data) {}
  MOELITH_HD explicit operator bool() const { return stacked || apart; }
  // size: elements of one expert's tensor.
  MOELITH_HD const bfloat16* of(std::int64_t expert, std::int64_t size) const {
    return apart ? apart[expert] : stacked + expert * size;
  }
};

// A weight gradient to be written, or added to; with neither pointer it is not wanted.
struct GradientTarget {
  void* data = nullptr;          // stacked,
  void* const* apart = nullptr;  // or [experts] pointers, in device memory
  bool is_float = false;         // float32, otherwise bfloat16
  bool accumulate = false;

  MOELITH_HD explicit operator bool() const { return data || apart; }
  MOELITH_HD GradientTarget of(std::int64_t expert, std::int64_t size) const {
    GradientTarget one = *this;
    one.apart = nullptr;
    one.data = apart ? apart[expert] : static_cast<char*>(data) + expert * size * (is_float ? 4 : 2);
    return one;
  }
};

// Experts of one width: group 0 are the L routed experts, group 1 + s is shared expert s. Row r of the group (a routed
// row, or a token of the shared expert) is at base + r * width of that tensor.
struct ExpertGroup {
  std::int32_t experts = 0;    // L, or 1
  std::int64_t width = 0;      // I
  ExpertTensors gate_up_proj;  // [F I, H] of each
  ExpertTensors gate_up_bias;  // [F I], or none
  ExpertTensors down_proj;     // [H, I]
  ExpertTensors down_bias;     // [H], or none
  // Tensor maps of projections that lie apart, in device memory, as sm90_gate_up_maps and sm90_down_maps make
  // them.
  const void* gate_up_maps = nullptr;
  const void* down_maps = nullptr;
  bfloat16* pre_activation = nullptr;    // [rows, F I]; null in a forward that saves nothing
  bfloat16* activated = nullptr;         // [rows, I]: act (forward), weighted act (backward; null: not wanted)
  bfloat16* d_pre_activation = nullptr;  // [rows, F I], backward; null: not wanted
  bfloat16* slots = nullptr;             // [T k, H] by route, or [T, H]: what combine sums
  float* dprob = nullptr;                // [T k, dprob_groups], or [T, dprob_groups], backward
  std::int32_t dprob_groups = 0;         // one for each 64 columns, and one for the bias of down_proj, last
  GradientTarget gate_up_grad, gate_up_bias_grad, down_grad, down_bias_grad;
};

// Counters of a pass: all zero before its launch, and zero again when it has finished.
struct PassCounters {
  unsigned long long* local = nullptr;     // [CounterMap::local_size]
  unsigned long long* arrivals = nullptr;  // [CounterMap::arrivals_size]
  unsigned long long* control = nullptr;   // [control_counters], by name:
  static constexpr int next_tile = 0, finished_blocks = 1, next_first_rows = 2, next_description = 3, described = 4,
                       pulled_parts = 5, control_counters = 6;
};

// Why a pass gave up, written to host-visible memory, which is all zero where none did.
struct PassError {
  enum : std::int32_t { none, being_written, there };
  std::int32_t state = none;
  std::int32_t stage = 0, expert = 0, row_block = 0;
  std::int32_t rank = 0;      // that gave up
  std::int32_t awaited = -1;  // the rank that it waited for, itself for its own work; -1: several
  std::int32_t saving = -1;   // 0 or 1 where forwards disagree: whether `rank` saves for a backward; `awaited` does not
};

// Where the rows of all ranks are, as one of them addresses them; in device memory. The last lines change with each pass.
struct Peers {
  static constexpr int most = limits::device_ranks;
  // In the place of a rank: the routed rows that are packed here already, each by its own number (in the kernel's copy).
  static constexpr int packed = most;
  bfloat16* slots[most];                // [T k, H] of that rank's routes
  float* dprob[most];                   // [T k, dprob_groups]
  unsigned long long* arrivals[most];   // [CounterMap::arrivals_size]
  unsigned long long* pulled[most];     // [R] flags, CounterMap::rows_pulled
  struct Rows {
    const bfloat16* data;
    std::int64_t stride;
  } x[most + 1], dy[most + 1];
  std::int64_t first_token[most];  // of that rank, in PassData::first_row; this rank has none
};

// The first routed row here of another rank's token, as a word of which the largest is that of the first row; 0: none.
struct FirstRow {
  unsigned long long word;
  static constexpr int rows_bits = 7;  // of a row block: 1 to 128

  explicit MOELITH_HD FirstRow(unsigned long long word) : word(word) {}
  // block: counted over all routed experts; block_rows: rows of it.
  MOELITH_HD FirstRow(std::int64_t row, std::int64_t block, std::int64_t block_rows)
      : word(static_cast<unsigned long long>(0x7fffffff - row) << 32 | static_cast<unsigned long long>(block << rows_bits | (block_rows - 1))) {}
  MOELITH_HD int row() const { return 0x7fffffff - static_cast<int>(word >> 32); }
  MOELITH_HD unsigned block() const { return static_cast<unsigned>(word) >> rows_bits; }
  MOELITH_HD unsigned block_rows() const { return (static_cast<unsigned>(word) & ((1u << rows_bits) - 1)) + 1; }
};

// What one computing warpgroup did with one tile.
struct TileEvent {
  std::uint64_t end_ns;                         // when it was done
  std::uint32_t wait_cycles;                    // from the tile before it until this one was there,
  std::uint32_t multiply_cycles, write_cycles;  // waiting for the other warpgroup's products included
  std::int32_t stage, expert, row_block, column_block;
};

struct PassData {
  schedule::Pass pass;  // of several ranks with peer_access
  PassCounters counters;
  void* tiles = nullptr;       // sm90_tile_table_bytes(pass.sizes), aligned to 16: written and read by the pass
  PassError* error = nullptr;  // host-visible, or null
  unsigned long long wait_limit_ns = 10'000'000'000ull;
  // Several ranks only.
  const Peers* peers = nullptr;
  const std::uint8_t* row_rank = nullptr;       // [routed rows] the rank that a routed row came from,
  const float* row_weight = nullptr;            // [routed rows] and its weight
  const unsigned long long* first_row = nullptr;  // FirstRow of the tokens of other ranks, rank by rank; null: not known
  const unsigned long long* last_pass = nullptr;  // [1] the number of this pass
  const unsigned long long* stopped = nullptr;  // [1] not 0: the exchange before this pass gave up
  std::int32_t* stop = nullptr;                 // [1] host-visible: not 0 once the group has failed
  TileEvent* trace = nullptr;  // [blocks, 2, trace_room], zeroed by the caller; null: no timeline
  std::int32_t trace_room = 0;
  numerics::Activation activation;
  bool weight_after_down = true;  // of the routed experts
  std::int64_t total_rows = 0;    // rows that the routed groups' tensors have room for: all ranks' T k, or fewer,
                                  // which are then worked through in rounds
  std::int64_t packed_rows = 0;   // and packed_x and packed_dy: as many, or with rounds up to twice as many
  // With rounds, backward: the sums of an expert that goes on in the next round, in two places that rounds take in turns.
  // Weights': whole tiles, each thread's values as it holds them.
  struct RoundSums {
    float* gate_up[2] = {};       // [tiles' rows, tiles' columns]
    float* gate_up_bias[2] = {};  // [F I]
    float* down[2] = {};
    float* down_bias[2] = {};     // [H]
  } round_sums;

  const bfloat16* x = nullptr;  // [T, H] at a row stride (a multiple of 8)
  std::int64_t x_stride = 0;
  const bfloat16* dy = nullptr;  // backward
  std::int64_t dy_stride = 0;
  bfloat16* packed_x = nullptr;   // [packed_rows, H]: the routed rows of x; backward: null when neither gate_up runs
                                  // again nor its weight gradient is wanted
  bfloat16* packed_dy = nullptr;  // [packed_rows, H], backward
  const std::int32_t* topk_ids = nullptr;  // [T, k], -1: empty
  const float* topk_weights = nullptr;     // [T, k]
  const float* shared_gates = nullptr;     // [T, S], or null: all 1
  bfloat16* out = nullptr;                 // y or dx, [T, H]; null in backward: not wanted
  std::int64_t out_stride = 0;
  float* d_topk_weights = nullptr;  // [T, k], backward
  float* d_shared_gates = nullptr;  // [T, S], backward; null without gates
  ExpertGroup groups[1 + schedule::max_shared_experts];
};

// Tile shapes of the sm_90a executor for products of `columns` columns a block (128 or 192); a tile is shared by two
// blocks; top_k says how many tokens a tile of combine has room for. The Layout of a call depends on row_block alone.
schedule::TileShape sm90_tile_shape(int columns, int gate_up_factor, int top_k);

// Tensor maps of gate_up_proj [F I, H], or down_proj [H, I], of experts that lie apart, to be copied to device memory
// (aligned to 64 bytes) for ExpertGroup: first those for forward, then those for backward. Throw Error(device_error).
std::vector<std::byte> sm90_gate_up_maps(const void* const* tensors, std::int32_t experts, int gate_up_factor,
                                         std::int64_t width, std::int64_t hidden);
std::vector<std::byte> sm90_down_maps(const void* const* tensors, std::int32_t experts, std::int64_t hidden,
                                      std::int64_t width);

// Room for the descriptions of all tiles of either pass of these sizes, whatever its routing and what is wanted of it.
std::size_t sm90_tile_table_bytes(schedule::Sizes sizes);

// Launches the persistent kernel of the pass on `stream` (a cudaStream_t), on at most `blocks` SMs (0: all; at
// least 2, and an even number).
// pass.sizes.tile must be sm90_tile_shape(columns, gate_up_factor, top_k), of several ranks with 192 columns.
// beside_previous: the kernel may start before the one in front of it in the stream, which must be one that lets it
// (griddepcontrol.launch_dependents), has ended; it waits for that itself before it reads any memory. Throws
// Error(device_error).
void sm90_run_pass(const PassData& data, int blocks, void* stream, bool beside_previous = false);
// Loads the kernels of several ranks: a kernel's first launch might otherwise wait for others that wait for this rank.
void sm90_prepare_ranks();

}  // namespace moelith::executors::cuda
