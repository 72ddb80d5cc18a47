// The persistent kernel of a pass, and its launch. Included by one file for each instantiation, so that they are
// compiled side by side.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <string>

#include "cuda_check.hpp"
#include "executors/cuda/sm90_gradients.cuh"
#include "executors/cuda/sm90_load.cuh"
#include "executors/cuda/sm90_rows.cuh"
#include "executors/cuda/sm90_tiles.cuh"
#include "moelith/tensor.hpp"

namespace moelith::executors::cuda::sm90 {

// Launches the pass with output tiles of N columns; Ranks: of several ranks; beside_previous: it may start before the
// kernel in front of it in the stream has ended. Throws Error(device_error).
template <schedule::Direction Pass, int N, bool Ranks>
void launch(const PassData& data, int blocks, cudaStream_t stream, bool beside_previous);

template <Direction Pass, int N, bool Ranks>
__device__ __forceinline__ void compute_tiles(SharedMemory<N>& shared, int group) {
  using Shape = BlockShape<N>;
  const PassData& data = shared.data();
  if (group == 1) named_barrier_arrive(barrier_turn, 2 * consumer_threads);  // the first turn is warpgroup 0's
  RingPosition<Shape::works> position(group);
  std::int32_t event = 0;
  std::uint32_t* moment = shared.moment[group];
  auto note = [&](int i) {
    if (data.trace && thread_now() % 128 == 0) moment[i] = cycles();
  };
  while (true) {
    note(0);
    barrier_wait(shared_address(&shared.work_full[position.slot]), position.parity);
    const Work& work = shared.work[position.slot];
    if (work.last) break;
    note(1);
    const Stage stage = work.stage;
    // One stage after the other has its own sums, so that none is alive across another's.
    const int my_turn = barrier_turn + group, your_turn = barrier_turn + 1 - group;
    auto multiplied_from = [&](auto& sums, auto a, auto b, auto&& begin) {
      multiply<a.value, b.value>(shared, sums, work, my_turn, your_turn, begin);
      note(2);
    };
    auto multiplied = [&](auto& sums, auto a, auto b) { multiplied_from(sums, a, b, [&] { sums.clear(); }); };
    auto pass_turn = [&] {
      named_barrier_sync(my_turn, 2 * consumer_threads);
      named_barrier_arrive(your_turn, 2 * consumer_threads);
      note(2);
    };
    constexpr std::integral_constant<Major, Major::k> along_k;
    constexpr std::integral_constant<Major, Major::mn> along_mn;
    const ExpertGroup& tensors = data.groups[work.group];
    const std::int64_t& hidden = data.pass.sizes.hidden_size;
    if (stage == Stage::combine) {
      combine<N>(
          shared, work, group, [&] { named_barrier_sync(my_turn, 2 * consumer_threads); },
          [&] {
            named_barrier_arrive(your_turn, 2 * consumer_threads);
            note(2);
          });
    } else if (stage == Stage::gate_up) {
      Sums<N> sums;
      multiplied(sums, along_k, along_k);
      activate_rows<N, Ranks>(data, sums, work, Warp::now(shared));
    } else if (stage == Stage::down && Pass == Direction::forward) {
      Sums<N> sums;
      multiplied(sums, along_k, along_k);
      const bf16* bias = tensors.down_bias ? tensors.down_bias.of(work.expert, hidden) + work.column : nullptr;
      rows_to_slots<N, Ranks>(sums, work, bias, tensors.slots, hidden, Warp::now(shared));
    } else if constexpr (Pass == Direction::backward) {
      if (stage == Stage::down_dgrad) {
        constexpr int columns = Shape::down_dgrad_columns;
        Sums<columns> sums;
        multiplied(sums, along_k, along_mn);
        activation_gradient<columns, Ranks>(data, sums, work, Warp::now(shared));
      } else if (stage == Stage::gate_up_dgrad) {
        Sums<N> sums;
        multiplied(sums, along_k, along_mn);
        rows_to_slots<N, Ranks>(sums, work, nullptr, tensors.slots, hidden, Warp::now(shared));
      } else if (stage == Stage::gate_up_bias_grad || stage == Stage::down_bias_grad) {
        pass_turn();
        auto* staging = reinterpret_cast<WeightedRow*>(shared.staging[4 * group]);
        if (stage == Stage::gate_up_bias_grad) {
          gate_up_bias_gradient(data, work, staging, group, thread_now() % 128);
        } else {
          down_bias_gradient<Ranks>(data, work, staging, group, thread_now() % 128);
        }
      } else {
        ask_for_old_values<N, Ranks>(shared, data, work);
        Sums<N> sums;
        multiplied_from(sums, along_mn, along_mn, [&] {
          if constexpr (Ranks) {
            read_round_sums(data, sums, work);
          } else {
            sums.clear();
          }
        });
        if (Ranks && work.goes_on) {
          write_round_sums(data, sums, work);
        } else {
          store_weight_gradient<N, Ranks>(shared, data, sums, work, Warp::now(shared));
        }
      }
    }
    // By later tiles, and their copy engine; or what it reads is written over.
    const bool read_here = work.raised >= 0 || work.raised_arrival >= 0 || (Ranks && work.raised_round >= 0);
    if (read_here) fence_async_all();
    named_barrier_sync(barrier_own + group, consumer_threads);
    if (thread_now() % 128 == 0) {
      if (data.trace && event < data.trace_room) {
        const std::uint32_t now = cycles();
        data.trace[(blockIdx.x * 2 + group) * std::int64_t(data.trace_room) + event++] =
            TileEvent{global_time(),
                      moment[1] - moment[0],
                      moment[2] - moment[1],
                      now - moment[2],
                      static_cast<std::int32_t>(stage),
                      work.slot,
                      work.row_block,
                      work.column_block};
      }
      if (read_here) __threadfence();
      if (work.raised >= 0) add_release(data.counters.local + work.raised, 1);
      if (Ranks && work.raised_round >= 0) add_release(data.counters.local + work.raised_round, 1);
      raise_arrival<Ranks>(data, shared.peers(), work);
    }
    barrier_arrive(shared_address(&shared.work_empty[position.slot]));
    position.next();
    position.next();
  }
  named_barrier_arrive(barrier_end, end_threads);
}

// The Layout's arrays into shared memory, where they fit.
template <int N>
__device__ __forceinline__ void copy_layout(SharedMemory<N>& shared, const schedule::Pass& pass, int thread) {
  const schedule::Sizes& sizes = pass.sizes;
  const std::int64_t words = schedule::Layout::header_length(sizes.ranks, sizes.local_experts, sizes.max_rounds);
  if (words > SharedMemory<N>::layout_words) return;
  const std::int64_t* from = pass.layout.valid_tokens;
  for (int i = thread; i < static_cast<int>(words); i += threads) shared.layout_header[i] = from[i];
  if (thread != 0) return;
  schedule::Layout& copy = reinterpret_cast<PassData*>(shared.data_copy)->pass.layout;
  copy = schedule::Layout::at(shared.layout_header, copy.row_route, sizes.ranks, sizes.local_experts, sizes.max_rounds);
}

// While the kernel in front is at work: three tiles of a pass that has one row are described, so that the instructions are
// there when the pass is known. (To fetch them takes as long as to describe all tiles of a small pass.)
template <Direction Pass, int N>
__device__ __forceinline__ void rehearse(SharedMemory<N>& shared, const schedule::Layout& layout, int thread) {
  auto& pass = reinterpret_cast<PassData*>(shared.data_copy)->pass;
  const std::int32_t experts = pass.sizes.local_experts;
  const std::int64_t words = schedule::Layout::header_length(1, experts);
  if (words > SharedMemory<N>::layout_words) return;
  const auto rehearsed = schedule::Layout::at(shared.layout_header, nullptr, 1, experts);
  // All of the rows that there are, one, are the first expert's.
  for (int i = thread; i < static_cast<int>(words); i += threads) {
    shared.layout_header[i] = shared.layout_header + i == rehearsed.source_begin || shared.layout_header + i == rehearsed.block_begin ? 0 : 1;
  }
  if (thread == 0) pass.layout = rehearsed;
  __syncthreads();
  const int warp = thread / 32;
  if (thread % 32 == 0 && warp < 3) {
    const std::int64_t last = count_tiles<Pass, false>(pass) - 1;
    describe<Pass, N, false>(shared.data(), shared.map(), warp == 0 ? 0 : warp == 1 ? last / 2 : last, shared.work[warp]);
  }
  __syncthreads();
  if (thread == 0) pass.layout = layout;
}

template <Direction Pass, int N, bool Ranks>
__global__ void __launch_bounds__(threads, 1) run_pass(const __grid_constant__ Parameters p) {
  using Shape = BlockShape<N>;
  extern __shared__ __align__(1024) std::uint8_t raw[];  // at a constant address, which needs no register
  SharedMemory<N>& shared = *reinterpret_cast<SharedMemory<N>*>(raw);
  const int thread = threadIdx.x;
  if constexpr (Ranks) {
    if (*p.data.stopped) return;  // all blocks alike: the exchange has written it
  }
  // Up to await_previous() nothing is read but what the launch brought.
  if (thread == 0) {
    for (int s = 0; s < Shape::stages; ++s) {
      barrier_init(shared_address(&shared.full[s]), full_arrivals);
      barrier_init(shared_address(&shared.empty[s]), empty_arrivals);
    }
    for (int w = 0; w < Shape::works; ++w) {
      barrier_init(shared_address(&shared.work_full[w]), work_full_arrivals);
      barrier_init(shared_address(&shared.work_empty[w]), work_empty_arrivals);
      barrier_init(shared_address(&shared.mail_full[w]), 1);
      barrier_init(shared_address(&shared.mail_empty[w]), mail_empty_arrivals);
    }
    for (std::uint64_t& full : shared.packing_full) barrier_init(shared_address(&full), 1);
    shared.loaded_stages = 0;
    fence_barrier_init();
  } else if (thread == 32) {
    const GroupMaps& maps = p.maps[0];
    for (const CUtensorMap* map : {&maps.x, &maps.gate_up_proj, &maps.activated, &maps.down_proj, &maps.slots}) prefetch_map(map);
  }
  auto copy = [&]<class T>(std::uint8_t* to, const T& from) {
    static_assert(sizeof(T) % 4 == 0);
    for (int i = thread; i < static_cast<int>(sizeof(T) / 4); i += threads) {
      reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(&from)[i];
    }
  };
  copy(shared.data_copy, p.data);
  copy(shared.map_copy, p.counter_map);
  if constexpr (Ranks) copy(shared.peers_copy, *p.data.peers);
  cluster_sync();
  if constexpr (Ranks) {
    if (thread == 0) place_packed_rows(p.data, *reinterpret_cast<Peers*>(shared.peers_copy));
  }
  if constexpr (Pass == Direction::forward && !Ranks) {
    if (p.beside_previous) rehearse<Pass, N>(shared, p.data.pass.layout, thread);
  }
  await_previous();
  copy_layout<N>(shared, p.data.pass, thread);
  __syncthreads();
  // Where there is little to do, few warps ask for it, and not the same ones for both.
  describe_all<Pass, N, Ranks>(shared, thread / 32, thread % 32);
  pack_first_rows<Ranks>(shared.data(), shared.peers(), shared.map(), threads / 32 - 1 - thread_now() / 32,
                         thread_now() % 32);
  __syncthreads();
  const int warp = thread_now() / 32, lane = thread_now() % 32;
  if (warp < first_consumer / 32) {
    registers_shrink<Shape::fetch_registers>();
    if (warp == 0) {
      if (cluster_rank() == 0) take_tiles<N, Ranks>(shared, lane);
    } else if (warp == 1) {
      load_a<N>(p, shared);
    } else if (warp == 2) {
      load_b<N>(p, shared, lane);
    } else {
      hand_on_tiles<N, Ranks>(shared, lane);
    }
  } else {
    registers_grow<Shape::compute_registers>();
    compute_tiles<Pass, N, Ranks>(shared, warp / 4 - 1);
  }
  cluster_sync();  // the other block may still write here, or signal
}

// Number of SMs of the current device, on which the kernel may use its shared memory from the first call on.
template <Direction Pass, int N, bool Ranks>
int prepare_device() {
  constexpr int remembered = 32;  // devices
  static std::atomic<int> counts[remembered] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device < remembered) {
    if (const int known = counts[device].load(std::memory_order_acquire)) return known;
  }
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  check_cuda(cudaFuncSetAttribute(run_pass<Pass, N, Ranks>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<N>),
        "shared memory of the pass");
  if (device < remembered) counts[device].store(count, std::memory_order_release);
  return count;
}

template <Direction Pass, int N, bool Ranks>
void launch(const PassData& data, int blocks, cudaStream_t stream, bool beside_previous) {
  const schedule::Sizes& sizes = data.pass.sizes;
  Parameters p{};
  p.data = data;
  p.counter_map = schedule::CounterMap::of(sizes);
  p.beside_previous = beside_previous;
  constexpr bool forward = Pass == Direction::forward;
  for (int g = 0; g <= sizes.shared_experts; ++g) {
    const ExpertGroup& group = data.groups[g];
    GroupMaps& maps = p.maps[g];
    const std::int64_t rows = g == 0 ? data.total_rows : sizes.tokens, pre_width = sizes.gate_up_factor * group.width;
    const std::int64_t hidden = sizes.hidden_size;
    if (g == 0) encode(maps.slots, group.slots, 0, sizes.tokens * sizes.top_k, hidden, slot_rows<N>);
    if (group.experts == 0) continue;
    if (g == 0) {
      encode(maps.x, data.packed_x, 0, data.packed_rows, hidden, box_rows);
      encode(maps.dy, data.packed_dy, 0, data.packed_rows, hidden, box_rows);
    } else {
      encode(maps.x, data.x, 0, rows, hidden, box_rows, data.x_stride);
      encode(maps.dy, data.dy, 0, rows, hidden, box_rows, data.dy_stride);
    }
    using Boxes = WeightBoxes;
    const int factor = sizes.gate_up_factor;
    Boxes::encode_gate_up(maps.gate_up_proj, group.gate_up_proj.stacked, group.experts, factor, group.width, hidden,
                          forward);
    encode(maps.down_proj, group.down_proj.stacked, group.experts, hidden, group.width, Boxes::rows);
    // Those of experts that lie apart: first the maps for forward, then those for backward.
    const std::int64_t direction = forward ? 0 : group.experts;
    if (group.gate_up_proj.apart) {
      const auto* apart = static_cast<const CUtensorMap*>(group.gate_up_maps);
      maps.gate_up_apart = apart + direction, maps.gate_up_again_apart = apart;
    }
    if (group.down_proj.apart) maps.down_apart = static_cast<const CUtensorMap*>(group.down_maps) + direction;
    encode(maps.activated, group.activated, 0, rows, group.width, forward ? box_rows : Boxes::rows);
    if (!forward) {
      encode(maps.d_pre_activation, group.d_pre_activation, 0, rows, pre_width, box_rows);
      encode(maps.pre_activation, group.pre_activation, 0, rows, pre_width, box_rows);
      if (g == 0) encode(maps.x_columns, data.packed_x, 0, data.packed_rows, hidden, Boxes::rows);
      else encode(maps.x_columns, data.x, 0, rows, hidden, Boxes::rows, data.x_stride);
      if (sizes.recompute || sizes.has_rounds())
        Boxes::encode_gate_up(maps.gate_up_again, group.gate_up_proj.stacked, group.experts, factor, group.width,
                              hidden, true);
    }
  }
  const int multiprocessors = prepare_device<Pass, N, Ranks>();
  if (blocks <= 0 || blocks > multiprocessors) blocks = multiprocessors;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster_blocks;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks < cluster_blocks ? cluster_blocks : blocks / cluster_blocks * cluster_blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes<N>;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = beside_previous ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, run_pass<Pass, N, Ranks>, p), forward ? "launch of forward" : "launch of backward");
}

}  // namespace moelith::executors::cuda::sm90
