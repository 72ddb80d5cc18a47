// The expert-parallel (EP) group that a plan runs in: one rank, or several that share the experts of the layer.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moelith {

namespace transport {
class Transport;
}

// One rank's membership of an EP group. Cheap to copy. All plans of a group share its symmetric memory and signals, so
// passes of one group run one after another, in the same order on every rank; nor is a plan made while one runs.
class Group {
 public:
  // A group of one rank: no communication. What a default-constructed plan uses.
  static Group single();
  // `ranks` ranks of one process that run on different threads, each thread calling with its own Group. Of CUDA plans
  // each is on the GPU that is current when its plan is made: several ranks may share a GPU, each with its share of the
  // SMs, or have GPUs that reach each other's memory by load, store and atomic addition. Each rank passes a stream of its
  // own (cudaStreamNonBlocking), and nothing that one rank's pass waits for may be queued behind another's: no work on the
  // legacy default stream between them, and no more streams in use than CUDA_DEVICE_MAX_CONNECTIONS (8 unless set). What
  // other GPUs read of a call, x and the gradient of y, lies in memory from cudaMalloc.
  static std::vector<Group> threads(int ranks);
  // This process's rank among `ranks` processes of one host, which share memory (POSIX shared memory, in /dev/shm).
  // Collective: every process calls it with its own rank and the same name, of letters, digits, '-' and '_', which no
  // other group has that is being set up; once the call has returned the name is free. CPU layers only. limit: as for
  // set_timeout, and for set-up itself. A rank whose process ends in the midst of a pass makes the others fail at once
  // with Error(group_failed); a new group may be made after that.
  static Group process(const std::string& name, int rank, int ranks,
                       std::chrono::milliseconds limit = std::chrono::seconds(60));

  int rank() const;
  int size() const;

  // A wait for another rank that lasts longer ends the pass with Error(timed_out), which names the rank and the stage;
  // the group is unusable from then on. 60 s by default. Waits that have begun keep their limit, and so do
  // captured graphs.
  void set_timeout(std::chrono::milliseconds limit);

  // Tells all ranks that this one will not come: their waits for it end at once with Error(group_failed), as does every
  // later call of theirs; the text names this rank and the reason. A collective call that throws does so by itself;
  // this is for what goes wrong between calls. Of a group of one rank it does nothing. The first reason stays.
  void fail(const std::string& reason) const;

  const std::shared_ptr<transport::Transport>& transport() const { return transport_; }
  explicit Group(std::shared_ptr<transport::Transport> transport) : transport_(std::move(transport)) {}

 private:
  std::shared_ptr<transport::Transport> transport_;
};

}  // namespace moelith
