// The second entry of the layer: expert ids and weights that the caller brings.
#pragma once

#include <cstdint>

#include "moelith/tensor.hpp"

namespace moelith::routing {

// Checks and copies caller-brought routes.
//   topk_ids      [T, k] int32 or int64, any strides; values in [-1, num_experts)
//   topk_weights  [T, k] float32 for T = float, float64 for T = double, any strides
//   valid_tokens  rows from here on are absent: not looked at, and out_ids = -1, out_weights = 0
//   out_ids, out_weights: [T, k] contiguous. Weights of empty slots (-1) become 0. Either may be null to only check.
// Throws Error(invalid_argument) naming the tensor, or the first bad element as topk_ids[t, j], its value and the
// range; then nothing was written.
template <class T>
void copy_caller_routes(const TensorView& topk_ids, const TensorView& topk_weights, std::int64_t tokens,
                        std::int32_t top_k, std::int32_t num_experts, std::int64_t valid_tokens, std::int32_t* out_ids,
                        T* out_weights);

}  // namespace moelith::routing
