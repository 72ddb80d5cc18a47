#include "moelith/presets.hpp"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace moelith {
namespace {

// Parameters of the experts of one layer, shared ones included, without the router.
std::int64_t expert_parameters(const LayerConfig& c) {
  const auto ffn = [&](std::int64_t width) {
    return c.gate_up_rows(width) * c.hidden_size + c.hidden_size * width +
           (c.gate_up_bias ? c.gate_up_rows(width) : 0) + (c.down_bias ? c.hidden_size : 0);
  };
  std::int64_t sum = c.num_experts * ffn(c.intermediate_size);
  for (const SharedExpertConfig& shared : c.shared_experts) sum += ffn(shared.intermediate_size);
  return sum;
}

TEST(Presets, EveryOneIsValidAndHasItsSource) {
  ASSERT_EQ(presets().size(), 9u);
  for (const ModelPreset& model : presets()) {
    SCOPED_TRACE(model.name);
    EXPECT_NO_THROW(model.config.validate());
    EXPECT_NE(model.source.find("arXiv"), std::string::npos);
    EXPECT_GE(model.num_layers, model.num_moe_layers);
    EXPECT_EQ(&preset(model.name), &model);
  }
}

// The parameters of all experts of the model, against the size that its name or its report gives (most of a MoE model
// is its experts).
TEST(Presets, ExpertsMakeUpTheKnownSizeOfTheModel) {
  const struct {
    const char* name;
    double billions_at_least, billions_at_most;
  } cases[] = {
      {"mixtral-8x7b", 44, 46.7},  {"qwen3-30b-a3b", 28, 30.5},  {"qwen3-235b-a22b", 220, 235},
      {"gpt-oss-20b", 18.5, 20.9}, {"gpt-oss-120b", 113, 116.9}, {"deepseek-v3", 650, 671},
      {"kimi-k2", 1000, 1043},     {"glm-4.5", 330, 355},        {"olmoe", 6, 6.9},
  };
  for (const auto& [name, least, most] : cases) {
    const ModelPreset& model = preset(name);
    const double billions = 1e-9 * static_cast<double>(expert_parameters(model.config) * model.num_moe_layers);
    EXPECT_GE(billions, least) << name;
    EXPECT_LE(billions, most) << name;
  }
}

TEST(Presets, AnUnknownNameListsTheKnownOnes) {
  try {
    preset("mixtral");
    FAIL() << "an unknown preset was found";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_STREQ(error.what(),
                 "preset is \"mixtral\"; accepted: mixtral-8x7b, qwen3-30b-a3b, qwen3-235b-a22b, gpt-oss-20b, "
                 "gpt-oss-120b, deepseek-v3, kimi-k2, glm-4.5, olmoe");
  }
}

void expect_same_layer(const LayerConfig& a, const LayerConfig& b) {
  EXPECT_EQ(a.hidden_size, b.hidden_size);
  EXPECT_EQ(a.intermediate_size, b.intermediate_size);
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.top_k, b.top_k);
  EXPECT_EQ(a.activation.kind, b.activation.kind);
  EXPECT_EQ(a.activation.limit, b.activation.limit);
  EXPECT_EQ(a.activation.alpha, b.activation.alpha);
  EXPECT_EQ(a.gate_up_bias, b.gate_up_bias);
  EXPECT_EQ(a.down_bias, b.down_bias);
  ASSERT_EQ(a.shared_experts.size(), b.shared_experts.size());
  for (std::size_t s = 0; s < a.shared_experts.size(); ++s) {
    EXPECT_EQ(a.shared_experts[s].intermediate_size, b.shared_experts[s].intermediate_size);
    EXPECT_EQ(a.shared_experts[s].gated, b.shared_experts[s].gated);
  }
  EXPECT_EQ(a.router.kind, b.router.kind);
  EXPECT_EQ(a.router.renormalize, b.router.renormalize);
  EXPECT_EQ(a.router.scaling_factor, b.router.scaling_factor);
  EXPECT_EQ(a.router.selection_bias, b.router.selection_bias);
  EXPECT_EQ(a.router.num_groups, b.router.num_groups);
  EXPECT_EQ(a.router.top_groups, b.router.top_groups);
  EXPECT_EQ(a.router.group_score_size, b.router.group_score_size);
}

// The fields of the published config.json files that concern the layer.
TEST(HuggingFaceConfig, PublishedFilesGiveThePresets) {
  const struct {
    const char* name;
    const char* json;
  } cases[] = {
      {"mixtral-8x7b",
       R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
           "intermediate_size": 14336, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_local_experts": 8,
           "router_aux_loss_coef": 0.02, "sliding_window": null, "torch_dtype": "bfloat16"})"},
      {"qwen3-30b-a3b",
       R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
           "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
           "moe_intermediate_size": 768, "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8,
           "num_hidden_layers": 48})"},
      {"gpt-oss-20b",
       R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu", "hidden_size": 2880,
           "intermediate_size": 2880, "experts_per_token": 4, "num_experts_per_tok": 4, "num_hidden_layers": 24,
           "num_local_experts": 32, "swiglu_limit": 7.0})"},
      {"deepseek-v3",
       R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3,
           "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
           "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
           "num_experts_per_tok": 8, "num_hidden_layers": 61, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
           "topk_group": 4, "topk_method": "noaux_tc"})"},
      {"kimi-k2",
       R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "first_k_dense_replace": 1,
           "hidden_act": "silu", "hidden_size": 7168, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
           "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8,
           "num_hidden_layers": 61, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1,
           "topk_method": "noaux_tc"})"},
      {"glm-4.5",
       R"({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "first_k_dense_replace": 3,
           "hidden_act": "silu", "hidden_size": 5120, "moe_intermediate_size": 1536, "n_group": 1,
           "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8,
           "num_hidden_layers": 92, "routed_scaling_factor": 2.5, "topk_group": 1})"},
      {"olmoe",
       R"({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_act": "silu", "hidden_size": 2048,
           "intermediate_size": 1024, "norm_topk_prob": false, "num_experts": 64, "num_experts_per_tok": 8,
           "num_hidden_layers": 16})"},
  };
  for (const auto& [name, json] : cases) {
    SCOPED_TRACE(name);
    const ModelPreset read = model_from_hugging_face(json);
    expect_same_layer(read.config, preset(name).config);
    EXPECT_EQ(read.num_layers, preset(name).num_layers);
    EXPECT_EQ(read.num_moe_layers, preset(name).num_moe_layers);
  }
}

TEST(HuggingFaceConfig, SharedExpertsOfQwen2AndDeepSeekV2) {
  const ModelPreset qwen = model_from_hugging_face(
      R"({"model_type": "qwen2_moe", "hidden_size": 2048, "moe_intermediate_size": 1408, "num_experts": 60,
          "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_hidden_layers": 24,
          "decoder_sparse_step": 2, "mlp_only_layers": [1]})");
  ASSERT_EQ(qwen.config.shared_experts.size(), 1u);
  EXPECT_EQ(qwen.config.shared_experts[0].intermediate_size, 5632);
  EXPECT_TRUE(qwen.config.shared_experts[0].gated);
  EXPECT_FALSE(qwen.config.router.renormalize);
  EXPECT_EQ(qwen.num_moe_layers, 11);

  const ModelPreset deepseek = model_from_hugging_face(
      R"({"model_type": "deepseek_v2", "hidden_size": 5120, "moe_intermediate_size": 1536, "n_routed_experts": 160,
          "n_shared_experts": 2, "num_experts_per_tok": 6, "num_hidden_layers": 60, "first_k_dense_replace": 1,
          "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0})");
  ASSERT_EQ(deepseek.config.shared_experts.size(), 1u);
  EXPECT_EQ(deepseek.config.shared_experts[0].intermediate_size, 3072);
  EXPECT_FALSE(deepseek.config.shared_experts[0].gated);
  EXPECT_EQ(deepseek.config.router.group_score_size, 1);
  EXPECT_EQ(deepseek.config.router.num_groups, 8);
  EXPECT_EQ(deepseek.num_moe_layers, 59);
}

TEST(HuggingFaceConfig, TheLanguagePartOfALargerModelIsFound) {
  const ModelPreset read = model_from_hugging_face(
      R"({"model_type": "some_vision_model", "text_config": {"model_type": "olmoe", "hidden_size": 64,
          "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}})");
  EXPECT_EQ(read.name, "olmoe");
  EXPECT_EQ(read.config.hidden_size, 64);
}

std::string error_of(const std::string& json) {
  try {
    model_from_hugging_face(json);
  } catch (const Error& error) { return error.what(); }
  return "accepted";
}

TEST(HuggingFaceConfig, BadFilesAreErrorsThatNameTheField) {
  EXPECT_EQ(error_of("{"), "config.json: the text is no JSON");
  EXPECT_EQ(error_of("[]"), "config.json: the text is no JSON object");
  EXPECT_EQ(error_of(R"({"model_type": "llama"})"),
            "config.json: \"model_type\" is \"llama\"; accepted: mixtral, olmoe, qwen2_moe, qwen3_moe, qwen3_next, "
            "gpt_oss, deepseek_v2, deepseek_v3, kimi_k2, glm4_moe");
  EXPECT_EQ(error_of(R"({"model_type": 3})"), "config.json: \"model_type\" is 3; accepted: a text");
  EXPECT_EQ(error_of(R"({"model_type": "olmoe", "intermediate_size": 8})"),
            "config.json: \"hidden_size\" is missing; accepted: a whole number");
  EXPECT_EQ(error_of(R"({"model_type": "olmoe", "hidden_size": "64"})"),
            "config.json: \"hidden_size\" is \"64\"; accepted: a whole number");
  EXPECT_EQ(error_of(R"({"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 30, "num_experts": 4,
                         "num_experts_per_tok": 2})"),
            "config.json: intermediate_size is 30; accepted: a multiple of 8 from 8 to 1048576");
  EXPECT_EQ(error_of(R"({"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_experts": 4,
                         "num_experts_per_tok": 2, "hidden_act": "relu"})"),
            "config.json: \"hidden_act\" is \"relu\"; accepted: silu, swish, gelu, gelu_new, gelu_pytorch_tanh, "
            "gelu_fast");
  EXPECT_EQ(error_of(R"({"model_type": "olmoe", "num_hidden_layers": -1})"),
            "config.json: \"num_hidden_layers\" is -1; accepted: 1 to 100000");
}

TEST(HuggingFaceConfig, IsReadFromAFileOrItsFolder) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / ("moelith_presets_test_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << R"({"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32,
                                               "num_experts": 4, "num_experts_per_tok": 2})";
  EXPECT_EQ(read_hugging_face_config(folder.string()).config.num_experts, 4);
  EXPECT_EQ(read_hugging_face_config((folder / "config.json").string()).config.num_experts, 4);
  std::filesystem::remove_all(folder);
  EXPECT_THROW(read_hugging_face_config(folder.string()), Error);
}

}  // namespace
}  // namespace moelith
