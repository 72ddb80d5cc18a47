#include "reference/activation.hpp"

#include <cmath>

namespace moelith::reference {

namespace {

constexpr double pi = 3.14159265358979323846;

// gelu(g) = g Phi(g); gelu'(g) = Phi(g) + g phi(g), with the normal distribution's Phi and density phi.
void gelu_erf(double g, double& value, double& derivative) {
  const double cumulative = 0.5 * (1.0 + std::erf(g / std::sqrt(2.0)));
  const double density = std::exp(-0.5 * g * g) / std::sqrt(2.0 * pi);
  value = g * cumulative;
  derivative = cumulative + g * density;
}

// gelu(g) = g/2 (1 + tanh h), h = sqrt(2/pi) (g + 0.044715 g^3); gelu' = (1 + tanh h)/2 + g/2 (1 - tanh^2 h) h'.
void gelu_tanh(double g, double& value, double& derivative) {
  const double scale = std::sqrt(2.0 / pi);
  const double tanh_h = std::tanh(scale * (g + 0.044715 * g * g * g));
  const double d_h = scale * (1.0 + 3.0 * 0.044715 * g * g);
  value = 0.5 * g * (1.0 + tanh_h);
  derivative = 0.5 * (1.0 + tanh_h) + 0.5 * g * (1.0 - tanh_h * tanh_h) * d_h;
}

}  // namespace

double sigmoid(double x) { return x >= 0.0 ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x) / (1.0 + std::exp(x)); }

ActivationValue activate(const ActivationConfig& config, double gate, double up) {
  switch (config.kind) {
    case ActivationKind::swiglu: {
      // silu(g) = g sigmoid(g); silu' = sigmoid(g) + g sigmoid(g) (1 - sigmoid(g))
      const double s = sigmoid(gate);
      return {gate * s * up, (s + gate * s * (1.0 - s)) * up, gate * s};
    }
    case ActivationKind::swiglu_clamped: {
      // G = min(g, limit), U = clamp(u, -limit, limit); value = G sigmoid(alpha G) (U + offset). NaN passes through.
      const bool gate_inside = !(gate > config.limit);
      const bool up_inside = !(up > config.limit) && !(up < -config.limit);
      const double g = gate_inside ? gate : config.limit;
      const double u = up_inside ? up : std::copysign(config.limit, up);
      const double s = sigmoid(config.alpha * g);
      const double d_g = s + config.alpha * g * s * (1.0 - s);
      return {g * s * (u + config.up_offset), gate_inside ? d_g * (u + config.up_offset) : 0.0,
              up_inside ? g * s : 0.0};
    }
    case ActivationKind::geglu_erf:
    case ActivationKind::geglu_tanh: {
      double value = 0.0, derivative = 0.0;
      (config.kind == ActivationKind::geglu_erf ? gelu_erf : gelu_tanh)(gate, value, derivative);
      return {value * up, derivative * up, value};
    }
    case ActivationKind::relu_squared: {
      if (gate <= 0.0) return {};
      return {gate * gate, 2.0 * gate, 0.0};
    }
  }
  return {};
}

}  // namespace moelith::reference
