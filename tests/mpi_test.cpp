// The group of an MPI communicator, which here is a stand-in's (tests/fake_mpi): where there is no MPI, and for ranks of
// several hosts. tests/mpi has real MPI's.
#include "moelith/mpi.hpp"

#include <gtest/gtest.h>

#include "tests/call.hpp"
#include "tests/outcome.hpp"

// Not under ThreadSanitizer, which does not know what threads tell each other through memory that each has mapped for
// itself.
#if !defined(__SANITIZE_THREAD__)

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

TEST(Mpi, RanksOfSeveralHostsAreRefusedByName) {
  FakeWorld world(3);
  world.elsewhere = 2;
  on_threads(3, [&](int r) {
    FakeCommunicator communicator{&world, r};
    const Outcome outcome = outcome_of([&] { group_of(&communicator); });
    EXPECT_EQ(outcome.status, Status::unsupported);
    EXPECT_EQ(outcome.text.find("communicator: its ranks do not share memory (rank 0 on "), 0u) << outcome.text;
    EXPECT_NE(outcome.text.find(", rank 2 on "), std::string::npos) << outcome.text;
    EXPECT_EQ(outcome.text.find(", rank 1 on "), std::string::npos) << outcome.text;
  });
}

TEST(Mpi, OneRankAlone) {
  FakeWorld world(1);
  FakeCommunicator communicator{&world, 0};
  EXPECT_EQ(group_of(&communicator).size(), 1);
}

}  // namespace
}  // namespace moelith::test

#endif
