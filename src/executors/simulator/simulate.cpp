#include "executors/simulator/simulate.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "moelith/tensor.hpp"
#include "schedule/dependencies.hpp"

namespace moelith::executors::simulator {
namespace {

using schedule::CounterArray;
using schedule::CounterMap;
using schedule::Pass;
using schedule::Stage;
using schedule::Tile;

double part(std::int64_t size, std::int64_t tile, std::int64_t index) {
  return static_cast<double>(std::clamp<std::int64_t>(size - tile * index, 0, tile));
}

// When a counter was raised for the last time so far, and by which tile.
struct Counter {
  std::int64_t count = 0;
  double end = 0, chain = 0;            // latest end, and longest chain, of the tiles that raised it
  std::int64_t by = -1, chain_by = -1;  // indices into spans
};

struct Rank {
  const Pass* pass = nullptr;
  CounterMap map{};
  std::array<std::vector<Counter>, 3> counters;  // by CounterArray
  std::vector<double> free;                      // when each worker is idle
  std::int64_t next = 0, tiles = 0;
  std::int64_t after_layout = 0;  // tiles from here on are decoded once the layout tile of this pass is done
};

}  // namespace

TileWork tile_work(const Pass& pass, const Tile& tile, std::int64_t element_size) {
  const schedule::Sizes& s = pass.sizes;
  const auto h = static_cast<double>(s.hidden_size), size = static_cast<double>(element_size);
  const auto width = static_cast<double>(tile.expert < s.expert_slots() ? s.width(tile.expert) : 0);
  const double pre = s.gate_up_factor * width;
  const auto block_rows = [&] { return static_cast<double>(schedule::tile_rows(pass, tile).size()); };
  // Rows of the block that belong to other ranks' tokens.
  const auto foreign_rows = [&] {
    if (s.ranks == 1 || s.is_shared(tile.expert)) return 0.0;
    const schedule::RowRange rows = schedule::tile_rows(pass, tile);
    const std::int64_t begin = std::clamp(pass.source_begin(tile.expert, s.rank), rows.begin, rows.end);
    const std::int64_t end = std::clamp(pass.source_begin(tile.expert, s.rank + 1), rows.begin, rows.end);
    return static_cast<double>(rows.size() - (end - begin));
  };
  const auto to_slots = [&](double k) -> TileWork {
    const double columns = part(s.hidden_size, s.tile.columns, tile.column_block);
    return {2 * block_rows() * columns * k, 0, foreign_rows() * columns * size};
  };
  const auto summed_rows = [&] { return static_cast<double>(schedule::summed_rows(pass, tile).size()); };
  switch (tile.stage) {
    case Stage::publish: return {0, 2 * part(s.tokens, s.chunk_tokens, tile.row_block) * h * size};
    case Stage::layout:
    case Stage::collect: return {};
    case Stage::dispatch: {
      const double bytes = part(pass.layout.tokens_of_rank[tile.expert], s.chunk_tokens, tile.row_block) * h * size;
      return {0, 2 * bytes, bytes};
    }
    case Stage::gate_up:
      return {
          2 * block_rows() * s.gate_up_factor * part(s.width(tile.expert), s.gate_up_columns(), tile.column_block) * h,
          0};
    case Stage::down: return to_slots(width);
    case Stage::combine:
      return {0, part(s.tokens, s.tile.token_block, tile.row_block) *
                     part(s.hidden_size, s.tile.columns, tile.column_block) * (s.top_k + s.shared_experts + 1) * size};
    case Stage::down_dgrad:
      return {2 * block_rows() * part(s.width(tile.expert), s.down_dgrad_columns(), tile.column_block) * h, 0};
    case Stage::gate_up_dgrad: return to_slots(pre);
    case Stage::gate_up_wgrad:
      return {2 * summed_rows() * part(static_cast<std::int64_t>(pre), s.tile.wgrad_rows, tile.row_block) *
                  part(s.hidden_size, s.tile.wgrad_columns, tile.column_block),
              0};
    case Stage::down_wgrad:
      return {2 * summed_rows() * part(s.hidden_size, s.tile.wgrad_rows, tile.row_block) *
                  part(s.width(tile.expert), s.tile.wgrad_columns, tile.column_block),
              0};
    case Stage::gate_up_bias_grad: return {0, summed_rows() * pre * size};
    case Stage::down_bias_grad: return {0, summed_rows() * h * size};
  }
  return {};
}

Simulation simulate(const std::vector<Pass>& passes, int workers,
                    const std::function<double(const Pass&, const Tile&)>& cost, double signal_latency) {
  if (workers < 1)
    throw Error(Status::invalid_argument, "workers is " + std::to_string(workers) + "; accepted: 1 or more");
  Simulation result;
  std::vector<double> chains;             // of each span: the longest chain that ends with it
  std::vector<std::int64_t> chain_after;  // and the tile before it in that chain
  std::vector<Rank> ranks(passes.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].pass = &passes[r];
    ranks[r].map = CounterMap::of(passes[r].sizes);
    const CounterMap& map = ranks[r].map;
    ranks[r].counters[static_cast<int>(CounterArray::local)].resize(static_cast<std::size_t>(map.local_size));
    ranks[r].counters[static_cast<int>(CounterArray::arrivals)].resize(static_cast<std::size_t>(map.arrivals_size));
    ranks[r].counters[static_cast<int>(CounterArray::flags)].resize(static_cast<std::size_t>(map.flags_size));
    ranks[r].free.assign(static_cast<std::size_t>(workers), 0.0);
    ranks[r].tiles = schedule::tile_count(passes[r]);
    const bool layout_is_late = passes[r].sizes.ranks > 1 && passes[r].sizes.direction == schedule::Direction::forward;
    ranks[r].after_layout = layout_is_late ? schedule::prologue_tiles(passes[r]) : ranks[r].tiles;
    // The host raises the flags of the tables before a pass of several ranks begins.
    for (std::int64_t i = 0; i < map.chunk_ready && i < map.flags_size; ++i) {
      ranks[r].counters[static_cast<int>(CounterArray::flags)][static_cast<std::size_t>(map.table_ready + i)].count = 1;
    }
  }

  // Runs the next tile of a rank, if all it waits for is known by now.
  const auto advance = [&](Rank& rank, int number) {
    const Tile tile = schedule::tile_at(*rank.pass, rank.next);
    double ready = 0, chain = 0;
    std::int64_t after = -1, before = -1;
    const auto wait_for = [&](const schedule::Wait& wait) {
      const std::int64_t target = wait.array == CounterArray::flags ? 1 : wait.target;  // a flag is raised once a pass
      for (std::int64_t i = wait.begin; i < wait.begin + wait.count; ++i) {
        const Counter& counter = rank.counters[static_cast<std::size_t>(wait.array)][static_cast<std::size_t>(i)];
        if (counter.count < target) return false;
        if (target == 0) continue;
        if (counter.end > ready) ready = counter.end, after = counter.by;
        if (counter.chain > chain) chain = counter.chain, before = counter.chain_by;
      }
      return true;
    };
    if (rank.next >= rank.after_layout && !wait_for({CounterArray::local, rank.map.layout_ready, 1, 1, number}))
      return false;
    const bool known = schedule::for_each_wait(*rank.pass, rank.map, tile, wait_for);
    if (!known) return false;
    const auto worker = std::min_element(rank.free.begin(), rank.free.end());
    const double seconds = cost(*rank.pass, tile);
    Span span{number, static_cast<int>(worker - rank.free.begin()), tile, std::max(*worker, ready), 0, *worker, -1};
    span.end = span.start + seconds;
    if (ready > *worker) span.after = after;
    *worker = span.end;
    const auto index = static_cast<std::int64_t>(result.spans.size());
    result.spans.push_back(span);
    chains.push_back(chain + seconds);
    chain_after.push_back(before);
    result.work += seconds;
    result.makespan = std::max(result.makespan, span.end);
    schedule::for_each_signal(*rank.pass, rank.map, tile, [&](const schedule::Signal& signal) {
      Counter& counter = ranks[static_cast<std::size_t>(signal.rank)]
                             .counters[static_cast<std::size_t>(signal.array)][static_cast<std::size_t>(signal.index)];
      const double latency = signal.rank == number ? 0 : signal_latency;
      ++counter.count;
      if (span.end + latency >= counter.end) counter.end = span.end + latency, counter.by = index;
      if (chains.back() + latency >= counter.chain) counter.chain = chains.back() + latency, counter.chain_by = index;
    });
    ++rank.next;
    return true;
  };

  for (bool all_done = false; !all_done;) {
    all_done = true;
    bool progress = false;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      while (ranks[r].next < ranks[r].tiles && advance(ranks[r], static_cast<int>(r))) progress = true;
      all_done &= ranks[r].next == ranks[r].tiles;
    }
    if (all_done || progress) continue;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r].next == ranks[r].tiles) continue;
      throw Error(Status::internal,
                  "rank " + std::to_string(r) + " would wait for ever in tile " + std::to_string(ranks[r].next) + " (" +
                      schedule::to_string(schedule::tile_at(*ranks[r].pass, ranks[r].next).stage) + ")");
    }
  }

  const auto last = std::max_element(chains.begin(), chains.end());
  if (last != chains.end()) {
    result.critical_path = *last;
    for (std::int64_t at = last - chains.begin(); at >= 0; at = chain_after[static_cast<std::size_t>(at)]) {
      result.critical.push_back(at);
    }
    std::reverse(result.critical.begin(), result.critical.end());
  }
  return result;
}

}  // namespace moelith::executors::simulator
