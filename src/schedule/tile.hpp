// A tile: the unit of work that a worker (a CPU thread, an SM) takes, and the stages it may belong to.
#pragma once

#include <cstdint>

#include "numerics/host_device.hpp"

namespace moelith::schedule {

enum class Stage : std::uint8_t {
  // Between ranks; absent when there is one rank.
  publish,        // row_block = chunk: this rank's rows of the chunk (x, or dY in backward) into symmetric memory
  layout,         // the Layout from all ranks' counts
  collect,        // expert: row_route and row weights of one local expert from all ranks' tables
  dispatch,       // expert = source rank, row_block = chunk: pull the rows of the chunk that local experts need
  // Forward; gate_up also in backward, when recomputing.
  gate_up,        // [rows, I] tile: pre-activation (saved) and activation
  down,           // [rows, H] tile: each row into its token's slot, at the token's rank
  combine,        // [tokens, H] tile: weighted sum over the slots of a token; in backward the plain sum (dx), and dprob
  // Backward.
  down_dgrad,     // [rows, I] tile: dA, dprob partial sums, dZ, and the weighted activation again
  gate_up_dgrad,  // [rows, H] tile: each row's dx into its token's slot
  gate_up_wgrad,  // [2I, H] tile of one expert
  down_wgrad,     // [H, I] tile of one expert
  gate_up_bias_grad,  // [2I] of one expert
  down_bias_grad,     // [H] of one expert
};
inline constexpr int stage_count = 13;

inline const char* to_string(Stage stage) {
  constexpr const char* names[stage_count] = {"publish",      "layout",        "collect",       "dispatch",   "gate_up",
                                              "down",         "combine",       "down_dgrad",    "gate_up_dgrad",
                                              "gate_up_wgrad", "down_wgrad",   "gate_up_bias_grad", "down_bias_grad"};
  return names[static_cast<int>(stage)];
}

struct Tile {
  Stage stage;
  std::int32_t expert;       // expert slot, or source rank (dispatch)
  std::int64_t row_block;    // of the expert, from 0; chunk; token block; row tile of a weight gradient
  std::int32_t column_block; // column tile
  std::int32_t round = 0;    // of a routed expert's tile: see schedule/extents.hpp
};

}  // namespace moelith::schedule
