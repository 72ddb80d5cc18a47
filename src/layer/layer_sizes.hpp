// What a layer's config says to the schedule.
#pragma once

#include "moelith/config.hpp"
#include "schedule/extents.hpp"

namespace moelith::layer {

// Sizes with all that follows from the config; ranks, tokens, tiles and what is wanted are the caller's.
inline schedule::Sizes layer_sizes(const LayerConfig& config) {
  schedule::Sizes sizes;
  sizes.shared_experts = static_cast<std::int32_t>(config.shared_experts.size());
  sizes.top_k = config.top_k;
  sizes.hidden_size = config.hidden_size;
  sizes.intermediate_size = config.intermediate_size;
  for (std::size_t s = 0; s < config.shared_experts.size(); ++s) {
    sizes.shared_intermediate_size[s] = config.shared_experts[s].intermediate_size;
  }
  sizes.gate_up_factor = config.activation.gated() ? 2 : 1;
  return sizes;
}

}  // namespace moelith::layer
