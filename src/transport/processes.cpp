// Ranks as processes of one host, over POSIX shared memory.
//
// A group has one small shared object (Board) that rank 0 makes and the others find by the group's name, and one object
// of symmetric memory a rank, made anew when it grows. Every object loses its name as soon as all ranks have it open,
// so that nothing is left behind when the processes end, unless all of them are killed in the midst of set-up.
//
// Each rank holds a lock on its own byte of the board's file. The kernel lets go of it when the process is gone,
// whoever has or has not waited for it, which is how the others learn of a death at once and not only by their time
// limit. (A child that the rank has forked and that lives on keeps the lock; then it is the limit.)
//
// Where ranks work on GPUs nobody waits in a call, so a thread looks at the locks, some times a second while a pass runs:
// it ends the waits of all kernels when a rank is gone that has not ended a pass which this one has begun.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "moelith/limits.hpp"
#include "moelith/tensor.hpp"
#include "transport/transport.hpp"
#if defined(MOELITH_WITH_CUDA)
#include "transport/device_memory.hpp"
#endif

namespace moelith::transport {
namespace {

using std::chrono::milliseconds;

[[noreturn]] void system_error(const std::string& what, int number) {
  throw Error(Status::device_error, what + ": " + std::strerror(number));
}

// An open shared object, mapped.
class Shared {
 public:
  Shared() = default;
  Shared(Shared&& other) noexcept { *this = std::move(other); }
  Shared& operator=(Shared&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Shared() {
    if (memory_) munmap(memory_, bytes_);
    if (file_ >= 0) close(file_);
  }

  // Its pages are there afterwards: where /dev/shm is full that is an error here and not a signal at the first store.
  // taken: the error where there is one of that name.
  static Shared make(const std::string& name, std::uint64_t bytes, const std::string& taken = "") {
    Shared made;
    made.file_ = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (made.file_ < 0) {
      if (errno == EEXIST && !taken.empty()) throw Error(Status::invalid_argument, taken);
      system_error("shared memory " + name, errno);
    }
    int failed = 0;
    do { failed = posix_fallocate(made.file_, 0, static_cast<off_t>(bytes)); } while (failed == EINTR);
    try {
      if (failed) system_error("shared memory " + name + " of " + std::to_string(bytes) + " bytes", failed);
      made.map(name, bytes);
    } catch (...) {
      shm_unlink(name.c_str());
      throw;
    }
    return made;
  }
  // False while it does not exist, or not in full.
  bool open(const std::string& name, std::uint64_t bytes) {
    const int file = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) {
      if (errno == ENOENT) return false;
      system_error("shared memory " + name, errno);
    }
    struct stat facts {};
    if (fstat(file, &facts) != 0 || static_cast<std::uint64_t>(facts.st_size) < bytes) {
      close(file);
      return false;
    }
    file_ = file;
    map(name, bytes);
    return true;
  }

  int file() const { return file_; }
  std::byte* memory() const { return static_cast<std::byte*>(memory_); }

 private:
  void map(const std::string& name, std::uint64_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) system_error("mapping shared memory " + name, errno);
    memory_ = memory;
    bytes_ = bytes;
  }

  int file_ = -1;
  void* memory_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// What all ranks of a group see. A new shared object holds zeros.
struct Board {
  static constexpr std::uint64_t magic = 0x4d4f454c49544832;  // "MOELITH2": the format, and that rank 0 has filled it

  std::atomic<std::uint64_t> ready;
  std::uint64_t id;  // random: a later group of the same name uses other names for its memory
  std::int32_t ranks;
  std::atomic<int> failure;  // 0: none, 1: `reason` is being written, 2: it stands there
  char reason[1024];

  struct alignas(64) Rank {
    std::atomic<std::uint64_t> meetings;     // that it has come to
    std::atomic<std::uint64_t> begun, done;  // the number of the last pass that it has begun, and done its part of
    std::int64_t value[2];                   // for all_gather: of the odd meetings, and of the even ones
  };
  Rank rank[limits::ranks];

  // What kernels of all ranks reach, in pages of its own.
  struct alignas(4096) OnDevice {
    HostWords words;
    struct alignas(64) Passes {
      DevicePasses of_rank;
    };
    Passes passes[limits::device_ranks];
  };
  OnDevice on_device;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "atomics in shared memory");

std::uint64_t rounded_up(std::uint64_t bytes) { return (bytes + 255) / 256 * 256; }

class Processes final : public Transport {
 public:
  Processes(const std::string& name, int rank, int ranks, milliseconds limit, const std::string& argument)
      : Transport(rank, ranks), name_("/moelith-" + name), process_(getpid()) {
    set_timeout(limit);
    // A name that the caller has not given would tell nothing.
    const bool named = argument == "name";
    auto refused = [&](const std::string& why) {
      return argument + ": got " + (named ? name : "one") + ", which " + why + "; accepted is one that no other group has";
    };
    if (rank == 0) {
      *board_memory_ = Shared::make(name_, sizeof(Board), refused("a group has that is being set up or was left half set up"));
      auto* board = reinterpret_cast<Board*>(board_memory_->memory());
      board->ranks = ranks;
      std::random_device random;
      board->id = std::uint64_t(random()) << 32 | random();
      board->ready.store(Board::magic, std::memory_order_release);
    } else {
      Waiting waiting;
      auto there = [&] {
        if (!board_memory_->memory() && !board_memory_->open(name_, sizeof(Board))) return false;
        return reinterpret_cast<Board*>(board_memory_->memory())->ready.load(std::memory_order_acquire) == Board::magic;
      };
      while (!there()) {
        if (waiting.time() > limit) {
          throw Error(Status::timed_out, "rank " + std::to_string(rank) + ": waited " + std::to_string(limit.count()) +
                                             " ms for rank 0 to set up the group of this " + argument +
                                             (named ? ", " + name + "," : "") +
                                             " in the shared memory of this host, the only one that it may have");
        }
        std::this_thread::sleep_for(milliseconds(1));
      }
    }
    board_ = reinterpret_cast<Board*>(board_memory_->memory());
    try {
      collective([&] {
        if (board_->ranks != ranks) {
          throw Error(Status::invalid_argument, "ranks: got " + std::to_string(ranks) +
                                                    ", accepted is the number that rank 0 gave, " +
                                                    std::to_string(board_->ranks));
        }
        hold_own_byte();
        meet();
        for (int r = 0; r < ranks; ++r) {
          // Its rank 0 came to this meeting, but is no more.
          if (r != rank && !is_alive(r)) {
            throw Error(Status::invalid_argument,
                        refused("a group has left that ended in the midst of its set-up (rank " + std::to_string(r) + " is gone)"));
          }
        }
        if (rank == 0) shm_unlink(name_.c_str());
        meet();  // from here on the name may be given to another group
      });
    } catch (...) {
      shm_unlink(name_.c_str());
      throw;
    }
  }
  ~Processes() override {
    if (getpid() != process_) {  // a child's copy: the lock, the thread and what is on the GPU are its parent's
      (void)watcher_.release();
      return;
    }
    watcher_.reset();
#if defined(MOELITH_WITH_CUDA)
    struct flock mine = byte_of(rank());
    mine.l_type = F_UNLCK;
    fcntl(board_memory_->file(), F_OFD_SETLK, &mine);  // though the file may stay open below
    device_shares_.give_up([board = board_memory_, rank = rank(), ranks = size()] {
      for (int r = 0; r < ranks; ++r) {
        if (r != rank && is_alive(*board, r)) return false;
      }
      return true;
    });
#endif
  }

  std::vector<std::int64_t> all_gather(std::int64_t value) override {
    // The two places take turns: one is written again only after a meeting that all have come to after reading it.
    const std::size_t place = (meetings_ + 1) % 2;
    board_->rank[rank()].value[place] = value;
    meet();
    std::vector<std::int64_t> all(size());
    for (int r = 0; r < size(); ++r) all[r] = board_->rank[r].value[place];
    return all;
  }

  void reserve(std::uint64_t bytes, std::int64_t arrivals, std::int64_t flags) override {
    auto largest = [&](std::int64_t value) {
      const auto all = all_gather(value);
      return *std::max_element(all.begin(), all.end());
    };
    const std::uint64_t most_bytes = std::max(bytes_, rounded_up(largest(static_cast<std::int64_t>(bytes))));
    const std::int64_t most_arrivals = std::max(arrivals_, largest(arrivals)),
                       most_flags = std::max(flags_, largest(flags));
    if (most_bytes > bytes_ || most_arrivals > arrivals_ || most_flags > flags_ || memory_.empty()) {
      const std::uint64_t size_of_one = most_bytes + (most_arrivals + most_flags) * sizeof(std::uint64_t);
      std::vector<Shared> memory(size());
      std::vector<std::string> names;
      for (int r = 0; r < size(); ++r)
        names.push_back(name_ + "-" + std::to_string(board_->id) + "-" + std::to_string(r) + "-" +
                        std::to_string(meetings_));
      try {
        memory[rank()] = Shared::make(names[rank()], size_of_one);
        auto* counters = reinterpret_cast<std::uint64_t*>(memory[rank()].memory() + most_bytes);
        std::fill_n(counters + most_arrivals, most_flags, last_pass());
        meet();  // all have made theirs
        for (int r = 0; r < size(); ++r) {
          if (r == rank() || memory[r].open(names[r], size_of_one)) continue;
          throw Error(Status::internal, "shared memory " + names[r] + " is not there");
        }
        meet();  // all have opened all
      } catch (...) {
        for (const std::string& name : names) shm_unlink(name.c_str());  // of a rank that is gone, too
        throw;
      }
      for (const std::string& name : names) shm_unlink(name.c_str());  // whoever comes first: its owner may die before
      memory_ = std::move(memory);
      bytes_ = most_bytes;
      arrivals_ = most_arrivals;
      flags_ = most_flags;
      return;
    }
    std::fill_n(this->arrivals(rank()), arrivals_, 0);
    std::fill_n(this->flags(rank()), flags_, last_pass());
    meet();
  }

#if defined(MOELITH_WITH_CUDA)
  std::shared_ptr<const DeviceMemory> device_memory(std::uint64_t layout, std::uint64_t bytes,
                                                    const Prepare& prepare) override {
    Board::OnDevice& shared = board_->on_device;
    auto made = device_shares_.share(*this, layout, bytes, prepare,
                                     {&shared.words, &shared.passes[rank()].of_rank, &shared, sizeof shared, board_memory_});
    watch();
    return made;
  }
  bool reads_any_device_memory() const override { return false; }
#endif

  std::byte* memory(int rank) const override { return memory_[rank].memory(); }
  std::uint64_t* arrivals(int rank) const override { return reinterpret_cast<std::uint64_t*>(memory(rank) + bytes_); }
  std::uint64_t* flags(int rank) const override { return arrivals(rank) + arrivals_; }

  void fail(const std::string& reason) override {
    int none = 0;
    if (!board_->failure.compare_exchange_strong(none, 1)) return;
    const std::string text = "rank " + std::to_string(rank()) + ": " + reason;
    const std::size_t length = std::min(text.size(), sizeof(board_->reason) - 1);
    std::memcpy(board_->reason, text.data(), length);
    board_->reason[length] = '\0';
    board_->failure.store(2, std::memory_order_release);
    std::atomic_ref(board_->on_device.words.stop).store(1, std::memory_order_release);
  }
  bool failed() const override { return board_->failure.load(std::memory_order_acquire) != 0; }
  void require_usable() const override {
    if (const int departed = departed_; departed >= 0 && !failed()) throw Error(Status::group_failed, gone(departed));
    if (!failed()) return;
    // A rank that dies while it writes its reason leaves the others without.
    for (int tries = 0; tries < 100 && board_->failure.load(std::memory_order_acquire) != 2; ++tries) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    const bool written = board_->failure.load(std::memory_order_acquire) == 2;
    throw Error(Status::group_failed,
                std::string("the group has failed: ") + (written ? board_->reason : "a rank is gone"));
  }

 protected:
  void begun(std::uint64_t pass) override { board_->rank[rank()].begun.store(pass, std::memory_order_release); }
  void done(std::uint64_t pass) override { board_->rank[rank()].done.store(pass, std::memory_order_release); }
  std::uint64_t last_begun(int rank) const override { return board_->rank[rank].begun.load(std::memory_order_acquire); }
  std::uint64_t last_done(int rank) const override { return board_->rank[rank].done.load(std::memory_order_acquire); }
  void look_after_ranks(std::uint64_t pass) override {
    for (int r = 0; r < size(); ++r) {
      if (r == rank() || reached(last_done(r), pass) || is_alive(r) || reached(last_done(r), pass)) continue;
      fail(gone(r));
    }
  }

 private:
  static struct flock byte_of(int rank) {
    struct flock one {};
    one.l_type = F_WRLCK;
    one.l_whence = SEEK_SET;
    one.l_start = rank;
    one.l_len = 1;
    return one;
  }
  void hold_own_byte() {
    struct flock mine = byte_of(rank());
    if (fcntl(board_memory_->file(), F_OFD_SETLK, &mine) != 0) {
      if (errno == EAGAIN || errno == EACCES) {
        throw Error(Status::invalid_argument,
                    "rank: got " + std::to_string(rank()) + ", which another process of the group has");
      }
      system_error("locking shared memory " + name_, errno);
    }
  }
  // Of a rank that has come to a meeting.
  bool is_alive(int rank) const { return is_alive(*board_memory_, rank); }
  static bool is_alive(const Shared& board, int rank) {
    struct flock theirs = byte_of(rank);
    return fcntl(board.file(), F_OFD_GETLK, &theirs) != 0 || theirs.l_type != F_UNLCK;
  }

  static std::string gone(int rank) {
    return "rank " + std::to_string(rank) + " is gone: its process has ended or given up the group";
  }

  // All ranks meet.
  void meet() {
    require_usable();
    const std::uint64_t number = ++meetings_;
    board_->rank[rank()].meetings.store(number, std::memory_order_release);
    auto has_come = [&](int r) { return board_->rank[r].meetings.load(std::memory_order_acquire) >= number; };
    const auto limit = timeout();
    Waiting waiting;
    for (int r = 0, tries = 0; r < size();) {
      if (has_come(r)) {
        ++r;
        continue;
      }
      require_usable();
      if (++tries % 64 == 0 && number > 1 && !is_alive(r) && !has_come(r)) { fail(gone(r)); }
      if (waiting.time() > limit) {
        std::string missing;
        for (int other = 0; other < size(); ++other) {
          if (!has_come(other)) missing += (missing.empty() ? "" : ", ") + std::to_string(other);
        }
        const std::string text =
            "waited " + std::to_string(limit.count()) + " ms for rank " + missing + " to meet all others";
        fail(text);
        throw Error(Status::timed_out, "rank " + std::to_string(rank()) + ": " + text);
      }
      if (tries < 100) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(tries < 1000 ? 50 : 500));
      }
    }
  }

  // --- passes on GPUs ---

  DevicePasses passes_of(int rank) const {
    DevicePasses& passes = board_->on_device.passes[rank].of_rank;
    return {std::atomic_ref(passes.begun).load(std::memory_order_acquire),
            std::atomic_ref(passes.ended).load(std::memory_order_acquire)};
  }
  // A rank that is gone, having ended every pass that this one has begun, has harmed nobody yet: only the next call
  // of this rank fails, whose pass that one cannot come to.
  void look_after_device_ranks() {
    for (int r = 0; r < size(); ++r) {
      if (r == rank() || is_alive(r)) continue;
      if (reached(passes_of(r).ended, passes_of(rank()).begun)) {
        departed_ = r;
      } else {
        fail(gone(r));
      }
    }
  }
  // Idle between looks, so often that the error comes long before a limit, so seldom that it costs nothing.
  static constexpr milliseconds between_looks{50};

  void watch() {
    if (!watcher_) watcher_ = std::make_unique<Watcher>([this] {
      look_after_device_ranks();
      return !failed();
    });
  }
  class Watcher {
   public:
    // look: whether to go on.
    explicit Watcher(std::function<bool()> look) {
      sigset_t all, before;  // signals are for the threads of the program
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        thread_ = std::thread([this, look] {
          std::unique_lock lock(mutex_);
          while (!leaving_ && look()) to_leave_.wait_for(lock, between_looks, [this] { return leaving_; });
        });
      } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    ~Watcher() {
      {
        const std::lock_guard lock(mutex_);
        leaving_ = true;
      }
      to_leave_.notify_all();
      thread_.join();
    }

   private:
    std::mutex mutex_;
    std::condition_variable to_leave_;
    bool leaving_ = false;
    std::thread thread_;
  };

  const std::string name_;
  const pid_t process_;
  const std::shared_ptr<Shared> board_memory_ = std::make_shared<Shared>();
  Board* board_ = nullptr;
  std::uint64_t meetings_ = 0;
  std::vector<Shared> memory_;  // [R]
  std::uint64_t bytes_ = 0;
  std::int64_t arrivals_ = 0, flags_ = 0;
  std::atomic<int> departed_{-1};  // a rank that is gone without having harmed a pass; -1: none is
#if defined(MOELITH_WITH_CUDA)
  ProcessDeviceShares device_shares_;
#endif
  std::unique_ptr<Watcher> watcher_;  // of groups whose passes are on GPUs
};

}  // namespace

std::shared_ptr<Transport> make_process(const std::string& name, int rank, int ranks, milliseconds limit,
                                        const std::string& argument) {
  return std::make_shared<Processes>(name, rank, ranks, limit, argument);
}

}  // namespace moelith::transport
