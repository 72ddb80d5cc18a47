// The tiles of a pass: what each of them is, worked out by all warps before anything else, and the warps that take tiles
// and hand them on.
#pragma once

#include "executors/cuda/sm90_pack.cuh"

namespace moelith::executors::cuda::sm90 {

using schedule::Direction;

// What the compiler may know of a pass, so that no code is there for what cannot be. (This code runs once or twice in a call,
// and to fetch its instructions takes longer than to execute them.)
template <Direction Pass, bool Ranks>
__device__ __forceinline__ void assume(const schedule::Sizes& sizes) {
  __builtin_assume(sizes.direction == Pass);
  if constexpr (Ranks) {
    __builtin_assume(sizes.peer_access);
  } else {
    __builtin_assume(sizes.ranks == 1);
    __builtin_assume(sizes.round_rows == 0);
  }
}

// Describes the tile at `index` of the order.
template <Direction Pass, int N, bool Ranks>
__device__ __noinline__ void describe(const PassData& data, const schedule::CounterMap& map, std::int64_t index,
                                      TileDescription& out) {
  assume<Pass, Ranks>(data.pass.sizes);
  const schedule::Tile tile = schedule::tile_at(data.pass, index);
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool shared = tile.stage != Stage::combine && sizes.is_shared(tile.expert);  // a rank may hold no routed expert
  const std::int64_t width = sizes.width(tile.expert), pre_width = sizes.gate_up_factor * width,
                     hidden = sizes.hidden_size;
  TileDescription d{};
  d.stage = tile.stage;
  d.slot = tile.expert;
  d.group = static_cast<std::int16_t>(shared ? 1 + tile.expert - sizes.local_experts : 0);
  d.expert = shared ? 0 : tile.expert;
  d.row_block = static_cast<std::int32_t>(tile.row_block);
  d.column_block = tile.column_block;
  auto steps = [](std::int64_t k) { return static_cast<std::int32_t>(schedule::ceil_div(k, depth)); };
  // Of `total` columns the tile has up to `tile_columns`; each block of the cluster takes half of those that there are,
  // in multiples of `unit`.
  auto share = [&](std::int32_t tile_columns, std::int64_t total, int unit) {
    d.column = tile.column_block * tile_columns;
    d.columns = static_cast<std::uint16_t>(schedule::min_of(tile_columns, total - d.column));
    d.half = d.n = static_cast<std::uint16_t>((d.columns + 2 * unit - 1) / (2 * unit) * unit);
  };
  auto begin_at = [&](std::int64_t row) {
    d.row_begin = d.held_begin = d.packed_begin = static_cast<std::int32_t>(row);
    if (!sizes.has_rounds() || shared) return;
    d.held_begin -= static_cast<std::int32_t>(schedule::first_row_held(data.pass, tile));
    d.packed_begin += static_cast<std::int32_t>(packed_from(data.pass, tile.round));
    d.round = static_cast<std::uint8_t>(tile.round == 0 ? 0 : 2 | tile.round % 2);
  };
  auto row_tile = [&](std::int64_t k) {
    const schedule::RowRange rows = schedule::tile_rows(data.pass, tile);
    begin_at(rows.begin);
    d.rows = static_cast<std::int32_t>(rows.size());
    d.k_steps = steps(k);
  };
  auto sum_tile = [&](std::int64_t output_rows, std::int64_t output_columns) {
    const schedule::RowRange all = schedule::summed_rows(data.pass, tile);
    begin_at(all.begin);
    if (sizes.has_rounds() && !shared) {
      const schedule::RowRange of_expert = data.pass.expert_rows(tile.expert);
      d.goes_on_from = all.begin > of_expert.begin, d.goes_on = all.end < of_expert.end;
    }
    d.sum_rows = static_cast<std::int32_t>(all.size());
    d.output_row = static_cast<std::int32_t>(tile.row_block) * sizes.tile.wgrad_rows;
    d.rows = static_cast<std::int32_t>(schedule::min_of(rows_per_tile, output_rows - d.output_row));
    d.k_steps = steps(all.size());
    share(sizes.tile.wgrad_columns, output_columns, 64);
  };
  switch (tile.stage) {
    case Stage::gate_up:
      row_tile(hidden);
      share(sizes.gate_up_columns(), width, sizes.gate_up_factor == 2 ? 32 : 64);
      d.n = static_cast<std::uint16_t>(d.n * sizes.gate_up_factor);
      break;
    case Stage::down:
      row_tile(width);
      share(sizes.tile.columns, hidden, 64);
      break;
    case Stage::down_dgrad:
      row_tile(hidden);
      share(sizes.down_dgrad_columns(), width, 64);
      break;
    case Stage::gate_up_dgrad:
      row_tile(pre_width);
      share(sizes.tile.columns, hidden, 64);
      break;
    case Stage::gate_up_wgrad: sum_tile(pre_width, hidden); break;
    case Stage::down_wgrad: sum_tile(hidden, width); break;
    case Stage::gate_up_bias_grad:
    case Stage::down_bias_grad:
      sum_tile(rows_per_tile, hidden);
      d.k_steps = 0;
      break;
    default:  // combine
      d.row_begin = static_cast<std::int32_t>(tile.row_block) * sizes.tile.token_block;
      d.rows = static_cast<std::int32_t>(schedule::min_of(sizes.tile.token_block, sizes.tokens - d.row_begin));
      share(sizes.tile.columns, hidden, 64);
      if (data.out) {
        const int tokens = combine_tokens<N>(sizes.top_k);
        d.k_steps = (d.rows + tokens - 1) / tokens;
      }
  }

  // Each block of the cluster signals for its half of a tile.
  int arrivals = 0;
  schedule::for_each_wait(data.pass, map, tile, [&](const schedule::Wait& wait) {
    const std::uint32_t target = static_cast<std::uint32_t>(wait.target) * cluster_blocks;
    if (Ranks && wait.array == schedule::CounterArray::local && wait.begin >= map.round_done) {
      d.round_before = {static_cast<std::int32_t>(wait.begin), target};
    } else if (wait.array == schedule::CounterArray::local) {
      d.awaited = static_cast<std::int32_t>(wait.begin), d.awaited_count = static_cast<std::int32_t>(wait.count);
      d.low_target = target;
    } else {
      (arrivals++ == 0 ? d.arrival : d.second_arrival) = {static_cast<std::int32_t>(wait.begin), target};
    }
    return true;
  });
  schedule::for_each_signal(data.pass, map, tile, [&](const schedule::Signal& signal) {
    const bool local = signal.array == schedule::CounterArray::local;
    const bool round = Ranks && local && signal.index >= map.round_done;
    (round ? d.raised_round : local ? d.raised : d.raised_arrival) = static_cast<std::int32_t>(signal.index);
    if (Ranks && !local) d.raised_ranks |= static_cast<std::uint16_t>(1u << signal.rank);
  });

  if (shared) {
    // its rows are the tokens themselves
  } else if (reads_packed(tile.stage)) {
    d.awaited = static_cast<std::int32_t>(map.gate_up_done +
                                          schedule::block_index(data.pass, tile.expert, tile.row_block));
    d.awaited_count = 1, d.high_target = d.rows;
  } else if (tile.stage == Stage::gate_up_wgrad && packs_x_later(data)) {
    d.high_target = packed_later(sizes);
  }
  const bool later = !shared && tile.stage == Stage::gate_up_dgrad && packs_x_later(data);
  if (later || tile.stage == first_reader(sizes, tile.round)) {
    BlockRange blocks;
    std::int64_t part = tile.column_block, parts;
    if (shared) {
      blocks = shared_readers_pack(data.pass) ? packed_first(data.pass) : BlockRange{0, 0};
      part += shared_readers_before(data.pass, tile.expert) + tile.row_block * first_reader_tiles(sizes, tile.expert, 0);
      parts = shared_readers(data.pass);
    } else {
      const std::int64_t block = data.pass.layout.block_begin[tile.expert] + tile.row_block;
      blocks = later ? BlockRange{block, block + 1} : packed_beside(data.pass, block);
      parts = later ? sizes.hidden_tiles() : first_reader_tiles(sizes, tile.expert, tile.round);
    }
    if (blocks.begin < blocks.end) {
      const PackedPlace first = packed_place(data.pass, blocks, part, parts), last = packed_place(data.pass, blocks, part + 1, parts);
      if (later || first.row < last.row) {
        d.pack_block = static_cast<std::int32_t>(first.block);
        d.pack_row = static_cast<std::int32_t>(first.row);
        d.pack_rows = static_cast<std::int32_t>(last.row - first.row);
        d.pack_first = static_cast<std::uint8_t>(schedule::min_of(last.row, rows_of_block(data.pass, first.block).end) - first.row);
      }
    }
  }
  out = d;
}

template <Direction Pass, bool Ranks>
__device__ __forceinline__ std::int64_t count_tiles(const schedule::Pass& pass) {
  assume<Pass, Ranks>(pass.sizes);
  return schedule::tile_count(pass);
}

// Describes all tiles, with all warps of the blocks that are there, or as many as have something to do. Working out one
// takes thousands of cycles, most of it latency: more than some tiles take. So each warp has as few as can be: tiles of
// different stages in one warp come one after the other.
template <Direction Pass, int N, bool Ranks>
__device__ __forceinline__ void describe_all(SharedMemory<N>& shared, int warp, int lane) {
  const PassData& data = shared.data();
  const std::int64_t tiles = count_tiles<Pass, Ranks>(data.pass);
  if (warp == 0 && lane == 0) {
    shared.tiles = tiles;
    if constexpr (Ranks) shared.pulled_parts = pulled_parts(data);
  }
  const std::int64_t warps = std::int64_t(gridDim.x) * (threads / 32);
  if (warp * std::int64_t(gridDim.x) >= tiles) return;
  int at_once = 1;
  while (at_once < 32 && at_once * warps < tiles) ++at_once;
  auto take = [&] {
    const unsigned long long first =
        lane == 0 ? atomicAdd(data.counters.control + PassCounters::next_description, static_cast<unsigned long long>(at_once))
                  : 0;
    return static_cast<std::int64_t>(__shfl_sync(~0u, first, 0));
  };
  for (std::int64_t first = take(); first < tiles; first = take()) {
    if (lane < at_once && first + lane < tiles) {
      describe<Pass, N, Ranks>(data, shared.map(), first + lane, static_cast<TileDescription*>(data.tiles)[first + lane]);
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) {
      add_release(data.counters.control + PassCounters::described,
                  static_cast<unsigned long long>(schedule::min_of(at_once, tiles - first)));
    }
  }
}
// Until they are all there. Whoever describes waits for nobody.
__device__ __forceinline__ void await_descriptions(const PassData& data, std::int64_t tiles) {
  while (load_acquire(data.counters.control + PassCounters::described) < static_cast<unsigned long long>(tiles)) {
    __nanosleep(64);
  }
  __syncwarp();
}

// Waits, with the whole warp, until all `count` counters are at their targets. False: it took too long.
// System: other ranks raise them.
template <bool Ranks, bool System>
__device__ __forceinline__ bool await(const PassData& data, const unsigned long long* counters, int count,
                                      std::uint32_t low, std::uint32_t high, int lane) {
  unsigned long long began = 0;
  for (int i = lane; __any_sync(~0u, i < count); i += 32) {
    auto done = [&] {
      if (i >= count) return true;
      const unsigned long long value = System ? load_acquire_system(counters + i) : load_acquire(counters + i);
      return static_cast<std::uint32_t>(value) >= low && static_cast<std::uint32_t>(value >> packed_shift) >= high;
    };
    unsigned spins = 0;
    while (!__all_sync(~0u, done())) {
      __nanosleep(32);
      if ((++spins & 1023u) == 0) {
        const unsigned long long now = global_time();
        if (began == 0) began = now;
        if (__any_sync(~0u, now - began > data.wait_limit_ns)) return false;
        if constexpr (Ranks) {
          if (__any_sync(~0u, group_failed(data.stop))) return false;
        }
      }
    }
  }
  return true;
}

// The tile waited too long, or the group has failed, which whoever waited for it has told.
inline __device__ __noinline__ void give_up(const PassData& data, const TileDescription& tile, bool own_work) {
  if (data.stop && group_failed(data.stop)) return;
  PassError what;
  what.stage = static_cast<std::int32_t>(tile.stage);
  what.expert = tile.slot, what.row_block = tile.row_block;
  what.rank = data.pass.sizes.rank;
  if (own_work) what.awaited = what.rank;
  report(data.error, data.stop, what);
}

// Warp 0 of the first block of a cluster: takes tiles, waits for what they read, and tells both blocks.
template <int N, bool Ranks>
__device__ __forceinline__ void take_tiles(SharedMemory<N>& shared, int lane) {
  const PassData& data = shared.data();
  if constexpr (!Ranks) __builtin_assume(data.pass.sizes.ranks == 1);
  const std::int64_t tiles = shared.tiles;
  const auto* table = static_cast<const TileDescription*>(data.tiles);
  RingPosition<SharedMemory<N>::Shape::works> mail(0);
  auto take = [&]() -> unsigned long long {
    return lane == 0 ? atomicAdd(data.counters.control + PassCounters::next_tile, 1ull) : 0ull;
  };
  unsigned long long taken = take();
  std::uint32_t taken_stages = 0;
  await_descriptions(data, tiles);
  std::int64_t index = 0;
  while (index >= 0) {
    index = static_cast<std::int64_t>(__shfl_sync(~0u, taken, 0));
    if (index >= tiles) {
      index = -1;
    } else {
      const TileDescription& tile = table[index];
      taken_stages += max(__ldcg(&tile.k_steps), SharedMemory<N>::Shape::least_stages);
      const int4 local = __ldcg(reinterpret_cast<const int4*>(&tile.awaited));
      const int4 arrivals = __ldcg(reinterpret_cast<const int4*>(&tile.arrival));
      auto arrived = [&](int counter, std::uint32_t target) {
        return target == 0 || await<Ranks, Ranks>(data, data.counters.arrivals + counter, 1, target, 0, lane);
      };
      bool own_work_done = await<Ranks, false>(data, data.counters.local + local.x, local.y, local.z, local.w, lane);
      if constexpr (Ranks) {
        const int2 round = __ldcg(reinterpret_cast<const int2*>(&tile.round_before));
        if (round.y != 0) own_work_done = own_work_done && await<true, false>(data, data.counters.local + round.x, 1, round.y, 0, lane);
      }
      if (!(own_work_done && arrived(arrivals.x, arrivals.y) && arrived(arrivals.z, arrivals.w))) {
        index = -1;
        if (lane == 0) give_up(data, tile, !own_work_done);
      }
    }
    barrier_wait_in_cluster(shared_address(&shared.mail_empty[mail.slot]), mail.parity ^ 1);
    if (lane < cluster_blocks) {  // both have thereby waited as well
      store_in_cluster(address_in(lane, shared_address(&shared.mail[mail.slot])), index);
      barrier_arrive_in_cluster(address_in(lane, shared_address(&shared.mail_full[mail.slot])));
    }
    __syncwarp();
    if (index >= 0) {
      if (lane == 0) {
        const std::uint32_t loaded_stages = shared_address(&shared.loaded_stages);
        while (static_cast<int>(taken_stages - load_count(loaded_stages)) > SharedMemory<N>::Shape::lead_stages) __nanosleep(64);
      }
      __syncwarp();
      taken = take();
    }
    mail.next();
  }
}

// Warp 3: hands tiles on to the warps of its block, and packs what they have beside them.
template <int N, bool Ranks>
__device__ __forceinline__ void hand_on_tiles(SharedMemory<N>& shared, int lane) {
  constexpr int slots = SharedMemory<N>::Shape::works;
  const PassData& data = shared.data();
  if constexpr (!Ranks) __builtin_assume(data.pass.sizes.ranks == 1);
  const std::uint32_t rank = cluster_rank();
  await_descriptions(data, shared.tiles);
  Packer<N, Ranks> packer(shared, lane);
  RingPosition<slots> position(0), mail(0);
  std::uint32_t step = 0;
  int ends = 0;  // each computing warpgroup gets an end of its own
  while (ends < 2) {
    std::int64_t index = -1;
    if (ends == 0) {
      const std::uint32_t full = shared_address(&shared.mail_full[mail.slot]);
      packer.publish_unless(full, mail.parity);
      barrier_wait_in_cluster(full, mail.parity);
      index = *const_cast<volatile std::int64_t*>(&shared.mail[mail.slot]);
      barrier_arrive_in_cluster(address_in(0, shared_address(&shared.mail_empty[mail.slot])));
      mail.next();
    }
    Work& work = shared.work[position.slot];
    const std::uint32_t empty = shared_address(&shared.work_empty[position.slot]);
    if (index < 0) {
      packer.publish();
      barrier_wait(empty, position.parity ^ 1);
      if (lane == 0) work.last = true, work.k_steps = 0, work.first_step = step;
      ++ends;
      barrier_arrive(shared_address(&shared.work_full[position.slot]));
      position.next();
      continue;
    }
    // A lane has four words of the description.
    constexpr int pieces = sizeof(TileDescription) / 16;
    static_assert(sizeof(TileDescription) % 16 == 0 && pieces <= 32);
    const TileDescription* description = static_cast<const TileDescription*>(data.tiles) + index;
    int4 mine{};
    if (lane < pieces) mine = __ldcg(reinterpret_cast<const int4*>(description) + lane);
    auto word = [&](std::size_t offset) {
      const int which = static_cast<int>(offset) / 4 % 4;
      return __shfl_sync(~0u, which == 0 ? mine.x : which == 1 ? mine.y : which == 2 ? mine.z : mine.w,
                         static_cast<int>(offset) / 16);
    };
    const auto stage = static_cast<Stage>(word(offsetof(TileDescription, stage)));
    const int row_begin = word(offsetof(TileDescription, row_begin)), rows = word(offsetof(TileDescription, rows));
    const int columns_and_half = word(offsetof(TileDescription, columns));
    const bool has_rows = stage == Stage::gate_up || stage == Stage::down || stage == Stage::down_dgrad ||
                          stage == Stage::gate_up_dgrad;
    std::int32_t row_index[rows_per_tile / 32];
    std::uint8_t row_rank[rows_per_tile / 32] = {};
    if (has_rows) {
      const bool routed = static_cast<std::int16_t>(word(offsetof(TileDescription, group))) == 0;
#pragma unroll
      for (int i = 0; i < rows_per_tile / 32; ++i) {
        const int r = lane + 32 * i;
        if (r < rows) row_index[i] = routed ? data.pass.layout.row_route[row_begin + r] : row_begin + r;
        if (Ranks && routed && r < rows) row_rank[i] = data.row_rank[row_begin + r];
      }
    }
    const int column = word(offsetof(TileDescription, column)), columns = columns_and_half & 0xffff,
              half = columns_and_half >> 16, k_steps = word(offsetof(TileDescription, k_steps)),
              pack_block = word(offsetof(TileDescription, pack_block)),
              pack_row = word(offsetof(TileDescription, pack_row)),
              pack_rows = word(offsetof(TileDescription, pack_rows));
    packer.publish_unless(empty, position.parity ^ 1);
    barrier_wait(empty, position.parity ^ 1);
    if (lane < pieces) reinterpret_cast<int4*>(static_cast<TileDescription*>(&work))[lane] = mine;
    __syncwarp();
    if (lane == 0) {
      work.last = false;
      work.first_step = step;
      work.column = column + static_cast<int>(rank) * half;
      work.columns = static_cast<std::uint16_t>(max(0, min(half, columns - static_cast<int>(rank) * half)));
    }
    if (has_rows) {
#pragma unroll
      for (int i = 0; i < rows_per_tile / 32; ++i) {
        if (lane + 32 * i < rows) work.row_index[lane + 32 * i] = row_index[i];
        if (Ranks && lane + 32 * i < rows) {
          work.row_place[lane + 32 * i] =
              place_of_row(data, shared.peers(), stage, work.group, row_rank[i], row_index[i]);
        }
      }
    }
    barrier_arrive(shared_address(&shared.work_full[position.slot]));
    __syncwarp();
    step += k_steps;
    position.next();
    if (pack_block >= 0) packer.pack_blocks(stage, pack_row, pack_rows, pack_block, work.pack_first);
  }
  // Counters are clean again once every block has stopped using them.
  const schedule::CounterMap& map = shared.map();
  named_barrier_sync(barrier_end, end_threads);
  unsigned long long finished = 0;
  if (lane == 0) {
    __threadfence();
    finished = atomicAdd(data.counters.control + PassCounters::finished_blocks, 1ull);
    __threadfence();
  }
  if (__shfl_sync(~0u, finished, 0) == gridDim.x - 1) {
    for (std::int64_t i = lane; i < map.local_size; i += 32) data.counters.local[i] = 0;
    for (std::int64_t i = lane; i < map.arrivals_size; i += 32) data.counters.arrivals[i] = 0;
    if (lane < PassCounters::control_counters) data.counters.control[lane] = 0;
    if (Ranks && data.pass.sizes.direction == schedule::Direction::backward) {
      if (shared.pulled_parts == 0) tell_rows_pulled(data, shared.peers(), lane);
      await_rows_pulled(data, shared.peers(), lane);
    }
  }
}

}  // namespace moelith::executors::cuda::sm90
