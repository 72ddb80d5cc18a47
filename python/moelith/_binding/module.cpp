#include "binding.hpp"

NB_MODULE(_moelith, module) {
  // The Python package keeps plans and groups until the process ends, which is no leak.
  nanobind::set_leak_warnings(false);
  module.doc() = "The C++ interface of Moelith. The Python package moelith wraps it for PyTorch.";
  moelith::binding::bind_tensor(module);
  moelith::binding::bind_config(module);
  moelith::binding::bind_layer(module);
}
