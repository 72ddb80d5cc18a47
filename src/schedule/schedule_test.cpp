// The schedule's promises, over random routings of 1 to 8 ranks that are simulated here: every tile once, every output
// element once, every input there when a tile has waited for what it names, counters that end at what is waited for,
// and progress for any number of workers a rank and any interleaving.
//
// The oracle knows which matrix each stage reads and writes, and nothing of how indices, blocks or counters are made.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "schedule/dependencies.hpp"
#include "schedule/extents.hpp"
#include "schedule/tile_order.hpp"

namespace moelith::schedule {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int routings = 100;
#else
constexpr int routings = 2500;
#endif

using Random = std::mt19937_64;

std::int64_t below(Random& random, std::int64_t end) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
}
template <class T>
T one_of(Random& random, std::initializer_list<T> values) {
  return values.begin()[below(random, static_cast<std::int64_t>(values.size()))];
}

// A batch and its routing, before anything of the schedule has seen it.
struct Routing {
  std::int32_t ranks = 1, experts = 1, top_k = 1;
  std::vector<std::int32_t> expert_rank;       // [E]
  std::vector<std::int64_t> tokens, valid;     // [R]
  std::vector<std::vector<std::int32_t>> ids;  // [R] of [T, k]
};

Routing random_routing(Random& random) {
  Routing r;
  r.ranks = random() % 3 ? static_cast<std::int32_t>(1 + below(random, 8)) : 1;
  const bool many = random() % 25 == 0;
  r.experts = many ? 512 : static_cast<std::int32_t>(1 + below(random, 16));
  r.top_k = static_cast<std::int32_t>(1 + below(random, std::min(r.experts, 16)));
  const int placement = static_cast<int>(random() % 3);
  for (std::int32_t e = 0; e < r.experts; ++e) {
    r.expert_rank.push_back(placement == 0   ? e * r.ranks / r.experts
                            : placement == 1 ? static_cast<std::int32_t>(below(random, r.ranks))
                                             : r.ranks - 1);  // ranks without an expert
  }
  const std::int64_t most = one_of<std::int64_t>(random, {1, 2, 7, 33, many ? 33 : 90});
  const int kind = static_cast<int>(random() % 4);
  const std::int32_t favourite = static_cast<std::int32_t>(below(random, r.experts));
  const std::uint64_t empty = one_of<std::uint64_t>(random, {0, 0, 20, 90});  // per cent of the slots
  for (std::int32_t rank = 0; rank < r.ranks; ++rank) {
    const std::int64_t t = random() % 5 == 0 ? below(random, 2) : below(random, most + 1);
    r.tokens.push_back(t);
    r.valid.push_back(random() % 4 == 0 ? below(random, t + 1) : t);
    std::vector<std::int32_t> ids, order(r.experts);
    for (std::int32_t e = 0; e < r.experts; ++e) order[e] = e;
    for (std::int64_t token = 0; token < t; ++token) {
      std::shuffle(order.begin(), order.end(), random);
      for (std::int32_t j = 0; j < r.top_k; ++j) {
        std::int32_t id = order[j];
        if (kind == 1) id = favourite;                                  // one expert takes all, even twice a token
        if (kind == 2) id = std::min<std::int32_t>(id, r.experts / 2);  // half of them empty
        if (random() % 100 < empty || token >= r.valid[rank]) id = -1;
        ids.push_back(id);
      }
    }
    r.ids.push_back(std::move(ids));
  }
  return r;
}

Sizes random_sizes(Random& random, const Routing& routing) {
  Sizes s;
  s.direction = random() % 2 ? Direction::forward : Direction::backward;
  s.ranks = routing.ranks;
  s.peer_access = random() % 3 == 0;
  s.top_k = routing.top_k;
  s.shared_experts = static_cast<std::int32_t>(random() % 4);
  s.hidden_size = 8 * (1 + below(random, 40));
  s.intermediate_size = 8 * (1 + below(random, 40));
  for (int i = 0; i < s.shared_experts; ++i) s.shared_intermediate_size[i] = 8 * (1 + below(random, 50));
  s.gate_up_factor = static_cast<std::int32_t>(1 + random() % 2);
  s.chunk_tokens = one_of(random, {1, 4, 64});
  s.tile.row_block = one_of(random, {4, 16, 64, 128});
  s.tile.columns = one_of(random, {64, 128, 192, 256});
  s.tile.gate_up = one_of(random, {0, 0, 64, 96, 128});
  s.tile.down_dgrad = one_of(random, {0, 0, 64, 128});
  s.tile.wgrad_rows = one_of(random, {32, 64, 128, 256});
  s.tile.wgrad_columns = one_of(random, {32, 64, 128, 256});
  s.tile.token_block = one_of(random, {1, 16, 64});
  s.tile.group_blocks = one_of(random, {1, 2, 3, 32, 1 << 30});
  s.tile.raster_blocks = one_of(random, {0, 0, 1, 2, 5, 64});
  if (random() % 2) s.round_rows = s.tile.row_block * (1 + below(random, 4)) + below(random, 3);
  if (s.direction == Direction::backward) {
    s.recompute = random() % 2;
    s.want_dx = s.ranks > 1 || random() % 4;
    s.want_gate_up_wgrad = random() % 3;
    s.want_down_wgrad = random() % 3;
    s.want_gate_up_bias_grad = random() % 2;
    s.want_down_bias_grad = random() % 2;
  }
  return s;
}

// A rank's pass, with the memory of its Layout, and counters as an executor has them.
struct Rank {
  Pass pass;
  CounterMap map;
  std::vector<std::int64_t> header;
  std::vector<std::int32_t> row_route;
  std::vector<std::int32_t> globals;                                     // global ids of local experts
  std::vector<std::vector<std::pair<std::int32_t, std::int32_t>>> rows;  // oracle: [L] of (source rank, route)
  std::vector<std::vector<std::int32_t>> round;                          // oracle: [L] of each row's round,
  std::vector<std::int32_t> round_before;                                // and of the last row before the expert
  std::int64_t room = 0;                                                 // rows that fit into a row buffer
  std::vector<Tile> tiles;
  std::vector<std::int64_t> counters[3];
  std::vector<std::int64_t> target[3];  // what the waits of tiles ask for; -1: not waited for

  std::int64_t rows_of(std::int32_t slot) const {
    if (slot < std::int32_t(rows.size())) return std::int64_t(rows[slot].size());
    return *pass.layout.valid_tokens;
  }
  std::int32_t round_of_row(std::int32_t slot, std::int64_t row) const {
    return slot < std::int32_t(rows.size()) ? round[slot][row] : 0;
  }
  // Again for a copy, whose memory is its own.
  void find_layout() {
    const Sizes& s = pass.sizes;
    pass.layout = Layout::at(header.data(), row_route.data(), s.ranks, s.local_experts, s.max_rounds);
  }
  // Blocks go into the present round while they fit.
  void make_rounds() {
    std::int64_t held = 0;
    std::int32_t now = 0;
    for (const auto& of_expert : rows) {
      round_before.push_back(now);
      auto& rounds = round.emplace_back();
      while (rounds.size() < of_expert.size()) {
        const auto block = std::min<std::int64_t>(pass.sizes.tile.row_block, of_expert.size() - rounds.size());
        if (held + block > room) held = 0, ++now;
        held += block;
        rounds.insert(rounds.end(), block, now);
      }
    }
  }
};

std::vector<Rank> make_ranks(const Routing& routing, const Sizes& sizes, std::int64_t spare_tokens) {
  std::vector<Rank> ranks(routing.ranks);
  std::int64_t all_tokens = 0, most = 0;
  for (std::int64_t t : routing.tokens) all_tokens += t + spare_tokens, most = std::max(most, t + spare_tokens);
  for (std::int32_t r = 0; r < routing.ranks; ++r) {
    Rank& rank = ranks[r];
    for (std::int32_t e = 0; e < routing.experts; ++e) {
      if (routing.expert_rank[e] != r) continue;
      rank.globals.push_back(e);
      auto& rows = rank.rows.emplace_back();
      for (std::int32_t source = 0; source < routing.ranks; ++source) {
        for (std::size_t route = 0; route < routing.ids[source].size(); ++route) {
          if (routing.ids[source][route] == e) rows.emplace_back(source, static_cast<std::int32_t>(route));
        }
      }
      for (const auto& row : rows) rank.row_route.push_back(row.second);
    }
    Sizes& s = rank.pass.sizes;
    s = sizes;
    s.rank = r;
    s.local_experts = static_cast<std::int32_t>(rank.globals.size());
    s.tokens = routing.tokens[r];
    s.max_chunks = ceil_div(most, s.chunk_tokens);
    s.max_row_blocks = all_tokens * s.top_k / s.tile.row_block + s.local_experts;
    // Ranks may have room for more or less.
    rank.room = sizes.round_rows > 0 ? sizes.round_rows * (1 + r % 2) : all_tokens * s.top_k;
    s.set_room(all_tokens * s.top_k, rank.room);
    rank.make_rounds();
    rank.header.assign(Layout::header_length(s.ranks, s.local_experts, s.max_rounds), -1);
    rank.find_layout();
    *rank.pass.layout.valid_tokens = routing.valid[r];
    std::copy(routing.tokens.begin(), routing.tokens.end(), rank.pass.layout.tokens_of_rank);
    fill_layout(s, rank.pass.layout, routing.experts, routing.expert_rank.data(),
                [&](std::int32_t source, std::int32_t e) {
                  return std::int64_t(std::count(routing.ids[source].begin(), routing.ids[source].end(), e));
                });
    rank.map = CounterMap::of(s);
    rank.counters[int(CounterArray::local)].assign(rank.map.local_size, 0);
    rank.counters[int(CounterArray::arrivals)].assign(rank.map.arrivals_size, 0);
    rank.counters[int(CounterArray::flags)].assign(rank.map.flags_size, 0);
    for (int a = 0; a < 3; ++a) rank.target[a].assign(rank.counters[a].size(), -1);
    const std::int64_t count = tile_count(rank.pass);
    EXPECT_LE(count, max_tile_count(s));
    for (std::int64_t i = 0; i < count; ++i) rank.tiles.push_back(tile_at(rank.pass, i));
  }
  return ranks;
}

// ---- the tiles that must be there

using Key = std::tuple<int, std::int64_t, std::int64_t, std::int64_t, std::int32_t>;
Key key_of(const Tile& tile) { return {int(tile.stage), tile.expert, tile.row_block, tile.column_block, tile.round}; }

std::vector<Key> expected_tiles(const Routing& routing, const Rank& rank) {
  const Sizes& s = rank.pass.sizes;
  std::vector<Key> keys;
  auto grid = [&](Stage stage, std::int64_t slot, std::int64_t rows, std::int64_t row_step, std::int64_t columns,
                  std::int64_t column_step, std::int32_t round = 0) {
    for (std::int64_t y = 0, i = 0; y < rows; y += row_step, ++i) {
      for (std::int64_t x = 0, j = 0; x < columns; x += column_step, ++j) {
        keys.emplace_back(int(stage), slot, i, j, round);
      }
    }
  };
  const bool forward = s.direction == Direction::forward;
  if (s.ranks > 1 && !s.peer_access) {
    grid(Stage::publish, 0, s.tokens, s.chunk_tokens, 1, 1);
    if (forward) keys.emplace_back(int(Stage::layout), 0, 0, 0, 0);
    for (std::int32_t e = 0; forward && e < s.local_experts; ++e) keys.emplace_back(int(Stage::collect), e, 0, 0, 0);
    for (std::int32_t r = 0; r < s.ranks; ++r) {
      if (r != s.rank) grid(Stage::dispatch, r, routing.tokens[r], s.chunk_tokens, 1, 1);
    }
  }
  for (std::int32_t slot = 0; slot < s.local_experts + s.shared_experts; ++slot) {
    const std::int64_t rows = rank.rows_of(slot);
    const std::int64_t width =
        slot < s.local_experts ? s.intermediate_size : s.shared_intermediate_size[slot - s.local_experts];
    auto blocks = [&](Stage stage, std::int64_t columns, std::int64_t column_step, std::int32_t from_round) {
      for (std::int64_t y = 0, i = 0; y < rows; y += s.tile.row_block, ++i) {
        const std::int32_t round = rank.round_of_row(slot, y);
        if (round < from_round) continue;
        for (std::int64_t x = 0, j = 0; x < columns; x += column_step, ++j) {
          keys.emplace_back(int(stage), slot, i, j, round);
        }
      }
    };
    blocks(Stage::gate_up, width, s.tile.gate_up ? s.tile.gate_up : s.tile.columns, forward || s.recompute ? 0 : 1);
    if (forward) {
      blocks(Stage::down, s.hidden_size, s.tile.columns, 0);
      continue;
    }
    blocks(Stage::down_dgrad, width, s.tile.down_dgrad ? s.tile.down_dgrad : s.tile.columns, 0);
    if (s.want_dx) blocks(Stage::gate_up_dgrad, s.hidden_size, s.tile.columns, 0);
    std::vector<std::int32_t> rounds;  // with rows of the expert; of one without any, that of the rows before it
    for (std::int64_t row = 0; row < rows; ++row) {
      if (rounds.empty() || rank.round_of_row(slot, row) != rounds.back()) rounds.push_back(rank.round_of_row(slot, row));
    }
    if (rounds.empty()) rounds.push_back(slot < s.local_experts ? rank.round_before[slot] : 0);
    for (std::int32_t round : rounds) {
      if (s.want_gate_up_wgrad) {
        grid(Stage::gate_up_wgrad, slot, s.gate_up_factor * width, s.tile.wgrad_rows, s.hidden_size,
             s.tile.wgrad_columns, round);
      }
      if (s.want_down_wgrad) {
        grid(Stage::down_wgrad, slot, s.hidden_size, s.tile.wgrad_rows, width, s.tile.wgrad_columns, round);
      }
      if (s.want_gate_up_bias_grad) keys.emplace_back(int(Stage::gate_up_bias_grad), slot, 0, 0, round);
      if (s.want_down_bias_grad) keys.emplace_back(int(Stage::down_bias_grad), slot, 0, 0, round);
    }
  }
  grid(Stage::combine, 0, s.tokens, s.tile.token_block, s.hidden_size, s.tile.columns);
  std::sort(keys.begin(), keys.end());
  return keys;
}

// ---- what tiles read and write

// How often each element of a matrix was written; columns in units of 8, since every width and tile is a multiple of
// it.
class Written {
 public:
  Written() = default;
  Written(std::int64_t rows, std::int64_t columns) : columns_(columns / 8), counts_(rows * columns_, 0) {}
  void add(std::int64_t row, std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin / 8; c < std::min(end / 8, columns_); ++c) ++counts_.at(row * columns_ + c);
  }
  bool all(std::int64_t row, std::int64_t begin, std::int64_t end) const {
    for (std::int64_t c = begin / 8; c < std::min(end / 8, columns_); ++c) {
      if (counts_.at(row * columns_ + c) == 0) return false;
    }
    return true;
  }
  bool all(std::int64_t row) const { return all(row, 0, columns_ * 8); }
  // Whether every element of the row was written that many times.
  bool row_is(std::int64_t row, int times) const {
    return std::all_of(counts_.begin() + row * columns_, counts_.begin() + (row + 1) * columns_,
                       [&](int n) { return n == times; });
  }
  bool is(int times) const {
    return std::all_of(counts_.begin(), counts_.end(), [&](int n) { return n == times; });
  }

 private:
  std::int64_t columns_ = 0;
  std::vector<std::uint8_t> counts_;
};

// A buffer of routed rows, whose places are used again and again: which row's results lie in each element.
class Places {
 public:
  struct Content {
    std::int32_t expert = -1;
    std::int64_t row = -1;
    bool final = false;  // the activation in forward, dZ in backward; before that the pre-activation, made again
    bool operator==(const Content&) const = default;
  };
  Places() = default;
  Places(std::int64_t rows, std::int64_t columns) : columns_(columns / 8), contents_(rows * columns_) {}
  void put(std::int64_t place, std::int64_t begin, std::int64_t end, Content content) {
    for (std::int64_t c = begin / 8; c < std::min(end / 8, columns_); ++c) contents_.at(place * columns_ + c) = content;
  }
  bool have(std::int64_t place, std::int64_t begin, std::int64_t end, Content content) const {
    for (std::int64_t c = begin / 8; c < std::min(end / 8, columns_); ++c) {
      if (!(contents_.at(place * columns_ + c) == content)) return false;
    }
    return true;
  }

 private:
  std::int64_t columns_ = 0;
  std::vector<Content> contents_;
};

struct Memory {                                                                      // of one rank
  std::vector<Written> gate_up, down_dgrad, shared_rows, gate_up_wgrad, down_wgrad;  // by slot
  std::vector<int> gate_up_bias, down_bias, collected;
  Written slots, out, window;     // [T k, H], [T, H], [T, 8]
  std::vector<Written> received;  // by source rank, [T, 8]
  Places held;                    // [room, I]: activation; in backward dZ and what lies beside it
  std::map<Key, std::int64_t> sums[2];  // of the expert that goes on in the next round: rows that a tile has summed
  std::vector<int> dprob;         // [T k]: columns of I, in units of 8, that have been written for a route
  int layout = 0;
};

class Oracle {
 public:
  // sum_places: 1 is a fault to be caught.
  Oracle(const Routing& routing, std::vector<Rank>& ranks, std::int32_t sum_places = 2)
      : routing_(routing), ranks_(ranks), memory_(ranks.size()), sum_places_(sum_places) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const Sizes& s = ranks[r].pass.sizes;
      Memory& m = memory_[r];
      for (std::int32_t slot = 0; slot < s.local_experts + s.shared_experts; ++slot) {
        const std::int64_t rows = ranks[r].rows_of(slot), width = width_of(s, slot);
        m.gate_up.emplace_back(rows, width);
        m.down_dgrad.emplace_back(rows, width);
        m.shared_rows.emplace_back(slot < s.local_experts ? 0 : rows, s.hidden_size);
        m.gate_up_wgrad.emplace_back(s.gate_up_factor * width, s.hidden_size);
        m.down_wgrad.emplace_back(s.hidden_size, width);
      }
      m.gate_up_bias.assign(m.gate_up.size(), 0);
      m.down_bias.assign(m.gate_up.size(), 0);
      m.collected.assign(s.local_experts, 0);
      m.slots = Written(s.tokens * s.top_k, s.hidden_size);
      m.out = Written(s.tokens, s.hidden_size);
      m.window = Written(s.tokens, 8);
      for (std::int64_t t : routing.tokens) m.received.emplace_back(t, 8);
      m.dprob.assign(s.tokens * s.top_k, 0);
      std::int64_t rows = 0;
      for (const auto& of_expert : ranks[r].rows) rows += std::int64_t(of_expert.size());
      m.held = Places(std::min(rows, ranks[r].room), s.intermediate_size);
    }
  }

  // Whether all that a tile reads is there. Called when its waits have been satisfied, and again when it ends: nobody may
  // write there in between.
  bool inputs_there(int rank, const Tile& tile) const {
    const Rank& here = ranks_[rank];
    const Memory& m = memory_[rank];
    const Sizes& s = here.pass.sizes;
    const bool forward = s.direction == Direction::forward;
    switch (tile.stage) {
      case Stage::publish: return true;
      case Stage::layout: return std::all_of(tables.begin(), tables.end(), [](bool there) { return there; });
      case Stage::collect: return m.layout == 1;
      case Stage::dispatch:
        for (std::int64_t t = tile.row_block * s.chunk_tokens;
             t < std::min((tile.row_block + 1) * s.chunk_tokens, routing_.tokens[tile.expert]); ++t) {
          if (!memory_[tile.expert].window.all(t)) return false;
        }
        return true;
      case Stage::gate_up: return !forward || tokens_there(rank, tile);
      case Stage::down: return rows_there(m.gate_up[tile.expert], tile, s) && rows_held(rank, tile, true);
      case Stage::down_dgrad: {
        if (!tokens_there(rank, tile)) return false;
        const std::int64_t begin = tile.column_block * std::int64_t(s.down_dgrad_columns());
        for (std::int64_t row = first_row(tile, s); s.recompute && row < last_row(here, tile); ++row) {
          if (!m.gate_up[tile.expert].all(row, begin, begin + s.down_dgrad_columns())) return false;
        }
        // The pre-activation of the first round has a buffer of its own, kept by forward or made again.
        return tile.round == 0 || rows_held(rank, tile, false, begin, begin + s.down_dgrad_columns());
      }
      case Stage::gate_up_dgrad: return rows_there(m.down_dgrad[tile.expert], tile, s) && rows_held(rank, tile, true);
      case Stage::gate_up_wgrad:
      case Stage::down_wgrad:
      case Stage::gate_up_bias_grad:
      case Stage::down_bias_grad:
      {
        const auto [begin, end] = rows_of_round(here, tile);
        for (std::int64_t row = begin; row < end; ++row) {
          if (!m.down_dgrad[tile.expert].all(row) || !token_there(rank, tile.expert, row)) return false;
          if (!row_held(rank, tile, row, true, 0, s.intermediate_size)) return false;
        }
        if (begin == 0) return true;
        const auto& sums = m.sums[sum_place(tile.round - 1) % sum_places_];
        const auto sum = sums.find(key_of_sum(tile));
        return sum != sums.end() && sum->second == begin;
      }
      case Stage::combine: {
        const std::int64_t begin = tile.column_block * std::int64_t(s.tile.columns), end = begin + s.tile.columns;
        for (std::int64_t t = tile.row_block * s.tile.token_block;
             t < std::min((tile.row_block + 1) * s.tile.token_block, routing_.valid[rank]); ++t) {
          for (std::int32_t j = 0; j < s.top_k; ++j) {
            const std::int64_t route = t * s.top_k + j;
            if (routing_.ids[rank][route] < 0) continue;
            if ((forward || s.want_dx) && !m.slots.all(route, begin, end)) return false;
            if (!forward && tile.column_block == 0 && m.dprob[route] * 8 < s.intermediate_size) return false;
          }
          for (std::int32_t slot = s.local_experts; slot < s.local_experts + s.shared_experts; ++slot) {
            if ((forward || s.want_dx) && !m.shared_rows[slot].all(t, begin, end)) return false;
            if (!forward && tile.column_block == 0 && !m.down_dgrad[slot].all(t)) return false;
          }
        }
        return true;
      }
    }
    return false;
  }

  // The tile has written what it owns.
  void write(int rank, const Tile& tile) {
    const Rank& here = ranks_[rank];
    Memory& m = memory_[rank];
    const Sizes& s = here.pass.sizes;
    auto chunk = [&](Written& to, std::int64_t tokens) {
      for (std::int64_t t = tile.row_block * s.chunk_tokens;
           t < std::min((tile.row_block + 1) * s.chunk_tokens, tokens); ++t)
        to.add(t, 0, 8);
    };
    auto rows = [&](Written& to, std::int64_t columns) {
      const std::int64_t begin = tile.column_block * columns;
      for (std::int64_t row = first_row(tile, s); row < last_row(here, tile); ++row)
        to.add(row, begin, begin + columns);
    };
    auto hold = [&](bool final, std::int64_t columns) {
      const std::int64_t begin = tile.column_block * columns;
      for (std::int64_t row = first_row(tile, s); tile.expert < s.local_experts && row < last_row(here, tile); ++row) {
        m.held.put(place_of(here, tile, row), begin, begin + columns, {tile.expert, row, final});
      }
    };
    // Whether the sum is complete; otherwise it is set aside, in the place of what was there.
    auto summed = [&] {
      const auto [begin, end] = rows_of_round(here, tile);
      if (end == here.rows_of(tile.expert)) return true;
      auto& sums = m.sums[sum_place(tile.round) % sum_places_];
      std::erase_if(sums, [&](const auto& sum) {
        return std::get<1>(sum.first) != tile.expert && std::get<0>(sum.first) == int(tile.stage) &&
               std::get<2>(sum.first) == tile.row_block && std::get<3>(sum.first) == tile.column_block;
      });
      sums[key_of_sum(tile)] = end;
      return false;
    };
    auto matrix = [&](Written& to, std::int64_t all_rows) {
      if (!summed()) return;
      const std::int64_t begin = tile.column_block * std::int64_t(s.tile.wgrad_columns);
      for (std::int64_t y = tile.row_block * s.tile.wgrad_rows;
           y < std::min((tile.row_block + 1) * s.tile.wgrad_rows, all_rows); ++y) {
        to.add(y, begin, begin + s.tile.wgrad_columns);
      }
    };
    switch (tile.stage) {
      case Stage::publish: return chunk(m.window, s.tokens);
      case Stage::layout: ++m.layout; return;
      case Stage::collect: ++m.collected.at(tile.expert); return;
      case Stage::dispatch: return chunk(m.received.at(tile.expert), routing_.tokens[tile.expert]);
      case Stage::gate_up:
        rows(m.gate_up.at(tile.expert), s.gate_up_columns());
        if (s.direction == Direction::forward) return hold(true, s.gate_up_columns());
        if (tile.round > 0) hold(false, s.gate_up_columns());
        return;
      case Stage::down_dgrad: {
        const std::int64_t columns = s.down_dgrad_columns();
        rows(m.down_dgrad.at(tile.expert), columns);
        hold(true, columns);
        const std::int64_t width = std::min(columns, s.intermediate_size - tile.column_block * columns);
        for (std::int64_t row = first_row(tile, s); tile.expert < s.local_experts && row < last_row(here, tile);
             ++row) {
          const auto [source, route] = here.rows[tile.expert][row];
          memory_[source].dprob[route] += static_cast<int>(width / 8);
        }
        return;
      }
      case Stage::down:
      case Stage::gate_up_dgrad: {
        if (tile.expert >= s.local_experts) return rows(m.shared_rows.at(tile.expert), s.tile.columns);
        const std::int64_t begin = tile.column_block * std::int64_t(s.tile.columns);
        // As an executor finds them: the tile's rows, the rank that each came from, and its route there.
        const RowRange range = tile_rows(here.pass, tile);
        for (std::int64_t row = range.begin; row < range.end; ++row) {
          const std::int32_t source = here.pass.source_rank(tile.expert, row);
          memory_.at(source).slots.add(here.pass.layout.row_route[row], begin, begin + s.tile.columns);
        }
        return;
      }
      case Stage::combine: {
        const std::int64_t begin = tile.column_block * std::int64_t(s.tile.columns);
        for (std::int64_t t = tile.row_block * s.tile.token_block;
             t < std::min((tile.row_block + 1) * s.tile.token_block, s.tokens); ++t) {
          m.out.add(t, begin, begin + s.tile.columns);
        }
        return;
      }
      case Stage::gate_up_wgrad:
        return matrix(m.gate_up_wgrad.at(tile.expert), s.gate_up_factor * width_of(s, tile.expert));
      case Stage::down_wgrad: return matrix(m.down_wgrad.at(tile.expert), s.hidden_size);
      case Stage::gate_up_bias_grad: m.gate_up_bias.at(tile.expert) += summed(); return;
      case Stage::down_bias_grad: m.down_bias.at(tile.expert) += summed(); return;
    }
  }

  // After the pass: everything that it promises was written once, nothing else at all.
  void expect_each_once(const std::string& what) const {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const Sizes& s = ranks_[r].pass.sizes;
      const Memory& m = memory_[r];
      const bool forward = s.direction == Direction::forward, several = s.ranks > 1 && !s.peer_access;
      for (std::int32_t slot = 0; slot < s.local_experts + s.shared_experts; ++slot) {
        const std::string where = what + ", rank " + std::to_string(r) + ", slot " + std::to_string(slot);
        for (std::int64_t row = 0; row < ranks_[r].rows_of(slot); ++row) {
          const bool made = forward || s.recompute || ranks_[r].round_of_row(slot, row) > 0;
          EXPECT_TRUE(m.gate_up[slot].row_is(row, made)) << where << ", row " << row;
        }
        EXPECT_TRUE(m.down_dgrad[slot].is(!forward)) << where;
        EXPECT_TRUE(m.shared_rows[slot].is(forward || s.want_dx)) << where;
        EXPECT_TRUE(m.gate_up_wgrad[slot].is(!forward && s.want_gate_up_wgrad)) << where;
        EXPECT_TRUE(m.down_wgrad[slot].is(!forward && s.want_down_wgrad)) << where;
        EXPECT_EQ(m.gate_up_bias[slot], !forward && s.want_gate_up_bias_grad) << where;
        EXPECT_EQ(m.down_bias[slot], !forward && s.want_down_bias_grad) << where;
      }
      for (std::size_t route = 0; route < routing_.ids[r].size(); ++route) {
        const bool there = routing_.ids[r][route] >= 0;
        EXPECT_TRUE(m.slots.row_is(std::int64_t(route), there && (forward || s.want_dx)))
            << what << ", rank " << r << ", route " << route;
        EXPECT_EQ(m.dprob[route] * 8, there && !forward ? s.intermediate_size : 0)
            << what << ", rank " << r << ", route " << route;
      }
      EXPECT_TRUE(m.out.is(1)) << what;
      EXPECT_TRUE(m.window.is(several)) << what;
      EXPECT_EQ(m.layout, several && forward) << what;
      for (int n : m.collected) EXPECT_EQ(n, several && forward) << what;
      for (std::int32_t source = 0; source < s.ranks; ++source) {
        EXPECT_TRUE(m.received[source].is(several && source != std::int32_t(r))) << what;
      }
    }
  }

  std::vector<bool> tables;  // [R] whether the rank's routing table is there for the others

 private:
  static std::int64_t width_of(const Sizes& s, std::int32_t slot) {
    return slot < s.local_experts ? s.intermediate_size : s.shared_intermediate_size[slot - s.local_experts];
  }
  static std::int64_t first_row(const Tile& tile, const Sizes& s) { return tile.row_block * s.tile.row_block; }
  static std::int64_t last_row(const Rank& rank, const Tile& tile) {
    return std::min(first_row(tile, rank.pass.sizes) + rank.pass.sizes.tile.row_block, rank.rows_of(tile.expert));
  }
  // The tile's place for a sum that goes on, whatever the round.
  static Key key_of_sum(const Tile& tile) { return {int(tile.stage), tile.expert, tile.row_block, tile.column_block, 0}; }
  // Rows of the tile's expert in its round.
  static std::pair<std::int64_t, std::int64_t> rows_of_round(const Rank& rank, const Tile& tile) {
    if (tile.expert >= std::int32_t(rank.rows.size())) return {0, rank.rows_of(tile.expert)};
    const auto& rounds = rank.round[tile.expert];
    const auto [begin, end] = std::equal_range(rounds.begin(), rounds.end(), tile.round);
    return {begin - rounds.begin(), end - rounds.begin()};
  }
  // As an executor finds it, of a row counted from its expert's first.
  static std::int64_t place_of(const Rank& rank, const Tile& tile, std::int64_t row) {
    return rank.pass.expert_rows(tile.expert).begin + row - first_row_held(rank.pass, tile);
  }
  bool row_held(int rank, const Tile& tile, std::int64_t row, bool final, std::int64_t begin, std::int64_t end) const {
    const Rank& here = ranks_[rank];
    return tile.expert >= here.pass.sizes.local_experts ||
           memory_[rank].held.have(place_of(here, tile, row), begin, end, {tile.expert, row, final});
  }
  bool rows_held(int rank, const Tile& tile, bool final, std::int64_t begin = 0, std::int64_t end = 1 << 30) const {
    const Sizes& s = ranks_[rank].pass.sizes;
    for (std::int64_t row = first_row(tile, s); row < last_row(ranks_[rank], tile); ++row) {
      if (!row_held(rank, tile, row, final, begin, end)) return false;
    }
    return true;
  }
  bool rows_there(const Written& written, const Tile& tile, const Sizes& s) const {
    const Rank& rank = ranks_[s.rank];
    for (std::int64_t row = first_row(tile, s); row < last_row(rank, tile); ++row) {
      if (!written.all(row)) return false;
    }
    return true;
  }
  // x (in backward: dY) of the row's token, and in forward the table entries that name it.
  bool token_there(int rank, std::int32_t slot, std::int64_t row) const {
    const Sizes& s = ranks_[rank].pass.sizes;
    if (slot >= s.local_experts || s.ranks == 1 || s.peer_access) return true;
    if (s.direction == Direction::forward && memory_[rank].collected[slot] == 0) return false;
    const auto [source, route] = ranks_[rank].rows[slot][row];
    return source == rank || memory_[rank].received[source].all(route / s.top_k);
  }
  bool tokens_there(int rank, const Tile& tile) const {
    for (std::int64_t row = first_row(tile, ranks_[rank].pass.sizes); row < last_row(ranks_[rank], tile); ++row) {
      if (!token_there(rank, tile.expert, row)) return false;
    }
    return true;
  }

  const Routing& routing_;
  std::vector<Rank>& ranks_;
  std::vector<Memory> memory_;
  const std::int32_t sum_places_;
};

// ---- running a pass

// Something wrong on purpose, that the oracle has to notice.
struct Fault {
  std::function<bool(const CounterMap&, const Wait&)> ignored = [](const CounterMap&, const Wait&) { return false; };
  std::int32_t sum_places = 2;
  bool noticed = false;
};

struct Machine {
  std::vector<Rank>& ranks;
  const Fault* fault = nullptr;
  bool out_of_range = false;

  // Flags hold 1 for "of this pass".
  bool ready(std::int32_t r, const Tile& tile) {
    Rank& rank = ranks[r];
    return for_each_wait(rank.pass, rank.map, tile, [&](const Wait& wait) {
      if (fault && fault->ignored(rank.map, wait)) return true;
      auto& counters = rank.counters[int(wait.array)];
      auto& targets = rank.target[int(wait.array)];
      const std::int64_t target = wait.array == CounterArray::flags ? 1 : wait.target;
      for (std::int64_t i = wait.begin; i < wait.begin + wait.count; ++i) {
        if (i < 0 || i >= std::int64_t(counters.size())) {
          out_of_range = true;
          return false;
        }
        if (targets[i] >= 0 && targets[i] != target) out_of_range = true;  // two tiles that expect different ends
        targets[i] = target;
        if (counters[i] < target) return false;
      }
      return true;
    });
  }
  void raise(std::int32_t r, const Tile& tile) {
    for_each_signal(ranks[r].pass, ranks[r].map, tile, [&](const Signal& signal) {
      auto& counters = ranks.at(signal.rank).counters[int(signal.array)];
      if (signal.index < 0 || signal.index >= std::int64_t(counters.size())) {
        out_of_range = true;
        return;
      }
      if (signal.array == CounterArray::local && signal.rank != r) out_of_range = true;
      ++counters[signal.index];
    });
  }
  void publish_table(std::int32_t r) {
    for (Rank& other : ranks) {
      if (&other != &ranks[r] && other.pass.sizes.direction == Direction::forward) {
        ++other.counters[int(CounterArray::flags)][other.map.table_ready + r];
      }
    }
  }
  // Tiles from here on need the Layout of several ranks' forward.
  bool decodable(std::int32_t r, std::int64_t index) const {
    const Rank& rank = ranks[r];
    const Sizes& s = rank.pass.sizes;
    const bool late = s.ranks > 1 && !s.peer_access && s.direction == Direction::forward;
    return !late || index < prologue_tiles(rank.pass) || rank.counters[0][rank.map.layout_ready] == 1;
  }
  void expect_targets_met(const std::string& what) {
    EXPECT_FALSE(out_of_range) << what;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      for (int a = 0; a < 3; ++a) {
        for (std::size_t i = 0; i < ranks[r].counters[a].size(); ++i) {
          if (ranks[r].target[a][i] >= 0) {
            EXPECT_EQ(ranks[r].counters[a][i], ranks[r].target[a][i])
                << what << ", rank " << r << ", array " << a << ", counter " << i;
          }
        }
      }
    }
  }
};

int section(const Tile& tile, const Rank& rank) {
  const Sizes& s = rank.pass.sizes;
  switch (tile.stage) {
    case Stage::publish: return 0;
    case Stage::layout: return 1;
    case Stage::collect: return 3;
    case Stage::dispatch: return 4;
    case Stage::gate_up:
    case Stage::down:
    case Stage::down_dgrad:
    case Stage::gate_up_dgrad: return tile.expert >= s.local_experts ? 2 : 5;
    case Stage::gate_up_wgrad:
    case Stage::down_wgrad:
    case Stage::gate_up_bias_grad:
    case Stage::down_bias_grad: return tile.expert >= s.local_experts || tile.round + 1 == rank.pass.rounds() ? 6 : 5;
    case Stage::combine: return 6;
  }
  return -1;
}

// One after the other in the global order: nothing may ever have to wait.
void run_in_global_order(const Routing& routing, std::vector<Rank> ranks, const std::string& what) {
  for (Rank& rank : ranks) rank.find_layout();
  Machine machine{ranks};
  Oracle oracle(routing, ranks);
  oracle.tables.assign(ranks.size(), true);
  for (std::int32_t r = 0; r < routing.ranks; ++r) machine.publish_table(r);
  std::vector<std::size_t> next(ranks.size(), 0);
  for (int now = 0; now <= 6; ++now) {
    for (std::int32_t r = 0; r < routing.ranks; ++r) {
      const auto& tiles = ranks[r].tiles;
      for (; next[r] < tiles.size() && section(tiles[next[r]], ranks[r]) <= now; ++next[r]) {
        const Tile& tile = tiles[next[r]];
        ASSERT_EQ(section(tile, ranks[r]), now) << what << ": a section goes back";
        ASSERT_TRUE(machine.decodable(r, std::int64_t(next[r]))) << what;
        ASSERT_TRUE(machine.ready(r, tile))
            << what << ": rank " << r << ", tile " << next[r] << ", " << to_string(tile.stage);
        ASSERT_TRUE(oracle.inputs_there(r, tile))
            << what << ": rank " << r << ", tile " << next[r] << ", " << to_string(tile.stage);
        oracle.write(r, tile);
        machine.raise(r, tile);
      }
    }
  }
  machine.expect_targets_met(what);
  oracle.expect_each_once(what);
}

// Workers that take tiles in order, wait, work and signal, a random one moving at a time; ranks begin at random
// moments. As many workers as tiles is any order at all that the waits allow.
void run_interleaved(const Routing& routing, std::vector<Rank> ranks, std::int64_t workers, Random& random,
                     const std::string& what, Fault* fault = nullptr) {
  for (Rank& rank : ranks) rank.find_layout();
  Machine machine{ranks, fault};
  Oracle oracle(routing, ranks, fault ? fault->sum_places : 2);
  oracle.tables.assign(ranks.size(), false);
  struct Worker {
    std::int32_t rank;
    std::int64_t index;
    bool working;
  };
  std::vector<Worker> active;
  std::vector<std::int64_t> next(ranks.size(), 0);
  std::vector<std::int32_t> unborn;
  for (std::int32_t r = 0; r < routing.ranks; ++r) unborn.push_back(r);
  std::shuffle(unborn.begin(), unborn.end(), random);

  auto expect_inputs = [&](const Worker& w, const Tile& tile, const char* otherwise) {
    const bool there = oracle.inputs_there(w.rank, tile);
    if (fault) {
      fault->noticed |= !there;
    } else {
      EXPECT_TRUE(there) << what << ": rank " << w.rank << ", tile " << w.index << ", " << to_string(tile.stage) << " "
                         << otherwise;
    }
  };
  // One move of one worker, if it can; `active[i]` leaves when its rank has no tile left.
  auto move = [&](std::size_t i) -> bool {
    Worker& w = active[i];
    const auto& tiles = ranks[w.rank].tiles;
    if (!machine.decodable(w.rank, w.index)) return false;
    const Tile& tile = tiles[w.index];
    if (!w.working) {
      if (!machine.ready(w.rank, tile)) return false;
      expect_inputs(w, tile, "began without its inputs");
      w.working = true;
      return true;
    }
    expect_inputs(w, tile, "lost its inputs");
    oracle.write(w.rank, tile);
    machine.raise(w.rank, tile);
    w.index = next[w.rank]++;
    w.working = false;
    if (w.index >= std::int64_t(tiles.size())) {
      active[i] = active.back();
      active.pop_back();
    }
    return true;
  };
  while ((!active.empty() || !unborn.empty()) && !(fault && fault->noticed)) {
    if (!unborn.empty() && (active.empty() || random() % 8 == 0)) {
      const std::int32_t r = unborn.back();
      unborn.pop_back();
      machine.publish_table(r);
      oracle.tables[r] = true;
      for (std::int64_t n = 0; n < workers && next[r] < std::int64_t(ranks[r].tiles.size()); ++n)
        active.push_back({r, next[r]++, false});
      continue;
    }
    bool moved = move(below(random, std::int64_t(active.size())));
    for (int tries = 0; !moved && tries < 8; ++tries) moved = move(below(random, std::int64_t(active.size())));
    const std::size_t start = static_cast<std::size_t>(below(random, std::int64_t(active.size()) + 1));
    for (std::size_t n = 0; !moved && n < active.size(); ++n) moved = move((start + n) % active.size());
    if (!moved && unborn.empty()) { FAIL() << what << ": no worker of " << workers << " a rank can go on"; }
    if (!moved) {
      const std::int32_t r = unborn.back();
      unborn.pop_back();
      machine.publish_table(r);
      oracle.tables[r] = true;
      for (std::int64_t n = 0; n < workers && next[r] < std::int64_t(ranks[r].tiles.size()); ++n)
        active.push_back({r, next[r]++, false});
    }
  }
  if (fault) return;
  machine.expect_targets_met(what);
  oracle.expect_each_once(what);
}

void expect_layout(const Routing& routing, const Rank& rank, const std::string& what) {
  const Layout& layout = rank.pass.layout;
  const Sizes& s = rank.pass.sizes;
  std::int64_t row = 0, block = 0;
  for (std::int32_t e = 0; e < s.local_experts; ++e) {
    ASSERT_EQ(layout.block_begin[e], block) << what;
    for (std::int32_t r = 0; r <= s.ranks; ++r) {
      std::int64_t before = 0;
      for (const auto& [source, route] : rank.rows[e]) before += source < r;
      ASSERT_EQ(rank.pass.source_begin(e, r), row + before) << what;
    }
    row += std::int64_t(rank.rows[e].size());
    for (std::size_t n = 0; n < rank.rows[e].size(); n += s.tile.row_block) ++block;
  }
  ASSERT_EQ(rank.pass.routed_blocks(), block) << what;
  ASSERT_LE(block, s.max_row_blocks) << what;
  std::int32_t rounds = 1;
  for (const auto& of_expert : rank.round) {
    if (!of_expert.empty()) rounds = of_expert.back() + 1;
  }
  ASSERT_EQ(rank.pass.rounds(), rounds) << what;
  ASSERT_LE(rounds, s.has_rounds() ? s.max_rounds : 1) << what;
  // Row blocks anywhere that hold a row of this rank.
  std::int64_t arrivals = 0;
  for (std::int32_t e = 0; e < routing.experts; ++e) {
    std::int64_t position = 0, last = -1;
    for (std::int32_t source = 0; source < s.ranks; ++source) {
      for (std::int32_t id : routing.ids[source]) {
        if (id != e) continue;
        if (source == s.rank && position / s.tile.row_block != last) ++arrivals, last = position / s.tile.row_block;
        ++position;
      }
    }
  }
  ASSERT_EQ(*layout.arrivals, arrivals) << what;
}

void check(const Routing& routing, const Sizes& sizes, Random& random, const std::string& what) {
  const std::vector<Rank> ranks = make_ranks(routing, sizes, below(random, 3));
  for (const Rank& rank : ranks) {
    expect_layout(routing, rank, what);
    std::vector<Key> keys;
    for (const Tile& tile : rank.tiles) keys.push_back(key_of(tile));
    std::sort(keys.begin(), keys.end());
    ASSERT_EQ(keys, expected_tiles(routing, rank)) << what;
  }
  run_in_global_order(routing, ranks, what + ", global order");
  if (::testing::Test::HasFailure()) return;
  run_interleaved(routing, ranks, 1, random, what + ", one worker");
  run_interleaved(routing, ranks, one_of<std::int64_t>(random, {2, 3, 8, 1 << 30}), random, what + ", several workers");
}

TEST(Schedule, KeepsItsPromisesOverRandomRoutings) {
  int several_rounds = 0;
  for (int n = 0; n < routings; ++n) {
    Random random(static_cast<std::uint64_t>(n) + 1);
    const Routing routing = random_routing(random);
    const Sizes sizes = random_sizes(random, routing);
    check(routing, sizes, random, "routing " + std::to_string(n));
    if (HasFailure()) return;
    for (const Rank& rank : make_ranks(routing, sizes, 0)) several_rounds += rank.pass.rounds() > 1;
  }
  EXPECT_GT(several_rounds, routings / 15);
}

// Expert by expert, in any order, as by all experts at once.
TEST(Schedule, ALayoutOfOneRankByItsExperts) {
  Random random(17);
  for (int n = 0; n < 300; ++n) {
    const auto experts = static_cast<std::int32_t>(1 + below(random, 40));
    std::vector<std::int64_t> counts;
    for (std::int32_t e = 0; e < experts; ++e) counts.push_back(random() % 3 ? below(random, 300) : 0);
    Sizes sizes;
    sizes.local_experts = experts;
    sizes.tile.row_block = one_of<std::int32_t>(random, {1, 16, 128});
    const std::int64_t length = Layout::header_length(1, experts);
    std::vector<std::int64_t> together(length, -1), apart(length, -1);
    const std::vector<std::int32_t> expert_rank(experts, 0);
    const Layout whole = Layout::at(together.data(), nullptr, 1, experts), parts = Layout::at(apart.data(), nullptr, 1, experts);
    whole.tokens_of_rank[0] = parts.tokens_of_rank[0] = 1000;
    fill_layout(sizes, whole, experts, expert_rank.data(), [&](std::int32_t, std::int32_t e) { return counts[e]; });
    for (std::int32_t e = experts - 1; e >= 0; --e) {
      Extent before;
      for (std::int32_t f = 0; f < e; ++f) before = before + Extent::of(sizes, counts[f]);
      fill_layout_of_expert(sizes, parts, experts, e, before, counts[e]);
    }
    EXPECT_EQ(together, apart);
  }
}

TEST(Schedule, EveryChoiceOfGradients) {
  Random random(99);
  Routing routing;
  routing.ranks = 2;
  routing.experts = 3;
  routing.top_k = 2;
  routing.expert_rank = {0, 1, 1};
  routing.tokens = {5, 3};
  routing.valid = {5, 2};
  routing.ids = {{0, 1, 2, 0, -1, 1, 1, 2, 0, -1}, {1, 0, 2, 1, -1, -1}};
  for (int wanted = 0; wanted < 64; ++wanted) {
    Sizes sizes = random_sizes(random, routing);
    sizes.direction = Direction::backward;
    sizes.recompute = wanted & 1;
    sizes.want_gate_up_wgrad = wanted & 2;
    sizes.want_down_wgrad = wanted & 4;
    sizes.want_gate_up_bias_grad = wanted & 8;
    sizes.want_down_bias_grad = wanted & 16;
    sizes.want_dx = wanted & 32;
    check(routing, sizes, random, "gradients " + std::to_string(wanted));
    if (HasFailure()) return;
  }
}

// The oracle sees what it is there for: with any one kind of wait left out, or a single place for the sums that go on in the
// next round, some routing shows it.
TEST(Schedule, FaultsAreNoticed) {
  struct Planted {
    const char* name;
    Fault fault;
  };
  auto without = [](auto begin, auto end) {
    Fault fault;
    fault.ignored = [=](const CounterMap& map, const Wait& wait) {
      return wait.array == CounterArray::local && wait.begin >= map.*begin && wait.begin < map.*end;
    };
    return fault;
  };
  using M = CounterMap;
  std::vector<Planted> faults{{"collected", without(&M::collected, &M::dispatched)},
                              {"dispatched", without(&M::dispatched, &M::gate_up_done)},
                              {"gate_up_done", without(&M::gate_up_done, &M::down_dgrad_done)},
                              {"down_dgrad_done", without(&M::down_dgrad_done, &M::round_done)},
                              {"round_done", without(&M::round_done, &M::local_size)},
                              {"one place for sums", {}},
                              {"arrivals", {}},
                              {"flags", {}}};
  faults[5].fault.sum_places = 1;
  faults[6].fault.ignored = [](const CounterMap&, const Wait& wait) { return wait.array == CounterArray::arrivals; };
  faults[7].fault.ignored = [](const CounterMap&, const Wait& wait) { return wait.array == CounterArray::flags; };
  for (Planted& planted : faults) {
    int tries = 0;
    for (; tries < 400 && !planted.fault.noticed; ++tries) {
      Random random(static_cast<std::uint64_t>(tries) + 77);
      const Routing routing = random_routing(random);
      Sizes sizes = random_sizes(random, routing);
      sizes.round_rows = sizes.tile.row_block;
      run_interleaved(routing, make_ranks(routing, sizes, 0), 1 << 30, random, planted.name, &planted.fault);
    }
    EXPECT_TRUE(planted.fault.noticed) << planted.name << " in " << tries << " routings";
  }
}

// ---- by hand

std::string names_of(const std::vector<Tile>& tiles) {
  std::string all;
  for (const Tile& t : tiles) {
    all += std::string(to_string(t.stage)) + " " + std::to_string(t.expert) + "," + std::to_string(t.row_block) + "," +
           std::to_string(t.column_block) + (t.round > 0 ? " of round " + std::to_string(t.round) : "") + "; ";
  }
  return all;
}

Routing three_tokens() {
  Routing routing;
  routing.experts = 2;
  routing.top_k = 1;
  routing.expert_rank = {0, 0};
  routing.tokens = routing.valid = {3};
  routing.ids = {{1, 0, 1}};
  return routing;
}
Sizes small_tiles() {
  Sizes sizes;
  sizes.hidden_size = 64;
  sizes.intermediate_size = 128;
  sizes.tile.row_block = 2;
  sizes.tile.columns = sizes.tile.wgrad_columns = 64;
  sizes.tile.wgrad_rows = 128;
  sizes.tile.token_block = 2;
  sizes.tile.group_blocks = 1;
  return sizes;
}

TEST(Schedule, ForwardByHand) {
  const auto ranks = make_ranks(three_tokens(), small_tiles(), 0);
  EXPECT_EQ(names_of(ranks[0].tiles),
            "gate_up 0,0,0; gate_up 0,0,1; "              // block 0: expert 0
            "gate_up 1,0,0; gate_up 1,0,1; down 0,0,0; "  // block 1, while block 0 goes on
            "down 1,0,0; combine 0,0,0; combine 0,1,0; ");
}

TEST(Schedule, BackwardByHand) {
  Sizes sizes = small_tiles();
  sizes.direction = Direction::backward;
  sizes.want_down_wgrad = false;
  const auto ranks = make_ranks(three_tokens(), sizes, 0);
  EXPECT_EQ(names_of(ranks[0].tiles),
            "down_dgrad 0,0,0; down_dgrad 0,0,1; "
            "down_dgrad 1,0,0; down_dgrad 1,0,1; gate_up_dgrad 0,0,0; "
            "gate_up_dgrad 1,0,0; "
            "gate_up_wgrad 0,0,0; gate_up_wgrad 0,1,0; combine 0,0,0; "
            "gate_up_wgrad 1,0,0; gate_up_wgrad 1,1,0; combine 0,1,0; ");
}

TEST(Schedule, RoundsByHand) {
  // Room for one block: expert 0 has two, expert 1 none, expert 2 one.
  Routing routing = three_tokens();
  routing.experts = 3;
  routing.expert_rank = {0, 0, 0};
  routing.tokens = routing.valid = {4};
  routing.ids = {{0, 2, 0, 0}};
  Sizes sizes = small_tiles();
  sizes.round_rows = 2;
  EXPECT_EQ(names_of(make_ranks(routing, sizes, 0)[0].tiles),
            "gate_up 0,0,0; gate_up 0,0,1; down 0,0,0; "
            "gate_up 0,1,0 of round 1; gate_up 0,1,1 of round 1; "
            "gate_up 2,0,0 of round 1; gate_up 2,0,1 of round 1; "  // its row and the last one of expert 0
            "down 0,1,0 of round 1; down 2,0,0 of round 1; "
            "combine 0,0,0; combine 0,1,0; ");
  sizes.direction = Direction::backward;
  sizes.want_gate_up_wgrad = false;
  EXPECT_EQ(names_of(make_ranks(routing, sizes, 0)[0].tiles),
            "down_dgrad 0,0,0; down_dgrad 0,0,1; gate_up_dgrad 0,0,0; "
            "down_wgrad 0,0,0; down_wgrad 0,0,1; "
            "gate_up 0,1,0 of round 1; gate_up 0,1,1 of round 1; "
            "gate_up 2,0,0 of round 1; gate_up 2,0,1 of round 1; "
            "down_dgrad 0,1,0 of round 1; down_dgrad 0,1,1 of round 1; "
            "down_dgrad 2,0,0 of round 1; down_dgrad 2,0,1 of round 1; gate_up_dgrad 0,1,0 of round 1; "
            "gate_up_dgrad 2,0,0 of round 1; "
            "down_wgrad 0,0,0 of round 1; down_wgrad 0,0,1 of round 1; "               // on from round 0
            "down_wgrad 1,0,0 of round 1; combine 0,0,0; down_wgrad 1,0,1 of round 1; "  // zeros
            "down_wgrad 2,0,0 of round 1; down_wgrad 2,0,1 of round 1; combine 0,1,0; ");
}

TEST(Schedule, NoTokensAtAll) {
  Routing routing = three_tokens();
  routing.tokens = routing.valid = {0};
  routing.ids = {{}};
  EXPECT_EQ(names_of(make_ranks(routing, small_tiles(), 0)[0].tiles), "");
  Sizes sizes = small_tiles();
  sizes.direction = Direction::backward;
  sizes.want_down_wgrad = false;
  // Gradients of experts without tokens are written all the same: zeros.
  EXPECT_EQ(names_of(make_ranks(routing, sizes, 0)[0].tiles),
            "gate_up_wgrad 0,0,0; gate_up_wgrad 0,1,0; gate_up_wgrad 1,0,0; gate_up_wgrad 1,1,0; ");
}

}  // namespace
}  // namespace moelith::schedule
