// How a kernel tells the host, and all ranks, that it gave up. Its blocks drain; nothing traps.
#pragma once

#include "executors/cuda/pass_data.hpp"

namespace moelith::executors::cuda {

// Nanoseconds, alike on all SMs: what waits are bounded by.
__device__ __forceinline__ unsigned long long global_time() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// By one thread. The first report stays. stop: of the group, or null.
__device__ inline void report(PassError* error, std::int32_t* stop, const PassError& what) {
  if (error && atomicCAS_system(&error->state, PassError::none, PassError::being_written) == PassError::none) {
    error->stage = what.stage, error->expert = what.expert, error->row_block = what.row_block;
    error->rank = what.rank, error->awaited = what.awaited, error->saving = what.saving;
    __threadfence_system();
    *const_cast<volatile std::int32_t*>(&error->state) = PassError::there;
  }
  if (stop) *const_cast<volatile std::int32_t*>(stop) = 1;
  __threadfence_system();
}
__device__ inline bool group_failed(const std::int32_t* stop) {
  return *const_cast<const volatile std::int32_t*>(stop) != 0;
}

}  // namespace moelith::executors::cuda
