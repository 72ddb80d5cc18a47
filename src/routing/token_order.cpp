#include "routing/token_order.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "moelith/tensor.hpp"

namespace moelith::routing {
namespace {

// Routes of one chunk: enough that counting them outweighs a row of counters, and at most 64 chunks in all, so that the
// counters stay small beside the routes.
std::int64_t chunk_length(std::int64_t routes) { return std::max<std::int64_t>(4096, (routes + 63) / 64); }

std::int64_t chunk_count(std::int64_t routes) {
  const std::int64_t length = chunk_length(routes);
  return (routes + length - 1) / length;
}

}  // namespace

std::size_t token_order_workspace_bytes(std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts) {
  return (static_cast<std::size_t>(chunk_count(tokens * top_k)) * num_experts * sizeof(std::int64_t) + 63) / 64 * 64;
}

template <class Route>
void sort_routes(const std::int32_t* topk_ids, std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts,
                 std::int64_t* offsets, Route* routes, void* workspace, const ParallelFor& parallel_for) {
  const std::int64_t total = tokens * top_k;
  if (total > static_cast<std::int64_t>(std::numeric_limits<Route>::max()))
    throw Error(Status::invalid_argument,
                "T * top_k is " + std::to_string(total) + "; route ids of 32 bits take at most 2147483647");
  const std::int64_t length = chunk_length(total), chunks = chunk_count(total);
  std::int64_t* next = static_cast<std::int64_t*>(workspace);  // [chunks, E]: counts, then where the next route goes
  parallel_for(chunks, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c) {
      std::int64_t* counts = next + c * num_experts;
      std::fill_n(counts, num_experts, std::int64_t{0});
      for (std::int64_t route = c * length; route < std::min((c + 1) * length, total); ++route)
        if (topk_ids[route] >= 0) ++counts[topk_ids[route]];
    }
  });
  std::int64_t position = 0;
  for (std::int32_t e = 0; e < num_experts; ++e) {
    offsets[e] = position;
    for (std::int64_t c = 0; c < chunks; ++c) {
      const std::int64_t count = next[c * num_experts + e];
      next[c * num_experts + e] = position;
      position += count;
    }
  }
  offsets[num_experts] = position;
  parallel_for(chunks, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c) {
      std::int64_t* position_of = next + c * num_experts;
      for (std::int64_t route = c * length; route < std::min((c + 1) * length, total); ++route)
        if (topk_ids[route] >= 0) routes[position_of[topk_ids[route]]++] = static_cast<Route>(route);
    }
  });
}

template void sort_routes<std::int32_t>(const std::int32_t*, std::int64_t, std::int32_t, std::int32_t, std::int64_t*,
                                        std::int32_t*, void*, const ParallelFor&);
template void sort_routes<std::int64_t>(const std::int32_t*, std::int64_t, std::int32_t, std::int32_t, std::int64_t*,
                                        std::int64_t*, void*, const ParallelFor&);

}  // namespace moelith::routing
