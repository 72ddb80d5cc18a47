// The activations of the expert FFN and their derivatives, in the accumulator type.
// Every executor calls these two functions with the pre-activation as it was rounded for saving, so that a recomputed
// activation has the bits of the first one.
#pragma once

#include <cstdint>

#include "moelith/config.hpp"
#include "numerics/elementary.hpp"
#include "numerics/host_device.hpp"

namespace moelith::numerics {

// ActivationConfig in a form that travels to a device.
struct Activation {
  ActivationKind kind = ActivationKind::swiglu;
  double limit = 7.0, alpha = 1.702, up_offset = 1.0;

  Activation() = default;
  explicit Activation(const ActivationConfig& config)
      : kind(config.kind),
        limit(config.limit),
        alpha(config.alpha),
        up_offset(config.up_offset) {}
};

// Its parameters in the type of the sums. Made outside of loops: on a GPU a conversion from double costs as much as the rest of
// an activation.
template <class T>
struct ActivationParameters {
  T limit, alpha, up_offset;
  MOELITH_HD explicit ActivationParameters(const Activation& a) : limit(T(a.limit)), alpha(T(a.alpha)), up_offset(T(a.up_offset)) {}
};

template <class T>
struct ActivationValue {
  T value;   // act(gate, up)
  T d_gate;  // its derivative by gate; by z for relu_squared
  T d_up;    // its derivative by up; 0 for relu_squared
};

// Value and derivatives together: backward needs all three, and they share their exponentials. Unused ones are removed
// by the compiler. `Kind` is a compile-time choice so that loops vectorise.
// At a clamp's boundary the derivative is that of the inside (gate == limit passes its gradient; so does |up| == limit),
// as torch.clamp has it; relu_squared has derivative 0 at 0.
template <ActivationKind Kind, class T>
MOELITH_HD_INLINE ActivationValue<T> activation(const ActivationParameters<T>& parameters, T gate, T up) {
  if constexpr (Kind == ActivationKind::swiglu) {
    const T s = sigmoid(gate);
    const T silu = gate * s;
    return {silu * up, up * (s + silu * (T(1) - s)), silu};
  } else if constexpr (Kind == ActivationKind::swiglu_clamped) {
    const T limit = parameters.limit, alpha = parameters.alpha, offset = parameters.up_offset;
    const T g = gate > limit ? limit : gate;
    const T u = (up > limit ? limit : (up < -limit ? -limit : up)) + offset;
    const T s = sigmoid(alpha * g);
    const T glu = g * s;
    const T d_glu = s + alpha * glu * (T(1) - s);
    return {glu * u, gate > limit ? T(0) : u * d_glu, (up > limit || up < -limit) ? T(0) : glu};
  } else if constexpr (Kind == ActivationKind::geglu_erf) {
    constexpr double inverse_sqrt2 = 0.70710678118654752440, inverse_sqrt_2pi = 0.39894228040143267794;
    const T cdf = T(0.5) * (T(1) + erf(gate * T(inverse_sqrt2)));
    const T pdf = T(inverse_sqrt_2pi) * exp(T(-0.5) * gate * gate);
    return {gate * cdf * up, up * (cdf + gate * pdf), gate * cdf};
  } else if constexpr (Kind == ActivationKind::geglu_tanh) {
    constexpr double sqrt_2_over_pi = 0.79788456080286535588, cubic = 0.044715;
    const T inner = T(sqrt_2_over_pi) * (gate + T(cubic) * gate * gate * gate);
    const T t = tanh(inner);
    const T d_inner = T(sqrt_2_over_pi) * (T(1) + T(3 * cubic) * gate * gate);
    const T cdf = T(0.5) * (T(1) + t);
    const T slope = T(1) - t * t;  // far out it is 0, while d_inner may overflow
    return {gate * cdf * up, up * (cdf + (slope == T(0) ? T(0) : T(0.5) * gate * slope * d_inner)), gate * cdf};
  } else {
    const T r = gate > T(0) ? gate : (gate != gate ? gate : T(0));  // NaN passes through
    return {r * r, T(2) * r, T(0)};
  }
}

// Calls `f` with the kind as a compile-time constant: f.template operator()<Kind>().
template <class F>
MOELITH_HD_INLINE void with_activation_kind(ActivationKind kind, F&& f) {
  switch (kind) {
    case ActivationKind::swiglu: f.template operator()<ActivationKind::swiglu>(); break;
    case ActivationKind::swiglu_clamped: f.template operator()<ActivationKind::swiglu_clamped>(); break;
    case ActivationKind::geglu_erf: f.template operator()<ActivationKind::geglu_erf>(); break;
    case ActivationKind::geglu_tanh: f.template operator()<ActivationKind::geglu_tanh>(); break;
    case ActivationKind::relu_squared: f.template operator()<ActivationKind::relu_squared>(); break;
  }
}

}  // namespace moelith::numerics
