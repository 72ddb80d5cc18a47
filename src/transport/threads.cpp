// Ranks as threads of one process: what the sanitizers can see whole. In builds with CUDA also the ranks of one process
// that work on GPUs.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>

#include "moelith/tensor.hpp"
#include "transport/transport.hpp"
#if defined(MOELITH_WITH_CUDA)
#include "transport/device_memory.hpp"
#endif

namespace moelith::transport {
namespace {

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{256}); }
};

// What all ranks of the group see.
struct Shared {
  explicit Shared(int ranks)
      : ranks(ranks), gathered(ranks), memory(ranks), arrivals(ranks), flags(ranks), begun(ranks), done(ranks) {}

  const int ranks;
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  std::uint64_t generation = 0;
  std::vector<bool> present = std::vector<bool>(ranks, false);
  std::vector<std::int64_t> gathered;
  std::uint64_t bytes = 0;
  std::int64_t arrival_count = 0, flag_count = 0;
  std::vector<std::unique_ptr<std::byte[], AlignedDelete>> memory;
  std::vector<std::vector<std::uint64_t>> arrivals, flags;
  std::atomic<bool> has_failed{false};
  std::vector<std::atomic<std::uint64_t>> begun, done;  // the last pass of each rank
  std::string reason;                                   // guarded by mutex

  // With the lock held.
  void require_usable() const {
    if (has_failed) throw Error(Status::group_failed, "the group has failed: " + reason);
  }

  // All ranks meet; the last to come runs `last` before anybody leaves.
  template <class F>
  void meet(int rank, std::chrono::milliseconds limit, F last) {
    std::unique_lock lock(mutex);
    require_usable();
    const std::uint64_t mine = generation;
    present[rank] = true;
    if (++arrived == ranks) {
      last();
      arrived = 0;
      present.assign(ranks, false);
      ++generation;
      changed.notify_all();
      return;
    }
    if (changed.wait_for(lock, limit, [&] { return generation != mine || has_failed; })) {
      if (generation == mine) require_usable();
      return;
    }
    std::string missing;
    for (int r = 0; r < ranks; ++r) {
      if (!present[r]) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    }
    reason = "rank " + std::to_string(rank) + ": waited " + std::to_string(limit.count()) + " ms for rank " + missing +
             " to meet all others";
    has_failed = true;
    changed.notify_all();
    throw Error(Status::timed_out, reason);
  }
};

class Threads final : public Transport {
 public:
  Threads(int rank, std::shared_ptr<Shared> shared) : Transport(rank, shared->ranks), shared_(std::move(shared)) {}

  std::vector<std::int64_t> all_gather(std::int64_t value) override {
    {
      std::lock_guard lock(shared_->mutex);
      shared_->gathered[rank()] = value;
    }
    std::vector<std::int64_t> all;
    shared_->meet(rank(), timeout(), [] {});
    {
      std::lock_guard lock(shared_->mutex);
      all = shared_->gathered;
    }
    shared_->meet(rank(), timeout(), [] {});  // nobody overwrites before everybody has read
    return all;
  }

  void reserve(std::uint64_t bytes, std::int64_t arrivals, std::int64_t flags) override {
    {
      std::lock_guard lock(shared_->mutex);
      shared_->bytes = std::max(shared_->bytes, bytes);
      shared_->arrival_count = std::max(shared_->arrival_count, arrivals);
      shared_->flag_count = std::max(shared_->flag_count, flags);
    }
    shared_->meet(rank(), timeout(), [this] {
      for (int r = 0; r < shared_->ranks; ++r) {
        shared_->memory[r].reset(new (std::align_val_t{256}) std::byte[shared_->bytes]);
        shared_->arrivals[r].assign(shared_->arrival_count, 0);
        shared_->flags[r].assign(shared_->flag_count, last_pass());
      }
    });
  }

#if defined(MOELITH_WITH_CUDA)
  std::shared_ptr<const DeviceMemory> device_memory(std::uint64_t layout, std::uint64_t bytes,
                                                    const Prepare& prepare) override {
    return device_shares_.share(*this, layout, bytes, prepare);
  }
#endif

  std::byte* memory(int rank) const override { return shared_->memory[rank].get(); }
  std::uint64_t* arrivals(int rank) const override { return shared_->arrivals[rank].data(); }
  std::uint64_t* flags(int rank) const override { return shared_->flags[rank].data(); }

  void fail(const std::string& reason) override {
    std::lock_guard lock(shared_->mutex);
    if (!shared_->has_failed) shared_->reason = "rank " + std::to_string(rank()) + ": " + reason;
    shared_->has_failed = true;
    shared_->changed.notify_all();
#if defined(MOELITH_WITH_CUDA)
    device_shares_.stop();
#endif
  }
  bool failed() const override { return shared_->has_failed; }
  void require_usable() const override {
    if (!shared_->has_failed) return;
    std::lock_guard lock(shared_->mutex);
    shared_->require_usable();
  }

 protected:
  void begun(std::uint64_t pass) override { shared_->begun[rank()].store(pass, std::memory_order_release); }
  void done(std::uint64_t pass) override { shared_->done[rank()].store(pass, std::memory_order_release); }
  std::uint64_t last_begun(int rank) const override { return shared_->begun[rank].load(std::memory_order_acquire); }
  std::uint64_t last_done(int rank) const override { return shared_->done[rank].load(std::memory_order_acquire); }

 private:
  std::shared_ptr<Shared> shared_;
#if defined(MOELITH_WITH_CUDA)
  DeviceShares device_shares_;
#endif
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_threads(int ranks) {
  auto shared = std::make_shared<Shared>(ranks);
  std::vector<std::shared_ptr<Transport>> all;
  for (int r = 0; r < ranks; ++r) all.push_back(std::make_shared<Threads>(r, shared));
  return all;
}

}  // namespace moelith::transport
