#include "routing/device_router.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda_check.hpp"
#include "moelith/tensor.hpp"
#include "numerics/bfloat16.hpp"
#include "routing/capacity.hpp"
#include "routing/router_math.hpp"

namespace moelith::routing {
namespace {

using numerics::bfloat16;

constexpr unsigned all_lanes = ~0u;
// Of the kernels that go through rows of logits: as many warps as their shared memory allows.
template <int PerLane>
constexpr int row_warps_of = PerLane <= 4 ? 16 : (PerLane <= 8 ? 8 : 4);
constexpr std::int32_t no_key = OrderKey<float>::excluded;
// Few tokens are routed by a single launch: a cluster of so many blocks at most, a unit each.
constexpr std::int64_t at_once_units = 8;
constexpr std::int32_t at_once_experts = 256;  // more have too few threads a block

// Where things lie in the scratch memory of forward.
struct Scratch {
  std::int32_t* unit_counts = nullptr;  // [units, E]: routes before capacity
  std::int32_t* unit_begin = nullptr;   // [units, E]: routes of the expert in units before
  float* unit_sums = nullptr;           // [units, E]: sums of scores
  double* unit_aux = nullptr;           // [units]: of the whole sequences in the unit
  float* unit_z = nullptr;              // [units]: sums of logsumexp^2
  std::int64_t* list_begin = nullptr;   // [E], with capacity: where an expert's routes before capacity start
  std::int32_t* list = nullptr;         // [T k], with capacity
  std::size_t bytes = 0;

  static Scratch over(void* memory, const RouterConfig& config, std::int64_t num_experts, std::int64_t top_k, std::int64_t tokens) {
    Scratch s;
    auto part = [&](auto*& pointer, std::int64_t count) {
      using T = std::remove_reference_t<decltype(*pointer)>;
      if (memory) pointer = reinterpret_cast<T*>(static_cast<std::byte*>(memory) + s.bytes);
      s.bytes += (std::size_t(count) * sizeof(T) + 255) / 256 * 256;
    };
    const std::int64_t units = std::max(tokens / 32 + 1, at_once_units);
    part(s.unit_counts, units * num_experts);
    part(s.unit_begin, units * num_experts);
    part(s.unit_sums, units * num_experts);
    part(s.unit_aux, units);
    part(s.unit_z, units);
    if (config.capacity_factor > 0) {
      part(s.list_begin, num_experts);
      part(s.list, tokens * top_k);
    }
    return s;
  }
};

__device__ float load(const DeviceFloats& from, std::int64_t i) {
  return from.is_bfloat16 ? numerics::to_float(static_cast<const bfloat16*>(from.data)[i]) : static_cast<const float*>(from.data)[i];
}

// The same bits in every lane.
__device__ float warp_sum(float v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(all_lanes, v, distance);
  return v;
}
__device__ float warp_max(float v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(all_lanes, v, distance));
  return v;
}
// Over all threads, in a fixed order; for every thread. `memory`: 32 values.
__device__ double block_sum(double v, double* memory) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(all_lanes, v, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = v;
  __syncthreads();
  double total = 0.0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) total += memory[w];
  return total;
}

__device__ std::int64_t clamped(std::int64_t v, std::int64_t low, std::int64_t high) { return v < low ? low : (v > high ? high : v); }

// A row of E values in a warp: value i of a lane is that of expert lane + 32 i.
template <int PerLane>
struct Row {
  float v[PerLane];

  __device__ void load_logits(const DeviceFloats& logits, std::int64_t t, std::int32_t num_experts, int lane) {
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
      const int e = lane + 32 * i;
      v[i] = e < num_experts ? finite_or_excluded(load(logits, t * logits.stride + e)) : excluded<float>();
    }
  }
  __device__ float max() const {
    float m = v[0];
#pragma unroll
    for (int i = 1; i < PerLane; ++i) m = fmaxf(m, v[i]);
    return warp_max(m);
  }
  __device__ float sum() const {
    float s = v[0];
#pragma unroll
    for (int i = 1; i < PerLane; ++i) s += v[i];
    return warp_sum(s);
  }
  // Softmax of x, all 0 without finite logits; returns the highest logit and the sum of exponentials.
  __device__ void softmax(const Row& x, float& highest, float& exponentials) {
    highest = x.max();
    const float shift = highest == excluded<float>() ? 0.0f : highest;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) v[i] = numerics::exp(x.v[i] - shift);
    exponentials = sum();
    const float divisor = exponentials > 0.0f ? exponentials : 1.0f;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) v[i] /= divisor;
  }
  __device__ void sigmoid(const Row& x) {
#pragma unroll
    for (int i = 0; i < PerLane; ++i) v[i] = numerics::sigmoid(x.v[i]);
  }
  __device__ void put(float* shared, int lane) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PerLane; ++i) shared[lane + 32 * i] = v[i];
    __syncwarp();
  }
};

// Softmax over the chosen logits, one a lane; lanes that are not `there` get 0.
__device__ float softmax_of_chosen(float logit, bool there) {
  const float highest = warp_max(there ? logit : excluded<float>());
  const float shift = highest == excluded<float>() ? 0.0f : highest;
  const float e = there ? numerics::exp(logit - shift) : 0.0f;
  const float sum = warp_sum(e);
  return e / (sum > 0.0f ? sum : 1.0f);
}

// A warp's room in shared memory.
template <int PerLane>
struct WarpMemory {
  float row[32 * PerLane], score[32 * PerLane];
  std::uint8_t kept[32 * PerLane];
};

// Excludes the experts of all groups but the best ones.
template <int PerLane>
__device__ void limit_groups(const RouterConfig& config, std::int32_t num_experts, Row<PerLane>& selection, WarpMemory<PerLane>& memory,
                             int lane) {
  const int groups = config.num_groups, size = num_experts / groups;
  selection.put(memory.row, lane);
  for (int g = lane; g < groups; g += 32) {
    float highest = excluded<float>(), next = excluded<float>();
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const float value = memory.row[e];
      next = fmaxf(next, fminf(highest, value));
      highest = fmaxf(highest, value);
    }
    memory.score[g] = config.group_score_size == 2 && next != excluded<float>() ? highest + next : highest;
    memory.kept[g] = 0;
  }
  __syncwarp();
  for (int n = 0; n < config.top_groups; ++n) {
    int best = -1;
    for (int g = lane; g < groups; g += 32) {
      if (!memory.kept[g] && (best < 0 || memory.score[g] > memory.score[best])) best = g;
    }
    // The lowest group among the highest scores; groups that are excluded themselves come last.
    const std::int32_t key = best < 0 ? no_key - 1 : order_key(memory.score[best]);
    const std::int32_t highest = __reduce_max_sync(all_lanes, key);
    const unsigned winner = __reduce_min_sync(all_lanes, best >= 0 && key == highest ? unsigned(best) : ~0u);
    if (lane == 0) memory.kept[winner] = 1;
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < PerLane; ++i) {
    const int e = lane + 32 * i;
    if (e < num_experts && !memory.kept[e / size]) selection.v[i] = excluded<float>();
  }
}

// The k experts with the highest selection scores, ties to the lowest id, then the lowest unused ids of kept groups: lane
// j returns the j-th, lanes from k on -1.
template <int PerLane>
__device__ std::int32_t choose(const RouterConfig& config, std::int32_t num_experts, int k, const Row<PerLane>& selection,
                               const WarpMemory<PerLane>& memory, int lane) {
  std::int32_t keys[PerLane], mine = -1;
#pragma unroll
  for (int i = 0; i < PerLane; ++i) keys[i] = order_key(selection.v[i]);
  for (int j = 0; j < k; ++j) {
    std::int32_t key = no_key;
    unsigned id = ~0u;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
      if (keys[i] > key) key = keys[i], id = unsigned(lane + 32 * i);
    }
    const std::int32_t highest = __reduce_max_sync(all_lanes, key);
    if (highest == no_key) {
      const int size = num_experts / config.num_groups;
      for (int e = 0; e < num_experts && j < k; ++e) {
        if (limits_groups(config) && !memory.kept[e / size]) continue;
        if (__any_sync(all_lanes, mine == e)) continue;
        if (lane == j) mine = e;
        ++j;
      }
      break;
    }
    const unsigned taken = __reduce_min_sync(all_lanes, key == highest ? id : ~0u);
    if (lane == j) mine = std::int32_t(taken);
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
      if (unsigned(lane + 32 * i) == taken) keys[i] = no_key;
    }
  }
  return mine;
}

// Adds the scores of token t to sums (if wanted); returns logsumexp^2 (if wanted). id, weight: slot `lane` of the token.
template <int PerLane>
__device__ float route_row(const DeviceRouteJob& job, std::int64_t t, bool want_sums, bool want_z, Row<PerLane>& sums,
                           WarpMemory<PerLane>& memory, int lane, std::int32_t& id, float& weight) {
  const RouterConfig& config = job.config;
  const std::int32_t num_experts = job.num_experts;
  const int k = job.top_k;
  const bool sigmoid = config.kind == RouterKind::sigmoid, of_chosen = weights_are_softmax_of_chosen(config);
  const bool choose_by_logits = chooses_by_logits(config);
  Row<PerLane> x, s;
  x.load_logits(job.logits, t, num_experts, lane);
  float z = 0.0f;
  if (want_z || (!sigmoid && (want_sums || !choose_by_logits || !of_chosen))) {
    float highest, exponentials;
    s.softmax(x, highest, exponentials);
    const float lse = want_z ? log_sum_exp(highest, exponentials) : 0.0f;
    z = lse * lse;
  }
  if (sigmoid && (want_sums || !choose_by_logits)) s.sigmoid(x);
  if (want_sums) {
    const float divisor = sigmoid ? s.sum() + float(sigmoid_sum_floor) : 1.0f;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) sums.v[i] += s.v[i] / divisor;
  }
  Row<PerLane> selection;
#pragma unroll
  for (int i = 0; i < PerLane; ++i) {
    const int e = lane + 32 * i;
    selection.v[i] = choose_by_logits || x.v[i] == excluded<float>() ? x.v[i] : s.v[i];
    if (config.selection_bias && e < num_experts) selection.v[i] = finite_or_excluded(selection.v[i] + job.selection_bias[e]);
  }
  if (limits_groups(config)) limit_groups(config, num_experts, selection, memory, lane);
  id = choose(config, num_experts, k, selection, memory, lane);

  const bool there = lane < k;
  if (!sigmoid && !of_chosen) {
    s.put(memory.row, lane);
  } else {
    x.put(memory.row, lane);
  }
  weight = there ? memory.row[id] : 0.0f;
  if (of_chosen) {
    weight = softmax_of_chosen(weight, there);
  } else if (sigmoid) {
    weight = there ? numerics::sigmoid(weight) : 0.0f;
    if (config.renormalize) weight /= warp_sum(weight) + float(sigmoid_sum_floor);
  }
  weight *= float(config.scaling_factor);
  __syncwarp();
  return z;
}

__device__ std::int64_t valid_tokens(const DeviceRouteJob& job) {
  return job.num_valid_tokens ? clamped(*job.num_valid_tokens, 0, job.tokens) : job.tokens;
}
__host__ __device__ bool wants_sums(const DeviceRouteJob& job) {
  return job.logits.data && job.aux_loss && job.config.aux_loss != AuxLossKind::none && job.config.aux_loss_coefficient != 0.0;
}
__host__ __device__ bool wants_z(const DeviceRouteJob& job) {
  return job.logits.data && job.z_loss && job.config.z_loss_coefficient != 0.0;
}
Units units_of(const RouterConfig& config, std::int64_t tokens, std::int64_t num_sequences) {
  return Units::of(tokens, config.aux_loss == AuxLossKind::sequence ? num_sequences : 1);
}
// The same where a single launch routes them. Without losses nothing is summed over the tokens of a unit, so that these may
// be as few as keep all warps of its block at work.
Units units_at_once(const DeviceRouteJob& job) {
  if (wants_sums(job) || wants_z(job)) return units_of(job.config, job.tokens, job.num_sequences);
  constexpr std::int64_t least = 16;
  return Units::of(job.tokens, 1, (job.tokens + at_once_units * least - 1) / (at_once_units * least) * least);
}

// Kernels of one stream side by side: the next one may start when all blocks of this one have, and waits for all that this
// one does before it reads or writes anything of it.
__device__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Shared memory of a block that goes through a unit's rows.
template <int PerLane>
struct ChoiceMemory {
  WarpMemory<PerLane> warp[row_warps_of<PerLane>];
  std::int32_t counts[32 * PerLane], total_counts[32 * PerLane];
  double reduction[32];
};

// A block a unit: ids and weights of its tokens, and what it adds to counts and losses. Blocks beyond the units help to
// set to zero what has to be.
template <int PerLane>
__device__ void choose_for_unit(const DeviceRouteJob& job, const Scratch& scratch, const Units& units, ChoiceMemory<PerLane>& shared) {
  constexpr int row_warps = row_warps_of<PerLane>, row_threads = 32 * row_warps;
  auto& memory = shared.warp;
  auto &counts = shared.counts, &total_counts = shared.total_counts;
  auto& reduction = shared.reduction;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, k = job.top_k;
  const std::int32_t num_experts = job.num_experts;
  auto clear = [&] {
#pragma unroll 1
    for (const ZeroRange& range : job.zero) {
#pragma unroll 1
      for (std::int64_t i = blockIdx.x * std::int64_t(row_threads) + thread; i < range.count; i += std::int64_t(gridDim.x) * row_threads) {
        range.begin[i] = 0;
      }
    }
  };
  const std::int64_t u = blockIdx.x;
  if (u >= units.count) return clear();
  const std::int64_t begin = units.begin(u), end = units.end(u), present = clamped(valid_tokens(job), begin, end);
  if (job.gates) {
    for (std::int64_t n = begin * job.shared_experts + thread; n < end * job.shared_experts; n += row_threads) {
      job.gates[n] = job.gated >> (n % job.shared_experts) & 1 ? numerics::sigmoid(load(job.gate_logits, n)) : 1.0f;
    }
  }
  const bool want_sums = wants_sums(job), want_z = wants_z(job);
  const bool whole = want_sums && job.config.aux_loss == AuxLossKind::sequence && units.units_per_sequence == 1;
  for (int e = thread; e < 32 * PerLane; e += row_threads) counts[e] = total_counts[e] = 0;
  __syncthreads();
  Row<PerLane> sums;
#pragma unroll
  for (int i = 0; i < PerLane; ++i) sums.v[i] = 0.0f;
  // Sums of all warps into the first warp's row.
  auto join_sums = [&] {
    sums.put(memory[warp].row, lane);
    __syncthreads();
    for (int e = thread; e < 32 * PerLane; e += row_threads) {
      float s = memory[0].row[e];
      for (int w = 1; w < row_warps; ++w) s += memory[w].row[e];
      memory[0].row[e] = s;
    }
    __syncthreads();
  };
  float z = 0.0f;
  double aux = 0.0;
  const std::int64_t step = whole ? units.length : units.size;
  for (std::int64_t from = begin; from < present; from += step) {
    const std::int64_t to = from + step < present ? from + step : present;
    for (std::int64_t t = from + warp; t < to; t += row_warps) {
      const std::int64_t route = t * k + lane;
      std::int32_t id = -1;
      float weight = 0.0f;
      if (job.logits.data) {
        z += route_row(job, t, want_sums, want_z, sums, memory[warp], lane, id, weight);
      } else if (lane < k && job.caller_ids) {
        const std::int64_t given = job.caller_ids_64 ? static_cast<const std::int64_t*>(job.caller_ids)[route]
                                                     : static_cast<const std::int32_t*>(job.caller_ids)[route];
        id = given >= 0 && given < num_experts ? std::int32_t(given) : -1;
        weight = id < 0 ? 0.0f : job.caller_weights[route];
      } else if (lane < k) {
        id = 0;
        weight = 1.0f;
      }
      if (lane < k) {
        job.topk_ids[route] = id;
        job.topk_weights[route] = weight;
        if (job.chosen_ids) job.chosen_ids[route] = id;
        if (job.out_ids) job.out_ids[route] = id;
        if (job.out_weights) job.out_weights[route] = weight;
        if (id >= 0) atomicAdd(&counts[id], 1);
      }
    }
    if (whole) {
      __syncthreads();
      join_sums();
      double dot = 0.0;
      for (int e = thread; e < num_experts; e += row_threads) dot += double(counts[e]) * double(memory[0].row[e]);
      aux += aux_from_dot(job.config.aux_loss_coefficient, num_experts, block_sum(dot, reduction), k, to - from);
#pragma unroll
      for (int i = 0; i < PerLane; ++i) sums.v[i] = 0.0f;
      __syncthreads();
      for (int e = thread; e < num_experts; e += row_threads) {
        total_counts[e] += counts[e];
        counts[e] = 0;
      }
      __syncthreads();
    }
  }
  clear();  // here, where warps without a token do it while others are at theirs
  for (std::int64_t route = present * k + thread; route < end * k; route += row_threads) {
    job.topk_ids[route] = -1;
    job.topk_weights[route] = 0.0f;
    if (job.chosen_ids) job.chosen_ids[route] = -1;
    if (job.out_ids) job.out_ids[route] = -1;
    if (job.out_weights) job.out_weights[route] = 0.0f;
  }
  __syncthreads();
  if (want_sums && !whole) {
    join_sums();
    for (int e = thread; e < num_experts; e += row_threads) scratch.unit_sums[u * num_experts + e] = memory[0].row[e];
  }
  for (int e = thread; e < num_experts; e += row_threads) scratch.unit_counts[u * num_experts + e] = counts[e] + total_counts[e];
  // z is alike in all lanes of a warp.
  const double z_total = block_sum(lane == 0 ? double(z) : 0.0, reduction);
  if (thread == 0) {
    scratch.unit_z[u] = float(z_total);
    scratch.unit_aux[u] = aux;
  }
}

template <int PerLane>
__global__ void __launch_bounds__(32 * row_warps_of<PerLane>) choose_experts(const __grid_constant__ DeviceRouteJob job, const Scratch scratch,
                                                                             const __grid_constant__ Units units) {
  __shared__ ChoiceMemory<PerLane> memory;
  let_next_start();
  choose_for_unit(job, scratch, units, memory);
}

// Where a rank's routes go, sorted by expert: with one rank they are the routed rows themselves, otherwise the other ranks
// read them.
struct RouteLists {
  std::int64_t* begin;  // of expert e: begin[e * stride]
  std::int64_t stride;
  std::int32_t* routes;
  float* weights;       // of each, or null

  __device__ explicit RouteLists(const DeviceRouteJob& job) {
    if (job.tables.ranks == 1) {
      begin = job.layout.source_begin, stride = 2, routes = job.layout.row_route, weights = nullptr;
    } else {
      const RankTable table = table_of(job);
      begin = table.offsets, stride = 1, routes = table.routes, weights = table.weights;
    }
  }
  __device__ static RankTable table_of(const DeviceRouteJob& job) {
    return job.tables.of_rank[job.tables.rank].of_pass(*job.tables.last_pass + 1);
  }
  __device__ void put(const DeviceRouteJob& job, std::int64_t place, std::int32_t route) const {
    routes[place] = route;
    if (weights) weights[place] = job.topk_weights[route];
  }
};

// Shared memory of a block that works out the layout.
template <int Threads>
struct LayoutMemory {
  std::int32_t counts[Threads];
  double sums[Threads];
  double reduction[32];
  struct Before {  // of experts in front of another: what is kept of their routes, in rows and row blocks, and all of them
    std::int32_t rows, blocks, routes;
    __device__ Before operator+(Before b) const { return {rows + b.rows, blocks + b.blocks, routes + b.routes}; }
    __device__ Before operator-(Before b) const { return {rows - b.rows, blocks - b.blocks, routes - b.routes}; }
  } of_warp[32];
};

// By one block: counts, losses, the layout (of several ranks this rank's table instead), where each expert's routes begin
// and, behind those of the units before it, each unit's. `writes`: false in blocks that do it for themselves alone.
// unit_begin(u, e, routes of e in units before u, where the routes of e begin)
template <int Threads, class UnitBegin>
__device__ void lay_out_units(const DeviceRouteJob& job, const Scratch& scratch, const Units& units, std::int64_t capacity, bool writes,
                              LayoutMemory<Threads>& memory, UnitBegin&& unit_begin) {
  const int thread = threadIdx.x, lane = thread % 32;
  const std::int32_t num_experts = job.num_experts;
  const std::int64_t valid = valid_tokens(job);
  const bool sequence = job.config.aux_loss == AuxLossKind::sequence;
  const bool want_sums = wants_sums(job), of_batch = want_sums && !sequence;

  // Threads of one expert share its units, each a range of them. As many as a single launch has stay together: so the
  // order of their sums is the same with fewer threads.
  const int width = num_experts > 1 ? 1 << (32 - __clz(num_experts - 1)) : 1, log_width = __ffs(width) - 1;
  const int parts = Threads >> log_width, e = thread & (width - 1), part = thread >> log_width;
  const auto share = (static_cast<std::uint32_t>(units.count) + parts - 1) / static_cast<std::uint32_t>(parts);
  const std::int64_t length = share > at_once_units ? share : at_once_units;
  const std::int64_t first = part * length, last = first + length < units.count ? first + length : units.count;
  const std::int32_t* unit_counts = scratch.unit_counts;  // read past the first-level cache: others may have written them
  const float* unit_sums = scratch.unit_sums;             // in this launch
  std::int32_t count = 0;
  double sum = 0.0;
  // f(u, routes of e in unit u): some at a time, so that the reads do not wait for each other.
  auto for_each_unit = [&](auto&& f) {
    constexpr int together = 8;
#pragma unroll 1
    for (std::int64_t u = first; u < last; u += together) {
      std::int32_t counts[together];
#pragma unroll
      for (int i = 0; i < together; ++i) counts[i] = u + i < last ? __ldcg(unit_counts + (u + i) * num_experts + e) : 0;
#pragma unroll
      for (int i = 0; i < together; ++i) {
        if (u + i < last) f(u + i, counts[i]);
      }
    }
  };
  if (e < num_experts) {
    for_each_unit([&](std::int64_t, std::int32_t c) { count += c; });
    if (of_batch) {
#pragma unroll 8
      for (std::int64_t u = first; u < last; ++u) sum += double(__ldcg(unit_sums + u * num_experts + e));
    }
  }
  memory.counts[thread] = count;
  memory.sums[thread] = sum;
  __syncthreads();
  std::int64_t all = 0, kept = 0;  // routes of expert e
  double dot = 0.0;
  if (e < num_experts) {
    for (int p = 0; p < parts; ++p) all += memory.counts[p * width + e];
    kept = capacity > 0 && all > capacity ? capacity : all;
    if (part == 0) {
      double scores = 0.0;
      for (int p = 0; p < parts; ++p) scores += memory.sums[p * width + e];
      dot = double(all) * double(float(scores));
      if (writes) {
        job.counts[e] = all;
        if (job.out_counts) job.out_counts[e] = kept;
        if (job.score_sums) job.score_sums[e] = float(scores);
      }
      if (want_sums && sequence && units.units_per_sequence > 1) {
        // The loss is linear in each expert's share, so each thread adds up its own over the sequences.
        dot = 0.0;
        for (std::int64_t q = 0; q < job.num_sequences; ++q) {
          std::int64_t c = 0;
          double s = 0.0;
          for (std::int64_t u = q * units.units_per_sequence; u < (q + 1) * units.units_per_sequence; ++u) {
            c += __ldcg(unit_counts + u * num_experts + e);
            // A unit without tokens has left its sums at zero.
            s += double(__ldcg(unit_sums + u * num_experts + e));
          }
          dot += aux_from_dot(job.config.aux_loss_coefficient, num_experts, double(c) * s, job.top_k, valid_tokens_of(q, units.length, valid));
        }
      }
    }
  }
  if (writes && job.aux_loss) {
    double aux = 0.0;
    if (of_batch) {
      aux = aux_from_dot(job.config.aux_loss_coefficient, num_experts, block_sum(dot, memory.reduction), job.top_k, valid);
    } else if (want_sums && units.units_per_sequence > 1) {
      aux = block_sum(dot, memory.reduction);
    } else if (want_sums) {
      double mine = 0.0;
      for (std::int64_t u = thread; u < units.count; u += Threads) mine += __ldcg(scratch.unit_aux + u);
      aux = block_sum(mine, memory.reduction);
    }
    if (thread == 0) *job.aux_loss = float(aux);
  }
  if (writes && job.z_loss) {
    double mine = 0.0;
    if (wants_z(job)) {
      for (std::int64_t u = thread; u < units.count; u += Threads) mine += double(__ldcg(scratch.unit_z + u));
    }
    const double total = block_sum(mine, memory.reduction);
    if (thread == 0) *job.z_loss = valid > 0 ? float(job.config.z_loss_coefficient * (total / double(valid))) : 0.0f;
  }

  // What the experts before e take up: those of its warp, then the warps before. Each part does it for itself, so that
  // nobody has to be told.
  using Before = typename LayoutMemory<Threads>::Before;
  const schedule::Extent extent = schedule::Extent::of(job.sizes, kept);
  const Before own{static_cast<std::int32_t>(extent.rows), static_cast<std::int32_t>(extent.blocks), static_cast<std::int32_t>(all)};
  Before until = own;  // the warp's experts up to e
#pragma unroll 1
  for (int distance = 1; distance < 32 && distance < width; distance *= 2) {
    const Before other{__shfl_up_sync(all_lanes, until.rows, distance), __shfl_up_sync(all_lanes, until.blocks, distance),
                       __shfl_up_sync(all_lanes, until.routes, distance)};
    if (e % 32 >= distance) until = until + other;
  }
  if (lane == 31) memory.of_warp[thread / 32] = until;
  __syncthreads();
  Before before = until - own;
  if (width > 32) {
    for (int w = part * (width / 32); w < thread / 32; ++w) before = before + memory.of_warp[w];
  }
  if (e >= num_experts) return;
  // Where capacity drops some, they are listed all before that.
  const std::int64_t begin = capacity > 0 ? before.routes : before.rows;
  std::int32_t in_units_before = 0;
  for (int p = 0; p < part; ++p) in_units_before += memory.counts[p * width + e];
  for_each_unit([&](std::int64_t u, std::int32_t c) {
    unit_begin(u, e, in_units_before, begin);
    in_units_before += c;
  });
  if (!writes || part > 0) return;
  if (capacity > 0) scratch.list_begin[e] = before.routes;
  const bool last_expert = e == num_experts - 1;
  if (job.tables.ranks > 1) {
    const RankTable table = RouteLists::table_of(job);
    table.counts[e] = all;
    table.offsets[e] = before.rows;
    if (last_expert) {
      table.offsets[num_experts] = before.rows + kept;
      table.header[RankTable::tokens] = job.tokens;
      table.header[RankTable::valid_tokens] = valid;
    }
  } else {
    schedule::fill_layout_of_expert(job.sizes, job.layout, num_experts, e, {before.rows, before.blocks}, kept);
    if (last_expert) job.layout.tokens_of_rank[0] = job.tokens;
  }
  if (last_expert) *job.layout.valid_tokens = job.counts[num_experts] = valid;
}

// One block.
constexpr int layout_threads = 1024;
__global__ void __launch_bounds__(layout_threads) lay_out(const __grid_constant__ DeviceRouteJob job, const Scratch scratch,
                                                          const __grid_constant__ Units units, const std::int64_t capacity) {
  __shared__ LayoutMemory<layout_threads> memory;
  let_next_start();
  await_previous();
  const std::int32_t num_experts = job.num_experts;
  lay_out_units(job, scratch, units, capacity, true, memory,
                [&](std::int64_t u, std::int32_t e, std::int32_t before, std::int64_t) { scratch.unit_begin[u * num_experts + e] = before; });
}

// By a block of Warps warps: a unit's routes, in order. begin[e]: where the next one of expert e goes, in shared memory.
template <int Warps>
__device__ void place_unit(const DeviceRouteJob& job, const Scratch& scratch, const Units& units, std::int64_t u, bool capacity,
                           std::int32_t* begin, std::int32_t* places) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const std::int32_t num_experts = job.num_experts;
  const std::int64_t last = units.end(u) * job.top_k;
  const RouteLists lists(job);
  std::int32_t* mine = places + warp * num_experts;  // routes of each expert among the warp's 32, then where these go
#pragma unroll 1
  for (std::int64_t first = units.begin(u) * job.top_k; first < last; first += 32 * Warps) {
    const std::int64_t route = first + thread;
    const std::int32_t id = route < last ? job.topk_ids[route] : -1;
#pragma unroll 1
    for (int e = lane; e < num_experts; e += 32) mine[e] = 0;
    __syncwarp();
    const unsigned same = __match_any_sync(all_lanes, id);
    const int before = __popc(same & ((1u << lane) - 1));
    if (id >= 0 && before == 0) mine[id] = __popc(same);
    __syncthreads();
#pragma unroll 1
    for (int e = thread; e < num_experts; e += 32 * Warps) {
      std::int32_t counts[Warps], place = begin[e];
#pragma unroll
      for (int w = 0; w < Warps; ++w) counts[w] = places[w * num_experts + e];
#pragma unroll
      for (int w = 0; w < Warps; ++w) {
        places[w * num_experts + e] = place;
        place += counts[w];
      }
      begin[e] = place;
    }
    __syncthreads();
    if (id >= 0) {
      const std::int32_t place = mine[id] + before;
      if (capacity) {
        scratch.list[place] = std::int32_t(route);
      } else {
        lists.put(job, place, std::int32_t(route));
      }
    }
    __syncwarp();
  }
}

// A block a unit.
constexpr int place_warps = 8;
__global__ void __launch_bounds__(32 * place_warps) place_routes(const __grid_constant__ DeviceRouteJob job, const Scratch scratch,
                                                                const __grid_constant__ Units units, const bool capacity) {
  __shared__ std::int32_t places[place_warps * max_experts], begin[max_experts];
  let_next_start();
  await_previous();
  const std::int64_t u = blockIdx.x;
  const RouteLists lists(job);
  for (int e = threadIdx.x; e < job.num_experts; e += 32 * place_warps) {
    begin[e] = scratch.unit_begin[u * job.num_experts + e] +
               static_cast<std::int32_t>(capacity ? scratch.list_begin[e] : lists.begin[e * lists.stride]);
  }
  __syncthreads();
  place_unit<place_warps>(job, scratch, units, u, capacity, begin, places);
}

// All of it for few tokens: a cluster of blocks, a unit each. All of them work out the layout, the first writes it.
template <int PerLane>
__global__ void __launch_bounds__(32 * row_warps_of<PerLane>) route_at_once(const __grid_constant__ DeviceRouteJob job, const Scratch scratch,
                                                                            const __grid_constant__ Units units, const std::int64_t capacity) {
  constexpr int warps = row_warps_of<PerLane>, threads = 32 * warps;
  __shared__ union {
    ChoiceMemory<PerLane> choice;
    struct {
      LayoutMemory<threads> layout;
      std::int32_t begin[threads], places[warps * 32 * PerLane];
    } order;
  } memory;
  static_assert(threads >= 32 * PerLane);
  let_next_start();
  const std::int64_t mine = blockIdx.x;
  choose_for_unit<PerLane>(job, scratch, units, memory.choice);
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  lay_out_units(job, scratch, units, capacity, mine == 0, memory.order.layout,
                [&](std::int64_t u, std::int32_t e, std::int32_t before, std::int64_t begin) {
                  if (u == mine) memory.order.begin[e] = static_cast<std::int32_t>(begin + before);
                });
  __syncthreads();
  if (mine < units.count) place_unit<warps>(job, scratch, units, mine, capacity > 0, memory.order.begin, memory.order.places);
}

// A block an expert: keeps `capacity` of its routes, in order, and drops the others.
constexpr int capacity_threads = 256;
__global__ void __launch_bounds__(capacity_threads) drop_routes(const __grid_constant__ DeviceRouteJob job, const Scratch scratch,
                                                                const std::int64_t capacity) {
  __shared__ std::int32_t warp_counts[2][capacity_threads / 32];
  let_next_start();
  await_previous();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const std::int32_t e = blockIdx.x;
  const std::int32_t* routes = scratch.list + scratch.list_begin[e];
  const std::int64_t count = job.counts[e];
  // Weights in order as integers; a NaN is below every number.
  auto key_of = [&](std::int64_t i) -> std::uint32_t {
    const float w = job.topk_weights[routes[i]];
    return w != w ? 0u : std::uint32_t(order_key(w)) ^ 0x80000000u;
  };
  std::uint32_t threshold = 0;     // the lowest key that is kept
  std::int64_t ties = capacity;    // how many that have it are kept
  const bool all = count <= capacity, by_score = !all && job.config.drop_policy == DropPolicy::by_score;
  if (by_score) {
    auto count_from = [&](std::uint32_t key, bool above) {
      std::int64_t total = 0;
      for (std::int64_t from = 0; from < count; from += capacity_threads) {
        const std::int64_t i = from + thread;
        total += __syncthreads_count(i < count && (above ? key_of(i) > key : key_of(i) >= key));
      }
      return total;
    };
    for (int bit = 31; bit >= 0; --bit) {
      const std::uint32_t next = threshold | 1u << bit;
      if (count_from(next, false) >= capacity) threshold = next;
    }
    ties = capacity - count_from(threshold, true);
  }
  const RouteLists lists(job);
  std::int64_t begin = lists.begin[e * lists.stride];
  for (std::int64_t from = 0; from < count; from += capacity_threads) {
    const std::int64_t i = from + thread;
    const std::uint32_t key = i < count && by_score ? key_of(i) : 0u;
    // Places among those that have the threshold, then among those that are kept.
    const bool tie = i < count && key == threshold;
    const unsigned tie_lanes = __ballot_sync(all_lanes, tie);
    if (lane == 0) warp_counts[0][warp] = __popc(tie_lanes);
    __syncthreads();
    std::int64_t tie_place = __popc(tie_lanes & ((1u << lane) - 1)), tie_total = 0;
    for (int w = 0; w < capacity_threads / 32; ++w) {
      tie_place += w < warp ? warp_counts[0][w] : 0;
      tie_total += warp_counts[0][w];
    }
    const bool keep = i < count && (all || key > threshold || (tie && tie_place < ties));
    const unsigned kept_lanes = __ballot_sync(all_lanes, keep);
    if (lane == 0) warp_counts[1][warp] = __popc(kept_lanes);
    __syncthreads();
    std::int64_t place = __popc(kept_lanes & ((1u << lane) - 1)), kept_total = 0;
    for (int w = 0; w < capacity_threads / 32; ++w) {
      place += w < warp ? warp_counts[1][w] : 0;
      kept_total += warp_counts[1][w];
    }
    if (i < count) {
      const std::int32_t route = routes[i];
      if (keep) {
        lists.put(job, begin + place, route);
      } else {
        job.topk_ids[route] = -1;
        job.topk_weights[route] = 0.0f;
        if (job.out_ids) job.out_ids[route] = -1;
        if (job.out_weights) job.out_weights[route] = 0.0f;
      }
    }
    begin += kept_total;
    ties = ties > tie_total ? ties - tie_total : 0;
    __syncthreads();
  }
}

// --- several ranks ---------------------------------------------------------------------------------------------------

// One block.
__global__ void __launch_bounds__(layout_threads) global_aux_loss(const __grid_constant__ DeviceRouteJob job) {
  __shared__ double reduction[32];
  const RankTables& tables = job.tables;
  if (*tables.stopped) return;
  const unsigned long long pass = *tables.last_pass;
  const int e = threadIdx.x;
  double dot = 0.0;
  if (e < job.num_experts) {
    std::int64_t all = 0;
    for (int r = 0; r < tables.ranks; ++r) all += tables.of_rank[r].of_pass(pass).counts[e];
    job.counts[e] = all;
    dot = double(all) * double(job.score_sums[e]);
  }
  const double sum = block_sum(dot, reduction);
  if (e != 0) return;
  std::int64_t tokens = 0;
  for (int r = 0; r < tables.ranks; ++r) tokens += tables.of_rank[r].of_pass(pass).header[RankTable::valid_tokens];
  job.counts[job.num_experts] = tokens;
  if (job.aux_loss) *job.aux_loss = float(aux_from_dot(job.config.aux_loss_coefficient, job.num_experts, sum, job.top_k, tokens));
}

// --- backward --------------------------------------------------------------------------------------------------------

// slopes: of the aux loss by score, [E] padded, or null.
template <int PerLane>
__device__ void gradient_row(const DeviceRouteGradientJob& job, std::int64_t t, float d_weight, const float* slopes, bool want_z, float z_factor,
                             float* memory, int lane) {
  const RouterConfig& config = job.config;
  const std::int32_t num_experts = job.num_experts;
  const int k = job.top_k;
  const bool sigmoid = config.kind == RouterKind::sigmoid, of_chosen = weights_are_softmax_of_chosen(config), there = lane < k;
  const std::int32_t id = there ? job.chosen_ids[t * k + lane] : 0;
  const float g = there ? d_weight * float(config.scaling_factor) : 0.0f;
  Row<PerLane> x, s, d;
  x.load_logits(job.logits, t, num_experts, lane);
  x.put(memory, lane);
  const float logit = memory[id];
  auto slope = [&](int i) { return slopes[lane + 32 * i]; };
  float addend = 0.0f;  // to the gradient of expert `id`

  const bool scores_are_softmax = !sigmoid && (slopes || !of_chosen);
  if (scores_are_softmax || want_z) {
    float highest, exponentials;
    s.softmax(x, highest, exponentials);
    float common = want_z ? z_factor * log_sum_exp(highest, exponentials) : 0.0f;
    if (scores_are_softmax && slopes) {
#pragma unroll
      for (int i = 0; i < PerLane; ++i) d.v[i] = slope(i) * s.v[i];
      common -= d.sum();
    }
    if (scores_are_softmax && !of_chosen) {
      s.put(memory, lane);
      addend = there ? memory[id] * g : 0.0f;
      common -= warp_sum(addend);
    }
#pragma unroll
    for (int i = 0; i < PerLane; ++i) d.v[i] = s.v[i] * (scores_are_softmax && slopes ? slope(i) + common : common);
  } else {
#pragma unroll
    for (int i = 0; i < PerLane; ++i) d.v[i] = 0.0f;
  }
  if (of_chosen) {
    const float q = softmax_of_chosen(logit, there);
    addend = q * (g - warp_sum(q * g));
  }
  if (sigmoid && slopes) {
    s.sigmoid(x);
    const float divisor = s.sum() + float(sigmoid_sum_floor);
    Row<PerLane> products;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) products.v[i] = slope(i) * s.v[i];
    const float mean = products.sum() / divisor;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) d.v[i] += (slope(i) - mean) / divisor * numerics::sigmoid_slope(x.v[i]);
  }
  if (sigmoid) {
    float divisor = 1.0f, mean = 0.0f;
    if (config.renormalize) {
      const float w = there ? numerics::sigmoid(logit) : 0.0f;
      divisor = warp_sum(w) + float(sigmoid_sum_floor);
      mean = warp_sum(g * (w / divisor));
    }
    addend = (g - mean) / divisor * numerics::sigmoid_slope(logit);
  }
  d.put(memory, lane);
  if (there) memory[id] += addend;  // ids of a row are distinct
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PerLane; ++i) {
    const int e = lane + 32 * i;
    if (e >= num_experts) continue;
    const float value = x.v[i] == excluded<float>() ? 0.0f : memory[e];
    const std::int64_t at = t * job.d_logits_stride + e;
    if (job.logits.is_bfloat16) {
      static_cast<bfloat16*>(job.d_logits)[at] = numerics::to_bfloat16(value);
    } else {
      static_cast<float*>(job.d_logits)[at] = value;
    }
  }
  __syncwarp();
}

template <int PerLane>
__global__ void __launch_bounds__(32 * row_warps_of<PerLane>) route_gradient(const __grid_constant__ DeviceRouteGradientJob job,
                                                                             const __grid_constant__ Units units) {
  constexpr int row_warps = row_warps_of<PerLane>, row_threads = 32 * row_warps;
  __shared__ float rows[row_warps][32 * PerLane], slopes[32 * PerLane];
  __shared__ std::int32_t counts[32 * PerLane];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, k = job.top_k;
  const RouterConfig& config = job.config;
  const std::int32_t num_experts = job.num_experts;
  const std::int64_t u = blockIdx.x, begin = units.begin(u), end = units.end(u), valid = *job.valid_tokens;
  const std::int64_t present = clamped(valid, begin, end);
  if (job.d_gate_logits) {
    for (std::int64_t n = begin * job.shared_experts + thread; n < end * job.shared_experts; n += row_threads) {
      // An absent token's logits may be anything, NaN too.
      const bool takes = n / job.shared_experts < present && (job.gated >> (n % job.shared_experts) & 1) && job.d_gates;
      const float value = takes ? job.d_gates[n] * numerics::sigmoid_slope(load(job.gate_logits, n)) : 0.0f;
      if (job.d_gate_logits_bfloat16) {
        static_cast<bfloat16*>(job.d_gate_logits)[n] = numerics::to_bfloat16(value);
      } else {
        static_cast<float*>(job.d_gate_logits)[n] = value;
      }
    }
  }
  const float d_aux = job.d_aux_loss ? *job.d_aux_loss : 0.0f, d_z = job.d_z_loss ? *job.d_z_loss : 0.0f;
  const bool aux = job.d_logits && config.aux_loss != AuxLossKind::none && config.aux_loss_coefficient != 0.0 && d_aux != 0.0f;
  const bool z = config.z_loss_coefficient != 0.0 && d_z != 0.0f;
  const float z_factor = float(z_slope(d_z, config.z_loss_coefficient, valid));
  const bool sequence = config.aux_loss == AuxLossKind::sequence, whole = sequence && units.units_per_sequence == 1;
  // Slopes from the counts of one sequence, whose tokens are [from, to), or from those of the batch.
  auto make_slopes = [&](std::int64_t from, std::int64_t to) {
    __syncthreads();
    if (sequence) {
      for (int e = thread; e < num_experts; e += row_threads) counts[e] = 0;
      __syncthreads();
      for (std::int64_t i = from * k + thread; i < to * k; i += row_threads) {
        const std::int32_t id = job.chosen_ids[i];
        if (id >= 0) atomicAdd(&counts[id], 1);
      }
      __syncthreads();
    }
    for (int e = thread; e < 32 * PerLane; e += row_threads) {
      slopes[e] = e < num_experts ? float(aux_slope(d_aux, config.aux_loss_coefficient, num_experts, sequence ? counts[e] : job.counts[e], k,
                                                    sequence ? to - from : job.counts[num_experts]))
                                  : 0.0f;
    }
    __syncthreads();
  };
  if (aux && !whole) {
    const std::int64_t q = units.units_per_sequence > 0 ? u / units.units_per_sequence : 0, from = q * units.length;
    make_slopes(from, from + valid_tokens_of(q, units.length, valid));
  }
  const std::int64_t step = whole ? units.length : unit_tokens;
  for (std::int64_t from = begin; from < present; from += step) {
    const std::int64_t to = from + step < present ? from + step : present;
    if (aux && whole) make_slopes(from, to);
    for (std::int64_t t = from + warp; t < to; t += row_warps) {
      const std::int64_t route = t * k + lane;
      float d_weight = 0.0f;
      if (lane < k) {
        if (job.d_pass_weights) d_weight = job.d_pass_weights[route];
        const bool takes = job.topk_ids[route] >= 0;
        if (job.d_given_weights && takes) d_weight += job.d_given_weights[route];
        if (job.d_topk_weights) job.d_topk_weights[route] = d_weight;
        if (!takes) d_weight = 0.0f;
      }
      if (job.d_logits) gradient_row<PerLane>(job, t, d_weight, aux ? slopes : nullptr, z, z_factor, rows[warp], lane);
    }
  }
  for (std::int64_t t = present + warp; t < end; t += row_warps) {
    if (lane < k && job.d_topk_weights) job.d_topk_weights[t * k + lane] = 0.0f;
    if (!job.d_logits) continue;
    for (int e = lane; e < num_experts; e += 32) {
      const std::int64_t at = t * job.d_logits_stride + e;
      if (job.logits.is_bfloat16) {
        static_cast<bfloat16*>(job.d_logits)[at] = bfloat16{0};
      } else {
        static_cast<float*>(job.d_logits)[at] = 0.0f;
      }
    }
  }
}

void check_launch(const char* what) { check_cuda(cudaGetLastError(), what); }

cudaLaunchAttribute cluster_of(unsigned blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  return attribute;
}
// The kernel may start before the one in front of it ends; it waits for that one itself (await_previous).
cudaLaunchAttribute beside_previous() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}
template <class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), unsigned blocks, int threads, cudaStream_t stream,
            cudaLaunchAttribute attribute, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

// f.operator()<experts of a lane>()
template <class F>
void with_row(std::int32_t num_experts, F&& f) {
  if (num_experts <= 32) return f.template operator()<1>();
  if (num_experts <= 128) return f.template operator()<4>();
  if (num_experts <= 256) return f.template operator()<8>();
  return f.template operator()<32>();
}

}  // namespace

std::size_t device_router_scratch_bytes(const RouterConfig& config, std::int32_t num_experts, std::int32_t top_k, std::int64_t tokens) {
  return Scratch::over(nullptr, config, num_experts, top_k, tokens).bytes;
}

void prepare_device_router(std::int32_t num_experts) {
  auto load = [](auto* kernel) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "kernels of the router");
  };
  with_row(num_experts, [&]<int PerLane>() {
    load(choose_experts<PerLane>), load(route_gradient<PerLane>);
    if constexpr (32 * PerLane <= at_once_experts) load(route_at_once<PerLane>);
  });
  load(lay_out), load(place_routes), load(drop_routes), load(global_aux_loss);
}

bool wants_global_aux_loss(const DeviceRouteJob& job) {
  return job.tables.ranks > 1 && job.logits.data && job.config.aux_loss == AuxLossKind::global;
}

void device_global_aux_loss(const DeviceRouteJob& job, void* stream) {
  global_aux_loss<<<1, layout_threads, 0, static_cast<cudaStream_t>(stream)>>>(job);
  check_launch("launch of the global aux loss");
}

bool routes_at_once(const DeviceRouteJob& job) {
  return !job.stepwise && job.num_experts <= at_once_experts && job.tokens <= at_once_units * unit_tokens &&
         units_at_once(job).count <= at_once_units;
}

void device_route(const DeviceRouteJob& job, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const Scratch scratch = Scratch::over(job.scratch, job.config, job.num_experts, job.top_k, job.tokens);
  const bool drops = job.config.capacity_factor > 0 && job.tokens > 0;
  const std::int64_t capacity = drops ? expert_capacity(job.config.capacity_factor, job.tokens, job.top_k, job.num_experts) : 0;
  if (routes_at_once(job)) {
    const Units units = units_at_once(job);
    unsigned blocks = 1;
    while (blocks < units.count) blocks *= 2;
    with_row(job.num_experts, [&]<int PerLane>() {
      if constexpr (32 * PerLane <= at_once_experts) {
        launch("launch of the router", route_at_once<PerLane>, blocks, 32 * row_warps_of<PerLane>, s, cluster_of(blocks), job, scratch, units, capacity);
      }
    });
  } else {
    const Units units = units_of(job.config, job.tokens, job.num_sequences);
    const auto blocks = static_cast<unsigned>(units.count);
    with_row(job.num_experts, [&]<int PerLane>() {
      choose_experts<PerLane><<<blocks > 0 ? blocks : 1, 32 * row_warps_of<PerLane>, 0, s>>>(job, scratch, units);
    });
    check_launch("launch of the router");
    launch("launch of the layout", lay_out, 1, layout_threads, s, beside_previous(), job, scratch, units, capacity);
    if (blocks == 0) return;
    launch("launch of the token order", place_routes, blocks, 32 * place_warps, s, beside_previous(), job, scratch, units, drops);
  }
  if (!drops) return;
  launch("launch of the capacity", drop_routes, unsigned(job.num_experts), capacity_threads, s, beside_previous(), job, scratch, capacity);
}

void device_route_gradient(const DeviceRouteGradientJob& job, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const Units units = units_of(job.config, job.tokens, job.num_sequences);
  if (units.count == 0 || (!job.d_logits && !job.d_topk_weights && !job.d_gate_logits)) return;
  const auto blocks = static_cast<unsigned>(units.count);
  with_row(job.num_experts, [&]<int PerLane>() { route_gradient<PerLane><<<blocks, 32 * row_warps_of<PerLane>, 0, s>>>(job, units); });
  check_launch("launch of the router's gradient");
}

}  // namespace moelith::routing
