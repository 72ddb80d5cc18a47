// Random weights, inputs and upstream gradients of the reference for tests; outputs come out of order 1.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "reference/layer.hpp"

namespace moelith::reference {

class RandomCase {
 public:
  explicit RandomCase(std::uint64_t seed) : engine_(seed) {}

  // Uniform in (-1, 1), the same numbers with every standard library.
  double uniform() { return (static_cast<double>(engine_() >> 11) + 0.5) * 0x1p-52 - 1.0; }

  std::vector<double> tensor(std::int64_t size, double scale = 1.0) {
    std::vector<double> result(static_cast<std::size_t>(size));
    for (double& value : result) value = scale * uniform();
    return result;
  }

  Weights weights(const LayerConfig& config) {
    Weights result;
    fill(config, config.num_experts, config.intermediate_size, result);
    for (const SharedExpertConfig& shared : config.shared_experts) {
      fill(config, 1, shared.intermediate_size, result.shared.emplace_back());
    }
    return result;
  }

  // With logits; a caller's ids and weights are up to the test.
  Inputs inputs(const LayerConfig& config, std::int64_t tokens) {
    Inputs result;
    result.tokens = tokens;
    result.x = tensor(tokens * config.hidden_size, 1.7);
    result.router_logits = tensor(tokens * config.num_experts, 2.0);
    if (config.router.selection_bias) result.selection_bias = tensor(config.num_experts, 0.3);
    for (const SharedExpertConfig& shared : config.shared_experts) {
      if (!shared.gated || !result.shared_gate_logits.empty()) continue;
      result.shared_gate_logits = tensor(tokens * static_cast<std::int64_t>(config.shared_experts.size()), 2.0);
    }
    return result;
  }

  // Distinct ids with about one slot in six empty and, in some rows, one id twice.
  void bring_routes(const LayerConfig& config, Inputs& inputs) {
    inputs.router_logits.clear();
    inputs.topk_ids.clear();
    for (std::int64_t t = 0; t < inputs.tokens; ++t) {
      const std::int64_t first = static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(config.num_experts));
      for (std::int64_t j = 0; j < config.top_k; ++j) {
        inputs.topk_ids.push_back(engine_() % 6 == 0 ? -1 : (first + j) % config.num_experts);
      }
      if (config.top_k > 1 && engine_() % 3 == 0) inputs.topk_ids.back() = inputs.topk_ids.end()[-2];
    }
    inputs.topk_weights = tensor(inputs.tokens * config.top_k);
  }

  OutputGradients output_gradients(const LayerConfig& config, const Inputs& inputs) {
    const std::int64_t ranks = inputs.ranks.empty() ? 1 : static_cast<std::int64_t>(inputs.ranks.size());
    return {tensor(inputs.tokens * config.hidden_size), tensor(inputs.tokens * config.top_k), tensor(ranks),
            tensor(ranks)};
  }

 private:
  template <class ExpertWeights>
  void fill(const LayerConfig& config, std::int64_t count, std::int64_t width, ExpertWeights& w) {
    const std::int64_t h = config.hidden_size, rows = config.gate_up_rows(width);
    w.gate_up_proj = tensor(count * rows * h, 1.7 / std::sqrt(static_cast<double>(h)));
    w.down_proj = tensor(count * h * width, 1.7 / std::sqrt(static_cast<double>(width)));
    if (config.gate_up_bias) w.gate_up_bias = tensor(count * rows, 0.5);
    if (config.down_bias) w.down_bias = tensor(count * h, 0.5);
  }

  std::mt19937_64 engine_;
};

}  // namespace moelith::reference
