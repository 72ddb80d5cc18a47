#include "reference/layer.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <string>
#include <thread>

#include "reference/activation.hpp"
#include "reference/matrix.hpp"
#include "reference/router.hpp"

namespace moelith::reference {

namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, "reference: " + text); }

template <class T>
void check_size(const std::string& name, const std::vector<T>& tensor, std::int64_t expected) {
  if (static_cast<std::int64_t>(tensor.size()) != expected) {
    refuse(name + " has " + std::to_string(tensor.size()) + " elements, expected " + std::to_string(expected));
  }
}

void check_ids(const std::string& name, const std::vector<std::int64_t>& ids, std::int64_t lowest,
               std::int64_t experts) {
  for (std::int64_t id : ids) {
    if (id < lowest || id >= experts) {
      refuse(name + " holds " + std::to_string(id) + ", accepted are " + std::to_string(lowest) + " to " +
             std::to_string(experts - 1));
    }
  }
}

bool any_shared_gate(const LayerConfig& config) {
  return std::any_of(config.shared_experts.begin(), config.shared_experts.end(),
                     [](const SharedExpertConfig& shared) { return shared.gated; });
}

void check(const LayerConfig& config, const Weights& weights, const Inputs& inputs) {
  const std::int64_t tokens = inputs.tokens, h = config.hidden_size, experts = config.num_experts, k = config.top_k;
  const auto check_expert = [&](const std::string& prefix, std::int64_t count, std::int64_t width, const auto& w) {
    const std::int64_t rows = config.gate_up_rows(width);
    check_size(prefix + "gate_up_proj", w.gate_up_proj, count * rows * h);
    check_size(prefix + "gate_up_bias", w.gate_up_bias, config.gate_up_bias ? count * rows : 0);
    check_size(prefix + "down_proj", w.down_proj, count * h * width);
    check_size(prefix + "down_bias", w.down_bias, config.down_bias ? count * h : 0);
  };
  if (experts < 1 || k < 1 || k > experts) {
    refuse("num_experts is " + std::to_string(experts) + " and top_k " + std::to_string(k) +
           ", accepted is 1 <= top_k <= num_experts");
  }
  const RouterConfig& router = config.router;
  if (router.num_groups < 1 || router.top_groups < 1 || experts % router.num_groups != 0 ||
      (router.top_groups < router.num_groups && router.top_groups * (experts / router.num_groups) < k)) {
    refuse("num_groups is " + std::to_string(router.num_groups) + " and top_groups " +
           std::to_string(router.top_groups) + ", accepted are groups that divide num_experts, kept ones with top_k "
           "experts at least");
  }
  check_expert("", experts, config.intermediate_size, weights);
  check_size("weights.shared", weights.shared, static_cast<std::int64_t>(config.shared_experts.size()));
  for (std::size_t s = 0; s < weights.shared.size(); ++s) {
    check_expert("shared." + std::to_string(s) + ".", 1, config.shared_experts[s].intermediate_size,
                 weights.shared[s]);
  }

  check_size("x", inputs.x, tokens * h);
  const bool logits = !inputs.router_logits.empty(), ids = !inputs.topk_ids.empty();
  if (tokens > 0 && logits && ids) refuse("router_logits and topk_ids are given, accepted is one of them");
  if (tokens > 0 && !logits && !ids && experts != 1) {
    refuse("neither router_logits nor topk_ids is given, accepted only for num_experts = 1");
  }
  if (logits) check_size("router_logits", inputs.router_logits, tokens * experts);
  if (ids) check_size("topk_ids", inputs.topk_ids, tokens * k);
  check_size("topk_weights", inputs.topk_weights, ids ? tokens * k : 0);
  check_ids("topk_ids", inputs.topk_ids, -1, experts);
  if (!inputs.chosen_ids.empty()) check_size("chosen_ids", inputs.chosen_ids, logits ? tokens * k : 0);
  check_ids("chosen_ids", inputs.chosen_ids, 0, experts);
  if (logits && config.router.selection_bias) check_size("selection_bias", inputs.selection_bias, experts);
  if (any_shared_gate(config)) {
    check_size("shared_gate_logits", inputs.shared_gate_logits,
               tokens * static_cast<std::int64_t>(config.shared_experts.size()));
  }
}

std::vector<RankRange> rank_ranges(const Inputs& inputs) {
  std::vector<RankBatch> batches = inputs.ranks;
  if (batches.empty()) batches.push_back(RankBatch{inputs.tokens, -1, 1});
  std::vector<RankRange> ranges;
  std::int64_t begin = 0;
  for (const RankBatch& batch : batches) {
    const std::int64_t valid = batch.valid_tokens < 0 ? batch.tokens : std::min(batch.valid_tokens, batch.tokens);
    if (batch.num_sequences < 1 || batch.tokens % batch.num_sequences != 0) {
      refuse("num_sequences is " + std::to_string(batch.num_sequences) + ", accepted are divisors of " +
             std::to_string(batch.tokens));
    }
    ranges.push_back(RankRange{begin, begin + valid, begin + batch.tokens, batch.num_sequences});
    begin += batch.tokens;
  }
  if (begin != inputs.tokens) {
    refuse("the ranks' tokens add up to " + std::to_string(begin) + ", expected " + std::to_string(inputs.tokens));
  }
  return ranges;
}

// Runs job(0) ... job(count - 1), each once, on several threads. Jobs write to places of their own.
void run_jobs(std::int64_t count, int threads, const std::function<void(std::int64_t)>& job) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr failure;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  const auto work = [&] {
    try {
      for (std::int64_t i = next++; i < count; i = next++) job(i);
    } catch (...) {
      if (!failed.test_and_set()) failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(threads, count); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

// Where a row of an expert comes from, and what it is multiplied by.
struct Route {
  std::int64_t token = 0;
  std::int64_t place = 0;  // row of the buffer that takes the route's result: token * (k + S) + slot, or + k + s
  double weight = 1.0;
};

// One expert, routed or shared: its weights, its routes in token order, and for backward where its gradients go.
struct Expert {
  std::int64_t width = 0;  // I
  bool weight_before_down = false;
  const double *gate_up_proj = nullptr, *gate_up_bias = nullptr, *down_proj = nullptr, *down_bias = nullptr;
  double *d_gate_up_proj = nullptr, *d_gate_up_bias = nullptr, *d_down_proj = nullptr, *d_down_bias = nullptr;
  std::vector<Route> routes;
};

const double* slice(const std::vector<double>& tensor, std::int64_t index, std::int64_t size) {
  return tensor.empty() ? nullptr : tensor.data() + index * size;
}
double* slice(std::vector<double>& tensor, std::int64_t index, std::int64_t size) {
  return tensor.empty() ? nullptr : tensor.data() + index * size;
}

// The E routed experts, then the S shared ones, which take every valid token with weight g_s(t).
std::vector<Expert> experts_of(const LayerConfig& config, const Weights& weights, const Inputs& inputs,
                               const std::vector<RankRange>& ranks, const Routing& routing, Weights* gradients) {
  const std::int64_t h = config.hidden_size, k = config.top_k;
  const std::int64_t routed = config.num_experts, shared = static_cast<std::int64_t>(config.shared_experts.size());
  const auto make = [&](std::int64_t width, std::int64_t index, const auto& w, auto* d) {
    const std::int64_t rows = config.gate_up_rows(width);
    Expert expert;
    expert.width = width;
    expert.gate_up_proj = slice(w.gate_up_proj, index, rows * h);
    expert.gate_up_bias = slice(w.gate_up_bias, index, rows);
    expert.down_proj = slice(w.down_proj, index, h * width);
    expert.down_bias = slice(w.down_bias, index, h);
    if (d != nullptr) {
      expert.d_gate_up_proj = slice(d->gate_up_proj, index, rows * h);
      expert.d_gate_up_bias = slice(d->gate_up_bias, index, rows);
      expert.d_down_proj = slice(d->down_proj, index, h * width);
      expert.d_down_bias = slice(d->down_bias, index, h);
    }
    return expert;
  };
  std::vector<Expert> experts;
  for (std::int64_t e = 0; e < routed; ++e) {
    experts.push_back(make(config.intermediate_size, e, weights, gradients));
    experts.back().weight_before_down = config.weight_placement == WeightPlacement::before_down;
  }
  for (std::int64_t s = 0; s < shared; ++s) {
    experts.push_back(make(config.shared_experts[s].intermediate_size, 0, weights.shared[s],
                           gradients == nullptr ? nullptr : &gradients->shared[s]));
  }
  for (const RankRange& rank : ranks) {
    for (std::int64_t t = rank.begin; t < rank.valid_end; ++t) {
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int64_t id = routing.kept[t * k + j];
        if (id >= 0) experts[id].routes.push_back({t, t * (k + shared) + j, routing.weights[t * k + j]});
      }
      for (std::int64_t s = 0; s < shared; ++s) {
        const double gate =
            config.shared_experts[s].gated ? sigmoid(inputs.shared_gate_logits[t * shared + s]) : 1.0;
        experts[routed + s].routes.push_back({t, t * (k + shared) + k + s, gate});
      }
    }
  }
  return experts;
}

std::vector<double> gather(const std::vector<double>& source, const std::vector<Route>& routes, std::int64_t columns) {
  std::vector<double> rows(routes.size() * static_cast<std::size_t>(columns));
  for (std::size_t i = 0; i < routes.size(); ++i) {
    std::copy_n(source.data() + routes[i].token * columns, columns, rows.data() + i * columns);
  }
  return rows;
}

// z = x gate_up_proj^T + gate_up_bias of all rows of an expert: [n, 2I], or [n, I] without a gate.
std::vector<double> pre_activation(const LayerConfig& config, const Expert& expert, const std::vector<double>& x) {
  const std::int64_t n = static_cast<std::int64_t>(expert.routes.size()), rows = config.gate_up_rows(expert.width);
  std::vector<double> z(static_cast<std::size_t>(n * rows));
  multiply_transposed(n, rows, config.hidden_size, x.data(), expert.gate_up_proj, z.data());
  for (std::int64_t i = 0; i < n && expert.gate_up_bias != nullptr; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) z[i * rows + r] += expert.gate_up_bias[r];
  }
  return z;
}

// act(z) of element c of row i of z, and its derivatives.
ActivationValue activation_at(const LayerConfig& config, const std::vector<double>& z, std::int64_t width,
                              std::int64_t i, std::int64_t c) {
  const double* row = z.data() + i * config.gate_up_rows(width);
  return activate(config.activation, row[c], config.activation.gated() ? row[width + c] : 0.0);
}

// out: [T (k + S), H], one row for each route.
void forward_expert(const LayerConfig& config, const Expert& expert, const Inputs& inputs, std::vector<double>& out) {
  const std::int64_t n = static_cast<std::int64_t>(expert.routes.size()), h = config.hidden_size;
  const std::vector<double> z = pre_activation(config, expert, gather(inputs.x, expert.routes, h));
  std::vector<double> a(static_cast<std::size_t>(n * expert.width));
  for (std::int64_t i = 0; i < n; ++i) {
    const double before = expert.weight_before_down ? expert.routes[i].weight : 1.0;
    for (std::int64_t c = 0; c < expert.width; ++c) {
      a[i * expert.width + c] = before * activation_at(config, z, expert.width, i, c).value;
    }
  }
  std::vector<double> o(static_cast<std::size_t>(n * h));
  multiply_transposed(n, h, expert.width, a.data(), expert.down_proj, o.data());
  for (std::int64_t i = 0; i < n; ++i) {
    const double after = expert.weight_before_down ? 1.0 : expert.routes[i].weight;
    for (std::int64_t c = 0; c < h; ++c) {
      const double bias = expert.down_bias == nullptr ? 0.0 : expert.down_bias[c];
      out[expert.routes[i].place * h + c] = after * (o[i * h + c] + bias);
    }
  }
}

// With a = act(z), o = down a + b and y = p o (after_down), or o = down (p a) + b and y = o (before_down):
//   u = down^T dy
//   dp = <u, a>, plus <dy, b> for after_down
//   d_down = p dy a^T                 (both placements)
//   db = p dy (after_down), or dy (before_down)
//   da = p u; dz = da * act'(z); d_gate_up = dz x^T; dx = gate_up^T dz; d_gate_up_bias = dz
// d_x: [T (k + S), H], one row for each route. d_weight: [T (k + S)].
void backward_expert(const LayerConfig& config, const Expert& expert, const Inputs& inputs,
                     const std::vector<double>& d_y, std::vector<double>& d_x, std::vector<double>& d_weight) {
  const std::int64_t n = static_cast<std::int64_t>(expert.routes.size()), h = config.hidden_size;
  const std::int64_t width = expert.width, rows = config.gate_up_rows(width);
  const std::vector<double> x = gather(inputs.x, expert.routes, h);
  std::vector<double> dy = gather(d_y, expert.routes, h);
  const std::vector<double> z = pre_activation(config, expert, x);

  std::vector<double> u(static_cast<std::size_t>(n * width));
  add_product(n, h, width, dy.data(), expert.down_proj, u.data());

  std::vector<double> a(u.size()), dz(z.size());
  for (std::int64_t i = 0; i < n; ++i) {
    const Route& route = expert.routes[i];
    double dp = 0.0;
    for (std::int64_t c = 0; c < width; ++c) {
      const ActivationValue act = activation_at(config, z, width, i, c);
      const double da = route.weight * u[i * width + c];
      a[i * width + c] = act.value;
      dp += u[i * width + c] * act.value;
      dz[i * rows + c] = da * act.d_gate;
      if (config.activation.gated()) dz[i * rows + width + c] = da * act.d_up;
    }
    for (std::int64_t c = 0; c < h && expert.down_bias != nullptr; ++c) {
      if (!expert.weight_before_down) dp += dy[i * h + c] * expert.down_bias[c];
      expert.d_down_bias[c] += (expert.weight_before_down ? 1.0 : route.weight) * dy[i * h + c];
    }
    d_weight[route.place] = dp;
    for (std::int64_t c = 0; c < h; ++c) dy[i * h + c] *= route.weight;
    for (std::int64_t r = 0; r < rows && expert.gate_up_bias != nullptr; ++r) {
      expert.d_gate_up_bias[r] += dz[i * rows + r];
    }
  }
  add_transposed_product(n, h, width, dy.data(), a.data(), expert.d_down_proj);
  add_transposed_product(n, rows, h, dz.data(), x.data(), expert.d_gate_up_proj);

  std::vector<double> dx(x.size());
  add_product(n, rows, h, dz.data(), expert.gate_up_proj, dx.data());
  for (std::int64_t i = 0; i < n; ++i) std::copy_n(&dx[i * h], h, &d_x[expert.routes[i].place * h]);
}

// Sums the rows of each token: [T (slots), H] -> [T, H].
std::vector<double> combine(const std::vector<double>& route_rows, std::int64_t tokens, std::int64_t slots,
                            std::int64_t h) {
  std::vector<double> result(static_cast<std::size_t>(tokens * h));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = 0; j < slots; ++j) {
      for (std::int64_t c = 0; c < h; ++c) result[t * h + c] += route_rows[(t * slots + j) * h + c];
    }
  }
  return result;
}

// Threads are not worth their start for a few thousand operations.
int thread_count(const LayerConfig& config, std::int64_t rows, int threads) {
  const double operations = 6.0 * static_cast<double>(rows) * static_cast<double>(config.hidden_size) *
                            static_cast<double>(config.intermediate_size);
  if (operations < 1e6) return 1;
  return threads > 0 ? threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

ReferenceResult forward(const LayerConfig& config, const Weights& weights, const Inputs& inputs, int threads) {
  check(config, weights, inputs);
  const std::vector<RankRange> ranks = rank_ranges(inputs);
  const std::int64_t h = config.hidden_size, k = config.top_k, num_experts = config.num_experts;
  const std::int64_t slots = k + static_cast<std::int64_t>(config.shared_experts.size());
  const Routing routing = route(config, inputs, ranks);
  const std::vector<Expert> experts = experts_of(config, weights, inputs, ranks, routing, nullptr);

  ReferenceResult result;
  std::vector<double> out(static_cast<std::size_t>(inputs.tokens * slots * h));
  run_jobs(static_cast<std::int64_t>(experts.size()), thread_count(config, inputs.tokens * slots, threads),
           [&](std::int64_t i) { forward_expert(config, experts[i], inputs, out); });
  result.y = combine(out, inputs.tokens, slots, h);

  result.topk_ids = routing.kept;
  result.topk_weights = routing.weights;
  for (std::size_t i = 0; i < routing.kept.size(); ++i) {
    if (routing.kept[i] < 0) result.topk_weights[i] = 0.0;
  }
  result.expert_counts.assign(ranks.size() * static_cast<std::size_t>(num_experts), 0);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (std::int64_t i = ranks[r].begin * k; i < ranks[r].end * k; ++i) {
      if (routing.kept[i] >= 0) ++result.expert_counts[r * num_experts + routing.kept[i]];
    }
  }
  Losses loss = losses(config, inputs, ranks, routing);
  result.aux_loss = std::move(loss.aux);
  result.z_loss = std::move(loss.z);
  return result;
}

ReferenceGradients backward(const LayerConfig& config, const Weights& weights, const Inputs& inputs,
                            const OutputGradients& output_gradients, int threads) {
  check(config, weights, inputs);
  const std::vector<RankRange> ranks = rank_ranges(inputs);
  const std::int64_t h = config.hidden_size, k = config.top_k, tokens = inputs.tokens;
  const std::int64_t shared = static_cast<std::int64_t>(config.shared_experts.size()), slots = k + shared;
  const auto given = [](const std::string& name, const std::vector<double>& gradient, std::int64_t size) {
    if (gradient.empty()) return std::vector<double>(static_cast<std::size_t>(size));
    check_size("gradient of " + name, gradient, size);
    return gradient;
  };
  const std::vector<double> d_y = given("y", output_gradients.y, tokens * h);
  const std::vector<double> d_topk_weights = given("topk_weights", output_gradients.topk_weights, tokens * k);
  const std::vector<double> d_aux =
      given("aux_loss", output_gradients.aux_loss, static_cast<std::int64_t>(ranks.size()));
  const std::vector<double> d_z = given("z_loss", output_gradients.z_loss, static_cast<std::int64_t>(ranks.size()));

  ReferenceGradients gradients;
  const auto zeros_like = [](const auto& from, auto& to) {
    to.gate_up_proj.assign(from.gate_up_proj.size(), 0.0);
    to.gate_up_bias.assign(from.gate_up_bias.size(), 0.0);
    to.down_proj.assign(from.down_proj.size(), 0.0);
    to.down_bias.assign(from.down_bias.size(), 0.0);
  };
  zeros_like(weights, gradients.weights);
  gradients.weights.shared.resize(weights.shared.size());
  for (std::size_t s = 0; s < weights.shared.size(); ++s) zeros_like(weights.shared[s], gradients.weights.shared[s]);

  const Routing routing = route(config, inputs, ranks);
  const std::vector<Expert> experts = experts_of(config, weights, inputs, ranks, routing, &gradients.weights);
  std::vector<double> d_x(static_cast<std::size_t>(tokens * slots * h));
  std::vector<double> d_weight(static_cast<std::size_t>(tokens * slots));
  run_jobs(static_cast<std::int64_t>(experts.size()), thread_count(config, tokens * slots, threads),
           [&](std::int64_t i) { backward_expert(config, experts[i], inputs, d_y, d_x, d_weight); });
  gradients.x = combine(d_x, tokens, slots, h);

  // The gradient into the weight of each kept route, from y and from the weights as an output.
  std::vector<double> d_kept(static_cast<std::size_t>(tokens * k));
  for (std::int64_t i = 0; i < tokens * k; ++i) {
    if (routing.kept[i] >= 0) d_kept[i] = d_weight[i / k * slots + i % k] + d_topk_weights[i];
  }
  if (!inputs.router_logits.empty()) {
    gradients.router_logits = router_backward(config, inputs, ranks, routing, d_kept, d_aux, d_z);
  }
  if (!inputs.topk_weights.empty()) gradients.topk_weights = d_kept;

  // g = sigmoid(l): dl = dg g (1 - g), with 1 - g = sigmoid(-l)
  gradients.shared_gate_logits.assign(inputs.shared_gate_logits.size(), 0.0);
  for (std::int64_t s = 0; s < shared && !inputs.shared_gate_logits.empty(); ++s) {
    if (!config.shared_experts[s].gated) continue;
    for (const Route& route : experts[config.num_experts + s].routes) {
      gradients.shared_gate_logits[route.token * shared + s] =
          d_weight[route.place] * route.weight * sigmoid(-inputs.shared_gate_logits[route.token * shared + s]);
    }
  }
  return gradients;
}

}  // namespace moelith::reference
