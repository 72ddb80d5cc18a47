// The layer on a GPU through its C++ interface: right against the fp64 reference, the same bits however it is run, and
// nothing but kernels in a call.
#include <algorithm>
#include <cstdlib>
#include <set>

#include "tests/driver_calls.cuh"
#include "tests/layer_fixture_gpu.cuh"
#include "tests/spin.cuh"

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
  LayerConfig config = random_config(random, DataType::bfloat16);
  if (config.hidden_size < 32) config.hidden_size += 32;  // the error of a row of 8 rounded values says little
  config.num_experts = std::max(config.num_experts, 2);   // over one, what is left of the router's gradient is rounding
  const std::int64_t tokens = n % 10 == 0 ? n % 3 : 16 + static_cast<std::int64_t>(random() % 285);
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
  c.options.bound = n % 3 == 1;
  c.options.wide_ids = n % 8 == 5;
  if (n % 5 == 1) c.options.row_gap = 8, c.options.logits_gap = 3;
  if (n % 4 == 3) round_logits(p), c.options.narrow_logits = true;
  if (n % 6 == 5) c.options.preset = 1.0;
  if (n % 7 == 3) {
    for (const char* name : {"dx", "d_gate_up_proj", "d_down_proj", "d_gate_up_bias", "d_down_bias", "d_router_logits", "shared0.d_down_proj"}) {
      if (random() % 3 == 0) c.options.frozen.push_back(name);
    }
  }
  return c;
}

bool is_weight_gradient(const std::string& name) {
  return name.find("d_gate_up") != std::string::npos || name.find("d_down") != std::string::npos;
}
// Without what the main gradients held before.
Results without_preset(Results results, const RunOptions& options) {
  if (std::isnan(options.preset)) return results;
  for (auto& [name, values] : results) {
    if (!is_weight_gradient(name)) continue;
    for (double& v : values) v -= options.preset;
  }
  return results;
}

// What a case has, by name, so that a test can say that it has seen everything.
void note_features(const Case& c, std::set<std::string>& seen) {
  const LayerConfig& config = c.problem.config;
  const RouterConfig& r = config.router;
  const auto& in = c.problem.inputs;
  auto note = [&](bool there, const std::string& name) {
    if (there) seen.insert(name);
  };
  seen.insert(to_string(config.activation.kind));
  note(config.gate_up_bias, "gate_up_bias"), note(config.down_bias, "down_bias");
  note(config.weight_placement == WeightPlacement::after_down, "after_down");
  note(config.weight_placement == WeightPlacement::before_down, "before_down");
  seen.insert(std::to_string(config.shared_experts.size()) + " shared");
  for (const auto& shared : config.shared_experts) seen.insert(shared.gated ? "gated" : "not gated");
  const bool logits = !in.router_logits.empty();
  if (logits) {
    seen.insert(to_string(r.kind));
    seen.insert(std::string("aux ") + std::to_string(int(r.aux_loss)));
    note(r.renormalize, "renormalize"), note(r.scaling_factor != 1.0, "scaling"), note(r.selection_bias, "selection_bias");
    note(r.num_groups > 1, "groups"), note(r.z_loss_coefficient > 0, "z_loss");
  }
  note(in.tokens == 0, "no tokens"), note(in.tokens > 128, "several row blocks");
  note(!in.topk_ids.empty(), "ids"), note(std::count(in.topk_ids.begin(), in.topk_ids.end(), -1) > 0, "empty slots");
  note(r.capacity_factor > 0 && r.drop_policy == DropPolicy::by_score, "capacity by score");
  note(r.capacity_factor > 0 && r.drop_policy == DropPolicy::by_position, "capacity by position");
  note(!in.ranks.empty() && in.ranks[0].valid_tokens >= 0, "valid tokens");
  note(!in.ranks.empty() && in.ranks[0].num_sequences > 1, "several sequences");
  note(c.problem.upstream.y.empty(), "no dY"), note(!c.problem.upstream.topk_weights.empty(), "gradient of the weights");
  const RunOptions& o = c.options;
  note(o.recompute, "recompute"), note(o.wide_gradients, "float gradients"), note(!o.wide_gradients, "bfloat16 gradients");
  note(!std::isnan(o.preset) && o.wide_gradients, "accumulated in float");
  note(o.bound, "bound"), note(o.wide_ids && !in.topk_ids.empty(), "int64 ids"), note(o.row_gap > 0, "row gaps");
  note(o.narrow_logits && logits, "bfloat16 logits"), note(o.narrow_logits && !in.shared_gate_logits.empty(), "bfloat16 gates");
  for (const auto& name : o.frozen) seen.insert("without " + name);
}
const std::vector<std::string> all_features{
    "swiglu", "swiglu_clamped", "geglu_erf", "geglu_tanh", "relu_squared", "gate_up_bias", "down_bias", "after_down", "before_down",
    "0 shared", "1 shared", "2 shared", "gated", "not gated", "softmax_topk", "topk_softmax", "sigmoid", "aux 0", "aux 1", "aux 2",
    "aux 3", "renormalize", "scaling", "selection_bias", "groups", "z_loss", "no tokens", "several row blocks", "ids", "empty slots",
    "capacity by score", "capacity by position", "valid tokens", "several sequences", "no dY", "gradient of the weights", "recompute",
    "float gradients", "bfloat16 gradients", "accumulated in float", "bound", "int64 ids", "row gaps", "bfloat16 logits",
    "bfloat16 gates", "without dx", "without d_gate_up_proj", "without d_down_proj", "without d_router_logits"};

// The GPU's results beside the CPU's: both round at the same places, so they differ by the order of sums alone.
void expect_like_the_cpu(const Case& c, const Results& got, const std::string& what) {
  RunOptions options = c.options;
  const RunOptions cpu;
  options.device = cpu.device, options.workers = 8, options.stream = nullptr, options.launch = cpu.launch;
  arena().reset();
  const Results want = without_preset(run(c.problem, options), options);
  ASSERT_EQ(got.size(), want.size()) << what;
  EXPECT_EQ(got.at("topk_ids"), want.at("topk_ids")) << what;
  EXPECT_EQ(got.at("expert_counts"), want.at("expert_counts")) << what;
  const double zero = rounding_of_zero(DataType::bfloat16);
  for (const auto& [name, values] : want) {
    if (magnitude(values) <= zero && magnitude(got.at(name)) <= zero) continue;
    const auto error = reference::compare(got.at(name), values, std::max<std::int64_t>(1, std::int64_t(values.size())));
    EXPECT_LE(error.rel_fro, tolerance(DataType::bfloat16).tensor) << what << ": " << name << " beside the CPU's";
  }
}

TEST(CudaLayer, MatchesTheReferenceAndTheCpu) {
  Random random(7);
  std::set<std::string> seen;
  for (int n = 0; n < 160; ++n) {
    const Case c = random_case(random, n);
    const std::string what = "configuration " + std::to_string(n);
    SCOPED_TRACE(what);
    note_features(c, seen);
    const Results results = without_preset(run_gpu(c.problem, c.options), c.options);
    expect_right(c.problem, results, c.options, what);
    expect_like_the_cpu(c, results, what);
  }
  for (const auto& name : all_features) EXPECT_TRUE(seen.count(name)) << "no configuration has: " << name;
}

TEST(CudaLayer, ExpertsThatLieApartGiveTheSameBits) {
  Random random(61);
  for (int n = 0; n < 8; ++n) {
    Case c = random_case(random, 10 * n + 1);
    c.options.bound = false;
    c.options.recompute = n % 2;
    if (n == 6) c.problem.upstream.y.clear();
    for (const int columns : {128, 192}) {
      c.options.tile_columns = columns;
      const Results stacked = run_gpu(c.problem, c.options);
      RunOptions apart = c.options;
      apart.bound = true;
      expect_identical(run_gpu(c.problem, apart), stacked, "apart");
    }
  }
}

TEST(CudaLayer, GapsBetweenRowsAndNarrowLogitsGiveTheSameBits) {
  Random random(67);
  for (int n = 0; n < 6; ++n) {
    Problem p = random_problem(random_config(random, DataType::bfloat16), 150, random());
    round_logits(p);
    if (n == 5) bring_routes(p, 0.2, random());
    RunOptions options = on_gpu();
    const Results plain = run_gpu(p, options);
    options.row_gap = 8 * (1 + n), options.logits_gap = 1 + n;
    options.wide_ids = true;
    expect_identical(run_gpu(p, options), plain, "gaps");
    options.narrow_logits = true;
    const Results narrow = run_gpu(p, options);
    expect_identical(narrow, plain, "narrow logits", {"d_router_logits", "d_shared_gate_logits"});
    expect_right(p, narrow, options, "narrow logits");
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
    options.tile_columns = 128;
    expect_identical(one, run_gpu(c.problem, options), "tiles of 128 columns");
    options.tile_columns = 192;
    options.recompute = !options.recompute;
    expect_identical(one, run_gpu(c.problem, options), "recomputed or not");
    for (int again = 0; again < (n == 0 ? 20 : 3); ++again) expect_identical(one, run_gpu(c.problem, c.options), "again");
    options = c.options;
    options.keep = false;
    expect_identical(run_gpu(c.problem, options), one, "without gradients");
  }
}

TEST(CudaLayer, SameBitsBesideAKernelThatHoldsSMs) {
  Random random(41);
  cudaStream_t other;
  check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  constexpr int shared_memory = 200 * 1024;  // an SM for each block alone
  check(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory));
  for (int blocks : {16, 100, 131}) {
    const LayerConfig config = random_config(random, DataType::bfloat16);
    const Problem p = random_problem(config, 700, random());
    const Results alone = run_gpu(p);
    RunOptions options = on_gpu();
    options.launch = [&](const std::function<void()>& pass) {
      spin<<<blocks, 1024, shared_memory, other>>>(20'000'000);
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
    const auto config = tokens_apart(random_config(random, DataType::bfloat16));
    expect_tokens_alone_have_their_rows(random_problem(config, 170, random()), {0, 33, 169},
                                        [](const Problem& p) { return run_gpu(p); });
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
    if (!is_weight_gradient(name)) continue;
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

// Kernels of a forward: three for routing, one more where experts have a capacity, and the pass.
std::size_t most_launches(const LayerConfig& config) { return config.router.capacity_factor > 0 ? 5u : 4u; }

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
    RunOptions options = on_gpu();
    if (n >= 4) options.preset = 1.0;
    const Results eager = run_gpu(first, options);
    for (const int passes : {1, 2}) {  // each pass a graph of its own; then the whole iteration one graph
      Captured captured;
      captured.passes = passes;
      expect_identical(run_gpu(first, capturing(captured, options)), eager, "captured");
      ASSERT_EQ(captured.graphs.size(), std::size_t(2 / passes));
      for (const Problem* p : {&second, &third, &fourth, &first}) {
        const Results replayed = run_gpu(*p, replaying(captured, options));
        expect_identical(replayed, run_gpu(*p, options), "replayed");
      }
      // What a call consists of: kernels, and few of them.
      const std::size_t forward = most_launches(config), most[2] = {passes == 1 ? forward : forward + 2, 2};
      for (std::size_t g = 0; g < captured.graphs.size(); ++g) {
        std::size_t count = 0;
        check(cudaGraphGetNodes(captured.graphs[g], nullptr, &count));
        std::vector<cudaGraphNode_t> nodes(count);
        check(cudaGraphGetNodes(captured.graphs[g], nodes.data(), &count));
        EXPECT_LE(count, most[g]);
        for (const auto& node : nodes) {
          cudaGraphNodeType type;
          check(cudaGraphNodeGetType(node, &type));
          EXPECT_EQ(type, cudaGraphNodeTypeKernel);
        }
      }
    }
  }
}

// Whatever happens in a call, by name: launches of kernels, as many as there are stages of routing and one for the pass;
// nothing that copies, clears, allocates, frees or waits.
TEST(CudaLayer, ACallConsistsOfLaunches) {
  auto& calls = DriverCalls::instance();
  if (!calls.available()) GTEST_SKIP() << "no CUPTI here";
  Random random(47);
  for (int n = 0; n < 12; ++n) {
    Case c = random_case(random, n);
    if (c.problem.inputs.tokens == 0) c.problem = random_problem(c.problem.config, 100, random());
    const std::size_t most[2] = {most_launches(c.problem.config), 2};
    run_gpu(c.problem, c.options);  // code is loaded on first use
    int pass = 0;
    c.options.launch = [&](const std::function<void()>& run_pass) {
      const std::vector<std::string> names = calls.during(run_pass);
      check(cudaStreamSynchronize(arena().stream));
      std::size_t launches = 0;
      std::string all;
      for (const auto& name : names) {
        all += name + " ";
        launches += name.rfind("cuLaunchKernel", 0) == 0;
        for (const char* bad : {"Memcpy", "Memset", "Alloc", "Free", "Synchronize", "Query", "Wait", "HostFunc", "Prefetch"}) {
          EXPECT_EQ(name.find(bad), std::string::npos) << name;
        }
      }
      EXPECT_GE(launches, 1u) << all;
      EXPECT_LE(launches, most[pass]) << all;
      pass = 1;
    };
    run_gpu(c.problem, c.options);
  }
}

TEST(CudaLayer, CallsTakeNoMemory) {
  Random random(53);
  const Problem p = random_problem(random_config(random, DataType::bfloat16), 200, random());
  run_gpu(p);
  RunOptions options = on_gpu();
  options.backwards = 3;
  options.launch = [](const std::function<void()>& pass) {
    std::size_t before = 0, after = 0, total = 0;
    check(cudaMemGetInfo(&before, &total));
    for (int n = 0; n < 20; ++n) pass();
    check(cudaStreamSynchronize(arena().stream));
    check(cudaMemGetInfo(&after, &total));
    EXPECT_EQ(before, after);
  };
  run_gpu(p, options);
}

// Saved and workspace as the device hands them out, filled by nobody and each by itself: compute-sanitizer sees what is
// read before it was written, and what lies outside.
TEST(CudaLayer, BuffersNeedNoInitialisation) {
  Random random(59);
  const int configurations = std::getenv("MOELITH_TEST_SHORT") ? 4 : 12;  // some of the tools take their time
  for (int n = 0; n < configurations; ++n) {
    const Case c = random_case(random, n);
    std::vector<void*> owned;
    RunOptions options = c.options;
    options.scratch = [&](std::uint64_t bytes) {
      void* memory = nullptr;
      check(cudaMalloc(&memory, std::max<std::uint64_t>(bytes, 1)));
      owned.push_back(memory);
      return memory;
    };
    const Results results = run_gpu(c.problem, options);
    for (void* memory : owned) check(cudaFree(memory));
    expect_identical(results, run_gpu(c.problem, c.options), "configuration " + std::to_string(n));
  }
}

// One graph of an iteration over experts that lie apart; its weights change in place, as an optimizer changes them.
TEST(CudaLayer, AGraphOverExpertsThatLieApart) {
  LayerConfig c;
  c.hidden_size = 72, c.intermediate_size = 40, c.num_experts = 6, c.top_k = 2;
  const std::int64_t tokens = 90;
  arena().reset();
  PlanOptions plan_options;
  plan_options.max_tokens = tokens;
  plan_options.device = DeviceKind::cuda;
  const Plan plan = Plan::create(c, plan_options);
  Tensor x(c.dtype, {tokens, 72}), y(c.dtype, {tokens, 72}), dy(c.dtype, {tokens, 72}), dx(c.dtype, {tokens, 72}),
      logits(DataType::float32, {tokens, 6}), d_logits(DataType::float32, {tokens, 6});
  std::vector<Tensor> gate_up, down, d_gate_up, d_down;
  for (int e = 0; e < 6; ++e) {
    gate_up.emplace_back(c.dtype, std::initializer_list<std::int64_t>{80, 72});
    d_down.emplace_back(DataType::float32, std::initializer_list<std::int64_t>{72, 40});
    down.emplace_back(c.dtype, std::initializer_list<std::int64_t>{72, 40});
    d_gate_up.emplace_back(DataType::float32, std::initializer_list<std::int64_t>{80, 72});
  }
  auto bind = [&](const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
    ExpertPointers pointers;
    pointers.dtype = a[0].view.dtype;
    for (int e = 0; e < 6; ++e) pointers.gate_up_proj.push_back(a[e].view.data), pointers.down_proj.push_back(b[e].view.data);
    return plan.bind(pointers);
  };
  Inputs in;
  in.x = x.view, in.router_logits = logits.view, in.weights.bound = bind(gate_up, down);
  Outputs out;
  out.y = y.view;
  OutputGradients up;
  up.y = dy.view;
  InputGradients grad;
  grad.x = dx.view, grad.router_logits = d_logits.view, grad.weights.bound = bind(d_gate_up, d_down);
  const auto sizes = plan.buffer_sizes(tokens);
  Buffer saved(sizes.saved), workspace(sizes.workspace);
  auto iteration = [&] {
    plan.forward(in, out, saved.data(), workspace.data(), arena().stream);
    plan.backward(in, saved.data(), up, grad, workspace.data(), arena().stream);
  };
  auto results = [&] {
    check(cudaStreamSynchronize(arena().stream));
    Results r{{"y", y.get()}, {"dx", dx.get()}, {"d_router_logits", d_logits.get()}};
    for (const auto* set : {&d_gate_up, &d_down}) {
      for (const Tensor& t : *set) r["d" + std::to_string(r.size())] = t.get();
    }
    return r;
  };
  cudaGraphExec_t executable = nullptr;
  for (std::uint64_t round = 0; round < 3; ++round) {
    Problem p = random_problem(c, tokens, 80 + round);
    for (std::int64_t t = 0; t < tokens; ++t) p.inputs.router_logits[t * 6 + std::int64_t(round)] = -30.0;
    x.set(p.inputs.x.data()), logits.set(p.inputs.router_logits.data()), dy.set(p.upstream.y.data());
    for (int e = 0; e < 6; ++e) gate_up[e].set(p.weights.gate_up_proj.data() + e * 80 * 72), down[e].set(p.weights.down_proj.data() + e * 72 * 40);
    iteration();
    const Results eager = results();
    if (!executable) {
      cudaGraph_t graph;
      check(cudaStreamBeginCapture(arena().stream, cudaStreamCaptureModeGlobal));
      iteration();
      check(cudaStreamEndCapture(arena().stream, &graph));
      check(cudaGraphInstantiate(&executable, graph, 0));
      check(cudaGraphDestroy(graph));
    }
    for (Tensor* t : {&y, &dx, &d_logits}) std::memset(t->view.data, 0xff, std::size_t(t->view.numel()) * size_of(t->view.dtype));
    check(cudaGraphLaunch(executable, arena().stream));
    const Results replayed = results();
    expect_identical(replayed, eager, "replayed");
    for (std::size_t n = 0; n < 40; ++n) ASSERT_EQ(d_gate_up[round].get()[n], 0.0);  // nobody wanted this one
  }
  check(cudaGraphExecDestroy(executable));
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
  expect_error(Status::invalid_argument, "128 and 192", [&] { Plan::create(config, tiles); });

  // Rows move 16 bytes at a time: other places are refused by name, before anything is launched.
  arena().reset();
  Tensor x(config.dtype, {9, 16}), y(config.dtype, {8, 16}), logits(DataType::float32, {8, 2}), gate_up(config.dtype, {3, 32, 16}),
      down(config.dtype, {2, 16, 16});
  const std::vector<double> zeros(1536, 0.0);
  for (Tensor* t : {&x, &logits, &gate_up, &down}) t->set(zeros.data());
  const auto sizes = plan.buffer_sizes(8);
  Buffer saved(sizes.saved), workspace(sizes.workspace);
  Inputs good;
  good.x = TensorView(x.view.data, config.dtype, {8, 16});
  good.router_logits = logits.view;
  good.weights.gate_up_proj = TensorView(gate_up.view.data, config.dtype, {2, 32, 16});
  good.weights.down_proj = down.view;
  Outputs out;
  out.y = y.view;
  auto forward = [&](const Inputs& in) {
    plan.forward(in, out, saved.data(), workspace.data(), arena().stream);
    check(cudaStreamSynchronize(arena().stream));
  };
  forward(good);
  for (const int elements : {1, 2, 4}) {
    auto moved = [&](TensorView view) {
      view.data = static_cast<numerics::bfloat16*>(view.data) + elements;
      return view;
    };
    Inputs in = good;
    in.x = moved(in.x);
    expect_error(Status::invalid_argument, "x: got memory that is not aligned", [&] { forward(in); });
    in = good;
    in.weights.gate_up_proj = moved(in.weights.gate_up_proj);
    expect_error(Status::invalid_argument, "gate_up_proj: got memory that is not aligned", [&] { forward(in); });
    in = good;
    in.x.shape[0] = 4;
    in.x.stride[0] = 16 + elements;
    in.router_logits.shape[0] = 4;
    Outputs fewer = out;
    fewer.y.shape[0] = 4;
    expect_error(Status::invalid_argument, "x: got bfloat16[4, 16]", [&] {
      plan.forward(in, fewer, saved.data(), workspace.data(), arena().stream);
    });
    ExpertPointers pointers;
    pointers.dtype = config.dtype;
    pointers.down_proj = {down.view.data, static_cast<numerics::bfloat16*>(down.view.data) + 256 + elements};
    expect_error(Status::invalid_argument, "down_proj[1]: got memory that is not aligned", [&] { plan.bind(pointers); });
  }
}

}  // namespace
}  // namespace moelith
