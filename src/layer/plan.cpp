#include "layer/plan.hpp"

#include <algorithm>
#include <string>

#include "layer/bound_experts.hpp"

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
  if (options.workers < 0 || options.workers > 1024) refuse("workers", std::to_string(options.workers), "0 (all) to 1024");
  if (options.tile_columns != 0 && (options.tile_columns < 64 || options.tile_columns > 1024 || options.tile_columns % 64 != 0)) {
    refuse("tile_columns", std::to_string(options.tile_columns), "0 (chosen by the plan), or a multiple of 64 up to 1024");
  }
  const int ranks = options.group.size();
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

// All that must agree between ranks, in one number (FNV-1a).
class Fingerprint {
 public:
  template <class T>
  Fingerprint& add(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (std::size_t i = 0; i < sizeof value; ++i) hash_ = (hash_ ^ bytes[i]) * 1099511628211ull;
    return *this;
  }
  std::int64_t value() const { return static_cast<std::int64_t>(hash_); }

 private:
  std::uint64_t hash_ = 14695981039346656037ull;
};

std::int64_t fingerprint(const LayerConfig& c, const PlanOptions& o, const std::vector<std::int32_t>& expert_rank) {
  Fingerprint f;
  f.add(c.hidden_size).add(c.intermediate_size).add(c.num_experts).add(c.top_k).add(c.dtype);
  f.add(c.activation.kind).add(c.activation.limit).add(c.activation.alpha).add(c.activation.up_offset);
  f.add(c.gate_up_bias).add(c.down_bias).add(c.weight_placement);
  for (const auto& s : c.shared_experts) f.add(s.intermediate_size).add(s.gated);
  const auto& r = c.router;
  f.add(r.kind).add(r.renormalize).add(r.scaling_factor).add(r.selection_bias).add(r.num_groups).add(r.top_groups);
  f.add(r.group_score_size).add(r.aux_loss).add(r.aux_loss_coefficient).add(r.z_loss_coefficient);
  f.add(r.capacity_factor).add(r.drop_policy);
  f.add(o.device).add(o.recompute).add(o.tile_columns);
  for (std::int32_t rank : expert_rank) f.add(rank);
  return f.value();
}

}  // namespace

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
  schedule::Sizes& s = g.sizes;
  s.ranks = g.ranks;
  s.rank = options.group.rank();
  s.local_experts = g.local_experts;
  s.shared_experts = static_cast<std::int32_t>(config.shared_experts.size());
  s.top_k = config.top_k;
  s.hidden_size = config.hidden_size;
  s.intermediate_size = config.intermediate_size;
  for (std::size_t i = 0; i < config.shared_experts.size(); ++i) {
    s.shared_intermediate_size[i] = config.shared_experts[i].intermediate_size;
  }
  s.gate_up_factor = config.activation.gated() ? 2 : 1;
  s.tokens = tokens;
  s.tile = tile;
  s.max_chunks = g.max_chunks = schedule::ceil_div(most, s.chunk_tokens);
  s.max_row_blocks = g.rows() / tile.row_block + g.local_experts;
  s.recompute = options.recompute;
  return g;
}

Plan Plan::create(const LayerConfig& config, const PlanOptions& options) {
  validate(config, options);
  auto impl = std::make_shared<Impl>();
  impl->config = config;
  impl->options = options;
  const int ranks = options.group.size(), rank = options.group.rank();
  impl->expert_rank = options.expert_rank;
  if (impl->expert_rank.empty()) {
    for (int r = 0; r < ranks; ++r) {
      const std::int32_t share = config.num_experts / ranks + (r < config.num_experts % ranks ? 1 : 0);
      impl->expert_rank.insert(impl->expert_rank.end(), share, r);
    }
  }
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    if (impl->expert_rank[e] == rank) impl->local_experts.push_back(e);
  }
  auto& transport = impl->transport();
  transport.require_usable();
  impl->max_tokens_of_rank = transport.all_gather(options.max_tokens);
  const auto prints = transport.all_gather(fingerprint(config, options, impl->expert_rank));
  for (int r = 0; r < ranks; ++r) {
    if (prints[r] != prints[0]) {
      throw Error(Status::invalid_argument, "config: rank " + std::to_string(r) + " has another config, device or expert_rank than rank 0");
    }
  }
  switch (options.device) {
    case DeviceKind::cpu: impl->device = layer::make_cpu_layer(*impl); break;
    case DeviceKind::cuda:
#if defined(MOELITH_WITH_CUDA)
      impl->device = layer::make_cuda_layer(*impl);
      break;
#else
      throw Error(Status::unsupported, "device cuda: this build of moelith runs on the CPU only");
#endif
  }
  return Plan(impl);
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

std::shared_ptr<const BoundExperts> Plan::bind(const ExpertPointers& pointers) const {
  layer::check_pointers(impl_->config, num_local_experts(), pointers);
  return std::make_shared<BoundExperts>(impl_, pointers, impl_->device->bind(pointers));
}

void Plan::forward(const Inputs& inputs, const Outputs& outputs, void* saved, void* workspace, void* stream) const {
  const auto facts = layer::check_inputs(impl_->config, num_local_experts(), impl_->options.max_tokens, inputs);
  layer::check_bound(inputs.weights.bound.get(), impl_.get(), "weights.bound");
  layer::check_outputs(impl_->config, facts, outputs);
  const BufferSizes sizes = impl_->device->buffer_sizes(facts.tokens);
  if (saved) layer::check_buffer(saved, sizes.saved, "saved");
  layer::check_buffer(workspace, sizes.workspace, "workspace");
  impl_->transport().require_usable();
  impl_->device->forward(facts, inputs, outputs, saved, workspace, stream);
}

void Plan::backward(const Inputs& inputs, const void* saved, const OutputGradients& output_gradients,
                    const InputGradients& input_gradients, void* workspace, void* stream) const {
  const auto facts = layer::check_inputs(impl_->config, num_local_experts(), impl_->options.max_tokens, inputs);
  layer::check_bound(inputs.weights.bound.get(), impl_.get(), "weights.bound");
  layer::check_bound(input_gradients.weights.bound.get(), impl_.get(), "d_weights.bound");
  layer::check_gradients(impl_->config, num_local_experts(), facts, inputs, output_gradients, input_gradients);
  const BufferSizes sizes = impl_->device->buffer_sizes(facts.tokens);
  layer::check_buffer(saved, sizes.saved, "saved");
  layer::check_buffer(workspace, sizes.workspace, "workspace");
  impl_->transport().require_usable();
  impl_->device->backward(facts, inputs, saved, output_gradients, input_gradients, workspace, stream);
}

}  // namespace moelith
