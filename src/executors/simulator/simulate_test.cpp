// The simulator on passes small enough to follow by hand, and its bounds on random ones.
#include "executors/simulator/simulate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "executors/simulator/batch.hpp"
#include "moelith/tensor.hpp"

namespace moelith::executors::simulator {
namespace {

using schedule::Direction;
using schedule::Pass;
using schedule::Stage;
using schedule::Tile;

// ids: [R] of each rank's [T, k]; experts are split evenly.
Batch make_batch(const schedule::Sizes& like, std::int32_t experts, const std::vector<std::vector<std::int32_t>>& ids) {
  const auto ranks = static_cast<std::int32_t>(ids.size());
  std::vector<std::int32_t> expert_rank;
  for (std::int32_t e = 0; e < experts; ++e) expert_rank.push_back(e * ranks / experts);
  return simulator::make_batch(like, expert_rank, ids);
}

// One expert, two row blocks, two column tiles of gate_up and one of down and combine each:
//   gate_up 0,0  gate_up 0,1 | gate_up 1,0  gate_up 1,1  down 0 | down 1 | combine 0  combine 1
schedule::Sizes small_sizes() {
  schedule::Sizes sizes;
  sizes.hidden_size = 64;
  sizes.intermediate_size = 128;
  sizes.tile.row_block = sizes.tile.token_block = 2;
  sizes.tile.columns = 64;
  sizes.tile.group_blocks = 1;
  return sizes;
}
double seconds_of(const Pass&, const Tile& tile) {
  switch (tile.stage) {
    case Stage::gate_up: return 3.0;
    case Stage::down: return 2.0;
    default: return 1.0;
  }
}

TEST(Simulate, OneWorkerByHand) {
  const Batch batch = make_batch(small_sizes(), 1, {{0, 0, 0, 0}});
  const Simulation s = simulate(batch.passes, 1, seconds_of);
  ASSERT_EQ(s.spans.size(), 8u);
  const std::vector<double> ends{3, 6, 9, 12, 14, 16, 17, 18};
  for (std::size_t n = 0; n < ends.size(); ++n) {
    EXPECT_EQ(s.spans[n].end, ends[n]) << n;
    EXPECT_EQ(s.spans[n].taken, s.spans[n].start) << "a single worker never waits";
    EXPECT_EQ(s.spans[n].worker, 0);
  }
  EXPECT_EQ(s.spans[4].tile.stage, Stage::down);
  EXPECT_EQ(s.makespan, 18.0);
  EXPECT_EQ(s.work, 18.0);
  EXPECT_EQ(s.critical_path, 3.0 + 2.0 + 1.0);
}

TEST(Simulate, TwoWorkersByHand) {
  const Batch batch = make_batch(small_sizes(), 1, {{0, 0, 0, 0}});
  const Simulation s = simulate(batch.passes, 2, seconds_of);
  // time     0      3      6      8   9
  // worker   gate   gate   down0  combine0 (waits for both downs, from 8)
  // worker   gate   gate   down1  combine1
  const std::vector<double> starts{0, 0, 3, 3, 6, 6, 8, 8};
  for (std::size_t n = 0; n < starts.size(); ++n) EXPECT_EQ(s.spans[n].start, starts[n]) << n;
  EXPECT_EQ(s.makespan, 9.0);
}

TEST(Simulate, ManyWorkersReachTheCriticalPath) {
  const Batch batch = make_batch(small_sizes(), 1, {{0, 0, 0, 0}});
  const Simulation s = simulate(batch.passes, 8, seconds_of);
  EXPECT_EQ(s.makespan, 6.0);
  EXPECT_EQ(s.critical_path, 6.0);
  ASSERT_EQ(s.critical.size(), 3u);
  EXPECT_EQ(s.spans[s.critical[0]].tile.stage, Stage::gate_up);
  EXPECT_EQ(s.spans[s.critical[1]].tile.stage, Stage::down);
  EXPECT_EQ(s.spans[s.critical[2]].tile.stage, Stage::combine);
  // down was taken at 0 and waited for the last gate_up of its block.
  EXPECT_EQ(s.spans[4].taken, 0.0);
  EXPECT_EQ(s.spans[4].start, 3.0);
  ASSERT_GE(s.spans[4].after, 0);
  EXPECT_EQ(s.spans[s.spans[4].after].tile.stage, Stage::gate_up);
}

TEST(Simulate, TwoRanksByHand) {
  schedule::Sizes sizes = small_sizes();
  sizes.intermediate_size = 64;
  // Each rank has 2 tokens, all for the other rank's expert.
  const Batch batch = make_batch(sizes, 2, {{1, 1}, {0, 0}});
  const Simulation s =
      simulate(batch.passes, 1, [](const Pass&, const Tile& tile) { return tile.stage == Stage::publish ? 5.0 : 1.0; });
  // publish (5), layout, collect, dispatch, gate_up, down, combine: one after the other on both ranks alike.
  ASSERT_EQ(s.spans.size(), 14u);
  EXPECT_EQ(s.makespan, 11.0);
  for (const Span& span : s.spans) {
    EXPECT_TRUE(span.tile.stage != Stage::combine || span.start == 10.0) << span.start;
  }
  // A slow rank 0 keeps rank 1 waiting: its chunk, then its down.
  const Simulation uneven =
      simulate(batch.passes, 1, [](const Pass& pass, const Tile&) { return pass.sizes.rank == 0 ? 10.0 : 1.0; });
  double combine_of_1 = 0;
  for (const Span& span : uneven.spans) {
    EXPECT_TRUE(span.rank == 0 || span.tile.stage != Stage::dispatch || span.start == 10.0) << span.start;
    if (span.rank == 1 && span.tile.stage == Stage::combine) combine_of_1 = span.start;
  }
  EXPECT_EQ(combine_of_1, 60.0);  // after rank 0's publish, layout, collect, dispatch, gate_up, down
  // Two signals between ranks on the way: the chunk, and the rows that come back.
  const Simulation late = simulate(
      batch.passes, 1, [](const Pass&, const Tile&) { return 1.0; }, 0.25);
  const Simulation prompt = simulate(batch.passes, 1, [](const Pass&, const Tile&) { return 1.0; });
  EXPECT_EQ(prompt.makespan, 7.0);
  EXPECT_EQ(late.makespan, 7.25);  // layout and collect hide the first one
  // With workers to spare collect still waits for the layout, and the chunk hides that.
  const Simulation spare = simulate(
      batch.passes, 9, [](const Pass&, const Tile&) { return 1.0; }, 0.25);
  for (const Span& span : spare.spans)
    EXPECT_TRUE(span.tile.stage != Stage::collect || span.start == 1.0) << span.start;
  EXPECT_EQ(spare.critical_path, 1 + 0.25 + 1 + 1 + 1 + 0.25 + 1);
  EXPECT_EQ(spare.makespan, spare.critical_path);
  // Both tokens go there and come back.
  double there = 0, back = 0;
  for (const Span& span : prompt.spans) {
    const double bytes = tile_work(batch.passes[span.rank], span.tile, 2).link_bytes;
    (span.tile.stage == Stage::dispatch ? there : back) += bytes;
  }
  EXPECT_EQ(there, 2 * 2 * 64 * 2.0);
  EXPECT_EQ(back, 2 * 2 * 64 * 2.0);
}

TEST(Simulate, WorkByHand) {
  schedule::Sizes sizes = small_sizes();
  const Batch batch = make_batch(sizes, 1, {{0, 0, 0}});
  const Pass& pass = batch.passes[0];
  EXPECT_EQ(tile_work(pass, {Stage::gate_up, 0, 0, 0}, 2).flops, 2.0 * 2 * 128 * 64);  // 2 rows x (64 gate + 64 up) x H
  EXPECT_EQ(tile_work(pass, {Stage::gate_up, 0, 1, 0}, 2).flops, 2.0 * 1 * 128 * 64);  // the third row
  EXPECT_EQ(tile_work(pass, {Stage::down, 0, 0, 0}, 2).flops, 2.0 * 2 * 64 * 128);
  EXPECT_EQ(tile_work(pass, {Stage::combine, 0, 0, 0}, 2).bytes, 2.0 * 64 * 2 * 2);  // a slot read, a row written, bf16
  // Whatever the tiles: 3 rows x 2 x 3 H I floating-point operations in forward.
  for (const std::int32_t columns : {64, 128}) {
    sizes.tile.columns = columns;
    sizes.direction = Direction::forward;
    Batch other = make_batch(sizes, 1, {{0, 0, 0}});
    double forward = 0, backward = 0;
    simulate(other.passes, 1, [&](const Pass& p, const Tile& t) { return forward += tile_work(p, t, 2).flops, 1.0; });
    EXPECT_EQ(forward, 3.0 * 2 * 3 * 64 * 128);
    sizes.direction = Direction::backward;
    other = make_batch(sizes, 1, {{0, 0, 0}});
    simulate(other.passes, 1, [&](const Pass& p, const Tile& t) { return backward += tile_work(p, t, 2).flops, 1.0; });
    EXPECT_EQ(backward, 2 * forward);
  }
}

TEST(Simulate, BoundsOnRandomPasses) {
  std::mt19937_64 random(1);
  for (int n = 0; n < 60; ++n) {
    schedule::Sizes sizes = small_sizes();
    sizes.direction = n % 2 ? Direction::backward : Direction::forward;
    sizes.top_k = 2;
    sizes.recompute = n % 4 == 3;
    sizes.tile.row_block = 8;
    sizes.tile.group_blocks = n % 3 + 1;
    sizes.chunk_tokens = 8;
    if (n % 7 > 3) sizes.round_rows = 8 * (n % 7 - 3);
    if (n % 5 == 0) sizes.shared_experts = 1, sizes.shared_intermediate_size[0] = 72;
    const int ranks = 1 + n % 4;
    std::vector<std::vector<std::int32_t>> ids(ranks);
    for (auto& of_rank : ids) {
      for (std::uint64_t t = random() % 40; t > 0; --t) {
        of_rank.push_back(static_cast<std::int32_t>(random() % 5));
        of_rank.push_back(static_cast<std::int32_t>(random() % 6) - 1);
      }
    }
    const Batch batch = make_batch(sizes, 5, ids);
    const auto cost = [](const Pass& pass, const Tile& tile) { return 1e-6 + tile_work(pass, tile, 2).flops * 1e-9; };
    std::size_t tiles = 0;
    for (const Pass& pass : batch.passes) tiles += static_cast<std::size_t>(schedule::tile_count(pass));
    const Simulation one = simulate(batch.passes, 1, cost), four = simulate(batch.passes, 4, cost),
                     all = simulate(batch.passes, static_cast<int>(tiles) + 1, cost);
    for (const Simulation* s : {&one, &four, &all}) {
      EXPECT_EQ(s->spans.size(), tiles);
      EXPECT_NEAR(s->work, one.work, 1e-9 * one.work);
      EXPECT_NEAR(s->critical_path, one.critical_path, 1e-9 * one.critical_path);
      EXPECT_GE(s->makespan, s->critical_path * (1 - 1e-12));
      double chain = 0;
      for (std::int64_t index : s->critical) chain += s->spans[index].end - s->spans[index].start;
      EXPECT_NEAR(chain, s->critical_path, 1e-9 * s->critical_path);
      for (const Span& span : s->spans) {
        EXPECT_LE(span.taken, span.start);
        EXPECT_TRUE(span.after < 0 || s->spans[span.after].end == span.start);
      }
    }
    EXPECT_LE(four.makespan, one.work * (1 + 1e-12));
    EXPECT_GE(four.makespan, one.work / (4 * ranks) * (1 - 1e-12));
    EXPECT_NEAR(all.makespan, all.critical_path, 1e-12);  // nobody ever waits for a worker
    EXPECT_TRUE(ranks > 1 || std::fabs(one.makespan - one.work) <= 1e-9 * one.work);
    // The same again.
    const Simulation again = simulate(batch.passes, 4, cost);
    ASSERT_EQ(again.spans.size(), four.spans.size());
    for (std::size_t i = 0; i < tiles; ++i) {
      ASSERT_EQ(again.spans[i].start, four.spans[i].start);
      ASSERT_EQ(again.spans[i].worker, four.spans[i].worker);
    }
    // No worker does two things at once.
    std::vector<const Span*> order;
    for (const Span& span : four.spans) order.push_back(&span);
    std::sort(order.begin(), order.end(), [](const Span* a, const Span* b) {
      return std::tie(a->rank, a->worker, a->start) < std::tie(b->rank, b->worker, b->start);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
      if (order[i]->rank != order[i - 1]->rank || order[i]->worker != order[i - 1]->worker) continue;
      EXPECT_GE(order[i]->start, order[i - 1]->end);
    }
  }
}

TEST(Simulate, NothingToDo) {
  const Batch batch = make_batch(small_sizes(), 1, {{}});
  const Simulation s = simulate(batch.passes, 3, seconds_of);
  EXPECT_TRUE(s.spans.empty());
  EXPECT_TRUE(s.critical.empty());
  EXPECT_EQ(s.makespan, 0.0);
  EXPECT_THROW(simulate(batch.passes, 0, seconds_of), Error);
}

}  // namespace
}  // namespace moelith::executors::simulator
