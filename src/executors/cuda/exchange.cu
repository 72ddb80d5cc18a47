#include "executors/cuda/exchange.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cuda/atomic>
#include <string>

#include "cuda_check.hpp"
#include "executors/cuda/pass_error.cuh"
#include "moelith/tensor.hpp"

namespace moelith::executors::cuda {
namespace {

using routing::RankTable;
using schedule::Direction;
using schedule::Stage;

constexpr int meeting_threads = 256, collecting_threads = 256, collecting_blocks = 8,  // blocks: of an expert
              staging_threads = 256;

using Flag = ::cuda::atomic_ref<unsigned long long, ::cuda::thread_scope_system>;

// Where rows are, from the table that names them: alike for all ranks of a process.
__device__ std::int64_t distance(const RankTable& table, const bfloat16* rows) {
  return reinterpret_cast<const char*>(rows) - reinterpret_cast<const char*>(table.header);
}
__device__ Peers::Rows rows_at(const RankTable& table, int place, int stride) {
  const char* data = reinterpret_cast<const char*>(table.header) + table.header[place];
  return {reinterpret_cast<const bfloat16*>(data), table.header[stride]};
}

// One more pass, in host memory (null: not wanted) that only this rank's stream writes: no atomic addition, which not
// every GPU can do there.
__device__ void count_pass(unsigned long long* passes) {
  if (!passes) return;
  const Flag count(*passes);
  count.store(count.load(::cuda::std::memory_order_relaxed) + 1, ::cuda::std::memory_order_release);
}

// Until rank `from` has raised its flag for this pass. False: it did not come, or the group has failed.
__device__ bool await_rank(const ExchangeJob& job, int from, unsigned long long pass) {
  Flag flag(job.flags[job.tables.rank][from]);
  unsigned long long began = 0;
  for (unsigned tries = 1;; ++tries) {
    if (static_cast<long long>(flag.load(::cuda::std::memory_order_acquire) - pass) >= 0) return true;
    __nanosleep(100);
    if (tries % 256 != 0) continue;
    const unsigned long long now = global_time();
    if (began == 0) began = now;
    if (group_failed(job.stop)) return false;
    if (now - began <= job.wait_limit_ns) continue;
    PassError what;
    what.stage = static_cast<std::int32_t>(job.pass.sizes.direction == Direction::forward ? Stage::layout : Stage::publish);
    what.rank = job.tables.rank;
    what.awaited = from;
    report(job.error, job.stop, what);
    return false;
  }
}

// All ranks keep what a backward needs, or none does: the ones that do would wait in backward for the others.
__device__ bool saves_as_here(const ExchangeJob& job, const RankTable& theirs, int from) {
  if ((theirs.header[RankTable::saves] != 0) == job.saves) return true;
  PassError what;
  what.stage = static_cast<std::int32_t>(Stage::layout);
  what.rank = job.tables.rank;
  what.awaited = from;
  what.saving = job.saves;
  report(job.error, job.stop, what);
  return false;
}

// By all threads; counts: room for [R, E] in shared memory, expert_rank: for [E].
__device__ void make_layout(const ExchangeJob& job, unsigned long long pass, std::int32_t* counts, std::int32_t* expert_rank) {
  const std::int32_t experts = job.num_experts;
  for (int i = threadIdx.x; i < job.tables.ranks * experts; i += blockDim.x) {
    const std::int64_t* offsets = job.tables.of_rank[i / experts].of_pass(pass).offsets + i % experts;
    counts[i] = static_cast<std::int32_t>(offsets[1] - offsets[0]);
  }
  for (int e = threadIdx.x; e < experts; e += blockDim.x) expert_rank[e] = job.expert_rank[e];
  if (threadIdx.x < job.tables.ranks) {
    job.pass.layout.tokens_of_rank[threadIdx.x] = job.tables.of_rank[threadIdx.x].of_pass(pass).header[RankTable::tokens];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  schedule::Sizes sizes = job.pass.sizes;
  if (sizes.tile.row_block == 128) sizes.tile.row_block = 128;  // divisions by a constant are shifts
  schedule::fill_layout(sizes, job.pass.layout, experts, expert_rank,
                        [&](std::int32_t rank, std::int32_t expert) { return std::int64_t(counts[rank * experts + expert]); });
}

// Of a rank, where the tokens of all ranks but this one are counted together; with a Layout that is filled.
__device__ std::int64_t first_token_of(const schedule::Pass& pass, int rank) {
  std::int64_t tokens = 0;
  for (int r = 0; r < rank; ++r) {
    if (r != pass.sizes.rank) tokens += pass.layout.tokens_of_rank[r];
  }
  return tokens;
}

// One block: this rank begins the pass, and meets all others.
__global__ void __launch_bounds__(meeting_threads) meet(const __grid_constant__ ExchangeJob job) {
  extern __shared__ std::int32_t memory[];
  const routing::RankTables& tables = job.tables;
  const int thread = threadIdx.x;
  const unsigned long long pass = *tables.last_pass + 1;
  const bool there = thread < tables.ranks;
  if (thread == 0) {
    const RankTable mine = tables.of_rank[tables.rank].of_pass(pass);
    mine.header[RankTable::saves] = job.saves;
    mine.header[RankTable::x] = distance(mine, job.x.data);
    mine.header[RankTable::x_stride] = job.x.stride;
    mine.header[RankTable::dy] = distance(mine, job.dy.data);
    mine.header[RankTable::dy_stride] = job.dy.stride;
  }
  bool fails = thread == 0 && (*tables.stopped != 0 || group_failed(job.stop));
  __threadfence_system();
  const bool stopped = __syncthreads_or(fails);
  if (thread == meeting_threads - 1) count_pass(job.begun);  // a thread that waits for nobody
  if (!stopped) {
    if (there && thread != tables.rank) {
      Flag(job.flags[thread][tables.rank]).store(pass, ::cuda::std::memory_order_release);
      fails = !await_rank(job, thread, pass);
    }
    if (there && !fails) {
      const RankTable theirs = tables.of_rank[thread].of_pass(pass);
      job.peers->x[thread] = rows_at(theirs, RankTable::x, RankTable::x_stride);
      job.peers->dy[thread] = rows_at(theirs, RankTable::dy, RankTable::dy_stride);
      fails = job.pass.sizes.direction == Direction::forward && !saves_as_here(job, theirs, thread);
    }
    fails = __syncthreads_or(fails);
  } else {
    fails = true;
  }
  if (thread == 0) *tables.last_pass = pass, *tables.stopped = fails;
  if (fails) return;
  if (job.pass.sizes.direction == Direction::forward) make_layout(job, pass, memory, memory + tables.ranks * job.num_experts);
  if (there) job.peers->first_token[thread] = first_token_of(job.pass, thread);
}

// collecting_blocks blocks for each local expert: its rows, source rank by source rank.
__global__ void __launch_bounds__(collecting_threads) collect(const __grid_constant__ ExchangeJob job) {
  const routing::RankTables& tables = job.tables;
  if (*tables.stopped) return;
  const unsigned long long pass = *tables.last_pass;
  const std::int32_t local = blockIdx.x, global = job.local_experts[local];
  const schedule::RowRange all = job.pass.expert_rows(local);
  const std::int64_t block_rows = job.pass.sizes.tile.row_block;
  for (std::int32_t r = 0; r < tables.ranks; ++r) {
    const RankTable theirs = tables.of_rank[r].of_pass(pass);
    const std::int64_t begin = job.pass.source_begin(local, r), end = job.pass.source_begin(local, r + 1);
    const std::int64_t from = theirs.offsets[global] - begin;
    for (std::int64_t row = begin + blockIdx.y * collecting_threads + threadIdx.x; row < end;
         row += collecting_blocks * collecting_threads) {
      const std::int32_t route = theirs.routes[from + row];
      job.pass.layout.row_route[row] = route;
      job.row_weight[row] = theirs.weights[from + row];
      job.row_rank[row] = static_cast<std::uint8_t>(r);
      if (!job.first_row || r == tables.rank) continue;
      const std::int64_t block = schedule::quotient(row - all.begin, block_rows);
      const FirstRow first(row, job.pass.layout.block_begin[local] + block, schedule::min_of(block_rows, all.size() - block * block_rows));
      atomicMax(job.first_row + job.peers->first_token[r] + schedule::quotient(route, job.pass.sizes.top_k), first.word);
    }
  }
}

// This rank's rows for the others: of x, and with blockIdx.y == 1 of dY.
struct Staging {
  Peers::Rows from[2];
  bfloat16* to[2];
  std::int64_t tokens, hidden;
};
__global__ void __launch_bounds__(staging_threads) stage(const __grid_constant__ Staging job) {
  const Peers::Rows from = job.from[blockIdx.y];
  bfloat16* const to = job.to[blockIdx.y];
  constexpr int batch = 4;  // pieces of 16 bytes that a lane has on their way
  const int lane = threadIdx.x % 32, warps = staging_threads / 32;
  for (std::int64_t row = std::int64_t(blockIdx.x) * warps + threadIdx.x / 32; row < job.tokens;
       row += std::int64_t(gridDim.x) * warps) {
    const bfloat16* const source = from.data + row * from.stride;
    bfloat16* const target = to + row * job.hidden;
    for (std::int64_t column = lane * 8; column < job.hidden; column += batch * 256) {
      uint4 piece[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (column + i * 256 < job.hidden) piece[i] = __ldcs(reinterpret_cast<const uint4*>(source + column + i * 256));
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (column + i * 256 < job.hidden) *reinterpret_cast<uint4*>(target + column + i * 256) = piece[i];
      }
    }
  }
}

__global__ void count_end(unsigned long long* ended) { count_pass(ended); }

// Puts the rows where the others find them, and tells the job so.
void run_staging(ExchangeJob& job, cudaStream_t stream) {
  const bool backward = job.pass.sizes.direction == Direction::backward;
  Staging staging{{job.x, job.dy}, {job.staged_x, job.staged_dy}, job.pass.sizes.tokens, job.pass.sizes.hidden_size};
  job.x = {job.staged_x, staging.hidden};
  if (backward) job.dy = {job.staged_dy, staging.hidden};
  if (staging.tokens == 0) return;
  const std::int64_t blocks = std::min<std::int64_t>((staging.tokens * 32 + staging_threads - 1) / staging_threads, 1024);
  stage<<<dim3(unsigned(blocks), backward ? 2 : 1), staging_threads, 0, stream>>>(staging);
  check_cuda(cudaGetLastError(), "launch of the copy of rows for other ranks");
}

constexpr int largest_layout = (limits::device_ranks + 1) * limits::num_experts * 4;  // bytes of shared memory

}  // namespace

void prepare_exchange() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncSetAttribute(meet, cudaFuncAttributeMaxDynamicSharedMemorySize, largest_layout), "shared memory of the exchange");
  check_cuda(cudaFuncGetAttributes(&attributes, collect), "kernels of the exchange");
  check_cuda(cudaFuncGetAttributes(&attributes, stage), "kernels of the exchange");
  check_cuda(cudaFuncGetAttributes(&attributes, count_end), "kernels of the exchange");
}

void run_exchange(const ExchangeJob& given, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  ExchangeJob job = given;
  if (job.staged_x) run_staging(job, stream);
  const bool forward = job.pass.sizes.direction == Direction::forward;
  meet<<<1, meeting_threads, forward ? (job.tables.ranks + 1) * job.num_experts * 4 : 0, stream>>>(job);
  check_cuda(cudaGetLastError(), "launch of the exchange");
  const std::int32_t experts = job.pass.sizes.local_experts;
  if (!forward || experts == 0) return;
  collect<<<dim3(unsigned(experts), collecting_blocks), collecting_threads, 0, stream>>>(job);
  check_cuda(cudaGetLastError(), "launch of the collection of routes");
}

void end_exchange(const ExchangeJob& job, void* stream) {
  if (!job.ended) return;
  count_end<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(job.ended);
  check_cuda(cudaGetLastError(), "launch of the count of passes");
}

}  // namespace moelith::executors::cuda
