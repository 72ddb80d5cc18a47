// Literal cases of the reference's routers, capacity and losses. Gradients: layer_test.cpp, by finite differences.
#include "reference/router.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/compare.hpp"
#include "reference/random_case.hpp"

namespace moelith::reference {
namespace {

using Ids = std::vector<std::int64_t>;
using Values = std::vector<double>;

constexpr double infinity = std::numeric_limits<double>::infinity();
const double nan_value = std::numeric_limits<double>::quiet_NaN();

// A layer of one hidden column: the router is all that these tests look at.
LayerConfig router_layer(RouterKind kind, std::int32_t experts, std::int32_t top_k) {
  LayerConfig config;
  config.hidden_size = 1;
  config.intermediate_size = 1;
  config.num_experts = experts;
  config.top_k = top_k;
  config.router.kind = kind;
  return config;
}

Inputs logits_only(const LayerConfig& config, Values logits) {
  Inputs inputs;
  inputs.tokens = static_cast<std::int64_t>(logits.size()) / config.num_experts;
  inputs.x.assign(static_cast<std::size_t>(inputs.tokens), 1.0);
  inputs.router_logits = std::move(logits);
  return inputs;
}

ReferenceResult run(const LayerConfig& config, const Inputs& inputs) {
  return forward(config, RandomCase(1).weights(config), inputs);
}

Values logits_gradient(const LayerConfig& config, const Inputs& inputs, const OutputGradients& gradients) {
  return backward(config, RandomCase(1).weights(config), inputs, gradients).router_logits;
}

void expect_near(const Values& actual, const Values& expected, double tolerance = 1e-14) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
}

Values log_of(Values values) {
  for (double& value : values) value = std::log(value);
  return values;
}

TEST(ReferenceRouter, SoftmaxTopk) {
  LayerConfig config = router_layer(RouterKind::softmax_topk, 4, 2);
  const Inputs inputs = logits_only(config, log_of({1, 4, 2, 3}));  // softmax .1 .4 .2 .3
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{1, 3}));
  expect_near(run(config, inputs).topk_weights, {0.4, 0.3});
  config.router.scaling_factor = 2.0;
  expect_near(run(config, inputs).topk_weights, {0.8, 0.6});
  config.router.renormalize = true;
  expect_near(run(config, inputs).topk_weights, {2.0 * 4 / 7, 2.0 * 3 / 7});
}

TEST(ReferenceRouter, SelectionBiasChoosesAndDoesNotWeigh) {
  LayerConfig config = router_layer(RouterKind::softmax_topk, 4, 2);
  config.router.selection_bias = true;
  Inputs inputs = logits_only(config, log_of({1, 4, 2, 3}));
  inputs.selection_bias = {0.5, 0.0, 0.0, 0.0};  // .6 .4 .2 .3
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{0, 1}));
  expect_near(run(config, inputs).topk_weights, {0.1, 0.4});
  config.router.kind = RouterKind::topk_softmax;
  inputs.selection_bias = {2.0, 0.0, 0.0, 0.0};  // logits log(1) + 2 > log(4)
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{0, 1}));
  expect_near(run(config, inputs).topk_weights, {0.2, 0.8});
}

TEST(ReferenceRouter, TopkSoftmax) {
  const LayerConfig config = router_layer(RouterKind::topk_softmax, 4, 2);
  const ReferenceResult result = run(config, logits_only(config, log_of({1, 4, 2, 3})));
  EXPECT_EQ(result.topk_ids, (Ids{1, 3}));
  expect_near(result.topk_weights, {4.0 / 7, 3.0 / 7});
}

TEST(ReferenceRouter, Sigmoid) {
  LayerConfig config = router_layer(RouterKind::sigmoid, 4, 2);
  const Inputs inputs = logits_only(config, log_of({1, 4, 1.0 / 3, 3}));  // sigmoid .5 .8 .25 .75
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{1, 3}));
  expect_near(run(config, inputs).topk_weights, {0.8, 0.75});
  config.router.renormalize = true;
  config.router.scaling_factor = 2.5;
  expect_near(run(config, inputs).topk_weights, {2.5 * 0.8 / 1.55, 2.5 * 0.75 / 1.55});
}

TEST(ReferenceRouter, TiesGoToTheLowestId) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    const LayerConfig config = router_layer(kind, 5, 3);
    EXPECT_EQ(run(config, logits_only(config, {1, 2, 1, 2, 1})).topk_ids, (Ids{1, 3, 0})) << int(kind);
    EXPECT_EQ(run(config, logits_only(config, {0.0, -0.0, 0.0, -0.0, 0.0})).topk_ids, (Ids{0, 1, 2})) << int(kind);
  }
}

TEST(ReferenceRouter, R1RowsThatAreNotFinite) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    for (bool renormalize : {false, true}) {
      LayerConfig config = router_layer(kind, 8, 2);
      config.router.renormalize = renormalize;
      config.router.z_loss_coefficient = 0.1;
      config.router.aux_loss = AuxLossKind::batch;
      config.router.aux_loss_coefficient = 0.1;
      const Values finite{0.1, -2.0, 0.7, 0.3, 1.5, -0.4, 0.2, -1.0};
      Values logits(8, nan_value);
      logits.insert(logits.end(), finite.begin(), finite.end());
      logits[8 + 4] = nan_value;  // the best of row 1
      logits.insert(logits.end(), finite.begin(), finite.end());
      const Inputs inputs = logits_only(config, logits);
      const ReferenceResult result = run(config, inputs), alone = run(config, logits_only(config, finite));
      EXPECT_EQ(result.topk_ids, (Ids{0, 1, 2, 3, 4, 2}));
      EXPECT_EQ(result.topk_weights[0], 0.0);
      EXPECT_EQ(result.topk_weights[1], 0.0);
      EXPECT_EQ(result.topk_weights[4], alone.topk_weights[0]);
      EXPECT_EQ(result.topk_weights[5], alone.topk_weights[1]);
      EXPECT_EQ(result.y[2], alone.y[0]);
      EXPECT_TRUE(std::isfinite(result.aux_loss[0]) && std::isfinite(result.z_loss[0]));

      const Values gradient = logits_gradient(config, inputs, {{1, 1, 1}, {1, 2, 3, 4, 5, 6}, {1}, {1}});
      for (int i = 0; i < 8; ++i) EXPECT_EQ(gradient[i], 0.0);
      EXPECT_EQ(gradient[8 + 4], 0.0);
      for (double value : gradient) EXPECT_TRUE(std::isfinite(value));
      EXPECT_NE(gradient[8 + 2], 0.0);
    }
  }
}

TEST(ReferenceRouter, FiniteLogitsComeBeforeAllOthersHoweverLow) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    const LayerConfig config = router_layer(kind, 6, 4);
    const ReferenceResult result =
        run(config, logits_only(config, {infinity, -infinity, nan_value, -900.0, -infinity, -5.0}));
    EXPECT_EQ(result.topk_ids, (Ids{5, 3, 0, 1})) << int(kind);
    EXPECT_GT(result.topk_weights[0], 0.0);
    EXPECT_EQ(result.topk_weights[2], 0.0);
    EXPECT_EQ(result.topk_weights[3], 0.0);
  }
}

TEST(ReferenceRouter, RenormalisedWeightsOfVanishingScores) {
  // All that the bias lets in have a softmax score that float64 rounds to 0; their weights still add up to 1.
  LayerConfig config = router_layer(RouterKind::softmax_topk, 3, 2);
  config.router.renormalize = true;
  config.router.selection_bias = true;
  Inputs inputs = logits_only(config, {0.0, -1000.0, -1000.0 + std::log(3.0)});
  inputs.selection_bias = {-2.0, 0.0, 0.0};
  const ReferenceResult result = run(config, inputs);
  EXPECT_EQ(result.topk_ids, (Ids{1, 2}));
  expect_near(result.topk_weights, {0.25, 0.75}, 1e-12);
}

// sigmoid(0) = 0.5 for all; the bias makes the selection scores.
TEST(ReferenceRouter, R3DroppedGroupsNeverBeatNegativeScores) {
  LayerConfig config = router_layer(RouterKind::sigmoid, 4, 2);
  config.router.selection_bias = true;
  config.router.num_groups = 2;
  config.router.top_groups = 1;
  Inputs inputs = logits_only(config, log_of({1.0, 1.0 / 3, 3.0, 4.0}));  // scores .5 .25 .75 .8
  inputs.selection_bias = {-0.6, -0.45, -1.05, -1.2};                      // selection -.1 -.2 ; -.3 -.4
  for (std::int32_t size : {1, 2}) {
    config.router.group_score_size = size;
    EXPECT_EQ(run(config, inputs).topk_ids, (Ids{0, 1}));
    expect_near(run(config, inputs).topk_weights, {0.5, 0.25});
  }
  // The other group kept, all scores negative, for the three routers.
  inputs.selection_bias = {-1.6, -1.35, -1.05, -1.3};  // -1.1 -1.1 ; -.3 -.5
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{2, 3}));
  config.router.kind = RouterKind::topk_softmax;
  inputs.router_logits = {-1.0, -7.0, -5.0, -2.5};
  inputs.selection_bias = {0, 0, 0, 0};
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{3, 2}));  // -8 against -7.5
  config.router.group_score_size = 1;
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{0, 1}));
  config.router.kind = RouterKind::softmax_topk;
  inputs.selection_bias = {-5, -5, -4, -4};
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{3, 2}));
}

TEST(ReferenceRouter, GroupTiesAndGroupsThatAreNotFinite) {
  LayerConfig config = router_layer(RouterKind::sigmoid, 6, 2);
  config.router.num_groups = 3;
  config.router.top_groups = 1;
  EXPECT_EQ(run(config, logits_only(config, {-1, -1, 0, 1, 1, 0})).topk_ids, (Ids{3, 2}));  // groups 1 and 2 tie
  // Group 0 has no finite logit; group 2 has one, low. The remaining slot stays within the kept group.
  EXPECT_EQ(run(config, logits_only(config, {nan_value, infinity, nan_value, -infinity, nan_value, -50.0})).topk_ids,
            (Ids{5, 4}));
  EXPECT_EQ(run(config, logits_only(config, Values(6, nan_value))).topk_ids, (Ids{0, 1}));
}

TEST(ReferenceRouter, AuxLossAndItsTokens) {
  LayerConfig config = router_layer(RouterKind::softmax_topk, 2, 1);
  config.router.aux_loss = AuxLossKind::batch;
  config.router.aux_loss_coefficient = 0.5;
  // Scores (.75 .25) (.6 .4) (.2 .8): f = (2/3, 1/3), P = (1.55/3, 1.45/3).
  Inputs inputs = logits_only(config, log_of({3, 1, 3, 2, 1, 4}));
  const double f0 = 2.0 / 3, f1 = 1.0 / 3;
  EXPECT_NEAR(run(config, inputs).aux_loss[0], 0.5 * 2 * (f0 * 1.55 / 3 + f1 * 1.45 / 3), 1e-15);
  // Two valid tokens: f = (1, 0), P_0 = 1.35/2.
  inputs.ranks = {RankBatch{3, 2, 1}};
  EXPECT_NEAR(run(config, inputs).aux_loss[0], 0.5 * 2 * 1.35 / 2, 1e-15);
  inputs.ranks = {RankBatch{3, 0, 1}};
  EXPECT_EQ(run(config, inputs).aux_loss[0], 0.0);
  // Three sequences of one token, each with f = 1 at its own choice: the sum of their losses.
  config.router.aux_loss = AuxLossKind::sequence;
  inputs.ranks = {RankBatch{3, -1, 3}};
  EXPECT_NEAR(run(config, inputs).aux_loss[0], 0.5 * 2 * (0.75 + 0.6 + 0.8), 1e-15);
  // Two ranks of 2 and 1 tokens: f of all three, P over all three tokens; the ranks' losses add up to the whole.
  config.router.aux_loss = AuxLossKind::global;
  inputs.ranks = {RankBatch{2}, RankBatch{1}};
  const ReferenceResult result = run(config, inputs);
  EXPECT_NEAR(result.aux_loss[0], 0.5 * 2 * (f0 * 1.35 / 3 + f1 * 0.65 / 3), 1e-15);
  EXPECT_NEAR(result.aux_loss[1], 0.5 * 2 * (f0 * 0.2 / 3 + f1 * 0.8 / 3), 1e-15);
  EXPECT_EQ(result.expert_counts, (Ids{2, 0, 0, 1}));
}

TEST(ReferenceRouter, AuxLossNormalisesSigmoidScoresAndTakesTheFullSoftmax) {
  LayerConfig config = router_layer(RouterKind::sigmoid, 2, 1);
  config.router.aux_loss = AuxLossKind::batch;
  config.router.aux_loss_coefficient = 1.0;
  EXPECT_NEAR(run(config, logits_only(config, log_of({3, 1}))).aux_loss[0], 2 * 0.75 / 1.25, 1e-15);
  config.router.kind = RouterKind::topk_softmax;  // weight 1, but score .75
  EXPECT_NEAR(run(config, logits_only(config, log_of({3, 1}))).aux_loss[0], 2 * 0.75, 1e-15);
}

TEST(ReferenceRouter, A2SequenceLossOfTwoMicroBatches) {
  LayerConfig config = router_layer(RouterKind::sigmoid, 4, 2);
  config.router.aux_loss = AuxLossKind::sequence;
  config.router.aux_loss_coefficient = 0.1;
  RandomCase random(3);
  Inputs joined = random.inputs(config, 8);
  joined.ranks = {RankBatch{8, -1, 2}};
  OutputGradients only_aux;
  only_aux.aux_loss = {1.0};
  const Values gradient = logits_gradient(config, joined, only_aux);

  Values separate;
  double loss = 0.0;
  for (int part = 0; part < 2; ++part) {
    const auto begin = joined.router_logits.begin() + part * 16;
    const Inputs inputs = logits_only(config, Values(begin, begin + 16));
    const Values of_part = logits_gradient(config, inputs, only_aux);
    separate.insert(separate.end(), of_part.begin(), of_part.end());
    loss += run(config, inputs).aux_loss[0];
  }
  EXPECT_EQ(compare(separate, gradient, 4).worst_row, 0.0);
  EXPECT_GT(*std::max_element(gradient.begin(), gradient.end()), 1e-4);
  EXPECT_DOUBLE_EQ(run(config, joined).aux_loss[0], loss);
}

TEST(ReferenceRouter, ZLoss) {
  LayerConfig config = router_layer(RouterKind::softmax_topk, 2, 1);
  config.router.z_loss_coefficient = 0.5;
  const double e = std::exp(1.0);
  Inputs inputs = logits_only(config, log_of({e / 4, 3 * e / 4, e * e / 2, e * e / 2}));  // logsumexp 1 and 2
  EXPECT_NEAR(run(config, inputs).z_loss[0], 0.5 * (1 + 4) / 2, 1e-14);
  expect_near(logits_gradient(config, inputs, {{}, {}, {}, {2.0}}),
              {2 * 0.5 * 2 * 1 * 0.25 / 2, 2 * 0.5 * 2 * 1 * 0.75 / 2, 2 * 0.5 * 2 * 2 * 0.5 / 2,
               2 * 0.5 * 2 * 2 * 0.5 / 2});
  // A logit that is not finite is left out; a row without finite ones adds 0 and still counts as a token.
  inputs.router_logits = {1.0, infinity, nan_value, -infinity};
  EXPECT_NEAR(run(config, inputs).z_loss[0], 0.5 * 1 / 2, 1e-14);
}

TEST(ReferenceRouter, CapacityByScoreAndByPosition) {
  LayerConfig config = router_layer(RouterKind::softmax_topk, 2, 1);
  config.router.capacity_factor = 1.0;  // 4 tokens, k 1, E 2: 2 routes an expert
  config.router.aux_loss = AuxLossKind::batch;
  config.router.aux_loss_coefficient = 1.0;
  Inputs inputs = logits_only(config, log_of({3, 1, 4, 1, 9, 1, 4, 1}));  // all to expert 0: .75 .8 .9 .8
  config.router.drop_policy = DropPolicy::by_position;
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{0, 0, -1, -1}));
  expect_near(run(config, inputs).topk_weights, {0.75, 0.8, 0, 0});
  config.router.drop_policy = DropPolicy::by_score;
  const ReferenceResult result = run(config, inputs);
  EXPECT_EQ(result.topk_ids, (Ids{-1, 0, 0, -1}));  // of the two .8 the lower token stays
  EXPECT_EQ(result.expert_counts, (Ids{2, 0}));
  EXPECT_EQ(result.y[0], 0.0);
  EXPECT_NEAR(result.aux_loss[0], 2 * 3.25 / 4, 1e-15);  // f_0 = 1: before capacity
  // Dropped routes give no gradient, whatever comes from above.
  const Values gradient = logits_gradient(config, inputs, {{1, 1, 1, 1}, {1, 1, 1, 1}, {}, {}});
  EXPECT_EQ(gradient[0], 0.0);
  EXPECT_EQ(gradient[6], 0.0);
  EXPECT_NE(gradient[2], 0.0);
  // Absent rows count for the capacity and are not kept.
  inputs.ranks = {RankBatch{4, 1, 1}};
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{0, -1, -1, -1}));
  // Each rank has a capacity of its own: 2 and 1 of 3 and 1 tokens (1.5 rounds up).
  inputs.ranks = {RankBatch{3}, RankBatch{1}};
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{-1, 0, 0, 0}));
}

TEST(ReferenceRouter, ChosenIdsReplaceTheChoiceAlone) {
  LayerConfig config = router_layer(RouterKind::softmax_topk, 4, 2);
  Inputs inputs = logits_only(config, log_of({1, 4, 2, 3}));
  inputs.chosen_ids = {2, 0};
  EXPECT_EQ(run(config, inputs).topk_ids, (Ids{2, 0}));
  expect_near(run(config, inputs).topk_weights, {0.2, 0.1});
}

}  // namespace
}  // namespace moelith::reference
