// The cases of tests/cases_test.cpp that one GPU can show: small inputs that systems of this kind got wrong, by their IDs.
#include <algorithm>

#include "numerics/activation.hpp"
#include "tests/layer_fixture_gpu.cuh"
#include "tests/one_unit.hpp"

namespace moelith {
namespace {

using namespace test;
using numerics::bfloat16;

LayerConfig plain(std::int64_t h, std::int64_t i, std::int32_t experts, std::int32_t k) {
  LayerConfig c;
  c.hidden_size = h, c.intermediate_size = i, c.num_experts = experts, c.top_k = k;
  c.router.renormalize = true;
  return c;
}
void bring(Problem& p, std::vector<std::int64_t> ids, std::uint64_t seed = 3) {
  bring_routes(p, 0.0, seed);
  p.inputs.topk_ids.assign(ids.begin(), ids.end());
}
bool all_are(const std::vector<double>& values, std::size_t begin, std::size_t count, double expected) {
  return std::all_of(values.begin() + begin, values.begin() + begin + count, [=](double v) { return v == expected; });
}

std::vector<double> slice(const std::vector<double>& values, std::int64_t row, std::int64_t columns) {
  return {values.begin() + row * columns, values.begin() + (row + 1) * columns};
}

TEST(CudaCases, R1_NaNLogitsStayInTheirRow) {
  for (const RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
      LayerConfig c = plain(16, 24, 8, 2);
      c.router.kind = kind;
      c.router.renormalize = false;
      Problem p = random_problem(c, 3, 5);
      p.inputs.router_logits = {bad, bad, bad, bad, bad, bad,  bad, bad,  // no finite expert
                                0.1, 0.2, bad, 0.9, 0.3, -2.0, 0.4, 0.0,  // the best of the finite ones: 3 and 6
                                0.5, 1.5, 0.1, 0.2, 2.5, -1.0, 0.3, 0.4};
      const Results all = run_gpu(p);
      const std::string what = std::string(to_string(kind)) + " " + std::to_string(bad);
      EXPECT_EQ(all.at("topk_ids"), (std::vector<double>{0, 1, 3, 6, 4, 1})) << what;
      EXPECT_EQ(slice(all.at("topk_weights"), 0, 2), (std::vector<double>{0, 0})) << what;
      EXPECT_TRUE(all_are(all.at("y"), 0, 16, 0.0)) << what;
      EXPECT_TRUE(all_are(all.at("d_router_logits"), 0, 8, 0.0)) << what;
      EXPECT_EQ(all.at("d_router_logits")[8 + 2], 0.0) << what;
      for (const auto& [name, values] : all) {
        for (double v : values) ASSERT_TRUE(std::isfinite(v)) << what << ": " << name;
      }
      Problem alone = p;
      alone.inputs.tokens = 1;
      alone.inputs.x = slice(p.inputs.x, 2, 16);
      alone.inputs.router_logits = slice(p.inputs.router_logits, 2, 8);
      alone.upstream.y = slice(p.upstream.y, 2, 16);
      const Results single = run_gpu(alone);
      EXPECT_EQ(single.at("y"), slice(all.at("y"), 2, 16)) << what;
      EXPECT_EQ(single.at("dx"), slice(all.at("dx"), 2, 16)) << what;
      EXPECT_EQ(single.at("topk_weights"), slice(all.at("topk_weights"), 2, 2)) << what;
      EXPECT_EQ(single.at("d_router_logits"), slice(all.at("d_router_logits"), 2, 8)) << what;
    }
  }
}

TEST(CudaCases, R1_NaNInATokenStaysInItsRow) {
  LayerConfig c = plain(72, 136, 6, 3);
  c.shared_experts = {{40, true}};
  const Problem p = random_problem(c, 150, 3);
  Problem bad = p;
  std::fill_n(bad.inputs.x.begin() + 77 * 72, 72, NAN);
  const Results good = run_gpu(p), other = run_gpu(bad);
  for (std::int64_t t = 0; t < 150; ++t) {
    for (const char* name : {"y", "dx"}) {
      if (t != 77) ASSERT_EQ(slice(good.at(name), t, 72), slice(other.at(name), t, 72)) << name << " of token " << t;
    }
  }
  EXPECT_TRUE(std::isnan(other.at("y")[77 * 72]));
}

TEST(CudaCases, R3_NegativeSelectionScores) {
  LayerConfig c = plain(8, 8, 4, 2);
  c.router.renormalize = false;
  c.router.kind = RouterKind::sigmoid;
  c.router.selection_bias = true;
  c.router.num_groups = 2;
  c.router.top_groups = 1;
  c.router.group_score_size = 2;
  Problem p = random_problem(c, 1, 1);
  p.inputs.router_logits = {0, 0, 0, 0};               // scores 0.5
  auto bias = [&p](std::initializer_list<float> values) { p.inputs.selection_bias.assign(values.begin(), values.end()); };
  bias({-0.6f, -0.7f, -0.8f, -0.9f});                  // biased: -.1, -.2 ; -.3, -.4
  const Results r = run_gpu(p);
  EXPECT_EQ(r.at("topk_ids"), (std::vector<double>{0, 1}));
  EXPECT_EQ(r.at("topk_weights"), (std::vector<double>{0.5, 0.5}));
  expect_right(p, r, on_gpu(), "R3");
  bias({-0.9f, -0.8f, 0.1f, 0.2f});  // the first group's scores alone are negative
  EXPECT_EQ(run_gpu(p).at("topk_ids"), (std::vector<double>{3, 2}));
  p.config.router.kind = RouterKind::softmax_topk;
  bias({-0.6f, -0.7f, -0.8f, -0.9f});
  const Results softmax = run_gpu(p);
  EXPECT_EQ(softmax.at("topk_ids"), (std::vector<double>{0, 1}));
  EXPECT_EQ(softmax.at("topk_weights"), (std::vector<double>{0.25, 0.25}));
}

TEST(CudaCases, A2_SequenceLossOfMicroBatches) {
  for (const RouterKind kind : {RouterKind::softmax_topk, RouterKind::sigmoid}) {
    LayerConfig c = plain(8, 8, 6, 2);
    c.router.kind = kind;
    c.router.aux_loss = AuxLossKind::sequence;
    c.router.aux_loss_coefficient = 0.3;
    Problem p = random_problem(c, 8, 2);
    p.upstream.y.clear();
    p.upstream.aux_loss = {1.0};
    p.inputs.ranks = {{8, -1, 2}};
    const Results joined = run_gpu(p);
    expect_right(p, joined, on_gpu(), "A2");
    double loss = 0;
    std::vector<double> gradient;
    for (std::int64_t half = 0; half < 2; ++half) {
      Problem part = p;
      part.inputs.tokens = 4;
      part.inputs.x = slice(p.inputs.x, half, 4 * 8);
      part.inputs.router_logits = slice(p.inputs.router_logits, half, 4 * 6);
      part.inputs.ranks = {{4, -1, 1}};
      const Results r = run_gpu(part);
      loss += r.at("aux_loss")[0];
      gradient.insert(gradient.end(), r.at("d_router_logits").begin(), r.at("d_router_logits").end());
    }
    EXPECT_NEAR(joined.at("aux_loss")[0], loss, 1e-6);
    EXPECT_EQ(joined.at("d_router_logits"), gradient);
    EXPECT_FALSE(all_are(gradient, 0, gradient.size(), 0.0));
  }
}

TEST(CudaCases, D1_EmptySlots) {
  Problem p = random_problem(plain(16, 24, 2, 2), 4, 7);
  bring(p, {0, -1, -1, 1, 1, 0, -1, -1});
  const Results r = run_gpu(p);
  expect_right(p, r, on_gpu(), "D1");
  EXPECT_EQ(r.at("expert_counts"), (std::vector<double>{2, 2}));
  EXPECT_TRUE(all_are(r.at("y"), 48, 16, 0.0));
  EXPECT_TRUE(all_are(r.at("dx"), 48, 16, 0.0));
  for (int slot : {1, 2, 6, 7}) EXPECT_EQ(r.at("d_topk_weights")[slot], 0.0);
}

TEST(CudaCases, G1_ExpertsWithoutTokens) {
  const std::vector<std::int64_t> counts{162, 0, 2577, 446, 0, 83};
  std::vector<std::int64_t> ids;
  for (std::size_t e = 0; e < counts.size(); ++e) ids.insert(ids.end(), counts[e], std::int64_t(e));
  Random random(5);
  std::shuffle(ids.begin(), ids.end(), random);
  LayerConfig c = plain(128, 72, 6, 1);
  c.gate_up_bias = c.down_bias = true;
  for (bool wide : {false, true}) {
    Problem p = random_problem(c, std::int64_t(ids.size()), 7);
    bring(p, ids);
    RunOptions options = on_gpu();
    options.wide_gradients = wide;
    const Results r = run_gpu(p, options);
    expect_right(p, r, options, "G1");
    for (std::size_t e : {1, 4}) {
      EXPECT_TRUE(all_are(r.at("d_gate_up_proj"), e * 2 * 72 * 128, 2 * 72 * 128, 0.0));
      EXPECT_TRUE(all_are(r.at("d_down_proj"), e * 72 * 128, 72 * 128, 0.0));
      EXPECT_TRUE(all_are(r.at("d_gate_up_bias"), e * 144, 144, 0.0));
      EXPECT_TRUE(all_are(r.at("d_down_bias"), e * 128, 128, 0.0));
    }
  }
}

TEST(CudaCases, G5_WidthsThatAreNoMultipleOfATile) {
  for (std::int64_t i : {8, 40, 128, 768}) {
    const Problem p = random_problem(plain(72, i, 16, 3), 150, 11);
    expect_right(p, run_gpu(p), on_gpu(), "I = " + std::to_string(i));
    const Problem q = random_problem(plain(i, 72, 16, 3), 150, 12);
    expect_right(q, run_gpu(q), on_gpu(), "H = " + std::to_string(i));
  }
}

TEST(CudaCases, G3_MainGradient) {
  Problem p = random_problem(plain(16, 32, 2, 1), 8, 21);
  bring(p, {0, 1, 1, 0, 0, 1, 0, 1});
  const Results once = run_gpu(p);
  RunOptions options = on_gpu();
  options.preset = 1.0;
  options.backwards = 2;
  const Results twice = run_gpu(p, options);
  for (const char* name : {"d_gate_up_proj", "d_down_proj"}) {
    for (std::size_t n = 0; n < once.at(name).size(); ++n) {
      const float dw = static_cast<float>(once.at(name)[n]);
      ASSERT_EQ(twice.at(name)[n], double((1.0f + dw) + dw)) << name << "[" << n << "]";
      ASSERT_NEAR(twice.at(name)[n], 1.0 + 2.0 * double(dw), 1e-5);
    }
    EXPECT_FALSE(all_are(once.at(name), 0, once.at(name).size(), 0.0));
  }
}

// The reported widths, a few rows for each of many experts (fewer where the reference would take minutes).
TEST(CudaCases, G5_ManyExpertsOfSuchWidths) {
  for (const std::int64_t n : {40, 128, 768, 2880}) {
    const LayerConfig c = plain(n == 768 ? 1024 : 256, n, n > 128 ? 16 : 128, 1);
    const Problem p = random_problem(c, 256, 12);
    for (const int columns : {128, 192}) {
      RunOptions options = on_gpu();
      options.tile_columns = columns;
      expect_right(p, run_gpu(p, options), options, "N = " + std::to_string(n));
    }
  }
}

TEST(CudaCases, G6_ALongExpert) {
  constexpr std::int64_t tokens = 147456;
  Problem p = random_problem(plain(32, 16, 1, 1), tokens, 13);
  bring(p, std::vector<std::int64_t>(tokens, 0));
  const Results all = run_gpu(p);
  Results gradients = all;  // the worst of so many rows says little: the last ones are looked at below
  for (const char* name : {"y", "dx", "d_topk_weights"}) gradients.erase(name);
  expect_right(p, gradients, on_gpu(), "G6");
  Problem last = p;
  auto keep = [](std::vector<double>& values, std::int64_t columns) { values.erase(values.begin(), values.end() - 100 * columns); };
  last.inputs.tokens = 100;
  last.inputs.topk_ids.resize(100);
  keep(last.inputs.x, 32), keep(last.inputs.topk_weights, 1), keep(last.upstream.y, 32);
  const Results some = run_gpu(last);
  expect_right(last, some, on_gpu(), "G6, the last tokens");
  for (const char* name : {"y", "dx", "d_topk_weights"}) {
    std::vector<double> end = all.at(name);
    keep(end, std::int64_t(end.size()) / tokens);
    EXPECT_EQ(end, some.at(name)) << name;
  }
}

TEST(CudaCases, S1_ManyExperts) {
  for (const auto& [experts, k] : {std::pair{512, 10}, std::pair{1024, 1}}) {
    const Problem p = random_problem(plain(32, 16, experts, k), 300, 17);
    expect_right(p, run_gpu(p), on_gpu(), std::to_string(experts) + " experts");
  }
}

TEST(CudaCases, N2_NaNInAbsentRowsDoesNotLeak) {
  LayerConfig c = plain(64, 40, 8, 2);
  c.shared_experts = {{48, true}};
  c.router.aux_loss = AuxLossKind::batch;
  c.router.aux_loss_coefficient = 0.1;
  Problem p = random_problem(c, 150, 19);
  p.inputs.ranks = {{150, 101, 1}};
  p.upstream.aux_loss = {1.0};
  const Results clean = run_gpu(p);
  expect_right(p, clean, on_gpu(), "N2");
  for (std::int64_t t = 101; t < 150; ++t) {
    std::fill_n(p.inputs.x.begin() + t * 64, 64, NAN);
    std::fill_n(p.upstream.y.begin() + t * 64, 64, NAN);
    std::fill_n(p.inputs.router_logits.begin() + t * 8, 8, NAN);
    p.inputs.shared_gate_logits[t] = NAN;
  }
  const Results dirty = run_gpu(p);
  expect_identical(dirty, clean, "NaN in absent rows");
  EXPECT_TRUE(all_are(dirty.at("y"), 101 * 64, 49 * 64, 0.0));
  EXPECT_TRUE(all_are(dirty.at("dx"), 101 * 64, 49 * 64, 0.0));
}

// Rows with gaps between them: NaN there is neither read nor overwritten (the fixture looks).
TEST(CudaCases, N2_NaNBetweenRowsDoesNotLeak) {
  LayerConfig c = plain(40, 72, 3, 2);
  const Problem p = random_problem(c, 150, 91);
  RunOptions options = on_gpu();
  options.row_gap = 16, options.logits_gap = 5;
  expect_identical(run_gpu(p, options), run_gpu(p), "gaps between rows");
}

TEST(CudaCases, N3_FewRowsAnExpert) {
  std::vector<std::int64_t> ids;
  for (std::int64_t e = 0; e < 63; ++e) ids.insert(ids.end(), e + 1, e);
  Random random(23);
  std::shuffle(ids.begin(), ids.end(), random);
  Problem p = random_problem(plain(40, 24, 63, 1), std::int64_t(ids.size()), 23);
  bring(p, ids);
  expect_right(p, run_gpu(p), on_gpu(), "N3");
}

TEST(CudaCases, C1_TwoGraphsOfOneLayerInTurn) {
  LayerConfig c = plain(72, 56, 8, 2);
  c.shared_experts = {{48, false}};
  Captured large, small;
  arena().reset();
  run(random_problem(c, 200, 29), capturing(large));
  run(random_problem(c, 90, 30), capturing(small));
  for (std::uint64_t round = 0; round < 4; ++round) {
    Problem a = random_problem(c, 200, 31 + round), b = random_problem(c, 90, 41 + round);
    for (std::int64_t t = 0; t < 200; ++t) a.inputs.router_logits[t * 8 + std::int64_t(round)] = -20.0;  // another expert empty
    arena().reset();
    const Results of_a = run(a, replaying(large)), of_b = run(b, replaying(small));
    expect_identical(of_a, run_gpu(a), "the graph of 200 tokens");
    expect_identical(of_b, run_gpu(b), "the graph of 90 tokens");
  }
}

TEST(CudaCases, E5_LossesAreTheSameEveryTime) {
  for (const AuxLossKind kind : {AuxLossKind::batch, AuxLossKind::sequence, AuxLossKind::global}) {
    LayerConfig c = plain(32, 16, 64, 6);
    c.router.aux_loss = kind;
    c.router.aux_loss_coefficient = 0.1;
    c.router.z_loss_coefficient = 0.01;
    Problem p = random_problem(c, 3000, 37);
    p.inputs.ranks = {{3000, -1, kind == AuxLossKind::sequence ? 6 : 1}};
    p.upstream.aux_loss = p.upstream.z_loss = {1.0};
    const Results first = run_gpu(p);
    expect_right(p, first, on_gpu(), "E5");
    for (int n = 0; n < 8; ++n) expect_identical(run_gpu(p), first, "again");
  }
}

// No tokens at all, and all tokens at one expert of many.
TEST(CudaCases, E1_NoTokensAndOneExpertForAll) {
  const LayerConfig c = plain(40, 72, 6, 2);
  Problem none = random_problem(c, 0, 61);
  none.upstream.aux_loss = {1.0};
  expect_right(none, run_gpu(none), on_gpu(), "no tokens");
  Problem p = random_problem(plain(40, 72, 6, 1), 300, 62);
  bring(p, std::vector<std::int64_t>(300, 5));
  const Results r = run_gpu(p);
  expect_right(p, r, on_gpu(), "one expert for all");
  EXPECT_TRUE(all_are(r.at("d_gate_up_proj"), 0, 5 * 2 * 72 * 40, 0.0));
}

TEST(CudaCases, C2_AWholeIterationIsCaptured) {
  LayerConfig c = plain(72, 56, 8, 2);
  c.shared_experts = {{48, true}};
  c.router.aux_loss = AuxLossKind::batch;
  c.router.aux_loss_coefficient = 0.1;
  Problem p = random_problem(c, 150, 51), q = random_problem(c, 150, 52);
  p.upstream.aux_loss = q.upstream.aux_loss = {1.0};
  const Results eager_p = run_gpu(p), eager_q = run_gpu(q);
  Captured captured;
  captured.passes = 2;
  expect_identical(run_gpu(p, capturing(captured)), eager_p, "captured");
  expect_identical(run_gpu(q, replaying(captured)), eager_q, "replayed");
  expect_identical(run_gpu(p, replaying(captured)), eager_p, "replayed again");
}

// --- F: formulas -----------------------------------------------------------------------------------------------------

OneUnit one_unit(const ActivationConfig& activation, double gate, double up) {
  return test::one_unit(activation, gate, up, DataType::bfloat16, [](const Problem& p) { return run_gpu(p); });
}

struct InFloat {
  float value, d_gate, d_up;
};
__global__ void evaluate(numerics::Activation activation, float gate, float up, InFloat* out) {
  numerics::with_activation_kind(activation.kind, [&]<ActivationKind Kind>() {
    const auto v = numerics::activation<Kind>(numerics::ActivationParameters<float>(activation), gate, up);
    *out = {v.value, v.d_gate, v.d_up};
  });
}
// The activation as the kernels compute it, before anything is rounded to bfloat16.
InFloat in_float(const ActivationConfig& activation, float gate, float up) {
  static InFloat* out = [] {
    void* memory = nullptr;
    check(cudaMallocManaged(&memory, sizeof(InFloat)));
    return static_cast<InFloat*>(memory);
  }();
  *out = {NAN, NAN, NAN};
  evaluate<<<1, 1>>>(numerics::Activation(activation), gate, up, out);
  check(cudaDeviceSynchronize());
  return *out;
}

TEST(CudaCases, F2_ClampedSwiGLU) {
  ActivationConfig a;
  a.kind = ActivationKind::swiglu_clamped;
  a.limit = 7.0;
  a.alpha = 1.702;
  a.up_offset = 1.0;
  // The gate is clamped above alone, up on both sides.
  EXPECT_NEAR(in_float(a, -10, -10).value, 2.43e-6, 0.005e-6);
  EXPECT_NEAR(in_float(a, 8, -9).value, -41.9997, 0.00005);
  EXPECT_NEAR(one_unit(a, -10, -10).value, 2.43e-6, 0.01e-6);
  EXPECT_NEAR(one_unit(a, 8, -9).value, -42.0, 0.001);
  // Outside of a clamp nothing flows; at the boundary it does.
  const InFloat boundary = in_float(a, 7, -7);
  EXPECT_NEAR(boundary.value, -41.99972, 0.00005);
  EXPECT_NEAR(boundary.d_gate, -6.000437, 0.00005);  // up' (s + alpha g s (1 - s)), g = 7, up' = -6
  EXPECT_NEAR(boundary.d_up, 6.999953, 0.00005);
  const OneUnit at = one_unit(a, 7, -7), beyond = one_unit(a, 7.5, -7.5), inside = one_unit(a, 6.5, -6.5), low = one_unit(a, -8, 7);
  EXPECT_NEAR(at.d_gate, -6.000437, 0.03);
  EXPECT_NEAR(at.d_up, 6.999953, 0.03);
  EXPECT_EQ(beyond.d_gate, 0.0);
  EXPECT_EQ(beyond.d_up, 0.0);
  for (const OneUnit& unit : {inside, low}) {
    EXPECT_NE(unit.d_gate, 0.0);
    EXPECT_NE(unit.d_up, 0.0);
  }
}

TEST(CudaCases, F4_BothGELUs) {
  ActivationConfig a;
  a.kind = activation_kind_from("geglu_erf");
  EXPECT_NEAR(in_float(a, 1, 1).value, 0.841345, 5e-7);
  EXPECT_NEAR(one_unit(a, 1, 1).value, 0.841345, 0.004);
  a.kind = activation_kind_from("geglu_tanh");
  EXPECT_NEAR(in_float(a, 1, 1).value, 0.841192, 5e-7);
  EXPECT_NEAR(one_unit(a, 1, 1).value, 0.841192, 0.004);
}

TEST(CudaCases, F4_ExtremePreActivations) {
  for (const char* name : {"swiglu", "swiglu_clamped", "geglu_erf", "geglu_tanh"}) {
    ActivationConfig a;
    a.kind = activation_kind_from(name);
    for (const double gate : {-1e25, -1e15, -200.0, -0.0, 0.0, 1e-30, 200.0, 1e15, 1e25}) {
      const OneUnit unit = one_unit(a, gate, 1);
      EXPECT_TRUE(std::isfinite(unit.value)) << name << " of " << gate;
      EXPECT_TRUE(std::isfinite(unit.d_gate)) << name << " of " << gate;
      EXPECT_TRUE(std::isfinite(unit.d_up)) << name << " of " << gate;
    }
  }
}

TEST(CudaCases, N1_OutputsAreOfOrderOne) {
  Random random(71);
  auto rms = [](const std::vector<double>& values) {
    double sum = 0.0;
    for (double v : values) sum += v * v;
    return std::sqrt(sum / double(values.size()));
  };
  for (int n = 0; n < 10; ++n) {
    LayerConfig c = random_config(random, DataType::bfloat16);
    c.router.capacity_factor = 0;
    const Problem p = random_problem(c, 64, random());
    const Results r = run_gpu(p);
    for (const char* name : {"y", "dx", "d_gate_up_proj", "d_down_proj"}) {
      EXPECT_GT(rms(r.at(name)), 0.005) << name << " of configuration " << n;
      EXPECT_LT(rms(r.at(name)), 200.0) << name << " of configuration " << n;
    }
  }
}

TEST(CudaCases, N1_AWrongActivationIsSeen) {
  const LayerConfig c = plain(32, 40, 4, 2);
  const Problem p = random_problem(c, 50, 73);
  const Results r = run_gpu(p);
  for (const ActivationKind wrong : {ActivationKind::geglu_erf, ActivationKind::geglu_tanh}) {
    LayerConfig other = c;
    other.activation.kind = wrong;
    const auto expected = reference::forward(other, p.weights, p.inputs, 1);
    EXPECT_GT(reference::compare(r.at("y"), expected.y, c.hidden_size).rel_fro, 0.05);
  }
}

// --- D3: more elements than 32 bits count, in every tensor of routed rows --------------------------------------------

__global__ void fill(bfloat16* p, std::int64_t count, float scale, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < count; i += std::int64_t(gridDim.x) * blockDim.x) {
    std::uint64_t n = seed + std::uint64_t(i) + 0x9e3779b97f4a7c15ull;
    n = (n ^ (n >> 30)) * 0xbf58476d1ce4e5b9ull;
    n = (n ^ (n >> 27)) * 0x94d049bb133111ebull;
    n ^= n >> 31;
    p[i] = numerics::to_bfloat16(((float(n >> 40) + 0.5f) * (2.0f / 16777216.0f) - 1.0f) * 1.7f * scale);
  }
}
struct DeviceMemory {
  std::vector<void*> blocks;
  template <class T>
  T* get(std::uint64_t count) {
    void* p = nullptr;
    check(cudaMalloc(&p, count * sizeof(T)));
    blocks.push_back(p);
    return static_cast<T*>(p);
  }
  ~DeviceMemory() {
    for (void* p : blocks) cudaFree(p);
  }
};

TEST(CudaCases, D3_FullSize) {
  constexpr std::int64_t tokens = 37450, h = 7168, i = 7168, tail = 64, first = tokens - tail;
  constexpr std::int32_t k = 8;
  static_assert(tokens * k * h > (std::int64_t(1) << 31) && tokens * k * 2 * i > (std::int64_t(1) << 32));
  const LayerConfig c = plain(h, i, k, k);
  DeviceMemory memory;
  auto random = [&](std::int64_t count, float scale, std::uint64_t seed) {
    auto* p = memory.get<bfloat16>(count);
    fill<<<1024, 256>>>(p, count, scale, seed << 40);
    return p;
  };
  auto* x = random(tokens * h, 1.0f, 1);
  auto* dy = random(tokens * h, 1.0f, 2);
  check(cudaMemset(dy, 0, first * h * 2));  // so that the weights' gradients are those of the tail
  auto* gate_up = random(k * 2 * i * h, 1.0f / 85.0f, 3);
  auto* down = random(k * h * i, 1.0f / 85.0f, 4);
  auto* ids = memory.get<std::int32_t>(tokens * k);
  auto* weights = memory.get<float>(tokens * k);
  std::vector<std::int32_t> host_ids(tokens * k);
  std::vector<float> host_weights(tokens * k);
  for (std::int64_t n = 0; n < tokens * k; ++n) host_ids[n] = std::int32_t((n + n / k) % k), host_weights[n] = 0.1f + float(n % 7) * 0.1f;
  check(cudaMemcpy(ids, host_ids.data(), host_ids.size() * 4, cudaMemcpyHostToDevice));
  check(cudaMemcpy(weights, host_weights.data(), host_weights.size() * 4, cudaMemcpyHostToDevice));
  auto *y = memory.get<bfloat16>(tokens * h), *dx = memory.get<bfloat16>(tokens * h);
  auto *d_gate_up = memory.get<bfloat16>(k * 2 * i * h), *d_down = memory.get<bfloat16>(k * h * i);
  PlanOptions plan_options;
  plan_options.max_tokens = tokens;
  plan_options.device = DeviceKind::cuda;
  const Plan plan = Plan::create(c, plan_options);
  const auto sizes = plan.buffer_sizes(tokens);
  auto *saved = memory.get<std::byte>(sizes.saved), *workspace = memory.get<std::byte>(sizes.workspace);
  struct Got {
    std::vector<std::uint16_t> y, dx;
    std::vector<double> d_gate_up, d_down;  // the last rows of the last expert
  };
  auto run_rows = [&](std::int64_t from) {
    const std::int64_t count = tokens - from;
    Inputs in;
    in.x = TensorView(x + from * h, c.dtype, {count, h});
    in.topk_ids = TensorView(ids + from * k, DataType::int32, {count, k});
    in.topk_weights = TensorView(weights + from * k, DataType::float32, {count, k});
    in.weights.gate_up_proj = TensorView(gate_up, c.dtype, {k, 2 * i, h});
    in.weights.down_proj = TensorView(down, c.dtype, {k, h, i});
    Outputs out;
    out.y = TensorView(y, c.dtype, {count, h});
    OutputGradients up;
    up.y = TensorView(dy + from * h, c.dtype, {count, h});
    InputGradients grad;
    grad.x = TensorView(dx, c.dtype, {count, h});
    grad.weights.gate_up_proj.tensor = TensorView(d_gate_up, c.dtype, {k, 2 * i, h});
    grad.weights.down_proj.tensor = TensorView(d_down, c.dtype, {k, h, i});
    plan.forward(in, out, saved, workspace);
    plan.backward(in, saved, up, grad, workspace);
    check(cudaDeviceSynchronize());
    Got got;
    got.y.resize(tail * h), got.dx.resize(tail * h);
    check(cudaMemcpy(got.y.data(), y + (count - tail) * h, tail * h * 2, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(got.dx.data(), dx + (count - tail) * h, tail * h * 2, cudaMemcpyDeviceToHost));
    auto last_rows = [&](const bfloat16* all, std::int64_t size) {
      std::vector<bfloat16> part(tail * h);
      check(cudaMemcpy(part.data(), all + size - tail * h, tail * h * 2, cudaMemcpyDeviceToHost));
      std::vector<double> values;
      for (bfloat16 v : part) values.push_back(numerics::to_float(v));
      return values;
    };
    got.d_gate_up = last_rows(d_gate_up, k * 2 * i * h), got.d_down = last_rows(d_down, k * h * i);
    return got;
  };
  const Got alone = run_rows(first), all = run_rows(0);
  EXPECT_EQ(all.y, alone.y);
  EXPECT_EQ(all.dx, alone.dx);
  EXPECT_LE(reference::compare(all.d_gate_up, alone.d_gate_up, h).rel_fro, 5e-3);
  EXPECT_LE(reference::compare(all.d_down, alone.d_down, h).rel_fro, 5e-3);
  double square = 0.0;
  for (std::uint16_t bits : alone.y) square += std::pow(double(numerics::to_float(bfloat16{bits})), 2);
  EXPECT_NEAR(std::log10(std::sqrt(square / double(tail * h))), 0.0, 1.5);  // of order 1
}

}  // namespace
}  // namespace moelith
