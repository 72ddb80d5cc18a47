#include "moelith/config.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace moelith {
namespace {

LayerConfig good_config() {
  LayerConfig config;
  config.hidden_size = 64;
  config.intermediate_size = 32;
  config.num_experts = 8;
  config.top_k = 2;
  return config;
}

// The error text after `change` was made to a good config; "" if it was accepted.
std::string error_after(const std::function<void(LayerConfig&)>& change) {
  LayerConfig config = good_config();
  change(config);
  try {
    config.validate();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    return error.what();
  }
  return "";
}

TEST(Config, AGoodConfigIsAccepted) {
  EXPECT_EQ(error_after([](LayerConfig&) {}), "");
  EXPECT_EQ(error_after([](LayerConfig& c) {
              c.num_experts = 1024;
              c.top_k = 32;
              c.shared_experts.assign(8, {24, true});
              c.router.kind = RouterKind::sigmoid;
              c.router.num_groups = 8;
              c.router.top_groups = 4;
              c.router.aux_loss = AuxLossKind::sequence;
              c.router.aux_loss_coefficient = 1e-4;
              c.router.capacity_factor = 1.25;
              c.router.drop_policy = DropPolicy::by_position;
              c.activation.kind = ActivationKind::swiglu_clamped;
              c.activation.limit = std::numeric_limits<double>::infinity();
              c.weight_placement = WeightPlacement::before_down;
              c.dtype = DataType::float64;
            }),
            "");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.num_experts = c.top_k = 1; }), "");
}

TEST(Config, EveryFieldIsCheckedAndNamed) {
  const double nan = std::nan("");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.hidden_size = 12; }),
            "hidden_size is 12; accepted: a multiple of 8 from 8 to 1048576");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.hidden_size = 0; }),
            "hidden_size is 0; accepted: a multiple of 8 from 8 to 1048576");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.intermediate_size = -8; }),
            "intermediate_size is -8; accepted: a multiple of 8 from 8 to 1048576");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.intermediate_size = std::int64_t{1} << 40; }),
            "intermediate_size is 1099511627776; accepted: a multiple of 8 from 8 to 1048576");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.num_experts = 0; }), "num_experts is 0; accepted: 1 to 1024");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.num_experts = 1025; }), "num_experts is 1025; accepted: 1 to 1024");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.top_k = 9; }), "top_k is 9; accepted: 1 to min(num_experts, 32) = 8");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.num_experts = 64, c.top_k = 33; }),
            "top_k is 33; accepted: 1 to min(num_experts, 32) = 32");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.top_k = 0; }), "top_k is 0; accepted: 1 to min(num_experts, 32) = 8");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.dtype = DataType::int32; }),
            "dtype is int32; accepted: float64, float32, bfloat16");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.dtype = static_cast<DataType>(200); }),
            "dtype is 200; accepted: float64, float32, bfloat16");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.activation.kind = static_cast<ActivationKind>(9); }),
            "activation.kind is 9; accepted: swiglu, swiglu_clamped, geglu_erf, geglu_tanh, relu_squared");
  EXPECT_EQ(error_after([](LayerConfig& c) {
              c.activation.kind = ActivationKind::swiglu_clamped;
              c.activation.limit = 0;
            }),
            "activation.limit is 0; accepted: a number above 0 (infinity: no clamp)");
  EXPECT_EQ(error_after([&](LayerConfig& c) {
              c.activation.kind = ActivationKind::swiglu_clamped;
              c.activation.alpha = nan;
            }),
            "activation.alpha is nan; accepted: a finite number");
  EXPECT_EQ(error_after([&](LayerConfig& c) {
              c.activation.kind = ActivationKind::swiglu_clamped;
              c.activation.up_offset = INFINITY;
            }),
            "activation.up_offset is inf; accepted: a finite number");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.weight_placement = static_cast<WeightPlacement>(2); }),
            "weight_placement is 2; accepted: after_down, before_down");
  EXPECT_EQ(error_after([](LayerConfig& c) {
              c.shared_experts.resize(9, {8, false});
            }),
            "the number of shared_experts is 9; accepted: at most 8");
  EXPECT_EQ(error_after([](LayerConfig& c) {
              c.shared_experts = {{8, false}, {20, false}};
            }),
            "shared_experts[1].intermediate_size is 20; accepted: a multiple of 8 from 8 to 1048576");
}

TEST(Config, EveryRouterFieldIsCheckedAndNamed) {
  const double nan = std::nan("");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.kind = static_cast<RouterKind>(3); }),
            "router.kind is 3; accepted: softmax_topk, topk_softmax, sigmoid");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.scaling_factor = 0; }),
            "router.scaling_factor is 0; accepted: a finite number above 0");
  EXPECT_EQ(error_after([&](LayerConfig& c) { c.router.scaling_factor = nan; }),
            "router.scaling_factor is nan; accepted: a finite number above 0");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.num_groups = 3; }),
            "router.num_groups is 3; accepted: a divisor of num_experts = 8");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.num_groups = 0; }),
            "router.num_groups is 0; accepted: a divisor of num_experts = 8");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.num_groups = 4, c.router.top_groups = 5; }),
            "router.top_groups is 5; accepted: 1 to router.num_groups = 4");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.group_score_size = 3; }),
            "router.group_score_size is 3; accepted: 1 or 2");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.num_groups = 8, c.router.top_groups = 4; }),
            "router.group_score_size is 2; accepted: at most the experts of a group, num_experts / router.num_groups = "
            "1");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.top_k = 3, c.router.num_groups = 4; }),
            "top_k is 3; accepted: at most the experts of the kept groups, router.top_groups * num_experts / "
            "router.num_groups = 2");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.aux_loss = static_cast<AuxLossKind>(4); }),
            "router.aux_loss is 4; accepted: none, batch, sequence, global");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.aux_loss_coefficient = -1; }),
            "router.aux_loss_coefficient is -1; accepted: a finite number, 0 or above");
  EXPECT_EQ(error_after([&](LayerConfig& c) { c.router.z_loss_coefficient = nan; }),
            "router.z_loss_coefficient is nan; accepted: a finite number, 0 or above");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.capacity_factor = -0.5; }),
            "router.capacity_factor is -0.5; accepted: 0 (no capacity) or a finite number above 0");
  EXPECT_EQ(error_after([](LayerConfig& c) { c.router.drop_policy = static_cast<DropPolicy>(2); }),
            "router.drop_policy is 2; accepted: by_score, by_position");
}

TEST(Config, NamesGoBothWays) {
  for (const char* name : {"swiglu", "swiglu_clamped", "geglu_erf", "geglu_tanh", "relu_squared"}) {
    EXPECT_STREQ(to_string(activation_kind_from(name)), name);
  }
  for (const char* name : {"after_down", "before_down"}) EXPECT_STREQ(to_string(weight_placement_from(name)), name);
  for (const char* name : {"softmax_topk", "topk_softmax", "sigmoid"}) {
    EXPECT_STREQ(to_string(router_kind_from(name)), name);
  }
  for (const char* name : {"none", "batch", "sequence", "global"}) {
    EXPECT_STREQ(to_string(aux_loss_kind_from(name)), name);
  }
  for (const char* name : {"by_score", "by_position"}) EXPECT_STREQ(to_string(drop_policy_from(name)), name);
  for (const char* name : {"float64", "float32", "bfloat16", "int64", "int32", "uint8"}) {
    EXPECT_STREQ(to_string(data_type_from(name)), name);
  }
  EXPECT_EQ(activation_kind_from("relu_squared"), ActivationKind::relu_squared);
  EXPECT_EQ(router_kind_from("topk_softmax"), RouterKind::topk_softmax);
}

TEST(Config, UnknownNamesListTheAcceptedOnes) {
  try {
    activation_kind_from("gelu");
    FAIL() << "an ambiguous GELU was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_STREQ(error.what(),
                 "activation is \"gelu\"; accepted: swiglu, swiglu_clamped, geglu_erf, geglu_tanh, relu_squared");
  }
  EXPECT_THROW(router_kind_from(""), Error);
  EXPECT_THROW(data_type_from("fp32"), Error);
  EXPECT_THROW(aux_loss_kind_from("None"), Error);
  EXPECT_THROW(drop_policy_from("score"), Error);
  EXPECT_THROW(weight_placement_from("after"), Error);
}

}  // namespace
}  // namespace moelith
