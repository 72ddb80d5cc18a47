#include "moelith/tensor.hpp"

#include <limits>

namespace moelith {

const char* to_string(DataType type) {
  switch (type) {
    case DataType::float64: return "float64";
    case DataType::float32: return "float32";
    case DataType::bfloat16: return "bfloat16";
    case DataType::int64: return "int64";
    case DataType::int32: return "int32";
    case DataType::uint8: return "uint8";
  }
  return "unknown dtype";
}

TensorView::TensorView(void* data_, DataType dtype_, std::initializer_list<std::int64_t> shape_)
    : data(data_), dtype(dtype_), rank(static_cast<int>(shape_.size())) {
  if (shape_.size() > static_cast<std::size_t>(max_rank)) {
    throw Error(Status::invalid_argument, "a tensor view has rank " + std::to_string(shape_.size()) +
                                              "; accepted: at most " + std::to_string(max_rank));
  }
  int i = 0;
  for (const std::int64_t extent : shape_) shape[static_cast<std::size_t>(i++)] = extent;
  std::int64_t step = 1;
  for (int d = rank - 1; d >= 0; --d) {
    const std::size_t at = static_cast<std::size_t>(d);
    if (shape[at] < 0) {
      throw Error(Status::invalid_argument, "dimension " + std::to_string(d) + " of a tensor view is " +
                                                std::to_string(shape[at]) + "; accepted: 0 or more");
    }
    stride[at] = step;
    // A dimension of 0 leaves the stride as if it were 1, as NumPy and PyTorch have it.
    if (__builtin_mul_overflow(step, shape[at] > 0 ? shape[at] : 1, &step)) {
      throw Error(Status::invalid_argument, "a tensor view has more than 2^63 - 1 elements");
    }
  }
}

// Saturates, so that a nonsensical shape can be compared and reported without overflow.
std::int64_t TensorView::numel() const {
  if (rank <= 0) return 0;
  std::int64_t count = 1;
  for (int d = 0; d < rank && d < max_rank; ++d) {
    const std::int64_t extent = shape[static_cast<std::size_t>(d)];
    if (extent <= 0) return 0;
    if (__builtin_mul_overflow(count, extent, &count)) count = std::numeric_limits<std::int64_t>::max();
  }
  return count;
}

bool TensorView::contiguous() const {
  if (numel() == 0) return true;
  std::int64_t step = 1;
  for (int d = (rank < max_rank ? rank : max_rank) - 1; d >= 0; --d) {
    const std::size_t at = static_cast<std::size_t>(d);
    if (shape[at] != 1 && stride[at] != step) return false;  // the stride of a dimension of 1 is never used
    if (__builtin_mul_overflow(step, shape[at], &step)) return false;
  }
  return true;
}

namespace {

std::string list_of(const std::array<std::int64_t, TensorView::max_rank>& values, int count) {
  std::string text = "[";
  for (int d = 0; d < count && d < TensorView::max_rank; ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(values[static_cast<std::size_t>(d)]);
  }
  return text + "]";
}

}  // namespace

std::string describe(const TensorView& view) {
  if (!view.given()) return "not given";
  std::string text = to_string(view.dtype) + list_of(view.shape, view.rank);
  if (!view.contiguous()) text += " with strides " + list_of(view.stride, view.rank);
  return text;
}

}  // namespace moelith
