// How large everything in a pass is: what the host knows beforehand (Sizes), and what only the routing of this call
// decides (Layout, in the memory of the device that runs the pass).
//
// Words used by the whole schedule:
//   expert slot   index of an expert on this rank: the L routed local experts first, in ascending global id, then the S
//                 shared experts. A shared expert's rows are this rank's valid tokens in order.
//   row           one (token, routed expert) pair of a local expert. An expert's rows stand in global token order: by
//                 source rank, then token, then slot j. Experts follow each other without padding.
//   row block     up to `row_block` consecutive rows of one expert; blocks never cross experts.
//   round         consecutive row blocks of the routed experts whose rows fit together into the row buffers of a rank,
//                 as many as fit. Where these have room for all rows that may come (Sizes::round_rows) there is one.
//   chunk         `chunk_tokens` consecutive tokens of one rank, the unit in which rows travel between ranks.
#pragma once

#include <cstdint>

#include "moelith/limits.hpp"
#include "numerics/host_device.hpp"

namespace moelith::schedule {

inline constexpr std::int32_t max_shared_experts = limits::shared_experts;

// a / b for a >= 0, b > 0, below 2^31: tiles, rows and columns of a pass are counted in 32 bits. A GPU has no instruction for
// it; 32 bits take a tenth of the time of 64, and a fraction of the code.
MOELITH_HD constexpr std::int64_t quotient(std::int64_t a, std::int64_t b) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
#else
  return a / b;
#endif
}
// The same for any a.
MOELITH_HD constexpr std::int64_t wide_quotient(std::int64_t a, std::int64_t b) {
#if defined(__CUDA_ARCH__)
  if (((a | b) >> 31) == 0) return quotient(a, b);
  std::uint64_t rest = 0, result = 0;  // bit by bit: rare, and a tenth of the code
#pragma unroll 1
  for (int bit = 62; bit >= 0; --bit) {
    rest = rest << 1 | (a >> bit & 1);
    result <<= 1;
    if (rest >= std::uint64_t(b)) rest -= b, result |= 1;
  }
  return static_cast<std::int64_t>(result);
#else
  return a / b;
#endif
}
MOELITH_HD constexpr std::int64_t remainder_of(std::int64_t a, std::int64_t b) { return a - quotient(a, b) * b; }
MOELITH_HD constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return quotient(a + b - 1, b); }
MOELITH_HD constexpr std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
MOELITH_HD constexpr std::int64_t max_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

enum class Direction : std::uint8_t { forward, backward };

// Tile shapes of an executor. Results never depend on them.
struct TileShape {
  std::int32_t row_block = 128;      // rows of a GEMM tile
  std::int32_t columns = 128;        // output columns of a GEMM tile: of I in gate_up and down_dgrad (a multiple of 64,
                                     // so that dprob's groups are never cut), of H in down and gate_up_dgrad
  std::int32_t gate_up = 0;          // columns of I in gate_up, and in down_dgrad (a multiple of 64), where those tiles
  std::int32_t down_dgrad = 0;       // are narrower; 0: as `columns`
  std::int32_t wgrad_rows = 128;     // rows and columns of a weight gradient tile
  std::int32_t wgrad_columns = 128;
  std::int32_t token_block = 64;     // tokens of a combine tile
  std::int32_t group_blocks = 32;    // row blocks that pass from one stage to the next together (see tile_order.hpp)
  std::int32_t raster_blocks = 0;    // within a group, row blocks whose column tiles come together: at most so many of an
                                     // expert's; 0: all of the group
};

// Everything that is fixed before the call's routing is known. Plain data, copied to the device as it is.
struct Sizes {
  Direction direction = Direction::forward;
  std::int32_t ranks = 1, rank = 0;
  bool peer_access = false;                              // several ranks read each other's tables and rows where they
                                                         // lie, and exchange tables before a pass begins
  std::int32_t local_experts = 0;                        // L
  std::int32_t shared_experts = 0;                       // S
  std::int32_t top_k = 1;
  std::int64_t hidden_size = 0;                          // H
  std::int64_t intermediate_size = 0;                    // I
  std::int64_t shared_intermediate_size[max_shared_experts] = {};
  std::int32_t gate_up_factor = 2;                       // rows of gate_up_proj per intermediate column: 2, or 1 ungated
  std::int64_t tokens = 0;                               // T of this rank
  std::int32_t chunk_tokens = 64;
  std::int64_t max_chunks = 0;                           // chunks of the rank with the largest max_tokens
  std::int64_t max_row_blocks = 0;                       // upper bound of this rank's routed row blocks
  std::int64_t round_rows = 0;                           // routed rows that row buffers have room for, at least a row
                                                         // block; 0: for all that may come (set_room)
  std::int64_t max_rounds = 0;                           // upper bound of this rank's rounds; 0 with round_rows = 0
  TileShape tile;

  // Backward only: which results are wanted. down_dgrad always runs, since all of them need it.
  bool recompute = false;                                // gate_up runs again before down_dgrad
  bool want_dx = true;
  bool want_gate_up_wgrad = true, want_down_wgrad = true;
  bool want_gate_up_bias_grad = false, want_down_bias_grad = false;

  // Row buffers have room for `room` of the up to `rows` routed rows that may come here, and for a row block at least. Two
  // neighbouring rounds have more rows than that together, since the first block of the second did not fit into the first.
  void set_room(std::int64_t rows, std::int64_t room) {
    room = max_of(room, tile.row_block);
    round_rows = room < rows ? room : 0;
    max_rounds = room < rows ? 2 * quotient(rows, room + 1) + 1 : 0;
  }
  // Whether there may be more than one round.
  MOELITH_HD constexpr bool has_rounds() const { return round_rows > 0; }
  // Whether a pass makes the pre-activation of a round's routed rows: backward finds that of the first round kept.
  MOELITH_HD bool makes_pre_activation(std::int32_t round) const {
    return direction == Direction::forward || recompute || (has_rounds() && round > 0);
  }

  // Whether tables and rows travel by tiles of their own: publish, layout, collect, dispatch.
  MOELITH_HD bool has_transfers() const { return ranks > 1 && !peer_access; }
  MOELITH_HD std::int32_t expert_slots() const { return local_experts + shared_experts; }
  MOELITH_HD bool is_shared(std::int32_t slot) const { return slot >= local_experts; }
  MOELITH_HD std::int64_t width(std::int32_t slot) const {
    return is_shared(slot) ? shared_intermediate_size[slot - local_experts] : intermediate_size;
  }
  // Column tiles of a stage whose output has I columns (I of that expert), or H.
  MOELITH_HD std::int32_t down_dgrad_columns() const { return tile.down_dgrad > 0 ? tile.down_dgrad : tile.columns; }
  MOELITH_HD std::int64_t down_dgrad_tiles(std::int32_t slot) const { return ceil_div(width(slot), down_dgrad_columns()); }
  MOELITH_HD std::int32_t gate_up_columns() const { return tile.gate_up > 0 ? tile.gate_up : tile.columns; }
  MOELITH_HD std::int64_t gate_up_tiles(std::int32_t slot) const { return ceil_div(width(slot), gate_up_columns()); }
  MOELITH_HD std::int64_t hidden_tiles() const { return ceil_div(hidden_size, tile.columns); }
  MOELITH_HD std::int64_t token_blocks() const { return ceil_div(tokens, tile.token_block); }
  // Row blocks reserved for each shared expert, whatever the number of valid tokens.
  MOELITH_HD std::int64_t shared_row_blocks() const { return ceil_div(tokens, tile.row_block); }
};

// What the routing of this call decides. The arrays lie in the saved buffer of the call, since backward needs the same.
struct Layout {
  std::int64_t* valid_tokens;   // [1] valid tokens of this rank, at most T
  std::int64_t* tokens_of_rank; // [R] tokens of each rank
  std::int64_t* source_begin;   // [L, R + 1] first row that came from rank r; [e, R] is the end of expert e's rows
  std::int64_t* block_begin;    // [L + 1] first row block of each local expert; [L] is their number
  std::int64_t* chunk_begin;    // [R + 1] first dispatch tile of each source rank (this rank itself has none)
  std::int64_t* arrivals;       // [1] row blocks, over all ranks and their routed experts, that hold rows of this rank
  std::int64_t* rounds;         // [1] number of rounds, at least 1; this and the next two with Sizes::has_rounds only
  std::int64_t* round_block;    // [rounds + 1] first row block of each round, over all experts; then their number
  std::int64_t* round_row;      // [rounds + 1] first row of each round; then their number
  std::int32_t* row_route;      // [rows] t * k + j at the row's source rank

  // Number of int64 values that the arrays before row_route need together.
  static MOELITH_HD constexpr std::int64_t header_length(std::int32_t ranks, std::int32_t local_experts,
                                                         std::int64_t max_rounds = 0) {
    const std::int64_t rounds = max_rounds > 0 ? 1 + 2 * (max_rounds + 1) : 0;
    return 1 + ranks + std::int64_t(local_experts) * (ranks + 1) + (local_experts + 1) + (ranks + 1) + 1 + rounds;
  }
  static MOELITH_HD Layout at(std::int64_t* header, std::int32_t* row_route, std::int32_t ranks, std::int32_t local_experts,
                              std::int64_t max_rounds = 0) {
    Layout layout;
    layout.valid_tokens = header;
    layout.tokens_of_rank = layout.valid_tokens + 1;
    layout.source_begin = layout.tokens_of_rank + ranks;
    layout.block_begin = layout.source_begin + std::int64_t(local_experts) * (ranks + 1);
    layout.chunk_begin = layout.block_begin + local_experts + 1;
    layout.arrivals = layout.chunk_begin + ranks + 1;
    layout.rounds = layout.arrivals + 1;
    layout.round_block = layout.rounds + 1;
    layout.round_row = layout.round_block + max_rounds + 1;
    layout.row_route = row_route;
    return layout;
  }
};

struct RowRange {
  std::int64_t begin, end;
  MOELITH_HD std::int64_t size() const { return end - begin; }
};

// Sizes and Layout together: all that decoding a tile needs.
struct Pass {
  Sizes sizes;
  Layout layout;

  MOELITH_HD std::int64_t source_begin(std::int32_t expert, std::int32_t rank) const {
    return layout.source_begin[std::int64_t(expert) * (sizes.ranks + 1) + rank];
  }
  // All rows of an expert slot: indices into the routed rows, or tokens for a shared expert.
  MOELITH_HD RowRange expert_rows(std::int32_t slot) const {
    if (sizes.is_shared(slot)) return {0, *layout.valid_tokens};
    return {source_begin(slot, 0), source_begin(slot, sizes.ranks)};
  }
  MOELITH_HD std::int64_t routed_blocks() const { return layout.block_begin[sizes.local_experts]; }
  MOELITH_HD std::int32_t rounds() const { return sizes.has_rounds() ? static_cast<std::int32_t>(*layout.rounds) : 1; }
  // The rank that a routed row of an expert came from.
  MOELITH_HD std::int32_t source_rank(std::int32_t expert, std::int64_t row) const {
    std::int32_t rank = 0;
    while (row >= source_begin(expert, rank + 1)) ++rank;
    return rank;
  }
};

// Row blocks of `row_block` rows, counted from `expert_begin`, that hold at least one row of [begin, end).
MOELITH_HD constexpr std::int64_t blocks_touching(std::int64_t expert_begin, std::int64_t begin, std::int64_t end,
                                                  std::int64_t row_block) {
  return begin == end ? 0 : quotient(end - 1 - expert_begin, row_block) - quotient(begin - expert_begin, row_block) + 1;
}

// What the rows of some experts take up.
struct Extent {
  std::int64_t rows = 0, blocks = 0;
  // Of one expert that has `rows` rows.
  static MOELITH_HD constexpr Extent of(const Sizes& sizes, std::int64_t rows) {
    return {rows, ceil_div(rows, sizes.tile.row_block)};
  }
  MOELITH_HD constexpr Extent operator+(Extent other) const { return {rows + other.rows, blocks + other.blocks}; }
};

// Fills everything of a Layout but valid_tokens, tokens_of_rank (inputs here) and row_route.
// counts(rank, expert): routes of that rank's tokens to global expert `expert`; expert_rank[e]: the rank that holds it.
template <class Counts>
MOELITH_HD void fill_layout(const Sizes& sizes, const Layout& layout, std::int32_t num_experts,
                            const std::int32_t* expert_rank, Counts counts) {
  Extent all;
  std::int64_t arrivals = 0;
  std::int32_t local = 0, rounds = 1;
  if (sizes.has_rounds()) layout.round_block[0] = layout.round_row[0] = 0;
  for (std::int32_t e = 0; e < num_experts; ++e) {
    std::int64_t before = 0, mine_begin = 0, mine_end = 0;  // rows of this expert, wherever it lives
    const bool is_local = expert_rank[e] == sizes.rank;
    for (std::int32_t r = 0; r < sizes.ranks; ++r) {
      if (is_local) layout.source_begin[std::int64_t(local) * (sizes.ranks + 1) + r] = all.rows + before;
      const std::int64_t count = counts(r, e);
      if (r == sizes.rank) mine_begin = before, mine_end = before + count;
      before += count;
    }
    arrivals += blocks_touching(0, mine_begin, mine_end, sizes.tile.row_block);
    if (is_local) {
      layout.source_begin[std::int64_t(local) * (sizes.ranks + 1) + sizes.ranks] = all.rows + before;
      layout.block_begin[local] = all.blocks;
      // Where the last round has no room for the rest of the expert, the next one begins with the first block that does
      // not fit. A round that begins with the expert takes at least one: there is room for a block.
      while (sizes.has_rounds() && all.rows + before - layout.round_row[rounds - 1] > sizes.round_rows) {
        const std::int64_t fit = quotient(layout.round_row[rounds - 1] + sizes.round_rows - all.rows, sizes.tile.row_block);
        layout.round_block[rounds] = all.blocks + fit;
        layout.round_row[rounds] = all.rows + fit * sizes.tile.row_block;
        ++rounds;
      }
      all = all + Extent::of(sizes, before);
      ++local;
    }
  }
  layout.block_begin[local] = all.blocks;
  if (sizes.has_rounds()) {
    *layout.rounds = rounds;
    layout.round_block[rounds] = all.blocks;
    layout.round_row[rounds] = all.rows;
  }
  *layout.arrivals = arrivals;
  std::int64_t chunk = 0;
  for (std::int32_t r = 0; r < sizes.ranks; ++r) {
    layout.chunk_begin[r] = chunk;
    if (r != sizes.rank) chunk += ceil_div(layout.tokens_of_rank[r], sizes.chunk_tokens);
  }
  layout.chunk_begin[sizes.ranks] = chunk;
}

// The same of a single rank for one expert, so that threads can share the experts: `before` is the Extent of those before
// it. The last expert's thread fills what is not of one expert as well.
MOELITH_HD inline void fill_layout_of_expert(const Sizes& sizes, const Layout& layout, std::int32_t num_experts,
                                             std::int32_t expert, Extent before, std::int64_t rows) {
  const Extent after = before + Extent::of(sizes, rows);
  layout.source_begin[2 * std::int64_t(expert)] = before.rows;
  layout.source_begin[2 * std::int64_t(expert) + 1] = after.rows;
  layout.block_begin[expert] = before.blocks;
  if (expert + 1 < num_experts) return;
  layout.block_begin[num_experts] = *layout.arrivals = after.blocks;
  layout.chunk_begin[0] = layout.chunk_begin[1] = 0;  // nothing travels
}

}  // namespace moelith::schedule
