// What a plan of several ranks keeps on its GPU beside what a plan of one rank has: the symmetric memory and who finds
// what in it, the SMs that are this rank's, and the word for what went wrong.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "executors/cuda/exchange.hpp"
#include "executors/cuda/pass_data.hpp"
#include "layer/plan.hpp"

namespace moelith::layer {

class CudaRanks {
 public:
  // Collective. Throws Error.
  CudaRanks(const Plan::Impl& plan, const schedule::TileShape& tile);

  const routing::RankTables& tables() const { return tables_; }
  executors::cuda::PassError* error() const;
  // SMs of this rank: those that are asked for (0: all), as far as they are its share of the GPU.
  int blocks(int workers) const;
  // Fills in what a pass of several ranks has of its own; tables: of the call, that `kept` describes.
  void complete(executors::cuda::PassData& data, void* tables, const SavedBuffer& kept) const;
  // Of a pass that is otherwise complete.
  executors::cuda::ExchangeJob exchange(const executors::cuda::PassData& data, bool saves) const;
  // Throws what a kernel of any rank has given up for.
  void check_error() const;

 private:
  template <class U>
  U* at(int rank, std::uint64_t offset) const;
  void count_from_last_pass(std::byte* memory) const;
  void place_tables();
  void place_on_device();

  const Plan::Impl& plan_;
  int size_, rank_, share_ = 0;
  schedule::CounterMap counters_{};  // of a call with max_tokens; what ranks share is alike in all calls
  std::vector<Window> windows_;      // [R]
  std::shared_ptr<const transport::DeviceMemory> memory_;
  routing::RankTables tables_;
  executors::cuda::ExchangeJob job_;     // what is alike in all passes
  std::shared_ptr<void> on_device_;      // Peers, then int32 [E] and [L]
};

}  // namespace moelith::layer
