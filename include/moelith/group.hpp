// The expert-parallel (EP) group that a plan runs in: one rank, or several that share the experts of the layer.
#pragma once

#include <chrono>
#include <cstddef>
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
//
// CUDA plans of several ranks: a pass is a collective operation in a stream, whose kernel takes all SMs that it may have
// (PlanOptions::workers) and waits for the other ranks' kernels, up to the group's time limit. Others that wait for their
// like on other GPUs, NCCL's say, may run beside it on other streams if either
//   - every rank enqueues passes and those collectives in one order, and what waits for what (streams, events) is the same
//     on all ranks, as it is where all run one program. What has been enqueued first may start last then: a collective
//     that finds all SMs taken begins when the pass has ended, and no pass waits for it; or
//   - workers leaves SMs for them (NCCL takes up to 32, see NCCL_MAX_CTAS), and no rank has a pass behind a collective in
//     a stream that another rank has behind that pass.
// The first collective of a communicator connects it, on the host, and so comes before passes that run beside it.
// Otherwise, such as in one stream first the pass and then the collective on one rank and the other way round on another,
// each waits for the other and the pass ends with its time limit's error.
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
  // other group has that is being set up; once the call has returned the name is free. limit: as for set_timeout, and for
  // set-up itself. A rank whose process ends in the midst of a pass makes the others' passes end at once, on a GPU within
  // a fraction of a second, and their calls fail with Error(group_failed), on a GPU the next ones; a new group may be made
  // after that.
  // CUDA plans: on the GPU that is current when the plan is made, one that reaches those of the other ranks by load, store
  // and atomic addition, or the same: processes on one GPU take turns, which is slow, or run side by side under MPS.
  // Memory of a call may be any that this process's GPU reaches: what other ranks read of it is copied (PyTorch's
  // allocators are welcome).
  // argument: what errors call that which the name stands for, where a caller has made it up.
  static Group process(const std::string& name, int rank, int ranks,
                       std::chrono::milliseconds limit = std::chrono::seconds(60),
                       const std::string& argument = "name");
  // The same where the processes share no name but an id that nobody else has: `bytes` bytes, 16 to 128 of them, such as
  // those of an ncclUniqueId that one rank made and the others have got from it (nothing here needs NCCL). One id may
  // serve several groups of the same processes, one after another.
  static Group process_by_id(const void* id, std::size_t bytes, int rank, int ranks,
                             std::chrono::milliseconds limit = std::chrono::seconds(60));
  // (moelith/mpi.hpp makes the group of an MPI communicator.)

  // Where this process could be in a group: the host and its shared memory, in less than 256 characters.
  static std::string place();
  // places: of all ranks, by rank. Throws Error(unsupported) naming those that do not share memory with rank 0; `what`
  // begins the text.
  static void require_one_place(const std::vector<std::string>& places, const std::string& what);

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
