// The MoE layer of include/moelith/ in plain float64 on the CPU: what every executor is measured against. Shares no
// code with src/. All tensors are dense row-major std::vector<double>; an empty vector means "not given".
//
// Symbols as in moelith/config.hpp, with one difference: here T counts the tokens of the whole group. Several ranks are
// one batch, their tokens one rank after another (Inputs::ranks); capacity and losses are each rank's own, and a loss
// has one value a rank. The rules of the router for ties and logits that are not finite: reference/router.hpp.
// config.dtype is ignored, and H and I need not be multiples of 8.
//
// The parts: router.hpp (choice, weights, capacity, losses), activation.hpp, matrix.hpp (three products), layer.cpp
// (experts and combine).
#pragma once

#include <cstdint>
#include <vector>

#include "moelith/config.hpp"

namespace moelith::reference {

struct Weights {
  std::vector<double> gate_up_proj;  // [E, 2I, H], rows [gate; up]; [E, I, H] without a gate
  std::vector<double> gate_up_bias;  // [E, 2I] if config.gate_up_bias
  std::vector<double> down_proj;     // [E, H, I]
  std::vector<double> down_bias;     // [E, H] if config.down_bias
  struct Shared {
    std::vector<double> gate_up_proj;  // [2 I_s, H], or [I_s, H]
    std::vector<double> gate_up_bias;  // [2 I_s]
    std::vector<double> down_proj;     // [H, I_s]
    std::vector<double> down_bias;     // [H]
  };
  std::vector<Shared> shared;  // S entries
};

// One rank's stretch of the batch.
struct RankBatch {
  std::int64_t tokens = 0;
  std::int64_t valid_tokens = -1;  // rows of this rank from here on count as absent; -1: none
  std::int64_t num_sequences = 1;  // sequence aux loss: divides `tokens`
};

// Either router_logits, or topk_ids and topk_weights, or, for E = 1 and k = 1, neither (a dense MLP: weight 1).
struct Inputs {
  std::int64_t tokens = 0;                 // T
  std::vector<double> x;                   // [T, H]
  std::vector<double> router_logits;       // [T, E]
  std::vector<std::int64_t> topk_ids;      // [T, k], -1: an empty slot; an id may stand several times in a row
  std::vector<double> topk_weights;        // [T, k]
  std::vector<double> selection_bias;      // [E] if config.router.selection_bias; finite
  std::vector<double> shared_gate_logits;  // [T, S] if any shared expert is gated
  std::vector<RankBatch> ranks;            // R entries, their tokens add up to T; empty: one rank, all tokens valid
  // With router_logits: the choice of experts before capacity, [T, k] distinct ids, taken as given instead of made from
  // the scores; weights, losses and gradients still come from the logits. For results whose router, in a lower
  // precision, broke a near-tie the other way.
  std::vector<std::int64_t> chosen_ids;
};

struct ReferenceResult {
  std::vector<double> y;                    // [T, H]
  std::vector<std::int64_t> topk_ids;       // [T, k] after capacity: -1 where dropped, empty or not valid
  std::vector<double> topk_weights;         // [T, k], 0 where the id is -1
  std::vector<std::int64_t> expert_counts;  // [R, E], after capacity
  std::vector<double> aux_loss;             // [R]; 0 without logits
  std::vector<double> z_loss;               // [R]; 0 without logits
};

// Upstream gradients; empty counts as zero.
struct OutputGradients {
  std::vector<double> y;             // [T, H]
  std::vector<double> topk_weights;  // [T, k]
  std::vector<double> aux_loss;      // [R]
  std::vector<double> z_loss;        // [R]
};

struct ReferenceGradients {
  std::vector<double> x;                   // [T, H]
  std::vector<double> router_logits;       // [T, E] if the logits were given
  std::vector<double> topk_weights;        // [T, k] if the caller brought the weights; 0 in empty and dropped slots
  std::vector<double> shared_gate_logits;  // [T, S] if those logits were given; 0 for a shared expert without a gate
  Weights weights;                         // 0 for experts without tokens
};

// Both throw Error(invalid_argument) naming the tensor whose size is wrong or the id that is out of range.
// `threads`: 0 takes all that the machine has. Results do not depend on it.
ReferenceResult forward(const LayerConfig& config, const Weights& weights, const Inputs& inputs, int threads = 0);
// Needs no result of forward: it computes again what it needs.
ReferenceGradients backward(const LayerConfig& config, const Weights& weights, const Inputs& inputs,
                            const OutputGradients& output_gradients, int threads = 0);

}  // namespace moelith::reference
