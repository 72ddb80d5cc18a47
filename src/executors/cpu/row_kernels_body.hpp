// The bodies of row_kernels.hpp, included by one file for each instruction set. In an unnamed namespace, so that each of
// those files keeps its own.
#include <algorithm>

#include "executors/cpu/row_kernels.hpp"

namespace moelith::executors::cpu {
namespace {

using numerics::accumulator_t;
using numerics::Activation;
using numerics::load;
using numerics::rounded;
using numerics::store;

// 16 lanes over the columns of one group, then lanes 8, 4, 2, 1 apart: one order for every vector width.
template <class T, class F>
T sum_of_group(std::int64_t begin, std::int64_t end, F term) {
  T lanes[16] = {};
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    for (int l = 0; l < 16; ++l) lanes[l] += term(i + l);
  }
  for (int l = 0; i + l < end; ++l) lanes[l] += term(i + l);
  for (int step = 8; step >= 1; step /= 2) {
    for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
  }
  return lanes[0];
}

template <class S>
struct Bodies {
  using T = accumulator_t<S>;
  using Kernels = RowKernels<S>;

  template <ActivationKind Kind>
  static void activate_kind(const Activation& activation, const typename Kernels::ActivateArguments& in,
                            std::int64_t width) {
    constexpr bool gated = Kind != ActivationKind::relu_squared;
    // Rounded pre-activations of a few columns at a time: the loops stay simple enough to vectorise.
    constexpr std::int64_t piece = 64;
    const numerics::ActivationParameters<T> parameters(activation);
    T gate[piece], up[piece];
    for (std::int64_t begin = 0; begin < width; begin += piece) {
      const std::int64_t n = std::min(piece, width - begin);
      auto round_piece = [&](const T* pre, const S* bias, S* z, T* out) {
        if (bias) {
          for (std::int64_t i = 0; i < n; ++i) out[i] = rounded<S>(pre[begin + i] + load(bias[begin + i]));
        } else {
          for (std::int64_t i = 0; i < n; ++i) out[i] = rounded<S>(pre[begin + i]);
        }
        if (z) {
          for (std::int64_t i = 0; i < n; ++i) z[begin + i] = store<S>(out[i]);
        }
      };
      round_piece(in.pre_gate, in.bias_gate, in.z_gate, gate);
      if constexpr (gated) round_piece(in.pre_up, in.bias_up, in.z_up, up);
      for (std::int64_t i = 0; i < n; ++i) {
        gate[i] = in.factor * numerics::activation<Kind>(parameters, gate[i], gated ? up[i] : T(0)).value;
      }
      for (std::int64_t i = 0; i < n; ++i) in.a[begin + i] = store<S>(gate[i]);
    }
  }
  static void activate(const Activation& activation, const typename Kernels::ActivateArguments& in, std::int64_t width) {
    numerics::with_activation_kind(activation.kind, [&]<ActivationKind Kind>() { activate_kind<Kind>(activation, in, width); });
  }

  template <ActivationKind Kind>
  static void backward_kind(const Activation& activation, const typename Kernels::ActivateBackwardArguments& in,
                            std::int64_t width) {
    constexpr bool gated = Kind != ActivationKind::relu_squared;
    const numerics::ActivationParameters<T> parameters(activation);
    T value[sum_group], d_gate[sum_group], d_up[sum_group];
    for (std::int64_t begin = 0; begin < width; begin += sum_group) {
      const std::int64_t n = std::min(sum_group, width - begin);
      const T* d_a = in.d_a + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        const T z_up = gated ? load(in.z_up[begin + i]) : T(0);
        const auto act = numerics::activation<Kind>(parameters, load(in.z_gate[begin + i]), z_up);
        value[i] = act.value;
        d_gate[i] = in.factor * d_a[i] * act.d_gate;
        d_up[i] = in.factor * d_a[i] * act.d_up;
      }
      in.dprob[begin / sum_group] =
          sum_of_group<T>(0, n, [&](std::int64_t i) { return d_a[i] * rounded<S>(value[i]); });
      if (in.dz_gate) {
        for (std::int64_t i = 0; i < n; ++i) in.dz_gate[begin + i] = store<S>(d_gate[i]);
        if constexpr (gated) {
          for (std::int64_t i = 0; i < n; ++i) in.dz_up[begin + i] = store<S>(d_up[i]);
        }
      }
      if (in.a && in.weight_after_down) {
        for (std::int64_t i = 0; i < n; ++i) in.a[begin + i] = store<S>(in.factor * rounded<S>(value[i]));
      } else if (in.a) {
        for (std::int64_t i = 0; i < n; ++i) in.a[begin + i] = store<S>(in.factor * value[i]);
      }
    }
  }
  static void activate_backward(const Activation& activation, const typename Kernels::ActivateBackwardArguments& in,
                                std::int64_t width) {
    numerics::with_activation_kind(activation.kind, [&]<ActivationKind Kind>() { backward_kind<Kind>(activation, in, width); });
  }

  static void store_row(const T* sum, const S* bias, S* out, std::int64_t width) {
    if (bias) {
      for (std::int64_t i = 0; i < width; ++i) out[i] = store<S>(sum[i] + load(bias[i]));
    } else {
      for (std::int64_t i = 0; i < width; ++i) out[i] = store<S>(sum[i]);
    }
  }

  static void combine(const S* const* rows, const T* factors, std::int64_t count, S* out, std::int64_t width) {
    constexpr std::int64_t piece = 64;
    T sum[piece];
    for (std::int64_t begin = 0; begin < width; begin += piece) {
      const std::int64_t n = std::min(piece, width - begin);
      for (std::int64_t i = 0; i < n; ++i) sum[i] = T(0);
      for (std::int64_t r = 0; r < count; ++r) {
        add_scaled(factors ? factors[r] : T(1), rows[r] + begin, sum, n);
      }
      for (std::int64_t i = 0; i < n; ++i) out[begin + i] = store<S>(sum[i]);
    }
  }

  static void add_scaled(T factor, const S* row, T* sum, std::int64_t width) {
    for (std::int64_t i = 0; i < width; ++i) sum[i] = std::fma(factor, load(row[i]), sum[i]);
  }

  static T dot(const S* a, const S* b, std::int64_t width) {
    T sum = T(0);
    for (std::int64_t begin = 0; begin < width; begin += sum_group) {
      sum += sum_of_group<T>(begin, std::min(begin + sum_group, width), [&](std::int64_t i) { return load(a[i]) * load(b[i]); });
    }
    return sum;
  }

  template <class Out>
  static void store_as(const T* value, Out* out, bool accumulate, std::int64_t width) {
    if (accumulate) {
      for (std::int64_t i = 0; i < width; ++i) out[i] = store<Out>(load(out[i]) + value[i]);
    } else {
      for (std::int64_t i = 0; i < width; ++i) out[i] = store<Out>(value[i]);
    }
  }
  static void store_gradient(const T* value, void* out, DataType dtype, bool accumulate, std::int64_t width) {
    if (dtype == DataType::bfloat16) {
      if constexpr (sizeof(S) == 2) store_as(value, static_cast<S*>(out), accumulate, width);
    } else {
      store_as(value, static_cast<T*>(out), accumulate, width);
    }
  }

  static constexpr Kernels table = {activate, activate_backward, store_row, combine, add_scaled, dot, store_gradient};
};

}  // namespace
}  // namespace moelith::executors::cpu
