// How every CUDA call's status becomes an Error.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "moelith/tensor.hpp"

namespace moelith {

// Throws Error(device_error), whose text begins with `what`, where a call has failed.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(Status::device_error, std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace moelith
