// A mixture-of-experts layer in C++: config -> plan -> forward -> backward, in memory that the caller owns.
#include <cstdio>
#include <new>
#include <vector>

#include "moelith/layer.hpp"
using namespace moelith;

int main() {
  LayerConfig config{.hidden_size = 64, .intermediate_size = 128, .num_experts = 8, .top_k = 2, .dtype = DataType::float32};
  const std::int64_t tokens = 512;
  const Plan plan = Plan::create(config, {.max_tokens = tokens});
  auto tensor = [](std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
    TensorView view(nullptr, DataType::float32, shape);
    for (std::int64_t i = 0; i < view.numel(); ++i) values.push_back(0.1f * float(i * i % 19) - 0.9f);
    view.data = values.data();
    return view;
  };
  std::vector<float> x, logits, gate_up, down, y, dy, dx, d_gate_up;
  Inputs in{.x = tensor(x, {tokens, 64}), .router_logits = tensor(logits, {tokens, 8})};
  in.weights = {.gate_up_proj = tensor(gate_up, {8, 256, 64}), .down_proj = tensor(down, {8, 64, 128})};
  auto buffer = [](std::uint64_t bytes) { return ::operator new(bytes, std::align_val_t{256}); };
  void *saved = buffer(plan.buffer_sizes(tokens).saved), *workspace = buffer(plan.buffer_sizes(tokens).workspace);
  plan.forward(in, {.y = tensor(y, {tokens, 64})}, saved, workspace);
  InputGradients gradients{.x = tensor(dx, {tokens, 64})};
  gradients.weights.gate_up_proj.tensor = tensor(d_gate_up, {8, 256, 64});
  plan.backward(in, saved, {.y = tensor(dy, {tokens, 64})}, gradients, workspace);
  std::printf("y[0] = %g, dx[0] = %g, d_gate_up[0] = %g\n", y[0], dx[0], d_gate_up[0]);
  for (void* memory : {saved, workspace}) ::operator delete(memory, std::align_val_t{256});
}
