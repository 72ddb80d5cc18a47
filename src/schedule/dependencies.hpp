// What a tile waits for and what it raises. Nothing else orders the work of a pass, but for copies that an executor makes
// beside its tiles for later ones of the order (the sm_90a executor's packed rows, sm90_pack.cuh).
//
// Counters lie in three arrays; those of the first two are 0 when a pass starts, which its executor sees to:
//   local     raised by this rank's workers only;
//   arrivals  of each rank, raised by every rank that wrote into it. Cleared by their owner at the end of a pass, which is
//             safe: others raise them only for rows that they pulled from the owner in the next pass, after it began it;
//   flags     of each rank, each written by one other rank: the number (epoch) of the pass for which something is there.
//             They only grow and are never cleared. Ranks with peer_access await those of the others' tables before the
//             pass, so that nobody's rows or slots are touched before it has begun the pass. Combine waits for all rows of
//             the rank's tokens to come back; what is read of them after that (the sm_90a executor's x in backward) the
//             reader says by rows_pulled, which the last block of a pass awaits, so that nobody ends it too early.
//
// Each output is written exactly once: a tile owns the [rows, columns] rectangle of its stage's output that its indices
// name; rectangles of one stage do not overlap and cover the whole (tile_order.hpp decodes each index to another tile).
// Slots: route (t, j) belongs to one expert, so one row; its columns belong to one tile each.
//
// With several rounds a place of the row buffers (the activation, in backward also dZ, where gate_up of a later round puts
// the pre-activation first) is written once a round. round_done counts the tiles of a round that read places, or write
// what the others of them read; gate_up of the next round, which is the first to write there, waits for all of them. So
// nobody writes a place that is still to be read, nor, since each round has waited for the one before it, one of an
// earlier round. The other tiles of a round have waited for a gate_up tile of it. That goes for the sums of an expert
// that goes on in the next round too, of which there are two places: a round reads the one that the round before it wrote,
// and writes the other, which was read last by the round before it.
#pragma once

#include <cstdint>

#include "schedule/extents.hpp"
#include "schedule/tile.hpp"
#include "schedule/tile_order.hpp"

namespace moelith::schedule {

// Offsets into the three counter arrays of a rank.
struct CounterMap {
  // local
  std::int64_t layout_ready, collected, dispatched, gate_up_done, down_dgrad_done, round_done, local_size;
  // arrivals
  std::int64_t rows_arrived, dprob_arrived, arrivals_size;
  // flags
  std::int64_t table_ready, rows_pulled, chunk_ready, flags_size;

  static MOELITH_HD CounterMap of(const Sizes& sizes) {
    CounterMap map{};
    const std::int64_t blocks = sizes.max_row_blocks + sizes.shared_experts * sizes.shared_row_blocks();
    map.layout_ready = 0;
    map.collected = 1;
    map.dispatched = map.collected + sizes.local_experts;
    map.gate_up_done = map.dispatched + (sizes.has_transfers() ? sizes.ranks * sizes.max_chunks : 0);
    map.down_dgrad_done = map.gate_up_done + blocks;
    map.round_done = map.down_dgrad_done + blocks;
    map.local_size = map.round_done + sizes.max_rounds;
    map.rows_arrived = 0;
    map.dprob_arrived = sizes.hidden_tiles();
    map.arrivals_size = map.dprob_arrived + 1;
    map.table_ready = 0;
    map.rows_pulled = sizes.ranks;
    map.chunk_ready = map.rows_pulled + (sizes.peer_access ? sizes.ranks : 0);
    map.flags_size = map.chunk_ready + (sizes.has_transfers() ? sizes.ranks * sizes.max_chunks : 0);
    return map;
  }
};

// Index of a row block among the per-block counters: routed blocks first, then those of the shared experts.
MOELITH_HD inline std::int64_t block_index(const Pass& pass, std::int32_t slot, std::int64_t row_block) {
  if (!pass.sizes.is_shared(slot)) return pass.layout.block_begin[slot] + row_block;
  return pass.sizes.max_row_blocks + (slot - pass.sizes.local_experts) * pass.sizes.shared_row_blocks() + row_block;
}

// Row blocks, here and on other ranks, whose rows end up in this rank's slots.
MOELITH_HD inline std::int64_t arriving_blocks(const Pass& pass) {
  return *pass.layout.arrivals +
         pass.sizes.shared_experts * ceil_div(*pass.layout.valid_tokens, pass.sizes.tile.row_block);
}

// Tiles of a round that raise its round_done: all but gate_up's, which down and down_dgrad wait for.
MOELITH_HD inline std::int64_t tiles_after_gate_up(const Pass& pass, std::int32_t number) {
  const Round round = round_of(pass, number);
  const Pipeline p = pipeline_of(pass, round);
  std::int64_t count = p.size() - p.columns[0] * p.blocks;
  if (pass.sizes.direction == Direction::backward) {
    count += weight_gradient_tile_count(pass.sizes, round.expert_end - round.expert_begin, false);
  }
  return count;
}

enum class CounterArray : std::uint8_t { local, arrivals, flags };

// Counters [begin, begin + count) of this rank must each have reached `target`; for flags: the epoch of this pass.
struct Wait {
  CounterArray array;
  std::int64_t begin, count, target;
  std::int32_t from;  // the rank whose doing is awaited, for error texts; -1: several
};

// Counter `index` of rank `rank` goes up by 1; a flag is set to the epoch of this pass.
struct Signal {
  CounterArray array;
  std::int32_t rank;
  std::int64_t index;
};

// Calls wait(Wait) for all that a tile needs, one after the other, until one returns false; returns whether all were
// true. A wait that returns true has been satisfied: what follows reads what it guards.
template <class F>
MOELITH_HD bool for_each_wait(const Pass& pass, const CounterMap& map, const Tile& tile, F&& wait) {
  const Sizes& sizes = pass.sizes;
  const bool shared = sizes.is_shared(tile.expert);
  auto local = [&](std::int64_t begin, std::int64_t count, std::int64_t target) -> bool {
    return wait(Wait{CounterArray::local, begin, count, target, sizes.rank});
  };
  // The dispatched chunks that the rows of a block come from. Rows are in token order, so they form a range per rank.
  auto dispatched_rows = [&]() -> bool {
    if (!sizes.has_transfers() || shared) return true;
    if (sizes.direction == Direction::forward && !local(map.collected + tile.expert, 1, 1)) return false;
    const RowRange rows = tile_rows(pass, tile);
    for (std::int32_t r = 0; r < sizes.ranks; ++r) {
      const std::int64_t begin = max_of(rows.begin, pass.source_begin(tile.expert, r));
      const std::int64_t end = min_of(rows.end, pass.source_begin(tile.expert, r + 1));
      if (r == sizes.rank || begin >= end) continue;
      const std::int64_t first = pass.layout.row_route[begin] / sizes.top_k / sizes.chunk_tokens;
      const std::int64_t last = pass.layout.row_route[end - 1] / sizes.top_k / sizes.chunk_tokens;
      if (!local(map.dispatched + r * sizes.max_chunks + first, last - first + 1, 1)) return false;
    }
    return true;
  };
  // The places of the round before this one are free.
  auto places_free = [&]() -> bool {
    if (!sizes.has_rounds() || shared || tile.round == 0) return true;
    return local(map.round_done + tile.round - 1, 1, tiles_after_gate_up(pass, tile.round - 1));
  };
  // All `tiles` column tiles of the earlier stage, for this row block.
  auto block_done = [&](std::int64_t counters, std::int64_t tiles) -> bool {
    return local(counters + block_index(pass, tile.expert, tile.row_block), 1, tiles);
  };
  switch (tile.stage) {
    case Stage::publish: return true;
    case Stage::layout:
      for (std::int32_t r = 0; r < sizes.ranks; ++r) {
        if (r != sizes.rank && !wait(Wait{CounterArray::flags, map.table_ready + r, 1, 0, r})) return false;
      }
      return true;
    case Stage::collect: return true;  // after the layout, which has seen all tables
    case Stage::dispatch:
      return wait(
          Wait{CounterArray::flags, map.chunk_ready + tile.expert * sizes.max_chunks + tile.row_block, 1, 0, tile.expert});
    case Stage::gate_up:
      // In backward x was kept by forward; the pre-activation alone is made anew.
      return (sizes.direction == Direction::backward || dispatched_rows()) && places_free();
    case Stage::down: return block_done(map.gate_up_done, sizes.gate_up_tiles(tile.expert));
    case Stage::down_dgrad:
      return dispatched_rows() && (!sizes.makes_pre_activation(tile.round) ||
                                   block_done(map.gate_up_done, sizes.gate_up_tiles(tile.expert)));
    case Stage::gate_up_dgrad: return block_done(map.down_dgrad_done, sizes.down_dgrad_tiles(tile.expert));
    case Stage::gate_up_wgrad:
    case Stage::down_wgrad:
    case Stage::gate_up_bias_grad:
    case Stage::down_bias_grad: {
      const RowRange rows = summed_rows(pass, tile);
      const std::int64_t blocks = ceil_div(rows.size(), sizes.tile.row_block);
      std::int64_t first = 0;
      if (sizes.has_rounds()) first = quotient(rows.begin - pass.expert_rows(tile.expert).begin, sizes.tile.row_block);
      return blocks == 0 || local(map.down_dgrad_done + block_index(pass, tile.expert, first), blocks,
                                  sizes.down_dgrad_tiles(tile.expert));
    }
    case Stage::combine: {
      const std::int64_t blocks = arriving_blocks(pass);
      const bool rows = sizes.direction == Direction::forward || sizes.want_dx;
      if (rows && !wait(Wait{CounterArray::arrivals, map.rows_arrived + tile.column_block, 1, blocks, -1})) return false;
      if (sizes.direction == Direction::backward && tile.column_block == 0) {
        // Every block of every expert raises it once per column tile of its width.
        std::int64_t target = *pass.layout.arrivals * ceil_div(sizes.intermediate_size, sizes.down_dgrad_columns());
        for (std::int32_t s = 0; s < sizes.shared_experts; ++s) {
          target += ceil_div(*pass.layout.valid_tokens, sizes.tile.row_block) *
                    sizes.down_dgrad_tiles(sizes.local_experts + s);
        }
        return wait(Wait{CounterArray::arrivals, map.dprob_arrived, 1, target, -1});
      }
      return true;
    }
  }
  return true;
}

// Calls raise(Signal) for all that a finished tile raises.
template <class F>
MOELITH_HD void for_each_signal(const Pass& pass, const CounterMap& map, const Tile& tile, F&& raise) {
  const Sizes& sizes = pass.sizes;
  auto local = [&](std::int64_t index) { raise(Signal{CounterArray::local, sizes.rank, index}); };
  // Raises an arrival counter of each rank that owns a row of the block.
  auto arrivals = [&](std::int64_t index) {
    if (sizes.ranks == 1 || sizes.is_shared(tile.expert)) {
      raise(Signal{CounterArray::arrivals, sizes.rank, index});
      return;
    }
    const RowRange rows = tile_rows(pass, tile);
    for (std::int32_t r = 0; r < sizes.ranks; ++r) {
      const std::int64_t begin = max_of(rows.begin, pass.source_begin(tile.expert, r));
      const std::int64_t end = min_of(rows.end, pass.source_begin(tile.expert, r + 1));
      if (begin < end) raise(Signal{CounterArray::arrivals, r, index});
    }
  };
  auto round_done = [&] {
    if (sizes.has_rounds() && !sizes.is_shared(tile.expert)) local(map.round_done + tile.round);
  };
  switch (tile.stage) {
    case Stage::publish:
      for (std::int32_t r = 0; r < sizes.ranks; ++r) {
        if (r == sizes.rank) continue;
        raise(Signal{CounterArray::flags, r, map.chunk_ready + sizes.rank * sizes.max_chunks + tile.row_block});
      }
      break;
    case Stage::layout: local(map.layout_ready); break;
    case Stage::collect: local(map.collected + tile.expert); break;
    case Stage::dispatch: local(map.dispatched + tile.expert * sizes.max_chunks + tile.row_block); break;
    case Stage::gate_up: local(map.gate_up_done + block_index(pass, tile.expert, tile.row_block)); break;
    case Stage::down_dgrad:
      local(map.down_dgrad_done + block_index(pass, tile.expert, tile.row_block));
      round_done();
      arrivals(map.dprob_arrived);
      break;
    case Stage::down:
    case Stage::gate_up_dgrad:
      round_done();
      arrivals(map.rows_arrived + tile.column_block);
      break;
    case Stage::gate_up_wgrad:
    case Stage::down_wgrad:
    case Stage::gate_up_bias_grad:
    case Stage::down_bias_grad: round_done(); break;
    case Stage::combine: break;
  }
}

}  // namespace moelith::schedule
