// Capacity: each expert keeps at most ceil(capacity_factor * T * k / E) of this rank's routes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moelith/config.hpp"
#include "routing/parallel_for.hpp"

namespace moelith::routing {

// ceil(capacity_factor * tokens * top_k / num_experts), evaluated in double from left to right. tokens counts all rows
// of the call, absent ones too, so that it does not depend on data.
std::int64_t expert_capacity(double capacity_factor, std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts);

std::size_t capacity_workspace_bytes(std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts);

// topk_ids: [tokens, k] in [-1, E); topk_weights: [tokens, k]. In place: a route beyond its expert's capacity gets id
// -1 and weight 0. by_score keeps the highest weights, equal ones in route order (a NaN counts as below every number);
// by_position keeps the first in route order. Route order is (t, j).
template <class T>
void apply_capacity(DropPolicy policy, std::int64_t capacity, std::int64_t tokens, std::int32_t top_k,
                    std::int32_t num_experts, std::int32_t* topk_ids, T* topk_weights, void* workspace,
                    const ParallelFor& parallel_for = serial_for);

}  // namespace moelith::routing
