// A mixture-of-experts layer in C++: config -> plan -> forward -> backward, in memory that the caller owns.
#include <cstdio>
#include <vector>

#include "moelith/layer.hpp"
using namespace moelith;

struct alignas(256) Block { std::byte bytes[256]; };  // buffers start at a multiple of 256 bytes

int main() {
  LayerConfig config{.hidden_size = 64, .intermediate_size = 128, .num_experts = 8, .top_k = 2};
  config.dtype = DataType::float32;
  const Plan plan = Plan::create(config, {.max_tokens = 512});
  std::vector<float> x(512 * 64), logits(512 * 8), gate_up(8 * 256 * 64), down(8 * 64 * 128);
  std::vector<float> y(512 * 64), dy(512 * 64), dx(512 * 64), d_down(8 * 64 * 128);
  for (auto* values : {&x, &logits, &gate_up, &down, &dy}) {
    for (int i = 0; float& value : *values) value = 0.1f * float(i++ % 19) - 0.9f;
  }
  auto view = [](auto& values, auto... shape) { return TensorView(values.data(), DataType::float32, {shape...}); };
  Inputs in{.x = view(x, 512, 64), .router_logits = view(logits, 512, 8)};
  in.weights = {.gate_up_proj = view(gate_up, 8, 256, 64), .down_proj = view(down, 8, 64, 128)};
  const BufferSizes sizes = plan.buffer_sizes(512);
  std::vector<Block> saved(sizes.saved / 256 + 1), workspace(sizes.workspace / 256 + 1);
  plan.forward(in, {.y = view(y, 512, 64)}, saved.data(), workspace.data());
  InputGradients gradients{.x = view(dx, 512, 64)};
  gradients.weights.down_proj.tensor = view(d_down, 8, 64, 128);
  plan.backward(in, saved.data(), {.y = view(dy, 512, 64)}, gradients, workspace.data());
  std::printf("y[0] = %g, dx[0] = %g, d_down[0] = %g\n", y[0], dx[0], d_down[0]);
}
