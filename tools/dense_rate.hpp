// The rate of dense matrix products on this machine, which the layer's own rate is measured against.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "options.hpp"

namespace moelith::tools {

struct DenseRate {
  std::string name;  // whose products
  double forward_tflops = 0;
  double forward_backward_tflops = 0;  // forward and backward together
};

// A dense MLP of the same library, E = 1 without a router, as wide as the k experts (and the shared ones) of a token
// together: the same multiply-adds for T tokens, by the same tiles. Times are medians over about `seconds` each.
DenseRate own_dense_rate(const LayerConfig& config, const RunOptions& run, std::int64_t tokens, double seconds);

// oneDNN's product of [T, H] with [H, F I'] for that width I', with the threads of `run`; the faster of dtype and
// float32, which the name tells. Nothing if this build has no oneDNN, or it has no such product.
std::optional<DenseRate> onednn_dense_rate(const LayerConfig& config, const RunOptions& run, std::int64_t tokens,
                                           double seconds);

// The width I' above.
std::int64_t dense_width(const LayerConfig& config);

}  // namespace moelith::tools
