// What the workers of a pass did when: PlanOptions::timeline, Plan::timeline.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace moelith {

// One tile. Times are seconds since the pass began.
struct TileSpan {
  int worker = 0;            // a CPU thread; on a GPU one of the two computing warpgroups of an SM: 2 * SM, 2 * SM + 1
  std::string_view stage;    // "gate_up", "down", "combine", ..
  std::int32_t expert = 0;   // of the rank's experts, the shared ones last; dispatch: the source rank
  std::int64_t row_block = 0;
  std::int32_t column_block = 0;
  double taken = 0;  // the worker turned to it: [taken, start) it waited for what the tile reads
  double start = 0, end = 0;
};

}  // namespace moelith
