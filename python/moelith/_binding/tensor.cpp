#include "moelith/tensor.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "binding.hpp"

namespace nb = nanobind;

namespace moelith::binding {
namespace {

// DLPack's table of functions for tensors in Python (DLPackExchangeAPI of dlpack.h, version 1): a dozen times faster
// than asking for attributes. Only the one that fills a view is called.
struct ExchangeApi {
  std::uint32_t major, minor;
  const ExchangeApi* previous;
  void (*others[3])();
  int (*view)(void* tensor, nb::dlpack::dltensor* view);  // may be null; not 0: a Python exception is set
  void (*current_work_stream)();
};

// What is known of PyTorch; the objects live as long as it.
struct KnownDtype {
  PyObject* dtype;
  DataType type;
};
struct PyTorch {
  std::vector<KnownDtype> dtypes;  // those that the library has
  PyTypeObject* tensor = nullptr;
  const ExchangeApi* exchange = nullptr;  // older ones have none
};
PyTorch& pytorch() {
  static PyTorch known;
  return known;
}

// "torch.float32" -> "float32"
std::string name_of(nb::handle dtype) {
  const std::string name = nb::cast<std::string>(nb::str(dtype));
  return name.starts_with("torch.") ? name.substr(6) : name;
}
// Which of them may be where they are expected depends on the argument: numbers of experts and tokens are integers.
[[noreturn]] void refuse_dtype(nb::handle dtype, const std::string& name) {
  const char* accepted = name == "topk_ids"           ? "int64, int32"
                         : name == "num_valid_tokens" ? "int32"
                         : name == "counts"           ? "int64"
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

// The table in a capsule; null where there is none, or of another version.
const ExchangeApi* exchange_of(nb::handle capsule) {
  constexpr const char* name = "dlpack_exchange_api";
  if (!PyCapsule_IsValid(capsule.ptr(), name)) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), name));
  return api->major == 1 && api->view ? api : nullptr;
}

PyObject* exception_type(Status status) {
  switch (status) {
    case Status::invalid_argument: return PyExc_ValueError;
    case Status::unsupported: return PyExc_NotImplementedError;
    case Status::timed_out: return PyExc_TimeoutError;
    default: return PyExc_RuntimeError;
  }
}

// All but the memory, by the attributes that a torch.Tensor has. Names the tensor where the library cannot take it.
TensorView facts_by_attributes(nb::handle tensor, const std::string& name) {
  static PyObject* const names[] = {PyUnicode_InternFromString("dtype"), PyUnicode_InternFromString("shape"),
                                    PyUnicode_InternFromString("stride")};
  TensorView view;
  const nb::object dtype = attribute(tensor, names[0]);
  const auto& dtypes = pytorch().dtypes;
  const auto known =
      std::find_if(dtypes.begin(), dtypes.end(), [&](const KnownDtype& k) { return k.dtype == dtype.ptr(); });
  if (known == dtypes.end()) refuse_dtype(dtype, name);
  view.dtype = known->type;
  const nb::tuple shape = nb::cast<nb::tuple>(attribute(tensor, names[1]));
  if (shape.size() > TensorView::max_rank) {
    throw Error(Status::invalid_argument, name + ": shape has " + std::to_string(shape.size()) +
                                              " dimensions; accepted: at most " + std::to_string(TensorView::max_rank));
  }
  view.rank = static_cast<int>(shape.size());
  const nb::tuple stride = nb::cast<nb::tuple>(result(tensor, names[2]));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    view.shape[i] = nb::cast<std::int64_t>(shape[i]);
    view.stride[i] = nb::cast<std::int64_t>(stride[i]);
  }
  return view;
}

TensorView view_by_attributes(nb::handle tensor, const std::string& name) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  TensorView view = facts_by_attributes(tensor, name);
  view.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(result(tensor, data_ptr)));
  return view;
}

bool type_of(nb::dlpack::dtype dtype, DataType& type) {
  if (dtype.lanes != 1) return false;
  switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
    case nb::dlpack::dtype_code::Float:
      type = dtype.bits == 64 ? DataType::float64 : DataType::float32;
      return dtype.bits >= 32;
    case nb::dlpack::dtype_code::Bfloat: type = DataType::bfloat16; return dtype.bits == 16;
    case nb::dlpack::dtype_code::Int:
      type = dtype.bits == 64 ? DataType::int64 : DataType::int32;
      return dtype.bits >= 32;
    case nb::dlpack::dtype_code::UInt: type = DataType::uint8; return dtype.bits == 8;
    default: return false;
  }
}

// By DLPack's table; false where that cannot be done.
bool view_by_exchange(nb::handle tensor, TensorView& view) {
  const PyTorch& known = pytorch();
  if (!known.exchange || !PyObject_TypeCheck(tensor.ptr(), known.tensor)) return false;
  nb::dlpack::dltensor filled;
  if (known.exchange->view(tensor.ptr(), &filled) != 0) {
    PyErr_Clear();
    return false;
  }
  if (filled.ndim > TensorView::max_rank || !type_of(filled.dtype, view.dtype)) return false;
  view.rank = filled.ndim;
  std::copy_n(filled.shape, filled.ndim, view.shape.begin());
  std::copy_n(filled.strides, filled.ndim, view.stride.begin());
  view.data = static_cast<char*>(filled.data) + filled.byte_offset;
  return true;
}

bool has_layout(const TensorView& view, Layout layout) {
  if (layout == Layout::rows && view.rank == 2 && view.stride[1] == 1 && view.stride[0] >= view.shape[1]) return true;
  return view.contiguous();
}

// Strides of dimensions of one element, or of tensors without any, are whatever they came by.
TensorView settled(TensorView view) {
  if (view.rank == 0) {
    view.rank = 1;
    view.shape[0] = 1;
  }
  if (view.contiguous()) settle_strides(view);
  return view;
}

}  // namespace

void settle_strides(TensorView& view) {
  std::int64_t stride = 1;
  for (int i = view.rank; i-- > 0;) {
    view.stride[i] = stride;
    stride *= view.shape[i];
  }
}

TensorView view_of(nb::handle tensor, const std::string& name) {
  TensorView view;
  if (!view_by_exchange(tensor, view)) view = view_by_attributes(tensor, name);
  return settled(view);
}

TensorView facts_of(nb::handle tensor, const std::string& name) {
  alignas(std::max_align_t) static std::byte never_read;
  TensorView view = facts_by_attributes(tensor, name);
  view.data = &never_read;
  return settled(view);
}

TensorView Copies::view_of(nb::handle tensor, const std::string& name, Layout layout) {
  static PyObject* const names[] = {PyUnicode_InternFromString("is_neg"), PyUnicode_InternFromString("resolve_neg"),
                                    PyUnicode_InternFromString("contiguous")};
  if (result(tensor, names[0]).ptr() == Py_True) {
    kept_.push_back(result(tensor, names[1]));
    tensor = kept_.back();
  }
  const TensorView view = binding::view_of(tensor, name);
  if (has_layout(view, layout)) return view;
  kept_.push_back(result(tensor, names[2]));
  return binding::view_of(kept_.back(), name);
}

void bind_tensor(nb::module_& module) {
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void*) {
        try {
          std::rethrow_exception(pointer);
        } catch (const Error& error) { PyErr_SetString(exception_type(error.status()), error.what()); }
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
      "know_pytorch",
      [](const nb::dict& dtypes, nb::type_object tensor, nb::object exchange) {
        PyTorch& known = pytorch();
        known.dtypes.clear();
        for (const auto& [dtype, type] : dtypes) known.dtypes.push_back({dtype.ptr(), nb::cast<DataType>(type)});
        known.tensor = reinterpret_cast<PyTypeObject*>(tensor.ptr());
        known.exchange = exchange_of(exchange);
      },
      nb::arg("dtypes"), nb::arg("tensor"), nb::arg("exchange").none(),
      "Says which DataType each torch.dtype is (the others are refused), what a tensor is, and hands over the type's "
      "__dlpack_c_exchange_api__, if it has one.");
  module.def("view", &view_of, nb::arg("tensor"), nb::arg("name"));
  module.def("aligned_bytes", &aligned_bytes, nb::arg("size"), nb::arg("alignment"),
             "A torch.Tensor of `size` uninitialised bytes on the CPU, its address a multiple of `alignment`.");
}

}  // namespace moelith::binding
