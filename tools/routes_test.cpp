#include "routes.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

namespace moelith::tools {
namespace {

LayerConfig config_of(std::int32_t experts, std::int32_t top_k) {
  LayerConfig config;
  config.num_experts = experts;
  config.top_k = top_k;
  return config;
}

RouteSpec spec_of(RouteKind kind) {
  RouteSpec spec;
  spec.kind = kind;
  return spec;
}

// Routes of each expert, [E].
std::vector<std::int64_t> count_routes(const std::vector<std::int32_t>& ids, std::int32_t num_experts) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts));
  for (const std::int32_t id : ids) {
    if (id >= 0) ++counts[static_cast<std::size_t>(id)];
  }
  return counts;
}

TEST(Routes, RowsHoldDistinctExpertsInRange) {
  for (const RouteKind kind : {RouteKind::balanced, RouteKind::uniform, RouteKind::zipf, RouteKind::one_expert}) {
    for (const auto& [experts, top_k] : {std::pair{1, 1}, {5, 3}, {16, 16}, {64, 8}}) {
      const auto ids = make_routes(config_of(experts, top_k), spec_of(kind), 50);
      ASSERT_EQ(ids.size(), static_cast<std::size_t>(50 * top_k));
      for (std::int64_t t = 0; t < 50; ++t) {
        const std::set<std::int32_t> row(ids.begin() + t * top_k, ids.begin() + (t + 1) * top_k);
        EXPECT_EQ(row.size(), static_cast<std::size_t>(top_k));
        EXPECT_GE(*row.begin(), 0);
        EXPECT_LT(*row.rbegin(), experts);
      }
    }
  }
}

TEST(Routes, BalancedDiffersByOneAtMost) {
  for (const std::int64_t tokens : {1, 7, 64, 101}) {
    const auto counts = count_routes(make_routes(config_of(12, 5), spec_of(RouteKind::balanced), tokens), 12);
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    EXPECT_LE(*most - *least, 1) << tokens;
  }
}

TEST(Routes, OneExpertTakesEveryToken) {
  EXPECT_EQ(count_routes(make_routes(config_of(16, 4), spec_of(RouteKind::one_expert), 99), 16)[0], 99);
}

TEST(Routes, ZipfIsSkewedAndUniformIsNot) {
  const auto share_of_fullest = [](RouteKind kind) {
    const auto counts = count_routes(make_routes(config_of(64, 1), spec_of(kind), 6400), 64);
    return static_cast<double>(*std::max_element(counts.begin(), counts.end())) / 6400;
  };
  EXPECT_LT(share_of_fullest(RouteKind::uniform), 0.03);  // 1 / 64 = 0.016
  EXPECT_GT(share_of_fullest(RouteKind::zipf), 0.15);     // 1 / H(64) = 0.21
  EXPECT_LT(share_of_fullest(RouteKind::zipf), 0.27);
}

TEST(Routes, GroupLimitIsKept) {
  LayerConfig config = config_of(32, 4);
  config.router.num_groups = 8;
  config.router.top_groups = 2;
  for (const RouteKind kind : {RouteKind::balanced, RouteKind::uniform, RouteKind::zipf, RouteKind::one_expert}) {
    const auto ids = make_routes(config, spec_of(kind), 40);
    for (std::int64_t t = 0; t < 40; ++t) {
      std::set<std::int32_t> groups;
      for (std::int64_t j = 0; j < 4; ++j) groups.insert(ids[static_cast<std::size_t>(t * 4 + j)] / 4);
      EXPECT_LE(groups.size(), 2u);
    }
  }
}

TEST(Routes, TheSeedDecides) {
  RouteSpec spec = spec_of(RouteKind::uniform);
  const auto first = make_routes(config_of(16, 2), spec, 20);
  EXPECT_EQ(make_routes(config_of(16, 2), spec, 20), first);
  spec.seed = 2;
  EXPECT_NE(make_routes(config_of(16, 2), spec, 20), first);
}

TEST(Routes, FromAFile) {
  const std::string path =
      (std::filesystem::path(testing::TempDir()) / ("moelith_routes_test_" + std::to_string(::getpid()))).string();
  const auto read = [&](const std::string& text, std::int64_t tokens) {
    std::ofstream(path) << text;
    RouteSpec spec = spec_of(RouteKind::file);
    spec.file = path;
    return make_routes(config_of(8, 2), spec, tokens);
  };
  EXPECT_EQ(read("# comment\n1 2\n\n3\t-1 # more\r\n7", 4), (std::vector<std::int32_t>{1, 2, 3, -1, 7, -1, 1, 2}));
  const auto error = [&](const std::string& text) -> std::string {
    try {
      read(text, 2);
    } catch (const Error& caught) { return caught.what(); }
    return "accepted";
  };
  EXPECT_EQ(error("1 2\n3 8\n"),
            "routing file \"" + path + "\", line 2: \"8\"; accepted: expert ids from -1 (none) to 7");
  EXPECT_EQ(error("1 x\n"), "routing file \"" + path + "\", line 1: \"x\"; accepted: expert ids from -1 (none) to 7");
  EXPECT_EQ(error("1 2 3\n"), "routing file \"" + path + "\", line 1: 3 ids; accepted: at most top_k = 2");
  EXPECT_EQ(error("# nothing\n"), "routing file \"" + path + "\" has no ids");
  std::filesystem::remove(path);
  EXPECT_EQ(error("").substr(0, 8), "routing ");
}

}  // namespace
}  // namespace moelith::tools
