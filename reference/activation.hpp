// The activations of the expert FFN and their derivatives, one formula a line.
#pragma once

#include "moelith/config.hpp"

namespace moelith::reference {

struct ActivationValue {
  double value = 0.0, d_gate = 0.0, d_up = 0.0;  // act(gate, up) and its partial derivatives
};

// relu_squared reads its one argument as `gate`. At a clamp's boundary the derivative is that of the inside.
ActivationValue activate(const ActivationConfig& config, double gate, double up);

double sigmoid(double x);

}  // namespace moelith::reference
