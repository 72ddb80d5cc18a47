#include "executors/cuda/sm90_kernel.cuh"

template void moelith::executors::cuda::sm90::launch<moelith::schedule::Direction::backward, 192, true>(
    const PassData& data, int blocks, cudaStream_t stream, bool beside_previous);
template int moelith::executors::cuda::sm90::prepare_device<moelith::schedule::Direction::backward, 192, true>();
