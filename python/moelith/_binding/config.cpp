#include "moelith/config.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding.hpp"
#include "moelith/presets.hpp"

namespace nb = nanobind;

namespace moelith::binding {
namespace {

// An enumeration member that Python reads and writes as its name.
template <class Struct, class Enum>
void by_name(nb::class_<Struct>& type, const char* name, Enum Struct::*member, Enum (*from)(const std::string&)) {
  type.def_prop_rw(
      name, [member](const Struct& self) { return std::string(to_string(self.*member)); },
      [member, from](Struct& self, const std::string& value) { self.*member = from(value); });
}

}  // namespace

void bind_config(nb::module_& module) {
  nb::class_<ActivationConfig> activation(module, "ActivationConfig");
  activation.def(nb::init<>())
      .def_rw("limit", &ActivationConfig::limit)
      .def_rw("alpha", &ActivationConfig::alpha)
      .def_rw("up_offset", &ActivationConfig::up_offset);
  by_name(activation, "kind", &ActivationConfig::kind, &activation_kind_from);

  nb::class_<SharedExpertConfig>(module, "SharedExpertConfig")
      .def(nb::init<>())
      .def_rw("intermediate_size", &SharedExpertConfig::intermediate_size)
      .def_rw("gated", &SharedExpertConfig::gated);

  nb::class_<RouterConfig> router(module, "RouterConfig");
  router.def(nb::init<>())
      .def_rw("renormalize", &RouterConfig::renormalize)
      .def_rw("scaling_factor", &RouterConfig::scaling_factor)
      .def_rw("selection_bias", &RouterConfig::selection_bias)
      .def_rw("num_groups", &RouterConfig::num_groups)
      .def_rw("top_groups", &RouterConfig::top_groups)
      .def_rw("group_score_size", &RouterConfig::group_score_size)
      .def_rw("aux_loss_coefficient", &RouterConfig::aux_loss_coefficient)
      .def_rw("z_loss_coefficient", &RouterConfig::z_loss_coefficient)
      .def_rw("capacity_factor", &RouterConfig::capacity_factor);
  by_name(router, "kind", &RouterConfig::kind, &router_kind_from);
  by_name(router, "aux_loss", &RouterConfig::aux_loss, &aux_loss_kind_from);
  by_name(router, "drop_policy", &RouterConfig::drop_policy, &drop_policy_from);

  nb::class_<LayerConfig> layer(module, "LayerConfig");
  layer.def(nb::init<>())
      .def_rw("hidden_size", &LayerConfig::hidden_size)
      .def_rw("intermediate_size", &LayerConfig::intermediate_size)
      .def_rw("num_experts", &LayerConfig::num_experts)
      .def_rw("top_k", &LayerConfig::top_k)
      .def_rw("activation", &LayerConfig::activation)
      .def_rw("gate_up_bias", &LayerConfig::gate_up_bias)
      .def_rw("down_bias", &LayerConfig::down_bias)
      .def_rw("shared_experts", &LayerConfig::shared_experts)
      .def_rw("router", &LayerConfig::router)
      .def("validate", &LayerConfig::validate);
  by_name(layer, "dtype", &LayerConfig::dtype, &data_type_from);
  by_name(layer, "weight_placement", &LayerConfig::weight_placement, &weight_placement_from);

  nb::class_<ModelPreset>(module, "ModelPreset")
      .def_ro("name", &ModelPreset::name)
      .def_ro("config", &ModelPreset::config)
      .def_ro("aux_loss_coefficient", &ModelPreset::aux_loss_coefficient);
  module.def("model_from_hugging_face", &model_from_hugging_face, nb::arg("json_text"));
  module.def("hugging_face_model_types", &hugging_face_model_types);
}

}  // namespace moelith::binding
