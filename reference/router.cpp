#include "reference/router.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/activation.hpp"

namespace moelith::reference {

namespace {

// Added to sums of sigmoid scores before they divide (DeepSeek-V3).
constexpr double sigmoid_sum_epsilon = 1e-20;

// log sum_e exp(l_e) over the finite logits of a row; -inf if there are none.
double logsumexp(const double* logits, std::int64_t experts) {
  double highest = -std::numeric_limits<double>::infinity();
  for (std::int64_t e = 0; e < experts; ++e) {
    if (std::isfinite(logits[e])) highest = std::max(highest, logits[e]);
  }
  if (!std::isfinite(highest)) return highest;
  double sum = 0.0;
  for (std::int64_t e = 0; e < experts; ++e) {
    if (std::isfinite(logits[e])) sum += std::exp(logits[e] - highest);
  }
  return highest + std::log(sum);
}

// Softmax of the finite logits of a row, 0 for the others.
void softmax(const double* logits, std::int64_t experts, double* result) {
  const double total = logsumexp(logits, experts);
  for (std::int64_t e = 0; e < experts; ++e) {
    result[e] = std::isfinite(logits[e]) ? std::exp(logits[e] - total) : 0.0;
  }
}

void score_row(RouterKind kind, const double* logits, std::int64_t experts, double* scores) {
  if (kind != RouterKind::sigmoid) return softmax(logits, experts, scores);
  for (std::int64_t e = 0; e < experts; ++e) scores[e] = std::isfinite(logits[e]) ? sigmoid(logits[e]) : 0.0;
}

// The experts of the best `top_groups` groups. A group's score is the sum of its highest `group_score_size` selection
// scores among candidates (of fewer, if it has fewer); a group without a candidate comes last. Equal groups: the lowest
// first.
std::vector<bool> in_kept_group(const RouterConfig& router, const std::vector<bool>& candidate,
                                const std::vector<double>& selection) {
  if (router.top_groups >= router.num_groups) return std::vector<bool>(candidate.size(), true);
  const std::int64_t group_size = static_cast<std::int64_t>(candidate.size()) / router.num_groups;
  struct Group {
    std::int64_t index;
    bool empty;
    double score;
  };
  std::vector<Group> groups;
  for (std::int64_t g = 0; g < router.num_groups; ++g) {
    std::vector<double> values;
    for (std::int64_t e = g * group_size; e < (g + 1) * group_size; ++e) {
      if (candidate[e]) values.push_back(selection[e]);
    }
    std::sort(values.begin(), values.end(), std::greater<>());
    Group group{g, values.empty(), 0.0};
    for (std::size_t i = 0; i < values.size() && i < static_cast<std::size_t>(router.group_score_size); ++i) {
      group.score += values[i];
    }
    groups.push_back(group);
  }
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
    return a.empty != b.empty ? b.empty : (!a.empty && a.score > b.score);
  });
  std::vector<bool> kept(candidate.size());
  for (std::int32_t i = 0; i < router.top_groups; ++i) {
    for (std::int64_t e = 0; e < group_size; ++e) kept[groups[i].index * group_size + e] = true;
  }
  return kept;
}

// The k ids of one row, best selection score first, ties to the lowest id. Candidates are experts of kept groups with a
// finite logit and a finite selection score; when they run out, the lowest unused ids of the kept groups follow.
void choose_row(const LayerConfig& config, const double* logits, const double* scores, const double* bias,
                std::int64_t* ids) {
  const RouterConfig& router = config.router;
  const std::int64_t experts = config.num_experts;
  // Without a bias and groups the logits order the experts as the scores do, but for scores rounded to equal numbers.
  const bool by_logits =
      router.kind == RouterKind::topk_softmax || (bias == nullptr && router.top_groups >= router.num_groups);
  std::vector<double> selection(static_cast<std::size_t>(experts));
  std::vector<bool> candidate(selection.size());
  for (std::int64_t e = 0; e < experts; ++e) {
    selection[e] = (by_logits ? logits[e] : scores[e]) + (bias ? bias[e] : 0.0);
    candidate[e] = std::isfinite(logits[e]) && std::isfinite(selection[e]);
  }
  const std::vector<bool> kept = in_kept_group(router, candidate, selection);
  std::vector<bool> used(selection.size());
  for (std::int64_t j = 0; j < config.top_k; ++j) {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < experts; ++e) {
      if (kept[e] && candidate[e] && !used[e] && (best < 0 || selection[e] > selection[best])) best = e;
    }
    for (std::int64_t e = 0; best < 0 && e < experts; ++e) {
      if (kept[e] && !used[e]) best = e;
    }
    ids[j] = best;
    used[best] = true;
  }
}

// Whether the weights are a softmax over the chosen logits. For softmax_topk with renormalize that is the same number
// as s_j / sum_i s_i, and has a value where all chosen scores are rounded to 0.
bool softmax_over_chosen(const RouterConfig& router) {
  return router.kind == RouterKind::topk_softmax || (router.kind == RouterKind::softmax_topk && router.renormalize);
}

std::vector<double> softmax_of_chosen(const double* logits, const std::int64_t* ids, std::int64_t k) {
  std::vector<double> chosen(static_cast<std::size_t>(k)), result(chosen.size());
  for (std::int64_t j = 0; j < k; ++j) chosen[j] = logits[ids[j]];
  softmax(chosen.data(), k, result.data());
  return result;
}

void weigh_row(const LayerConfig& config, const double* logits, const double* scores, const std::int64_t* ids,
               double* weights) {
  const RouterConfig& router = config.router;
  const std::int64_t k = config.top_k;
  if (softmax_over_chosen(router)) {
    const std::vector<double> chosen = softmax_of_chosen(logits, ids, k);
    for (std::int64_t j = 0; j < k; ++j) weights[j] = router.scaling_factor * chosen[j];
    return;
  }
  double divisor = 1.0;
  if (router.renormalize) {  // sigmoid
    divisor = sigmoid_sum_epsilon;
    for (std::int64_t j = 0; j < k; ++j) divisor += scores[ids[j]];
  }
  // Divided first: with k = 1 every weight is then exactly the same, and capacity by score sees them as equal.
  for (std::int64_t j = 0; j < k; ++j) weights[j] = router.scaling_factor * (scores[ids[j]] / divisor);
}

// The gradient into the scores, or where the weights are a softmax over the chosen logits into the logits, of one row.
void weigh_row_backward(const LayerConfig& config, const double* logits, const double* scores, const std::int64_t* ids,
                        const double* d_weights, double* d_scores, double* d_logits) {
  const RouterConfig& router = config.router;
  const std::int64_t k = config.top_k;
  if (softmax_over_chosen(router)) {
    // w = scale * softmax(chosen): d_logit_j = scale * softmax_j (d_w_j - sum_i d_w_i softmax_i)
    const std::vector<double> chosen = softmax_of_chosen(logits, ids, k);
    double mean = 0.0;
    for (std::int64_t j = 0; j < k; ++j) mean += d_weights[j] * chosen[j];
    for (std::int64_t j = 0; j < k; ++j) d_logits[ids[j]] += router.scaling_factor * chosen[j] * (d_weights[j] - mean);
    return;
  }
  // w_j = scale * s_j: d_s_j = scale * d_w_j
  // w_j = scale * s_j / D, D = sum_i s_i + epsilon: d_s_j = scale * (d_w_j - sum_i d_w_i s_i / D) / D
  double divisor = 1.0, mean = 0.0;
  if (router.renormalize) {
    divisor = sigmoid_sum_epsilon;
    for (std::int64_t j = 0; j < k; ++j) divisor += scores[ids[j]];
    for (std::int64_t j = 0; j < k; ++j) mean += d_weights[j] * scores[ids[j]] / divisor;
  }
  for (std::int64_t j = 0; j < k; ++j) d_scores[ids[j]] += router.scaling_factor * (d_weights[j] - mean) / divisor;
}

// Each expert of a rank keeps its best ceil(capacity_factor * tokens * k / E) routes; absent tokens count among these
// tokens, so that the capacity is known before the data.
void apply_capacity(const LayerConfig& config, const RankRange& rank, Routing& routing) {
  const RouterConfig& router = config.router;
  const std::int64_t k = config.top_k;
  const double capacity = std::ceil(router.capacity_factor * static_cast<double>(rank.end - rank.begin) *
                                    static_cast<double>(k) / config.num_experts);
  std::vector<std::vector<std::int64_t>> routes(static_cast<std::size_t>(config.num_experts));  // indices t k + slot
  for (std::int64_t i = rank.begin * k; i < rank.valid_end * k; ++i) {
    if (routing.chosen[i] >= 0) routes[routing.chosen[i]].push_back(i);
  }
  for (std::vector<std::int64_t>& of_expert : routes) {
    if (router.drop_policy == DropPolicy::by_score) {
      // A NaN of the caller's counts as the lowest weight.
      const auto weight = [&](std::int64_t i) {
        return std::isnan(routing.weights[i]) ? -std::numeric_limits<double>::infinity() : routing.weights[i];
      };
      std::stable_sort(of_expert.begin(), of_expert.end(),
                       [&](std::int64_t a, std::int64_t b) { return weight(a) > weight(b); });
    }
    for (std::size_t i = 0; i < of_expert.size(); ++i) {
      if (static_cast<double>(i) >= capacity) routing.kept[of_expert[i]] = -1;
    }
  }
}

// The score of each expert that P_e of the aux loss averages.
std::vector<double> balance_scores(RouterKind kind, const double* scores, std::int64_t experts) {
  std::vector<double> result(scores, scores + experts);
  if (kind != RouterKind::sigmoid) return result;
  double sum = 0.0;
  for (double score : result) sum += score;
  for (double& score : result) score /= sum + sigmoid_sum_epsilon;
  return result;
}

// A part of one rank's aux loss: coefficient * E * sum_e f_e P_e with f_e = counts[e] / (k tokens) and P_e the sum of
// the balance scores over [begin, end) divided by `tokens`.
struct AuxPart {
  std::int64_t begin = 0, end = 0;
  std::int64_t tokens = 0;
  std::vector<std::int64_t> counts;  // [E], after top-k, before capacity
};

// The parts of each rank's aux loss. batch: its valid tokens. sequence: one part a sequence. global: its tokens, with
// counts and the number of tokens taken from the whole group.
std::vector<std::vector<AuxPart>> aux_parts(const LayerConfig& config, const std::vector<RankRange>& ranks,
                                            const Routing& routing) {
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    AuxPart result{begin, end, end - begin, std::vector<std::int64_t>(static_cast<std::size_t>(config.num_experts))};
    for (std::int64_t i = begin * config.top_k; i < end * config.top_k; ++i) {
      if (routing.chosen[i] >= 0) ++result.counts[routing.chosen[i]];
    }
    return result;
  };
  std::vector<std::vector<AuxPart>> parts(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const RankRange& rank = ranks[r];
    if (config.router.aux_loss == AuxLossKind::batch || config.router.aux_loss == AuxLossKind::global) {
      parts[r] = {part(rank.begin, rank.valid_end)};
    } else if (config.router.aux_loss == AuxLossKind::sequence) {
      const std::int64_t length = (rank.end - rank.begin) / rank.num_sequences;
      for (std::int64_t s = 0; s < rank.num_sequences; ++s) {
        const std::int64_t begin = std::min(rank.begin + s * length, rank.valid_end);
        parts[r].push_back(part(begin, std::min(begin + length, rank.valid_end)));
      }
    }
  }
  if (config.router.aux_loss == AuxLossKind::global) {
    AuxPart whole{0, 0, 0, std::vector<std::int64_t>(static_cast<std::size_t>(config.num_experts))};
    for (const std::vector<AuxPart>& of_rank : parts) {
      whole.tokens += of_rank[0].tokens;
      for (std::int32_t e = 0; e < config.num_experts; ++e) whole.counts[e] += of_rank[0].counts[e];
    }
    for (std::vector<AuxPart>& of_rank : parts) {
      of_rank[0].tokens = whole.tokens;
      of_rank[0].counts = whole.counts;
    }
  }
  return parts;
}

// d(aux loss) / d(balance score of e at a token) = coefficient * E * f_e / tokens; f_e counts as a constant.
double aux_slope(const LayerConfig& config, const AuxPart& part, std::int64_t e) {
  const double tokens = static_cast<double>(part.tokens);
  const double f = static_cast<double>(part.counts[e]) / (config.top_k * tokens);
  return config.router.aux_loss_coefficient * config.num_experts * f / tokens;
}

}  // namespace

Routing route(const LayerConfig& config, const Inputs& inputs, const std::vector<RankRange>& ranks) {
  const std::int64_t k = config.top_k, experts = config.num_experts;
  const std::size_t slots = static_cast<std::size_t>(inputs.tokens * k);
  Routing routing{std::vector<std::int64_t>(slots, -1), std::vector<double>(slots), {}, {}};
  const double* bias = config.router.selection_bias ? inputs.selection_bias.data() : nullptr;
  routing.scores.assign(inputs.router_logits.size(), 0.0);

  for (const RankRange& rank : ranks) {
    for (std::int64_t t = rank.begin; t < rank.valid_end; ++t) {
      std::int64_t* ids = &routing.chosen[t * k];
      if (!inputs.router_logits.empty()) {
        const double* logits = &inputs.router_logits[t * experts];
        double* scores = &routing.scores[t * experts];
        score_row(config.router.kind, logits, experts, scores);
        if (inputs.chosen_ids.empty()) {
          choose_row(config, logits, scores, bias, ids);
        } else {
          std::copy_n(&inputs.chosen_ids[t * k], k, ids);
        }
        weigh_row(config, logits, scores, ids, &routing.weights[t * k]);
      } else if (!inputs.topk_ids.empty()) {
        for (std::int64_t j = 0; j < k; ++j) {
          ids[j] = inputs.topk_ids[t * k + j];
          routing.weights[t * k + j] = ids[j] < 0 ? 0.0 : inputs.topk_weights[t * k + j];
        }
      } else {
        ids[0] = 0;  // a dense MLP
        routing.weights[t] = 1.0;
      }
    }
  }

  routing.kept = routing.chosen;
  if (config.router.capacity_factor > 0.0) {
    for (const RankRange& rank : ranks) apply_capacity(config, rank, routing);
  }
  return routing;
}

Losses losses(const LayerConfig& config, const Inputs& inputs, const std::vector<RankRange>& ranks,
              const Routing& routing) {
  Losses result{std::vector<double>(ranks.size()), std::vector<double>(ranks.size())};
  if (inputs.router_logits.empty()) return result;
  const std::int64_t experts = config.num_experts;

  const std::vector<std::vector<AuxPart>> parts = aux_parts(config, ranks, routing);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const AuxPart& part : parts[r]) {
      for (std::int64_t t = part.begin; t < part.end; ++t) {
        const std::vector<double> scores =
            balance_scores(config.router.kind, &routing.scores[t * experts], experts);
        for (std::int64_t e = 0; e < experts; ++e) result.aux[r] += aux_slope(config, part, e) * scores[e];
      }
    }
  }

  // z = coefficient * (sum over tokens of logsumexp^2) / (valid tokens); a row without a finite logit adds nothing.
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (std::int64_t t = ranks[r].begin; t < ranks[r].valid_end; ++t) {
      const double value = logsumexp(&inputs.router_logits[t * experts], experts);
      if (!std::isfinite(value)) continue;
      result.z[r] +=
          config.router.z_loss_coefficient * value * value / static_cast<double>(ranks[r].valid_tokens());
    }
  }
  return result;
}

std::vector<double> router_backward(const LayerConfig& config, const Inputs& inputs,
                                    const std::vector<RankRange>& ranks, const Routing& routing,
                                    const std::vector<double>& d_weights, const std::vector<double>& d_aux,
                                    const std::vector<double>& d_z) {
  const std::int64_t k = config.top_k, experts = config.num_experts;
  std::vector<double> d_logits(inputs.router_logits.size()), d_scores(d_logits.size());

  // Through the weights.
  for (const RankRange& rank : ranks) {
    for (std::int64_t t = rank.begin; t < rank.valid_end; ++t) {
      weigh_row_backward(config, &inputs.router_logits[t * experts], &routing.scores[t * experts],
                         &routing.chosen[t * k], &d_weights[t * k], &d_scores[t * experts],
                         &d_logits[t * experts]);
    }
  }

  // Through the aux loss. Sigmoid scores are normalised there: q_e = s_e / D, D = sum_i s_i + epsilon, thus
  // d_s_e = (d_q_e - sum_i d_q_i q_i) / D.
  const std::vector<std::vector<AuxPart>> parts = aux_parts(config, ranks, routing);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const AuxPart& part : parts[r]) {
      for (std::int64_t t = part.begin; t < part.end; ++t) {
        const double* scores = &routing.scores[t * experts];
        double sum = 0.0, product = 0.0;
        for (std::int64_t e = 0; e < experts; ++e) {
          sum += scores[e];
          product += d_aux[r] * aux_slope(config, part, e) * scores[e];
        }
        for (std::int64_t e = 0; e < experts; ++e) {
          const double d_balance = d_aux[r] * aux_slope(config, part, e);
          if (config.router.kind == RouterKind::sigmoid) {
            const double d = sum + sigmoid_sum_epsilon;
            d_scores[t * experts + e] += (d_balance - product / d) / d;
          } else {
            d_scores[t * experts + e] += d_balance;
          }
        }
      }
    }
  }

  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (std::int64_t t = ranks[r].begin; t < ranks[r].valid_end; ++t) {
      const double* logits = &inputs.router_logits[t * experts];
      const double* scores = &routing.scores[t * experts];
      const double* d_score = &d_scores[t * experts];
      double* d_logit = &d_logits[t * experts];
      // Scores to logits: softmax s_e (d_s_e - sum_i d_s_i s_i), or sigmoid s_e (1 - s_e) d_s_e,
      // with 1 - s_e = sigmoid(-l_e).
      double mean = 0.0;
      for (std::int64_t e = 0; e < experts; ++e) mean += d_score[e] * scores[e];
      for (std::int64_t e = 0; e < experts; ++e) {
        d_logit[e] += config.router.kind == RouterKind::sigmoid ? scores[e] * sigmoid(-logits[e]) * d_score[e]
                                                                : scores[e] * (d_score[e] - mean);
      }
      // The z-loss: d logsumexp^2 / d l_e = 2 logsumexp softmax_e.
      const double lse = logsumexp(logits, experts);
      if (std::isfinite(lse)) {
        const double slope = d_z[r] * config.router.z_loss_coefficient * 2.0 * lse /
                             static_cast<double>(ranks[r].valid_tokens());
        std::vector<double> probabilities(static_cast<std::size_t>(experts));
        softmax(logits, experts, probabilities.data());
        for (std::int64_t e = 0; e < experts; ++e) d_logit[e] += slope * probabilities[e];
      }
      for (std::int64_t e = 0; e < experts; ++e) {
        if (!std::isfinite(logits[e])) d_logit[e] = 0.0;
      }
    }
  }
  return d_logits;
}

}  // namespace moelith::reference
