#include "moelith/tensor.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace moelith {
namespace {

TEST(Tensor, ContiguousViewHasLastDimensionFastest) {
  float data[24] = {};
  const TensorView view(data, DataType::float32, {2, 3, 4});
  EXPECT_EQ(view.data, data);
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[1], 4);
  EXPECT_EQ(view.stride[2], 1);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_TRUE(view.given());
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(describe(view), "float32[2, 3, 4]");
}

TEST(Tensor, NotGivenAndEmptyDiffer) {
  const TensorView none;
  EXPECT_FALSE(none.given());
  EXPECT_EQ(none.numel(), 0);
  EXPECT_EQ(describe(none), "not given");

  const TensorView empty(nullptr, DataType::bfloat16, {0, 8});
  EXPECT_TRUE(empty.given());
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_TRUE(empty.contiguous());
  EXPECT_EQ(empty.stride[0], 8);
  EXPECT_EQ(describe(empty), "bfloat16[0, 8]");
}

TEST(Tensor, StridesAreToldOnlyWhenTheyMatter) {
  float data[64] = {};
  TensorView view(data, DataType::float32, {4, 8});
  view.stride[0] = 16;
  EXPECT_FALSE(view.contiguous());
  EXPECT_EQ(describe(view), "float32[4, 8] with strides [16, 1]");

  TensorView row(data, DataType::float32, {1, 8});
  row.stride[0] = 999;  // never used
  EXPECT_TRUE(row.contiguous());
  EXPECT_EQ(describe(row), "float32[1, 8]");
}

TEST(Tensor, BadShapesAreErrorsWithTheNumbers) {
  try {
    TensorView(nullptr, DataType::float32, {1, 2, 3, 4, 5});
    FAIL() << "rank 5 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_STREQ(error.what(), "a tensor view has rank 5; accepted: at most 4");
  }
  try {
    TensorView(nullptr, DataType::float32, {4, -8});
    FAIL() << "a negative dimension was accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "dimension 1 of a tensor view is -8; accepted: 0 or more");
  }
  EXPECT_THROW(TensorView(nullptr, DataType::float32, {std::int64_t{1} << 40, std::int64_t{1} << 40}), Error);
}

TEST(Tensor, AShapeThatOverflowsSaturates) {
  TensorView view;  // as the C interface may fill it
  view.rank = 3;
  view.shape = {std::numeric_limits<std::int64_t>::max(), 4, 4, 0};
  EXPECT_EQ(view.numel(), std::numeric_limits<std::int64_t>::max());
  EXPECT_FALSE(view.contiguous());
  view.shape = {-4, 4, 4, 0};
  EXPECT_EQ(view.numel(), 0);
}

TEST(Tensor, SizesAndNamesOfTypes) {
  EXPECT_EQ(size_of(DataType::float64), 8u);
  EXPECT_EQ(size_of(DataType::float32), 4u);
  EXPECT_EQ(size_of(DataType::bfloat16), 2u);
  EXPECT_EQ(size_of(DataType::int64), 8u);
  EXPECT_EQ(size_of(DataType::int32), 4u);
  EXPECT_EQ(size_of(DataType::uint8), 1u);
  EXPECT_STREQ(to_string(DataType::float64), "float64");
  EXPECT_STREQ(to_string(DataType::bfloat16), "bfloat16");
  EXPECT_STREQ(to_string(static_cast<DataType>(77)), "unknown dtype");
}

}  // namespace
}  // namespace moelith
