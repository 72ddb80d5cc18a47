// How routing code spreads over threads that it does not own: the caller passes a callable.
#pragma once

#include <cstdint>
#include <functional>

namespace moelith::routing {

// parallel_for(count, body) calls body(begin, end) on disjoint ranges that together are [0, count), possibly at the
// same time on different threads, and returns when all are done. Every function that takes one gives the same bits
// whatever the ranges and their order are.
using ParallelFor =
    std::function<void(std::int64_t count, const std::function<void(std::int64_t begin, std::int64_t end)>& body)>;

// The default: one call on the calling thread.
inline void serial_for(std::int64_t count, const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  if (count > 0) body(0, count);
}

}  // namespace moelith::routing
