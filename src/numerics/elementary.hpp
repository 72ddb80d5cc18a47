// exp, sigmoid, tanh, erf for float and double. The float exp is branch-free, so that loops over it vectorise; it is
// made of fma and integer steps alone, so every compiler and vector width gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numerics/host_device.hpp"

namespace moelith::numerics {

// exp for float, error below 2 units in the last place. Results below the smallest normal number become 0 and results
// above the largest finite one infinity; NaN stays NaN.
// Method: x = n ln2 + r with |r| <= ln2 / 2 (Cody and Waite, ln2 in two parts), a polynomial for exp(r), then 2^n.
// On a GPU the hardware's 2^x does it: within 2 + |x| units in the last place.
MOELITH_HD_INLINE float exp(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  constexpr float log2e = 1.44269504088896341f;
  constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  constexpr float lowest = -87.3365447f, highest = 88.7228391f;
  const float clamped = x < lowest ? lowest : (x > highest ? highest : x);  // NaN passes through
  constexpr float round_bias = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float biased = std::fma(clamped, log2e, round_bias);
  const float n = biased - round_bias;
  const float r = std::fma(-n, ln2_low, std::fma(-n, ln2_high, clamped));
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  p = std::fma(p * r, r, r) + 1.0f;
  std::uint32_t biased_bits;
  std::memcpy(&biased_bits, &biased, sizeof biased_bits);
  const std::uint32_t exponent = biased_bits - 0x4b400000u;  // n as a two's complement integer
  // 2^n in two factors, since n may be 128.
  const std::uint32_t half = static_cast<std::uint32_t>(static_cast<std::int32_t>(exponent) >> 1);
  const std::uint32_t first_bits = (half + 127u) << 23, second_bits = (exponent - half + 127u) << 23;
  float first, second;
  std::memcpy(&first, &first_bits, sizeof first);
  std::memcpy(&second, &second_bits, sizeof second);
  const float value = p * first * second;
  return x < lowest ? 0.0f : (x > highest ? INFINITY : (x != x ? x : value));
#endif
}
MOELITH_HD_INLINE double exp(double x) { return std::exp(x); }

// a / b for b in [1, 2]; on a GPU within 2 units in the last place.
MOELITH_HD_INLINE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdividef(a, b);
#else
  return a / b;
#endif
}
MOELITH_HD_INLINE double divide(double a, double b) { return a / b; }

// 1 / (1 + e^-x), written so that neither side overflows.
template <class T>
MOELITH_HD_INLINE T sigmoid(T x) {
  const T e = exp(x < T(0) ? x : -x);  // in (0, 1]
  const T numerator = x < T(0) ? e : T(1);
  return divide(numerator, T(1) + e);
}

#if defined(__CUDA_ARCH__)
// Four instructions. Where e^-x overflows the result is 0 instead of a number below 1e-38.
template <>
MOELITH_HD_INLINE float sigmoid<float>(float x) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269504088896341f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
  return s;
}
#endif

// Its derivative sigmoid(x) (1 - sigmoid(x)), as a product that keeps its precision on both sides.
template <class T>
MOELITH_HD_INLINE T sigmoid_slope(T x) {
  return sigmoid(x) * sigmoid(-x);
}

template <class T>
MOELITH_HD_INLINE T tanh(T x) {
  // 1 - 2 / (e^2|x| + 1); small arguments lose nothing that gelu would notice (its tanh is added to 1).
  const T magnitude = x < T(0) ? -x : x;
  const T e = exp(T(-2) * magnitude);
  const T t = divide(T(1) - e, T(1) + e);
  return x < T(0) ? -t : t;
}

MOELITH_HD_INLINE float erf(float x) { return ::erff(x); }
MOELITH_HD_INLINE double erf(double x) { return ::erf(x); }

}  // namespace moelith::numerics
