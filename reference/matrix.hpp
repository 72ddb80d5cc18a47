// The three matrix products of an expert and its backward, as plain loops. All matrices row-major and contiguous. The
// inner loops run over contiguous memory; four rows are taken at a time only to read memory less often.
#pragma once

#include <cstdint>

namespace moelith::reference {

// out[n, m] = sum_k a[n, k] b[m, k]
void multiply_transposed(std::int64_t n, std::int64_t m, std::int64_t k, const double* a, const double* b, double* out);

// out[n, k] += sum_m a[n, m] b[m, k]
void add_product(std::int64_t n, std::int64_t m, std::int64_t k, const double* a, const double* b, double* out);

// out[m, k] += sum_n a[n, m] b[n, k]
void add_transposed_product(std::int64_t n, std::int64_t m, std::int64_t k, const double* a, const double* b,
                            double* out);

}  // namespace moelith::reference
