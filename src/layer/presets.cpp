#include "moelith/presets.hpp"

namespace moelith {
namespace {

// Sizes of a model without shared experts or biases; the router is set by the caller.
ModelPreset sized(const char* name, const char* model, int num_layers, int num_moe_layers, std::int64_t hidden_size,
                  std::int64_t intermediate_size, std::int32_t num_experts, std::int32_t top_k, const char* source) {
  ModelPreset made;
  made.name = name;
  made.model = model;
  made.num_layers = num_layers;
  made.num_moe_layers = num_moe_layers;
  made.config.hidden_size = hidden_size;
  made.config.intermediate_size = intermediate_size;
  made.config.num_experts = num_experts;
  made.config.top_k = top_k;
  made.source = source;
  return made;
}

ModelPreset with_softmax(ModelPreset made, bool renormalize) {
  made.config.router.kind = RouterKind::softmax_topk;
  made.config.router.renormalize = renormalize;
  return made;
}

// DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2) and one shared expert as wide as the routed ones; Kimi K2 and
// GLM-4.5 took them over with other numbers.
ModelPreset with_sigmoid(ModelPreset made, double scaling_factor, std::int32_t num_groups, std::int32_t top_groups) {
  RouterConfig& router = made.config.router;
  router.kind = RouterKind::sigmoid;
  router.renormalize = true;
  router.selection_bias = true;
  router.scaling_factor = scaling_factor;
  router.num_groups = num_groups;
  router.top_groups = top_groups;
  made.config.shared_experts = {{made.config.intermediate_size, false}};
  return made;
}

// GPT-OSS (arXiv 2508.10925): both biases, the clamped SwiGLU with its published limit and alpha.
ModelPreset with_gpt_oss(ModelPreset made) {
  made.config.router.kind = RouterKind::topk_softmax;
  made.config.activation = {ActivationKind::swiglu_clamped, 7.0, 1.702, 1.0};
  made.config.gate_up_bias = made.config.down_bias = true;
  return made;
}

std::vector<ModelPreset> make_presets() {
  //            name, model, layers, with experts, H, I, E, k, source
  return {
      with_softmax(sized("mixtral-8x7b", "Mixtral 8x7B", 32, 32, 4096, 14336, 8, 2,
                         "arXiv 2401.04088, table 1; config.json of mistralai/Mixtral-8x7B-v0.1"),
                   true),
      with_softmax(sized("qwen3-30b-a3b", "Qwen3-30B-A3B", 48, 48, 2048, 768, 128, 8,
                         "arXiv 2505.09388, table 2; config.json of Qwen/Qwen3-30B-A3B"),
                   true),
      with_softmax(sized("qwen3-235b-a22b", "Qwen3-235B-A22B", 94, 94, 4096, 1536, 128, 8,
                         "arXiv 2505.09388, table 2; config.json of Qwen/Qwen3-235B-A22B"),
                   true),
      with_gpt_oss(sized("gpt-oss-20b", "GPT-OSS 20B", 24, 24, 2880, 2880, 32, 4,
                         "arXiv 2508.10925; config.json of openai/gpt-oss-20b")),
      with_gpt_oss(sized("gpt-oss-120b", "GPT-OSS 120B", 36, 36, 2880, 2880, 128, 4,
                         "arXiv 2508.10925; config.json of openai/gpt-oss-120b")),
      with_sigmoid(sized("deepseek-v3", "DeepSeek-V3", 61, 58, 7168, 2048, 256, 8,
                         "arXiv 2412.19437, section 4.2; config.json of deepseek-ai/DeepSeek-V3"),
                   2.5, 8, 4),
      with_sigmoid(sized("kimi-k2", "Kimi K2", 61, 60, 7168, 2048, 384, 8,
                         "arXiv 2507.20534, section 2.3; config.json of moonshotai/Kimi-K2-Instruct"),
                   2.827, 1, 1),
      with_sigmoid(sized("glm-4.5", "GLM-4.5", 92, 89, 5120, 1536, 160, 8,
                         "arXiv 2508.06471, table 1; config.json of zai-org/GLM-4.5"),
                   2.5, 1, 1),
      with_softmax(sized("olmoe", "OLMoE 1B-7B", 16, 16, 2048, 1024, 64, 8,
                         "arXiv 2409.02060, table 1; config.json of allenai/OLMoE-1B-7B-0924"),
                   false),
  };
}

}  // namespace

const std::vector<ModelPreset>& presets() {
  static const std::vector<ModelPreset> all = make_presets();
  return all;
}

const ModelPreset& preset(const std::string& name) {
  std::string names;
  for (const ModelPreset& known : presets()) {
    if (known.name == name) return known;
    names += (names.empty() ? "" : ", ") + known.name;
  }
  throw Error(Status::invalid_argument, "preset is \"" + name + "\"; accepted: " + names);
}

}  // namespace moelith
