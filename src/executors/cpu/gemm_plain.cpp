// The tile product in C++ alone.
#include "executors/cpu/gemm_kernels.hpp"

namespace moelith::executors::cpu {
namespace {

constexpr std::int64_t panel_bytes = 8 << 10;
constexpr std::int64_t block_bytes = 128 << 10;

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <class T>
struct Lanes {
  static constexpr int width = 4, max_rows = 4, max_vectors = 1;
  struct Vector {
    T lane[width];
  };
  static Vector zero() { return Vector{}; }
  static Vector load(const T* in) { return {in[0], in[1], in[2], in[3]}; }
  static void store(T* out, const Vector& v) {
    for (int i = 0; i < width; ++i) out[i] = v.lane[i];
  }
  static Vector broadcast(const T* in) { return {*in, *in, *in, *in}; }
  static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    Vector sum;
    for (int i = 0; i < width; ++i) sum.lane[i] = fused(a.lane[i], b.lane[i], c.lane[i]);
    return sum;
  }
};

template <class Storage>
struct Pack {
  using T = numerics::accumulator_t<Storage>;
  static constexpr std::int64_t lanes = 4, steps = 4;
  static void transpose(const Storage* const* rows, std::int64_t first, T* out, std::int64_t distance) {
    for (std::int64_t s = 0; s < steps; ++s)
      for (std::int64_t r = 0; r < lanes; ++r) out[s * distance + r] = numerics::load(rows[r][first + s]);
  }
  static void widen(const Storage* in, T* out) {
    for (std::int64_t r = 0; r < lanes; ++r) out[r] = numerics::load(in[r]);
  }
};

#include "executors/cpu/gemm_blocked.inl"

}  // namespace

const GemmKernels gemm_kernels_plain = all_kernels;

}  // namespace moelith::executors::cpu
