// How a call ended, for tests of what fails.
#pragma once

#include <chrono>
#include <exception>
#include <string>

#include "moelith/tensor.hpp"

namespace moelith::test {

struct Outcome {
  Status status = Status::ok;
  std::string text;  // of the error; empty: none
  std::chrono::milliseconds took{0};
};

// An exception that is no Error counts as Status::internal.
template <class F>
Outcome outcome_of(F call) {
  Outcome outcome;
  const auto begin = std::chrono::steady_clock::now();
  try {
    call();
  } catch (const Error& error) {
    outcome.status = error.status();
    outcome.text = error.what();
  } catch (const std::exception& error) {
    outcome.status = Status::internal;
    outcome.text = error.what();
  }
  const auto took = std::chrono::steady_clock::now() - begin;
  outcome.took = std::chrono::duration_cast<std::chrono::milliseconds>(took);
  return outcome;
}

}  // namespace moelith::test
