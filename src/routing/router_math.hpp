// The formulas of the router that the CPU code and the CUDA kernels share, one element at a time. How they fit together
// is written in router.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "moelith/config.hpp"
#include "numerics/elementary.hpp"
#include "numerics/host_device.hpp"

namespace moelith::routing {

// Room for a row's experts and choices.
constexpr std::int32_t max_experts = limits::num_experts, max_top_k = limits::top_k;
// Tokens of one unit: what is summed in the accumulator type before sums go on in double.
constexpr std::int64_t unit_tokens = 64;
// Added to sums of sigmoid scores before dividing by them, as DeepSeek-V3's code has it.
constexpr double sigmoid_sum_floor = 1e-20;

// Whether groups limit the choice at all: where every group is kept, num_groups and group_score_size mean nothing.
MOELITH_HD inline bool limits_groups(const RouterConfig& config) { return config.top_groups < config.num_groups; }

// Whether the logits choose by themselves. They order the experts as the scores do, but are not blurred by the scores'
// rounding; a selection bias and a group's score are made for scores.
MOELITH_HD inline bool chooses_by_logits(const RouterConfig& config) {
  return config.kind == RouterKind::topk_softmax || (!config.selection_bias && !limits_groups(config));
}

// Whether the weights are a softmax over the k chosen logits.
MOELITH_HD inline bool weights_are_softmax_of_chosen(const RouterConfig& config) {
  return config.kind == RouterKind::topk_softmax || (config.kind == RouterKind::softmax_topk && config.renormalize);
}

// What takes no part in a choice or a softmax is -infinity; no finite number can be mistaken for it.
template <class T>
MOELITH_HD constexpr T excluded() {
  return -std::numeric_limits<T>::infinity();
}

// The value if it is finite, otherwise excluded(): for logits and for selection scores.
template <class T>
MOELITH_HD inline T finite_or_excluded(T value) {
  constexpr T largest = std::numeric_limits<T>::max();
  return (value >= -largest && value <= largest) ? value : excluded<T>();
}

// Integers in the order of the numbers, for fast and exact comparison: a < b as numbers exactly if key(a) < key(b);
// -0 and +0 have one key. Excluded entries have the lowest key of all. Not for NaN.
MOELITH_HD inline std::int32_t order_key(float value) {
  const float no_negative_zero = value + 0.0f;
  std::int32_t bits;
  std::memcpy(&bits, &no_negative_zero, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
MOELITH_HD inline std::int64_t order_key(double value) {
  const double no_negative_zero = value + 0.0;
  std::int64_t bits;
  std::memcpy(&bits, &no_negative_zero, sizeof bits);
  return bits ^ ((bits >> 63) & 0x7fffffffffffffff);
}
template <class T>
struct OrderKey;
template <>
struct OrderKey<float> {
  using type = std::int32_t;
  static constexpr type excluded = static_cast<type>(0xff800000u ^ 0x7fffffffu);  // order_key(-infinity)
};
template <>
struct OrderKey<double> {
  using type = std::int64_t;
  static constexpr type excluded = static_cast<type>(0xfff0000000000000ull ^ 0x7fffffffffffffffull);
};

// logsumexp from the highest logit m and the sum of exp(l - m); 0 for a row without finite logits (sum 0).
template <class T>
MOELITH_HD inline T log_sum_exp(T highest, T sum) {
  return sum > T(0) ? highest + std::log(sum) : T(0);
}

// aux = coefficient * E * sum_e (count_e / (k N)) (sum_e / N), from the dot product of counts and score sums. 0 for N = 0.
MOELITH_HD inline double aux_from_dot(double coefficient, std::int32_t num_experts, double dot, std::int32_t top_k,
                                      std::int64_t tokens) {
  if (tokens <= 0) return 0.0;
  const double n = static_cast<double>(tokens);
  return coefficient * num_experts * (dot / (top_k * n) / n);
}

// d aux / d s_te for every token of the batch or sequence: coefficient * E * f_e / N, f_e = count / (k N), times the
// upstream gradient. 0 for N = 0.
MOELITH_HD inline double aux_slope(double upstream, double coefficient, std::int32_t num_experts, std::int64_t count,
                                   std::int32_t top_k, std::int64_t tokens) {
  if (tokens <= 0) return 0.0;
  const double n = static_cast<double>(tokens);
  return upstream * coefficient * num_experts * (static_cast<double>(count) / (top_k * n)) / n;
}

// d z / d logsumexp_t without the factor logsumexp_t itself: 2 coefficient / N times the upstream gradient.
MOELITH_HD inline double z_slope(double upstream, double coefficient, std::int64_t tokens) {
  return tokens > 0 ? upstream * 2.0 * coefficient / static_cast<double>(tokens) : 0.0;
}

// Valid tokens of sequence `q` when sequences have `length` tokens each and rows from `valid` on are absent.
MOELITH_HD inline std::int64_t valid_tokens_of(std::int64_t q, std::int64_t length, std::int64_t valid) {
  const std::int64_t rest = valid - q * length;
  return rest < 0 ? 0 : (rest > length ? length : rest);
}

// Which tokens a unit holds. Units never cross a sequence, except that a unit may hold several whole sequences when
// these are short; so there are at most tokens / 32 + 1 of them.
struct Units {
  std::int64_t tokens = 0;              // of the call
  std::int64_t size = unit_tokens;      // tokens of a unit, at most
  std::int64_t length = 0;              // tokens of a sequence
  std::int64_t units_per_sequence = 0;  // 1 where a unit holds whole sequences
  std::int64_t sequences_per_unit = 0;  // 1 where a sequence has several units
  std::int64_t count = 0;               // of units

  // Other sizes than unit_tokens: where nothing is summed over tokens.
  MOELITH_HD static Units of(std::int64_t tokens, std::int64_t num_sequences, std::int64_t size = unit_tokens) {
    Units units;
    units.tokens = tokens;
    units.size = size;
    if (tokens <= 0 || num_sequences <= 0) return units;
    units.length = tokens / num_sequences;
    units.units_per_sequence = (units.length + size - 1) / size;
    units.sequences_per_unit = units.length < size ? size / units.length : 1;
    units.count = units.units_per_sequence > 1
                      ? num_sequences * units.units_per_sequence
                      : (num_sequences + units.sequences_per_unit - 1) / units.sequences_per_unit;
    return units;
  }
  MOELITH_HD std::int64_t begin(std::int64_t unit) const {
    if (units_per_sequence <= 1) return unit * sequences_per_unit * length;
    const std::int64_t sequence = sequence_of(unit);
    return sequence * length + (unit - sequence * units_per_sequence) * size;
  }
  MOELITH_HD std::int64_t end(std::int64_t unit) const {
    if (units_per_sequence > 1) {
      const std::int64_t sequence_end = (sequence_of(unit) + 1) * length;
      const std::int64_t full = begin(unit) + size;
      return full < sequence_end ? full : sequence_end;
    }
    const std::int64_t full = begin(unit) + sequences_per_unit * length;
    return full < tokens ? full : tokens;
  }

 private:
  MOELITH_HD std::int64_t sequence_of(std::int64_t unit) const {  // in 32 bits, which a GPU divides much faster
    return static_cast<std::uint32_t>(unit) / static_cast<std::uint32_t>(units_per_sequence);
  }
};

}  // namespace moelith::routing
