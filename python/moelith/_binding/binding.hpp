// The parts of the Python extension `_moelith`. It wraps include/moelith/ one to one and knows no tensor library: a
// tensor comes as address, element type, shape and strides.
#pragma once

#include <nanobind/nanobind.h>

namespace moelith::binding {

void bind_tensor(nanobind::module_& module);  // DataType, TensorView, Error -> Python exceptions
void bind_config(nanobind::module_& module);  // LayerConfig and its parts; enumerations as their names
void bind_layer(nanobind::module_& module);   // Group, PlanOptions, Plan and the structs that its passes take

}  // namespace moelith::binding
