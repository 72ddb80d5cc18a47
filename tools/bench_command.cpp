// `moelith bench`: median times of forward and backward, their rates, the fraction of a dense product's rate in the
// same run, and memory. Inputs and routing change from call to call (three sets in turn), weights stay.
#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <ostream>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include "command_line.hpp"
#include "dense_rate.hpp"
#include "options.hpp"
#include "placed_problem.hpp"
#include "random_problem.hpp"
#include "stopwatch.hpp"

namespace moelith::tools {
namespace {

struct BenchOptions {
  LayerOptions layer;
  RunOptions run;
  std::int64_t shrink = 1;
  double seconds = 1.5;
};

double peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

int run_bench(const Streams& streams, const BenchOptions& o) {
  constexpr int variants = 3;
  // Small experts, which are harder for a MoE layer than large ones.
  const PlacedLayer layer(o.layer, o.run, plain_layer(512, 256, 64, 8), o.shrink, variants, false, "the benchmark");
  const auto& [config, tokens, plan, sizes, problem, placed] = layer;
  std::vector<double> forward, backward, without_gradients, routes, largest;
  repeat_for(o.seconds, [&](int n) {
    const auto& [inputs, output_gradients] = placed.variants()[static_cast<std::size_t>(n % variants)];
    const double w = placed.seconds_of([&] { plan.forward(inputs, placed.outputs(), nullptr, placed.workspace()); });
    const double f = placed.seconds_of([&] { plan.forward(inputs, placed.outputs(), placed.saved(), placed.workspace()); });
    const double b = placed.seconds_of(
        [&] { plan.backward(inputs, placed.saved(), output_gradients, placed.gradients(), placed.workspace()); });
    placed.fetch_outputs();
    if (n == 0) return;
    without_gradients.push_back(w);
    forward.push_back(f);
    backward.push_back(b);
    const auto* counts = static_cast<const std::int64_t*>(problem.outputs.expert_counts.data);
    std::int64_t sum = 0;
    for (std::int32_t e = 0; e < config.num_experts; ++e) sum += counts[e];
    routes.push_back(static_cast<double>(sum));
    largest.push_back(static_cast<double>(*std::max_element(counts, counts + config.num_experts)));
  });
  const double layer_memory = peak_memory();

  const double f = median(forward), b = median(backward);
  const double flops = forward_flops(config, median(routes), static_cast<double>(tokens));
  const double forward_tflops = flops / f * 1e-12, backward_tflops = 2 * flops / b * 1e-12;
  const double both_tflops = 3 * flops / (f + b) * 1e-12;

  // The faster of the two dense rates is what counts.
  std::vector<DenseRate> dense{own_dense_rate(config, o.run, tokens, o.seconds)};
  const bool on_cpu = plan.options().device == DeviceKind::cpu;
  if (auto rate = on_cpu ? onednn_dense_rate(config, o.run, tokens, o.seconds) : std::nullopt) dense.push_back(*rate);
  const auto fastest = [&](double DenseRate::*rate) -> const DenseRate& {
    return *std::max_element(dense.begin(), dense.end(),
                             [&](const DenseRate& x, const DenseRate& y) { return x.*rate < y.*rate; });
  };
  const DenseRate& best_forward = fastest(&DenseRate::forward_tflops);
  const DenseRate& best_both = fastest(&DenseRate::forward_backward_tflops);
  const double fraction_forward = forward_tflops / best_forward.forward_tflops;
  const double fraction_both = both_tflops / best_both.forward_backward_tflops;
  const double mean_load = median(routes) / config.num_experts;
  const int threads = threads_of(o.run);

  if (o.run.json) {
    Json rates = Json::array();
    for (const DenseRate& rate : dense) {
      rates.push_back({{"name", rate.name},
                       {"forward_tflops", rate.forward_tflops},
                       {"forward_backward_tflops", rate.forward_backward_tflops}});
    }
    streams.out
        << Json{{"forward_ms", f * 1e3},
                {"backward_ms", b * 1e3},
                {"forward_without_gradients_ms", median(without_gradients) * 1e3},
                {"forward_tflops", forward_tflops},
                {"backward_tflops", backward_tflops},
                {"forward_backward_tflops", both_tflops},
                {"fraction_of_dense", {{"forward", fraction_forward}, {"forward_backward", fraction_both}}},
                {"dense",
                 {{"forward_is", best_forward.name}, {"forward_backward_is", best_both.name}, {"rates", rates}}},
                {"device", o.run.device},
                {"threads", threads},
                {"tokens", tokens},
                {"tokens_per_s", static_cast<double>(tokens) / (f + b)},
                {"routing", o.run.routing},
                {"load", {{"routes", median(routes)}, {"largest_over_mean", median(largest) / mean_load}}},
                {"rounds", forward.size()},
                {"seed", o.run.seed},
                {"recompute", o.run.recompute},
                {"memory_bytes",
                 {{"weights", problem.weight_bytes},
                  {"weight_gradients", problem.gradient_bytes},
                  {"saved", sizes.saved},
                  {"workspace", sizes.workspace},
                  {"peak_of_process", layer_memory}}},
                {"saved_formula", sizes.formula},
                {"config", to_json(config)}}
               .dump(2)
        << "\n";
    return success;
  }
  const auto mb = [](double bytes) { return fmt::format("{:.1f} MB", bytes * 1e-6); };
  const std::string where = on_cpu ? fmt::format("cpu {} threads", threads) : o.run.device;
  fmt::print(streams.out, "{}\nT {}, routing {} (the fullest expert has {:.2f} x the mean), {}, {} rounds\n\n",
             summary(config), tokens, o.run.routing, median(largest) / mean_load, where, forward.size());
  fmt::print(streams.out, "{:<22} {:>10} {:>10} {:>10}\n", "", "ms", "TFLOP/s", "of dense");
  fmt::print(streams.out, "{:<22} {:>10.2f} {:>10.4f} {:>10.2f}\n", "forward", f * 1e3, forward_tflops,
             fraction_forward);
  fmt::print(streams.out, "{:<22} {:>10.2f} {:>10.4f}\n", "backward", b * 1e3, backward_tflops);
  fmt::print(streams.out, "{:<22} {:>10.2f} {:>10.4f} {:>10.2f}\n", "forward + backward", (f + b) * 1e3, both_tflops,
             fraction_both);
  fmt::print(streams.out, "{:<22} {:>10.2f}\n\n", "without gradients", median(without_gradients) * 1e3);
  for (const DenseRate& rate : dense) {
    fmt::print(streams.out, "dense: {:.4f} TFLOP/s forward, {:.4f} forward + backward ({})\n", rate.forward_tflops,
               rate.forward_backward_tflops, rate.name);
  }
  fmt::print(streams.out, "\nmemory: weights {}, their gradients {}, saved {}, workspace {}; the process at most {}\n",
             mb(static_cast<double>(problem.weight_bytes)), mb(static_cast<double>(problem.gradient_bytes)),
             mb(static_cast<double>(sizes.saved)), mb(static_cast<double>(sizes.workspace)), mb(layer_memory));
  fmt::print(streams.out, "saved = {}\n", sizes.formula);
  return success;
}

}  // namespace

void add_bench(CLI::App& program, Streams streams, Run& run) {
  auto* command = program.add_subcommand("bench", "times, rates, fraction of a dense product's rate, memory");
  auto options = std::make_shared<BenchOptions>();
  add_layer_options(*command, options->layer);
  add_run_options(*command, options->run);
  add_shrink_option(*command, options->shrink);
  command->add_option("--seconds", options->seconds, "for each measurement, at least 3 rounds")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command->callback([=, &run] { run = [=] { return run_bench(streams, *options); }; });
}

}  // namespace moelith::tools
