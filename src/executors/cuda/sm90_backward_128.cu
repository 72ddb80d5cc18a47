#include "executors/cuda/sm90_kernel.cuh"

template void moelith::executors::cuda::sm90::launch<moelith::schedule::Direction::backward, 128, false>(
    const PassData& data, int blocks, cudaStream_t stream, bool beside_previous);
