// Random tensors of a layer, with values of order 1 all the way through: x and dY are about N(0, 1), and weights are
// scaled so that pre-activations and outputs are of order 1 too. (With values of 1e-5 a wrong result would pass for
// rounding.)
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moelith/layer.hpp"
#include "routes.hpp"

namespace moelith::tools {

// Memory of a number of bytes, aligned to 256, filled with 0xff: NaN in every floating-point type, -1 as an integer.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::uint64_t bytes);
  void* data() const { return memory_.get(); }
  std::uint64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;
  std::uint64_t size_ = 0;
};

// Tensors that live as long as this. Views stay valid when it is moved.
class TensorStore {
 public:
  // Filled with NaN or -1.
  TensorView add(DataType type, std::initializer_list<std::int64_t> shape);
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::vector<Buffer> buffers_;
  std::uint64_t bytes_ = 0;
};

// Element i becomes mean + scale * N(0, 1), rounded to the view's type; reproducible for any number of threads.
void fill_normal(const TensorView& view, double mean, double scale, std::uint64_t seed, std::uint64_t stream);

// All elements of a contiguous tensor.
std::vector<double> to_doubles(const TensorView& view);

// Bytes of all weights of the layer, each element of `element_size` bytes.
double weight_bytes(const LayerConfig& config, double element_size);

// Throws Error(invalid_argument) if `bytes` is more than the machine has free; `what` needs them.
void require_memory(double bytes, const std::string& what);

// How the routes reach the layer.
enum class Entry : std::uint8_t { logits, ids };

// Inputs, upstream gradients and room for results. Weights are made once; `variants` sets of everything else.
struct Problem {
  LayerConfig config;
  std::int64_t tokens = 0;
  TensorStore store;
  struct Variant {
    Inputs inputs;
    OutputGradients output_gradients;  // y, and the losses that the config has
  };
  std::vector<Variant> variants;
  Outputs outputs;
  InputGradients gradients;                            // all that there are
  std::uint64_t weight_bytes = 0, gradient_bytes = 0;  // of the weights alone
};

// Entry::logits: logits such that the router's choice is that of `routes`, as far as its rules allow, by a wide margin.
// A file's routes, which may hold -1, always come in as ids. E = 1 and k = 1 with Entry::logits: a router of one
// expert.
Problem make_problem(const LayerConfig& config, std::int64_t tokens, const RouteSpec& routes, Entry entry,
                     int variants);

// Calls f(name, gradient) for x, the router's inputs and all weights whose gradient is wanted.
template <class F>
void for_each_gradient(const InputGradients& g, F f) {
  auto call = [&](const std::string& name, const TensorView& view) {
    if (view.given()) f(name, view);
  };
  auto weights = [&](const std::string& prefix, const auto& w) {
    call(prefix + "gate_up_proj", w.gate_up_proj.tensor);
    call(prefix + "gate_up_bias", w.gate_up_bias.tensor);
    call(prefix + "down_proj", w.down_proj.tensor);
    call(prefix + "down_bias", w.down_bias.tensor);
  };
  call("d_x", g.x);
  call("d_router_logits", g.router_logits);
  call("d_topk_weights", g.topk_weights);
  call("d_shared_gate_logits", g.shared_gate_logits);
  weights("d_", g.weights);
  for (std::size_t s = 0; s < g.weights.shared.size(); ++s) {
    weights("d_shared." + std::to_string(s) + ".", g.weights.shared[s]);
  }
}

}  // namespace moelith::tools
