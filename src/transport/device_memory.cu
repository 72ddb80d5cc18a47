#include "transport/device_memory.hpp"

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>

#include "cuda_check.hpp"
#include "moelith/tensor.hpp"

namespace moelith::transport {
namespace {

std::int64_t number_of(void* pointer) { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)); }
template <class T>
T* pointer_of(std::int64_t number) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(number));
}

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// Throws unless GPU `other`, which is rank `rank`'s, can be reached from `device`; the names are for the error.
void check_reachable(int device, int other, int rank, const std::string& other_name, const std::string& name) {
  int reachable = 0, atomics = 0;
  check_cuda(cudaDeviceCanAccessPeer(&reachable, device, other), "cudaDeviceCanAccessPeer");
  if (reachable) {
    check_cuda(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other),
               "cudaDeviceGetP2PAttribute");
  }
  if (atomics) return;
  throw Error(Status::unsupported, "group: rank " + std::to_string(rank) + "'s GPU " + other_name +
                                       " cannot be reached from GPU " + name + " by " +
                                       (reachable ? "atomic additions" : "load and store"));
}

// The ranks of this process on this rank's GPU; the others' become reachable.
int ranks_on_my_gpu(Transport& ranks, int device) {
  int sharing = 0;
  const std::vector<std::int64_t> devices = ranks.all_gather(device);
  for (int r = 0; r < ranks.size(); ++r) {
    const int other = static_cast<int>(devices[r]);
    if (other == device) {
      ++sharing;
      continue;
    }
    check_reachable(device, other, r, std::to_string(other), std::to_string(device));
    const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      check_cuda(status, "cudaDeviceEnablePeerAccess");
    }
  }
  return sharing;
}

// The object, which is released when the last owner goes; but not in a child that this process has forked, whose copy of
// the pointer stands for what is its parent's.
template <class T, class Release>
std::shared_ptr<T> owned_here(T* object, Release release) {
  return {object, [release, owner = getpid()](T* o) {
            if (getpid() == owner) release(o);
          }};
}

// Zeroed memory of the current GPU.
std::shared_ptr<void> device_allocation(std::uint64_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, std::max<std::uint64_t>(bytes, 256)), "symmetric memory");
  std::shared_ptr<void> owned = owned_here(memory, [](void* m) { cudaFree(m); });
  check_cuda(cudaMemset(memory, 0, std::max<std::uint64_t>(bytes, 256)), "symmetric memory");
  check_cuda(cudaStreamSynchronize(cudaStreamLegacy), "symmetric memory");
  return owned;
}

// One for all ranks, in the host's memory: rank 0 makes it, and all own it together.
std::shared_ptr<HostWords> common_words(Transport& ranks, std::shared_ptr<HostWords>& mine) {
  void* memory = nullptr;
  if (ranks.rank() == 0 && !mine) {
    check_cuda(cudaHostAlloc(&memory, sizeof(HostWords), cudaHostAllocPortable | cudaHostAllocMapped),
               "words for errors");
    mine = owned_here(new (memory) HostWords, [](HostWords* words) { cudaFreeHost(words); });
  }
  // Shared pointers of one process: the others copy rank 0's.
  auto* source = pointer_of<std::shared_ptr<HostWords>>(ranks.all_gather(number_of(&mine))[0]);
  if (ranks.rank() != 0) mine = *source;
  ranks.all_gather(0);  // rank 0's pointer stays until all have copied it
  return mine;
}

}  // namespace

std::shared_ptr<const DeviceMemory> DeviceShares::share(Transport& ranks, std::uint64_t layout, std::uint64_t bytes,
                                                        const Transport::Prepare& prepare) {
  std::shared_ptr<const DeviceMemory> here;
  const int device = current_device();
  if (const auto found = made_.find({layout, device}); found != made_.end()) here = found->second.lock();
  // The same memory on all ranks, if that is what they have: it is known by where rank 0's lies.
  const std::int64_t mine = here ? number_of(here->rank[0]) : 0;
  const std::vector<std::int64_t> have = ranks.all_gather(mine);
  if (mine != 0 && std::count(have.begin(), have.end(), mine) == ranks.size()) return here;

  auto made = std::make_shared<DeviceMemory>();
  made->sharing = ranks_on_my_gpu(ranks, device);
  std::shared_ptr<HostWords> words;
  {
    const std::lock_guard lock(mutex_);
    words = words_;
  }
  made->words = common_words(ranks, words);
  {
    const std::lock_guard lock(mutex_);
    words_ = words;
  }
  std::shared_ptr<void> own = device_allocation(bytes);
  prepare(static_cast<std::byte*>(own.get()));
  for (const std::int64_t number : ranks.all_gather(number_of(&own))) {
    made->owned.push_back(*pointer_of<std::shared_ptr<void>>(number));
    made->rank.push_back(static_cast<std::byte*>(made->owned.back().get()));
  }
  ranks.all_gather(0);  // each rank's pointer stays until all have copied it
  made_[{layout, device}] = made;
  return made;
}

void DeviceShares::stop() {
  const std::lock_guard lock(mutex_);
  if (words_) std::atomic_ref(words_->stop).store(1, std::memory_order_release);
}

// --- ranks that are processes ----------------------------------------------------------------------------------------

namespace {

// Every rank's value, 8 bytes at a time.
template <class T>
std::vector<T> gather(Transport& ranks, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  std::vector<T> all(ranks.size());
  for (std::size_t at = 0; at < sizeof(T); at += 8) {
    std::int64_t piece;
    std::memcpy(&piece, reinterpret_cast<const std::byte*>(&mine) + at, 8);
    const std::vector<std::int64_t> pieces = ranks.all_gather(piece);
    for (int r = 0; r < ranks.size(); ++r) std::memcpy(reinterpret_cast<std::byte*>(&all[r]) + at, &pieces[r], 8);
  }
  return all;
}

// Makes a GPU current for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// A GPU as all processes know it: what number it has in each depends on CUDA_VISIBLE_DEVICES.
struct Gpu {
  std::array<char, 16> uuid;
  std::array<char, 24> pci;  // for error texts

  static Gpu of(int device) {
    Gpu gpu{};
    cudaDeviceProp facts;
    check_cuda(cudaGetDeviceProperties(&facts, device), "cudaGetDeviceProperties");
    static_assert(sizeof facts.uuid.bytes == sizeof gpu.uuid);
    std::memcpy(gpu.uuid.data(), facts.uuid.bytes, sizeof gpu.uuid);
    check_cuda(cudaDeviceGetPCIBusId(gpu.pci.data(), static_cast<int>(gpu.pci.size()), device),
               "cudaDeviceGetPCIBusId");
    return gpu;
  }
  std::string name() const { return pci.data(); }
};

// Its number in this process; -1: it is not visible here.
int number_here(const Gpu& gpu) {
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  for (int d = 0; d < devices; ++d) {
    if (Gpu::of(d).uuid == gpu.uuid) return d;
  }
  return -1;
}

// Memory handles are for other processes.
void refuse_ranks_of_one_process(Transport& ranks) {
  static const std::uint64_t of_program = [] {
    std::random_device random;
    return std::uint64_t(random()) << 32 | random();
  }();
  const std::uint64_t here = of_program ^ static_cast<std::uint64_t>(getpid());  // after a fork, too
  const std::vector<std::uint64_t> all = gather(ranks, here);
  for (int r = 0; r < ranks.size(); ++r) {
    const auto first = std::find(all.begin(), all.end(), all[r]) - all.begin();
    if (first == r) continue;
    throw Error(Status::unsupported,
                "group: ranks " + std::to_string(first) + " and " + std::to_string(r) +
                    " are of one process; accepted on device cuda are a process for each rank, or ranks "
                    "that are all of one (Group::threads)");
  }
}

std::shared_ptr<HostWords> registered(const ProcessDeviceShares::Words& words) {
  check_cuda(cudaHostRegister(words.shared, words.shared_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
             "words for errors");
  std::shared_ptr<HostWords> made = owned_here(
      words.of_all, [shared = words.shared, mapping = words.mapping](HostWords*) { cudaHostUnregister(shared); });
  void* on_device = nullptr;
  check_cuda(cudaHostGetDevicePointer(&on_device, words.shared, 0), "words for errors");
  if (on_device != words.shared) {
    throw Error(
        Status::unsupported,
        "group: this GPU has other addresses for the host's memory than the host; ranks that are processes need "
        "the same");
  }
  return made;
}

// Another rank's memory. Peer access between the GPUs comes with it; `mine` and the other's number here as in Gpu.
std::shared_ptr<void> opened(const cudaIpcMemHandle_t& handle, int rank, const Gpu& theirs, int number, const Gpu& mine,
                             int device) {
  void* memory = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(Status::unsupported, "group: the memory of rank " + std::to_string(rank) + " on GPU " + theirs.name() +
                                         " cannot be opened from GPU " + mine.name() + ": " +
                                         cudaGetErrorString(status) +
                                         (number < 0 ? "; CUDA_VISIBLE_DEVICES hides that GPU from this process" : ""));
  }
  return owned_here(memory, [device](void* m) {
    const OnDevice current(device);
    cudaIpcCloseMemHandle(m);
  });
}

// Memory of groups that this process has given up before the other ranks did.
class Kept {
 public:
  static Kept& instance() {
    static Kept* kept = new Kept;  // never destroyed: CUDA may be gone by then
    return *kept;
  }
  void add(std::vector<std::shared_ptr<void>> memory, const std::function<bool()>& others_gone) {
    const std::lock_guard lock(mutex_);
    groups_.push_back({std::move(memory), others_gone});
  }
  void release() {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& group) { return group.second(); });
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::vector<std::shared_ptr<void>>, std::function<bool()>>> groups_;
};

}  // namespace

std::shared_ptr<const DeviceMemory> ProcessDeviceShares::share(Transport& ranks, std::uint64_t layout,
                                                               std::uint64_t bytes, const Transport::Prepare& prepare,
                                                               const Words& words) {
  Kept::instance().release();
  const int device = current_device();
  for (auto made = made_.begin(); made != made_.end();) {
    const std::shared_ptr<const DeviceMemory> here = made->here.lock();
    enum : std::int64_t { unused, used, wanted };
    const bool gone = !here && made->gone->load(std::memory_order_acquire);
    const bool fits = here && made->layout == layout && made->device == device;
    const auto all = ranks.all_gather(gone ? unused : fits ? wanted : used);
    const auto [least, most] = std::minmax_element(all.begin(), all.end());
    if (*least == wanted) return here;
    made = *most == unused ? made_.erase(made) : made + 1;
  }

  refuse_ranks_of_one_process(ranks);
  const Gpu mine = Gpu::of(device);
  const std::vector<Gpu> gpus = gather(ranks, mine);
  std::vector<int> numbers;
  const auto gone = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<DeviceMemory> memory(new DeviceMemory, [gone](DeviceMemory* m) {  // on any thread
    delete m;
    gone->store(true, std::memory_order_release);
  });
  memory->sharing = 0;
  for (int r = 0; r < ranks.size(); ++r) {
    numbers.push_back(number_here(gpus[r]));
    if (gpus[r].uuid == mine.uuid) {
      ++memory->sharing;
    } else if (numbers[r] >= 0) {  // otherwise opening tells, though nothing of atomics
      check_reachable(device, numbers[r], r, gpus[r].name(), mine.name());
    }
  }
  memory->words = words_.lock();
  if (!memory->words) words_ = memory->words = registered(words);
  memory->passes = words.passes;

  // A handle stands for all of the 2 MiB pages that the memory lies in.
  constexpr std::uint64_t page = std::uint64_t(2) << 20;
  const std::shared_ptr<void> own = device_allocation((bytes + page - 1) / page * page);
  prepare(static_cast<std::byte*>(own.get()));
  cudaIpcMemHandle_t handle;
  if (const cudaError_t status = cudaIpcGetMemHandle(&handle, own.get()); status != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(Status::unsupported,
                "group: GPU " + mine.name() +
                    " gives no handles of its memory for other processes: " + cudaGetErrorString(status));
  }
  made_.push_back({layout, device, own, {}, gone});
  const std::vector<cudaIpcMemHandle_t> handles = gather(ranks, handle);
  for (int r = 0; r < ranks.size(); ++r) {
    memory->owned.push_back(r == ranks.rank() ? own : opened(handles[r], r, gpus[r], numbers[r], mine, device));
    memory->rank.push_back(static_cast<std::byte*>(memory->owned.back().get()));
  }
  made_.back().here = memory;
  ranks.all_gather(0);  // all have opened all
  return memory;
}

void ProcessDeviceShares::give_up(const std::function<bool()>& others_gone) {
  if (made_.empty()) return;
  std::vector<std::shared_ptr<void>> own;
  for (const Made& made : made_) own.push_back(made.own);
  made_.clear();
  Kept::instance().add(std::move(own), others_gone);
  Kept::instance().release();
}

}  // namespace moelith::transport
