// What one mixture-of-experts (MoE) layer computes. For token t with routed experts e_1..e_k, weights p_1..p_k and
// shared experts s with gates g_s (1 where a shared expert has no gate):
//
//   y_t = sum_j p_j * FFN_{e_j}(x_t) + sum_s g_s(t) * FFN_s(x_t),      FFN(x) = down(act(gate_up(x)))
//
// Symbols used in every header: T tokens of this rank, H hidden_size, I intermediate_size, E num_experts (of the whole
// expert-parallel group), L local experts (of this rank), k top_k, S shared experts, R ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moelith/limits.hpp"
#include "moelith/tensor.hpp"

namespace moelith {

enum class ActivationKind : std::uint8_t {
  swiglu,          // silu(gate) * up
  swiglu_clamped,  // GPT-OSS: g = min(gate, limit), u = clamp(up, -limit, limit); g * sigmoid(alpha g) * (u + up_offset)
  geglu_erf,       // gelu(gate) * up, gelu by erf
  geglu_tanh,      // gelu(gate) * up, gelu by its tanh approximation
  relu_squared,    // max(z, 0)^2, no gate: gate_up_proj has I rows instead of 2 I
};

struct ActivationConfig {
  ActivationKind kind = ActivationKind::swiglu;
  double limit = 7.0;      // swiglu_clamped only, > 0
  double alpha = 1.702;    // swiglu_clamped only
  double up_offset = 1.0;  // swiglu_clamped only

  bool gated() const { return kind != ActivationKind::relu_squared; }
};

// Where the routed weight p multiplies: the output of down_proj (Mixtral, Qwen, DeepSeek, GPT-OSS), bias included, or
// the activation that down_proj reads (the down bias is then not scaled).
enum class WeightPlacement : std::uint8_t { after_down, before_down };

struct SharedExpertConfig {
  std::int64_t intermediate_size = 0;  // I_s, as intermediate_size of LayerConfig
  bool gated = false;  // scaled by sigmoid(shared_gate_logits[t, s]) (Qwen2-MoE)
};

enum class RouterKind : std::uint8_t {
  softmax_topk,  // scores = softmax over all E; take k; optionally renormalise (Mixtral, Qwen3, OLMoE)
  topk_softmax,  // take the k highest logits; softmax over these k (GPT-OSS)
  sigmoid,       // scores = sigmoid; choice by scores + selection bias, group-limited (DeepSeek-V3)
};

enum class AuxLossKind : std::uint8_t { none, batch, sequence, global };
enum class DropPolicy : std::uint8_t { by_score, by_position };

// Routing rules, losses and their formulas: src/routing/ and docs/numerics.md. Ties go to the lowest expert id.
struct RouterConfig {
  RouterKind kind = RouterKind::softmax_topk;
  bool renormalize = false;          // selected weights divided by their sum (softmax_topk, sigmoid)
  double scaling_factor = 1.0;       // then multiplied by this (DeepSeek-V3's routed_scaling_factor)
  bool selection_bias = false;       // choice by score + bias [E]; the weights come from the unbiased scores
  std::int32_t num_groups = 1;       // E is split into this many equal groups,
  std::int32_t top_groups = 1;       // of which this many are kept before experts are chosen; all: no limit
  std::int32_t group_score_size = 2; // a group's score: the sum of its highest 1 or 2 selection scores

  // aux = coefficient * E * sum_e f_e P_e; f_e = routes to e / (k tokens), P_e = mean score of e (sigmoid scores are
  // normalised over E first). `batch`: over this call's valid tokens. `sequence`: the *sum* of the sequences' own
  // losses, so that micro-batches accumulate to the gradient of the joined batch. `global`: f_e over all ranks, and P_e
  // summed over this rank's tokens but divided by the tokens of all ranks, so the ranks' losses add up to the whole.
  AuxLossKind aux_loss = AuxLossKind::none;
  double aux_loss_coefficient = 0.0;
  double z_loss_coefficient = 0.0;   // coefficient * mean over valid tokens of logsumexp(logits)^2

  // 0: dropless (default). Otherwise each expert keeps at most ceil(capacity_factor * T * k / E) of this rank's routes,
  // and a dropped route becomes id -1, weight 0 (the kept weights are not renormalised).
  double capacity_factor = 0.0;
  DropPolicy drop_policy = DropPolicy::by_score;  // keep the highest weights (ties: lowest token), or the first tokens
};

struct LayerConfig {
  std::int64_t hidden_size = 0;        // H, a multiple of 8 from 8 to limits::width = 2^20
  std::int64_t intermediate_size = 0;  // I, likewise
  std::int32_t num_experts = 0;        // E, 1 to limits::num_experts = 1024; 1 with a dense plan is an ordinary MLP
  std::int32_t top_k = 0;              // k, 1 to min(E, limits::top_k = 32)
  DataType dtype = DataType::bfloat16; // storage of x, weights, y and their gradients; float64 (CPU only) computes in
                                       // float64, the others accumulate in float32
  ActivationConfig activation;
  bool gate_up_bias = false;           // [E, 2I], of the routed and the shared experts alike
  bool down_bias = false;              // [E, H], likewise
  WeightPlacement weight_placement = WeightPlacement::after_down;
  std::vector<SharedExpertConfig> shared_experts;  // at most limits::shared_experts = 8, else as the routed experts
  RouterConfig router;

  // Rows of gate_up_proj of an expert of width i: 2 i, or i without a gate.
  std::int64_t gate_up_rows(std::int64_t i) const { return activation.gated() ? 2 * i : i; }
  // float32, or float64 for a float64 layer: the type of topk_weights, losses and accumulators.
  DataType accumulator_dtype() const { return dtype == DataType::float64 ? DataType::float64 : DataType::float32; }

  // Throws Error(invalid_argument) naming the field, its value and what is accepted.
  void validate() const;
};

const char* to_string(ActivationKind kind);   // "swiglu", "swiglu_clamped", "geglu_erf", "geglu_tanh", "relu_squared"
const char* to_string(WeightPlacement place); // "after_down", "before_down"
const char* to_string(RouterKind kind);       // "softmax_topk", "topk_softmax", "sigmoid"
const char* to_string(AuxLossKind kind);      // "none", "batch", "sequence", "global"
const char* to_string(DropPolicy policy);     // "by_score", "by_position"
// The inverse of to_string; throws Error(invalid_argument) listing the accepted names.
ActivationKind activation_kind_from(const std::string& name);
WeightPlacement weight_placement_from(const std::string& name);
RouterKind router_kind_from(const std::string& name);
AuxLossKind aux_loss_kind_from(const std::string& name);
DropPolicy drop_policy_from(const std::string& name);
DataType data_type_from(const std::string& name);

}  // namespace moelith
