#include "routing/capacity.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace moelith::routing {
namespace {

struct Routes {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Routes limited(Routes routes, DropPolicy policy, std::int64_t capacity, std::int32_t top_k, std::int32_t num_experts) {
  const std::int64_t tokens = static_cast<std::int64_t>(routes.ids.size()) / top_k;
  std::vector<char> workspace(capacity_workspace_bytes(tokens, top_k, num_experts), '\xff');
  apply_capacity(policy, capacity, tokens, top_k, num_experts, routes.ids.data(), routes.weights.data(),
                 workspace.data());
  return routes;
}

TEST(Capacity, IsTheCeilingOfItsFormula) {
  EXPECT_EQ(expert_capacity(1.0, 4, 2, 4), 2);
  EXPECT_EQ(expert_capacity(1.25, 4, 2, 4), 3);
  EXPECT_EQ(expert_capacity(1.0, 5, 1, 4), 2);
  EXPECT_EQ(expert_capacity(0.01, 5, 1, 4), 1);
  EXPECT_EQ(expert_capacity(1.0, 0, 2, 4), 0);
  EXPECT_EQ(expert_capacity(1e300, 5, 2, 4), 10);
  EXPECT_EQ(expert_capacity(1.0, std::int64_t{1} << 40, 8, 8), std::int64_t{1} << 40);
}

TEST(Capacity, KeepsTheHighestWeightsAndTheLowestTokensAmongEqualOnes) {
  const Routes routes{{0, 0, 0, 0, 1, -1}, {0.5f, 0.7f, 0.5f, 0.5f, 0.1f, 0.0f}};
  const Routes by_score = limited(routes, DropPolicy::by_score, 2, 1, 2);
  EXPECT_EQ(by_score.ids, (std::vector<std::int32_t>{0, 0, -1, -1, 1, -1}));
  EXPECT_EQ(by_score.weights, (std::vector<float>{0.5f, 0.7f, 0, 0, 0.1f, 0}));
  const Routes by_position = limited(routes, DropPolicy::by_position, 1, 1, 2);
  EXPECT_EQ(by_position.ids, (std::vector<std::int32_t>{0, -1, -1, -1, 1, -1}));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Routes with_nan = limited({{0, 0, 0}, {nan, -1.0f, nan}}, DropPolicy::by_score, 2, 1, 1);
  EXPECT_EQ(with_nan.ids, (std::vector<std::int32_t>{0, 0, -1}));
  EXPECT_EQ(limited(routes, DropPolicy::by_score, 0, 1, 2).ids, std::vector<std::int32_t>(6, -1));
}

TEST(Capacity, IsLikeAFullSort) {
  std::mt19937 generator(5);
  for (int round = 0; round < 60; ++round) {
    const std::int32_t num_experts = 1 + static_cast<std::int32_t>(generator() % 9);
    Routes routes;
    for (int i = 0; i < 240; ++i) {
      routes.ids.push_back(static_cast<std::int32_t>(generator() % (num_experts + 1)) - 1);
      routes.weights.push_back(routes.ids.back() < 0 ? 0.0f : static_cast<float>(generator() % 7) - 3.0f);
    }
    const std::int64_t capacity = static_cast<std::int64_t>(generator() % 40);
    Routes expected = routes;
    for (std::int32_t e = 0; e < num_experts; ++e) {
      std::vector<int> order;
      for (int i = 0; i < 240; ++i)
        if (routes.ids[i] == e) order.push_back(i);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return routes.weights[a] > routes.weights[b]; });
      for (std::size_t i = static_cast<std::size_t>(capacity); i < order.size(); ++i) {
        expected.ids[order[i]] = -1;
        expected.weights[order[i]] = 0;
      }
    }
    const Routes got = limited(routes, DropPolicy::by_score, capacity, 2, num_experts);
    ASSERT_EQ(got.ids, expected.ids);
    for (int i = 0; i < 240; ++i) ASSERT_EQ(got.weights[i], expected.ids[i] >= 0 ? routes.weights[i] : 0.0f);
  }
}

}  // namespace
}  // namespace moelith::routing
