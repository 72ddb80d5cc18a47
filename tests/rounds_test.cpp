// Ranks whose buffers have room for some of the rows that may come: the same bits for any room, in as many rounds as it
// takes, and less memory.
#include <atomic>
#include <cmath>
#include <limits>

#include "tests/call.hpp"
#include "tests/outcome.hpp"

namespace moelith::test {
namespace {

constexpr double all_rows = std::numeric_limits<double>::infinity();

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr DataType dtypes[]{DataType::float32};
constexpr int configurations = 4;
#else
constexpr DataType dtypes[]{DataType::bfloat16, DataType::float32, DataType::float64};
constexpr int configurations = 12;
#endif

LayerConfig small_config(DataType dtype) {
  LayerConfig c;
  c.hidden_size = 40;
  c.intermediate_size = 72;
  c.num_experts = 8;
  c.top_k = 2;
  c.dtype = dtype;
  return c;
}

// What backward did: tiles of gate_up of routed experts where nothing is recomputed belong to rounds after the first.
struct Rounds {
  std::atomic<int> later_tiles{0};
  void watch(RunOptions& options) {
    options.timeline = true;
    options.after_backward = [this](const Plan& plan) {
      for (const TileSpan& span : plan.timeline()) later_tiles += span.stage == "gate_up";
    };
  }
};

TEST(Rounds, SameBitsForAnyRoomAndNumberOfRanks) {
  const struct {
    const char* name;
    std::int32_t experts;  // that get the tokens; 0: those of the router
  } routings[]{{"the router's", 0}, {"half of the experts", 4}, {"one rank's or two", 2}, {"one expert", 1}};
  for (const DataType dtype : dtypes) {
    for (const auto& routing : routings) {
      LayerConfig c = small_config(dtype);
      c.gate_up_bias = c.down_bias = true;
      c.shared_experts = {{48, true}};
      c.weight_placement = routing.experts % 2 ? WeightPlacement::before_down : WeightPlacement::after_down;
      Problem p = random_problem(c, 450, 3);
      if (routing.experts > 0) route_to_first(p, routing.experts);
      const Results one = run(p, {});
      expect_right(p, one, {}, std::string("one rank, ") + routing.name);
      Rounds rounds;
      const std::vector<std::vector<std::int64_t>> shares{{450}, {300, 150}, {0, 450}, {200, 0, 250}, {100, 150, 1, 199}};
      for (std::size_t n = 0; n < shares.size(); ++n) {
        for (const double factor : {0.01, 0.5, 1.0, 1.25, all_rows}) {
          RunOptions options;
          options.tokens_of_rank = shares[n];
          options.receive_capacity_factor = {factor};
          options.workers = 1 + static_cast<int>(n % 2);
          options.shuffle_seed = factor == 0.5 ? 7 + n : 0;
          if (factor == 1.0) options.tile_columns = 64;
          options.recompute = factor == 1.25;
          if (!options.recompute && factor != all_rows && shares[n].size() > 1) rounds.watch(options);
          expect_identical(one, run(p, options),
                           std::to_string(shares[n].size()) + " ranks, factor " + std::to_string(factor) + ", routes to " +
                               routing.name,
                           of_each_rank(p));
          if (::testing::Test::HasFailure()) return;
        }
      }
      EXPECT_GT(rounds.later_tiles, 20) << routing.name;
    }
  }
}

TEST(Rounds, RandomLayersMatchTheReferenceAndOneRank) {
  Random random(43);
  Rounds rounds;
  for (int n = 0; n < configurations; ++n) {
    const auto config = tokens_apart(random_config(random, n % 2 ? DataType::bfloat16 : DataType::float32));
    const Problem p = random_problem(config, 500, random());
    const Results one = run(p, {});
    RunOptions options;
    options.tokens_of_rank = {130, 0, 270, 100};
    options.receive_capacity_factor = {0.25, all_rows, 1.0, 0.0};  // each rank as it likes
    options.workers = 1 + n % 2;
    options.shuffle_seed = n % 4 == 3 ? 5 : 0;
    options.wide_gradients = n % 3 != 0;
    for (std::int32_t e = 0; e < config.num_experts; ++e) {
      options.expert_rank.push_back(static_cast<std::int32_t>(random() % 4));
    }
    rounds.watch(options);
    const Results results = run(p, options);
    expect_right(p, results, options, "configuration " + std::to_string(n));
    options.tokens_of_rank.clear();  // gradients of weights are rounded as there
    options.expert_rank.clear();
    options.receive_capacity_factor.clear();
    expect_identical(run(p, options), results, "configuration " + std::to_string(n), of_each_rank(p));
  }
  EXPECT_GT(rounds.later_tiles, configurations / 2);
}

// Losses, valid tokens and dropping by the router's capacity join the tokens of a rank; room for rows does not.
TEST(Rounds, SameBitsWithWhatJoinsTheTokensOfARank) {
  Random random(47);
  Rounds rounds;
  for (int n = 0; n < configurations; ++n) {
    LayerConfig config = random_config(random, n % 2 ? DataType::float64 : DataType::float32);
    if (n % 3 == 0) config.router.capacity_factor = 1.5;
    RunOptions options;
    options.tokens_of_rank = {200, 0, 260 + n, 3};
    Problem p = random_problem(config, 463 + n, random());
    for (const std::int64_t tokens : options.tokens_of_rank) p.inputs.ranks.push_back({tokens, n % 4 ? -1 : tokens / 2, 1});
    p.upstream.aux_loss = p.upstream.z_loss = {0.7, 0.7, 0.7, 0.7};
    for (std::int32_t e = 0; e < config.num_experts; ++e) options.expert_rank.push_back(n % 2 ? e % 4 : e % 2);
    options.receive_capacity_factor = {all_rows};
    const Results roomy = run(p, options);
    options.receive_capacity_factor = {0.1};
    options.workers = 2;
    rounds.watch(options);
    const Results tight = run(p, options);
    expect_identical(roomy, tight, "configuration " + std::to_string(n));
    expect_right(p, tight, options, "configuration " + std::to_string(n));
  }
  EXPECT_GT(rounds.later_tiles, configurations / 2);
}

TEST(Rounds, AccumulateIntoTheMainGradientOnce) {
  LayerConfig c = small_config(DataType::bfloat16);
  c.gate_up_bias = c.down_bias = true;
  Problem p = random_problem(c, 400, 11);
  route_to_first(p, 3);  // of the first rank; the other experts have no rows
  RunOptions options;
  options.preset = 1.0;
  options.backwards = 2;
  const Results one = run(p, options);
  Rounds rounds;
  rounds.watch(options);
  options.tokens_of_rank = {150, 250};
  for (const bool bound : {false, true}) {
    options.bound = bound;
    for (const double factor : {0.3, 1.0, all_rows}) {
      options.receive_capacity_factor = {factor};
      expect_identical(one, run(p, options), "factor " + std::to_string(factor), of_each_rank(p));
    }
  }
  EXPECT_GT(rounds.later_tiles, 0);
}

TEST(Rounds, EachGradientMayBeLeftOut) {
  LayerConfig c = small_config(DataType::float32);
  c.gate_up_bias = c.down_bias = true;
  Problem p = random_problem(c, 400, 13);
  route_to_first(p, 2);
  const Results all = run(p, {});
  const std::vector<std::string> names{"dx", "d_gate_up_proj", "d_down_proj", "d_gate_up_bias", "d_down_bias"};
  for (std::size_t left = 0; left < 1u << names.size(); ++left) {
    RunOptions options;
    options.tokens_of_rank = {250, 150};
    options.receive_capacity_factor = {0.4};
    for (std::size_t n = 0; n < names.size(); ++n) {
      if (left >> n & 1) options.frozen.push_back(names[n]);
    }
    expect_identical(run(p, options), all, "without " + std::to_string(left), of_each_rank(p));
  }
}

TEST(Rounds, ForwardWithoutGradients) {
  LayerConfig c = small_config(DataType::bfloat16);
  Problem p = random_problem(c, 400, 17);
  route_to_first(p, 1);
  const Results one = run(p, {});
  RunOptions options;
  options.tokens_of_rank = {200, 200};
  options.keep = false;
  options.receive_capacity_factor = {0.5};
  expect_identical(run(p, options), one, "without gradients", of_each_rank(p));
}

#if !defined(__SANITIZE_THREAD__)  // as in processes_test.cpp
TEST(Rounds, SameBitsOfProcesses) {
  for (const std::int32_t experts : {0, 2}) {
    LayerConfig c = small_config(DataType::bfloat16);
    c.gate_up_bias = c.down_bias = true;
    Problem p = random_problem(c, 450, 19);
    if (experts > 0) route_to_first(p, experts);
    const Results one = run(p, {});
    for (const auto& share : std::vector<std::vector<std::int64_t>>{{300, 150}, {200, 0, 250}, {100, 150, 1, 199}}) {
      for (const double factor : {0.5, 1.0, 1.25, all_rows}) {
        RunOptions options;
        options.processes = true;
        options.tokens_of_rank = share;
        options.receive_capacity_factor = {factor};
        options.recompute = factor == 1.25;
        expect_identical(one, run(p, options), std::to_string(share.size()) + " processes, factor " + std::to_string(factor),
                         of_each_rank(p));
      }
    }
  }
}
#endif

// Calls f(rank, plan) on each of `ranks` threads, for plans of these options.
template <class F>
void with_plans(const LayerConfig& c, int ranks, PlanOptions options, F f) {
  auto groups = Group::threads(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      PlanOptions mine = options;
      mine.group = groups[r];
      f(r, Plan::create(c, mine));
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Rounds, BuffersShrink) {
  LayerConfig c;
  c.hidden_size = 512;
  c.intermediate_size = 256;
  c.num_experts = 64;
  c.top_k = 8;
  c.dtype = DataType::bfloat16;
  constexpr std::int64_t tokens = 1024;
  constexpr int ranks = 8;
  const std::uint64_t row = 2 * c.gate_up_rows(c.intermediate_size);
  BufferSizes sizes[3], smaller[3];
  const double factors[]{1.0, 0.0, all_rows};
  for (int n = 0; n < 3; ++n) {
    PlanOptions options;
    options.max_tokens = tokens;
    options.workers = 1;
    options.receive_capacity_factor = factors[n];
    with_plans(c, ranks, options, [&](int r, const Plan& plan) {
      if (r != 3) return;
      sizes[n] = plan.buffer_sizes(tokens);
      smaller[n] = plan.buffer_sizes(tokens / 2);
      BufferSizes before;
      for (std::int64_t t = 0; t <= tokens; t += 16) {
        const BufferSizes now = plan.buffer_sizes(t);
        EXPECT_GE(now.saved, before.saved) << t;
        EXPECT_GE(now.workspace, before.workspace) << t;
        before = now;
      }
    });
  }
  // Pre-activation: of T k rows, 1.25 times that, and 8 times that.
  const std::uint64_t balanced = std::uint64_t(tokens) * c.top_k * row;
  EXPECT_NEAR(double(sizes[1].saved - sizes[0].saved), 0.25 * double(balanced), 256.0 * double(row));
  EXPECT_NEAR(double(sizes[2].saved - sizes[0].saved), 7.0 * double(balanced), 256.0 * double(row));
  EXPECT_LT(3 * sizes[1].workspace, sizes[2].workspace);
  EXPECT_NE(sizes[1].formula.find("(of 10240 routed rows out of 65536 that may come"), std::string::npos) << sizes[1].formula;
  EXPECT_EQ(sizes[2].formula.find("out of"), std::string::npos) << sizes[2].formula;
  // With fewer tokens here others' may still come.
  EXPECT_NE(smaller[1].formula.find("(of 10240 routed rows out of 61440 that"), std::string::npos) << smaller[1].formula;

  // One rank gets its own rows alone.
  PlanOptions options;
  options.max_tokens = tokens;
  const BufferSizes usual = Plan::create(c, options).buffer_sizes(tokens);
  options.receive_capacity_factor = 0.5;
  const BufferSizes half = Plan::create(c, options).buffer_sizes(tokens);
  EXPECT_EQ(usual.saved, half.saved);
  EXPECT_EQ(usual.workspace, half.workspace);
}

TEST(Rounds, WrongFactorsAreNamed) {
  const LayerConfig c = small_config(DataType::bfloat16);
  for (const double factor : {-1.0, -all_rows, std::nan("")}) {
    PlanOptions options;
    options.receive_capacity_factor = factor;
    const Outcome outcome = outcome_of([&] { Plan::create(c, options); });
    EXPECT_EQ(outcome.status, Status::invalid_argument);
    EXPECT_NE(outcome.text.find("receive_capacity_factor: got "), std::string::npos) << outcome.text;
    EXPECT_NE(outcome.text.find("accepted is 0 (chosen by the plan)"), std::string::npos) << outcome.text;
  }
}

TEST(Rounds, ASavedBufferOfAnotherRoomIsRefused) {
  const LayerConfig c = small_config(DataType::float32);
  const Problem p = random_problem(c, 400, 23);
  auto groups = Group::threads(2);
  std::vector<std::string> texts(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      PlanOptions options;
      options.max_tokens = 200;
      options.workers = 1;
      options.group = groups[r];
      options.receive_capacity_factor = all_rows;
      const Plan roomy = Plan::create(c, options);
      options.receive_capacity_factor = 1.0;
      const Plan tight = Plan::create(c, options);
      Call filled(p, roomy, 200 * r, 200), other(p, tight, 200 * r, 200);
      texts[r] = outcome_of([&] {
                   filled.forward();
                   std::swap(filled.saved, other.saved);
                   other.backward();
                 }).text;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(texts[0].find("another plan") != std::string::npos) << texts[0];
  EXPECT_TRUE(texts[1].find("another plan") != std::string::npos) << texts[1];
}

}  // namespace
}  // namespace moelith::test
