#include "moelith/group.hpp"

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

}  // namespace

std::vector<Group> Group::threads(int ranks) {
  require_ranks(ranks);
  std::vector<Group> groups;
  if (ranks == 1) return {Group::single()};
  for (auto& transport : transport::make_threads(ranks)) groups.emplace_back(std::move(transport));
  return groups;
}

Group Group::process(const std::string& name, int rank, int ranks, std::chrono::milliseconds limit) {
  require_ranks(ranks);
  require_limit(limit);
  if (rank < 0 || rank >= ranks) {
    throw Error(Status::invalid_argument,
                "rank: got " + std::to_string(rank) + ", accepted are 0 to " + std::to_string(ranks - 1));
  }
  constexpr std::size_t longest = 128;  // a name of shared memory has 255 characters, of which we need some
  const char* allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
  if (name.empty() || name.size() > longest || name.find_first_not_of(allowed) != std::string::npos) {
    throw Error(Status::invalid_argument, "name: got \"" + name + "\", accepted are 1 to " + std::to_string(longest) +
                                              " letters, digits, '-' and '_'");
  }
  if (ranks == 1) return single();
  return Group(transport::make_process(name, rank, ranks, limit));
}

int Group::rank() const { return transport_->rank(); }
int Group::size() const { return transport_->size(); }
void Group::fail(const std::string& reason) const { transport_->fail(reason.empty() ? "no reason was given" : reason); }
void Group::set_timeout(std::chrono::milliseconds limit) {
  require_limit(limit);
  transport_->set_timeout(limit);
}

}  // namespace moelith
