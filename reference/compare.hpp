// Error measures that every test and the command line use. Both are relative, so values of any size may be compared,
// and both count a NaN (or an infinity that the reference does not have at the same place) as an infinite error. So
// does anything whose square overflows (beyond 1e154).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace moelith::reference {

struct Comparison {
  double rel_fro = 0.0;             // ||actual - expected|| / ||expected|| over the whole tensor (Frobenius norms)
  double worst_row = 0.0;           // the largest over rows of ||row - expected row|| / max(||expected row||, floor)
  std::int64_t worst_row_index = -1;  // where; -1 for a tensor without rows
  bool within(double tolerance) const { return rel_fro <= tolerance && worst_row <= tolerance; }
};

// The floor of worst_row, as a part of the root mean square of the expected rows' norms: a row that is nearly zero
// among rows of ordinary size is measured against this instead of against its own cancelled value.
constexpr double row_floor = 1e-2;
// The floor for tensors whose single rows cancel by nature, so that only the tensor's scale is left to measure a small
// row against: gradients of weights of experts with few tokens (the activation's derivative crosses 0), and of routers.
constexpr double scale_floor = 1.0;

// actual, expected: [rows, columns] row-major, of any element type that converts to double; `columns` is the last
// dimension. Where the expected value is 0 everywhere (of the tensor, or of a row and the floor too), the error is 0 if
// actual is exactly 0 as well and infinite otherwise. An infinity equal to the expected one counts as no error.
template <class Actual, class Expected>
Comparison compare(const Actual* actual, const Expected* expected, std::int64_t rows, std::int64_t columns,
                   double floor_part = row_floor) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto relative = [](double error, double size) {
    if (error == 0.0) return 0.0;
    return size > 0.0 && std::isfinite(size) ? error / size : infinity;
  };
  std::vector<double> row_error(static_cast<std::size_t>(rows)), row_size(static_cast<std::size_t>(rows));
  double error_squares = 0.0, squares = 0.0, largest_error = 0.0;
  for (std::int64_t r = 0; r < rows; ++r) {
    double row_error_squares = 0.0, row_squares = 0.0, largest = 0.0;
    for (std::int64_t c = 0; c < columns; ++c) {
      const double a = static_cast<double>(actual[r * columns + c]);
      const double e = static_cast<double>(expected[r * columns + c]);
      if (std::isinf(e) && a == e) continue;
      const double difference = a - e;
      row_error_squares += std::isfinite(difference) ? difference * difference : infinity;
      row_squares += std::isfinite(e) ? e * e : 0.0;
      largest = std::fmax(largest, std::fabs(difference));
    }
    // The norm is at least the largest difference, whose square may have been rounded to 0.
    row_error[static_cast<std::size_t>(r)] = std::fmax(std::sqrt(row_error_squares), largest);
    largest_error = std::fmax(largest_error, largest);
    row_size[static_cast<std::size_t>(r)] = std::sqrt(row_squares);
    error_squares += row_error_squares;
    squares += row_squares;
  }
  Comparison result;
  result.rel_fro = relative(std::fmax(std::sqrt(error_squares), largest_error), std::sqrt(squares));
  const double floor = rows > 0 ? floor_part * std::sqrt(squares / static_cast<double>(rows)) : 0.0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double size = row_size[static_cast<std::size_t>(r)];
    const double error = relative(row_error[static_cast<std::size_t>(r)], size > floor ? size : floor);
    if (r == 0 || error > result.worst_row) {
      result.worst_row = error;
      result.worst_row_index = r;
    }
  }
  return result;
}

// The same for two vectors of equal size whose last dimension is `columns`.
template <class Actual, class Expected>
Comparison compare(const std::vector<Actual>& actual, const std::vector<Expected>& expected, std::int64_t columns,
                   double floor_part = row_floor) {
  if (actual.size() != expected.size()) {
    throw std::invalid_argument("compare: actual has " + std::to_string(actual.size()) + " elements, expected has " +
                                std::to_string(expected.size()));
  }
  if (columns <= 0 || expected.size() % static_cast<std::size_t>(columns) != 0) {
    throw std::invalid_argument("compare: " + std::to_string(expected.size()) + " elements do not make rows of " +
                                std::to_string(columns));
  }
  return compare(actual.data(), expected.data(), static_cast<std::int64_t>(expected.size()) / columns, columns,
                 floor_part);
}

}  // namespace moelith::reference
