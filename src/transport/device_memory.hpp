// Symmetric memory on GPUs for ranks of one process: on one GPU, side by side, or on several that reach each other's
// memory by load and store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "transport/transport.hpp"

namespace moelith::transport {

// One rank's share of the symmetric memories that the plans of a group have made.
class DeviceShares {
 public:
  // Collective, through `ranks`, each on its current GPU. Equal layouts on the same GPUs share memory for as long as some plan keeps it: addresses never change,
  // since captured graphs name them, and what different layouts have to do with each other is nothing.
  std::shared_ptr<const DeviceMemory> share(Transport& ranks, std::uint64_t layout, std::uint64_t bytes,
                                            const Transport::Prepare& prepare);
  // Ends the waits of all ranks' kernels.
  void stop();

 private:
  std::mutex mutex_;                  // stop() may come from any thread
  std::shared_ptr<HostWords> words_;  // of the whole group
  std::map<std::pair<std::uint64_t, int>, std::weak_ptr<const DeviceMemory>> made_;  // by layout and GPU
};

}  // namespace moelith::transport
