// config -> plan -> forward, backward. A plan tells the size of every buffer before anything is allocated; the caller
// owns all memory (and, on a GPU, the stream). A plan holds no tensor: layers with equal configs may share one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moelith/config.hpp"
#include "moelith/group.hpp"
#include "moelith/tensor.hpp"
#include "moelith/timeline.hpp"

namespace moelith {

enum class DeviceKind : std::uint8_t { cpu, cuda };

struct PlanOptions {
  std::int64_t max_tokens = 0;      // the largest T of any call on this rank; 0 is allowed (then every call has T = 0)
  DeviceKind device = DeviceKind::cpu;
  int workers = 0;                  // CPU threads, or SMs of the GPU (which work in pairs: at least 2, an even number), up
                                    // to limits::workers; 0: all that the process may use, where ranks of the group that
                                    // may use the same processors share them evenly. Ranks that share a GPU have an equal
                                    // share of its SMs each, and never more
  bool recompute = false;           // keep x and the routing table only; backward runs gate_up again
  // Several ranks: how many routed rows a rank's buffers have room for, as a multiple of those that a balanced routing
  // brings it: factor x T x k, where T is the mean of the ranks' max_tokens (with experts spread unevenly T x k x R x L /
  // E), rounded up to whole row blocks of its tiles. What does not fit is worked through in rounds: nothing is dropped,
  // and results are the same bits for any factor, which ranks may choose apart. Backward makes the pre-activation of rows
  // beyond the first round again (gate_up once more). 0: chosen by the plan, 1.25 on the CPU, infinity on a GPU; infinity:
  // room for every row that may come, R times that of a balanced routing, and on GPUs a token's row mostly crosses to a rank
  // once, where there may be rounds once for each of its experts there. Of no effect for one rank, which gets T x k rows at most.
  double receive_capacity_factor = 0;
  Group group = Group::single();
  // expert_rank[e]: the rank that holds expert e; empty: contiguous, the first E % R ranks hold one more. Local experts
  // of a rank are numbered in ascending global id.
  std::vector<std::int32_t> expert_rank;

  // For tests and tuning; results do not depend on any of these.
  std::int32_t tile_columns = 0;    // width of a GEMM tile; 0: chosen by the plan
  std::uint64_t shuffle_seed = 0;   // CPU: nonzero takes tiles in a random order among those that are ready
  bool timeline = false;            // keep what the workers did in the last pass, for Plan::timeline
};

// A tensor for each of the L local experts, wherever it lies: contiguous, of one dtype (of weights: config.dtype; of their
// gradients: config.dtype or the accumulator dtype), in the device's memory. Each list has L pointers, or none.
struct ExpertPointers {
  DataType dtype = DataType::bfloat16;
  std::vector<void*> gate_up_proj;  // [2I, H], [I, H] without a gate
  std::vector<void*> gate_up_bias;  // [2I]
  std::vector<void*> down_proj;     // [H, I]
  std::vector<void*> down_bias;     // [H]
};
class BoundExperts;  // made by Plan::bind

// Weights of the L local experts and the S shared experts. All contiguous, of config.dtype.
struct Weights {
  TensorView gate_up_proj;  // [L, 2I, H], rows [gate; up]; [L, I, H] without a gate
  TensorView gate_up_bias;  // [L, 2I] if config.gate_up_bias
  TensorView down_proj;     // [L, H, I]
  TensorView down_bias;     // [L, H] if config.down_bias
  struct Shared {
    TensorView gate_up_proj;  // [2 I_s, H]
    TensorView gate_up_bias;  // [2 I_s]
    TensorView down_proj;     // [H, I_s]
    TensorView down_bias;     // [H]
  };
  std::vector<Shared> shared;  // S entries
  // Tensors of the local experts that lie apart; those that it has are not given above.
  std::shared_ptr<const BoundExperts> bound;
};

// What of a call may share memory: inputs with each other (saved, workspace and every output may not overlap anything);
// outputs and gradients overlap neither each other nor any input, weight or upstream gradient, not even with equal
// addresses (y is not written over x, nor dx over dy). x and every input must keep their values until backward.

// The inputs of a forward call; backward gets the same ones again. Either router_logits, or topk_ids and topk_weights.
struct Inputs {
  TensorView x;                   // [T, H] of config.dtype; rows contiguous, row stride >= H
  TensorView router_logits;       // [T, E] of config.dtype or of the accumulator dtype
  TensorView topk_ids;            // [T, k] int32 or int64, global expert ids in [-1, E); -1: an empty slot
  TensorView topk_weights;        // [T, k] of the accumulator dtype
  TensorView selection_bias;      // [E] of the accumulator dtype, if router.selection_bias
  TensorView shared_gate_logits;  // [T, S] of config.dtype or of the accumulator dtype, if any shared expert is gated
  TensorView num_valid_tokens;    // [1] int32, in the device's memory: rows from it on count as absent (y = 0, dx = 0)
  std::int64_t num_sequences = 1; // sequence aux loss: T is this many sequences of T / num_sequences tokens
  Weights weights;
};

struct Outputs {
  TensorView y;              // [T, H] of config.dtype; rows contiguous, row stride >= H
  TensorView topk_ids;       // optional, [T, k] int32: after capacity, -1 where dropped
  TensorView topk_weights;   // optional, [T, k] of the accumulator dtype
  TensorView expert_counts;  // optional, [E] int64: this rank's routes to each expert, after capacity
  TensorView aux_loss;       // optional, [1] of the accumulator dtype
  TensorView z_loss;         // optional, [1] of the accumulator dtype
};

// A gradient of a weight to be written, of config.dtype or the accumulator dtype; or, with accumulate, added to
// (main-gradient accumulation), then of the accumulator dtype: float32, or float64 for a float64 layer. Not given: not
// computed.
struct Gradient {
  TensorView tensor;
  bool accumulate = false;
};

struct WeightGradients {
  Gradient gate_up_proj, gate_up_bias, down_proj, down_bias;  // shapes as in Weights
  struct Shared {
    Gradient gate_up_proj, gate_up_bias, down_proj, down_bias;
  };
  std::vector<Shared> shared;  // empty, or S entries
  // Gradients of the local experts that lie apart: those that it has are computed, and not given above, where only
  // their `accumulate` counts.
  std::shared_ptr<const BoundExperts> bound;
};

// Upstream gradients; each may be left out, which counts as zero (at least one must be given).
struct OutputGradients {
  TensorView y;             // [T, H] of config.dtype; rows contiguous, row stride >= H
  TensorView topk_weights;  // [T, k] of the accumulator dtype: gradient into Outputs::topk_weights
  TensorView aux_loss;      // [1] of the accumulator dtype
  TensorView z_loss;        // [1] of the accumulator dtype
};

struct InputGradients {
  TensorView x;                   // [T, H] of config.dtype; rows contiguous, row stride >= H
  TensorView router_logits;       // [T, E], dtype of the logits
  TensorView topk_weights;        // [T, k] of the accumulator dtype, when the caller brought the weights
  TensorView shared_gate_logits;  // [T, S], dtype of those logits
  WeightGradients weights;
};

// Bytes, for a call with T tokens. Buffers must be aligned to 256 bytes and need no initialisation.
struct BufferSizes {
  std::uint64_t saved = 0;      // one for each forward that awaits its backward; 0 for a forward without gradients
  std::uint64_t workspace = 0;  // scratch of any one pass; may be shared by all layers of a group
  std::string formula;          // how `saved` comes about, for people
};

class Plan {
 public:
  // Throws Error(invalid_argument | unsupported). Collective over options.group: every rank calls with an equal config.
  // Where a collective call of one rank of several throws, whatever the reason, those of the others throw
  // Error(group_failed), which names that rank and its error; the group is unusable from then on.
  static Plan create(const LayerConfig& config, const PlanOptions& options);

  const LayerConfig& config() const;
  const PlanOptions& options() const;
  std::int32_t num_local_experts() const;                    // L
  std::vector<std::int32_t> local_experts() const;           // their global ids, ascending
  BufferSizes buffer_sizes(std::int64_t tokens) const;       // tokens <= max_tokens; monotone in tokens

  // Makes ready what the calls of this plan may be given in the place of stacked tensors, for as long as the memory
  // stays where it is. Once, outside of a training step: on a GPU it allocates and copies. Throws Error.
  std::shared_ptr<const BoundExperts> bind(const ExpertPointers& pointers) const;

  // saved: a buffer of buffer_sizes(T).saved bytes that a later backward gets, or null for a forward without
  // gradients; either on every rank of the group or on none. stream: a cudaStream_t for a GPU plan, otherwise null.
  // Collective over the group.
  // Throws Error; on invalid_argument this rank has written nothing (but where ranks differ in having `saved`). Shapes,
  // dtypes, strides and alignment are checked on every device. Values (topk_ids, num_valid_tokens) are on the CPU;
  // those of a GPU are not looked at by the host: an id that is no expert's is an empty slot there, and num_valid_tokens is
  // clamped to 0 .. T.
  void forward(const Inputs& inputs, const Outputs& outputs, void* saved, void* workspace, void* stream = nullptr) const;
  // inputs: those of the forward that filled saved. May be called several times for one forward (retain_graph): saved is
  // only read. Collective over the group, also for a rank that has no gradient of y or wants none: rows of others went
  // through its experts. Throws Error as forward. A saved buffer that was not filled by a forward of an equal plan with
  // as many tokens and the same kind of routes is refused on the CPU; a GPU's cannot be looked at without waiting, so
  // there the caller answers for it.
  void backward(const Inputs& inputs, const void* saved, const OutputGradients& output_gradients,
                const InputGradients& input_gradients, void* workspace, void* stream = nullptr) const;

  // What the workers did in the last pass of this plan that ended, in no particular order; of a plan made with
  // PlanOptions::timeline. On a GPU it waits for the device, and of a warpgroup's tiles those after the 4096th are left
  // out. Throws Error.
  std::vector<TileSpan> timeline() const;

  class Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
};

// The bias update of aux-loss-free balancing (DeepSeek-V3, arXiv 2412.19437 section 2.1.2), in place:
// bias[e] += rate * sign(mean(counts) - counts[e]). bias: [E] float32 or float64; counts: [E] int64, over whatever
// batch (and ranks) the caller has summed. Both in the host's memory. Throws Error(invalid_argument); a build with CUDA
// refuses memory of a GPU.
void update_selection_bias(const TensorView& bias, const TensorView& counts, double rate);

}  // namespace moelith
