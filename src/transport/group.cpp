#include "moelith/group.hpp"

#include "moelith/limits.hpp"
#include "moelith/tensor.hpp"
#include "transport/transport.hpp"

namespace moelith {

Group Group::single() { return Group(transport::make_single()); }

std::vector<Group> Group::threads(int ranks) {
  if (ranks < 1 || ranks > limits::ranks) {
    throw Error(Status::invalid_argument, "ranks: got " + std::to_string(ranks) + ", accepted are 1 to " +
                                              std::to_string(limits::ranks));
  }
  std::vector<Group> groups;
  if (ranks == 1) return {Group::single()};
  for (auto& transport : transport::make_threads(ranks)) groups.emplace_back(std::move(transport));
  return groups;
}

int Group::rank() const { return transport_->rank(); }
int Group::size() const { return transport_->size(); }
void Group::fail(const std::string& reason) const { transport_->fail(reason.empty() ? "no reason was given" : reason); }
void Group::set_timeout(std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds longest = std::chrono::hours(24 * 365);  // a deadline's nanoseconds fit 63 bits
  if (limit.count() <= 0 || limit > longest) {
    throw Error(Status::invalid_argument, "limit: got " + std::to_string(limit.count()) + " ms, accepted are 1 to " +
                                              std::to_string(longest.count()));
  }
  transport_->set_timeout(limit);
}

}  // namespace moelith
