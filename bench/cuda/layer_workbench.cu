// The whole layer on a GPU through its C++ interface: forwards of few tokens in a CUDA graph (`small`: these alone), time
// of a forward and of a backward with their routing, of the routing kernels alone (the same T, E and k with experts of no
// size), and of the host for a call.
//
// Build: as pass_workbench.cu, together with src/**/*.cpp and -DMOELITH_WITH_CUDA=1.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "executors/cuda/sm90_pass.cuh"
#include "moelith/layer.hpp"
#include "tensors.cuh"
#include "tests/spin.cuh"

using namespace moelith;

namespace {

double median_ms(const std::function<void()>& f, int repeats) {
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  std::vector<float> times;
  for (int i = 0; i < repeats + 2; ++i) {
    cudaEventRecord(a);
    f();
    cudaEventRecord(b);
    check(cudaEventSynchronize(b), "timing");
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}
// Microseconds of the host a call; the device keeps up, or its queue takes them.
double host_us(const std::function<void()>& f) {
  std::vector<double> times;
  for (int round = 0; round < 20; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; ++i) f();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / 20);
    check(cudaDeviceSynchronize(), "host time");
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Arguments as large as those of the routing kernels and of the pass.
template <int Size>
struct Argument {
  char bytes[Size];
};
template <int Size>
__global__ void empty_kernel(const __grid_constant__ Argument<Size>) {}

// A layer on random numbers, and what its forward reads and writes.
struct Layer {
  Plan plan;
  Inputs in;
  Outputs out;

  Layer(std::int64_t hidden, std::int64_t width, int experts, int top_k, std::int64_t tokens)
      : plan(make_plan(hidden, width, experts, top_k, tokens)) {
    const DataType bf16 = DataType::bfloat16, f32 = DataType::float32;
    in.x = tensor(bf16, {tokens, hidden}, 1.0f, 1);
    in.router_logits = tensor(f32, {tokens, experts}, 1.0f, 2);
    in.weights.gate_up_proj = tensor(bf16, {experts, 2 * width, hidden}, 1.0f / std::sqrt(float(hidden)), 3);
    in.weights.down_proj = tensor(bf16, {experts, hidden, width}, 1.0f / std::sqrt(float(width)), 4);
    out.y = tensor(bf16, {tokens, hidden});
  }
  static Plan make_plan(std::int64_t hidden, std::int64_t width, int experts, int top_k, std::int64_t tokens) {
    LayerConfig c;
    c.hidden_size = hidden, c.intermediate_size = width, c.num_experts = experts, c.top_k = top_k;
    PlanOptions options;
    options.max_tokens = tokens, options.device = DeviceKind::cuda;
    return Plan::create(c, options);
  }
};

void measure(const std::string& name, std::int64_t hidden, std::int64_t width, int experts, int top_k, std::int64_t tokens) {
  Layer layer(hidden, width, experts, top_k, tokens);
  const Plan& plan = layer.plan;
  Inputs& in = layer.in;
  Outputs& out = layer.out;
  const DataType bf16 = DataType::bfloat16, f32 = DataType::float32;
  OutputGradients up;
  up.y = tensor(bf16, {tokens, hidden}, 1.0f, 5);
  InputGradients grad;
  grad.x = tensor(bf16, {tokens, hidden});
  grad.router_logits = tensor(f32, {tokens, experts});
  grad.weights.gate_up_proj.tensor = tensor(bf16, {experts, 2 * width, hidden});
  grad.weights.down_proj.tensor = tensor(bf16, {experts, hidden, width});
  const auto sizes = plan.buffer_sizes(tokens);
  void *saved = allocate(sizes.saved), *workspace = allocate(sizes.workspace);
  auto forward = [&] { plan.forward(in, out, saved, workspace); };
  auto backward = [&] { plan.backward(in, saved, up, grad, workspace); };
  const double f = median_ms(forward, 9), b = median_ms(backward, 9);
  std::printf("%-24s forward %8.3f ms, backward %8.3f ms; host: forward %6.1f us, backward %6.1f us\n", name.c_str(), f, b,
              tokens <= 512 ? host_us(forward) : 0.0, tokens <= 512 ? host_us(backward) : 0.0);
  if (tokens <= 512) {  // the same with each expert's weights and gradients at places of their own, bound once
    auto pointers = [&](const TensorView& gate_up, const TensorView& down) {
      ExpertPointers p;
      p.dtype = bf16;
      for (std::int64_t e = 0; e < experts; ++e) {
        p.gate_up_proj.push_back(static_cast<numerics::bfloat16*>(gate_up.data) + e * gate_up.stride[0]);
        p.down_proj.push_back(static_cast<numerics::bfloat16*>(down.data) + e * down.stride[0]);
      }
      return plan.bind(p);
    };
    const auto weights = pointers(in.weights.gate_up_proj, in.weights.down_proj);
    const auto gradients = pointers(grad.weights.gate_up_proj.tensor, grad.weights.down_proj.tensor);
    in.weights = {}, grad.weights = {};
    in.weights.bound = weights, grad.weights.bound = gradients;
    forward(), backward();
    std::printf("%-24s experts apart; host: forward %6.1f us, backward %6.1f us\n", name.c_str(), host_us(forward), host_us(backward));
  }
  std::fflush(stdout);
  check(cudaDeviceSynchronize(), name.c_str());
  free_all();
}

// A CUDA graph of forward without gradients, replayed: the median over fresh inputs and routes, so that weights come from
// memory, and the least time to read those of the experts that were chosen.
void measure_small(const std::string& name, std::int64_t hidden, std::int64_t width, int experts, int top_k) {
  constexpr double bytes_per_us = 4.8e6;  // an H200's memory, by its data sheet
  for (const std::int64_t tokens : {1, 8, 64, 512}) {
    Layer layer(hidden, width, experts, top_k, tokens);
    const Plan& plan = layer.plan;
    Inputs& in = layer.in;
    Outputs& out = layer.out;
    out.expert_counts = tensor(DataType::int64, {experts});
    void* workspace = allocate(plan.buffer_sizes(tokens).workspace);
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    plan.forward(in, out, nullptr, workspace, stream);  // code is loaded on first use
    check(cudaDeviceSynchronize(), "forward");
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    plan.forward(in, out, nullptr, workspace, stream);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&replay, graph, 0), "graph");
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    std::vector<double> times, floors;
    for (int round = 0; round < 53; ++round) {
      fill<<<64, 256, 0, stream>>>(static_cast<numerics::bfloat16*>(in.x.data), in.x.numel(), 1.0f, (100ull + round) << 40);
      fill<<<64, 256, 0, stream>>>(static_cast<float*>(in.router_logits.data), in.router_logits.numel(), 1.0f, (500ull + round) << 40);
      test::spin<<<1, 1, 0, stream>>>(200'000);  // the host is done launching before the device begins
      cudaEventRecord(a, stream);
      check(cudaGraphLaunch(replay, stream), "replay");
      cudaEventRecord(b, stream);
      check(cudaEventSynchronize(b), "replay");
      float ms;
      cudaEventElapsedTime(&ms, a, b);
      std::vector<std::int64_t> counts(experts);
      check(cudaMemcpy(counts.data(), out.expert_counts.data, counts.size() * 8, cudaMemcpyDeviceToHost), "counts");
      if (round < 3) continue;
      times.push_back(ms * 1e3);
      floors.push_back(double(experts - std::count(counts.begin(), counts.end(), 0)) * 6 * hidden * width / bytes_per_us);
    }
    std::sort(times.begin(), times.end()), std::sort(floors.begin(), floors.end());
    std::printf("%-12s T %4lld  forward %7.1f us (%.1f to %.1f), weights alone %6.1f us\n", name.c_str(), (long long)tokens,
                times[times.size() / 2], times.front(), times.back(), floors[floors.size() / 2]);
    std::fflush(stdout);
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
    cudaEventDestroy(a), cudaEventDestroy(b);
    free_all();
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    measure_small("Qwen3-30B", 2048, 768, 128, 8);
    if (count > 1 && std::string(arguments[1]) == "small") return 0;
    measure("Qwen3-30B", 2048, 768, 128, 8, 16384);
    measure("its routing", 8, 8, 128, 8, 16384);
    measure("OLMoE", 2048, 1024, 64, 8, 16384);
    measure("its routing", 8, 8, 64, 8, 16384);
    measure("routing, 1024 experts", 8, 8, 1024, 8, 16384);
    measure("small", 256, 128, 32, 4, 64);
    const double launches = host_us([] {
      static const Argument<512> small{};
      static const Argument<sizeof(executors::cuda::sm90::Parameters)> large{};
      for (int i = 0; i < 3; ++i) empty_kernel<<<1, 32>>>(small);
      empty_kernel<<<1, 32>>>(large);
    });
    std::printf("host: 4 launches of empty kernels with as large arguments as forward's %.1f us\n", launches);
  } catch (const Error& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
