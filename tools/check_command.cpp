// `moelith check`: forward and backward against the fp64 reference, fed the same inputs as they were rounded to dtype.
//
// Every output and every gradient is compared as a whole (relative Frobenius error) and row by row, the worst row
// counting (reference/compare.hpp has both measures); expert ids and counts must be equal. Allowed errors, of each:
//   bfloat16 1e-2: a result is rounded to 8 bits (2^-9 at most), and what it was made of once or twice before
//   float32  2e-5: sums of thousands of terms in float32
//   float64  1e-12
// A row's error is relative to the row, or to the root mean square of the tensor's rows where the row is smaller than
// that and cancels by nature: in the gradients of the weights (an expert's few tokens may all lie where the activation
// is flat) and of the router's inputs (dot products, and differences of nearly equal ones). In these tensors, with up
// to a hundred thousand rows of few terms each, the worst row may be off by twice as much.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <ostream>
#include <utility>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include "command_line.hpp"
#include "options.hpp"
#include "placed_problem.hpp"
#include "random_problem.hpp"
#include "reference/compare.hpp"
#include "reference/layer.hpp"

namespace moelith::tools {
namespace {

struct CheckOptions {
  LayerOptions layer;
  RunOptions run;
  std::int64_t shrink = 0;
  double tolerance = 0;
};

double tolerance_of(DataType dtype) {
  switch (dtype) {
    case DataType::bfloat16: return 1e-2;
    case DataType::float32: return 2e-5;
    default: return 1e-12;
  }
}

// By how much a layer's sizes must be divided so that the reference takes seconds.
std::int64_t automatic_shrink(const LayerConfig& config, std::int64_t tokens) {
  constexpr double most_weights = 1.5e7, most_operations = 2e10;
  std::int64_t factor = 1;
  for (; factor < 1024; factor *= 2) {
    const LayerConfig smaller = shrunk(config, factor);
    const double routes = static_cast<double>(tokens * config.top_k);
    if (weight_bytes(smaller, 1) <= most_weights &&
        3 * forward_flops(smaller, routes, static_cast<double>(tokens)) <= most_operations) {
      break;
    }
  }
  return factor;
}

reference::Weights weights_of(const Weights& w) {
  const auto one = [](const TensorView& view) { return view.given() ? to_doubles(view) : std::vector<double>{}; };
  reference::Weights made{one(w.gate_up_proj), one(w.gate_up_bias), one(w.down_proj), one(w.down_bias), {}};
  for (const Weights::Shared& s : w.shared) {
    made.shared.push_back({one(s.gate_up_proj), one(s.gate_up_bias), one(s.down_proj), one(s.down_bias)});
  }
  return made;
}

std::vector<std::int64_t> ids_of(const TensorView& view) {
  const auto* data = static_cast<const std::int32_t*>(view.data);
  return {data, data + view.numel()};
}

class Checker {
 public:
  explicit Checker(double tolerance) : tolerance_(tolerance) {}

  void compare(const std::string& name, const TensorView& actual, const std::vector<double>& expected) {
    const std::int64_t columns = actual.shape[static_cast<std::size_t>(actual.rank - 1)];
    if (expected.empty() && actual.numel() == 0) return add(name, {});
    const bool may_cancel = name.rfind("d_", 0) == 0 && name != "d_x";
    add(name,
        reference::compare(to_doubles(actual), expected, columns,
                           may_cancel ? reference::scale_floor : reference::row_floor),
        tolerance_, may_cancel ? 2 * tolerance_ : tolerance_);
  }
  // Whole numbers: any difference is an error; rel_fro is the share of rows that differ.
  template <class T>
  void equal(const std::string& name, const std::vector<T>& actual, const std::vector<T>& expected,
             std::int64_t columns) {
    reference::Comparison result;
    std::int64_t rows = static_cast<std::int64_t>(expected.size()) / std::max<std::int64_t>(columns, 1), bad = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t begin = r * columns, end = begin + columns;
      if (std::equal(actual.begin() + begin, actual.begin() + end, expected.begin() + begin)) continue;
      if (bad++ == 0) result.worst_row_index = r;
    }
    if (bad > 0) {
      result.rel_fro = static_cast<double>(bad) / static_cast<double>(rows);
      result.worst_row = 1.0;
    }
    add(name, result);
  }

  struct Result {
    std::string name;
    reference::Comparison error;
    bool right;
  };
  bool pass() const { return pass_; }
  const std::vector<Result>& results() const { return results_; }

 private:
  void add(const std::string& name, const reference::Comparison& error, double tolerance = 0.0,
           double row_tolerance = 0.0) {
    const bool right = error.rel_fro <= tolerance && error.worst_row <= row_tolerance;
    pass_ &= right;
    results_.push_back({name, error, right});
  }
  double tolerance_;
  bool pass_ = true;
  std::vector<Result> results_;
};

int run_check(const Streams& streams, const CheckOptions& o) {
  LayerConfig config = layer_config(o.layer, plain_layer(256, 128, 16, 4));
  const std::int64_t tokens = o.run.tokens > 0 ? o.run.tokens : 192;
  std::int64_t shrink = o.shrink;
  if (shrink == 0) shrink = o.layer.named() ? automatic_shrink(config, tokens) : 1;
  config = shrunk(config, shrink);
  config.validate();
  const double tolerance = o.tolerance > 0 ? o.tolerance : tolerance_of(config.dtype);
  // Weights and gradients in dtype, and in the reference's float64 as well.
  require_memory(2 * weight_bytes(config, static_cast<double>(size_of(config.dtype)) + 8), "the check");

  const Plan plan = Plan::create(config, plan_options(o.run, tokens));
  Problem problem = make_problem(config, tokens, o.run.routes(), o.run.entry == "ids" ? Entry::ids : Entry::logits, 1);
  const auto& [inputs, output_gradients] = problem.variants[0];
  {
    const PlacedProblem placed(problem, plan.options().device, plan.buffer_sizes(tokens));
    const auto& [in, up] = placed.variants()[0];
    plan.forward(in, placed.outputs(), placed.saved(), placed.workspace());
    plan.backward(in, placed.saved(), up, placed.gradients(), placed.workspace());
    placed.fetch_outputs();
    placed.fetch_gradients();
  }

  const auto one = [](const TensorView& view) { return view.given() ? to_doubles(view) : std::vector<double>{}; };
  const reference::Weights weights = weights_of(inputs.weights);
  reference::Inputs in;
  in.tokens = tokens;
  in.x = one(inputs.x);
  in.router_logits = one(inputs.router_logits);
  if (inputs.topk_ids.given()) in.topk_ids = ids_of(inputs.topk_ids);
  in.topk_weights = one(inputs.topk_weights);
  in.selection_bias = one(inputs.selection_bias);
  in.shared_gate_logits = one(inputs.shared_gate_logits);
  const reference::OutputGradients upstream{
      one(output_gradients.y), {}, one(output_gradients.aux_loss), one(output_gradients.z_loss)};
  const auto start = std::chrono::steady_clock::now();
  const reference::ReferenceResult expected = reference::forward(config, weights, in, o.run.threads);
  const reference::ReferenceGradients gradients = reference::backward(config, weights, in, upstream, o.run.threads);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  Checker checker(tolerance);
  const Outputs& out = problem.outputs;
  checker.equal("topk_ids", ids_of(out.topk_ids), expected.topk_ids, config.top_k);
  checker.equal("expert_counts", to_doubles(out.expert_counts),
                std::vector<double>(expected.expert_counts.begin(), expected.expert_counts.end()), 1);
  checker.compare("y", out.y, expected.y);
  checker.compare("topk_weights", out.topk_weights, expected.topk_weights);
  if (out.aux_loss.given()) checker.compare("aux_loss", out.aux_loss, expected.aux_loss);
  if (out.z_loss.given()) checker.compare("z_loss", out.z_loss, expected.z_loss);
  const auto expected_gradient = [&](const std::string& name) -> const std::vector<double>& {
    if (name == "d_x") return gradients.x;
    if (name == "d_router_logits") return gradients.router_logits;
    if (name == "d_topk_weights") return gradients.topk_weights;
    if (name == "d_shared_gate_logits") return gradients.shared_gate_logits;
    const auto of = [&](const auto& w) -> const std::vector<double>& {
      if (name.ends_with("gate_up_proj")) return w.gate_up_proj;
      if (name.ends_with("gate_up_bias")) return w.gate_up_bias;
      return name.ends_with("down_proj") ? w.down_proj : w.down_bias;
    };
    if (name.rfind("d_shared.", 0) != 0) return of(gradients.weights);
    return of(gradients.weights.shared[static_cast<std::size_t>(std::stoul(name.substr(9)))]);
  };
  for_each_gradient(problem.gradients, [&](const std::string& name, const TensorView& view) {
    checker.compare(name, view, expected_gradient(name));
  });

  if (o.run.json) {
    // JSON has no infinity: the largest double stands for it.
    const auto finite = [](double value) { return std::isfinite(value) ? value : std::numeric_limits<double>::max(); };
    Json tensors = Json::object();
    for (const auto& [name, error, right] : checker.results()) {
      tensors[name] = {{"rel_fro", finite(error.rel_fro)},
                       {"worst_row", finite(error.worst_row)},
                       {"worst_row_index", error.worst_row_index},
                       {"pass", right}};
    }
    streams.out << Json{{"pass", checker.pass()},    {"tolerance", tolerance},
                        {"device", o.run.device},    {"tokens", tokens},
                        {"shrink", shrink},          {"seed", o.run.seed},
                        {"routing", o.run.routing},  {"entry", inputs.router_logits.given() ? "logits" : "ids"},
                        {"config", to_json(config)}, {"tensors", tensors}}
                       .dump(2)
                << "\n";
  } else {
    fmt::print(streams.out, "{}, T {}, routing {}, seed {}\n", summary(config), tokens, o.run.routing, o.run.seed);
    if (shrink > 1) fmt::print(streams.out, "sizes divided by {} (--shrink 1 for the full layer)\n", shrink);
    fmt::print(streams.out,
               "against the fp64 reference ({:.1f} s); allowed error {:.0e} (rows of gradients of weights and router: "
               "twice that), "
               "ids and counts exact\n\n",
               seconds, tolerance);
    fmt::print(streams.out, "{:<24} {:>10} {:>10} {:>8}\n", "tensor", "error", "worst row", "at row");
    for (const auto& [name, error, right] : checker.results()) {
      fmt::print(streams.out, "{:<24} {:>10.2e} {:>10.2e} {:>8}{}\n", name, error.rel_fro, error.worst_row,
                 error.worst_row_index, right ? "" : "   WRONG");
    }
    fmt::print(streams.out, "\n{}\n", checker.pass() ? "pass" : "FAIL");
  }
  return checker.pass() ? success : check_failed;
}

}  // namespace

void add_check(CLI::App& program, Streams streams, Run& run) {
  auto* command = program.add_subcommand(
      "check", "forward and backward against the fp64 reference; exit status 1 if a result is wrong");
  auto options = std::make_shared<CheckOptions>();
  add_layer_options(*command, options->layer);
  add_run_options(*command, options->run);
  command
      ->add_option("--shrink", options->shrink,
                   "divide H and the intermediate sizes by this; 0: for a preset or a file as it takes to finish in "
                   "seconds, otherwise 1")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1024}))
      ->capture_default_str();
  command
      ->add_option("--tolerance", options->tolerance,
                   "allowed error of each tensor and row (rows of gradients of weights and router: twice that); 0: "
                   "1e-2 (bfloat16), 2e-5 (float32), 1e-12 (float64)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->callback([=, &run] { run = [=] { return run_check(streams, *options); }; });
}

}  // namespace moelith::tools
