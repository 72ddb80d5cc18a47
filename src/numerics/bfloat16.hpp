// bfloat16 as 16 bits of storage, and its conversions. All arithmetic happens in float.
#pragma once

#include <cstdint>
#include <cstring>

#include "numerics/host_device.hpp"

namespace moelith::numerics {

struct bfloat16 {
  std::uint16_t bits;
};
static_assert(sizeof(bfloat16) == 2);

MOELITH_HD_INLINE float to_float(bfloat16 value) {
  std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Round to nearest, ties to even; overflow goes to infinity. A NaN stays a NaN (its top payload bit is set, so that
// cutting the low half cannot turn it into an infinity).
MOELITH_HD_INLINE bfloat16 to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return bfloat16{static_cast<std::uint16_t>((is_nan ? bits | 0x00400000u : rounded) >> 16)};
}

// The storage types of the layer and the type each accumulates in.
template <class Storage>
struct AccumulatorOf { using type = float; };
template <>
struct AccumulatorOf<double> { using type = double; };
template <class Storage>
using accumulator_t = typename AccumulatorOf<Storage>::type;

// load: storage -> accumulator, exact. store: accumulator -> storage, rounded once.
MOELITH_HD_INLINE float load(bfloat16 value) { return to_float(value); }
MOELITH_HD_INLINE float load(float value) { return value; }
MOELITH_HD_INLINE double load(double value) { return value; }

template <class Storage>
MOELITH_HD_INLINE Storage store(accumulator_t<Storage> value) {
  return static_cast<Storage>(value);
}
template <>
MOELITH_HD_INLINE bfloat16 store<bfloat16>(float value) {
  return to_bfloat16(value);
}

// The value as it comes back from storage.
template <class Storage>
MOELITH_HD_INLINE accumulator_t<Storage> rounded(accumulator_t<Storage> value) {
  return load(store<Storage>(value));
}

}  // namespace moelith::numerics
