#include "transport/device_memory.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda_check.hpp"
#include "moelith/tensor.hpp"

namespace moelith::transport {
namespace {

std::int64_t number_of(void* pointer) { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)); }
template <class T>
T* pointer_of(std::int64_t number) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(number));
}

// Makes the memory of GPU `other` reachable from the current one.
void reach(int device, int other, int rank) {
  int reachable = 0, atomics = 0;
  check_cuda(cudaDeviceCanAccessPeer(&reachable, device, other), "cudaDeviceCanAccessPeer");
  if (reachable) {
    check_cuda(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other), "cudaDeviceGetP2PAttribute");
  }
  if (!atomics) {
    throw Error(Status::unsupported, "group: rank " + std::to_string(rank) + "'s GPU " + std::to_string(other) +
                                         " cannot be reached from GPU " + std::to_string(device) + " by " +
                                         (reachable ? "atomic additions" : "load and store"));
  }
  const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    check_cuda(status, "cudaDeviceEnablePeerAccess");
  }
}

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// The ranks on this rank's GPU; the others' become reachable.
int ranks_on_my_gpu(Transport& ranks, int device) {
  int sharing = 0;
  const std::vector<std::int64_t> devices = ranks.all_gather(device);
  for (int r = 0; r < ranks.size(); ++r) {
    const int other = static_cast<int>(devices[r]);
    if (other == device) {
      ++sharing;
    } else {
      reach(device, other, r);
    }
  }
  return sharing;
}

// Zeroed memory of the current GPU.
std::shared_ptr<void> device_allocation(std::uint64_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, std::max<std::uint64_t>(bytes, 256)), "symmetric memory");
  std::shared_ptr<void> owned(memory, [](void* m) { cudaFree(m); });
  check_cuda(cudaMemset(memory, 0, std::max<std::uint64_t>(bytes, 256)), "symmetric memory");
  check_cuda(cudaStreamSynchronize(cudaStreamLegacy), "symmetric memory");
  return owned;
}

// One for all ranks, in the host's memory: rank 0 makes it, and all own it together.
std::shared_ptr<HostWords> common_words(Transport& ranks, std::shared_ptr<HostWords>& mine) {
  void* memory = nullptr;
  if (ranks.rank() == 0 && !mine) {
    check_cuda(cudaHostAlloc(&memory, sizeof(HostWords), cudaHostAllocPortable | cudaHostAllocMapped), "words for errors");
    mine = {new (memory) HostWords, [](HostWords* words) { cudaFreeHost(words); }};
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

}  // namespace moelith::transport
