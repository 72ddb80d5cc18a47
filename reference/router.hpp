// The routers, capacity and losses of the reference, forward and backward.
//
// A logit that is not finite (NaN, +inf, -inf) is left out: its score is 0, it adds nothing to a softmax's sum, to a
// group's score or to logsumexp, and its gradient is 0. The choice falls on such experts last: where the kept groups
// of a row have fewer than k candidates, the remaining slots take the lowest ids of these groups that are not yet used.
// An expert with such a logit has weight 0 there; its slot is a route like all others and counts for f_e and capacity.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/layer.hpp"

namespace moelith::reference {

// A rank's tokens are [begin, end), of which [begin, valid_end) exist.
struct RankRange {
  std::int64_t begin = 0, valid_end = 0, end = 0;
  std::int64_t num_sequences = 1;
  std::int64_t valid_tokens() const { return valid_end - begin; }
};

struct Routing {
  std::vector<std::int64_t> chosen;  // [T, k] before capacity; -1: empty or not valid
  std::vector<double> weights;       // [T, k] of `chosen`, before capacity
  std::vector<std::int64_t> kept;    // [T, k] after capacity
  std::vector<double> scores;        // [T, E] softmax over E or sigmoid of the logits; empty without logits
};

// Chooses experts from the logits, or takes the caller's ids and weights; then applies capacity, rank by rank.
Routing route(const LayerConfig& config, const Inputs& inputs, const std::vector<RankRange>& ranks);

struct Losses {
  std::vector<double> aux, z;  // [R]
};
Losses losses(const LayerConfig& config, const Inputs& inputs, const std::vector<RankRange>& ranks,
              const Routing& routing);

// d_weights: [T, k], the gradient into the kept routes' weights (0 elsewhere). d_aux, d_z: [R]. Returns [T, E].
std::vector<double> router_backward(const LayerConfig& config, const Inputs& inputs,
                                    const std::vector<RankRange>& ranks, const Routing& routing,
                                    const std::vector<double>& d_weights, const std::vector<double>& d_aux,
                                    const std::vector<double>& d_z);

}  // namespace moelith::reference
