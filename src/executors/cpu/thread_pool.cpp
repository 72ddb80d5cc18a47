#include "executors/cpu/thread_pool.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "moelith/tensor.hpp"

namespace moelith::executors::cpu {

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable start, finished;
  const std::function<void(int)>* body = nullptr;
  unsigned long generation = 0;
  int running = 0;
  bool stopping = false;
  std::vector<std::thread> threads;

  void loop(int worker) {
    unsigned long seen = 0;
    std::unique_lock lock(mutex);
    while (true) {
      start.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      const auto* work = body;
      lock.unlock();
      (*work)(worker);
      lock.lock();
      if (--running == 0) finished.notify_one();
    }
  }
  void stop() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    start.notify_all();
    for (auto& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int workers) : state_(std::make_unique<State>()) {
  try {
    for (int w = 1; w < workers; ++w) state_->threads.emplace_back([s = state_.get(), w] { s->loop(w); });
  } catch (const std::system_error& error) {
    state_->stop();
    throw Error(Status::device_error, "could not start worker thread " + std::to_string(state_->threads.size() + 1) + " of " +
                                          std::to_string(workers) + ": " + error.what());
  }
}

ThreadPool::~ThreadPool() { state_->stop(); }

int ThreadPool::workers() const { return static_cast<int>(state_->threads.size()) + 1; }

void ThreadPool::run(const std::function<void(int)>& body) {
  if (!state_->threads.empty()) {
    std::lock_guard lock(state_->mutex);
    state_->body = &body;
    state_->running = static_cast<int>(state_->threads.size());
    ++state_->generation;
    state_->start.notify_all();
  }
  body(0);
  if (state_->threads.empty()) return;
  std::unique_lock lock(state_->mutex);
  state_->finished.wait(lock, [&] { return state_->running == 0; });
}

std::shared_ptr<ThreadPool> ThreadPool::acquire(int workers) {
  struct Idle {
    std::mutex mutex;
    std::vector<std::unique_ptr<ThreadPool>> pools;
    pid_t owner = getpid();
  };
  // Never destroyed: worker threads may outlive static destructors. A forked child has none of its parent's threads, so
  // it leaves the parent's pools alone and starts its own list.
  static std::mutex idle_mutex;
  static Idle* idle = new Idle;
  Idle* list;
  {
    std::lock_guard lock(idle_mutex);
    if (idle->owner != getpid()) idle = new Idle;
    list = idle;
  }
  std::unique_ptr<ThreadPool> pool;
  {
    std::lock_guard lock(list->mutex);
    for (auto& candidate : list->pools) {
      if (candidate && candidate->workers() == workers) {
        pool = std::move(candidate);
        std::swap(candidate, list->pools.back());
        list->pools.pop_back();
        break;
      }
    }
  }
  if (!pool) pool = std::make_unique<ThreadPool>(workers);
  return std::shared_ptr<ThreadPool>(pool.release(), [list](ThreadPool* released) {
    std::lock_guard lock(list->mutex);
    list->pools.emplace_back(released);
  });
}

std::vector<int> available_processors() {
  cpu_set_t set;
  std::vector<int> numbers;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &set)) numbers.push_back(i);
    }
  } else {
    numbers.resize(std::max(1u, std::thread::hardware_concurrency()));
    std::iota(numbers.begin(), numbers.end(), 0);
  }
  return numbers;
}

int available_workers() { return static_cast<int>(available_processors().size()); }

}  // namespace moelith::executors::cpu
