#include "moelith/tensor.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <vector>

#include "binding.hpp"

namespace nb = nanobind;

namespace moelith::binding {
namespace {

TensorView make_view(std::uintptr_t address, DataType dtype, const std::vector<std::int64_t>& shape,
                     const std::optional<std::vector<std::int64_t>>& stride) {
  if (shape.empty() || shape.size() > TensorView::max_rank) {
    throw Error(Status::invalid_argument, "TensorView: shape has " + std::to_string(shape.size()) +
                                              " dimensions; accepted: 1 to " + std::to_string(TensorView::max_rank));
  }
  if (stride && stride->size() != shape.size()) {
    throw Error(Status::invalid_argument, "TensorView: shape has " + std::to_string(shape.size()) +
                                              " dimensions but stride has " + std::to_string(stride->size()));
  }
  TensorView view;
  view.data = reinterpret_cast<void*>(address);
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  std::int64_t contiguous_stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.stride[i] = stride ? (*stride)[i] : contiguous_stride;
    contiguous_stride *= shape[i];
  }
  return view;
}

// DLPack carries the memory to PyTorch, which frees it.
nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>, nb::device::cpu> aligned_bytes(std::size_t size,
                                                                                  std::size_t alignment) {
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded > 0 ? rounded : alignment);
  if (!memory) throw std::bad_alloc();
  return {memory, {size}, nb::capsule(memory, [](void* m) noexcept { std::free(m); })};
}

PyObject* exception_type(Status status) {
  switch (status) {
    case Status::invalid_argument: return PyExc_ValueError;
    case Status::unsupported: return PyExc_NotImplementedError;
    case Status::timed_out: return PyExc_TimeoutError;
    default: return PyExc_RuntimeError;
  }
}

}  // namespace

void bind_tensor(nb::module_& module) {
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void*) {
        try {
          std::rethrow_exception(pointer);
        } catch (const Error& error) {
          PyErr_SetString(exception_type(error.status()), error.what());
        }
      },
      nullptr);

  nb::enum_<DataType>(module, "DataType")
      .value("float64", DataType::float64)
      .value("float32", DataType::float32)
      .value("bfloat16", DataType::bfloat16)
      .value("int64", DataType::int64)
      .value("int32", DataType::int32)
      .value("uint8", DataType::uint8);

  nb::class_<TensorView>(module, "TensorView",
                         "A view of memory that the caller keeps alive. Without arguments: not given.")
      .def(nb::init<>())
      .def(
          "__init__",
          [](TensorView* self, std::uintptr_t address, DataType dtype, const std::vector<std::int64_t>& shape,
             const std::optional<std::vector<std::int64_t>>& stride) {
            new (self) TensorView(make_view(address, dtype, shape, stride));
          },
          nb::arg("address"), nb::arg("dtype"), nb::arg("shape"), nb::arg("stride") = nb::none())
      .def_prop_ro("given", &TensorView::given)
      .def("__repr__", [](const TensorView& view) { return describe(view); });

  module.def("aligned_bytes", &aligned_bytes, nb::arg("size"), nb::arg("alignment"),
             "A torch.Tensor of `size` uninitialised bytes on the CPU, its address a multiple of `alignment`.");
}

}  // namespace moelith::binding
