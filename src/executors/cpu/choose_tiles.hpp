// The CPU executor's tile shapes. Results never depend on them; time does.
#pragma once

#include <cstdint>

#include "schedule/extents.hpp"

namespace moelith::executors::cpu {

// What a shape costs: B is converted and packed once for each row block, A once for each column tile, so large tiles
// spend less on that; and a worker that takes the last tile leaves the others without work for up to its length, so
// there shall be many. Measured on two Zen 3 cores, 256 rows an expert, H 512: tiles of 128 x 256 take 0.558 s, of
// 128 x 512 0.521 to 0.564 s, of 256 x 512 0.512 to 0.523 s.
//
// rows: routed rows of a call, of all ranks together; experts: that share them; hidden_size: H; workers: threads of a
// rank, the same number on every rank (ranks must choose alike, since they count each other's tiles);
// columns: as PlanOptions::tile_columns, 0 if it is chosen here.
inline schedule::TileShape choose_tiles(std::int64_t rows, std::int64_t experts, std::int64_t hidden_size, int workers,
                                        std::int32_t columns) {
  constexpr std::int64_t tiles_per_worker = 16;
  schedule::TileShape tile;
  const std::int64_t rows_of_expert = schedule::ceil_div(rows, experts);
  // Whether the stage with the fewest tiles has enough of them.
  auto enough = [&](std::int64_t row_block, std::int64_t tile_columns) {
    const std::int64_t tiles =
        experts * schedule::ceil_div(rows_of_expert, row_block) * schedule::ceil_div(hidden_size, tile_columns);
    return tiles >= tiles_per_worker * workers;
  };
  if (columns > 0) {
    tile.columns = columns;
  } else {
    tile.columns = enough(128, 512) ? 512 : 256;
  }
  tile.row_block = rows_of_expert > 128 && enough(256, tile.columns) ? 256 : 128;
  tile.wgrad_rows = columns > 0 ? columns : 256;
  tile.wgrad_columns = tile.columns;
  return tile;
}

}  // namespace moelith::executors::cpu
