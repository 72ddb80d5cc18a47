// See row_kernels.hpp.
#include "executors/cpu/row_kernels_body.hpp"

namespace moelith::executors::cpu {

extern const RowKernels<numerics::bfloat16> row_kernels_plain_bfloat16 = Bodies<numerics::bfloat16>::table;
extern const RowKernels<float> row_kernels_plain_float = Bodies<float>::table;
extern const RowKernels<double> row_kernels_plain_double = Bodies<double>::table;

}  // namespace moelith::executors::cpu
