#include "reference/matrix.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "reference/compare.hpp"
#include "reference/random_case.hpp"

namespace moelith::reference {
namespace {

// Sizes that leave every loop a remainder, and more columns than are handled in one go.
TEST(ReferenceMatrix, ProductsEqualTheirDefinition) {
  struct Size {
    std::int64_t n, m, k;
  };
  for (const auto& [n, m, k] : {Size{1, 1, 1}, Size{3, 5, 7}, Size{4, 8, 12}, Size{6, 9, 515}, Size{0, 3, 4}}) {
    RandomCase random(1);
    const std::vector<double> x = random.tensor(n * k), w = random.tensor(m * k), z = random.tensor(n * m);
    std::vector<double> product(n * m), expected_product(n * m);
    std::vector<double> nk = random.tensor(n * k), mk = random.tensor(m * k), expected_nk = nk, expected_mk = mk;
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < m; ++j) {
        for (std::int64_t c = 0; c < k; ++c) {
          expected_product[i * m + j] += x[i * k + c] * w[j * k + c];
          expected_nk[i * k + c] += z[i * m + j] * w[j * k + c];
          expected_mk[j * k + c] += z[i * m + j] * x[i * k + c];
        }
      }
    }
    multiply_transposed(n, m, k, x.data(), w.data(), product.data());
    add_product(n, m, k, z.data(), w.data(), nk.data());
    add_transposed_product(n, m, k, z.data(), x.data(), mk.data());
    EXPECT_LT(compare(product, expected_product, m).worst_row, 1e-14);
    EXPECT_LT(compare(nk, expected_nk, k).worst_row, 1e-14);
    EXPECT_LT(compare(mk, expected_mk, k).worst_row, 1e-14);
  }
}

}  // namespace
}  // namespace moelith::reference
