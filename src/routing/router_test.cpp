// The router against literal cases, a plain double-precision oracle, and finite differences.
#include "routing/router.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "numerics/bfloat16.hpp"
#include "reference/router.hpp"
#include "routing/router_math.hpp"

namespace moelith::routing {
namespace {

using numerics::bfloat16;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

template <class Storage>
DataType dtype_of() {
  if constexpr (std::is_same_v<Storage, double>) return DataType::float64;
  if constexpr (std::is_same_v<Storage, float>) return DataType::float32;
  return DataType::bfloat16;
}

// Units one by one, last first.
void backwards_for(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  for (std::int64_t i = count; i-- > 0;) body(i, i + 1);
}

ParallelFor threads_for(int threads) {
  return [threads](std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i)
      running.emplace_back([&, i] { body(count * i / threads, count * (i + 1) / threads); });
    for (std::thread& thread : running) thread.join();
  };
}

constexpr int canaries = 40;

// A buffer of n elements, filled with bytes that are NaN as floating point, and canaries behind it.
template <class T>
struct Guarded {
  std::vector<T> data;
  std::size_t n;
  explicit Guarded(std::size_t n) : data(n + canaries), n(n) {
    std::memset(data.data(), 0xff, data.size() * sizeof(T));
  }
  T* get() { return data.data(); }
  std::vector<T> values() const { return {data.begin(), data.begin() + static_cast<std::ptrdiff_t>(n)}; }
  bool intact() const {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(data.data() + n);
    return std::all_of(bytes, bytes + canaries * sizeof(T), [](unsigned char b) { return b == 0xff; });
  }
};

// One call, with its inputs as doubles, and what came out of both passes.
template <class Storage>
struct Call {
  using T = numerics::accumulator_t<Storage>;

  RouterSpec spec;
  std::int64_t tokens = 0;
  std::int64_t valid = -1;  // -1: all
  std::int64_t num_sequences = 1;
  std::vector<double> logits;  // [T, E]; rounded to Storage by load()
  std::vector<double> bias;    // [E]
  ParallelFor parallel_for = serial_for;

  std::vector<std::int32_t> ids, chosen;
  std::vector<T> weights;
  std::vector<std::int64_t> counts;
  std::vector<T> score_sums;
  T aux = T(0), z = T(0);
  std::vector<Storage> gradient;

  std::int64_t present() const { return valid < 0 ? tokens : std::min(valid, tokens); }

  // Rows are 3 elements apart from each other, with NaN between.
  std::vector<Storage> stored() const {
    const std::size_t stride = static_cast<std::size_t>(spec.num_experts) + 3;
    std::vector<Storage> rows(static_cast<std::size_t>(tokens) * stride + 1, numerics::store<Storage>(T(nan)));
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int32_t e = 0; e < spec.num_experts; ++e)
        rows[t * stride + e] = numerics::store<Storage>(T(logits[t * spec.num_experts + e]));
    return rows;
  }

  RouterInputs<T> inputs(const std::vector<Storage>& rows, const std::vector<T>& bias_t) const {
    RouterInputs<T> in;
    in.logits = rows.data();
    in.logits_dtype = dtype_of<Storage>();
    in.logits_stride = spec.num_experts + 3;
    in.tokens = tokens;
    in.valid_tokens = present();
    in.num_sequences = num_sequences;
    in.selection_bias = spec.config.selection_bias ? bias_t.data() : nullptr;
    return in;
  }

  void forward() {
    const std::vector<Storage> rows = stored();
    const std::vector<T> bias_t(bias.begin(), bias.end());
    const std::size_t routes = static_cast<std::size_t>(tokens * spec.top_k);
    const std::size_t experts = static_cast<std::size_t>(spec.num_experts);
    Guarded<std::int32_t> out_ids(routes), out_chosen(routes);
    Guarded<T> out_weights(routes), out_sums(experts), out_aux(1), out_z(1);
    Guarded<std::int64_t> out_counts(experts);
    Guarded<char> workspace(router_workspace_bytes<T>(spec, tokens));
    RouterOutputs<T> out;
    out.topk_ids = out_ids.get();
    out.topk_weights = out_weights.get();
    out.chosen_ids = out_chosen.get();
    out.counts = out_counts.get();
    out.score_sums = out_sums.get();
    out.aux_loss = out_aux.get();
    out.z_loss = out_z.get();
    router_forward(spec, inputs(rows, bias_t), out, workspace.get(), parallel_for);
    EXPECT_TRUE(out_ids.intact() && out_chosen.intact() && out_weights.intact() && out_sums.intact() &&
                out_aux.intact() && out_z.intact() && out_counts.intact() && workspace.intact());
    ids = out_ids.values();
    chosen = spec.config.capacity_factor > 0 ? out_chosen.values() : ids;
    weights = out_weights.values();
    counts = out_counts.values();
    score_sums = out_sums.values();
    aux = out_aux.values()[0];
    z = out_z.values()[0];
  }

  // d_weights may be empty. For `global`, other_counts and other_tokens are of the other ranks.
  void backward(const std::vector<double>& d_weights, double d_aux, double d_z,
                const std::vector<std::int64_t>& other_counts = {}, std::int64_t other_tokens = 0) {
    const std::vector<Storage> rows = stored();
    const std::vector<T> bias_t(bias.begin(), bias.end());
    const std::vector<T> d_weights_t(d_weights.begin(), d_weights.end());
    const std::int64_t stride = spec.num_experts + 1;
    Guarded<Storage> out(static_cast<std::size_t>(tokens * stride));
    Guarded<char> workspace(router_workspace_bytes<T>(spec, tokens));
    std::vector<std::int64_t> all_counts = counts;
    for (std::size_t e = 0; e < other_counts.size(); ++e) all_counts[e] += other_counts[e];
    RouterGradients<T> gradients;
    gradients.chosen_ids = chosen.data();
    gradients.topk_ids = ids.data();
    gradients.d_topk_weights = d_weights.empty() ? nullptr : d_weights_t.data();
    gradients.d_aux_loss = T(d_aux);
    gradients.d_z_loss = T(d_z);
    gradients.counts = all_counts.data();
    gradients.count_tokens = present() + other_tokens;
    gradients.d_logits = out.get();
    gradients.d_logits_stride = stride;
    RouterInputs<T> in = inputs(rows, bias_t);
    in.selection_bias = nullptr;  // backward does not need it
    router_backward(spec, in, gradients, workspace.get(), parallel_for);
    EXPECT_TRUE(out.intact() && workspace.intact());
    gradient.clear();
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int32_t e = 0; e < spec.num_experts; ++e) gradient.push_back(out.data[t * stride + e]);
      const unsigned char* gap = reinterpret_cast<const unsigned char*>(&out.data[t * stride + spec.num_experts]);
      EXPECT_EQ(gap[0], 0xff);  // elements between rows stay as they are
    }
  }

  bool same_bits(const Call& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
    };
    return same(ids, other.ids) && same(weights, other.weights) && same(counts, other.counts) &&
           same(gradient, other.gradient) && std::memcmp(&aux, &other.aux, sizeof aux) == 0 &&
           std::memcmp(&z, &other.z, sizeof z) == 0;
  }
};

// The definition of router.hpp, plainly.
struct Oracle {
  std::vector<std::int32_t> ids;
  std::vector<double> weights, score_sums;
  std::vector<std::int64_t> counts;
  double aux = 0, z = 0;
};

std::vector<double> softmax(const std::vector<double>& x) {
  double highest = -infinity, sum = 0;
  for (double v : x)
    if (std::isfinite(v)) highest = std::max(highest, v);
  std::vector<double> s;
  for (double v : x) s.push_back(std::isfinite(v) ? std::exp(v - highest) : 0);
  for (double v : s) sum += v;
  for (double& v : s) v = sum > 0 ? v / sum : 0;
  return s;
}

Oracle oracle(const RouterSpec& spec, const std::vector<double>& logits, const std::vector<double>& bias,
              std::int64_t tokens, std::int64_t valid, std::int64_t num_sequences) {
  const RouterConfig& config = spec.config;
  const int E = spec.num_experts, k = spec.top_k;
  Oracle result;
  result.ids.assign(tokens * k, -1);
  result.weights.assign(tokens * k, 0);
  result.counts.assign(E, 0);
  result.score_sums.assign(E, 0);
  const std::int64_t sequences = config.aux_loss == AuxLossKind::sequence ? num_sequences : 1;
  const std::int64_t length = tokens / std::max<std::int64_t>(sequences, 1);
  for (std::int64_t q = 0; q < sequences; ++q) {
    std::vector<double> f(E), p(E);
    double n = 0;
    for (std::int64_t t = q * length; t < std::min((q + 1) * length, valid); ++t) {
      ++n;
      const std::vector<double> x(logits.begin() + t * E, logits.begin() + (t + 1) * E);
      const std::vector<double> soft = softmax(x);
      std::vector<double> score = soft;
      if (config.kind == RouterKind::sigmoid)
        for (int e = 0; e < E; ++e) score[e] = std::isfinite(x[e]) ? 1 / (1 + std::exp(-x[e])) : 0;
      std::vector<double> select(E);
      std::vector<bool> out(E);
      for (int e = 0; e < E; ++e) {
        select[e] = (config.kind == RouterKind::topk_softmax ? x[e] : score[e]) + (config.selection_bias ? bias[e] : 0);
        out[e] = !std::isfinite(x[e]) || !std::isfinite(select[e]);
      }
      const int size = E / config.num_groups;
      std::vector<bool> group_kept(config.num_groups, true);
      if (config.num_groups > 1) {
        std::vector<std::pair<double, int>> order;
        for (int g = 0; g < config.num_groups; ++g) {
          std::vector<double> members;
          for (int e = g * size; e < (g + 1) * size; ++e)
            if (!out[e]) members.push_back(select[e]);
          std::sort(members.rbegin(), members.rend());
          double sum = members.empty() ? -infinity : 0;
          for (int i = 0; i < std::min<int>(config.group_score_size, static_cast<int>(members.size())); ++i)
            sum += members[i];
          order.emplace_back(-sum, g);
        }
        std::sort(order.begin(), order.end());
        for (int i = config.top_groups; i < config.num_groups; ++i) group_kept[order[i].second] = false;
      }
      std::vector<std::pair<double, int>> order;
      for (int e = 0; e < E; ++e)
        if (group_kept[e / size]) order.emplace_back(out[e] ? infinity : -select[e], e);
      std::sort(order.begin(), order.end());
      double sum = 0;
      std::vector<double> w(k), chosen_logits(k);
      for (int j = 0; j < k; ++j) {
        const int e = order[j].second;
        result.ids[t * k + j] = e;
        ++result.counts[e];
        ++f[e];
        w[j] = score[e];
        chosen_logits[j] = x[e];
        sum += w[j];
      }
      if (config.kind == RouterKind::topk_softmax) w = softmax(chosen_logits);
      if (config.kind == RouterKind::softmax_topk && config.renormalize)
        for (double& v : w) v = sum > 0 ? v / sum : 0;
      if (config.kind == RouterKind::sigmoid && config.renormalize)
        for (double& v : w) v /= sum + 1e-20;
      for (int j = 0; j < k; ++j) result.weights[t * k + j] = w[j] * config.scaling_factor;
      const double total = std::accumulate(score.begin(), score.end(), 0.0);
      for (int e = 0; e < E; ++e) {
        const double part = config.kind == RouterKind::sigmoid ? score[e] / (total + 1e-20) : score[e];
        p[e] += part;
        result.score_sums[e] += part;
      }
      double highest = -infinity, exps = 0;
      for (double v : x)
        if (std::isfinite(v)) highest = std::max(highest, v);
      for (double v : x)
        if (std::isfinite(v)) exps += std::exp(v - highest);
      if (exps > 0) result.z += std::pow(highest + std::log(exps), 2);
    }
    for (int e = 0; e < E && n > 0; ++e) result.aux += config.aux_loss_coefficient * E * (f[e] / (k * n)) * (p[e] / n);
  }
  if (config.aux_loss == AuxLossKind::none) result.aux = 0;
  result.z *= valid > 0 ? config.z_loss_coefficient / static_cast<double>(valid) : 0;
  return result;
}

std::vector<double> normal(std::size_t n, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> distribution;
  std::vector<double> values(n);
  for (double& v : values) v = distribution(generator);
  return values;
}

template <class Storage>
Call<Storage> call(const RouterSpec& spec, std::int64_t tokens, std::uint32_t seed) {
  Call<Storage> c;
  c.spec = spec;
  c.tokens = tokens;
  c.logits = normal(static_cast<std::size_t>(tokens * spec.num_experts), seed);
  for (double& v : c.logits) v = static_cast<double>(numerics::rounded<Storage>(numerics::accumulator_t<Storage>(v)));
  c.bias = normal(static_cast<std::size_t>(spec.num_experts), seed + 1);
  for (double& v : c.bias) v = static_cast<float>(0.2 * v);
  return c;
}

RouterSpec spec_of(RouterKind kind, std::int32_t num_experts, std::int32_t top_k) {
  RouterSpec spec;
  spec.config.kind = kind;
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  return spec;
}

// Every kind of router and rule, over a small number of experts (a multiple of 4) and k.
std::vector<RouterSpec> all_rules(std::int32_t num_experts, std::int32_t top_k) {
  std::vector<RouterSpec> specs;
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid})
    for (bool renormalize : {false, true})
      for (bool bias : {false, true})
        for (int groups : {1, 4})
          for (AuxLossKind aux : {AuxLossKind::none, AuxLossKind::batch, AuxLossKind::sequence, AuxLossKind::global}) {
            if (groups > num_experts || num_experts / groups * 2 < top_k) continue;
            RouterSpec spec = spec_of(kind, num_experts, top_k);
            spec.config.renormalize = renormalize;
            spec.config.selection_bias = bias;
            spec.config.scaling_factor = renormalize ? 2.5 : 1.0;
            spec.config.num_groups = groups;
            spec.config.top_groups = groups == 1 ? 1 : 2;
            spec.config.group_score_size = bias ? 2 : 1;
            spec.config.aux_loss = aux;
            spec.config.aux_loss_coefficient = aux == AuxLossKind::none ? 0.0 : 0.7;
            spec.config.z_loss_coefficient = aux == AuxLossKind::batch ? 0.0 : 0.3;
            specs.push_back(spec);
          }
  return specs;
}

std::string name_of(const RouterSpec& spec) {
  return std::string(to_string(spec.config.kind)) + " renormalize " + std::to_string(spec.config.renormalize) +
         " bias " + std::to_string(spec.config.selection_bias) + " groups " + std::to_string(spec.config.num_groups) +
         " aux " + to_string(spec.config.aux_loss) + " E " + std::to_string(spec.num_experts) + " k " +
         std::to_string(spec.top_k);
}

template <class Storage>
void expect_like_oracle(Call<Storage>& c, double tolerance) {
  SCOPED_TRACE(name_of(c.spec));
  c.forward();
  const Oracle expected = oracle(c.spec, c.logits, c.bias, c.tokens, c.present(), c.num_sequences);
  ASSERT_EQ(c.ids, expected.ids);
  EXPECT_EQ(c.counts, expected.counts);
  double worst = 0;
  for (std::size_t i = 0; i < c.weights.size(); ++i)
    worst =
        std::max(worst, std::abs(c.weights[i] - expected.weights[i]) / std::max(1.0, std::abs(expected.weights[i])));
  EXPECT_LE(worst, tolerance);
  if (c.spec.config.aux_loss == AuxLossKind::global || c.spec.config.aux_loss == AuxLossKind::batch) {
    for (std::int32_t e = 0; e < c.spec.num_experts; ++e)
      EXPECT_NEAR(c.score_sums[e], expected.score_sums[e], tolerance * (1 + expected.score_sums[e]));
    EXPECT_NEAR(aux_loss(c.spec, c.counts.data(), c.present(), c.score_sums.data()), expected.aux,
                tolerance * (1 + expected.aux));
  }
  if (c.spec.config.aux_loss == AuxLossKind::global)
    EXPECT_NE(c.aux, c.aux);  // untouched: still the NaN it was filled with
  else
    EXPECT_NEAR(c.aux, expected.aux, tolerance * (1 + expected.aux));
  EXPECT_NEAR(c.z, expected.z, tolerance * (1 + expected.z));
}

TEST(Router, IsLikeTheOracleInEveryRule) {
  std::uint32_t seed = 1;
  for (const auto& [E, k] : {std::pair{8, 2}, {12, 5}, {40, 8}})
    for (const RouterSpec& spec : all_rules(E, k)) {
      Call<double> c = call<double>(spec, 30, ++seed);
      c.num_sequences = 3;
      c.valid = seed % 3 == 0 ? 17 : -1;
      expect_like_oracle(c, 1e-13);
      if (HasFailure()) return;
    }
}

TEST(Router, IsLikeTheOracleInFloatAndBfloat16) {
  std::uint32_t seed = 1000;
  for (const RouterSpec& spec : all_rules(16, 4)) {
    // Only choices by logits: scores differ in their last bits, and what they choose then may, too.
    if (spec.config.num_groups > 1 || (spec.config.kind != RouterKind::topk_softmax && spec.config.selection_bias))
      continue;
    Call<float> c = call<float>(spec, 192, ++seed);
    c.num_sequences = 2;  // 96 tokens: more than a unit
    if (spec.config.selection_bias) c.bias.assign(c.bias.size(), 0.25);
    expect_like_oracle(c, 2e-6);
    // bfloat16 logits of a few values only: ties everywhere.
    Call<bfloat16> b = call<bfloat16>(spec, 192, ++seed);
    b.num_sequences = 48;
    if (spec.config.selection_bias) b.bias.assign(b.bias.size(), 0.25);
    for (double& v : b.logits) v = std::round(v * 2) / 2;
    expect_like_oracle(b, 2e-6);
    if (HasFailure()) return;
  }
}

TEST(Router, TakesExtremeSizes) {
  std::uint32_t seed = 2000;
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid})
    for (const auto& [E, k] : {std::pair{1, 1}, {2, 2}, {17, 17}, {32, 32}, {64, 32}, {65, 1}, {1024, 32}, {1024, 1}})
      for (int tokens : {0, 1, 3, 65}) {
        RouterSpec spec = spec_of(kind, E, k);
        spec.config.renormalize = true;
        spec.config.aux_loss = AuxLossKind::batch;
        spec.config.aux_loss_coefficient = 0.5;
        spec.config.z_loss_coefficient = 0.5;
        Call<double> c = call<double>(spec, tokens, ++seed);
        expect_like_oracle(c, 1e-13);
        c.backward(std::vector<double>(static_cast<std::size_t>(tokens * k), 1.0), 1.0, 1.0);
        for (double g : c.gradient) ASSERT_TRUE(std::isfinite(g));
        if (tokens == 0) {
          EXPECT_EQ(c.aux, 0);
          EXPECT_EQ(c.z, 0);
        }
        if (E == 1) {
          for (double w : c.weights) EXPECT_EQ(w, 1.0);  // renormalised over one (1e-20 is nothing beside a score)
        }
      }
}

TEST(Router, AllValidTokensAbsent) {
  RouterSpec spec = spec_of(RouterKind::softmax_topk, 8, 2);
  spec.config.aux_loss = AuxLossKind::batch;
  spec.config.aux_loss_coefficient = spec.config.z_loss_coefficient = 1;
  Call<float> c = call<float>(spec, 70, 5);
  c.logits.assign(c.logits.size(), nan);
  c.valid = 0;
  c.forward();
  EXPECT_EQ(c.ids, std::vector<std::int32_t>(140, -1));
  EXPECT_EQ(c.weights, std::vector<float>(140, 0.0f));
  EXPECT_EQ(c.aux, 0.0f);
  EXPECT_EQ(c.z, 0.0f);
  c.backward(std::vector<double>(140, 1.0), 1, 1);
  EXPECT_EQ(c.gradient, std::vector<float>(560, 0.0f));
}

TEST(Router, R1_NotANumberLeavesIdsDistinctAndOtherRowsAlone) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid})
    for (double bad : {nan, infinity, -infinity}) {
      RouterSpec spec = spec_of(kind, 8, 2);
      spec.config.renormalize = true;
      spec.config.z_loss_coefficient = 0.1;
      Call<float> clean = call<float>(spec, 1, 7);
      clean.forward();
      clean.backward({1.0, -2.0}, 0, 0);
      Call<float> c = call<float>(spec, 3, 7);
      std::fill_n(c.logits.begin(), 8, bad);
      const double row1[] = {0.5, 3.0, -1.0, bad, 2.0, 0.0, -3.0, 1.0};
      std::copy_n(row1, 8, c.logits.begin() + 8);
      std::copy_n(clean.logits.begin(), 8, c.logits.begin() + 16);
      c.forward();
      EXPECT_EQ(c.ids[0], 0);
      EXPECT_EQ(c.ids[1], 1);
      EXPECT_EQ(c.weights[0], 0.0f);
      EXPECT_EQ(c.weights[1], 0.0f);
      EXPECT_EQ(c.ids[2], 1);
      EXPECT_EQ(c.ids[3], 4);
      const double share = kind == RouterKind::sigmoid
                               ? 1 / (1 + std::exp(-3.0)) / (1 / (1 + std::exp(-3.0)) + 1 / (1 + std::exp(-2.0)))
                               : 1 / (1 + std::exp(-1.0));
      EXPECT_NEAR(c.weights[2], share, 1e-6);
      EXPECT_NEAR(c.weights[3], 1 - share, 1e-6);
      EXPECT_EQ(c.ids[4], clean.ids[0]);
      EXPECT_EQ(c.ids[5], clean.ids[1]);
      EXPECT_EQ(std::memcmp(&c.weights[4], clean.weights.data(), 2 * sizeof(float)), 0);
      EXPECT_TRUE(std::isfinite(c.z));
      c.backward({5.0, 6.0, 1.0, -2.0, 1.0, -2.0}, 0, 1);
      for (int e = 0; e < 8; ++e) EXPECT_EQ(c.gradient[e], 0.0f);
      EXPECT_EQ(c.gradient[8 + 3], 0.0f);
      for (float g : c.gradient) EXPECT_TRUE(std::isfinite(g));
      c.backward({5.0, 6.0, 1.0, -2.0, 1.0, -2.0}, 0, nan);
      EXPECT_EQ(c.gradient[8 + 3], 0.0f);  // whatever comes from above
      EXPECT_TRUE(std::isnan(c.gradient[8 + 4]));
      c.backward({5.0, 6.0, 1.0, -2.0, 1.0, -2.0}, 0, 0);
      EXPECT_EQ(std::memcmp(&c.gradient[16], clean.gradient.data(), 8 * sizeof(float)), 0);
    }
}

TEST(Router, FewerFiniteLogitsThanSlots) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid})
    for (bool bias : {false, true}) {
      RouterSpec spec = spec_of(kind, 6, 4);
      spec.config.selection_bias = bias;
      spec.config.renormalize = true;
      Call<float> c = call<float>(spec, 1, 3);
      c.logits = {nan, 1.0, infinity, nan, 2.0, -infinity};
      c.bias.assign(6, -5.0);
      c.forward();
      EXPECT_EQ(c.ids, (std::vector<std::int32_t>{4, 1, 0, 2}));
      EXPECT_NEAR(c.weights[0] + c.weights[1], 1.0, 1e-6);
      EXPECT_GT(c.weights[0], c.weights[1]);
      EXPECT_EQ(c.weights[2], 0.0f);
      EXPECT_EQ(c.weights[3], 0.0f);
      c.backward({1, 2, 3, 4}, 0, 0);
      for (int e : {0, 2, 3, 5}) EXPECT_EQ(c.gradient[e], 0.0f);
      EXPECT_NE(c.gradient[1], 0.0f);
    }
}

// Random rows with many bad logits, under all rules: ids stay distinct, within range and, with groups, within the kept
// groups as the oracle has them.
TEST(Router, RandomNonFiniteLogits) {
  std::uint32_t seed = 3000;
  for (const RouterSpec& spec : all_rules(16, 5)) {
    Call<double> c = call<double>(spec, 24, ++seed);
    std::mt19937 generator(seed);
    for (double& v : c.logits) switch (generator() % 4) {
        case 0:
          v = nan;
          break;
        case 1:
          v = generator() % 2 ? infinity : -infinity;
          break;
        default:
          break;
      }
    c.num_sequences = 4;
    expect_like_oracle(c, 1e-13);
    c.backward(normal(120, seed), 1, 1);
    for (std::size_t i = 0; i < c.logits.size(); ++i) {
      ASSERT_TRUE(std::isfinite(c.gradient[i]));
      ASSERT_TRUE(std::isfinite(c.logits[i]) || c.gradient[i] == 0.0);
    }
    if (HasFailure()) return;
  }
}

TEST(Router, R3_MaskedGroupsDoNotBeatNegativeScores) {
  // Biased scores [-.1, -.2; -.3, -.4]: logits 0 have score 0.5.
  RouterSpec spec = spec_of(RouterKind::sigmoid, 4, 2);
  spec.config.selection_bias = true;
  spec.config.num_groups = 2;
  spec.config.top_groups = 1;
  Call<float> c = call<float>(spec, 1, 1);
  c.logits = {0, 0, 0, 0};
  c.bias = {-0.6, -0.7, -0.8, -0.9};
  for (int size : {1, 2}) {
    c.spec.config.group_score_size = size;
    c.forward();
    EXPECT_EQ(c.ids, (std::vector<std::int32_t>{0, 1}));
    EXPECT_EQ(c.weights, (std::vector<float>{0.5f, 0.5f}));
  }
}

TEST(Router, TiesGoToTheLowestIdAndGroup) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid})
    for (int groups : {1, 4}) {
      RouterSpec spec = spec_of(kind, 128, 6);
      spec.config.num_groups = groups;
      spec.config.top_groups = groups == 1 ? 1 : 2;
      Call<bfloat16> c = call<bfloat16>(spec, 1, 1);
      c.logits.assign(128, 0.0);
      c.logits[5] = -0.0;  // equal to 0
      c.forward();
      EXPECT_EQ(c.ids, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5}));
      for (int e : {100, 66, 70, 63}) c.logits[e] = 1.0;
      c.forward();
      EXPECT_EQ(c.ids, groups == 1 ? (std::vector<std::int32_t>{63, 66, 70, 100, 0, 1})
                                   : (std::vector<std::int32_t>{63, 66, 70, 32, 33, 34}));
    }
}

// Random routings: where every group is kept, the choice is that of one group, bit for bit, and the reference's, also
// where rounding makes scores equal that were not (logits of order 30).
template <class Storage>
void expect_no_limit(std::mt19937& random, bool bias) {
  const std::vector<RouterKind> kinds{RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid};
  const RouterKind kind = kinds[random() % kinds.size()];
  const auto groups = static_cast<std::int32_t>(2 + random() % 7), size = static_cast<std::int32_t>(1 + random() % 9);
  RouterSpec spec = spec_of(kind, groups * size, 1 + static_cast<std::int32_t>(random() % std::min(groups * size, 12)));
  spec.config.renormalize = random() % 2;
  spec.config.selection_bias = bias;
  Call<Storage> one = call<Storage>(spec, 1 + static_cast<std::int64_t>(random() % 100), random());
  const double scale = random() % 2 ? 1.0 : 30.0;
  for (double& v : one.logits) {
    v = static_cast<double>(numerics::rounded<Storage>(numerics::accumulator_t<Storage>(scale * v)));
    if (random() % 50 == 0) v = nan;
  }
  one.forward();
  Call<Storage> all = one;
  all.spec.config.num_groups = all.spec.config.top_groups = groups;
  all.spec.config.group_score_size = 1 + static_cast<std::int32_t>(random() % 2);
  all.forward();
  EXPECT_TRUE(one.same_bits(all)) << name_of(all.spec);

  LayerConfig config;
  config.num_experts = spec.num_experts;
  config.top_k = spec.top_k;
  config.router = all.spec.config;
  reference::Inputs inputs;
  inputs.tokens = all.tokens;
  inputs.router_logits = all.logits;
  if (bias) inputs.selection_bias = all.bias;
  const auto expected = reference::route(config, inputs, {{0, all.tokens, all.tokens, 1}});
  EXPECT_EQ(std::vector<std::int64_t>(all.ids.begin(), all.ids.end()), expected.chosen) << name_of(all.spec);
}

TEST(Router, KeepingAllGroupsLimitsNothing) {
  std::mt19937 random(29);
  for (int n = 0; n < 400 && !::testing::Test::HasFailure(); ++n) {
    SCOPED_TRACE(n);
    expect_no_limit<float>(random, false);
    expect_no_limit<double>(random, n % 2);  // scores plus a bias: not as rounded as in float
  }
}

TEST(Router, GroupOfOneExpertAndGroupScoreOfTwo) {
  RouterSpec spec = spec_of(RouterKind::sigmoid, 4, 2);
  spec.config.num_groups = 4;
  spec.config.top_groups = 2;
  Call<float> c = call<float>(spec, 1, 1);
  c.logits = {-1, 3, 2, 1};
  c.forward();
  EXPECT_EQ(c.ids, (std::vector<std::int32_t>{1, 2}));
}

TEST(Router, ScoresThatUnderflowStillHaveAnOrder) {
  RouterSpec spec = spec_of(RouterKind::softmax_topk, 4, 3);
  Call<float> c = call<float>(spec, 1, 1);
  c.logits = {-300, 0, -200, -250};
  c.forward();
  EXPECT_EQ(c.ids, (std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(c.weights, (std::vector<float>{1, 0, 0}));
  // Renormalised over chosen experts that all have score 0 in float: still a softmax, not 0 / 0.
  spec.config.renormalize = spec.config.selection_bias = true;
  spec.top_k = 2;
  Call<float> renormalized = call<float>(spec, 1, 1);
  renormalized.logits = {-200, 0, -200, -250};
  renormalized.bias = {2, 0, 2, 0};
  renormalized.forward();
  EXPECT_EQ(renormalized.ids, (std::vector<std::int32_t>{0, 2}));
  EXPECT_EQ(renormalized.weights, (std::vector<float>{0.5f, 0.5f}));
}

TEST(Router, HugeLogitsStayFinite) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    RouterSpec spec = spec_of(kind, 4, 2);
    spec.config.renormalize = true;
    spec.config.aux_loss = AuxLossKind::batch;
    spec.config.aux_loss_coefficient = 1;
    Call<float> c = call<float>(spec, 2, 1);
    c.logits = {3e38, -3e38, 1, 0, -3e38, -3e38, -3e38, -2e38};
    c.forward();
    for (float w : c.weights) EXPECT_TRUE(std::isfinite(w));
    EXPECT_TRUE(std::isfinite(c.aux));
    c.backward({1, 2, 3, 4}, 1, 0);
    for (float g : c.gradient) EXPECT_TRUE(std::isfinite(g));
  }
}

TEST(Router, LiteralWeightsOfEachKind) {
  const double logits[] = {std::log(4.0), std::log(1.0), std::log(3.0), std::log(2.0)};
  const auto weights = [&](RouterKind kind, bool renormalize, double factor) {
    RouterSpec spec = spec_of(kind, 4, 2);
    spec.config.renormalize = renormalize;
    spec.config.scaling_factor = factor;
    Call<double> c = call<double>(spec, 1, 1);
    c.logits.assign(logits, logits + 4);
    c.forward();
    EXPECT_EQ(c.ids, (std::vector<std::int32_t>{0, 2}));
    return c.weights;
  };
  const auto expect = [](const std::vector<double>& got, double first, double second) {
    EXPECT_NEAR(got[0], first, 1e-15);
    EXPECT_NEAR(got[1], second, 1e-15);
  };
  expect(weights(RouterKind::softmax_topk, false, 1), 0.4, 0.3);
  expect(weights(RouterKind::softmax_topk, true, 1), 4.0 / 7, 3.0 / 7);
  expect(weights(RouterKind::topk_softmax, false, 1), 4.0 / 7, 3.0 / 7);
  expect(weights(RouterKind::sigmoid, false, 1), 0.8, 0.75);
  expect(weights(RouterKind::sigmoid, true, 1), 0.8 / 1.55, 0.75 / 1.55);
  expect(weights(RouterKind::sigmoid, true, 2), 1.6 / 1.55, 1.5 / 1.55);
}

TEST(Router, LiteralLosses) {
  // Two tokens, two experts, k = 1: scores (0.75, 0.25) and (0.5, 0.5); both choose expert 0.
  RouterSpec spec = spec_of(RouterKind::softmax_topk, 2, 1);
  spec.config.aux_loss = AuxLossKind::batch;
  spec.config.aux_loss_coefficient = 0.1;
  spec.config.z_loss_coefficient = 0.01;
  Call<double> c = call<double>(spec, 2, 1);
  c.logits = {std::log(3.0), 0, 0, 0};
  c.forward();
  EXPECT_NEAR(c.aux, 0.1 * 2 * 1.0 * 0.625, 1e-15);
  EXPECT_NEAR(c.z, 0.01 * (std::pow(std::log(4.0), 2) + std::pow(std::log(2.0), 2)) / 2, 1e-15);
  c.spec.config.aux_loss = AuxLossKind::sequence;
  c.num_sequences = 2;
  c.forward();
  EXPECT_NEAR(c.aux, 0.1 * 2 * (0.75 + 0.5), 1e-15);
}

TEST(Router, A2_MicroBatchesAccumulateTheSameGradient) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid})
    for (int length : {4, 100}) {
      RouterSpec spec = spec_of(kind, 8, 2);
      spec.config.aux_loss = AuxLossKind::sequence;
      spec.config.aux_loss_coefficient = 1.0;
      Call<double> joined = call<double>(spec, 2 * length, 11);
      joined.num_sequences = 2;
      joined.forward();
      joined.backward({}, 1.0, 0);
      double largest = 0, loss = 0;
      for (int half : {0, 1}) {
        Call<double> part = call<double>(spec, length, 1);
        const auto from = static_cast<std::ptrdiff_t>(half) * length * 8;
        part.logits.assign(joined.logits.begin() + from, joined.logits.begin() + from + length * 8);
        part.forward();
        part.backward({}, 1.0, 0);
        loss += part.aux;
        for (std::ptrdiff_t i = 0; i < length * 8; ++i) {
          ASSERT_EQ(part.gradient[i], joined.gradient[from + i]);
          largest = std::max(largest, std::abs(part.gradient[i]));
        }
      }
      EXPECT_NEAR(loss, joined.aux, 1e-14);
      EXPECT_GT(largest, 1e-4);
    }
}

TEST(Router, GlobalLossOfRanksAddsUpToTheBatch) {
  for (RouterKind kind : {RouterKind::softmax_topk, RouterKind::sigmoid}) {
    RouterSpec spec = spec_of(kind, 8, 2);
    spec.config.aux_loss = AuxLossKind::batch;
    spec.config.aux_loss_coefficient = 0.5;
    Call<double> whole = call<double>(spec, 90, 21);
    whole.forward();
    whole.backward({}, 1.5, 0);
    spec.config.aux_loss = AuxLossKind::global;
    double total = 0;
    std::vector<double> gradients;
    for (const auto& [from, to] : {std::pair{0, 13}, {13, 13}, {13, 90}}) {
      Call<double> rank = call<double>(spec, to - from, 1);
      rank.logits.assign(whole.logits.begin() + from * 8, whole.logits.begin() + to * 8);
      rank.forward();
      total += aux_loss(spec, whole.counts.data(), 90, rank.score_sums.data());
      std::vector<std::int64_t> others(8);
      for (int e = 0; e < 8; ++e) others[e] = whole.counts[e] - rank.counts[e];
      rank.backward({}, 1.5, 0, others, 90 - (to - from));
      gradients.insert(gradients.end(), rank.gradient.begin(), rank.gradient.end());
    }
    EXPECT_NEAR(total, whole.aux, 1e-14);
    EXPECT_EQ(gradients, whole.gradient);
  }
}

// Loss r . weights + a aux + b z by central differences, where no choice is close.
TEST(Router, GradientIsThatOfFiniteDifferences) {
  std::uint32_t seed = 4000;
  for (const RouterSpec& rule : all_rules(8, 3)) {
    RouterSpec spec = rule;
    spec.config.capacity_factor = seed / 2 % 3 == 0 ? 1.1 : 0.0;
    spec.config.drop_policy = DropPolicy::by_position;  // what is kept does not move with the logits
    SCOPED_TRACE(name_of(spec));
    constexpr std::int64_t tokens = 8;
    Call<double> c = call<double>(spec, tokens, ++seed);
    c.num_sequences = 2;
    c.valid = 7;
    const std::vector<double> r = normal(tokens * 3, ++seed);
    const double a = 1.3, b = -0.7;
    const std::vector<std::int64_t> others = {4, 0, 9, 2, 1, 7, 3, 4};
    constexpr std::int64_t other_tokens = 10;
    const auto loss = [&](Call<double>& at) {
      at.forward();
      double sum = b * at.z;
      for (std::size_t i = 0; i < r.size(); ++i) sum += r[i] * at.weights[i];
      if (spec.config.aux_loss == AuxLossKind::global) {
        std::vector<std::int64_t> counts = at.counts;
        for (int e = 0; e < 8; ++e) counts[e] += others[e];
        sum += a * aux_loss(spec, counts.data(), at.present() + other_tokens, at.score_sums.data());
      } else {
        sum += a * at.aux;
      }
      return sum;
    };
    c.forward();
    const std::vector<std::int32_t> chosen = c.chosen;
    const bool global = spec.config.aux_loss == AuxLossKind::global;
    c.backward(r, a, b, global ? others : std::vector<std::int64_t>{}, global ? other_tokens : 0);
    double largest = 0;
    for (std::size_t i = 0; i < c.logits.size(); ++i) {
      constexpr double step = 1e-5;
      Call<double> moved = c;
      moved.logits[i] = c.logits[i] + step;
      const double above = loss(moved);
      const bool same_above = moved.chosen == chosen;
      moved.logits[i] = c.logits[i] - step;
      const double below = loss(moved);
      ASSERT_TRUE(same_above && moved.chosen == chosen) << "a choice too close for this seed";
      ASSERT_NEAR(c.gradient[i], (above - below) / (2 * step), 1e-8) << "element " << i;
      largest = std::max(largest, std::abs(c.gradient[i]));
    }
    EXPECT_GT(largest, 0.01);
    for (int e = 0; e < 8; ++e) EXPECT_EQ(c.gradient[7 * 8 + e], 0.0);  // the absent row
  }
}

TEST(Router, GradientInFloatIsNearDouble) {
  std::uint32_t seed = 5000;
  for (const RouterSpec& spec : all_rules(24, 4)) {
    SCOPED_TRACE(name_of(spec));
    Call<bfloat16> b = call<bfloat16>(spec, 100, ++seed);
    Call<double> d;
    d.spec = spec;
    d.tokens = 100;
    d.logits = b.logits;
    d.bias = b.bias;
    b.num_sequences = d.num_sequences = 1;
    b.forward();
    d.forward();
    const std::vector<double> r = normal(400, ++seed);
    std::vector<double> rounded(r.size());
    for (std::size_t i = 0; i < r.size(); ++i) rounded[i] = static_cast<float>(r[i]);
    d.backward(rounded, 2, 1);
    // The same routes, in case that a choice differed by rounding.
    b.chosen = d.chosen;
    b.ids = d.ids;
    b.counts = d.counts;
    b.backward(rounded, 2, 1);
    for (std::int64_t t = 0; t < 100; ++t) {
      double error = 0, norm = 0;
      for (int e = 0; e < 24; ++e) {
        const double want = d.gradient[t * 24 + e];
        error += std::pow(numerics::to_float(b.gradient[t * 24 + e]) - want, 2);
        norm += want * want;
      }
      ASSERT_LE(std::sqrt(error), 4e-3 * std::sqrt(norm) + 1e-7) << "row " << t;
    }
  }
}

TEST(Router, GradientWhereTheWeightIsZeroOrNegative) {
  // d weight / d logit does not vanish with scaling_factor's sign, nor with the weight.
  RouterSpec spec = spec_of(RouterKind::softmax_topk, 2, 1);
  spec.config.scaling_factor = -1;
  Call<double> c = call<double>(spec, 1, 1);
  c.logits = {0, 0};
  c.forward();
  EXPECT_EQ(c.weights[0], -0.5);
  c.backward({1.0}, 0, 0);
  EXPECT_EQ(c.gradient, (std::vector<double>{-0.25, 0.25}));
  // topk_softmax with a weight that is 0 in float: its share of the gradient is 0 by the formula, the rest is right.
  RouterSpec two = spec_of(RouterKind::topk_softmax, 3, 3);
  Call<float> zero = call<float>(two, 1, 1);
  zero.logits = {0, 0, -200};
  zero.forward();
  EXPECT_EQ(zero.weights, (std::vector<float>{0.5f, 0.5f, 0.0f}));
  zero.backward({1.0, 0.0, 3.0}, 0, 0);
  EXPECT_EQ(zero.gradient, (std::vector<float>{0.25f, -0.25f, 0.0f}));
}

TEST(Router, CapacityDropsAfterLossesAreCounted) {
  // Every token wants experts 0 then 1; capacity ceil(1.0 * 4 * 2 / 4) = 2 each.
  RouterSpec spec = spec_of(RouterKind::sigmoid, 4, 2);
  spec.config.capacity_factor = 1.0;
  spec.config.aux_loss = AuxLossKind::batch;
  spec.config.aux_loss_coefficient = 1;
  Call<float> c = call<float>(spec, 4, 1);
  c.logits = {2, 1, 0, 0, 4, 1, 0, 0, 3, 2, 0, 0, 4, 1.5, 0, 0};
  c.forward();
  EXPECT_EQ(c.chosen, (std::vector<std::int32_t>{0, 1, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(c.ids, (std::vector<std::int32_t>{-1, -1, 0, -1, -1, 1, 0, 1}));
  EXPECT_EQ(c.weights[0], 0.0f);
  EXPECT_GT(c.weights[2], 0.9f);
  EXPECT_EQ(c.counts, (std::vector<std::int64_t>{4, 4, 0, 0}));
  c.backward(std::vector<double>(8, 1.0), 0, 0);
  for (int e = 0; e < 4; ++e) EXPECT_EQ(c.gradient[e], 0.0f);  // both routes of token 0 are gone
  EXPECT_EQ(c.gradient[4 + 1], 0.0f);
  EXPECT_NE(c.gradient[4], 0.0f);
  c.spec.config.drop_policy = DropPolicy::by_position;
  c.forward();
  EXPECT_EQ(c.ids, (std::vector<std::int32_t>{0, 1, 0, 1, -1, -1, -1, -1}));
}

TEST(Router, DroppedSlotsStayInTheDenominator) {
  RouterSpec spec = spec_of(RouterKind::topk_softmax, 2, 2);
  spec.config.capacity_factor = 0.5;
  spec.config.drop_policy = DropPolicy::by_position;
  Call<double> c = call<double>(spec, 2, 1);
  c.logits = {0, 0, std::log(3.0), 0};
  c.forward();
  EXPECT_EQ(c.ids, (std::vector<std::int32_t>{0, 1, -1, -1}));
  EXPECT_EQ(c.weights, (std::vector<double>{0.5, 0.5, 0, 0}));
  c.backward({1, 0, 7, 9}, 0, 0);
  EXPECT_EQ(c.gradient, (std::vector<double>{0.25, -0.25, 0, 0}));
}

TEST(Router, E5_SameBitsRunToRunAndForAnyThreads) {
  std::uint32_t seed = 6000;
  const std::vector<RouterSpec> rules = all_rules(40, 4);
  for (std::size_t i = 0; i < rules.size(); i += 5) {  // 5 has no factor in common with the lists that rules come from
    RouterSpec spec = rules[i];
    spec.config.capacity_factor = seed % 2 ? 1.0 : 0.0;
    Call<float> first = call<float>(spec, 300, ++seed);
    first.num_sequences = seed % 3 == 0 ? 3 : 60;
    const std::vector<double> r = normal(1200, seed);
    first.forward();
    first.backward(r, 1, 1);
    for (int run = 0; run < 8; ++run) {
      Call<float> again = first;
      if (run == 1) again.parallel_for = backwards_for;
      if (run >= 2 && run <= 4) again.parallel_for = threads_for(run == 4 ? 8 : run);
      again.forward();
      again.backward(r, 1, 1);
      ASSERT_TRUE(again.same_bits(first)) << name_of(spec) << ", run " << run;
    }
  }
}

TEST(Router, ARowDoesNotDependOnItsBatch) {
  for (const RouterSpec& spec : all_rules(24, 4)) {
    Call<float> batch = call<float>(spec, 33, 77);
    batch.forward();
    batch.backward(normal(132, 1), 0, 0);
    Call<float> alone = batch;
    alone.tokens = 1;
    alone.logits.assign(batch.logits.begin() + 20 * 24, batch.logits.begin() + 21 * 24);
    alone.forward();
    const std::vector<double> r = normal(132, 1);
    alone.backward({r.begin() + 80, r.begin() + 84}, 0, 0);
    EXPECT_TRUE(std::equal(alone.ids.begin(), alone.ids.end(), batch.ids.begin() + 80));
    EXPECT_EQ(std::memcmp(alone.weights.data(), &batch.weights[80], 4 * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(alone.gradient.data(), &batch.gradient[20 * 24], 24 * sizeof(float)), 0);
  }
}

TEST(Router, RefusesWhatItCannotWorkWith) {
  const auto text = [](auto change) -> std::string {
    Call<float> c = call<float>(spec_of(RouterKind::sigmoid, 8, 2), 4, 1);
    c.parallel_for = serial_for;
    change(c);
    try {
      c.forward();
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      return error.what();
    }
    return "";
  };
  EXPECT_NE(text([](auto& c) { c.spec.top_k = 9; }).find("top_k is 9"), std::string::npos);
  EXPECT_NE(text([](auto& c) { c.spec.config.num_groups = 3; }).find("num_groups is 3"), std::string::npos);
  EXPECT_NE(text([](auto& c) { c.spec.config.group_score_size = 3; }).find("group_score_size is 3"), std::string::npos);
  EXPECT_NE(text([](auto& c) {
              c.spec.config.num_groups = 8;
              c.spec.config.top_groups = 1;
            }).find("leaves 1 experts"),
            std::string::npos);
  EXPECT_NE(text([](auto& c) {
              c.spec.config.aux_loss = AuxLossKind::sequence;
              c.num_sequences = 3;
            }).find("num_sequences is 3"),
            std::string::npos);
}

TEST(RouterMath, OrderKeysHaveTheOrderOfNumbers) {
  const float values[] = {-std::numeric_limits<float>::infinity(), -3e38f, -1.5f, -1e-40f, 0.0f, 1e-40f, 1.0f, 3e38f};
  for (int i = 0; i + 1 < 8; ++i) {
    EXPECT_LT(order_key(values[i]), order_key(values[i + 1]));
    EXPECT_LT(order_key(double(values[i])), order_key(double(values[i + 1])));
  }
  EXPECT_EQ(order_key(-0.0f), order_key(0.0f));
  EXPECT_EQ(order_key(-0.0), order_key(0.0));
  EXPECT_EQ(order_key(values[0]), OrderKey<float>::excluded);
  EXPECT_EQ(order_key(double(values[0])), OrderKey<double>::excluded);
}

TEST(RouterMath, UnitsCoverTokensOnceAndNeverCrossASequence) {
  for (std::int64_t sequences : {1, 2, 3, 7, 40, 64, 100})
    for (std::int64_t length : {1, 2, 31, 32, 33, 63, 64, 65, 128, 1000}) {
      const std::int64_t tokens = sequences * length;
      const Units units = Units::of(tokens, sequences);
      ASSERT_LE(units.count, tokens / 32 + 1);
      std::int64_t at = 0;
      for (std::int64_t u = 0; u < units.count; ++u) {
        ASSERT_EQ(units.begin(u), at);
        at = units.end(u);
        ASSERT_GT(at, units.begin(u));
        ASSERT_LE(at - units.begin(u), unit_tokens);
        const bool whole = units.begin(u) % length == 0 && at % length == 0;
        ASSERT_TRUE(whole || units.begin(u) / length == (at - 1) / length);
      }
      ASSERT_EQ(at, tokens);
    }
  EXPECT_EQ(Units::of(0, 1).count, 0);
  for (std::int64_t tokens : {1, 16, 17, 100, 128, 512}) {  // of another size
    const Units units = Units::of(tokens, 1, 16);
    EXPECT_EQ(units.count, (tokens + 15) / 16);
    for (std::int64_t u = 0; u < units.count; ++u) {
      EXPECT_EQ(units.begin(u), 16 * u);
      EXPECT_EQ(units.end(u), std::min<std::int64_t>(16 * u + 16, tokens));
    }
  }
}

}  // namespace
}  // namespace moelith::routing
