// What the computing warpgroups noted (TileEvent), as spans of time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "executors/cuda/pass_data.hpp"
#include "moelith/timeline.hpp"

namespace moelith::executors::cuda {

// Cycles of an SM in a nanosecond, on average: from one event of a warpgroup to its next its cycles add up. 1 where no
// warpgroup has two.
inline double cycles_per_ns(const std::vector<TileEvent>& events, std::int32_t room) {
  double cycles = 0, nanoseconds = 0;
  for (std::size_t i = 1; i < events.size(); ++i) {
    const TileEvent &event = events[i], &before = events[i - 1];
    if (i % static_cast<std::size_t>(room) == 0 || event.stage < 0 || before.stage < 0) continue;
    cycles += double(event.wait_cycles) + event.multiply_cycles + event.write_cycles;
    nanoseconds += double(event.end_ns - before.end_ns);
  }
  return nanoseconds > 0 && cycles > 0 ? cycles / nanoseconds : 1.0;
}

// events: [workers, room], stage -1 where nothing was noted; the time that a warpgroup waits for the other's products
// counts as work.
inline std::vector<TileSpan> spans_of(const std::vector<TileEvent>& events, std::int32_t room) {
  const double seconds_a_cycle = 1e-9 / cycles_per_ns(events, room);
  std::uint64_t base = std::numeric_limits<std::uint64_t>::max();  // keeps the digits of a double for differences
  for (const TileEvent& event : events) {
    if (event.stage >= 0) base = std::min(base, event.end_ns);
  }
  std::vector<TileSpan> spans;
  double first = std::numeric_limits<double>::max();
  for (std::size_t i = 0; i < events.size(); ++i) {
    const TileEvent& event = events[i];
    if (event.stage < 0) continue;
    TileSpan span{static_cast<int>(i / static_cast<std::size_t>(room)),
                  schedule::to_string(static_cast<schedule::Stage>(event.stage)), event.expert, event.row_block,
                  event.column_block};
    span.end = double(event.end_ns - base) * 1e-9;
    span.start = span.end - (double(event.multiply_cycles) + event.write_cycles) * seconds_a_cycle;
    span.taken = span.start - event.wait_cycles * seconds_a_cycle;
    first = std::min(first, span.taken);
    spans.push_back(span);
  }
  for (TileSpan& span : spans) span.taken -= first, span.start -= first, span.end -= first;
  return spans;
}

}  // namespace moelith::executors::cuda
