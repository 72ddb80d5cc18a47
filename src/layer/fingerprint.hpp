// One number for many values (FNV-1a): equal values give equal numbers, others almost surely different ones.
#pragma once

#include <cstdint>
#include <type_traits>

namespace moelith::layer {

class Fingerprint {
 public:
  template <class T>
  Fingerprint& add(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (std::size_t i = 0; i < sizeof value; ++i) hash_ = (hash_ ^ bytes[i]) * 1099511628211ull;
    return *this;
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 14695981039346656037ull;
};

}  // namespace moelith::layer
