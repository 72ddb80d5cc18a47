// Random numbers that depend on (seed, index) alone, so that any number of threads draws the same ones.
#pragma once

#include <cmath>
#include <cstdint>

namespace moelith::tools {

// 64 well mixed bits (the output function of splitmix64; Steele, Lea, Flood 2014).
inline std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// A stream of draws for one purpose.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : key_(mixed(mixed(seed) ^ stream)) {}

  std::uint64_t bits(std::uint64_t index) const { return mixed(key_ + index * 0xd1342543de82ef95ull); }
  // In (0, 1).
  double uniform(std::uint64_t index) const { return (static_cast<double>(bits(index) >> 11) + 0.5) * 0x1p-53; }
  // Mean 0, variance 1, within +-3.5: the sum of four uniform draws of 16 bits. Near enough to a normal distribution
  // for values of order 1, and cheap enough for billions of weights.
  float normal(std::uint64_t index) const {
    const std::uint64_t b = bits(index);
    const auto sum = static_cast<float>((b & 0xffff) + (b >> 16 & 0xffff) + (b >> 32 & 0xffff) + (b >> 48));
    return (sum - 2.0f * 65535.0f) * (1.7320508f / 65536.0f);
  }
  std::uint64_t below(std::uint64_t index, std::uint64_t bound) const { return bits(index) % bound; }

 private:
  std::uint64_t key_;
};

}  // namespace moelith::tools
