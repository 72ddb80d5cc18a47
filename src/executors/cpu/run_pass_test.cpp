// How a pass ends when it cannot go on: within the limit, on every rank, with a reason, and for good. The tiles do
// nothing here; what they compute is tested in gemm_test.cpp and through the layer.
#include "executors/cpu/run_pass.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "moelith/group.hpp"
#include "moelith/tensor.hpp"
#include "schedule/tile_order.hpp"
#include "tests/outcome.hpp"
#include "transport/transport.hpp"

namespace moelith::executors::cpu {
namespace {

using schedule::Stage;
using schedule::Tile;
using test::Outcome;
using test::outcome_of;
using std::chrono::milliseconds;

// One rank's pass over 2 experts a rank, T tokens a rank of which each goes to every expert; and its counters.
struct Rank {
  schedule::Pass pass;
  std::vector<std::int64_t> header;
  std::vector<std::int32_t> row_route, expert_rank;
  std::vector<std::uint64_t> local, arrivals;

  Rank(std::int32_t rank, std::int32_t ranks, std::int64_t tokens, schedule::Direction direction) {
    auto& s = pass.sizes;
    s.direction = direction;
    s.rank = rank;
    s.ranks = ranks;
    s.local_experts = 2;
    s.top_k = 2 * ranks;
    s.hidden_size = 128;
    s.intermediate_size = 192;
    s.tokens = tokens;
    s.chunk_tokens = 16;
    s.max_chunks = schedule::ceil_div(tokens, s.chunk_tokens);
    s.tile.row_block = 16;
    s.tile.columns = 64;
    s.max_row_blocks = 2 * tokens * ranks / s.tile.row_block + 2;
    header.resize(schedule::Layout::header_length(ranks, 2));
    for (int e = 0; e < 2; ++e) {
      for (std::int32_t r = 0; r < ranks; ++r) {
        for (std::int64_t t = 0; t < tokens; ++t)
          row_route.push_back(static_cast<std::int32_t>(t * s.top_k + rank * 2 + e));
      }
    }
    for (std::int32_t e = 0; e < s.top_k; ++e) expert_rank.push_back(e / 2);
    pass.layout = schedule::Layout::at(header.data(), row_route.data(), ranks, 2);
    *pass.layout.valid_tokens = tokens;
    std::fill_n(pass.layout.tokens_of_rank, ranks, tokens);
    schedule::fill_layout(s, pass.layout, s.top_k, expert_rank.data(),
                          [&](std::int32_t, std::int32_t) { return tokens; });
    local.resize(schedule::CounterMap::of(s).local_size, 77);  // whatever is there is cleared
    arrivals.resize(schedule::CounterMap::of(s).arrivals_size, 77);
  }
  void reserve(transport::Transport& transport) const {
    const auto map = schedule::CounterMap::of(pass.sizes);
    transport.reserve(256, map.arrivals_size, map.flags_size);
  }
  // As the layer does before a forward pass.
  void publish_table(transport::Transport& transport, std::uint64_t epoch) const {
    const auto map = schedule::CounterMap::of(pass.sizes);
    for (std::int32_t r = 0; r < pass.sizes.ranks; ++r) {
      if (r != pass.sizes.rank) std::atomic_ref(transport.flags(r)[map.table_ready + pass.sizes.rank]).store(epoch);
    }
  }
};

constexpr milliseconds limit{300};
// A busy machine may be late; a wait without bound would last for ever.
constexpr milliseconds late{20000};

// Runs one pass on each rank's thread; `absent` does not take part. run_tile gets the rank, too.
std::vector<Outcome> run_ranks(std::vector<std::shared_ptr<transport::Transport>>& transports,
                               schedule::Direction direction, std::uint64_t shuffle_seed, int absent,
                               const std::function<void(int, const Tile&)>& run_tile) {
  const int ranks = static_cast<int>(transports.size());
  std::vector<Outcome> outcomes(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(r, ranks, 40, direction);
      rank.reserve(*transports[r]);
      if (r == absent) return;
      outcomes[r] = outcome_of([&] {
        transports[r]->require_usable();
        auto pool = ThreadPool::acquire(2);
        const std::uint64_t epoch = transports[r]->begin_pass();
        if (direction == schedule::Direction::forward) rank.publish_table(*transports[r], epoch);
        run_pass(rank.pass, {rank.local.data(), nullptr}, *transports[r], epoch, *pool, shuffle_seed,
                 [&](const Tile& tile, int) { run_tile(r, tile); });
      });
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

std::vector<std::shared_ptr<transport::Transport>> group_of(int ranks) {
  auto transports = transport::make_threads(ranks);
  for (auto& t : transports) t->set_timeout(limit);
  return transports;
}

class RunPass : public ::testing::TestWithParam<std::tuple<schedule::Direction, std::uint64_t>> {
 protected:
  schedule::Direction direction() const { return std::get<0>(GetParam()); }
  std::uint64_t seed() const { return std::get<1>(GetParam()); }
};

TEST_P(RunPass, RunsEveryTileOnce) {
  for (int workers : {1, 2, 5}) {
    Rank rank(0, 1, 75, direction());
    std::mutex mutex;
    std::multiset<std::tuple<int, std::int64_t, std::int64_t, std::int64_t>> seen;
    auto pool = ThreadPool::acquire(workers);
    auto transport = transport::make_single();
    run_pass(rank.pass, {rank.local.data(), rank.arrivals.data()}, *transport, 0, *pool, seed(),
             [&](const Tile& tile, int worker) {
               EXPECT_GE(worker, 0);
               EXPECT_LT(worker, workers);
               std::lock_guard lock(mutex);
               seen.insert({int(tile.stage), tile.expert, tile.row_block, tile.column_block});
             });
    EXPECT_EQ(std::int64_t(seen.size()), schedule::tile_count(rank.pass));
    EXPECT_EQ(std::set(seen.begin(), seen.end()).size(), seen.size());
  }
}

TEST_P(RunPass, ATimelineSaysWhatEachWorkerDid) {
  constexpr int workers = 3;
  Rank rank(0, 1, 75, direction());
  auto pool = ThreadPool::acquire(workers);
  auto transport = transport::make_single();
  std::vector<TileSpan> spans;
  run_pass(rank.pass, {rank.local.data(), rank.arrivals.data()}, *transport, 0, *pool, seed(),
           [](const Tile&, int) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }, &spans);
  std::set<std::tuple<std::string_view, std::int64_t, std::int64_t, std::int64_t>> tiles;
  std::vector<std::vector<TileSpan>> of_worker(workers);
  for (const TileSpan& s : spans) {
    ASSERT_LT(s.worker, workers);
    of_worker[s.worker].push_back(s);
    tiles.insert({s.stage, s.expert, s.row_block, s.column_block});
    EXPECT_LE(0.0, s.taken);
    EXPECT_LE(s.taken, s.start);
    EXPECT_LE(s.start + 50e-6, s.end);
  }
  EXPECT_EQ(std::int64_t(spans.size()), schedule::tile_count(rank.pass));
  EXPECT_EQ(tiles.size(), spans.size());
  for (auto& own : of_worker) {  // a worker does one tile at a time
    std::sort(own.begin(), own.end(), [](const TileSpan& a, const TileSpan& b) { return a.taken < b.taken; });
    for (std::size_t i = 1; i < own.size(); ++i) EXPECT_LE(own[i - 1].end, own[i].taken);
  }
}

TEST_P(RunPass, SeveralPassesOfAGroup) {
  auto transports = group_of(3);
  for (auto& t : transports) t->set_timeout(late);
  for (int pass = 0; pass < 4; ++pass) {
    std::atomic<int> tiles{0};
    for (const Outcome& o : run_ranks(transports, direction(), seed(), -1, [&](int, const Tile&) { ++tiles; })) {
      EXPECT_EQ(o.status, Status::ok) << o.text;
    }
    EXPECT_GT(tiles, 200);
    for (int r = 0; r < 3; ++r) {  // cleared for the next one
      const auto map = schedule::CounterMap::of(Rank(r, 3, 40, direction()).pass.sizes);
      for (std::int64_t i = 0; i < map.arrivals_size; ++i) ASSERT_EQ(transports[r]->arrivals(r)[i], 0u);
    }
  }
}

TEST_P(RunPass, ARankThatNeverCallsTimesOutTheOthers) {
  auto transports = group_of(3);
  const auto outcomes = run_ranks(transports, direction(), seed(), 1, [](int, const Tile&) {});
  bool timed_out = false;
  for (int r : {0, 2}) {
    EXPECT_TRUE(outcomes[r].status == Status::timed_out || outcomes[r].status == Status::group_failed) << r;
    timed_out |= outcomes[r].status == Status::timed_out;
    EXPECT_LT(outcomes[r].took, late);
    // Who waited, in which stage, and how long; of two ranks one may only hear of the other's failure.
    EXPECT_NE(outcomes[r].text.find("rank "), std::string::npos) << outcomes[r].text;
    EXPECT_NE(outcomes[r].text.find("waited 300 ms"), std::string::npos) << outcomes[r].text;
    const char* stage = direction() == schedule::Direction::forward ? "stage layout" : "stage dispatch";
    EXPECT_NE(outcomes[r].text.find(stage), std::string::npos) << outcomes[r].text;
    EXPECT_NE(outcomes[r].text.find("for rank 1"), std::string::npos) << outcomes[r].text;
  }
  EXPECT_TRUE(timed_out);

  // From then on the group refuses at once, also for the rank that comes late.
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(transports[r]->failed());
    const Outcome again = outcome_of([&] { transports[r]->require_usable(); });
    EXPECT_EQ(again.status, Status::group_failed);
    EXPECT_NE(again.text.find("the group has failed: rank "), std::string::npos) << again.text;
    EXPECT_NE(again.text.find("waited 300 ms"), std::string::npos) << again.text;
  }
  // A new group of the same threads is none the worse.
  auto fresh = group_of(3);
  for (auto& t : fresh) t->set_timeout(late);
  for (const Outcome& o : run_ranks(fresh, direction(), seed(), -1, [](int, const Tile&) {}))
    EXPECT_EQ(o.status, Status::ok) << o.text;
}

TEST_P(RunPass, AnExceptionInATileEndsThePassOnAllRanks) {
  for (const Stage stage : {Stage::publish, Stage::dispatch, Stage::gate_up, Stage::down_dgrad, Stage::combine}) {
    if (stage == (direction() == schedule::Direction::forward ? Stage::down_dgrad : Stage::gate_up)) continue;
    auto transports = group_of(2);
    for (auto& t : transports)
      t->set_timeout(milliseconds(60000));  // they end because of the failure, not of the limit
    const auto outcomes = run_ranks(transports, direction(), seed(), -1, [&](int rank, const Tile& tile) {
      if (rank == 1 && tile.stage == stage) throw std::runtime_error("the tile broke");
    });
    EXPECT_EQ(outcomes[1].status, Status::internal) << to_string(stage);
    EXPECT_EQ(outcomes[1].text, "the tile broke");
    // Rank 0 may have had all it needs by then (rank 1's combine is its own); otherwise it tells the reason.
    if (outcomes[0].status != Status::ok) {
      EXPECT_EQ(outcomes[0].status, Status::group_failed);
      EXPECT_NE(outcomes[0].text.find("rank 1: the tile broke"), std::string::npos) << outcomes[0].text;
    } else {
      EXPECT_EQ(stage, Stage::combine);
    }
    EXPECT_LT(outcomes[0].took, late);
    EXPECT_TRUE(transports[0]->failed());
  }
}

TEST_P(RunPass, AnExceptionOnOneRankAloneLeavesItUsable) {
  auto transport = transport::make_single();
  auto pool = ThreadPool::acquire(3);
  Rank rank(0, 1, 75, direction());
  std::atomic<int> left{5};
  const Outcome broken = outcome_of([&] {
    run_pass(rank.pass, {rank.local.data(), rank.arrivals.data()}, *transport, 0, *pool, seed(), [&](const Tile&, int) {
      if (--left == 0) throw Error(Status::device_error, "the fifth tile broke");
    });
  });
  EXPECT_EQ(broken.status, Status::device_error);
  EXPECT_EQ(broken.text, "the fifth tile broke");
  std::atomic<std::int64_t> tiles{0};
  run_pass(rank.pass, {rank.local.data(), rank.arrivals.data()}, *transport, 0, *pool, seed(),
           [&](const Tile&, int) { ++tiles; });
  EXPECT_EQ(tiles, schedule::tile_count(rank.pass));
}

// A tile that never ends on one rank: the others do not wait for it longer than the limit.
TEST_P(RunPass, ASlowRankTimesOutTheOthers) {
  auto transports = group_of(2);
  transports[1]->set_timeout(milliseconds(60000));
  std::atomic<bool> done{false};
  const auto outcomes = run_ranks(transports, direction(), seed(), -1, [&](int rank, const Tile& tile) {
    if (rank == 1 && tile.stage == Stage::dispatch) {
      while (!done && !transports[1]->failed()) std::this_thread::sleep_for(milliseconds(5));
    }
  });
  EXPECT_EQ(outcomes[0].status, Status::timed_out);
  EXPECT_NE(outcomes[0].text.find("rank 0"), std::string::npos) << outcomes[0].text;
  EXPECT_EQ(outcomes[1].status, Status::group_failed);
  EXPECT_NE(outcomes[1].text.find("rank 0"), std::string::npos) << outcomes[1].text;
}

INSTANTIATE_TEST_SUITE_P(Directions, RunPass,
                         ::testing::Combine(::testing::Values(schedule::Direction::forward,
                                                              schedule::Direction::backward),
                                            ::testing::Values(std::uint64_t(0), std::uint64_t(3))),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == schedule::Direction::forward ? "forward"
                                                                                                      : "backward") +
                                  (std::get<1>(info.param) ? "_shuffled" : "_in_order");
                         });

}  // namespace
}  // namespace moelith::executors::cpu
