#include "routing/caller_routes.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace moelith::routing {
namespace {

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    return error.what();
  }
  return "no error";
}

TEST(CallerRoutes, CopiesBothIdTypesAndAnyStrides) {
  // [2, 3] stored column by column.
  std::vector<std::int64_t> ids = {0, 3, -1, 2, 1, 1};
  std::vector<float> weights = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f};
  TensorView id_view(ids.data(), DataType::int64, {2, 3}), weight_view(weights.data(), DataType::float32, {2, 3});
  id_view.stride = {1, 2};
  std::vector<std::int32_t> out_ids(6, 99);
  std::vector<float> out_weights(6, std::numeric_limits<float>::quiet_NaN());
  copy_caller_routes(id_view, weight_view, 2, 3, 4, 2, out_ids.data(), out_weights.data());
  EXPECT_EQ(out_ids, (std::vector<std::int32_t>{0, -1, 1, 3, 2, 1}));
  EXPECT_EQ(out_weights, (std::vector<float>{0.1f, 0.0f, 0.3f, 0.4f, 0.5f, 0.6f}));
  std::vector<std::int32_t> narrow = {0, -1, 1, 3, 2, 1};
  std::vector<double> wide_weights = {1, 2, 3, 4, 5, 6}, wide_out(6);
  copy_caller_routes(TensorView(narrow.data(), DataType::int32, {2, 3}),
                     TensorView(wide_weights.data(), DataType::float64, {2, 3}), 2, 3, 4, 2, out_ids.data(),
                     wide_out.data());
  EXPECT_EQ(out_ids, narrow);
  EXPECT_EQ(wide_out, (std::vector<double>{1, 0, 3, 4, 5, 6}));
}

TEST(CallerRoutes, AbsentRowsAreNotLookedAt) {
  std::vector<std::int32_t> ids = {0, 1, 1234, -99}, out_ids(4, 7);
  std::vector<float> weights(4, std::numeric_limits<float>::quiet_NaN()), out_weights(4, 7);
  weights[0] = weights[1] = 0.5f;
  copy_caller_routes(TensorView(ids.data(), DataType::int32, {2, 2}),
                     TensorView(weights.data(), DataType::float32, {2, 2}), 2, 2, 2, 1, out_ids.data(),
                     out_weights.data());
  EXPECT_EQ(out_ids, (std::vector<std::int32_t>{0, 1, -1, -1}));
  EXPECT_EQ(out_weights, (std::vector<float>{0.5f, 0.5f, 0, 0}));
}

TEST(CallerRoutes, NamesTheElementThatIsOutOfRange) {
  for (std::int64_t bad :
       {std::int64_t{8}, std::int64_t{-2}, std::int64_t{1} << 32, std::numeric_limits<std::int64_t>::min()}) {
    std::vector<std::int64_t> ids = {0, 1, 2, 3, 4, 5};
    ids[5] = bad;
    std::vector<float> weights(6, 1.0f), out_weights(6, 7.0f);
    std::vector<std::int32_t> out_ids(6, 77);
    const std::string text = error_of([&] {
      copy_caller_routes(TensorView(ids.data(), DataType::int64, {3, 2}),
                         TensorView(weights.data(), DataType::float32, {3, 2}), 3, 2, 8, 3, out_ids.data(),
                         out_weights.data());
    });
    EXPECT_EQ(text, "topk_ids[2, 1] is " + std::to_string(bad) + "; accepted are -1 to 7");
    EXPECT_EQ(out_ids, std::vector<std::int32_t>(6, 77));
  }
}

TEST(CallerRoutes, RefusesWrongShapesAndTypes) {
  std::vector<std::int64_t> ids(6);
  std::vector<float> weights(6);
  const auto text = [&](TensorView id_view, TensorView weight_view) {
    return error_of([&] { copy_caller_routes<float>(id_view, weight_view, 3, 2, 8, 3, nullptr, nullptr); });
  };
  const TensorView good_ids(ids.data(), DataType::int64, {3, 2}),
      good_weights(weights.data(), DataType::float32, {3, 2});
  EXPECT_EQ(text(good_ids, good_weights), "no error");
  EXPECT_NE(text({}, good_weights).find("topk_ids is missing"), std::string::npos);
  EXPECT_NE(text(good_ids, {}).find("topk_weights is missing"), std::string::npos);
  EXPECT_NE(text(TensorView(ids.data(), DataType::int64, {2, 3}), good_weights).find("topk_ids is int64[2, 3]"),
            std::string::npos);
  EXPECT_NE(text(TensorView(ids.data(), DataType::uint8, {3, 2}), good_weights).find("uint8"), std::string::npos);
  EXPECT_NE(text(good_ids, TensorView(weights.data(), DataType::bfloat16, {3, 2})).find("accepted is float32"),
            std::string::npos);
  EXPECT_NE(text(TensorView(nullptr, DataType::int64, {3, 2}), good_weights).find("null"), std::string::npos);
}

TEST(CallerRoutes, NoTokens) {
  copy_caller_routes<float>(TensorView(nullptr, DataType::int32, {0, 2}),
                            TensorView(nullptr, DataType::float32, {0, 2}), 0, 2, 8, 0, nullptr, nullptr);
}

}  // namespace
}  // namespace moelith::routing
