// The tile product with AVX2 and FMA: a register tile of 6 x 16 floats or 6 x 8 doubles.
//
// The instruction set is switched on by pragma, after every include: inline functions of headers keep the baseline's
// code, whichever copy of them the linker takes.
#if defined(__x86_64__)

#include <immintrin.h>

#include "executors/cpu/gemm_kernels.hpp"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace moelith::executors::cpu {
namespace {

constexpr std::int64_t panel_bytes = 16 << 10;   // of 32 KiB
constexpr std::int64_t block_bytes = 256 << 10;  // of 512 KiB or more

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  using Vector = __m256;
  static constexpr int width = 8, max_rows = 6, max_vectors = 2;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* in) { return _mm256_loadu_ps(in); }
  static void store(float* out, Vector v) { _mm256_storeu_ps(out, v); }
  static Vector broadcast(const float* in) { return _mm256_broadcast_ss(in); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
};

template <>
struct Lanes<double> {
  using Vector = __m256d;
  static constexpr int width = 4, max_rows = 6, max_vectors = 2;
  static Vector zero() { return _mm256_setzero_pd(); }
  static Vector load(const double* in) { return _mm256_loadu_pd(in); }
  static void store(double* out, Vector v) { _mm256_storeu_pd(out, v); }
  static Vector broadcast(const double* in) { return _mm256_broadcast_sd(in); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
};

// Bits `first` to `first` + 127 of two rows, side by side: the loads do half of the transposition.
inline __m256i two_rows(const void* low, const void* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
}

// out[q]: 32-bit word q of the rows 0 to 7, of which x[i] holds words 0 to 3 of rows i and i + 4.
inline void transpose_words(const __m256i (&x)[4], __m256i (&out)[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(x[0], x[1]), high01 = _mm256_unpackhi_epi32(x[0], x[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(x[2], x[3]), high23 = _mm256_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm256_unpacklo_epi64(low01, low23);
  out[1] = _mm256_unpackhi_epi64(low01, low23);
  out[2] = _mm256_unpacklo_epi64(high01, high23);
  out[3] = _mm256_unpackhi_epi64(high01, high23);
}

template <class Storage>
struct Pack;

template <>
struct Pack<numerics::bfloat16> {
  static constexpr std::int64_t lanes = 8, steps = 16;
  // Pairs of steps travel as one 32-bit word; a bfloat16 is the upper half of its float.
  static void transpose(const numerics::bfloat16* const* rows, std::int64_t first, float* out, std::int64_t distance) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i x[4], word[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) x[i] = two_rows(rows[i] + first + 8 * half, rows[i + 4] + first + 8 * half);
      transpose_words(x, word);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        float* target = out + (8 * half + 2 * q) * distance;
        _mm256_storeu_ps(target, _mm256_castsi256_ps(_mm256_slli_epi32(word[q], 16)));
        _mm256_storeu_ps(target + distance, _mm256_castsi256_ps(_mm256_and_si256(word[q], upper)));
      }
    }
  }
  static void widen(const numerics::bfloat16* in, float* out) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
    _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16)));
  }
};

template <>
struct Pack<float> {
  static constexpr std::int64_t lanes = 8, steps = 8;
  static void transpose(const float* const* rows, std::int64_t first, float* out, std::int64_t distance) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i x[4], word[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) x[i] = two_rows(rows[i] + first + 4 * half, rows[i + 4] + first + 4 * half);
      transpose_words(x, word);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) _mm256_storeu_ps(out + (4 * half + q) * distance, _mm256_castsi256_ps(word[q]));
    }
  }
  static void widen(const float* in, float* out) { _mm256_storeu_ps(out, _mm256_loadu_ps(in)); }
};

template <>
struct Pack<double> {
  static constexpr std::int64_t lanes = 4, steps = 4;
  static void transpose(const double* const* rows, std::int64_t first, double* out, std::int64_t distance) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256d even = _mm256_castsi256_pd(two_rows(rows[0] + first + 2 * half, rows[2] + first + 2 * half));
      const __m256d odd = _mm256_castsi256_pd(two_rows(rows[1] + first + 2 * half, rows[3] + first + 2 * half));
      _mm256_storeu_pd(out + 2 * half * distance, _mm256_unpacklo_pd(even, odd));
      _mm256_storeu_pd(out + (2 * half + 1) * distance, _mm256_unpackhi_pd(even, odd));
    }
  }
  static void widen(const double* in, double* out) { _mm256_storeu_pd(out, _mm256_loadu_pd(in)); }
};

#include "executors/cpu/gemm_blocked.inl"

}  // namespace

const GemmKernels gemm_kernels_avx2 = all_kernels;

}  // namespace moelith::executors::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
