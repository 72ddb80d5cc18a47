// The parts of the Python extension `_moelith`. It wraps include/moelith/ one to one and is built without PyTorch: what
// it needs of a tensor (address, element type, shape, strides) it asks the Python object for.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "moelith/tensor.hpp"

namespace moelith::binding {

void bind_tensor(nanobind::module_& module);  // DataType, TensorView, Error -> Python exceptions
void bind_config(nanobind::module_& module);  // LayerConfig and its parts; enumerations as their names
void bind_layer(nanobind::module_& module);   // Group, PlanOptions, Plan and the structs that its passes take

// The view of a torch.Tensor, which the caller keeps alive; a scalar is seen as of shape [1]. `name` is for the error
// of a dtype that the library has not.
TensorView view_of(nanobind::handle tensor, const std::string& name);
// The same of a tensor that has no memory, on PyTorch's device meta or a fake one: for checks.
TensorView facts_of(nanobind::handle tensor, const std::string& name);
void settle_strides(TensorView& view);  // sets those of a contiguous tensor

enum class Layout { contiguous, rows };  // rows: or two-dimensional with contiguous rows that do not overlap

// Views of tensors as the library takes them: copies where they are laid out otherwise or negated lazily (PyTorch
// resolves that in arguments of operators, but not in all lists of them).
class Copies {
 public:
  TensorView view_of(nanobind::handle tensor, const std::string& name, Layout layout);

 private:
  std::vector<nanobind::object> kept_;
};

}  // namespace moelith::binding
