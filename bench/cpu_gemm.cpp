// Speed of the CPU tile product (src/executors/cpu/gemm.hpp) on one thread, for the shapes that tiles have.
//
//   cpu_gemm [dtype ...]      dtype: bf16 f32 f64 (all by default); MOELITH_CPU_ISA chooses the instruction set
//
// For each shape: GFLOP/s with everything included (packing, conversion), and its fraction of the peak, which is a loop
// of independent fused multiply-adds in registers, measured in the same run. "cold" walks over so many weights that
// they come from memory, as those of many experts do.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "executors/cpu/gemm.hpp"
#include "numerics/bfloat16.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using moelith::executors::cpu::gemm;
using moelith::executors::cpu::instruction_set;
using moelith::executors::cpu::InstructionSet;
using moelith::executors::cpu::Operand;
using moelith::executors::cpu::Scratch;
using moelith::numerics::accumulator_t;
using moelith::numerics::bfloat16;

namespace {

// Time that this thread ran, in seconds: other work on the machine counts only by what it does to clocks and caches.
double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

double lower_quartile(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 4, times.end());
  return times[times.size() / 4];
}

constexpr long peak_steps = 20000;
constexpr int peak_chains = 12;

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) void peak_avx2(float* out) {
  __m256 sum[peak_chains];
  for (int i = 0; i < peak_chains; ++i) sum[i] = _mm256_set1_ps(float(i));
  __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (long s = 0; s < peak_steps; ++s) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (int i = 0; i < peak_chains; ++i) sum[i] = _mm256_fmadd_ps(a, sum[i], b);
  }
  for (int i = 0; i < peak_chains; ++i) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), sum[i]));
}

__attribute__((target("avx512f"))) void peak_avx512(float* out) {
  __m512 sum[peak_chains];
  for (int i = 0; i < peak_chains; ++i) sum[i] = _mm512_set1_ps(float(i));
  __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (long s = 0; s < peak_steps; ++s) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (int i = 0; i < peak_chains; ++i) sum[i] = _mm512_fmadd_ps(a, sum[i], b);
  }
  for (int i = 0; i < peak_chains; ++i) _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), sum[i]));
}
#endif

// Seconds of one loop in registers and its flops in float (half of them in double); no flops: unknown.
double peak_flops() {
  const double steps = 2.0 * peak_steps * peak_chains;
  if (instruction_set() == InstructionSet::avx2) return steps * 8;
  if (instruction_set() >= InstructionSet::avx512) return steps * 16;  // of amx, too, that of AVX-512
  return 0;
}
void run_peak() {
#if defined(__x86_64__)
  static float out[16];
  if (instruction_set() == InstructionSet::avx2) peak_avx2(out);
  if (instruction_set() >= InstructionSet::avx512) peak_avx512(out);
#endif
}

struct Rate {
  double gflops, peak;
};

// Lower quartiles over at least 9 calls and 0.2 s, call and peak loop in turn, so that both see the same machine.
template <class F>
Rate rate(double gflop, F&& call) {
  std::vector<double> times, peaks;
  call();
  const double end = now() + 0.2;
  while (times.size() < 9 || now() < end) {
    double start = now();
    run_peak();
    peaks.push_back(now() - start);
    start = now();
    call();
    times.push_back(now() - start);
  }
  return {gflop / lower_quartile(times), peak_flops() * 1e-9 / lower_quartile(peaks)};
}

template <class Storage>
std::vector<Storage> random_values(std::int64_t count) {
  std::mt19937 random(7);
  std::vector<Storage> values(count);
  for (Storage& value : values)
    value = moelith::numerics::store<Storage>(accumulator_t<Storage>(double(random()) / 2147483648.0 - 1.0));
  return values;
}

struct Shape {
  const char* stage;
  std::int64_t m, n, k;
  bool a_by_rows, b_by_rows, gather_a, gather_b, accumulate;
};

template <class Storage>
void measure(const char* dtype) {
  using T = accumulator_t<Storage>;
  using Order = typename Operand<Storage>::Order;
  const Shape shapes[] = {
      {"forward", 1, 512, 2048, false, false, true, false, false},
      {"forward", 4, 512, 2048, false, false, true, false, false},
      {"forward", 8, 512, 2048, false, false, true, false, false},
      {"forward", 16, 512, 2048, false, false, true, false, false},
      {"forward", 32, 512, 2048, false, false, true, false, false},
      {"forward", 64, 64, 2048, false, false, true, false, false},
      {"forward", 64, 128, 512, false, false, true, false, false},
      {"forward", 64, 256, 2048, false, false, true, false, false},
      {"forward", 64, 512, 2048, false, false, true, false, false},
      {"forward", 64, 512, 4096, false, false, true, false, false},
      {"forward", 64, 512, 2880, false, false, true, false, false},
      {"forward", 128, 512, 2048, false, false, true, false, false},
      {"dgrad", 8, 512, 2048, false, true, false, false, false},
      {"dgrad", 64, 128, 2048, false, true, false, false, false},
      {"dgrad", 64, 512, 2048, false, true, false, false, false},
      {"dgrad", 128, 512, 1024, false, true, false, false, false},
      {"wgrad", 128, 128, 64, true, true, false, true, true},
      {"wgrad", 256, 256, 64, true, true, false, true, true},
      {"wgrad", 512, 512, 64, true, true, false, true, true},
      {"wgrad", 512, 512, 256, true, true, false, true, false},
      {"wgrad", 512, 512, 1000, true, true, false, true, false},
      {"wgrad", 128, 512, 2048, true, true, false, true, false},
  };
  Scratch scratch;
  for (const Shape& shape : shapes) {
    // Rows of A and B sit in wider matrices, at strides that are powers of two: the worst case for the caches.
    const std::int64_t a_vectors = shape.a_by_rows ? shape.k : shape.m, b_vectors = shape.b_by_rows ? shape.k : shape.n;
    const std::int64_t a_stride = std::max<std::int64_t>(2048, shape.a_by_rows ? shape.m : shape.k);
    const std::int64_t b_stride = std::max<std::int64_t>(2048, shape.b_by_rows ? shape.n : shape.k);
    const std::int64_t b_size = b_vectors * b_stride;
    const std::int64_t copies = std::max<std::int64_t>(1, (std::int64_t(192) << 20) / (b_size * sizeof(Storage)));
    const auto a_values = random_values<Storage>(a_vectors * a_stride);
    std::vector<Storage> b_values = random_values<Storage>(b_size);
    b_values.resize(b_size * copies);
    for (std::int64_t copy = 1; copy < copies; ++copy)
      std::memcpy(b_values.data() + copy * b_size, b_values.data(), b_size * sizeof(Storage));
    std::vector<const Storage*> a_pointers(a_vectors), b_pointers(b_vectors);
    std::mt19937 random(11);
    for (std::int64_t v = 0; v < a_vectors; ++v) a_pointers[v] = a_values.data() + v * a_stride;
    std::shuffle(a_pointers.begin(), a_pointers.end(), random);
    // C as a tile has it: of its own, aligned.
    const std::unique_ptr<T, decltype(&std::free)> c(
        static_cast<T*>(std::aligned_alloc(4096, (shape.m * shape.n * sizeof(T) + 4095) / 4096 * 4096)), &std::free);
    std::fill_n(c.get(), shape.m * shape.n, T(0));
    std::int64_t at = 0;
    auto call = [&](bool cold) {
      const Storage* b_data = b_values.data() + (cold ? ++at % copies : 0) * b_size;
      Operand<Storage> a{shape.a_by_rows ? Order::row_contiguous : Order::k_contiguous, a_values.data(), a_stride,
                         shape.gather_a ? a_pointers.data() : nullptr};
      Operand<Storage> b{shape.b_by_rows ? Order::row_contiguous : Order::k_contiguous, b_data, b_stride, nullptr};
      if (shape.gather_b) {
        for (std::int64_t v = 0; v < b_vectors; ++v) b_pointers[v] = b_data + (v * 31 % b_vectors) * b_stride;
        b.pointers = b_pointers.data();
      }
      gemm<Storage>(a, b, shape.m, shape.n, shape.k, c.get(), shape.n, shape.accumulate, scratch);
    };
    const double gflop = 2e-9 * double(shape.m) * double(shape.n) * double(shape.k);
    const Rate warm = rate(gflop, [&] { call(false); });
    const Rate cold = rate(gflop, [&] { call(true); });
    std::printf("%-5s %-8s %5lld %5lld %5lld  %8.1f %8.1f", dtype, shape.stage, (long long)shape.m, (long long)shape.n,
                (long long)shape.k, warm.gflops, cold.gflops);
    if (warm.peak > 0) {
      const double part = std::is_same_v<T, double> ? 0.5 : 1.0;
      std::printf("  %8.1f %6.3f %6.3f", part * warm.peak, warm.gflops / (part * warm.peak),
                  cold.gflops / (part * cold.peak));
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::string> dtypes(arguments + 1, arguments + count);
  if (dtypes.empty()) dtypes = {"bf16", "f32", "f64"};
  for (const std::string& dtype : dtypes) {
    if (dtype != "bf16" && dtype != "f32" && dtype != "f64") {
      std::fprintf(stderr, "cpu_gemm: \"%s\" is not one of: bf16, f32, f64\n", dtype.c_str());
      return 2;
    }
  }
  std::printf("instruction set %s\n", to_string(instruction_set()));
  std::printf("dtype stage        m     n     k   GFLOP/s     cold      peak  /peak   cold\n");
  for (const std::string& dtype : dtypes) {
    if (dtype == "bf16") measure<bfloat16>("bf16");
    if (dtype == "f32") measure<float>("f32");
    if (dtype == "f64") measure<double>("f64");
  }
}
