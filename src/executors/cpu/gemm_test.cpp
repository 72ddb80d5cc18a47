// gemm against its definition, element by element and bit by bit, on every instruction set of this machine.
#include "executors/cpu/gemm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "moelith/tensor.hpp"

namespace moelith::executors::cpu {
namespace {

using numerics::accumulator_t;
using numerics::bfloat16;

constexpr double canary = 123456.0;

class InstructionSetGuard {
 public:
  InstructionSetGuard() : before_(instruction_set()) {}
  ~InstructionSetGuard() { set_instruction_set(before_); }

 private:
  InstructionSet before_;
};

// An operand in memory of its exact size (so that AddressSanitizer sees any read beyond it), and its logical values.
template <class Storage>
struct TestOperand {
  using Order = typename Operand<Storage>::Order;
  std::int64_t rows, k;
  Order order;
  std::vector<std::unique_ptr<Storage[]>> memory;  // one block, or one a vector
  std::vector<const Storage*> pointers;
  Operand<Storage> view;

  // slack: what the stride exceeds the vector's length by. nulls: every third vector, for a gather.
  TestOperand(std::mt19937& random, std::int64_t rows, std::int64_t k, Order order, bool gather, bool nulls,
              std::int64_t slack)
      : rows(rows), k(k), order(order) {
    const std::int64_t vectors = order == Order::k_contiguous ? rows : k;
    const std::int64_t length = order == Order::k_contiguous ? k : rows;
    std::normal_distribution<double> normal;
    auto fill = [&](Storage* out, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i)
        out[i] = numerics::store<Storage>(accumulator_t<Storage>(normal(random)));
    };
    if (gather) {
      for (std::int64_t v = 0; v < vectors; ++v) {
        if (nulls && v % 3 == 1) {
          pointers.push_back(nullptr);
          continue;
        }
        memory.emplace_back(new Storage[length]);
        fill(memory.back().get(), length);
        pointers.push_back(memory.back().get());
      }
      view = Operand<Storage>::gathered(order, pointers.data());
    } else {
      const std::int64_t stride = length + slack;
      const std::int64_t count = vectors > 0 ? (vectors - 1) * stride + length : 0;
      memory.emplace_back(new Storage[count]);
      fill(memory.back().get(), count);
      view = Operand<Storage>::strided(order, memory.back().get(), stride);
    }
  }

  Storage* at(std::int64_t row, std::int64_t p) const {
    const std::int64_t v = order == Order::k_contiguous ? row : p, i = order == Order::k_contiguous ? p : row;
    const Storage* vector = view.pointers ? view.pointers[v] : view.data + v * view.stride;
    return vector ? const_cast<Storage*>(vector) + i : nullptr;
  }
  accumulator_t<Storage> value(std::int64_t row, std::int64_t p) const {
    const Storage* element = at(row, p);
    return element ? numerics::load(*element) : accumulator_t<Storage>(0);
  }
};

// The definition.
template <class Storage>
accumulator_t<Storage> chain(const TestOperand<Storage>& a, const TestOperand<Storage>& b, std::int64_t i,
                             std::int64_t j, accumulator_t<Storage> sum) {
  for (std::int64_t p = 0; p < a.k; ++p) sum = std::fma(a.value(i, p), b.value(j, p), sum);
  return sum;
}

template <class T>
bool same_bits(T x, T y) {
  return std::memcmp(&x, &y, sizeof x) == 0 || (std::isnan(x) && std::isnan(y));
}

// C with canaries to the right of its rows and below them.
template <class T>
struct TestResult {
  std::int64_t m, n, ldc;
  std::vector<T> values;
  TestResult(std::int64_t m, std::int64_t n, std::int64_t slack, T fill)
      : m(m), n(n), ldc(n + slack), values((m + 2) * ldc, T(canary)) {
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j) at(i, j) = fill;
  }
  T& at(std::int64_t i, std::int64_t j) { return values[i * ldc + j]; }
  void expect_canaries() {
    for (std::int64_t i = 0; i < m + 2; ++i)
      for (std::int64_t j = i < m ? n : 0; j < ldc; ++j)
        ASSERT_EQ(at(i, j), T(canary)) << "canary " << i << ", " << j << " of " << m << " x " << n;
  }
};

template <class Storage>
void expect_product(TestOperand<Storage>& a, TestOperand<Storage>& b, bool accumulate, Scratch& scratch) {
  using T = accumulator_t<Storage>;
  const std::int64_t m = a.rows, n = b.rows, k = a.k;
  std::vector<T> expected(m * n);
  auto before = [](std::int64_t i, std::int64_t j) { return T(0.25) * T((i * 7 + j * 3) % 11) - T(1); };
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) expected[i * n + j] = chain(a, b, i, j, accumulate ? before(i, j) : T(0));
  for (InstructionSet set : available_instruction_sets()) {
    set_instruction_set(set);
    TestResult<T> c(m, n, 3, std::numeric_limits<T>::quiet_NaN());
    if (accumulate) {
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) c.at(i, j) = before(i, j);
    }
    gemm<Storage>(a.view, b.view, m, n, k, c.values.data(), c.ldc, accumulate, scratch);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j)
        if (!same_bits(c.at(i, j), expected[i * n + j]) && ++wrong <= 3)
          ADD_FAILURE() << to_string(set) << " " << m << " x " << n << " x " << k << ": C(" << i << ", " << j << ") is "
                        << c.at(i, j) << ", not " << expected[i * n + j];
    ASSERT_EQ(wrong, 0);
    c.expect_canaries();
  }
}

template <class Storage>
class Gemm : public testing::Test {
 protected:
  InstructionSetGuard guard;
  std::mt19937 random{20261130};
  Scratch scratch;
};
using Storages = testing::Types<bfloat16, float, double>;
TYPED_TEST_SUITE(Gemm, Storages);

TYPED_TEST(Gemm, every_layout_and_tail) {
  using Order = typename Operand<TypeParam>::Order;
  const struct {
    std::int64_t m, n, k;
  } shapes[] = {{1, 1, 1},    {1, 33, 7},   {2, 40, 16}, {3, 64, 31}, {4, 17, 8},   {5, 8, 24},
                {6, 16, 40},  {7, 15, 9},   {8, 31, 15}, {9, 65, 17}, {13, 5, 100}, {14, 32, 33},
                {17, 48, 64}, {29, 37, 41}, {0, 5, 3},   {5, 0, 3},   {12, 20, 0}};
  for (const auto& shape : shapes)
    for (int layout = 0; layout < 4; ++layout)
      for (int gather = 0; gather < 4; ++gather) {
        TestOperand<TypeParam> a(this->random, shape.m, shape.k,
                                 layout & 1 ? Order::row_contiguous : Order::k_contiguous, gather & 1, true, layout);
        TestOperand<TypeParam> b(this->random, shape.n, shape.k,
                                 layout & 2 ? Order::row_contiguous : Order::k_contiguous, gather & 2, true,
                                 2 * layout);
        expect_product(a, b, (layout + gather) % 2 == 1, this->scratch);
        if (this->HasFatalFailure()) return;
      }
}

TYPED_TEST(Gemm, every_row_count) {
  using Order = typename Operand<TypeParam>::Order;
  for (std::int64_t m = 1; m <= 45; ++m) {
    const Order order = m % 2 ? Order::k_contiguous : Order::row_contiguous;
    TestOperand<TypeParam> a(this->random, m, 21, order, false, false, 0);
    TestOperand<TypeParam> b(this->random, 8 + 3 * (m % 24), 21, Order::k_contiguous, false, false, 0);
    expect_product(a, b, false, this->scratch);
    if (this->HasFatalFailure()) return;
  }
}

// Longer than the blocks of k, more rows than a block of A holds.
TYPED_TEST(Gemm, several_blocks) {
  using Order = typename Operand<TypeParam>::Order;
  const struct { std::int64_t m, n, k; } shapes[] = {{2, 72, 1037}, {11, 49, 1031}, {64, 40, 530}, {601, 24, 263}};
  int layout = 0;
  for (const auto& shape : shapes) {
    TestOperand<TypeParam> a(this->random, shape.m, shape.k, layout & 1 ? Order::row_contiguous : Order::k_contiguous,
                             layout & 2, true, 0);
    TestOperand<TypeParam> b(this->random, shape.n, shape.k, layout & 2 ? Order::row_contiguous : Order::k_contiguous,
                             layout & 1, true, 0);
    expect_product(a, b, true, this->scratch);
    if (this->HasFatalFailure()) return;
    ++layout;
  }
}

TYPED_TEST(Gemm, split_k_continues_the_chain) {
  using Order = typename Operand<TypeParam>::Order;
  using T = accumulator_t<TypeParam>;
  TestOperand<TypeParam> a(this->random, 13, 777, Order::k_contiguous, false, false, 0);
  TestOperand<TypeParam> b(this->random, 43, 777, Order::row_contiguous, false, false, 0);
  for (InstructionSet set : available_instruction_sets()) {
    set_instruction_set(set);
    TestResult<T> whole(13, 43, 0, T(0)), split(13, 43, 0, T(0));
    gemm<TypeParam>(a.view, b.view, 13, 43, 777, whole.values.data(), 43, false, this->scratch);
    for (std::int64_t begin = 0, step = 64; begin < 777; begin += step) {
      auto part_a = a.view, part_b = b.view;
      part_a.data += begin;
      part_b.data += begin * part_b.stride;
      gemm<TypeParam>(part_a, part_b, 13, 43, std::min(step, 777 - begin), split.values.data(), 43, begin > 0,
                      this->scratch);
    }
    EXPECT_EQ(std::memcmp(whole.values.data(), split.values.data(), whole.values.size() * sizeof(T)), 0)
        << to_string(set);
  }
}

// A row's bits are the same alone and among any others.
TYPED_TEST(Gemm, row_alone_and_among_others) {
  using Order = typename Operand<TypeParam>::Order;
  using T = accumulator_t<TypeParam>;
  TestOperand<TypeParam> a(this->random, 23, 300, Order::k_contiguous, false, false, 0);
  TestOperand<TypeParam> b(this->random, 50, 300, Order::k_contiguous, false, false, 0);
  for (InstructionSet set : available_instruction_sets()) {
    set_instruction_set(set);
    TestResult<T> all(23, 50, 0, T(0));
    gemm<TypeParam>(a.view, b.view, 23, 50, 300, all.values.data(), 50, false, this->scratch);
    for (std::int64_t i = 0; i < 23; ++i) {
      auto row = a.view;
      row.data += i * row.stride;
      TestResult<T> alone(1, 50, 0, T(0));
      gemm<TypeParam>(row, b.view, 1, 50, 300, alone.values.data(), 50, false, this->scratch);
      EXPECT_EQ(std::memcmp(alone.values.data(), &all.at(i, 0), 50 * sizeof(T)), 0) << to_string(set) << " row " << i;
    }
  }
}

TYPED_TEST(Gemm, nan_and_infinity_stay_in_their_row_and_column) {
  using Order = typename Operand<TypeParam>::Order;
  using T = accumulator_t<TypeParam>;
  for (int layout = 0; layout < 4; ++layout) {
    TestOperand<TypeParam> a(this->random, 19, 70, layout & 1 ? Order::row_contiguous : Order::k_contiguous, false,
                             false, 0);
    TestOperand<TypeParam> b(this->random, 37, 70, layout & 2 ? Order::row_contiguous : Order::k_contiguous, false,
                             false, 0);
    for (std::int64_t p = 0; p < 70; ++p) *a.at(4, p) = numerics::store<TypeParam>(std::numeric_limits<T>::quiet_NaN());
    *a.at(18, 69) = numerics::store<TypeParam>(std::numeric_limits<T>::infinity());
    *b.at(36, 0) = numerics::store<TypeParam>(-std::numeric_limits<T>::infinity());
    *b.at(7, 33) = numerics::store<TypeParam>(std::numeric_limits<T>::quiet_NaN());
    for (InstructionSet set : available_instruction_sets()) {
      set_instruction_set(set);
      TestResult<T> c(19, 37, 1, T(0));
      gemm<TypeParam>(a.view, b.view, 19, 37, 70, c.values.data(), c.ldc, false, this->scratch);
      for (std::int64_t i = 0; i < 19; ++i)
        for (std::int64_t j = 0; j < 37; ++j)
          EXPECT_EQ(std::isfinite(c.at(i, j)), i != 4 && i != 18 && j != 7 && j != 36)
              << to_string(set) << " " << i << ", " << j;
      c.expect_canaries();
    }
    expect_product(a, b, false, this->scratch);
  }
}

// AMX has an order of its own; it is the one that gemm_amx.cpp states.
TEST(GemmAmx, its_stated_order) {
  if (!available(InstructionSet::amx)) GTEST_SKIP() << "this machine has no AMX";
  InstructionSetGuard guard;
  set_instruction_set(InstructionSet::amx);
  std::mt19937 random(5);
  Scratch scratch;
  using Order = Operand<bfloat16>::Order;
  const struct {
    std::int64_t m, n, k;
  } shapes[] = {{1, 1, 1}, {16, 16, 32}, {17, 33, 70}, {33, 15, 31}, {64, 48, 544}, {5, 100, 1000}, {600, 40, 1100}};
  for (const auto& shape : shapes)
    for (int layout = 0; layout < 8; ++layout) {
      const bool accumulate = layout & 1, gather = layout & 2;
      TestOperand<bfloat16> a(random, shape.m, shape.k, layout & 2 ? Order::row_contiguous : Order::k_contiguous,
                              gather, true, layout);
      TestOperand<bfloat16> b(random, shape.n, shape.k, layout & 4 ? Order::row_contiguous : Order::k_contiguous,
                              !gather, true, 2 * layout);
      TestResult<float> c(shape.m, shape.n, 3, accumulate ? 0.75f : std::numeric_limits<float>::quiet_NaN());
      gemm<bfloat16>(a.view, b.view, shape.m, shape.n, shape.k, c.values.data(), c.ldc, accumulate, scratch);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < shape.m; ++i)
        for (std::int64_t j = 0; j < shape.n; ++j) {
          float expected = accumulate ? 0.75f : 0.0f;
          for (std::int64_t p = 0; p < shape.k; p += 32) {
            float sum[2] = {};
            for (std::int64_t q = p; q < std::min(p + 32, shape.k); ++q)
              sum[q % 2] = std::fma(a.value(i, q), b.value(j, q), sum[q % 2]);
            expected += sum[0] + sum[1];
          }
          if (c.at(i, j) != expected && ++wrong <= 3)
            ADD_FAILURE() << shape.m << " x " << shape.n << " x " << shape.k << ": C(" << i << ", " << j << ") is "
                          << c.at(i, j) << ", not " << expected;
        }
      c.expect_canaries();
      ASSERT_EQ(wrong, 0);
    }
}

TEST(GemmLiteral, small_product) {
  InstructionSetGuard guard;
  Scratch scratch;
  // A = [1 2 3; 4 5 6], B = [1 0 -1; 2 2 2]: C = A B^T.
  const float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, -1, 2, 2, 2}, b_transposed[] = {1, 2, 0, 2, -1, 2};
  using Float = Operand<float>;
  for (InstructionSet set : available_instruction_sets()) {
    set_instruction_set(set);
    float c[4] = {};
    gemm<float>(Float::strided(Float::Order::k_contiguous, a, 3), Float::strided(Float::Order::k_contiguous, b, 3), 2,
                2, 3, c, 2, false, scratch);
    EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{-2, 12, -2, 30}));
    gemm<float>(Float::strided(Float::Order::k_contiguous, a, 3),
                Float::strided(Float::Order::row_contiguous, b_transposed, 2), 2, 2, 3, c, 2, true, scratch);
    EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{-4, 24, -4, 60}));
    // One rounding a step: (1 + 2^-12)^2 - 1 is exact only if the product is not rounded before the sum.
    const float x[] = {1.0f, 1.0f + 0x1p-12f}, y[] = {-1.0f, 1.0f + 0x1p-12f};
    gemm<float>(Float::strided(Float::Order::k_contiguous, x, 2), Float::strided(Float::Order::k_contiguous, y, 2), 1,
                1, 2, c, 1, false, scratch);
    EXPECT_EQ(c[0], 0x1p-11f + 0x1p-24f) << to_string(set);
  }
}

// Subnormal bfloat16 inputs and subnormal sums are kept.
TEST(GemmLiteral, subnormals) {
  InstructionSetGuard guard;
  Scratch scratch;
  const bfloat16 smallest{1}, one = numerics::to_bfloat16(1.0f);
  using Bf16 = Operand<bfloat16>;
  for (InstructionSet set : available_instruction_sets()) {
    set_instruction_set(set);
    float c = -1;
    gemm<bfloat16>(Bf16::strided(Bf16::Order::k_contiguous, &smallest, 1),
                   Bf16::strided(Bf16::Order::k_contiguous, &one, 1), 1, 1, 1, &c, 1, false, scratch);
    EXPECT_EQ(c, 0x1p-133f) << to_string(set);
  }
}

TEST(GemmInstructionSet, names_and_refusals) {
  InstructionSetGuard guard;
  const auto sets = available_instruction_sets();
  ASSERT_FALSE(sets.empty());
  EXPECT_EQ(sets.front(), InstructionSet::plain);
  for (InstructionSet set :
       {InstructionSet::plain, InstructionSet::avx2, InstructionSet::avx512, InstructionSet::amx}) {
    EXPECT_EQ(instruction_set_from(to_string(set)), set);
    EXPECT_EQ(std::find(sets.begin(), sets.end(), set) != sets.end(), set != InstructionSet::amx && available(set));
    if (available(set)) {
      set_instruction_set(set);
      EXPECT_EQ(instruction_set(), set);
    } else {
      try {
        set_instruction_set(set);
        ADD_FAILURE() << "accepted " << to_string(set);
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), Status::unsupported);
        EXPECT_NE(std::string(error.what()).find(to_string(set)), std::string::npos);
      }
    }
  }
  try {
    instruction_set_from("sse9");
    ADD_FAILURE() << "accepted sse9";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("plain, avx2, avx512, amx"), std::string::npos);
  }
}

}  // namespace
}  // namespace moelith::executors::cpu
