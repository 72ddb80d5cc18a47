// The loops are worth vectorising even in a build that asks for -O2 only.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#include "reference/matrix.hpp"

#include <algorithm>

#if defined(__GNUC__) && defined(__x86_64__)
#define MOELITH_REFERENCE_AVX2 1
#endif

namespace moelith::reference {

namespace {

// Columns of k handled in one go, so that four rows of b stay in the first-level cache.
constexpr std::int64_t chunk = 512;
constexpr std::int64_t lanes = 4;

#define MOELITH_INLINE inline __attribute__((always_inline))

// out[r] += sum_i a[i] b[r][i] for four rows of b, k columns apart. Each sum runs in four lanes.
MOELITH_INLINE void dot4(std::int64_t n, const double* a, const double* b, std::int64_t k, double* out) {
  double s0[lanes] = {}, s1[lanes] = {}, s2[lanes] = {}, s3[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (std::int64_t l = 0; l < lanes; ++l) s0[l] += a[i + l] * b[i + l];
    for (std::int64_t l = 0; l < lanes; ++l) s1[l] += a[i + l] * b[k + i + l];
    for (std::int64_t l = 0; l < lanes; ++l) s2[l] += a[i + l] * b[2 * k + i + l];
    for (std::int64_t l = 0; l < lanes; ++l) s3[l] += a[i + l] * b[3 * k + i + l];
  }
  for (; i < n; ++i) {
    s0[0] += a[i] * b[i];
    s1[0] += a[i] * b[k + i];
    s2[0] += a[i] * b[2 * k + i];
    s3[0] += a[i] * b[3 * k + i];
  }
  out[0] += (s0[0] + s0[1]) + (s0[2] + s0[3]);
  out[1] += (s1[0] + s1[1]) + (s1[2] + s1[3]);
  out[2] += (s2[0] + s2[1]) + (s2[2] + s2[3]);
  out[3] += (s3[0] + s3[1]) + (s3[2] + s3[3]);
}

// out += sum_r a[r] b[r] for four rows of b, k columns apart.
MOELITH_INLINE void axpy4(std::int64_t n, const double* a, const double* __restrict b, std::int64_t k,
                          double* __restrict out) {
  const double a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] += a0 * b[i] + a1 * b[k + i] + a2 * b[2 * k + i] + a3 * b[3 * k + i];
  }
}

MOELITH_INLINE void multiply_transposed_loops(std::int64_t n, std::int64_t m, std::int64_t k, const double* a,
                                              const double* b, double* out) {
  std::fill_n(out, n * m, 0.0);
  for (std::int64_t c = 0; c < k; c += chunk) {
    const std::int64_t columns = std::min(chunk, k - c);
    std::int64_t j = 0;
    for (; j + 4 <= m; j += 4) {
      for (std::int64_t i = 0; i < n; ++i) dot4(columns, a + i * k + c, b + j * k + c, k, out + i * m + j);
    }
    for (; j < m; ++j) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t x = c; x < c + columns; ++x) out[i * m + j] += a[i * k + x] * b[j * k + x];
      }
    }
  }
}

MOELITH_INLINE void add_product_loops(std::int64_t n, std::int64_t m, std::int64_t k, const double* a, const double* b,
                                      double* out) {
  for (std::int64_t c = 0; c < k; c += chunk) {
    const std::int64_t columns = std::min(chunk, k - c);
    std::int64_t j = 0;
    for (; j + 4 <= m; j += 4) {
      for (std::int64_t i = 0; i < n; ++i) axpy4(columns, a + i * m + j, b + j * k + c, k, out + i * k + c);
    }
    for (; j < m; ++j) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t x = c; x < c + columns; ++x) out[i * k + x] += a[i * m + j] * b[j * k + x];
      }
    }
  }
}

MOELITH_INLINE void add_transposed_product_loops(std::int64_t n, std::int64_t m, std::int64_t k, const double* a,
                                                 const double* b, double* out) {
  for (std::int64_t c = 0; c < k; c += chunk) {
    const std::int64_t columns = std::min(chunk, k - c);
    std::int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      for (std::int64_t j = 0; j < m; ++j) {
        const double column[4] = {a[i * m + j], a[(i + 1) * m + j], a[(i + 2) * m + j], a[(i + 3) * m + j]};
        axpy4(columns, column, b + i * k + c, k, out + j * k + c);
      }
    }
    for (; i < n; ++i) {
      for (std::int64_t j = 0; j < m; ++j) {
        for (std::int64_t x = c; x < c + columns; ++x) out[j * k + x] += a[i * m + j] * b[i * k + x];
      }
    }
  }
}

}  // namespace

// The same loops, compiled a second time for processors with AVX2 and FMA.
#if defined(MOELITH_REFERENCE_AVX2)
#define MOELITH_REFERENCE_PRODUCT(name)                                                                             \
  __attribute__((target("avx2,fma"))) static void name##_avx2(std::int64_t n, std::int64_t m, std::int64_t k,       \
                                                              const double* a, const double* b, double* out) {      \
    name##_loops(n, m, k, a, b, out);                                                                               \
  }                                                                                                                 \
  void name(std::int64_t n, std::int64_t m, std::int64_t k, const double* a, const double* b, double* out) {        \
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");                       \
    avx2 ? name##_avx2(n, m, k, a, b, out) : name##_loops(n, m, k, a, b, out);                                      \
  }
#else
#define MOELITH_REFERENCE_PRODUCT(name)                                                                             \
  void name(std::int64_t n, std::int64_t m, std::int64_t k, const double* a, const double* b, double* out) {        \
    name##_loops(n, m, k, a, b, out);                                                                               \
  }
#endif

MOELITH_REFERENCE_PRODUCT(multiply_transposed)
MOELITH_REFERENCE_PRODUCT(add_product)
MOELITH_REFERENCE_PRODUCT(add_transposed_product)

}  // namespace moelith::reference
