#include "moelith/layer.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "binding.hpp"
#include "current_gpu.hpp"
#include "layer/arguments.hpp"
#include "moelith/group.hpp"

namespace nb = nanobind;

namespace moelith::binding {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// The tensors of the structs that passes take, in the order in which Python gives them.
template <class Struct>
struct Field {
  const char* name;
  TensorView Struct::*member;
};
constexpr Field<Inputs> input_fields[] = {
    {"x", &Inputs::x},
    {"router_logits", &Inputs::router_logits},
    {"topk_ids", &Inputs::topk_ids},
    {"topk_weights", &Inputs::topk_weights},
    {"selection_bias", &Inputs::selection_bias},
    {"shared_gate_logits", &Inputs::shared_gate_logits},
    {"num_valid_tokens", &Inputs::num_valid_tokens},
};
constexpr Field<Outputs> output_fields[] = {
    {"y", &Outputs::y},
    {"topk_ids", &Outputs::topk_ids},
    {"topk_weights", &Outputs::topk_weights},
    {"expert_counts", &Outputs::expert_counts},
    {"aux_loss", &Outputs::aux_loss},
    {"z_loss", &Outputs::z_loss},
};
constexpr Field<OutputGradients> output_gradient_fields[] = {
    {"y", &OutputGradients::y},
    {"topk_weights", &OutputGradients::topk_weights},
    {"aux_loss", &OutputGradients::aux_loss},
    {"z_loss", &OutputGradients::z_loss},
};
constexpr Field<InputGradients> input_gradient_fields[] = {
    {"x", &InputGradients::x},
    {"router_logits", &InputGradients::router_logits},
    {"topk_weights", &InputGradients::topk_weights},
    {"shared_gate_logits", &InputGradients::shared_gate_logits},
};

template <class Struct, std::size_t Count>
nb::tuple names_of(const Field<Struct> (&fields)[Count]) {
  nb::list names;
  for (const auto& field : fields) names.append(field.name);
  return nb::tuple(names);
}

// Sets the fields to read(tensor, name) from a sequence of as many tensors or None.
template <class Struct, std::size_t Count, class Read>
Struct struct_of(const Field<Struct> (&fields)[Count], const nb::sequence& tensors, Read&& read) {
  if (nb::len(tensors) != Count) throw nb::value_error("as many tensors are needed as there are names");
  Struct target;
  for (std::size_t i = 0; i < Count; ++i) {
    const nb::object tensor = tensors[i];
    if (!tensor.is_none()) target.*fields[i].member = read(tensor, fields[i].name);
  }
  return target;
}

// Names in errors: that of the argument, or of the gradient of it.
struct Given {
  TensorView operator()(nb::handle tensor, const char* name) const { return view_of(tensor, name); }
};
struct GradientOf {
  TensorView operator()(nb::handle tensor, const std::string& name) const {
    return view_of(tensor, "gradient of " + name);
  }
};

// Where each of a layer's weights belongs, from their names (LayerConfig.weights): "down_proj", "shared.3.down_proj".
class WeightPlaces {
 public:
  WeightPlaces(std::vector<std::string> names, std::size_t shared_experts)
      : names_(std::move(names)), shared_experts_(shared_experts) {
    for (const std::string& name : names_) {
      const std::size_t dot = name.rfind('.');
      const std::string member = dot == std::string::npos ? name : name.substr(dot + 1);
      const auto found = std::find(std::begin(members), std::end(members), member);
      int owner = routed;
      if (dot != std::string::npos) owner = std::stoi(name.substr(name.find('.') + 1));
      if (found == std::end(members) || owner >= static_cast<int>(shared_experts_))
        throw nb::value_error(("no weight is named " + name).c_str());
      places_.push_back({owner, static_cast<int>(found - std::begin(members))});
    }
  }
  // Sets all weights that are not None to convert(tensor, index, name).
  template <class Experts, class Convert>
  Experts fill(const nb::sequence& tensors, Convert&& convert) const {
    if (nb::len(tensors) != names_.size()) throw nb::value_error("as many tensors are needed as the layer has weights");
    Experts experts;
    experts.shared.resize(shared_experts_);
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const nb::object tensor = tensors[i];
      if (tensor.is_none()) continue;
      const auto [owner, member] = places_[i];
      (owner == routed ? member_of(experts, member)
                       : member_of(experts.shared[static_cast<std::size_t>(owner)], member)) =
          convert(tensor, i, names_[i]);
    }
    return experts;
  }

 private:
  static constexpr int routed = -1;
  static constexpr const char* members[] = {"gate_up_proj", "gate_up_bias", "down_proj", "down_bias"};
  template <class Owner>
  static auto& member_of(Owner& owner, int member) {
    return member == 0   ? owner.gate_up_proj
           : member == 1 ? owner.gate_up_bias
           : member == 2 ? owner.down_proj
                         : owner.down_bias;
  }
  struct Place {
    int owner, member;
  };
  std::vector<std::string> names_;
  std::size_t shared_experts_;
  std::vector<Place> places_;
};

// The inputs. Tensors, but no weights, are copied where their layout is none that the library takes: of x the rows may
// be apart, the others are contiguous. `copies` has to outlive the pass.
Inputs inputs_of(const nb::sequence& tensors, const nb::sequence& weights, const WeightPlaces& places,
                 std::int64_t num_sequences, Copies& copies) {
  Inputs inputs = struct_of(input_fields, tensors, [&](nb::handle tensor, const char* name) {
    return copies.view_of(tensor, name, name == input_fields[0].name ? Layout::rows : Layout::contiguous);
  });
  inputs.num_sequences = num_sequences;
  inputs.weights = places.fill<Weights>(
      weights, [](nb::handle tensor, std::size_t, const std::string& name) { return view_of(tensor, name); });
  return inputs;
}

// Refuses what a forward pass would refuse of tensors, which need no memory.
void check_inputs(const LayerConfig& config, std::int32_t local_experts, std::int64_t max_tokens,
                  const nb::sequence& tensors, const nb::sequence& weights, const WeightPlaces& places,
                  std::int64_t num_sequences) {
  config.validate();
  Inputs inputs = struct_of(input_fields, tensors, [](nb::handle tensor, const char* name) {
    TensorView view = facts_of(tensor, name);
    settle_strides(view);  // as its copy would lie
    return view;
  });
  inputs.num_sequences = num_sequences;
  inputs.weights = places.fill<Weights>(
      weights, [](nb::handle tensor, std::size_t, const std::string& name) { return facts_of(tensor, name); });
  layer::check_inputs(config, local_experts, max_tokens, inputs);
}

OutputGradients output_gradients_of(const nb::sequence& tensors, Copies& copies) {
  return struct_of(output_gradient_fields, tensors, [&](nb::handle tensor, const char* name) {
    return copies.view_of(tensor, std::string("gradient of ") + name,
                          name == output_gradient_fields[0].name ? Layout::rows : Layout::contiguous);
  });
}

// accumulate: bit i says that the gradient of weight i is added to what is there.
InputGradients input_gradients_of(const nb::sequence& tensors, const nb::sequence& weights, const WeightPlaces& places,
                                  std::uint64_t accumulate) {
  InputGradients gradients = struct_of(input_gradient_fields, tensors, GradientOf());
  gradients.weights =
      places.fill<WeightGradients>(weights, [&](nb::handle tensor, std::size_t i, const std::string& name) {
        return Gradient{GradientOf()(tensor, name), (accumulate >> i & 1) != 0};
      });
  return gradients;
}

void* memory_of(nb::handle tensor, const char* name) { return tensor.is_none() ? nullptr : view_of(tensor, name).data; }

void bind_tensors_of_passes(nb::module_& module) {
  nb::class_<WeightPlaces>(module, "WeightPlaces", "Where each of a layer's weights belongs.")
      .def(nb::init<std::vector<std::string>, std::size_t>(), nb::arg("names"), nb::arg("shared_experts"));
  module.attr("INPUTS") = names_of(input_fields);
  module.attr("DIFFERENTIABLE_INPUTS") = names_of(input_gradient_fields);
}

// The result of call(), which may wait for other ranks of the group; called without the interpreter's lock.
// watch_signals, on the main thread only: the call runs on a thread of its own while this one lets Python's signal
// handlers run. One that raises makes the group fail, which ends the call, and its exception goes to the caller.
template <class Call>
auto waiting_for_ranks(const Group& group, bool watch_signals, Call call) {
  if (!watch_signals) return call();
  auto result = std::async(std::launch::async, [gpu = current_gpu(), &call] {
    make_gpu_current(gpu);
    return call();
  });
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
          [](const std::string& name, int rank, int ranks, double seconds, const std::string& argument) {
            return Group::process(name, rank, ranks, milliseconds_of(seconds), argument);
          },
          nb::arg("name"), nb::arg("rank"), nb::arg("ranks"), nb::arg("seconds"), nb::arg("argument") = "name",
          nb::call_guard<nb::gil_scoped_release>())
      .def_static("place", &Group::place)
      .def_static("require_one_place", &Group::require_one_place, nb::arg("places"), nb::arg("what"))
      .def("fail", &Group::fail, nb::arg("reason"))
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("size", &Group::size)
      .def(
          "set_timeout", [](Group& self, double seconds) { self.set_timeout(milliseconds_of(seconds)); },
          nb::arg("seconds"));

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
      .def_rw("receive_capacity_factor", &PlanOptions::receive_capacity_factor)
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
          [](const Plan& self, const nb::sequence& tensors, const nb::sequence& weights, const WeightPlaces& places,
             std::int64_t num_sequences, const nb::sequence& results, nb::handle saved, nb::handle workspace,
             std::uintptr_t stream, bool watch_signals) {
            Copies copies;
            const Inputs inputs = inputs_of(tensors, weights, places, num_sequences, copies);
            const Outputs outputs = struct_of(output_fields, results, Given());
            void* const saved_at = memory_of(saved, "saved");
            void* const workspace_at = memory_of(workspace, "workspace");
            nb::gil_scoped_release unlocked;
            waiting_for_ranks(self.options().group, watch_signals,
                              [&] { self.forward(inputs, outputs, saved_at, workspace_at, pointer(stream)); });
          },
          nb::arg("tensors"), nb::arg("weights"), nb::arg("places"), nb::arg("num_sequences"), nb::arg("results"),
          nb::arg("saved").none(), nb::arg("workspace"), nb::arg("stream"), nb::arg("watch_signals"),
          "tensors: one for each of INPUTS, or None; results: y, topk_ids, topk_weights, expert_counts, aux_loss, "
          "z_loss.")
      .def(
          "backward",
          [](const Plan& self, const nb::sequence& tensors, const nb::sequence& weights, const WeightPlaces& places,
             std::int64_t num_sequences, nb::handle saved, const nb::sequence& upstream, const nb::sequence& of_inputs,
             const nb::sequence& of_weights, std::uint64_t accumulate, nb::handle workspace, std::uintptr_t stream,
             bool watch_signals) {
            Copies copies;
            const Inputs inputs = inputs_of(tensors, weights, places, num_sequences, copies);
            const OutputGradients output_gradients = output_gradients_of(upstream, copies);
            const InputGradients input_gradients = input_gradients_of(of_inputs, of_weights, places, accumulate);
            void* const saved_at = memory_of(saved, "saved");
            void* const workspace_at = memory_of(workspace, "workspace");
            nb::gil_scoped_release unlocked;
            waiting_for_ranks(self.options().group, watch_signals, [&] {
              self.backward(inputs, saved_at, output_gradients, input_gradients, workspace_at, pointer(stream));
            });
          },
          nb::arg("tensors"), nb::arg("weights"), nb::arg("places"), nb::arg("num_sequences"), nb::arg("saved"),
          nb::arg("upstream"), nb::arg("of_inputs"), nb::arg("of_weights"), nb::arg("accumulate"), nb::arg("workspace"),
          nb::arg("stream"), nb::arg("watch_signals"),
          "upstream: the gradients of y, topk_weights, aux_loss and z_loss; of_inputs, of_weights: where those of "
          "DIFFERENTIABLE_INPUTS and of the weights go, bit i of accumulate: added to what is there. None: not "
          "wanted.");

  module.def("check_inputs", &check_inputs, nb::arg("config"), nb::arg("local_experts"), nb::arg("max_tokens"),
             nb::arg("tensors"), nb::arg("weights"), nb::arg("places"), nb::arg("num_sequences"));
  module.def("update_selection_bias", &update_selection_bias, nb::arg("bias"), nb::arg("counts"), nb::arg("rate"));
}

}  // namespace moelith::binding
