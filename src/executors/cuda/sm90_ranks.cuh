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

// The routing weight of row `row` of a tile of routed experts.
template <bool Ranks>
__device__ __forceinline__ float weight_of_row(const PassData& data, const Work& work, int row) {
  if constexpr (Ranks) return __ldg(data.row_weight + work.row_begin + row);
  return __ldg(data.topk_weights + work.row_index[row]);
}
// Slots, or partial sums of dprob, of the tokens that row `row` of a tile belongs to, routed or not.
template <bool Ranks>
__device__ __forceinline__ bfloat16* slots_of_row(const Peers& peers, const Work& work, bfloat16* own, int row) {
  if constexpr (Ranks) return work.group == 0 ? peers.slots[work.row_rank[row]] : own;
  return own;
}
template <bool Ranks>
__device__ __forceinline__ float* dprob_of_row(const Peers& peers, const Work& work, float* own, int row) {
  if constexpr (Ranks) return work.group == 0 ? peers.dprob[work.row_rank[row]] : own;
  return own;
}
// dY of row `row` of the tile's group, counted over all of the group, whose route (of a shared expert: token) is `index`.
// Another rank's is the packed copy that there is of it.
template <bool Ranks>
__device__ __forceinline__ const bfloat16* dy_of_row(const PassData& data, const Work& work, std::int64_t row,
                                                     std::int64_t index) {
  if (Ranks && work.group == 0) return data.packed_dy + row * data.pass.sizes.hidden_size;
  return data.dy + (work.group == 0 ? index / data.pass.sizes.top_k : index) * data.dy_stride;
}

// Raises the tile's arrival counter at each rank that it has rows of.
template <bool Ranks>
__device__ __forceinline__ void raise_arrival(const PassData& data, const Peers& peers, const Work& work) {
  if (work.raised_arrival < 0) return;
  if constexpr (Ranks) {
    for (unsigned ranks = work.raised_ranks; ranks != 0; ranks &= ranks - 1) {
      add_release_system(peers.arrivals[__ffs(static_cast<int>(ranks)) - 1] + work.raised_arrival, 1);
    }
  } else {
    add_release(data.counters.arrivals + work.raised_arrival, 1);
  }
}

}  // namespace moelith::executors::cuda::sm90
