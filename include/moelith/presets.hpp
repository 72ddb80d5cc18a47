// The MoE layers of published models: a table of well-known ones, and a reader of Hugging Face's config.json.
//
// Both describe a model's layer as it computes; what training chooses is left at its default: dtype bfloat16 (a
// checkpoint's storage format is no property of the layer), no losses, dropless.
#pragma once

#include <string>
#include <vector>

#include "moelith/config.hpp"

namespace moelith {

struct ModelPreset {
  std::string name;        // what preset() takes: "mixtral-8x7b"
  std::string model;       // the model's own name: "Mixtral 8x7B"
  LayerConfig config;      // of one of its MoE layers
  int num_layers = 0;      // of the whole model,
  int num_moe_layers = 0;  // of which this many have experts
  std::string source;      // where the numbers come from
  double aux_loss_coefficient = 0.0;  // of a config.json: router_aux_loss_coef as transformers counts; 0: it has none
};

// In a fixed order; every config is valid.
const std::vector<ModelPreset>& presets();

// Throws Error(invalid_argument) listing the names there are.
const ModelPreset& preset(const std::string& name);

// The layer that a Hugging Face config.json describes. name is the model_type, model the first architecture's name.
// A value that the file leaves out is transformers' default for that model_type, except for sizes, which must be there.
// So is null, but for norm_topk_prob (false), n_shared_experts (none), n_group and topk_group (1: no limit).
// Throws Error(invalid_argument): no JSON; a model_type that is not known (the text lists those that are); a missing or
// wrong field, which is named; Error(unsupported): a layer that this library cannot compute, and why.
ModelPreset model_from_hugging_face(const std::string& json_text);

// The same from a file, or from a folder that holds a config.json. source is the file's path.
// Throws Error(invalid_argument) if it cannot be read.
ModelPreset read_hugging_face_config(const std::string& path);

// The model_types that model_from_hugging_face knows.
std::vector<std::string> hugging_face_model_types();

}  // namespace moelith
