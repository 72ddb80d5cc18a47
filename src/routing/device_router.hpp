// The router on a GPU: the rules of router.hpp, capacity.hpp and token_order.hpp as kernels on one stream, for float
// accumulators and one rank's tokens. Nothing is read back, allocated, cleared or copied by the host; every sum has a fixed order
// that depends on T, E and k alone.
//
// Forward is one launch for few tokens, otherwise three (and one more with capacity), backward one. All pointers but those
// inside RouterConfig's plain values are device memory.
//
// What the host cannot check: a caller's id outside [-1, E) counts as an empty slot, and num_valid_tokens is clamped to
// [0, T].
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "moelith/config.hpp"
#include "moelith/limits.hpp"
#include "numerics/host_device.hpp"
#include "schedule/extents.hpp"

namespace moelith::routing {

// float or bfloat16 values.
struct DeviceFloats {
  const void* data = nullptr;
  bool is_bfloat16 = false;
  std::int64_t stride = 0;  // elements from row to row
};

struct ZeroRange {
  unsigned long long* begin = nullptr;
  std::int64_t count = 0;
};

// What a rank lets the others read, in its symmetric memory: twice, for odd and for even passes, since a rank may begin
// a pass while another still reads the tables of the one before.
struct RankTable {
  std::int64_t* header = nullptr;   // [header_length], by name:
  enum : int { tokens, valid_tokens, saves, x, x_stride, dy, dy_stride, header_length };  // x, dy: bytes from the header
  std::int64_t* offsets = nullptr;  // [E + 1]: where each global expert's routes begin
  std::int64_t* counts = nullptr;   // [E] before capacity
  std::int32_t* routes = nullptr;   // [T k], sorted by expert, in order of tokens and slots
  float* weights = nullptr;         // [T k] likewise
  std::int64_t to_odd = 0;          // bytes from these, of even passes, to those of odd ones

  MOELITH_HD RankTable of_pass(unsigned long long pass) const {
    RankTable table = *this;
    if (pass % 2 == 0) return table;
    auto move = [&](auto*& pointer) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(reinterpret_cast<char*>(pointer) + to_odd);
    };
    move(table.header), move(table.offsets), move(table.counts), move(table.routes), move(table.weights);
    return table;
  }
};

// All ranks' tables, as one of them sees them.
struct RankTables {
  std::int32_t ranks = 1, rank = 0;
  RankTable of_rank[limits::device_ranks];
  // Of this rank, in device memory: the number of the last pass that it has begun, and whether it has given up (not 0).
  unsigned long long* last_pass = nullptr;
  unsigned long long* stopped = nullptr;
};

struct DeviceRouteJob {
  RouterConfig config;
  std::int32_t num_experts = 0, top_k = 0;
  std::int64_t tokens = 0, num_sequences = 1;
  const std::int32_t* num_valid_tokens = nullptr;  // [1], or null: all

  // One of three: logits [T, E]; the caller's ids and weights [T, k], contiguous; neither: expert 0 with weight 1 (E = 1).
  DeviceFloats logits;
  const float* selection_bias = nullptr;           // [E]
  const void* caller_ids = nullptr;
  bool caller_ids_64 = false;
  const float* caller_weights = nullptr;

  // gates [T, S] = sigmoid of gate_logits, 1 for shared experts whose bit in `gated` is not set; null: not wanted.
  DeviceFloats gate_logits;
  std::int32_t shared_experts = 0;
  std::uint32_t gated = 0;
  float* gates = nullptr;

  std::int32_t* topk_ids = nullptr;                // [T, k] after capacity
  float* topk_weights = nullptr;                   // [T, k]
  std::int32_t* chosen_ids = nullptr;              // [T, k] before capacity; null without capacity
  std::int64_t* counts = nullptr;                  // [E + 1]: before capacity, and the valid tokens
  schedule::Sizes sizes;
  schedule::Layout layout;                         // written, row_route included; of several ranks valid_tokens alone
  RankTables tables;                               // of several ranks this rank's is written, for the next pass
  float* score_sums = nullptr;                     // [E], for device_global_aux_loss

  // Optional results for the caller.
  std::int32_t* out_ids = nullptr;
  float* out_weights = nullptr;
  std::int64_t* out_counts = nullptr;              // [E], after capacity
  float* aux_loss = nullptr;                       // [1]
  float* z_loss = nullptr;                         // [1]

  ZeroRange zero[6];                               // set to zero on the way
  bool stepwise = false;                           // three launches, however few the tokens: the same bits
  void* scratch = nullptr;                         // device_router_scratch_bytes, aligned to 256
};

struct DeviceRouteGradientJob {
  RouterConfig config;
  std::int32_t num_experts = 0, top_k = 0;
  std::int64_t tokens = 0, num_sequences = 1;
  const std::int64_t* valid_tokens = nullptr;      // [1], Layout::valid_tokens of forward
  DeviceFloats logits;
  const std::int32_t* topk_ids = nullptr;          // [T, k] of forward
  const std::int32_t* chosen_ids = nullptr;        // [T, k]; topk_ids without capacity
  const std::int64_t* counts = nullptr;            // [E + 1] of forward

  const float* d_pass_weights = nullptr;           // [T, k] from the pass; null: 0
  const float* d_given_weights = nullptr;          // [T, k] upstream; null: 0. Added where topk_ids >= 0.
  const float* d_aux_loss = nullptr;               // [1]; null: 0
  const float* d_z_loss = nullptr;                 // [1]; null: 0
  DeviceFloats gate_logits;                        // [T, S], as forward had them
  const float* d_gates = nullptr;                  // [T, S] from the pass; null: 0
  std::int32_t shared_experts = 0;
  std::uint32_t gated = 0;

  // Null: not wanted.
  void* d_logits = nullptr;                        // [T, E] of the logits' dtype
  std::int64_t d_logits_stride = 0;
  float* d_topk_weights = nullptr;                 // [T, k]: both gradients together
  void* d_gate_logits = nullptr;                   // [T, S]
  bool d_gate_logits_bfloat16 = false;
};

std::size_t device_router_scratch_bytes(const RouterConfig& config, std::int32_t num_experts, std::int32_t top_k,
                                        std::int64_t tokens);
// Loads the kernels of these functions: a kernel's first launch might otherwise wait for others that wait for this rank.
void prepare_device_router(std::int32_t num_experts);
// Several ranks: the aux loss of all their tokens, when their tables are there for this pass; leaves their counts and
// valid tokens in `counts`. Of `job` it reads config, num_experts, top_k, tables, score_sums.
bool wants_global_aux_loss(const DeviceRouteJob& job);
void device_global_aux_loss(const DeviceRouteJob& job, void* stream);
// Whether device_route() has a single launch (or two, with capacity) for the job.
bool routes_at_once(const DeviceRouteJob& job);
// stream: a cudaStream_t. Throws Error(device_error). A kernel launched behind it may start beside its last one
// (cudaLaunchAttributeProgrammaticStreamSerialization) and has to wait for that (griddepcontrol.wait).
void device_route(const DeviceRouteJob& job, void* stream);
void device_route_gradient(const DeviceRouteGradientJob& job, void* stream);

}  // namespace moelith::routing
