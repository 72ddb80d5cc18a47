#include "random_problem.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <thread>

#include <fmt/format.h>

#include "executors/cpu/thread_pool.hpp"
#include "numerics/bfloat16.hpp"
#include "random.hpp"

namespace moelith::tools {
namespace {

using numerics::bfloat16;

// Calls f(begin, end) for parts of [0, count) on all threads.
template <class F>
void in_parallel(std::int64_t count, F f) {
  const std::int64_t threads = std::clamp<std::int64_t>(count >> 16, 1, executors::cpu::available_workers());
  std::vector<std::thread> others;
  for (std::int64_t i = 1; i < threads; ++i) {
    others.emplace_back([=] { f(count * i / threads, count * (i + 1) / threads); });
  }
  f(std::int64_t{0}, count / threads);
  for (std::thread& thread : others) thread.join();
}

// Sets elements from a function of the index.
template <class F>
void fill(const TensorView& view, F value) {
  const auto set = [&](auto* data, auto convert) {
    in_parallel(view.numel(), [=](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) data[i] = convert(value(i));
    });
  };
  switch (view.dtype) {
    case DataType::float64: set(static_cast<double*>(view.data), [](double v) { return v; }); break;
    case DataType::float32: set(static_cast<float*>(view.data), [](double v) { return static_cast<float>(v); }); break;
    case DataType::bfloat16:
      set(static_cast<bfloat16*>(view.data), [](double v) { return numerics::to_bfloat16(static_cast<float>(v)); });
      break;
    case DataType::int64:
      set(static_cast<std::int64_t*>(view.data), [](double v) { return static_cast<std::int64_t>(v); });
      break;
    case DataType::int32:
      set(static_cast<std::int32_t*>(view.data), [](double v) { return static_cast<std::int32_t>(v); });
      break;
    case DataType::uint8:
      set(static_cast<std::uint8_t*>(view.data), [](double v) { return static_cast<std::uint8_t>(v); });
      break;
  }
}

// Streams of Random: one for each kind of tensor; a shared expert or a variant adds its number times `streams`.
enum Stream : std::uint64_t {
  x_stream = 16,
  logit_stream,
  weight_stream,
  selection_bias_stream,
  shared_gate_stream,
  dy_stream,
  loss_stream,
  gate_up_stream,
  gate_up_bias_stream,
  down_stream,
  down_bias_stream,
  streams = 64,
};

}  // namespace

void Buffer::Free::operator()(void* memory) const { std::free(memory); }

Buffer::Buffer(std::uint64_t bytes) : size_(bytes) {
  constexpr std::uint64_t alignment = 256;
  if (bytes > std::numeric_limits<std::uint64_t>::max() / 2) throw std::bad_alloc();
  const std::uint64_t room = (std::max<std::uint64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  memory_.reset(std::aligned_alloc(alignment, room));
  if (!memory_) throw std::bad_alloc();
  std::memset(memory_.get(), 0xff, room);
}

TensorView TensorStore::add(DataType type, std::initializer_list<std::int64_t> shape) {
  TensorView view(nullptr, type, shape);
  const std::uint64_t size = static_cast<std::uint64_t>(view.numel()) * size_of(type);
  view.data = buffers_.emplace_back(size).data();
  bytes_ += size;
  return view;
}

void fill_normal(const TensorView& view, double mean, double scale, std::uint64_t seed, std::uint64_t stream) {
  const Random random(seed, stream);
  fill(view, [=](std::int64_t i) {
    return mean + scale * static_cast<double>(random.normal(static_cast<std::uint64_t>(i)));
  });
}

std::vector<double> to_doubles(const TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.numel()));
  const auto get = [&](const auto* data, auto convert) {
    in_parallel(view.numel(), [&values, data, convert](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) values[static_cast<std::size_t>(i)] = convert(data[i]);
    });
  };
  switch (view.dtype) {
    case DataType::float64: get(static_cast<const double*>(view.data), [](double v) { return v; }); break;
    case DataType::float32:
      get(static_cast<const float*>(view.data), [](float v) { return static_cast<double>(v); });
      break;
    case DataType::bfloat16:
      get(static_cast<const bfloat16*>(view.data),
          [](bfloat16 v) { return static_cast<double>(numerics::to_float(v)); });
      break;
    case DataType::int64:
      get(static_cast<const std::int64_t*>(view.data), [](std::int64_t v) { return static_cast<double>(v); });
      break;
    case DataType::int32:
      get(static_cast<const std::int32_t*>(view.data), [](std::int32_t v) { return static_cast<double>(v); });
      break;
    case DataType::uint8:
      get(static_cast<const std::uint8_t*>(view.data), [](std::uint8_t v) { return static_cast<double>(v); });
      break;
  }
  return values;
}

double weight_bytes(const LayerConfig& c, double element_size) {
  const auto expert = [&](std::int64_t width) {
    return static_cast<double>(c.hidden_size) * static_cast<double>(c.gate_up_rows(width) + width);
  };
  double elements = c.num_experts * expert(c.intermediate_size);
  for (const SharedExpertConfig& shared : c.shared_experts) elements += expert(shared.intermediate_size);
  return elements * element_size;
}

void require_memory(double bytes, const std::string& what) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  double kibibytes = 0;
  while (file >> name >> kibibytes) {
    std::getline(file, unit);
    if (name != "MemAvailable:") continue;
    if (bytes <= kibibytes * 1024) return;
    throw Error(
        Status::invalid_argument,
        fmt::format("{} needs about {:.1f} GB of memory, and {:.1f} GB are free; fewer experts or tokens, smaller "
                    "sizes or --shrink need less",
                    what, bytes * 1e-9, kibibytes * 1024e-9));
  }
}

Problem make_problem(const LayerConfig& config, std::int64_t tokens, const RouteSpec& routes, Entry entry,
                     int variants) {
  Problem p;
  p.config = config;
  p.tokens = tokens;
  const DataType type = config.dtype, accumulator = config.accumulator_dtype();
  const std::int64_t h = config.hidden_size, i = config.intermediate_size, e = config.num_experts, k = config.top_k;
  const auto s_count = static_cast<std::int64_t>(config.shared_experts.size());
  const std::uint64_t seed = routes.seed;

  // Weights and their gradients. `first` is [L] for the routed experts and nothing for a shared one.
  const auto inverse_root = [](std::int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); };
  Weights weights;
  {
    const std::uint64_t before = p.store.bytes();
    const std::int64_t rows = config.gate_up_rows(i);
    auto filled = [&](std::initializer_list<std::int64_t> shape, double scale, std::uint64_t stream) {
      const TensorView view = p.store.add(type, shape);
      fill_normal(view, 0.0, scale, seed, stream);
      return view;
    };
    weights.gate_up_proj = filled({e, rows, h}, inverse_root(h), gate_up_stream);
    weights.down_proj = filled({e, h, i}, 2.0 * inverse_root(i), down_stream);
    if (config.gate_up_bias) weights.gate_up_bias = filled({e, rows}, 0.5, gate_up_bias_stream);
    if (config.down_bias) weights.down_bias = filled({e, h}, 0.5, down_bias_stream);
    for (std::int64_t s = 0; s < s_count; ++s) {
      const std::int64_t width = config.shared_experts[static_cast<std::size_t>(s)].intermediate_size;
      const std::uint64_t other = static_cast<std::uint64_t>(s + 1) * streams;
      Weights::Shared& shared = weights.shared.emplace_back();
      shared.gate_up_proj = filled({config.gate_up_rows(width), h}, inverse_root(h), gate_up_stream + other);
      shared.down_proj = filled({h, width}, 2.0 * inverse_root(width), down_stream + other);
      if (config.gate_up_bias)
        shared.gate_up_bias = filled({config.gate_up_rows(width)}, 0.5, gate_up_bias_stream + other);
      if (config.down_bias) shared.down_bias = filled({h}, 0.5, down_bias_stream + other);
    }
    p.weight_bytes = p.store.bytes() - before;
  }

  for (int v = 0; v < variants; ++v) {
    const std::uint64_t other = static_cast<std::uint64_t>(v + 1) * 16 * streams;
    auto filled = [&](DataType dtype, std::initializer_list<std::int64_t> shape, double scale, std::uint64_t stream) {
      const TensorView view = p.store.add(dtype, shape);
      fill_normal(view, 0.0, scale, seed, stream + other);
      return view;
    };
    Problem::Variant& variant = p.variants.emplace_back();
    Inputs& in = variant.inputs;
    in.weights = weights;
    in.x = filled(type, {tokens, h}, 1.0, x_stream);
    RouteSpec spec = routes;
    spec.seed = mixed(seed + static_cast<std::uint64_t>(v));
    const std::vector<std::int32_t> ids = make_routes(config, spec, tokens);
    const Random noise(seed, logit_stream + other);
    if (entry == Entry::logits && routes.kind != RouteKind::file) {
      // Chosen experts lie around 3, the others around -1.5, each within +-1: the choice stays clear of rounding, and
      // scores are of ordinary size.
      std::vector<float> logits(static_cast<std::size_t>(tokens * e), -1.5f);
      for (std::int64_t r = 0; r < tokens * k; ++r) {
        logits[static_cast<std::size_t>(r / k * e + ids[static_cast<std::size_t>(r)])] = 3.0f;
      }
      in.router_logits = p.store.add(accumulator, {tokens, e});
      fill(in.router_logits, [&logits, noise](std::int64_t at) {
        return logits[static_cast<std::size_t>(at)] + 2.0 * noise.uniform(static_cast<std::uint64_t>(at)) - 1.0;
      });
      if (config.router.selection_bias) in.selection_bias = filled(accumulator, {e}, 0.02, selection_bias_stream);
    } else {
      in.topk_ids = p.store.add(DataType::int32, {tokens, k});
      std::copy(ids.begin(), ids.end(), static_cast<std::int32_t*>(in.topk_ids.data));
      in.topk_weights = p.store.add(accumulator, {tokens, k});
      const Random draw(seed, weight_stream + other);
      fill(in.topk_weights,
           [draw](std::int64_t at) { return 0.1 + 0.9 * draw.uniform(static_cast<std::uint64_t>(at)); });
    }
    const bool gated = std::any_of(config.shared_experts.begin(), config.shared_experts.end(),
                                   [](const SharedExpertConfig& shared) { return shared.gated; });
    if (gated) in.shared_gate_logits = filled(accumulator, {tokens, s_count}, 1.0, shared_gate_stream);

    OutputGradients& up = variant.output_gradients;
    up.y = filled(type, {tokens, h}, 1.0, dy_stream);
    if (in.router_logits.given()) {
      const auto one = [&] {
        const TensorView view = p.store.add(accumulator, {1});
        fill(view, [](std::int64_t) { return 1.0; });
        return view;
      };
      if (config.router.aux_loss != AuxLossKind::none) up.aux_loss = one();
      if (config.router.z_loss_coefficient > 0) up.z_loss = one();
    }
  }

  const Inputs& in = p.variants.at(0).inputs;
  p.outputs.y = p.store.add(type, {tokens, h});
  p.outputs.topk_ids = p.store.add(DataType::int32, {tokens, k});
  p.outputs.topk_weights = p.store.add(accumulator, {tokens, k});
  p.outputs.expert_counts = p.store.add(DataType::int64, {e});
  if (p.variants[0].output_gradients.aux_loss.given()) p.outputs.aux_loss = p.store.add(accumulator, {1});
  if (p.variants[0].output_gradients.z_loss.given()) p.outputs.z_loss = p.store.add(accumulator, {1});

  InputGradients& out = p.gradients;
  const auto alike = [&](const TensorView& view) {  // a tensor of the same shape and type, of at most 3 dimensions
    if (view.rank == 3) return p.store.add(view.dtype, {view.shape[0], view.shape[1], view.shape[2]});
    if (view.rank == 2) return p.store.add(view.dtype, {view.shape[0], view.shape[1]});
    return view.rank == 1 ? p.store.add(view.dtype, {view.shape[0]}) : TensorView{};
  };
  out.x = alike(in.x);
  out.router_logits = alike(in.router_logits);
  out.topk_weights = alike(in.topk_weights);
  out.shared_gate_logits = alike(in.shared_gate_logits);
  const std::uint64_t before = p.store.bytes();
  const auto gradients_of = [&](const auto& w, auto& g) {
    g.gate_up_proj.tensor = alike(w.gate_up_proj);
    g.gate_up_bias.tensor = alike(w.gate_up_bias);
    g.down_proj.tensor = alike(w.down_proj);
    g.down_bias.tensor = alike(w.down_bias);
  };
  gradients_of(weights, out.weights);
  for (const Weights::Shared& shared : weights.shared) gradients_of(shared, out.weights.shared.emplace_back());
  p.gradient_bytes = p.store.bytes() - before;
  return p;
}

}  // namespace moelith::tools
