// Plain tensor views, element types and the one exception type of the library.
// Nothing in include/moelith/ names a framework, CUTLASS or CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace moelith {

enum class DataType : std::uint8_t { float64, float32, bfloat16, int64, int32, uint8 };

// Size of one element in bytes.
constexpr std::size_t size_of(DataType type) {
  switch (type) {
    case DataType::float64:
    case DataType::int64: return 8;
    case DataType::float32:
    case DataType::int32: return 4;
    case DataType::bfloat16: return 2;
    case DataType::uint8: return 1;
  }
  return 0;
}

// "float64", "float32", "bfloat16", "int64", "int32", "uint8".
const char* to_string(DataType type);

// A view of memory that the caller owns. A default-constructed view (data == nullptr, rank 0) means "not given" for
// inputs and "not wanted" for outputs. Strides are in elements.
struct TensorView {
  static constexpr int max_rank = 4;

  void* data = nullptr;
  DataType dtype = DataType::float32;
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> stride{};

  TensorView() = default;
  // A contiguous view, last dimension fastest. Throws Error if the rank is over max_rank.
  TensorView(void* data, DataType dtype, std::initializer_list<std::int64_t> shape);

  bool given() const { return rank > 0; }  // an empty tensor (a dimension of 0) is given, though its data may be null
  std::int64_t numel() const;
  bool contiguous() const;
};

// "bfloat16[128, 2048]", with strides if they are not the contiguous ones: used in error texts.
std::string describe(const TensorView& view);

enum class Status : std::int32_t {
  ok = 0,
  invalid_argument = 1,  // an argument's value, shape, dtype, stride or alignment; the text names it
  unsupported = 2,       // right in itself, but this build or device cannot do it; the text says why
  timed_out = 3,         // a bounded wait ran out; the text names rank, stage and what was waited for
  device_error = 4,      // a CUDA or operating system call failed
  internal = 5,          // a defect of the library
  group_failed = 6,      // a rank of the group has ended a call by an error; the text names it and says why
};

// Thrown by every function of the C++ interface that fails. what() names the argument, what came, and what is accepted.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

}  // namespace moelith
