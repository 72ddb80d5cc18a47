#include "routing/router.hpp"

#include <algorithm>
#include <string>

#include "moelith/tensor.hpp"
#include "numerics/bfloat16.hpp"
#include "routing/capacity.hpp"
#include "routing/router_math.hpp"

// The row loops are compiled twice, for the baseline and for AVX2 + FMA, and chosen at run time. Everything they call
// is inlined into them, so that it is compiled for the same instructions.
#if defined(__x86_64__) && defined(__GNUC__)
#define MOELITH_ROUTING_WIDE 1
#endif

namespace moelith::routing {
namespace {

using numerics::bfloat16;

constexpr std::int32_t lanes = 16;

constexpr std::int32_t padded(std::int32_t num_experts) { return (num_experts + lanes - 1) / lanes * lanes; }

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, text); }

// Experts of one row, padded to a multiple of `lanes` with excluded logits.
template <class T>
struct alignas(64) RowOf {
  T values[max_experts];
};

// Highest value; excluded() if all are.
template <class T>
inline T row_max(const T* x, std::int32_t width) {
  using Key = typename OrderKey<T>::type;
  // Integers, because their maximum may be taken in any order: the loop vectorises without relaxing floating point.
  Key highest = OrderKey<T>::excluded;
  for (std::int32_t e = 0; e < width; ++e) {
    const Key key = order_key(x[e]);
    highest = key > highest ? key : highest;
  }
  // order_key undoes itself.
  const Key bits = highest ^ ((highest >> (sizeof(Key) * 8 - 1)) & std::numeric_limits<Key>::max());
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Vectors of 32 bytes, four or eight lanes: wider ones would live in memory. Written out where the compiler does not
// find the vector loop by itself.
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(32)));
  static constexpr std::int32_t size = 32 / sizeof(T);

  static inline void load(const T* from, type& to) { std::memcpy(&to, from, sizeof to); }
  static inline void fill(T value, type& to) { to = value - type{}; }
  static inline void maximum(const type& other, type& to) { to = other > to ? other : to; }
  static inline void minimum(const type& other, type& to) { to = other < to ? other : to; }
  static inline void sum(const type& other, type& to) { to += other; }

  // Each lane of `to` gets lane (its own number xor distance) of `from`, for a distance of 1, 2 or 4.
  template <std::int32_t distance>
  static inline void exchange(const type& from, type& to) {
    if constexpr (size == 8) {
      if constexpr (distance == 4) to = __builtin_shufflevector(from, from, 4, 5, 6, 7, 0, 1, 2, 3);
      if constexpr (distance == 2) to = __builtin_shufflevector(from, from, 2, 3, 0, 1, 6, 7, 4, 5);
      if constexpr (distance == 1) to = __builtin_shufflevector(from, from, 1, 0, 3, 2, 5, 4, 7, 6);
    } else {
      if constexpr (distance == 2) to = __builtin_shufflevector(from, from, 2, 3, 0, 1);
      if constexpr (distance == 1) to = __builtin_shufflevector(from, from, 1, 0, 3, 2);
    }
  }

  // Combines all lanes by a commutative, associative operation combine(other, to).
  template <std::int32_t distance = size / 2, class Combine>
  static inline T reduce(type& value, Combine combine) {
    type other;
    exchange<distance>(value, other);
    combine(other, value);
    if constexpr (distance > 1) return reduce<distance / 2>(value, combine);
    return value[0];
  }

  // first and second: the two highest of what each lane has seen (equal values count twice). Leaves those of all lanes
  // in lane 0.
  template <std::int32_t distance = size / 2>
  static inline void reduce_two_highest(type& first, type& second) {
    type other_first, other_second;
    exchange<distance>(first, other_first);
    exchange<distance>(second, other_second);
    maximum(other_second, second);
    maximum(other_first < first ? other_first : first, second);
    maximum(other_first, first);
    if constexpr (distance > 1) reduce_two_highest<distance / 2>(first, second);
  }
};

// Sum of x[e], or of x[e] * y[e] with Dot. Lane l sums the terms e = l (mod lanes) in order; then lanes 8, 4, 2 and 1
// apart are added.
template <bool Dot, class T>
inline T lane_sum(const T* x, const T* y, std::int32_t width) {
  using Vector = typename VectorOf<T>::type;
  constexpr std::int32_t per_vector = VectorOf<T>::size, vectors = lanes / per_vector;
  Vector partial[vectors] = {};
  for (std::int32_t e = 0; e < width; e += lanes)
    for (std::int32_t v = 0; v < vectors; ++v) {
      Vector terms;
      std::memcpy(&terms, x + e + v * per_vector, sizeof terms);
      if constexpr (Dot) {
        Vector factors;
        std::memcpy(&factors, y + e + v * per_vector, sizeof factors);
        terms *= factors;
      }
      partial[v] += terms;
    }
  T lane[lanes];
  std::memcpy(lane, partial, sizeof lane);
  for (std::int32_t apart = lanes / 2; apart > 0; apart /= 2)
    for (std::int32_t l = 0; l < apart; ++l) lane[l] += lane[l + apart];
  return lane[0];
}

template <class T>
inline T row_sum(const T* x, std::int32_t width) {
  return lane_sum<false, T>(x, nullptr, width);
}

template <class T>
inline T row_dot(const T* x, const T* y, std::int32_t width) {
  return lane_sum<true>(x, y, width);
}

template <class Storage>
inline void load_row(const Storage* source, std::int32_t num_experts, std::int32_t width,
                     numerics::accumulator_t<Storage>* logits) {
  using T = numerics::accumulator_t<Storage>;
  for (std::int32_t e = 0; e < num_experts; ++e) logits[e] = finite_or_excluded(numerics::load(source[e]));
  for (std::int32_t e = num_experts; e < width; ++e) logits[e] = excluded<T>();
}

// out[e] = exp(l_e - highest); returns their sum. For a row without finite logits: all 0.
template <class T>
inline T exponentials(const T* logits, T highest, std::int32_t width, T* out) {
  const T shift = highest == excluded<T>() ? T(0) : highest;
  for (std::int32_t e = 0; e < width; ++e) out[e] = numerics::exp(logits[e] - shift);
  return row_sum(out, width);
}

template <class T>
inline T or_one(T sum) {
  return sum > T(0) ? sum : T(1);
}

// Softmax over the k chosen logits, 0 for those that are excluded. out has room for max_top_k.
template <class T>
inline void softmax_of_chosen(const T* logits, const std::int32_t* ids, std::int32_t k, T* out) {
  T highest = excluded<T>();
  for (std::int32_t j = 0; j < k; ++j) {
    out[j] = logits[ids[j]];
    highest = out[j] > highest ? out[j] : highest;
  }
  const T shift = highest == excluded<T>() ? T(0) : highest;
  const std::int32_t whole_vectors = (k + 7) / 8 * 8;
  for (std::int32_t j = k; j < whole_vectors; ++j) out[j] = T(0);
  for (std::int32_t j = 0; j < whole_vectors; ++j) out[j] = numerics::exp(out[j] - shift);
  T sum = T(0);
  for (std::int32_t j = 0; j < k; ++j) sum += out[j];
  sum = or_one(sum);
  for (std::int32_t j = 0; j < k; ++j) out[j] /= sum;
}

// Choice of the k highest keys. Keys stay as they are (a store into what vectors load next would stall); instead each
// block of 64 knows the highest key that it still has to give.
template <class T>
class Choice {
 public:
  using Key = typename OrderKey<T>::type;

  inline void fill(const T* selection, std::int32_t width) {
    blocks_ = (width + block - 1) / block;
    for (std::int32_t e = 0; e < width; ++e) keys_[e] = order_key(selection[e]);
    for (std::int32_t e = width; e < blocks_ * block; ++e) keys_[e] = OrderKey<T>::excluded;
    for (std::int32_t b = 0; b < blocks_; ++b) {
      const Key* keys = keys_ + b * block;
      Key highest = OrderKey<T>::excluded;
      for (std::int32_t i = 0; i < block; ++i) highest = keys[i] > highest ? keys[i] : highest;
      highest_[b] = highest;
      resume_[b] = 0;
    }
  }

  // The expert with the highest key, the lowest id among equals, which then counts as excluded; -1 if all are.
  inline std::int32_t take() {
    std::int32_t b = 0;
    for (std::int32_t other = 1; other < blocks_; ++other) b = highest_[other] > highest_[b] ? other : b;
    const Key highest = highest_[b];
    if (highest == OrderKey<T>::excluded) return -1;
    const Key* keys = keys_ + b * block;
    // At once: where the key is, how often it is there, and the highest one below it.
    using V = VectorOf<Key>;
    using Vector = typename V::type;
    Vector wanted, none, ids, first, count = {}, below;
    V::fill(highest, wanted);
    V::fill(OrderKey<T>::excluded, none);
    V::fill(block, first);
    below = none;
    for (std::int32_t i = 0; i < V::size; ++i) ids[i] = i;
    for (std::int32_t i = 0; i < block; i += V::size) {
      Vector here;
      V::load(keys + i, here);
      const Vector equal = here == wanted;  // -1 where true
      V::minimum(equal ? ids : first, first);
      count += equal;
      V::maximum(here < wanted ? here : none, below);
      ids += V::size;
    }
    Key next = V::reduce(below, V::maximum);
    std::int32_t i = static_cast<std::int32_t>(V::reduce(first, V::minimum));
    if (V::reduce(count, V::sum) < -1) {  // a tie: after the last taken
      i = resume_[b];
      while (keys[i] != highest) ++i;
      std::int32_t more = i + 1;
      while (more < block && keys[more] != highest) ++more;
      resume_[b] = more < block ? more : 0;
      if (more < block) next = highest;
    }
    highest_[b] = next;
    return b * block + i;
  }

 private:
  static constexpr std::int32_t block = 64;
  alignas(64) Key keys_[max_experts];
  Key highest_[max_experts / block];
  std::int32_t resume_[max_experts / block];  // where to look for the next of equal keys
  std::int32_t blocks_ = 0;
};

// Excludes the experts of all groups but the best ones; kept[g] tells which stay.
template <class T>
inline void limit_groups(const RouterConfig& config, std::int32_t num_experts, T* selection, bool* kept) {
  const std::int32_t size = num_experts / config.num_groups;
  T score[max_experts];
  for (std::int32_t g = 0; g < config.num_groups; ++g) {
    const T* members = selection + static_cast<std::ptrdiff_t>(g) * size;
    // The two highest of each lane, then of the lanes and the rest.
    using V = VectorOf<T>;
    typename V::type first, second;
    V::fill(excluded<T>(), first);
    second = first;
    std::int32_t e = 0;
    for (; e + V::size <= size; e += V::size) {
      typename V::type values;
      V::load(members + e, values);
      V::maximum(values < first ? values : first, second);
      V::maximum(values, first);
    }
    V::reduce_two_highest(first, second);
    T highest = first[0], next = second[0];
    for (; e < size; ++e) {
      const T lower = members[e] < highest ? members[e] : highest;
      next = lower > next ? lower : next;
      highest = members[e] > highest ? members[e] : highest;
    }
    // A group with one candidate is scored by it alone; one with none is excluded like an expert.
    score[g] = config.group_score_size == 2 && next != excluded<T>() ? highest + next : highest;
    kept[g] = false;
  }
  for (std::int32_t n = 0; n < config.top_groups; ++n) {
    std::int32_t best = -1;
    for (std::int32_t g = 0; g < config.num_groups; ++g)
      if (!kept[g] && (best < 0 || score[g] > score[best])) best = g;
    kept[best] = true;
  }
  for (std::int32_t g = 0; g < config.num_groups; ++g)
    if (!kept[g]) std::fill_n(selection + static_cast<std::ptrdiff_t>(g) * size, size, excluded<T>());
}

// Lowest ids of kept groups that are not in ids[0, have) yet.
inline void fill_with_unused(const RouterConfig& config, std::int32_t num_experts, const bool* kept, std::int32_t have,
                             std::int32_t k, std::int32_t* ids) {
  const std::int32_t size = num_experts / config.num_groups;
  for (std::int32_t e = 0; e < num_experts && have < k; ++e) {
    if (limits_groups(config) && !kept[e / size]) continue;
    if (std::find(ids, ids + have, e) == ids + have) ids[have++] = e;
  }
}

template <class Count, class Sum>
inline double aux_of(const RouterSpec& spec, const Count* counts, std::int64_t tokens, const Sum* score_sums) {
  if (tokens <= 0) return 0.0;
  double dot = 0.0;
  for (std::int32_t e = 0; e < spec.num_experts; ++e)
    dot += static_cast<double>(counts[e]) * static_cast<double>(score_sums[e]);
  return aux_from_dot(spec.config.aux_loss_coefficient, spec.num_experts, dot, spec.top_k, tokens);
}

// Per-unit results in the workspace.
template <class T>
struct Scratch {
  T* sums = nullptr;               // [units, width]: sums of scores; in backward, slopes of aux by score
  std::int32_t* counts = nullptr;  // [units, width]
  double* aux = nullptr;           // [units], of the whole sequences that the unit holds
  T* z = nullptr;                  // [units]: sum of logsumexp^2
  T* slopes = nullptr;             // [width], backward of batch and global
  void* capacity = nullptr;
  std::size_t bytes = 0;

  static Scratch over(void* workspace, const RouterSpec& spec, std::int64_t tokens) {
    const std::size_t units = static_cast<std::size_t>(tokens / 32 + 1);
    const std::size_t width = static_cast<std::size_t>(padded(spec.num_experts));
    Scratch scratch;
    char* base = static_cast<char*>(workspace);
    const auto part = [&](std::size_t bytes) -> void* {
      void* at = base ? base + scratch.bytes : nullptr;
      scratch.bytes += aligned(bytes);
      return at;
    };
    scratch.sums = static_cast<T*>(part(units * width * sizeof(T)));
    scratch.counts = static_cast<std::int32_t*>(part(units * width * sizeof(std::int32_t)));
    scratch.aux = static_cast<double*>(part(units * sizeof(double)));
    scratch.z = static_cast<T*>(part(units * sizeof(T)));
    scratch.slopes = static_cast<T*>(part(width * sizeof(T)));
    if (spec.config.capacity_factor > 0)
      scratch.capacity = part(capacity_workspace_bytes(tokens, spec.top_k, spec.num_experts));
    return scratch;
  }
};

template <class Storage>
struct ForwardJob {
  using T = numerics::accumulator_t<Storage>;
  RouterSpec spec;
  RouterInputs<T> inputs;
  std::int32_t* ids;
  T* weights;
  Units units;
  Scratch<T> scratch;
  bool score_sums, z;  // whether these are wanted
};

template <class Storage>
struct ForwardRows {
  using T = numerics::accumulator_t<Storage>;
  RowOf<T> logits, scores, selection;
  Choice<T> choice;
  bool kept[max_experts];

  // Adds the row's scores to sums (if wanted) and its choices to counts; returns logsumexp^2 (if wanted).
  inline T row(const ForwardJob<Storage>& job, std::int64_t t, T* sums, std::int32_t* counts) {
    const RouterConfig& config = job.spec.config;
    const std::int32_t num_experts = job.spec.num_experts, width = padded(num_experts), k = job.spec.top_k;
    const bool sigmoid = config.kind == RouterKind::sigmoid;
    const bool of_chosen = weights_are_softmax_of_chosen(config), choose_by_logits = chooses_by_logits(config);
    T* x = logits.values;
    T* s = scores.values;
    load_row(static_cast<const Storage*>(job.inputs.logits) + t * job.inputs.logits_stride, num_experts, width, x);

    // Scores: only where something reads them.
    T z = T(0);
    if (job.z || (!sigmoid && (job.score_sums || !choose_by_logits || !of_chosen))) {
      const T highest = row_max(x, width);
      const T sum = exponentials(x, highest, width, s);
      const T lse = job.z ? log_sum_exp(highest, sum) : T(0);
      z = lse * lse;
      const T divisor = or_one(sum);
      for (std::int32_t e = 0; e < width; ++e) s[e] /= divisor;
    }
    if (sigmoid && (job.score_sums || !choose_by_logits))
      for (std::int32_t e = 0; e < width; ++e) s[e] = numerics::sigmoid(x[e]);
    if (job.score_sums) {
      if (sigmoid) {
        const T divisor = row_sum(s, width) + T(sigmoid_sum_floor);
        for (std::int32_t e = 0; e < width; ++e) sums[e] += s[e] / divisor;
      } else {
        for (std::int32_t e = 0; e < width; ++e) sums[e] += s[e];
      }
    }

    // Choice.
    std::int32_t* ids = job.ids + t * k;
    const T* chosen_by = x;
    if (!choose_by_logits || config.selection_bias || limits_groups(config)) {
      T* selected = selection.values;
      const T* from = choose_by_logits ? x : s;
      const T* bias = config.selection_bias ? job.inputs.selection_bias : nullptr;
      for (std::int32_t e = 0; e < width; ++e) selected[e] = x[e] == excluded<T>() ? x[e] : from[e];
      if (bias)
        for (std::int32_t e = 0; e < num_experts; ++e) selected[e] = finite_or_excluded(selected[e] + bias[e]);
      if (limits_groups(config)) limit_groups(config, num_experts, selected, kept);
      chosen_by = selected;
    }
    choice.fill(chosen_by, width);
    for (std::int32_t j = 0; j < k; ++j) {
      ids[j] = choice.take();
      if (ids[j] < 0) {
        fill_with_unused(config, num_experts, kept, j, k, ids);
        break;
      }
    }
    for (std::int32_t j = 0; j < k; ++j) ++counts[ids[j]];

    // Weights.
    T w[max_top_k];
    if (of_chosen) {
      softmax_of_chosen(x, ids, k, w);
    } else if (sigmoid) {
      for (std::int32_t j = 0; j < k; ++j) w[j] = numerics::sigmoid(x[ids[j]]);
      if (config.renormalize) {
        T sum = T(0);
        for (std::int32_t j = 0; j < k; ++j) sum += w[j];
        sum += T(sigmoid_sum_floor);
        for (std::int32_t j = 0; j < k; ++j) w[j] /= sum;
      }
    } else {
      for (std::int32_t j = 0; j < k; ++j) w[j] = s[ids[j]];
    }
    const T scale = T(config.scaling_factor);
    for (std::int32_t j = 0; j < k; ++j) job.weights[t * k + j] = w[j] * scale;
    return z;
  }

  inline void unit(const ForwardJob<Storage>& job, std::int64_t u) {
    const std::int32_t width = padded(job.spec.num_experts), k = job.spec.top_k;
    const Units& units = job.units;
    T* sums = job.scratch.sums + u * width;
    std::int32_t* counts = job.scratch.counts + u * width;
    std::fill_n(sums, width, T(0));
    std::fill_n(counts, width, 0);
    const std::int64_t end = units.end(u);
    const std::int64_t present = std::clamp(job.inputs.valid_tokens, units.begin(u), end);
    T z = T(0);
    double aux = 0.0;
    // Whole sequences: the loss of each is complete here. Otherwise one stretch, whose sums go to the workspace.
    const bool whole = job.spec.config.aux_loss == AuxLossKind::sequence && units.units_per_sequence == 1;
    const std::int64_t step = whole ? units.length : unit_tokens;
    std::int32_t sequence_counts[max_experts];
    for (std::int64_t from = units.begin(u); from < present; from += step) {
      const std::int64_t to = std::min(from + step, present);
      if (whole) {
        std::fill_n(sums, width, T(0));
        std::fill_n(sequence_counts, width, 0);
      }
      std::int32_t* counting = whole ? sequence_counts : counts;
      for (std::int64_t t = from; t < to; ++t) z += row(job, t, sums, counting);
      if (whole) {
        if (job.score_sums) aux += aux_of(job.spec, counting, to - from, sums);
        for (std::int32_t e = 0; e < width; ++e) counts[e] += counting[e];
      }
    }
    std::fill_n(job.ids + present * k, (end - present) * k, -1);
    std::fill_n(job.weights + present * k, (end - present) * k, T(0));
    job.scratch.aux[u] = aux;
    job.scratch.z[u] = z;
  }

  static inline void run(const ForwardJob<Storage>& job, std::int64_t begin, std::int64_t end) {
    ForwardRows rows;
    for (std::int64_t u = begin; u < end; ++u) rows.unit(job, u);
  }
};

template <class Storage>
struct BackwardJob {
  using T = numerics::accumulator_t<Storage>;
  RouterSpec spec;
  RouterInputs<T> inputs;
  RouterGradients<T> gradients;
  Units units;
  Scratch<T> scratch;
  bool aux, z;  // whether these have a gradient
  std::int64_t valid;
};

// Choices in rows [begin, end) of chosen_ids.
inline void count_choices(const std::int32_t* chosen_ids, std::int32_t k, std::int64_t begin, std::int64_t end,
                          std::int32_t* counts) {
  for (std::int64_t i = begin * k; i < end * k; ++i)
    if (chosen_ids[i] >= 0) ++counts[chosen_ids[i]];
}

template <class T, class Count>
inline void aux_slopes(const RouterSpec& spec, T upstream, const Count* counts, std::int64_t tokens, T* slopes) {
  for (std::int32_t e = 0; e < padded(spec.num_experts); ++e)
    slopes[e] =
        e < spec.num_experts
            ? T(aux_slope(upstream, spec.config.aux_loss_coefficient, spec.num_experts, counts[e], spec.top_k, tokens))
            : T(0);
}

template <class Storage>
struct BackwardRows {
  using T = numerics::accumulator_t<Storage>;
  RowOf<T> logits, scores, gradient, sequence_slopes;

  // slopes: of the aux loss by score, or null.
  inline void row(const BackwardJob<Storage>& job, std::int64_t t, const T* slopes, T z_factor) {
    const RouterConfig& config = job.spec.config;
    const std::int32_t num_experts = job.spec.num_experts, width = padded(num_experts), k = job.spec.top_k;
    const bool sigmoid = config.kind == RouterKind::sigmoid;
    const bool of_chosen = weights_are_softmax_of_chosen(config);
    T* x = logits.values;
    T* s = scores.values;
    T* d = gradient.values;
    load_row(static_cast<const Storage*>(job.inputs.logits) + t * job.inputs.logits_stride, num_experts, width, x);

    // Gradient into the weights before scaling.
    const std::int32_t* ids = job.gradients.chosen_ids + t * k;
    T g[max_top_k];
    for (std::int32_t j = 0; j < k; ++j) {
      const bool takes =
          job.gradients.d_topk_weights && (!job.gradients.topk_ids || job.gradients.topk_ids[t * k + j] >= 0);
      g[j] = takes ? job.gradients.d_topk_weights[t * k + j] * T(config.scaling_factor) : T(0);
    }

    // The softmax over all E: as scores, and for the z loss.
    const bool scores_are_softmax = !sigmoid && (slopes || !of_chosen);
    if (scores_are_softmax || job.z) {
      const T highest = row_max(x, width);
      const T sum = exponentials(x, highest, width, s);
      const T divisor = or_one(sum);
      for (std::int32_t e = 0; e < width; ++e) s[e] /= divisor;
      T common = job.z ? z_factor * log_sum_exp(highest, sum) : T(0);
      if (scores_are_softmax) {
        if (slopes) common -= row_dot(slopes, s, width);
        if (!of_chosen) {
          T dot = T(0);
          for (std::int32_t j = 0; j < k; ++j) dot += g[j] * s[ids[j]];
          common -= dot;
        }
      }
      if (scores_are_softmax && slopes)
        for (std::int32_t e = 0; e < width; ++e) d[e] = s[e] * (slopes[e] + common);
      else
        for (std::int32_t e = 0; e < width; ++e) d[e] = s[e] * common;
      if (scores_are_softmax && !of_chosen)
        for (std::int32_t j = 0; j < k; ++j) d[ids[j]] += s[ids[j]] * g[j];
    } else {
      std::fill_n(d, width, T(0));
    }

    if (of_chosen) {
      T q[max_top_k];
      softmax_of_chosen(x, ids, k, q);
      T dot = T(0);
      for (std::int32_t j = 0; j < k; ++j) dot += q[j] * g[j];
      for (std::int32_t j = 0; j < k; ++j) d[ids[j]] += q[j] * (g[j] - dot);
    }
    if (sigmoid && slopes) {
      for (std::int32_t e = 0; e < width; ++e) s[e] = numerics::sigmoid(x[e]);
      const T divisor = row_sum(s, width) + T(sigmoid_sum_floor);
      const T mean = row_dot(slopes, s, width) / divisor;
      for (std::int32_t e = 0; e < width; ++e) d[e] += (slopes[e] - mean) / divisor * numerics::sigmoid_slope(x[e]);
    }
    if (sigmoid) {
      T divisor = T(1), mean = T(0);
      if (config.renormalize) {
        T w[max_top_k], sum = T(0), dot = T(0);
        for (std::int32_t j = 0; j < k; ++j) {
          w[j] = numerics::sigmoid(x[ids[j]]);
          sum += w[j];
        }
        divisor = sum + T(sigmoid_sum_floor);
        for (std::int32_t j = 0; j < k; ++j) dot += g[j] * (w[j] / divisor);
        mean = dot;
      }
      for (std::int32_t j = 0; j < k; ++j) d[ids[j]] += (g[j] - mean) / divisor * numerics::sigmoid_slope(x[ids[j]]);
    }

    Storage* out = static_cast<Storage*>(job.gradients.d_logits) + t * job.gradients.d_logits_stride;
    for (std::int32_t e = 0; e < num_experts; ++e)
      out[e] = numerics::store<Storage>(x[e] == excluded<T>() ? T(0) : d[e]);
  }

  inline void unit(const BackwardJob<Storage>& job, std::int64_t u) {
    const std::int32_t num_experts = job.spec.num_experts, width = padded(num_experts), k = job.spec.top_k;
    const Units& units = job.units;
    const std::int64_t end = units.end(u);
    const std::int64_t present = std::clamp(job.valid, units.begin(u), end);
    const T z_factor = T(z_slope(job.gradients.d_z_loss, job.spec.config.z_loss_coefficient, job.valid));
    const bool sequence = job.spec.config.aux_loss == AuxLossKind::sequence;
    const bool whole = sequence && units.units_per_sequence == 1;
    const T* slopes = !job.aux   ? nullptr
                      : whole    ? sequence_slopes.values
                      : sequence ? job.scratch.sums + u / units.units_per_sequence * units.units_per_sequence * width
                                 : job.scratch.slopes;
    const std::int64_t step = whole ? units.length : unit_tokens;
    for (std::int64_t from = units.begin(u); from < present; from += step) {
      const std::int64_t to = std::min(from + step, present);
      if (job.aux && whole) {
        std::int32_t counts[max_experts];
        std::fill_n(counts, width, 0);
        count_choices(job.gradients.chosen_ids, k, from, to, counts);
        aux_slopes(job.spec, job.gradients.d_aux_loss, counts, to - from, sequence_slopes.values);
      }
      for (std::int64_t t = from; t < to; ++t) row(job, t, slopes, z_factor);
    }
    for (std::int64_t t = present; t < end; ++t) {
      Storage* out = static_cast<Storage*>(job.gradients.d_logits) + t * job.gradients.d_logits_stride;
      for (std::int32_t e = 0; e < num_experts; ++e) out[e] = numerics::store<Storage>(T(0));
    }
  }

  static inline void run(const BackwardJob<Storage>& job, std::int64_t begin, std::int64_t end) {
    BackwardRows rows;
    for (std::int64_t u = begin; u < end; ++u) rows.unit(job, u);
  }
};

#if MOELITH_ROUTING_WIDE
template <class Rows, class Job>
__attribute__((target("avx2,fma"), flatten)) void run_wide(const Job& job, std::int64_t begin, std::int64_t end) {
  Rows::run(job, begin, end);
}
#endif

template <class Rows, class Job>
void run_rows(const Job& job, const ParallelFor& parallel_for) {
  parallel_for(job.units.count, [&job](std::int64_t begin, std::int64_t end) {
#if MOELITH_ROUTING_WIDE
    static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (wide) return run_wide<Rows>(job, begin, end);
#endif
    Rows::run(job, begin, end);
  });
}

// The loss of a call of `sequence` with several units a sequence; others have it in scratch.aux already.
template <class T>
double aux_of_long_sequences(const RouterSpec& spec, const Units& units, std::int64_t valid,
                             const Scratch<T>& scratch) {
  const std::int32_t width = padded(spec.num_experts);
  double total = 0.0;
  for (std::int64_t first = 0; first < units.count; first += units.units_per_sequence) {
    double sums[max_experts] = {};
    std::int64_t counts[max_experts] = {};
    for (std::int64_t u = first; u < first + units.units_per_sequence; ++u)
      for (std::int32_t e = 0; e < spec.num_experts; ++e) {
        sums[e] += scratch.sums[u * width + e];
        counts[e] += scratch.counts[u * width + e];
      }
    total += aux_of(spec, counts, valid_tokens_of(first / units.units_per_sequence, units.length, valid), sums);
  }
  return total;
}

template <class T>
RouterInputs<T> checked(const RouterSpec& spec, RouterInputs<T> inputs) {
  spec.validate();
  if (inputs.tokens < 0) refuse("tokens is " + std::to_string(inputs.tokens) + "; it must be at least 0");
  inputs.valid_tokens = std::clamp<std::int64_t>(inputs.valid_tokens, 0, inputs.tokens);
  if (inputs.tokens > 1 && inputs.logits_stride < spec.num_experts)
    refuse("row stride of router_logits is " + std::to_string(inputs.logits_stride) + "; it must be at least " +
           std::to_string(spec.num_experts));
  if (spec.config.aux_loss != AuxLossKind::sequence) {
    inputs.num_sequences = 1;
  } else if (inputs.num_sequences < 1 || inputs.tokens % inputs.num_sequences != 0) {
    refuse("num_sequences is " + std::to_string(inputs.num_sequences) +
           "; it must be at least 1 and divide T = " + std::to_string(inputs.tokens));
  }
  return inputs;
}

// Calls f.operator()<Storage>() for the storage type of the logits.
template <class T, class F>
void with_storage(DataType dtype, F&& f) {
  if constexpr (sizeof(T) == sizeof(double)) {
    if (dtype == DataType::float64) return f.template operator()<double>();
    refuse(std::string("router_logits has dtype ") + to_string(dtype) + "; a float64 layer takes float64");
  } else {
    if (dtype == DataType::float32) return f.template operator()<float>();
    if (dtype == DataType::bfloat16) return f.template operator()<bfloat16>();
    refuse(std::string("router_logits has dtype ") + to_string(dtype) +
           "; accepted are float32 and bfloat16, or float64 for a float64 layer");
  }
}

}  // namespace

void RouterSpec::validate() const {
  if (num_experts < 1 || num_experts > max_experts)
    refuse("num_experts is " + std::to_string(num_experts) + "; accepted are 1 to " + std::to_string(max_experts));
  if (top_k < 1 || top_k > std::min(num_experts, max_top_k))
    refuse("top_k is " + std::to_string(top_k) + "; accepted are 1 to " +
           std::to_string(std::min(num_experts, max_top_k)));
  if (config.num_groups < 1 || num_experts % config.num_groups != 0)
    refuse("router.num_groups is " + std::to_string(config.num_groups) +
           "; it must divide num_experts = " + std::to_string(num_experts));
  if (config.top_groups < 1 || config.top_groups > config.num_groups)
    refuse("router.top_groups is " + std::to_string(config.top_groups) +
           "; accepted are 1 to num_groups = " + std::to_string(config.num_groups));
  if (num_experts / config.num_groups * config.top_groups < top_k)
    refuse("router.top_groups is " + std::to_string(config.top_groups) + ", which leaves " +
           std::to_string(num_experts / config.num_groups * config.top_groups) +
           " experts; at least top_k = " + std::to_string(top_k) + " are needed");
  if (config.group_score_size != 1 && config.group_score_size != 2)
    refuse("router.group_score_size is " + std::to_string(config.group_score_size) + "; accepted are 1 and 2");
}

template <class T>
std::size_t router_workspace_bytes(const RouterSpec& spec, std::int64_t tokens) {
  return Scratch<T>::over(nullptr, spec, std::max<std::int64_t>(tokens, 0)).bytes;
}

template <class T>
void router_forward(const RouterSpec& spec, const RouterInputs<T>& given, const RouterOutputs<T>& outputs,
                    void* workspace, const ParallelFor& parallel_for) {
  const RouterInputs<T> inputs = checked(spec, given);
  const std::int32_t num_experts = spec.num_experts, width = padded(num_experts), k = spec.top_k;
  const RouterConfig& config = spec.config;
  const bool capacity = config.capacity_factor > 0;
  if (config.selection_bias && !inputs.selection_bias)
    refuse("selection_bias is missing; router.selection_bias is set");
  if (capacity && inputs.tokens > 0 && !outputs.chosen_ids) refuse("chosen_ids is missing; capacity_factor is set");
  const Scratch<T> scratch = Scratch<T>::over(workspace, spec, inputs.tokens);
  const Units units = Units::of(inputs.tokens, inputs.num_sequences);
  const bool sequence = config.aux_loss == AuxLossKind::sequence;
  const bool whole_batch = config.aux_loss == AuxLossKind::batch || config.aux_loss == AuxLossKind::global;
  const bool wants_aux = outputs.aux_loss && config.aux_loss_coefficient != 0.0;
  const bool score_sums =
      whole_batch ? outputs.score_sums || (wants_aux && config.aux_loss == AuxLossKind::batch) : sequence && wants_aux;
  const bool z = outputs.z_loss && config.z_loss_coefficient != 0.0;
  with_storage<T>(inputs.logits_dtype, [&]<class Storage>() {
    const ForwardJob<Storage> job{
        spec,       inputs, capacity ? outputs.chosen_ids : outputs.topk_ids, outputs.topk_weights, units, scratch,
        score_sums, z};
    run_rows<ForwardRows<Storage>>(job, parallel_for);
  });

  // What units found, in their order.
  std::int64_t counts[max_experts] = {};
  double sums[max_experts] = {};
  for (std::int64_t u = 0; u < units.count; ++u) {
    for (std::int32_t e = 0; e < num_experts; ++e) counts[e] += scratch.counts[u * width + e];
    if (score_sums && whole_batch)
      for (std::int32_t e = 0; e < num_experts; ++e) sums[e] += static_cast<double>(scratch.sums[u * width + e]);
  }
  if (outputs.counts) std::copy_n(counts, num_experts, outputs.counts);
  T rounded_sums[max_experts];  // as a caller of aux_loss() gets them
  for (std::int32_t e = 0; e < num_experts; ++e) rounded_sums[e] = T(sums[e]);
  if (outputs.score_sums && whole_batch) std::copy_n(rounded_sums, num_experts, outputs.score_sums);
  if (outputs.aux_loss && config.aux_loss != AuxLossKind::global) {
    double aux = 0.0;
    if (wants_aux && config.aux_loss == AuxLossKind::batch) {
      aux = aux_of(spec, counts, inputs.valid_tokens, rounded_sums);
    } else if (wants_aux && sequence && units.units_per_sequence > 1) {
      aux = aux_of_long_sequences(spec, units, inputs.valid_tokens, scratch);
    } else if (wants_aux && sequence) {
      for (std::int64_t u = 0; u < units.count; ++u) aux += scratch.aux[u];
    }
    *outputs.aux_loss = T(aux);
  }
  if (outputs.z_loss) {
    double total = 0.0;
    for (std::int64_t u = 0; z && u < units.count; ++u) total += static_cast<double>(scratch.z[u]);
    *outputs.z_loss = inputs.valid_tokens > 0
                          ? T(config.z_loss_coefficient * (total / static_cast<double>(inputs.valid_tokens)))
                          : T(0);
  }

  if (capacity) {
    std::copy_n(outputs.chosen_ids, inputs.tokens * k, outputs.topk_ids);
    apply_capacity<T>(config.drop_policy, expert_capacity(config.capacity_factor, inputs.tokens, k, num_experts),
                      inputs.tokens, k, num_experts, outputs.topk_ids, outputs.topk_weights, scratch.capacity,
                      parallel_for);
  }
}

template <class T>
T aux_loss(const RouterSpec& spec, const std::int64_t* counts, std::int64_t tokens, const T* score_sums) {
  return T(aux_of(spec, counts, tokens, score_sums));
}

template <class T>
void router_backward(const RouterSpec& spec, const RouterInputs<T>& given, const RouterGradients<T>& gradients,
                     void* workspace, const ParallelFor& parallel_for) {
  const RouterInputs<T> inputs = checked(spec, given);
  const RouterConfig& config = spec.config;
  const std::int32_t width = padded(spec.num_experts), k = spec.top_k;
  if (inputs.tokens > 1 && gradients.d_logits_stride < spec.num_experts)
    refuse("row stride of the gradient of router_logits is " + std::to_string(gradients.d_logits_stride) +
           "; it must be at least " + std::to_string(spec.num_experts));
  if (config.capacity_factor > 0 && inputs.tokens > 0 && !gradients.topk_ids)
    refuse("topk_ids is missing; capacity_factor is set");
  const Scratch<T> scratch = Scratch<T>::over(workspace, spec, inputs.tokens);
  const Units units = Units::of(inputs.tokens, inputs.num_sequences);
  const bool aux =
      config.aux_loss != AuxLossKind::none && config.aux_loss_coefficient != 0.0 && gradients.d_aux_loss != T(0);
  const bool z = config.z_loss_coefficient != 0.0 && gradients.d_z_loss != T(0);
  if (aux && config.aux_loss == AuxLossKind::sequence && units.units_per_sequence > 1) {
    parallel_for(units.count, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t u = begin; u < end; ++u) {
        std::fill_n(scratch.counts + u * width, width, 0);
        count_choices(gradients.chosen_ids, k, units.begin(u),
                      std::clamp(inputs.valid_tokens, units.begin(u), units.end(u)), scratch.counts + u * width);
      }
    });
    parallel_for(inputs.num_sequences, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t q = begin; q < end; ++q) {
        std::int64_t counts[max_experts] = {};
        for (std::int64_t u = q * units.units_per_sequence; u < (q + 1) * units.units_per_sequence; ++u)
          for (std::int32_t e = 0; e < spec.num_experts; ++e) counts[e] += scratch.counts[u * width + e];
        aux_slopes(spec, gradients.d_aux_loss, counts, valid_tokens_of(q, units.length, inputs.valid_tokens),
                   scratch.sums + q * units.units_per_sequence * width);
      }
    });
  } else if (aux && config.aux_loss != AuxLossKind::sequence) {
    if (!gradients.counts) refuse("counts is missing; the aux loss has a gradient");
    aux_slopes(spec, gradients.d_aux_loss, gradients.counts, gradients.count_tokens, scratch.slopes);
  }
  with_storage<T>(inputs.logits_dtype, [&]<class Storage>() {
    const BackwardJob<Storage> job{spec, inputs, gradients, units, scratch, aux, z, inputs.valid_tokens};
    run_rows<BackwardRows<Storage>>(job, parallel_for);
  });
}

#define MOELITH_INSTANTIATE(T)                                                                                  \
  template std::size_t router_workspace_bytes<T>(const RouterSpec&, std::int64_t);                              \
  template void router_forward<T>(const RouterSpec&, const RouterInputs<T>&, const RouterOutputs<T>&, void*,    \
                                  const ParallelFor&);                                                          \
  template T aux_loss<T>(const RouterSpec&, const std::int64_t*, std::int64_t, const T*);                       \
  template void router_backward<T>(const RouterSpec&, const RouterInputs<T>&, const RouterGradients<T>&, void*, \
                                   const ParallelFor&);
MOELITH_INSTANTIATE(float)
MOELITH_INSTANTIATE(double)
#undef MOELITH_INSTANTIATE

}  // namespace moelith::routing
