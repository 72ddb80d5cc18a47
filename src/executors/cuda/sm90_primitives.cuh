// The Hopper instructions that the tile operations are made of, one small function each: mbarriers, the tensor copy
// engine (TMA), bulk copies, warpgroup matrix products, matrix stores to shared memory, fences.
// PTX ISA 8.x, sections "Parallel synchronization and communication", "Data movement", "Asynchronous warpgroup MMA".
// Shared memory is named by its 32-bit address in the shared window throughout.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <utility>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>

namespace moelith::executors::cuda::sm90 {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarriers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once and adds `bytes` to what the phase still waits for from the copy engine.
__device__ __forceinline__ void barrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is complete. A fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ bool barrier_complete(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The block's place among those of its cluster, and a place in shared memory as the block `rank` of them has it.
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ std::uint32_t address_in(std::uint32_t rank, std::uint32_t address) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Arrives at an address from address_in(). The first is for stages that have been read: by the tensor cores, whose
// products were waited for, or by loads whose values have been used. The second, with its wait, also orders what this
// thread wrote.
__device__ __forceinline__ void barrier_arrive_at(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_in_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait_in_cluster(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void store_in_cluster(std::uint32_t address, std::int64_t value) {
  asm volatile("st.shared::cluster.s64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
// A count that one warp of a block keeps for another, and that orders nothing else.
__device__ __forceinline__ void count_up(std::uint32_t address, std::uint32_t by) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(address), "r"(by) : "memory");
}
__device__ __forceinline__ std::uint32_t load_count(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], 0;" : "=r"(value) : "r"(address) : "memory");
  return value;
}
// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// One lane of the warp, the same each time. Where what the copy engine is told is alike for all lanes, the compiler knows by this
// that there is nothing to repeat lane by lane: a box takes 30 cycles of a warp instead of 95.
__device__ __forceinline__ bool elected() {
  std::uint32_t yes;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(yes));
  return yes != 0;
}

// Hardware barriers by number, for whole warps; `threads` counts all that take part.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- copies into shared memory ---------------------------------------------------------------------------------------

// One box of a tensor map into shared memory; coordinates innermost first. Completion counts as bytes on `barrier`.
__device__ __forceinline__ void tma_load(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                                         int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                                         int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_load(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                                         int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
          "r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// The same box to the same place in every block of `mask`, each with the barrier that it has there.
__device__ __forceinline__ void tma_load_to_all(std::uint32_t destination, const CUtensorMap* map,
                                                std::uint32_t barrier, int c0, int c1, std::uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], "
      "%5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(mask)
      : "memory");
}
// A box into the second-level cache.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1)
               : "memory");
}
// `bytes` (a multiple of 16) that lie one after the other, in and out. Stores of a thread belong to groups, which it can wait
// for: until they have read their source, or until they are done.
__device__ __forceinline__ void bulk_load(std::uint32_t destination, const void* source, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* destination, std::uint32_t source, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Bytes into shared memory by the thread itself, through no register. Only groups of such copies can be awaited: all but the
// last `Pending` that were committed.
template <int Bytes>
__device__ __forceinline__ void copy_async(std::uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(destination), "l"(source), "n"(Bytes) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Between ordinary accesses and those of the copy engine or the tensor cores, in either order. The first
// covers shared memory alone, the second global memory too.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// --- launches --------------------------------------------------------------------------------------------------------

// Until the kernel in front is done, where this one was launched to start beside it; otherwise at once.
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// A tensor map into the cache that the copy engine reads it through.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// --- registers -------------------------------------------------------------------------------------------------------

template <int Count>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// --- matrix products -------------------------------------------------------------------------------------------------

// Operands lie in shared memory in the copy engine's 128-byte swizzle, in blocks of 8 rows x 128 bytes (1024 bytes,
// aligned to that): byte b of row r of a block is at r * 128 + (b ^ ((r & 7) << 4)).
//   k_major    rows are rows of the operand (M or N), 64 k values each; 8-row blocks follow each other.
//              The next 16 k are 32 bytes further.
//   mn_major   rows are k, 64 values of M or N each; 8-row blocks follow each other, and the next 64 of M or N start
//              `mn_block_bytes` further. The next 16 k are 2048 bytes further.
enum class Major { k, mn };
inline constexpr int mn_block_bytes = 64 * 128;  // 64 k rows of 128 bytes

// Descriptor of the operand at `address`; only its low half depends on that.
template <Major Layout>
__device__ __forceinline__ std::uint64_t operand_descriptor(std::uint32_t address) {
  constexpr std::uint32_t swizzle_128 = 1u << 30, stride = 1024 >> 4;  // between 8-row blocks
  constexpr std::uint32_t leading = ((Layout == Major::mn ? mn_block_bytes : 16) >> 4) << 16;
  std::uint64_t descriptor;
  constexpr std::uint32_t own = 0x3ffff;  // above these bits the address names the block of the cluster
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(((address & own) >> 4) | leading), "r"(swizzle_128 | stride));
  return descriptor;
}
// Bytes from one 16-deep k step to the next.
template <Major Layout>
inline constexpr std::uint32_t k_step_bytes = Layout == Major::mn ? 2048 : 32;

template <int N, cute::SM90::GMMA::Major A, cute::SM90::GMMA::Major B>
struct ProductOf;
#define MOELITH_SM90_PRODUCT(N)                                          \
  template <cute::SM90::GMMA::Major A, cute::SM90::GMMA::Major B>        \
  struct ProductOf<N, A, B> {                                            \
    using type = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<A, B>; \
  };
MOELITH_SM90_PRODUCT(64)
MOELITH_SM90_PRODUCT(128)
MOELITH_SM90_PRODUCT(192)
#undef MOELITH_SM90_PRODUCT

namespace detail {
template <class Product, int Count, std::size_t... I>
__device__ __forceinline__ void issue_product(float (&d)[Count], std::uint64_t a, std::uint64_t b,
                                              std::index_sequence<I...>) {
  Product::fma(a, b, d[I]..., cute::SM90::GMMA::ScaleOut::One);
}
}  // namespace detail

// d [64, N] += a [64, 16] b [16, N] in the first N / 2 of the registers, issued asynchronously by the four warps of a
// warpgroup. Of each 8 columns, thread t holds row (t / 32) * 16 + (t % 32) / 4 in values 4c, 4c + 1 (columns 8c + 2 (t
// % 4), + 1) and the row 8 further down in 4c + 2, 4c + 3.
template <int N, Major A, Major B, int Count>
__device__ __forceinline__ void product(float (&d)[Count], std::uint64_t a, std::uint64_t b) {
  using cute::SM90::GMMA::Major;
  using Product = typename ProductOf<N, A == sm90::Major::mn ? Major::MN : Major::K,
                                     B == sm90::Major::mn ? Major::MN : Major::K>::type;
  detail::issue_product<Product>(d, a, b, std::make_index_sequence<N / 2>{});
}
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Tells the compiler that the registers change hands here, so that it moves no use of them across.
template <int Count>
__device__ __forceinline__ void hold(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// --- fragments to shared memory and back -----------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_8(std::uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_4(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_8(std::uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_shared_16(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Two floats rounded to bfloat16 (nearest, ties to even), the first in the low half.
__device__ __forceinline__ std::uint32_t pack_bfloat16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_bfloat16(std::uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bfloat16(std::uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// threadIdx.x, read anew: what follows from it is then computed where it is used instead of being kept in registers all
// through the main loop.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
  return thread;
}

// Of this SM.
__device__ __forceinline__ std::uint32_t cycles() {
  std::uint32_t now;
  asm volatile("mov.u32 %0, %clock;" : "=r"(now));
  return now;
}

// --- counters in global memory ---------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* counter) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(unsigned long long* counter, unsigned long long value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
}
// The same between ranks, whose GPUs may differ.
__device__ __forceinline__ unsigned long long load_acquire_system(const unsigned long long* counter) {
  unsigned long long value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}
// After a __threadfence_system(), which then counts for all of them.
__device__ __forceinline__ void add_system(unsigned long long* counter, unsigned long long value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
}
__device__ __forceinline__ void store_system(unsigned long long* flag, unsigned long long value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

}  // namespace moelith::executors::cuda::sm90
