// The loops are worth vectorising even in a build that asks for -O2 only.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#include "reference/matrix.hpp"

#include <algorithm>
#include <cstring>

#if defined(__GNUC__) && defined(__x86_64__)
#define MOELITH_REFERENCE_AVX2 1
#endif

namespace moelith::reference {

namespace {

// Columns of k handled in one go, so that four rows of b stay in the first-level cache.
constexpr std::int64_t chunk = 512;
constexpr std::int64_t lanes = 4;

#define MOELITH_INLINE inline __attribute__((always_inline))

// Four numbers that the compiler keeps in vector registers.
typedef double Lanes __attribute__((vector_size(lanes * sizeof(double))));
MOELITH_INLINE void load(const double* from, Lanes& to) { std::memcpy(&to, from, sizeof to); }
MOELITH_INLINE double sum_of(const Lanes& v) { return (v[0] + v[1]) + (v[2] + v[3]); }

// out[r] += sum_i a[i] b[r][i] for four rows of b, k columns apart. Each sum runs in four lanes.
MOELITH_INLINE void dot4(std::int64_t n, const double* a, const double* b, std::int64_t k, double* out) {
  Lanes s0 = {}, s1 = {}, s2 = {}, s3 = {}, x, b0, b1, b2, b3;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    load(a + i, x);
    load(b + i, b0);
    load(b + k + i, b1);
    load(b + 2 * k + i, b2);
    load(b + 3 * k + i, b3);
    s0 += x * b0;
    s1 += x * b1;
    s2 += x * b2;
    s3 += x * b3;
  }
  for (; i < n; ++i) {
    s0[0] += a[i] * b[i];
    s1[0] += a[i] * b[k + i];
    s2[0] += a[i] * b[2 * k + i];
    s3[0] += a[i] * b[3 * k + i];
  }
  out[0] += sum_of(s0);
  out[1] += sum_of(s1);
  out[2] += sum_of(s2);
  out[3] += sum_of(s3);
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
    for (std::int64_t j = 0; j < m; ++j) {
      double* row = out + j * k + c;
      std::int64_t i = 0;
      for (; i + 4 <= n; i += 4) {
        const double column[4] = {a[i * m + j], a[(i + 1) * m + j], a[(i + 2) * m + j], a[(i + 3) * m + j]};
        axpy4(columns, column, b + i * k + c, k, row);
      }
      for (; i < n; ++i) {
        for (std::int64_t x = 0; x < columns; ++x) row[x] += a[i * m + j] * b[i * k + c + x];
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
