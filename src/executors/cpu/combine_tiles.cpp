// The combine tile: what a token's routes and the shared experts wrote for it, summed in slot order.
#include <algorithm>

#include "executors/cpu/pass_data.hpp"

namespace moelith::executors::cpu {
namespace {

using schedule::Direction;

// dprob of each route: the partial sums of its groups, in order. Once a token block (with its first column tile).
template <class Storage, class T = numerics::accumulator_t<Storage>>
void combine_dprob(const PassData<Storage>& data, std::int64_t begin, std::int64_t end) {
  const auto& sizes = data.pass.sizes;
  const std::int64_t valid = *data.pass.layout.valid_tokens;
  auto sum = [](const T* groups, std::int64_t count) {
    T total = T(0);
    for (std::int64_t g = 0; g < count; ++g) total += groups[g];
    return total;
  };
  // Routes may be on other ranks, where L may be 0, so the number of groups comes from the sizes.
  const std::int64_t groups = data.route_dprob_groups;
  for (std::int64_t t = begin; t < end; ++t) {
    for (std::int32_t j = 0; j < sizes.top_k; ++j) {
      const std::int64_t route = t * sizes.top_k + j;
      const bool there = t < valid && data.topk_ids[route] >= 0;
      data.d_topk_weights[route] = there ? sum(data.route_dprob[sizes.rank] + route * groups, groups) : T(0);
    }
    if (!data.d_shared_gates) continue;
    for (std::int32_t s = 0; s < sizes.shared_experts; ++s) {
      const std::int64_t shared_groups = data.dprob_groups(sizes.local_experts + s);
      data.d_shared_gates[t * sizes.shared_experts + s] =
          t < valid ? sum(data.shared_dprob[s] + t * shared_groups, shared_groups) : T(0);
    }
  }
}

}  // namespace

template <class Storage>
void run_combine_tile(const PassData<Storage>& data, const schedule::Tile& tile) {
  using T = numerics::accumulator_t<Storage>;
  const auto& sizes = data.pass.sizes;
  const auto& kernels = row_kernels<Storage>();
  const bool forward = sizes.direction == Direction::forward;
  const std::int64_t begin = tile.row_block * sizes.tile.token_block;
  const std::int64_t end = std::min(begin + sizes.tile.token_block, sizes.tokens);
  const std::int64_t column = tile.column_block * sizes.tile.columns;
  const std::int64_t width = std::min<std::int64_t>(sizes.tile.columns, sizes.hidden_size - column);
  const std::int64_t valid = *data.pass.layout.valid_tokens;
  if (!forward && tile.column_block == 0) combine_dprob(data, begin, end);
  if (!data.out) return;

  const Storage* rows[64];
  T factors[64];
  static_assert(limits::shared_experts + limits::top_k <= 64);
  const bool weighted = forward && data.weight_placement == WeightPlacement::after_down;
  for (std::int64_t t = begin; t < end; ++t) {
    std::int64_t count = 0;
    if (t < valid) {
      for (std::int32_t j = 0; j < sizes.top_k; ++j) {
        const std::int64_t route = t * sizes.top_k + j;
        if (data.topk_ids[route] < 0) continue;
        rows[count] = data.route_rows[sizes.rank] + route * sizes.hidden_size + column;
        factors[count++] = weighted ? data.topk_weights[route] : T(1);
      }
      for (std::int32_t s = 0; s < sizes.shared_experts; ++s) {
        rows[count] = data.shared_rows[s] + t * sizes.hidden_size + column;
        factors[count++] = forward ? data.weight(sizes.local_experts + s, t) : T(1);
      }
    }
    kernels.combine(rows, factors, count, data.out + t * data.out_stride + column, width);
  }
}

template void run_combine_tile(const PassData<numerics::bfloat16>&, const schedule::Tile&);
template void run_combine_tile(const PassData<float>&, const schedule::Tile&);
template void run_combine_tile(const PassData<double>&, const schedule::Tile&);

}  // namespace moelith::executors::cpu
