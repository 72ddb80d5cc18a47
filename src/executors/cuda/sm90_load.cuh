// The loading warps: what each stage of a pass has the copy engine bring into the ring. What it reads was made known to
// the copy engine by those who wrote it, before they signalled.
#pragma once

#include "executors/cuda/sm90_pass.cuh"
#include "executors/cuda/sm90_tensor_map.hpp"

namespace moelith::executors::cuda::sm90 {

// What a loading warp needs of a tile.
struct LoadJob {
  Stage stage;
  bool last, sums_rows, later_round;
  int group, expert, rows, column, blocks, output_row, k_steps;
  int a_row, b_row;  // the first row that A is loaded from; B's of a weight gradient or combine, or that of the pre-activation
  __device__ explicit LoadJob(const Work& work)
      : stage(work.stage),
        last(work.last),
        sums_rows(work.stage == Stage::gate_up_wgrad || work.stage == Stage::down_wgrad),
        later_round(work.round != 0),
        group(work.group),
        expert(work.expert),
        rows(work.rows),
        column(work.column),
        blocks(work.n / 64),
        output_row(work.output_row),
        k_steps(work.k_steps),
        a_row(stage == Stage::gate_up || stage == Stage::down_dgrad || stage == Stage::down_wgrad ? work.packed_begin : work.held_begin),
        b_row(stage == Stage::combine         ? work.row_begin
              : stage == Stage::gate_up_wgrad ? work.packed_begin
                                              : work.held_begin) {}
};

// Warp 1.
template <int N>
__device__ __forceinline__ void load_a(const Parameters& p, SharedMemory<N>& shared) {
  using Shape = BlockShape<N>;
  const int rank = static_cast<int>(cluster_rank());
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
    const GroupMaps& maps = p.maps[job.group];
    const CUtensorMap* map = &maps.x;
    if (job.stage == Stage::down) map = &maps.activated;
    if (job.stage == Stage::down_dgrad || job.stage == Stage::down_wgrad) map = &maps.dy;
    if (job.stage == Stage::gate_up_dgrad || job.stage == Stage::gate_up_wgrad) map = &maps.d_pre_activation;
    const bool two = job.rows > 64, combine = job.stage == Stage::combine;
    int c0 = job.sums_rows ? job.output_row : 0, c1 = job.a_row + rank * box_rows;
#pragma unroll 1
    for (int k = 0; k < job.k_steps; ++k) {
      barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);  // both blocks are done with it
      if (elected()) {
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
  }
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
    const GroupMaps& maps = p.maps[job.group];
    const bool of_down = job.stage == Stage::down || job.stage == Stage::down_dgrad;
    const bool again = job.stage == Stage::gate_up && sizes.direction == schedule::Direction::backward;
    const CUtensorMap* apart = of_down ? maps.down_apart : again ? maps.gate_up_again_apart : maps.gate_up_apart;
    const CUtensorMap* map = of_down ? &maps.down_proj : again ? &maps.gate_up_again : &maps.gate_up_proj;
    if (apart) map = apart + job.expert;
    const int expert = apart ? 0 : job.expert;  // where it is in the map
    if (job.stage == Stage::gate_up_wgrad) map = &maps.x_columns;
    if (job.stage == Stage::down_wgrad) map = &maps.activated;
    if (job.stage == Stage::combine) map = &maps.slots;
    // A box of gate_up_proj: 32 gate rows and the 32 up rows that belong to them; without a gate the next 64 rows.
    const int factor = sizes.gate_up_factor, width = static_cast<int>(shared.data().groups[job.group].width);
    const int next = WeightBoxes::gate_up_rows(factor);
    const int tokens = job.stage == Stage::combine ? combine_tokens<N>(sizes.top_k) : 0;
    // The epilogue of down_dgrad reads the pre-activation, which is nowhere near; that of a later round has just been made.
    // Not long before: what is in the second-level cache does not stay there for 20 us.
    const bool asks = job.stage == Stage::down_dgrad && !(job.later_round && !sizes.recompute);
    const int asks_at = asks ? max(0, job.k_steps - Shape::ask_stages) : -1;
#pragma unroll 1
    for (int k = 0; k < job.k_steps; ++k) {
      if (k == asks_at) {
        const int boxes = (job.rows > 64 ? 4 : 2) * job.blocks * factor;
        for (int i = lane; i < boxes; i += 32) {
          const int box = i / factor;
          tma_prefetch(&maps.pre_activation, job.column + box % job.blocks * 64 + i % factor * width,
                       job.b_row + box / job.blocks * box_rows);
        }
        __syncwarp();
      }
      barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
      if (elected()) {
        count_up(shared_address(&shared.loaded_stages), 1);
        const std::uint32_t full = shared_address(&shared.full[ring.slot]);
        std::uint32_t place =
            shared_address(shared.stage[ring.slot]) + (job.stage == Stage::combine ? 0 : Shape::a_bytes);
        if (job.stage == Stage::combine) {
          barrier_arrive_expect(full, job.blocks * slot_rows<N> * 128);
#pragma unroll 1
          for (int i = 0; i < job.blocks; ++i) {
            tma_load(place + i * (slot_rows<N> * 128), map, full, job.column + 64 * i,
                     (job.b_row + k * tokens) * sizes.top_k);
          }
        } else {
          barrier_arrive_expect(full, job.blocks * 8192);
          if (job.stage == Stage::gate_up) {
            int row = job.column;
#pragma unroll 1
            for (int i = 0; i < job.blocks; ++i, place += 8192, row += next) {
              tma_load(place, map, full, k * depth, row, 0, expert);
            }
          } else if (job.sums_rows) {
#pragma unroll 1
            for (int i = 0; i < job.blocks; ++i, place += 8192) {
              tma_load(place, map, full, job.column + 64 * i, job.b_row + k * depth);
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
    if (job.k_steps < Shape::least_stages && elected()) count_up(shared_address(&shared.loaded_stages), Shape::least_stages - job.k_steps);
  }
}

}  // namespace moelith::executors::cuda::sm90
