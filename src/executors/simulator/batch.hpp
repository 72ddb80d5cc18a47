// The passes of all ranks of a batch whose routing is known, with the memory that their layouts lie in: what simulate()
// takes.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/extents.hpp"

namespace moelith::executors::simulator {

struct Batch {
  std::vector<std::vector<std::int64_t>> headers;
  std::vector<std::vector<std::int32_t>> routes;
  std::vector<schedule::Pass> passes;  // [R]; they point into the above

  Batch() = default;
  Batch(Batch&&) = default;
  Batch& operator=(Batch&&) = default;
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
};

// like: sizes that all ranks share; those of a rank and of its tokens are filled in. Its round_rows: room of each rank for
// routed rows, at least a row block; 0: for all. expert_rank: [E] the rank of each expert. ids: [R] of each rank's [T, k]
// expert ids, -1 for an empty slot; a rank may have any number of tokens.
Batch make_batch(const schedule::Sizes& like, const std::vector<std::int32_t>& expert_rank,
                 const std::vector<std::vector<std::int32_t>>& ids);

}  // namespace moelith::executors::simulator
