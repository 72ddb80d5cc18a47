// The router: logits -> expert ids and weights, balancing losses, and the gradient back into the logits.
//
// One row (token), with s_e its scores:
//   scores     softmax_topk: softmax over all E; sigmoid: sigmoid(logit); topk_softmax: the logits themselves choose.
//   choice     the k highest selection scores; selection score = score (topk_softmax: logit) + selection_bias[e].
//              Ties go to the lowest id. Slots are in descending order of selection score. Without bias and
//              limit to groups the logits choose: the same order as that of the scores, but not blurred by rounding.
//   groups     with top_groups < num_groups: a group's score is the sum of its highest group_score_size selection scores (of as
//              many as it has); the top_groups highest stay, ties to the lowest group; the rest is excluded by a flag.
//   weights    softmax_topk: s_e, or with renormalize s_e / sum over the k; topk_softmax: softmax over the k chosen
//              logits; sigmoid: s_e, or with renormalize s_e / (sum over the k + 1e-20). Then times scaling_factor.
//              (softmax_topk with renormalize is computed as the softmax over the k chosen logits, which is the same
//              number and cannot become 0 / 0.)
//   not finite a logit that is NaN, +inf or -inf has score 0 and takes no part in any softmax, logsumexp or group
//              score. Such an expert is chosen only when the kept groups have no finite candidates left, lowest unused
//              id first (within the kept groups), with weight 0. The gradient into it is 0. A finite logit whose
//              selection score is not finite (a selection bias of -inf, say) is chosen as late, but keeps its weight.
//   absent     rows from valid_tokens on: ids -1, weights 0, gradient 0, no part in any loss or count.
// Ids of a present row are always distinct and in [0, E) before capacity.
//
// Losses, over the N valid tokens of a batch (or of one sequence):
//   aux = coefficient * E * sum_e f_e P_e,  f_e = count_e / (k N),  P_e = sum_t s_te / N, where s is the softmax over
//         all E for both softmax routers, and sigmoid(l_e) / (sum over E + 1e-20) for the sigmoid router. count_e is
//         taken after the choice and before capacity, and has no gradient.
//         `global`: N and count_e are of all ranks, the sum over t of this rank.
//   z   = coefficient * mean_t logsumexp(l_t)^2 over finite logits; a row without any adds 0.
//
// Sums over tokens: in the accumulator type over units of at most 64 consecutive tokens that do not cross a sequence,
// then over units in order in double. Sums over experts of one row: 16 lanes (lane e mod 16), then lanes 8, 4, 2, 1
// apart. Hence the bits do not depend on threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moelith/config.hpp"
#include "routing/parallel_for.hpp"

namespace moelith::routing {

struct RouterSpec {
  RouterConfig config;
  std::int32_t num_experts = 0;  // E, 1 to limits::num_experts
  std::int32_t top_k = 0;        // k, 1 to min(E, limits::top_k)

  // Throws Error(invalid_argument) where the sizes cannot be worked with: E, k, groups that do not divide E, kept
  // groups with fewer than k experts. The functions below call it.
  void validate() const;
};

// What both passes read. T is the accumulator type: float (logits of bfloat16 or float32) or double (float64).
template <class T>
struct RouterInputs {
  const void* logits = nullptr;               // [tokens, E]
  DataType logits_dtype = DataType::float32;  // bfloat16 or float32 for T = float; float64 for T = double
  std::int64_t logits_stride = 0;             // elements from row to row, >= E; any for at most one row
  std::int64_t tokens = 0;                    // T
  std::int64_t valid_tokens = 0;              // rows from here on are absent; clamped to [0, tokens]
  std::int64_t num_sequences = 1;             // AuxLossKind::sequence only; divides tokens
  const T* selection_bias = nullptr;          // [E] if config.selection_bias; forward only
};

template <class T>
struct RouterOutputs {
  std::int32_t* topk_ids = nullptr;    // [tokens, k]; -1 where absent or dropped
  T* topk_weights = nullptr;           // [tokens, k]; 0 where topk_ids is -1
  std::int32_t* chosen_ids = nullptr;  // [tokens, k], ids before capacity, which backward needs: required if
                                       // config.capacity_factor > 0, ignored otherwise (they equal topk_ids)
  std::int64_t* counts = nullptr;      // optional, [E]: routes to each expert before capacity
  T* score_sums = nullptr;             // optional, [E]: sum over valid tokens of the scores in P_e, which aux_loss() of
                                       // `global` needs; untouched for `sequence` and `none`
  T* aux_loss = nullptr;               // optional, [1]; untouched for AuxLossKind::global (see aux_loss below)
  T* z_loss = nullptr;                 // optional, [1]
};

// Bytes of scratch that router_forward and router_backward need, for any num_sequences; aligned to 64 bytes.
template <class T>
std::size_t router_workspace_bytes(const RouterSpec& spec, std::int64_t tokens);

template <class T>
void router_forward(const RouterSpec& spec, const RouterInputs<T>& inputs, const RouterOutputs<T>& outputs,
                    void* workspace, const ParallelFor& parallel_for = serial_for);

// The loss of `batch` and `global` from sums. counts: [E] and `tokens` (valid ones), both of this rank (batch) or
// summed over all ranks (global); score_sums: [E] of this rank. 0 for tokens = 0.
template <class T>
T aux_loss(const RouterSpec& spec, const std::int64_t* counts, std::int64_t tokens, const T* score_sums);

template <class T>
struct RouterGradients {
  const std::int32_t* chosen_ids = nullptr;  // [tokens, k] of forward: chosen_ids, or topk_ids without capacity
  const std::int32_t* topk_ids = nullptr;    // [tokens, k] of forward; slots that are -1 take nothing from
                                             // d_topk_weights. May be null without capacity.
  const T* d_topk_weights = nullptr;         // [tokens, k], or null for zero
  T d_aux_loss = T(0);
  T d_z_loss = T(0);
  // For AuxLossKind::batch: counts as forward gave them and the number of valid tokens; for global: both summed over
  // all ranks. Not read for sequence (whose counts come from chosen_ids) and none.
  const std::int64_t* counts = nullptr;  // [E]
  std::int64_t count_tokens = 0;
  void* d_logits = nullptr;          // [tokens, E] of inputs.logits_dtype, every element written
  std::int64_t d_logits_stride = 0;  // elements from row to row, >= E; any for at most one row
};

// Scores are computed again from the logits. Right for weights of zero and below, too: nothing divides by a weight.
template <class T>
void router_backward(const RouterSpec& spec, const RouterInputs<T>& inputs, const RouterGradients<T>& gradients,
                     void* workspace, const ParallelFor& parallel_for = serial_for);

}  // namespace moelith::routing
