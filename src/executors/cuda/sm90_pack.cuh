// Packed rows. Routed rows of x (and dY) are copied to where the copy engine finds them one after the other: row r of the
// routed rows at r * H. Who copies what:
//   - The rows that the first stage of the routed pipeline reads: its tile of row block b and column tile c of C has
//     beside it the c-th part of the rows of a block up to a group further (packed_beside). At first these are two blocks
//     for one, so that few have to be there before the first tile: those few (first_packed_blocks) are copied
//     beside the tiles of shared experts, and where these are few or none by all warps before anything else. A tile that copies
//     stands in the order before those that wait for it, and whoever takes it copies without waiting for anyone. So the
//     order of the schedule still makes progress.
//   - x in backward, which only the weight gradients read unless gate_up runs again: beside the tiles of gate_up_dgrad,
//     those of their own row block, so that the tiles of down_dgrad have dY's rows alone to take along.
// Rows of other ranks' tokens are read where they lie. A token with several rows here crosses the link once, or nearly so:
// beside a tile its row is copied from the first of them (FirstRow), if that one's block is packed by then, and otherwise
// from its rank like the first; nobody waits for the first. (To write the first to all of them at once had tiles wait at the
// start, when nearly each row is a first one.)
// What combine waits for says that the others have read this rank's rows of forward, and of dY; of x in backward they say
// it themselves, the last to copy for all (rows_pulled).
// The warp that hands on tiles copies, while the others load and compute: first it hands the tile on, then it copies, and
// of what it has copied it tells when it would next have to wait (Packer::publish), so that nobody waits for it in vain.
//
// What is there is counted in the high halves of counters whose low halves count tiles: rows in gate_up_done of their
// block; for x beside gate_up_dgrad, parts (one for each tile and block of the cluster) in down_dgrad_done.
//
// Where row buffers do not have room for all rows (schedule/extents.hpp), packed rows have two places, for rounds in turns, and x
// in backward comes with dY, since gate_up runs again. Beside tiles of a round no rows are packed but that round's and the next
// one's (packed_limit): the place is that of the round before, whose tiles are done, or a tile of this one would not have begun.
// What a limit holds back is packed beside the first block of the next round, still before the round that reads it. And each row is
// read from its rank: an earlier one of its token may have left its place.
#pragma once

#include "executors/cuda/sm90_ranks.cuh"

namespace moelith::executors::cuda::sm90 {

inline constexpr int packed_shift = 32;

// Whether x is packed beside gate_up_dgrad.
__device__ inline bool packs_x_later(const PassData& data) {
  const schedule::Sizes& sizes = data.pass.sizes;
  return sizes.direction == schedule::Direction::backward && !sizes.recompute && !sizes.has_rounds() && sizes.want_dx && data.packed_x;
}
// How many parts of a row block it then comes in: one for each tile and block of the cluster; and of all of them.
__device__ inline std::uint32_t packed_later(const schedule::Sizes& sizes) {
  return static_cast<std::uint32_t>(sizes.hidden_tiles()) * cluster_blocks;
}
__device__ inline std::int64_t pulled_parts(const PassData& data) {
  return packs_x_later(data) ? data.pass.routed_blocks() * packed_later(data.pass.sizes) : 0;
}
// Whether the tile reads rows that were packed ahead.
__device__ inline bool reads_packed(Stage stage) { return stage == Stage::gate_up || stage == Stage::down_dgrad; }

// Rows of the row block `block`, counted over all routed experts.
__device__ inline schedule::RowRange rows_of_block(const schedule::Pass& pass, std::int64_t block) {
  return schedule::tile_rows(pass, schedule::routed_tile(pass, Stage::gate_up, block, 0));
}

// Row blocks, counted over all routed experts, whose rows lie one after the other.
struct BlockRange {
  std::int64_t begin, end;
};
// The round that a row block is in, and where among the packed rows those of a round lie, from where they are counted: every
// other round in the same place.
__device__ inline std::int32_t round_of_block(const schedule::Pass& pass, std::int64_t block) {
  if (!pass.sizes.has_rounds()) return 0;
  return schedule::last_begun(pass.layout.round_block, pass.rounds(), block);
}
__device__ inline std::int64_t packed_from(const schedule::Pass& pass, std::int32_t round) {
  return pass.sizes.has_rounds() ? round % 2 * pass.sizes.round_rows - pass.layout.round_row[round] : 0;
}
// The end of what may be packed beside tiles of a round: they have waited for the round before, whose place the next one's
// rows take.
__device__ inline std::int64_t packed_limit(const schedule::Pass& pass, std::int32_t round) {
  if (!pass.sizes.has_rounds()) return pass.routed_blocks();
  return pass.layout.round_block[schedule::min_of(std::int64_t(round) + 2, std::int64_t(pass.rounds()))];
}
// Those packed before any tile of a routed expert.
__device__ inline BlockRange packed_first(const schedule::Pass& pass) {
  return {0, schedule::min_of(std::int64_t(first_packed_blocks), packed_limit(pass, 0))};
}
// Those packed beside the tiles of routed block `block`: of the first blocks two for each, until the lead is a group. A
// block is packed beside one of an earlier raster, all of whose tiles come before it: the first are a raster or more.
__device__ inline BlockRange packed_beside(const schedule::Pass& pass, std::int64_t block) {
  const std::int64_t first = first_packed_blocks, lead = schedule::max_of(first, std::int64_t(pass.sizes.tile.group_blocks));
  const std::int32_t round = round_of_block(pass, block);
  auto before = [&](std::int64_t b, std::int32_t r) {
    return schedule::min_of(schedule::min_of(first + 2 * b, lead + b), packed_limit(pass, r));
  };
  // Beside a round's first block also what its limit held back.
  const bool begins = pass.sizes.has_rounds() && round > 0 && block == pass.layout.round_block[round];
  return {before(block, begins ? round - 1 : round), before(block + 1, round)};
}
// The stage that reads x (dY) first, and how many tiles of it a row block of an expert slot has.
__device__ inline Stage first_reader(const schedule::Sizes& sizes, std::int32_t round) {
  return sizes.makes_pre_activation(round) ? Stage::gate_up : Stage::down_dgrad;
}
__device__ inline std::int64_t first_reader_tiles(const schedule::Sizes& sizes, std::int32_t slot, std::int32_t round) {
  return first_reader(sizes, round) == Stage::gate_up ? sizes.gate_up_tiles(slot) : sizes.down_dgrad_tiles(slot);
}
// Of the shared experts before slot `slot`, and of all of them.
__device__ inline std::int64_t shared_readers_before(const schedule::Pass& pass, std::int32_t slot) {
  std::int64_t tiles = 0;
  for (std::int32_t s = pass.sizes.local_experts; s < slot; ++s) tiles += first_reader_tiles(pass.sizes, s, 0);
  return tiles * schedule::ceil_div(*pass.layout.valid_tokens, pass.sizes.tile.row_block);
}
__device__ inline std::int64_t shared_readers(const schedule::Pass& pass) {
  return shared_readers_before(pass, pass.sizes.local_experts + pass.sizes.shared_experts);
}
// Whether they have the first rows beside them: not where they are so few that all would wait for them.
__device__ inline bool shared_readers_pack(const schedule::Pass& pass) {
  const std::int64_t readers = shared_readers(pass);
  return readers > 0 && readers >= packed_first(pass).end;
}
// Where part `part` of `parts` of the blocks' rows begins: each block is divided by itself.
struct PackedPlace {
  std::int64_t block, row;
};
__device__ inline PackedPlace packed_place(const schedule::Pass& pass, BlockRange blocks, std::int64_t part, std::int64_t parts) {
  const std::int64_t position = (blocks.end - blocks.begin) * part, block = blocks.begin + schedule::quotient(position, parts);
  if (block == blocks.end) return {block, rows_of_block(pass, block - 1).end};
  const schedule::RowRange rows = rows_of_block(pass, block);
  return {block, rows.begin + schedule::quotient(rows.size() * (position - (block - blocks.begin) * parts), parts)};
}

// What this warp has written is there for the copy engine of whoever sees what is released after this.
__device__ __forceinline__ void finish_packing() {
  fence_async_all();
  __threadfence();
  __syncwarp();
}

// The first rows, by all warps of the blocks that are there, or as many as have something to do: a block that
// starts late need not be waited for.
template <bool Ranks>
__device__ __forceinline__ void pack_first_rows(const PassData& data, const Peers& peers, const schedule::CounterMap& map,
                                                int warp, int lane) {
  const schedule::Pass& pass = data.pass;
  if (pass.sizes.local_experts == 0 || shared_readers_pack(pass)) return;
  constexpr int units = 16;  // of a block
  const std::int64_t blocks = packed_first(pass).end;
  if (warp * std::int64_t(gridDim.x) >= blocks * units) return;
  auto take = [&] {
    const unsigned long long unit = lane == 0 ? atomicAdd(data.counters.control + PassCounters::next_first_rows, 1ull) : 0;
    return static_cast<std::int64_t>(__shfl_sync(~0u, unit, 0));
  };
  const std::int64_t hidden = pass.sizes.hidden_size;
  auto copy = [&](const bfloat16* from, bfloat16* to) {
    constexpr int batch = 4;  // pieces of 16 bytes that a lane has on their way
#pragma unroll 1
    for (int column = lane * 8; column < hidden; column += batch * 256) {
      uint4 piece[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (column + i * 256 < hidden) piece[i] = __ldcg(reinterpret_cast<const uint4*>(from + column + i * 256));
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (column + i * 256 < hidden) __stcg(reinterpret_cast<uint4*>(to + column + i * 256), piece[i]);
      }
    }
  };
  bfloat16* x = packs_x_later(data) ? nullptr : data.packed_x;
  for (std::int64_t unit = take(); unit < blocks * units; unit = take()) {
    const schedule::RowRange rows = rows_of_block(pass, unit / units);
    const std::int64_t first = rows.begin + unit % units;
    const TokenOfRow<Ranks> mine(data, first + lane * units, rows.end);
    const std::int64_t place = Ranks ? packed_from(pass, round_of_block(pass, unit / units)) : 0;
    unsigned count = 0;
#pragma unroll 1
    for (std::int64_t row = first; row < rows.end; row += units, ++count) {
      const TokenOfRow<Ranks> from = mine.of_lane(static_cast<int>(count));
      if (x) copy(from.x(data, peers), x + (row + place) * hidden);
      if (data.packed_dy) copy(from.dy(data, peers), data.packed_dy + (row + place) * hidden);
    }
    if (count == 0) continue;
    finish_packing();
    if (lane == 0) {
      add_release(data.counters.local + map.gate_up_done + unit / units,
                  static_cast<unsigned long long>(count) << packed_shift);
    }
  }
}

// Where the token of row `row` is to be copied from: where it lies, or the first row that it has here, if that is known to be
// packed by now. later: of x beside gate_up_dgrad.
__device__ __forceinline__ TokenOfRow<true> nearest(const PassData& data, const Peers& peers, const schedule::CounterMap& map,
                                                    TokenOfRow<true> token, int row, bool later) {
  if (!data.first_row || token.rank == static_cast<unsigned>(data.pass.sizes.rank)) return token;
  const FirstRow first(__ldg(data.first_row + peers.first_token[token.rank] + token.token));
  if (first.row() >= row) return token;
  const unsigned long long* counter = data.counters.local + (later ? map.down_dgrad_done : map.gate_up_done) + first.block();
  const std::uint32_t packed = later ? packed_later(data.pass.sizes) : first.block_rows();
  if (load_acquire(counter) >> packed_shift < packed) return token;
  token.token = static_cast<unsigned>(first.row());
  token.rank = Peers::packed;
  return token;
}

// Rows beside tiles, by one warp through a piece of shared memory and the copy engine: many bytes under way, with few
// registers.
template <int N, bool Ranks>
class Packer {
 public:
  __device__ Packer(SharedMemory<N>& shared, int lane) : shared_(shared), lane_(lane) {}

  // What a tile has beside it: rows [row, row + rows), the first `first` of row block `block`, others of those after it.
  __device__ __forceinline__ void pack_blocks(Stage stage, int row, int rows, int block, int first) {
#pragma unroll 1
    while (true) {
      pack(stage, row, first, block);
      row += first, rows -= first;
      if (rows <= 0) break;
      first = min(rows, static_cast<int>(rows_of_block(shared_.data().pass, ++block).size()));
    }
  }

 private:
  // This block's share of rows [row, row + rows) of row block `block`.
  __device__ __forceinline__ void pack(Stage stage, int row, int rows, int block) {
    const PassData& data = shared_.data();
    const schedule::CounterMap& map = shared_.map();
    const bool later = stage == Stage::gate_up_dgrad;
    const bool x = data.packed_x && (later || !packs_x_later(data)), dy = data.packed_dy && !later;
    const int first = row + static_cast<int>(cluster_rank()), last = row + rows;
    const int count = last > first ? (last - first + cluster_blocks - 1) / cluster_blocks : 0;
    publish();
    if constexpr (Ranks) from_ = static_cast<int>(packed_from(data.pass, round_of_block(data.pass, block)));
    for (int begin = first; begin < last; begin += 32 * cluster_blocks) {
      if (x) copy<true>(begin, last);
      if (dy) copy<false>(begin, last);
    }
    counter_ = static_cast<int>(later ? map.down_dgrad_done : map.gate_up_done) + block;
    amount_ = later ? 1 : count;
    later_ = later;
  }

 public:
  // Tells of the last tile's rows, once they have arrived in memory: not at once, since that takes a while, but before
  // this warp waits for anything that might wait for them.
  __device__ __forceinline__ void publish() {
    if (amount_ == 0) return;
    bulk_wait();
    finish_packing();
    if (lane_ == 0) {
      add_release(shared_.data().counters.local + counter_, static_cast<unsigned long long>(amount_) << packed_shift);
    }
    amount_ = 0;
    if (Ranks && later_) count_pulled();
  }
  // .. unless the barrier's phase is complete, so that there is nothing to wait for.
  __device__ __forceinline__ void publish_unless(std::uint32_t barrier, std::uint32_t parity) {
    if (amount_ != 0 && !__all_sync(~0u, barrier_complete(barrier, parity))) publish();
  }

 private:
  using Shape = BlockShape<N>;

  // One part of x is there; the last tells the other ranks.
  __device__ __forceinline__ void count_pulled() {
    const PassData& data = shared_.data();
    unsigned long long before = 0;
    if (lane_ == 0) before = atomicAdd(data.counters.control + PassCounters::pulled_parts, 1ull);
    if (__shfl_sync(~0u, before, 0) + 1 == static_cast<unsigned long long>(shared_.pulled_parts)) {
      tell_rows_pulled(data, shared_.peers(), lane_);
    }
  }

  // Rows first, first + cluster_blocks, .. before last, 32 at most, of x or of dY. They go in pieces, each by a lane, some at a
  // time ("a lot"): while one lot is stored from where it has come to, the next is on its way.
  template <bool OfX>
  __device__ __forceinline__ void copy(int first, int last) {
    const PassData& data = shared_.data();
    const int hidden = static_cast<int>(data.pass.sizes.hidden_size), mine = first + lane_ * cluster_blocks;
    // As large pieces as there may be: the copy engine's time goes by pieces.
    const int pieces = (2 * hidden + Shape::pack_piece - 1) / Shape::pack_piece, elements = ((hidden + pieces - 1) / pieces + 7) / 8 * 8,
              lot = min(32, Shape::pack_bytes / 2 / (2 * elements));
    TokenOfRow<Ranks> own(data, mine, last);
    if constexpr (Ranks) {
      if (mine < last) own = nearest(data, shared_.peers(), shared_.map(), own, mine, OfX && packs_x_later(data));
      __syncwarp();
      fence_async_all();  // the copy engine reads what counters have told of
    }
    const bfloat16* const from = OfX ? own.x(data, shared_.peers()) : own.dy(data, shared_.peers());
    bfloat16* const to = (OfX ? data.packed_x : data.packed_dy) + (first + (Ranks ? from_ : 0)) * std::int64_t(hidden);
    const int all = min(32, (last - first + cluster_blocks - 1) / cluster_blocks) * pieces;
    // This lane's piece of the lot that begins with piece `begin`: of which row, and which elements of it.
    struct Piece {
      int row, column, bytes;
    };
    auto piece_of = [&](int begin) {
      const int n = begin + lane_, row = n / pieces, column = (n - row * pieces) * elements;
      return Piece{row & 31, column, lane_ < lot && n < all ? 2 * min(elements, hidden - column) : 0};
    };
    auto place = [&](int which) { return shared_address(shared_.packing) + (which * lot + lane_) * (2 * elements); };
    auto ask = [&](int begin, int which) {
      const Piece piece = piece_of(begin);
      const auto row = reinterpret_cast<const bfloat16*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), piece.row));
      const std::uint32_t full = shared_address(&shared_.packing_full[which]), bytes = __reduce_add_sync(~0u, piece.bytes);
      if (lane_ == 0) barrier_arrive_expect(full, bytes);
      __syncwarp();
      if (piece.bytes > 0) bulk_load(place(which), row + piece.column, piece.bytes, full);
    };
    ask(0, 0);
    if (lot < all) ask(lot, 1);
#pragma unroll 1
    for (int begin = 0, which = 0; begin < all; begin += lot, which ^= 1) {
      const Piece piece = piece_of(begin);
      barrier_wait(shared_address(&shared_.packing_full[which]), parity_ >> which & 1);
      parity_ ^= 1u << which;
      if (piece.bytes > 0) bulk_store(to + piece.row * cluster_blocks * std::int64_t(hidden) + piece.column, place(which), piece.bytes);
      bulk_commit();
      bulk_wait_read();
      __syncwarp();
      if (begin + 2 * lot < all) ask(begin + 2 * lot, which);
    }
  }

  SharedMemory<N>& shared_;
  const int lane_;
  std::uint32_t parity_ = 0;  // a bit for each of the two places of lots
  int counter_ = 0, amount_ = 0;  // not told yet
  bool later_ = false;            // of x, beside gate_up_dgrad
  int from_ = 0;                  // packed_from of the block's round, of several ranks
};

}  // namespace moelith::executors::cuda::sm90
