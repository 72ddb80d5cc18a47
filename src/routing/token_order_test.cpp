#include "routing/token_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "moelith/tensor.hpp"

namespace moelith::routing {
namespace {

template <class Route>
struct Sorted {
  std::vector<std::int64_t> offsets;
  std::vector<Route> routes;
};

template <class Route>
Sorted<Route> sorted(const std::vector<std::int32_t>& ids, std::int32_t top_k, std::int32_t num_experts,
                     const ParallelFor& parallel_for = serial_for) {
  const std::int64_t tokens = static_cast<std::int64_t>(ids.size()) / top_k;
  Sorted<Route> result;
  constexpr std::int64_t canary = -77;
  result.offsets.assign(static_cast<std::size_t>(num_experts) + 2, canary);
  result.routes.assign(ids.size() + 1, Route(canary));
  std::vector<char> workspace(token_order_workspace_bytes(tokens, top_k, num_experts) + 1, '\x5a');
  sort_routes(ids.data(), tokens, top_k, num_experts, result.offsets.data(), result.routes.data(), workspace.data(),
              parallel_for);
  EXPECT_EQ(workspace.back(), '\x5a');
  EXPECT_EQ(result.offsets.back(), canary);
  result.offsets.pop_back();
  for (std::size_t i = static_cast<std::size_t>(result.offsets.back()); i < result.routes.size(); ++i)
    EXPECT_EQ(result.routes[i], canary);
  result.routes.resize(static_cast<std::size_t>(result.offsets.back()));
  return result;
}

TEST(TokenOrder, D1_EmptySlotsDoNotShiftRows) {
  const Sorted<std::int32_t> s = sorted<std::int32_t>({0, -1, -1, 1, 1, 0, -1, -1}, 2, 2);
  EXPECT_EQ(s.offsets, (std::vector<std::int64_t>{0, 2, 4}));  // counts [2, 2]
  EXPECT_EQ(s.routes, (std::vector<std::int32_t>{0, 5, 3, 4}));
  std::vector<std::int32_t> rows;
  for (std::int32_t route : s.routes) rows.push_back(route / 2);
  EXPECT_EQ(rows, (std::vector<std::int32_t>{0, 2, 1, 2}));
}

TEST(TokenOrder, NoTokensAndOnlyEmptySlots) {
  EXPECT_EQ(sorted<std::int64_t>({}, 3, 4).offsets, std::vector<std::int64_t>(5, 0));
  EXPECT_EQ(sorted<std::int64_t>({-1, -1, -1}, 3, 4).offsets, std::vector<std::int64_t>(5, 0));
}

TEST(TokenOrder, IsAStableSortForAnyThreads) {
  std::mt19937 generator(3);
  for (int round = 0; round < 16; ++round) {
    const std::int32_t num_experts = round % 4 == 0 ? 1 : 1 + static_cast<std::int32_t>(generator() % 1024);
    const std::int32_t top_k = 1 + static_cast<std::int32_t>(generator() % 16);
    const std::int64_t tokens = static_cast<std::int64_t>(generator() % 3000);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * top_k));
    const bool one_takes_all = round % 5 == 0;
    for (std::int32_t& id : ids)
      id = generator() % 4 == 0 ? -1
           : one_takes_all      ? num_experts - 1
                                : static_cast<std::int32_t>(generator() % num_experts);
    std::vector<std::int64_t> expected;
    for (std::size_t route = 0; route < ids.size(); ++route)
      if (ids[route] >= 0) expected.push_back(static_cast<std::int64_t>(route));
    std::stable_sort(expected.begin(), expected.end(), [&](std::int64_t a, std::int64_t b) { return ids[a] < ids[b]; });
    const Sorted<std::int64_t> s = sorted<std::int64_t>(ids, top_k, num_experts);
    ASSERT_EQ(s.routes, expected);
    for (std::int32_t e = 0; e < num_experts; ++e)
      ASSERT_EQ(s.offsets[e + 1] - s.offsets[e], std::count(ids.begin(), ids.end(), e));
    const Sorted<std::int32_t> threaded = sorted<std::int32_t>(
        ids, top_k, num_experts, [](std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
          std::vector<std::thread> threads;
          for (std::int64_t i = 0; i < 3; ++i)
            threads.emplace_back([&, i] { body(count * i / 3, count * (i + 1) / 3); });
          for (std::thread& thread : threads) thread.join();
        });
    ASSERT_TRUE(std::equal(s.routes.begin(), s.routes.end(), threaded.routes.begin(), threaded.routes.end()));
    ASSERT_EQ(s.offsets, threaded.offsets);
  }
}

TEST(TokenOrder, D3_RouteIdsOf32BitsAreRefusedWhereTheyWouldWrap) {
  // Refused before anything is read.
  constexpr std::int64_t tokens = (std::int64_t{1} << 31) / 8;
  EXPECT_THROW(sort_routes<std::int32_t>(nullptr, tokens, 8, 4, nullptr, nullptr, nullptr), Error);
  // The workspace of such a call is known without wrapping: at most 64 rows of counters.
  EXPECT_EQ(token_order_workspace_bytes(tokens, 8, 4), 64u * 4 * 8);
  EXPECT_EQ(token_order_workspace_bytes(std::int64_t{1} << 36, 32, 1024), 64u * 1024 * 8);
}

}  // namespace
}  // namespace moelith::routing
