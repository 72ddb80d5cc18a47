// Workbench of the sm_90a executor: runs a pass on random data, checks every result against the naive kernels, and
// times it beside cuBLAS on the dense products of the same size.
//
//   pass_workbench [check] [time] [forward] [128] [192] [json FILE COMMIT] [SHAPE ..]
//     check: small shapes with every feature; time: the shapes of the speed table; forward: no backward; json: what
//     time found also in a file. GROUP and RASTER (at most 32) in the environment: row blocks in the order of
//     tiles (schedule/extents.hpp).
//
// Build: nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++20 --expt-relaxed-constexpr --extended-lambda -O3
//        -Isrc -Iinclude -I<cutlass>/include bench/cuda/pass_workbench.cu src/executors/cuda/*.cu -lcublas
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "executors/cuda/naive.hpp"
#include "executors/cuda/pass_data.hpp"
#include "executors/cuda/timeline.hpp"
#include "moelith/tensor.hpp"
#include "uniform.cuh"

using namespace moelith;
using namespace moelith::executors::cuda;
using schedule::Direction;

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("FAILED %s: %s\n", what, cudaGetErrorString(status));
  std::fflush(stdout);
  std::exit(1);
}

struct Memory {
  std::vector<void*> blocks;
  template <class T>
  T* get(std::size_t count) {
    void* p = nullptr;
    check(cudaMalloc(&p, std::max<std::size_t>(count * sizeof(T), 256) + 256), "cudaMalloc");
    blocks.push_back(p);
    return static_cast<T*>(p);
  }
  ~Memory() {
    for (void* p : blocks) cudaFree(p);
  }
};

// Roughly normal, of the given deviation.
__global__ void fill(bfloat16* p, std::size_t count, float deviation, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < count;
       i += std::size_t(gridDim.x) * blockDim.x) {
    const float f = uniform(seed + 3 * i) + uniform(seed + 3 * i + 1) + uniform(seed + 3 * i + 2);
    p[i] = numerics::to_bfloat16(f * deviation);
  }
}
__global__ void fill_bits(std::uint32_t* p, std::size_t count, std::uint32_t bits) {
  for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < count;
       i += std::size_t(gridDim.x) * blockDim.x)
    p[i] = bits;
}

// Per row: sum of squared differences and of squares; NaN anywhere in `got` makes the difference NaN.
template <class T>
__global__ void compare(const T* got, const T* want, std::int64_t rows, std::int64_t columns, double* out) {
  double difference = 0, square = 0, unequal = 0;
  const std::int64_t row = blockIdx.x;
  for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    const double a = numerics::load(got[row * columns + c]), b = numerics::load(want[row * columns + c]);
    difference += (a - b) * (a - b);
    square += b * b;
    unequal += a != b;
  }
  __shared__ double sums[3][256];
  sums[0][threadIdx.x] = difference, sums[1][threadIdx.x] = square, sums[2][threadIdx.x] = unequal;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 256; ++i) {
      for (int s = 0; s < 3; ++s) sums[s][0] += sums[s][i];
    }
    for (int s = 0; s < 3; ++s) out[3 * row + s] = sums[s][0];
  }
}

struct Case {
  std::string name;
  std::int64_t hidden, width;
  int experts, top_k;
  std::int64_t tokens;
  ActivationKind kind = ActivationKind::swiglu;
  bool bias = false, after_down = true, fp32_gradients = false, accumulate = false;
  int shared = 0;
  std::int64_t shared_width = 0;
  bool recompute = false;
  double empty_slots = 0;  // part of the routes that are -1
  int columns = 192;       // of a block's products
  bool equal_counts = false;
};

struct Results {  // tensors to compare: name, rows, columns, pointer, float?
  struct Tensor {
    std::string name;
    std::int64_t rows, columns;
    const void* data;
    bool is_float;
  };
  std::vector<Tensor> tensors;
};

class Bench {
 public:
  explicit Bench(const Case& c) : c_(c) {
    std::mt19937 random(1234);
    const std::int64_t t = c.tokens, k = c.top_k, routes = t * k;
    std::vector<std::int32_t> ids(routes);
    std::vector<float> weights(routes);
    std::vector<std::int64_t> counts(c.experts, 0);
    std::uniform_real_distribution<float> unit(0.0f, 1.0f);
    for (std::int64_t i = 0; i < t; ++i) {
      for (int j = 0; j < k; ++j) {
        std::int32_t e;
        if (c.equal_counts) {
          e = std::int32_t((i * k + j) % c.experts);
        } else {
          do {
            e = std::int32_t(random() % c.experts);
          } while (std::find(&ids[i * k], &ids[i * k] + j, e) != &ids[i * k] + j);
        }
        ids[i * k + j] = e;
        weights[i * k + j] = unit(random);
      }
    }
    for (auto& e : ids) {
      if (unit(random) < c.empty_slots || (c.empty_slots > 0 && e == 1)) e = -1;  // and expert 1 has no rows at all
    }
    std::vector<std::vector<std::int32_t>> of_expert(c.experts);
    for (std::int64_t r = 0; r < routes; ++r) {
      if (ids[r] >= 0) of_expert[ids[r]].push_back(std::int32_t(r)), ++counts[ids[r]];
    }
    std::vector<std::int32_t> row_route;
    for (auto& list : of_expert) row_route.insert(row_route.end(), list.begin(), list.end());
    rows_ = std::int64_t(row_route.size());
    row_route.resize(std::max<std::int64_t>(routes, 1));

    schedule::Sizes& s = sizes_;
    s.local_experts = c.experts;
    s.shared_experts = c.shared;
    s.top_k = c.top_k;
    s.hidden_size = c.hidden;
    s.intermediate_size = c.width;
    for (int i = 0; i < c.shared; ++i) s.shared_intermediate_size[i] = c.shared_width;
    s.gate_up_factor = c.kind == ActivationKind::relu_squared ? 1 : 2;
    s.tokens = t;
    s.tile = sm90_tile_shape(c.columns, s.gate_up_factor, s.top_k);
    auto tune = [](const char* name, std::int32_t& value) {
      if (const char* text = std::getenv(name)) value = std::atoi(text);
    };
    tune("GROUP", s.tile.group_blocks), tune("RASTER", s.tile.raster_blocks), tune("TOKENS", s.tile.token_block);
    s.max_row_blocks = schedule::ceil_div(routes, s.tile.row_block) + c.experts;
    s.max_chunks = schedule::ceil_div(t, s.chunk_tokens);
    s.recompute = c.recompute;
    s.want_gate_up_bias_grad = s.want_down_bias_grad = c.bias;

    std::vector<std::int64_t> header(schedule::Layout::header_length(1, c.experts));
    std::vector<std::int32_t> expert_rank(c.experts, 0);
    auto layout = schedule::Layout::at(header.data(), nullptr, 1, c.experts);
    *layout.valid_tokens = t;
    layout.tokens_of_rank[0] = t;
    schedule::fill_layout(s, layout, c.experts, expert_rank.data(), [&](int, int e) { return counts[e]; });
    auto* device_header = memory_.get<std::int64_t>(header.size());
    auto* device_route = memory_.get<std::int32_t>(row_route.size());
    upload(device_header, header), upload(device_route, row_route);
    layout_ = schedule::Layout::at(device_header, device_route, 1, c.experts);
    ids_ = memory_.get<std::int32_t>(routes), weights_ = memory_.get<float>(routes);
    upload(ids_, ids), upload(weights_, weights);

    const auto pre = s.gate_up_factor * c.width, shared_pre = s.gate_up_factor * c.shared_width;
    x_ = random_tensor(t * c.hidden, 1.0f, 1), dy_ = random_tensor(t * c.hidden, 1.0f, 2);
    auto group = [&](int experts, std::int64_t width, std::int64_t pre_width, std::uint64_t seed) {
      ExpertGroup g;
      g.experts = experts, g.width = width;
      g.gate_up_proj = random_tensor(experts * pre_width * c.hidden, 1.0f / std::sqrt(float(c.hidden)), seed);
      g.down_proj = random_tensor(experts * c.hidden * width, 1.0f / std::sqrt(float(width)), seed + 1);
      if (c.bias) {
        g.gate_up_bias = random_tensor(experts * pre_width, 0.3f, seed + 2);
        g.down_bias = random_tensor(experts * c.hidden, 0.3f, seed + 3);
      }
      return g;
    };
    base_.groups[0] = group(c.experts, c.width, pre, 10);
    for (int i = 0; i < c.shared; ++i) base_.groups[1 + i] = group(1, c.shared_width, shared_pre, 20 + 10 * i);
    if (c.shared > 0) {
      std::vector<float> gates(t * c.shared);
      for (auto& g : gates) g = unit(random);
      gates_ = memory_.get<float>(gates.size());
      upload(gates_, gates);
    }
    base_.activation = numerics::Activation(ActivationConfig{c.kind});
    base_.weight_after_down = c.after_down;
    base_.total_rows = base_.packed_rows = routes;
    base_.x = x_, base_.x_stride = c.hidden, base_.dy = dy_, base_.dy_stride = c.hidden;
    base_.topk_ids = ids_, base_.topk_weights = weights_, base_.shared_gates = gates_;
    base_.out_stride = c.hidden;
    base_.pass.layout = layout_;
    check(cudaMallocHost(&error_, sizeof(PassError)), "error word");
    *error_ = PassError{};
    counters_ = memory_.get<unsigned long long>(counter_count());
    tiles_ = memory_.get<std::byte>(sm90_tile_table_bytes(sizes_));
    check(cudaMemset(counters_, 0, counter_count() * 8), "counters");
  }
  ~Bench() { cudaFreeHost(error_); }

  // Buffers of one run, filled with NaN.
  struct Run {
    PassData forward, backward;
    Results results;
  };
  Run make_run() {
    const Case& c = c_;
    const std::int64_t t = c.tokens, routes = t * c.top_k;
    Run run;
    PassData d = base_;
    d.pass.sizes = sizes_;
    d.error = error_;
    d.tiles = tiles_;
    const auto map = schedule::CounterMap::of(sizes_);
    d.counters = {counters_, counters_ + map.local_size, counters_ + map.local_size + map.arrivals_size};
    run.forward = d;
    run.forward.out = poisoned(t * c.hidden);
    add(run, "y", t, c.hidden, run.forward.out);
    std::vector<bfloat16*> z(1 + c.shared);
    for (int g = 0; g <= c.shared; ++g) {
      auto& group = run.forward.groups[g];
      const std::int64_t rows = g == 0 ? routes : t;
      z[g] = group.pre_activation = poisoned(rows * sizes_.gate_up_factor * group.width);
      group.activated = poisoned(rows * group.width);
      group.slots = poisoned(rows * c.hidden);
      add(run, "z" + std::to_string(g), g == 0 ? rows_ : t, sizes_.gate_up_factor * group.width, group.pre_activation);
      add(run, "act" + std::to_string(g), g == 0 ? rows_ : t, group.width, group.activated);
    }
    run.backward = d;
    run.backward.pass.sizes.direction = Direction::backward;
    run.forward.packed_x = run.backward.packed_x = poisoned(routes * c.hidden);
    run.backward.packed_dy = poisoned(routes * c.hidden);
    run.backward.out = poisoned(t * c.hidden);
    add(run, "dx", t, c.hidden, run.backward.out);
    run.backward.d_topk_weights = poisoned_float(routes);
    add(run, "dprob", t, c.top_k, run.backward.d_topk_weights, true);
    if (c.shared > 0) {
      run.backward.d_shared_gates = poisoned_float(t * c.shared);
      add(run, "dgate", t, c.shared, run.backward.d_shared_gates, true);
    }
    for (int g = 0; g <= c.shared; ++g) {
      auto& group = run.backward.groups[g];
      const std::int64_t rows = g == 0 ? routes : t, pre = sizes_.gate_up_factor * group.width;
      group.pre_activation = c.recompute ? poisoned(rows * pre) : z[g];
      group.activated = poisoned(rows * group.width);
      group.d_pre_activation = poisoned(rows * pre);
      group.slots = poisoned(rows * c.hidden);
      group.dprob_groups = int(schedule::ceil_div(group.width, 64)) + (c.bias ? 1 : 0);
      group.dprob = poisoned_float(rows * group.dprob_groups);
      auto target = [&](const char* name, std::int64_t r, std::int64_t columns) {
        GradientTarget out;
        out.is_float = c.fp32_gradients, out.accumulate = c.accumulate;
        out.data = c.fp32_gradients ? static_cast<void*>(poisoned_float(r * columns)) : poisoned(r * columns);
        if (c.accumulate) check(cudaMemset(out.data, 0x3f, r * columns * (c.fp32_gradients ? 4 : 2)), "main gradient");
        add(run, name + std::to_string(g), r, columns, out.data, c.fp32_gradients);
        return out;
      };
      group.gate_up_grad = target("dWgu", group.experts * pre, c.hidden);
      group.down_grad = target("dWd", group.experts * c.hidden, group.width);
      if (c.bias) {
        group.gate_up_bias_grad = target("dbgu", group.experts, pre);
        group.down_bias_grad = target("dbd", group.experts, c.hidden);
      }
      add(run, "dz" + std::to_string(g), g == 0 ? rows_ : t, pre, group.d_pre_activation);
      add(run, "pA" + std::to_string(g), g == 0 ? rows_ : t, group.width, group.activated);
    }
    check(cudaDeviceSynchronize(), "buffers");
    return run;
  }

  void naive(const Run& run) {
    std::int64_t widest = c_.width;
    if (c_.shared > 0) widest = std::max(widest, c_.shared_width);
    float* scratch = memory_.get<float>(std::size_t(c_.tokens) * c_.top_k * widest);
    naive_run_pass(run.forward, scratch, nullptr);
    naive_run_pass(run.backward, scratch, nullptr);
    check(cudaDeviceSynchronize(), "naive pass");
  }
  bool fast(const Run& run, int blocks = 0, bool backward = true) {
    sm90_run_pass(run.forward, blocks, nullptr);
    check(cudaDeviceSynchronize(), "forward");
    if (backward) {
      sm90_run_pass(run.backward, blocks, nullptr);
      check(cudaDeviceSynchronize(), "backward");
    }
    if (error_->state == PassError::there) {
      std::printf("%s: gave up in stage %d, expert %d, block %d\n", c_.name.c_str(), error_->stage, error_->expert,
                  error_->row_block);
      return false;
    }
    return true;
  }

  struct Difference {
    double whole, worst_row, unequal;
  };
  Difference difference(const Results::Tensor& a, const Results::Tensor& b) {
    if (a.rows == 0 || a.columns == 0) return {0, 0, 0};
    auto* out = memory_.get<double>(3 * a.rows);
    if (a.is_float) {
      compare<<<unsigned(a.rows), 256>>>(static_cast<const float*>(a.data), static_cast<const float*>(b.data), a.rows,
                                         a.columns, out);
    } else {
      compare<<<unsigned(a.rows), 256>>>(static_cast<const bfloat16*>(a.data), static_cast<const bfloat16*>(b.data),
                                         a.rows, a.columns, out);
    }
    std::vector<double> host(3 * a.rows);
    check(cudaMemcpy(host.data(), out, host.size() * 8, cudaMemcpyDeviceToHost), "compare");
    double d = 0, s = 0, worst = 0, unequal = 0;
    for (std::int64_t r = 0; r < a.rows; ++r) {
      d += host[3 * r], s += host[3 * r + 1], unequal += host[3 * r + 2];
      const double mean_square = host[3 * r + 1];
      const double e = host[3 * r] == 0 ? 0 : std::sqrt(host[3 * r] / (mean_square + 1e-6));
      if (!(e <= worst)) worst = e;
    }
    return {d == 0 ? 0 : std::sqrt(d / s), worst, unequal};
  }

  // One line a tensor; returns whether all agree.
  bool agree(const Run& got, const Run& want, double limit, bool verbose) {
    bool good = true;
    for (std::size_t i = 0; i < got.results.tensors.size(); ++i) {
      const auto& t = got.results.tensors[i];
      const Difference d = difference(t, want.results.tensors[i]);
      const bool ok = d.whole <= limit;
      if (!ok || verbose) {
        std::printf("  %-20s %-6s [%lld, %lld] error %.2e worst row %.2e unequal %.0f %s\n", c_.name.c_str(),
                    t.name.c_str(), (long long)t.rows, (long long)t.columns, d.whole, d.worst_row, d.unequal,
                    ok ? "" : "WRONG");
      }
      good = good && ok;
    }
    return good;
  }

  std::size_t counter_count() const {
    const auto map = schedule::CounterMap::of(sizes_);
    return map.local_size + map.arrivals_size + PassCounters::control_counters;
  }
  bool counters_clean() {
    std::vector<unsigned long long> host(counter_count());
    check(cudaMemcpy(host.data(), counters_, host.size() * 8, cudaMemcpyDeviceToHost), "counters");
    return std::all_of(host.begin(), host.end(), [](auto c) { return c == 0; });
  }
  Memory& memory() { return memory_; }

 private:
  template <class T>
  void upload(T* to, const std::vector<T>& from) {
    check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  bfloat16* random_tensor(std::size_t count, float deviation, std::uint64_t seed) {
    auto* p = memory_.get<bfloat16>(count);
    fill<<<1024, 256>>>(p, count, deviation, seed << 40);
    return p;
  }
  bfloat16* poisoned(std::size_t count) {
    auto* p = memory_.get<bfloat16>(count);
    fill_bits<<<1024, 256>>>(reinterpret_cast<std::uint32_t*>(p), (count + 1) / 2 + 32, 0x7fff7fffu);
    return p;
  }
  float* poisoned_float(std::size_t count) {
    auto* p = memory_.get<float>(count);
    fill_bits<<<1024, 256>>>(reinterpret_cast<std::uint32_t*>(p), count, 0x7fffffffu);
    return p;
  }
  static void add(Run& run, const std::string& name, std::int64_t rows, std::int64_t columns, const void* data,
                  bool is_float = false) {
    run.results.tensors.push_back({name, rows, columns, data, is_float});
  }

  Case c_;
  Memory memory_;
  schedule::Sizes sizes_;
  schedule::Layout layout_;
  PassData base_;
  std::int64_t rows_ = 0;
  std::int32_t* ids_ = nullptr;
  float* weights_ = nullptr;
  float* gates_ = nullptr;
  bfloat16 *x_ = nullptr, *dy_ = nullptr;
  PassError* error_ = nullptr;
  unsigned long long* counters_ = nullptr;
  std::byte* tiles_ = nullptr;
};

double median_ms(const std::function<void()>& f, int repeats) {
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  std::vector<float> times;
  f();
  for (int i = 0; i < repeats; ++i) {
    cudaEventRecord(a);
    f();
    cudaEventRecord(b);
    check(cudaEventSynchronize(b), "timing");
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// TFLOP/s of cuBLAS over [m, 2I, H] and [m, H, I] together.
double dense_rate(Bench& bench, std::int64_t m, std::int64_t hidden, std::int64_t width) {
  static cublasHandle_t handle = [] {
    cublasHandle_t h;
    cublasCreate(&h);
    return h;
  }();
  Memory memory;
  auto* x = memory.get<bfloat16>(m * hidden);
  auto* w = memory.get<bfloat16>(2 * width * hidden);
  auto* z = memory.get<bfloat16>(m * 2 * width);
  fill<<<1024, 256>>>(x, m * hidden, 1.0f, 77ull << 40);
  fill<<<1024, 256>>>(w, 2 * width * hidden, 0.02f, 78ull << 40);
  auto* y = memory.get<bfloat16>(m * hidden);
  const float one = 1.0f, zero = 0.0f;
  // Row-major [m, n] = a [m, k] b [n, k]^T, as column-major n x m.
  auto gemm = [&](const bfloat16* a, const bfloat16* b, bfloat16* c, std::int64_t n, std::int64_t k) {
    cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, int(n), int(m), int(k), &one, b, CUDA_R_16BF, int(k), a, CUDA_R_16BF,
                 int(k), &zero, c, CUDA_R_16BF, int(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  };
  const double up = median_ms([&] { gemm(x, w, z, 2 * width, hidden); }, 7);
  const double down = median_ms([&] { gemm(z, w, y, hidden, width); }, 7);
  (void)bench;
  return 6.0 * m * hidden * width / (up + down) * 1e-9;
}

int check_all(bool forward_only) {
  std::vector<Case> cases = {
      {"plain", 256, 192, 4, 2, 300},
      {"tails", 200, 104, 8, 3, 517},
      {"wide", 512, 384, 8, 2, 1024},
  };
  Case c{"clamped bias", 136, 200, 8, 4, 333, ActivationKind::swiglu_clamped, true};
  cases.push_back(c);
  c = {"relu2 fp32", 320, 264, 4, 2, 400, ActivationKind::relu_squared, true};
  c.fp32_gradients = true;
  cases.push_back(c);
  c = {"erf accumulate", 256, 128, 8, 2, 400, ActivationKind::geglu_erf};
  c.fp32_gradients = c.accumulate = true;
  c.empty_slots = 0.2;
  cases.push_back(c);
  c = {"tanh before", 256, 320, 8, 2, 257, ActivationKind::geglu_tanh};
  c.after_down = false, c.empty_slots = 0.1, c.recompute = true;
  cases.push_back(c);
  c = {"shared", 384, 128, 16, 4, 300};
  c.shared = 2, c.shared_width = 264, c.bias = true;
  cases.push_back(c);
  c = {"many rows", 384, 136, 16, 4, 8000};
  cases.push_back(c);
  c = {"many columns", 1160, 712, 4, 2, 700};
  cases.push_back(c);
  c = {"one token", 256, 128, 8, 2, 1};
  cases.push_back(c);
  int wrong = 0;
  for (const Case& one : cases) {
    Bench bench(one);
    auto want = bench.make_run(), got = bench.make_run();
    std::printf("%s\n", one.name.c_str());
    std::fflush(stdout);
    bench.naive(want);
    bool good = bench.fast(got, 0, !forward_only);
    if (forward_only) got.results.tensors.resize(3 + 2 * one.shared), want.results.tensors.resize(3 + 2 * one.shared);
    good = bench.agree(got, want, 8e-3, false) && good;
    if (!bench.counters_clean()) std::printf("  counters are not clean\n"), good = false;
    // The same bits again, on few SMs.
    auto again = bench.make_run();
    good = bench.fast(again, 7, !forward_only) && good;
    if (forward_only) again.results.tensors.resize(3 + 2 * one.shared);
    good = bench.agree(again, got, 0.0, false) && good;
    // And with tiles of another width.
    Case narrow = one;
    narrow.columns = 128;
    Bench narrow_bench(narrow);
    auto narrow_run = narrow_bench.make_run();
    good = narrow_bench.fast(narrow_run, 0, !forward_only) && good;
    if (forward_only) narrow_run.results.tensors.resize(3 + 2 * one.shared);
    good = bench.agree(narrow_run, got, 0.0, false) && good;
    if (!narrow_bench.counters_clean()) std::printf("  counters are not clean\n"), good = false;
    std::printf("%-16s %s\n", one.name.c_str(), good ? "ok" : "WRONG");
    std::fflush(stdout);
    wrong += !good;
  }
  return wrong;
}

// Mean cycles of each part of a tile, by stage, and how the SMs' time divides.
void print_trace(Bench& bench, PassData data, const char* name) {
  constexpr int room = 4096, blocks = 132;
  auto* events = bench.memory().get<TileEvent>(std::size_t(blocks) * 2 * room);
  check(cudaMemset(events, 0xff, sizeof(TileEvent) * blocks * 2 * room), "trace");
  data.trace = events, data.trace_room = room;
  sm90_run_pass(data, 0, nullptr);
  check(cudaDeviceSynchronize(), "traced pass");
  std::vector<TileEvent> host(std::size_t(blocks) * 2 * room);
  check(cudaMemcpy(host.data(), events, host.size() * sizeof(TileEvent), cudaMemcpyDeviceToHost), "trace");
  struct Sum {
    double n = 0, wait = 0, multiply = 0, write = 0;
    std::uint64_t first = ~0ull, last = 0;
  } sums[schedule::stage_count];
  std::uint64_t begin = ~0ull;
  for (std::size_t i = 0; i < host.size(); ++i) {
    const TileEvent& e = host[i];
    if (e.stage < 0) continue;
    Sum& s = sums[e.stage];
    s.n += 1, s.wait += e.wait_cycles, s.multiply += e.multiply_cycles, s.write += e.write_cycles;
    s.first = std::min(s.first, e.end_ns), s.last = std::max(s.last, e.end_ns);
    begin = std::min(begin, e.end_ns);
  }
  std::printf("  %-8s SM clock %.3f GHz\n", name, cycles_per_ns(host, room));
  for (int i = 0; i < schedule::stage_count; ++i) {
    const Sum& s = sums[i];
    if (s.n > 0) {
      std::printf("  %-8s %-14s %7.0f tiles: wait %6.0f  multiply %6.0f write %6.0f cycles; from %5.0f to %5.0f us\n",
                  name, schedule::to_string(static_cast<schedule::Stage>(i)), s.n, s.wait / s.n, s.multiply / s.n,
                  s.write / s.n, (s.first - begin) * 1e-3, (s.last - begin) * 1e-3);
    }
  }
}

struct Json {
  std::string file, commit, command;
};

void time_all(bool forward_only, const std::vector<std::string>& shapes, const std::vector<int>& widths,
              const Json& json) {
  std::vector<Case> cases = {
      {"Qwen3-30B", 2048, 768, 128, 8, 16384},
      {"fine", 1536, 256, 128, 8, 24576},
      {"OLMoE", 2048, 1024, 64, 8, 16384},
      {"4096x512", 4096, 512, 128, 8, 32768},
      {"Qwen3-235B", 4096, 1536, 128, 8, 8192},
      {"Mixtral", 4096, 14336, 8, 2, 16384},
      {"GPT-OSS-120B", 2880, 2880, 128, 4, 16384, ActivationKind::swiglu_clamped, true},
      {"DeepSeek-V3", 7168, 2048, 64, 8, 8192},
  };
  cases.back().shared = 1, cases.back().shared_width = 2048;
  std::string rows;
  if (!shapes.empty()) {
    std::erase_if(cases,
                  [&](const Case& c) { return std::find(shapes.begin(), shapes.end(), c.name) == shapes.end(); });
  }
  std::printf("%-12s %4s %9s %9s %8s %8s %8s %8s %9s\n", "shape", "cols", "fwd ms", "fwd+bwd", "R TF/s", "fwd TF/s",
              "f+b TF/s", "fwd/R", "f+b/R");
  for (Case c : cases) {
    for (int columns : widths) {
      c.columns = columns;
      Bench bench(c);
      auto run = bench.make_run();
      if (!bench.fast(run, 0, !forward_only)) continue;
      const double before = dense_rate(bench, c.tokens * c.top_k, c.hidden, c.width);
      const double forward = median_ms([&] { sm90_run_pass(run.forward, 0, nullptr); }, 9);
      const double backward = forward_only ? 0 : median_ms([&] { sm90_run_pass(run.backward, 0, nullptr); }, 9);
      const double after = dense_rate(bench, c.tokens * c.top_k, c.hidden, c.width);
      const double rate = (before + after) / 2;
      const double flops = 6.0 * c.tokens * c.hidden * (c.top_k * c.width + c.shared * c.shared_width) * 1e-9;
      std::printf("%-12s %4d %9.3f %9.3f %8.0f %8.0f %8.0f %8.3f %9.3f\n", c.name.c_str(), columns, forward,
                  forward + backward, rate, flops / forward, forward_only ? 0.0 : 3 * flops / (forward + backward),
                  flops / forward / rate, forward_only ? 0.0 : 3 * flops / (forward + backward) / rate);
      const double saved =
          2.0 * 2 * c.tokens * (c.top_k * c.width + c.shared * c.shared_width) + 12.0 * c.tokens * c.top_k;
      char row[640];
      std::snprintf(
          row, sizeof row,
          "    {\"shape\": \"%s\", \"hidden_size\": %lld, \"intermediate_size\": %lld, \"num_experts\": %d, \"top_k\": "
          "%d, "
          "\"tokens\": %lld, \"ranks\": 1, \"routing\": \"balanced\", \"tile_columns\": %d, \"forward_ms\": %.3f, "
          "\"forward_backward_ms\": %.3f, \"fraction_of_dense\": {\"forward\": %.3f, \"forward_backward\": %.3f}, "
          "\"saved_bytes\": %.0f, \"rivals\": {}}",
          c.name.c_str(), (long long)c.hidden, (long long)c.width, c.experts, c.top_k, (long long)c.tokens, columns,
          forward, forward + backward, flops / forward / rate, 3 * flops / (forward + backward) / rate, saved);
      rows += (rows.empty() ? "" : ",\n") + std::string(row);
      print_trace(bench, run.forward, "forward");
      if (!forward_only) print_trace(bench, run.backward, "backward");
      std::fflush(stdout);
    }
  }
  if (json.file.empty()) return;
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  std::FILE* out = std::fopen(json.file.c_str(), "w");
  if (!out) throw Error(Status::invalid_argument, json.file + " cannot be written");
  // Saved: the pre-activation and the routing table; x stays where the caller has it.
  std::fprintf(out,
               "{\n  \"gpu\": \"%s\",\n  \"date\": \"%s\",\n  \"commit\": \"%s\",\n  \"command\": \"%s\",\n  \"rows\": "
               "[\n%s\n  ]\n}\n",
               device.name, date, json.commit.c_str(), json.command.c_str(), rows.c_str());
  std::fclose(out);
}

}  // namespace

int main(int count, char** arguments) {
  bool do_check = false, do_time = false, forward_only = false;
  std::vector<std::string> shapes;
  std::vector<int> widths;
  Json json;
  json.command = "pass_workbench";
  for (int i = 1; i < count; ++i) json.command += std::string(" ") + arguments[i];
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument == "json" && i + 2 < count) {
      json.file = arguments[++i], json.commit = arguments[++i];
      continue;
    }
    if (argument == "check")
      do_check = true;
    else if (argument == "time")
      do_time = true;
    else if (argument == "forward")
      forward_only = true;
    else if (argument == "128" || argument == "192")
      widths.push_back(std::stoi(argument));
    else
      shapes.push_back(argument);
  }
  if (widths.empty()) widths = {192};
  try {
    int wrong = 0;
    if (do_check) wrong = check_all(forward_only), std::printf("%d wrong\n", wrong);
    if (do_time) time_all(forward_only, shapes, widths, json);
    return wrong != 0;
  } catch (const Error& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
