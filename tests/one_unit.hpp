// A dense layer in which one number passes through the activation alone: for the literal expectations of the cases F.
#pragma once

#include "tests/layer_fixture.hpp"

namespace moelith::test {

struct OneUnit {
  double value, d_gate, d_up;
};

// Unit 0 of one expert of 8 x 8 sees (gate, up), and its activation is y[0]; the gradients are those of y[0].
// run_problem(Problem) -> Results.
template <class Run>
OneUnit one_unit(const ActivationConfig& activation, double gate, double up, DataType dtype, Run run_problem) {
  constexpr std::size_t size = 8;
  Problem p;
  LayerConfig& c = p.config;
  c.hidden_size = c.intermediate_size = size;
  c.num_experts = c.top_k = 1;
  c.dtype = dtype;
  c.activation = activation;
  p.inputs.tokens = 1;
  p.inputs.x.assign(size, 0.0);
  p.inputs.x[0] = 1;
  p.inputs.topk_ids = {0};
  p.inputs.topk_weights = {1};
  p.weights.gate_up_proj.assign(2 * size * size, 0.0);
  p.weights.gate_up_proj[0] = gate;
  p.weights.gate_up_proj[size * size] = up;
  p.weights.down_proj.assign(size * size, 0.0);
  p.weights.down_proj[0] = 1;
  p.upstream.y = p.inputs.x;
  const Results r = run_problem(p);
  return {r.at("y")[0], r.at("d_gate_up_proj")[0], r.at("d_gate_up_proj")[size * size]};
}

}  // namespace moelith::test
