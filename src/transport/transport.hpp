// What ranks of a group share: symmetric memory (the same buffer on each rank, addressable from each), counters that
// every rank may raise (arrivals), and flags that carry the number of a pass (schedule/dependencies.hpp says how the
// last two are used). Set-up calls are collective; everything else happens by plain loads, stores and atomics.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moelith::transport {

// Whether a count of passes has come to `target`: by the sign of their difference, which is right also where counts
// start anew from 0.
inline bool reached(std::uint64_t count, std::uint64_t target) {
  return static_cast<std::int64_t>(count - target) >= 0;
}

// How long one has waited for others. A pause of the process itself (Ctrl-Z, a debugger) counts as a tenth of a second
// only: whoever stopped the whole job for a minute shall not find that it has failed.
class Waiting {
 public:
  std::chrono::steady_clock::duration time() {
    const auto now = std::chrono::steady_clock::now();
    time_ += std::min<std::chrono::steady_clock::duration>(now - last_, std::chrono::milliseconds(100));
    last_ = now;
    return time_;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration time_{};
};

// Host memory that the kernels of all ranks reach. All zero at first.
struct HostWords {
  std::int32_t stop = 0;                   // not 0 once the group has failed: kernels' waits end
  alignas(16) std::byte report[64] = {};  // what a kernel gave up, in its executor's own terms
};

// Passes on GPUs that one rank has begun, and ended: counted by its kernels, in host memory. A pass of the group has the
// same count on every rank.
struct DevicePasses {
  std::uint64_t begun = 0, ended = 0;
};

// Symmetric memory on the GPUs of the ranks.
struct DeviceMemory {
  std::vector<std::byte*> rank;  // [R], each as this rank addresses it: aligned to 256 bytes, all zero at first
  std::shared_ptr<HostWords> words;
  DevicePasses* passes = nullptr;  // of this rank, kept by `words`; null: nobody wants to know
  int sharing = 1;               // how many of the ranks are on this rank's GPU
  std::vector<std::shared_ptr<void>> owned;  // keeps all of it alive: another rank's kernel may read to its own pass's end
};

class Transport {
 public:
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Collective. Every rank's value, by rank. Throws Error(timed_out) naming the ranks that did not come.
  virtual std::vector<std::int64_t> all_gather(std::int64_t value) = 0;
  // Collective, outside of passes. Makes each rank's symmetric memory at least that large (bytes; numbers of counters);
  // addresses may change, contents are lost, arrivals are 0 and flags stand at the last pass. Memory never shrinks.
  virtual void reserve(std::uint64_t bytes, std::int64_t arrivals, std::int64_t flags) = 0;

  // Collective, outside of passes. Memory of this rank's current GPU, `bytes` bytes of it, for passes whose symmetric
  // memory is laid out as `layout` says, a number that is alike on all ranks and stands for their sizes too. It lives as
  // long as it is kept. `prepare` gets this rank's where it is made anew, all zero, before the others see it. Throws
  // Error(unsupported) naming the ranks whose GPUs cannot be reached by load and store.
  using Prepare = std::function<void(std::byte* memory)>;
  virtual std::shared_ptr<const DeviceMemory> device_memory(std::uint64_t layout, std::uint64_t bytes, const Prepare& prepare);
  // Whether ranks read any memory on each other's GPUs, as those of one process do, or device_memory alone.
  virtual bool reads_any_device_memory() const { return true; }

  // Of any rank; valid until the next reserve. Memory is aligned to 256 bytes.
  virtual std::byte* memory(int rank) const = 0;
  virtual std::uint64_t* arrivals(int rank) const = 0;  // reached with std::atomic_ref
  virtual std::uint64_t* flags(int rank) const = 0;     // likewise

  // Every pass of the group has a number, the same on all ranks since all run the same passes in the same order.
  std::uint64_t begin_pass() {
    begun(++epoch_);
    return epoch_;
  }
  // The number of the last pass of this rank, and a way to have it elsewhere: before any reserve, on all ranks alike.
  std::uint64_t last_pass() const { return epoch_; }
  void start_after_pass(std::uint64_t number) {
    epoch_ = number;
    begun(number);
    done(number);
  }
  // This rank has done all that others may wait for in this pass.
  void end_pass() { done(epoch_); }
  // While a pass waits: whom it can be waiting for, for an error's text, such as "rank 2 has not begun this pass".
  std::string laggards() const {
    std::string text;
    for (int r = 0; r < size(); ++r) {
      if (r == rank() || reached(last_done(r), epoch_)) continue;
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(r) +
              (reached(last_begun(r), epoch_) ? " is in it still" : " has not begun this pass");
    }
    return text;
  }
  // While a pass waits, from time to time: fails the group if the process of a rank is gone that has not ended the
  // pass.
  void look_after_ranks() { look_after_ranks(epoch_); }
  // Forward passes alternate between two routing tables: a rank may still read the last one of a rank that has gone on.
  int begin_table() { return table_ ^= 1; }

  // Collective where it changes anything: a pass whose symmetric memory is laid out otherwise than that of the pass
  // before begins only when every rank is done with that one. Among passes of one layout there is no need: a rank ends
  // its pass after all its rows have been pulled and brought back, and tables alternate. `layout`: a number that stands
  // for the layout, alike on all ranks, not 0.
  void lay_out(std::uint64_t layout) {
    if (layout_ != 0 && layout_ != layout) all_gather(0);
    layout_ = layout;
  }

  // May be set while others wait: by any thread, for the waits that begin afterwards.
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_.load()); }
  void set_timeout(std::chrono::milliseconds limit) { timeout_.store(limit.count()); }

  // This rank gives up: every wait of the others ends, and the group refuses further use, since nobody knows what was
  // written. The first reason stays, with the number of the rank that gave it.
  virtual void fail(const std::string& reason) = 0;
  virtual bool failed() const = 0;
  // Throws Error(group_failed) with that rank and its reason if the group has failed.
  virtual void require_usable() const = 0;

  // Runs this rank's part of a collective call. If it throws, the others learn at once instead of waiting for this
  // rank.
  template <class F>
  auto collective(F&& call) {
    try {
      return call();
    } catch (const std::exception& error) {
      fail(error.what());
      throw;
    } catch (...) {
      fail("an exception of unknown type");
      throw;
    }
  }

 protected:
  Transport(int rank, int size) : rank_(rank), size_(size) {}

  // The number of the last pass that each rank has begun, and ended.
  virtual void begun(std::uint64_t) {}
  virtual void done(std::uint64_t) {}
  virtual std::uint64_t last_begun(int) const { return epoch_; }
  virtual std::uint64_t last_done(int) const { return epoch_; }
  virtual void look_after_ranks(std::uint64_t) {}

 private:
  int rank_, size_;
  std::uint64_t epoch_ = 0;
  int table_ = 0;
  std::uint64_t layout_ = 0;                  // of the last pass
  std::atomic<std::int64_t> timeout_{60000};  // milliseconds
};

// One rank: no symmetric memory, no counters.
std::shared_ptr<Transport> make_single();
// `ranks` ranks on threads of this process.
std::vector<std::shared_ptr<Transport>> make_threads(int ranks);
// One rank of several processes of this host; Group::process says what the arguments are, but for the name's length.
// Collective.
inline constexpr std::size_t longest_process_name = 192;  // a file's name has 255 characters, of which it takes some
std::shared_ptr<Transport> make_process(const std::string& name, int rank, int ranks, std::chrono::milliseconds limit,
                                        const std::string& argument);

}  // namespace moelith::transport
