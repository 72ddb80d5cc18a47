// The small matrix product that every tile of the CPU executor calls, on one thread:
//
//   C(i, j) = [C(i, j) if accumulate, else +0]  then, for p = 0, 1, ..., k-1:  C(i, j) = fma(A(i, p), B(j, p), C(i, j))
//
// in the accumulator type (float; double for double storage). That one chain of fused multiply-adds in the order of p
// is the definition: the bits do not depend on the instruction set, the vector width, the blocking, or on which other
// rows and columns belong to the call. (Of a NaN only that it is a NaN is promised, not its payload.) Hence also: a
// product over k split into calls with accumulate = true has the bits of the unsplit one, and a NaN or infinity in row
// i of A reaches row i of C alone, in row j of B column j of C alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "numerics/bfloat16.hpp"

namespace moelith::executors::cpu {

// One operand: a logical matrix of `rows` (m of A, n of B) by k, held as vectors that are contiguous one way or other.
template <class Storage>
struct Operand {
  enum class Order : std::uint8_t {
    k_contiguous,    // `rows` vectors of length k:  element (i, p) = vector(i)[p]
    row_contiguous,  // k vectors of length `rows`:  element (i, p) = vector(p)[i]
  };
  Order order = Order::k_contiguous;
  const Storage* data = nullptr;             // vector(v) = data + v * stride, where pointers is null
  std::int64_t stride = 0;                   // in elements
  const Storage* const* pointers = nullptr;  // a gather: vector(v) = pointers[v]; a null entry is a vector of zeros

  // Vectors at a fixed stride, and gathered vectors.
  static Operand strided(Order order, const Storage* data, std::int64_t stride) {
    return {order, data, stride, nullptr};
  }
  static Operand gathered(Order order, const Storage* const* pointers) { return {order, nullptr, 0, pointers}; }
};

// Memory for packed panels, kept from call to call: one for each worker thread, not shared between threads. It grows
// to what the largest call so far needed (below 1 MiB for any shape) and is freed by the destructor.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes` bytes, aligned to 64; the contents do not survive the next call. Throws std::bad_alloc.
  void* reserve(std::size_t bytes);

 private:
  void* memory_ = nullptr;
  std::size_t capacity_ = 0;
};

// Storage: bfloat16, float or double. c: [m, n] of the accumulator type, rows at a distance of ldc >= n elements; it
// must not overlap the operands. m, n, k >= 0; with k = 0, C becomes 0 unless accumulate. No alignment is needed
// beyond that of the element type. Nothing is read outside the vectors or written outside C.
// What makes it fast: many rows in one call, since B is converted anew in each (64 or more; 8 % of the time at 64), k
// whole instead of in pieces, and a C that is aligned to 64 bytes, with ldc a multiple of 16 but not of 1024 elements.
// Throws Error(unsupported) if MOELITH_CPU_ISA asks for what this machine cannot do: see instruction_set().
template <class Storage>
void gemm(const Operand<Storage>& a, const Operand<Storage>& b, std::int64_t m, std::int64_t n, std::int64_t k,
          numerics::accumulator_t<Storage>* c, std::int64_t ldc, bool accumulate, Scratch& scratch);

extern template void gemm(const Operand<numerics::bfloat16>&, const Operand<numerics::bfloat16>&, std::int64_t,
                          std::int64_t, std::int64_t, float*, std::int64_t, bool, Scratch&);
extern template void gemm(const Operand<float>&, const Operand<float>&, std::int64_t, std::int64_t, std::int64_t,
                          float*, std::int64_t, bool, Scratch&);
extern template void gemm(const Operand<double>&, const Operand<double>&, std::int64_t, std::int64_t, std::int64_t,
                          double*, std::int64_t, bool, Scratch&);

// What the kernels are made of. The first three give the same bits.
enum class InstructionSet : std::uint8_t {
  plain,   // C++ alone (slow: where the machine has no fused multiply-add, every one is emulated)
  avx2,    // AVX2 and FMA
  avx512,  // AVX-512 F, BW, VL
  amx,  // AMX for bfloat16, in an order of sums of its own (gemm_amx.cpp) and with subnormal numbers as zero; AVX-512
        // for the others. Taken only where it is asked for by name.
};

// The one in use: the best of the first three that this machine has, unless the environment variable MOELITH_CPU_ISA
// (plain, avx2, avx512, amx; read at the first call of this function or of gemm) or set_instruction_set chose another.
// Throws Error(invalid_argument) for an unknown name and Error(unsupported) for one that this machine lacks; a plan
// calls it once so that the error comes from there and not from a worker.
InstructionSet instruction_set();
// For tests and measurements. Not while another thread is in gemm. Throws Error(unsupported).
void set_instruction_set(InstructionSet choice);
// Whether this machine (and, for amx, its operating system, which is asked for the permission) can run it.
bool available(InstructionSet set);
// Those of the first three that this machine can run, plain first, the best last.
std::vector<InstructionSet> available_instruction_sets();
const char* to_string(InstructionSet set);
InstructionSet instruction_set_from(const std::string& name);  // throws Error(invalid_argument)

}  // namespace moelith::executors::cpu
