#include "dense_rate.hpp"

#include "placed_problem.hpp"
#include "random_problem.hpp"
#include "stopwatch.hpp"

#if MOELITH_HAVE_ONEDNN
#include <dnnl.hpp>

// The thread count of oneDNN's runtime, where that is OpenMP.
extern "C" void omp_set_num_threads(int) __attribute__((weak));
#endif

namespace moelith::tools {

std::int64_t dense_width(const LayerConfig& config) {
  std::int64_t width = config.intermediate_size * config.top_k;
  for (const SharedExpertConfig& shared : config.shared_experts) width += shared.intermediate_size;
  return width;
}

DenseRate own_dense_rate(const LayerConfig& config, const RunOptions& run, std::int64_t tokens, double seconds) {
  LayerConfig dense;
  dense.hidden_size = config.hidden_size;
  dense.intermediate_size = dense_width(config);
  dense.num_experts = dense.top_k = 1;
  dense.dtype = config.dtype;
  dense.activation = config.activation;
  RunOptions without_recompute = run;
  without_recompute.recompute = false;
  const Plan plan = Plan::create(dense, plan_options(without_recompute, tokens));
  RouteSpec routes;
  routes.seed = run.seed;
  Problem problem = make_problem(dense, tokens, routes, Entry::logits, 1);
  Inputs& inputs = problem.variants[0].inputs;
  inputs.router_logits = {};  // no router: the dense MLP
  problem.gradients.router_logits = {};
  const PlacedProblem placed(problem, plan.options().device, plan.buffer_sizes(tokens));
  const auto& [in, up] = placed.variants()[0];
  std::vector<double> forward, backward;
  repeat_for(seconds, [&](int n) {
    const double f = placed.seconds_of([&] { plan.forward(in, placed.outputs(), placed.saved(), placed.workspace()); });
    const double b =
        placed.seconds_of([&] { plan.backward(in, placed.saved(), up, placed.gradients(), placed.workspace()); });
    if (n == 0) return;
    forward.push_back(f);
    backward.push_back(b);
  });
  const double flops = forward_flops(dense, static_cast<double>(tokens), static_cast<double>(tokens));
  DenseRate rate;
  rate.name = "moelith, dense MLP (E = 1) of the same work";
  rate.forward_tflops = flops / median(forward) * 1e-12;
  rate.forward_backward_tflops = 3 * flops / (median(forward) + median(backward)) * 1e-12;
  return rate;
}

#if MOELITH_HAVE_ONEDNN
namespace {

// TFLOP/s of [m, k] x [k, n], or 0 if oneDNN has no such product.
double matmul_tflops(dnnl::memory::data_type type, DataType dtype, std::int64_t m, std::int64_t n, std::int64_t k,
                     std::uint64_t seed, double seconds) {
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const dnnl::memory::desc a({m, k}, type, dnnl::memory::format_tag::ab);
    const dnnl::memory::desc b({k, n}, type,
                               dnnl::memory::format_tag::ba);  // weights are stored [n, k], as in the layer
    const dnnl::memory::desc c({m, n}, type, dnnl::memory::format_tag::ab);
    const dnnl::matmul product(dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), engine));
    TensorStore store;
    const TensorView left = store.add(dtype, {m, k}), right = store.add(dtype, {n, k}),
                     result = store.add(dtype, {m, n});
    fill_normal(left, 0, 1, seed, 1);
    fill_normal(right, 0, 1, seed, 2);
    dnnl::memory am(a, engine, left.data), bm(b, engine, right.data), cm(c, engine, result.data);
    std::vector<double> times;
    repeat_for(seconds, [&](int round) {
      const double time = seconds_of([&] {
        product.execute(stream, {{DNNL_ARG_SRC, am}, {DNNL_ARG_WEIGHTS, bm}, {DNNL_ARG_DST, cm}});
        stream.wait();
      });
      if (round > 0) times.push_back(time);
    });
    return 2e-12 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / median(times);
  } catch (const dnnl::error&) { return 0; }
}

}  // namespace

std::optional<DenseRate> onednn_dense_rate(const LayerConfig& config, const RunOptions& run, std::int64_t tokens,
                                           double seconds) {
  if (config.dtype == DataType::float64) return std::nullopt;
  if (omp_set_num_threads != nullptr) {
    omp_set_num_threads(threads_of(run));
  }
  const std::int64_t n = config.gate_up_rows(dense_width(config)), k = config.hidden_size;
  using Type = dnnl::memory::data_type;
  double best = matmul_tflops(Type::f32, DataType::float32, tokens, n, k, run.seed, seconds);
  std::string name = "float32";
  if (config.dtype == DataType::bfloat16) {
    // Without bf16 instructions oneDNN may fall back to a loop that takes minutes: try a small product first.
    const double small = matmul_tflops(Type::bf16, DataType::bfloat16, 64, 256, 256, run.seed, 0.0);
    if (small * 20 > best) {
      const double rate = matmul_tflops(Type::bf16, DataType::bfloat16, tokens, n, k, run.seed, seconds);
      if (rate > best) best = rate, name = "bfloat16";
    }
  }
  if (best == 0) return std::nullopt;
  return DenseRate{"oneDNN, " + name, best, best};
}
#else
std::optional<DenseRate> onednn_dense_rate(const LayerConfig&, const RunOptions&, std::int64_t, double) {
  return std::nullopt;
}
#endif

}  // namespace moelith::tools
