// `moelith presets`: the layers of published models.
#include <memory>
#include <ostream>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include "command_line.hpp"
#include "moelith/presets.hpp"
#include "options.hpp"
#include "random_problem.hpp"

namespace moelith::tools {
namespace {

Json to_json(const ModelPreset& model) {
  return {{"name", model.name},
          {"model", model.model},
          {"num_layers", model.num_layers},
          {"num_moe_layers", model.num_moe_layers},
          {"weights_of_a_layer_bytes", weight_bytes(model.config, static_cast<double>(size_of(model.config.dtype)))},
          {"config", tools::to_json(model.config)},
          {"source", model.source}};
}

std::string router_text(const RouterConfig& r) {
  std::string text = to_string(r.kind);
  if (r.renormalize) text += ", renormalised";
  if (r.selection_bias) text += ", selection bias";
  if (r.num_groups > 1) text += fmt::format(", {} of {} groups", r.top_groups, r.num_groups);
  if (r.scaling_factor != 1.0) text += fmt::format(", x {}", r.scaling_factor);
  return text;
}

void print_table(std::ostream& out, const std::vector<ModelPreset>& models) {
  fmt::print(out, "{:<16} {:>6} {:>6} {:>5} {:>3} {:>7} {:>9} {:>8}  {:<16} {}\n", "name", "H", "I", "E", "k", "shared",
             "of layers", "bf16 GB", "activation", "router");
  for (const ModelPreset& m : models) {
    const LayerConfig& c = m.config;
    std::string shared;
    for (const SharedExpertConfig& s : c.shared_experts)
      shared += fmt::format("{}{}", shared.empty() ? "" : "+", s.intermediate_size);
    fmt::print(out, "{:<16} {:>6} {:>6} {:>5} {:>3} {:>7} {:>9} {:>8.2f}  {:<16} {}\n", m.name, c.hidden_size,
               c.intermediate_size, c.num_experts, c.top_k, shared.empty() ? "-" : shared,
               fmt::format("{}/{}", m.num_moe_layers, m.num_layers), weight_bytes(c, 2) * 1e-9,
               std::string(to_string(c.activation.kind)) + (c.gate_up_bias ? "+bias" : ""), router_text(c.router));
  }
  fmt::print(out, "\nsources\n");
  for (const ModelPreset& m : models) fmt::print(out, "  {:<16} {}\n", m.name, m.source);
}

}  // namespace

void add_presets(CLI::App& program, Streams streams, Run& run) {
  struct Options {
    std::string name, config_file;
    bool json = false;
  };
  auto* command = program.add_subcommand("presets", "layers of published models, or of a Hugging Face config.json");
  auto options = std::make_shared<Options>();
  auto* name = command->add_option("name", options->name, "one of them alone");
  command->add_option("--config", options->config_file, "a Hugging Face config.json, or its folder")->excludes(name);
  add_json_option(*command, options->json);
  command->callback([=, &run] {
    run = [=] {
      std::vector<ModelPreset> models = presets();
      if (!options->name.empty()) models = {preset(options->name)};
      if (!options->config_file.empty()) models = {read_hugging_face_config(options->config_file)};
      if (options->json) {
        Json list = Json::array();
        for (const ModelPreset& model : models) list.push_back(to_json(model));
        streams.out << Json{{"presets", list}}.dump(2) << "\n";
      } else {
        print_table(streams.out, models);
      }
      return success;
    };
  });
}

}  // namespace moelith::tools
