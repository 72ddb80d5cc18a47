// Faults that layers of this kind have had in public, each cut down to a small input, through the whole layer. The IDs
// are those by which the same cases go on every executor. What only a GPU has (CUDA graphs: C1 as reported, C2) stands
// with the GPU tests.
#include <gtest/gtest-spi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <numeric>

#include "executors/cpu/pass_data.hpp"
#include "layer/buffers.hpp"
#include "routing/token_order.hpp"
#include "schedule/tile_order.hpp"
#include "tests/call.hpp"
#include "tests/one_unit.hpp"

namespace moelith {
namespace {

using namespace test;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true;  // everything is ten to fifty times as slow, so widths are smaller where they may be
#else
constexpr bool sanitized = false;
#endif

LayerConfig plain(std::int64_t hidden, std::int64_t intermediate, std::int32_t experts, std::int32_t top_k,
                  DataType dtype = DataType::float32) {
  LayerConfig c;
  c.hidden_size = hidden;
  c.intermediate_size = intermediate;
  c.num_experts = experts;
  c.top_k = top_k;
  c.dtype = dtype;
  return c;
}

// Ids that the caller brings, with weights that differ from slot to slot.
void bring(Problem& p, std::vector<std::int64_t> ids) {
  p.inputs.router_logits.clear();
  p.inputs.topk_ids = std::move(ids);
  p.inputs.topk_weights.clear();
  for (std::size_t i = 0; i < p.inputs.topk_ids.size(); ++i) {
    p.inputs.topk_weights.push_back(round_to(p.config.accumulator_dtype(), 0.3 + 0.07 * double(i % 9)));
  }
}
// Each token's slots in turn: counts[e] routes to expert e, in an order that mixes them. Needs k = 1.
void bring_counts(Problem& p, const std::vector<std::int64_t>& counts, std::uint64_t seed) {
  std::vector<std::int64_t> ids;
  for (std::size_t e = 0; e < counts.size(); ++e)
    ids.insert(ids.end(), static_cast<std::size_t>(counts[e]), std::int64_t(e));
  Random random(seed);
  std::shuffle(ids.begin(), ids.end(), random);
  bring(p, ids);
}

std::vector<double> slice(const std::vector<double>& values, std::int64_t row, std::int64_t columns) {
  return {values.begin() + row * columns, values.begin() + (row + 1) * columns};
}
bool all_are(const std::vector<double>& values, double expected) {
  return std::all_of(values.begin(), values.end(), [&](double v) { return v == expected; });
}

// ---- R: routing

TEST(Cases, R1_NaNLogitsStayInTheirRow) {
  for (const RouterKind kind : {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    for (const double bad : {nan, infinity, -infinity}) {
      LayerConfig c = plain(16, 24, 8, 2);
      c.router.kind = kind;
      Problem p = random_problem(c, 3, 5);
      p.inputs.router_logits = {bad, bad, bad, bad, bad, bad,  bad, bad,  // no finite expert
                                0.1, 0.2, bad, 0.9, 0.3, -2.0, 0.4, 0.0,  // the best of the finite ones: 3 and 6
                                0.5, 1.5, 0.1, 0.2, 2.5, -1.0, 0.3, 0.4};
      const Results all = run(p, {});
      const std::string what = std::string(to_string(kind)) + " " + std::to_string(bad);
      EXPECT_EQ(all.at("topk_ids"), (std::vector<double>{0, 1, 3, 6, 4, 1})) << what;
      EXPECT_EQ(slice(all.at("topk_weights"), 0, 2), (std::vector<double>{0, 0})) << what;
      EXPECT_TRUE(all_are(slice(all.at("y"), 0, 16), 0.0)) << what;
      EXPECT_TRUE(all_are(slice(all.at("d_router_logits"), 0, 8), 0.0)) << what;
      EXPECT_EQ(all.at("d_router_logits")[8 + 2], 0.0) << what;
      for (const auto& [name, values] : all) {
        for (double v : values) ASSERT_TRUE(std::isfinite(v)) << what << ": " << name;
      }

      Problem alone = p;
      alone.inputs.tokens = 1;
      alone.inputs.x = slice(p.inputs.x, 2, 16);
      alone.inputs.router_logits = slice(p.inputs.router_logits, 2, 8);
      alone.upstream.y = slice(p.upstream.y, 2, 16);
      const Results single = run(alone, {});
      EXPECT_EQ(single.at("y"), slice(all.at("y"), 2, 16)) << what;
      EXPECT_EQ(single.at("dx"), slice(all.at("dx"), 2, 16)) << what;
      EXPECT_EQ(single.at("topk_weights"), slice(all.at("topk_weights"), 2, 2)) << what;
      EXPECT_EQ(single.at("d_router_logits"), slice(all.at("d_router_logits"), 2, 8)) << what;
    }
  }
}

TEST(Cases, R1_NaNInATokenStaysInItsRow) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    LayerConfig c = plain(72, 136, 6, 3, dtype);
    c.shared_experts = {{40, true}};
    const Problem p = random_problem(c, 150, 3);
    Problem bad = p;
    std::fill_n(bad.inputs.x.begin() + 77 * 72, 72, nan);
    const Results good = run(p, {}), other = run(bad, {});
    for (std::int64_t t = 0; t < 150; ++t) {
      for (const char* name : {"y", "dx"}) {
        if (t == 77) continue;
        ASSERT_EQ(slice(good.at(name), t, 72), slice(other.at(name), t, 72)) << name << " of token " << t;
      }
    }
    EXPECT_TRUE(std::isnan(other.at("y")[77 * 72]));
  }
}

TEST(Cases, R3_NegativeSelectionScores) {
  LayerConfig c = plain(8, 8, 4, 2, DataType::float64);
  c.router.kind = RouterKind::sigmoid;
  c.router.selection_bias = true;
  c.router.num_groups = 2;
  c.router.top_groups = 1;
  c.router.group_score_size = 2;
  Problem p = random_problem(c, 1, 1);
  p.inputs.router_logits = {0, 0, 0, 0};               // scores 0.5
  p.inputs.selection_bias = {-0.6, -0.7, -0.8, -0.9};  // biased: -.1, -.2 ; -.3, -.4
  const Results r = run(p, {});
  EXPECT_EQ(r.at("topk_ids"), (std::vector<double>{0, 1}));
  EXPECT_EQ(r.at("topk_weights"), (std::vector<double>{0.5, 0.5}));
  expect_right(p, r, {}, "R3");

  // The same where only the first group's scores are negative, and with a softmax.
  p.inputs.selection_bias = {-0.9, -0.8, 0.1, 0.2};
  EXPECT_EQ(run(p, {}).at("topk_ids"), (std::vector<double>{3, 2}));
  p.config.router.kind = RouterKind::softmax_topk;
  p.inputs.selection_bias = {-0.6, -0.7, -0.8, -0.9};
  const Results softmax = run(p, {});
  EXPECT_EQ(softmax.at("topk_ids"), (std::vector<double>{0, 1}));
  EXPECT_EQ(softmax.at("topk_weights"), (std::vector<double>{0.25, 0.25}));
}

TEST(Cases, A2_SequenceLossOfMicroBatches) {
  for (const RouterKind kind : {RouterKind::softmax_topk, RouterKind::sigmoid}) {
    LayerConfig c = plain(8, 8, 6, 2, DataType::float64);
    c.router.kind = kind;
    c.router.aux_loss = AuxLossKind::sequence;
    c.router.aux_loss_coefficient = 0.3;
    Problem p = random_problem(c, 8, 2);
    p.upstream.y.clear();
    p.upstream.aux_loss = {1.0};
    p.inputs.ranks = {{8, -1, 2}};
    const Results joined = run(p, {});
    expect_right(p, joined, {}, "A2");
    double loss = 0;
    std::vector<double> gradient;
    for (std::int64_t half = 0; half < 2; ++half) {
      Problem part = p;
      part.inputs.tokens = 4;
      part.inputs.x = slice(p.inputs.x, half, 4 * 8);
      part.inputs.router_logits = slice(p.inputs.router_logits, half, 4 * 6);
      part.inputs.ranks = {{4, -1, 1}};
      const Results r = run(part, {});
      loss += r.at("aux_loss")[0];
      gradient.insert(gradient.end(), r.at("d_router_logits").begin(), r.at("d_router_logits").end());
    }
    EXPECT_NEAR(joined.at("aux_loss")[0], loss, 1e-14);
    EXPECT_EQ(joined.at("d_router_logits"), gradient);
    EXPECT_FALSE(all_are(gradient, 0.0));
  }
}

// ---- D: dispatch and addresses

TEST(Cases, D1_EmptySlots) {
  const std::vector<std::int32_t> ids{0, -1, -1, 1, 1, 0, -1, -1};
  std::vector<std::int64_t> offsets(3), workspace(1 + routing::token_order_workspace_bytes(4, 2, 2) / 8);
  std::vector<std::int32_t> routes(8);
  routing::sort_routes(ids.data(), 4, 2, 2, offsets.data(), routes.data(), workspace.data());
  EXPECT_EQ(offsets, (std::vector<std::int64_t>{0, 2, 4}));
  std::vector<int> tokens;
  for (int row = 0; row < 4; ++row) tokens.push_back(routes[row] / 2);
  EXPECT_EQ(tokens, (std::vector<int>{0, 2, 1, 2}));

  for (int ranks : {1, 2, 4}) {
    Problem p = random_problem(plain(16, 24, 2, 2), 4, 7);
    bring(p, {0, -1, -1, 1, 1, 0, -1, -1});
    RunOptions options;
    if (ranks > 1) options.tokens_of_rank.assign(ranks, 4 / ranks);
    const Results r = run(p, options);
    expect_right(p, r, options, "D1");
    std::vector<double> counts(2, 0.0);
    for (std::size_t i = 0; i < r.at("expert_counts").size(); ++i) counts[i % 2] += r.at("expert_counts")[i];
    EXPECT_EQ(counts, (std::vector<double>{2, 2}));
    EXPECT_TRUE(all_are(slice(r.at("y"), 3, 16), 0.0));
    EXPECT_TRUE(all_are(slice(r.at("dx"), 3, 16), 0.0));
    for (int slot : {1, 2, 6, 7}) EXPECT_EQ(r.at("d_topk_weights")[slot], 0.0);
  }
}

#if !defined(__SANITIZE_THREAD__)  // one thread's arithmetic: minutes there, and nothing for it to see
// Addresses without memory behind them: zeros, until a page is written.
class Mapping {
 public:
  explicit Mapping(std::uint64_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Mapping() { munmap(memory_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  template <class T = void>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  std::uint64_t bytes_;
  void* memory_;
};

// `count` matrices one behind the other, of which number m has the memory of number m mod `distinct`.
class RepeatedMatrices {
 public:
  RepeatedMatrices(std::int64_t count, std::int64_t distinct, std::int64_t bytes)
      : bytes_(bytes), all_(std::uint64_t(count * bytes)) {
    if (bytes % sysconf(_SC_PAGESIZE) != 0) throw std::logic_error("a matrix must be whole pages");
    const int file = memfd_create("matrices", 0);
    if (file < 0 || ftruncate(file, distinct * bytes) != 0) throw std::bad_alloc();
    bool mapped = true;
    for (std::int64_t m = 0; m < count; ++m) {
      mapped &= mmap(all_.as<std::byte>() + m * bytes, std::size_t(bytes), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED, file, m % distinct * bytes) != MAP_FAILED;
    }
    close(file);
    if (!mapped) throw std::bad_alloc();
  }
  template <class T = void>
  T* all() const {
    return all_.as<T>();
  }
  template <class T>
  T* matrix(std::int64_t m) const {
    return reinterpret_cast<T*>(all_.as<std::byte>() + m * bytes_);
  }

 private:
  std::int64_t bytes_;
  Mapping all_;
};

// 8200 tokens x 32 slots x 8192 columns are more elements than 32 bits count. All slots but those of the first and the
// last token are empty, so hardly any memory is touched; the two must come out as in a batch of their own.
TEST(Cases, D3_SlotsBeyond32Bits) {
  constexpr std::int64_t tokens = 8200, h = 8192, i = 8;
  constexpr std::int32_t k = 32;
  static_assert(tokens * k * h > (std::int64_t(1) << 31));
  const LayerConfig c = plain(h, i, k, k, DataType::bfloat16);
  Problem small = random_problem(c, 2, 9);
  std::vector<std::int64_t> ids(2 * k);
  for (std::int64_t n = 0; n < 2 * k; ++n) ids[n] = n % k;
  bring(small, ids);
  const Results expected = run(small, {});

  PlanOptions plan_options;
  plan_options.max_tokens = tokens;
  plan_options.workers = 1;
  const Plan plan = Plan::create(c, plan_options);
  const auto sizes = plan.buffer_sizes(tokens);
  EXPECT_GT(sizes.workspace, std::uint64_t(tokens) * k * h * 2);
  const Mapping x(tokens * h * 2), dy(tokens * h * 2), y(tokens * h * 2), dx(tokens * h * 2), saved(sizes.saved),
      workspace(sizes.workspace);
  Tensor topk_ids(DataType::int32, {tokens, k}), topk_weights(DataType::float32, {tokens, k}),
      d_weights(DataType::float32, {tokens, k});
  Tensor gate_up(c.dtype, {k, 2 * i, h}), down(c.dtype, {k, h, i}), d_gate_up(DataType::float32, {k, 2 * i, h}),
      d_down(DataType::float32, {k, h, i});
  gate_up.set(small.weights.gate_up_proj.data());
  down.set(small.weights.down_proj.data());
  std::vector<double> all_ids(tokens * k, -1.0), all_weights(tokens * k, 0.0);
  for (std::int64_t n = 0; n < k; ++n) {
    all_ids[n] = all_ids[(tokens - 1) * k + n] = double(n);
    all_weights[n] = small.inputs.topk_weights[n];
    all_weights[(tokens - 1) * k + n] = small.inputs.topk_weights[k + n];
  }
  topk_ids.set(all_ids.data());
  topk_weights.set(all_weights.data());
  for (std::int64_t n = 0; n < h; ++n) {
    x.as<numerics::bfloat16>()[n] = numerics::to_bfloat16(float(small.inputs.x[n]));
    x.as<numerics::bfloat16>()[(tokens - 1) * h + n] = numerics::to_bfloat16(float(small.inputs.x[h + n]));
    dy.as<numerics::bfloat16>()[n] = numerics::to_bfloat16(float(small.upstream.y[n]));
    dy.as<numerics::bfloat16>()[(tokens - 1) * h + n] = numerics::to_bfloat16(float(small.upstream.y[h + n]));
  }
  Inputs in;
  in.x = TensorView(x.as(), c.dtype, {tokens, h});
  in.topk_ids = topk_ids.view;
  in.topk_weights = topk_weights.view;
  in.weights.gate_up_proj = gate_up.view;
  in.weights.down_proj = down.view;
  Outputs out;
  out.y = TensorView(y.as(), c.dtype, {tokens, h});
  plan.forward(in, out, saved.as(), workspace.as());
  OutputGradients up;
  up.y = TensorView(dy.as(), c.dtype, {tokens, h});
  InputGradients grad;
  grad.x = TensorView(dx.as(), c.dtype, {tokens, h});
  grad.topk_weights = d_weights.view;
  grad.weights.gate_up_proj.tensor = d_gate_up.view;
  grad.weights.down_proj.tensor = d_down.view;
  plan.backward(in, saved.as(), up, grad, workspace.as());

  for (std::int64_t t = 0; t < 2; ++t) {
    const std::int64_t at = t * (tokens - 1);
    for (std::int64_t n = 0; n < h; ++n) {
      ASSERT_EQ(double(numerics::to_float(y.as<numerics::bfloat16>()[at * h + n])), expected.at("y")[t * h + n])
          << "token " << at;
      ASSERT_EQ(double(numerics::to_float(dx.as<numerics::bfloat16>()[at * h + n])), expected.at("dx")[t * h + n])
          << "token " << at;
    }
    EXPECT_EQ(slice(d_weights.get(), at, k), slice(expected.at("d_topk_weights"), t, k));
  }
  EXPECT_EQ(d_gate_up.get(), expected.at("d_gate_up_proj"));
  EXPECT_EQ(d_down.get(), expected.at("d_down_proj"));
  for (std::int64_t t : {std::int64_t(1), tokens / 2, tokens - 2}) {
    EXPECT_EQ(y.as<std::uint16_t>()[t * h], 0);
    EXPECT_EQ(dx.as<std::uint16_t>()[t * h + h - 1], 0);
  }
}

// One expert's rows x intermediate columns beyond 32 bits: the last block of rows through each stage, and one tile of
// each weight gradient over all rows, against the same rows by themselves.
TEST(Cases, D3_RowsBeyond32Bits) {
  using numerics::bfloat16;
  using schedule::Stage;
  using schedule::Tile;
  constexpr std::int64_t h = 8, i = 7200, all_rows = 299600, block = 128, last = all_rows % block;
  static_assert(all_rows * i > (std::int64_t(1) << 31));
  constexpr std::int32_t wgrad_tile = sanitized ? 8 : 64;
  Random random(4);
  auto random_values = [&](std::int64_t count) {
    std::vector<bfloat16> values(count);
    std::normal_distribution<float> distribution;
    for (auto& v : values) v = numerics::to_bfloat16(distribution(random));
    return values;
  };
  const auto gate_up = random_values(2 * i * h), down = random_values(h * i), tail_x = random_values(last * h),
             tail_dy = random_values(last * h);

  struct Made {
    std::vector<float> gate_up_grad, down_grad, dprob;
    std::vector<bfloat16> rows, pre, act, dz;
  };
  auto make = [&](std::int64_t rows) {
    // With places for a round: the compiler does not see that there are none, and warns.
    std::vector<std::int64_t> header(schedule::Layout::header_length(1, 1, 1));
    std::vector<std::int32_t> row_route(rows), expert_rank{0};
    std::iota(row_route.begin(), row_route.end(), 0);
    std::vector<bfloat16> x(rows * h), dy(rows * h), slots(rows * h);
    std::copy(tail_x.begin(), tail_x.end(), x.end() - last * h);
    std::copy(tail_dy.begin(), tail_dy.end(), dy.end() - last * h);
    std::vector<float> weights(rows, 0.5f);
    const Mapping pre(rows * 2 * i * 2), act(rows * i * 2), dz(rows * 2 * i * 2),
        dprob(rows * schedule::ceil_div(i, 64) * 4);
    Made made;
    made.gate_up_grad.assign(2 * i * h, -1.0f);
    made.down_grad.assign(h * i, -1.0f);
    executors::cpu::PassData<bfloat16> data;
    auto& s = data.pass.sizes;
    s.local_experts = 1;
    s.hidden_size = h;
    s.intermediate_size = i;
    s.tokens = rows;
    s.max_row_blocks = rows / block + 1;
    s.tile.wgrad_rows = s.tile.wgrad_columns = wgrad_tile;
    data.pass.layout = schedule::Layout::at(header.data(), row_route.data(), 1, 1);
    *data.pass.layout.valid_tokens = *data.pass.layout.tokens_of_rank = rows;
    schedule::fill_layout(s, data.pass.layout, 1, expert_rank.data(), [&](std::int32_t, std::int32_t) { return rows; });
    data.num_experts = 1;
    data.expert_rank = expert_rank.data();
    auto& slot = data.slots.emplace_back();
    slot.gate_up_proj = gate_up.data();
    slot.down_proj = down.data();
    slot.pre_activation = pre.as<bfloat16>();
    slot.activated = act.as<bfloat16>();
    slot.d_pre_activation = dz.as<bfloat16>();
    slot.gate_up_grad.data = made.gate_up_grad.data();
    slot.down_grad.data = made.down_grad.data();
    data.x = x.data();
    data.dy = dy.data();
    data.x_stride = data.dy_stride = h;
    data.row_weight = weights.data();
    data.route_rows = {slots.data()};
    data.route_dprob = {dprob.as<float>()};
    executors::cpu::WorkerMemory<bfloat16> memory;
    const std::int64_t last_block = schedule::ceil_div(rows, block) - 1, first = rows - last;
    auto run_all = [&](Stage stage, std::int64_t columns) {
      for (std::int32_t n = 0; n < schedule::ceil_div(columns, 128); ++n)
        run_tile(data, Tile{stage, 0, last_block, n}, memory);
    };
    run_all(Stage::gate_up, i);
    run_all(Stage::down, h);
    made.rows.assign(slots.end() - last * h, slots.end());
    s.direction = schedule::Direction::backward;
    run_all(Stage::down_dgrad, i);
    run_all(Stage::gate_up_dgrad, h);
    run_tile(data, Tile{Stage::gate_up_wgrad, 0, 2 * i / wgrad_tile - 1, 0}, memory);
    run_tile(data, Tile{Stage::down_wgrad, 0, 0, std::int32_t(schedule::ceil_div(i, wgrad_tile)) - 1}, memory);
    made.rows.insert(made.rows.end(), slots.end() - last * h, slots.end());
    made.pre.assign(pre.as<bfloat16>() + first * 2 * i, pre.as<bfloat16>() + rows * 2 * i);
    made.act.assign(act.as<bfloat16>() + first * i, act.as<bfloat16>() + rows * i);
    made.dz.assign(dz.as<bfloat16>() + first * 2 * i, dz.as<bfloat16>() + rows * 2 * i);
    const std::int64_t groups = schedule::ceil_div(i, 64);
    made.dprob.assign(dprob.as<float>() + first * groups, dprob.as<float>() + rows * groups);
    return made;
  };
  const Made alone = make(last), among = make(all_rows);
  auto same = [](const auto& a, const auto& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
  };
  EXPECT_TRUE(same(alone.pre, among.pre));
  EXPECT_TRUE(same(alone.act, among.act));
  EXPECT_TRUE(same(alone.dz, among.dz));
  EXPECT_TRUE(same(alone.rows, among.rows));
  EXPECT_TRUE(same(alone.dprob, among.dprob));
  EXPECT_TRUE(same(alone.gate_up_grad, among.gate_up_grad));
  EXPECT_TRUE(same(alone.down_grad, among.down_grad));
  EXPECT_NE(among.gate_up_grad.back(), -1.0f);
  EXPECT_NE(among.gate_up_grad.back(), 0.0f);
  EXPECT_NE(numerics::to_float(among.dz.back()), 0.0f);
}

#endif

TEST(Cases, D3_BufferOffsets) {
  layer::Geometry g;
  g.config = plain(7168, 2048, 8, 8, DataType::bfloat16);
  g.local_experts = 8;
  g.tokens = g.global_tokens = 37450;
  g.sizes.local_experts = 8;
  g.sizes.hidden_size = 7168;
  g.sizes.intermediate_size = 2048;
  const auto forward = layer::ForwardWorkspace::of(g, 0);
  EXPECT_EQ(forward.shared_gates - forward.route_rows, 4295065600u);  // 37450 x 8 x 7168 x 2 bytes
  EXPECT_EQ(forward.route_rows - forward.activated, 1227161600u);     // 37450 x 8 x 2048 x 2
  const auto saved = layer::SavedBuffer::of(g, true);
  EXPECT_EQ(saved.size - saved.pre_activation, 2454323200u);  // 37450 x 8 x 4096 x 2
  const auto window = layer::Window::of(g.config, 37450);
  EXPECT_EQ(window.route_dprob - window.route_rows, 4295065600u);
}

// ---- G: gradients and products

TEST(Cases, G1_ExpertsWithoutTokens) {
  const std::vector<std::int64_t> counts{162, 0, 2577, 446, 0, 83};
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    LayerConfig c = sanitized ? plain(64, 32, 6, 1, dtype) : plain(256, 96, 6, 1, dtype);
    c.gate_up_bias = c.down_bias = true;
    Problem p = random_problem(c, 3268, 11);
    bring_counts(p, counts, 12);
    RunOptions options;
    options.wide_gradients = dtype == DataType::float32;
    const Results r = run(p, options);
    expect_right(p, r, options, "G1");
    options.preset = 1.0;
    options.wide_gradients = true;
    const Results onto_one = run(p, options);
    for (const char* name : {"d_gate_up_proj", "d_down_proj", "d_gate_up_bias", "d_down_bias"}) {
      const auto size = std::int64_t(r.at(name).size()) / 6;
      for (std::int64_t e : {1, 4}) {
        EXPECT_TRUE(all_are(slice(r.at(name), e, size), 0.0)) << name << " of expert " << e;
        EXPECT_TRUE(all_are(slice(onto_one.at(name), e, size), 1.0)) << name << " of expert " << e;
      }
    }
  }
}

// The routed experts' intermediate columns [begin, end) alone. Each column's weights have the gradients that they have
// in the whole layer, since the layer's output is a sum over them.
Problem only_columns(const Problem& p, std::int64_t begin, std::int64_t end) {
  Problem part = p;
  const std::int64_t h = p.config.hidden_size, i = p.config.intermediate_size, n = end - begin;
  part.config.intermediate_size = n;
  part.weights.gate_up_proj.clear();
  part.weights.down_proj.clear();
  const std::int64_t halves = p.config.activation.gated() ? 2 : 1;
  for (std::int64_t row = 0; row < p.config.num_experts * halves; ++row) {
    const auto from = p.weights.gate_up_proj.begin() + (row * i + begin) * h;
    part.weights.gate_up_proj.insert(part.weights.gate_up_proj.end(), from, from + n * h);
  }
  for (std::int64_t row = 0; row < p.config.num_experts * h; ++row) {
    const auto from = p.weights.down_proj.begin() + row * i + begin;
    part.weights.down_proj.insert(part.weights.down_proj.end(), from, from + n);
  }
  return part;
}

// As it was reported: 2048 -> 768, here and back, with every byte of the gradients' memory set beforehand (to NaN).
// Whole gradients of six of the 768 columns against the reference.
TEST(Cases, G1_ExpertsWithoutTokensAtFullSize) {
  const std::vector<std::int64_t> counts{162, 0, 2577, 446, 0, 83};
  const std::int64_t h = sanitized ? 64 : 2048, i = sanitized ? 72 : 768;
  LayerConfig c = plain(h, i, 6, 1, DataType::bfloat16);
  c.activation.kind = ActivationKind::relu_squared;  // one product of 2048 -> 768, one of 768 -> 2048
  Problem p = random_problem(c, 3268, 15);
  bring_counts(p, counts, 16);
  RunOptions options;
  options.workers = 2;
  options.frozen = {"dx"};
  const Results r = run(p, options);
  EXPECT_EQ(r.at("expert_counts"), std::vector<double>(counts.begin(), counts.end()));
  for (const char* name : {"d_gate_up_proj", "d_down_proj"}) {
    ASSERT_EQ(r.at(name).size(), std::size_t(6 * h * i));
    for (std::int64_t e : {1, 4}) EXPECT_TRUE(all_are(slice(r.at(name), e, h * i), 0.0)) << name << " of expert " << e;
    for (double v : r.at(name)) ASSERT_TRUE(std::isfinite(v)) << name;
  }
  for (const std::int64_t begin : {std::int64_t(0), i / 2 - 1, i - 2}) {
    const Problem part = only_columns(p, begin, begin + 2);
    const auto expected = reference::backward(part.config, part.weights, part.inputs, part.upstream, 2).weights;
    std::vector<double> gate_up, down;
    for (std::int64_t e = 0; e < 6; ++e) {
      const auto rows = r.at("d_gate_up_proj").begin() + (e * i + begin) * h;
      gate_up.insert(gate_up.end(), rows, rows + 2 * h);
      for (std::int64_t row = 0; row < h; ++row) {
        for (std::int64_t n : {0, 1}) down.push_back(r.at("d_down_proj")[(e * h + row) * i + begin + n]);
      }
    }
    const auto up_error = reference::compare(gate_up, expected.gate_up_proj, h, reference::scale_floor);
    const auto down_error = reference::compare(down, expected.down_proj, 2, reference::scale_floor);
    EXPECT_TRUE(up_error.within(1e-2)) << begin << ": " << up_error.rel_fro << " " << up_error.worst_row;
    EXPECT_TRUE(down_error.rel_fro <= 1e-2) << begin << ": " << down_error.rel_fro;
  }
}

TEST(Cases, G1_SharedExpertWithoutTokens) {
  LayerConfig c = plain(16, 24, 4, 2);
  c.shared_experts = {{32, false}};
  c.gate_up_bias = c.down_bias = true;
  for (std::int64_t tokens : {0, 5}) {
    Problem p = random_problem(c, tokens, 1);
    p.inputs.ranks = {{tokens, 0, 1}};  // none is valid
    p.upstream.aux_loss = {1.0};
    const Results r = run(p, {});
    for (const auto& [name, values] : r) {
      EXPECT_TRUE(all_are(values, name == "topk_ids" ? -1.0 : 0.0)) << name << " with " << tokens << " tokens";
    }
  }
}

TEST(Cases, G3_MainGradient) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    LayerConfig c = plain(16, 32, 2, 1, dtype);
    Problem p = random_problem(c, 8, 21);
    bring(p, {0, 1, 1, 0, 0, 1, 0, 1});
    const Results once = run(p, {});
    RunOptions options;
    options.preset = 1.0;
    options.backwards = 2;
    const Results twice = run(p, options);
    for (const char* name : {"d_gate_up_proj", "d_down_proj"}) {
      for (std::size_t n = 0; n < once.at(name).size(); ++n) {
        const float dw = static_cast<float>(once.at(name)[n]);
        ASSERT_EQ(twice.at(name)[n], double((1.0f + dw) + dw)) << name << "[" << n << "]";
        ASSERT_NEAR(twice.at(name)[n], 1.0 + 2.0 * double(dw), 1e-5);
      }
      EXPECT_FALSE(all_are(once.at(name), 0.0));
    }
  }
}

TEST(Cases, G5_WidthsThatAreNoMultipleOfATile) {
  for (const std::int64_t n : {40, 128, 768, 2880}) {
    if (sanitized && n > 768) continue;
    for (const bool of_hidden : {true, false}) {
      for (const std::int32_t columns : {0, 64, 192}) {
        LayerConfig c =
            of_hidden ? plain(n, 24, 3, 2, DataType::bfloat16) : plain(24, n / 2 / 8 * 8, 3, 2, DataType::bfloat16);
        const Problem p = random_problem(c, 37, static_cast<std::uint64_t>(n));
        RunOptions options;
        options.tile_columns = columns;
        options.recompute = columns == 64;
        expect_right(p, run(p, options), options, "N = " + std::to_string(n) + ", tiles of " + std::to_string(columns));
      }
    }
  }
  const LayerConfig c = plain(64, 384, 128, 1, DataType::bfloat16);  // 128 experts, N = 768
  const Problem p = random_problem(c, sanitized ? 128 : 1024, 6);
  expect_right(p, run(p, {}), {}, "128 experts");
}

#if !defined(__SANITIZE_THREAD__)  // see D3
// 128 experts, 2048 tokens, N = 768, K = 4096, forward and dx; and K = 4096 with the other N. An expert's matrices are
// one of five, each in memory once and mapped as often as it is used, so that 1.6 GB of weights take 63 MB. Rows of y
// and dx of some tokens against the reference.
TEST(Cases, G5_ManyExpertsAtFullSize) {
  using numerics::bfloat16;
  constexpr std::int64_t distinct = 5;
  struct Shape {
    std::int64_t experts, tokens, n, k;
  };
  const std::vector<Shape> shapes = sanitized ? std::vector<Shape>{{128, 256, 40, 512}}
                                              : std::vector<Shape>{{128, 2048, 768, 4096},
                                                                   {8, 48, 40, 4096},
                                                                   {8, 48, 128, 4096},
                                                                   {8, 48, 2880, 4096}};
  for (const Shape& shape : shapes) {
    const std::int64_t h = shape.k, i = shape.n, one = h * i;
    LayerConfig c = plain(h, i, std::int32_t(shape.experts), 1, DataType::bfloat16);
    c.activation.kind = ActivationKind::relu_squared;
    const RepeatedMatrices gate_up(shape.experts, distinct, one * 2), down(shape.experts, distinct, one * 2);
    Random random(17);
    auto fill = [&](bfloat16* to, std::int64_t count, double scale) {  // uniform: 4 values of each number drawn
      for (std::int64_t n = 0; n < count; n += 4) {
        const std::uint64_t bits = random();
        for (int part = 0; part < 4 && n + part < count; ++part) {
          const double unit = double(bits >> 16 * part & 0xffff) / 32768.0 - 1.0;
          to[n + part] = numerics::to_bfloat16(float(scale * 1.7 * unit));
        }
      }
    };
    for (std::int64_t d = 0; d < distinct; ++d) {
      fill(gate_up.matrix<bfloat16>(d), one, 1.0 / std::sqrt(double(h)));
      fill(down.matrix<bfloat16>(d), one, 1.0 / std::sqrt(double(i)));
    }
    auto tensor = [&](std::int64_t rows) { return Tensor(c.dtype, {rows, h}); };
    const Tensor x = tensor(shape.tokens), dy = tensor(shape.tokens);
    const Tensor y = tensor(shape.tokens), dx = tensor(shape.tokens);
    fill(static_cast<bfloat16*>(x.view.data), shape.tokens * h, 1.0);
    fill(static_cast<bfloat16*>(dy.view.data), shape.tokens * h, 1.0);
    Tensor ids(DataType::int32, {shape.tokens, 1}), weights(DataType::float32, {shape.tokens, 1});
    auto expert_of = [&](std::int64_t t) { return t * 37 % shape.experts; };
    for (std::int64_t t = 0; t < shape.tokens; ++t) {
      static_cast<std::int32_t*>(ids.view.data)[t] = std::int32_t(expert_of(t));
      static_cast<float*>(weights.view.data)[t] = 0.5f + 0.125f * float(t % 8);
    }
    PlanOptions plan_options;
    plan_options.max_tokens = shape.tokens;
    const Plan plan = Plan::create(c, plan_options);
    const auto sizes = plan.buffer_sizes(shape.tokens);
    const Buffer saved(sizes.saved), workspace(sizes.workspace);
    Inputs in;
    in.x = x.view;
    in.topk_ids = ids.view;
    in.topk_weights = weights.view;
    in.weights.gate_up_proj = TensorView(gate_up.all(), c.dtype, {shape.experts, i, h});
    in.weights.down_proj = TensorView(down.all(), c.dtype, {shape.experts, h, i});
    Outputs out;
    out.y = y.view;
    OutputGradients up;
    up.y = dy.view;
    InputGradients grad;
    grad.x = dx.view;
    plan.forward(in, out, saved.data(), workspace.data());
    plan.backward(in, saved.data(), up, grad, workspace.data());
    for (const Tensor* t : std::initializer_list<const Tensor*>{&x, &dy, &y, &dx, &ids, &weights}) {
      EXPECT_TRUE(t->buffer.intact());
    }
    EXPECT_TRUE(saved.intact() && workspace.intact());
    for (const Tensor* t : {&y, &dx}) {
      for (double v : t->get()) ASSERT_TRUE(std::isfinite(v)) << "N = " << i;
    }

    // Some tokens, of all of the distinct matrices, the first and the last ones among them.
    auto doubles = [](const bfloat16* from, std::int64_t count) {
      std::vector<double> values(count);
      for (std::int64_t n = 0; n < count; ++n) values[n] = double(numerics::to_float(from[n]));
      return values;
    };
    const auto all_y = y.get(), all_dx = dx.get();
    const std::int64_t last = shape.tokens - 1;
    for (const std::int64_t t : {std::int64_t(0), last / 3, last / 2 + 1, last - 1, last}) {
      Problem p;
      p.config = c;
      p.config.num_experts = 1;
      p.inputs.tokens = 1;
      p.inputs.x = doubles(static_cast<bfloat16*>(x.view.data) + t * h, h);
      p.inputs.topk_ids = {0};
      p.inputs.topk_weights = {double(static_cast<float*>(weights.view.data)[t])};
      p.weights.gate_up_proj = doubles(gate_up.all<bfloat16>() + expert_of(t) * one, one);
      p.weights.down_proj = doubles(down.all<bfloat16>() + expert_of(t) * one, one);
      p.upstream.y = doubles(static_cast<bfloat16*>(dy.view.data) + t * h, h);
      const auto forward = reference::forward(p.config, p.weights, p.inputs, 2);
      const auto y_error = reference::compare(slice(all_y, t, h), forward.y, h);
      EXPECT_TRUE(y_error.within(1e-2)) << "N = " << i << ", y of token " << t << ": " << y_error.rel_fro;
      const auto backward = reference::backward(p.config, p.weights, p.inputs, p.upstream, 2);
      const auto dx_error = reference::compare(slice(all_dx, t, h), backward.x, h);
      EXPECT_TRUE(dx_error.within(1e-2)) << "N = " << i << ", dx of token " << t << ": " << dx_error.rel_fro;
    }
  }
}
#endif

TEST(Cases, G6_ALongExpert) {
  const LayerConfig c = plain(8, 8, 2, 1);
  Problem p = random_problem(c, 147456, 13);
  bring(p, std::vector<std::int64_t>(147456, 1));
  RunOptions options;
  options.workers = 2;
  const Results r = run(p, options);
  expect_right(p, r, options, "G6");
  EXPECT_EQ(r.at("expert_counts"), (std::vector<double>{0, 147456}));
}

// ---- F: formulas

OneUnit one_unit(const ActivationConfig& activation, double gate, double up, DataType dtype) {
  return test::one_unit(activation, gate, up, dtype, [](const Problem& p) { return run(p, {}); });
}

TEST(Cases, F2_ClampedSwiGLU) {
  ActivationConfig a;
  a.kind = ActivationKind::swiglu_clamped;
  a.limit = 7.0;
  a.alpha = 1.702;
  a.up_offset = 1.0;
  // The gate is clamped above alone, up on both sides.
  EXPECT_NEAR(one_unit(a, -10, -10, DataType::float32).value, 2.43e-6, 0.005e-6);
  EXPECT_NEAR(one_unit(a, 8, -9, DataType::float32).value, -41.9997, 0.00005);
  EXPECT_NEAR(one_unit(a, -10, -10, DataType::float64).value, 2.43478e-6, 0.00001e-6);
  EXPECT_NEAR(one_unit(a, 8, -9, DataType::float64).value, -41.99972, 0.000005);
  EXPECT_NEAR(one_unit(a, 8, -9, DataType::bfloat16).value, -42.0, 0.001);
  // Outside of a clamp nothing flows; at the boundary it does.
  for (const DataType dtype : {DataType::float32, DataType::float64}) {
    const OneUnit at = one_unit(a, 7, -7, dtype), beyond = one_unit(a, 7.5, -7.5, dtype),
                  inside = one_unit(a, 6.5, -6.5, dtype);
    EXPECT_NEAR(at.value, -41.99972, 0.00005);
    EXPECT_NEAR(at.d_gate, -6.000437, 0.00005);  // up' (s + alpha g s (1 - s)), g = 7, up' = -6
    EXPECT_NEAR(at.d_up, 6.999953, 0.00005);
    EXPECT_EQ(beyond.d_gate, 0.0);
    EXPECT_EQ(beyond.d_up, 0.0);
    EXPECT_NE(inside.d_gate, 0.0);
    EXPECT_NE(inside.d_up, 0.0);
    const OneUnit low = one_unit(a, -8, 7, dtype);
    EXPECT_NE(low.d_gate, 0.0);
    EXPECT_NE(low.d_up, 0.0);
  }
}

TEST(Cases, F4_BothGELUs) {
  ActivationConfig a;
  a.kind = activation_kind_from("geglu_erf");
  EXPECT_NEAR(one_unit(a, 1, 1, DataType::float32).value, 0.841345, 5e-7);
  EXPECT_NEAR(one_unit(a, 1, 1, DataType::float64).value, 0.8413447460685429, 1e-15);
  a.kind = activation_kind_from("geglu_tanh");
  EXPECT_NEAR(one_unit(a, 1, 1, DataType::float32).value, 0.841192, 5e-7);
  EXPECT_NEAR(one_unit(a, 1, 1, DataType::float64).value, 0.8411919906082768, 1e-15);
}

// Very large and very small pre-activations give no NaN where the formula has none.
TEST(Cases, F4_ExtremePreActivations) {
  for (const char* name : {"swiglu", "swiglu_clamped", "geglu_erf", "geglu_tanh"}) {
    ActivationConfig a;
    a.kind = activation_kind_from(name);
    for (const DataType dtype : {DataType::float32, DataType::float64, DataType::bfloat16}) {
      for (const double gate : {-1e25, -1e15, -200.0, -0.0, 0.0, 1e-30, 200.0, 1e15, 1e25}) {
        const OneUnit unit = one_unit(a, gate, 1, dtype);
        EXPECT_TRUE(std::isfinite(unit.value)) << name << " of " << gate;
        EXPECT_TRUE(std::isfinite(unit.d_gate)) << name << " of " << gate;
        EXPECT_TRUE(std::isfinite(unit.d_up)) << name << " of " << gate;
      }
    }
  }
}

// ---- E: several ranks

TEST(Cases, E1_OddUnequalAndNoTokens) {
  const LayerConfig c = plain(16, 8, 8, 2, DataType::bfloat16);
  struct Split {
    std::vector<std::int64_t> tokens;
    bool all_to_rank_0;
  };
  for (const Split& split : {Split{{4095, 4095}, false}, Split{{7, 0}, false}, Split{{0, 7}, true}, Split{{7, 5}, true},
                             Split{{0, 0}, false}, Split{{1, 0, 0}, false}}) {
    const std::int64_t tokens = std::accumulate(split.tokens.begin(), split.tokens.end(), std::int64_t(0));
    Problem p = random_problem(c, tokens, 31);
    p.upstream.aux_loss.assign(split.tokens.size(), 1.0);  // (no tokens, no gradient of y)
    if (split.all_to_rank_0) {
      std::vector<std::int64_t> ids;
      for (std::int64_t t = 0; t < tokens; ++t) ids.push_back(t % 4), ids.push_back((t + 1) % 4);  // experts 0 to 3
      bring(p, ids);
    }
    RunOptions options;
    options.tokens_of_rank = split.tokens;
    const Results several = run(p, options);
    const Results one = run(p, {});
    expect_identical(one, several, std::to_string(tokens) + " tokens", {"expert_counts", "aux_loss", "z_loss"});
    ASSERT_EQ(several.at("d_gate_up_proj").size(), std::size_t(8 * 16 * 16));
    ASSERT_EQ(several.at("d_down_proj").size(), std::size_t(8 * 16 * 8));
    if (split.all_to_rank_0) {
      for (std::int64_t e = 4; e < 8; ++e) EXPECT_TRUE(all_are(slice(several.at("d_gate_up_proj"), e, 256), 0.0));
    }
  }
}

// A rank whose loss does not depend on y still has other ranks' tokens in its experts.
TEST(Cases, E1_ARankWithoutAGradientOfY) {
  LayerConfig c = plain(16, 24, 4, 2);
  c.shared_experts = {{16, true}};
  Problem p = random_problem(c, 20, 33);
  p.upstream.aux_loss.assign(3, 1.0);
  RunOptions options;
  options.tokens_of_rank = {9, 7, 4};
  options.without_dy = {1};
  const Results r = run(p, options);
  Problem zero = p;
  std::fill_n(zero.upstream.y.begin() + 9 * 16, 7 * 16, 0.0);
  expect_right(zero, r, options, "rank 1 without dy");
  EXPECT_TRUE(all_are({r.at("dx").begin() + 9 * 16, r.at("dx").begin() + 16 * 16}, 0.0));
  options.without_dy = {0, 1, 2};
  std::fill(zero.upstream.y.begin(), zero.upstream.y.end(), 0.0);
  expect_right(zero, run(p, options), options, "no rank with dy");
}

TEST(Cases, E3_ExpertGradientsAreNotMultiplied) {
  Problem p = random_problem(plain(8, 8, 2, 1, DataType::float64), 12, 41);
  const Results one = run(p, {});
  expect_right(p, one, {}, "one rank");
  RunOptions options;
  options.tokens_of_rank = {6, 6};
  const Results two = run(p, options);
  expect_right(p, two, options, "two ranks");
  EXPECT_EQ(two.at("d_gate_up_proj"), one.at("d_gate_up_proj"));
  EXPECT_EQ(two.at("d_down_proj"), one.at("d_down_proj"));
  EXPECT_EQ(two.at("d_router_logits"), one.at("d_router_logits"));
  EXPECT_FALSE(all_are(one.at("d_gate_up_proj"), 0.0));
}

TEST(Cases, E5_LossesAreTheSameEveryTime) {
  for (const AuxLossKind kind : {AuxLossKind::batch, AuxLossKind::sequence, AuxLossKind::global}) {
    LayerConfig c = plain(16, 8, 64, 8, DataType::bfloat16);
    c.router.aux_loss = kind;
    c.router.aux_loss_coefficient = 0.1;
    c.router.z_loss_coefficient = 0.01;
    for (const int ranks : {1, 2}) {
      Problem p = random_problem(c, 512, 51);
      RunOptions options;
      if (ranks == 2) options.tokens_of_rank = {400, 112};
      p.upstream.aux_loss.assign(ranks, 1.0);
      p.upstream.z_loss.assign(ranks, 1.0);
      const Results first = run(p, options);
      expect_right(p, first, options, "E5");
      for (int n = 1; n < 8; ++n) {
        options.workers = 1 + n % 4;
        options.shuffle_seed = n == 5 ? 5 : 0;
        expect_identical(first, run(p, options), to_string(kind));
      }
    }
  }
}

TEST(Cases, E7_ARankWhoseExpertsGetNoToken) {
  const LayerConfig c = plain(16, 24, 6, 2, DataType::bfloat16);
  Problem p = random_problem(c, 30, 61);
  std::vector<std::int64_t> ids;
  for (std::int64_t n = 0; n < 60; ++n) ids.push_back(n % 2 ? 1 : 0);
  bring(p, ids);
  const Results one = run(p, {});
  RunOptions options;
  options.tokens_of_rank = {10, 12, 8};  // experts 0, 1 | 2, 3 | 4, 5
  const Results r = run(p, options);
  expect_identical(one, r, "E7", {"expert_counts", "aux_loss", "z_loss"});
  for (std::int64_t e = 2; e < 6; ++e) {
    EXPECT_TRUE(all_are(slice(r.at("d_gate_up_proj"), e, 48 * 16), 0.0));
    EXPECT_TRUE(all_are(slice(r.at("d_down_proj"), e, 24 * 16), 0.0));
  }
  options.expert_rank = {1, 1, 1, 1, 1, 1};  // two ranks without any expert
  expect_identical(one, run(p, options), "all experts on rank 1", {"expert_counts", "aux_loss", "z_loss"});
}

// ---- C: several calls that share memory -----------------------------------------------------------------------------

// Of one rank's part of a call and of the joined batch run alone.
void expect_part(const Call& call, const Results& whole, std::int64_t first, std::int64_t tokens, std::int64_t h,
                 const std::string& what) {
  for (const char* name : {"y", "dx"}) {
    const auto& all = whole.at(name);
    EXPECT_EQ(call.get(name), (std::vector<double>{all.begin() + first * h, all.begin() + (first + tokens) * h}))
        << what << ": " << name;
  }
}

// Two forwards of one plan with different tokens and routing await their backwards, which come in either order.
TEST(Cases, C1_ForwardsThatAwaitTheirBackwards) {
  const LayerConfig c = plain(40, 72, 6, 2, DataType::bfloat16);
  Problem a = random_problem(c, 90, 121), b = random_problem(c, 31, 122);
  b.weights = a.weights;
  const Results alone_a = run(a, {}), alone_b = run(b, {});
  for (const int ranks : {1, 3}) {
    for (const bool first_in_first_out : {true, false}) {
      auto groups = Group::threads(ranks);
      on_threads(ranks, [&](int r) {
        PlanOptions options;
        options.max_tokens = 90;
        options.workers = 2;
        options.group = groups[r];
        const Plan plan = Plan::create(c, options);
        const std::vector<std::int64_t> begin_a{0, 50, 50, 90}, begin_b{0, 1, 31, 31};
        const std::int64_t first_a = ranks == 1 ? 0 : begin_a[r], tokens_a = ranks == 1 ? 90 : begin_a[r + 1] - first_a;
        const std::int64_t first_b = ranks == 1 ? 0 : begin_b[r], tokens_b = ranks == 1 ? 31 : begin_b[r + 1] - first_b;
        Call call_a(a, plan, first_a, tokens_a), call_b(b, plan, first_b, tokens_b);
        call_a.forward();
        call_b.forward();
        (first_in_first_out ? call_a : call_b).backward();
        (first_in_first_out ? call_b : call_a).backward();
        expect_part(call_a, alone_a, first_a, tokens_a, 40, "first, rank " + std::to_string(r));
        expect_part(call_b, alone_b, first_b, tokens_b, 40, "second, rank " + std::to_string(r));
      });
    }
  }
}

// Layers of different sizes in one group use the same symmetric memory, laid out differently. A rank that is done
// early, since nobody else holds its tokens, must not begin the next layer where others still read the last one.
TEST(Cases, C1_LayersOfOneGroupInTurn) {
  LayerConfig small = plain(8, 8, 4, 1), large = plain(1024, 8, 8, 2);
  small.shared_experts = {{1024, false}};  // keeps rank 0 busy before it reads what rank 1 has
  constexpr std::int64_t many = 700;
  Problem a = random_problem(small, many + 1, 131), b = random_problem(large, many + 1, 132);
  std::vector<std::int64_t> ids_a, ids_b;
  for (std::int64_t t = 0; t <= many; ++t) {  // the last token is rank 1's, for its own experts
    ids_a.push_back(t < many ? t % 4 : 3);
    for (int j = 0; j < 2; ++j) ids_b.push_back(t < many ? (t + j) % 8 : 6 + j);
  }
  bring(a, ids_a);
  bring(b, ids_b);
  for (std::int64_t n = many * 1024; n < (many + 1) * 1024; ++n) {  // read as an expert's id: far too large
    b.inputs.x[n] = std::fabs(b.inputs.x[n]) + 1;
  }
  const Results alone_a = run(a, {}), alone_b = run(b, {});
  auto groups = Group::threads(2);
  on_threads(2, [&](int r) {
    PlanOptions options;
    options.max_tokens = r == 0 ? many : 1;
    options.workers = 1;
    options.group = groups[r];
    options.group.set_timeout(std::chrono::seconds(30));
    const Plan plan_a = Plan::create(small, options), plan_b = Plan::create(large, options);
    const std::int64_t first = r == 0 ? 0 : many, tokens = r == 0 ? many : 1;
    for (int round = 0; round < 3; ++round) {
      Call call_a(a, plan_a, first, tokens), call_b(b, plan_b, first, tokens);
      call_a.forward();
      call_b.forward();
      call_b.backward();
      call_a.backward();
      expect_part(call_a, alone_a, first, tokens, 8, "small layer, rank " + std::to_string(r));
      expect_part(call_b, alone_b, first, tokens, 1024, "large layer, rank " + std::to_string(r));
    }
  });
}

TEST(Cases, E1_EmptyTensorsMayHaveNoAddress) {
  const LayerConfig c = plain(16, 24, 4, 2);
  const Problem p = random_problem(c, 5, 141);
  const Results one = run(p, {});
  for (const int ranks : {1, 2}) {
    auto groups = Group::threads(ranks);
    on_threads(ranks, [&](int r) {
      PlanOptions options;
      options.max_tokens = r == 1 ? 5 : 0;
      options.group = groups[r];
      const Plan plan = Plan::create(c, options);
      Call call(p, plan, 0, r == 1 ? 5 : 0);
      call.forward();
      call.backward();
      if (r == 1) {
        expect_part(call, one, 0, 5, 16, "rank 1");
      } else {
        EXPECT_TRUE(ranks == 2 || all_are(call.get("d_gate_up_proj"), 0.0));
      }
    });
  }
}

// ---- N, S: sizes and the tests themselves

TEST(Cases, N1_OutputsAreOfOrderOne) {
  Random random(71);
  auto rms = [](const std::vector<double>& values) {
    return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0) / double(values.size()));
  };
  for (int n = 0; n < 20; ++n) {
    LayerConfig c = random_config(random, DataType::float32);
    c.router.capacity_factor = 0;
    const Problem p = random_problem(c, 64, random());
    const Results r = run(p, {});
    for (const char* name : {"y", "dx", "d_gate_up_proj", "d_down_proj"}) {
      EXPECT_GT(rms(r.at(name)), 0.005) << name << " of configuration " << n;
      EXPECT_LT(rms(r.at(name)), 200.0) << name << " of configuration " << n;
    }
  }
}

// What expect_right, which judges every result here, says of results that come from other mathematics and are small.
TEST(Cases, N1_TheCheckerCatchesAWrongActivationAt1e5) {
  auto complaints = [](const Problem& p, const Results& results) {
    ::testing::TestPartResultArray parts;
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &parts);
    expect_right(p, results, {}, "N1");
    return parts.size();
  };
  for (const DataType dtype : {DataType::float64, DataType::float32, DataType::bfloat16}) {
    Problem p = random_problem(plain(32, 40, 4, 2, dtype), 50, 75);
    for (double& v : p.weights.down_proj) v = round_to(dtype, v * 1e-5);
    const Results right = run(p, {});
    double largest = 0;
    for (double v : right.at("y")) largest = std::max(largest, std::fabs(v));
    EXPECT_LT(largest, 1e-4);  // a wrong one passes any absolute tolerance that is usual
    EXPECT_EQ(complaints(p, right), 0) << to_string(dtype);
    for (const ActivationKind wrong :
         {ActivationKind::swiglu_clamped, ActivationKind::geglu_erf, ActivationKind::geglu_tanh}) {
      Problem other = p;
      other.config.activation.kind = wrong;
      EXPECT_GT(complaints(p, run(other, {})), 0) << to_string(dtype) << ", " << to_string(wrong);
    }
  }
}

TEST(Cases, N1_AWrongActivationIsSeenAtAnyScale) {
  LayerConfig c = plain(32, 40, 4, 2);
  Problem p = random_problem(c, 50, 73);
  for (const double scale : {1.0, 1e-5}) {
    Problem scaled = p;
    for (double& v : scaled.inputs.x) v = round_to(c.dtype, v * scale);
    const Results r = run(scaled, {});
    for (const ActivationKind wrong : {ActivationKind::geglu_erf, ActivationKind::geglu_tanh}) {
      LayerConfig other = c;
      other.activation.kind = wrong;
      const auto expected = reference::forward(other, scaled.weights, scaled.inputs, 1);
      const auto error = reference::compare(r.at("y"), expected.y, c.hidden_size);
      // Near 0 each of them is gate * up / 2, so only inputs of order 1 tell them apart: what every test here uses.
      EXPECT_TRUE(scale != 1.0 || error.rel_fro > 0.05) << error.rel_fro;
    }
    reference::Weights larger = scaled.weights;
    for (double& v : larger.down_proj) v *= 1.01;  // one per cent is seen however small all of it is
    const auto expected = reference::forward(c, larger, scaled.inputs, 1);
    EXPECT_GT(reference::compare(r.at("y"), expected.y, c.hidden_size).rel_fro, 0.005) << scale;
    const auto right = reference::forward(c, scaled.weights, scaled.inputs, 1);
    EXPECT_LT(reference::compare(r.at("y"), right.y, c.hidden_size).rel_fro, 1e-5) << scale;
  }
}

TEST(Cases, N2_NaNInAbsentRowsDoesNotLeak) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (const int entry : {0, 1}) {
      for (const int ranks : {1, 2}) {
        LayerConfig c = plain(72, 136, 5, 2, dtype);
        c.shared_experts = {{40, true}, {24, false}};
        c.router.aux_loss = AuxLossKind::batch;
        c.router.aux_loss_coefficient = 0.1;
        c.router.z_loss_coefficient = 0.1;
        Problem clean = random_problem(c, 300, 81);
        if (entry == 1) bring_routes(clean, 0.3, 82);
        RunOptions options;
        if (ranks == 1) {
          clean.inputs.ranks = {{300, 203, 1}};
        } else {
          options.tokens_of_rank = {170, 130};
          clean.inputs.ranks = {{170, 101, 1}, {130, 65, 1}};
        }
        clean.upstream.aux_loss.assign(ranks, 1.0);
        clean.upstream.z_loss.assign(ranks, 1.0);
        Problem dirty = clean;
        for (std::int64_t t = 0; t < 300; ++t) {
          if (ranks == 1 ? t < 203 : t % 170 < (t < 170 ? 101 : 65)) continue;
          auto spoil = [t](std::vector<double>& values, std::int64_t columns) {
            if (!values.empty()) std::fill_n(values.begin() + t * columns, columns, nan);
          };
          spoil(dirty.inputs.x, 72);
          spoil(dirty.inputs.router_logits, 5);
          spoil(dirty.inputs.topk_weights, 2);
          spoil(dirty.inputs.shared_gate_logits, 2);
          spoil(dirty.upstream.y, 72);
          if (entry == 1) dirty.inputs.topk_ids[t * 2] = 1000000;  // not looked at
        }
        if (entry == 1) {
          for (std::size_t n = 0; n < dirty.inputs.topk_ids.size(); ++n) {
            if (dirty.inputs.topk_ids[n] < 0) dirty.inputs.topk_weights[n] = nan;
          }
        }
        const Results a = run(clean, options), b = run(dirty, options);
        expect_identical(a, b, "N2");
        for (std::int64_t t = 0; t < 300; ++t) {
          if (ranks == 1 ? t < 203 : t % 170 < (t < 170 ? 101 : 65)) continue;
          EXPECT_TRUE(all_are(slice(b.at("y"), t, 72), 0.0)) << t;
          EXPECT_TRUE(all_are(slice(b.at("dx"), t, 72), 0.0)) << t;
        }
        for (const auto& [name, values] : b) {
          for (double v : values) ASSERT_TRUE(std::isfinite(v)) << name;
        }
      }
    }
  }
}

// Rows with gaps between them: NaN there is neither read nor overwritten.
TEST(Cases, N2_NaNBetweenRowsDoesNotLeak) {
  const LayerConfig c = plain(40, 72, 3, 2);
  Problem p = random_problem(c, 70, 91);
  const Results expected = run(p, {});
  constexpr std::int64_t tokens = 70, h = 40, stride = 56;
  auto strided = [&](const std::vector<double>* values) {
    Tensor t(DataType::float32, {tokens, stride});
    if (values) {
      for (std::int64_t row = 0; row < tokens; ++row) {
        for (std::int64_t n = 0; n < h; ++n)
          static_cast<float*>(t.view.data)[row * stride + n] = float((*values)[row * h + n]);
      }
    }
    return t;
  };
  auto narrow = [&](const Tensor& t) {
    TensorView view(t.view.data, DataType::float32, {tokens, h});
    view.stride[0] = stride;
    return view;
  };
  const Tensor x = strided(&p.inputs.x), dy = strided(&p.upstream.y), y = strided(nullptr), dx = strided(nullptr);
  Tensor logits(DataType::float32, {tokens, 3}), gate_up(c.dtype, {3, 144, h}), down(c.dtype, {3, h, 72});
  logits.set(p.inputs.router_logits.data());
  gate_up.set(p.weights.gate_up_proj.data());
  down.set(p.weights.down_proj.data());
  PlanOptions options;
  options.max_tokens = tokens;
  options.workers = 1;
  const Plan plan = Plan::create(c, options);
  const auto sizes = plan.buffer_sizes(tokens);
  const Buffer saved(sizes.saved), workspace(sizes.workspace);
  Inputs in;
  in.x = narrow(x);
  in.router_logits = logits.view;
  in.weights.gate_up_proj = gate_up.view;
  in.weights.down_proj = down.view;
  Outputs out;
  out.y = narrow(y);
  plan.forward(in, out, saved.data(), workspace.data());
  OutputGradients up;
  up.y = narrow(dy);
  InputGradients grad;
  grad.x = narrow(dx);
  Tensor d_gate_up(DataType::float32, {3, 144, h});
  grad.weights.gate_up_proj.tensor = d_gate_up.view;
  plan.backward(in, saved.data(), up, grad, workspace.data());
  for (std::int64_t row = 0; row < tokens; ++row) {
    for (std::int64_t n = 0; n < stride; ++n) {
      const float value = static_cast<const float*>(y.view.data)[row * stride + n],
                  d = static_cast<const float*>(dx.view.data)[row * stride + n];
      if (n < h) {
        ASSERT_EQ(value, expected.at("y")[row * h + n]);
        ASSERT_EQ(d, expected.at("dx")[row * h + n]);
      } else {
        ASSERT_TRUE(std::isnan(value) && std::isnan(d));
      }
    }
  }
  EXPECT_EQ(d_gate_up.get(), expected.at("d_gate_up_proj"));
}

TEST(Cases, N3_FewRowsAnExpert) {
  std::vector<std::int64_t> counts;
  for (std::int64_t e = 1; e <= 63; ++e) counts.push_back(e);
  for (const DataType dtype : {DataType::float64, DataType::float32, DataType::bfloat16}) {
    Problem p = random_problem(plain(72, 136, 63, 1, dtype), 63 * 64 / 2, 101);
    bring_counts(p, counts, 102);
    const Results r = run(p, {});
    expect_right(p, r, {}, "N3");
    EXPECT_EQ(r.at("expert_counts"), std::vector<double>(counts.begin(), counts.end()));
  }
}

TEST(Cases, S1_ManyExperts) {
  struct Shape {
    std::int32_t experts, top_k;
  };
  for (const Shape& shape : {Shape{512, 10}, Shape{1024, 1}, Shape{1024, 32}}) {
    for (const int ranks : {1, 2}) {
      const LayerConfig c = plain(16, 8, shape.experts, shape.top_k);
      const Problem p = random_problem(c, 96, 111);
      RunOptions options;
      if (ranks == 2) options.tokens_of_rank = {59, 37};
      expect_right(p, run(p, options), options, std::to_string(shape.experts) + " experts");
    }
  }
}

}  // namespace
}  // namespace moelith
