// See row_kernels.hpp; this file is compiled for x86-64-v3 (AVX2, FMA).
#include "executors/cpu/row_kernels_body.hpp"

namespace moelith::executors::cpu {

extern const RowKernels<numerics::bfloat16> row_kernels_v3_bfloat16 = Bodies<numerics::bfloat16>::table;
extern const RowKernels<float> row_kernels_v3_float = Bodies<float>::table;
extern const RowKernels<double> row_kernels_v3_double = Bodies<double>::table;

}  // namespace moelith::executors::cpu
