// Repeated timings.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace moelith::tools {

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

template <class F>
double seconds_of(F&& work) {
  const Stopwatch watch;
  work();
  return watch.seconds();
}

// Calls round(n) for n = 0, 1, ...: the first call warms up, then at least 3 more and on until `seconds` have passed.
// round returns nothing that counts; it keeps its own times and must drop those of n == 0.
template <class F>
void repeat_for(double seconds, F&& round) {
  round(0);
  const Stopwatch watch;
  for (int n = 1; n <= 3 || watch.seconds() < seconds; ++n) round(n);
}

}  // namespace moelith::tools
