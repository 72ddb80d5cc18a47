// include/moelith/moelith.h on top of the C++ interface, one to one. Structs are copied into their C++ counterparts
// before anything else happens; no exception leaves a function.
#include "moelith/moelith.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "layer/plan.hpp"
#include "moelith/config.hpp"
#include "moelith/group.hpp"
#include "moelith/layer.hpp"
#include "moelith/presets.hpp"
#include "moelith/tensor.hpp"

struct moelith_group {
  moelith::Group group;
};

struct moelith_plan {
  moelith::Plan plan;
};

struct moelith_bound_experts {
  std::shared_ptr<const moelith::BoundExperts> experts;
};

namespace moelith {
namespace {

// Numbers of the C enumerations are those of the C++ ones.
template <class E>
constexpr bool equal(int c_value, E value) {
  return c_value == static_cast<int>(value);
}
static_assert(equal(MOELITH_OK, Status::ok) && equal(MOELITH_INVALID_ARGUMENT, Status::invalid_argument) &&
              equal(MOELITH_UNSUPPORTED, Status::unsupported) && equal(MOELITH_TIMED_OUT, Status::timed_out) &&
              equal(MOELITH_DEVICE_ERROR, Status::device_error) && equal(MOELITH_INTERNAL, Status::internal) &&
              equal(MOELITH_GROUP_FAILED, Status::group_failed));
static_assert(equal(MOELITH_FLOAT64, DataType::float64) && equal(MOELITH_FLOAT32, DataType::float32) &&
              equal(MOELITH_BFLOAT16, DataType::bfloat16) && equal(MOELITH_INT64, DataType::int64) &&
              equal(MOELITH_INT32, DataType::int32) && equal(MOELITH_UINT8, DataType::uint8));
static_assert(equal(MOELITH_SWIGLU, ActivationKind::swiglu) &&
              equal(MOELITH_SWIGLU_CLAMPED, ActivationKind::swiglu_clamped) &&
              equal(MOELITH_GEGLU_ERF, ActivationKind::geglu_erf) &&
              equal(MOELITH_GEGLU_TANH, ActivationKind::geglu_tanh) &&
              equal(MOELITH_RELU_SQUARED, ActivationKind::relu_squared));
static_assert(equal(MOELITH_AFTER_DOWN, WeightPlacement::after_down) &&
              equal(MOELITH_BEFORE_DOWN, WeightPlacement::before_down));
static_assert(equal(MOELITH_SOFTMAX_TOPK, RouterKind::softmax_topk) &&
              equal(MOELITH_TOPK_SOFTMAX, RouterKind::topk_softmax) && equal(MOELITH_SIGMOID, RouterKind::sigmoid));
static_assert(equal(MOELITH_AUX_NONE, AuxLossKind::none) && equal(MOELITH_AUX_BATCH, AuxLossKind::batch) &&
              equal(MOELITH_AUX_SEQUENCE, AuxLossKind::sequence) && equal(MOELITH_AUX_GLOBAL, AuxLossKind::global));
static_assert(equal(MOELITH_DROP_BY_SCORE, DropPolicy::by_score) &&
              equal(MOELITH_DROP_BY_POSITION, DropPolicy::by_position));
static_assert(equal(MOELITH_CPU, DeviceKind::cpu) && equal(MOELITH_CUDA, DeviceKind::cuda));
static_assert(MOELITH_MAX_RANK == TensorView::max_rank && MOELITH_MAX_SHARED_EXPERTS == limits::shared_experts);

// The text of this thread's last failure. A plain array: keeping a text can neither throw nor need a destructor.
thread_local std::array<char, 2048> last_error{};

moelith_status_t fail(Status status, const char* text) {
  // Whatever happens, a failure has a text.
  std::snprintf(last_error.data(), last_error.size(), "%s", *text ? text : "no text was given for this failure");
  return static_cast<moelith_status_t>(status);
}

template <class F>
moelith_status_t guarded(F&& body) noexcept {
  try {
    body();
    return MOELITH_OK;
  } catch (const Error& error) {
    // Error(ok, ...) would be a defect of its own.
    return fail(error.status() == Status::ok ? Status::internal : error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::device_error, "out of host memory");
  } catch (const std::exception& error) { return fail(Status::internal, error.what()); } catch (...) {
    return fail(Status::internal, "an exception of unknown type");
  }
}

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, text); }

template <class T>
T& deref(T* pointer, const char* name) {
  if (pointer == nullptr) refuse(std::string(name) + " is NULL; accepted: a valid pointer");
  return *pointer;
}

// Of a struct of two versions at most: `oldest` and `newest` are their sizes. A size in between would cut a field in two.
void check_struct_size(std::size_t struct_size, std::size_t oldest, std::size_t newest, const char* name) {
  if (struct_size == oldest || struct_size == newest) return;
  refuse(std::string(name) + ".struct_size is " + std::to_string(struct_size) + "; accepted: sizeof of the struct, " +
         (oldest == newest ? std::to_string(newest) : std::to_string(oldest) + " or " + std::to_string(newest)) +
         (struct_size > newest ? " (the caller's header may be newer than this library)" : ""));
}

template <class T>
constexpr std::size_t oldest_size = sizeof(T);  // of a struct that has not grown
// It ended with expert_rank_count, and what fills up to the alignment of pointers.
template <>
constexpr std::size_t oldest_size<moelith_plan_options_t> = offsetof(moelith_plan_options_t, receive_capacity_factor);
// These ended before `bound`.
template <>
constexpr std::size_t oldest_size<moelith_inputs_t> = offsetof(moelith_inputs_t, bound);
template <>
constexpr std::size_t oldest_size<moelith_input_gradients_t> = offsetof(moelith_input_gradients_t, bound);

// Copies what the caller's version of a struct has into a zeroed struct of this version.
template <class T>
T copy_of(const T* given, const char* name) {
  constexpr std::size_t oldest = oldest_size<T>;
  const std::size_t struct_size = deref(given, name).struct_size;
  check_struct_size(struct_size, oldest, sizeof(T), name);
  T copy{};
  std::memcpy(&copy, given, struct_size);
  return copy;
}

// Writes what the caller's version of a struct has room for.
template <class T>
void copy_out(T value, T* target, std::size_t struct_size) {
  value.struct_size = struct_size;
  std::memcpy(target, &value, struct_size);
}

const char* to_string(DeviceKind kind) { return kind == DeviceKind::cpu ? "cpu" : "cuda"; }

// An enumerator from its number; `last` is the enumeration's last one. The C++ side has one byte for it, so a number
// out of range must not get that far.
template <class E>
E enumerator(std::int32_t value, E last, const std::string& field) {
  if (value >= 0 && value <= static_cast<std::int32_t>(last)) return static_cast<E>(value);
  std::string names;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    names += (i > 0 ? ", " : "") + std::to_string(i) + " (" + to_string(static_cast<E>(i)) + ")";
  }
  refuse(field + " is " + std::to_string(value) + "; accepted: " + names);
}

// Names such as "weights.shared.1.down_proj", for error texts.
std::string shared_name(const char* prefix, std::int32_t index) {
  return std::string(prefix) + "shared." + std::to_string(index) + ".";
}

TensorView view_of(const moelith_tensor_t& tensor, const std::string& name) {
  TensorView view;
  if (tensor.rank == 0) return view;
  if (tensor.rank < 0 || tensor.rank > TensorView::max_rank) {
    refuse(name + ".rank is " + std::to_string(tensor.rank) + "; accepted: 0 to " +
           std::to_string(TensorView::max_rank));
  }
  view.data = tensor.data;
  view.dtype = enumerator(tensor.dtype, DataType::uint8, name + ".dtype");
  view.rank = tensor.rank;
  for (int d = 0; d < tensor.rank; ++d) {
    const std::size_t at = static_cast<std::size_t>(d);
    if (tensor.shape[d] < 0) {
      refuse(name + ".shape[" + std::to_string(d) + "] is " + std::to_string(tensor.shape[d]) +
             "; accepted: 0 or more");
    }
    view.shape[at] = tensor.shape[d];
    view.stride[at] = tensor.stride[d];
  }
  return view;
}

Gradient gradient_of(const moelith_gradient_t& gradient, const std::string& name) {
  return {view_of(gradient.tensor, name), gradient.accumulate != 0};
}

// The four of a set of weights or of their gradients, whichever struct holds them.
template <class From, class To, class Convert>
void set_weights(const From& from, To& to, const std::string& prefix, Convert convert) {
  to.gate_up_proj = convert(from.gate_up_proj, prefix + "gate_up_proj");
  to.gate_up_bias = convert(from.gate_up_bias, prefix + "gate_up_bias");
  to.down_proj = convert(from.down_proj, prefix + "down_proj");
  to.down_bias = convert(from.down_bias, prefix + "down_bias");
}

LayerConfig config_of(const moelith_layer_config_t& c) {
  LayerConfig config;
  config.hidden_size = c.hidden_size;
  config.intermediate_size = c.intermediate_size;
  config.num_experts = c.num_experts;
  config.top_k = c.top_k;
  config.dtype = enumerator(c.dtype, DataType::uint8, "dtype");
  config.activation.kind = enumerator(c.activation, ActivationKind::relu_squared, "activation");
  config.activation.limit = c.activation_limit;
  config.activation.alpha = c.activation_alpha;
  config.activation.up_offset = c.activation_up_offset;
  config.gate_up_bias = c.gate_up_bias != 0;
  config.down_bias = c.down_bias != 0;
  config.weight_placement = enumerator(c.weight_placement, WeightPlacement::before_down, "weight_placement");
  if (c.num_shared_experts < 0 || c.num_shared_experts > MOELITH_MAX_SHARED_EXPERTS) {
    refuse("num_shared_experts is " + std::to_string(c.num_shared_experts) + "; accepted: 0 to " +
           std::to_string(MOELITH_MAX_SHARED_EXPERTS));
  }
  for (std::int32_t s = 0; s < c.num_shared_experts; ++s) {
    config.shared_experts.push_back({c.shared_experts[s].intermediate_size, c.shared_experts[s].gated != 0});
  }
  RouterConfig& router = config.router;
  router.kind = enumerator(c.router_kind, RouterKind::sigmoid, "router_kind");
  router.renormalize = c.renormalize != 0;
  router.scaling_factor = c.scaling_factor;
  router.selection_bias = c.selection_bias != 0;
  router.num_groups = c.num_groups;
  router.top_groups = c.top_groups;
  router.group_score_size = c.group_score_size;
  router.aux_loss = enumerator(c.aux_loss, AuxLossKind::global, "aux_loss");
  router.drop_policy = enumerator(c.drop_policy, DropPolicy::by_position, "drop_policy");
  router.aux_loss_coefficient = c.aux_loss_coefficient;
  router.z_loss_coefficient = c.z_loss_coefficient;
  router.capacity_factor = c.capacity_factor;
  return config;
}

moelith_layer_config_t c_config_of(const LayerConfig& config) {
  moelith_layer_config_t c{};
  c.hidden_size = config.hidden_size;
  c.intermediate_size = config.intermediate_size;
  c.num_experts = config.num_experts;
  c.top_k = config.top_k;
  c.dtype = static_cast<std::int32_t>(config.dtype);
  c.activation = static_cast<std::int32_t>(config.activation.kind);
  c.activation_limit = config.activation.limit;
  c.activation_alpha = config.activation.alpha;
  c.activation_up_offset = config.activation.up_offset;
  c.gate_up_bias = config.gate_up_bias;
  c.down_bias = config.down_bias;
  c.weight_placement = static_cast<std::int32_t>(config.weight_placement);
  if (config.shared_experts.size() > MOELITH_MAX_SHARED_EXPERTS) {
    refuse("the layer has " + std::to_string(config.shared_experts.size()) + " shared experts; accepted: 0 to " +
           std::to_string(MOELITH_MAX_SHARED_EXPERTS));
  }
  c.num_shared_experts = static_cast<std::int32_t>(config.shared_experts.size());
  for (std::size_t s = 0; s < config.shared_experts.size(); ++s) {
    c.shared_experts[s].intermediate_size = config.shared_experts[s].intermediate_size;
    c.shared_experts[s].gated = config.shared_experts[s].gated;
  }
  const RouterConfig& router = config.router;
  c.router_kind = static_cast<std::int32_t>(router.kind);
  c.renormalize = router.renormalize;
  c.scaling_factor = router.scaling_factor;
  c.selection_bias = router.selection_bias;
  c.num_groups = router.num_groups;
  c.top_groups = router.top_groups;
  c.group_score_size = router.group_score_size;
  c.aux_loss = static_cast<std::int32_t>(router.aux_loss);
  c.drop_policy = static_cast<std::int32_t>(router.drop_policy);
  c.aux_loss_coefficient = router.aux_loss_coefficient;
  c.z_loss_coefficient = router.z_loss_coefficient;
  c.capacity_factor = router.capacity_factor;
  return c;
}

std::shared_ptr<const BoundExperts> bound_of(moelith_bound_experts_t bound) { return bound ? bound->experts : nullptr; }

ExpertPointers pointers_of(const moelith_expert_pointers_t* given) {
  const moelith_expert_pointers_t c = copy_of(given, "pointers");
  // Bounds what is read; the plan compares the count with its experts.
  if (c.count < 0 || c.count > limits::num_experts) {
    refuse("pointers.count is " + std::to_string(c.count) + "; accepted: the number of local experts");
  }
  ExpertPointers pointers;
  pointers.dtype = enumerator(c.dtype, DataType::uint8, "pointers.dtype");
  const auto list = [&](void* const* from) { return from ? std::vector<void*>(from, from + c.count) : std::vector<void*>{}; };
  pointers.gate_up_proj = list(c.gate_up_proj);
  pointers.gate_up_bias = list(c.gate_up_bias);
  pointers.down_proj = list(c.down_proj);
  pointers.down_bias = list(c.down_bias);
  return pointers;
}

// Into the caller's struct, whose struct_size is set.
void put_config(const LayerConfig& config, moelith_layer_config_t* target) {
  const std::size_t struct_size = copy_of(target, "config").struct_size;
  copy_out(c_config_of(config), target, struct_size);
}

// `shared` and `num_shared` of a struct: the count is bounded and the pointer there before an entry is read.
template <class T>
const T* shared_array(const T* shared, std::int32_t count, const char* name) {
  if (count < 0 || count > MOELITH_MAX_SHARED_EXPERTS) {
    refuse(std::string(name) + ".num_shared is " + std::to_string(count) + "; accepted: 0 to " +
           std::to_string(MOELITH_MAX_SHARED_EXPERTS));
  }
  if (count > 0) deref(shared, (std::string(name) + ".shared").c_str());
  return shared;
}

Inputs inputs_of(const moelith_inputs_t* given) {
  const moelith_inputs_t c = copy_of(given, "inputs");
  Inputs inputs;
  inputs.x = view_of(c.x, "x");
  inputs.router_logits = view_of(c.router_logits, "router_logits");
  inputs.topk_ids = view_of(c.topk_ids, "topk_ids");
  inputs.topk_weights = view_of(c.topk_weights, "topk_weights");
  inputs.selection_bias = view_of(c.selection_bias, "selection_bias");
  inputs.shared_gate_logits = view_of(c.shared_gate_logits, "shared_gate_logits");
  inputs.num_valid_tokens = view_of(c.num_valid_tokens, "num_valid_tokens");
  inputs.num_sequences = c.num_sequences == 0 ? 1 : c.num_sequences;
  set_weights(c, inputs.weights, "", view_of);
  const moelith_shared_weights_t* shared = shared_array(c.shared, c.num_shared, "inputs");
  for (std::int32_t s = 0; s < c.num_shared; ++s) {
    set_weights(shared[s], inputs.weights.shared.emplace_back(), shared_name("weights.", s), view_of);
  }
  inputs.weights.bound = bound_of(c.bound);
  return inputs;
}

Outputs outputs_of(const moelith_outputs_t* given) {
  const moelith_outputs_t c = copy_of(given, "outputs");
  Outputs outputs;
  outputs.y = view_of(c.y, "y");
  outputs.topk_ids = view_of(c.topk_ids, "outputs.topk_ids");
  outputs.topk_weights = view_of(c.topk_weights, "outputs.topk_weights");
  outputs.expert_counts = view_of(c.expert_counts, "expert_counts");
  outputs.aux_loss = view_of(c.aux_loss, "aux_loss");
  outputs.z_loss = view_of(c.z_loss, "z_loss");
  return outputs;
}

OutputGradients output_gradients_of(const moelith_output_gradients_t* given) {
  const moelith_output_gradients_t c = copy_of(given, "output_gradients");
  OutputGradients gradients;
  gradients.y = view_of(c.y, "output_gradients.y");
  gradients.topk_weights = view_of(c.topk_weights, "output_gradients.topk_weights");
  gradients.aux_loss = view_of(c.aux_loss, "output_gradients.aux_loss");
  gradients.z_loss = view_of(c.z_loss, "output_gradients.z_loss");
  return gradients;
}

InputGradients input_gradients_of(const moelith_input_gradients_t* given) {
  const moelith_input_gradients_t c = copy_of(given, "input_gradients");
  InputGradients gradients;
  gradients.x = view_of(c.x, "input_gradients.x");
  gradients.router_logits = view_of(c.router_logits, "input_gradients.router_logits");
  gradients.topk_weights = view_of(c.topk_weights, "input_gradients.topk_weights");
  gradients.shared_gate_logits = view_of(c.shared_gate_logits, "input_gradients.shared_gate_logits");
  set_weights(c, gradients.weights, "input_gradients.", gradient_of);
  const moelith_shared_gradients_t* shared = shared_array(c.shared, c.num_shared, "input_gradients");
  for (std::int32_t s = 0; s < c.num_shared; ++s) {
    set_weights(shared[s], gradients.weights.shared.emplace_back(), shared_name("input_gradients.", s), gradient_of);
  }
  gradients.weights.bound = bound_of(c.bound);
  return gradients;
}

PlanOptions options_of(const moelith_plan_options_t& c) {
  PlanOptions options;
  options.max_tokens = c.max_tokens;
  options.device = enumerator(c.device, DeviceKind::cuda, "options.device");
  options.workers = c.workers;
  options.recompute = c.recompute != 0;
  options.receive_capacity_factor = c.receive_capacity_factor;
  options.tile_columns = c.tile_columns;
  options.shuffle_seed = c.shuffle_seed;
  if (c.group != nullptr) options.group = c.group->group;
  // Bounds what is read; the plan compares the count with num_experts.
  if (c.expert_rank_count < 0 || c.expert_rank_count > limits::num_experts) {
    refuse("options.expert_rank_count is " + std::to_string(c.expert_rank_count) + "; accepted: 0, or num_experts");
  }
  if (c.expert_rank_count > 0) deref(c.expert_rank, "options.expert_rank");
  if (c.expert_rank != nullptr && c.expert_rank_count == 0) {
    refuse("options.expert_rank_count is 0 though options.expert_rank is given; accepted: num_experts");
  }
  options.expert_rank.assign(c.expert_rank, c.expert_rank + c.expert_rank_count);
  return options;
}

}  // namespace
}  // namespace moelith

using namespace moelith;

extern "C" {

const char* moelith_last_error(void) { return last_error.data(); }

const char* moelith_status_name(moelith_status_t status) {
  switch (status) {
    case MOELITH_OK: return "ok";
    case MOELITH_INVALID_ARGUMENT: return "invalid_argument";
    case MOELITH_UNSUPPORTED: return "unsupported";
    case MOELITH_TIMED_OUT: return "timed_out";
    case MOELITH_DEVICE_ERROR: return "device_error";
    case MOELITH_INTERNAL: return "internal";
    case MOELITH_GROUP_FAILED: return "group_failed";
  }
  return "unknown status";
}

int32_t moelith_version(void) { return MOELITH_VERSION; }

moelith_status_t moelith_tensor_init(moelith_tensor_t* tensor, void* data, int32_t dtype, int32_t rank,
                                     const int64_t* shape) {
  return guarded([&] {
    deref(tensor, "tensor");
    moelith_tensor_t filled{};
    if (rank != 0) {
      filled.data = data;
      filled.dtype = dtype;
      filled.rank = rank;
      if (rank > 0 && rank <= MOELITH_MAX_RANK) std::copy_n(&deref(shape, "shape"), rank, filled.shape);
      view_of(filled, "tensor");  // refuses a bad rank, dtype or extent
      std::int64_t step = 1;
      for (int d = rank - 1; d >= 0; --d) {
        filled.stride[d] = step;
        if (__builtin_mul_overflow(step, std::max<std::int64_t>(filled.shape[d], 1), &step)) {
          refuse("tensor.shape has more than 2^63 - 1 elements");
        }
      }
    }
    *tensor = filled;
  });
}

moelith_status_t moelith_layer_config_init(moelith_layer_config_t* config, size_t struct_size) {
  return guarded([&] {
    deref(config, "config");
    check_struct_size(struct_size, sizeof(moelith_layer_config_t), sizeof(moelith_layer_config_t), "config");
    copy_out(c_config_of(LayerConfig{}), config, struct_size);
  });
}

moelith_status_t moelith_layer_config_validate(const moelith_layer_config_t* config) {
  return guarded([&] { config_of(copy_of(config, "config")).validate(); });
}

const char* moelith_preset_name(int32_t index) {
  const auto& all = presets();
  return index >= 0 && static_cast<std::size_t>(index) < all.size() ? all[static_cast<std::size_t>(index)].name.c_str()
                                                                    : nullptr;
}

moelith_status_t moelith_layer_config_from_preset(moelith_layer_config_t* config, const char* name) {
  return guarded([&] { put_config(preset(&deref(name, "name")).config, config); });
}

moelith_status_t moelith_layer_config_from_json(moelith_layer_config_t* config, const char* json) {
  return guarded([&] { put_config(model_from_hugging_face(&deref(json, "json")).config, config); });
}

moelith_status_t moelith_layer_config_from_file(moelith_layer_config_t* config, const char* path) {
  return guarded([&] { put_config(read_hugging_face_config(&deref(path, "path")).config, config); });
}

moelith_status_t moelith_group_create_single(moelith_group_t* group) {
  return guarded([&] {
    deref(group, "group");
    *group = new moelith_group{Group::single()};
  });
}

moelith_status_t moelith_group_create_threads(int32_t ranks, moelith_group_t* groups) {
  return guarded([&] {
    deref(groups, "groups");
    std::vector<std::unique_ptr<moelith_group>> made;
    for (Group& group : Group::threads(ranks)) made.push_back(std::make_unique<moelith_group>(std::move(group)));
    for (std::size_t r = 0; r < made.size(); ++r) groups[r] = made[r].release();
  });
}

moelith_status_t moelith_group_create_process(const char* name, int32_t rank, int32_t ranks, int64_t milliseconds,
                                              moelith_group_t* group) {
  return guarded([&] {
    deref(name, "name");
    deref(group, "group");
    *group = new moelith_group{Group::process(name, rank, ranks, std::chrono::milliseconds(milliseconds))};
  });
}

moelith_status_t moelith_group_create_process_by_id(const void* id, uint64_t bytes, int32_t rank, int32_t ranks,
                                                    int64_t milliseconds, moelith_group_t* group) {
  return guarded([&] {
    deref(group, "group");
    *group = new moelith_group{Group::process_by_id(id, bytes, rank, ranks, std::chrono::milliseconds(milliseconds))};
  });
}

moelith_status_t moelith_group_rank(moelith_group_t group, int32_t* rank, int32_t* size) {
  return guarded([&] {
    const Group& of = deref(group, "group").group;
    const int this_rank = of.rank(), ranks = of.size();
    if (rank != nullptr) *rank = this_rank;
    if (size != nullptr) *size = ranks;
  });
}

moelith_status_t moelith_group_set_timeout(moelith_group_t group, int64_t milliseconds) {
  return guarded([&] {
    deref(group, "group").group.set_timeout(std::chrono::milliseconds(milliseconds));
  });
}

moelith_status_t moelith_group_fail(moelith_group_t group, const char* reason) {
  return guarded([&] { deref(group, "group").group.fail(reason == nullptr ? "" : reason); });
}

void moelith_group_destroy(moelith_group_t group) { delete group; }

moelith_status_t moelith_plan_create(const moelith_layer_config_t* config, const moelith_plan_options_t* options,
                                     moelith_plan_t* plan) {
  return guarded([&] {
    deref(plan, "plan");
    const moelith_plan_options_t given = copy_of(options, "options");
    const Group group = given.group == nullptr ? Group::single() : given.group->group;
    *plan = group.transport()->collective([&] {
      return new moelith_plan{Plan::create(config_of(copy_of(config, "config")), options_of(given))};
    });
  });
}

void moelith_plan_destroy(moelith_plan_t plan) { delete plan; }

moelith_status_t moelith_plan_config(moelith_plan_t plan, moelith_layer_config_t* config) {
  return guarded([&] {
    put_config(deref(plan, "plan").plan.config(), config);
  });
}

moelith_status_t moelith_plan_local_experts(moelith_plan_t plan, int32_t* count, int32_t* ids, int32_t capacity) {
  return guarded([&] {
    const Plan& of = deref(plan, "plan").plan;
    deref(count, "count");
    const std::int32_t local = of.num_local_experts();
    if (ids != nullptr) {
      if (capacity < local) {
        refuse("capacity is " + std::to_string(capacity) + "; accepted: at least the number of local experts, " +
               std::to_string(local));
      }
      const std::vector<std::int32_t> experts = of.local_experts();
      std::copy(experts.begin(), experts.end(), ids);
    }
    *count = local;
  });
}

moelith_status_t moelith_plan_buffer_sizes(moelith_plan_t plan, int64_t tokens, moelith_buffer_sizes_t* sizes) {
  return guarded([&] {
    const Plan& of = deref(plan, "plan").plan;
    moelith_buffer_sizes_t filled = copy_of(sizes, "sizes");
    const BufferSizes found = of.buffer_sizes(tokens);
    filled.saved = found.saved;
    filled.workspace = found.workspace;
    copy_out(filled, sizes, filled.struct_size);
  });
}

moelith_status_t moelith_plan_saved_formula(moelith_plan_t plan, int64_t tokens, char* text, size_t capacity) {
  return guarded([&] {
    const Plan& of = deref(plan, "plan").plan;
    deref(text, "text");
    if (capacity == 0) refuse("capacity is 0; accepted: at least 1");
    const std::string formula = of.buffer_sizes(tokens).formula;
    const std::size_t length = std::min(formula.size(), capacity - 1);
    std::memcpy(text, formula.data(), length);
    text[length] = '\0';
  });
}

moelith_status_t moelith_plan_bind(moelith_plan_t plan, const moelith_expert_pointers_t* pointers,
                                   moelith_bound_experts_t* bound) {
  return guarded([&] {
    const Plan& of = deref(plan, "plan").plan;
    deref(bound, "bound");
    *bound = new moelith_bound_experts{of.bind(pointers_of(pointers))};
  });
}

void moelith_bound_experts_destroy(moelith_bound_experts_t bound) { delete bound; }

moelith_status_t moelith_forward(moelith_plan_t plan, const moelith_inputs_t* inputs, const moelith_outputs_t* outputs,
                                 void* saved, void* workspace, void* stream) {
  return guarded([&] {
    const Plan& of = deref(plan, "plan").plan;
    of.impl().transport().collective(
        [&] { of.forward(inputs_of(inputs), outputs_of(outputs), saved, workspace, stream); });
  });
}

moelith_status_t moelith_backward(moelith_plan_t plan, const moelith_inputs_t* inputs, const void* saved,
                                  const moelith_output_gradients_t* output_gradients,
                                  const moelith_input_gradients_t* input_gradients, void* workspace, void* stream) {
  return guarded([&] {
    const Plan& of = deref(plan, "plan").plan;
    of.impl().transport().collective([&] {
      of.backward(inputs_of(inputs), saved, output_gradients_of(output_gradients), input_gradients_of(input_gradients),
                  workspace, stream);
    });
  });
}

moelith_status_t moelith_update_selection_bias(const moelith_tensor_t* bias, const moelith_tensor_t* counts,
                                               double rate) {
  return guarded([&] {
    update_selection_bias(view_of(deref(bias, "bias"), "bias"), view_of(deref(counts, "counts"), "counts"), rate);
  });
}

}  // extern "C"
