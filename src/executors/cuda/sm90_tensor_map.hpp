// Tensor maps, as the copy engine takes them, and the boxes in which weights are loaded.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda_check.hpp"
#include "moelith/tensor.hpp"
#include "numerics/bfloat16.hpp"

namespace moelith::executors::cuda::sm90 {

using numerics::bfloat16;

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);
inline EncodeTensorMap encode_function() {
  static const EncodeTensorMap function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess)
      throw Error(Status::unsupported, "the driver lacks cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTensorMap>(pointer);
  }();
  return function;
}

// A contiguous bfloat16 tensor [outer, halves, rows, columns], with 0 for dimensions that it has not, or [rows, columns]
// at a row stride, in boxes of 64 columns by `box_rows` of each half.
struct TensorMapKey {
  const void* data = nullptr;
  std::int64_t outer = 0, halves = 0, rows = 0, columns = 0, box_rows = 0, row_stride = 0;
  bool operator==(const TensorMapKey&) const = default;
};

// Tensors without elements get no map: no tile reads them.
inline void encode(CUtensorMap& map, const TensorMapKey& key) {
  if (!key.data || key.rows == 0 || key.columns == 0) return;
  // The driver takes half a microsecond for a map, and a layer's tensors lie where they lay in the last call.
  struct Made {
    TensorMapKey key;
    CUtensorMap map;
  };
  constexpr std::size_t places = 64;
  thread_local Made made[places];
  const auto address = reinterpret_cast<std::uintptr_t>(key.data);
  Made& place = made[((address >> 8) ^ (address >> 14) ^ std::uintptr_t(key.box_rows)) % places];
  if (place.key == key) {
    map = place.map;
    return;
  }
  cuuint64_t size[4] = {cuuint64_t(key.columns), cuuint64_t(key.rows)}, stride[3] = {};
  stride[0] = cuuint64_t(key.row_stride > 0 && key.rows > 1 ? key.row_stride : key.columns) * 2;
  cuuint32_t box[4] = {64, cuuint32_t(key.box_rows), 1, 1}, step[4] = {1, 1, 1, 1};
  cuuint32_t dimensions = 2;
  cuuint64_t bytes = cuuint64_t(key.columns) * cuuint64_t(key.rows) * 2;
  for (const std::int64_t further : {key.halves, key.outer}) {
    if (further == 0) continue;
    size[dimensions] = cuuint64_t(further);
    stride[dimensions - 1] = bytes;
    bytes *= size[dimensions++];
  }
  if (key.halves > 0) box[2] = cuuint32_t(key.halves);
  const CUresult status = encode_function()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dimensions, const_cast<void*>(key.data), size, stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(Status::device_error, "tensor map of [" + std::to_string(key.outer) + ", " +
                                          std::to_string(key.halves) + ", " + std::to_string(key.rows) + ", " +
                                          std::to_string(key.columns) + "]: error " + std::to_string(status));
  }
  place = {key, map};
}
inline void encode(CUtensorMap& map, const bfloat16* data, std::int64_t outer, std::int64_t rows, std::int64_t columns,
                   int box_rows, std::int64_t row_stride = 0) {
  encode(map, {data, outer, 0, rows, columns, box_rows, row_stride});
}

// The boxes in which weights are loaded: 64 rows, of which forward has 32 of gate and the 32 of up that belong to them.
struct WeightBoxes {
  static constexpr int rows = 64;
  // Of each half of gate_up_proj.
  static constexpr int gate_up_rows(int gate_up_factor) { return rows / gate_up_factor; }

  static void encode_gate_up(CUtensorMap& map, const bfloat16* data, std::int64_t experts, int gate_up_factor,
                             std::int64_t width, std::int64_t hidden, bool forward) {
    if (forward) {
      encode(map, {data, experts, gate_up_factor, width, hidden, gate_up_rows(gate_up_factor)});
    } else {
      encode(map, {data, experts, 0, gate_up_factor * width, hidden, rows});
    }
  }
};

}  // namespace moelith::executors::cuda::sm90
