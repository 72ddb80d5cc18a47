// Options that several subcommands share, and the LayerConfig that they describe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "moelith/layer.hpp"
#include "routes.hpp"

namespace CLI {
class App;
}

namespace moelith::tools {

using Json = nlohmann::ordered_json;

// --preset, --config and every field of LayerConfig. A field given by itself wins over the preset or the file.
struct LayerOptions {
  std::string preset, config_file;
  std::optional<std::int64_t> hidden_size, intermediate_size;
  std::optional<std::int32_t> num_experts, top_k;
  std::optional<std::string> activation, router, weight_placement, aux_loss, drop_policy;
  std::optional<double> activation_limit, scaling_factor, aux_coefficient, z_coefficient, capacity_factor;
  std::optional<bool> gate_up_bias, down_bias, renormalize, selection_bias;
  std::optional<std::int32_t> groups, top_groups, group_score_size;
  std::optional<std::vector<std::int64_t>> shared_widths;
  std::optional<bool> shared_gate;
  std::string dtype = "bfloat16";

  bool named() const { return !preset.empty() || !config_file.empty(); }
};
void add_layer_options(CLI::App& command, LayerOptions& options);

// What the options say, on top of `plain` where neither a preset nor a file is named. Valid. Throws Error.
LayerConfig layer_config(const LayerOptions& options, const LayerConfig& plain);

// A layer of these sizes, everything else as by default: what a command takes where none is named.
LayerConfig plain_layer(std::int64_t hidden_size, std::int64_t intermediate_size, std::int32_t num_experts, std::int32_t top_k);

// The layer with hidden_size and all intermediate sizes divided by `factor`, rounded up to multiples of 8.
LayerConfig shrunk(LayerConfig config, std::int64_t factor);

// Where and how it runs.
struct RunOptions {
  std::string device = "cpu";
  int threads = 0;          // 0: all that the process may use
  std::int64_t tokens = 0;  // 0: chosen by the command
  std::uint64_t seed = 1;
  std::string routing = "uniform", routing_file, entry = "logits";
  double zipf_exponent = 1.0;
  bool recompute = false;
  bool json = false;

  RouteSpec routes() const;
};
void add_run_options(CLI::App& command, RunOptions& options);
// --shrink, for a layer that is shrunk() by it.
void add_shrink_option(CLI::App& command, std::int64_t& shrink);
// CPU threads: --threads, or all that the process may use.
int threads_of(const RunOptions& options);
void add_json_option(CLI::App& command, bool& json);

// throws Error(invalid_argument) for a name that is no device.
DeviceKind device_kind(const std::string& name);
PlanOptions plan_options(const RunOptions& options, std::int64_t tokens);

// All fields, under the names of config.hpp.
Json to_json(const LayerConfig& config);
// "H 2048, I 1024, E 64, k 8, swiglu, softmax_topk, bfloat16".
std::string summary(const LayerConfig& config);

// Multiply-adds of the three products of a forward, counted as 2 floating-point operations each; `routes` routed rows
// and `tokens` rows of the shared experts. A backward without recomputing makes twice as many.
double forward_flops(const LayerConfig& config, double routes, double tokens);

}  // namespace moelith::tools
