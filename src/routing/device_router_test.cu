// The router's kernels: a single launch, for few tokens, leaves the same bits as a launch for each step.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "routing/device_router.hpp"
#include "schedule/extents.hpp"

namespace moelith::routing {
namespace {

using Random = std::mt19937_64;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Managed memory, full of what no test expects. What was written is compared byte by byte.
class Buffers {
 public:
  ~Buffers() {
    for (const auto& part : parts_) cudaFree(part.data);
  }
  template <class T>
  T* get(std::int64_t count, bool result = true) {
    void* data = nullptr;
    const std::size_t bytes = std::max<std::size_t>(std::size_t(count) * sizeof(T), 1);
    check(cudaMallocManaged(&data, bytes));
    std::memset(data, 0xfb, bytes);
    parts_.push_back({data, bytes, result});
    return static_cast<T*>(data);
  }
  std::vector<std::vector<char>> results() const {
    std::vector<std::vector<char>> all;
    for (const auto& part : parts_) {
      if (part.result) all.emplace_back(static_cast<char*>(part.data), static_cast<char*>(part.data) + part.bytes);
    }
    return all;
  }

 private:
  struct Part {
    void* data;
    std::size_t bytes;
    bool result;
  };
  std::vector<Part> parts_;
};

struct Case {
  RouterConfig config;
  std::int32_t experts = 8, top_k = 2;
  std::int64_t tokens = 1, sequences = 1;
  std::int32_t valid = -1;  // -1: all tokens
  int source = 0;           // of the routes: 0 logits, 1 the caller's, 2 none
  bool losses = false;
  std::uint64_t seed = 0;
};

struct Routed {
  std::vector<std::vector<char>> results;
  bool at_once = false;
  std::int64_t rows = 0;
  float aux_loss = 0;
};

Routed route(const Case& c, bool stepwise) {
  Buffers buffers;
  Random random(c.seed);
  std::normal_distribution<float> normal;
  DeviceRouteJob job;
  job.config = c.config;
  job.num_experts = c.experts, job.top_k = c.top_k;
  job.tokens = c.tokens, job.num_sequences = c.sequences;
  const std::int64_t routes = c.tokens * c.top_k;
  if (c.valid >= 0) {
    auto* valid = buffers.get<std::int32_t>(1);
    *valid = c.valid;
    job.num_valid_tokens = valid;
  }
  if (c.source == 0) {
    auto* logits = buffers.get<float>(c.tokens * c.experts);
    for (std::int64_t i = 0; i < c.tokens * c.experts; ++i) logits[i] = std::round(normal(random) * 8) / 4;  // many are equal
    job.logits = {logits, false, c.experts};
    if (c.config.selection_bias) {
      auto* bias = buffers.get<float>(c.experts);
      for (std::int32_t e = 0; e < c.experts; ++e) bias[e] = normal(random) * 0.2f;
      job.selection_bias = bias;
    }
  } else if (c.source == 1) {
    auto* ids = buffers.get<std::int32_t>(routes);
    auto* weights = buffers.get<float>(routes);
    for (std::int64_t i = 0; i < routes; ++i) ids[i] = static_cast<std::int32_t>(random() % (c.experts + 1)) - 1, weights[i] = normal(random);
    job.caller_ids = ids, job.caller_weights = weights;
  }
  job.topk_ids = buffers.get<std::int32_t>(routes);
  job.topk_weights = buffers.get<float>(routes);
  if (c.config.capacity_factor > 0) job.chosen_ids = buffers.get<std::int32_t>(routes);
  job.counts = buffers.get<std::int64_t>(c.experts + 1);
  job.sizes.local_experts = c.experts, job.sizes.top_k = c.top_k, job.sizes.tokens = c.tokens;
  job.sizes.tile.row_block = 16;
  job.layout = schedule::Layout::at(buffers.get<std::int64_t>(schedule::Layout::header_length(1, c.experts)), buffers.get<std::int32_t>(routes), 1,
                                    c.experts);
  job.out_ids = buffers.get<std::int32_t>(routes);
  job.out_weights = buffers.get<float>(routes);
  job.out_counts = buffers.get<std::int64_t>(c.experts);
  if (c.losses) job.aux_loss = buffers.get<float>(1), job.z_loss = buffers.get<float>(1);
  job.zero[0] = {buffers.get<unsigned long long>(1000), 1000};
  job.zero[5] = {buffers.get<unsigned long long>(3), 3};
  job.scratch = buffers.get<std::byte>(static_cast<std::int64_t>(device_router_scratch_bytes(c.config, c.experts, c.top_k, c.tokens)), false);
  job.stepwise = stepwise;
  device_route(job, nullptr);
  check(cudaDeviceSynchronize());
  Routed routed{buffers.results(), routes_at_once(job), job.layout.source_begin[2 * c.experts - 1], c.losses ? *job.aux_loss : 0.0f};

  // The rows are the routes that are left, by expert and in order.
  std::vector<std::int32_t> expected;
  for (std::int32_t e = 0; e < c.experts; ++e) {
    EXPECT_EQ(job.layout.source_begin[2 * e], std::int64_t(expected.size())) << "expert " << e;
    for (std::int64_t r = 0; r < routes; ++r) {
      if (job.topk_ids[r] == e) expected.push_back(static_cast<std::int32_t>(r));
    }
    EXPECT_EQ(job.out_counts[e], std::int64_t(expected.size()) - job.layout.source_begin[2 * e]) << "expert " << e;
  }
  EXPECT_EQ(routed.rows, std::int64_t(expected.size()));
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), job.layout.row_route));
  EXPECT_TRUE(std::all_of(job.zero[0].begin, job.zero[0].begin + 1000, [](auto v) { return v == 0; }));
  return routed;
}

// Whether the case is one for a single launch; that it leaves the same bits.
bool same_bits(const Case& c, const std::string& what) {
  const Routed steps = route(c, true), once = route(c, false);
  EXPECT_FALSE(steps.at_once) << what;
  EXPECT_EQ(steps.results.size(), once.results.size()) << what;
  for (std::size_t i = 0; i < steps.results.size(); ++i) EXPECT_EQ(steps.results[i], once.results[i]) << what << ": result " << i;
  if (c.losses && c.config.aux_loss != AuxLossKind::none && c.source == 0 && once.rows > 0) EXPECT_GT(once.aux_loss, 0.0f) << what;
  return once.at_once;
}

RouterConfig random_router(Random& random, std::int32_t experts) {
  auto one_in = [&](int n) { return random() % n == 0; };
  RouterConfig r;
  r.kind = std::vector{RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}[random() % 3];
  r.renormalize = one_in(2);
  r.scaling_factor = one_in(3) ? 2.5 : 1.0;
  if (r.kind == RouterKind::sigmoid) r.selection_bias = one_in(2);
  if (r.kind != RouterKind::topk_softmax && experts % 4 == 0 && experts >= 16 && one_in(3)) {
    r.num_groups = 4, r.top_groups = 2, r.group_score_size = one_in(2) ? 2 : 1;
  }
  return r;
}

TEST(DeviceRouter, OneLaunchLeavesTheBitsOfSeveral) {
  Random random(5);
  int at_once = 0;
  for (std::int64_t tokens = 1; tokens <= 200; ++tokens) {
    Case c;
    c.tokens = tokens, c.seed = random();
    c.experts = std::vector{8, 16, 100, 128, 256}[random() % 5];
    c.top_k = std::vector{1, 2, 4, 8}[random() % 4];
    c.config = random_router(random, c.experts);
    c.source = random() % 5 == 0 ? 1 : 0;
    if (random() % 3 == 0) c.valid = static_cast<std::int32_t>(random() % (tokens + 1));
    if (random() % 4 == 0) {
      c.config.capacity_factor = 0.7;
      c.config.drop_policy = random() % 2 ? DropPolicy::by_score : DropPolicy::by_position;
    }
    at_once += same_bits(c, std::to_string(tokens) + " tokens");
  }
  EXPECT_EQ(at_once, 200);
}

TEST(DeviceRouter, OneLaunchLeavesTheLossesOfSeveral) {
  Random random(6);
  int at_once = 0, all = 0;
  for (const AuxLossKind kind : {AuxLossKind::none, AuxLossKind::batch, AuxLossKind::sequence, AuxLossKind::global}) {
    for (const std::int64_t tokens : {1, 2, 15, 16, 17, 63, 64, 65, 120, 128, 200, 384, 512}) {
      for (const std::int64_t sequences : {1, 3, 8}) {
        if (tokens % sequences != 0) continue;
        Case c;
        c.tokens = tokens, c.sequences = sequences, c.seed = random();
        c.experts = std::vector{16, 128, 256}[random() % 3], c.top_k = 4;
        c.config = random_router(random, c.experts);
        c.config.aux_loss = kind, c.config.aux_loss_coefficient = 0.01, c.config.z_loss_coefficient = 0.001;
        c.losses = true;
        if (random() % 3 == 0) c.valid = static_cast<std::int32_t>(random() % (tokens + 1));
        at_once += same_bits(c, std::string("losses of ") + std::to_string(tokens) + " tokens in " + std::to_string(sequences) + " sequences");
        ++all;
      }
    }
  }
  EXPECT_GT(at_once, all * 3 / 4);
}

// The sizes at which something changes, and those that take a launch for each step.
TEST(DeviceRouter, AnySize) {
  for (const std::int32_t experts : {1, 2, 31, 32, 33, 64, 127, 129, 255, 257, 512, 1024}) {
    for (const std::int64_t tokens : {0, 1, 129, 257, 511, 512, 513, 3000}) {
      Case c;
      c.experts = experts, c.tokens = tokens, c.seed = std::uint64_t(experts) * 7919 + std::uint64_t(tokens);
      c.top_k = std::min(experts, 32);
      c.source = experts == 1 ? 2 : 0;
      EXPECT_EQ(same_bits(c, std::to_string(experts) + " experts, " + std::to_string(tokens) + " tokens"), experts <= 256 && tokens <= 512);
    }
  }
}

}  // namespace
}  // namespace moelith::routing
