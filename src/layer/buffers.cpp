#include "layer/buffers.hpp"

#include <algorithm>

#include "layer/fingerprint.hpp"
#include "routing/device_router.hpp"

namespace moelith::layer {
namespace {

// Hands out aligned places one behind the other.
class Places {
 public:
  std::uint64_t add(std::uint64_t bytes) {
    const std::uint64_t offset = size_;
    size_ += (bytes + 255) / 256 * 256;
    return offset;
  }
  std::uint64_t add_if(bool wanted, std::uint64_t bytes) { return wanted ? add(bytes) : absent; }
  std::uint64_t size() const { return size_; }

 private:
  std::uint64_t size_ = 0;
};

}  // namespace

std::int64_t Geometry::dprob_groups(std::int64_t width) const {
  return schedule::ceil_div(width, 64) + (config.down_bias ? 1 : 0);
}

SavedBuffer SavedBuffer::of(const Geometry& g, bool keep) {
  const auto element = size_of(g.config.dtype), accumulator = size_of(g.config.accumulator_dtype());
  const std::int64_t experts = g.config.num_experts;
  Places places;
  SavedBuffer saved;
  saved.stamp = places.add(sizeof(Stamp));
  saved.layout_header = places.add(8 * schedule::Layout::header_length(g.ranks, g.local_experts, g.sizes.max_rounds));
  saved.row_route = places.add(4 * g.rows());
  saved.row_weight = places.add(accumulator * g.rows());
  saved.row_rank = places.add_if(g.sizes.peer_access, g.rows());
  saved.first_row = places.add_if(g.may_copy_rows_here(), 8 * g.tokens_of_others());
  saved.topk_ids = places.add(4 * g.routes());
  saved.topk_weights = places.add(accumulator * g.routes());
  saved.chosen_ids = places.add_if(g.config.router.capacity_factor > 0, 4 * g.routes());
  saved.counts = places.add(8 * (experts + 1));
  const std::uint64_t table = places.size();
  const bool keep_pre_activation = keep && !g.recompute;
  saved.pre_activation =
      places.add_if(keep_pre_activation, element * g.held_rows() * g.config.gate_up_rows(g.config.intermediate_size));
  for (const auto& shared : g.config.shared_experts) {
    saved.shared_pre_activation.push_back(
        places.add_if(keep_pre_activation, element * g.tokens * g.config.gate_up_rows(shared.intermediate_size)));
  }
  const std::uint64_t pre_activation = places.size() - table;
  saved.received_x = places.add_if(g.sizes.has_transfers(), element * g.received_rows() * g.config.hidden_size);
  saved.needed = places.add_if(g.sizes.has_transfers(), g.received_rows());
  saved.size = places.size();
  std::string rows_kept;
  if (keep_pre_activation && g.sizes.has_rounds()) {
    rows_kept = " (of " + std::to_string(g.held_rows()) + " routed rows out of " + std::to_string(g.rows()) +
                " that may come; backward makes the others' again)";
  }
  saved.formula = "pre-activation " + std::to_string(pre_activation) + rows_kept + " + routing table " + std::to_string(table) +
                  " + rows received from other ranks " + std::to_string(saved.size - table - pre_activation) + " = " +
                  std::to_string(saved.size) + " bytes (x itself stays where the caller has it)";
  return saved;
}

ForwardWorkspace ForwardWorkspace::of(const Geometry& g, std::uint64_t router_scratch_bytes) {
  const auto element = size_of(g.config.dtype), accumulator = size_of(g.config.accumulator_dtype());
  const auto map = schedule::CounterMap::of(g.sizes);
  Places places;
  ForwardWorkspace workspace;
  workspace.local_counters = places.add(8 * map.local_size);
  workspace.arrivals = places.add(8 * map.arrivals_size);
  workspace.activated = places.add(element * g.held_rows() * g.config.intermediate_size);
  workspace.route_rows = places.add_if(g.ranks == 1, element * g.routes() * g.config.hidden_size);
  for (const auto& shared : g.config.shared_experts) {
    workspace.shared_activated.push_back(places.add(element * g.tokens * shared.intermediate_size));
    workspace.shared_rows.push_back(places.add(element * g.tokens * g.config.hidden_size));
  }
  workspace.shared_gates = places.add(accumulator * g.tokens * g.config.shared_experts.size());
  workspace.score_sums = places.add(accumulator * g.config.num_experts);
  workspace.offsets = places.add(8 * (std::uint64_t(g.config.num_experts) + 1));
  workspace.router_scratch = places.add(router_scratch_bytes);
  workspace.tables = places.add(SavedBuffer::of(g, false).size);
  workspace.size = places.size();
  return workspace;
}

BackwardWorkspace BackwardWorkspace::of(const Geometry& g, std::uint64_t router_scratch_bytes) {
  const auto element = size_of(g.config.dtype), accumulator = size_of(g.config.accumulator_dtype());
  const auto map = schedule::CounterMap::of(g.sizes);
  const std::int64_t width = g.config.intermediate_size, pre_width = g.config.gate_up_rows(width);
  Places places;
  BackwardWorkspace workspace;
  workspace.local_counters = places.add(8 * map.local_size);
  workspace.arrivals = places.add(8 * map.arrivals_size);
  workspace.pre_activation = places.add_if(g.recompute, element * g.held_rows() * pre_width);
  workspace.activated = places.add(element * g.held_rows() * width);
  workspace.d_pre_activation = places.add(element * g.held_rows() * pre_width);
  for (Sums& sums : workspace.sums) {
    const bool rounds = g.sizes.has_rounds() && g.local_experts > 0;
    const std::int64_t hidden = g.config.hidden_size;
    // On a GPU whole tiles.
    auto product = [&](std::int64_t m, std::int64_t n) {
      if (!g.sizes.peer_access) return accumulator * m * n;
      const auto& tile = g.sizes.tile;
      return accumulator * (schedule::ceil_div(m, tile.wgrad_rows) * tile.wgrad_rows) * (schedule::ceil_div(n, tile.wgrad_columns) * tile.wgrad_columns);
    };
    sums.gate_up = places.add_if(rounds, product(pre_width, hidden));
    sums.gate_up_bias = places.add_if(rounds && g.config.gate_up_bias, accumulator * pre_width);
    sums.down = places.add_if(rounds, product(hidden, width));
    sums.down_bias = places.add_if(rounds && g.config.down_bias, accumulator * hidden);
  }
  workspace.route_rows = places.add_if(g.ranks == 1, element * g.routes() * g.config.hidden_size);
  workspace.route_dprob = places.add_if(g.ranks == 1, accumulator * g.routes() * g.dprob_groups(width));
  for (const auto& shared : g.config.shared_experts) {
    const std::int64_t shared_pre_width = g.config.gate_up_rows(shared.intermediate_size);
    workspace.shared_pre_activation.push_back(places.add_if(g.recompute, element * g.tokens * shared_pre_width));
    workspace.shared_activated.push_back(places.add(element * g.tokens * shared.intermediate_size));
    workspace.shared_d_pre_activation.push_back(places.add(element * g.tokens * shared_pre_width));
    workspace.shared_rows.push_back(places.add(element * g.tokens * g.config.hidden_size));
    workspace.shared_dprob.push_back(places.add(accumulator * g.tokens * g.dprob_groups(shared.intermediate_size)));
  }
  workspace.shared_gates = places.add(accumulator * g.tokens * g.config.shared_experts.size());
  workspace.d_topk_weights = places.add(accumulator * g.routes());
  workspace.d_shared_gates = places.add(accumulator * g.tokens * g.config.shared_experts.size());
  workspace.received_dy = places.add_if(g.sizes.has_transfers(), element * g.received_rows() * g.config.hidden_size);
  workspace.router_scratch = places.add(router_scratch_bytes);
  workspace.size = places.size();
  return workspace;
}

Window Window::of(const LayerConfig& config, std::int64_t tokens, const schedule::CounterMap* map, bool staged) {
  const auto element = size_of(config.dtype), accumulator = size_of(config.accumulator_dtype());
  const std::int64_t routes = tokens * config.top_k;
  const bool peers = map != nullptr;
  Geometry widths;
  widths.config = config;
  Places places;
  Window window;
  window.rows = places.add_if(!peers || staged, element * tokens * config.hidden_size);
  window.dy_rows = places.add_if(peers && staged, element * tokens * config.hidden_size);
  window.route_rows = places.add(element * routes * config.hidden_size);
  window.route_dprob = places.add(accumulator * routes * widths.dprob_groups(config.intermediate_size));
  for (auto& table : window.table) {
    static_assert(routing::RankTable::header_length <= 8);
    table.header = places.add(8 * 8);
    table.offsets = places.add(8 * (std::uint64_t(config.num_experts) + 1));
    table.counts = places.add(8 * std::uint64_t(config.num_experts));
    table.routes = places.add(4 * routes);
    table.topk_ids = places.add_if(!peers, 4 * routes);
    table.topk_weights = places.add(accumulator * routes);
  }
  window.arrivals = places.add_if(peers, peers ? 8 * std::uint64_t(map->arrivals_size) : 0);
  window.flags = places.add_if(peers, peers ? 8 * std::uint64_t(map->flags_size) : 0);
  window.state = places.add_if(peers, 16);
  window.size = places.size();
  return window;
}

std::uint64_t layout_number(const std::vector<Window>& windows, const schedule::CounterMap& map) {
  Fingerprint f;
  for (const Window& w : windows) {
    f.add(w.rows).add(w.dy_rows).add(w.route_rows).add(w.route_dprob).add(w.size);
    for (const auto& t : w.table) {
      f.add(t.header).add(t.offsets).add(t.counts).add(t.routes).add(t.topk_ids).add(t.topk_weights);
    }
  }
  return f.add(map.arrivals_size).add(map.flags_size).value() | 1;
}

}  // namespace moelith::layer
