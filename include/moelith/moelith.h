/* The C interface of Moelith: the mixture-of-experts layer of include/moelith/config.hpp and layer.hpp, one to one.
 *
 * Rules that hold for every call:
 *  - It returns a status; anything but MOELITH_OK leaves a text for people behind, see moelith_last_error. Out
 *    parameters are written on MOELITH_OK only.
 *  - A struct that begins with struct_size is passed with struct_size = sizeof of it and everything not used set to
 *    zero: `moelith_inputs_t inputs = {.struct_size = sizeof inputs};`. Zero means "not given", "off" or "the default".
 *    A library takes the structs of older headers (a smaller struct_size); it refuses those of newer ones.
 *  - The structs without struct_size (tensor, gradient and the shared-expert ones) never change.
 *  - Flags are int32_t: 0 is off, anything else on. Sizes of tensors are in elements, those of buffers in bytes.
 *  - The caller owns all tensors, buffers and structs; nothing is kept after the call, except by handles.
 *  - A handle may be used from several threads at once; it must not be destroyed while another call uses it.
 *  - Where a call takes a stream, it comes last: a cudaStream_t for a plan on a GPU, otherwise NULL.
 *
 * Symbols of shapes: T tokens of this rank, H hidden_size, I intermediate_size, E num_experts (of the whole group),
 * L local experts (of this rank), k top_k, S shared experts, R ranks. "Accumulator dtype" is float64 for a float64
 * layer and float32 for every other. */
#ifndef MOELITH_MOELITH_H_
#define MOELITH_MOELITH_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define MOELITH_API
#else
#define MOELITH_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header; moelith_version() is that of the library at run time. */
#define MOELITH_VERSION_MAJOR 0
#define MOELITH_VERSION_MINOR 1
#define MOELITH_VERSION_PATCH 0
#define MOELITH_VERSION (MOELITH_VERSION_MAJOR * 10000 + MOELITH_VERSION_MINOR * 100 + MOELITH_VERSION_PATCH)

/* ---- status ------------------------------------------------------------------------------------------------------ */

typedef enum moelith_status {
  MOELITH_OK = 0,
  MOELITH_INVALID_ARGUMENT = 1, /* a value, shape, dtype, stride or alignment; the text names the argument */
  MOELITH_UNSUPPORTED = 2,      /* right in itself, but this build or device cannot do it; the text says why */
  MOELITH_TIMED_OUT = 3,        /* a bounded wait ran out; the text names rank, stage and what was waited for */
  MOELITH_DEVICE_ERROR = 4,     /* a CUDA or operating system call failed, or memory ran out */
  MOELITH_INTERNAL = 5,         /* a defect of the library */
  MOELITH_GROUP_FAILED = 6      /* a rank of the group has ended a call by an error; the text names it and says why */
} moelith_status_t;

/* The text of the last call that failed on the calling thread; "" if none has. It stays valid until the next failing
 * call of this thread. Never NULL. */
MOELITH_API const char* moelith_last_error(void);

/* "ok", "invalid_argument", ...; "unknown status" for any other value. Never NULL. */
MOELITH_API const char* moelith_status_name(moelith_status_t status);

/* MOELITH_VERSION of the library that is linked in. */
MOELITH_API int32_t moelith_version(void);

/* ---- values of the enumerated fields ----------------------------------------------------------------------------- */

enum { /* dtype */
  MOELITH_FLOAT64 = 0,
  MOELITH_FLOAT32 = 1,
  MOELITH_BFLOAT16 = 2,
  MOELITH_INT64 = 3,
  MOELITH_INT32 = 4,
  MOELITH_UINT8 = 5
};

enum { /* activation; the formulas are in config.hpp */
  MOELITH_SWIGLU = 0,
  MOELITH_SWIGLU_CLAMPED = 1, /* GPT-OSS */
  MOELITH_GEGLU_ERF = 2,
  MOELITH_GEGLU_TANH = 3,
  MOELITH_RELU_SQUARED = 4 /* no gate: gate_up_proj has I rows instead of 2 I */
};

enum { /* weight_placement: where the routed weight multiplies */
  MOELITH_AFTER_DOWN = 0,
  MOELITH_BEFORE_DOWN = 1
};

enum { /* router_kind */
  MOELITH_SOFTMAX_TOPK = 0,
  MOELITH_TOPK_SOFTMAX = 1,
  MOELITH_SIGMOID = 2
};

enum { /* aux_loss */
  MOELITH_AUX_NONE = 0,
  MOELITH_AUX_BATCH = 1,
  MOELITH_AUX_SEQUENCE = 2,
  MOELITH_AUX_GLOBAL = 3
};

enum { /* drop_policy */
  MOELITH_DROP_BY_SCORE = 0,
  MOELITH_DROP_BY_POSITION = 1
};

enum { /* device */
  MOELITH_CPU = 0,
  MOELITH_CUDA = 1
};

enum { MOELITH_MAX_RANK = 4, MOELITH_MAX_SHARED_EXPERTS = 8 };

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* A view of the caller's memory. rank 0 (all zero) means "not given" for an input and "not wanted" for an output. */
typedef struct moelith_tensor {
  void* data;
  int32_t dtype;
  int32_t rank;                      /* 0 to MOELITH_MAX_RANK */
  int64_t shape[MOELITH_MAX_RANK];   /* the first `rank` count */
  int64_t stride[MOELITH_MAX_RANK];  /* in elements */
} moelith_tensor_t;

/* Fills `tensor` as a contiguous view of `data`, the last dimension fastest. shape: `rank` extents, each 0 or more;
 * it may be NULL if rank is 0. data is not looked at.
 * MOELITH_INVALID_ARGUMENT: a null pointer, an unknown dtype, a rank or an extent out of range. */
MOELITH_API moelith_status_t moelith_tensor_init(moelith_tensor_t* tensor, void* data, int32_t dtype, int32_t rank,
                                                 const int64_t* shape);

/* ---- what the layer computes ------------------------------------------------------------------------------------- */

typedef struct moelith_shared_expert {
  int64_t intermediate_size;
  int32_t gated; /* scaled by sigmoid(shared_gate_logits[t, s]) */
  int32_t reserved;
} moelith_shared_expert_t;

/* LayerConfig, ActivationConfig and RouterConfig of config.hpp in one struct; the fields mean the same. Fill it with
 * moelith_layer_config_init first: not every default is zero. */
typedef struct moelith_layer_config {
  size_t struct_size;

  int64_t hidden_size;       /* H, a multiple of 8, 8 to 2^20 */
  int64_t intermediate_size; /* I, a multiple of 8, 8 to 2^20 */
  int32_t num_experts;       /* E, 1 to 1024 */
  int32_t top_k;             /* k, 1 to min(E, 32) */
  int32_t dtype;             /* of x, weights, y and gradients: MOELITH_FLOAT64 (CPU only), FLOAT32 or BFLOAT16 */

  int32_t activation;
  double activation_limit, activation_alpha, activation_up_offset; /* MOELITH_SWIGLU_CLAMPED only */
  int32_t gate_up_bias, down_bias;                                 /* flags; routed and shared experts alike */
  int32_t weight_placement;

  int32_t num_shared_experts; /* S, 0 to MOELITH_MAX_SHARED_EXPERTS */
  moelith_shared_expert_t shared_experts[MOELITH_MAX_SHARED_EXPERTS];

  int32_t router_kind;
  int32_t renormalize;    /* flag */
  double scaling_factor;
  int32_t selection_bias; /* flag */
  int32_t num_groups, top_groups, group_score_size;
  int32_t aux_loss;
  int32_t drop_policy;
  double aux_loss_coefficient, z_loss_coefficient;
  double capacity_factor; /* 0: dropless */
} moelith_layer_config_t;

/* Sets every field to its default (as config.hpp gives it; sizes are 0 and must be filled in) and struct_size to
 * `struct_size`, which is sizeof(moelith_layer_config_t) at the caller.
 * MOELITH_INVALID_ARGUMENT: config is NULL, or struct_size is not one of a known header. */
MOELITH_API moelith_status_t moelith_layer_config_init(moelith_layer_config_t* config, size_t struct_size);

/* MOELITH_OK if a plan may be made of it; MOELITH_INVALID_ARGUMENT with a text that names the field, its value and
 * what is accepted otherwise. */
MOELITH_API moelith_status_t moelith_layer_config_validate(const moelith_layer_config_t* config);

/* ---- the layers of published models ------------------------------------------------------------------------------ */

/* One of the presets' names ("mixtral-8x7b", ...) by its number, from 0; NULL past the last one. Valid for ever. */
MOELITH_API const char* moelith_preset_name(int32_t index);

/* The three below write the MoE layer of a model into *config, whose struct_size must be set; dtype is bfloat16, what
 * training chooses (losses, capacity) at its default. Rules: include/moelith/presets.hpp.
 * MOELITH_INVALID_ARGUMENT: a null pointer; a name that is no preset's (the text lists them); a text that is no Hugging
 * Face config.json, or one with a missing or wrong field (named) or a model_type that is not known; a file that cannot
 * be read. MOELITH_UNSUPPORTED: a layer that this library cannot compute. */
MOELITH_API moelith_status_t moelith_layer_config_from_preset(moelith_layer_config_t* config, const char* name);
/* json: the null-terminated text of a config.json. */
MOELITH_API moelith_status_t moelith_layer_config_from_json(moelith_layer_config_t* config, const char* json);
/* path: of the file, or of the folder that holds a config.json. */
MOELITH_API moelith_status_t moelith_layer_config_from_file(moelith_layer_config_t* config, const char* path);

/* ---- groups ------------------------------------------------------------------------------------------------------ */

/* One rank's membership of an expert-parallel group. */
typedef struct moelith_group* moelith_group_t;

/* A group of one rank. */
MOELITH_API moelith_status_t moelith_group_create_single(moelith_group_t* group);

/* The memberships of `ranks` ranks of one process, each to be used by a thread of its own; groups: room for `ranks`
 * handles, groups[r] is rank r's. Each is destroyed by itself. A plan on a GPU is on the one that is current when it is
 * made: ranks may share a GPU, each with a stream of its own and its share of the SMs, or have GPUs that reach each
 * other's memory.
 * MOELITH_INVALID_ARGUMENT: groups is NULL, ranks is out of range. */
MOELITH_API moelith_status_t moelith_group_create_threads(int32_t ranks, moelith_group_t* groups);

/* This process's rank among `ranks` processes of one host, which share memory. Collective: every process calls it with
 * the same name (1 to 128 letters, digits, '-' and '_'), which no other group has at that time, and its own rank.
 * milliseconds: the longest wait for the others, now and in passes (moelith_group_set_timeout). Plans on GPUs are each on
 * the one that is current when they are made; these reach each other's memory, or are one.
 * MOELITH_INVALID_ARGUMENT, MOELITH_TIMED_OUT: a rank did not come, the text names it; MOELITH_DEVICE_ERROR: no shared
 * memory is left. */
MOELITH_API moelith_status_t moelith_group_create_process(const char* name, int32_t rank, int32_t ranks,
                                                          int64_t milliseconds, moelith_group_t* group);
/* Likewise where the processes share no name but `bytes` bytes, 16 to 128, that nobody else has, such as those of an
 * ncclUniqueId. */
MOELITH_API moelith_status_t moelith_group_create_process_by_id(const void* id, uint64_t bytes, int32_t rank, int32_t ranks,
                                                                int64_t milliseconds, moelith_group_t* group);

/* This membership's rank and the number of ranks; either pointer may be NULL. */
MOELITH_API moelith_status_t moelith_group_rank(moelith_group_t group, int32_t* rank, int32_t* size);

/* A wait for another rank that lasts longer than `milliseconds` (above 0; 60000 by default) ends the pass with
 * MOELITH_TIMED_OUT; the group is unusable from then on. Waits that have begun keep their limit. */
MOELITH_API moelith_status_t moelith_group_set_timeout(moelith_group_t group, int64_t milliseconds);

/* Tells all ranks that this one will not come: a call of theirs that waits for it ends at once with
 * MOELITH_GROUP_FAILED, as does every later one; the text names this rank and says `reason`. A collective call that
 * fails (plan_create, forward, backward) does so by itself; this is for what goes wrong between calls. Of a group of one
 * rank it does nothing. The first reason stays. reason: may be NULL. */
MOELITH_API moelith_status_t moelith_group_fail(moelith_group_t group, const char* reason);

/* Plans that were made with the group stay valid. NULL is allowed. */
MOELITH_API void moelith_group_destroy(moelith_group_t group);

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* A layer made ready for a device and a group. It holds no tensor: layers with equal configs may share one. */
typedef struct moelith_plan* moelith_plan_t;

/* All zero but struct_size: one rank, the CPU, all its cores, calls with T = 0 only. */
typedef struct moelith_plan_options {
  size_t struct_size;
  int64_t max_tokens;     /* the largest T of any call */
  int32_t device;
  int32_t workers;        /* CPU threads, or SMs of the GPU; 0: all that the process may use, evenly among ranks that may use
                             the same */
  int32_t recompute;      /* flag: keep x and the routing table only; backward runs gate_up again */
  int32_t tile_columns;   /* results do not depend on it; 0: chosen by the plan */
  uint64_t shuffle_seed;  /* results do not depend on it; 0: tiles in order */
  moelith_group_t group;  /* NULL: one rank */
  /* The rank that holds each expert, [E]; NULL: contiguous, the first E % R ranks hold one more. */
  const int32_t* expert_rank;
  int32_t expert_rank_count; /* E, or 0 with NULL */
  /* Several ranks: the routed rows that buffers have room for, as a multiple of those that a balanced routing brings; rows
   * beyond are worked through in rounds, with the same bits. 0: chosen by the plan; infinity: room for every row that may
   * come. include/moelith/layer.hpp says it all. */
  double receive_capacity_factor;
} moelith_plan_options_t;

/* Bytes, for a call with T tokens. Buffers must be aligned to 256 bytes and need no initialisation. */
typedef struct moelith_buffer_sizes {
  size_t struct_size;
  uint64_t saved;     /* one for each forward that awaits its backward; none for a forward without gradients */
  uint64_t workspace; /* scratch of any one pass; all layers of a group may share it */
} moelith_buffer_sizes_t;

/* Makes a plan. Collective over the group: every rank calls with an equal config.
 * MOELITH_INVALID_ARGUMENT: a null pointer or a bad field, which is named. MOELITH_UNSUPPORTED: no such device here.
 * Of several ranks, any failure of one ends the call of the others too (MOELITH_GROUP_FAILED), and the group with it. */
MOELITH_API moelith_status_t moelith_plan_create(const moelith_layer_config_t* config,
                                                 const moelith_plan_options_t* options, moelith_plan_t* plan);

/* NULL is allowed. */
MOELITH_API void moelith_plan_destroy(moelith_plan_t plan);

/* The config that the plan was made of; config->struct_size must be set. */
MOELITH_API moelith_status_t moelith_plan_config(moelith_plan_t plan, moelith_layer_config_t* config);

/* L into *count. If ids is not NULL, the local experts' global ids, ascending, into ids[0..L); capacity, the room in
 * ids, must then be L or more. */
MOELITH_API moelith_status_t moelith_plan_local_experts(moelith_plan_t plan, int32_t* count, int32_t* ids,
                                                        int32_t capacity);

/* The sizes of the buffers of a call with `tokens` tokens (0 to max_tokens); they never fall as tokens grow.
 * sizes->struct_size must be set. */
MOELITH_API moelith_status_t moelith_plan_buffer_sizes(moelith_plan_t plan, int64_t tokens,
                                                       moelith_buffer_sizes_t* sizes);

/* How `saved` comes about, for people: a null-terminated text, cut to fit if `capacity` bytes are too few. */
MOELITH_API moelith_status_t moelith_plan_saved_formula(moelith_plan_t plan, int64_t tokens, char* text,
                                                        size_t capacity);

/* A tensor for each of the L local experts, wherever it lies: contiguous, all of `dtype`, in the device's memory. Of
 * weights, dtype is the layer's; of gradients, the layer's or the accumulator dtype. Each list has L pointers, or is
 * NULL; bias lists only where the config has the bias. */
typedef struct moelith_expert_pointers {
  size_t struct_size;
  int32_t dtype;
  int32_t count;             /* L */
  void* const* gate_up_proj; /* each [2I, H]; [I, H] without a gate */
  void* const* gate_up_bias; /* each [2I] */
  void* const* down_proj;    /* each [H, I] */
  void* const* down_bias;    /* each [H] */
} moelith_expert_pointers_t;

/* Such tensors, made ready for the calls of one plan. */
typedef struct moelith_bound_experts* moelith_bound_experts_t;

/* Binds the tensors to the plan, for as long as they stay where they are; the lists themselves are copied. Once, outside
 * of a training step: on a GPU it allocates and copies.
 * MOELITH_INVALID_ARGUMENT: a null or misaligned pointer or a wrong count, which is named. */
MOELITH_API moelith_status_t moelith_plan_bind(moelith_plan_t plan, const moelith_expert_pointers_t* pointers,
                                               moelith_bound_experts_t* bound);

/* Not before all passes that use them are done, replays of captured graphs included. NULL is allowed. */
MOELITH_API void moelith_bound_experts_destroy(moelith_bound_experts_t bound);

/* ---- a forward and its backward ---------------------------------------------------------------------------------- */

typedef struct moelith_shared_weights {
  moelith_tensor_t gate_up_proj; /* [2 I_s, H] */
  moelith_tensor_t gate_up_bias; /* [2 I_s] if gate_up_bias */
  moelith_tensor_t down_proj;    /* [H, I_s] */
  moelith_tensor_t down_bias;    /* [H] if down_bias */
} moelith_shared_weights_t;

/* Either router_logits, or topk_ids and topk_weights. Everything of weights is contiguous and of the layer's dtype. */
typedef struct moelith_inputs {
  size_t struct_size;
  moelith_tensor_t x;                  /* [T, H] of the layer's dtype; rows contiguous, row stride >= H */
  moelith_tensor_t router_logits;      /* [T, E] of the layer's or the accumulator dtype */
  moelith_tensor_t topk_ids;           /* [T, k] int32 or int64, global ids in [-1, E); -1: an empty slot */
  moelith_tensor_t topk_weights;       /* [T, k] of the accumulator dtype */
  moelith_tensor_t selection_bias;     /* [E] of the accumulator dtype, if the config has one */
  moelith_tensor_t shared_gate_logits; /* [T, S] of the layer's or the accumulator dtype, if a shared expert is gated */
  moelith_tensor_t num_valid_tokens;   /* optional [1] int32, in the device's memory: rows from it on are absent */
  int64_t num_sequences;               /* sequence aux loss; 0 counts as 1 */

  moelith_tensor_t gate_up_proj;          /* [L, 2I, H], rows [gate; up]; [L, I, H] without a gate */
  moelith_tensor_t gate_up_bias;          /* [L, 2I] if gate_up_bias */
  moelith_tensor_t down_proj;             /* [L, H, I] */
  moelith_tensor_t down_bias;             /* [L, H] if down_bias */
  const moelith_shared_weights_t* shared; /* S entries; NULL if S is 0 */
  int32_t num_shared;                     /* S */
  moelith_bound_experts_t bound;          /* optional; the tensors that it has are not given above */
} moelith_inputs_t;

typedef struct moelith_outputs {
  size_t struct_size;
  moelith_tensor_t y;             /* [T, H] of the layer's dtype */
  moelith_tensor_t topk_ids;      /* optional [T, k] int32: after capacity, -1 where dropped */
  moelith_tensor_t topk_weights;  /* optional [T, k] of the accumulator dtype */
  moelith_tensor_t expert_counts; /* optional [E] int64: this rank's routes to each expert, after capacity */
  moelith_tensor_t aux_loss;      /* optional [1] of the accumulator dtype */
  moelith_tensor_t z_loss;        /* optional [1] of the accumulator dtype */
} moelith_outputs_t;

/* A gradient to be written or, with accumulate, added to (then of the accumulator dtype). rank 0: not computed. */
typedef struct moelith_gradient {
  moelith_tensor_t tensor;
  int32_t accumulate; /* flag */
  int32_t reserved;
} moelith_gradient_t;

typedef struct moelith_shared_gradients {
  moelith_gradient_t gate_up_proj, gate_up_bias, down_proj, down_bias;
} moelith_shared_gradients_t;

/* Upstream gradients. One that is not given counts as zero; at least one must be given. */
typedef struct moelith_output_gradients {
  size_t struct_size;
  moelith_tensor_t y;            /* [T, H] of the layer's dtype; rows contiguous */
  moelith_tensor_t topk_weights; /* [T, k] of the accumulator dtype */
  moelith_tensor_t aux_loss;     /* [1] of the accumulator dtype */
  moelith_tensor_t z_loss;       /* [1] of the accumulator dtype */
} moelith_output_gradients_t;

/* Gradients to compute; those not given are not computed. Weights' gradients are of the layer's or the accumulator
 * dtype. */
typedef struct moelith_input_gradients {
  size_t struct_size;
  moelith_tensor_t x;                  /* [T, H] of the layer's dtype */
  moelith_tensor_t router_logits;      /* [T, E], dtype of the logits */
  moelith_tensor_t topk_weights;       /* [T, k] of the accumulator dtype, when the caller brought the weights */
  moelith_tensor_t shared_gate_logits; /* [T, S], dtype of those logits */
  moelith_gradient_t gate_up_proj, gate_up_bias, down_proj, down_bias; /* shapes as in moelith_inputs_t */
  const moelith_shared_gradients_t* shared; /* NULL, or S entries */
  int32_t num_shared;                       /* 0 with NULL, or S */
  /* Optional: gradients to compute that are not given above, where only their `accumulate` counts. */
  moelith_bound_experts_t bound;
} moelith_input_gradients_t;

/* y, and what else is wanted of `outputs`.
 * saved: a buffer of moelith_plan_buffer_sizes(T).saved bytes that a later backward gets, or NULL for a forward without
 * gradients. workspace: a buffer of .workspace bytes. Both aligned to 256 bytes. Collective over the group.
 * MOELITH_INVALID_ARGUMENT: a null pointer, or a tensor that does not fit, which is named; nothing was written.
 * Of several ranks, any failure of one ends the call of the others too (MOELITH_GROUP_FAILED), and the group with it. */
MOELITH_API moelith_status_t moelith_forward(moelith_plan_t plan, const moelith_inputs_t* inputs,
                                             const moelith_outputs_t* outputs, void* saved, void* workspace,
                                             void* stream);

/* The gradients that `input_gradients` wants. inputs: those of the forward that filled saved. saved is only read, so
 * several backwards of one forward are allowed. Collective over the group.
 * MOELITH_INVALID_ARGUMENT: as for moelith_forward, or (on the CPU) saved was not filled by a forward of an equal plan
 * with as many tokens and the same kind of routes; nothing was written. Otherwise as moelith_forward. */
MOELITH_API moelith_status_t moelith_backward(moelith_plan_t plan, const moelith_inputs_t* inputs, const void* saved,
                                              const moelith_output_gradients_t* output_gradients,
                                              const moelith_input_gradients_t* input_gradients, void* workspace,
                                              void* stream);

/* The bias update of balancing without an aux loss, in place, on the CPU:
 * bias[e] += rate * sign(mean(counts) - counts[e]). bias: [E] float32 or float64; counts: [E] int64. Both in the host's
 * memory; a build with CUDA refuses memory of a GPU. */
MOELITH_API moelith_status_t moelith_update_selection_bias(const moelith_tensor_t* bias, const moelith_tensor_t* counts,
                                                           double rate);

#ifdef __cplusplus
}
#endif

#endif /* MOELITH_MOELITH_H_ */
