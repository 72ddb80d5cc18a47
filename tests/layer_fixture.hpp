// Random layers, run through the C++ interface on one or several ranks, with every buffer full of NaN beforehand and
// canaries behind it; and their results as doubles, to be compared bit for bit or with the fp64 reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "moelith/layer.hpp"
#include "numerics/bfloat16.hpp"
#include "reference/compare.hpp"
#include "reference/layer.hpp"
#include "tests/fork_ranks.hpp"
#include "transport/transport.hpp"

namespace moelith::test {

// Where buffers lie; a test on another device puts its own here.
struct Memory {
  std::function<void*(std::size_t)> allocate = [](std::size_t bytes) { return ::operator new[](bytes, std::align_val_t{256}); };
  std::function<void(void*)> release = [](void* memory) { ::operator delete[](memory, std::align_val_t{256}); };
};
inline Memory& memory() {
  static Memory instance;
  return instance;
}

// Memory of any dtype, aligned to 256 bytes, filled with NaN (all bits set), with canary bytes behind it.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::uint64_t bytes)
      : bytes_(bytes), memory_(static_cast<std::byte*>(memory().allocate(bytes + canary)), memory().release) {
    std::memset(memory_.get(), 0xff, bytes);
    std::memset(memory_.get() + bytes, 0xa5, canary);
  }
  // Memory that is somebody else's, as it is.
  static Buffer around(void* memory) {
    Buffer buffer;
    buffer.memory_ = {static_cast<std::byte*>(memory), [](void*) {}};
    return buffer;
  }
  std::byte* data() const { return memory_.get(); }
  bool intact() const {
    if (bytes_ == 0) return true;
    for (std::uint64_t i = bytes_; i < bytes_ + canary; ++i) {
      if (memory_.get()[i] != std::byte{0xa5}) return false;
    }
    return true;
  }

 private:
  static constexpr std::uint64_t canary = 512;
  std::uint64_t bytes_ = 0;
  std::shared_ptr<std::byte[]> memory_;
};

inline double round_to(DataType type, double value) {
  if (type == DataType::bfloat16) return numerics::to_float(numerics::to_bfloat16(static_cast<float>(value)));
  return type == DataType::float32 ? static_cast<double>(static_cast<float>(value)) : value;
}

// A tensor in the library's memory, from or to doubles. row_gap: elements between the rows of a 2-d tensor.
struct Tensor {
  Buffer buffer;
  TensorView view;

  Tensor() = default;
  Tensor(DataType type, std::initializer_list<std::int64_t> shape, std::int64_t row_gap = 0) {
    view = TensorView(nullptr, type, shape);
    std::int64_t elements = view.numel();
    if (row_gap > 0) {
      view.stride[0] += row_gap;
      elements = view.shape[0] * view.stride[0];
    }
    buffer = Buffer(static_cast<std::uint64_t>(elements) * size_of(type));
    view.data = buffer.data();
  }
  // Nothing has been written between the rows.
  bool gaps_intact() const {
    if (view.contiguous()) return true;
    const std::size_t size = size_of(view.dtype);
    for (std::int64_t r = 0; r < view.shape[0]; ++r) {
      const std::byte* row = buffer.data() + static_cast<std::size_t>(r * view.stride[0]) * size;
      for (std::size_t b = static_cast<std::size_t>(view.shape[1]) * size; b < static_cast<std::size_t>(view.stride[0]) * size; ++b) {
        if (row[b] != std::byte{0xff}) return false;
      }
    }
    return true;
  }
  void set(const double* values) {
    for (std::int64_t n = 0; n < view.numel(); ++n) {
      const std::int64_t i = place(n);
      switch (view.dtype) {
        case DataType::bfloat16:
          static_cast<numerics::bfloat16*>(view.data)[i] = numerics::to_bfloat16(static_cast<float>(values[n]));
          break;
        case DataType::float32: static_cast<float*>(view.data)[i] = static_cast<float>(values[n]); break;
        case DataType::float64: static_cast<double*>(view.data)[i] = values[n]; break;
        case DataType::int32: static_cast<std::int32_t*>(view.data)[i] = static_cast<std::int32_t>(values[n]); break;
        case DataType::int64: static_cast<std::int64_t*>(view.data)[i] = static_cast<std::int64_t>(values[n]); break;
        default: throw std::logic_error("dtype");
      }
    }
  }
  std::vector<double> get() const {
    std::vector<double> values(static_cast<std::size_t>(view.numel()));
    for (std::int64_t n = 0; n < view.numel(); ++n) {
      const std::int64_t i = place(n);
      switch (view.dtype) {
        case DataType::bfloat16: values[n] = numerics::to_float(static_cast<numerics::bfloat16*>(view.data)[i]); break;
        case DataType::float32: values[n] = static_cast<float*>(view.data)[i]; break;
        case DataType::float64: values[n] = static_cast<double*>(view.data)[i]; break;
        case DataType::int32: values[n] = static_cast<std::int32_t*>(view.data)[i]; break;
        case DataType::int64: values[n] = static_cast<double>(static_cast<std::int64_t*>(view.data)[i]); break;
        default: throw std::logic_error("dtype");
      }
    }
    return values;
  }

 private:
  // Where element n lies; only the rows of 2-d tensors may be apart.
  std::int64_t place(std::int64_t n) const {
    return view.rank == 2 ? n / view.shape[1] * view.stride[0] + n % view.shape[1] : n;
  }
};

// A layer and one batch of it, all ranks' tokens one after another. Values are already rounded to the dtype.
struct Problem {
  LayerConfig config;
  reference::Weights weights;
  reference::Inputs inputs;  // inputs.ranks may be empty
  reference::OutputGradients upstream;
};

using Random = std::mt19937_64;

inline std::vector<double> normal(Random& random, std::size_t count, double scale, DataType type) {
  std::normal_distribution<double> distribution(0.0, scale);
  std::vector<double> values(count);
  for (double& value : values) value = round_to(type, distribution(random));
  return values;
}

inline reference::Weights random_weights(const LayerConfig& c, Random& random) {
  const auto h = c.hidden_size, e = std::int64_t(c.num_experts);
  auto matrices = [&](auto& set, std::int64_t experts, std::int64_t width) {
    set.gate_up_proj = normal(random, experts * c.gate_up_rows(width) * h, 1.0 / std::sqrt(double(h)), c.dtype);
    set.down_proj = normal(random, experts * h * width, 1.0 / std::sqrt(double(width)), c.dtype);
    if (c.gate_up_bias) set.gate_up_bias = normal(random, experts * c.gate_up_rows(width), 0.5, c.dtype);
    if (c.down_bias) set.down_bias = normal(random, experts * h, 0.5, c.dtype);
  };
  reference::Weights weights;
  matrices(weights, e, c.intermediate_size);
  weights.shared.resize(c.shared_experts.size());
  for (std::size_t s = 0; s < c.shared_experts.size(); ++s) matrices(weights.shared[s], 1, c.shared_experts[s].intermediate_size);
  return weights;
}

// Logits of order 1 for `tokens` tokens, and upstream gradients of everything.
inline Problem random_problem(const LayerConfig& config, std::int64_t tokens, std::uint64_t seed) {
  Random random(seed);
  Problem p;
  p.config = config;
  p.weights = random_weights(config, random);
  auto& in = p.inputs;
  in.tokens = tokens;
  in.x = normal(random, tokens * config.hidden_size, 1.0, config.dtype);
  in.router_logits = normal(random, tokens * config.num_experts, 1.5, config.accumulator_dtype());
  if (config.router.selection_bias) in.selection_bias = normal(random, config.num_experts, 0.3, config.accumulator_dtype());
  for (const auto& shared : config.shared_experts) {
    if (!shared.gated || !in.shared_gate_logits.empty()) continue;
    in.shared_gate_logits = normal(random, tokens * config.shared_experts.size(), 1.0, config.accumulator_dtype());
  }
  p.upstream.y = normal(random, tokens * config.hidden_size, 1.0, config.dtype);
  return p;
}

// Turns the problem into one whose ids and weights the caller brings; an id is -1 with probability `empty`.
inline void bring_routes(Problem& p, double empty, std::uint64_t seed) {
  Random random(seed);
  const auto& c = p.config;
  p.inputs.router_logits.clear();
  p.inputs.selection_bias.clear();
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (std::int64_t t = 0; t < p.inputs.tokens; ++t) {
    std::vector<std::int64_t> ids(c.num_experts);
    for (std::int32_t e = 0; e < c.num_experts; ++e) ids[e] = e;
    std::shuffle(ids.begin(), ids.end(), random);
    for (std::int32_t j = 0; j < c.top_k; ++j) {
      p.inputs.topk_ids.push_back(uniform(random) < empty ? -1 : ids[j]);
      p.inputs.topk_weights.push_back(round_to(c.accumulator_dtype(), uniform(random) - 0.2));
    }
  }
}

// Every token to `top_k` of the experts [0, experts), or to expert 0 with every slot that it may take.
inline void route_to_first(Problem& p, std::int32_t experts) {
  bring_routes(p, 0.0, 5);
  for (std::int64_t t = 0; t < p.inputs.tokens; ++t) {
    for (std::int32_t j = 0; j < p.config.top_k; ++j) {
      p.inputs.topk_ids[t * p.config.top_k + j] = j < experts ? (t + j) % experts : -1;
    }
  }
}

// The logits of router and gates as values that bfloat16 has, for RunOptions::narrow_logits.
inline void round_logits(Problem& p) {
  for (auto* values : {&p.inputs.router_logits, &p.inputs.shared_gate_logits}) {
    for (double& v : *values) v = round_to(p.config.dtype, v);
  }
}

struct RunOptions {
  std::vector<std::int64_t> tokens_of_rank;  // empty: one rank has all
  std::vector<std::int32_t> expert_rank;
  std::vector<double> receive_capacity_factor;  // of each rank, or one for all; empty: chosen by the plan
  int workers = 1;
  std::int32_t tile_columns = 0;
  std::uint64_t shuffle_seed = 0;
  bool recompute = false;
  bool keep = true;                          // false: a forward without gradients, and no backward
  bool wide_gradients = true;                // weight gradients in the accumulator dtype; false: in config.dtype
  double preset = std::numeric_limits<double>::quiet_NaN();  // a number: accumulate onto it
  int backwards = 1;
  std::vector<std::string> frozen;           // results that are not asked for: "dx", "d_gate_up_proj", ...
  std::vector<int> without_dy;               // ranks that give no gradient of y
  bool narrow_logits = false;                // logits of router and gates, and their gradients, in config.dtype
  bool wide_ids = false;                     // the caller's ids as int64
  std::int64_t row_gap = 0;                  // elements between the rows of x, y, dY and dx,
  std::int64_t logits_gap = 0;               // and of the router's logits and their gradient
  bool bound = false;                        // weights of experts and their gradients apart, by pointers
  bool processes = false;                    // ranks are processes instead of threads
  std::uint64_t passes_before = 0;           // of the group
  DeviceKind device = DeviceKind::cpu;
  void* stream = nullptr;
  std::vector<void*> stream_of_rank;         // where each rank has its own
  std::chrono::milliseconds timeout{30000};  // of the group
  std::function<void(int rank)> begin_rank = [](int) {};  // in the rank's thread, before anything else
  std::function<void*(std::uint64_t bytes)> scratch;  // where saved and the workspaces lie, unfilled; none: a Buffer
  std::function<void(const Plan&)> with_plan = [](const Plan&) {};  // once it is made
  bool timeline = false;
  std::function<void(const Plan&)> after_backward = [](const Plan&) {};  // of each rank, in its thread
  // Runs a pass; when it returns the results are there.
  std::function<void(const std::function<void()>& pass)> launch = [](const std::function<void()>& pass) { pass(); };
  std::function<void(int rank, const std::function<void()>& pass)> launch_of_rank;  // likewise, by the rank's own thread
};

// Every result by name, of all ranks joined: tokens one rank after another, experts by global id.
using Results = std::map<std::string, std::vector<double>>;

// One rank's part, as bytes from a process to its parent and back.
struct RankPart {
  Results results;
  std::vector<std::int32_t> local_experts;

  std::string packed() const {
    std::string bytes;
    auto put = [&](const void* data, std::size_t size) {
      if (size > 0) bytes.append(static_cast<const char*>(data), size);
    };
    auto put_all = [&](const auto& values) {
      const std::uint64_t count = values.size();
      put(&count, sizeof count);
      put(values.data(), count * sizeof values[0]);
    };
    put_all(local_experts);
    for (const auto& [name, values] : results) {
      put_all(name);
      put_all(values);
    }
    return bytes;
  }
  static RankPart unpacked(const std::string& bytes) {
    RankPart part;
    std::size_t place = 0;
    auto take_all = [&](auto& values) {
      std::uint64_t count = 0;
      std::memcpy(&count, bytes.data() + place, sizeof count);
      values.resize(count);
      if (count > 0) std::memcpy(values.data(), bytes.data() + place + sizeof count, count * sizeof values[0]);
      place += sizeof count + count * sizeof values[0];
    };
    take_all(part.local_experts);
    while (place < bytes.size()) {
      std::string name;
      take_all(name);
      take_all(part.results[name]);
    }
    return part;
  }
};

// One rank's part of a run, in this thread.
inline RankPart run_rank(const Problem& p, const RunOptions& options, const Group& group) {
  const auto& c = p.config;
  const int rank = group.rank();
  std::vector<std::int64_t> tokens_of_rank = options.tokens_of_rank;
  if (tokens_of_rank.empty()) tokens_of_rank = {p.inputs.tokens};
  const std::int64_t first = std::accumulate(tokens_of_rank.begin(), tokens_of_rank.begin() + rank, std::int64_t(0));
  const DataType accumulator = c.accumulator_dtype();
  const auto h = c.hidden_size, e = std::int64_t(c.num_experts), k = std::int64_t(c.top_k);
  const auto shared_count = static_cast<std::int64_t>(c.shared_experts.size());
  RankPart part;

  options.begin_rank(rank);
  void* const stream = options.stream_of_rank.empty() ? options.stream : options.stream_of_rank[rank];
  auto launch = [&](const std::function<void()>& pass) {
    if (options.launch_of_rank) return options.launch_of_rank(rank, pass);
    options.launch(pass);
  };
  PlanOptions plan_options;
  const std::int64_t tokens = tokens_of_rank[rank];
  plan_options.max_tokens = tokens + 3;
  plan_options.device = options.device;
  plan_options.workers = options.workers;
  plan_options.recompute = options.recompute;
  plan_options.timeline = options.timeline;
  if (const auto& factors = options.receive_capacity_factor; !factors.empty()) {
    plan_options.receive_capacity_factor = factors.size() == 1 ? factors[0] : factors[rank];
  }
  plan_options.group = group;
  plan_options.group.set_timeout(options.timeout);
  if (options.passes_before) plan_options.group.transport()->start_after_pass(options.passes_before);
  plan_options.expert_rank = options.expert_rank;
  plan_options.tile_columns = options.tile_columns;
  plan_options.shuffle_seed = options.shuffle_seed == 0 ? 0 : options.shuffle_seed + static_cast<std::uint64_t>(rank);
  const Plan plan = Plan::create(c, plan_options);
  options.with_plan(plan);
  const auto locals = part.local_experts = plan.local_experts();
  const auto l = static_cast<std::int64_t>(locals.size());

  std::deque<Tensor> owned;
  auto tensor = [&](DataType type, std::initializer_list<std::int64_t> shape, std::int64_t row_gap = 0) -> Tensor& {
    return owned.emplace_back(type, shape, row_gap);
  };
  // This rank's rows of a joined tensor.
  auto rows = [&](const std::vector<double>& joined, DataType type, std::int64_t columns, std::int64_t row_gap = 0) {
    Tensor& t = tensor(type, {tokens, columns}, row_gap);
    t.set(joined.data() + first * columns);
    return t.view;
  };
  const DataType logits_type = options.narrow_logits ? c.dtype : accumulator;
  // The experts of such a tensor each by itself, in an order of no meaning.
  auto apart = [&](const std::vector<double>& joined, std::initializer_list<std::int64_t> shape) {
    const std::int64_t size = static_cast<std::int64_t>(joined.size()) / e;
    std::vector<void*> pointers(static_cast<std::size_t>(l));
    for (std::int64_t n = 0; n < l; ++n) {
      const std::int64_t local = l - 1 - n;
      Tensor& t = tensor(c.dtype, shape);
      t.set(joined.data() + locals[local] * size);
      pointers[local] = t.view.data;
    }
    return pointers;
  };
  auto experts = [&](const std::vector<double>& joined, std::initializer_list<std::int64_t> shape) {
    Tensor& t = tensor(c.dtype, shape);
    const std::int64_t size = static_cast<std::int64_t>(joined.size()) / e;
    std::vector<double> mine;
    for (std::int32_t id : locals) mine.insert(mine.end(), joined.begin() + id * size, joined.begin() + (id + 1) * size);
    t.set(mine.data());
    return t.view;
  };
  auto whole = [&](const std::vector<double>& values, DataType type, std::initializer_list<std::int64_t> shape) {
    Tensor& t = tensor(type, shape);
    t.set(values.data());
    return t.view;
  };

  Inputs in;
  in.x = rows(p.inputs.x, c.dtype, h, options.row_gap);
  if (!p.inputs.router_logits.empty() || (p.inputs.topk_ids.empty() && p.inputs.tokens == 0)) {
    in.router_logits = rows(p.inputs.router_logits, logits_type, e, options.logits_gap);
  } else if (!p.inputs.topk_ids.empty()) {
    std::vector<double> ids(p.inputs.topk_ids.begin(), p.inputs.topk_ids.end());
    in.topk_ids = rows(ids, rank % 2 || options.wide_ids ? DataType::int64 : DataType::int32, k);
    in.topk_weights = rows(p.inputs.topk_weights, accumulator, k);
  }
  if (!p.inputs.selection_bias.empty()) in.selection_bias = whole(p.inputs.selection_bias, accumulator, {e});
  bool gated = false;
  for (const auto& shared : c.shared_experts) gated |= shared.gated;
  if (gated) in.shared_gate_logits = rows(p.inputs.shared_gate_logits, logits_type, shared_count);
  if (!p.inputs.ranks.empty()) {
    const auto& batch = p.inputs.ranks[rank];
    if (batch.valid_tokens >= 0) in.num_valid_tokens = whole({double(batch.valid_tokens)}, DataType::int32, {1});
    in.num_sequences = batch.num_sequences;
  }
  const auto i = c.intermediate_size, pre = c.gate_up_rows(i);
  auto& w = in.weights;
  if (options.bound && l > 0) {
    ExpertPointers pointers;
    pointers.dtype = c.dtype;
    pointers.gate_up_proj = apart(p.weights.gate_up_proj, {pre, h});
    pointers.down_proj = apart(p.weights.down_proj, {h, i});
    if (c.gate_up_bias) pointers.gate_up_bias = apart(p.weights.gate_up_bias, {pre});
    if (c.down_bias) pointers.down_bias = apart(p.weights.down_bias, {h});
    w.bound = plan.bind(pointers);
  } else {
    w.gate_up_proj = experts(p.weights.gate_up_proj, {l, pre, h});
    w.down_proj = experts(p.weights.down_proj, {l, h, i});
    if (c.gate_up_bias) w.gate_up_bias = experts(p.weights.gate_up_bias, {l, pre});
    if (c.down_bias) w.down_bias = experts(p.weights.down_bias, {l, h});
  }
  w.shared.resize(shared_count);
  for (std::int64_t s = 0; s < shared_count; ++s) {
    const auto width = c.shared_experts[s].intermediate_size;
    w.shared[s].gate_up_proj = whole(p.weights.shared[s].gate_up_proj, c.dtype, {c.gate_up_rows(width), h});
    w.shared[s].down_proj = whole(p.weights.shared[s].down_proj, c.dtype, {h, width});
    if (c.gate_up_bias) w.shared[s].gate_up_bias = whole(p.weights.shared[s].gate_up_bias, c.dtype, {c.gate_up_rows(width)});
    if (c.down_bias) w.shared[s].down_bias = whole(p.weights.shared[s].down_bias, c.dtype, {h});
  }

  const auto sizes = plan.buffer_sizes(tokens);
  const auto scratch = [&](std::uint64_t bytes) { return options.scratch ? Buffer::around(options.scratch(bytes)) : Buffer(bytes); };
  const Buffer saved = scratch(sizes.saved), workspace = scratch(sizes.workspace);
  Outputs out;
  std::map<std::string, std::vector<const Tensor*>> made;
  auto output = [&](const std::string& name, DataType type, std::initializer_list<std::int64_t> shape, std::int64_t row_gap = 0) {
    Tensor& t = tensor(type, shape, row_gap);
    made[name].push_back(&t);
    return t.view;
  };
  out.y = output("y", c.dtype, {tokens, h}, options.row_gap);
  out.topk_ids = output("topk_ids", DataType::int32, {tokens, k});
  out.topk_weights = output("topk_weights", accumulator, {tokens, k});
  out.expert_counts = output("expert_counts", DataType::int64, {e});
  out.aux_loss = output("aux_loss", accumulator, {1});
  out.z_loss = output("z_loss", accumulator, {1});
  launch([&] { plan.forward(in, out, options.keep ? saved.data() : nullptr, workspace.data(), stream); });

  if (options.keep) {
    OutputGradients up;
    const bool gives_dy = std::find(options.without_dy.begin(), options.without_dy.end(), rank) == options.without_dy.end();
    if (!p.upstream.y.empty() && gives_dy) up.y = rows(p.upstream.y, c.dtype, h, options.row_gap);
    if (!p.upstream.topk_weights.empty()) up.topk_weights = rows(p.upstream.topk_weights, accumulator, k);
    if (!p.upstream.aux_loss.empty()) up.aux_loss = whole({p.upstream.aux_loss[rank]}, accumulator, {1});
    if (!p.upstream.z_loss.empty()) up.z_loss = whole({p.upstream.z_loss[rank]}, accumulator, {1});
    auto wanted = [&](const std::string& name) {
      return std::find(options.frozen.begin(), options.frozen.end(), name) == options.frozen.end();
    };
    InputGradients grad;
    if (wanted("dx")) grad.x = output("dx", c.dtype, {tokens, h}, options.row_gap);
    if (in.router_logits.given() && wanted("d_router_logits")) {
      grad.router_logits = output("d_router_logits", logits_type, {tokens, e}, options.logits_gap);
    }
    if (in.topk_ids.given() && wanted("d_topk_weights")) grad.topk_weights = output("d_topk_weights", accumulator, {tokens, k});
    if (in.shared_gate_logits.given() && wanted("d_shared_gate_logits")) {
      grad.shared_gate_logits = output("d_shared_gate_logits", logits_type, {tokens, shared_count});
    }
    const DataType weight_type = options.wide_gradients ? accumulator : c.dtype;
    auto weight_gradient = [&](const std::string& name, std::initializer_list<std::int64_t> shape) {
      Gradient g;
      if (!wanted(name)) return g;
      g.tensor = output(name, weight_type, shape);
      if (!std::isnan(options.preset)) {
        g.accumulate = true;
        std::vector<double> ones(static_cast<std::size_t>(g.tensor.numel()), options.preset);
        owned.back().set(ones.data());
      }
      return g;
    };
    auto& gw = grad.weights;
    if (options.bound && l > 0) {
      ExpertPointers pointers;
      pointers.dtype = weight_type;
      auto each = [&](const std::string& name, std::initializer_list<std::int64_t> shape, std::vector<void*>& list, Gradient& g) {
        for (std::int64_t n = 0; wanted(name) && n < l; ++n) {
          const Gradient one = weight_gradient(name, shape);
          list.push_back(one.tensor.data);
          g.accumulate = one.accumulate;
        }
      };
      each("d_gate_up_proj", {pre, h}, pointers.gate_up_proj, gw.gate_up_proj);
      each("d_down_proj", {h, i}, pointers.down_proj, gw.down_proj);
      if (c.gate_up_bias) each("d_gate_up_bias", {pre}, pointers.gate_up_bias, gw.gate_up_bias);
      if (c.down_bias) each("d_down_bias", {h}, pointers.down_bias, gw.down_bias);
      const bool any = !(pointers.gate_up_proj.empty() && pointers.down_proj.empty() && pointers.gate_up_bias.empty() &&
                         pointers.down_bias.empty());
      if (any) gw.bound = plan.bind(pointers);
    } else {
      gw.gate_up_proj = weight_gradient("d_gate_up_proj", {l, pre, h});
      gw.down_proj = weight_gradient("d_down_proj", {l, h, i});
      if (c.gate_up_bias) gw.gate_up_bias = weight_gradient("d_gate_up_bias", {l, pre});
      if (c.down_bias) gw.down_bias = weight_gradient("d_down_bias", {l, h});
    }
    gw.shared.resize(shared_count);
    for (std::int64_t s = 0; s < shared_count; ++s) {
      const auto width = c.shared_experts[s].intermediate_size;
      const std::string name = "shared" + std::to_string(s) + ".";
      gw.shared[s].gate_up_proj = weight_gradient(name + "d_gate_up_proj", {c.gate_up_rows(width), h});
      gw.shared[s].down_proj = weight_gradient(name + "d_down_proj", {h, width});
      if (c.gate_up_bias) gw.shared[s].gate_up_bias = weight_gradient(name + "d_gate_up_bias", {c.gate_up_rows(width)});
      if (c.down_bias) gw.shared[s].down_bias = weight_gradient(name + "d_down_bias", {h});
    }
    for (int b = 0; b < options.backwards; ++b) {
      const Buffer other = scratch(sizes.workspace);  // nothing may be left over from the forward
      launch([&] { plan.backward(in, saved.data(), up, grad, other.data(), stream); });
      if (!other.intact()) throw std::runtime_error("backward wrote beyond the workspace");
    }
    options.after_backward(plan);
  }
  if (!saved.intact() || !workspace.intact()) throw std::runtime_error("a pass wrote beyond saved or workspace");
  for (const Tensor& t : owned) {
    if (!t.buffer.intact()) throw std::runtime_error("a pass wrote beyond a tensor");
    if (!t.gaps_intact()) throw std::runtime_error("a pass wrote between the rows of a tensor");
  }
  for (const auto& [name, tensors] : made) {
    auto& all = part.results[name];
    for (const Tensor* t : tensors) {
      const std::vector<double> values = t->get();
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return part;
}

// All ranks' parts together.
inline Results joined(const std::vector<RankPart>& parts, const LayerConfig& config) {
  const std::int64_t e = config.num_experts;
  Results joined;
  for (const RankPart& part : parts) {
    const auto& local_experts = part.local_experts;
    for (auto& [name, values] : part.results) {
      auto& all = joined[name];
      const bool of_experts = name == "d_gate_up_proj" || name == "d_down_proj" || name == "d_gate_up_bias" || name == "d_down_bias";
      if (of_experts) {
        const std::int64_t size = local_experts.empty() ? 0 : static_cast<std::int64_t>(values.size() / local_experts.size());
        if (size > 0) all.resize(e * size);
        for (std::size_t n = 0; n < local_experts.size(); ++n) {
          std::copy_n(values.begin() + n * size, size, all.begin() + local_experts[n] * size);
        }
      } else if (name.rfind("shared", 0) == 0) {
        // Each rank has the gradient of its own tokens; the replicas' sum is the caller's.
        if (all.empty()) all.resize(values.size(), 0.0);
        for (std::size_t n = 0; n < values.size(); ++n) all[n] += values[n];
      } else {
        all.insert(all.end(), values.begin(), values.end());
      }
    }
  }
  return joined;
}

inline Results run(const Problem& p, const RunOptions& options) {
  const int ranks = std::max(1, static_cast<int>(options.tokens_of_rank.size()));
  std::vector<RankPart> parts(ranks);
  if (options.processes) {
    const std::string name = fresh_group_name();
    const auto ended = fork_ranks(ranks, [&](int r) {
      return run_rank(p, options, Group::process(name, r, ranks, std::chrono::seconds(30))).packed();
    });
    for (int r = 0; r < ranks; ++r) {
      if (!ended[r].returned) {
        throw std::runtime_error("rank " + std::to_string(r) + " ended by signal " + std::to_string(ended[r].signal) + ": " + ended[r].text);
      }
      parts[r] = RankPart::unpacked(ended[r].text);
    }
  } else if (ranks == 1) {
    parts[0] = run_rank(p, options, Group::single());
  } else {
    const std::vector<Group> groups = Group::threads(ranks);
    std::vector<std::exception_ptr> errors(ranks);
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        try {
          parts[r] = run_rank(p, options, groups[r]);
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (auto& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
  return joined(parts, p.config);
}

// Shared experts' weight gradients and the losses of `batch` and `sequence` are of each rank's own tokens by definition.
inline std::vector<std::string> of_each_rank(const Problem& p) {
  std::vector<std::string> names{"aux_loss", "z_loss", "expert_counts"};
  for (std::size_t s = 0; s < p.config.shared_experts.size(); ++s) {
    for (const char* name : {"d_gate_up_proj", "d_down_proj", "d_gate_up_bias", "d_down_bias"}) {
      names.push_back("shared" + std::to_string(s) + "." + name);
    }
  }
  return names;
}

// Bit for bit, apart from the results named in `except`.
inline void expect_identical(const Results& a, const Results& b, const std::string& what, const std::vector<std::string>& except = {}) {
  for (const auto& [name, values] : a) {
    if (std::find(except.begin(), except.end(), name) != except.end()) continue;
    const auto other = b.find(name);
    ASSERT_NE(other, b.end()) << what << ": " << name << " is missing";
    ASSERT_EQ(values.size(), other->second.size()) << what << ": " << name;
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(values[i] == other->second[i] && std::signbit(values[i]) == std::signbit(other->second[i]))
          << what << ": " << name << "[" << i << "]: " << values[i] << " and " << other->second[i];
    }
  }
}

// Without what joins the tokens of a batch, losses and a capacity: results of a token depend on it alone.
inline LayerConfig tokens_apart(LayerConfig config) {
  config.router.aux_loss = AuxLossKind::none;
  config.router.z_loss_coefficient = 0;
  config.router.capacity_factor = 0;
  return config;
}

// Of a problem whose config is tokens_apart: each of these tokens alone has bit for bit the rows that it has among all.
// run_problem(Problem) -> Results.
template <class Run>
void expect_tokens_alone_have_their_rows(const Problem& p, std::initializer_list<std::int64_t> tokens, Run run_problem) {
  const Results all = run_problem(p);
  for (const std::int64_t t : tokens) {
    Problem alone = p;
    alone.inputs.tokens = 1;
    auto row = [t](std::vector<double>& values, std::int64_t columns) {
      if (!values.empty()) values = {values.begin() + t * columns, values.begin() + (t + 1) * columns};
    };
    row(alone.inputs.x, p.config.hidden_size);
    row(alone.inputs.router_logits, p.config.num_experts);
    row(alone.inputs.shared_gate_logits, std::int64_t(p.config.shared_experts.size()));
    row(alone.upstream.y, p.config.hidden_size);
    const Results single = run_problem(alone);
    for (const char* name : {"y", "dx", "d_router_logits"}) {
      std::vector<double> expected = all.at(name);
      row(expected, std::int64_t(expected.size()) / p.inputs.tokens);
      EXPECT_EQ(single.at(name), expected) << name << " of token " << t;
    }
  }
}

// Largest error over a tensor, of a row of y or dx relative to that row, and of a row of any other gradient relative to
// the tensor's rows: one token's small derivative or a routing gradient may have cancelled (reference/compare.hpp).
struct Tolerance {
  double tensor, token_row, gradient_row;
};
inline Tolerance tolerance(DataType type) {
  switch (type) {
    case DataType::bfloat16: return {1e-2, 1e-2, 3e-2};
    case DataType::float32: return {1e-5, 1e-5, 3e-5};
    default: return {1e-13, 1e-13, 3e-13};
  }
}

inline double magnitude(const std::vector<double>& values) {
  double most = 0.0;
  for (double v : values) most = std::max(most, std::abs(v));
  return most;
}
// What may be left of a gradient that is zero in truth (a router over one expert, or one that takes them all).
inline double rounding_of_zero(DataType dtype) { return dtype == DataType::float64 ? 1e-13 : 1e-7; }

// Every result against the fp64 reference on the same inputs.
inline void expect_right(const Problem& p, const Results& results, const RunOptions& options, const std::string& what) {
  const auto& c = p.config;
  reference::Inputs inputs = p.inputs;
  if (inputs.ranks.empty()) {
    for (std::int64_t tokens : options.tokens_of_rank) inputs.ranks.push_back({tokens, -1, 1});
  }
  const auto expected = reference::forward(c, p.weights, inputs, 1);
  const Tolerance limit = tolerance(c.dtype);
  auto near = [&](const std::string& name, const std::vector<double>& reference, std::int64_t columns) {
    const auto found = results.find(name);
    if (found == results.end()) return;
    ASSERT_EQ(found->second.size(), reference.size()) << what << ": " << name;
    if (reference.empty()) return;
    if (magnitude(reference) <= rounding_of_zero(DataType::float64)) {  // the reference's own rounding
      EXPECT_LE(magnitude(found->second), rounding_of_zero(c.dtype)) << what << ": " << name << ", which is zero";
      return;
    }
    const bool of_tokens = name == "y" || name == "dx";
    const auto error = reference::compare(found->second, reference, columns, of_tokens ? reference::row_floor : reference::scale_floor);
    const double row_limit = of_tokens ? limit.token_row : limit.gradient_row;
    EXPECT_TRUE(error.rel_fro <= limit.tensor && error.worst_row <= row_limit) << what << ": " << name << ": error " << error.rel_fro << ", worst row "
                                     << error.worst_row_index << " " << error.worst_row << ", allowed " << limit.tensor
                                     << " and " << row_limit;
  };
  const auto h = c.hidden_size, k = std::int64_t(c.top_k);
  std::vector<double> ids(expected.topk_ids.begin(), expected.topk_ids.end());
  ASSERT_EQ(results.at("topk_ids"), ids) << what;
  std::vector<double> counts(expected.expert_counts.begin(), expected.expert_counts.end());
  ASSERT_EQ(results.at("expert_counts"), counts) << what;
  near("y", expected.y, h);
  near("topk_weights", expected.topk_weights, k);
  near("aux_loss", expected.aux_loss, 1);
  near("z_loss", expected.z_loss, 1);
  if (!options.keep) return;
  const auto gradients = reference::backward(c, p.weights, inputs, p.upstream, 1);
  near("dx", gradients.x, h);
  near("d_router_logits", gradients.router_logits, c.num_experts);
  near("d_topk_weights", gradients.topk_weights, k);
  near("d_shared_gate_logits", gradients.shared_gate_logits, std::max<std::int64_t>(1, std::int64_t(c.shared_experts.size())));
  auto set = [&](const std::string& prefix, const auto& g, std::int64_t width) {
    near(prefix + "d_gate_up_proj", g.gate_up_proj, h);
    near(prefix + "d_down_proj", g.down_proj, width);
    near(prefix + "d_gate_up_bias", g.gate_up_bias, c.gate_up_rows(width));
    near(prefix + "d_down_bias", g.down_bias, h);
  };
  set("", gradients.weights, c.intermediate_size);
  for (std::size_t s = 0; s < c.shared_experts.size(); ++s) {
    set("shared" + std::to_string(s) + ".", gradients.weights.shared[s], c.shared_experts[s].intermediate_size);
  }
}

// A configuration with every option drawn at random.
inline LayerConfig random_config(Random& random, DataType dtype) {
  auto pick = [&](auto... choices) {
    const std::vector<std::common_type_t<decltype(choices)...>> all{choices...};
    return all[random() % all.size()];
  };
  LayerConfig c;
  c.hidden_size = 8 * (1 + random() % 24);
  c.intermediate_size = 8 * (1 + random() % 24);
  c.num_experts = static_cast<std::int32_t>(1 + random() % 16);
  c.top_k = static_cast<std::int32_t>(1 + random() % std::min(c.num_experts, 8));
  c.dtype = dtype;
  c.activation.kind = pick(ActivationKind::swiglu, ActivationKind::swiglu_clamped, ActivationKind::geglu_erf,
                           ActivationKind::geglu_tanh, ActivationKind::relu_squared);
  // Reached often; but a pre-activation that bfloat16 rounds across the limit has another derivative altogether.
  c.activation.limit = dtype == DataType::bfloat16 ? 7.0 : 1.5;
  c.gate_up_bias = random() % 2;
  c.down_bias = random() % 2;
  c.weight_placement = pick(WeightPlacement::after_down, WeightPlacement::before_down);
  for (std::uint64_t s = random() % 3; s > 0; --s) {
    c.shared_experts.push_back({static_cast<std::int64_t>(8 * (1 + random() % 24)), random() % 2 == 0});
  }
  auto& r = c.router;
  r.kind = pick(RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid);
  // A single renormalised sigmoid weight is 1 whatever its logit: its gradient would be rounding errors alone.
  r.renormalize = random() % 2 && !(r.kind == RouterKind::sigmoid && c.top_k == 1);
  r.scaling_factor = pick(1.0, 2.5);
  r.selection_bias = random() % 2;
  if (c.num_experts % 4 == 0) {
    r.num_groups = 4;
    r.top_groups = c.top_k <= c.num_experts / 2 ? pick(2, 4) : 4;
    r.group_score_size = c.num_experts > 4 ? pick(1, 2) : 1;
  }
  r.aux_loss = pick(AuxLossKind::none, AuxLossKind::batch, AuxLossKind::sequence, AuxLossKind::global);
  r.aux_loss_coefficient = 0.1;
  r.z_loss_coefficient = pick(0.0, 0.01);
  if (random() % 4 == 0) {
    r.capacity_factor = 0.75;
    r.drop_policy = pick(DropPolicy::by_score, DropPolicy::by_position);
  }
  return c;
}

}  // namespace moelith::test
