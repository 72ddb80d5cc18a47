// The one order of all tiles of a pass, decoded from an index. A pass is a row of sections:
//
//   forward:   publish | layout | shared experts: gate_up, down | collect | dispatch | routed: gate_up, down | combine
//   backward:  publish | shared: [gate_up], down_dgrad, gate_up_dgrad | dispatch |
//              routed: [gate_up], down_dgrad, gate_up_dgrad | weight and bias gradients mixed evenly with combine
//
// (publish, layout, collect, dispatch: with several ranks only, and not among those with peer_access, which have exchanged
// their tables before the pass and read x and dY where they lie; [gate_up]: when recomputing.)
//
// Where row buffers do not have room for all routed rows, the section of routed experts goes round by round
// (extents.hpp), each in the place of the one before it:
//
//   forward:   round 0: gate_up, down | round 1: gate_up, down | ..
//   backward:  round 0: [gate_up], down_dgrad, gate_up_dgrad, weight and bias gradients | round 1: the same after gate_up,
//              whose results were kept for round 0 only | ..
//
// and the last round's weight and bias gradients, with those of the shared experts, are the ones mixed with combine. A
// round sums the gradients of those experts that have rows in it, and of those without any rows that stand between
// them. Of an expert whose rows go on in the next round the sums up to there are set aside, and go on from there.
// Rounds are a rank's own affair: what it has room for, and how many it has, no other rank knows or waits for.
//
// Order across ranks: by section, then rank, then index. Every tile waits only for tiles before it in that order
// (dependencies.hpp lists the waits): within a rank because each stage of a pipelined section follows the one it reads,
// and each round the one whose place it takes; and across ranks because a tile waits for other ranks only in an earlier
// section, and rounds are within one. So whichever tile is the first unfinished one has all it waits for, its worker is
// the one that holds it, and grids of any size make progress.
#pragma once

#include <cstdint>

#include "schedule/extents.hpp"
#include "schedule/tile.hpp"

namespace moelith::schedule {

// Of `count` that follow each other, from begin[0] on, the last that begins at `position` or before.
MOELITH_HD inline std::int32_t last_begun(const std::int64_t* begin, std::int32_t count, std::int64_t position) {
  std::int32_t low = 0, high = count;
  while (high - low > 1) {
    const std::int32_t middle = (low + high) >> 1;
    if (begin[middle] <= position) low = middle; else high = middle;
  }
  return low;
}
// The expert that has row block `block`, counted over all of them.
MOELITH_HD inline std::int32_t expert_of_block(const Pass& pass, std::int64_t block) {
  return last_begun(pass.layout.block_begin, pass.sizes.local_experts, block);
}

// Stages over the same row blocks, one a group of blocks behind the other: segment s runs stage i on group s - i. So a
// stage finds its input finished, or nearly, and still in cache.
struct Pipeline {
  static constexpr int max_stages = 3;  // loops run over all: a stage that is not there has no columns
  std::int64_t blocks = 0;               // row blocks
  std::int64_t group = 1;                // blocks of a group
  std::int64_t raster = 0;               // of these, at most so many blocks of an expert whose columns come together; 0: the group
  // The experts: e has the blocks from block_begin[e] - first on. Null: there is one.
  const std::int64_t* block_begin = nullptr;
  std::int32_t experts = 1;
  std::int64_t first = 0;
  Stage stage[max_stages] = {};
  std::int64_t columns[max_stages] = {}; // column tiles per block

  MOELITH_HD std::int64_t per_block() const {
    std::int64_t sum = 0;
    for (int i = 0; i < max_stages; ++i) sum += columns[i];
    return sum;
  }
  MOELITH_HD std::int64_t size() const { return per_block() * blocks; }
  // Tiles before segment s.
  MOELITH_HD std::int64_t segment_begin(std::int64_t s) const {
    std::int64_t tiles = 0;
    for (int i = 0; i < max_stages; ++i) tiles += columns[i] * min_of(max_of(s - i, 0) * group, blocks);
    return tiles;
  }
  // Within a group: the blocks of one expert at a time, or an even part of them, and those column by column. So they read the
  // same weights together and nobody reads them later, and the tiles of one block, which read the same rows, are not far
  // apart either. The raster of `block`, of the blocks [begin, end) of a group:
  MOELITH_HD void raster_of(std::int64_t block, std::int64_t begin, std::int64_t end, std::int64_t& raster_begin,
                            std::int64_t& raster_end) const {
    raster_begin = begin, raster_end = end;
    if (raster == 0) return;
    if (block_begin) {
      const std::int32_t expert = last_begun(block_begin, experts, first + block);
      begin = max_of(begin, block_begin[expert] - first), end = min_of(end, block_begin[expert + 1] - first);
    }
    const std::int64_t size = ceil_div(end - begin, ceil_div(end - begin, raster));
    raster_begin = begin + quotient(block - begin, size) * size;
    raster_end = min_of(raster_begin + size, end);
  }
  MOELITH_HD void decode(std::int64_t index, Stage& out_stage, std::int64_t& block, std::int32_t& column) const {
    // The segment, if all of them were as long as those in the middle; then a few steps to the right one.
    std::int64_t lead = 0;
    for (int i = 0; i < max_stages; ++i) lead += columns[i] * i * group;
    std::int64_t segment = quotient(index + lead, per_block() * group);
    while (segment_begin(segment) > index) --segment;
    while (segment_begin(segment + 1) <= index) ++segment;
    index -= segment_begin(segment);
    std::int64_t group_begin = 0, group_end = 0, per_column = 1;
    for (int i = 0; i < max_stages; ++i) {
      const std::int64_t begin = (segment - i) * group, end = min_of(begin + group, blocks);
      const std::int64_t tiles = begin < 0 || end < begin ? 0 : (end - begin) * columns[i];
      if (index < tiles) {
        out_stage = stage[i];
        group_begin = begin, group_end = end, per_column = columns[i];
        break;
      }
      index -= tiles;
    }
    std::int64_t begin, end;  // all tiles of the blocks before a raster come before its own
    raster_of(group_begin + quotient(index, per_column), group_begin, group_end, begin, end);
    index -= (begin - group_begin) * per_column;
    block = begin + remainder_of(index, end - begin);
    column = static_cast<std::int32_t>(quotient(index, end - begin));
  }
};

// The pipelined stages of an expert slot's row blocks; `slot` may be any routed one, since they are alike.
MOELITH_HD inline Pipeline pipeline_of(const Sizes& sizes, std::int32_t slot, std::int64_t blocks,
                                       std::int32_t round = 0) {
  Pipeline p;
  p.blocks = blocks;
  p.group = sizes.tile.group_blocks;
  p.raster = sizes.tile.raster_blocks;
  const bool forward = sizes.direction == Direction::forward;
  p.stage[0] = Stage::gate_up;
  p.columns[0] = sizes.makes_pre_activation(round) ? sizes.gate_up_tiles(slot) : 0;
  p.stage[1] = forward ? Stage::down : Stage::down_dgrad;
  p.columns[1] = forward ? sizes.hidden_tiles() : sizes.down_dgrad_tiles(slot);
  p.stage[2] = Stage::gate_up_dgrad;
  p.columns[2] = !forward && sizes.want_dx ? sizes.hidden_tiles() : 0;
  return p;
}

MOELITH_HD inline Pipeline shared_pipeline(const Pass& pass, std::int32_t slot) {
  return pipeline_of(pass.sizes, slot, ceil_div(*pass.layout.valid_tokens, pass.sizes.tile.row_block));
}

MOELITH_HD inline Tile routed_tile(const Pass& pass, Stage stage, std::int64_t block, std::int32_t column,
                                   std::int32_t round = 0) {
  const std::int32_t expert = expert_of_block(pass, block);
  return {stage, expert, block - pass.layout.block_begin[expert], column, round};
}

struct Round {
  std::int32_t number = 0;
  bool last = true;
  std::int64_t block_begin = 0, block_end = 0;    // counted over all routed experts
  std::int32_t expert_begin = 0, expert_end = 0;  // whose gradients the round sums
};
MOELITH_HD inline Round round_of(const Pass& pass, std::int32_t number) {
  const std::int32_t experts = pass.sizes.local_experts;
  if (!pass.sizes.has_rounds()) return {0, true, 0, pass.routed_blocks(), 0, experts};
  const std::int64_t begin = pass.layout.round_block[number], end = pass.layout.round_block[number + 1];
  Round round{number, number + 1 == pass.rounds(), begin, end, 0, experts};
  if (number > 0) round.expert_begin = expert_of_block(pass, begin);
  if (!round.last) {
    round.expert_end = expert_of_block(pass, end);
    if (pass.layout.block_begin[round.expert_end] < end) ++round.expert_end;
  }
  return round;
}
MOELITH_HD inline Pipeline pipeline_of(const Pass& pass, const Round& round) {
  Pipeline p = pipeline_of(pass.sizes, 0, round.block_end - round.block_begin, round.number);
  p.block_begin = pass.layout.block_begin, p.experts = pass.sizes.local_experts, p.first = round.block_begin;
  return p;
}

// Weight and bias gradient tiles of one expert slot. In this order, since those of biases, which sum all columns, may take
// longest and should not be the last of a pass.
struct WeightGradientTiles {
  std::int64_t gate_up_bias, down_bias, gate_up_rows, gate_up_columns, down_rows, down_columns;
  MOELITH_HD std::int64_t size() const {
    return gate_up_rows * gate_up_columns + down_rows * down_columns + gate_up_bias + down_bias;
  }
};
MOELITH_HD inline WeightGradientTiles weight_gradient_tiles(const Sizes& sizes, std::int32_t slot) {
  const std::int64_t width = sizes.width(slot);
  WeightGradientTiles tiles{};
  if (sizes.want_gate_up_wgrad) {
    tiles.gate_up_rows = ceil_div(sizes.gate_up_factor * width, sizes.tile.wgrad_rows);
    tiles.gate_up_columns = ceil_div(sizes.hidden_size, sizes.tile.wgrad_columns);
  }
  if (sizes.want_down_wgrad) {
    tiles.down_rows = ceil_div(sizes.hidden_size, sizes.tile.wgrad_rows);
    tiles.down_columns = ceil_div(width, sizes.tile.wgrad_columns);
  }
  if (sizes.want_gate_up_bias_grad) tiles.gate_up_bias = 1;
  if (sizes.want_down_bias_grad) tiles.down_bias = 1;
  return tiles;
}

MOELITH_HD inline std::int64_t combine_tiles(const Sizes& sizes) { return sizes.token_blocks() * sizes.hidden_tiles(); }

// Token block by token block, so that whole rows are read and written together.
MOELITH_HD inline Tile combine_tile(const Sizes& sizes, std::int64_t index) {
  const std::int64_t columns = sizes.hidden_tiles(), block = quotient(index, columns);
  return {Stage::combine, 0, block, static_cast<std::int32_t>(index - block * columns)};
}

// Of so many routed experts, and of the shared ones beside them.
MOELITH_HD inline std::int64_t weight_gradient_tile_count(const Sizes& sizes, std::int32_t experts, bool shared) {
  std::int64_t count = 0;
  if (experts > 0) count += experts * weight_gradient_tiles(sizes, 0).size();
  for (std::int32_t s = 0; shared && s < sizes.shared_experts; ++s) {
    count += weight_gradient_tiles(sizes, sizes.local_experts + s).size();
  }
  return count;
}
MOELITH_HD inline std::int64_t weight_gradient_tile_count(const Sizes& sizes, const Round& round) {
  return weight_gradient_tile_count(sizes, round.expert_end - round.expert_begin, round.last);
}

MOELITH_HD inline Tile weight_gradient_tile(const Sizes& sizes, const Round& round, std::int64_t index) {
  std::int32_t slot = sizes.local_experts, number = 0;
  if (sizes.local_experts > 0) {
    const std::int64_t per_expert = weight_gradient_tiles(sizes, 0).size();
    const std::int64_t routed = per_expert * (round.expert_end - round.expert_begin);
    if (index < routed) {
      const std::int64_t expert = quotient(index, per_expert);
      slot = round.expert_begin + static_cast<std::int32_t>(expert);
      number = round.number;
      index -= expert * per_expert;
    } else {
      index -= routed;
    }
  }
  while (sizes.is_shared(slot) && index >= weight_gradient_tiles(sizes, slot).size()) {
    index -= weight_gradient_tiles(sizes, slot).size();
    ++slot;
  }
  const WeightGradientTiles tiles = weight_gradient_tiles(sizes, slot);
  const std::int64_t biases = tiles.gate_up_bias + tiles.down_bias;
  if (index < biases) {
    return {index < tiles.gate_up_bias ? Stage::gate_up_bias_grad : Stage::down_bias_grad, slot, 0, 0, number};
  }
  index -= biases;
  const std::int64_t gate_up = tiles.gate_up_rows * tiles.gate_up_columns;
  if (index < gate_up) {
    return {Stage::gate_up_wgrad, slot, quotient(index, tiles.gate_up_columns),
            std::int32_t(remainder_of(index, tiles.gate_up_columns)), number};
  }
  index -= gate_up;
  return {Stage::down_wgrad, slot, quotient(index, tiles.down_columns),
          std::int32_t(remainder_of(index, tiles.down_columns)), number};
}

// Tiles whose number and meaning do not need the Layout's arrays beyond valid_tokens: a worker may run them before the
// layout tile has finished. In backward the Layout is there from the start.
MOELITH_HD inline std::int64_t prologue_tiles(const Pass& pass) {
  const Sizes& sizes = pass.sizes;
  std::int64_t count = 0;
  if (sizes.has_transfers()) {
    count += ceil_div(sizes.tokens, sizes.chunk_tokens);
    if (sizes.direction == Direction::forward) count += 1;
  }
  for (std::int32_t s = 0; s < sizes.shared_experts; ++s) count += shared_pipeline(pass, sizes.local_experts + s).size();
  return count;
}

MOELITH_HD inline std::int64_t tile_count(const Pass& pass) {
  const Sizes& sizes = pass.sizes;
  std::int64_t count = prologue_tiles(pass);
  if (sizes.has_transfers()) {
    if (sizes.direction == Direction::forward) count += sizes.local_experts;
    count += pass.layout.chunk_begin[sizes.ranks];
  }
  for (std::int32_t number = 0; number < pass.rounds(); ++number) {
    const Round round = round_of(pass, number);
    if (sizes.local_experts > 0) count += pipeline_of(pass, round).size();
    if (sizes.direction == Direction::backward) count += weight_gradient_tile_count(sizes, round);
  }
  count += combine_tiles(sizes);
  return count;
}

// At most so many tiles, whatever the routing.
inline std::int64_t max_tile_count(const Sizes& sizes) {
  std::int64_t count = combine_tiles(sizes);
  if (sizes.has_transfers()) count += ceil_div(sizes.tokens, sizes.chunk_tokens) + 1 + sizes.local_experts + sizes.ranks * sizes.max_chunks;
  // With rounds nearly all blocks may be in those after the first.
  const std::int32_t round = sizes.has_rounds() ? 1 : 0;
  if (sizes.local_experts > 0) count += pipeline_of(sizes, 0, sizes.max_row_blocks, round).size();
  for (std::int32_t s = 0; s < sizes.shared_experts; ++s) {
    count += pipeline_of(sizes, sizes.local_experts + s, sizes.shared_row_blocks()).size();
  }
  if (sizes.direction == Direction::backward) {
    count += weight_gradient_tile_count(sizes, sizes.local_experts, true);
    // One expert at most goes on from one round to the next.
    if (sizes.has_rounds() && sizes.local_experts > 0) count += (sizes.max_rounds - 1) * weight_gradient_tile_count(sizes, 1, false);
  }
  return count;
}

// The tile at an index in [0, tile_count). Needs the whole Layout from prologue_tiles on.
MOELITH_HD inline Tile tile_at(const Pass& pass, std::int64_t index) {
  const Sizes& sizes = pass.sizes;
  if (sizes.has_transfers()) {
    const std::int64_t chunks = ceil_div(sizes.tokens, sizes.chunk_tokens);
    if (index < chunks) return {Stage::publish, 0, index, 0};
    index -= chunks;
    if (sizes.direction == Direction::forward) {
      if (index == 0) return {Stage::layout, 0, 0, 0};
      index -= 1;
    }
  }
  for (std::int32_t s = 0; s < sizes.shared_experts; ++s) {
    const Pipeline p = shared_pipeline(pass, sizes.local_experts + s);
    if (index < p.size()) {
      Tile tile{Stage::gate_up, sizes.local_experts + s, 0, 0};
      p.decode(index, tile.stage, tile.row_block, tile.column_block);
      return tile;
    }
    index -= p.size();
  }
  if (sizes.has_transfers()) {
    if (sizes.direction == Direction::forward) {
      if (index < sizes.local_experts) return {Stage::collect, std::int32_t(index), 0, 0};
      index -= sizes.local_experts;
    }
    const std::int64_t* chunk_begin = pass.layout.chunk_begin;
    if (index < chunk_begin[sizes.ranks]) {
      std::int32_t source = 0;
      while (index >= chunk_begin[source + 1]) ++source;
      return {Stage::dispatch, source, index - chunk_begin[source], 0};
    }
    index -= chunk_begin[sizes.ranks];
  }
  Round round = round_of(pass, 0);
  for (; sizes.local_experts > 0; round = round_of(pass, round.number + 1)) {
    const Pipeline p = pipeline_of(pass, round);
    if (index < p.size()) {
      Stage stage = Stage::gate_up;
      std::int64_t block = 0;
      std::int32_t column = 0;
      p.decode(index, stage, block, column);
      return routed_tile(pass, stage, round.block_begin + block, column, round.number);
    }
    index -= p.size();
    if (round.last) break;
    if (sizes.direction == Direction::forward) continue;
    const std::int64_t gradients = weight_gradient_tile_count(sizes, round);
    if (index < gradients) return weight_gradient_tile(sizes, round, index);
    index -= gradients;
  }
  const std::int64_t combine = combine_tiles(sizes);
  if (sizes.direction == Direction::forward) return combine_tile(sizes, index);
  // Combine moves bytes and weight gradients compute: among n tiles, c of them combine, the i-th is one if c i / n
  // passes an integer there.
  const std::int64_t total = combine + weight_gradient_tile_count(sizes, round);
  const std::int64_t combines_before = wide_quotient(combine * index, total);
  if (wide_quotient(combine * (index + 1), total) > combines_before) return combine_tile(sizes, combines_before);
  return weight_gradient_tile(sizes, round, index - combines_before);
}

// The rows of a tile of a row-blocked stage.
MOELITH_HD inline RowRange tile_rows(const Pass& pass, const Tile& tile) {
  const RowRange all = pass.expert_rows(tile.expert);
  const std::int64_t begin = all.begin + tile.row_block * pass.sizes.tile.row_block;
  return {begin, min_of(begin + pass.sizes.tile.row_block, all.end)};
}

// Row r of a routed expert lies at place r - first_row_held of the row buffers, while the tile's round has them.
MOELITH_HD inline std::int64_t first_row_held(const Pass& pass, const Tile& tile) {
  return pass.sizes.has_rounds() && !pass.sizes.is_shared(tile.expert) ? pass.layout.round_row[tile.round] : 0;
}

// The rows that a weight or bias gradient tile sums: those of its expert that are in its round.
MOELITH_HD inline RowRange summed_rows(const Pass& pass, const Tile& tile) {
  const RowRange all = pass.expert_rows(tile.expert);
  if (!pass.sizes.has_rounds() || pass.sizes.is_shared(tile.expert)) return all;
  const std::int64_t* round_row = pass.layout.round_row + tile.round;
  return {max_of(all.begin, round_row[0]), min_of(all.end, round_row[1])};
}
// Which of two places has the sums of the expert that goes on after a round.
MOELITH_HD constexpr std::int32_t sum_place(std::int32_t round) { return round & 1; }

}  // namespace moelith::schedule
