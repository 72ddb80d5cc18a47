#include "placed_problem.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "stopwatch.hpp"

#if MOELITH_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace moelith::tools {

namespace {

// Calls f(view) for each tensor of a set.
template <class F>
void for_each_view(Outputs& o, F f) {
  for (TensorView* view : {&o.y, &o.topk_ids, &o.topk_weights, &o.expert_counts, &o.aux_loss, &o.z_loss}) f(*view);
}
template <class F>
void for_each_view(InputGradients& g, F f) {
  for (TensorView* view : {&g.x, &g.router_logits, &g.topk_weights, &g.shared_gate_logits}) f(*view);
  const auto set = [&](auto& w) {
    for (Gradient* gradient : {&w.gate_up_proj, &w.gate_up_bias, &w.down_proj, &w.down_bias}) f(gradient->tensor);
  };
  set(g.weights);
  for (auto& shared : g.weights.shared) set(shared);
}
template <class F>
void for_each_view(Problem::Variant& v, F f) {
  Inputs& in = v.inputs;
  for (TensorView* view : {&in.x, &in.router_logits, &in.topk_ids, &in.topk_weights, &in.selection_bias,
                           &in.shared_gate_logits, &in.num_valid_tokens}) {
    f(*view);
  }
  const auto set = [&](auto& w) {
    for (TensorView* view : {&w.gate_up_proj, &w.gate_up_bias, &w.down_proj, &w.down_bias}) f(*view);
  };
  set(in.weights);
  for (auto& shared : in.weights.shared) set(shared);
  OutputGradients& up = v.output_gradients;
  for (TensorView* view : {&up.y, &up.topk_weights, &up.aux_loss, &up.z_loss}) f(*view);
}

#if MOELITH_WITH_CUDA
std::uint64_t bytes_of(const TensorView& view) { return static_cast<std::uint64_t>(view.numel()) * size_of(view.dtype); }

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(Status::device_error, std::string(what) + ": " + cudaGetErrorString(status));
}
#endif

}  // namespace

#if MOELITH_WITH_CUDA

struct PlacedProblem::Memory {
  std::vector<void*> blocks;
  std::map<const void*, void*> copies;  // weights belong to all variants
  cudaEvent_t begin = nullptr, end = nullptr;

  Memory() {
    check(cudaEventCreate(&begin), "an event");
    check(cudaEventCreate(&end), "an event");
  }
  ~Memory() {
    for (void* block : blocks) cudaFree(block);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  void* allocate(std::uint64_t bytes) {
    void* block = nullptr;
    check(cudaMalloc(&block, std::max<std::uint64_t>(bytes, 1)), "memory on the GPU");
    blocks.push_back(block);
    return block;
  }
  // The view of a copy.
  TensorView copy(const TensorView& view) {
    TensorView there = view;
    if (!view.given()) return there;
    void*& block = copies[view.data];
    if (block == nullptr) {
      block = allocate(bytes_of(view));
      check(cudaMemcpy(block, view.data, bytes_of(view), cudaMemcpyHostToDevice), "copy to the GPU");
    }
    there.data = block;
    return there;
  }
};

void PlacedProblem::place_on_gpu(const BufferSizes& sizes) {
  memory_ = std::make_unique<Memory>();
  for (auto& variant : variants_) for_each_view(variant, [&](TensorView& view) { view = memory_->copy(view); });
  const auto results = [&](auto& set, auto& pairs) {
    for_each_view(set, [&](TensorView& view) {
      const TensorView here = view;
      view = memory_->copy(view);
      if (view.given()) pairs.emplace_back(view, here);
    });
  };
  results(outputs_, output_pairs_);
  results(gradients_, gradient_pairs_);
  saved_ = memory_->allocate(sizes.saved);
  workspace_ = memory_->allocate(sizes.workspace);
}

static void fetch(const std::vector<std::pair<TensorView, TensorView>>& pairs) {
  for (const auto& [there, here] : pairs) {
    check(cudaMemcpy(here.data, there.data, bytes_of(here), cudaMemcpyDeviceToHost), "copy from the GPU");
  }
}

double PlacedProblem::seconds_of(const std::function<void()>& pass) const {
  if (!memory_) return tools::seconds_of(pass);
  check(cudaEventRecord(memory_->begin), "an event");
  pass();
  check(cudaEventRecord(memory_->end), "an event");
  check(cudaEventSynchronize(memory_->end), "a pass");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, memory_->begin, memory_->end), "the time of a pass");
  return milliseconds * 1e-3;
}

#else

struct PlacedProblem::Memory {};

void PlacedProblem::place_on_gpu(const BufferSizes&) {
  throw Error(Status::unsupported, "device cuda: this build of moelith runs on the CPU only");
}

static void fetch(const std::vector<std::pair<TensorView, TensorView>>&) {}

double PlacedProblem::seconds_of(const std::function<void()>& pass) const { return tools::seconds_of(pass); }

#endif

PlacedProblem::PlacedProblem(const Problem& problem, DeviceKind device, const BufferSizes& sizes)
    : variants_(problem.variants), outputs_(problem.outputs), gradients_(problem.gradients) {
  if (device != DeviceKind::cpu) {
    place_on_gpu(sizes);
    return;
  }
  saved_buffer_ = Buffer(sizes.saved);
  workspace_buffer_ = Buffer(sizes.workspace);
  saved_ = saved_buffer_.data();
  workspace_ = workspace_buffer_.data();
}
PlacedProblem::~PlacedProblem() = default;

void PlacedProblem::fetch_outputs() const { fetch(output_pairs_); }
void PlacedProblem::fetch_gradients() const { fetch(gradient_pairs_); }

namespace {

Plan plan_of(const LayerConfig& config, const RunOptions& run, std::int64_t tokens, bool timeline) {
  PlanOptions options = plan_options(run, tokens);
  options.timeline = timeline;
  return Plan::create(config, options);
}

BufferSizes affordable_sizes(const Plan& plan, std::int64_t tokens, const std::string& what) {
  const BufferSizes sizes = plan.buffer_sizes(tokens);
  require_memory(2 * weight_bytes(plan.config(), static_cast<double>(size_of(plan.config().dtype))) +
                     static_cast<double>(sizes.saved + sizes.workspace),
                 what);
  return sizes;
}

}  // namespace

PlacedLayer::PlacedLayer(const LayerOptions& layer, const RunOptions& run, const LayerConfig& unnamed,
                         std::int64_t shrink, int variants, bool timeline, const std::string& what)
    : config(shrunk(layer_config(layer, unnamed), shrink)),
      tokens(run.tokens > 0 ? run.tokens : (layer.named() ? 512 : 2048)),
      plan(plan_of(config, run, tokens, timeline)),
      sizes(affordable_sizes(plan, tokens, what)),
      problem(make_problem(config, tokens, run.routes(), run.entry == "ids" ? Entry::ids : Entry::logits, variants)),
      placed(problem, plan.options().device, sizes) {}

}  // namespace moelith::tools
