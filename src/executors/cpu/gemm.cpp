#include "executors/cpu/gemm.hpp"

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <type_traits>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "executors/cpu/gemm_kernels.hpp"
#include "moelith/tensor.hpp"

namespace moelith::executors::cpu {
namespace {

constexpr std::align_val_t scratch_alignment{64};

struct Known {
  InstructionSet set;
  const char* name;
};
constexpr std::array<Known, 4> known{{{InstructionSet::plain, "plain"},
                                      {InstructionSet::avx2, "avx2"},
                                      {InstructionSet::avx512, "avx512"},
                                      {InstructionSet::amx, "amx"}}};

#if defined(__x86_64__)
// Linux gives the tile registers to a process that asks for them (arch_prctl, ARCH_REQ_XCOMP_PERM).
bool amx_permitted() {
#if defined(__linux__)
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;  // CPUID leaf 7, EDX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & amx_bf16) == 0 || (edx & amx_tile) == 0) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

const GemmKernels* kernels_of(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::avx2) return &gemm_kernels_avx2;
  if (set == InstructionSet::avx512 || set == InstructionSet::amx) return &gemm_kernels_avx512;
#endif
  return &gemm_kernels_plain;
}

std::string names(const std::vector<InstructionSet>& sets) {
  std::string text;
  for (InstructionSet set : sets) text += (text.empty() ? "" : ", ") + std::string(to_string(set));
  return text;
}

void require_available(InstructionSet set, const std::string& source) {
  if (!available(set)) {
    throw Error(Status::unsupported, source + " asks for the instruction set " + to_string(set) +
                                         ", which this machine lacks; it has " + names(available_instruction_sets()));
  }
}

constexpr int unset = -1;
std::atomic<int> chosen{unset};  // an InstructionSet

}  // namespace

bool available(InstructionSet set) {
#if defined(__x86_64__)
  switch (set) {
    case InstructionSet::plain: return true;
    case InstructionSet::avx2:  // with BMI, since row_kernels_v3.cpp is compiled for all of x86-64-v3
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
             __builtin_cpu_supports("bmi2");
    case InstructionSet::avx512:
      return available(InstructionSet::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    case InstructionSet::amx: {
      static const bool permitted = available(InstructionSet::avx512) && amx_permitted();
      return permitted;
    }
  }
  return false;
#else
  return set == InstructionSet::plain;
#endif
}

Scratch::~Scratch() { ::operator delete(memory_, scratch_alignment); }

void* Scratch::reserve(std::size_t bytes) {
  if (bytes > capacity_) {
    ::operator delete(memory_, scratch_alignment);
    memory_ = nullptr;
    capacity_ = 0;
    memory_ = ::operator new(bytes, scratch_alignment);
    capacity_ = bytes;
  }
  return memory_;
}

const char* to_string(InstructionSet set) {
  for (const Known& one : known)
    if (one.set == set) return one.name;
  return "unknown";
}

InstructionSet instruction_set_from(const std::string& name) {
  std::string accepted;
  for (const Known& one : known) {
    if (name == one.name) return one.set;
    accepted += (accepted.empty() ? "" : ", ") + std::string(one.name);
  }
  throw Error(Status::invalid_argument, "instruction set \"" + name + "\" is not one of: " + accepted);
}

std::vector<InstructionSet> available_instruction_sets() {
  std::vector<InstructionSet> sets;
  for (const Known& one : known)
    if (one.set != InstructionSet::amx && available(one.set)) sets.push_back(one.set);
  return sets;
}

InstructionSet instruction_set() {
  int set = chosen.load(std::memory_order_relaxed);
  if (set == unset) {
    // Threads that come here at the same time all find the same.
    InstructionSet found = available_instruction_sets().back();
    if (const char* name = std::getenv("MOELITH_CPU_ISA"); name && *name) {
      found = instruction_set_from(name);
      require_available(found, "MOELITH_CPU_ISA");
    }
    set = static_cast<int>(found);
    int expected = unset;
    if (!chosen.compare_exchange_strong(expected, set, std::memory_order_relaxed)) set = expected;
  }
  return static_cast<InstructionSet>(set);
}

void set_instruction_set(InstructionSet choice) {
  require_available(choice, "set_instruction_set");
  chosen.store(static_cast<int>(choice), std::memory_order_relaxed);
}

template <class Storage>
void gemm(const Operand<Storage>& a, const Operand<Storage>& b, std::int64_t m, std::int64_t n, std::int64_t k,
          numerics::accumulator_t<Storage>* c, std::int64_t ldc, bool accumulate, Scratch& scratch) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) {
    if (!accumulate) {
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) c[i * ldc + j] = 0;
    }
    return;
  }
  const InstructionSet set = instruction_set();
  const GemmKernels* kernels = kernels_of(set);
  if constexpr (std::is_same_v<Storage, numerics::bfloat16>) {
#if defined(__x86_64__)
    if (set == InstructionSet::amx) return gemm_bfloat16_amx(a, b, m, n, k, c, ldc, accumulate, scratch);
#endif
    kernels->bfloat16(a, b, m, n, k, c, ldc, accumulate, scratch);
  } else if constexpr (std::is_same_v<Storage, float>) {
    kernels->float32(a, b, m, n, k, c, ldc, accumulate, scratch);
  } else {
    kernels->float64(a, b, m, n, k, c, ldc, accumulate, scratch);
  }
}

template void gemm(const Operand<numerics::bfloat16>&, const Operand<numerics::bfloat16>&, std::int64_t, std::int64_t,
                   std::int64_t, float*, std::int64_t, bool, Scratch&);
template void gemm(const Operand<float>&, const Operand<float>&, std::int64_t, std::int64_t, std::int64_t, float*,
                   std::int64_t, bool, Scratch&);
template void gemm(const Operand<double>&, const Operand<double>&, std::int64_t, std::int64_t, std::int64_t, double*,
                   std::int64_t, bool, Scratch&);

}  // namespace moelith::executors::cpu
