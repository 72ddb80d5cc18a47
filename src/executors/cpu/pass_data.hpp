// All that the CPU tiles of one pass read and write. Filled by src/layer/; every pointer stays valid for the pass.
// Storage: bfloat16, float or double; T its accumulator type. Symbols as in schedule/extents.hpp; F = gate_up_factor.
#pragma once

#include <cstdint>
#include <vector>

#include "executors/cpu/gemm.hpp"
#include "executors/cpu/row_kernels.hpp"
#include "moelith/config.hpp"
#include "moelith/tensor.hpp"
#include "numerics/activation.hpp"
#include "numerics/bfloat16.hpp"
#include "schedule/extents.hpp"
#include "schedule/tile.hpp"

namespace moelith::executors::cpu {

// A rank's routing table in symmetric memory, for the other ranks to read (several ranks only).
template <class T>
struct RoutingTable {
  std::int64_t* tokens;         // [1] T of that rank
  std::int64_t* offsets;        // [E + 1] routes of each global expert in `routes`
  std::int32_t* routes;         // [T k] sorted by expert
  std::int32_t* topk_ids;       // [T, k]
  T* topk_weights;              // [T, k]
};

template <class Storage, class T = numerics::accumulator_t<Storage>>
struct PassData {
  schedule::Pass pass;
  numerics::Activation activation;
  WeightPlacement weight_placement = WeightPlacement::after_down;
  std::int32_t num_experts = 0;              // E
  const std::int32_t* expert_rank = nullptr; // [E]

  // One expert slot: its weights, and where its rows' intermediate results lie. Row r of the slot (a routed row, or a
  // token of a shared expert) is at base + (r - first_row_held) * width, as schedule/tile_order.hpp has it.
  struct Slot {
    const Storage *gate_up_proj = nullptr, *gate_up_bias = nullptr;  // [F I, H], [F I]
    const Storage *down_proj = nullptr, *down_bias = nullptr;        // [H, I], [H]
    Storage* pre_activation = nullptr;   // [rows, F I] of the first round; null in a forward that saves nothing
    Storage* activated = nullptr;        // [rows, I]: act (forward), weighted act (backward; may be null)
    Storage* d_pre_activation = nullptr; // [rows, F I], backward; null if nothing needs it
    // Of later rounds, in backward only: [rows, F I] where dZ will be, which a down_dgrad tile writes over what it has read.
    Storage* later_pre_activation = nullptr;
    // Weight gradients; null data: not wanted.
    struct Target {
      void* data = nullptr;
      DataType dtype = DataType::float32;
      bool accumulate = false;
    };
    Target gate_up_grad, gate_up_bias_grad, down_grad, down_bias_grad;
  };
  // Sums of the expert that goes on in the next round (schedule::sum_place says which).
  struct Sums {
    T *gate_up = nullptr, *gate_up_bias = nullptr;  // [F I, H], [F I]
    T *down = nullptr, *down_bias = nullptr;        // [H, I], [H]
  };
  std::vector<Slot> slots;  // [L + S]
  Sums sums[2];             // backward with rounds

  // Rows of this rank's tokens: [T, H] at a row stride.
  const Storage* x = nullptr;
  std::int64_t x_stride = 0;
  const Storage* dy = nullptr;  // backward
  std::int64_t dy_stride = 0;

  // Routing of this rank's tokens.
  const std::int32_t* topk_ids = nullptr;  // [T, k], -1: empty
  const T* topk_weights = nullptr;         // [T, k]
  T* row_weight = nullptr;                 // [rows] weight of each routed row
  const T* shared_gates = nullptr;         // [T, S], or null: all 1

  // Combine: what the slots hold, and the results.
  std::vector<Storage*> route_rows;   // [R] of each rank: [T k, H]
  std::vector<Storage*> shared_rows;  // [S]: [T, H]
  std::vector<T*> route_dprob;        // [R] of each rank: [T k, route_dprob_groups], backward
  std::int64_t route_dprob_groups = 0;
  std::vector<T*> shared_dprob;       // [S]: [T, dprob_groups(I_s)], backward
  Storage* out = nullptr;             // y or dx, [T, H]; null in backward: not wanted
  std::int64_t out_stride = 0;
  T* d_topk_weights = nullptr;        // [T, k], backward
  T* d_shared_gates = nullptr;        // [T, S], backward; null without gates

  // Several ranks only. Row t of rank r in a received buffer: ((r * max_chunks * chunk_tokens) + t) * H.
  std::vector<Storage*> windows;                // [R] of each rank: [T, H], x or dY for the others to pull
  std::vector<RoutingTable<T>> tables;          // [R], forward
  Storage* received_x = nullptr;
  Storage* received_dy = nullptr;
  std::uint8_t* needed = nullptr;               // [R, max_chunks * chunk_tokens]: 1 where a local expert wants the row

  // dprob's partial sums of one row: one for each 64 columns, and one for the bias of down_proj, last.
  std::int64_t dprob_groups(std::int32_t slot) const {
    return schedule::ceil_div(pass.sizes.width(slot), sum_group) + (slots[slot].down_bias ? 1 : 0);
  }
  // Shared experts' gates always multiply the output.
  bool weight_after_down(std::int32_t slot) const {
    return pass.sizes.is_shared(slot) || weight_placement == WeightPlacement::after_down;
  }
  T weight(std::int32_t slot, std::int64_t row) const {
    if (!pass.sizes.is_shared(slot)) return row_weight[row];
    return shared_gates ? shared_gates[row * pass.sizes.shared_experts + slot - pass.sizes.local_experts] : T(1);
  }
};

// Memory of one worker, kept from tile to tile.
template <class Storage, class T = numerics::accumulator_t<Storage>>
struct WorkerMemory {
  Scratch scratch;
  Scratch product;                         // a tile's product, aligned for the vector stores
  std::vector<const Storage*> pointers[2]; // gathered vectors of A and B
};

// The stages, one tile each. Files: rank_tiles.cpp, gemm_tiles.cpp, combine_tiles.cpp.
template <class Storage>
void run_rank_tile(const PassData<Storage>& data, const schedule::Tile& tile);
template <class Storage>
void run_gemm_tile(const PassData<Storage>& data, const schedule::Tile& tile, WorkerMemory<Storage>& memory);
template <class Storage>
void run_combine_tile(const PassData<Storage>& data, const schedule::Tile& tile);

// Any tile.
template <class Storage>
void run_tile(const PassData<Storage>& data, const schedule::Tile& tile, WorkerMemory<Storage>& memory) {
  using schedule::Stage;
  switch (tile.stage) {
    case Stage::publish:
    case Stage::layout:
    case Stage::collect:
    case Stage::dispatch: return run_rank_tile(data, tile);
    case Stage::combine: return run_combine_tile(data, tile);
    default: return run_gemm_tile(data, tile, memory);
  }
}

}  // namespace moelith::executors::cpu
