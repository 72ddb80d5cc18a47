#include "moelith/layer.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <future>

#include "binding.hpp"
#include "moelith/group.hpp"

namespace nb = nanobind;

namespace moelith::binding {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Members of the types that hold the tensors of one expert stack: routed or shared, values or gradients.
template <class Struct>
nb::class_<Struct> expert_tensors(nb::handle scope, const char* name) {
  return nb::class_<Struct>(scope, name)
      .def(nb::init<>())
      .def_rw("gate_up_proj", &Struct::gate_up_proj)
      .def_rw("gate_up_bias", &Struct::gate_up_bias)
      .def_rw("down_proj", &Struct::down_proj)
      .def_rw("down_bias", &Struct::down_bias);
}

void bind_tensors_of_passes(nb::module_& module) {
  nb::class_<Gradient>(module, "Gradient")
      .def(nb::init<>())
      .def(
          "__init__",
          [](Gradient* self, const TensorView& tensor, bool accumulate) { new (self) Gradient{tensor, accumulate}; },
          nb::arg("tensor"), nb::arg("accumulate") = false)
      .def_rw("tensor", &Gradient::tensor)
      .def_rw("accumulate", &Gradient::accumulate);

  auto weights = expert_tensors<Weights>(module, "Weights");
  expert_tensors<Weights::Shared>(weights, "Shared");
  weights.def_rw("shared", &Weights::shared);
  auto weight_gradients = expert_tensors<WeightGradients>(module, "WeightGradients");
  expert_tensors<WeightGradients::Shared>(weight_gradients, "Shared");
  weight_gradients.def_rw("shared", &WeightGradients::shared);

  nb::class_<Inputs>(module, "Inputs")
      .def(nb::init<>())
      .def_rw("x", &Inputs::x)
      .def_rw("router_logits", &Inputs::router_logits)
      .def_rw("topk_ids", &Inputs::topk_ids)
      .def_rw("topk_weights", &Inputs::topk_weights)
      .def_rw("selection_bias", &Inputs::selection_bias)
      .def_rw("shared_gate_logits", &Inputs::shared_gate_logits)
      .def_rw("num_valid_tokens", &Inputs::num_valid_tokens)
      .def_rw("num_sequences", &Inputs::num_sequences)
      .def_rw("weights", &Inputs::weights);

  nb::class_<Outputs>(module, "Outputs")
      .def(nb::init<>())
      .def_rw("y", &Outputs::y)
      .def_rw("topk_ids", &Outputs::topk_ids)
      .def_rw("topk_weights", &Outputs::topk_weights)
      .def_rw("expert_counts", &Outputs::expert_counts)
      .def_rw("aux_loss", &Outputs::aux_loss)
      .def_rw("z_loss", &Outputs::z_loss);

  nb::class_<OutputGradients>(module, "OutputGradients")
      .def(nb::init<>())
      .def_rw("y", &OutputGradients::y)
      .def_rw("topk_weights", &OutputGradients::topk_weights)
      .def_rw("aux_loss", &OutputGradients::aux_loss)
      .def_rw("z_loss", &OutputGradients::z_loss);

  nb::class_<InputGradients>(module, "InputGradients")
      .def(nb::init<>())
      .def_rw("x", &InputGradients::x)
      .def_rw("router_logits", &InputGradients::router_logits)
      .def_rw("topk_weights", &InputGradients::topk_weights)
      .def_rw("shared_gate_logits", &InputGradients::shared_gate_logits)
      .def_rw("weights", &InputGradients::weights);
}

// The result of call(), which may wait for other ranks of the group; called without the interpreter's lock.
// watch_signals, on the main thread only: the call runs on a thread of its own while this one lets Python's signal
// handlers run. One that raises makes the group fail, which ends the call, and its exception goes to the caller.
template <class Call>
auto waiting_for_ranks(const Group& group, bool watch_signals, Call call) {
  if (!watch_signals) return call();
  auto result = std::async(std::launch::async, call);
  while (result.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
    nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() == 0) continue;
    nb::python_error raised;
    group.fail("interrupted by a signal");
    nb::gil_scoped_release unlocked;
    result.wait();
    throw raised;
  }
  return result.get();
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  if (!(seconds > 0 && seconds < 1e12)) {  // NaN too; the library knows the exact limits
    throw Error(Status::invalid_argument, "seconds: got " + std::to_string(seconds) + ", accepted are 0.001 to a year");
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

}  // namespace

void bind_layer(nb::module_& module) {
  bind_tensors_of_passes(module);

  nb::class_<Group>(module, "Group")
      .def_static("single", &Group::single)
      .def_static("threads", &Group::threads, nb::arg("ranks"))
      .def_static(
          "process",
          [](const std::string& name, int rank, int ranks, double seconds) {
            return Group::process(name, rank, ranks, milliseconds_of(seconds));
          },
          nb::arg("name"), nb::arg("rank"), nb::arg("ranks"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def("fail", &Group::fail, nb::arg("reason"))
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def("set_timeout", [](Group& self, double seconds) { self.set_timeout(milliseconds_of(seconds)); }, nb::arg("seconds"));

  nb::class_<PlanOptions>(module, "PlanOptions")
      .def(nb::init<>())
      .def_rw("max_tokens", &PlanOptions::max_tokens)
      .def_prop_rw(
          "device", [](const PlanOptions& self) { return self.device == DeviceKind::cpu ? "cpu" : "cuda"; },
          [](PlanOptions& self, const std::string& name) {
            if (name != "cpu" && name != "cuda") {
              throw Error(Status::unsupported, "device: '" + name + "'; accepted: 'cpu', 'cuda'");
            }
            self.device = name == "cpu" ? DeviceKind::cpu : DeviceKind::cuda;
          })
      .def_rw("workers", &PlanOptions::workers)
      .def_rw("recompute", &PlanOptions::recompute)
      .def_rw("group", &PlanOptions::group)
      .def_rw("expert_rank", &PlanOptions::expert_rank)
      .def_rw("tile_columns", &PlanOptions::tile_columns)
      .def_rw("shuffle_seed", &PlanOptions::shuffle_seed);

  nb::class_<BufferSizes>(module, "BufferSizes")
      .def_ro("saved", &BufferSizes::saved)
      .def_ro("workspace", &BufferSizes::workspace)
      .def_ro("formula", &BufferSizes::formula);

  nb::class_<Plan>(module, "Plan")
      .def_static(
          "create",
          [](const LayerConfig& config, const PlanOptions& options, bool watch_signals) {
            return waiting_for_ranks(options.group, watch_signals, [&] { return Plan::create(config, options); });
          },
          nb::arg("config"), nb::arg("options"), nb::arg("watch_signals") = false, Unlocked())
      .def_prop_ro("num_local_experts", &Plan::num_local_experts)
      .def_prop_ro("local_experts", &Plan::local_experts)
      .def("buffer_sizes", &Plan::buffer_sizes, nb::arg("tokens"))
      .def(
          "forward",
          [](const Plan& self, const Inputs& inputs, const Outputs& outputs, std::uintptr_t saved,
             std::uintptr_t workspace, std::uintptr_t stream, bool watch_signals) {
            waiting_for_ranks(self.options().group, watch_signals, [&] {
              self.forward(inputs, outputs, pointer(saved), pointer(workspace), pointer(stream));
            });
          },
          nb::arg("inputs"), nb::arg("outputs"), nb::arg("saved"), nb::arg("workspace"), nb::arg("stream") = 0,
          nb::arg("watch_signals") = false, Unlocked())
      .def(
          "backward",
          [](const Plan& self, const Inputs& inputs, std::uintptr_t saved, const OutputGradients& output_gradients,
             const InputGradients& input_gradients, std::uintptr_t workspace, std::uintptr_t stream,
             bool watch_signals) {
            waiting_for_ranks(self.options().group, watch_signals, [&] {
              self.backward(inputs, pointer(saved), output_gradients, input_gradients, pointer(workspace),
                            pointer(stream));
            });
          },
          nb::arg("inputs"), nb::arg("saved"), nb::arg("output_gradients"), nb::arg("input_gradients"),
          nb::arg("workspace"), nb::arg("stream") = 0, nb::arg("watch_signals") = false, Unlocked());

  module.def("update_selection_bias", &update_selection_bias, nb::arg("bias"), nb::arg("counts"), nb::arg("rate"));
}

}  // namespace moelith::binding
