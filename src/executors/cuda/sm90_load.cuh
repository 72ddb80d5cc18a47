// The fetching warps: what each stage of a pass loads into the ring.
#pragma once

#include "executors/cuda/sm90_pass.cuh"

namespace moelith::executors::cuda::sm90 {

// --- warp 0: tiles ---------------------------------------------------------------------------------------------------

// Waits, with the whole warp, until counters [begin, begin + count) have reached the target. False: it took too long.
__device__ inline bool await(const PassData& data, const schedule::Wait& wait, int lane) {
  const unsigned long long* base = wait.array == schedule::CounterArray::local ? data.counters.local : data.counters.arrivals;
  const unsigned long long target = static_cast<unsigned long long>(wait.target);
  unsigned long long began = 0;
  for (std::int64_t i = wait.begin + lane; __any_sync(~0u, i < wait.begin + wait.count); i += 32) {
    unsigned spins = 0;
    while (true) {
      const bool done = i >= wait.begin + wait.count || load_acquire(base + i) >= target;
      if (__all_sync(~0u, done)) break;
      __nanosleep(32);
      if ((++spins & 1023u) == 0) {
        unsigned long long now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (began == 0) began = now;
        if (__any_sync(~0u, now - began > data.wait_limit_ns)) return false;
      }
    }
  }
  return true;
}

// Fills `work` but for row_index and first_step.
template <int N>
__device__ inline void describe_tile(const PassData& data, const schedule::Tile& tile, Work& work) {
  const schedule::Sizes& sizes = data.pass.sizes;
  const bool shared = sizes.is_shared(tile.expert);
  const std::int32_t group = shared ? 1 + tile.expert - sizes.local_experts : 0;
  const std::int64_t width = sizes.width(tile.expert), pre_width = sizes.gate_up_factor * width, hidden = sizes.hidden_size;
  work.stage = tile.stage;
  work.last = false;
  work.group = group;
  work.expert = shared ? 0 : tile.expert;
  work.column_block = tile.column_block;
  work.tile = tile;
  work.output_row = work.sum_rows = work.k_steps = 0;
  auto steps = [](std::int64_t k) { return static_cast<std::int32_t>((k + depth - 1) / depth); };
  auto row_tile = [&](std::int64_t k, std::int32_t columns) {
    const schedule::RowRange rows = schedule::tile_rows(data.pass, tile);
    work.row_begin = rows.begin;
    work.rows = static_cast<std::int32_t>(rows.size());
    work.column = tile.column_block * columns;
    work.k_steps = steps(k);
  };
  auto sum_tile = [&](std::int64_t output_rows) {
    const schedule::RowRange rows = data.pass.expert_rows(tile.expert);
    work.row_begin = rows.begin;
    work.sum_rows = static_cast<std::int32_t>(rows.size());
    work.output_row = static_cast<std::int32_t>(tile.row_block) * sizes.tile.wgrad_rows;
    work.rows = static_cast<std::int32_t>(schedule::min_of(rows_per_tile, output_rows - work.output_row));
    work.column = tile.column_block * sizes.tile.wgrad_columns;
    work.k_steps = steps(rows.size());
  };
  switch (tile.stage) {
    case Stage::gate_up: row_tile(hidden, sizes.gate_up_columns()); break;
    case Stage::down: row_tile(width, sizes.tile.columns); break;
    case Stage::down_dgrad: row_tile(hidden, sizes.down_dgrad_columns()); break;
    case Stage::gate_up_dgrad: row_tile(pre_width, sizes.tile.columns); break;
    case Stage::gate_up_wgrad: sum_tile(pre_width); break;
    case Stage::down_wgrad: sum_tile(hidden); break;
    case Stage::gate_up_bias_grad:
    case Stage::down_bias_grad: sum_tile(rows_per_tile); work.k_steps = 0; break;
    default:  // combine
      work.row_begin = tile.row_block * sizes.tile.token_block;
      work.rows = static_cast<std::int32_t>(schedule::min_of(sizes.tile.token_block, sizes.tokens - work.row_begin));
      work.column = tile.column_block * sizes.tile.columns;
  }
}

template <int N>
__device__ inline void take_tiles(const Parameters& p, SharedMemory<N>& shared, int lane) {
  constexpr int slots = SharedMemory<N>::Shape::works;
  const PassData& data = p.data;
  __builtin_assume(data.pass.sizes.ranks == 1);
  const std::int64_t tiles = schedule::tile_count(data.pass);
  RingPosition<slots> position(0);
  std::uint32_t step = 0;
  int ends = 0;  // each computing warpgroup gets an end of its own
  auto take = [&]() -> unsigned long long {
    return lane == 0 ? atomicAdd(data.counters.control, 1ull) : 0ull;
  };
  unsigned long long taken = take();
  while (ends < 2) {
    const std::int64_t index = static_cast<std::int64_t>(__shfl_sync(~0u, taken, 0));
    bool last = ends > 0 || index >= tiles;
    if (!last) taken = take();  // in flight while this tile is prepared
    schedule::Tile tile{};
    bool has_rows = false;
    std::int32_t row_index[rows_per_tile / 32];
    if (!last) {
      tile = schedule::tile_at(data.pass, index);
      has_rows = tile.stage == Stage::gate_up || tile.stage == Stage::down || tile.stage == Stage::down_dgrad ||
                 tile.stage == Stage::gate_up_dgrad;
      if (has_rows) {
        const schedule::RowRange rows = schedule::tile_rows(data.pass, tile);
        const bool shared_expert = data.pass.sizes.is_shared(tile.expert);
#pragma unroll
        for (int i = 0; i < rows_per_tile / 32; ++i) {
          const std::int64_t row = rows.begin + lane + 32 * i;
          if (row < rows.end) row_index[i] = shared_expert ? static_cast<std::int32_t>(row) : data.pass.layout.row_route[row];
        }
      }
      const bool ready = schedule::for_each_wait(data.pass, p.counter_map, tile,
                                                 [&](const schedule::Wait& wait) { return await(data, wait, lane); });
      if (!ready) {
        last = true;
        if (lane == 0 && data.error) {
          *data.error = {static_cast<std::int32_t>(tile.stage), tile.expert, static_cast<std::int32_t>(tile.row_block), 0};
          __threadfence_system();
        }
      }
    }
    Work& work = shared.work[position.slot];
    barrier_wait(shared_address(&shared.work_empty[position.slot]), position.parity ^ 1);
    if (last) {
      if (lane == 0) work.last = true, work.k_steps = 0, work.first_step = step;
      ++ends;
    } else {
      if (lane == 0) {
        describe_tile<N>(data, tile, work);
        work.first_step = step;
      }
      __syncwarp();
      step += work.k_steps;
      if (has_rows) {
        const unsigned divisor = work.group > 0 ? 1u : static_cast<unsigned>(data.pass.sizes.top_k);
        const unsigned stride = static_cast<unsigned>((tile.stage == Stage::gate_up ? data.x_stride : data.dy_stride) / 8);
#pragma unroll
        for (int i = 0; i < rows_per_tile / 32; ++i) {
          const int r = lane + 32 * i;
          const bool there = r < work.rows;
          if (there) work.row_index[r] = row_index[i];
          work.row_offset[r] = there ? static_cast<unsigned>(row_index[i]) / divisor * stride : absent_row;
        }
      }
    }
    barrier_arrive(shared_address(&shared.work_full[position.slot]));
    position.next();
  }
  // Counters are clean again once every block has stopped using them.
  named_barrier_sync(barrier_end, 2 * consumer_threads + 32);
  unsigned long long finished = 0;
  if (lane == 0) {
    __threadfence();
    finished = atomicAdd(data.counters.control + 1, 1ull);
    __threadfence();
  }
  if (__shfl_sync(~0u, finished, 0) == gridDim.x - 1) {
    for (std::int64_t i = lane; i < p.counter_map.local_size; i += 32) data.counters.local[i] = 0;
    for (std::int64_t i = lane; i < p.counter_map.arrivals_size; i += 32) data.counters.arrivals[i] = 0;
    if (lane < PassCounters::control_counters) data.counters.control[lane] = 0;
  }
}

// --- warp 1: the copy engine -----------------------------------------------------------------------------------------

template <int N>
__device__ inline void load_tiles(const Parameters& p, SharedMemory<N>& shared) {
  using Shape = BlockShape<N>;
  const schedule::Sizes& sizes = p.data.pass.sizes;
  RingPosition<Shape::works> position(0);
  while (true) {
    barrier_wait(shared_address(&shared.work_full[position.slot]), position.parity);
    const Work& work = shared.work[position.slot];
    const bool last = work.last;
    const Stage stage = work.stage;
    const int column = work.column, k_steps = work.k_steps, rows = work.rows;
    const int row_begin = static_cast<int>(work.row_begin), output_row = work.output_row, sum_rows = work.sum_rows;
    const GroupMaps& maps = p.maps[work.group];
    const int width = static_cast<int>(p.data.groups[work.group].width);
    const bool of_down = stage == Stage::down || stage == Stage::down_dgrad;
    const bool again = stage == Stage::gate_up && sizes.direction == schedule::Direction::backward;
    const CUtensorMap* apart = of_down ? maps.down_apart : again ? maps.gate_up_again_apart : maps.gate_up_apart;
    const CUtensorMap* weights = of_down ? &maps.down_proj : again ? &maps.gate_up_again : &maps.gate_up_proj;
    if (apart) weights = apart + work.expert;
    const int expert = apart ? 0 : work.expert;  // where it is in the map
    RingPosition<Shape::stages> ring(work.first_step);
    barrier_arrive(shared_address(&shared.work_empty[position.slot]));
    position.next();
    if (last) return;
    fence_async_all();  // what the tile waited for was written by ordinary stores
    // Second half of a gate_up tile: the up rows, or without a gate simply the next columns.
    const int second = sizes.gate_up_factor == 2 ? width + column : column + N / 2;
    const int row_boxes = rows > 64 ? 2 : 1;
#pragma unroll 1
    for (int k = 0; k < k_steps; ++k, ring.next()) {
      barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
      const std::uint32_t a = shared_address(shared.stage[ring.slot]), b = a + Shape::a_bytes;
      const std::uint32_t full = shared_address(&shared.full[ring.slot]);
      switch (stage) {
        case Stage::gate_up:
          barrier_arrive_expect(full, Shape::b_bytes);
          tma_load(b, weights, full, k * depth, column, expert);
          tma_load(b + Shape::b_bytes / 2, weights, full, k * depth, second, expert);
          break;
        case Stage::down:
          barrier_arrive_expect(full, row_boxes * 8192 + Shape::b_bytes);
          for (int i = 0; i < row_boxes; ++i) tma_load(a + i * 8192, &maps.activated, full, k * depth, row_begin + 64 * i);
          tma_load(b, weights, full, k * depth, column, expert);
          break;
        case Stage::down_dgrad:
          barrier_arrive_expect(full, Shape::b_bytes);
          for (int i = 0; i < N / 64; ++i) {
            tma_load(b + i * mn_block_bytes, weights, full, column + 64 * i, k * depth, expert);
          }
          break;
        case Stage::gate_up_dgrad:
          barrier_arrive_expect(full, row_boxes * 8192 + Shape::b_bytes);
          for (int i = 0; i < row_boxes; ++i) {
            tma_load(a + i * 8192, &maps.d_pre_activation, full, k * depth, row_begin + 64 * i);
          }
          for (int i = 0; i < N / 64; ++i) {
            tma_load(b + i * mn_block_bytes, weights, full, column + 64 * i, k * depth, expert);
          }
          break;
        // The last rows of an expert, where not 64 of them are left, are copied by the gathering warps, which zero what
        // follows: a box would bring rows of the next expert.
        case Stage::gate_up_wgrad:
          if ((k + 1) * depth > sum_rows) {
            barrier_arrive(full);
            break;
          }
          barrier_arrive_expect(full, row_boxes * mn_block_bytes);
          for (int i = 0; i < row_boxes; ++i) {
            tma_load(a + i * mn_block_bytes, &maps.d_pre_activation, full, output_row + 64 * i, row_begin + k * depth);
          }
          break;
        default:  // down_wgrad
          if ((k + 1) * depth > sum_rows) {
            barrier_arrive(full);
            break;
          }
          barrier_arrive_expect(full, Shape::b_bytes);
          for (int i = 0; i < N / 64; ++i) {
            tma_load(b + i * mn_block_bytes, &maps.activated, full, column + 64 * i, row_begin + k * depth);
          }
      }
    }
  }
}

// --- warps 2 and 3: gathered rows ------------------------------------------------------------------------------------

// Copies 32 rows of 128 bytes, 4 rows at a time: lane l copies 16-byte piece l % 8 of rows l / 8 + 4 i into the swizzled
// block at `destination` (aligned to 1024). `offset`: of lane l, where row l begins, in 16 bytes; absent_row: zeros.
__device__ inline void gather_32_rows(std::uint32_t destination, const bfloat16* base, std::uint32_t offset, bool inside, int lane) {
  const int piece = lane % 8, row = lane / 8;
  const std::uint32_t even = destination + row * 128 + ((piece ^ row) << 4);
  const std::uint32_t odd = destination + (row + 4) * 128 + ((piece ^ (row + 4)) << 4);
  // All shuffles first: they and the copies keep their order, and one by one each copy would wait for its shuffle.
  std::uint32_t from[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) from[i] = __shfl_sync(~0u, offset, row + 4 * i);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool valid = inside && from[i] != absent_row;
    copy_16_async((i % 2 ? odd : even) + i / 2 * 1024, base + std::uint64_t(valid ? from[i] : 0) * 8, valid);
  }
}
// Of an mn_major operand, `blocks` blocks of 64 columns from `column` on: 32 rows that begin at `offset`.
__device__ inline void gather_columns(std::uint32_t destination, const bfloat16* base, std::uint32_t offset, int blocks,
                                      std::int64_t column, std::int64_t columns, int lane) {
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    const std::int64_t c = column + b * 64 + lane % 8 * 8;
    gather_32_rows(destination + b * mn_block_bytes, base + (c < columns ? c : 0), offset, c < columns, lane);
  }
}

template <int N>
__device__ inline void gather_tiles(const Parameters& p, SharedMemory<N>& shared, int thread) {
  using Shape = BlockShape<N>;
  const PassData& data = p.data;
  const schedule::Sizes& sizes = data.pass.sizes;
  const int lane = thread % 32, first_row = thread / 32 * 32;  // this warp copies rows first_row .. + 31 of each 64
  const std::int64_t hidden = sizes.hidden_size;
  RingPosition<Shape::works> position(0);
  // The stages of all tiles, one after the other, also of those without rows to gather: a parity tells a phase from its
  // neighbours only.
  RingPosition<Shape::stages> ring(0);
  auto begin_stage = [&] {
    barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
    return shared_address(shared.stage[ring.slot]);
  };
  auto end_stage = [&] {
    copy_arrive(shared_address(&shared.full[ring.slot]));
    ring.next();
  };
  while (true) {
    barrier_wait(shared_address(&shared.work_full[position.slot]), position.parity);
    const Work& work = shared.work[position.slot];
    const bool last = work.last;
    const Stage stage = work.stage;
    const int k_steps = work.k_steps, group = work.group, rows = work.rows;
    auto leave_work = [&] {
      barrier_arrive(shared_address(&shared.work_empty[position.slot]));  // each lane for its own reads
      position.next();
    };
    if (last || !is_gathered(stage)) {
      leave_work();
      if (last) return;
#pragma unroll 1
      for (int k = 0; k < k_steps; ++k) {
        begin_stage();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.full[ring.slot]), 32);
        ring.next();
      }
      continue;
    }
    if (stage == Stage::gate_up || stage == Stage::down_dgrad) {  // A: rows of x or dY, 64 columns at a time
      const std::uint32_t offset = work.row_offset[first_row + lane], offset_below = work.row_offset[64 + first_row + lane];
      leave_work();
      const bfloat16* base = (stage == Stage::gate_up ? data.x : data.dy) + lane % 8 * 8;
      const int columns = static_cast<int>(hidden) - lane % 8 * 8;
#pragma unroll 1
      for (int k = 0; k < k_steps; ++k) {
        const std::uint32_t a = begin_stage() + first_row * 128;
        const bool inside = k * depth < columns;
        const bfloat16* source = base + (inside ? k * depth : 0);
        gather_32_rows(a, source, offset, inside, lane);
        if (rows > 64) gather_32_rows(a + 64 * 128, source, offset_below, inside, lane);  // else only 64 are multiplied
        end_stage();
      }
    } else {
      const bool of_x = stage == Stage::gate_up_wgrad;
      const bfloat16* base = of_x ? data.x : data.dy;
      const unsigned stride = static_cast<unsigned>((of_x ? data.x_stride : data.dy_stride) / 8);
      const unsigned divisor = group > 0 ? 1u : static_cast<unsigned>(sizes.top_k);
      const std::int64_t row_begin = work.row_begin;
      const int sum_rows = work.sum_rows, column = work.column, output_row = work.output_row;
      const int row_boxes = rows > 64 ? 2 : 1;
      leave_work();
      const std::int32_t* routes = data.pass.layout.row_route + row_begin;
      // Where the row of a lane begins, one stage ahead.
      auto route_of = [&](int k) -> unsigned {
        const int r = k * depth + first_row + lane;
        return r >= sum_rows ? 0u : group > 0 ? static_cast<unsigned>(r) : static_cast<unsigned>(__ldg(routes + r));
      };
      unsigned route = route_of(0);
#pragma unroll 1
      for (int k = 0; k < k_steps; ++k) {
        const int r = k * depth + first_row + lane;
        const std::uint32_t offset = r < sum_rows ? route / divisor * stride : absent_row;
        route = route_of(k + 1);
        const std::uint32_t stage_address = begin_stage();
        const std::uint32_t a = stage_address + first_row * 128, b = a + Shape::a_bytes;
        if (of_x) {
          gather_columns(b, base, offset, N / 64, column, hidden, lane);
        } else {
          gather_columns(a, base, offset, row_boxes, output_row, hidden, lane);
        }
        if ((k + 1) * depth > sum_rows) {  // the other operand's last rows, for which the copy engine stood back
          const ExpertGroup& tensors = data.groups[group];
          const std::int64_t width = of_x ? sizes.gate_up_factor * tensors.width : tensors.width;
          const bfloat16* other = (of_x ? tensors.d_pre_activation : tensors.activated) + row_begin * width;
          const std::uint32_t at = r < sum_rows ? static_cast<std::uint32_t>(r * (width / 8)) : absent_row;
          if (of_x) {
            gather_columns(a, other, at, row_boxes, output_row, width, lane);
          } else {
            gather_columns(b, other, at, N / 64, column, width, lane);
          }
        }
        end_stage();
      }
    }
  }
}

}  // namespace moelith::executors::cuda::sm90
