// The group of an MPI communicator, which here is a stand-in's (tests/fake_mpi): what the header exchanges and makes.
#include "moelith/mpi.hpp"

#include <gtest/gtest.h>

#include <set>

#include "tests/call.hpp"
#include "tests/outcome.hpp"

namespace moelith::test {
namespace {

TEST(Mpi, TheRanksOfACommunicatorAreAGroup) {
  constexpr int ranks = 3;
  FakeWorld world(ranks);
  LayerConfig config;
  config.dtype = DataType::float32;
  config.hidden_size = config.intermediate_size = 32, config.num_experts = 6, config.top_k = 2;
  const Problem p = random_problem(config, 40, 3);
  RunOptions options;
  options.tokens_of_rank = {25, 0, 15};
  for (int again = 0; again < 2; ++again) {  // of one communicator
    std::vector<RankPart> parts(ranks);
    on_threads(ranks, [&](int r) {
      FakeCommunicator communicator{&world, r};
      const Group group = group_of(&communicator, std::chrono::seconds(20));
      EXPECT_EQ(group.rank(), r);
      EXPECT_EQ(group.size(), ranks);
      parts[r] = run_rank(p, options, group);
    });
    expect_identical(joined(parts, config), run(p, {}), "an MPI communicator", of_each_rank(p));
  }
}

TEST(Mpi, OneRankAlone) {
  FakeWorld world(1);
  FakeCommunicator communicator{&world, 0};
  EXPECT_EQ(group_of(&communicator).size(), 1);
}

}  // namespace
}  // namespace moelith::test
