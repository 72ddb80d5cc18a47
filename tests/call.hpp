// Calls of a plan one by one, where tests/layer_fixture.hpp's run() would make them all at once.
#pragma once

#include "tests/layer_fixture.hpp"

namespace moelith::test {

// One rank's tokens [first, first + tokens) of a problem, with all memory of its own but the workspace: so that several
// calls may be on their way at once. Of an empty call, all addresses of token tensors are null.
class Call {
 public:
  Call(const Problem& p, const Plan& plan, std::int64_t first, std::int64_t tokens)
      : saved(plan.buffer_sizes(tokens).saved), plan_(plan) {
    const auto& c = p.config;
    const std::int64_t h = c.hidden_size, i = c.intermediate_size, e = c.num_experts;
    const auto locals = plan.local_experts();
    const auto l = static_cast<std::int64_t>(locals.size());
    auto rows = [&](const std::vector<double>& joined, DataType type, std::int64_t columns) {
      Tensor& t = tensors_.emplace_back(type, std::initializer_list<std::int64_t>{tokens, columns});
      t.set(joined.data() + first * columns);
      if (tokens == 0) t.view.data = nullptr;
      return t.view;
    };
    auto experts = [&](const std::vector<double>& joined, std::initializer_list<std::int64_t> shape) {
      Tensor& t = tensors_.emplace_back(c.dtype, shape);
      const std::int64_t size = static_cast<std::int64_t>(joined.size()) / e;
      std::vector<double> mine;
      for (std::int32_t id : locals)
        mine.insert(mine.end(), joined.begin() + id * size, joined.begin() + (id + 1) * size);
      t.set(mine.data());
      return t.view;
    };
    tensors_.reserve(20);
    in.x = rows(p.inputs.x, c.dtype, h);
    if (p.inputs.topk_ids.empty()) {
      in.router_logits = rows(p.inputs.router_logits, c.accumulator_dtype(), e);
    } else {
      in.topk_ids = rows({p.inputs.topk_ids.begin(), p.inputs.topk_ids.end()}, DataType::int32, c.top_k);
      in.topk_weights = rows(p.inputs.topk_weights, c.accumulator_dtype(), c.top_k);
    }
    in.weights.gate_up_proj = experts(p.weights.gate_up_proj, {l, 2 * i, h});
    in.weights.down_proj = experts(p.weights.down_proj, {l, h, i});
    for (std::size_t n = 0; n < c.shared_experts.size(); ++n) {
      const std::int64_t width = c.shared_experts[n].intermediate_size;
      auto& shared = in.weights.shared.emplace_back();
      Tensor& gate_up = tensors_.emplace_back(c.dtype, std::initializer_list<std::int64_t>{2 * width, h});
      gate_up.set(p.weights.shared[n].gate_up_proj.data());
      shared.gate_up_proj = gate_up.view;
      Tensor& down = tensors_.emplace_back(c.dtype, std::initializer_list<std::int64_t>{h, width});
      down.set(p.weights.shared[n].down_proj.data());
      shared.down_proj = down.view;
    }
    up.y = rows(p.upstream.y, c.dtype, h);
    const std::vector<double> nothing(p.inputs.x.size(), std::numeric_limits<double>::quiet_NaN());
    out.y = rows(nothing, c.dtype, h);
    grad.x = rows(nothing, c.dtype, h);
    grad.weights.gate_up_proj.tensor =
        tensors_.emplace_back(c.dtype, std::initializer_list<std::int64_t>{l, 2 * i, h}).view;
    results_["y"] = tensors_.size() - 3;
    results_["dx"] = tensors_.size() - 2;
    results_["d_gate_up_proj"] = tensors_.size() - 1;
  }
  void forward() {
    const Buffer workspace(plan_.buffer_sizes(plan_.options().max_tokens).workspace);
    plan_.forward(in, out, saved.data(), workspace.data());
  }
  void backward() {
    const Buffer workspace(plan_.buffer_sizes(plan_.options().max_tokens).workspace);
    plan_.backward(in, saved.data(), up, grad, workspace.data());
  }
  std::vector<double> get(const std::string& name) const { return tensors_[results_.at(name)].get(); }

  // What the calls get; a test may put something else here.
  Inputs in;
  Outputs out;
  OutputGradients up;
  InputGradients grad;
  Buffer saved;

 private:
  const Plan& plan_;
  std::vector<Tensor> tensors_;
  std::map<std::string, std::size_t> results_;
};

// body(rank) on a thread for each rank; throws what the first of them threw.
template <class F>
void on_threads(int ranks, F body) {
  std::vector<std::exception_ptr> errors(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) { errors[r] = std::current_exception(); }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace moelith::test
