// A problem's tensors where the plan's device reads them, and times of its passes there.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "options.hpp"
#include "random_problem.hpp"

namespace moelith::tools {

// On the CPU the problem itself; on a GPU copies of all its tensors in the GPU's memory. The problem must outlive it.
class PlacedProblem {
 public:
  // sizes: of the plan's buffers for the problem's tokens. Throws Error(device_error, unsupported).
  PlacedProblem(const Problem& problem, DeviceKind device, const BufferSizes& sizes);
  ~PlacedProblem();
  PlacedProblem(const PlacedProblem&) = delete;
  PlacedProblem& operator=(const PlacedProblem&) = delete;

  const std::vector<Problem::Variant>& variants() const { return variants_; }
  const Outputs& outputs() const { return outputs_; }
  const InputGradients& gradients() const { return gradients_; }
  void* saved() const { return saved_; }
  void* workspace() const { return workspace_; }

  // Brings the results into the problem's own tensors.
  void fetch_outputs() const;
  void fetch_gradients() const;
  // Of the work that `pass` gives the device, from its start to its end.
  double seconds_of(const std::function<void()>& pass) const;

 private:
  struct Memory;  // what is allocated on a GPU
  void place_on_gpu(const BufferSizes& sizes);

  std::unique_ptr<Memory> memory_;
  Buffer saved_buffer_, workspace_buffer_;  // on the CPU
  std::vector<Problem::Variant> variants_;
  Outputs outputs_;
  InputGradients gradients_;
  void *saved_ = nullptr, *workspace_ = nullptr;
  std::vector<std::pair<TensorView, TensorView>> output_pairs_, gradient_pairs_;  // on the device, in the problem
};

// The layer that the options name, on its device, with a problem of it in memory: what `bench` and `trace` run.
struct PlacedLayer {
  // `unnamed` is the layer, of 2048 tokens, where the options name none; they are divided by `shrink`. what: for the error
  // of too little memory, "the benchmark". Throws Error.
  PlacedLayer(const LayerOptions& layer, const RunOptions& run, const LayerConfig& unnamed, std::int64_t shrink,
              int variants, bool timeline, const std::string& what);

  const LayerConfig config;
  const std::int64_t tokens;
  const Plan plan;
  const BufferSizes sizes;
  const Problem problem;
  const PlacedProblem placed;
};

}  // namespace moelith::tools
