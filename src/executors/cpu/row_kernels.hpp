// What the CPU tiles do besides matrix products, one row at a time. Each function exists compiled for any x86-64 machine
// and for those with AVX2 and FMA; both give the same bits, since every sum has a fixed order of its own.
#pragma once

#include <cstdint>

#include "moelith/tensor.hpp"
#include "numerics/activation.hpp"
#include "numerics/bfloat16.hpp"

namespace moelith::executors::cpu {

// dprob and bias gradients are summed over groups of this many columns or rows first, then over groups in order.
inline constexpr std::int64_t sum_group = 64;

// Pointers to `width` consecutive columns of one row. Storage: bfloat16, float or double; T its accumulator type.
template <class Storage, class T = numerics::accumulator_t<Storage>>
struct RowKernels {
  // Epilogue of gate_up. pre: product without bias. z (may be null) receives the rounded pre-activation, a the rounded
  // factor * act(z). Without a gate the *_up pointers are not used.
  struct ActivateArguments {
    const T *pre_gate, *pre_up;
    const Storage *bias_gate, *bias_up;  // null: no bias
    Storage *z_gate, *z_up;
    Storage* a;
    T factor;
  };
  void (*activate)(const numerics::Activation& activation, const ActivateArguments& arguments, std::int64_t width);

  // Epilogue of down_dgrad. d_a: dA before the factor (the route's weight p). z: the saved pre-activation.
  //   A = act(z);  dprob[g] = <d_a, rounded A> over the g-th group of 64 columns;  dz = p * d_a * act'(z);
  //   a = p * (rounded A) if weight_after_down, else p * A: what down_proj's gradient multiplies with dY.
  struct ActivateBackwardArguments {
    const T* d_a;
    const Storage *z_gate, *z_up;
    Storage *dz_gate, *dz_up;  // null: not wanted; may be z_gate and z_up themselves
    Storage* a;                // null: not wanted
    T* dprob;                  // [ceil(width / 64)]
    T factor;
    bool weight_after_down;
  };
  void (*activate_backward)(const numerics::Activation& activation, const ActivateBackwardArguments& arguments,
                            std::int64_t width);

  // out = rounded (sum + bias); bias may be null.
  void (*store)(const T* sum, const Storage* bias, Storage* out, std::int64_t width);
  // out = rounded sum over i in order of fma(factors[i], rows[i], .), from 0. factors null: all 1.
  void (*combine)(const Storage* const* rows, const T* factors, std::int64_t count, Storage* out, std::int64_t width);
  // sum = fma(factor, row, sum)
  void (*add_scaled)(T factor, const Storage* row, T* sum, std::int64_t width);
  // Sum over groups of 64 columns of <a, b>.
  T (*dot)(const Storage* a, const Storage* b, std::int64_t width);
  // out = value, or out + value, in the dtype of out: Storage's or T's.
  void (*store_gradient)(const T* value, void* out, DataType dtype, bool accumulate, std::int64_t width);
};

// The fastest for this machine and for the instruction set that gemm.hpp has in use.
template <class Storage>
const RowKernels<Storage>& row_kernels();

}  // namespace moelith::executors::cpu
