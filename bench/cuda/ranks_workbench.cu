// Several ranks side by side on one GPU, each with its share of the SMs, beside one rank with all SMs, all experts and all
// tokens: the same work, so that the difference is what the protocol costs. Both in turns, since clocks follow the heat.
// First the bits are compared; a line "row" is one of bench/results/ranks-h200.json. With an argument above 1 there is a rank on
// each of so many GPUs; the fraction is then of what one GPU would do in as many times the time.
//
// `small`: forwards of few tokens instead, in a CUDA graph of each rank.
//
// Build: as layer_workbench.cu. ranks_workbench [GPUS [SHAPE | small]]; SHAPE: a part of a name
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moelith/layer.hpp"
#include "tensors.cuh"
#include "tests/spin.cuh"

namespace {

struct Shape {
  const char* name;
  std::int64_t hidden, width;
  std::int32_t experts, top_k;
  std::int64_t tokens;  // of a rank
};

// Rows [begin, begin + count) of a tensor.
TensorView rows_of(const TensorView& all, std::int64_t begin, std::int64_t count) {
  TensorView part = all;
  part.data = static_cast<char*>(all.data) + begin * all.stride[0] * std::int64_t(size_of(all.dtype));
  part.shape[0] = count;
  return part;
}

// A rank's plan, or that of the one that has everything, with its tensors.
struct Rank {
  std::unique_ptr<Plan> plan;
  int gpu = 0;
  cudaStream_t stream;
  cudaEvent_t done;
  cudaGraphExec_t replay;  // of a forward without gradients
  Inputs in;
  Outputs out;
  OutputGradients up;
  InputGradients grad;
  void *saved, *workspace;

  void place(const LayerConfig& c, std::int64_t tokens) {
    const auto sizes = plan->buffer_sizes(tokens);
    saved = allocate(sizes.saved), workspace = allocate(sizes.workspace);
    out.y = tensor(c.dtype, {tokens, c.hidden_size});
    grad.x = tensor(c.dtype, {tokens, c.hidden_size});
    grad.router_logits = tensor(DataType::float32, {tokens, c.num_experts});
    const std::int64_t local = plan->num_local_experts();
    grad.weights.gate_up_proj.tensor = tensor(c.dtype, {local, 2 * c.intermediate_size, c.hidden_size});
    grad.weights.down_proj.tensor = tensor(c.dtype, {local, c.hidden_size, c.intermediate_size});
  }
  void make_stream() {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "event");
  }
  void run_without_gradients() const {
    check(cudaSetDevice(gpu), "cudaSetDevice");
    plan->forward(in, out, nullptr, workspace, stream);
  }
  void capture() {
    cudaGraph_t graph;
    check(cudaSetDevice(gpu), "cudaSetDevice");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    run_without_gradients();
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&replay, graph, 0), "graph");
    check(cudaGraphUpload(replay, stream), "graph");
    check(cudaGraphDestroy(graph), "graph");
  }
  void run(bool backward) const {
    check(cudaSetDevice(gpu), "cudaSetDevice");
    if (backward) {
      plan->backward(in, saved, up, grad, workspace, stream);
    } else {
      plan->forward(in, out, saved, workspace, stream);
    }
  }
};

class Bench {
 public:
  Bench(const Shape& shape, int ranks, int gpus) : tokens_(shape.tokens * ranks), ranks_(ranks), gpus_(gpus) {
    config_.hidden_size = shape.hidden, config_.intermediate_size = shape.width;
    config_.num_experts = shape.experts, config_.top_k = shape.top_k;
    const std::int64_t h = shape.hidden, i = shape.width, e = shape.experts;
    all_.in.x = tensor(config_.dtype, {tokens_, h}, 1.0f, 1);
    all_.in.router_logits = tensor(DataType::float32, {tokens_, e}, 1.0f, 2);
    all_.in.weights.gate_up_proj = tensor(config_.dtype, {e, 2 * i, h}, 1.0f / std::sqrt(float(h)), 3);
    all_.in.weights.down_proj = tensor(config_.dtype, {e, h, i}, 1.0f / std::sqrt(float(i)), 4);
    all_.up.y = tensor(config_.dtype, {tokens_, h}, 1.0f, 5);
    check(cudaDeviceSynchronize(), "tensors");
    PlanOptions options;
    options.device = DeviceKind::cuda, options.max_tokens = tokens_;
    all_.plan = std::make_unique<Plan>(Plan::create(config_, options));
    all_.make_stream();
    all_.place(config_, tokens_);
    make_ranks(shape.tokens);
    check(cudaEventCreate(&begin_), "event"), check(cudaEventCreate(&end_), "event");
    check(cudaDeviceSynchronize(), "tensors");
  }

  // Milliseconds of one pass: of the one rank, and of all of them.
  double one(bool backward, int repeats) {
    return time({&all_}, backward, repeats);
  }
  double several(bool backward, int repeats) { return time(pointers(), backward, repeats); }
  // Microseconds of a forward without gradients, replayed, with fresh inputs and routes; the median.
  double one_replayed() { return replayed({&all_}); }
  double several_replayed() { return replayed(pointers()); }
  bool same_bits() {
    one(false, 1), one(true, 1), several(false, 1), several(true, 1);
    check(cudaDeviceSynchronize(), "passes");
    std::int64_t token = 0, expert = 0;
    bool same = true;
    for (const Rank& rank : each_) {
      const std::int64_t tokens = rank.in.x.shape[0], experts = rank.plan->num_local_experts();
      auto compare = [&](const TensorView& part, const TensorView& all, std::int64_t begin, std::int64_t count) {
        same &= bytes_of(part) == bytes_of(rows_of(all, begin, count));
      };
      compare(rank.out.y, all_.out.y, token, tokens), compare(rank.grad.x, all_.grad.x, token, tokens);
      compare(rank.grad.router_logits, all_.grad.router_logits, token, tokens);
      compare(rank.grad.weights.gate_up_proj.tensor, all_.grad.weights.gate_up_proj.tensor, expert, experts);
      compare(rank.grad.weights.down_proj.tensor, all_.grad.weights.down_proj.tensor, expert, experts);
      token += tokens, expert += experts;
    }
    return same;
  }

 private:
  void make_ranks(std::int64_t tokens) {
    const std::vector<Group> groups = Group::threads(ranks_);
    each_.resize(ranks_);
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks_; ++r) {
      threads.emplace_back([&, r] {
        PlanOptions options;
        options.device = DeviceKind::cuda, options.max_tokens = tokens, options.group = groups[r];
        check(cudaSetDevice(each_[r].gpu = r % gpus_), "cudaSetDevice");
        each_[r].plan = std::make_unique<Plan>(Plan::create(config_, options));
      });
    }
    for (auto& thread : threads) thread.join();
    std::int64_t expert = 0;
    for (int r = 0; r < ranks_; ++r) {
      Rank& rank = each_[r];
      check(cudaSetDevice(rank.gpu), "cudaSetDevice");
      rank.make_stream();
      const std::int64_t local = rank.plan->num_local_experts();
      rank.in.x = on_gpu(rank.gpu, rows_of(all_.in.x, r * tokens, tokens));
      rank.in.router_logits = on_gpu(rank.gpu, rows_of(all_.in.router_logits, r * tokens, tokens));
      rank.in.weights.gate_up_proj = on_gpu(rank.gpu, rows_of(all_.in.weights.gate_up_proj, expert, local));
      rank.in.weights.down_proj = on_gpu(rank.gpu, rows_of(all_.in.weights.down_proj, expert, local));
      rank.up.y = on_gpu(rank.gpu, rows_of(all_.up.y, r * tokens, tokens));
      rank.place(config_, tokens);
      expert += local;
    }
    for (const Rank& rank : each_) {
      check(cudaSetDevice(rank.gpu), "cudaSetDevice");
      check(cudaDeviceSynchronize(), "tensors");
    }
    check(cudaSetDevice(0), "cudaSetDevice");
  }
  // The tensor itself on the first GPU, on others a copy.
  static TensorView on_gpu(int gpu, TensorView view) {
    if (gpu == 0) return view;
    const std::uint64_t bytes = view.numel() * size_of(view.dtype);
    void* copy = allocate(bytes);
    check(cudaMemcpy(copy, view.data, bytes, cudaMemcpyDefault), "copy to another GPU");
    view.data = copy;
    return view;
  }
  std::vector<Rank*> pointers() {
    std::vector<Rank*> ranks;
    for (Rank& rank : each_) ranks.push_back(&rank);
    return ranks;
  }
  double time(const std::vector<Rank*>& ranks, bool backward, int repeats) {
    return time(ranks, repeats, [&](const Rank& rank) { rank.run(backward); });
  }
  // All ranks begin together; the last to end counts.
  template <class Run>
  double time(const std::vector<Rank*>& ranks, int repeats, Run&& run) {
    const cudaStream_t first = ranks[0]->stream;
    check(cudaEventRecord(begin_, first), "event");
    for (const Rank* rank : ranks) check(cudaStreamWaitEvent(rank->stream, begin_, 0), "begin");
    for (int i = 0; i < repeats; ++i) {
      for (const Rank* rank : ranks) run(*rank);
    }
    for (const Rank* rank : ranks) {
      check(cudaSetDevice(rank->gpu), "cudaSetDevice");
      check(cudaEventRecord(rank->done, rank->stream), "event");
      check(cudaStreamWaitEvent(first, rank->done, 0), "end");
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaEventRecord(end_, first), "event");
    check(cudaEventSynchronize(end_), "timing");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "timing");
    return ms / repeats;
  }
  double replayed(const std::vector<Rank*>& ranks) {
    time(ranks, 1, [](const Rank& rank) { rank.run_without_gradients(); });  // code is loaded on first use
    for (Rank* rank : ranks) rank->capture();
    check(cudaSetDevice(0), "cudaSetDevice");
    std::vector<double> times;
    for (int round = 0; round < 53; ++round) {
      refresh(ranks, 100 + static_cast<std::uint64_t>(round));
      test::spin<<<1, 1, 0, ranks[0]->stream>>>(300'000);  // the host is done launching before the devices begin
      const double us = 1e3 * time(ranks, 1, [](const Rank& rank) {
        check(cudaSetDevice(rank.gpu), "cudaSetDevice");
        check(cudaGraphLaunch(rank.replay, rank.stream), "replay");
      });
      if (round >= 3) times.push_back(us);
    }
    for (Rank* rank : ranks) cudaGraphExecDestroy(rank->replay);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  // Other values of x and router_logits.
  void refresh(const std::vector<Rank*>& ranks, std::uint64_t seed) {
    fill<<<64, 256>>>(static_cast<numerics::bfloat16*>(all_.in.x.data), all_.in.x.numel(), 1.0f, seed << 40);
    fill<<<64, 256>>>(static_cast<float*>(all_.in.router_logits.data), all_.in.router_logits.numel(), 1.0f, (seed + 1000) << 40);
    std::int64_t token = 0;
    for (const Rank* rank : ranks) {
      const std::int64_t tokens = rank->in.x.shape[0];
      for (auto name : {&Inputs::x, &Inputs::router_logits}) {
        const TensorView part = rows_of(all_.in.*name, token, tokens), &own = rank->in.*name;
        if (own.data != part.data) {
          check(cudaMemcpy(own.data, part.data, own.numel() * size_of(own.dtype), cudaMemcpyDefault), "copy to another GPU");
        }
      }
      token += tokens;
    }
    check(cudaDeviceSynchronize(), "inputs");
  }
  static std::vector<char> bytes_of(const TensorView& view) {
    std::vector<char> bytes(static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
    check(cudaMemcpy(bytes.data(), view.data, bytes.size(), cudaMemcpyDeviceToHost), "copy of a result");
    return bytes;
  }

  LayerConfig config_;
  std::int64_t tokens_;
  int ranks_, gpus_;
  Rank all_;
  std::vector<Rank> each_;
  cudaEvent_t begin_, end_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(const Shape& shape, int ranks, int gpus) {
  {
    Bench bench(shape, ranks, gpus);
    const bool same = bench.same_bits();
    std::vector<double> one[2], several[2];
    for (int round = 0; round < 7; ++round) {
      for (const bool backward : {false, true}) {
        one[backward].push_back(bench.one(backward, 4));
        several[backward].push_back(bench.several(backward, 4));
      }
    }
    const double f1 = median(one[0]), b1 = median(one[1]), f2 = median(several[0]), b2 = median(several[1]);
    std::printf("%-16s %d ranks on %d GPUs, T %lld: forward %7.3f ms, of one rank %7.3f (%.3f); backward %7.3f, of one "
                "%7.3f (%.3f); both %.3f; bits %s\n",
                shape.name, ranks, gpus, static_cast<long long>(shape.tokens), f2, f1, f1 / f2 / gpus, b2, b1,
                b1 / b2 / gpus, (f1 + b1) / (f2 + b2) / gpus, same ? "alike" : "DIFFERENT");
    if (!same) throw Error(Status::internal, std::string(shape.name) + ": several ranks give other bits than one");
    std::printf("row {\"shape\": \"%s (%lld, %lld, %d, %d), %d ranks on %s\", \"hidden_size\": %lld, \"intermediate_size\": %lld, "
                "\"num_experts\": %d, \"top_k\": %d, \"tokens\": %lld, \"ranks\": %d, \"gpus\": %d, \"routing\": \"balanced\", "
                "\"forward_ms\": %.3f, \"forward_backward_ms\": %.3f, \"rivals\": {\"one rank on one GPU, all tokens\": "
                "{\"forward_ms\": %.3f, \"forward_backward_ms\": %.3f}}}\n",
                shape.name, static_cast<long long>(shape.hidden), static_cast<long long>(shape.width), shape.experts,
                shape.top_k, ranks, gpus == 1 ? "one GPU" : (std::to_string(gpus) + " GPUs").c_str(),
                static_cast<long long>(shape.hidden), static_cast<long long>(shape.width), shape.experts, shape.top_k,
                static_cast<long long>(shape.tokens), ranks, gpus, f2, f2 + b2, f1, f1 + b1);
    std::fflush(stdout);
  }
  free_all();
}

void measure_small(Shape shape, int ranks, int gpus) {
  for (const std::int64_t tokens : {1, 8, 64, 256}) {
    shape.tokens = tokens;
    {
      Bench bench(shape, ranks, gpus);
      if (!bench.same_bits()) throw Error(Status::internal, std::string(shape.name) + ": several ranks give other bits than one");
      const double several = bench.several_replayed(), one = bench.one_replayed();
      std::printf("%-12s %d ranks on %d GPUs, T %4lld  forward %7.1f us, of one rank %7.1f (%.3f)\n", shape.name, ranks, gpus,
                  static_cast<long long>(tokens), several, one, one / several / gpus);
      std::fflush(stdout);
    }
    free_all();
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int gpus = count > 1 ? std::atoi(arguments[1]) : 1;
  try {
    const Shape shapes[] = {{"Qwen3-30B", 2048, 768, 128, 8, 16384},
                            {"GPT-OSS-120B", 2880, 2880, 128, 4, 16384},
                            {"DeepSeek-V3/4", 7168, 2048, 64, 8, 8192}};
    if (count > 2 && std::string(arguments[2]) == "small") {
      measure_small(shapes[0], std::max(2, gpus), gpus);
      return 0;
    }
    for (const Shape& shape : shapes) {
      if (count < 3 || std::strstr(shape.name, arguments[2])) measure(shape, std::max(2, gpus), gpus);
    }
  } catch (const Error& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
