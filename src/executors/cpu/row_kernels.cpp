#include "executors/cpu/row_kernels.hpp"

#include "executors/cpu/gemm.hpp"

namespace moelith::executors::cpu {

extern const RowKernels<numerics::bfloat16> row_kernels_plain_bfloat16, row_kernels_v3_bfloat16;
extern const RowKernels<float> row_kernels_plain_float, row_kernels_v3_float;
extern const RowKernels<double> row_kernels_plain_double, row_kernels_v3_double;

namespace {
template <class Kernels>
const Kernels& choose(const Kernels& plain, const Kernels& v3) {
  return instruction_set() == InstructionSet::plain ? plain : v3;  // every machine with AVX-512 has AVX2 and FMA
}
}  // namespace

template <>
const RowKernels<numerics::bfloat16>& row_kernels() {
  return choose(row_kernels_plain_bfloat16, row_kernels_v3_bfloat16);
}
template <>
const RowKernels<float>& row_kernels() {
  return choose(row_kernels_plain_float, row_kernels_v3_float);
}
template <>
const RowKernels<double>& row_kernels() {
  return choose(row_kernels_plain_double, row_kernels_v3_double);
}

}  // namespace moelith::executors::cpu
