// Several ranks on one GPU: the bits of one rank, right against the fp64 reference, and an error where a rank does not
// come.
#include <algorithm>
#include <limits>
#include <numeric>
#include <thread>

#include "executors/cuda/pass_data.hpp"
#include "tests/layer_fixture_gpu.cuh"

namespace moelith {
namespace {

using namespace test;

// Unequal numbers of tokens, none on the second rank.
std::vector<std::int64_t> random_split(Random& random, std::int64_t tokens, int ranks) {
  std::vector<std::int64_t> split;
  std::int64_t left = tokens;
  for (int r = 0; r + 1 < ranks; ++r) {
    split.push_back(r == 1 ? 0 : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(left + 1)));
    left -= split.back();
  }
  split.push_back(left);
  return split;
}

TEST(CudaRanks, TheSmallestCase) {
  LayerConfig config;
  config.hidden_size = 64, config.intermediate_size = 64, config.num_experts = 4, config.top_k = 2;
  const Problem p = random_problem(config, 64, 5);
  const Results one = run_gpu(p);
  RunOptions options = on_ranks({32, 32});
  options.keep = false;
  expect_identical(run_gpu(p, options), one, "forward", of_each_rank(p));
  options.keep = true;
  expect_identical(run_gpu(p, options), one, "both passes", of_each_rank(p));
}

TEST(CudaRanks, SameBitsForAnyNumberOfRanks) {
  Random random(13);
  for (int n = 0; n < 12; ++n) {
    const auto config = tokens_apart(random_config(random, DataType::bfloat16));
    const std::int64_t tokens = 130 + static_cast<std::int64_t>(random() % 300);
    Problem p = random_problem(config, tokens, random());
    if (n % 4 == 3) bring_routes(p, 0.3, random());
    const Results one = run_gpu(p);
    for (const int ranks : {2, 3, 4}) {
      RunOptions options = on_ranks(random_split(random, tokens, ranks));
      options.recompute = n % 4 == 2;
      options.bound = n % 3 == 1;
      if (n % 5 == 1) options.row_gap = 8;
      if (n % 2) {  // any placement, with ranks that hold no expert
        for (std::int32_t e = 0; e < config.num_experts; ++e) {
          options.expert_rank.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(ranks)));
        }
      }
      SCOPED_TRACE("configuration " + std::to_string(n));
      expect_identical(run_gpu(p, options), one, std::to_string(ranks) + " ranks", of_each_rank(p));
    }
  }
}

TEST(CudaRanks, SameBitsAtARealSize) {
  LayerConfig config;
  config.hidden_size = 1024, config.intermediate_size = 384, config.num_experts = 30, config.top_k = 6;
  config.shared_experts = {{256, true}};
  const std::int64_t tokens = 3000;
  const Problem p = random_problem(config, tokens, 3);
  const Results one = run_gpu(p);
  for (const std::vector<std::int64_t>& split : {std::vector<std::int64_t>{1400, 1600}, {1000, 0, 1900, 100}}) {
    const RunOptions options = on_ranks(split);
    for (int again = 0; again < 3; ++again) {
      expect_identical(run_gpu(p, options), one, std::to_string(split.size()) + " ranks", of_each_rank(p));
    }
  }
}

TEST(CudaRanks, NumbersOfPassesMayWrapAround) {
  LayerConfig config;
  config.hidden_size = 64, config.intermediate_size = 64, config.num_experts = 4, config.top_k = 2;
  const Problem p = random_problem(config, 64, 5);
  const Results one = run_gpu(p);
  for (const std::uint64_t passes : {~0ull, ~0ull - 1, ~0ull - 2, 1ull << 63}) {
    RunOptions options = on_ranks({20, 44});
    options.passes_before = passes;
    options.backwards = 3;
    expect_identical(run_gpu(p, options), one, std::to_string(passes) + " passes before", of_each_rank(p));
  }
}

TEST(CudaRanks, AllTokensGoToOneRank) {
  LayerConfig config;
  config.hidden_size = 136, config.intermediate_size = 72, config.num_experts = 8, config.top_k = 2;
  const std::int64_t tokens = 500;
  Problem p = random_problem(config, tokens, 3);
  bring_routes(p, 0.0, 4);
  for (const std::int64_t first : {0, 6}) {  // both experts of the first rank, and of the last
    for (std::int64_t t = 0; t < tokens; ++t) p.inputs.topk_ids[2 * t] = first, p.inputs.topk_ids[2 * t + 1] = first + 1;
    const Results one = run_gpu(p);
    expect_identical(run_gpu(p, on_ranks({100, 200, 0, 200})), one, "4 ranks", of_each_rank(p));
  }
}

// Each token's experts, of which every rank has as many: all on one rank that is not its own, or as many on each rank.
void choose_ranks(Problem& p, const std::vector<std::int64_t>& split, bool on_one, std::uint64_t seed) {
  Random random(seed);
  const auto ranks = static_cast<std::int32_t>(split.size());
  const std::int32_t k = p.config.top_k, experts = p.config.num_experts / ranks;  // of a rank
  std::vector<std::int64_t> local(static_cast<std::size_t>(experts));
  std::int64_t token = 0;
  for (std::int32_t owner = 0; owner < ranks; ++owner) {
    for (std::int64_t end = token + split[owner]; token < end; ++token) {
      const std::int64_t first_rank = on_one ? (owner + 1 + std::int64_t(random() % std::uint64_t(ranks - 1))) % ranks : 0;
      std::vector<std::int64_t> chosen;
      for (std::int32_t r = 0; r < (on_one ? 1 : ranks); ++r) {
        std::iota(local.begin(), local.end(), (first_rank + r) * experts);
        std::shuffle(local.begin(), local.end(), random);
        chosen.insert(chosen.end(), local.begin(), local.begin() + (on_one ? k : k / ranks));
      }
      std::shuffle(chosen.begin(), chosen.end(), random);
      std::copy(chosen.begin(), chosen.end(), p.inputs.topk_ids.begin() + token * k);
    }
  }
}

TEST(CudaRanks, TheFirstRowIsTheLargestWord) {
  using executors::cuda::FirstRow;
  const std::int64_t last_row = 0x7ffffffe, last_block = (1 << 24) + 1023;  // below 2^31 rows, in blocks of 128 and up to 1024 rests
  unsigned long long before = ~0ull;
  for (const std::int64_t row : {std::int64_t(0), std::int64_t(1), std::int64_t(127), std::int64_t(1) << 30, last_row}) {
    for (const std::int64_t block : {last_block, std::int64_t(0)}) {
      for (const std::int64_t rows : {1, 100, 128}) {
        const FirstRow first(FirstRow(row, block, rows).word);
        EXPECT_EQ(first.row(), row);
        EXPECT_EQ(first.block(), block);
        EXPECT_EQ(first.block_rows(), rows);
        EXPECT_GT(first.word, 0ull);
        EXPECT_LT(first.word >> 32, before >> 32);
      }
    }
    before = FirstRow(row, 0, 1).word;
  }
}

// Rows that are copied from others of their token: few row blocks, and more than are copied before all tiles.
TEST(CudaRanks, SeveralExpertsOfATokenOnARank) {
  for (const std::int32_t experts : {16, 1024}) {
    LayerConfig config;
    config.hidden_size = 136, config.intermediate_size = 64, config.num_experts = experts, config.top_k = 4;
    for (const bool on_one : {true, false}) {
      for (const std::vector<std::int64_t>& split : {std::vector<std::int64_t>{500, 200}, {390, 1, 0, 309}}) {
        Problem p = random_problem(config, 700, 19);
        bring_routes(p, 0.0, 4);
        choose_ranks(p, split, on_one, 5);
        for (std::size_t n = 0; n < p.inputs.topk_ids.size(); n += 11) p.inputs.topk_ids[n] = -1;
        const Results one = run_gpu(p);
        for (const bool recompute : {false, true}) {
          RunOptions options = on_ranks(split);
          options.recompute = recompute;
          SCOPED_TRACE(std::to_string(experts) + (on_one ? " experts, a token's on one rank" : " experts, a token's on all ranks"));
          expect_identical(run_gpu(p, options), one, std::to_string(split.size()) + " ranks", of_each_rank(p));
        }
      }
    }
  }
}

TEST(CudaRanks, MatchTheReferenceWithLosses) {
  Random random(17);
  for (int n = 0; n < 12; ++n) {
    LayerConfig config = random_config(random, DataType::bfloat16);
    if (config.hidden_size < 32) config.hidden_size += 32;
    config.num_experts = std::max(config.num_experts, 2);
    config.router.num_groups = config.router.top_groups = config.router.group_score_size = 1;
    if (n % 2) config.router.aux_loss = AuxLossKind::global;
    RunOptions options = on_ranks({140 + n, 0, 64, 3});
    Problem p = random_problem(config, 207 + n, random());
    for (const std::int64_t t : options.tokens_of_rank) p.inputs.ranks.push_back({t, n % 3 ? -1 : t / 2, 1});
    p.upstream.aux_loss.assign(4, 0.7);
    p.upstream.z_loss.assign(4, -0.3);
    expect_right(p, run_gpu(p, options), options, "configuration " + std::to_string(n));
  }
}

// All GPUs that there are, up to eight: a rank on each, and two on each, with an empty one.
TEST(CudaRanks, SeveralGpusGiveTheSameBits) {
  int gpus = 0;
  check(cudaGetDeviceCount(&gpus));
  if (gpus < 2) GTEST_SKIP() << "one GPU alone";
  gpus = std::min(gpus, limits::device_ranks / 2);
  std::vector<std::int64_t> even(static_cast<std::size_t>(gpus), 400 / gpus);
  even.back() += 400 % gpus;
  Random random(43);
  for (int n = 0; n < 8; ++n) {
    const auto config = tokens_apart(random_config(random, DataType::bfloat16));
    const Problem p = random_problem(config, 400, random());
    const Results one = run_gpu(p);
    for (const std::vector<std::int64_t>& split : {even,
                                                   random_split(random, 400, gpus), random_split(random, 400, 2 * gpus)}) {
      const RunOptions options = on_ranks(split, gpus);
      for (int again = 0; again < 2; ++again) {
        expect_identical(run_gpu(p, options), one, std::to_string(split.size()) + " ranks on " + std::to_string(gpus) + " GPUs", of_each_rank(p));
      }
    }
  }
}

TEST(CudaRanks, ARankWithoutAGradientOfYTakesPart) {
  LayerConfig config;
  config.hidden_size = 96, config.intermediate_size = 40, config.num_experts = 5, config.top_k = 2;
  config.down_bias = true;
  config.shared_experts = {{48, false}};
  Problem p = random_problem(config, 200, 3);
  Random random(7);
  p.upstream.topk_weights = normal(random, 400, 1.0, DataType::float32);  // without anything there is no backward
  RunOptions options = on_ranks({120, 80});
  options.without_dy = {1};
  const Results some = run_gpu(p, options);
  std::fill(p.upstream.y.begin() + 120 * 96, p.upstream.y.end(), 0.0);
  expect_identical(some, run_gpu(p), "a gradient of zeros", of_each_rank(p));
}

TEST(CudaRanks, GraphsReplayWithOtherInputs) {
  Random random(37);
  for (int n = 0; n < 3; ++n) {
    const LayerConfig config = tokens_apart(random_config(random, DataType::bfloat16));
    const RunOptions options = on_ranks(n == 2 ? std::vector<std::int64_t>{70, 0, 90, 60} : std::vector<std::int64_t>{120, 100});
    auto problem = [&](bool empty_expert, std::int64_t valid) {
      Problem p = random_problem(config, 220, random());
      for (std::int64_t t = 0; empty_expert && t < 220; ++t) p.inputs.router_logits[t * config.num_experts] = -INFINITY;
      for (const std::int64_t t : options.tokens_of_rank) p.inputs.ranks.push_back({t, std::min(t, valid), 1});
      return p;
    };
    const Problem first = problem(false, 1000), second = problem(true, 50), third = problem(false, 0);
    const Results eager = run_gpu(first, options);
    CapturedRanks captured(static_cast<int>(options.tokens_of_rank.size()));
    expect_identical(run_gpu(first, capturing(captured, options)), eager, "captured");
    for (const Problem* p : {&second, &third, &first}) {
      const Results replayed = run_gpu(*p, replaying(captured, options));
      expect_identical(replayed, run_gpu(*p, options), "replayed");
    }
  }
}

void expect_room_for_some_rows(const Plan& plan) {
  const std::string formula = plan.buffer_sizes(plan.options().max_tokens).formula;
  EXPECT_NE(formula.find("routed rows out of"), std::string::npos) << formula;
}

// Room for some of the rows that may come: further rounds, with the same bits.
TEST(CudaRanks, RoundsGiveTheSameBits) {
  constexpr double all_rows = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::int64_t> splits[] = {{900, 500}, {300, 0, 600, 500}};
  for (const std::int32_t experts : {0, 4, 1}) {  // that get the tokens; 0: those of the router
    LayerConfig config;
    config.hidden_size = 136, config.intermediate_size = 200, config.num_experts = 8, config.top_k = 2;
    config.gate_up_bias = config.down_bias = true;
    config.shared_experts = {{48, true}};
    config.weight_placement = experts == 1 ? WeightPlacement::before_down : WeightPlacement::after_down;
    Problem p = random_problem(config, 1400, 3);
    if (experts > 0) route_to_first(p, experts);
    RunOptions alone = on_gpu();
    for (const auto& [wide, preset] : {std::pair{true, nan}, {true, 0.5}, {false, nan}}) {
      alone.wide_gradients = wide, alone.preset = preset;
      const Results one = run_gpu(p, alone);
      for (const auto& split : splits) {
        for (const double factor : {0.01, 0.5, 1.0, 1.25, all_rows}) {
          RunOptions options = on_ranks(split);
          options.wide_gradients = alone.wide_gradients, options.preset = alone.preset;
          options.receive_capacity_factor = {factor};
          options.recompute = factor == 1.0;
          options.bound = factor == 0.5;
          if (factor != all_rows && !options.recompute) options.with_plan = expect_room_for_some_rows;
          expect_identical(run_gpu(p, options), one,
                           std::to_string(split.size()) + " ranks, factor " + std::to_string(factor) + ", routes to " +
                               std::to_string(experts) + " experts",
                           of_each_rank(p));
        }
      }
    }
  }
}

// Buffers for many tokens are large enough for few, where rounds begin in between.
TEST(CudaRanks, BuffersGrowWithTokens) {
  LayerConfig config;
  config.hidden_size = config.intermediate_size = 64, config.num_experts = 8, config.top_k = 2;
  const auto groups = Group::threads(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      PlanOptions options;
      options.device = DeviceKind::cuda;
      options.max_tokens = 1024;
      options.group = groups[r];
      options.receive_capacity_factor = 1.9;
      const Plan plan = Plan::create(config, options);
      BufferSizes before;
      for (std::int64_t t = 0; t <= 1024; ++t) {
        const BufferSizes now = plan.buffer_sizes(t);
        EXPECT_GE(now.saved, before.saved) << t;
        EXPECT_GE(now.workspace, before.workspace) << t;
        before = now;
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// More row blocks than are packed before all tiles, in rounds that are shorter and longer than those.
TEST(CudaRanks, RoundsOfManyRowBlocks) {
  LayerConfig config;
  config.hidden_size = 64, config.intermediate_size = 64, config.num_experts = 256, config.top_k = 4;
  Problem p = random_problem(config, 2600, 7);
  const Results one = run_gpu(p);
  for (const double factor : {0.1, 0.4, 0.9}) {
    RunOptions options = on_ranks({1500, 1100});
    options.receive_capacity_factor = {factor, 2.0 * factor};
    if (factor < 0.9) options.with_plan = expect_room_for_some_rows;
    expect_identical(run_gpu(p, options), one, "factor " + std::to_string(factor), of_each_rank(p));
  }
}

TEST(CudaRanks, RoundsInGraphs) {
  LayerConfig config;
  config.hidden_size = 72, config.intermediate_size = 64, config.num_experts = 8, config.top_k = 2;
  RunOptions options = on_ranks({500, 400});
  options.receive_capacity_factor = {0.3};
  const Problem router = random_problem(config, 900, 11);
  Problem even = random_problem(config, 900, 12), skewed = even;
  bring_routes(even, 0.1, 3), route_to_first(skewed, 2);
  for (const auto& problems : {std::vector<const Problem*>{&router}, std::vector<const Problem*>{&even, &skewed, &even}}) {
    CapturedRanks captured(2);
    expect_identical(run_gpu(*problems[0], capturing(captured, options)), run_gpu(*problems[0]), "captured", of_each_rank(*problems[0]));
    for (const Problem* p : problems) {
      expect_identical(run_gpu(*p, replaying(captured, options)), run_gpu(*p), "replayed", of_each_rank(*p));
    }
  }
}

// A group of ranks in one thread each, with a plan and what a forward needs.
struct Ranks {
  LayerConfig config;
  std::vector<Group> groups;
  std::vector<std::unique_ptr<Plan>> plans;
  std::vector<cudaStream_t> streams;
  static constexpr std::int64_t tokens = 32;

  explicit Ranks(int ranks) : groups(Group::threads(ranks)), plans(ranks), streams(ranks) {
    config.hidden_size = config.intermediate_size = 64, config.num_experts = 4, config.top_k = 2;
    arena().reset();
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      check(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
      groups[r].set_timeout(std::chrono::milliseconds(500));
      threads.emplace_back([this, r] {
        PlanOptions options;
        options.device = DeviceKind::cuda;
        options.max_tokens = tokens;
        options.group = groups[r];
        plans[r] = std::make_unique<Plan>(Plan::create(config, options));
      });
    }
    for (auto& thread : threads) thread.join();
  }
  ~Ranks() {
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }

  // What a rank's forward throws; "" if nothing.
  std::string forward(int rank, bool keep = true) {
    const Plan& plan = *plans[rank];
    const std::int64_t h = config.hidden_size, l = plan.num_local_experts();
    Tensor x(config.dtype, {tokens, h}), y(config.dtype, {tokens, h}), logits(DataType::float32, {tokens, 4}),
        gate_up(config.dtype, {l, 2 * h, h}), down(config.dtype, {l, h, h});
    Random random(3);
    for (Tensor* t : {&x, &logits, &gate_up, &down}) t->set(normal(random, std::size_t(t->view.numel()), 1.0, config.dtype).data());
    Inputs in;
    in.x = x.view, in.router_logits = logits.view, in.weights.gate_up_proj = gate_up.view, in.weights.down_proj = down.view;
    Outputs out;
    out.y = y.view;
    const auto sizes = plan.buffer_sizes(tokens);
    Buffer saved(sizes.saved), workspace(sizes.workspace);
    try {
      plan.forward(in, out, keep ? saved.data() : nullptr, workspace.data(), streams[rank]);
    } catch (const Error& error) {
      status = error.status();
      return error.what();
    }
    return "";
  }
  void wait() {
    for (cudaStream_t stream : streams) check(cudaStreamSynchronize(stream));
  }
  Status status = Status::ok;
};

TEST(CudaRanks, ARankThatNeverLaunchesIsNamed) {
  Ranks ranks(2);
  EXPECT_EQ(ranks.forward(0), "");
  EXPECT_EQ(ranks.forward(1), "");
  ranks.wait();
  EXPECT_EQ(ranks.forward(0), "");  // the kernels wait; the host does not
  ranks.wait();
  const std::string error = ranks.forward(0);
  EXPECT_EQ(ranks.status, Status::timed_out);
  EXPECT_NE(error.find("rank 0, stage layout: waited 500 ms for rank 1"), std::string::npos) << error;
  const std::string late = ranks.forward(1);
  EXPECT_EQ(ranks.status, Status::group_failed);
  EXPECT_NE(late.find("rank 0, stage layout: waited 500 ms for rank 1"), std::string::npos) << late;
  ranks.wait();
  Ranks fresh(2);  // the process goes on
  EXPECT_EQ(fresh.forward(0), "");
  EXPECT_EQ(fresh.forward(1), "");
  fresh.wait();
  EXPECT_EQ(fresh.forward(1), "");
  EXPECT_EQ(fresh.forward(0), "");
  fresh.wait();
}

TEST(CudaRanks, AnErrorOfOneRankEndsTheWaitsOfTheOthers) {
  Ranks ranks(2);
  for (auto& group : ranks.groups) group.set_timeout(std::chrono::seconds(20));
  EXPECT_EQ(ranks.forward(0), "");
  ranks.groups[1].fail("because");
  ranks.wait();  // at once
  const std::string error = ranks.forward(0);
  EXPECT_EQ(ranks.status, Status::group_failed);
  EXPECT_NE(error.find("because"), std::string::npos) << error;
}

TEST(CudaRanks, AllSaveOrNone) {
  Ranks ranks(2);
  EXPECT_EQ(ranks.forward(0, true), "");
  EXPECT_EQ(ranks.forward(1, false), "");
  ranks.wait();
  const std::string error = ranks.forward(0);
  EXPECT_EQ(ranks.status, Status::invalid_argument);
  EXPECT_NE(error.find("saved: rank 0 saves for a backward and rank 1 does not"), std::string::npos) << error;
}

}  // namespace
}  // namespace moelith
