// The tile product with AVX-512: a register tile of 14 x 32 floats or 14 x 16 doubles (28 sums in 32 registers).
//
// The instruction set is switched on by pragma, after every include: see gemm_avx2.cpp.
#if defined(__x86_64__)

#include <immintrin.h>

#include "executors/cpu/gemm_kernels.hpp"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl")
// The "undefined" pass-through operands within GCC 12's own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace moelith::executors::cpu {
namespace {

constexpr std::int64_t panel_bytes = 24 << 10;   // of 32 or 48 KiB
constexpr std::int64_t block_bytes = 384 << 10;  // of 1 MiB or more

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  using Vector = __m512;
  static constexpr int width = 16, max_rows = 14, max_vectors = 2;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* in) { return _mm512_loadu_ps(in); }
  static void store(float* out, Vector v) { _mm512_storeu_ps(out, v); }
  static Vector broadcast(const float* in) { return _mm512_set1_ps(*in); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
};

template <>
struct Lanes<double> {
  using Vector = __m512d;
  static constexpr int width = 8, max_rows = 14, max_vectors = 2;
  static Vector zero() { return _mm512_setzero_pd(); }
  static Vector load(const double* in) { return _mm512_loadu_pd(in); }
  static void store(double* out, Vector v) { _mm512_storeu_pd(out, v); }
  static Vector broadcast(const double* in) { return _mm512_set1_pd(*in); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }
};

// 128 bits of four rows, side by side: the loads do half of the transposition.
inline __m512i four_rows(const void* row0, const void* row1, const void* row2, const void* row3) {
  __m512i x = _mm512_castsi128_si512(_mm_loadu_si128(static_cast<const __m128i*>(row0)));
  x = _mm512_inserti32x4(x, _mm_loadu_si128(static_cast<const __m128i*>(row1)), 1);
  x = _mm512_inserti32x4(x, _mm_loadu_si128(static_cast<const __m128i*>(row2)), 2);
  return _mm512_inserti32x4(x, _mm_loadu_si128(static_cast<const __m128i*>(row3)), 3);
}

// out[q]: 32-bit word q of the rows 0 to 15, of which x[i] holds words 0 to 3 of rows i, i + 4, i + 8 and i + 12.
inline void transpose_words(const __m512i (&x)[4], __m512i (&out)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(x[0], x[1]), high01 = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(x[2], x[3]), high23 = _mm512_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm512_unpacklo_epi64(low01, low23);
  out[1] = _mm512_unpackhi_epi64(low01, low23);
  out[2] = _mm512_unpacklo_epi64(high01, high23);
  out[3] = _mm512_unpackhi_epi64(high01, high23);
}

template <class Storage>
struct Pack;

template <>
struct Pack<numerics::bfloat16> {
  static constexpr std::int64_t lanes = 16, steps = 8;
  // Pairs of steps travel as one 32-bit word; a bfloat16 is the upper half of its float.
  static void transpose(const numerics::bfloat16* const* rows, std::int64_t first, float* out, std::int64_t distance) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512i x[4], word[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      x[i] = four_rows(rows[i] + first, rows[i + 4] + first, rows[i + 8] + first, rows[i + 12] + first);
    transpose_words(x, word);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      float* target = out + 2 * q * distance;
      _mm512_storeu_ps(target, _mm512_castsi512_ps(_mm512_slli_epi32(word[q], 16)));
      _mm512_storeu_ps(target + distance, _mm512_castsi512_ps(_mm512_and_si512(word[q], upper)));
    }
  }
  static void widen(const numerics::bfloat16* in, float* out) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    _mm512_storeu_ps(out, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16)));
  }
};

template <>
struct Pack<float> {
  static constexpr std::int64_t lanes = 16, steps = 4;
  static void transpose(const float* const* rows, std::int64_t first, float* out, std::int64_t distance) {
    __m512i x[4], word[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      x[i] = four_rows(rows[i] + first, rows[i + 4] + first, rows[i + 8] + first, rows[i + 12] + first);
    transpose_words(x, word);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) _mm512_storeu_ps(out + q * distance, _mm512_castsi512_ps(word[q]));
  }
  static void widen(const float* in, float* out) { _mm512_storeu_ps(out, _mm512_loadu_ps(in)); }
};

template <>
struct Pack<double> {
  static constexpr std::int64_t lanes = 8, steps = 2;
  static void transpose(const double* const* rows, std::int64_t first, double* out, std::int64_t distance) {
    const __m512d even =
        _mm512_castsi512_pd(four_rows(rows[0] + first, rows[2] + first, rows[4] + first, rows[6] + first));
    const __m512d odd =
        _mm512_castsi512_pd(four_rows(rows[1] + first, rows[3] + first, rows[5] + first, rows[7] + first));
    _mm512_storeu_pd(out, _mm512_unpacklo_pd(even, odd));
    _mm512_storeu_pd(out + distance, _mm512_unpackhi_pd(even, odd));
  }
  static void widen(const double* in, double* out) { _mm512_storeu_pd(out, _mm512_loadu_pd(in)); }
};

#include "executors/cpu/gemm_blocked.inl"

}  // namespace

const GemmKernels gemm_kernels_avx512 = all_kernels;

}  // namespace moelith::executors::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
