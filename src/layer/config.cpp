#include "moelith/config.hpp"

#include <cmath>
#include <utility>

#include "layer/number_text.hpp"

namespace moelith {
namespace {

// The names of an enumeration, in one place for both directions.
template <class E>
using Name = std::pair<E, const char*>;

constexpr Name<ActivationKind> activation_names[] = {{ActivationKind::swiglu, "swiglu"},
                                                     {ActivationKind::swiglu_clamped, "swiglu_clamped"},
                                                     {ActivationKind::geglu_erf, "geglu_erf"},
                                                     {ActivationKind::geglu_tanh, "geglu_tanh"},
                                                     {ActivationKind::relu_squared, "relu_squared"}};
constexpr Name<WeightPlacement> placement_names[] = {{WeightPlacement::after_down, "after_down"},
                                                     {WeightPlacement::before_down, "before_down"}};
constexpr Name<RouterKind> router_names[] = {{RouterKind::softmax_topk, "softmax_topk"},
                                             {RouterKind::topk_softmax, "topk_softmax"},
                                             {RouterKind::sigmoid, "sigmoid"}};
constexpr Name<AuxLossKind> aux_loss_names[] = {{AuxLossKind::none, "none"},
                                                {AuxLossKind::batch, "batch"},
                                                {AuxLossKind::sequence, "sequence"},
                                                {AuxLossKind::global, "global"}};
constexpr Name<DropPolicy> drop_names[] = {{DropPolicy::by_score, "by_score"},
                                           {DropPolicy::by_position, "by_position"}};
constexpr Name<DataType> dtype_names[] = {{DataType::float64, "float64"},   {DataType::float32, "float32"},
                                          {DataType::bfloat16, "bfloat16"}, {DataType::int64, "int64"},
                                          {DataType::int32, "int32"},       {DataType::uint8, "uint8"}};

// The name, or null for a value outside of the enumeration (which the C interface can bring in).
template <class E, std::size_t N>
const char* name_of(const Name<E> (&names)[N], E value) {
  for (const auto& [known, name] : names) {
    if (known == value) return name;
  }
  return nullptr;
}

template <class E, std::size_t N>
std::string accepted(const Name<E> (&names)[N]) {
  std::string text;
  for (const auto& [known, name] : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

template <class E, std::size_t N>
E value_of(const Name<E> (&names)[N], const std::string& name, const char* what) {
  for (const auto& [known, known_name] : names) {
    if (name == known_name) return known;
  }
  throw Error(Status::invalid_argument, std::string(what) + " is \"" + name + "\"; accepted: " + accepted(names));
}

std::string text_of(double value) { return layer::number_text(value); }
std::string text_of(std::int64_t value) { return std::to_string(value); }
std::string text_of(std::int32_t value) { return std::to_string(value); }

template <class T>
void require(bool good, const std::string& field, T value, const std::string& what_is_accepted) {
  if (good) return;
  throw Error(Status::invalid_argument, field + " is " + text_of(value) + "; accepted: " + what_is_accepted);
}

template <class E, std::size_t N>
void require_known(const Name<E> (&names)[N], const char* field, E value) {
  require(name_of(names, value) != nullptr, field, static_cast<std::int32_t>(value), accepted(names));
}

void require_width(const std::string& field, std::int64_t value) {
  require(value >= 8 && value <= limits::width && value % 8 == 0, field, value,
          "a multiple of 8 from 8 to " + std::to_string(limits::width));
}

void validate_router(const RouterConfig& router, std::int32_t num_experts, std::int32_t top_k) {
  require_known(router_names, "router.kind", router.kind);
  require(std::isfinite(router.scaling_factor) && router.scaling_factor > 0, "router.scaling_factor",
          router.scaling_factor, "a finite number above 0");

  require(router.num_groups >= 1 && router.num_groups <= num_experts && num_experts % router.num_groups == 0,
          "router.num_groups", router.num_groups, "a divisor of num_experts = " + std::to_string(num_experts));
  require(router.top_groups >= 1 && router.top_groups <= router.num_groups, "router.top_groups", router.top_groups,
          "1 to router.num_groups = " + std::to_string(router.num_groups));
  require(router.group_score_size == 1 || router.group_score_size == 2, "router.group_score_size",
          router.group_score_size, "1 or 2");
  const std::int32_t group_size = num_experts / router.num_groups;
  if (router.top_groups < router.num_groups) {
    require(router.group_score_size <= group_size, "router.group_score_size", router.group_score_size,
            "at most the experts of a group, num_experts / router.num_groups = " + std::to_string(group_size));
    require(top_k <= router.top_groups * group_size, "top_k", top_k,
            "at most the experts of the kept groups, router.top_groups * num_experts / router.num_groups = " +
                std::to_string(router.top_groups * group_size));
  }

  require_known(aux_loss_names, "router.aux_loss", router.aux_loss);
  require(std::isfinite(router.aux_loss_coefficient) && router.aux_loss_coefficient >= 0, "router.aux_loss_coefficient",
          router.aux_loss_coefficient, "a finite number, 0 or above");
  require(std::isfinite(router.z_loss_coefficient) && router.z_loss_coefficient >= 0, "router.z_loss_coefficient",
          router.z_loss_coefficient, "a finite number, 0 or above");
  require(std::isfinite(router.capacity_factor) && router.capacity_factor >= 0, "router.capacity_factor",
          router.capacity_factor, "0 (no capacity) or a finite number above 0");
  require_known(drop_names, "router.drop_policy", router.drop_policy);
}

}  // namespace

void LayerConfig::validate() const {
  require_width("hidden_size", hidden_size);
  require_width("intermediate_size", intermediate_size);
  require(num_experts >= 1 && num_experts <= limits::num_experts, "num_experts", num_experts,
          "1 to " + std::to_string(limits::num_experts));
  const std::int32_t most_k = num_experts < limits::top_k ? num_experts : limits::top_k;
  require(top_k >= 1 && top_k <= most_k, "top_k", top_k,
          "1 to min(num_experts, " + std::to_string(limits::top_k) + ") = " + std::to_string(most_k));
  if (dtype != DataType::float64 && dtype != DataType::float32 && dtype != DataType::bfloat16) {
    const char* name = name_of(dtype_names, dtype);
    throw Error(Status::invalid_argument, "dtype is " +
                                              (name ? std::string(name) : std::to_string(static_cast<int>(dtype))) +
                                              "; accepted: float64, float32, bfloat16");
  }

  require_known(activation_names, "activation.kind", activation.kind);
  if (activation.kind == ActivationKind::swiglu_clamped) {
    require(activation.limit > 0, "activation.limit", activation.limit, "a number above 0 (infinity: no clamp)");
    require(std::isfinite(activation.alpha), "activation.alpha", activation.alpha, "a finite number");
    require(std::isfinite(activation.up_offset), "activation.up_offset", activation.up_offset, "a finite number");
  }
  require_known(placement_names, "weight_placement", weight_placement);

  const auto shared_count = static_cast<std::int64_t>(shared_experts.size());
  require(shared_count <= limits::shared_experts, "the number of shared_experts", shared_count,
          "at most " + std::to_string(limits::shared_experts));
  for (std::size_t s = 0; s < shared_experts.size(); ++s) {
    require_width("shared_experts[" + std::to_string(s) + "].intermediate_size", shared_experts[s].intermediate_size);
  }

  validate_router(router, num_experts, top_k);
}

const char* to_string(ActivationKind kind) {
  const char* name = name_of(activation_names, kind);
  return name ? name : "unknown activation kind";
}
const char* to_string(WeightPlacement place) {
  const char* name = name_of(placement_names, place);
  return name ? name : "unknown weight placement";
}
const char* to_string(RouterKind kind) {
  const char* name = name_of(router_names, kind);
  return name ? name : "unknown router kind";
}
const char* to_string(AuxLossKind kind) {
  const char* name = name_of(aux_loss_names, kind);
  return name ? name : "unknown aux loss kind";
}
const char* to_string(DropPolicy policy) {
  const char* name = name_of(drop_names, policy);
  return name ? name : "unknown drop policy";
}

ActivationKind activation_kind_from(const std::string& name) { return value_of(activation_names, name, "activation"); }
WeightPlacement weight_placement_from(const std::string& name) {
  return value_of(placement_names, name, "weight_placement");
}
RouterKind router_kind_from(const std::string& name) { return value_of(router_names, name, "router kind"); }
AuxLossKind aux_loss_kind_from(const std::string& name) { return value_of(aux_loss_names, name, "aux_loss"); }
DropPolicy drop_policy_from(const std::string& name) { return value_of(drop_names, name, "drop_policy"); }
DataType data_type_from(const std::string& name) { return value_of(dtype_names, name, "dtype"); }

}  // namespace moelith
