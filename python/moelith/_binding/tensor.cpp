#include "moelith/tensor.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "binding.hpp"

namespace nb = nanobind;

namespace moelith::binding {
namespace {

// The dtypes of PyTorch that the library has; the objects live as long as PyTorch.
struct KnownDtype {
  PyObject* dtype;
  DataType type;
};
std::vector<KnownDtype>& known_dtypes() {
  static std::vector<KnownDtype> all;
  return all;
}

// "torch.float32" -> "float32"
std::string name_of(nb::handle dtype) {
  const std::string name = nb::cast<std::string>(nb::str(dtype));
  return name.starts_with("torch.") ? name.substr(6) : name;
}
// Which of them may be where they are expected depends on the argument: numbers of experts and tokens are integers.
[[noreturn]] void refuse_dtype(nb::handle dtype, const std::string& name) {
  const char* accepted = name == "topk_ids"                     ? "int64, int32"
                         : name == "num_valid_tokens"           ? "int32"
                         : name == "counts"                     ? "int64"
                                                                : "float64, float32, bfloat16";
  throw Error(Status::invalid_argument, name + ": dtype " + name_of(dtype) + "; accepted: " + accepted);
}

// One attribute, or the result of one method without arguments, by an interned name: of a tensor these are asked for
// a dozen times a call. Throw what Python raises.
nb::object attribute(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}
nb::object result(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), name);
  if (!value) throw nb::python_error();
  return nb::steal(value);
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

TensorView view_of(nb::handle tensor, const std::string& name) {
  static PyObject* const names[] = {PyUnicode_InternFromString("dtype"), PyUnicode_InternFromString("shape"),
                                    PyUnicode_InternFromString("is_contiguous"), PyUnicode_InternFromString("stride"),
                                    PyUnicode_InternFromString("data_ptr")};
  TensorView view;
  const nb::object dtype = attribute(tensor, names[0]);
  const auto& dtypes = known_dtypes();
  const auto known = std::find_if(dtypes.begin(), dtypes.end(), [&](const KnownDtype& k) { return k.dtype == dtype.ptr(); });
  if (known == dtypes.end()) refuse_dtype(dtype, name);
  view.dtype = known->type;
  const nb::tuple shape = nb::cast<nb::tuple>(attribute(tensor, names[1]));
  if (shape.size() > TensorView::max_rank) {
    throw Error(Status::invalid_argument, name + ": shape has " + std::to_string(shape.size()) + " dimensions; accepted: at most " +
                                              std::to_string(TensorView::max_rank));
  }
  view.rank = std::max(1, static_cast<int>(shape.size()));
  const bool contiguous = result(tensor, names[2]).ptr() == Py_True;
  const nb::tuple stride = contiguous ? nb::tuple() : nb::cast<nb::tuple>(result(tensor, names[3]));
  std::int64_t contiguous_stride = 1;
  view.shape[0] = view.stride[0] = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = nb::cast<std::int64_t>(shape[i]);
    view.stride[i] = contiguous ? contiguous_stride : nb::cast<std::int64_t>(stride[i]);
    contiguous_stride *= view.shape[i];
  }
  view.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(result(tensor, names[4])));
  return view;
}

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
      .def_prop_ro("given", &TensorView::given)
      .def("__repr__", [](const TensorView& view) { return describe(view); });

  module.def(
      "know_dtypes",
      [](const nb::dict& dtypes) {
        known_dtypes().clear();
        for (const auto& [dtype, type] : dtypes) known_dtypes().push_back({dtype.ptr(), nb::cast<DataType>(type)});
      },
      nb::arg("dtypes"), "Says which DataType each torch.dtype is; the others are refused.");
  module.def("view", &view_of, nb::arg("tensor"), nb::arg("name"));
  module.def("aligned_bytes", &aligned_bytes, nb::arg("size"), nb::arg("alignment"),
             "A torch.Tensor of `size` uninitialised bytes on the CPU, its address a multiple of `alignment`.");
}

}  // namespace moelith::binding
