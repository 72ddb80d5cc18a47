// Chooses the instantiation of the persistent kernel.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "executors/cuda/pass_data.hpp"
#include "executors/cuda/sm90_pass.cuh"
#include "executors/cuda/sm90_tensor_map.hpp"
#include "moelith/tensor.hpp"

namespace moelith::executors::cuda {
namespace sm90 {

template <schedule::Direction Pass, int N, bool Ranks>
void launch(const PassData& data, int blocks, cudaStream_t stream, bool beside_previous);  // sm90_kernel.cuh
template <schedule::Direction Pass, int N, bool Ranks>
int prepare_device();  // likewise

// The kernel for one rank or for several.
template <schedule::Direction Pass, int N>
void launch_for_ranks(const PassData& data, int blocks, cudaStream_t stream, bool beside_previous) {
  if (data.pass.sizes.ranks == 1) return launch<Pass, N, false>(data, blocks, stream, beside_previous);
  if constexpr (N == 192) return launch<Pass, N, true>(data, blocks, stream, beside_previous);
  throw Error(Status::invalid_argument, "tile_columns is " + std::to_string(N) + "; with several ranks it is 192");
}
template <int N>
void launch_direction(const PassData& data, int blocks, cudaStream_t stream, bool beside_previous) {
  if (data.pass.sizes.direction == schedule::Direction::forward) {
    launch_for_ranks<schedule::Direction::forward, N>(data, blocks, stream, beside_previous);
  } else {
    launch_for_ranks<schedule::Direction::backward, N>(data, blocks, stream, beside_previous);
  }
}

template <class Encode>
std::vector<std::byte> maps_of_experts(std::int32_t experts, Encode&& encode) {
  std::vector<CUtensorMap> maps(2 * static_cast<std::size_t>(experts));
  for (const bool forward : {true, false}) {
    for (std::int32_t e = 0; e < experts; ++e) encode(maps[(forward ? 0 : experts) + e], e, forward);
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(maps.data());
  return {bytes, bytes + maps.size() * sizeof(CUtensorMap)};
}

}  // namespace sm90

schedule::TileShape sm90_tile_shape(int columns, int gate_up_factor, int top_k) {
  // Of both blocks together.
  schedule::TileShape shape;
  shape.row_block = 128;
  shape.columns = 2 * columns;
  shape.gate_up = gate_up_factor == 2 ? columns : 2 * columns;
  shape.down_dgrad = 256;
  shape.wgrad_rows = 128;
  shape.wgrad_columns = 2 * columns;
  shape.token_block = columns == 128 ? sm90::combine_tile_tokens<128>(top_k) : sm90::combine_tile_tokens<192>(top_k);
  shape.group_blocks = sm90::group_blocks;
  shape.raster_blocks = sm90::raster_blocks;
  return shape;
}

std::vector<std::byte> sm90_gate_up_maps(const void* const* tensors, std::int32_t experts, int gate_up_factor,
                                         std::int64_t width, std::int64_t hidden) {
  return sm90::maps_of_experts(experts, [&](CUtensorMap& map, std::int32_t e, bool forward) {
    sm90::WeightBoxes::encode_gate_up(map, static_cast<const bfloat16*>(tensors[e]), 1, gate_up_factor, width, hidden,
                                      forward);
  });
}
std::vector<std::byte> sm90_down_maps(const void* const* tensors, std::int32_t experts, std::int64_t hidden,
                                      std::int64_t width) {
  return sm90::maps_of_experts(experts, [&](CUtensorMap& map, std::int32_t e, bool) {
    sm90::encode(map, static_cast<const bfloat16*>(tensors[e]), 1, hidden, width, sm90::WeightBoxes::rows);
  });
}

std::size_t sm90_tile_table_bytes(schedule::Sizes sizes) {
  sizes.direction = schedule::Direction::forward;
  const std::int64_t forward = schedule::max_tile_count(sizes);
  sizes.direction = schedule::Direction::backward;
  sizes.recompute = sizes.want_dx = sizes.want_gate_up_wgrad = sizes.want_down_wgrad = true;
  sizes.want_gate_up_bias_grad = sizes.want_down_bias_grad = true;
  return static_cast<std::size_t>(std::max(forward, schedule::max_tile_count(sizes))) * sizeof(sm90::TileDescription);
}

void sm90_run_pass(const PassData& data, int blocks, void* stream, bool beside_previous) {
  const auto s = static_cast<cudaStream_t>(stream);
  switch (data.pass.sizes.tile.columns) {
    case 256: return sm90::launch_direction<128>(data, blocks, s, beside_previous);
    case 384: return sm90::launch_direction<192>(data, blocks, s, beside_previous);
    default:
      throw Error(Status::invalid_argument, "tile_columns is " + std::to_string(data.pass.sizes.tile.columns / 2) +
                                                "; on this GPU it is 128 or 192");
  }
}

void sm90_prepare_ranks() {
  sm90::prepare_device<schedule::Direction::forward, 192, true>();
  sm90::prepare_device<schedule::Direction::backward, 192, true>();
}

}  // namespace moelith::executors::cuda
