// The fixture of the layer's tests on a GPU. All buffers are managed memory, so that the fixture sees them too.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "tests/layer_fixture.hpp"

namespace moelith::test {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// All buffers of a run, one behind the other: the next run of equal sizes has them at the same addresses.
class Arena {
 public:
  Arena() {
    check(cudaMallocManaged(&base_, size));
    memory().allocate = [this](std::size_t bytes) {
      std::byte* here = base_ + used_;
      used_ += (bytes + 255) / 256 * 256;
      if (used_ > size) throw std::runtime_error("the arena is full");
      return here;
    };
    memory().release = [](void*) {};
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  void reset() { used_ = 0; }

  cudaStream_t stream = nullptr;

 private:
  static constexpr std::size_t size = std::size_t(1) << 30;
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
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

// Each pass of a run as a captured graph.
struct Captured {
  std::vector<cudaGraph_t> graphs;
  std::vector<cudaGraphExec_t> executables;
};
inline RunOptions capturing(Captured& captured) {
  RunOptions options = on_gpu();
  options.launch = [&captured](const std::function<void()>& pass) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(arena().stream, cudaStreamCaptureModeThreadLocal));
    pass();
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
inline RunOptions replaying(const Captured& captured) {
  RunOptions options = on_gpu();
  auto next = std::make_shared<std::size_t>(0);
  options.launch = [&captured, next](const std::function<void()>&) {
    check(cudaGraphLaunch(captured.executables.at((*next)++), arena().stream));
    check(cudaStreamSynchronize(arena().stream));
  };
  return options;
}

}  // namespace moelith::test
