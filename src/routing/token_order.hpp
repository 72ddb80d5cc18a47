// The local routing table: this rank's routes sorted by expert. A route is slot j of token t; its id is t * k + j.
#pragma once

#include <cstddef>
#include <cstdint>

#include "routing/parallel_for.hpp"

namespace moelith::routing {

// Bytes of scratch for sort_routes, aligned to 64 bytes.
std::size_t token_order_workspace_bytes(std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts);

// A stable counting sort of the T * k routes by expert.
//   topk_ids  [tokens, k] int32 in [-1, num_experts); slots that are -1 are left out
//   offsets   [num_experts + 1]: routes of expert e are routes[offsets[e]] up to routes[offsets[e + 1]];
//             offsets[num_experts] is the number of routes
//   routes    [offsets[num_experts]] (room for tokens * k): route ids, ascending within an expert
// Route is std::int32_t or std::int64_t; int32 is refused (Error(invalid_argument)) where tokens * k is over 2^31 - 1.
// The order is unique, so it does not depend on threads.
template <class Route>
void sort_routes(const std::int32_t* topk_ids, std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts,
                 std::int64_t* offsets, Route* routes, void* workspace, const ParallelFor& parallel_for = serial_for);

}  // namespace moelith::routing
