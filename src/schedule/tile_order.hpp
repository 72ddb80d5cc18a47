// The one order of all tiles of a pass, decoded from an index. A pass is a row of sections:
//
//   forward:   publish | layout | shared experts: gate_up, down | collect | dispatch | routed: gate_up, down | combine
//   backward:  publish | shared: [gate_up], down_dgrad, gate_up_dgrad | dispatch |
//              routed: [gate_up], down_dgrad, gate_up_dgrad | weight and bias gradients mixed evenly with combine
//
// (publish, layout, collect, dispatch: with several ranks only, and not among those with peer_access, which have exchanged
// their tables before the pass and read x and dY where they lie; [gate_up]: when recomputing.)
//
// Order across ranks: by section, then rank, then index. Every tile waits only for tiles before it in that order
// (dependencies.hpp lists the waits): within a rank because each stage of a pipelined section follows the one it reads,
// and across ranks because a tile waits for other ranks only in an earlier section. So whichever tile is the first
// unfinished one has all it waits for, its worker is the one that holds it, and grids of any size make progress.
#pragma once

#include <cstdint>

#include "schedule/extents.hpp"
#include "schedule/tile.hpp"

namespace moelith::schedule {

// Stages over the same row blocks, one a group of blocks behind the other: segment s runs stage i on group s - i. So a
// stage finds its input finished, or nearly, and still in cache.
struct Pipeline {
  static constexpr int max_stages = 3;  // loops run over all: a stage that is not there has no columns
  std::int64_t blocks = 0;               // row blocks
  std::int64_t group = 1;                // blocks of a group
  std::int64_t raster = 1;               // of these, blocks whose columns come together
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
  // Within a group: some blocks at a time, and those column by column, so that the blocks of one expert read the same
  // weights together, and the tiles of one block, which read the same rows, are not far apart either.
  MOELITH_HD void decode(std::int64_t index, Stage& out_stage, std::int64_t& block, std::int32_t& column) const {
    // The segment, if all of them were as long as those in the middle; then a few steps to the right one.
    std::int64_t lead = 0;
    for (int i = 0; i < max_stages; ++i) lead += columns[i] * i * group;
    std::int64_t segment = quotient(index + lead, per_block() * group);
    while (segment_begin(segment) > index) --segment;
    while (segment_begin(segment + 1) <= index) ++segment;
    index -= segment_begin(segment);
    for (int i = 0; i < max_stages; ++i) {
      const std::int64_t first = (segment - i) * group;
      const std::int64_t count = segment < i ? 0 : min_of(group, max_of(blocks - first, 0));
      if (index < count * columns[i]) {
        const std::int64_t before = quotient(index, raster * columns[i]) * raster;
        const std::int64_t together = min_of(raster, count - before);
        index -= before * columns[i];
        out_stage = stage[i];
        block = first + before + remainder_of(index, together);
        column = static_cast<std::int32_t>(quotient(index, together));
        return;
      }
      index -= count * columns[i];
    }
  }
};

// The pipelined stages of an expert slot's row blocks; `slot` may be any routed one, since they are alike.
MOELITH_HD inline Pipeline pipeline_of(const Sizes& sizes, std::int32_t slot, std::int64_t blocks) {
  Pipeline p;
  p.blocks = blocks;
  p.group = sizes.tile.group_blocks;
  p.raster = sizes.tile.raster_blocks > 0 ? min_of(sizes.tile.raster_blocks, p.group) : p.group;
  const bool forward = sizes.direction == Direction::forward;
  p.stage[0] = Stage::gate_up;
  p.columns[0] = forward || sizes.recompute ? sizes.gate_up_tiles(slot) : 0;
  p.stage[1] = forward ? Stage::down : Stage::down_dgrad;
  p.columns[1] = forward ? sizes.hidden_tiles() : sizes.down_dgrad_tiles(slot);
  p.stage[2] = Stage::gate_up_dgrad;
  p.columns[2] = !forward && sizes.want_dx ? sizes.hidden_tiles() : 0;
  return p;
}

MOELITH_HD inline Pipeline pipeline_of(const Pass& pass, std::int32_t slot) {
  const Sizes& sizes = pass.sizes;
  return pipeline_of(sizes, slot,
                     sizes.is_shared(slot) ? ceil_div(*pass.layout.valid_tokens, sizes.tile.row_block) : pass.routed_blocks());
}

// A routed tile of row block `block`, counted over all routed experts.
MOELITH_HD inline Tile routed_tile(const Pass& pass, Stage stage, std::int64_t block, std::int32_t column) {
  const std::int64_t* block_begin = pass.layout.block_begin;
  std::int32_t low = 0, high = pass.sizes.local_experts;  // the last expert with block_begin <= block has that block
  while (high - low > 1) {
    const std::int32_t middle = (low + high) >> 1;
    if (block_begin[middle] <= block) low = middle; else high = middle;
  }
  return {stage, low, block - block_begin[low], column};
}

// Weight and bias gradient tiles of one expert slot, in this order.
struct WeightGradientTiles {
  std::int64_t gate_up_rows, gate_up_columns, down_rows, down_columns, gate_up_bias, down_bias;
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

MOELITH_HD inline std::int64_t weight_gradient_tile_count(const Sizes& sizes) {
  std::int64_t count = 0;
  if (sizes.local_experts > 0) count += sizes.local_experts * weight_gradient_tiles(sizes, 0).size();
  for (std::int32_t s = 0; s < sizes.shared_experts; ++s) {
    count += weight_gradient_tiles(sizes, sizes.local_experts + s).size();
  }
  return count;
}

MOELITH_HD inline Tile weight_gradient_tile(const Sizes& sizes, std::int64_t index) {
  std::int32_t slot = 0;
  if (sizes.local_experts > 0) {
    const std::int64_t per_expert = weight_gradient_tiles(sizes, 0).size();
    const std::int64_t routed = per_expert * sizes.local_experts;
    slot = static_cast<std::int32_t>(index < routed ? quotient(index, per_expert) : sizes.local_experts);
    index -= index < routed ? slot * per_expert : routed;
  }
  while (sizes.is_shared(slot) && index >= weight_gradient_tiles(sizes, slot).size()) {
    index -= weight_gradient_tiles(sizes, slot).size();
    ++slot;
  }
  const WeightGradientTiles tiles = weight_gradient_tiles(sizes, slot);
  const std::int64_t gate_up = tiles.gate_up_rows * tiles.gate_up_columns, down = tiles.down_rows * tiles.down_columns;
  if (index < gate_up) {
    return {Stage::gate_up_wgrad, slot, quotient(index, tiles.gate_up_columns),
            std::int32_t(remainder_of(index, tiles.gate_up_columns))};
  }
  index -= gate_up;
  if (index < down) {
    return {Stage::down_wgrad, slot, quotient(index, tiles.down_columns),
            std::int32_t(remainder_of(index, tiles.down_columns))};
  }
  index -= down;
  return {index < tiles.gate_up_bias ? Stage::gate_up_bias_grad : Stage::down_bias_grad, slot, 0, 0};
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
  for (std::int32_t s = 0; s < sizes.shared_experts; ++s) count += pipeline_of(pass, sizes.local_experts + s).size();
  return count;
}

MOELITH_HD inline std::int64_t tile_count(const Pass& pass) {
  const Sizes& sizes = pass.sizes;
  std::int64_t count = prologue_tiles(pass);
  if (sizes.has_transfers()) {
    if (sizes.direction == Direction::forward) count += sizes.local_experts;
    count += pass.layout.chunk_begin[sizes.ranks];
  }
  if (sizes.local_experts > 0) count += pipeline_of(pass, 0).size();
  count += combine_tiles(sizes);
  if (sizes.direction == Direction::backward) count += weight_gradient_tile_count(sizes);
  return count;
}

// At most so many tiles, whatever the routing.
inline std::int64_t max_tile_count(const Sizes& sizes) {
  std::int64_t count = combine_tiles(sizes);
  if (sizes.has_transfers()) count += ceil_div(sizes.tokens, sizes.chunk_tokens) + 1 + sizes.local_experts + sizes.ranks * sizes.max_chunks;
  if (sizes.local_experts > 0) count += pipeline_of(sizes, 0, sizes.max_row_blocks).size();
  for (std::int32_t s = 0; s < sizes.shared_experts; ++s) {
    count += pipeline_of(sizes, sizes.local_experts + s, sizes.shared_row_blocks()).size();
  }
  if (sizes.direction == Direction::backward) count += weight_gradient_tile_count(sizes);
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
    const Pipeline p = pipeline_of(pass, sizes.local_experts + s);
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
  if (sizes.local_experts > 0) {
    const Pipeline p = pipeline_of(pass, 0);
    if (index < p.size()) {
      Stage stage = Stage::gate_up;
      std::int64_t block = 0;
      std::int32_t column = 0;
      p.decode(index, stage, block, column);
      return routed_tile(pass, stage, block, column);
    }
    index -= p.size();
  }
  const std::int64_t combine = combine_tiles(sizes);
  if (sizes.direction == Direction::forward) return combine_tile(sizes, index);
  // Combine moves bytes and weight gradients compute: among n tiles, c of them combine, the i-th is one if c i / n
  // passes an integer there.
  const std::int64_t total = combine + weight_gradient_tile_count(sizes);
  const std::int64_t combines_before = wide_quotient(combine * index, total);
  if (wide_quotient(combine * (index + 1), total) > combines_before) return combine_tile(sizes, combines_before);
  return weight_gradient_tile(sizes, index - combines_before);
}

// The rows of a tile of a row-blocked stage.
MOELITH_HD inline RowRange tile_rows(const Pass& pass, const Tile& tile) {
  const RowRange all = pass.expert_rows(tile.expert);
  const std::int64_t begin = all.begin + tile.row_block * pass.sizes.tile.row_block;
  return {begin, min_of(begin + pass.sizes.tile.row_block, all.end)};
}

}  // namespace moelith::schedule
