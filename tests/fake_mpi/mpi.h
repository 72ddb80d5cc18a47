// As much of MPI as moelith/mpi.hpp uses, between threads of one process, for its test.
#pragma once

#include <barrier>
#include <cstring>
#include <vector>

struct FakeWorld {
  explicit FakeWorld(int ranks) : meeting(ranks), sent(static_cast<std::size_t>(ranks)) {}
  std::barrier<> meeting;
  std::vector<const void*> sent;
  int elsewhere = -1;  // a rank whose texts arrive with another last letter, as if it were on another host
};
struct FakeCommunicator {
  FakeWorld* world;
  int rank;
};
using MPI_Comm = FakeCommunicator*;
using MPI_Datatype = int;
inline constexpr MPI_Datatype MPI_CHAR = 1;
inline constexpr int MPI_SUCCESS = 0, MPI_ERR_OTHER = 1;

inline int MPI_Comm_rank(MPI_Comm c, int* rank) { return *rank = c->rank, MPI_SUCCESS; }
inline int MPI_Comm_size(MPI_Comm c, int* size) { return *size = static_cast<int>(c->world->sent.size()), MPI_SUCCESS; }

inline int MPI_Allgather(const void* from, int count, MPI_Datatype type, void* to, int to_count, MPI_Datatype, MPI_Comm c) {
  if (type != MPI_CHAR || count != to_count) return MPI_ERR_OTHER;
  FakeWorld& world = *c->world;
  const auto size = static_cast<std::size_t>(count);
  world.sent[static_cast<std::size_t>(c->rank)] = from;
  world.meeting.arrive_and_wait();
  for (std::size_t r = 0; r < world.sent.size(); ++r) {
    char* const text = static_cast<char*>(to) + r * size;
    std::memcpy(text, world.sent[r], size);
    if (static_cast<int>(r) == world.elsewhere) text[std::strlen(text) - 1] = '#';
  }
  world.meeting.arrive_and_wait();  // what was sent stays until all have read it
  return MPI_SUCCESS;
}

inline int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm c) {
  std::vector<char> all(static_cast<std::size_t>(count) * c->world->sent.size());
  const int status = MPI_Allgather(data, count, type, all.data(), count, type, c);
  std::memcpy(data, all.data() + static_cast<std::size_t>(root) * static_cast<std::size_t>(count), static_cast<std::size_t>(count));
  return status;
}
