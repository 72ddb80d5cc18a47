// The persistent kernel of a pass, and its launch. Included by one file for each instantiation, so that they are compiled
// side by side.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "executors/cuda/sm90_epilogue.cuh"
#include "executors/cuda/sm90_load.cuh"
#include "executors/cuda/sm90_rows.cuh"
#include "executors/cuda/sm90_tensor_map.hpp"
#include "moelith/tensor.hpp"

namespace moelith::executors::cuda::sm90 {

// Launches the pass with output tiles of N columns. Throws Error(device_error).
template <schedule::Direction Pass, int N>
void launch(const PassData& data, int blocks, cudaStream_t stream);

using schedule::Direction;

template <int N>
__device__ inline void raise_signals(const Parameters& p, const Work& work) {
  __builtin_assume(p.data.pass.sizes.ranks == 1);
  schedule::for_each_signal(p.data.pass, p.counter_map, work.tile, [&](const schedule::Signal& signal) {
    unsigned long long* base =
        signal.array == schedule::CounterArray::local ? p.data.counters.local : p.data.counters.arrivals;
    add_release(base + signal.index, 1);
  });
}

template <Direction Pass, int N>
__device__ inline void compute_tiles(const Parameters& p, SharedMemory<N>& shared, int group) {
  using Shape = BlockShape<N>;
  const PassData& data = p.data;
  __builtin_assume(data.pass.sizes.ranks == 1);
  const std::int64_t hidden = data.pass.sizes.hidden_size;
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
    const int rows = work.rows, k_steps = work.k_steps;
    const std::uint32_t first_step = work.first_step;
    const Stage stage = work.stage;
    // One stage after the other has its own sums, so that none is alive across another's.
    const int my_turn = barrier_turn + group, your_turn = barrier_turn + 1 - group;
    auto multiplied = [&](auto& sums, auto a, auto b, bool gathered) {
      multiply<a.value, b.value>(shared, sums, rows, first_step, k_steps, gathered, my_turn, your_turn);
      note(2);
    };
    auto pass_turn = [&] {
      named_barrier_sync(my_turn, 2 * consumer_threads);
      named_barrier_arrive(your_turn, 2 * consumer_threads);
      note(2);
    };
    constexpr std::integral_constant<Major, Major::k> along_k;
    constexpr std::integral_constant<Major, Major::mn> along_mn;
    const ExpertGroup& tensors = data.groups[work.group];
    if (stage == Stage::combine) {
      pass_turn();
      combine(data, work, data.pass.sizes.tile.columns, thread_now() % 128);
    } else if (stage == Stage::gate_up) {
      Sums<N> sums;
      multiplied(sums, along_k, along_k, true);
      activate_rows<N>(data, sums, work, Warp::now(shared));
    } else if (stage == Stage::down && Pass == Direction::forward) {
      Sums<N> sums;
      multiplied(sums, along_k, along_k, false);
      const bf16* bias = tensors.down_bias ? tensors.down_bias.of(work.expert, hidden) + work.column : nullptr;
      rows_to_slots<N>(sums, work, bias, tensors.slots, hidden, Warp::now(shared));
    } else if constexpr (Pass == Direction::backward) {
      if (stage == Stage::down_dgrad) {
        Sums<N> sums;
        multiplied(sums, along_k, along_mn, true);
        activation_gradient<N>(data, sums, work, Warp::now(shared));
      } else if (stage == Stage::gate_up_dgrad) {
        Sums<N> sums;
        multiplied(sums, along_k, along_mn, false);
        rows_to_slots<N>(sums, work, nullptr, tensors.slots, hidden, Warp::now(shared));
      } else if (stage == Stage::gate_up_bias_grad || stage == Stage::down_bias_grad) {
        pass_turn();
        if (stage == Stage::gate_up_bias_grad) {
          gate_up_bias_gradient(data, work, thread_now() % 128);
        } else {
          down_bias_gradient(data, work, thread_now() % 128);
        }
      } else {
        Sums<N> sums;
        multiplied(sums, along_mn, along_mn, true);
        const bool of_gate_up = stage == Stage::gate_up_wgrad;
        const std::int64_t pre_width = data.pass.sizes.gate_up_factor * tensors.width;
        store_weight_gradient<N>(sums, work, of_gate_up ? tensors.gate_up_grad : tensors.down_grad,
                                 of_gate_up ? pre_width : hidden, of_gate_up ? hidden : tensors.width, Warp::now(shared));
      }
    }
    // The copy engine of other SMs reads some of what was just written.
    fence_async_all();
    named_barrier_sync(barrier_own + group, consumer_threads);
    if (thread_now() % 128 == 0) {
      if (data.trace && event < data.trace_room) {
        const std::uint32_t now = cycles();
        data.trace[(blockIdx.x * 2 + group) * std::int64_t(data.trace_room) + event++] =
            TileEvent{global_time(), moment[1] - moment[0], moment[2] - moment[1], now - moment[2],
                      static_cast<std::int32_t>(stage), work.tile.expert, static_cast<std::int32_t>(work.tile.row_block),
                      work.tile.column_block};
      }
      __threadfence();
      raise_signals<N>(p, work);
      barrier_arrive(shared_address(&shared.work_empty[position.slot]));
    }
    position.next();
    position.next();
  }
  named_barrier_arrive(barrier_end, 2 * consumer_threads + 32);
}

template <Direction Pass, int N>
__global__ void __launch_bounds__(threads, 1) run_pass(const __grid_constant__ Parameters p) {
  using Shape = BlockShape<N>;
  extern __shared__ std::uint8_t raw[];
  const std::uint32_t misalignment = (1024 - (shared_address(raw) & 1023)) & 1023;
  SharedMemory<N>& shared = *reinterpret_cast<SharedMemory<N>*>(raw + misalignment);
  const int thread = threadIdx.x;
  if (thread == 0) {
    for (int s = 0; s < Shape::stages; ++s) {
      barrier_init(shared_address(&shared.full[s]), full_arrivals);
      barrier_init(shared_address(&shared.empty[s]), empty_arrivals);
    }
    for (int w = 0; w < Shape::works; ++w) {
      barrier_init(shared_address(&shared.work_full[w]), work_full_arrivals);
      barrier_init(shared_address(&shared.work_empty[w]), work_empty_arrivals);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (thread < first_consumer) {
    registers_shrink<Shape::fetch_registers>();
    const int warp = thread / 32;
    if (warp == 0) {
      take_tiles<N>(p, shared, thread);
    } else if (warp == 1) {
      if (thread == 32) load_tiles<N>(p, shared);
    } else {
      gather_tiles<N>(p, shared, thread - 64);
    }
  } else {
    registers_grow<Shape::compute_registers>();
    compute_tiles<Pass, N>(p, shared, thread / 128 - 1);
  }
}

template <Direction Pass, int N>
void launch(const PassData& data, int blocks, cudaStream_t stream) {
  const schedule::Sizes& sizes = data.pass.sizes;
  Parameters p{};
  p.data = data;
  p.counter_map = schedule::CounterMap::of(sizes);
  constexpr bool forward = Pass == Direction::forward;
  for (int g = 0; g <= sizes.shared_experts; ++g) {
    const ExpertGroup& group = data.groups[g];
    GroupMaps& maps = p.maps[g];
    const std::int64_t rows = g == 0 ? data.total_rows : sizes.tokens, pre_width = sizes.gate_up_factor * group.width;
    if (group.experts == 0) continue;
    using Boxes = WeightBoxes;
    encode(maps.gate_up_proj, group.gate_up_proj.stacked, group.experts, pre_width, sizes.hidden_size, Boxes::gate_up(N, forward));
    encode(maps.down_proj, group.down_proj.stacked, group.experts, sizes.hidden_size, group.width, Boxes::down(N, forward));
    // Those of experts that lie apart: first the maps for forward, then those for backward.
    const std::int64_t direction = forward ? 0 : group.experts;
    if (group.gate_up_proj.apart) {
      const auto* apart = static_cast<const CUtensorMap*>(group.gate_up_maps);
      maps.gate_up_apart = apart + direction, maps.gate_up_again_apart = apart;
    }
    if (group.down_proj.apart) maps.down_apart = static_cast<const CUtensorMap*>(group.down_maps) + direction;
    encode(maps.activated, group.activated, 0, rows, group.width, 64);
    if (!forward) {
      encode(maps.d_pre_activation, group.d_pre_activation, 0, rows, pre_width, 64);
      if (sizes.recompute) {
        encode(maps.gate_up_again, group.gate_up_proj.stacked, group.experts, pre_width, sizes.hidden_size, Boxes::gate_up(N, true));
      }
    }
  }
  static const int multiprocessors = [] {
    int device = 0, count = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    check(cudaFuncSetAttribute(run_pass<Pass, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<N>),
          "shared memory of the pass");
    return count;
  }();
  if (blocks <= 0 || blocks > multiprocessors) blocks = multiprocessors;
  run_pass<Pass, N><<<blocks, threads, shared_bytes<N>, stream>>>(p);
  check(cudaGetLastError(), forward ? "launch of forward" : "launch of backward");
}

}  // namespace moelith::executors::cuda::sm90
