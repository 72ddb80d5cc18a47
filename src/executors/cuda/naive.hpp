// The pass in plain CUDA: one kernel a stage, one thread an element, no tensor cores. The second reference of the GPU
// executors, beside the fp64 one; it rounds at the same places as they do.
#pragma once

#include "executors/cuda/pass_data.hpp"

namespace moelith::executors::cuda {

// Runs the pass on `stream`. Needs pre_activation and, in backward, every buffer of a group; counters are not used.
// scratch: [max(rows, T), I of the widest group] float, backward only. Throws Error(device_error).
void naive_run_pass(const PassData& data, float* scratch, void* stream);

}  // namespace moelith::executors::cuda
