// Inside of gemm: the same blocked product (gemm_blocked.inl) compiled for each instruction set. gemm.cpp chooses one.
#pragma once

#include <cstdint>

#include "executors/cpu/gemm.hpp"
#include "numerics/bfloat16.hpp"

namespace moelith::executors::cpu {

// As gemm, for m, n, k > 0.
template <class Storage>
using GemmFunction = void (*)(const Operand<Storage>& a, const Operand<Storage>& b, std::int64_t m, std::int64_t n,
                              std::int64_t k, numerics::accumulator_t<Storage>* c, std::int64_t ldc, bool accumulate,
                              Scratch& scratch);

struct GemmKernels {
  GemmFunction<numerics::bfloat16> bfloat16;
  GemmFunction<float> float32;
  GemmFunction<double> float64;
};

extern const GemmKernels gemm_kernels_plain;
#if defined(__x86_64__)
extern const GemmKernels gemm_kernels_avx2;
extern const GemmKernels gemm_kernels_avx512;
extern const GemmFunction<numerics::bfloat16> gemm_bfloat16_amx;
#endif

}  // namespace moelith::executors::cpu
