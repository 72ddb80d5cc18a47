// update_selection_bias of moelith/layer.hpp.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "moelith/layer.hpp"

namespace moelith {
namespace {

TEST(SelectionBias, MovesAgainstTheLoad) {
  std::vector<float> bias = {0.5f, 0.5f, 0.5f, 0.5f};
  std::vector<std::int64_t> counts = {1, 3, 2, 2};
  update_selection_bias(TensorView(bias.data(), DataType::float32, {4}),
                        TensorView(counts.data(), DataType::int64, {4}), 0.25);
  EXPECT_EQ(bias, (std::vector<float>{0.75f, 0.25f, 0.5f, 0.5f}));
  std::vector<double> wide = {0, 0, 0};
  std::vector<std::int64_t> uneven = {1, 1, 2};  // mean 4/3
  update_selection_bias(TensorView(wide.data(), DataType::float64, {3}),
                        TensorView(uneven.data(), DataType::int64, {3}), 0.001);
  EXPECT_EQ(wide, (std::vector<double>{0.001, 0.001, -0.001}));
}

TEST(SelectionBias, ComparesHugeCountsExactly) {
  constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max() - 1;
  std::vector<double> bias = {0, 0, 0};
  std::vector<std::int64_t> counts = {huge, huge, huge + 1};
  update_selection_bias(TensorView(bias.data(), DataType::float64, {3}),
                        TensorView(counts.data(), DataType::int64, {3}), 1.0);
  EXPECT_EQ(bias, (std::vector<double>{1, 1, -1}));
}

TEST(SelectionBias, RefusesBadArguments) {
  std::vector<float> bias(4);
  std::vector<std::int64_t> counts(4);
  const TensorView b(bias.data(), DataType::float32, {4}), c(counts.data(), DataType::int64, {4});
  const auto text = [](const TensorView& bias, const TensorView& counts, double rate) -> std::string {
    try {
      update_selection_bias(bias, counts, rate);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(text(b, c, 0.0), "no error");
  EXPECT_NE(text(TensorView(bias.data(), DataType::bfloat16, {4}), c, 0.1).find("bias is bfloat16[4]"),
            std::string::npos);
  EXPECT_NE(text(b, TensorView(counts.data(), DataType::int64, {3}), 0.1).find("counts is int64[3]"),
            std::string::npos);
  EXPECT_NE(text(b, c, std::numeric_limits<double>::quiet_NaN()).find("rate is nan"), std::string::npos);
  EXPECT_NE(text(b, c, -1.0).find("rate is -1"), std::string::npos);
  counts[2] = -5;
  EXPECT_NE(text(b, c, 0.1).find("counts[2] is -5"), std::string::npos);
}

}  // namespace
}  // namespace moelith
