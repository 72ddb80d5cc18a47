// The layer on CPU threads: routing, then one pass of tiles; backward the other way round.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <type_traits>

#include "executors/cpu/choose_tiles.hpp"
#include "executors/cpu/pass_data.hpp"
#include "executors/cpu/run_pass.hpp"
#include "executors/cpu/thread_pool.hpp"
#include "layer/bound_experts.hpp"
#include "layer/fingerprint.hpp"
#include "layer/plan.hpp"
#include "numerics/elementary.hpp"
#include "routing/caller_routes.hpp"
#include "routing/capacity.hpp"
#include "routing/router.hpp"
#include "routing/token_order.hpp"
#include "schedule/dependencies.hpp"

namespace moelith::layer {
namespace {

using executors::cpu::PassData;
using executors::cpu::ThreadPool;
using schedule::Direction;

// A place in a buffer, or null where it is absent.
template <class U>
U* at(void* base, std::uint64_t offset) {
  return offset == absent ? nullptr : reinterpret_cast<U*>(static_cast<std::byte*>(base) + offset);
}
template <class U>
U* data_of(const TensorView& view) {
  return view.given() ? static_cast<U*>(view.data) : nullptr;
}
// Element i of a tensor of one of the floating dtypes.
template <class T>
T element(const TensorView& view, std::int64_t i) {
  switch (view.dtype) {
    case DataType::bfloat16: return T(numerics::load(static_cast<const numerics::bfloat16*>(view.data)[i]));
    case DataType::float64: return T(static_cast<const double*>(view.data)[i]);
    default: return T(static_cast<const float*>(view.data)[i]);
  }
}

// In the stamp of a saved buffer that is complete: "MOELITH1" as a number.
constexpr std::uint64_t stamp_filled = 0x4d4f454c49544831;

template <class Storage>
class CpuLayer final : public DeviceLayer {
  using T = numerics::accumulator_t<Storage>;

 public:
  explicit CpuLayer(const Plan::Impl& plan)
      : plan_(plan), config_(plan.config), activation_(plan.config.activation), shared_count_(plan.config.shared_experts.size()) {
    const int share = share_of_processors();  // collective, whatever this rank's number is
    workers_ = plan.options.workers > 0 ? plan.options.workers : share;
    executors::cpu::instruction_set();  // a wrong choice is refused here and not by a worker
    tile_ = choose_tiles();
    saved_mark_ = Fingerprint().add(plan.saved_mark).add(tile_.row_block).value();  // row blocks lie in the buffer too
    router_ = routing::RouterSpec{config_.router, config_.num_experts, config_.top_k};
    if (plan.options.group.size() > 1) {
      std::int64_t most = 0;
      for (std::int64_t tokens : plan.max_tokens_of_rank) {
        most = std::max(most, tokens);
        windows_.push_back(Window::of(config_, tokens));
      }
      const auto map = schedule::CounterMap::of(plan.geometry(plan.options.max_tokens, tile_).sizes);
      plan.transport().reserve(Window::of(config_, most).size, map.arrivals_size, map.flags_size);
      window_layout_ = layout_number(windows_, map);
    }
  }

  BufferSizes buffer_sizes(std::int64_t tokens) const override {
    const Geometry geometry = plan_.geometry(tokens, tile_);
    const std::uint64_t scratch = router_scratch_bytes(tokens);
    const SavedBuffer saved = SavedBuffer::of(geometry, true);
    return {saved.size,
            std::max(ForwardWorkspace::of(geometry, scratch).size, BackwardWorkspace::of(geometry, scratch).size),
            saved.formula};
  }

  std::vector<TileSpan> timeline() const override {
    const std::lock_guard lock(timeline_mutex_);
    return timeline_;
  }

  void forward(const CallFacts& facts, const Inputs& inputs, const Outputs& outputs, void* saved, void* workspace,
               void*) const override {
    const Geometry geometry = plan_.geometry(facts.tokens, tile_);
    const SavedBuffer kept = SavedBuffer::of(geometry, saved != nullptr);
    const auto scratch = ForwardWorkspace::of(geometry, router_scratch_bytes(facts.tokens));
    const bool saves = saved != nullptr;
    if (!saves) saved = at<std::byte>(workspace, scratch.tables);
    auto pool = ThreadPool::acquire(workers_);
    auto& transport = plan_.transport();
    const std::int64_t valid = valid_tokens(inputs, facts.tokens);
    const bool several = geometry.ranks > 1;
    auto& stamp = *at<SavedBuffer::Stamp>(saved, kept.stamp);

    // Routing of this rank's tokens.
    auto* ids = at<std::int32_t>(saved, kept.topk_ids);
    auto* weights = at<T>(saved, kept.topk_weights);
    auto* counts = at<std::int64_t>(saved, kept.counts);
    auto* score_sums = at<T>(workspace, scratch.score_sums);
    route(facts, inputs, outputs, valid, ids, weights, at<std::int32_t>(saved, kept.chosen_ids), counts, score_sums,
          at<std::byte>(workspace, scratch.router_scratch), *pool);
    counts[config_.num_experts] = valid;
    stamp = {};

    PassData<Storage> data = pass_data(geometry, inputs, Direction::forward, saved, kept, at<T>(workspace, scratch.shared_gates));
    data.out = data_of<Storage>(outputs.y);
    data.out_stride = outputs.y.stride[0];
    place(data, geometry, workspace, scratch.activated, scratch.shared_activated, saved, kept.pre_activation,
          kept.shared_pre_activation);
    *data.pass.layout.valid_tokens = valid;
    auto* offsets = at<std::int64_t>(workspace, scratch.offsets);
    auto* sort_scratch = at<std::byte>(workspace, scratch.router_scratch);
    const auto parallel = parallel_for(*pool);
    std::uint64_t epoch = 0;
    int table = 0;
    if (!several) {
      routing::sort_routes(ids, facts.tokens, config_.top_k, config_.num_experts, offsets, data.pass.layout.row_route,
                           sort_scratch, parallel);
      data.pass.layout.tokens_of_rank[0] = facts.tokens;
      schedule::fill_layout(data.pass.sizes, data.pass.layout, config_.num_experts, plan_.expert_rank.data(),
                            [&](std::int32_t, std::int32_t e) { return offsets[e + 1] - offsets[e]; });
      for (std::int64_t row = 0; row < offsets[config_.num_experts]; ++row) {
        data.row_weight[row] = weights[data.pass.layout.row_route[row]];
      }
      data.route_rows = {at<Storage>(workspace, scratch.route_rows)};
    } else {
      transport.lay_out(window_layout_);
      epoch = transport.begin_pass();
      table = transport.begin_table();
      open_windows(data, table);
      auto& mine = data.tables[data.pass.sizes.rank];
      mine.tokens[0] = facts.tokens;
      mine.tokens[1] = valid;
      mine.tokens[2] = saves;
      std::copy_n(counts, config_.num_experts, counts_of(data.pass.sizes.rank, table));
      std::copy_n(ids, geometry.routes(), mine.topk_ids);
      std::copy_n(weights, geometry.routes(), mine.topk_weights);
      routing::sort_routes(ids, facts.tokens, config_.top_k, config_.num_experts, mine.offsets, mine.routes, sort_scratch, parallel);
      std::copy_n(mine.offsets, config_.num_experts + 1, offsets);
      const auto map = schedule::CounterMap::of(data.pass.sizes);
      for (std::int32_t r = 0; r < geometry.ranks; ++r) {
        if (r == data.pass.sizes.rank) continue;
        std::atomic_ref(transport.flags(r)[map.table_ready + data.pass.sizes.rank]).store(epoch, std::memory_order_release);
      }
      data.received_x = at<Storage>(saved, kept.received_x);
      data.needed = at<std::uint8_t>(saved, kept.needed);
    }
    for (std::size_t s = 0; s < shared_count_; ++s) data.shared_rows.push_back(at<Storage>(workspace, scratch.shared_rows[s]));

    run(data, {at<std::uint64_t>(workspace, scratch.local_counters), several ? nullptr : at<std::uint64_t>(workspace, scratch.arrivals)},
        epoch, *pool);
    if (several) require_same_saving(data, saves);

    if (outputs.topk_ids.given()) std::copy_n(ids, geometry.routes(), data_of<std::int32_t>(outputs.topk_ids));
    if (outputs.topk_weights.given()) std::copy_n(weights, geometry.routes(), data_of<T>(outputs.topk_weights));
    if (auto* out = data_of<std::int64_t>(outputs.expert_counts)) {
      for (std::int32_t e = 0; e < config_.num_experts; ++e) out[e] = offsets[e + 1] - offsets[e];
    }
    if (facts.routes == RouteSource::logits && config_.router.aux_loss == AuxLossKind::global) {
      if (several) {  // every rank's table is there, since the pass has seen them
        std::fill_n(counts, config_.num_experts + 1, 0);
        for (std::int32_t r = 0; r < geometry.ranks; ++r) {
          const std::int64_t* theirs = counts_of(r, table);
          for (std::int32_t e = 0; e < config_.num_experts; ++e) counts[e] += theirs[e];
          counts[config_.num_experts] += data.tables[r].tokens[1];
        }
      }
      if (outputs.aux_loss.given()) {
        *data_of<T>(outputs.aux_loss) = routing::aux_loss<T>(router_, counts, counts[config_.num_experts], score_sums);
      }
    }
    stamp = {saved_mark_, stamp_filled, facts.tokens, static_cast<std::int64_t>(facts.routes)};
  }

  void backward(const CallFacts& facts, const Inputs& inputs, const void* const_saved, const OutputGradients& upstream,
                const InputGradients& gradients, void* workspace, void*) const override {
    const Geometry geometry = plan_.geometry(facts.tokens, tile_);
    const SavedBuffer kept = SavedBuffer::of(geometry, true);
    const auto scratch = BackwardWorkspace::of(geometry, router_scratch_bytes(facts.tokens));
    // Only read below; the pass's pointers serve both directions and are not const.
    void* saved = const_cast<void*>(const_saved);
    check_stamp(*at<SavedBuffer::Stamp>(saved, kept.stamp), facts);
    auto pool = ThreadPool::acquire(workers_);
    auto* d_weights = at<T>(workspace, scratch.d_topk_weights);
    auto* d_gates = at<T>(workspace, scratch.d_shared_gates);

    PassData<Storage> data = pass_data(geometry, inputs, Direction::backward, saved, kept, at<T>(workspace, scratch.shared_gates));
    // Among several ranks one without a gradient of y has to take part: others' tokens went through its experts.
    if (upstream.y.given() || geometry.ranks > 1) {
      run_backward(data, geometry, saved, kept, upstream, gradients, workspace, scratch, *pool);
    } else {
      zero_gradients(gradients);
      std::fill_n(d_weights, geometry.routes(), T(0));
      std::fill_n(d_gates, geometry.tokens * std::int64_t(shared_count_), T(0));
    }

    if (upstream.topk_weights.given()) {  // what the caller made of the weights that forward gave out
      const T* extra = data_of<T>(upstream.topk_weights);
      for (std::int64_t i = 0; i < geometry.routes(); ++i) {
        if (data.topk_ids[i] >= 0) d_weights[i] += extra[i];
      }
    }
    if (gradients.topk_weights.given()) std::copy_n(d_weights, geometry.routes(), data_of<T>(gradients.topk_weights));
    if (gradients.shared_gate_logits.given()) store_gate_gradients(inputs, data, d_gates, gradients.shared_gate_logits);
    if (gradients.router_logits.given()) {
      const auto* counts = at<std::int64_t>(saved, kept.counts);
      routing::RouterGradients<T> router;
      router.topk_ids = data.topk_ids;
      router.chosen_ids = kept.chosen_ids == absent ? data.topk_ids : at<std::int32_t>(saved, kept.chosen_ids);
      router.d_topk_weights = d_weights;
      if (upstream.aux_loss.given()) router.d_aux_loss = *data_of<T>(upstream.aux_loss);
      if (upstream.z_loss.given()) router.d_z_loss = *data_of<T>(upstream.z_loss);
      router.counts = counts;
      router.count_tokens = counts[config_.num_experts];
      router.d_logits = gradients.router_logits.data;
      router.d_logits_stride = gradients.router_logits.stride[0];
      routing::router_backward(router_, router_inputs(inputs, *data.pass.layout.valid_tokens), router,
                               at<std::byte>(workspace, scratch.router_scratch), parallel_for(*pool));
    }
  }

 private:
  // Collective where there are several ranks: those that may use the same processors share them evenly.
  int share_of_processors() const {
    const std::vector<int> mine = executors::cpu::available_processors();
    const int count = static_cast<int>(mine.size());
    if (plan_.options.group.size() == 1) return count;
    Fingerprint which;
    for (const int number : mine) which.add(number);
    const auto print = static_cast<std::int64_t>(which.value());
    const auto all = plan_.transport().all_gather(print);
    return std::max(1, count / static_cast<int>(std::count(all.begin(), all.end(), print)));
  }

  schedule::TileShape choose_tiles() const {
    const bool several = plan_.options.group.size() > 1;
    std::int64_t tokens = plan_.options.max_tokens;
    if (several) tokens = std::accumulate(plan_.max_tokens_of_rank.begin(), plan_.max_tokens_of_rank.end(), std::int64_t(0));
    constexpr int workers_of_any_rank = 8;  // each rank knows its own number alone, and all have to choose alike
    return executors::cpu::choose_tiles(tokens * config_.top_k, config_.num_experts, config_.hidden_size,
                                        several ? workers_of_any_rank : workers_, plan_.options.tile_columns);
  }

  std::uint64_t router_scratch_bytes(std::int64_t tokens) const {
    return std::max({routing::router_workspace_bytes<T>(router_, tokens),
                     routing::token_order_workspace_bytes(tokens, config_.top_k, config_.num_experts),
                     routing::capacity_workspace_bytes(tokens, config_.top_k, config_.num_experts)});
  }

  // Refuses what no forward of such a layer and call has filled.
  void check_stamp(const SavedBuffer::Stamp& stamp, const CallFacts& facts) const {
    auto refuse = [](const std::string& got, const std::string& accepted) {
      throw Error(Status::invalid_argument, "saved: got " + got + ", accepted is " + accepted);
    };
    if (stamp.filled != stamp_filled) refuse("a buffer that no forward has filled", "that of a forward of this layer");
    if (stamp.mark != saved_mark_) {
      refuse("a buffer that a forward of another plan has filled",
             "that of this plan, or of one of the same rank with equal config and options");
    }
    if (stamp.tokens != facts.tokens) {
      refuse("a buffer that a forward with " + std::to_string(stamp.tokens) + " tokens has filled",
             "that of a forward with as many as x has here, " + std::to_string(facts.tokens));
    }
    if (stamp.routes != static_cast<std::int64_t>(facts.routes)) {
      refuse(std::string("a buffer of a forward that had ") + to_string(static_cast<RouteSource>(stamp.routes)),
             std::string("one of a forward that had ") + to_string(facts.routes) + ", as here");
    }
  }

  // All ranks take part in a backward, so all keep what it needs or none does. Every rank has seen every table and says the
  // same; without this the ones that save would wait in backward for the others.
  void require_same_saving(const PassData<Storage>& data, bool saves) const {
    for (std::int32_t r = 0; r < data.pass.sizes.ranks; ++r) {
      if (static_cast<bool>(data.tables[r].tokens[2]) == saves) continue;
      const std::string here = std::to_string(data.pass.sizes.rank), there = std::to_string(r);
      throw Error(Status::invalid_argument,
                  "saved: rank " + (saves ? here : there) + " saves for a backward and rank " + (saves ? there : here) +
                      " does not; accepted: a buffer on every rank of the group, or on none");
    }
  }

  std::int64_t valid_tokens(const Inputs& inputs, std::int64_t tokens) const {
    if (!inputs.num_valid_tokens.given()) return tokens;
    const std::int64_t valid = *data_of<std::int32_t>(inputs.num_valid_tokens);
    if (valid < 0 || valid > tokens) {
      throw Error(Status::invalid_argument,
                  "num_valid_tokens: got " + std::to_string(valid) + ", accepted is 0 to " + std::to_string(tokens));
    }
    return valid;
  }

  static routing::ParallelFor parallel_for(ThreadPool& pool) {
    return [&pool](std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
      const std::int64_t workers = pool.workers();
      if (workers == 1 || count <= 1) {
        if (count > 0) body(0, count);
        return;
      }
      pool.run([&](int w) {
        const std::int64_t begin = count * w / workers, end = count * (w + 1) / workers;
        if (begin < end) body(begin, end);
      });
    };
  }

  routing::RouterInputs<T> router_inputs(const Inputs& inputs, std::int64_t valid) const {
    routing::RouterInputs<T> in;
    in.logits = inputs.router_logits.data;
    in.logits_dtype = inputs.router_logits.dtype;
    in.logits_stride = inputs.router_logits.stride[0];
    in.tokens = inputs.x.shape[0];
    in.valid_tokens = valid;
    in.num_sequences = inputs.num_sequences;
    in.selection_bias = data_of<T>(inputs.selection_bias);
    return in;
  }

  void route(const CallFacts& facts, const Inputs& inputs, const Outputs& outputs, std::int64_t valid, std::int32_t* ids,
             T* weights, std::int32_t* chosen_ids, std::int64_t* counts, T* score_sums, void* scratch, ThreadPool& pool) const {
    if (facts.routes == RouteSource::logits) {
      routing::RouterOutputs<T> out;
      out.topk_ids = ids;
      out.topk_weights = weights;
      out.chosen_ids = chosen_ids;
      out.counts = counts;
      if (config_.router.aux_loss == AuxLossKind::global && outputs.aux_loss.given()) out.score_sums = score_sums;
      out.aux_loss = data_of<T>(outputs.aux_loss);
      out.z_loss = data_of<T>(outputs.z_loss);
      routing::router_forward(router_, router_inputs(inputs, valid), out, scratch, parallel_for(pool));
      return;
    }
    if (facts.routes == RouteSource::caller) {
      routing::copy_caller_routes<T>(inputs.topk_ids, inputs.topk_weights, facts.tokens, config_.top_k, config_.num_experts,
                                     valid, ids, weights);
    } else {
      for (std::int64_t t = 0; t < facts.tokens; ++t) {
        ids[t] = t < valid ? 0 : -1;
        weights[t] = t < valid ? T(1) : T(0);
      }
    }
    std::fill_n(counts, config_.num_experts, 0);
    if (config_.router.capacity_factor > 0) {
      routing::apply_capacity(
          config_.router.drop_policy,
          routing::expert_capacity(config_.router.capacity_factor, facts.tokens, config_.top_k, config_.num_experts),
          facts.tokens, config_.top_k, config_.num_experts, ids, weights, scratch, parallel_for(pool));
    }
    if (outputs.aux_loss.given()) *data_of<T>(outputs.aux_loss) = T(0);  // the losses are the router's
    if (outputs.z_loss.given()) *data_of<T>(outputs.z_loss) = T(0);
  }

  // What both directions share.
  PassData<Storage> pass_data(const Geometry& geometry, const Inputs& inputs, Direction direction, void* saved,
                              const SavedBuffer& kept, T* gates) const {
    PassData<Storage> data;
    data.pass.sizes = geometry.sizes;
    data.pass.sizes.direction = direction;
    data.pass.layout = schedule::Layout::at(at<std::int64_t>(saved, kept.layout_header), at<std::int32_t>(saved, kept.row_route),
                                            geometry.ranks, geometry.local_experts, geometry.sizes.max_rounds);
    data.activation = activation_;
    data.weight_placement = config_.weight_placement;
    data.num_experts = config_.num_experts;
    data.expert_rank = plan_.expert_rank.data();
    data.x = data_of<Storage>(inputs.x);
    data.x_stride = inputs.x.stride[0];
    data.topk_ids = at<std::int32_t>(saved, kept.topk_ids);
    data.topk_weights = at<T>(saved, kept.topk_weights);
    data.row_weight = at<T>(saved, kept.row_weight);

    const auto& weights = inputs.weights;
    const std::int64_t h = config_.hidden_size, i = config_.intermediate_size, pre = config_.gate_up_rows(i);
    data.slots.resize(geometry.local_experts + shared_count_);
    for (std::int32_t e = 0; e < geometry.local_experts; ++e) {
      auto& slot = data.slots[e];
      const auto tensor = [&](const TensorView& stacked, PointerList list, std::int64_t size) -> Storage* {
        if (void* const* apart = bound_list(weights.bound, list)) return static_cast<Storage*>(apart[e]);
        return stacked.data ? static_cast<Storage*>(stacked.data) + e * size : nullptr;
      };
      slot.gate_up_proj = tensor(weights.gate_up_proj, &ExpertPointers::gate_up_proj, pre * h);
      slot.down_proj = tensor(weights.down_proj, &ExpertPointers::down_proj, h * i);
      slot.gate_up_bias = tensor(weights.gate_up_bias, &ExpertPointers::gate_up_bias, pre);
      slot.down_bias = tensor(weights.down_bias, &ExpertPointers::down_bias, h);
    }
    for (std::size_t s = 0; s < shared_count_; ++s) {
      auto& slot = data.slots[geometry.local_experts + s];
      slot.gate_up_proj = data_of<Storage>(weights.shared[s].gate_up_proj);
      slot.down_proj = data_of<Storage>(weights.shared[s].down_proj);
      slot.gate_up_bias = data_of<Storage>(weights.shared[s].gate_up_bias);
      slot.down_bias = data_of<Storage>(weights.shared[s].down_bias);
    }
    if (inputs.shared_gate_logits.given()) {
      for (std::int64_t t = 0; t < geometry.tokens; ++t) {
        for (std::size_t s = 0; s < shared_count_; ++s) {
          const std::int64_t n = t * std::int64_t(shared_count_) + std::int64_t(s);
          gates[n] = config_.shared_experts[s].gated ? numerics::sigmoid(element<T>(inputs.shared_gate_logits, n)) : T(1);
        }
      }
      data.shared_gates = gates;
    }
    return data;
  }

  // Intermediate results of all slots: activated in one buffer, the pre-activation in another (or nowhere).
  void place(PassData<Storage>& data, const Geometry& geometry, void* workspace, std::uint64_t activated,
             const std::vector<std::uint64_t>& shared_activated, void* pre_base, std::uint64_t pre_activation,
             const std::vector<std::uint64_t>& shared_pre_activation) const {
    for (std::int32_t e = 0; e < geometry.local_experts; ++e) {
      data.slots[e].activated = at<Storage>(workspace, activated);
      data.slots[e].pre_activation = at<Storage>(pre_base, pre_activation);
    }
    for (std::size_t s = 0; s < shared_count_; ++s) {
      data.slots[geometry.local_experts + s].activated = at<Storage>(workspace, shared_activated[s]);
      data.slots[geometry.local_experts + s].pre_activation = at<Storage>(pre_base, shared_pre_activation[s]);
    }
  }

  std::int64_t* counts_of(std::int32_t rank, int table) const {
    return at<std::int64_t>(plan_.transport().memory(rank), windows_[rank].table[table].counts);
  }

  // Pointers into every rank's symmetric memory.
  void open_windows(PassData<Storage>& data, int table) const {
    auto& transport = plan_.transport();
    for (std::int32_t r = 0; r < data.pass.sizes.ranks; ++r) {
      std::byte* memory = transport.memory(r);
      const Window& window = windows_[r];
      data.windows.push_back(at<Storage>(memory, window.rows));
      data.route_rows.push_back(at<Storage>(memory, window.route_rows));
      data.route_dprob.push_back(at<T>(memory, window.route_dprob));
      const auto& t = window.table[table];
      data.tables.push_back({at<std::int64_t>(memory, t.header), at<std::int64_t>(memory, t.offsets),
                             at<std::int32_t>(memory, t.routes), at<std::int32_t>(memory, t.topk_ids),
                             at<T>(memory, t.topk_weights)});
    }
  }

  void run(const PassData<Storage>& data, const executors::cpu::PassCounters& counters, std::uint64_t epoch, ThreadPool& pool) const {
    std::vector<executors::cpu::WorkerMemory<Storage>> memory(pool.workers());
    std::vector<TileSpan> spans;
    executors::cpu::run_pass(data.pass, counters, plan_.transport(), epoch, pool, plan_.options.shuffle_seed,
                             [&](const schedule::Tile& tile, int worker) { run_tile(data, tile, memory[worker]); },
                             plan_.options.timeline ? &spans : nullptr);
    if (!plan_.options.timeline) return;
    const std::lock_guard lock(timeline_mutex_);
    timeline_ = std::move(spans);
  }

  void run_backward(PassData<Storage>& data, const Geometry& geometry, void* saved, const SavedBuffer& kept,
                    const OutputGradients& upstream, const InputGradients& gradients, void* workspace,
                    const BackwardWorkspace& scratch, ThreadPool& pool) const {
    auto& sizes = data.pass.sizes;
    const bool several = geometry.ranks > 1;
    data.dy = data_of<Storage>(upstream.y);
    data.dy_stride = upstream.y.stride[0];
    std::vector<Storage> zero_row;
    if (!upstream.y.given()) {  // counts as zero: one row of zeros stands for all
      zero_row.resize(config_.hidden_size, Storage{});
      data.dy = zero_row.data();
      data.dy_stride = 0;
    }
    data.out = data_of<Storage>(gradients.x);
    data.out_stride = gradients.x.stride[0];
    data.d_topk_weights = at<T>(workspace, scratch.d_topk_weights);
    if (data.shared_gates) data.d_shared_gates = at<T>(workspace, scratch.d_shared_gates);
    data.route_dprob_groups = geometry.dprob_groups(config_.intermediate_size);
    if (geometry.recompute) {
      place(data, geometry, workspace, scratch.activated, scratch.shared_activated, workspace, scratch.pre_activation,
            scratch.shared_pre_activation);
    } else {
      place(data, geometry, workspace, scratch.activated, scratch.shared_activated, saved, kept.pre_activation,
            kept.shared_pre_activation);
    }

    // What is wanted of each slot, and so of the pass. Ranks may differ in all but dx, which others' tiles write.
    sizes.want_dx = several || gradients.x.given();
    sizes.want_gate_up_wgrad = sizes.want_down_wgrad = sizes.want_gate_up_bias_grad = sizes.want_down_bias_grad = false;
    auto target = [](const ExpertGradient& gradient, std::int64_t e, std::int64_t size, bool& wanted) {
      typename PassData<Storage>::Slot::Target t;
      if (!gradient.wanted()) return t;
      wanted = true;
      t.data = gradient.of(e, size);
      t.dtype = gradient.dtype;
      t.accumulate = gradient.accumulate;
      return t;
    };
    const auto& w = gradients.weights;
    const std::int64_t h = config_.hidden_size;
    auto set_targets = [&](typename PassData<Storage>::Slot& slot, const auto& g, const std::shared_ptr<const BoundExperts>& bound,
                           std::int64_t e, std::int64_t width) {
      const std::int64_t pre = config_.gate_up_rows(width);
      using P = ExpertPointers;
      slot.gate_up_grad = target({g.gate_up_proj, bound, &P::gate_up_proj}, e, pre * h, sizes.want_gate_up_wgrad);
      slot.gate_up_bias_grad = target({g.gate_up_bias, bound, &P::gate_up_bias}, e, pre, sizes.want_gate_up_bias_grad);
      slot.down_grad = target({g.down_proj, bound, &P::down_proj}, e, h * width, sizes.want_down_wgrad);
      slot.down_bias_grad = target({g.down_bias, bound, &P::down_bias}, e, h, sizes.want_down_bias_grad);
    };
    for (std::int32_t e = 0; e < geometry.local_experts; ++e) {
      set_targets(data.slots[e], w, w.bound, e, config_.intermediate_size);
      data.slots[e].d_pre_activation = at<Storage>(workspace, scratch.d_pre_activation);
      data.slots[e].later_pre_activation = data.slots[e].d_pre_activation;
    }
    for (int n = 0; n < 2; ++n) {
      data.sums[n] = {at<T>(workspace, scratch.sums[n].gate_up), at<T>(workspace, scratch.sums[n].gate_up_bias),
                      at<T>(workspace, scratch.sums[n].down), at<T>(workspace, scratch.sums[n].down_bias)};
    }
    for (std::size_t s = 0; s < shared_count_; ++s) {
      auto& slot = data.slots[geometry.local_experts + s];
      if (!w.shared.empty()) {
        set_targets(slot, w.shared[s], nullptr, 0, config_.shared_experts[s].intermediate_size);
      }
      slot.d_pre_activation = at<Storage>(workspace, scratch.shared_d_pre_activation[s]);
      data.shared_rows.push_back(at<Storage>(workspace, scratch.shared_rows[s]));
      data.shared_dprob.push_back(at<T>(workspace, scratch.shared_dprob[s]));
    }
    const bool want_dz = sizes.want_dx || sizes.want_gate_up_wgrad || sizes.want_gate_up_bias_grad;
    for (auto& slot : data.slots) {
      if (!want_dz) slot.d_pre_activation = nullptr;
      if (!slot.down_grad.data) slot.activated = nullptr;
    }

    std::uint64_t epoch = 0;
    if (several) {
      plan_.transport().lay_out(window_layout_);
      epoch = plan_.transport().begin_pass();
      open_windows(data, 0);
      data.received_x = at<Storage>(saved, kept.received_x);
      data.received_dy = at<Storage>(workspace, scratch.received_dy);
      data.needed = at<std::uint8_t>(saved, kept.needed);
    } else {
      data.route_rows = {at<Storage>(workspace, scratch.route_rows)};
      data.route_dprob = {at<T>(workspace, scratch.route_dprob)};
    }
    run(data, {at<std::uint64_t>(workspace, scratch.local_counters), several ? nullptr : at<std::uint64_t>(workspace, scratch.arrivals)},
        epoch, pool);
  }

  // y has no gradient: nothing flows into x or the weights.
  void zero_gradients(const InputGradients& gradients) const {
    auto zero = [](const TensorView& view) {
      if (!view.given() || view.numel() == 0) return;
      const std::int64_t rows = view.rank == 2 ? view.shape[0] : 1;  // only 2-d tensors may have strided rows
      const std::int64_t length = view.numel() / rows;
      for (std::int64_t r = 0; r < rows; ++r) {
        std::memset(static_cast<std::byte*>(view.data) + r * view.stride[0] * std::int64_t(size_of(view.dtype)), 0,
                    length * size_of(view.dtype));
      }
    };
    auto zero_gradient = [&](const Gradient& gradient) {
      if (!gradient.accumulate) zero(gradient.tensor);
    };
    auto zero_set = [&](const auto& set) {
      zero_gradient(set.gate_up_proj);
      zero_gradient(set.gate_up_bias);
      zero_gradient(set.down_proj);
      zero_gradient(set.down_bias);
    };
    zero(gradients.x);
    zero_set(gradients.weights);
    const std::int64_t h = config_.hidden_size, i = config_.intermediate_size;
    const auto zero_apart = [&](const Gradient& gradient, PointerList list, std::int64_t size) {
      const ExpertGradient g(gradient, gradients.weights.bound, list);
      if (!g.apart || g.accumulate) return;
      for (std::int32_t e = 0; e < static_cast<std::int32_t>(plan_.local_experts.size()); ++e) {
        std::memset(g.apart[e], 0, static_cast<std::size_t>(size) * size_of(g.dtype));
      }
    };
    zero_apart(gradients.weights.gate_up_proj, &ExpertPointers::gate_up_proj, config_.gate_up_rows(i) * h);
    zero_apart(gradients.weights.gate_up_bias, &ExpertPointers::gate_up_bias, config_.gate_up_rows(i));
    zero_apart(gradients.weights.down_proj, &ExpertPointers::down_proj, h * i);
    zero_apart(gradients.weights.down_bias, &ExpertPointers::down_bias, h);
    for (const auto& shared : gradients.weights.shared) zero_set(shared);
  }

  void store_gate_gradients(const Inputs& inputs, const PassData<Storage>& data, const T* d_gates, const TensorView& out) const {
    for (std::int64_t n = 0; n < inputs.shared_gate_logits.numel(); ++n) {
      // An absent token's logits may be anything, NaN too.
      const bool there = n / std::int64_t(shared_count_) < *data.pass.layout.valid_tokens;
      const bool gated = config_.shared_experts[n % shared_count_].gated;
      const T logit = element<T>(inputs.shared_gate_logits, n);
      const T value = there && gated ? d_gates[n] * numerics::sigmoid_slope(logit) : T(0);
      if (out.dtype == DataType::bfloat16) {
        static_cast<numerics::bfloat16*>(out.data)[n] = numerics::to_bfloat16(float(value));
      } else {
        static_cast<T*>(out.data)[n] = value;
      }
    }
  }

  const Plan::Impl& plan_;
  const LayerConfig& config_;
  const numerics::Activation activation_;
  const std::size_t shared_count_;
  int workers_ = 1;
  mutable std::mutex timeline_mutex_;
  mutable std::vector<TileSpan> timeline_;  // of the last pass
  schedule::TileShape tile_;
  std::uint64_t saved_mark_ = 0;
  routing::RouterSpec router_;
  std::vector<Window> windows_;  // [R], several ranks only
  std::uint64_t window_layout_ = 0;
};

}  // namespace

std::unique_ptr<DeviceLayer> make_cpu_layer(const Plan::Impl& plan) {
  switch (plan.config.dtype) {
    case DataType::bfloat16: return std::make_unique<CpuLayer<numerics::bfloat16>>(plan);
    case DataType::float32: return std::make_unique<CpuLayer<float>>(plan);
    default: return std::make_unique<CpuLayer<double>>(plan);
  }
}

}  // namespace moelith::layer
