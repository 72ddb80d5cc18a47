#include "reference/compare.hpp"

#include <gtest/gtest.h>

namespace moelith::reference {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const double nan_value = std::numeric_limits<double>::quiet_NaN();

TEST(Compare, MeasuresTensorAndWorstRow) {
  // Row norms 5 and 10, error 1 in the first row.
  const std::vector<double> expected{3, 4, 6, 8}, actual{3, 5, 6, 8};
  const Comparison result = compare(actual, expected, 2);
  EXPECT_DOUBLE_EQ(result.rel_fro, 1.0 / std::sqrt(125.0));
  EXPECT_DOUBLE_EQ(result.worst_row, 0.2);
  EXPECT_EQ(result.worst_row_index, 0);
  EXPECT_TRUE(result.within(0.2));
  EXPECT_FALSE(result.within(0.19));
}

TEST(Compare, OneBadRowShowsWhereTheTensorHidesIt) {
  std::vector<double> expected(1000, 1.0);
  std::vector<double> actual = expected;
  actual[500] = 2.0;
  const Comparison result = compare(actual, expected, 1);
  EXPECT_LT(result.rel_fro, 0.04);
  EXPECT_DOUBLE_EQ(result.worst_row, 1.0);
  EXPECT_EQ(result.worst_row_index, 500);
}

TEST(Compare, NearlyZeroRowsAreMeasuredAgainstTheFloor) {
  // Root mean square of the row norms is 1 (norms sqrt 2 and about 0); the floor is 0.01.
  const std::vector<double> expected{std::sqrt(2.0), 1e-12}, actual{std::sqrt(2.0), 2e-12};
  EXPECT_NEAR(compare(actual, expected, 1).worst_row, 1e-10, 1e-14);
}

TEST(Compare, AllZeroIsRightOrInfinitelyWrong) {
  const std::vector<double> zeros(4), tiny{0, 0, 1e-300, 0};
  EXPECT_EQ(compare(zeros, zeros, 2).rel_fro, 0.0);
  EXPECT_EQ(compare(zeros, zeros, 2).worst_row, 0.0);
  // 1e-300 squared is 0 in float64; a difference must show all the same.
  EXPECT_EQ(compare(tiny, zeros, 2).rel_fro, infinity);
  EXPECT_EQ(compare(tiny, zeros, 2).worst_row, infinity);
}

TEST(Compare, NotFiniteValuesAreInfinitelyWrong) {
  const std::vector<double> expected{1, 2};
  for (double bad : {nan_value, infinity, -infinity}) {
    const Comparison result = compare(std::vector<double>{1, bad}, expected, 1);
    EXPECT_EQ(result.rel_fro, infinity);
    EXPECT_EQ(result.worst_row, infinity);
    EXPECT_EQ(result.worst_row_index, 1);
    EXPECT_FALSE(result.within(1e300));
  }
  // The reference's own NaN is never "right", its infinity is if it is met.
  EXPECT_EQ(compare(std::vector<double>{1, nan_value}, std::vector<double>{1, nan_value}, 1).rel_fro, infinity);
  EXPECT_EQ(compare(std::vector<double>{1, infinity}, std::vector<double>{1, infinity}, 1).worst_row, 0.0);
  EXPECT_EQ(compare(std::vector<double>{1, 5}, std::vector<double>{1, infinity}, 1).worst_row, infinity);
}

TEST(Compare, EmptyAndMismatchedTensors) {
  const std::vector<float> none;
  EXPECT_EQ(compare(none, none, 8).rel_fro, 0.0);
  EXPECT_EQ(compare(none, none, 8).worst_row_index, -1);
  EXPECT_THROW(compare(std::vector<float>{1}, none, 1), std::invalid_argument);
  EXPECT_THROW(compare(std::vector<float>{1, 2, 3}, std::vector<double>{1, 2, 3}, 2), std::invalid_argument);
  EXPECT_THROW(compare(none, none, 0), std::invalid_argument);
}

}  // namespace
}  // namespace moelith::reference
