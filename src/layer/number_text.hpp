// A number as error texts have it.
#pragma once

#include <charconv>
#include <string>

namespace moelith::layer {

// The shortest text that reads back as the same number.
inline std::string number_text(double value) {
  char buffer[64];
  return std::string(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
}

}  // namespace moelith::layer
