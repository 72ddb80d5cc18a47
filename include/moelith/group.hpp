// The expert-parallel (EP) group that a plan runs in: one rank, or several that share the experts of the layer.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace moelith {

namespace transport { class Transport; }

// One rank's membership of an EP group. Cheap to copy. All plans of a group share its symmetric memory and signals, so
// passes of one group run one after another, in the same order on every rank.
class Group {
 public:
  // A group of one rank: no communication. What a default-constructed plan uses.
  static Group single();
  // `ranks` ranks of one process that run on different threads, each thread calling with its own Group.
  static std::vector<Group> threads(int ranks);

  int rank() const;
  int size() const;

  // A wait for another rank that lasts longer ends the pass with Error(timed_out), which names the rank and the stage;
  // the group is unusable from then on. 60 s by default.
  void set_timeout(std::chrono::milliseconds limit);

  const std::shared_ptr<transport::Transport>& transport() const { return transport_; }
  explicit Group(std::shared_ptr<transport::Transport> transport) : transport_(std::move(transport)) {}

 private:
  std::shared_ptr<transport::Transport> transport_;
};

}  // namespace moelith
