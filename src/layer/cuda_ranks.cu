#include "layer/cuda_ranks.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda_check.hpp"

namespace moelith::layer {

using executors::cuda::ExchangeJob;
using executors::cuda::PassData;
using executors::cuda::PassError;
using executors::cuda::Peers;
using numerics::bfloat16;

namespace {

void check_sizes(const Plan::Impl& plan, const Geometry& geometry) {
  if (plan.options.group.size() > limits::device_ranks) {
    throw Error(Status::unsupported, "group: got " + std::to_string(plan.options.group.size()) +
                                         " ranks, accepted on device cuda are up to " + std::to_string(limits::device_ranks));
  }
  if (plan.options.tile_columns == 128) {
    throw Error(Status::unsupported, "tile_columns: got 128, accepted on device cuda with several ranks are 0 and 192");
  }
  if (geometry.rows() > std::numeric_limits<std::int32_t>::max()) {
    throw Error(Status::invalid_argument, "max_tokens: all ranks' tokens may have " + std::to_string(geometry.rows()) +
                                              " routes together, accepted on device cuda are below 2^31");
  }
}

// A kernel that is loaded at its first launch may wait for those that run, and they for this rank.
void load_kernels(std::int32_t num_experts) {
  routing::prepare_device_router(num_experts);
  executors::cuda::prepare_exchange();
  executors::cuda::sm90_prepare_ranks();
}

}  // namespace

CudaRanks::CudaRanks(const Plan::Impl& plan, const schedule::TileShape& tile)
    : plan_(plan), size_(plan.options.group.size()), rank_(plan.options.group.rank()) {
  const Geometry geometry = plan.geometry(plan.options.max_tokens, tile);
  check_sizes(plan, geometry);
  counters_ = schedule::CounterMap::of(geometry.sizes);
  const bool staged = !plan.transport().reads_any_device_memory();
  for (const std::int64_t tokens : plan.max_tokens_of_rank) {
    windows_.push_back(Window::of(plan.config, tokens, &counters_, staged));
  }
  memory_ = plan.transport().device_memory(layout_number(windows_, counters_), windows_[rank_].size,
                                           [this](std::byte* memory) { count_from_last_pass(memory); });
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  share_ = multiprocessors / memory_->sharing / 2 * 2;  // they work in pairs
  if (share_ == 0) {
    throw Error(Status::unsupported, "group: " + std::to_string(memory_->sharing) + " ranks share a GPU of " +
                                         std::to_string(multiprocessors) + " SMs, accepted are 2 SMs a rank or more");
  }
  place_tables();
  place_on_device();
  load_kernels(plan.config.num_experts);
  plan.transport().all_gather(0);  // nobody launches before all have loaded them
}

template <class U>
U* CudaRanks::at(int rank, std::uint64_t offset) const {
  return reinterpret_cast<U*>(memory_->rank[rank] + offset);
}

// Passes are counted on from the group's last one: flags stand there, as if it had been of this layout.
void CudaRanks::count_from_last_pass(std::byte* memory) const {
  const std::vector<std::uint64_t> last(static_cast<std::size_t>(counters_.flags_size), plan_.transport().last_pass());
  const Window& mine = windows_[rank_];
  check_cuda(cudaMemcpy(memory + mine.state, last.data(), sizeof last[0], cudaMemcpyHostToDevice), "number of the last pass");
  check_cuda(cudaMemcpy(memory + mine.flags, last.data(), last.size() * sizeof last[0], cudaMemcpyHostToDevice), "flags");
}

void CudaRanks::place_tables() {
  tables_.ranks = size_, tables_.rank = rank_;
  for (int r = 0; r < size_; ++r) {
    const Window::Table& even = windows_[r].table[0];
    routing::RankTable& table = tables_.of_rank[r];
    table.header = at<std::int64_t>(r, even.header);
    table.offsets = at<std::int64_t>(r, even.offsets);
    table.counts = at<std::int64_t>(r, even.counts);
    table.routes = at<std::int32_t>(r, even.routes);
    table.weights = at<float>(r, even.topk_weights);
    table.to_odd = static_cast<std::int64_t>(windows_[r].table[1].header - even.header);
    job_.flags[r] = at<unsigned long long>(r, windows_[r].flags) + counters_.table_ready;
  }
  tables_.last_pass = at<unsigned long long>(rank_, windows_[rank_].state);
  tables_.stopped = tables_.last_pass + 1;
  job_.tables = tables_;
  job_.error = error();
  job_.stop = &memory_->words->stop;
  job_.num_experts = plan_.config.num_experts;
  const Window& mine = windows_[rank_];
  if (mine.rows != absent) {
    job_.staged_x = at<bfloat16>(rank_, mine.rows);
    job_.staged_dy = at<bfloat16>(rank_, mine.dy_rows);
  }
  if (memory_->passes) {
    static_assert(sizeof(unsigned long long) == sizeof memory_->passes->begun);
    job_.begun = reinterpret_cast<unsigned long long*>(&memory_->passes->begun);
    job_.ended = reinterpret_cast<unsigned long long*>(&memory_->passes->ended);
  }
}

void CudaRanks::place_on_device() {
  Peers peers{};
  for (int r = 0; r < size_; ++r) {
    peers.slots[r] = at<bfloat16>(r, windows_[r].route_rows);
    peers.dprob[r] = at<float>(r, windows_[r].route_dprob);
    peers.arrivals[r] = at<unsigned long long>(r, windows_[r].arrivals);
    peers.pulled[r] = at<unsigned long long>(r, windows_[r].flags) + counters_.rows_pulled;
  }
  std::vector<std::int32_t> experts = plan_.expert_rank;
  experts.insert(experts.end(), plan_.local_experts.begin(), plan_.local_experts.end());
  const std::size_t bytes = experts.size() * sizeof(std::int32_t);
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, sizeof(Peers) + bytes), "memory of the ranks' places");
  on_device_ = {memory, [](void* m) { cudaFree(m); }};
  job_.peers = static_cast<Peers*>(memory);
  auto* list = reinterpret_cast<std::int32_t*>(job_.peers + 1);
  check_cuda(cudaMemcpy(memory, &peers, sizeof peers, cudaMemcpyHostToDevice), "copy of the ranks' places");
  check_cuda(cudaMemcpy(list, experts.data(), bytes, cudaMemcpyHostToDevice), "copy of the experts' ranks");
  job_.expert_rank = list;
  job_.local_experts = list + plan_.config.num_experts;
}

PassError* CudaRanks::error() const {
  static_assert(sizeof(PassError) <= sizeof(transport::HostWords::report));
  return reinterpret_cast<PassError*>(memory_->words->report);
}

int CudaRanks::blocks(int workers) const { return workers == 0 ? share_ : std::min(workers, share_); }

void CudaRanks::complete(PassData& data, void* tables, const SavedBuffer& kept) const {
  const Window& mine = windows_[rank_];
  auto* base = static_cast<std::byte*>(tables);
  data.peers = job_.peers;
  data.row_rank = reinterpret_cast<std::uint8_t*>(base + kept.row_rank);
  data.row_weight = reinterpret_cast<float*>(base + kept.row_weight);
  if (kept.first_row != absent && !data.pass.sizes.has_rounds()) data.first_row = reinterpret_cast<unsigned long long*>(base + kept.first_row);
  data.last_pass = tables_.last_pass;
  data.stopped = tables_.stopped;
  data.stop = job_.stop;
  data.error = job_.error;
  data.wait_limit_ns = static_cast<unsigned long long>(plan_.transport().timeout().count()) * 1'000'000ull;
  data.counters.arrivals = at<unsigned long long>(rank_, mine.arrivals);
  data.groups[0].slots = at<bfloat16>(rank_, mine.route_rows);
  data.groups[0].dprob = at<float>(rank_, mine.route_dprob);
}

ExchangeJob CudaRanks::exchange(const PassData& data, bool saves) const {
  ExchangeJob job = job_;
  job.pass = data.pass;
  job.x = {data.x, data.x_stride};
  job.dy = {data.dy, data.dy_stride};
  job.saves = saves;
  job.wait_limit_ns = data.wait_limit_ns;
  job.row_rank = const_cast<std::uint8_t*>(data.row_rank);  // forward's exchange writes what passes only read
  job.row_weight = const_cast<float*>(data.row_weight);
  job.first_row = const_cast<unsigned long long*>(data.first_row);
  return job;
}

void CudaRanks::check_error() const {
  const volatile PassError& found = *error();
  const volatile std::int32_t& stop = memory_->words->stop;
  if (found.state != PassError::there) {
    if (stop == 0) return;
    plan_.transport().require_usable();  // which knows why, if no kernel does
    throw Error(Status::group_failed, "the group has failed: a kernel of one of its ranks gave up");
  }
  const std::string rank = std::to_string(found.rank), awaited = std::to_string(found.awaited);
  if (found.saving >= 0) {
    throw Error(Status::invalid_argument, "saved: rank " + (found.saving ? rank : awaited) + " saves for a backward and rank " +
                                              (found.saving ? awaited : rank) +
                                              " does not; accepted: a buffer on every rank of the group, or on none");
  }
  const auto stage = static_cast<schedule::Stage>(found.stage);
  const bool own_work = found.awaited == found.rank;
  const bool begins = stage == schedule::Stage::layout || stage == schedule::Stage::publish;
  std::string text = "rank " + rank + ", stage " + schedule::to_string(stage);
  if (found.awaited < 0 || own_work) text += ", expert " + std::to_string(found.expert) + ", row block " + std::to_string(found.row_block);
  text += ": waited " + std::to_string(plan_.transport().timeout().count()) + " ms for " +
          (own_work ? "its own work" : found.awaited < 0 ? "rows of other ranks" : "rank " + awaited + (begins ? ", which has not begun this pass" : ""));
  throw Error(found.rank == rank_ ? Status::timed_out : Status::group_failed, text + "; the results are incomplete");
}

}  // namespace moelith::layer
