#include "layer/arguments.hpp"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "layer/bound_experts.hpp"

namespace moelith::layer {
namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& got, const std::string& accepted) {
  throw Error(Status::invalid_argument, name + ": got " + got + ", accepted is " + accepted);
}

std::string list_of(std::initializer_list<DataType> types) {
  std::string text;
  // Two that are the same for this layer count once.
  for (auto type = types.begin(); type != types.end(); ++type) {
    if (std::find(types.begin(), type, *type) == type) {
      text += (text.empty() ? "" : " or ") + std::string(to_string(*type));
    }
  }
  return text;
}

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  std::string text = "[";
  for (std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

// Shape, dtype, memory and alignment. rows_may_be_strided: a 2-d tensor whose rows are contiguous, at any distance.
void check(const TensorView& view, const std::string& name, std::initializer_list<DataType> types,
           std::initializer_list<std::int64_t> shape, bool rows_may_be_strided = false) {
  bool type_fits = false;
  for (DataType type : types) type_fits |= view.dtype == type;
  bool shape_fits = view.rank == static_cast<int>(shape.size());
  if (shape_fits) {
    int i = 0;
    for (std::int64_t extent : shape) shape_fits &= view.shape[i++] == extent;
  }
  const auto accepted = [&] { return list_of(types) + shape_text(shape); };  // text only where something is wrong
  if (!view.given()) refuse(name, "nothing", accepted());
  if (!type_fits || !shape_fits) refuse(name, describe(view), accepted());
  if (view.numel() == 0) return;
  if (rows_may_be_strided) {
    const bool fits = (view.shape[1] <= 1 || view.stride[1] == 1) && (view.shape[0] <= 1 || view.stride[0] >= view.shape[1]);
    if (!fits) refuse(name, describe(view), accepted() + " with contiguous rows at a distance of at least their length");
  } else if (!view.contiguous()) {
    refuse(name, describe(view), accepted() + ", contiguous");
  }
  if (!view.data) refuse(name, "a null pointer", "memory of " + accepted());
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
    refuse(name, "memory that is not aligned to its elements", "an address divisible by " + std::to_string(size_of(view.dtype)));
  }
}

void must_be_absent(const TensorView& view, const std::string& name, const std::string& why) {
  if (view.given()) refuse(name, describe(view), "nothing, since " + why);
}

struct WeightShapes {
  const LayerConfig& config;
  std::int32_t local_experts;

  // Calls f(name, shape as a list with the expert dimension or without, tensor, whether the config has it, its bound
  // pointers or null) for all weights, which come in the same order of any set.
  template <class Set, class F>
  void for_each(Set& set, const std::string& prefix, F f) const {
    const std::int64_t h = config.hidden_size, i = config.intermediate_size, l = local_experts;
    auto bound = [&](PointerList list) {
      return bound_list(set.bound, list) ? &(set.bound->pointers().*list) : nullptr;
    };
    constexpr const std::vector<void*>* none = nullptr;
    f(prefix + "gate_up_proj", {l, config.gate_up_rows(i), h}, set.gate_up_proj, true, bound(&ExpertPointers::gate_up_proj));
    f(prefix + "gate_up_bias", {l, config.gate_up_rows(i)}, set.gate_up_bias, config.gate_up_bias, bound(&ExpertPointers::gate_up_bias));
    f(prefix + "down_proj", {l, h, i}, set.down_proj, true, bound(&ExpertPointers::down_proj));
    f(prefix + "down_bias", {l, h}, set.down_bias, config.down_bias, bound(&ExpertPointers::down_bias));
    for (std::size_t s = 0; s < set.shared.size(); ++s) {
      const std::string name = prefix + "shared." + std::to_string(s) + ".";
      const std::int64_t w = config.shared_experts[s].intermediate_size;
      auto& shared = set.shared[s];
      f(name + "gate_up_proj", {config.gate_up_rows(w), h}, shared.gate_up_proj, true, none);
      f(name + "gate_up_bias", {config.gate_up_rows(w)}, shared.gate_up_bias, config.gate_up_bias, none);
      f(name + "down_proj", {h, w}, shared.down_proj, true, none);
      f(name + "down_bias", {h}, shared.down_bias, config.down_bias, none);
    }
  }
};

// Where a weight of the experts or its gradient lies: stacked, or each expert's by itself.
struct Place {
  const TensorView* stacked;
  const std::vector<void*>* apart;

  const void* of(std::int64_t e, std::int64_t experts) const {
    if (apart) return (*apart)[static_cast<std::size_t>(e)];
    if (!stacked->data) return nullptr;
    return static_cast<const std::byte*>(stacked->data) + stacked->numel() / experts * e * static_cast<std::int64_t>(size_of(stacked->dtype));
  }
};

}  // namespace

const char* to_string(RouteSource source) {
  switch (source) {
    case RouteSource::logits: return "router_logits";
    case RouteSource::caller: return "topk_ids";
    case RouteSource::dense: break;
  }
  return "neither router_logits nor topk_ids";
}

CallFacts check_inputs(const LayerConfig& config, std::int32_t local_experts, std::int64_t max_tokens, const Inputs& inputs) {
  CallFacts facts;
  const DataType type = config.dtype, accumulator = config.accumulator_dtype();
  if (inputs.x.rank != 2) {
    refuse("x", inputs.x.given() ? describe(inputs.x) : "nothing",
           std::string(to_string(type)) + "[tokens, " + std::to_string(config.hidden_size) + "]");
  }
  const std::int64_t tokens = facts.tokens = inputs.x.shape[0];
  check(inputs.x, "x", {type}, {tokens, config.hidden_size}, true);
  if (tokens > max_tokens) refuse("x", std::to_string(tokens) + " tokens", "at most max_tokens = " + std::to_string(max_tokens));

  if (inputs.router_logits.given()) {
    facts.routes = RouteSource::logits;
    const std::string why = "router_logits are given";
    must_be_absent(inputs.topk_ids, "topk_ids", why);
    must_be_absent(inputs.topk_weights, "topk_weights", why);
    check(inputs.router_logits, "router_logits", {type, accumulator}, {tokens, config.num_experts}, true);
    if (config.router.selection_bias) {
      check(inputs.selection_bias, "selection_bias", {accumulator}, {config.num_experts});
    } else {
      must_be_absent(inputs.selection_bias, "selection_bias", "the config has no selection_bias");
    }
  } else if (inputs.topk_ids.given() || inputs.topk_weights.given()) {
    facts.routes = RouteSource::caller;
    check(inputs.topk_ids, "topk_ids", {DataType::int32, DataType::int64}, {tokens, config.top_k});
    check(inputs.topk_weights, "topk_weights", {accumulator}, {tokens, config.top_k});
    must_be_absent(inputs.selection_bias, "selection_bias", "topk_ids are given");
  } else if (config.num_experts == 1 && config.top_k == 1) {
    facts.routes = RouteSource::dense;
    must_be_absent(inputs.selection_bias, "selection_bias", "there are no router_logits");
  } else {
    refuse("router_logits, topk_ids", "neither",
           "one of them (only a layer of one expert, a dense MLP, needs none)");
  }

  bool gated = false;
  for (const auto& shared : config.shared_experts) gated |= shared.gated;
  const auto shared_count = static_cast<std::int64_t>(config.shared_experts.size());
  if (gated) {
    check(inputs.shared_gate_logits, "shared_gate_logits", {type, accumulator}, {tokens, shared_count});
  } else {
    must_be_absent(inputs.shared_gate_logits, "shared_gate_logits", "no shared expert is gated");
  }
  if (inputs.num_valid_tokens.given()) check(inputs.num_valid_tokens, "num_valid_tokens", {DataType::int32}, {1});
  if (inputs.num_sequences < 1 || tokens % inputs.num_sequences != 0) {
    refuse("num_sequences", std::to_string(inputs.num_sequences), "a divisor of the " + std::to_string(tokens) + " tokens");
  }

  if (inputs.weights.shared.size() != config.shared_experts.size()) {
    refuse("weights.shared", std::to_string(inputs.weights.shared.size()) + " entries",
           "one for each of the config's " + std::to_string(config.shared_experts.size()) + " shared experts");
  }
  WeightShapes{config, local_experts}.for_each(
      inputs.weights, "",
      [&](const std::string& name, std::initializer_list<std::int64_t> shape, const TensorView& view, bool exists,
          const std::vector<void*>* bound) {
        if (bound) {
          must_be_absent(view, name, "weights.bound has it");
          if (inputs.weights.bound->pointers().dtype != type) {
            refuse(name, to_string(inputs.weights.bound->pointers().dtype), std::string(to_string(type)) + ", the config's dtype");
          }
        } else if (exists) {
          check(view, name, {type}, shape);
        } else {
          must_be_absent(view, name, "the config has no such bias");
        }
      });
  return facts;
}

void check_outputs(const LayerConfig& config, const CallFacts& facts, const Outputs& outputs) {
  const DataType accumulator = config.accumulator_dtype();
  check(outputs.y, "y", {config.dtype}, {facts.tokens, config.hidden_size}, true);
  if (outputs.topk_ids.given()) check(outputs.topk_ids, "topk_ids (output)", {DataType::int32}, {facts.tokens, config.top_k});
  if (outputs.topk_weights.given()) {
    check(outputs.topk_weights, "topk_weights (output)", {accumulator}, {facts.tokens, config.top_k});
  }
  if (outputs.expert_counts.given()) check(outputs.expert_counts, "expert_counts", {DataType::int64}, {config.num_experts});
  if (outputs.aux_loss.given()) check(outputs.aux_loss, "aux_loss", {accumulator}, {1});
  if (outputs.z_loss.given()) check(outputs.z_loss, "z_loss", {accumulator}, {1});
}

void check_gradients(const LayerConfig& config, std::int32_t local_experts, const CallFacts& facts, const Inputs& inputs,
                     const OutputGradients& output_gradients, const InputGradients& input_gradients) {
  const DataType type = config.dtype, accumulator = config.accumulator_dtype();
  const auto& out = output_gradients;
  if (out.y.given()) check(out.y, "gradient of y", {type}, {facts.tokens, config.hidden_size}, true);
  if (out.topk_weights.given()) {
    check(out.topk_weights, "gradient of topk_weights", {accumulator}, {facts.tokens, config.top_k});
  }
  if (out.aux_loss.given()) check(out.aux_loss, "gradient of aux_loss", {accumulator}, {1});
  if (out.z_loss.given()) check(out.z_loss, "gradient of z_loss", {accumulator}, {1});
  if (!out.y.given() && !out.topk_weights.given() && !out.aux_loss.given() && !out.z_loss.given()) {
    refuse("output gradients", "none", "at least one of y, topk_weights, aux_loss, z_loss");
  }

  const auto& in = input_gradients;
  if (in.x.given()) check(in.x, "dx", {type}, {facts.tokens, config.hidden_size}, true);
  if (in.router_logits.given()) {
    if (facts.routes != RouteSource::logits) refuse("d_router_logits", "a tensor", "nothing, since there are no router_logits");
    check(in.router_logits, "d_router_logits", {inputs.router_logits.dtype}, {facts.tokens, config.num_experts}, true);
  }
  if (in.topk_weights.given()) {
    if (facts.routes != RouteSource::caller) refuse("d_topk_weights", "a tensor", "nothing, since topk_weights are no input");
    check(in.topk_weights, "d_topk_weights", {accumulator}, {facts.tokens, config.top_k});
  }
  if (in.shared_gate_logits.given()) {
    if (!inputs.shared_gate_logits.given()) refuse("d_shared_gate_logits", "a tensor", "nothing, since no shared expert is gated");
    check(in.shared_gate_logits, "d_shared_gate_logits", {inputs.shared_gate_logits.dtype},
          {facts.tokens, static_cast<std::int64_t>(config.shared_experts.size())});
  }
  if (!in.weights.shared.empty() && in.weights.shared.size() != config.shared_experts.size()) {
    refuse("weight gradients of shared experts", std::to_string(in.weights.shared.size()) + " entries",
           "none or " + std::to_string(config.shared_experts.size()));
  }
  const WeightShapes shapes{config, local_experts};
  std::vector<Place> weights;
  weights.reserve(4 + 4 * config.shared_experts.size());
  shapes.for_each(inputs.weights, "", [&](const auto&, std::initializer_list<std::int64_t>, const TensorView& weight, bool,
                                           const std::vector<void*>* bound) {
    weights.push_back({&weight, bound});
  });
  auto weight = weights.begin();
  const std::int64_t experts = std::max(1, local_experts);
  shapes.for_each(
      in.weights, "d_",
      [&](const std::string& name, std::initializer_list<std::int64_t> shape, const Gradient& gradient, bool exists,
          const std::vector<void*>* bound) {
        const Place own_weight = *weight++, place{&gradient.tensor, bound};
        for (std::int64_t e = 0; e < experts && (bound || gradient.tensor.data); ++e) {
          if (place.of(e, experts) == own_weight.of(e, experts)) {
            refuse(name, "the memory of the weight itself", "memory of its own");
          }
        }
        if (bound) {
          must_be_absent(gradient.tensor, name, "weights.bound has it");
          const DataType given = in.weights.bound->pointers().dtype;
          if (gradient.accumulate && given != accumulator) {
            refuse(name + " (accumulated)", to_string(given), to_string(accumulator));
          }
        }
        if (!gradient.tensor.given()) return;
        if (!exists) refuse(name, "a tensor", "nothing, since the config has no such bias");
        if (gradient.accumulate) {
          check(gradient.tensor, name + " (accumulated)", {accumulator}, shape);
        } else {
          check(gradient.tensor, name, {type, accumulator}, shape);
        }
      });
}

void check_pointers(const LayerConfig& config, std::int32_t local_experts, const ExpertPointers& pointers) {
  const DataType type = pointers.dtype;
  if (type != config.dtype && type != config.accumulator_dtype()) {
    refuse("dtype of the pointers", to_string(type), list_of({config.dtype, config.accumulator_dtype()}));
  }
  bool any = false;
  auto check_list = [&](const std::vector<void*>& list, const char* name, bool exists) {
    if (list.empty()) return;
    any = true;
    if (!exists) refuse(name, std::to_string(list.size()) + " pointers", "none, since the config has no such bias");
    if (list.size() != static_cast<std::size_t>(local_experts)) {
      refuse(name, std::to_string(list.size()) + " pointers", std::to_string(local_experts) + ", one for each local expert, or none");
    }
    for (std::size_t e = 0; e < list.size(); ++e) {
      const std::string one = std::string(name) + "[" + std::to_string(e) + "]";
      if (!list[e]) refuse(one, "a null pointer", std::string("memory of ") + to_string(type));
      if (reinterpret_cast<std::uintptr_t>(list[e]) % size_of(type) != 0) {
        refuse(one, "memory that is not aligned to its elements", "an address divisible by " + std::to_string(size_of(type)));
      }
    }
  };
  check_list(pointers.gate_up_proj, "gate_up_proj", true);
  check_list(pointers.gate_up_bias, "gate_up_bias", config.gate_up_bias);
  check_list(pointers.down_proj, "down_proj", true);
  check_list(pointers.down_bias, "down_bias", config.down_bias);
  if (!any && local_experts > 0) refuse("pointers", "no list", "at least one list of pointers");
}

void check_bound(const BoundExperts* bound, const Plan::Impl* plan, const char* name) {
  if (bound && bound->plan() != plan) refuse(name, "tensors that another plan has bound", "those of this plan's bind()");
}

void check_buffer(const void* buffer, std::uint64_t size, const char* name) {
  if (size == 0) return;
  if (!buffer) refuse(name, "a null pointer", std::to_string(size) + " bytes");
  if (reinterpret_cast<std::uintptr_t>(buffer) % 256 != 0) refuse(name, "memory that is not aligned", "an address divisible by 256");
}

}  // namespace moelith::layer
