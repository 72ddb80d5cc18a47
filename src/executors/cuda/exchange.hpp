// What ranks on GPUs tell each other before a pass, in kernels of one stream each: where their rows are, and in forward
// their tables, of which each makes the Layout of its own pass. Nobody begins the persistent kernel before all ranks have
// come this far; a rank that does not come within the limit ends the pass, and all later ones, by PassError and `stop`.
#pragma once

#include "executors/cuda/pass_data.hpp"
#include "routing/device_router.hpp"

namespace moelith::executors::cuda {

struct ExchangeJob {
  schedule::Pass pass;                                // layout: written in forward
  routing::RankTables tables;                         // this rank's has been filled by the router, in forward
  unsigned long long* flags[Peers::most] = {};        // of each rank: [R], the s-th raised by rank s
  Peers* peers = nullptr;                             // x and dy: written
  Peers::Rows x{}, dy{};                              // of this rank; dy in backward
  bool saves = true;                                  // whether this rank's forward saves for a backward
  PassError* error = nullptr;
  std::int32_t* stop = nullptr;
  unsigned long long wait_limit_ns = 0;
  // Forward only.
  std::int32_t num_experts = 0;
  const std::int32_t* expert_rank = nullptr;          // [E]
  const std::int32_t* local_experts = nullptr;        // [L] global ids
  std::uint8_t* row_rank = nullptr;                   // [rows] written, as PassData has them
  float* row_weight = nullptr;                        // [rows]
};

// One launch in backward, two in forward. Throws Error(device_error).
void run_exchange(const ExchangeJob& job, void* stream);
// Loads its kernels.
void prepare_exchange();

}  // namespace moelith::executors::cuda
