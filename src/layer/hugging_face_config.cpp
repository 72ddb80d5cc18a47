// Hugging Face's config.json -> LayerConfig. The meaning of the fields, and the defaults of those left out, follow the
// configuration classes and the blocks of the transformers package (models/*/configuration_*.py, modeling_*.py) of each
// model_type; python/tests/test_hugging_face_config.py compares with them.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "moelith/presets.hpp"

namespace moelith {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, "config.json: " + text); }
[[noreturn]] void cannot(const std::string& text) { throw Error(Status::unsupported, "config.json: " + text); }

// The fields of one config.json; null counts as left out, but where null_in is asked.
class Fields {
 public:
  explicit Fields(const Json& json) : json_(json) {}

  bool has(const char* name) const { return json_.contains(name) && !json_.at(name).is_null(); }
  bool null_in(const char* name) const { return json_.contains(name) && json_.at(name).is_null(); }

  std::int64_t integer(const char* name) const {
    if (!has(name)) refuse(std::string("\"") + name + "\" is missing; accepted: a whole number");
    const Json& value = json_.at(name);
    if (!value.is_number_integer()) {
      refuse(std::string("\"") + name + "\" is " + value.dump() + "; accepted: a whole number");
    }
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{1} << 62) {
      refuse(std::string("\"") + name + "\" is " + value.dump() + "; accepted: a number below 2^62");
    }
    return value.get<std::int64_t>();
  }
  // The first of two names that is there: some fields go by two names.
  std::int64_t integer(const char* name, const char* other) const { return has(name) ? integer(name) : integer(other); }
  std::int64_t integer_or(const char* name, std::int64_t otherwise) const {
    return has(name) ? integer(name) : otherwise;
  }
  // For fields of 32 bits; the range itself is checked by LayerConfig::validate.
  std::int32_t small(std::int64_t value, const char* name) const {
    if (value < -(std::int64_t{1} << 31) || value >= std::int64_t{1} << 31) {
      refuse(std::string("\"") + name + "\" is " + std::to_string(value) + "; accepted: a number of 32 bits");
    }
    return static_cast<std::int32_t>(value);
  }
  double number_or(const char* name, double otherwise) const {
    if (!has(name)) return otherwise;
    const Json& value = json_.at(name);
    if (!value.is_number()) refuse(std::string("\"") + name + "\" is " + value.dump() + "; accepted: a number");
    return value.get<double>();
  }
  bool flag_or(const char* name, bool otherwise) const {
    if (!has(name)) return otherwise;
    const Json& value = json_.at(name);
    if (!value.is_boolean()) refuse(std::string("\"") + name + "\" is " + value.dump() + "; accepted: true, false");
    return value.get<bool>();
  }
  std::string text_or(const char* name, const std::string& otherwise) const {
    if (!has(name)) return otherwise;
    const Json& value = json_.at(name);
    if (!value.is_string()) refuse(std::string("\"") + name + "\" is " + value.dump() + "; accepted: a text");
    return value.get<std::string>();
  }
  std::vector<std::int64_t> integers(const char* name) const {
    std::vector<std::int64_t> values;
    if (!has(name)) return values;
    const Json& array = json_.at(name);
    if (!array.is_array()) refuse(std::string("\"") + name + "\" is " + array.dump() + "; accepted: a list of numbers");
    for (const Json& value : array) {
      if (!value.is_number_integer()) {
        refuse(std::string("\"") + name + "\" holds " + value.dump() + "; accepted: whole numbers");
      }
      values.push_back(value.get<std::int64_t>());
    }
    return values;
  }

 private:
  const Json& json_;
};

ActivationKind activation_of(const Fields& fields) {
  const std::string name = fields.text_or("hidden_act", "silu");
  if (name == "silu" || name == "swish") return ActivationKind::swiglu;
  if (name == "gelu") return ActivationKind::geglu_erf;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return ActivationKind::geglu_tanh;
  refuse("\"hidden_act\" is \"" + name + "\"; accepted: silu, swish, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast");
}

// Sizes and activation under the names that the model_type has for them.
void read_sizes(const Fields& fields, const char* intermediate, const char* experts, const char* other_experts,
                LayerConfig& config) {
  config.hidden_size = fields.integer("hidden_size");
  config.intermediate_size = fields.integer(intermediate);
  config.num_experts = fields.small(fields.integer(experts, other_experts), experts);
  config.top_k = fields.small(fields.integer("num_experts_per_tok"), "num_experts_per_tok");
  config.activation.kind = activation_of(fields);
}

// Number of layers with experts, where the first few are dense and every n-th of the others is sparse.
int layers_after_dense(const Fields& fields, int layers, std::int64_t dense_by_default) {
  const std::int64_t first = fields.integer_or("first_k_dense_replace", dense_by_default);
  const std::int64_t every = fields.integer_or("moe_layer_freq", 1);
  if (every < 1) refuse("\"moe_layer_freq\" is " + std::to_string(every) + "; accepted: 1 or more");
  int count = 0;
  for (int i = 0; i < layers; ++i) count += i >= first && i % every == 0;
  return count;
}

int layers_by_step(const Fields& fields, int layers) {
  const std::int64_t step = fields.integer_or("decoder_sparse_step", 1);
  if (step < 1) refuse("\"decoder_sparse_step\" is " + std::to_string(step) + "; accepted: 1 or more");
  const std::vector<std::int64_t> dense = fields.integers("mlp_only_layers");
  int count = 0;
  for (int i = 0; i < layers; ++i) {
    count += (i + 1) % step == 0 && std::find(dense.begin(), dense.end(), i) == dense.end();
  }
  return count;
}

// null is false there.
bool renormalize_of(const Fields& fields, bool by_default) {
  return !fields.null_in("norm_topk_prob") && fields.flag_or("norm_topk_prob", by_default);
}

void read_softmax(const Fields& fields, bool renormalize_by_default, ModelPreset& made) {
  made.config.router.kind = RouterKind::softmax_topk;
  made.config.router.renormalize = renormalize_of(fields, renormalize_by_default);
}

// Only the families whose code has the loss read it.
void read_aux_loss(const Fields& fields, double by_default, ModelPreset& made) {
  made.aux_loss_coefficient = fields.number_or("router_aux_loss_coef", by_default);
}

void read_mixtral(const Fields& fields, ModelPreset& made) {
  read_sizes(fields, "intermediate_size", "num_local_experts", "num_experts", made.config);
  read_aux_loss(fields, 0.001, made);
  made.config.router.kind = RouterKind::softmax_topk;
  made.config.router.renormalize = true;  // always, there is no field for it
}

void read_olmoe(const Fields& fields, ModelPreset& made) {
  read_sizes(fields, "intermediate_size", "num_experts", "num_local_experts", made.config);
  read_softmax(fields, false, made);
  read_aux_loss(fields, 0.01, made);
}

void read_qwen(const Fields& fields, bool renormalize_by_default, ModelPreset& made) {
  read_sizes(fields, "moe_intermediate_size", "num_experts", "num_local_experts", made.config);
  read_softmax(fields, renormalize_by_default, made);
  read_aux_loss(fields, 0.001, made);
  made.num_moe_layers = layers_by_step(fields, made.num_layers);
}

// Qwen2-MoE and Qwen3-Next: one shared expert of its own width, with a sigmoid gate.
void read_gated_shared_expert(const Fields& fields, ModelPreset& made) {
  made.config.shared_experts = {{fields.integer("shared_expert_intermediate_size"), true}};
}

void read_qwen3(const Fields& fields, ModelPreset& made) { read_qwen(fields, false, made); }

void read_qwen2(const Fields& fields, ModelPreset& made) {
  read_qwen(fields, false, made);
  read_gated_shared_expert(fields, made);
}

void read_qwen3_next(const Fields& fields, ModelPreset& made) {
  read_qwen(fields, true, made);
  read_gated_shared_expert(fields, made);
}

void read_gpt_oss(const Fields& fields, ModelPreset& made) {
  read_sizes(fields, "intermediate_size", "num_local_experts", "num_experts", made.config);
  read_aux_loss(fields, 0.001, made);
  // The file has the limit only; alpha and the offset are constants of the published code.
  made.config.activation = {ActivationKind::swiglu_clamped, fields.number_or("swiglu_limit", 7.0), 1.702, 1.0};
  made.config.gate_up_bias = made.config.down_bias = true;
  made.config.router.kind = RouterKind::topk_softmax;
}

// The shared experts are one MLP of n_shared_experts times the routed width; null: there are none.
void read_shared_of_deepseek(const Fields& fields, std::int64_t shared_by_default, LayerConfig& config) {
  const std::int64_t shared =
      fields.null_in("n_shared_experts") ? 0 : fields.integer_or("n_shared_experts", shared_by_default);
  if (shared < 0 || shared > 1024) {
    refuse("\"n_shared_experts\" is " + std::to_string(shared) + "; accepted: 0 to 1024");
  }
  std::int64_t width = 0;
  if (__builtin_mul_overflow(shared, config.intermediate_size, &width)) refuse("the shared experts' width overflows");
  if (shared > 0) config.shared_experts = {{width, false}};
}

struct SigmoidDefaults {
  std::int64_t first_dense, groups, top_groups;
  double scaling_factor;
};

void read_sigmoid(const Fields& fields, const SigmoidDefaults& defaults, ModelPreset& made) {
  LayerConfig& config = made.config;
  read_sizes(fields, "moe_intermediate_size", "n_routed_experts", "num_local_experts", config);
  const std::string scoring = fields.text_or("scoring_func", "sigmoid");
  if (scoring != "sigmoid") cannot("\"scoring_func\" is \"" + scoring + "\"; accepted: sigmoid");
  const std::string method = fields.text_or("topk_method", "noaux_tc");
  if (method != "noaux_tc") cannot("\"topk_method\" is \"" + method + "\"; accepted: noaux_tc");
  RouterConfig& router = config.router;
  router.kind = RouterKind::sigmoid;
  router.selection_bias = true;
  router.renormalize = renormalize_of(fields, true);
  router.scaling_factor = fields.number_or("routed_scaling_factor", defaults.scaling_factor);
  const auto groups = [&](const char* name, std::int64_t by_default) {  // null: the choice is not limited
    return fields.null_in(name) ? 1 : fields.small(fields.integer_or(name, by_default), name);
  };
  router.num_groups = groups("n_group", defaults.groups);
  router.top_groups = groups("topk_group", defaults.top_groups);
  read_shared_of_deepseek(fields, 1, config);
  made.num_moe_layers = layers_after_dense(fields, made.num_layers, defaults.first_dense);
}

void read_deepseek_v3(const Fields& fields, ModelPreset& made) { read_sigmoid(fields, {3, 8, 4, 2.5}, made); }
void read_glm4(const Fields& fields, ModelPreset& made) { read_sigmoid(fields, {1, 1, 1, 1.0}, made); }

void read_deepseek_v2(const Fields& fields, ModelPreset& made) {
  LayerConfig& config = made.config;
  read_sizes(fields, "moe_intermediate_size", "n_routed_experts", "num_experts", config);
  config.router.kind = RouterKind::softmax_topk;
  if (fields.flag_or("norm_topk_prob", false)) {
    cannot("\"norm_topk_prob\" is true; accepted for deepseek_v2: false, as the model's own code and transformers "
           "differ for true");
  }
  if (fields.flag_or("mlp_bias", false)) {
    cannot("\"mlp_bias\" is true; accepted: false, a bias of all experts or of none");
  }
  config.router.scaling_factor = fields.number_or("routed_scaling_factor", 1.0);
  const std::string method = fields.text_or("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    config.router.num_groups = fields.small(fields.integer("n_group"), "n_group");
    config.router.top_groups = fields.small(fields.integer("topk_group"), "topk_group");
    config.router.group_score_size = 1;  // a group's score is that of its best expert
  } else if (method != "greedy") {
    cannot("\"topk_method\" is \"" + method + "\"; accepted: greedy, group_limited_greedy");
  }
  read_shared_of_deepseek(fields, 2, config);
  made.num_moe_layers = layers_after_dense(fields, made.num_layers, 0);
}

using Reader = void (*)(const Fields&, ModelPreset&);
constexpr std::pair<const char*, Reader> readers[] = {
    {"mixtral", read_mixtral},         {"olmoe", read_olmoe},
    {"qwen2_moe", read_qwen2},         {"qwen3_moe", read_qwen3},
    {"qwen3_next", read_qwen3_next},   {"gpt_oss", read_gpt_oss},
    {"deepseek_v2", read_deepseek_v2}, {"deepseek_v3", read_deepseek_v3},
    {"kimi_k2", read_deepseek_v3},     {"glm4_moe", read_glm4},
};

Reader reader_of(const std::string& model_type) {
  for (const auto& [name, reader] : readers) {
    if (model_type == name) return reader;
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> hugging_face_model_types() {
  std::vector<std::string> names;
  for (const auto& [name, reader] : readers) names.emplace_back(name);
  return names;
}

ModelPreset model_from_hugging_face(const std::string& json_text) {
  Json json = Json::parse(json_text, nullptr, false);
  if (json.is_discarded()) refuse("the text is no JSON");
  if (!json.is_object()) refuse("the text is no JSON object");

  std::string model_type = Fields(json).text_or("model_type", "");
  std::string model = model_type;
  if (json.contains("architectures") && json["architectures"].is_array() && !json["architectures"].empty() &&
      json["architectures"][0].is_string()) {
    model = json["architectures"][0].get<std::string>();
  }
  // Models that also see pictures keep the language model's part apart.
  if (reader_of(model_type) == nullptr && json.contains("text_config") && json["text_config"].is_object()) {
    json = Json(json["text_config"]);
    model_type = Fields(json).text_or("model_type", "");
  }
  const Reader reader = reader_of(model_type);
  if (reader == nullptr) {
    std::string names;
    for (const std::string& name : hugging_face_model_types()) names += (names.empty() ? "" : ", ") + name;
    refuse("\"model_type\" is \"" + model_type + "\"; accepted: " + names);
  }

  const Fields fields(json);
  ModelPreset made;
  made.name = model_type;
  made.model = model;
  made.source = "config.json";
  const std::int64_t layers = fields.integer_or("num_hidden_layers", 1);
  if (layers < 1 || layers > 100000) {
    refuse("\"num_hidden_layers\" is " + std::to_string(layers) + "; accepted: 1 to 100000");
  }
  made.num_layers = made.num_moe_layers = static_cast<int>(layers);
  reader(fields, made);
  try {
    made.config.validate();
  } catch (const Error& error) { throw Error(error.status(), "config.json: " + std::string(error.what())); }
  return made;
}

ModelPreset read_hugging_face_config(const std::string& path) {
  std::error_code ignored;
  const std::string file =
      std::filesystem::is_directory(path, ignored) ? (std::filesystem::path(path) / "config.json").string() : path;
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  if (!stream || !(text << stream.rdbuf())) {
    throw Error(Status::invalid_argument, "\"" + file + "\" cannot be read; accepted: a Hugging Face config.json");
  }
  try {
    ModelPreset made = model_from_hugging_face(text.str());
    made.source = file;
    return made;
  } catch (const Error& error) { throw Error(error.status(), "\"" + file + "\": " + error.what()); }
}

}  // namespace moelith
