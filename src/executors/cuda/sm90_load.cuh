// The fetching warps: what each stage of a pass loads into the ring.
#pragma once

#include "executors/cuda/sm90_pass.cuh"

namespace moelith::executors::cuda::sm90 {

// --- warps 0 and 3: tiles --------------------------------------------------------------------------------------------

// Waits, with the whole warp, until `done(i)` for all i of [begin, begin + count). False: it took too long.
template <class Done>
__device__ __forceinline__ bool await_all(const PassData& data, std::int64_t begin, std::int64_t count, int lane,
                                          Done&& done) {
  unsigned long long began = 0;
  for (std::int64_t i = begin + lane; __any_sync(~0u, i < begin + count); i += 32) {
    unsigned spins = 0;
    while (!__all_sync(~0u, i >= begin + count || done(i))) {
      __nanosleep(32);
      if ((++spins & 1023u) == 0) {
        const unsigned long long now = global_time();
        if (began == 0) began = now;
        if (__any_sync(~0u, now - began > data.wait_limit_ns)) return false;
      }
    }
  }
  return true;
}
__device__ __forceinline__ bool await(const PassData& data, const schedule::Wait& wait, int lane) {
  const unsigned long long* base =
      wait.array == schedule::CounterArray::local ? data.counters.local : data.counters.arrivals;
  // Each block of the cluster signals for its half of a tile. The high half counts packed rows.
  const unsigned target = static_cast<unsigned>(wait.target) * cluster_blocks;
  return await_all(data, wait.begin, wait.count, lane,
                   [&](std::int64_t i) { return static_cast<unsigned>(load_acquire(base + i)) >= target; });
}
__device__ __forceinline__ bool await_packed(const PassData& data, const schedule::CounterMap& map,
                                             const schedule::Tile& tile, int lane) {
  const std::int64_t index = map.gate_up_done + schedule::block_index(data.pass, tile.expert, tile.row_block);
  const unsigned rows = static_cast<unsigned>(schedule::tile_rows(data.pass, tile).size());
  return await_all(data, index, 1, lane, [&](std::int64_t i) {
    return static_cast<unsigned>(load_acquire(data.counters.local + i) >> packed_shift) >= rows;
  });
}

// Rows of the row block `block`, counted over all routed experts.
__device__ inline schedule::RowRange rows_of_block(const schedule::Pass& pass, std::int64_t block) {
  return schedule::tile_rows(pass, schedule::routed_tile(pass, Stage::gate_up, block, 0));
}

// What is packed beside the tile.
template <int N>
__device__ __forceinline__ void describe_packing(const PassData& data, const schedule::Tile& tile, std::uint32_t rank,
                                                 Work& work) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const std::int64_t block = data.pass.layout.block_begin[tile.expert] + tile.row_block + sizes.tile.group_blocks;
  if (block >= data.pass.routed_blocks()) return;
  const std::int64_t tiles =
      tile.stage == Stage::gate_up ? sizes.gate_up_tiles(tile.expert) : sizes.down_dgrad_tiles(tile.expert);
  const schedule::RowRange rows = rows_of_block(data.pass, block);
  const int first = static_cast<int>(schedule::quotient(rows.size() * tile.column_block, tiles));
  const int count = static_cast<int>(schedule::quotient(rows.size() * (tile.column_block + 1), tiles)) - first;
  const PackShape shape(data, BlockShape<N>::stage_bytes);
  work.pack_steps = ((count + 1) / 2 * shape.per_row + shape.per_stage - 1) / shape.per_stage;
  work.pack_interval = work.pack_steps > 0 ? work.k_steps / work.pack_steps : 1;
  work.pack_block = static_cast<int>(block);
  work.pack_rows = (count + 1 - static_cast<int>(rank)) / 2;
  work.pack_row = rows.begin + first + static_cast<int>(rank);
}

// Fills `work` but for row_index and first_step, for the block `rank` of the cluster.
template <int N>
__device__ __forceinline__ void describe_tile(const PassData& data, const schedule::Tile& tile, std::uint32_t rank,
                                              Work& work) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool shared = sizes.is_shared(tile.expert);
  const std::int32_t group = shared ? 1 + tile.expert - sizes.local_experts : 0;
  const std::int64_t width = sizes.width(tile.expert), pre_width = sizes.gate_up_factor * width,
                     hidden = sizes.hidden_size;
  work.stage = tile.stage;
  work.last = false;
  work.group = group;
  work.expert = shared ? 0 : tile.expert;
  work.column_block = tile.column_block;
  work.tile = tile;
  work.output_row = work.sum_rows = work.k_steps = work.pack_steps = 0;
  auto steps = [](std::int64_t k) { return static_cast<std::int32_t>((k + depth - 1) / depth); };
  // Of `total` columns the tile has up to `tile_columns`; each block of the cluster takes half of those that there are,
  // in multiples of `unit`.
  auto share = [&](std::int32_t tile_columns, std::int64_t total, int unit) {
    const std::int64_t begin = std::int64_t(tile.column_block) * tile_columns;
    const int there = static_cast<int>(schedule::min_of(tile_columns, total - begin));
    const int half = (there + 2 * unit - 1) / (2 * unit) * unit;
    work.column = static_cast<std::int32_t>(begin) + static_cast<int>(rank) * half;
    work.columns =
        static_cast<std::int32_t>(schedule::max_of(0, schedule::min_of(half, there - static_cast<int>(rank) * half)));
    work.n = half;
  };
  auto row_tile = [&](std::int64_t k) {
    const schedule::RowRange rows = schedule::tile_rows(data.pass, tile);
    work.row_begin = rows.begin;
    work.rows = static_cast<std::int32_t>(rows.size());
    work.k_steps = steps(k);
  };
  auto sum_tile = [&](std::int64_t output_rows, std::int64_t output_columns) {
    const schedule::RowRange rows = data.pass.expert_rows(tile.expert);
    work.row_begin = rows.begin;
    work.sum_rows = static_cast<std::int32_t>(rows.size());
    work.output_row = static_cast<std::int32_t>(tile.row_block) * sizes.tile.wgrad_rows;
    work.rows = static_cast<std::int32_t>(schedule::min_of(rows_per_tile, output_rows - work.output_row));
    work.k_steps = steps(rows.size());
    share(sizes.tile.wgrad_columns, output_columns, 64);
  };
  switch (tile.stage) {
    case Stage::gate_up:
      row_tile(hidden);
      share(sizes.gate_up_columns(), width, sizes.gate_up_factor == 2 ? 32 : 64);
      work.n *= sizes.gate_up_factor;
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
      work.k_steps = 0;
      break;
    default:  // combine
      work.row_begin = tile.row_block * sizes.tile.token_block;
      work.rows = static_cast<std::int32_t>(schedule::min_of(sizes.tile.token_block, sizes.tokens - work.row_begin));
      share(sizes.tile.columns, hidden, 64);
      if (data.out && data.groups[0].slots) work.k_steps = combine_steps<N>(sizes, work.rows);
  }
  if (group == 0 && packs(sizes, tile.stage)) describe_packing<N>(data, tile, rank, work);
}

// Warp 0 of the first block of a cluster: tells both blocks which tiles to do, one after the other.
template <int N>
__device__ __forceinline__ void take_tiles(SharedMemory<N>& shared, int lane) {
  const PassData& data = shared.data();
  const schedule::CounterMap& map = shared.map();
  __builtin_assume(data.pass.sizes.ranks == 1);
  const std::int64_t tiles = schedule::tile_count(data.pass);
  RingPosition<SharedMemory<N>::Shape::works> mail(0);
  auto take = [&]() -> unsigned long long { return lane == 0 ? atomicAdd(data.counters.control, 1ull) : 0ull; };
  unsigned long long taken = take();
  std::int64_t index = 0;
  while (index >= 0) {
    index = static_cast<std::int64_t>(__shfl_sync(~0u, taken, 0));
    if (index >= tiles) {
      index = -1;
    } else {
      taken = take();  // in flight meanwhile
      const schedule::Tile tile = schedule::tile_at(data.pass, index);
      bool ready = schedule::for_each_wait(data.pass, map, tile,
                                           [&](const schedule::Wait& wait) { return await(data, wait, lane); });
      if (ready && reads_packed(tile.stage) && !data.pass.sizes.is_shared(tile.expert))
        ready = await_packed(data, map, tile, lane);
      if (!ready) {
        index = -1;
        if (lane == 0 && data.error) {
          *data.error = {static_cast<std::int32_t>(tile.stage), tile.expert, static_cast<std::int32_t>(tile.row_block),
                         0};
          __threadfence_system();
        }
      }
    }
    barrier_wait_in_cluster(shared_address(&shared.mail_empty[mail.slot]), mail.parity ^ 1);
    if (lane < cluster_blocks) {  // both have thereby waited as well
      store_in_cluster(address_in(lane, shared_address(&shared.mail[mail.slot])), index);
      barrier_arrive_in_cluster(address_in(lane, shared_address(&shared.mail_full[mail.slot])));
    }
    __syncwarp();
    mail.next();
  }
}

// Warp 3.
template <int N>
__device__ __forceinline__ void describe_tiles(SharedMemory<N>& shared, int lane) {
  constexpr int slots = SharedMemory<N>::Shape::works;
  const PassData& data = shared.data();
  __builtin_assume(data.pass.sizes.ranks == 1);
  const std::uint32_t rank = cluster_rank();
  RingPosition<slots> position(0), mail(0);
  std::uint32_t step = 0;
  int ends = 0;  // each computing warpgroup gets an end of its own
  while (ends < 2) {
    std::int64_t index = -1;
    if (ends == 0) {
      barrier_wait_in_cluster(shared_address(&shared.mail_full[mail.slot]), mail.parity);
      index = *const_cast<volatile std::int64_t*>(&shared.mail[mail.slot]);
      barrier_arrive_in_cluster(address_in(0, shared_address(&shared.mail_empty[mail.slot])));
      mail.next();
    }
    schedule::Tile tile{};
    bool has_rows = false;
    std::int32_t row_index[rows_per_tile / 32];
    if (index >= 0) {
      tile = schedule::tile_at(data.pass, index);
      has_rows = tile.stage == Stage::gate_up || tile.stage == Stage::down || tile.stage == Stage::down_dgrad ||
                 tile.stage == Stage::gate_up_dgrad;
      if (has_rows) {
        const bool shared_expert = data.pass.sizes.is_shared(tile.expert);
        const schedule::RowRange rows = schedule::tile_rows(data.pass, tile);
#pragma unroll
        for (int i = 0; i < rows_per_tile / 32; ++i) {
          const std::int64_t row = rows.begin + lane + 32 * i;
          if (row < rows.end)
            row_index[i] = shared_expert ? static_cast<std::int32_t>(row) : data.pass.layout.row_route[row];
        }
      }
    }
    Work& work = shared.work[position.slot];
    barrier_wait(shared_address(&shared.work_empty[position.slot]), position.parity ^ 1);
    if (index < 0) {
      if (lane == 0) work.last = true, work.k_steps = work.pack_steps = 0, work.first_step = step;
      ++ends;
    } else {
      if (lane == 0) {
        describe_tile<N>(data, tile, rank, work);
        work.first_step = step;
      }
      __syncwarp();
      step += work.k_steps + work.pack_steps;
      if (work.pack_steps > 0) {  // they will be wanted in L2
        const std::uint32_t bytes = static_cast<std::uint32_t>(data.pass.sizes.hidden_size) * 2;
        for (int i = lane; i < work.pack_rows; i += 32) {
          const std::int64_t token =
              static_cast<unsigned>(data.pass.layout.row_route[work.pack_row + i * cluster_blocks]) /
              static_cast<unsigned>(data.pass.sizes.top_k);
          if (data.packed_x) bulk_prefetch(data.x + token * data.x_stride, bytes);
          if (data.packed_dy) bulk_prefetch(data.dy + token * data.dy_stride, bytes);
        }
        __syncwarp();
      }
      if (has_rows) {
#pragma unroll
        for (int i = 0; i < rows_per_tile / 32; ++i) {
          const int r = lane + 32 * i;
          if (r < work.rows) work.row_index[r] = row_index[i];
        }
      }
    }
    barrier_arrive(shared_address(&shared.work_full[position.slot]));
    __syncwarp();
    position.next();
  }
  // Counters are clean again once every block has stopped using them.
  const schedule::CounterMap& map = shared.map();
  named_barrier_sync(barrier_end, 2 * consumer_threads + 2 * 32);
  unsigned long long finished = 0;
  if (lane == 0) {
    __threadfence();
    finished = atomicAdd(data.counters.control + 1, 1ull);
    __threadfence();
  }
  if (__shfl_sync(~0u, finished, 0) == gridDim.x - 1) {
    for (std::int64_t i = lane; i < map.local_size; i += 32) data.counters.local[i] = 0;
    for (std::int64_t i = lane; i < map.arrivals_size; i += 32) data.counters.arrivals[i] = 0;
    if (lane < PassCounters::control_counters) data.counters.control[lane] = 0;
  }
}

// --- warps 1 and 2: the copy engine

// Rows on their way through a stage of the ring.
template <int N>
struct Packing {
  using Shape = BlockShape<N>;
  SharedMemory<N>& shared;
  int lane;
  std::uint32_t slot = 0, parity = 0;  // the stage
  int state = 0;                       // 0: none, 1: on their way into the stage, 2: on their way out
  int age = 0;                         // stages of the tile since then
  int step = 0;                        // which of the tile's
  std::int64_t row = 0;                // of the tile
  int rows = 0;

  // f(place, from, to, bytes) for each of this lane's pieces of a step
  template <class F>
  __device__ __forceinline__ void for_each_piece(F&& f) {
    const PassData& data = shared.data();
    const PackShape shape(data, Shape::stage_bytes);
    const std::int64_t hidden = data.pass.sizes.hidden_size;
    const int all = rows * shape.per_row - step * shape.per_stage,
              count = all < shape.per_stage ? all : shape.per_stage;
    const std::uint32_t place = shared_address(shared.stage[slot]);
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      const int piece = step * shape.per_stage + i, inside = piece % shape.per_row;
      const std::int64_t r = row + piece / shape.per_row * cluster_blocks;
      const bool of_x = data.packed_x && inside < shape.pieces;
      const int column = inside % shape.pieces * shape.columns;
      const int columns =
          static_cast<int>(hidden) - column < shape.columns ? static_cast<int>(hidden) - column : shape.columns;
      f(place + i * 2 * shape.columns, r, of_x, column, columns * 2);
    }
  }
  __device__ __forceinline__ void begin(RingPosition<Shape::stages>& ring, int which) {
    finish();
    slot = ring.slot, parity = ring.parity, step = which, age = 0, state = 1;
    barrier_wait(shared_address(&shared.empty[slot]), parity ^ 1);
    const std::uint32_t full = shared_address(&shared.full[slot]);
    unsigned mine = 0;
    for_each_piece([&](std::uint32_t, std::int64_t, bool, int, int bytes) { mine += bytes; });
    const unsigned bytes = __reduce_add_sync(~0u, mine);
    if (lane == 0) barrier_arrive_expect(full, bytes);
    __syncwarp();
    const PassData& data = shared.data();
    for_each_piece([&](std::uint32_t place, std::int64_t r, bool of_x, int column, int piece_bytes) {
      const std::int64_t token =
          static_cast<unsigned>(data.pass.layout.row_route[r]) / static_cast<unsigned>(data.pass.sizes.top_k);
      bulk_load(place, (of_x ? data.x + token * data.x_stride : data.dy + token * data.dy_stride) + column, piece_bytes,
                full);
    });
    ring.next();
  }
  __device__ __forceinline__ void write_out() {
    barrier_wait(shared_address(&shared.full[slot]), parity);
    const PassData& data = shared.data();
    for_each_piece([&](std::uint32_t place, std::int64_t r, bool of_x, int column, int bytes) {
      bulk_store((of_x ? data.packed_x : data.packed_dy) + r * data.pass.sizes.hidden_size + column, place, bytes);
    });
    bulk_commit();
    state = 2;
  }
  __device__ __forceinline__ void give_back() {
    bulk_wait_read();
    __syncwarp();
    if (lane < cluster_blocks) barrier_arrive_at(address_in(lane, shared_address(&shared.empty[slot])));
    state = 0;
  }
  __device__ __forceinline__ void finish() {
    if (state == 1) write_out();
    if (state == 2) give_back();
  }
  // Before each stage of the tile's own; the ring must not come to the stage in use.
  __device__ __forceinline__ void advance() {
    if (state == 1 && age == 2)
      write_out();
    else if (state == 2 && age >= 3)
      give_back();
    ++age;
  }
  // All that the tile had to pack is there.
  __device__ __forceinline__ void publish(std::int64_t block) {
    finish();
    bulk_wait();
    fence_async_all();
    __threadfence();
    __syncwarp();
    if (lane == 0 && rows > 0) {
      add_release(shared.data().counters.local + shared.map().gate_up_done + block,
                  static_cast<unsigned long long>(rows) << packed_shift);
    }
  }
};

// What a loading warp needs of a tile.
struct LoadJob {
  Stage stage;
  bool last, sums_rows;
  int group, expert, rows, column, blocks, row_begin, output_row, k_steps, pack_steps, pack_interval;
  __device__ explicit LoadJob(const Work& work)
      : stage(work.stage),
        last(work.last),
        sums_rows(work.stage == Stage::gate_up_wgrad || work.stage == Stage::down_wgrad),
        group(work.group),
        expert(work.expert),
        rows(work.rows),
        column(work.column),
        blocks(work.n / 64),
        row_begin(static_cast<int>(work.row_begin)),
        output_row(work.output_row),
        k_steps(work.k_steps),
        pack_steps(work.pack_steps),
        pack_interval(work.pack_interval) {}
};

// Warp 1.
template <int N>
__device__ __forceinline__ void load_a(const Parameters& p, SharedMemory<N>& shared, int lane) {
  using Shape = BlockShape<N>;
  const int rank = static_cast<int>(cluster_rank());
  RingPosition<Shape::works> position(0);
  RingPosition<Shape::stages> ring(0);
  Packing<N> packing{shared, lane};
  // Waits until both blocks are done with the next stage, and tells both that this warp will be, once the others are.
  auto await_stage = [&] {
    const std::uint32_t empty = shared_address(&shared.empty[ring.slot]);
    barrier_wait(empty, ring.parity ^ 1);
    if (lane < cluster_blocks) barrier_arrive_at(address_in(lane, empty));
  };
  while (true) {
    barrier_wait(shared_address(&shared.work_full[position.slot]), position.parity);
    const Work& work = shared.work[position.slot];
    const LoadJob job(work);
    const int pack_block = work.pack_block;
    packing.row = work.pack_row, packing.rows = work.pack_rows;
    barrier_arrive(shared_address(&shared.work_empty[position.slot]));
    __syncwarp();
    position.next();
    if (job.last) break;
    fence_async_all();  // what the tile waited for was written by ordinary stores
    const GroupMaps& maps = p.maps[job.group];
    const CUtensorMap* map = &maps.x;
    if (job.stage == Stage::down) map = &maps.activated;
    if (job.stage == Stage::down_dgrad || job.stage == Stage::down_wgrad) map = &maps.dy;
    if (job.stage == Stage::gate_up_dgrad || job.stage == Stage::gate_up_wgrad) map = &maps.d_pre_activation;
    const bool two = job.rows > 64, combine = job.stage == Stage::combine;
    int c0 = job.sums_rows ? job.output_row : 0, c1 = job.row_begin + rank * box_rows, packed = 0;
#pragma unroll 1
    for (int k = 0; k < job.k_steps; ++k) {
      if (packed < job.pack_steps && k == packed * job.pack_interval) packing.begin(ring, packed++);
      packing.advance();
      await_stage();
      if (lane == 0) {
        const std::uint32_t place = shared_address(shared.stage[ring.slot]) + rank * (box_rows * 128);
        const std::uint32_t full = shared_address(&shared.full[ring.slot]);
        if (combine) {
          barrier_arrive(full);
        } else {
          constexpr std::uint16_t both = 3;
          barrier_arrive_expect(full, two ? 16384 : 8192);
          tma_load_to_all(place, map, full, c0, c1, both);
          if (two)
            tma_load_to_all(place + 8192, map, full, job.sums_rows ? c0 + 64 : c0, job.sums_rows ? c1 : c1 + 64, both);
        }
      }
      __syncwarp();
      (job.sums_rows ? c1 : c0) += depth;
      ring.next();
    }
    if (job.pack_steps > 0) packing.publish(pack_block);
  }
  named_barrier_arrive(barrier_end, 2 * consumer_threads + 2 * 32);
}

// Warp 2.
template <int N>
__device__ __forceinline__ void load_b(const Parameters& p, SharedMemory<N>& shared, int lane) {
  using Shape = BlockShape<N>;
  const schedule::Sizes& sizes = shared.data().pass.sizes;
  RingPosition<Shape::works> position(0);
  RingPosition<Shape::stages> ring(0);
  while (true) {
    barrier_wait(shared_address(&shared.work_full[position.slot]), position.parity);
    const Work& work = shared.work[position.slot];
    const LoadJob job(work);
    barrier_arrive(shared_address(&shared.work_empty[position.slot]));
    __syncwarp();
    position.next();
    if (job.last) break;
    fence_async_all();
    const GroupMaps& maps = p.maps[job.group];
    const bool of_down = job.stage == Stage::down || job.stage == Stage::down_dgrad;
    const bool again = job.stage == Stage::gate_up && sizes.direction == schedule::Direction::backward;
    const CUtensorMap* apart = of_down ? maps.down_apart : again ? maps.gate_up_again_apart : maps.gate_up_apart;
    const CUtensorMap* map = of_down ? &maps.down_proj : again ? &maps.gate_up_again : &maps.gate_up_proj;
    if (apart) map = apart + job.expert;
    const int expert = apart ? 0 : job.expert;  // where it is in the map
    if (job.stage == Stage::gate_up_wgrad) map = &maps.x;
    if (job.stage == Stage::down_wgrad) map = &maps.activated;
    if (job.stage == Stage::combine) map = &maps.slots;
    // 32 gate rows and the 32 up rows that belong to them, in turns; without a gate simply the next rows.
    const int factor = sizes.gate_up_factor, width = static_cast<int>(shared.data().groups[job.group].width);
    const int second = factor == 2 ? width : box_rows, next = factor == 2 ? box_rows : 2 * box_rows;
    if (job.stage == Stage::down_dgrad) {  // its epilogue reads the pre-activation, which is nowhere near
      const int boxes = (job.rows > 64 ? 4 : 2) * job.blocks * factor;
      for (int i = lane; i < boxes; i += 32) {
        const int box = i / factor;
        tma_prefetch(&maps.pre_activation, job.column + box % job.blocks * 64 + i % factor * width,
                     job.row_begin + box / job.blocks * box_rows);
      }
      __syncwarp();
    }
    const int tokens = job.stage == Stage::combine ? combine_tokens<N>(sizes.top_k) : 0;
    int left = job.pack_steps, next_pack = 0;
#pragma unroll 1
    for (int k = 0; k < job.k_steps; ++k) {
      if (left > 0 && k == next_pack) {  // the stage passes
        barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
        if (lane == 0) barrier_arrive(shared_address(&shared.full[ring.slot]));
        --left, next_pack += job.pack_interval;
        ring.next();
      }
      barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
      if (lane == 0) {
        const std::uint32_t full = shared_address(&shared.full[ring.slot]);
        std::uint32_t place =
            shared_address(shared.stage[ring.slot]) + (job.stage == Stage::combine ? 0 : Shape::a_bytes);
        if (job.stage == Stage::combine) {
          const int begin = k * tokens, slots = (job.rows - begin < tokens ? job.rows - begin : tokens) * sizes.top_k;
          const int boxes = (slots + box_rows - 1) / box_rows;
          barrier_arrive_expect(full, job.blocks * boxes * 4096);
#pragma unroll 1
          for (int b = 0; b < job.blocks; ++b) {
#pragma unroll 1
            for (int i = 0; i < boxes; ++i) {
              tma_load(place + (b * slot_boxes<N> + i) * 4096, map, full, job.column + 64 * b,
                       (job.row_begin + begin) * sizes.top_k + i * box_rows);
            }
          }
        } else {
          barrier_arrive_expect(full, job.blocks * 8192);
          if (job.stage == Stage::gate_up) {
            int row = job.column;
#pragma unroll 1
            for (int i = 0; i < job.blocks; ++i, place += 8192, row += next) {
              tma_load(place, map, full, k * depth, row, expert);
              tma_load(place + 4096, map, full, k * depth, row + second, expert);
            }
          } else if (job.sums_rows) {
#pragma unroll 1
            for (int i = 0; i < job.blocks; ++i, place += 8192) {
              tma_load(place, map, full, job.column + 64 * i, job.row_begin + k * depth);
              tma_load(place + 4096, map, full, job.column + 64 * i, job.row_begin + k * depth + box_rows);
            }
          } else {
            const bool along_k = job.stage == Stage::down;
            int c0 = along_k ? k * depth : job.column, c1 = along_k ? job.column : k * depth;
#pragma unroll 1
            for (int i = 0; i < job.blocks; ++i, place += 8192) {
              tma_load(place, map, full, c0, c1, expert);
              (along_k ? c1 : c0) += 64;
            }
          }
        }
      }
      __syncwarp();
      ring.next();
    }
  }
}

// --- packed rows: the first ones -------------------------------------------------------------------------------------

// Copies routed rows first + part, first + part + parts, .. of [first, last) of row block `block` (counted over all
// experts) with one warp, and counts them.
__device__ __forceinline__ void pack_rows(const PassData& data, const schedule::CounterMap& map, std::int64_t block,
                                          std::int64_t first, std::int64_t last, int part, int parts, int lane) {
  const std::int64_t hidden = data.pass.sizes.hidden_size;
  const unsigned top_k = static_cast<unsigned>(data.pass.sizes.top_k);
  auto copy = [&](const bfloat16* from, bfloat16* to) {
    constexpr int batch = 4;  // pieces of 16 bytes a lane has on their way
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
  unsigned count = 0;
  for (std::int64_t begin = first + part; begin < last; begin += 32 * parts) {
    const std::int64_t mine = begin + lane * parts;
    const unsigned route = mine < last ? static_cast<unsigned>(data.pass.layout.row_route[mine]) : 0;
    const unsigned token = route / top_k;
#pragma unroll 1
    for (int i = 0; i < 32 && begin + i * parts < last; ++i, ++count) {
      const std::int64_t row = begin + i * parts, from = __shfl_sync(~0u, token, i);
      if (data.packed_x) copy(data.x + from * data.x_stride, data.packed_x + row * hidden);
      if (data.packed_dy) copy(data.dy + from * data.dy_stride, data.packed_dy + row * hidden);
    }
  }
  if (count == 0) return;
  fence_async_all();  // the copy engine reads these rows
  __threadfence();
  __syncwarp();
  if (lane == 0) {
    add_release(data.counters.local + map.gate_up_done + block, static_cast<unsigned long long>(count) << packed_shift);
  }
}

// The first blocks' rows, by all warps of the blocks that are there: a block that starts late need not be waited for.
__device__ __forceinline__ void pack_first_rows(const PassData& data, const schedule::CounterMap& map, int lane) {
  const schedule::Pass& pass = data.pass;
  if (pass.sizes.local_experts == 0) return;
  constexpr int units = 16;  // of a block
  const std::int64_t blocks = schedule::min_of(pass.routed_blocks(), pass.sizes.tile.group_blocks);
  auto take = [&] {
    const unsigned long long unit = lane == 0 ? atomicAdd(data.counters.control + 2, 1ull) : 0;
    return static_cast<std::int64_t>(__shfl_sync(~0u, unit, 0));
  };
  for (std::int64_t unit = take(); unit < blocks * units; unit = take()) {
    const schedule::RowRange rows = rows_of_block(pass, unit / units);
    pack_rows(data, map, unit / units, rows.begin, rows.end, static_cast<int>(unit % units), units, lane);
  }
}

}  // namespace moelith::executors::cuda::sm90
