// The groups of real MPI's communicators. Every rank runs these tests: cmake/tests.cmake has mpirun start them.
#include "moelith/mpi.hpp"

#include <gtest/gtest.h>

#include "tests/layer_fixture.hpp"

namespace moelith::test {
namespace {

int rank_of(MPI_Comm communicator) {
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  return rank;
}
int size_of(MPI_Comm communicator) {
  int size = 0;
  MPI_Comm_size(communicator, &size);
  return size;
}

// All ranks' parts, on rank 0.
std::vector<RankPart> gathered(const RankPart& mine, MPI_Comm communicator) {
  const std::string packed = mine.packed();
  const int bytes = static_cast<int>(packed.size());
  std::vector<int> sizes(size_of(communicator)), begins(sizes.size());
  MPI_Gather(&bytes, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, communicator);
  for (std::size_t r = 1; r < sizes.size(); ++r) begins[r] = begins[r - 1] + sizes[r - 1];
  std::string all(begins.back() + sizes.back(), '\0');
  MPI_Gatherv(packed.data(), bytes, MPI_CHAR, all.data(), sizes.data(), begins.data(), MPI_CHAR, 0, communicator);
  std::vector<RankPart> parts;
  if (rank_of(communicator) != 0) return parts;
  for (std::size_t r = 0; r < sizes.size(); ++r) parts.push_back(RankPart::unpacked(all.substr(begins[r], sizes[r])));
  return parts;
}

// Forward and backward on the communicator's ranks have the bits of one rank.
void expect_bits_of_one_rank(MPI_Comm communicator, std::uint64_t seed) {
  const int ranks = size_of(communicator);
  Random random(seed);
  const Problem p = random_problem(tokens_apart(random_config(random, DataType::float32)), 90, random());
  RunOptions options;
  for (int r = 0; r < ranks; ++r) options.tokens_of_rank.push_back(90 * (r + 1) / ranks - 90 * r / ranks);
  const Group group = group_of(communicator, std::chrono::seconds(20));
  EXPECT_EQ(group.rank(), rank_of(communicator));
  EXPECT_EQ(group.size(), ranks);
  const std::vector<RankPart> parts = gathered(run_rank(p, options, group), communicator);
  if (!parts.empty()) {
    expect_identical(run(p, {}), joined(parts, p.config), std::to_string(ranks) + " ranks of MPI", of_each_rank(p));
  }
}

TEST(MpiRun, TheWorld) {
  ASSERT_GE(size_of(MPI_COMM_WORLD), 2) << "mpirun started one rank alone";
  for (std::uint64_t seed : {3, 4, 5}) expect_bits_of_one_rank(MPI_COMM_WORLD, seed);
}

TEST(MpiRun, CommunicatorsWhoseRanksAreOthersThanTheWorlds) {
  const int rank = rank_of(MPI_COMM_WORLD), ranks = size_of(MPI_COMM_WORLD);
  for (int parts : {1, 2}) {  // the last rank is the first of its communicator
    MPI_Comm communicator;
    ASSERT_EQ(MPI_Comm_split(MPI_COMM_WORLD, rank % parts, ranks - rank, &communicator), MPI_SUCCESS);
    expect_bits_of_one_rank(communicator, 6);
    MPI_Comm_free(&communicator);
  }
}

}  // namespace
}  // namespace moelith::test

int main(int count, char** arguments) {
  MPI_Init(&count, &arguments);
  testing::InitGoogleTest(&count, arguments);
  const int status = RUN_ALL_TESTS();
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);  // others may wait for this one
  MPI_Finalize();
  return status;
}
