// The layer on a GPU through its C++ interface: right against the fp64 reference, the same bits however it is run, and
// nothing but kernels in a call.
#include "tests/layer_fixture_gpu.cuh"

namespace moelith {
namespace {

using namespace test;

std::vector<double> ones(std::size_t count, double value) { return std::vector<double>(count, value); }

struct Case {
  Problem problem;
  RunOptions options;
};
Case random_case(Random& random, int n) {
  Case c;
  const LayerConfig config = random_config(random, DataType::bfloat16);
  const std::int64_t tokens = n % 10 == 0 ? n % 3 : 1 + static_cast<std::int64_t>(random() % 300);
  Problem& p = c.problem;
  p = random_problem(config, tokens, random());
  if (n % 4 == 1) bring_routes(p, n % 8 == 1 ? 0.6 : 0.2, random());
  if (n % 3 == 2) p.inputs.ranks = {{tokens, static_cast<std::int64_t>(random() % (tokens + 1)), 1}};
  if (n % 7 == 6) p.inputs.ranks = {{tokens, -1, tokens % 5 == 0 && tokens > 0 ? 5 : 1}};
  p.upstream.aux_loss = ones(1, 0.7);
  p.upstream.z_loss = ones(1, -0.3);
  if (n % 5 == 0) p.upstream.topk_weights = normal(random, tokens * config.top_k, 1.0, config.accumulator_dtype());
  if (n % 9 == 8) p.upstream.y.clear();
  c.options = on_gpu();
  c.options.recompute = n % 4 == 2;
  c.options.wide_gradients = n % 2;
  return c;
}

TEST(CudaLayer, MatchesTheReference) {
  Random random(7);
  for (int n = 0; n < 80; ++n) {
    const Case c = random_case(random, n);
    SCOPED_TRACE("configuration " + std::to_string(n));
    expect_right(c.problem, run_gpu(c.problem, c.options), c.options, "configuration " + std::to_string(n));
  }
}

TEST(CudaLayer, LongSequencesMatchTheReference) {
  Random random(8);
  for (int n = 0; n < 6; ++n) {
    LayerConfig config = random_config(random, DataType::bfloat16);
    config.shared_experts.clear();  // the losses are what counts here
    config.router.aux_loss = n % 2 ? AuxLossKind::sequence : AuxLossKind::batch;
    config.router.capacity_factor = n == 3 ? 0.5 : 0.0;
    Problem p = random_problem(config, 450, random());
    p.inputs.ranks = {{450, n < 3 ? -1 : 250, 3}};
    p.upstream.aux_loss = ones(1, 0.7);
    p.upstream.z_loss = ones(1, -0.3);
    expect_right(p, run_gpu(p), on_gpu(), "configuration " + std::to_string(n));
  }
}

// Routing alone counts here: tiny experts, many of them.
TEST(CudaLayer, ManyExpertsAreChosenAsOnTheCpu) {
  const struct {
    int experts, k, groups, top_groups;
    RouterKind kind;
    double capacity;
    DropPolicy policy;
    bool bias;
  } cases[] = {
      {1024, 32, 1, 1, RouterKind::softmax_topk, 0.0, DropPolicy::by_score, false},
      {1024, 8, 32, 4, RouterKind::sigmoid, 0.0, DropPolicy::by_score, true},
      {256, 8, 8, 4, RouterKind::sigmoid, 1.0, DropPolicy::by_score, true},
      {128, 8, 1, 1, RouterKind::softmax_topk, 0.5, DropPolicy::by_position, false},
      {64, 6, 1, 1, RouterKind::topk_softmax, 0.7, DropPolicy::by_score, false},
      {33, 3, 1, 1, RouterKind::softmax_topk, 0.0, DropPolicy::by_score, true},
      {4, 2, 1, 1, RouterKind::topk_softmax, 0.3, DropPolicy::by_score, false},
  };
  int n = 0;
  for (const auto& c : cases) {
    SCOPED_TRACE(std::to_string(c.experts) + " experts");
    LayerConfig config;
    config.hidden_size = 16;
    config.intermediate_size = 8;
    config.num_experts = c.experts;
    config.top_k = c.k;
    auto& r = config.router;
    r.kind = c.kind;
    r.num_groups = c.groups;
    r.top_groups = c.top_groups;
    r.capacity_factor = c.capacity;
    r.drop_policy = c.policy;
    r.selection_bias = c.bias;
    r.renormalize = n % 2;
    r.aux_loss = n % 2 ? AuxLossKind::batch : AuxLossKind::sequence;
    r.aux_loss_coefficient = 0.1;
    r.z_loss_coefficient = 0.01;
    const std::int64_t tokens = 1500;
    Problem p = random_problem(config, tokens, 100 + n);
    p.inputs.ranks = {{tokens, n % 3 ? -1 : 1001, 5}};
    p.upstream.aux_loss = ones(1, 0.7);
    p.upstream.z_loss = ones(1, -0.3);
    for (std::int64_t i = 0; i < 64; ++i) p.inputs.router_logits[(i * 997) % p.inputs.router_logits.size()] = i % 2 ? NAN : INFINITY;
    if (c.experts == 4) {  // many equal weights, so that the order of routes decides
      for (auto& logit : p.inputs.router_logits) logit = std::isfinite(logit) ? std::round(logit) : logit;
    }
    RunOptions cpu;
    cpu.workers = 8;
    arena().reset();
    const Results want = run(p, cpu);
    const Results got = run_gpu(p);
    EXPECT_EQ(got.at("topk_ids"), want.at("topk_ids"));
    EXPECT_EQ(got.at("expert_counts"), want.at("expert_counts"));
    for (const char* name : {"topk_weights", "aux_loss", "z_loss", "d_router_logits", "y", "dx"}) {
      const auto& w = want.at(name);
      const double limit = name[0] == 'y' || name == std::string("dx") || name[0] == 'd' ? 1e-2 : 1e-5;
      EXPECT_LE(reference::compare(got.at(name), w, static_cast<std::int64_t>(w.size())).rel_fro, limit) << name;
    }
    ++n;
  }
}

TEST(CudaLayer, SameBitsForAnyBudgetTileWidthAndTime) {
  Random random(11);
  for (int n = 0; n < 10; ++n) {
    const Case c = random_case(random, 10 * n + 1 + 2 * (n % 2));
    if (c.problem.inputs.tokens == 0) continue;
    const Results one = run_gpu(c.problem, c.options);
    for (int workers : {132, 120, 64, 16, 1}) {
      RunOptions options = c.options;
      options.workers = workers;
      expect_identical(one, run_gpu(c.problem, options), std::to_string(workers) + " SMs");
    }
    RunOptions options = c.options;
    options.tile_columns = 64;
    expect_identical(one, run_gpu(c.problem, options), "tiles of 64 columns");
    options.tile_columns = 128;
    options.recompute = !options.recompute;
    expect_identical(one, run_gpu(c.problem, options), "recomputed or not");
    for (int again = 0; again < (n == 0 ? 20 : 3); ++again) expect_identical(one, run_gpu(c.problem, c.options), "again");
    options = c.options;
    options.keep = false;
    expect_identical(run_gpu(c.problem, options), one, "without gradients");
  }
}

// Holds an SM for itself until `duration` nanoseconds have passed.
__global__ void hog(unsigned long long duration) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < duration);
}

TEST(CudaLayer, SameBitsBesideAKernelThatHoldsSMs) {
  Random random(41);
  cudaStream_t other;
  check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  constexpr int shared_memory = 200 * 1024;
  check(cudaFuncSetAttribute(hog, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory));
  for (int blocks : {16, 100, 131}) {
    const LayerConfig config = random_config(random, DataType::bfloat16);
    const Problem p = random_problem(config, 700, random());
    const Results alone = run_gpu(p);
    RunOptions options = on_gpu();
    options.launch = [&](const std::function<void()>& pass) {
      hog<<<blocks, 1024, shared_memory, other>>>(20'000'000);
      check(cudaGetLastError());
      pass();
      check(cudaStreamSynchronize(arena().stream));
      check(cudaStreamSynchronize(other));
    };
    expect_identical(run_gpu(p, options), alone, std::to_string(blocks) + " SMs taken");
  }
  check(cudaStreamDestroy(other));
}

TEST(CudaLayer, ATokenAloneHasTheSameRow) {
  Random random(19);
  for (int n = 0; n < 4; ++n) {
    LayerConfig config = random_config(random, DataType::bfloat16);
    config.router.aux_loss = AuxLossKind::none;
    config.router.z_loss_coefficient = 0;
    config.router.capacity_factor = 0;
    const Problem p = random_problem(config, 170, random());
    const Results all = run_gpu(p);
    for (std::int64_t t : {0, 33, 169}) {
      Problem alone = p;
      alone.inputs.tokens = 1;
      auto row = [t](std::vector<double>& values, std::int64_t columns) {
        if (!values.empty()) values = {values.begin() + t * columns, values.begin() + (t + 1) * columns};
      };
      row(alone.inputs.x, config.hidden_size);
      row(alone.inputs.router_logits, config.num_experts);
      row(alone.inputs.shared_gate_logits, std::int64_t(config.shared_experts.size()));
      row(alone.upstream.y, config.hidden_size);
      const Results single = run_gpu(alone);
      for (const char* name : {"y", "dx", "d_router_logits"}) {
        std::vector<double> expected = all.at(name);
        row(expected, std::int64_t(expected.size()) / 170);
        EXPECT_EQ(single.at(name), expected) << name << " of token " << t;
      }
    }
  }
}

TEST(CudaLayer, AnIdOutsideTheExpertsIsAnEmptySlot) {
  Random random(23);
  const LayerConfig config = random_config(random, DataType::bfloat16);
  Problem p = random_problem(config, 90, random());
  bring_routes(p, 0.3, random());
  Problem outside = p;
  for (auto& id : outside.inputs.topk_ids) id = id < 0 ? (random() % 2 ? -7 : config.num_experts + 3) : id;
  expect_identical(run_gpu(p), run_gpu(outside), "ids outside");
}

TEST(CudaLayer, AccumulatesIntoTheMainGradient) {
  Random random(29);
  const LayerConfig config = random_config(random, DataType::bfloat16);
  const Problem p = random_problem(config, 160, random());
  const Results once = run_gpu(p);
  RunOptions options = on_gpu();
  options.preset = 1.0;
  options.backwards = 2;
  const Results twice = run_gpu(p, options);
  for (const auto& [name, values] : once) {
    if (name.find("d_gate_up") == std::string::npos && name.find("d_down") == std::string::npos) continue;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float expected = (1.0f + static_cast<float>(values[i])) + static_cast<float>(values[i]);
      ASSERT_EQ(twice.at(name)[i], expected) << name << "[" << i << "]";
    }
  }
}

TEST(CudaLayer, FrozenTensorsChangeNothingElse) {
  Random random(31);
  for (int n = 0; n < 3; ++n) {
    const LayerConfig config = random_config(random, DataType::bfloat16);
    const Problem p = random_problem(config, 140, random());
    const Results all = run_gpu(p);
    std::vector<std::string> names;
    for (const auto& [name, values] : all) {
      if (name[0] == 'd' || name.rfind("shared", 0) == 0) names.push_back(name);
    }
    for (std::size_t only = 0; only <= names.size(); ++only) {
      RunOptions options = on_gpu();
      if (only < names.size()) options.frozen = {names[only]};
      expect_identical(run_gpu(p, options), all, "without one");
      options.frozen = names;
      if (only < names.size()) options.frozen.erase(options.frozen.begin() + static_cast<std::ptrdiff_t>(only));
      expect_identical(run_gpu(p, options), all, "with one alone");
    }
  }
}

TEST(CudaLayer, GraphsReplayWithOtherInputs) {
  Random random(37);
  for (int n = 0; n < 6; ++n) {
    LayerConfig config = random_config(random, DataType::bfloat16);
    const std::int64_t tokens = 200;
    auto problem = [&](std::int64_t valid, double empty) {
      Problem p = random_problem(config, tokens, random());
      if (n % 2) bring_routes(p, empty, random());
      p.inputs.ranks = {{tokens, valid, 1}};
      p.upstream.aux_loss = ones(1, 0.7);
      p.upstream.z_loss = ones(1, -0.3);
      return p;
    };
    Problem first = problem(200, 0.1), second = problem(77, 0.5), third = problem(0, 0.0), fourth = problem(199, 0.99);
    if (n % 2 == 0) {  // one expert that nobody wants
      for (std::int64_t t = 0; t < tokens; ++t) second.inputs.router_logits[t * config.num_experts] = -INFINITY;
    }
    Captured captured;
    expect_identical(run_gpu(first, capturing(captured)), run_gpu(first), "captured");
    ASSERT_EQ(captured.graphs.size(), 2u);
    for (const Problem* p : {&second, &third, &fourth, &first}) {
      const Results replayed = run_gpu(*p, replaying(captured));
      expect_identical(replayed, run_gpu(*p), "replayed");
    }
    // What a call consists of: kernels, and few of them.
    const std::size_t most[2] = {config.router.capacity_factor > 0 ? 5u : 4u, 2u};
    for (int pass = 0; pass < 2; ++pass) {
      std::size_t count = 0;
      check(cudaGraphGetNodes(captured.graphs[pass], nullptr, &count));
      std::vector<cudaGraphNode_t> nodes(count);
      check(cudaGraphGetNodes(captured.graphs[pass], nodes.data(), &count));
      EXPECT_LE(count, most[pass]);
      for (const auto& node : nodes) {
        cudaGraphNodeType type;
        check(cudaGraphNodeGetType(node, &type));
        EXPECT_EQ(type, cudaGraphNodeTypeKernel);
      }
    }
  }
}

template <class F>
void expect_error(Status status, const std::string& part, F&& f) {
  try {
    f();
    FAIL() << "nothing thrown; expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(CudaLayer, SaysWhatItCannotDo) {
  LayerConfig config;
  config.hidden_size = config.intermediate_size = 16;
  config.num_experts = 2;
  config.top_k = 1;
  PlanOptions options;
  options.max_tokens = 8;
  options.device = DeviceKind::cuda;
  const Plan plan = Plan::create(config, options);
  EXPECT_GT(plan.buffer_sizes(8).saved, 0u);
  LayerConfig wide = config;
  wide.dtype = DataType::float32;
  expect_error(Status::unsupported, "bfloat16", [&] { Plan::create(wide, options); });
  PlanOptions tiles = options;
  tiles.tile_columns = 256;
  expect_error(Status::invalid_argument, "64 and 128", [&] { Plan::create(config, tiles); });
}

}  // namespace
}  // namespace moelith
