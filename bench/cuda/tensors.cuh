// Tensors of random values in device memory, for the benches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "moelith/tensor.hpp"
#include "numerics/bfloat16.hpp"
#include "uniform.cuh"

using namespace moelith;

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("FAILED %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

inline std::vector<void*> owned;

template <class T>
__global__ void fill(T* p, std::int64_t count, float scale, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < count; i += std::int64_t(gridDim.x) * blockDim.x) {
    const float value = (uniform(seed + 2 * i) + uniform(seed + 2 * i + 1)) * 1.2f * scale;
    if constexpr (sizeof(T) == 2) {
      p[i] = numerics::to_bfloat16(value);
    } else {
      p[i] = value;
    }
  }
}
inline void* allocate(std::uint64_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, std::max<std::uint64_t>(bytes, 256)), "cudaMalloc");
  owned.push_back(p);
  return p;
}
inline TensorView tensor(DataType type, std::initializer_list<std::int64_t> shape, float scale = 0.0f, std::uint64_t seed = 0) {
  TensorView view(nullptr, type, shape);
  view.data = allocate(view.numel() * size_of(type));
  if (type == DataType::bfloat16) {
    fill<<<1024, 256>>>(static_cast<numerics::bfloat16*>(view.data), view.numel(), scale, seed << 40);
  } else if (type == DataType::float32) {
    fill<<<1024, 256>>>(static_cast<float*>(view.data), view.numel(), scale, seed << 40);
  }
  return view;
}
inline void free_all() {
  for (void* p : owned) cudaFree(p);
  owned.clear();
}
