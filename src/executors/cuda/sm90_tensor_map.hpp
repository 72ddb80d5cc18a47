// Tensor maps, as the copy engine takes them, and the boxes in which weights are loaded.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "moelith/tensor.hpp"
#include "numerics/bfloat16.hpp"

namespace moelith::executors::cuda::sm90 {

using numerics::bfloat16;

// Rows of the boxes of 64 columns.
struct WeightBoxes {
  static constexpr int gate_up(bool forward) { return forward ? 32 : 64; }
  static constexpr int down = 64;
};

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(Status::device_error, std::string(what) + ": " + cudaGetErrorString(status));
}

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);
inline EncodeTensorMap encode_function() {
  static const EncodeTensorMap function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess)
      throw Error(Status::unsupported, "the driver lacks cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTensorMap>(pointer);
  }();
  return function;
}

// What a map follows from.
struct TensorMapKey {
  const void* data = nullptr;
  std::int64_t outer = 0, rows = 0, columns = 0, box_rows = 0, row_stride = 0;
  bool operator==(const TensorMapKey&) const = default;
};

// A contiguous [outer, rows, columns] (outer > 0) tensor, or [rows, columns] (outer == 0) at a row stride, in boxes of
// 64 columns by `box_rows`. Tensors without elements get no map: no tile reads them.
inline void encode(CUtensorMap& map, const bfloat16* data, std::int64_t outer, std::int64_t rows, std::int64_t columns,
                   int box_rows, std::int64_t row_stride = 0) {
  if (!data || rows == 0 || columns == 0) return;
  // The driver takes half a microsecond for a map, and a layer's tensors lie where they lay in the last call.
  struct Made {
    TensorMapKey key;
    CUtensorMap map;
  };
  constexpr std::size_t places = 64;
  thread_local Made made[places];
  const TensorMapKey key{data, outer, rows, columns, box_rows, row_stride};
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  Made& place = made[((address >> 8) ^ (address >> 14) ^ std::uintptr_t(box_rows)) % places];
  if (place.key == key) {
    map = place.map;
    return;
  }
  const cuuint64_t size[3] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(outer)};
  const cuuint64_t stride[2] = {cuuint64_t(row_stride > 0 && rows > 1 ? row_stride : columns) * 2,
                                cuuint64_t(columns) * cuuint64_t(rows) * 2};
  const cuuint32_t box[3] = {64, cuuint32_t(box_rows), 1}, step[3] = {1, 1, 1};
  const CUresult status =
      encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, outer > 0 ? 3 : 2, const_cast<bfloat16*>(data), size,
                        stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(Status::device_error, "tensor map of [" + std::to_string(outer) + ", " + std::to_string(rows) + ", " +
                                          std::to_string(columns) + "]: error " + std::to_string(status));
  }
  place = {key, map};
}

}  // namespace moelith::executors::cuda::sm90
