#include "reference/activation.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace moelith::reference {
namespace {

ActivationConfig of(ActivationKind kind) {
  ActivationConfig config;
  config.kind = kind;
  return config;
}

TEST(ReferenceActivation, F2ClampsTheGateAboveOnly) {
  const ActivationConfig config = of(ActivationKind::swiglu_clamped);  // limit 7, alpha 1.702, up + 1
  EXPECT_NEAR(activate(config, -10.0, -10.0).value, 2.43e-6, 0.005e-6);
  EXPECT_NEAR(activate(config, 8.0, -9.0).value, -41.9997, 0.00005);
  EXPECT_EQ(activate(config, 8.0, 1.0).value, activate(config, 7.0, 1.0).value);
}

TEST(ReferenceActivation, F2GradientAtTheBoundaryIsThatOfTheInside) {
  const ActivationConfig config = of(ActivationKind::swiglu_clamped);
  const double above = std::nextafter(7.0, 8.0), below = std::nextafter(7.0, 6.0);
  // d/dg of g sigmoid(1.702 g) at 7 is 1.0000730 (sigmoid(11.914) = 1 - 6.696e-6, times 1 + 11.914 * 6.696e-6).
  EXPECT_NEAR(activate(config, 7.0, 0.0).d_gate, 1.0000731, 1e-6);
  EXPECT_NEAR(activate(config, below, 0.0).d_gate, 1.0000731, 1e-6);
  EXPECT_EQ(activate(config, above, 0.0).d_gate, 0.0);
  EXPECT_NE(activate(config, -100.0, 0.0).d_gate, 0.0);  // no clamp below
  const double glu = activate(config, 1.0, 0.0).d_up;
  EXPECT_NEAR(glu, 0.845795, 1e-6);  // sigmoid(1.702)
  EXPECT_EQ(activate(config, 1.0, 7.0).d_up, glu);
  EXPECT_EQ(activate(config, 1.0, -7.0).d_up, glu);
  EXPECT_EQ(activate(config, 1.0, above).d_up, 0.0);
  EXPECT_EQ(activate(config, 1.0, -above).d_up, 0.0);
}

TEST(ReferenceActivation, F4BothFormsOfGelu) {
  EXPECT_NEAR(activate(of(ActivationKind::geglu_erf), 1.0, 1.0).value, 0.841345, 5e-7);
  EXPECT_NEAR(activate(of(ActivationKind::geglu_tanh), 1.0, 1.0).value, 0.841192, 5e-7);
}

TEST(ReferenceActivation, SwigluAndReluSquared) {
  EXPECT_NEAR(activate(of(ActivationKind::swiglu), 1.0, 2.0).value, 2.0 * 0.7310585786300049, 1e-15);
  EXPECT_EQ(activate(of(ActivationKind::relu_squared), 3.0, 0.0).value, 9.0);
  EXPECT_EQ(activate(of(ActivationKind::relu_squared), 3.0, 0.0).d_gate, 6.0);
  EXPECT_EQ(activate(of(ActivationKind::relu_squared), -3.0, 0.0).value, 0.0);
  EXPECT_EQ(activate(of(ActivationKind::relu_squared), 0.0, 0.0).d_gate, 0.0);
}

TEST(ReferenceActivation, DerivativesAreThoseOfTheValue) {
  for (ActivationKind kind : {ActivationKind::swiglu, ActivationKind::swiglu_clamped, ActivationKind::geglu_erf,
                              ActivationKind::geglu_tanh, ActivationKind::relu_squared}) {
    const ActivationConfig config = of(kind);
    for (double gate : {-20.0, -7.5, -3.0, -0.5, 0.3, 1.0, 4.0, 6.5, 7.5}) {
      for (double up : {-8.0, -2.0, 0.1, 1.0, 6.9, 9.0}) {
        const double step = 1e-5;
        const ActivationValue at = activate(config, gate, up);
        const double d_gate =
            (activate(config, gate + step, up).value - activate(config, gate - step, up).value) / (2 * step);
        const double d_up =
            (activate(config, gate, up + step).value - activate(config, gate, up - step).value) / (2 * step);
        EXPECT_NEAR(at.d_gate, d_gate, 1e-7 * std::max(1.0, std::abs(d_gate))) << int(kind) << ' ' << gate << ' ' << up;
        EXPECT_NEAR(at.d_up, d_up, 1e-7 * std::max(1.0, std::abs(d_up))) << int(kind) << ' ' << gate << ' ' << up;
      }
    }
  }
}

TEST(ReferenceActivation, NanPassesAndLargeValuesDoNotOverflow) {
  const double nan_value = std::numeric_limits<double>::quiet_NaN();
  for (ActivationKind kind : {ActivationKind::swiglu, ActivationKind::swiglu_clamped, ActivationKind::geglu_erf,
                              ActivationKind::geglu_tanh, ActivationKind::relu_squared}) {
    EXPECT_TRUE(std::isnan(activate(of(kind), nan_value, 1.0).value)) << int(kind);
    if (kind != ActivationKind::relu_squared) {
      EXPECT_TRUE(std::isnan(activate(of(kind), 1.0, nan_value).value)) << int(kind);
    }
    for (double gate : {-800.0, 800.0}) {
      const ActivationValue at = activate(of(kind), gate, 1.0);
      EXPECT_TRUE(std::isfinite(at.value) && std::isfinite(at.d_gate) && std::isfinite(at.d_up)) << int(kind);
    }
  }
}

}  // namespace
}  // namespace moelith::reference
