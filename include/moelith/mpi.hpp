// The group of an MPI communicator. For programs that use MPI: the library itself does not need it.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "moelith/group.hpp"
#include "moelith/tensor.hpp"

namespace moelith {

// The same ranks as those of the communicator, which is used for this call alone. Collective over it. Throws on every
// rank Error(unsupported), which names those concerned, if its processes do not share one host's memory; otherwise as
// Group::process.
inline Group group_of(MPI_Comm communicator, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
  auto check = [](int status, const char* call) {
    if (status != MPI_SUCCESS)
      throw Error(Status::device_error, std::string(call) + " failed: " + std::to_string(status));
  };
  int rank = 0, ranks = 0;
  check(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(communicator, &ranks), "MPI_Comm_size");

  using Text = std::array<char, 256>;
  auto text_of = [](const std::string& text) {
    Text bytes{};
    std::memcpy(bytes.data(), text.data(), std::min(text.size(), bytes.size() - 1));
    return bytes;
  };
  const Text place = text_of(Group::place());
  std::vector<Text> all(static_cast<std::size_t>(ranks));
  check(MPI_Allgather(place.data(), sizeof(Text), MPI_CHAR, all.data(), sizeof(Text), MPI_CHAR, communicator),
        "MPI_Allgather");
  std::vector<std::string> places;
  for (const Text& one : all) places.emplace_back(one.data());
  Group::require_one_place(places, "communicator");

  Text name{};
  if (rank == 0) {
    std::random_device random;
    std::snprintf(name.data(), name.size(), "mpi-%08x%08x%08x%08x", random(), random(), random(), random());
  }
  check(MPI_Bcast(name.data(), sizeof(Text), MPI_CHAR, 0, communicator), "MPI_Bcast");
  return Group::process(name.data(), rank, ranks, limit, "communicator");
}

}  // namespace moelith
