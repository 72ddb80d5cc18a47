// The whole layer through its C++ interface: right against the fp64 reference, and the same bits however it is run.
#include <algorithm>
#include <atomic>

#include "executors/cpu/thread_pool.hpp"
#include "tests/layer_fixture.hpp"

namespace moelith {
namespace {

using namespace test;

std::vector<double> ones(std::size_t count, double value) { return std::vector<double>(count, value); }

class RandomLayer : public ::testing::TestWithParam<DataType> {};

TEST_P(RandomLayer, MatchesTheReference) {
  Random random(7);
  for (int n = 0; n < 60; ++n) {
    const LayerConfig config = random_config(random, GetParam());
    const std::int64_t tokens = n % 10 == 0 ? n % 3 : 1 + static_cast<std::int64_t>(random() % 150);
    Problem p = random_problem(config, tokens, random());
    const bool caller = n % 4 == 1;
    if (caller) bring_routes(p, 0.2, random());
    if (n % 3 == 2) p.inputs.ranks = {{tokens, static_cast<std::int64_t>(random() % (tokens + 1)), 1}};
    p.upstream.aux_loss = ones(1, 0.7);
    p.upstream.z_loss = ones(1, -0.3);
    if (n % 5 == 0) p.upstream.topk_weights = normal(random, tokens * config.top_k, 1.0, config.accumulator_dtype());
    RunOptions options;
    options.workers = 1 + n % 3;
    options.recompute = n % 4 == 2;
    options.wide_gradients = n % 2;
    SCOPED_TRACE("configuration " + std::to_string(n));
    expect_right(p, run(p, options), options, "configuration " + std::to_string(n));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RandomLayer, ::testing::Values(DataType::float64, DataType::float32, DataType::bfloat16),
                         [](const auto& info) { return to_string(info.param); });

// bfloat16 logits of router and shared gates, as a bfloat16 model's linear layers give them.
TEST(NarrowLogits, MatchTheReference) {
  Random random(41);
  int routed = 0, gated = 0;
  for (int n = 0; n < 40; ++n) {
    LayerConfig config = random_config(random, DataType::bfloat16);
    if (n % 2) config.shared_experts = {{24, true}, {40, n % 4 == 1}};
    Problem p = random_problem(config, 1 + static_cast<std::int64_t>(random() % 150), random());
    if (n % 8 == 3) bring_routes(p, 0.2, random());
    round_logits(p);
    p.upstream.aux_loss = ones(1, 0.7);
    p.upstream.z_loss = ones(1, -0.3);
    RunOptions options;
    options.narrow_logits = true;
    options.workers = 1 + n % 2;
    if (n % 5 == 4) {
      options.tokens_of_rank = {p.inputs.tokens / 3, p.inputs.tokens - p.inputs.tokens / 3};
      p.upstream.aux_loss = p.upstream.z_loss = ones(2, 0.7);
    }
    const Results results = run(p, options);
    expect_right(p, results, options, "configuration " + std::to_string(n));
    routed += results.count("d_router_logits");
    gated += results.count("d_shared_gate_logits");
  }
  EXPECT_GT(routed, 30);
  EXPECT_GT(gated, 15);
}

// Far out a gate's derivative is e^-|logit|, which 1 - gate has lost.
TEST(Backward, GateGradientsKeepTheirPrecisionForLargeLogits) {
  for (const DataType dtype : {DataType::float32, DataType::float64}) {
    LayerConfig config;
    config.hidden_size = 16;
    config.intermediate_size = 24;
    config.num_experts = 4;
    config.top_k = 2;
    config.dtype = dtype;
    config.shared_experts = {{24, true}, {16, true}};
    Problem p = random_problem(config, 42, 43);
    for (std::size_t n = 0; n < p.inputs.shared_gate_logits.size(); ++n) {
      const double size = 20.0 + 0.25 * static_cast<double>(n % 81);
      p.inputs.shared_gate_logits[n] = n % 2 == n / 2 % 2 ? size : -size;
    }
    const std::vector<double> actual = run(p, {}).at("d_shared_gate_logits");
    const auto right = reference::backward(config, p.weights, p.inputs, p.upstream, 1);
    const std::vector<double>& expected = right.shared_gate_logits;
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t n = 0; n < actual.size(); ++n) {
      EXPECT_NEAR(actual[n] / expected[n], 1.0, dtype == DataType::float32 ? 1e-3 : 1e-12)
          << "logit " << p.inputs.shared_gate_logits[n];
    }
  }
}

TEST(Determinism, SameBitsForAnyWorkersOrderAndTileWidth) {
  Random random(11);
  for (int n = 0; n < 12; ++n) {
    const LayerConfig config = random_config(random, n % 2 ? DataType::bfloat16 : DataType::float32);
    Problem p = random_problem(config, 50 + static_cast<std::int64_t>(random() % 200), random());
    p.upstream.aux_loss = ones(1, 0.7);
    const Results one = run(p, {});
    for (int workers : {2, 3, 8}) {
      RunOptions options;
      options.workers = workers;
      expect_identical(one, run(p, options), std::to_string(workers) + " workers");
    }
    for (std::uint64_t seed : {1, 2, 3}) {
      RunOptions options;
      options.workers = 3;
      options.shuffle_seed = seed;
      expect_identical(one, run(p, options), "shuffled");
    }
    RunOptions options;
    options.tile_columns = 64;
    expect_identical(one, run(p, options), "tiles of 64 columns");
    options.tile_columns = 192;
    expect_identical(one, run(p, options), "tiles of 192 columns");
    options.tile_columns = 0;
    options.recompute = true;
    expect_identical(one, run(p, options), "recomputed");
  }
}

TEST(Determinism, SameBitsForAnyNumberOfRanks) {
  Random random(13);
  for (int n = 0; n < 10; ++n) {
    const auto config = tokens_apart(random_config(random, n % 2 ? DataType::bfloat16 : DataType::float32));
    const std::int64_t tokens = 130 + static_cast<std::int64_t>(random() % 100);
    const Problem p = random_problem(config, tokens, random());
    const Results one = run(p, {});
    for (int ranks : {2, 3, 4, 8}) {
      RunOptions options;
      std::int64_t left = tokens;
      for (int r = 0; r + 1 < ranks; ++r) {  // unequal, and none on some
        const std::int64_t share = r == 1 ? 0 : static_cast<std::int64_t>(random() % (left + 1));
        options.tokens_of_rank.push_back(share);
        left -= share;
      }
      options.tokens_of_rank.push_back(left);
      options.workers = 1 + n % 2;
      options.shuffle_seed = n % 3 == 0 ? 5 : 0;
      options.recompute = n % 4 == 3;
      if (n % 2) {  // any placement, with ranks that hold no expert
        for (std::int32_t e = 0; e < config.num_experts; ++e) {
          options.expert_rank.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(ranks)));
        }
      }
      expect_identical(one, run(p, options), std::to_string(ranks) + " ranks", of_each_rank(p));
    }
  }
}

TEST(Ranks, MatchTheReferenceWithLosses) {
  Random random(17);
  for (int n = 0; n < 12; ++n) {
    const LayerConfig config = random_config(random, n % 2 ? DataType::float64 : DataType::float32);
    RunOptions options;
    options.tokens_of_rank = {40 + n, 0, 64, 3};
    Problem p = random_problem(config, 107 + n, random());
    for (std::int64_t tokens : options.tokens_of_rank) p.inputs.ranks.push_back({tokens, n % 3 ? -1 : tokens / 2, 1});
    p.upstream.aux_loss = ones(4, 0.7);
    p.upstream.z_loss = ones(4, -0.3);
    expect_right(p, run(p, options), options, "configuration " + std::to_string(n));
  }
}

// Without a number of their own, ranks that may use the same processors take an even share of them, and one worker at least.
TEST(Ranks, ShareTheProcessorsOfTheHost) {
  const int processors = executors::cpu::available_workers();
  ASSERT_GE(processors, 1);
  Random random(4);
  const Problem p = random_problem(random_config(random, DataType::float32), 120, 5);
  for (const std::size_t ranks : {2, 3}) {
    std::atomic<int> most{-1};
    RunOptions options;
    options.tokens_of_rank.assign(ranks, 120 / static_cast<std::int64_t>(ranks));
    options.workers = 0;
    options.timeline = true;
    options.after_backward = [&](const Plan& plan) {
      for (const TileSpan& span : plan.timeline()) {
        for (int seen = most; seen < span.worker && !most.compare_exchange_weak(seen, span.worker);) {}
      }
    };
    run(p, options);
    EXPECT_GE(most, 0);
    EXPECT_LT(most, std::max(1, processors / static_cast<int>(ranks)));
  }
}

TEST(Determinism, ATokenAloneHasTheSameRow) {
  Random random(19);
  for (int n = 0; n < 6; ++n) {
    const auto config = tokens_apart(random_config(random, n % 2 ? DataType::bfloat16 : DataType::float32));
    expect_tokens_alone_have_their_rows(random_problem(config, 70, random()), {0, 33, 69},
                                        [](const Problem& p) { return run(p, {}); });
  }
}

TEST(Forward, WithoutGradientsGivesTheSameBitsAndSavesNothing) {
  Random random(23);
  for (int n = 0; n < 8; ++n) {
    const LayerConfig config = random_config(random, DataType::bfloat16);
    Problem p = random_problem(config, 90, random());
    RunOptions options;
    if (n % 2) options.tokens_of_rank = {50, 40};
    const Results kept = run(p, options);
    options.keep = false;
    const Results bare = run(p, options);
    expect_identical(bare, kept, "without gradients");
  }
}

TEST(Backward, AccumulatesIntoTheMainGradient) {
  Random random(29);
  for (int n = 0; n < 4; ++n) {
    const LayerConfig config = random_config(random, n % 2 ? DataType::bfloat16 : DataType::float32);
    const Problem p = random_problem(config, 60, random());
    const Results once = run(p, {});
    RunOptions options;
    options.preset = 1.0;
    options.backwards = 2;
    const Results twice = run(p, options);
    for (const auto& [name, values] : once) {
      if (name.find("d_gate_up") == std::string::npos && name.find("d_down") == std::string::npos) continue;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float expected = (1.0f + static_cast<float>(values[i])) + static_cast<float>(values[i]);
        ASSERT_EQ(twice.at(name)[i], expected) << name << "[" << i << "]";
      }
    }
  }
}

TEST(Backward, EachResultMayBeLeftOut) {
  Random random(31);
  LayerConfig config = random_config(random, DataType::float32);
  config.gate_up_bias = config.down_bias = true;
  config.shared_experts = {{24, true}, {40, false}};
  const Problem p = random_problem(config, 80, 5);
  const Results all = run(p, {});
  std::vector<std::string> names;
  for (const auto& [name, values] : all) {
    if (name[0] == 'd' || name.rfind("shared", 0) == 0) names.push_back(name);
  }
  ASSERT_EQ(names.size(), 15u);
  for (std::size_t only = 0; only <= names.size(); ++only) {  // one left out; then, one alone; then none
    RunOptions options;
    if (only < names.size()) options.frozen = {names[only]};
    Results part = run(p, options);
    EXPECT_TRUE(only == names.size() || part.count(names[only]) == 0);
    expect_identical(part, all, "without one");
    options.frozen = names;
    if (only < names.size()) options.frozen.erase(options.frozen.begin() + static_cast<std::ptrdiff_t>(only));
    part = run(p, options);
    expect_identical(part, all, "one alone");
  }
}

TEST(Backward, WithoutAGradientOfYOnlyTheLossesFlow) {
  Random random(37);
  LayerConfig config = random_config(random, DataType::float64);
  config.router.aux_loss = AuxLossKind::batch;
  config.router.z_loss_coefficient = 0.01;
  Problem p = random_problem(config, 40, 3);
  p.upstream.y.clear();
  p.upstream.aux_loss = {1.0};
  p.upstream.z_loss = {1.0};
  const RunOptions options;
  const Results results = run(p, options);
  expect_right(p, results, options, "losses alone");
  for (double value : results.at("d_gate_up_proj")) ASSERT_EQ(value, 0.0);
}

}  // namespace
}  // namespace moelith
