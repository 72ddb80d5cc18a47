// Chooses the instantiation of the persistent kernel.
#include <cuda_runtime.h>

#include <string>

#include "executors/cuda/pass_data.hpp"
#include "moelith/tensor.hpp"

namespace moelith::executors::cuda {
namespace sm90 {

template <schedule::Direction Pass, int N>
void launch(const PassData& data, int blocks, cudaStream_t stream);  // sm90_kernel.cuh

}  // namespace sm90

schedule::TileShape sm90_tile_shape(int columns, int gate_up_factor) {
  schedule::TileShape shape;
  shape.row_block = 128;
  shape.columns = columns;
  shape.gate_up = gate_up_factor == 2 ? columns / 2 : columns;
  shape.wgrad_rows = 128;
  shape.wgrad_columns = columns;
  shape.token_block = 32;
  return shape;
}

void sm90_run_pass(const PassData& data, int blocks, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const bool forward = data.pass.sizes.direction == schedule::Direction::forward;
  switch (data.pass.sizes.tile.columns) {
    case 128:
      return forward ? sm90::launch<schedule::Direction::forward, 128>(data, blocks, s)
                     : sm90::launch<schedule::Direction::backward, 128>(data, blocks, s);
    case 64:
      return forward ? sm90::launch<schedule::Direction::forward, 64>(data, blocks, s)
                     : sm90::launch<schedule::Direction::backward, 64>(data, blocks, s);
    default:
      throw Error(Status::invalid_argument,
                  "tile_columns is " + std::to_string(data.pass.sizes.tile.columns) + "; on this GPU it is 64 or 128");
  }
}

}  // namespace moelith::executors::cuda
