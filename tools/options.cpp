#include "options.hpp"
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "executors/cpu/thread_pool.hpp"
#include "moelith/presets.hpp"

namespace moelith::tools {

void add_layer_options(CLI::App& command, LayerOptions& o) {
  auto* preset = command.add_option("--preset", o.preset, "the layer of a published model: see `moelith presets`");
  auto* file = command.add_option("--config", o.config_file, "a Hugging Face config.json, or its folder");
  preset->excludes(file);
  const std::string group = "Layer (over what --preset or --config says)";
  auto add = [&](const char* name, auto& value, const std::string& text) {
    command.add_option(name, value, text)->group(group);
  };
  add("--hidden-size,-H", o.hidden_size, "H, a multiple of 8");
  add("--intermediate-size,-I", o.intermediate_size, "I, a multiple of 8");
  add("--num-experts,-E", o.num_experts, "E, 1 to " + std::to_string(limits::num_experts));
  add("--top-k,-k", o.top_k, "k, 1 to min(E, 32)");
  add("--activation", o.activation, "swiglu, swiglu_clamped, geglu_erf, geglu_tanh, relu_squared");
  add("--activation-limit", o.activation_limit, "of swiglu_clamped");
  add("--gate-up-bias", o.gate_up_bias, "true, false");
  add("--down-bias", o.down_bias, "true, false");
  add("--weight-placement", o.weight_placement, "after_down, before_down");
  add("--shared-expert", o.shared_widths, "width of a shared expert; several for several; 0 for none");
  add("--shared-gate", o.shared_gate, "true, false: a sigmoid gate for each shared expert");
  add("--router", o.router, "softmax_topk, topk_softmax, sigmoid");
  add("--renormalize", o.renormalize, "true, false");
  add("--scaling-factor", o.scaling_factor, "of the routed weights");
  add("--selection-bias", o.selection_bias, "true, false: a bias that counts for the choice alone");
  add("--groups", o.groups, "groups of experts");
  add("--top-groups", o.top_groups, "groups kept");
  add("--group-score-size", o.group_score_size, "1, 2: experts that make a group's score");
  add("--aux-loss", o.aux_loss, "none, batch, sequence, global");
  add("--aux-coefficient", o.aux_coefficient, "of the aux loss");
  add("--z-coefficient", o.z_coefficient, "of the z-loss");
  add("--capacity-factor", o.capacity_factor, "0: dropless");
  add("--drop-policy", o.drop_policy, "by_score, by_position");
  command.add_option("--dtype", o.dtype, "bfloat16, float32, float64 (CPU only)")->capture_default_str();
}

LayerConfig layer_config(const LayerOptions& o, const LayerConfig& plain) {
  LayerConfig c = plain;
  if (!o.preset.empty()) c = preset(o.preset).config;
  if (!o.config_file.empty()) c = read_hugging_face_config(o.config_file).config;
  c.dtype = data_type_from(o.dtype);

  auto set = [](auto& field, const auto& option) {
    if (option) field = *option;
  };
  set(c.hidden_size, o.hidden_size);
  set(c.intermediate_size, o.intermediate_size);
  set(c.num_experts, o.num_experts);
  set(c.top_k, o.top_k);
  if (o.activation) c.activation.kind = activation_kind_from(*o.activation);
  set(c.activation.limit, o.activation_limit);
  set(c.gate_up_bias, o.gate_up_bias);
  set(c.down_bias, o.down_bias);
  if (o.weight_placement) c.weight_placement = weight_placement_from(*o.weight_placement);
  if (o.shared_widths) {
    c.shared_experts.clear();
    for (const std::int64_t width : *o.shared_widths) {
      if (width != 0) c.shared_experts.push_back({width, false});
    }
  }
  if (o.shared_gate) {
    for (SharedExpertConfig& shared : c.shared_experts) shared.gated = *o.shared_gate;
  }
  RouterConfig& r = c.router;
  if (o.router) r.kind = router_kind_from(*o.router);
  set(r.renormalize, o.renormalize);
  set(r.scaling_factor, o.scaling_factor);
  set(r.selection_bias, o.selection_bias);
  set(r.num_groups, o.groups);
  set(r.top_groups, o.top_groups);
  set(r.group_score_size, o.group_score_size);
  if (o.aux_loss) r.aux_loss = aux_loss_kind_from(*o.aux_loss);
  set(r.aux_loss_coefficient, o.aux_coefficient);
  set(r.z_loss_coefficient, o.z_coefficient);
  set(r.capacity_factor, o.capacity_factor);
  if (o.drop_policy) r.drop_policy = drop_policy_from(*o.drop_policy);
  c.validate();
  return c;
}

LayerConfig plain_layer(std::int64_t hidden_size, std::int64_t intermediate_size, std::int32_t num_experts, std::int32_t top_k) {
  LayerConfig config;
  config.hidden_size = hidden_size;
  config.intermediate_size = intermediate_size;
  config.num_experts = num_experts;
  config.top_k = top_k;
  return config;
}

LayerConfig shrunk(LayerConfig config, std::int64_t factor) {
  auto divide = [&](std::int64_t& size) { size = (size + 8 * factor - 1) / (8 * factor) * 8; };
  divide(config.hidden_size);
  divide(config.intermediate_size);
  for (SharedExpertConfig& shared : config.shared_experts) divide(shared.intermediate_size);
  return config;
}

RouteSpec RunOptions::routes() const {
  RouteSpec spec;
  spec.kind = route_kind_from(routing);
  spec.zipf_exponent = zipf_exponent;
  spec.file = routing_file;
  spec.seed = seed;
  if (spec.kind == RouteKind::file && routing_file.empty()) {
    throw Error(Status::invalid_argument, "--routing file needs --routing-file");
  }
  if (spec.kind != RouteKind::file && !routing_file.empty()) {
    throw Error(Status::invalid_argument, "--routing-file needs --routing file, but --routing is " + routing);
  }
  return spec;
}

void add_shrink_option(CLI::App& command, std::int64_t& shrink) {
  command.add_option("--shrink", shrink, "divide H and the intermediate sizes by this")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1024}))
      ->capture_default_str();
}

int threads_of(const RunOptions& options) {
  return options.threads > 0 ? options.threads : executors::cpu::available_workers();
}

void add_json_option(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "one JSON object on standard output, for machines");
}

void add_run_options(CLI::App& command, RunOptions& o) {
  command.add_option("--device", o.device, "cpu, cuda")->capture_default_str();
  command.add_option("--threads", o.threads, "CPU threads, or SMs of the GPU; 0: all that the process may use")
      ->check(CLI::Range(0, limits::workers))
      ->capture_default_str();
  command.add_option("--tokens,-T", o.tokens, "tokens of a call; 0: chosen to take seconds")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 31))
      ->capture_default_str();
  command.add_option("--seed", o.seed, "of all random values")->capture_default_str();
  command
      .add_option("--routing", o.routing,
                  "balanced (as even as it can be), uniform (random), zipf (few experts take most), one-expert (one "
                  "takes every token), file")
      ->capture_default_str();
  command.add_option("--zipf-exponent", o.zipf_exponent, "--routing zipf: an expert's share falls as 1 / rank^this")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();
  command.add_option("--routing-file", o.routing_file, "--routing file: a line of k expert ids for each token");
  command.add_option("--entry", o.entry, "logits (the layer routes), ids (it gets topk_ids and topk_weights)")
      ->check(CLI::IsMember({"logits", "ids"}))
      ->capture_default_str();
  command.add_flag("--recompute", o.recompute, "keep x and the routing table alone; backward runs gate_up again");
  add_json_option(command, o.json);
}

DeviceKind device_kind(const std::string& name) {
  if (name == "cpu") return DeviceKind::cpu;
  if (name == "cuda") return DeviceKind::cuda;
  throw Error(Status::invalid_argument, "device is \"" + name + "\"; accepted: cpu, cuda");
}

PlanOptions plan_options(const RunOptions& options, std::int64_t tokens) {
  PlanOptions made;
  made.max_tokens = tokens;
  made.device = device_kind(options.device);
  made.workers = options.threads;
  made.recompute = options.recompute;
  return made;
}

Json to_json(const LayerConfig& c) {
  Json shared = Json::array();
  for (const SharedExpertConfig& s : c.shared_experts) {
    shared.push_back({{"intermediate_size", s.intermediate_size}, {"gated", s.gated}});
  }
  Json activation{{"kind", to_string(c.activation.kind)}};
  if (c.activation.kind == ActivationKind::swiglu_clamped) {
    activation["limit"] = c.activation.limit;
    activation["alpha"] = c.activation.alpha;
    activation["up_offset"] = c.activation.up_offset;
  }
  const RouterConfig& r = c.router;
  return {{"hidden_size", c.hidden_size},
          {"intermediate_size", c.intermediate_size},
          {"num_experts", c.num_experts},
          {"top_k", c.top_k},
          {"dtype", to_string(c.dtype)},
          {"activation", activation},
          {"gate_up_bias", c.gate_up_bias},
          {"down_bias", c.down_bias},
          {"weight_placement", to_string(c.weight_placement)},
          {"shared_experts", shared},
          {"router",
           {{"kind", to_string(r.kind)},
            {"renormalize", r.renormalize},
            {"scaling_factor", r.scaling_factor},
            {"selection_bias", r.selection_bias},
            {"num_groups", r.num_groups},
            {"top_groups", r.top_groups},
            {"group_score_size", r.group_score_size},
            {"aux_loss", to_string(r.aux_loss)},
            {"aux_loss_coefficient", r.aux_loss_coefficient},
            {"z_loss_coefficient", r.z_loss_coefficient},
            {"capacity_factor", r.capacity_factor},
            {"drop_policy", to_string(r.drop_policy)}}}};
}

std::string summary(const LayerConfig& c) {
  std::string text =
      fmt::format("H {}, I {}, E {}, k {}, {}, {}, {}", c.hidden_size, c.intermediate_size, c.num_experts, c.top_k,
                  to_string(c.activation.kind), to_string(c.router.kind), to_string(c.dtype));
  for (const SharedExpertConfig& shared : c.shared_experts) {
    text += fmt::format(", shared expert of {}{}", shared.intermediate_size, shared.gated ? " (gated)" : "");
  }
  return text;
}

double forward_flops(const LayerConfig& c, double routes, double tokens) {
  const auto row = [&](std::int64_t width) {
    return 2.0 * static_cast<double>(c.hidden_size) * static_cast<double>(c.gate_up_rows(width) + width);
  };
  double flops = routes * row(c.intermediate_size);
  for (const SharedExpertConfig& shared : c.shared_experts) flops += tokens * row(shared.intermediate_size);
  return flops;
}

}  // namespace moelith::tools
