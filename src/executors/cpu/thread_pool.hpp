// Threads that run one function together, again and again.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace moelith::executors::cpu {

class ThreadPool {
 public:
  // `workers` includes the calling thread. Throws Error(device_error) if the system refuses a thread.
  explicit ThreadPool(int workers);
  ~ThreadPool();

  int workers() const;
  // Runs body(0) on the calling thread and body(1) .. body(workers - 1) on the others; returns when all have.
  // The body must not throw.
  void run(const std::function<void(int worker)>& body);

  // A pool that nobody else uses at the moment, kept for the next caller when released. Any number of threads of the
  // process may hold one each.
  static std::shared_ptr<ThreadPool> acquire(int workers);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Numbers of the processors that the calling thread may use, and how many they are.
std::vector<int> available_processors();
int available_workers();

}  // namespace moelith::executors::cpu
