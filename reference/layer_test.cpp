// The reference layer: small cases worked by hand, and finite differences of every gradient.
#include "reference/layer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "reference/compare.hpp"
#include "reference/random_case.hpp"

namespace moelith::reference {
namespace {

using Ids = std::vector<std::int64_t>;
using Values = std::vector<double>;

double inner(const Values& a, const Values& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Checks all gradients of <g_y, y> + <g_w, topk_weights> + <g_aux, aux_loss> + <g_z, z_loss> against central
// differences.
void check_gradients(const LayerConfig& config, Weights weights, Inputs inputs, const OutputGradients& upstream) {
  const auto objective = [&] {
    const ReferenceResult result = forward(config, weights, inputs);
    return inner(upstream.y, result.y) + inner(upstream.topk_weights, result.topk_weights) +
           inner(upstream.aux_loss, result.aux_loss) + inner(upstream.z_loss, result.z_loss);
  };
  const ReferenceGradients gradients = backward(config, weights, inputs, upstream);
  const auto check = [&](const std::string& name, Values& tensor, const Values& gradient) {
    ASSERT_EQ(gradient.size(), tensor.size()) << name;
    if (tensor.empty()) return;
    Values expected;
    for (double& element : tensor) {
      const double step = 1e-5, at = element;
      element = at + step;
      const double above = objective();
      element = at - step;
      const double below = objective();
      element = at;
      expected.push_back((above - below) / (2 * step));
    }
    EXPECT_LT(compare(gradient, expected, static_cast<std::int64_t>(tensor.size())).rel_fro, 2e-8) << name;
  };
  const auto check_expert = [&](const std::string& prefix, auto& w, const auto& d) {
    check(prefix + "gate_up_proj", w.gate_up_proj, d.gate_up_proj);
    check(prefix + "gate_up_bias", w.gate_up_bias, d.gate_up_bias);
    check(prefix + "down_proj", w.down_proj, d.down_proj);
    check(prefix + "down_bias", w.down_bias, d.down_bias);
  };
  check("x", inputs.x, gradients.x);
  check("router_logits", inputs.router_logits, gradients.router_logits);
  check("topk_weights", inputs.topk_weights, gradients.topk_weights);
  check("shared_gate_logits", inputs.shared_gate_logits, gradients.shared_gate_logits);
  check_expert("", weights, gradients.weights);
  for (std::size_t s = 0; s < weights.shared.size(); ++s) {
    check_expert("shared." + std::to_string(s) + ".", weights.shared[s], gradients.weights.shared[s]);
  }
}

LayerConfig small_layer() {
  LayerConfig config;
  config.hidden_size = 3;
  config.intermediate_size = 2;
  config.num_experts = 4;
  config.top_k = 2;
  return config;
}

TEST(ReferenceGradient, EveryActivationPlacementAndBias) {
  std::uint64_t seed = 100;
  for (ActivationKind kind : {ActivationKind::swiglu, ActivationKind::swiglu_clamped, ActivationKind::geglu_erf,
                              ActivationKind::geglu_tanh, ActivationKind::relu_squared}) {
    for (WeightPlacement placement : {WeightPlacement::after_down, WeightPlacement::before_down}) {
      for (int biases = 0; biases < 4; ++biases) {
        SCOPED_TRACE("activation " + std::to_string(int(kind)) + " placement " + std::to_string(int(placement)) +
                     " biases " + std::to_string(biases));
        LayerConfig config = small_layer();
        config.activation.kind = kind;
        config.activation.limit = 0.9;  // within the range of values, so that the clamps act
        config.weight_placement = placement;
        config.gate_up_bias = biases & 1;
        config.down_bias = biases & 2;
        config.shared_experts = {{1, true}, {3, false}};
        RandomCase random(seed++);
        const Weights weights = random.weights(config);
        const Inputs inputs = random.inputs(config, 4);
        check_gradients(config, weights, inputs, random.output_gradients(config, inputs));
      }
    }
  }
}

TEST(ReferenceGradient, EveryRouterAndLoss) {
  std::uint64_t seed = 200;
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    for (AuxLossKind aux : {AuxLossKind::none, AuxLossKind::batch, AuxLossKind::sequence, AuxLossKind::global}) {
      for (int options = 0; options < 8; ++options) {
        SCOPED_TRACE("router " + std::to_string(int(kind)) + " aux " + std::to_string(int(aux)) + " options " +
                     std::to_string(options));
        LayerConfig config = small_layer();
        config.hidden_size = 2;
        config.num_experts = 6;
        config.router.kind = kind;
        config.router.aux_loss = aux;
        config.router.aux_loss_coefficient = aux == AuxLossKind::none ? 0.0 : 0.7;
        config.router.z_loss_coefficient = 0.3;
        config.router.renormalize = options & 1;
        config.router.scaling_factor = options & 1 ? 2.5 : 1.0;
        config.router.selection_bias = options & 2;
        if (options & 2) {
          config.router.num_groups = 3;
          config.router.top_groups = 2;
        }
        if (options & 4) {
          config.router.capacity_factor = 0.7;
          config.router.drop_policy = options & 1 ? DropPolicy::by_score : DropPolicy::by_position;
        }
        RandomCase random(seed++);
        const Weights weights = random.weights(config);
        Inputs inputs = random.inputs(config, 10);
        inputs.ranks = {RankBatch{6, 5, 2}, RankBatch{4, -1, 1}};
        check_gradients(config, weights, inputs, random.output_gradients(config, inputs));
      }
    }
  }
}

TEST(ReferenceGradient, RoutesOfTheCaller) {
  for (WeightPlacement placement : {WeightPlacement::after_down, WeightPlacement::before_down}) {
    for (double capacity_factor : {0.0, 0.7}) {
      LayerConfig config = small_layer();
      config.top_k = 3;
      config.down_bias = true;
      config.weight_placement = placement;
      config.router.capacity_factor = capacity_factor;
      config.router.drop_policy = DropPolicy::by_position;
      RandomCase random(300);
      const Weights weights = random.weights(config);
      Inputs inputs = random.inputs(config, 6);
      random.bring_routes(config, inputs);
      inputs.ranks = {RankBatch{6, 5, 1}};
      check_gradients(config, weights, inputs, random.output_gradients(config, inputs));
    }
  }
}

TEST(ReferenceGradient, DenseMlpAndChosenIds) {
  LayerConfig config = small_layer();
  config.num_experts = 1;
  config.top_k = 1;
  RandomCase random(400);
  Weights weights = random.weights(config);
  Inputs inputs = random.inputs(config, 3);
  inputs.router_logits.clear();
  check_gradients(config, weights, inputs, random.output_gradients(config, inputs));

  config = small_layer();
  weights = random.weights(config);
  inputs = random.inputs(config, 2);
  inputs.chosen_ids = {3, 1, 0, 2};
  check_gradients(config, weights, inputs, random.output_gradients(config, inputs));
}

// H = 2, I = 1, squared ReLU: FFN_e(x) = down_e max(<w_e, x> + b, 0)^2 + c_e. Expert 0: w (1, 1), b 0, down (1, 2),
// c (10, 20). Expert 1: w (1, -1), b 1, down (3, 0), c (0, 5). x = (2, 1): FFN_0 = (9 + 10, 18 + 20), FFN_1 = (12, 5).
struct HandCase {
  LayerConfig config;
  Weights weights;
  Inputs inputs;

  HandCase() {
    config.hidden_size = 2;
    config.intermediate_size = 1;
    config.num_experts = 2;
    config.top_k = 2;
    config.activation.kind = ActivationKind::relu_squared;
    config.gate_up_bias = config.down_bias = true;
    weights.gate_up_proj = {1, 1, 1, -1};
    weights.gate_up_bias = {0, 1};
    weights.down_proj = {1, 2, 3, 0};
    weights.down_bias = {10, 20, 0, 5};
    inputs.tokens = 1;
    inputs.x = {2, 1};
    inputs.topk_ids = {1, 0};
    inputs.topk_weights = {2, 0.5};
  }
};

TEST(ReferenceLayer, WeightsAfterDown) {
  HandCase hand;
  EXPECT_EQ(forward(hand.config, hand.weights, hand.inputs).y, (Values{24 + 9.5, 10 + 19}));
}

TEST(ReferenceLayer, WeightsBeforeDownLeaveTheBiasUnscaled) {
  HandCase hand;
  hand.config.weight_placement = WeightPlacement::before_down;
  EXPECT_EQ(forward(hand.config, hand.weights, hand.inputs).y, (Values{24 + 0 + 4.5 + 10, 0 + 5 + 9 + 20}));
  // A weight of 0 leaves the bias alone; an empty slot leaves nothing.
  hand.inputs.topk_weights = {0, 0};
  EXPECT_EQ(forward(hand.config, hand.weights, hand.inputs).y, (Values{10, 25}));
  hand.inputs.topk_ids = {-1, 0};
  EXPECT_EQ(forward(hand.config, hand.weights, hand.inputs).y, (Values{10, 20}));
}

TEST(ReferenceLayer, AnExpertTwiceInARowAddsTwice) {
  HandCase hand;
  hand.inputs.topk_ids = {0, 0};
  const ReferenceResult result = forward(hand.config, hand.weights, hand.inputs);
  EXPECT_EQ(result.y, (Values{2.5 * 19, 2.5 * 38}));
  EXPECT_EQ(result.expert_counts, (Ids{2, 0}));
}

TEST(ReferenceLayer, SharedExpertsOfTheirOwnWidth) {
  HandCase hand;
  hand.config.shared_experts = {{2, true}, {1, false}};
  // Shared 0, gate sigmoid(log 3) = .75: rows (1, 0), (0, 1) -> squares 4, 1; down ((1, 1), (0, 2)); bias (1, 1):
  // (5 + 1, 2 + 1). Shared 1: row (0, 3) -> 9, down (1, 0), bias 0: (9, 0).
  hand.weights.shared = {{{1, 0, 0, 1}, {0, 0}, {1, 1, 0, 2}, {1, 1}}, {{0, 3}, {0}, {1, 0}, {0, 0}}};
  hand.inputs.shared_gate_logits = {std::log(3.0), -50.0};  // the second has no gate: its logit means nothing
  hand.inputs.topk_ids = {-1, -1};
  const ReferenceResult result = forward(hand.config, hand.weights, hand.inputs);
  EXPECT_NEAR(result.y[0], 4.5 + 9, 1e-14);
  EXPECT_NEAR(result.y[1], 2.25, 1e-14);
  OutputGradients upstream;
  upstream.y = {1, 0};
  const ReferenceGradients gradients = backward(hand.config, hand.weights, hand.inputs, upstream);
  EXPECT_NEAR(gradients.shared_gate_logits[0], 6 * 0.75 * 0.25, 1e-14);
  EXPECT_EQ(gradients.shared_gate_logits[1], 0.0);
}

TEST(ReferenceLayer, D1EmptySlotsDoNotShiftRows) {
  HandCase hand;
  hand.inputs.tokens = 4;
  hand.inputs.x = {2, 1, 1, 3, 4, 0, 5, 5};
  hand.inputs.topk_ids = {0, -1, -1, 1, 1, 0, -1, -1};
  hand.inputs.topk_weights = Values(8, 1.0);
  const ReferenceResult result = forward(hand.config, hand.weights, hand.inputs);
  // FFN_0: t0 z 3, t2 z 4; FFN_1: t1 z -1, t2 z 5.
  EXPECT_EQ(result.y, (Values{9 + 10, 18 + 20, 0, 5, 16 + 10 + 75, 32 + 20 + 5, 0, 0}));
  EXPECT_EQ(result.expert_counts, (Ids{2, 2}));
  EXPECT_EQ(result.topk_ids, hand.inputs.topk_ids);
  EXPECT_EQ(result.topk_weights, (Values{1, 0, 0, 1, 1, 1, 0, 0}));

  OutputGradients upstream;
  upstream.y = Values(8, 1.0);
  const ReferenceGradients gradients = backward(hand.config, hand.weights, hand.inputs, upstream);
  EXPECT_EQ(gradients.x[6], 0.0);
  EXPECT_EQ(gradients.x[7], 0.0);
  EXPECT_EQ(gradients.topk_weights, (Values{19 + 38, 0, 0, 5, 75 + 5, 26 + 52, 0, 0}));
  EXPECT_EQ(gradients.weights.down_bias, (Values{2, 2, 2, 2}));
  EXPECT_EQ(gradients.weights.down_proj, (Values{9 + 16, 9 + 16, 25, 25}));
}

TEST(ReferenceLayer, AbsentRowsAreNeverRead) {
  LayerConfig config = small_layer();
  config.shared_experts = {{2, false}};
  config.router.aux_loss = AuxLossKind::batch;
  config.router.aux_loss_coefficient = config.router.z_loss_coefficient = 0.1;
  RandomCase random(5);
  const Weights weights = random.weights(config);
  Inputs inputs = random.inputs(config, 5);
  const OutputGradients upstream = random.output_gradients(config, inputs);
  inputs.ranks = {RankBatch{5, 3, 1}};
  const ReferenceResult clean = forward(config, weights, inputs);
  const ReferenceGradients clean_gradients = backward(config, weights, inputs, upstream);
  Inputs dirty = inputs;
  const double nan_value = std::numeric_limits<double>::quiet_NaN();
  std::fill(dirty.x.begin() + 9, dirty.x.end(), nan_value);
  std::fill(dirty.router_logits.begin() + 12, dirty.router_logits.end(), nan_value);
  const ReferenceResult result = forward(config, weights, dirty);
  const ReferenceGradients gradients = backward(config, weights, dirty, upstream);
  EXPECT_EQ(result.y, clean.y);
  EXPECT_EQ(result.topk_ids, clean.topk_ids);
  EXPECT_EQ(result.aux_loss, clean.aux_loss);
  EXPECT_EQ(result.z_loss, clean.z_loss);
  EXPECT_EQ(gradients.x, clean_gradients.x);
  EXPECT_EQ(gradients.router_logits, clean_gradients.router_logits);
  EXPECT_EQ(gradients.weights.gate_up_proj, clean_gradients.weights.gate_up_proj);
  for (std::size_t i = 9; i < 15; ++i) {
    EXPECT_EQ(result.y[i], 0.0);
    EXPECT_EQ(gradients.x[i], 0.0);
  }
  EXPECT_EQ(result.topk_ids[6], -1);
}

TEST(ReferenceLayer, RanksAreOneBatch) {
  LayerConfig config = small_layer();
  RandomCase random(6);
  const Weights weights = random.weights(config);
  Inputs inputs = random.inputs(config, 7);
  const OutputGradients upstream = random.output_gradients(config, inputs);
  const Values y = forward(config, weights, inputs).y;
  const Values gradient = backward(config, weights, inputs, upstream).weights.down_proj;
  inputs.ranks = {RankBatch{0}, RankBatch{5}, RankBatch{2}};
  EXPECT_EQ(forward(config, weights, inputs).y, y);
  EXPECT_EQ(forward(config, weights, inputs).aux_loss.size(), 3u);
  OutputGradients only_y;
  only_y.y = upstream.y;
  EXPECT_EQ(backward(config, weights, inputs, only_y).weights.down_proj, gradient);
}

TEST(ReferenceLayer, ThreadsDoNotChangeTheBits) {
  LayerConfig config = small_layer();
  config.hidden_size = 96;
  config.intermediate_size = 40;
  config.shared_experts = {{24, true}};
  RandomCase random(7);
  const Weights weights = random.weights(config);
  const Inputs inputs = random.inputs(config, 50);
  const OutputGradients upstream = random.output_gradients(config, inputs);
  const ReferenceResult one = forward(config, weights, inputs, 1), four = forward(config, weights, inputs, 4);
  EXPECT_EQ(one.y, four.y);
  const ReferenceGradients d_one = backward(config, weights, inputs, upstream, 1);
  const ReferenceGradients d_four = backward(config, weights, inputs, upstream, 4);
  EXPECT_EQ(d_one.x, d_four.x);
  EXPECT_EQ(d_one.router_logits, d_four.router_logits);
  EXPECT_EQ(d_one.weights.gate_up_proj, d_four.weights.gate_up_proj);
}

TEST(ReferenceLayer, NoTokensAndExpertsWithoutTokens) {
  LayerConfig config = small_layer();
  RandomCase random(8);
  const Weights weights = random.weights(config);
  const ReferenceGradients none = backward(config, weights, Inputs{}, OutputGradients{});
  EXPECT_EQ(none.weights.gate_up_proj, Values(weights.gate_up_proj.size()));
  EXPECT_TRUE(forward(config, weights, Inputs{}).y.empty());

  Inputs inputs = random.inputs(config, 2);
  inputs.router_logits = {9, 8, 0, 0, 8, 9, 0, 0};  // experts 2 and 3 get none
  const Values gradient =
      backward(config, weights, inputs, random.output_gradients(config, inputs)).weights.down_proj;
  for (std::size_t i = 0; i < gradient.size(); ++i) EXPECT_EQ(gradient[i] == 0.0, i >= gradient.size() / 2) << i;
}

TEST(ReferenceLayer, BadInputNamesTheArgument) {
  const HandCase hand;
  const auto message = [&](const std::function<void(HandCase&)>& spoil) {
    HandCase spoilt = hand;
    spoil(spoilt);
    try {
      forward(spoilt.config, spoilt.weights, spoilt.inputs);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      return std::string(error.what());
    }
    return std::string("nothing thrown");
  };
  const auto expect_named = [&](const std::string& name, const std::function<void(HandCase&)>& spoil) {
    EXPECT_NE(message(spoil).find(name), std::string::npos) << message(spoil);
  };
  expect_named("x has 1 elements, expected 2", [](HandCase& c) { c.inputs.x.pop_back(); });
  expect_named("topk_ids holds 2", [](HandCase& c) { c.inputs.topk_ids[0] = 2; });
  expect_named("topk_ids holds -2", [](HandCase& c) { c.inputs.topk_ids[0] = -2; });
  expect_named("topk_weights", [](HandCase& c) { c.inputs.topk_weights.clear(); });
  expect_named("gate_up_bias", [](HandCase& c) { c.weights.gate_up_bias.clear(); });
  expect_named("down_bias", [](HandCase& c) { c.config.down_bias = false; });
  expect_named("top_k", [](HandCase& c) { c.config.top_k = 3; });
  expect_named("router_logits", [](HandCase& c) { c.inputs.router_logits = {0, 0}; });
  expect_named("neither router_logits nor topk_ids", [](HandCase& c) {
    c.inputs.topk_ids.clear();
    c.inputs.topk_weights.clear();
  });
  expect_named("ranks' tokens", [](HandCase& c) { c.inputs.ranks = {RankBatch{2}}; });
  expect_named("num_sequences", [](HandCase& c) { c.inputs.ranks = {RankBatch{1, -1, 2}}; });
}

}  // namespace
}  // namespace moelith::reference
