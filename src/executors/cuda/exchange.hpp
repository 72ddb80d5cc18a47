// What ranks on GPUs tell each other before a pass, in kernels of one stream each: where their rows are, and in forward
// their tables, of which each makes the Layout of its own pass. Nobody begins the persistent kernel before all ranks have
// come this far; a rank that does not come within the limit ends the pass, and all later ones, by PassError and `stop`.
//
// Ranks of one process read x and dY of others where these have them. Those of other processes see symmetric memory alone,
// so each rank first copies its rows there ("staged"). Nobody reads there what a later pass writes, nor the other way
// round, without a wait of any kind between passes: the copy stands in the stream behind this rank's last pass of that
// memory, and that one has ended only when all others have read what they needed of its rows:
//   - x in forward, dY in backward, and x where backward runs gate_up again: combine waits for the results of every
//     routed row of this rank, which were computed from copies that the others had made of these rows before;
//   - x in backward otherwise: the last block waits for rows_pulled of all ranks.
// The other way round: a rank reads only when the owner's flag says that the owner is in the same pass, which it raises
// behind its copy. Passes of other layouts have other memory. (A pass that gave up waits for nothing; after it no pass of
// the group reads anything.)
#pragma once

#include "executors/cuda/pass_data.hpp"
#include "routing/device_router.hpp"

namespace moelith::executors::cuda {

struct ExchangeJob {
  schedule::Pass pass;                                // layout: written in forward
  routing::RankTables tables;                         // this rank's has been filled by the router, in forward
  unsigned long long* flags[Peers::most] = {};        // of each rank: [R], the s-th raised by rank s
  Peers* peers = nullptr;                             // x, dy and first_token: written
  Peers::Rows x{}, dy{};                              // of this rank; dy in backward
  bfloat16 *staged_x = nullptr, *staged_dy = nullptr; // [T, H] in symmetric memory, for the others; null: they read x and dy
  unsigned long long *begun = nullptr, *ended = nullptr;  // passes of this rank, counted in host memory; null: not wanted
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
  unsigned long long* first_row = nullptr;            // [tokens of the others] all zero before, or null
};

// One launch in backward, two in forward, and one more where rows are staged. Throws Error(device_error).
void run_exchange(const ExchangeJob& job, void* stream);
// Behind the pass: counts it as ended, if that is wanted.
void end_exchange(const ExchangeJob& job, void* stream);
// Loads its kernels.
void prepare_exchange();

}  // namespace moelith::executors::cuda
