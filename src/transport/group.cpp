#include "moelith/group.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "moelith/limits.hpp"
#include "moelith/tensor.hpp"
#include "transport/transport.hpp"

namespace moelith {

Group Group::single() { return Group(transport::make_single()); }

namespace {

void require_ranks(int ranks) {
  if (ranks >= 1 && ranks <= limits::ranks) return;
  throw Error(Status::invalid_argument,
              "ranks: got " + std::to_string(ranks) + ", accepted are 1 to " + std::to_string(limits::ranks));
}

void require_limit(std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds longest = std::chrono::hours(24 * 365);  // a deadline's nanoseconds fit 63 bits
  if (limit.count() > 0 && limit <= longest) return;
  throw Error(Status::invalid_argument, "limit: got " + std::to_string(limit.count()) + " ms, accepted are 1 to " +
                                            std::to_string(longest.count()));
}

void require_process(int rank, int ranks, std::chrono::milliseconds limit) {
  require_ranks(ranks);
  require_limit(limit);
  if (rank >= 0 && rank < ranks) return;
  throw Error(Status::invalid_argument,
              "rank: got " + std::to_string(rank) + ", accepted are 0 to " + std::to_string(ranks - 1));
}

constexpr char name_characters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";  // 64 of them

}  // namespace

std::vector<Group> Group::threads(int ranks) {
  require_ranks(ranks);
  std::vector<Group> groups;
  if (ranks == 1) return {Group::single()};
  for (auto& transport : transport::make_threads(ranks)) groups.emplace_back(std::move(transport));
  return groups;
}

Group Group::process(const std::string& name, int rank, int ranks, std::chrono::milliseconds limit,
                     const std::string& argument) {
  require_process(rank, ranks, limit);
  constexpr std::size_t longest = 128;
  static_assert(longest <= transport::longest_process_name);
  if (name.empty() || name.size() > longest || name.find_first_not_of(name_characters) != std::string::npos) {
    throw Error(Status::invalid_argument, argument + ": got \"" + name + "\", accepted are 1 to " + std::to_string(longest) +
                                              " letters, digits, '-' and '_'");
  }
  if (ranks == 1) return single();
  return Group(transport::make_process(name, rank, ranks, limit, argument));
}

Group Group::process_by_id(const void* id, std::size_t bytes, int rank, int ranks, std::chrono::milliseconds limit) {
  require_process(rank, ranks, limit);
  constexpr std::size_t shortest = 16, longest = 128;
  static_assert(longest * 4 / 3 + 4 <= transport::longest_process_name);
  if (!id || bytes < shortest || bytes > longest) {
    throw Error(Status::invalid_argument, "id: got " + (id ? std::to_string(bytes) + " bytes" : "none") + ", accepted are " +
                                              std::to_string(shortest) + " to " + std::to_string(longest) + " bytes");
  }
  // The id itself, 6 bits a character: different ids have different names.
  const auto* from = static_cast<const unsigned char*>(id);
  std::string name = "id-";
  unsigned held = 0;
  int held_bits = 0;
  for (std::size_t i = 0; i < bytes; ++i) {
    held = (held << 8 | from[i]) & 0xffff;
    for (held_bits += 8; held_bits >= 6; held_bits -= 6) name += name_characters[held >> (held_bits - 6) & 63];
  }
  if (held_bits > 0) name += name_characters[held << (6 - held_bits) & 63];
  if (ranks == 1) return single();
  return Group(transport::make_process(name, rank, ranks, limit, "id"));
}

std::string Group::place() {
  char host[64] = "";  // for people
  gethostname(host, sizeof host - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  // Containers of one host may each have a /dev/shm of their own.
  struct stat facts {};
  const bool there = stat("/dev/shm", &facts) == 0;
  return std::string(host) + ' ' + boot + ' ' + (there ? std::to_string(facts.st_dev) : "without /dev/shm");
}

void Group::require_one_place(const std::vector<std::string>& places, const std::string& what) {
  auto host = [&](std::size_t r) { return places[r].substr(0, places[r].find(' ')); };
  auto memory = [&](std::size_t r) { return places[r].substr(std::min(places[r].size(), places[r].find(' '))); };
  std::string apart;
  for (std::size_t r = 1; r < places.size(); ++r) {
    if (memory(r) != memory(0)) apart += ", rank " + std::to_string(r) + " on " + host(r);
  }
  if (apart.empty()) return;
  throw Error(Status::unsupported, what + ": its ranks do not share memory (rank 0 on " + host(0) + apart +
                                       "); an expert-parallel group lies within one host: make one for each host and reduce "
                                       "expert gradients over the others");
}

int Group::rank() const { return transport_->rank(); }
int Group::size() const { return transport_->size(); }
void Group::fail(const std::string& reason) const { transport_->fail(reason.empty() ? "no reason was given" : reason); }
void Group::set_timeout(std::chrono::milliseconds limit) {
  require_limit(limit);
  transport_->set_timeout(limit);
}

}  // namespace moelith
