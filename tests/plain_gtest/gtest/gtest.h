// What the GPU tests use of GoogleTest, for machines that do not have it and cannot fetch it. Same names, same output of
// the closing lines; --gtest_filter takes patterns with * joined by ':', those after '-' are left out. Where GoogleTest
// is installed, CMake takes that instead.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace testing {

struct Test {
  virtual ~Test() = default;
  virtual void TestBody() = 0;
};

namespace internal {

struct Registered {
  std::string name;
  std::function<void()> run;
};
inline std::vector<Registered>& tests() {
  static std::vector<Registered> all;
  return all;
}
inline std::vector<std::string>& traces() {
  static std::vector<std::string> all;
  return all;
}
struct State {
  bool failed = false, skipped = false;
};
inline State& state() {
  static State now;
  return now;
}
struct Trace {
  explicit Trace(std::string text) { traces().push_back(std::move(text)); }
  ~Trace() { traces().pop_back(); }
};

template <class T>
std::string text_of(const T& value) {
  std::ostringstream out;
  if constexpr (requires { out << value; }) {
    out.precision(17);
    out << value;
  } else if constexpr (requires { value.begin(); value.end(); }) {
    out << "{";
    std::size_t n = 0;
    for (const auto& v : value) {
      if (n++ == 8) {
        out << ", ...";
        break;
      }
      out << (n > 1 ? ", " : "") << text_of(v);
    }
    out << "}";
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else {
    out << sizeof(T) << " bytes";
  }
  return out.str();
}

// Assigning the message reports the failure; void, so that an ASSERT can return it.
class Failure {
 public:
  Failure(const char* file, int line, std::string what, bool skip = false) : file_(file), line_(line), what_(std::move(what)), skip_(skip) {}
  template <class T>
  Failure& operator<<(const T& value) {
    message_ << value;
    return *this;
  }
  Failure& operator<<(std::nullptr_t) { return *this; }
  void report() const {
    if (skip_) {
      state().skipped = true;
      std::printf("%s:%d: Skipped\n%s\n", file_, line_, message_.str().c_str());
      return;
    }
    state().failed = true;
    std::printf("%s:%d: Failure\n%s%s\n", file_, line_, what_.c_str(), message_.str().c_str());
    for (const auto& trace : traces()) std::printf("  with: %s\n", trace.c_str());
    std::fflush(stdout);
  }

 private:
  const char* file_;
  int line_;
  std::string what_;
  bool skip_;
  std::ostringstream message_;
};
struct Report {
  void operator=(const Failure& failure) const { failure.report(); }
};

template <class A, class B, class Compare>
std::string compare(const char* a_text, const char* b_text, const char* relation, const A& a, const B& b, Compare holds) {
  if (holds(a, b)) return "";
  return std::string("Expected: ") + a_text + " " + relation + " " + b_text + "\n  " + text_of(a) + "\n  " + text_of(b) + "\n";
}

inline bool matches(const char* pattern, const char* name) {
  if (*pattern == '\0') return *name == '\0';
  if (*pattern == '*') return matches(pattern + 1, name) || (*name != '\0' && matches(pattern, name + 1));
  return *name != '\0' && (*pattern == '?' || *pattern == *name) && matches(pattern + 1, name + 1);
}
inline bool wanted(const std::string& filter, const std::string& name) {
  const std::size_t dash = filter.find('-');
  auto any = [&](const std::string& patterns) {
    std::istringstream in(patterns);
    for (std::string pattern; std::getline(in, pattern, ':');) {
      if (matches(pattern.c_str(), name.c_str())) return true;
    }
    return false;
  };
  const std::string positive = filter.substr(0, dash);
  return (positive.empty() || any(positive)) && (dash == std::string::npos || !any(filter.substr(dash + 1)));
}

inline int run_all(int count, char** arguments) {
  std::string filter = "*";
  bool list = false;
  for (int i = 1; i < count; ++i) {
    if (std::strncmp(arguments[i], "--gtest_filter=", 15) == 0) filter = arguments[i] + 15;
    list |= std::strcmp(arguments[i], "--gtest_list_tests") == 0;
  }
  std::vector<std::string> failed, skipped;
  int passed = 0, ran = 0;
  for (const auto& test : tests()) {
    if (!wanted(filter, test.name)) continue;
    if (list) {
      std::printf("%s\n", test.name.c_str());
      continue;
    }
    std::printf("[ RUN      ] %s\n", test.name.c_str());
    std::fflush(stdout);
    ++ran;
    state() = {};
    try {
      test.run();
    } catch (const std::exception& error) {
      Report() = Failure(test.name.c_str(), 0, std::string("exception: ") + error.what() + "\n");
    } catch (...) {
      Report() = Failure(test.name.c_str(), 0, "an exception of unknown type\n");
    }
    if (state().failed) {
      failed.push_back(test.name);
    } else if (state().skipped) {
      skipped.push_back(test.name);
    } else {
      ++passed;
    }
    std::printf("[ %s ] %s\n", state().failed ? " FAILED " : state().skipped ? " SKIPPED" : "      OK", test.name.c_str());
    std::fflush(stdout);
  }
  if (list) return 0;
  std::printf("[==========] %d tests ran.\n[  PASSED  ] %d tests.\n", ran, passed);
  if (!skipped.empty()) std::printf("[  SKIPPED ] %zu tests.\n", skipped.size());
  if (!failed.empty()) {
    std::printf("[  FAILED  ] %zu tests, listed below:\n", failed.size());
    for (const auto& name : failed) std::printf("[  FAILED  ] %s\n", name.c_str());
  }
  return failed.empty() ? 0 : 1;
}

template <class T>
bool add(const char* suite, const char* name) {
  tests().push_back({std::string(suite) + "." + name, [] { T().TestBody(); }});
  return true;
}

}  // namespace internal
}  // namespace testing

#define TEST(Suite, Name)                                                                                 \
  struct Suite##_##Name##_Test : ::testing::Test {                                                        \
    void TestBody() override;                                                                             \
  };                                                                                                      \
  static const bool Suite##_##Name##_added = ::testing::internal::add<Suite##_##Name##_Test>(#Suite, #Name); \
  void Suite##_##Name##_Test::TestBody()

#define MOELITH_GTEST_REPORT(what) ::testing::internal::Report() = ::testing::internal::Failure(__FILE__, __LINE__, what)
#define MOELITH_GTEST_CHECK(text, leave) \
  if (const std::string moelith_failure = (text); moelith_failure.empty()) { \
  } else                                                                     \
    leave MOELITH_GTEST_REPORT(moelith_failure)
#define MOELITH_GTEST_COMPARE(a, b, relation, leave)                                               \
  MOELITH_GTEST_CHECK(::testing::internal::compare(#a, #b, #relation, a, b,                        \
                                                   [](const auto& x, const auto& y) { return x relation y; }), leave)
#define MOELITH_GTEST_TRUE(condition, leave) \
  MOELITH_GTEST_CHECK(static_cast<bool>(condition) ? "" : "Expected to hold: " #condition "\n", leave)
#define MOELITH_GTEST_FALSE(condition, leave) \
  MOELITH_GTEST_CHECK(!static_cast<bool>(condition) ? "" : "Expected not to hold: " #condition "\n", leave)

#define EXPECT_EQ(a, b) MOELITH_GTEST_COMPARE(a, b, ==, )
#define EXPECT_NE(a, b) MOELITH_GTEST_COMPARE(a, b, !=, )
#define EXPECT_LE(a, b) MOELITH_GTEST_COMPARE(a, b, <=, )
#define EXPECT_LT(a, b) MOELITH_GTEST_COMPARE(a, b, <, )
#define EXPECT_GE(a, b) MOELITH_GTEST_COMPARE(a, b, >=, )
#define EXPECT_GT(a, b) MOELITH_GTEST_COMPARE(a, b, >, )
#define ASSERT_EQ(a, b) MOELITH_GTEST_COMPARE(a, b, ==, return)
#define ASSERT_NE(a, b) MOELITH_GTEST_COMPARE(a, b, !=, return)
#define ASSERT_LE(a, b) MOELITH_GTEST_COMPARE(a, b, <=, return)
#define EXPECT_TRUE(condition) MOELITH_GTEST_TRUE(condition, )
#define EXPECT_FALSE(condition) MOELITH_GTEST_FALSE(condition, )
#define ASSERT_TRUE(condition) MOELITH_GTEST_TRUE(condition, return)
#define ASSERT_FALSE(condition) MOELITH_GTEST_FALSE(condition, return)
#define EXPECT_NEAR(a, b, distance) \
  MOELITH_GTEST_CHECK(::testing::internal::compare(#a, #b, "near", a, b, \
    [&](const auto& x, const auto& y) { return std::abs(double(x) - double(y)) <= double(distance); }), )
#define ASSERT_NEAR(a, b, distance) \
  MOELITH_GTEST_CHECK(::testing::internal::compare(#a, #b, "near", a, b, \
    [&](const auto& x, const auto& y) { return std::abs(double(x) - double(y)) <= double(distance); }), return)
#define FAIL() return MOELITH_GTEST_REPORT("")
#define ADD_FAILURE() MOELITH_GTEST_REPORT("")
#define GTEST_SKIP() \
  return ::testing::internal::Report() = ::testing::internal::Failure(__FILE__, __LINE__, "", true)
#define MOELITH_GTEST_JOIN_(a, b) a##b
#define MOELITH_GTEST_JOIN(a, b) MOELITH_GTEST_JOIN_(a, b)
#define SCOPED_TRACE(text) const ::testing::internal::Trace MOELITH_GTEST_JOIN(moelith_trace_, __LINE__)(text)
