// Rows of several ranks: where they come from and where what becomes of them goes. `Ranks` is a kernel's template
// argument, whether there are several; with one rank each of these is the one expression that it needs.
#pragma once

#include "executors/cuda/pass_error.cuh"
#include "executors/cuda/sm90_pass.cuh"

namespace moelith::executors::cuda::sm90 {

// The token of a routed row, and the rank that has it. Rows from `last` on have none.
template <bool Ranks>
struct TokenOfRow {
  unsigned token = 0, rank = 0;

  __device__ __forceinline__ TokenOfRow(const PassData& data, std::int64_t row, std::int64_t last) {
    const unsigned route = row < last ? static_cast<unsigned>(data.pass.layout.row_route[row]) : 0;
    token = route / static_cast<unsigned>(data.pass.sizes.top_k);
    if constexpr (Ranks) rank = row < last ? data.row_rank[row] : 0;
  }
  // That of another lane.
  __device__ __forceinline__ TokenOfRow of_lane(int lane) const {
    TokenOfRow other = *this;
    other.token = __shfl_sync(~0u, token, lane);
    if constexpr (Ranks) other.rank = __shfl_sync(~0u, rank, lane);
    return other;
  }
  __device__ __forceinline__ const bfloat16* x(const PassData& data, const Peers& peers) const {
    if constexpr (Ranks) return peers.x[rank].data + token * peers.x[rank].stride;
    return data.x + token * data.x_stride;
  }
  __device__ __forceinline__ const bfloat16* dy(const PassData& data, const Peers& peers) const {
    if constexpr (Ranks) return peers.dy[rank].data + token * peers.dy[rank].stride;
    return data.dy + token * data.dy_stride;
  }
};

// So that TokenOfRow can name a row that is packed here.
__device__ __forceinline__ void place_packed_rows(const PassData& data, Peers& peers) {
  peers.x[Peers::packed] = {data.packed_x, data.pass.sizes.hidden_size};
  peers.dy[Peers::packed] = {data.packed_dy, data.pass.sizes.hidden_size};
}

// The routing weight of row `row` of a tile of routed experts.
template <bool Ranks>
__device__ __forceinline__ float weight_of_row(const PassData& data, const Work& work, int row) {
  if constexpr (Ranks) return __ldg(data.row_weight + work.row_begin + row);
  return __ldg(data.topk_weights + work.row_index[row]);
}
// Work::row_place of a row whose route (of a shared expert: token) is `index`, at rank `rank`.
__device__ __forceinline__ void* place_of_row(const PassData& data, const Peers& peers, Stage stage, int group, int rank,
                                              std::int64_t index) {
  const ExpertGroup& tensors = data.groups[group];
  if (stage == Stage::down_dgrad) {
    return (group == 0 ? peers.dprob[rank] : tensors.dprob) + index * tensors.dprob_groups;
  }
  return (group == 0 ? peers.slots[rank] : tensors.slots) + index * data.pass.sizes.hidden_size;
}
// The slot that row `row` of a tile is for, and sum `group` of its dprob. slots, dprob: of this rank, by work.row_index.
template <bool Ranks>
__device__ __forceinline__ bfloat16* slot_of_row(const Work& work, bfloat16* slots, std::int64_t hidden, int row) {
  if constexpr (Ranks) return static_cast<bfloat16*>(work.row_place[row]);
  return slots + work.row_index[row] * hidden;
}
template <bool Ranks>
__device__ __forceinline__ float& dprob_of_row(const Work& work, const ExpertGroup& tensors, int row, int group) {
  if constexpr (Ranks) return static_cast<float*>(work.row_place[row])[group];
  return tensors.dprob[std::int64_t(work.row_index[row]) * tensors.dprob_groups + group];
}
// dY of row `row` of the tile's group, counted as packed_begin is: of routed experts the packed copy, which lies near its
// neighbours and is in the second-level cache, of a shared one the token's own.
__device__ __forceinline__ const bfloat16* dy_of_row(const PassData& data, const Work& work, std::int64_t row) {
  if (work.group == 0) return data.packed_dy + row * data.pass.sizes.hidden_size;
  return data.dy + row * data.dy_stride;
}

// Raises the tile's arrival counter at each rank that it has rows of.
template <bool Ranks>
__device__ __forceinline__ void raise_arrival(const PassData& data, const Peers& peers, const Work& work) {
  if (work.raised_arrival < 0) return;
  if constexpr (Ranks) {
    __threadfence_system();
    for (unsigned ranks = work.raised_ranks; ranks != 0; ranks &= ranks - 1) {
      add_system(peers.arrivals[__ffs(static_cast<int>(ranks)) - 1] + work.raised_arrival, 1);
    }
  } else {
    add_release(data.counters.arrivals + work.raised_arrival, 1);
  }
}

// --- the end of backward ---------------------------------------------------------------------------------------------

// Tells all ranks, with a whole warp, that this one has read all that it needs of their rows.
__device__ __forceinline__ void tell_rows_pulled(const PassData& data, const Peers& peers, int lane) {
  __threadfence_system();
  __syncwarp();
  if (lane < data.pass.sizes.ranks) store_system(peers.pulled[lane] + data.pass.sizes.rank, *data.last_pass);
}
// Until all ranks have told this one so; with a whole warp. Then its x and dY are its own again.
__device__ __forceinline__ void await_rows_pulled(const PassData& data, const Peers& peers, int lane) {
  if (lane >= data.pass.sizes.ranks) return;
  const unsigned long long* flag = peers.pulled[data.pass.sizes.rank] + lane;
  const unsigned long long pass = *data.last_pass;
  unsigned long long began = 0;
  for (unsigned tries = 1; static_cast<long long>(load_acquire_system(flag) - pass) < 0; ++tries) {
    __nanosleep(64);
    if (tries % 1024 != 0) continue;
    const unsigned long long now = global_time();
    if (began == 0) began = now;
    if (group_failed(data.stop)) return;
    if (now - began <= data.wait_limit_ns) continue;
    PassError what;
    what.stage = static_cast<std::int32_t>(Stage::gate_up_wgrad);  // whose rows they are
    what.rank = data.pass.sizes.rank, what.awaited = lane;
    return report(data.error, data.stop, what);
  }
}

}  // namespace moelith::executors::cuda::sm90
