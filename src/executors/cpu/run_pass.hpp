// Runs the tiles of a pass on CPU threads: any worker takes the next tile, waits for its counters, computes, raises.
// Nothing else orders the work.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "executors/cpu/thread_pool.hpp"
#include "moelith/timeline.hpp"
#include "schedule/dependencies.hpp"
#include "transport/transport.hpp"

namespace moelith::executors::cpu {

struct PassCounters {
  std::uint64_t* local = nullptr;     // [CounterMap::local_size], zeroed here before the first worker starts
  std::uint64_t* arrivals = nullptr;  // [CounterMap::arrivals_size] of one rank, zeroed likewise; with several ranks
                                      // null: the transport's are used, which are 0 between passes
};

// Calls run_tile(tile, worker) for each tile of the pass. `epoch`: the transport's number of this pass.
// shuffle_seed: 0 takes tiles in the schedule's order; otherwise in a random one among those that are ready.
// Throws Error(timed_out), naming the rank, the stage and what was waited for, when a wait for another rank outlasts the
// transport's limit (or one for this rank's own work twice of it); whatever run_tile throws ends the pass too. Either
// way all workers have stopped, and a group of several ranks has failed; a single rank may go on. Throws
// Error(group_failed) when another rank has ended the group. timeline, if not null, gets what each worker did.
void run_pass(const schedule::Pass& pass, const PassCounters& counters, transport::Transport& transport,
              std::uint64_t epoch, ThreadPool& pool, std::uint64_t shuffle_seed,
              const std::function<void(const schedule::Tile& tile, int worker)>& run_tile,
              std::vector<TileSpan>* timeline = nullptr);

}  // namespace moelith::executors::cpu
