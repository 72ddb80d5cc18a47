#include "routing/capacity.hpp"

#include <algorithm>
#include <cmath>

#include "routing/token_order.hpp"

namespace moelith::routing {
namespace {

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

struct Layout {
  std::size_t offsets, routes, order, bytes;
  Layout(std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts) {
    offsets = 0;
    routes = aligned((static_cast<std::size_t>(num_experts) + 1) * sizeof(std::int64_t));
    order = routes + aligned(static_cast<std::size_t>(tokens) * top_k * sizeof(std::int64_t));
    bytes = order + token_order_workspace_bytes(tokens, top_k, num_experts);
  }
};

}  // namespace

std::int64_t expert_capacity(double capacity_factor, std::int64_t tokens, std::int32_t top_k,
                             std::int32_t num_experts) {
  const double limit = std::ceil(capacity_factor * static_cast<double>(tokens) * top_k / num_experts);
  const std::int64_t routes = tokens * top_k;  // more is never needed, and a huge factor must not overflow
  return limit < static_cast<double>(routes) ? static_cast<std::int64_t>(limit) : routes;
}

std::size_t capacity_workspace_bytes(std::int64_t tokens, std::int32_t top_k, std::int32_t num_experts) {
  return Layout(tokens, top_k, num_experts).bytes;
}

template <class T>
void apply_capacity(DropPolicy policy, std::int64_t capacity, std::int64_t tokens, std::int32_t top_k,
                    std::int32_t num_experts, std::int32_t* topk_ids, T* topk_weights, void* workspace,
                    const ParallelFor& parallel_for) {
  const Layout layout(tokens, top_k, num_experts);
  char* base = static_cast<char*>(workspace);
  std::int64_t* offsets = reinterpret_cast<std::int64_t*>(base + layout.offsets);
  std::int64_t* routes = reinterpret_cast<std::int64_t*>(base + layout.routes);
  sort_routes(topk_ids, tokens, top_k, num_experts, offsets, routes, base + layout.order, parallel_for);
  parallel_for(num_experts, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t e = begin; e < end; ++e) {
      std::int64_t* first = routes + offsets[e];
      std::int64_t* last = routes + offsets[e + 1];
      if (last - first <= capacity) continue;
      // Route order is what sort_routes left.
      if (policy == DropPolicy::by_score)
        std::nth_element(first, first + capacity, last, [topk_weights](std::int64_t a, std::int64_t b) {
          const T wa = topk_weights[a], wb = topk_weights[b];
          const bool nan_a = wa != wa, nan_b = wb != wb;
          if (nan_a || nan_b) return nan_a == nan_b ? a < b : nan_b;
          return wa != wb ? wa > wb : a < b;
        });
      for (std::int64_t* dropped = first + capacity; dropped < last; ++dropped) {
        topk_ids[*dropped] = -1;
        topk_weights[*dropped] = T(0);
      }
    }
  });
}

template void apply_capacity<float>(DropPolicy, std::int64_t, std::int64_t, std::int32_t, std::int32_t, std::int32_t*,
                                    float*, void*, const ParallelFor&);
template void apply_capacity<double>(DropPolicy, std::int64_t, std::int64_t, std::int32_t, std::int32_t, std::int32_t*,
                                     double*, void*, const ParallelFor&);

}  // namespace moelith::routing
