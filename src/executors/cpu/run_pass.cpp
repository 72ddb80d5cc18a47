#include "executors/cpu/run_pass.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "moelith/tensor.hpp"

namespace moelith::executors::cpu {
namespace {

using schedule::CounterArray;
using schedule::Pass;
using schedule::Signal;
using schedule::Tile;
using schedule::Wait;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr int tries_between_looks = 1000;  // of a wait, which takes a few microseconds between two tries

class Run {
 public:
  Run(const Pass& pass, const PassCounters& counters, transport::Transport& transport, std::uint64_t epoch,
      std::uint64_t shuffle_seed, const std::function<void(const Tile&, int)>& run_tile,
      std::vector<TileSpan>* timeline)
      : pass_(pass),
        map_(schedule::CounterMap::of(pass.sizes)),
        counters_(counters),
        transport_(transport),
        epoch_(epoch),
        run_tile_(run_tile),
        timeline_(timeline),
        prologue_(schedule::prologue_tiles(pass)),
        layout_is_late_(pass.sizes.ranks > 1 && pass.sizes.direction == schedule::Direction::forward),
        random_(shuffle_seed) {
    std::fill_n(counters_.local, map_.local_size, 0);
    if (counters_.arrivals) std::fill_n(counters_.arrivals, map_.arrivals_size, 0);
    if (shuffle_seed != 0) {
      for (std::int64_t i = 0; i < prologue_; ++i) remaining_.push_back(i);
      if (!layout_is_late_) reveal();
    }
  }

  void in_order(int worker) {
    guarded([&] {
      while (!stopped()) {
        const double taken = now();
        const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
        if (index >= prologue_) {  // only the layout tells how many tiles follow
          if (layout_is_late_ && !await(layout_wait(), Tile{schedule::Stage::layout, 0, 0, 0})) return;
          if (index >= schedule::tile_count(pass_)) return;
        }
        const Tile tile = schedule::tile_at(pass_, index);
        if (!schedule::for_each_wait(pass_, map_, tile, [&](const Wait& w) { return await(w, tile); })) return;
        finish(tile, worker, taken);
      }
    });
  }

  void shuffled(int worker) {
    guarded([&] {
      transport::Waiting idle;
      std::uint64_t tries = 0;
      double taken = now();
      while (!stopped()) {
        Tile tile;
        {
          std::lock_guard lock(pick_);
          if (!revealed_ && satisfied(layout_wait())) reveal();
          if (revealed_ && remaining_.empty()) return;
          if (!pick_ready(tile)) tile.stage = static_cast<schedule::Stage>(schedule::stage_count);
        }
        if (static_cast<int>(tile.stage) < schedule::stage_count) {
          finish(tile, worker, taken);
          taken = now();
          idle = {};
        } else {
          if (pass_.sizes.ranks > 1) {
            if (tries++ % tries_between_looks == 0) transport_.look_after_ranks();
            end_if_overdue(idle.time());
          }
          std::this_thread::yield();
        }
      }
    });
  }

  // After all workers have stopped.
  void conclude() {
    if (error_) transport_.collective([this] { std::rethrow_exception(error_); });
    if (!counters_.arrivals) {
      auto* mine = transport_.arrivals(pass_.sizes.rank);
      for (std::int64_t i = 0; i < map_.arrivals_size; ++i)
        std::atomic_ref(mine[i]).store(0, std::memory_order_relaxed);
    }
    transport_.end_pass();
  }

 private:
  template <class F>
  void guarded(F body) {
    try {
      body();
    } catch (...) {
      std::lock_guard lock(pick_);
      if (!error_) error_ = std::current_exception();
      stop_.store(true, std::memory_order_release);
    }
  }

  bool stopped() const { return stop_.load(std::memory_order_acquire) || transport_.failed(); }

  Wait layout_wait() const { return {CounterArray::local, map_.layout_ready, 1, 1, pass_.sizes.rank}; }

  std::uint64_t* array(CounterArray which, int rank) const {
    switch (which) {
      case CounterArray::local: return counters_.local;
      case CounterArray::arrivals: return counters_.arrivals ? counters_.arrivals : transport_.arrivals(rank);
      default: return transport_.flags(rank);
    }
  }

  bool satisfied(const Wait& wait) const {
    std::uint64_t* base = array(wait.array, pass_.sizes.rank);
    const std::uint64_t target = wait.array == CounterArray::flags ? epoch_ : static_cast<std::uint64_t>(wait.target);
    for (std::int64_t i = wait.begin; i < wait.begin + wait.count; ++i) {
      if (!transport::reached(std::atomic_ref(base[i]).load(std::memory_order_acquire), target)) return false;
    }
    return true;
  }

  // False when the pass is being given up.
  bool await(const Wait& wait, const Tile& tile) {
    for (int spin = 0; spin < 2000; ++spin) {
      if (satisfied(wait)) return true;
      relax();
    }
    const auto limit = limit_of(wait);
    transport::Waiting waiting;
    // One rank waits for its own workers alone, each of which finishes its tile or ends the pass by an exception: no
    // limit there, or a process that was stopped for a while (Ctrl-Z, a debugger) would fail when it goes on.
    const bool limited = pass_.sizes.ranks > 1;
    for (std::uint64_t tries = 0; !satisfied(wait); ++tries) {
      if (stop_.load(std::memory_order_acquire)) return false;
      if (transport_.failed()) transport_.require_usable();
      if (limited && tries % tries_between_looks == 0) transport_.look_after_ranks();
      if (limited && waiting.time() > limit) time_out(wait, tile, limit);
      std::this_thread::yield();
    }
    return true;
  }

  // Work of this rank is late because a worker waits for another rank: that one's limit shall run out first and name
  // it.
  std::chrono::milliseconds limit_of(const Wait& wait) const {
    return transport_.timeout() * (wait.array == CounterArray::local ? 2 : 1);
  }

  // Shuffled: nothing has been ready for this worker for so long. The first of the remaining tiles is the one that
  // others hold up, since each depends only on tiles before it.
  void end_if_overdue(std::chrono::steady_clock::duration idle) {
    if (idle <= transport_.timeout()) return;
    Tile tile{schedule::Stage::layout, 0, 0, 0};  // where only the layout is missing, another worker has its tile
    Wait wait = layout_wait();
    {
      std::lock_guard lock(pick_);
      if (!remaining_.empty()) {
        tile = schedule::tile_at(pass_, *std::min_element(remaining_.begin(), remaining_.end()));
        const bool ready = schedule::for_each_wait(pass_, map_, tile, [&](const Wait& w) {
          wait = w;
          return satisfied(w);
        });
        if (ready) return;
      }
    }
    if (const auto limit = limit_of(wait); idle > limit) time_out(wait, tile, limit);
  }

  [[noreturn]] void time_out(const Wait& wait, const Tile& tile, std::chrono::milliseconds limit) {
    const std::string what = wait.array == CounterArray::local      ? "work of this rank"
                             : wait.array == CounterArray::arrivals ? "rows of other ranks"
                                                                    : "rank " + std::to_string(wait.from);
    const std::string laggards = transport_.laggards();
    throw Error(Status::timed_out, "rank " + std::to_string(pass_.sizes.rank) + ", stage " + to_string(tile.stage) +
                                       ", expert " + std::to_string(tile.expert) + ", block " +
                                       std::to_string(tile.row_block) + ": waited " + std::to_string(limit.count()) +
                                       " ms for " + what + (laggards.empty() ? "" : " (" + laggards + ")"));
  }

  // Seconds since the pass began; 0 where nobody wants to know.
  double now() const {
    if (!timeline_) return 0.0;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

  void finish(const Tile& tile, int worker, double taken) {
    const double start = now();
    run_tile_(tile, worker);
    if (timeline_) {
      const double end = now();
      std::lock_guard lock(pick_);
      timeline_->push_back(
          {worker, to_string(tile.stage), tile.expert, tile.row_block, tile.column_block, taken, start, end});
    }
    schedule::for_each_signal(pass_, map_, tile, [&](const Signal& signal) {
      std::atomic_ref counter(array(signal.array, signal.rank)[signal.index]);
      if (signal.array == CounterArray::flags) {
        counter.store(epoch_, std::memory_order_release);
      } else {
        counter.fetch_add(1, std::memory_order_release);
      }
    });
  }

  void reveal() {
    const std::int64_t count = schedule::tile_count(pass_);
    for (std::int64_t i = prologue_; i < count; ++i) remaining_.push_back(i);
    std::shuffle(remaining_.begin(), remaining_.end(), random_);
    revealed_ = true;
  }

  bool pick_ready(Tile& tile) {
    for (std::size_t i = 0; i < remaining_.size(); ++i) {
      tile = schedule::tile_at(pass_, remaining_[i]);
      if (schedule::for_each_wait(pass_, map_, tile, [&](const Wait& w) { return satisfied(w); })) {
        remaining_.erase(remaining_.begin() + static_cast<std::ptrdiff_t>(i));
        return true;
      }
    }
    return false;
  }

  const Pass& pass_;
  const schedule::CounterMap map_;
  const PassCounters counters_;
  transport::Transport& transport_;
  const std::uint64_t epoch_;
  const std::function<void(const Tile&, int)>& run_tile_;
  std::vector<TileSpan>* const timeline_;  // guarded by pick_
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  const std::int64_t prologue_;
  const bool layout_is_late_;

  std::atomic<std::int64_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex pick_;  // guards all below
  std::exception_ptr error_;
  bool revealed_ = false;
  std::vector<std::int64_t> remaining_;  // shuffled mode: tiles not yet taken
  std::mt19937_64 random_;
};

}  // namespace

void run_pass(const Pass& pass, const PassCounters& counters, transport::Transport& transport, std::uint64_t epoch,
              ThreadPool& pool, std::uint64_t shuffle_seed, const std::function<void(const Tile&, int)>& run_tile,
              std::vector<TileSpan>* timeline) {
  Run run(pass, counters, transport, epoch, shuffle_seed, run_tile, timeline);
  pool.run([&](int worker) {
    if (shuffle_seed != 0) {
      run.shuffled(worker);
    } else {
      run.in_order(worker);
    }
  });
  transport.require_usable();
  run.conclude();
}

}  // namespace moelith::executors::cpu
