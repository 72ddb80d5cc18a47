// Set-up of a group: what its ranks exchange and share, and what happens when one does not come.
#include "transport/transport.hpp"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "moelith/group.hpp"
#include "moelith/layer.hpp"
#include "moelith/tensor.hpp"

namespace moelith::transport {
namespace {

using std::chrono::milliseconds;

template <class F>
void on_all_ranks(int ranks, F body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back([&body, r] { body(r); });
  for (auto& thread : threads) thread.join();
}

// The error that a call ends with, its own time limit or another rank's failure; empty: none.
template <class F>
std::string error_of(F call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_TRUE(error.status() == Status::timed_out || error.status() == Status::group_failed) << error.what();
    return error.what();
  }
  return "";
}

TEST(Transport, SingleRank) {
  auto transport = make_single();
  EXPECT_EQ(transport->rank(), 0);
  EXPECT_EQ(transport->size(), 1);
  EXPECT_EQ(transport->all_gather(5), (std::vector<std::int64_t>{5}));
  EXPECT_FALSE(transport->failed());
  transport->require_usable();
}

TEST(Transport, GathersInRankOrderAgainAndAgain) {
  constexpr int ranks = 5;
  auto group = make_threads(ranks);
  std::vector<std::vector<std::int64_t>> seen(ranks);
  on_all_ranks(ranks, [&](int r) {
    EXPECT_EQ(group[r]->rank(), r);
    EXPECT_EQ(group[r]->size(), ranks);
    for (std::int64_t round = 0; round < 50; ++round) {
      const auto all = group[r]->all_gather(100 * round + r);
      for (int other = 0; other < ranks; ++other) {
        if (all.at(other) != 100 * round + other) seen[r].push_back(round);
      }
    }
  });
  for (const auto& wrong : seen) EXPECT_TRUE(wrong.empty());
}

TEST(Transport, SharesMemoryAndClearsCounters) {
  auto group = make_threads(3);
  on_all_ranks(3, [&](int r) { group[r]->reserve(r == 1 ? 1000 : 10, 4, r == 2 ? 7 : 2); });  // the largest counts
  for (int r = 0; r < 3; ++r) {
    for (int other = 0; other < 3; ++other) {
      EXPECT_EQ(group[r]->memory(other), group[0]->memory(other));
      EXPECT_EQ(group[r]->arrivals(other), group[0]->arrivals(other));
      EXPECT_EQ(group[r]->flags(other), group[0]->flags(other));
      EXPECT_EQ(r == other, group[0]->memory(r) == group[0]->memory(other)) << "each has its own";
    }
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(group[0]->memory(r)) % 256, 0u);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(group[0]->arrivals(r)[i], 0u);
    for (int i = 0; i < 7; ++i) EXPECT_EQ(group[0]->flags(r)[i], 0u);
    group[0]->memory(r)[999] = std::byte{1};
    group[0]->flags(r)[6] = 9;
  }
  on_all_ranks(3, [&](int r) { group[r]->reserve(20, 1, 1); });  // never smaller
  for (int r = 0; r < 3; ++r) {
    group[0]->memory(r)[999] = std::byte{1};
    EXPECT_EQ(group[0]->flags(r)[6], 0u);
  }
}

TEST(Transport, NamesTheRanksThatDoNotCome) {
  auto group = make_threads(4);
  for (auto& t : group) t->set_timeout(milliseconds(200));
  std::vector<std::string> errors(4);
  on_all_ranks(4, [&](int r) {
    if (r == 0 || r == 2) errors[r] = error_of([&] { group[r]->all_gather(1); });
  });
  EXPECT_NE((errors[0] + errors[2]).find("waited 200 ms for rank 1, 3"), std::string::npos) << errors[0] << errors[2];
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
  // For good, and for everybody.
  for (int r = 0; r < 4; ++r) {
    EXPECT_TRUE(group[r]->failed());
    EXPECT_FALSE(error_of([&] { group[r]->all_gather(1); }).empty());
    EXPECT_FALSE(error_of([&] { group[r]->reserve(1, 1, 1); }).empty());
    EXPECT_FALSE(error_of([&] { group[r]->require_usable(); }).empty());
  }
  auto fresh = make_threads(4);
  on_all_ranks(4, [&](int r) { EXPECT_EQ(fresh[r]->all_gather(r).at(3), 3); });
}

TEST(Transport, FailureWakesThoseWhoWait) {
  auto group = make_threads(2);
  for (auto& t : group) t->set_timeout(milliseconds(60000));
  std::string error;
  on_all_ranks(2, [&](int r) {
    if (r == 0) {
      error = error_of([&] { group[0]->all_gather(1); });
    } else {
      std::this_thread::sleep_for(milliseconds(50));
      group[1]->fail("because");
      group[1]->fail("of another reason");  // the first one counts
    }
  });
  EXPECT_NE(error.find("the group has failed: rank 1: because"), std::string::npos) << error;
  EXPECT_NE(error_of([&] { group[1]->require_usable(); }).find("because"), std::string::npos);
}

TEST(Transport, ACollectiveCallThatThrowsTellsTheOthers) {
  auto group = make_threads(2);
  std::string error;
  on_all_ranks(2, [&](int r) {
    if (r == 0) {
      error = error_of([&] { group[0]->all_gather(1); });
    } else {
      EXPECT_THROW(group[1]->collective([] { throw std::bad_alloc(); }), std::bad_alloc);
    }
  });
  EXPECT_NE(error.find("rank 1: "), std::string::npos) << error;
  EXPECT_EQ(make_threads(2)[0]->collective([] { return 7; }), 7);
}

TEST(Transport, EpochsAndTables) {
  auto transport = make_single();
  EXPECT_EQ(transport->begin_pass(), 1u);
  EXPECT_EQ(transport->begin_pass(), 2u);
  const int first = transport->begin_table(), second = transport->begin_table();
  EXPECT_NE(first, second);
  EXPECT_EQ(transport->begin_table(), first);
}

TEST(Group, RefusesWhatMakesNoSense) {
  for (int ranks : {-1, 0, 65}) EXPECT_THROW(Group::threads(ranks), Error) << ranks;
  EXPECT_EQ(Group::threads(1).size(), 1u);
  EXPECT_EQ(Group::threads(64).back().rank(), 63);
  EXPECT_THROW(Group::single().set_timeout(milliseconds(0)), Error);
  EXPECT_THROW(Group::single().set_timeout(milliseconds::max()), Error);
}

// Through the layer: a plan that one rank never makes, and ranks whose configs differ.
TEST(Group, APlanNeedsEveryRank) {
  LayerConfig config;
  config.hidden_size = config.intermediate_size = 8;
  config.num_experts = 4;
  config.top_k = 1;
  PlanOptions options;
  options.max_tokens = 4;
  auto groups = Group::threads(2);
  options.group = groups[0];
  options.group.set_timeout(milliseconds(100));
  EXPECT_NE(error_of([&] { Plan::create(config, options); }).find("for rank 1"), std::string::npos);

  auto others = Group::threads(2);
  std::vector<std::string> errors(2);
  on_all_ranks(2, [&](int r) {
    LayerConfig mine = config;
    if (r == 1) mine.hidden_size = 16;
    PlanOptions o;
    o.max_tokens = 4;
    o.group = others[r];
    o.group.set_timeout(milliseconds(5000));
    try {
      Plan::create(mine, o);
    } catch (const Error& error) { errors[r] = error.what(); }
  });
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[1].empty());
}

}  // namespace
}  // namespace moelith::transport
