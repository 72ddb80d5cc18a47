#include "layer/plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "layer/bound_experts.hpp"
#include "layer/expert_placement.hpp"
#include "layer/fingerprint.hpp"
#include "layer/layer_sizes.hpp"
#include "layer/number_text.hpp"

namespace moelith {
namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& got, const std::string& accepted) {
  throw Error(Status::invalid_argument, name + ": got " + got + ", accepted is " + accepted);
}

void validate(const LayerConfig& config, const PlanOptions& options) {
  config.validate();
  const std::string experts = std::to_string(config.num_experts);
  // Route ids t * k + j are 32-bit, of one rank's tokens.
  const std::int64_t most_tokens = ((std::int64_t(1) << 31) - 1) / config.top_k;
  if (options.max_tokens < 0 || options.max_tokens > most_tokens) {
    refuse("max_tokens", std::to_string(options.max_tokens), "0 to " + std::to_string(most_tokens));
  }
  if (options.workers < 0 || options.workers > limits::workers) {
    refuse("workers", std::to_string(options.workers), "0 (all) to " + std::to_string(limits::workers));
  }
  if (options.tile_columns != 0 && (options.tile_columns < 64 || options.tile_columns > 1024 || options.tile_columns % 64 != 0)) {
    refuse("tile_columns", std::to_string(options.tile_columns), "0 (chosen by the plan), or a multiple of 64 up to 1024");
  }
  const int ranks = options.group.size();
  const double factor = options.receive_capacity_factor;
  if (!(factor >= 0)) {
    refuse("receive_capacity_factor", layer::number_text(factor),
           "0 (chosen by the plan), a number above 0, or infinity (room for every row that may come)");
  }
  if (options.expert_rank.empty()) return;
  if (options.expert_rank.size() != static_cast<std::size_t>(config.num_experts)) {
    refuse("expert_rank", std::to_string(options.expert_rank.size()) + " entries", experts + ", one for each expert");
  }
  for (std::size_t e = 0; e < options.expert_rank.size(); ++e) {
    if (options.expert_rank[e] < 0 || options.expert_rank[e] >= ranks) {
      refuse("expert_rank[" + std::to_string(e) + "]", std::to_string(options.expert_rank[e]), "0 to " + std::to_string(ranks - 1));
    }
  }
}

// What a layer computes, and who holds its experts.
layer::Fingerprint fingerprint(const LayerConfig& c, const std::vector<std::int32_t>& expert_rank) {
  layer::Fingerprint f;
  f.add(c.hidden_size).add(c.intermediate_size).add(c.num_experts).add(c.top_k).add(c.dtype);
  f.add(c.activation.kind).add(c.activation.limit).add(c.activation.alpha).add(c.activation.up_offset);
  f.add(c.gate_up_bias).add(c.down_bias).add(c.weight_placement);
  for (const auto& s : c.shared_experts) f.add(s.intermediate_size).add(s.gated);
  const auto& r = c.router;
  f.add(r.kind).add(r.renormalize).add(r.scaling_factor).add(r.selection_bias).add(r.num_groups).add(r.top_groups);
  f.add(r.group_score_size).add(r.aux_loss).add(r.aux_loss_coefficient).add(r.z_loss_coefficient);
  f.add(r.capacity_factor).add(r.drop_policy);
  for (std::int32_t rank : expert_rank) f.add(rank);
  return f;
}

// All that must agree between ranks, in one number.
std::int64_t agreement(const Plan::Impl& plan) {
  const PlanOptions& o = plan.options;
  auto f = fingerprint(plan.config, plan.expert_rank);
  return static_cast<std::int64_t>(f.add(o.device).add(o.recompute).add(o.tile_columns).value());
}

// What decides how a saved buffer is laid out and what its contents mean, in one number. With several ranks that are
// the sizes of all ranks too; one rank's plans may differ in max_tokens, as far as the device's row blocks, which it adds
// to the mark, do not depend on it.
std::uint64_t saved_mark(const Plan::Impl& plan) {
  auto f = fingerprint(plan.config, plan.expert_rank);
  f.add(plan.options.recompute).add(plan.options.group.size()).add(plan.options.group.rank());
  if (plan.options.group.size() > 1) {
    for (std::int64_t tokens : plan.max_tokens_of_rank) f.add(tokens);
    f.add(plan.receive_capacity_factor());
  }
  return f.value();
}

// A plan without its device, whose ranks agree.
std::shared_ptr<Plan::Impl> agreed_plan(const LayerConfig& config, const PlanOptions& options) {
  validate(config, options);
  auto impl = std::make_shared<Plan::Impl>();
  impl->config = config;
  impl->options = options;
  const int ranks = options.group.size(), rank = options.group.rank();
  impl->expert_rank = options.expert_rank;
  if (impl->expert_rank.empty()) impl->expert_rank = layer::contiguous_placement(config.num_experts, ranks);
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    if (impl->expert_rank[e] == rank) impl->local_experts.push_back(e);
  }
  auto& transport = impl->transport();
  transport.require_usable();
  impl->max_tokens_of_rank = transport.all_gather(options.max_tokens);
  const auto prints = transport.all_gather(agreement(*impl));
  for (int r = 0; r < ranks; ++r) {
    if (prints[r] != prints[0]) {
      throw Error(Status::invalid_argument, "config: rank " + std::to_string(r) + " has another config, device or expert_rank than rank 0");
    }
  }
  impl->saved_mark = saved_mark(*impl);
  return impl;
}

std::unique_ptr<layer::DeviceLayer> make_device(const Plan::Impl& plan) {
  if (plan.options.device == DeviceKind::cpu) return layer::make_cpu_layer(plan);
#if defined(MOELITH_WITH_CUDA)
  return layer::make_cuda_layer(plan);
#else
  throw Error(Status::unsupported, "device cuda: this build of moelith runs on the CPU only");
#endif
}

}  // namespace

double Plan::Impl::receive_capacity_factor() const {
  constexpr double all = std::numeric_limits<double>::infinity();
  if (options.group.size() == 1) return all;
  if (options.receive_capacity_factor > 0) return options.receive_capacity_factor;
  return options.device == DeviceKind::cpu ? 1.25 : all;
}

layer::Geometry Plan::Impl::geometry(std::int64_t tokens, const schedule::TileShape& tile) const {
  layer::Geometry g;
  g.config = config;
  g.ranks = options.group.size();
  g.local_experts = static_cast<std::int32_t>(local_experts.size());
  g.recompute = options.recompute;
  g.tokens = tokens;
  g.global_tokens = tokens;
  std::int64_t most = 0;  // not of this call: the ranks' flags are laid out alike
  for (int r = 0; r < g.ranks; ++r) {
    if (r != options.group.rank()) g.global_tokens += max_tokens_of_rank[r];
    most = std::max(most, max_tokens_of_rank[r]);
  }
  schedule::Sizes& s = g.sizes = layer::layer_sizes(config);
  s.ranks = g.ranks;
  s.rank = options.group.rank();
  s.peer_access = g.ranks > 1 && options.device == DeviceKind::cuda;
  s.local_experts = g.local_experts;
  s.tokens = tokens;
  s.tile = tile;
  s.max_chunks = g.max_chunks = schedule::ceil_div(most, s.chunk_tokens);
  s.max_row_blocks = g.rows() / tile.row_block + g.local_experts;
  // Not of this call either: what has room for its rows has room for those of a smaller call.
  const std::int64_t all_tokens = std::accumulate(max_tokens_of_rank.begin(), max_tokens_of_rank.end(), std::int64_t(0));
  const double balanced = double(all_tokens * config.top_k) * g.local_experts / config.num_experts;
  const double wanted = std::ceil(receive_capacity_factor() * balanced);
  std::int64_t room = g.rows();
  if (wanted < double(room)) {  // whole row blocks, and at least one
    room = schedule::ceil_div(std::int64_t(wanted), tile.row_block) * tile.row_block;
  }
  s.set_room(g.rows(), room);
  s.recompute = options.recompute;
  return g;
}

Plan Plan::create(const LayerConfig& config, const PlanOptions& options) {
  return options.group.transport()->collective([&] {
    auto impl = agreed_plan(config, options);
    impl->device = make_device(*impl);
    return Plan(impl);
  });
}

const LayerConfig& Plan::config() const { return impl_->config; }
const PlanOptions& Plan::options() const { return impl_->options; }
std::int32_t Plan::num_local_experts() const { return static_cast<std::int32_t>(impl_->local_experts.size()); }
std::vector<std::int32_t> Plan::local_experts() const { return impl_->local_experts; }

BufferSizes Plan::buffer_sizes(std::int64_t tokens) const {
  if (tokens < 0 || tokens > impl_->options.max_tokens) {
    refuse("tokens", std::to_string(tokens), "0 to max_tokens = " + std::to_string(impl_->options.max_tokens));
  }
  return impl_->device->buffer_sizes(tokens);
}

std::vector<TileSpan> Plan::timeline() const {
  if (!impl_->options.timeline) refuse("options.timeline", "false", "true, when the plan is made");
  return impl_->device->timeline();
}

std::shared_ptr<const BoundExperts> Plan::bind(const ExpertPointers& pointers) const {
  layer::check_pointers(impl_->config, num_local_experts(), pointers);
  return std::make_shared<BoundExperts>(impl_, pointers, impl_->device->bind(pointers));
}

void Plan::forward(const Inputs& inputs, const Outputs& outputs, void* saved, void* workspace, void* stream) const {
  impl_->transport().collective([&] {
    const auto facts = layer::check_inputs(impl_->config, num_local_experts(), impl_->options.max_tokens, inputs);
    layer::check_bound(inputs.weights.bound.get(), impl_.get(), "weights.bound");
    layer::check_outputs(impl_->config, facts, outputs);
    const BufferSizes sizes = impl_->device->buffer_sizes(facts.tokens);
    if (saved) layer::check_buffer(saved, sizes.saved, "saved");
    layer::check_buffer(workspace, sizes.workspace, "workspace");
    impl_->transport().require_usable();
    impl_->device->forward(facts, inputs, outputs, saved, workspace, stream);
  });
}

void Plan::backward(const Inputs& inputs, const void* saved, const OutputGradients& output_gradients,
                    const InputGradients& input_gradients, void* workspace, void* stream) const {
  impl_->transport().collective([&] {
    const auto facts = layer::check_inputs(impl_->config, num_local_experts(), impl_->options.max_tokens, inputs);
    layer::check_bound(inputs.weights.bound.get(), impl_.get(), "weights.bound");
    layer::check_bound(input_gradients.weights.bound.get(), impl_.get(), "d_weights.bound");
    layer::check_gradients(impl_->config, num_local_experts(), facts, inputs, output_gradients, input_gradients);
    const BufferSizes sizes = impl_->device->buffer_sizes(facts.tokens);
    layer::check_buffer(saved, sizes.saved, "saved");
    layer::check_buffer(workspace, sizes.workspace, "workspace");
    impl_->transport().require_usable();
    impl_->device->backward(facts, inputs, saved, output_gradients, input_gradients, workspace, stream);
  });
}

}  // namespace moelith
