// Symmetric memory on GPUs: for ranks of one process, by plain pointers, and for ranks that are processes, by CUDA's
// memory handles. On one GPU, side by side, or on several that reach each other's memory by load and store.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace moelith::transport {

// One rank's share of the symmetric memories that the plans of a group have made; ranks of one process.
class DeviceShares {
 public:
  // Collective, through `ranks`, each on its current GPU. Equal layouts on the same GPUs share memory for as long as
  // some plan keeps it: addresses never change, since captured graphs name them, and what different layouts have to do
  // with each other is nothing.
  std::shared_ptr<const DeviceMemory> share(Transport& ranks, std::uint64_t layout, std::uint64_t bytes,
                                            const Transport::Prepare& prepare);
  // Ends the waits of all ranks' kernels.
  void stop();

 private:
  std::mutex mutex_;                                                                 // stop() may come from any thread
  std::shared_ptr<HostWords> words_;                                                 // of the whole group
  std::map<std::pair<std::uint64_t, int>, std::weak_ptr<const DeviceMemory>> made_;  // by layout and GPU
};

// The same for ranks that are processes. A rank opens the others' memory by its handle and closes it when the last of
// its plans goes that have it. Its own it may free only then when the others have closed theirs: they say so where all
// ranks meet the next time, and what is left when the group goes is kept until the others' processes are gone or have
// given up the group, too. Nobody waits for that.
// A process counts as gone when its files are closed: of one that was killed the driver may then still be taking down the
// GPU context that has the memory open, while a survivor frees it.
// A child that a rank forks has copies of all of this but no use of CUDA: they do nothing when they go.
class ProcessDeviceShares {
 public:
  // Collective, as DeviceShares::share. `of_all` and `passes`: where each process has them, inside [shared, shared +
  // shared_bytes), which stays mapped as long as `mapping` is kept.
  struct Words {
    HostWords* of_all;
    DevicePasses* passes;  // of this rank
    void* shared;
    std::size_t shared_bytes;
    std::shared_ptr<const void> mapping;
  };
  std::shared_ptr<const DeviceMemory> share(Transport& ranks, std::uint64_t layout, std::uint64_t bytes,
                                            const Transport::Prepare& prepare, const Words& words);
  // The group goes. others_gone: whether all other ranks have given it up too; asked now and in later calls of any
  // group.
  void give_up(const std::function<bool()>& others_gone);

 private:
  // Alike on all ranks, in the order in which they were made.
  struct Made {
    std::uint64_t layout;
    int device;
    std::shared_ptr<void> own;
    std::weak_ptr<const DeviceMemory> here;         // own and the others', opened
    std::shared_ptr<const std::atomic<bool>> gone;  // the others' are closed; `here` expires before that
  };
  std::vector<Made> made_;
  std::weak_ptr<HostWords> words_;  // registered with CUDA
};

}  // namespace moelith::transport
