// The fixture of the layer's tests on a GPU. All buffers are managed memory, so that the fixture sees them too.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <stdexcept>

#include "tests/layer_fixture.hpp"

namespace moelith::test {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// All buffers of a run, one behind the other: the next run of equal sizes has them at the same addresses. Each rank of
// several has a part for itself, since their threads take turns as they like.
class Arena {
 public:
  static constexpr int ranks = 4;
  Arena() {
    check(cudaMallocManaged(&base_, size + ranks * size_of_rank));
    memory().allocate = [this](std::size_t bytes) {
      const int rank = this_rank();
      std::size_t& used = used_[1 + rank];
      std::byte* here = base_ + (rank < 0 ? 0 : size + std::size_t(rank) * size_of_rank) + used;
      used += (bytes + 255) / 256 * 256;
      if (used > (rank < 0 ? size : size_of_rank)) throw std::runtime_error("the arena is full");
      return here;
    };
    memory().release = [](void*) {};
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  void reset() { std::fill_n(used_, 1 + ranks, 0); }
  // Of the calling thread; -1: it is no rank's.
  static int& this_rank() {
    thread_local int rank = -1;
    return rank;
  }

  cudaStream_t stream = nullptr;

 private:
  static constexpr std::size_t size = std::size_t(1) << 30, size_of_rank = size / 2;
  std::byte* base_ = nullptr;
  std::size_t used_[1 + ranks] = {};
};
inline Arena& arena() {
  static Arena* instance = new Arena;
  return *instance;
}

inline RunOptions on_gpu() {
  RunOptions options;
  options.device = DeviceKind::cuda;
  options.workers = 0;
  options.stream = arena().stream;
  options.launch = [](const std::function<void()>& pass) {
    pass();
    check(cudaStreamSynchronize(arena().stream));
  };
  return options;
}
inline Results run_gpu(const Problem& p, const RunOptions& options = on_gpu()) {
  arena().reset();
  return run(p, options);
}

// Several ranks on this GPU, or each on its own of `gpus`, with a stream for each.
inline RunOptions on_ranks(std::vector<std::int64_t> tokens_of_rank, int gpus = 1) {
  RunOptions options = on_gpu();
  options.stream_of_rank.clear();
  for (std::size_t r = 0; r < tokens_of_rank.size(); ++r) {
    static std::map<std::pair<std::size_t, int>, cudaStream_t> streams;
    const int gpu = static_cast<int>(r) % gpus;
    cudaStream_t& stream = streams[{r, gpu}];
    check(cudaSetDevice(gpu));
    if (!stream) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    options.stream_of_rank.push_back(stream);
  }
  check(cudaSetDevice(0));
  options.tokens_of_rank = std::move(tokens_of_rank);
  options.timeout = std::chrono::seconds(std::getenv("MOELITH_TEST_PATIENT") ? 100 : 2);  // under tools that slow all down
  options.begin_rank = [gpus](int rank) {
    Arena::this_rank() = rank;
    check(cudaSetDevice(rank % gpus));
  };
  options.launch_of_rank = [streams = options.stream_of_rank](int rank, const std::function<void()>& pass) {
    pass();
    check(cudaStreamSynchronize(static_cast<cudaStream_t>(streams[static_cast<std::size_t>(rank)])));
  };
  return options;
}

// A run's passes as captured graphs, of `passes` passes each. In this mode of capturing a call that allocates, frees or
// waits fails.
struct Captured {
  std::vector<cudaGraph_t> graphs;
  std::vector<cudaGraphExec_t> executables;
  std::vector<Plan> plans;  // a graph must not outlive its plan; a copy of the plan is enough
  int passes = 1;

  ~Captured() {
    for (auto executable : executables) cudaGraphExecDestroy(executable);
    for (auto graph : graphs) cudaGraphDestroy(graph);
  }
};
inline RunOptions capturing(Captured& captured, const RunOptions& base = on_gpu()) {
  RunOptions options = base;
  options.with_plan = [&captured](const Plan& plan) { captured.plans.push_back(plan); };
  auto count = std::make_shared<int>(0);
  options.launch = [&captured, count](const std::function<void()>& pass) {
    if (*count % captured.passes == 0) check(cudaStreamBeginCapture(arena().stream, cudaStreamCaptureModeGlobal));
    pass();
    if (++*count % captured.passes != 0) return;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamEndCapture(arena().stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    captured.graphs.push_back(graph);
    captured.executables.push_back(executable);
    check(cudaGraphLaunch(executable, arena().stream));
    check(cudaStreamSynchronize(arena().stream));
  };
  return options;
}

// Launches the graphs in place of the passes.
inline RunOptions replaying(const Captured& captured, const RunOptions& base = on_gpu()) {
  RunOptions options = base;
  auto count = std::make_shared<int>(0);
  options.launch = [&captured, count](const std::function<void()>&) {
    if (++*count % captured.passes != 0) return;
    check(cudaGraphLaunch(captured.executables.at(std::size_t(*count / captured.passes - 1)), arena().stream));
    check(cudaStreamSynchronize(arena().stream));
  };
  return options;
}

// The same for several ranks, each with graphs of its own. In this mode of capturing the other ranks' threads may do what
// they like.
struct CapturedRanks {
  explicit CapturedRanks(int ranks) : of_rank(ranks), launching(ranks) {}
  std::vector<Captured> of_rank;
  std::barrier<> launching;  // making a graph ready may wait for kernels, which would wait for this rank
};
inline RunOptions capturing(CapturedRanks& captured, const RunOptions& base) {
  RunOptions options = base;
  options.with_plan = [&captured](const Plan& plan) {
    captured.of_rank[plan.options().group.rank()].plans.push_back(plan);
  };
  options.launch_of_rank = [&captured, base](int rank, const std::function<void()>& pass) {
    Captured& mine = captured.of_rank[rank];
    const auto stream = static_cast<cudaStream_t>(base.stream_of_rank[rank]);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    pass();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    mine.graphs.push_back(graph);
    mine.executables.push_back(executable);
    captured.launching.arrive_and_wait();
    check(cudaGraphLaunch(executable, stream));
    check(cudaStreamSynchronize(stream));
  };
  return options;
}
inline RunOptions replaying(const CapturedRanks& captured, const RunOptions& base) {
  RunOptions options = base;
  auto counts = std::make_shared<std::vector<int>>(captured.of_rank.size(), 0);
  options.launch_of_rank = [&captured, base, counts](int rank, const std::function<void()>&) {
    const auto stream = static_cast<cudaStream_t>(base.stream_of_rank[rank]);
    check(cudaGraphLaunch(captured.of_rank[rank].executables.at(std::size_t((*counts)[rank]++)), stream));
    check(cudaStreamSynchronize(stream));
  };
  return options;
}

}  // namespace moelith::test
