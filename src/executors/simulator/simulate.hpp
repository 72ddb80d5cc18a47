// The schedule run against a table of costs instead of a device: when each tile would start and end, on which worker,
// and the longest chain of tiles that wait for one another. For GPUs and links that nobody has at hand, and for
// pictures.
//
// The model: a rank's idle workers take its tiles in the schedule's order, the one that is idle longest first. A worker
// that holds a tile waits for its counters, computes for the tile's cost, and raises its counters, which other ranks
// see after the signal latency; nothing else takes time, and no link is shared. So the result depends on the schedule
// and the costs alone. All ranks begin at time 0, with their routing tables in each other's reach.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "schedule/tile_order.hpp"

namespace moelith::executors::simulator {

// What a tile does: floating-point operations of its products, and bytes that it moves if it is one that moves rows
// (publish, dispatch, combine, bias sums) and not one that computes.
struct TileWork {
  double flops = 0, bytes = 0;
  double link_bytes = 0;  // bytes to or from other ranks: all rows of a dispatched chunk (those that no expert here
                          // needs do not travel), and the rows that down and gate_up_dgrad put into other ranks' slots
};
TileWork tile_work(const schedule::Pass& pass, const schedule::Tile& tile, std::int64_t element_size);

struct Span {
  int rank = 0, worker = 0;
  schedule::Tile tile{};
  double start = 0, end = 0;  // of the work itself, in seconds
  double taken = 0;           // when the worker took it: [taken, start) is its wait
  std::int64_t after = -1;    // index (into spans) of the tile whose end it waited for last; -1: of none
};

struct Simulation {
  std::vector<Span> spans;             // in the order in which tiles were taken, rank by rank within one moment
  double makespan = 0;                 // the end of the last tile
  double work = 0;                     // the sum of all costs
  double critical_path = 0;            // the longest chain of dependent tiles; no number of workers can be faster
  std::vector<std::int64_t> critical;  // its tiles, first to last: indices into spans
};

// passes: one for each rank, in rank order; each with its whole layout (batch.hpp makes them of routes). workers: of each
// rank. cost: seconds of a tile, >= 0. signal_latency: seconds until another rank sees a counter that was raised.
// Throws Error(invalid_argument) for fewer than 1 worker, and Error(internal) if the schedule would wait for ever,
// naming the tile.
Simulation simulate(const std::vector<schedule::Pass>& passes, int workers,
                    const std::function<double(const schedule::Pass&, const schedule::Tile&)>& cost,
                    double signal_latency = 0);

}  // namespace moelith::executors::simulator
