// Which rank holds which expert where the caller does not say: contiguous, the first E % R ranks hold one more.
#pragma once

#include <cstdint>
#include <vector>

namespace moelith::layer {

// [E]: the rank of each expert.
inline std::vector<std::int32_t> contiguous_placement(std::int32_t num_experts, std::int32_t ranks) {
  std::vector<std::int32_t> expert_rank;
  for (std::int32_t r = 0; r < ranks; ++r) {
    const std::int32_t share = num_experts / ranks + (r < num_experts % ranks ? 1 : 0);
    expert_rank.insert(expert_rank.end(), static_cast<std::size_t>(share), r);
  }
  return expert_rank;
}

}  // namespace moelith::layer
