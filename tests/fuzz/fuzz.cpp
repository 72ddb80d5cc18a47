// Random calls of the C interface, for a given time:
//
//   moelith_fuzz [--seconds 60] [--seed 1] [--cases N] [--case NUMBER] [--verbose]
//
// A case is a layer, its plan, a forward and a backward, all well formed, into which up to three faults are put: in the
// config, the options, a tensor (shape, dtype, stride, alignment, null pointer), values (ids out of range, NaN),
// structs and buffers. What must hold:
//   - nothing crashes (build with -fsanitize=address,undefined);
//   - a call with a fault that the contract refuses fails with invalid_argument or unsupported, with a text of its own,
//     and has written nothing; without a fault it succeeds;
//   - no status is `internal`;
//   - the bytes around every buffer keep their value; under AddressSanitizer they may not even be read;
//   - with finite inputs, all results of a call that succeeded are written, and finite.
// Case NUMBER of a seed is always the same one: a failure prints both.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "moelith/moelith.h"
#include "numerics/bfloat16.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define POISON(begin, size) __asan_poison_memory_region(begin, size)
#define UNPOISON(begin, size) __asan_unpoison_memory_region(begin, size)
#else
#define POISON(begin, size) ((void)(begin), (void)(size))
#define UNPOISON(begin, size) ((void)(begin), (void)(size))
#endif

namespace {

unsigned long long current_seed = 1, current_case = 0;

struct Violation {
  std::string text;
};
[[noreturn]] void violated(const std::string& text) { throw Violation{text}; }

// ---- random choices ----

class Random {
 public:
  explicit Random(unsigned long long seed) : engine_(seed) {}
  // In [0, bound).
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(bound));
  }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(int in_hundred) { return below(100) < in_hundred; }
  double normal() { return std::normal_distribution<double>()(engine_); }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<std::int64_t>(choices.size()))];
  }
  // A number that some code somewhere gets wrong.
  std::int64_t nasty() {
    return pick<std::int64_t>({0, -1, 1, 7, -8, 1 << 20, (1 << 20) + 8, std::int64_t{1} << 31,
                               (std::int64_t{1} << 32) + 8, std::int64_t{1} << 40,
                               std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()});
  }
  std::int32_t nasty32() {
    return pick<std::int32_t>({0, -1, 7, 33, 255, 256, 257, 1025, 65536, std::numeric_limits<std::int32_t>::max(),
                               std::numeric_limits<std::int32_t>::min()});
  }
  double nasty_number() { return pick<double>({std::nan(""), INFINITY, -INFINITY, -1.0, 0.0, -0.0, 1e308, 5e-324}); }

 private:
  std::mt19937_64 engine_;
};

// ---- memory with guarded surroundings ----

class Guarded {
 public:
  // 0xff all over: NaN as a floating-point number.
  explicit Guarded(std::uint64_t size) : size_(size), room_(guard + (size + 255) / 256 * 256 + guard) {
    memory_ = static_cast<unsigned char*>(std::aligned_alloc(256, room_));
    if (memory_ == nullptr) std::abort();
    std::memset(memory_, canary, room_);
    std::memset(data(), 0xff, size_);
    POISON(memory_, guard);
    POISON(memory_ + guard + size_, room_ - guard - size_);
  }
  ~Guarded() {
    UNPOISON(memory_, room_);
    std::free(memory_);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  unsigned char* data() { return memory_ + guard; }
  std::uint64_t size() const { return size_; }
  bool intact() {
    UNPOISON(memory_, room_);
    const auto is_canary = [](unsigned char byte) { return byte == canary; };
    const bool good = std::all_of(memory_, memory_ + guard, is_canary) &&
                      std::all_of(memory_ + guard + size_, memory_ + room_, is_canary);
    POISON(memory_, guard);
    POISON(memory_ + guard + size_, room_ - guard - size_);
    return good;
  }

 private:
  static constexpr std::uint64_t guard = 256;
  static constexpr unsigned char canary = 0xa5;
  std::uint64_t size_, room_;
  unsigned char* memory_ = nullptr;
};

std::size_t element_size(std::int32_t dtype) {
  switch (dtype) {
    case MOELITH_FLOAT64:
    case MOELITH_INT64: return 8;
    case MOELITH_BFLOAT16: return 2;
    case MOELITH_UINT8: return 1;
    default: return 4;
  }
}

void store(void* data, std::int32_t dtype, std::int64_t index, double value) {
  switch (dtype) {
    case MOELITH_FLOAT64: static_cast<double*>(data)[index] = value; break;
    case MOELITH_FLOAT32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    case MOELITH_BFLOAT16:
      static_cast<moelith::numerics::bfloat16*>(data)[index] =
          moelith::numerics::to_bfloat16(static_cast<float>(value));
      break;
    case MOELITH_INT64: static_cast<std::int64_t*>(data)[index] = static_cast<std::int64_t>(value); break;
    default: static_cast<std::int32_t*>(data)[index] = static_cast<std::int32_t>(value); break;
  }
}

double load(const void* data, std::int32_t dtype, std::int64_t index) {
  switch (dtype) {
    case MOELITH_FLOAT64: return static_cast<const double*>(data)[index];
    case MOELITH_FLOAT32: return static_cast<double>(static_cast<const float*>(data)[index]);
    case MOELITH_BFLOAT16:
      return static_cast<double>(
          moelith::numerics::to_float(static_cast<const moelith::numerics::bfloat16*>(data)[index]));
    case MOELITH_INT64: return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
    default: return static_cast<double>(static_cast<const std::int32_t*>(data)[index]);
  }
}

// ---- one case ----

struct Case {
  explicit Case(unsigned long long seed) : random(seed) {}

  Random random;
  moelith_layer_config_t config{};
  moelith_plan_options_t options{};
  std::vector<std::int32_t> expert_rank;
  std::int64_t tokens = 0;
  moelith_inputs_t inputs{};
  moelith_outputs_t outputs{};
  moelith_output_gradients_t output_gradients{};
  moelith_input_gradients_t input_gradients{};
  std::vector<moelith_shared_weights_t> shared;
  std::vector<moelith_shared_gradients_t> shared_gradients;
  std::vector<std::unique_ptr<Guarded>> memory;
  bool finite = true;

  std::int32_t accumulator() const { return config.dtype == MOELITH_FLOAT64 ? MOELITH_FLOAT64 : MOELITH_FLOAT32; }
  std::int64_t gate_up_rows(std::int64_t width) const {
    return config.activation == MOELITH_RELU_SQUARED ? width : 2 * width;
  }

  moelith_tensor_t tensor(std::int32_t dtype, std::initializer_list<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    memory.push_back(std::make_unique<Guarded>(static_cast<std::uint64_t>(count) * element_size(dtype)));
    moelith_tensor_t made;
    if (moelith_tensor_init(&made, memory.back()->data(), dtype, static_cast<std::int32_t>(shape.size()),
                            shape.begin()) != MOELITH_OK) {
      violated(std::string("moelith_tensor_init refused a good tensor: ") + moelith_last_error());
    }
    return made;
  }
  moelith_tensor_t filled(std::int32_t dtype, std::initializer_list<std::int64_t> shape, double scale) {
    const moelith_tensor_t made = tensor(dtype, shape);
    const auto count = static_cast<std::int64_t>(memory.back()->size() / element_size(dtype));
    for (std::int64_t i = 0; i < count; ++i) store(made.data, dtype, i, scale * random.normal());
    return made;
  }

  void make_config() {
    if (moelith_layer_config_init(&config, sizeof config) != MOELITH_OK) violated("moelith_layer_config_init failed");
    Random& r = random;
    config.hidden_size = 8 * r.between(1, 9);
    config.intermediate_size = 8 * r.between(1, 9);
    config.num_experts = static_cast<std::int32_t>(r.chance(10) ? 1 : r.between(1, 12));
    config.top_k = static_cast<std::int32_t>(r.between(1, std::min(config.num_experts, 6)));
    config.dtype = r.pick({MOELITH_FLOAT64, MOELITH_FLOAT32, MOELITH_BFLOAT16});
    config.activation = static_cast<std::int32_t>(r.below(5));
    config.gate_up_bias = static_cast<std::int32_t>(r.below(2));
    config.down_bias = static_cast<std::int32_t>(r.below(2));
    config.weight_placement = static_cast<std::int32_t>(r.below(2));
    config.num_shared_experts = r.chance(50) ? 0 : static_cast<std::int32_t>(r.between(1, 3));
    for (std::int32_t s = 0; s < config.num_shared_experts; ++s) {
      config.shared_experts[s].intermediate_size = 8 * r.between(1, 5);
      config.shared_experts[s].gated = static_cast<std::int32_t>(r.below(2));
    }
    config.router_kind = static_cast<std::int32_t>(r.below(3));
    config.renormalize = static_cast<std::int32_t>(r.below(2));
    config.scaling_factor = r.pick({1.0, 2.5});
    config.selection_bias = static_cast<std::int32_t>(r.below(2));
    if (config.num_experts % 4 == 0 && config.top_k <= config.num_experts / 2) {
      config.num_groups = 4;
      config.top_groups = 2;
      config.group_score_size = config.num_experts > 4 ? static_cast<std::int32_t>(r.between(1, 2)) : 1;
    }
    config.aux_loss = static_cast<std::int32_t>(r.below(4));
    config.aux_loss_coefficient = 0.1;
    config.z_loss_coefficient = r.pick({0.0, 0.01});
    config.capacity_factor = r.chance(80) ? 0.0 : 0.75;
    config.drop_policy = static_cast<std::int32_t>(r.below(2));

    tokens = r.chance(10) ? 0 : r.between(1, 40);
    options.struct_size = sizeof options;
    options.max_tokens = tokens + r.below(3);
    options.workers = static_cast<std::int32_t>(r.between(1, 3));
    options.recompute = static_cast<std::int32_t>(r.below(2));
    options.receive_capacity_factor = r.pick({0.0, 0.5, 2.0});
    options.tile_columns = r.pick({0, 64, 128});
    options.shuffle_seed = r.chance(50) ? 0 : static_cast<std::uint64_t>(r.between(1, 1000));
    if (r.chance(20)) {
      expert_rank.assign(static_cast<std::size_t>(config.num_experts), 0);
      options.expert_rank = expert_rank.data();
      options.expert_rank_count = config.num_experts;
    }
  }

  void make_tensors() {
    Random& r = random;
    const std::int32_t type = config.dtype, acc = accumulator();
    const std::int64_t h = config.hidden_size, i = config.intermediate_size, e = config.num_experts, k = config.top_k;
    const std::int64_t s_count = config.num_shared_experts, rows = gate_up_rows(i);
    const bool gradients_are_wide = r.chance(50);
    const std::int32_t gradient_type = gradients_are_wide ? acc : type;
    const auto gradient = [&](std::initializer_list<std::int64_t> shape) {
      moelith_gradient_t made{};
      if (r.chance(10)) return made;  // not wanted
      made.tensor = tensor(gradient_type, shape);
      made.accumulate = gradients_are_wide && r.chance(50);
      if (made.accumulate) std::memset(memory.back()->data(), 0, memory.back()->size());
      return made;
    };

    inputs.struct_size = sizeof inputs;
    inputs.x = filled(type, {tokens, h}, 1.0);
    const bool dense = config.num_experts == 1 && config.top_k == 1 && r.chance(50);
    if (!dense && r.chance(60)) {
      inputs.router_logits = filled(r.chance(50) ? type : acc, {tokens, e}, 1.0);
      if (config.selection_bias) inputs.selection_bias = filled(acc, {e}, 0.1);
      if (config.aux_loss == MOELITH_AUX_SEQUENCE && tokens % 2 == 0) inputs.num_sequences = 2;
    } else if (!dense) {
      const std::int32_t id_type = r.chance(50) ? MOELITH_INT32 : MOELITH_INT64;
      inputs.topk_ids = tensor(id_type, {tokens, k});
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t first = r.below(e);
        for (std::int64_t j = 0; j < k; ++j) {
          store(inputs.topk_ids.data, id_type, t * k + j, r.chance(10) ? -1.0 : static_cast<double>((first + j) % e));
        }
      }
      inputs.topk_weights = filled(acc, {tokens, k}, 1.0);
    }
    bool gated = false;
    for (std::int64_t s = 0; s < s_count; ++s) gated |= config.shared_experts[s].gated != 0;
    if (gated) inputs.shared_gate_logits = filled(r.chance(50) ? type : acc, {tokens, s_count}, 1.0);
    if (r.chance(20)) {
      inputs.num_valid_tokens = tensor(MOELITH_INT32, {1});
      store(inputs.num_valid_tokens.data, MOELITH_INT32, 0, static_cast<double>(r.between(0, tokens)));
      if (inputs.num_sequences > 1) inputs.num_sequences = 1;
    }
    inputs.gate_up_proj = filled(type, {e, rows, h}, 1.0 / std::sqrt(static_cast<double>(h)));
    inputs.down_proj = filled(type, {e, h, i}, 1.0 / std::sqrt(static_cast<double>(i)));
    if (config.gate_up_bias) inputs.gate_up_bias = filled(type, {e, rows}, 0.5);
    if (config.down_bias) inputs.down_bias = filled(type, {e, h}, 0.5);
    for (std::int64_t s = 0; s < s_count; ++s) {
      const std::int64_t width = config.shared_experts[s].intermediate_size, pre = gate_up_rows(width);
      moelith_shared_weights_t w{};
      w.gate_up_proj = filled(type, {pre, h}, 0.3);
      w.down_proj = filled(type, {h, width}, 0.3);
      if (config.gate_up_bias) w.gate_up_bias = filled(type, {pre}, 0.5);
      if (config.down_bias) w.down_bias = filled(type, {h}, 0.5);
      shared.push_back(w);
    }
    inputs.shared = shared.empty() ? nullptr : shared.data();
    inputs.num_shared = config.num_shared_experts;

    outputs.struct_size = sizeof outputs;
    outputs.y = tensor(type, {tokens, h});
    if (r.chance(50)) outputs.topk_ids = tensor(MOELITH_INT32, {tokens, k});
    if (r.chance(50)) outputs.topk_weights = tensor(acc, {tokens, k});
    if (r.chance(50)) outputs.expert_counts = tensor(MOELITH_INT64, {e});
    if (r.chance(50)) outputs.aux_loss = tensor(acc, {1});
    if (r.chance(50)) outputs.z_loss = tensor(acc, {1});

    output_gradients.struct_size = sizeof output_gradients;
    const bool only_others = r.chance(10);
    if (!only_others) output_gradients.y = filled(type, {tokens, h}, 1.0);
    if (only_others || r.chance(20)) output_gradients.topk_weights = filled(acc, {tokens, k}, 1.0);
    if (r.chance(30)) output_gradients.aux_loss = filled(acc, {1}, 1.0);
    if (r.chance(30)) output_gradients.z_loss = filled(acc, {1}, 1.0);

    input_gradients.struct_size = sizeof input_gradients;
    if (r.chance(90)) input_gradients.x = tensor(type, {tokens, h});
    if (inputs.router_logits.rank && r.chance(90))
      input_gradients.router_logits = tensor(inputs.router_logits.dtype, {tokens, e});
    if (inputs.topk_ids.rank && r.chance(90)) input_gradients.topk_weights = tensor(acc, {tokens, k});
    if (gated && r.chance(90))
      input_gradients.shared_gate_logits = tensor(inputs.shared_gate_logits.dtype, {tokens, s_count});
    input_gradients.gate_up_proj = gradient({e, rows, h});
    input_gradients.down_proj = gradient({e, h, i});
    if (config.gate_up_bias) input_gradients.gate_up_bias = gradient({e, rows});
    if (config.down_bias) input_gradients.down_bias = gradient({e, h});
    if (s_count > 0 && r.chance(80)) {
      for (std::int64_t s = 0; s < s_count; ++s) {
        const std::int64_t width = config.shared_experts[s].intermediate_size, pre = gate_up_rows(width);
        moelith_shared_gradients_t g{};
        g.gate_up_proj = gradient({pre, h});
        g.down_proj = gradient({h, width});
        if (config.gate_up_bias) g.gate_up_bias = gradient({pre});
        if (config.down_bias) g.down_bias = gradient({h});
        shared_gradients.push_back(g);
      }
      input_gradients.shared = shared_gradients.data();
      input_gradients.num_shared = config.num_shared_experts;
    }
  }

  template <class F>
  static auto if_given(F& f) {
    return [&f](const char* name, moelith_tensor_t& t) {
      if (t.rank != 0) f(name, t);
    };
  }
  // Calls f(name, tensor) for every tensor that the given structs hold; not for those that are not given.
  template <class F>
  void for_each_input(F f) {
    const auto call = if_given(f);
    call("x", inputs.x);
    call("router_logits", inputs.router_logits);
    call("topk_ids", inputs.topk_ids);
    call("topk_weights", inputs.topk_weights);
    call("selection_bias", inputs.selection_bias);
    call("shared_gate_logits", inputs.shared_gate_logits);
    call("num_valid_tokens", inputs.num_valid_tokens);
    call("gate_up_proj", inputs.gate_up_proj);
    call("gate_up_bias", inputs.gate_up_bias);
    call("down_proj", inputs.down_proj);
    call("down_bias", inputs.down_bias);
    for (moelith_shared_weights_t& s : shared) {
      call("shared.gate_up_proj", s.gate_up_proj);
      call("shared.gate_up_bias", s.gate_up_bias);
      call("shared.down_proj", s.down_proj);
      call("shared.down_bias", s.down_bias);
    }
  }
  template <class F>
  void for_each_output(F f) {
    const auto call = if_given(f);
    call("y", outputs.y);
    call("outputs.topk_ids", outputs.topk_ids);
    call("outputs.topk_weights", outputs.topk_weights);
    call("expert_counts", outputs.expert_counts);
    call("aux_loss", outputs.aux_loss);
    call("z_loss", outputs.z_loss);
  }
  template <class F>
  void for_each_upstream(F f) {
    const auto call = if_given(f);
    call("output_gradients.y", output_gradients.y);
    call("output_gradients.topk_weights", output_gradients.topk_weights);
    call("output_gradients.aux_loss", output_gradients.aux_loss);
    call("output_gradients.z_loss", output_gradients.z_loss);
  }
  template <class F>
  void for_each_gradient(F f) {
    const auto call = if_given(f);
    const auto weights = [&](auto& g) {
      call("d_gate_up_proj", g.gate_up_proj.tensor);
      call("d_gate_up_bias", g.gate_up_bias.tensor);
      call("d_down_proj", g.down_proj.tensor);
      call("d_down_bias", g.down_bias.tensor);
    };
    call("d_x", input_gradients.x);
    call("d_router_logits", input_gradients.router_logits);
    call("d_topk_weights", input_gradients.topk_weights);
    call("d_shared_gate_logits", input_gradients.shared_gate_logits);
    weights(input_gradients);
    for (moelith_shared_gradients_t& s : shared_gradients) weights(s);
  }
};

// ---- calls and what is asked of them ----

enum class Expect { success, refusal, anything };
bool verbose = false;

void check_call(const std::string& name, Expect expect, const std::function<moelith_status_t()>& call,
                moelith_status_t* result = nullptr) {
  // A known text first, so that an old one is not taken for that of this call.
  (void)moelith_tensor_init(nullptr, nullptr, 0, 0, nullptr);
  const std::string before = moelith_last_error();
  const moelith_status_t status = call();
  const std::string text = moelith_last_error();
  if (verbose)
    std::printf("  %s: %s%s%s\n", name.c_str(), moelith_status_name(status), status == MOELITH_OK ? "" : ": ",
                status == MOELITH_OK ? "" : text.c_str());
  if (result != nullptr) *result = status;
  if (status != MOELITH_OK && (text.empty() || text == before)) violated(name + " failed without a text of its own");
  if (status == MOELITH_INTERNAL) violated(name + " reports a defect: " + text);
  if (status == MOELITH_TIMED_OUT) violated(name + " timed out: " + text);
  if (std::strcmp(moelith_status_name(status), "unknown status") == 0) violated(name + " returned an unknown status");
  if (expect == Expect::success && status != MOELITH_OK) violated(name + " refused a good call: " + text);
  if (expect == Expect::refusal && status == MOELITH_OK) violated(name + " accepted a bad call");
  if (expect == Expect::refusal && status == MOELITH_DEVICE_ERROR)
    violated(name + " took a bad argument for a failing device: " + text);
}

// Puts a fault into a tensor. Returns what is to be expected of a call with it.
Expect spoil(Random& r, moelith_tensor_t& t) {
  const auto empty = [&] {
    for (std::int32_t d = 0; d < t.rank; ++d) {
      if (t.shape[d] == 0) return true;
    }
    return false;
  };
  const std::int32_t d = static_cast<std::int32_t>(r.below(t.rank));
  switch (r.below(8)) {
    case 0: {
      std::int32_t other = r.chance(50) ? r.nasty32() : static_cast<std::int32_t>(r.between(0, 5));
      // A type of more bytes would be a lie about the memory, which no library can see through.
      if (other >= 0 && other <= MOELITH_INT32 && element_size(other) > element_size(t.dtype)) other = MOELITH_UINT8;
      const bool same_or_maybe = other >= 0 && other <= MOELITH_INT32;
      t.dtype = other;
      return same_or_maybe ? Expect::anything : Expect::refusal;
    }
    case 1: {
      const std::int32_t other = r.pick({-1, 1, 2, 3, 4, 5, 100, std::numeric_limits<std::int32_t>::max()});
      const bool same = other == t.rank;
      t.rank = other;
      return same ? Expect::anything : Expect::refusal;
    }
    case 2: {
      const std::int64_t other = r.chance(50) ? t.shape[d] + r.pick({-1, 1, 8}) : r.nasty();
      // Fewer tokens in every tensor would be right: the shape of x alone may shrink and disagree with others.
      const bool same = other == t.shape[d];
      t.shape[d] = other;
      return same ? Expect::anything : Expect::refusal;
    }
    case 3: {
      // Only shorter row strides and broken last strides are wrong for certain, and only where a stride is used.
      if (empty() || t.shape[t.rank - 1] < 2) return Expect::anything;
      t.stride[t.rank - 1] = r.pick<std::int64_t>({0, 2, -1, std::numeric_limits<std::int64_t>::max()});
      return Expect::refusal;
    }
    case 4: {
      if (empty() || t.rank < 2 || t.shape[0] < 2) return Expect::anything;
      t.stride[0] = r.pick<std::int64_t>({0, 1, -8, std::numeric_limits<std::int64_t>::min()});
      return t.stride[0] >= t.shape[1] ? Expect::anything : Expect::refusal;
    }
    case 5: {
      if (empty()) return Expect::anything;
      t.data = nullptr;
      return Expect::refusal;
    }
    case 6: {
      if (empty() || element_size(t.dtype) == 1) return Expect::anything;
      // Set and not added: twice would be aligned again, with the end beyond the memory.
      t.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(t.data) | 1);
      return Expect::refusal;
    }
    default: {
      t = {};  // not given: right for some
      return Expect::anything;
    }
  }
}

// Puts a fault into the config. Returns what is to be expected of a plan with it.
Expect spoil(Random& r, moelith_layer_config_t& c) {
  const std::int32_t too_many = c.num_experts < 1024 ? c.num_experts + 1 : 1025;  // may have been spoilt before
  switch (r.below(16)) {
    case 0: c.hidden_size = r.nasty(); return c.hidden_size == 1 << 20 ? Expect::anything : Expect::refusal;
    case 1: c.intermediate_size = r.nasty(); return c.intermediate_size == 1 << 20 ? Expect::anything : Expect::refusal;
    case 2: c.num_experts = r.nasty32(); return Expect::anything;
    case 3: c.top_k = too_many; return Expect::refusal;
    case 4: c.top_k = r.pick({0, -1, 33, std::numeric_limits<std::int32_t>::min()}); return Expect::refusal;
    case 5: c.dtype = r.pick({3, 4, 5, 6, -1, 256, 258}); return Expect::refusal;
    case 6: c.activation = r.pick({5, -1, 256, 257}); return Expect::refusal;
    case 7:
      c.activation = MOELITH_SWIGLU_CLAMPED;
      c.activation_limit = r.pick<double>({std::nan(""), 0.0, -1.0, -INFINITY});
      return Expect::refusal;
    case 8: c.weight_placement = r.pick({2, -1, 256}); return Expect::refusal;
    case 9: c.num_shared_experts = r.pick({-1, 9, std::numeric_limits<std::int32_t>::max()}); return Expect::refusal;
    case 10:
      c.num_shared_experts = std::max(c.num_shared_experts, 1);
      c.shared_experts[0].intermediate_size = r.pick<std::int64_t>({0, -8, 12, std::int64_t{1} << 40});
      return Expect::refusal;
    case 11: c.router_kind = r.pick({3, -1, 256}); return Expect::refusal;
    case 12: c.num_groups = r.pick({0, -4, too_many, std::numeric_limits<std::int32_t>::min()}); return Expect::refusal;
    case 13: c.scaling_factor = r.pick<double>({std::nan(""), INFINITY, -1.0, 0.0}); return Expect::refusal;
    case 14:
      (r.chance(50) ? c.aux_loss_coefficient : c.z_loss_coefficient) = r.pick<double>({std::nan(""), INFINITY, -1.0});
      return Expect::refusal;
    default: c.capacity_factor = r.pick<double>({std::nan(""), INFINITY, -0.5}); return Expect::refusal;
  }
}

Expect spoil(Random& r, moelith_plan_options_t& o) {
  switch (r.below(8)) {
    case 0: o.max_tokens = r.pick<std::int64_t>({-1, std::numeric_limits<std::int64_t>::min()}); return Expect::refusal;
    case 1: o.max_tokens = std::numeric_limits<std::int64_t>::max(); return Expect::refusal;
    case 2: o.device = r.pick({2, -1, 256, 257}); return Expect::refusal;
    case 3:
      o.workers = r.pick({-1, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()});
      return Expect::refusal;
    case 4:
      o.tile_columns =
          r.pick({-64, 7, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()});
      return Expect::refusal;
    case 5: o.expert_rank_count = r.pick({-1, 2000, std::numeric_limits<std::int32_t>::max()}); return Expect::refusal;
    case 6: o.receive_capacity_factor = r.pick<double>({std::nan(""), -INFINITY, -0.5}); return Expect::refusal;
    default: o.device = MOELITH_CUDA; return Expect::anything;
  }
}

template <class T>
bool spoil_struct_size(Random& r, T& given) {
  if (!r.chance(3)) return false;
  given.struct_size =
      r.pick<std::size_t>({0, 1, sizeof given - 1, sizeof given + 1, std::numeric_limits<std::size_t>::max()});
  return true;
}

std::vector<std::vector<unsigned char>> snapshot(Case& c) {
  std::vector<std::vector<unsigned char>> copies;
  for (const auto& block : c.memory) copies.emplace_back(block->data(), block->data() + block->size());
  return copies;
}

void check_memory(Case& c, const std::vector<std::vector<unsigned char>>* unchanged, const std::string& name) {
  for (std::size_t i = 0; i < c.memory.size(); ++i) {
    if (!c.memory[i]->intact()) violated(name + " wrote beyond a tensor");
    if (unchanged != nullptr && i < unchanged->size() &&
        !std::equal((*unchanged)[i].begin(), (*unchanged)[i].end(), c.memory[i]->data())) {
      violated(name + " failed and yet wrote into a tensor");
    }
  }
}

void check_finite(const char* name, const moelith_tensor_t& t) {
  std::int64_t count = 1;
  for (std::int32_t d = 0; d < t.rank; ++d) count *= t.shape[d];
  if (t.dtype == MOELITH_INT32 || t.dtype == MOELITH_INT64) return;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(load(t.data, t.dtype, i)))
      violated(std::string(name) + "[" + std::to_string(i) + "] is not finite or was not written");
  }
}

// One of the tensors that `visit` goes over gets a fault.
template <class Visit>
Expect spoil_one(Random& r, Visit visit) {
  std::vector<moelith_tensor_t*> all;
  visit([&](const char*, moelith_tensor_t& t) { all.push_back(&t); });
  if (all.empty()) return Expect::success;
  return spoil(r, *all[static_cast<std::size_t>(r.below(static_cast<std::int64_t>(all.size())))]);
}

void run_layer_case(Case& c) {
  Random& r = c.random;
  c.make_config();

  // Bad plans.
  if (r.chance(30)) {
    moelith_layer_config_t config = c.config;
    moelith_plan_options_t options = c.options;
    Expect expect = Expect::success;
    for (std::int64_t n = r.between(1, 3); n > 0; --n) {
      // A second fault may undo the first one: only a single one is sure to be refused.
      const Expect one = r.chance(70) ? spoil(r, config) : spoil(r, options);
      expect = expect == Expect::success ? one : Expect::anything;
    }
    if (spoil_struct_size(r, config) || spoil_struct_size(r, options)) expect = Expect::refusal;
    moelith_plan_t plan = nullptr;
    moelith_status_t status = MOELITH_OK;
    check_call(
        "plan_create (spoilt)", expect, [&] { return moelith_plan_create(&config, &options, &plan); }, &status);
    if (status != MOELITH_OK && plan != nullptr) violated("plan_create failed and yet made a plan");
    moelith_plan_destroy(plan);
    check_call("config_validate (spoilt)", Expect::anything, [&] { return moelith_layer_config_validate(&config); });
  }

  moelith_plan_t plan = nullptr;
  check_call("plan_create", Expect::success, [&] { return moelith_plan_create(&c.config, &c.options, &plan); });
  const std::unique_ptr<struct moelith_plan, void (*)(moelith_plan_t)> owner(plan, moelith_plan_destroy);

  moelith_buffer_sizes_t sizes{};
  sizes.struct_size = sizeof sizes;
  check_call("buffer_sizes", Expect::success, [&] { return moelith_plan_buffer_sizes(plan, c.tokens, &sizes); });
  check_call("buffer_sizes (too many tokens)", Expect::refusal,
             [&] { return moelith_plan_buffer_sizes(plan, c.options.max_tokens + 1, &sizes); });
  check_call("buffer_sizes (negative)", Expect::refusal, [&] { return moelith_plan_buffer_sizes(plan, -1, &sizes); });
  char formula[64];
  check_call("saved_formula", Expect::success, [&] {
    return moelith_plan_saved_formula(plan, c.tokens, formula, static_cast<std::size_t>(r.between(1, 64)));
  });
  std::int32_t count = -1;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(c.config.num_experts));
  check_call("local_experts", Expect::success,
             [&] { return moelith_plan_local_experts(plan, &count, ids.data(), c.config.num_experts); });
  if (count != c.config.num_experts) violated("one rank does not hold all experts");
  check_call("local_experts (no room)", Expect::refusal,
             [&] { return moelith_plan_local_experts(plan, &count, ids.data(), count - 1); });

  c.make_tensors();
  Guarded saved(sizes.saved), workspace(sizes.workspace);
  const auto buffers_intact = [&](const std::string& name) {
    if (!saved.intact()) violated(name + " wrote beyond saved");
    if (!workspace.intact()) violated(name + " wrote beyond the workspace");
  };

  // A spoilt forward, then the same inputs unspoilt.
  if (r.chance(60)) {
    const moelith_inputs_t inputs = c.inputs;
    const moelith_outputs_t outputs = c.outputs;
    const std::vector<moelith_shared_weights_t> shared = c.shared;
    Expect expect = Expect::success;
    for (std::int64_t n = r.between(1, 2); n > 0; --n) {
      const Expect one = r.chance(70) ? spoil_one(r, [&](auto f) { c.for_each_input(f); })
                                      : spoil_one(r, [&](auto f) { c.for_each_output(f); });
      expect = expect == Expect::success ? one : Expect::anything;
    }
    void* saved_at = saved.data();
    void* workspace_at = workspace.data();
    if (r.chance(5) && sizes.workspace > 0) {
      workspace_at = r.chance(50) ? nullptr : workspace.data() + 8;
      expect = Expect::refusal;
    }
    if (r.chance(5) && sizes.saved > 0) {
      saved_at = saved.data() + 16;
      expect = Expect::refusal;
    }
    if (r.chance(5)) {
      c.inputs.num_sequences = r.pick<std::int64_t>({-1, c.tokens + 1, std::numeric_limits<std::int64_t>::min()});
      expect = c.tokens > 0 || c.inputs.num_sequences < 0 ? Expect::refusal : Expect::anything;
    }
    if (r.chance(5) && c.config.num_shared_experts > 0) {
      if (r.chance(50))
        c.inputs.shared = nullptr;
      else
        c.inputs.num_shared = r.pick({0, -1, 100});
      expect = Expect::refusal;
    }
    if (spoil_struct_size(r, c.inputs) || spoil_struct_size(r, c.outputs)) expect = Expect::refusal;
    const auto before = snapshot(c);
    moelith_status_t status = MOELITH_OK;
    check_call(
        "forward (spoilt)", expect,
        [&] { return moelith_forward(plan, &c.inputs, &c.outputs, saved_at, workspace_at, nullptr); }, &status);
    check_memory(c, status == MOELITH_OK ? nullptr : &before, "forward (spoilt)");
    buffers_intact("forward (spoilt)");
    c.inputs = inputs;
    c.outputs = outputs;
    c.shared = shared;
    c.inputs.shared = c.shared.empty() ? nullptr : c.shared.data();
  }

  // Values that no shape check sees.
  Expect values = Expect::success;
  if (c.tokens > 0 && r.chance(15) && c.inputs.topk_ids.rank) {
    const std::int64_t at = r.below(c.tokens * c.config.top_k);
    const bool absent = c.inputs.num_valid_tokens.rank != 0;  // the row may not exist
    store(c.inputs.topk_ids.data, c.inputs.topk_ids.dtype, at,
          r.pick({-2.0, static_cast<double>(c.config.num_experts), 2147483647.0, -2147483648.0}));
    values = absent ? Expect::anything : Expect::refusal;
  }
  if (c.tokens > 0 && r.chance(15)) {
    // NaN and infinities: a documented rule of their own for logits, and no refusal anywhere.
    moelith_tensor_t& t = c.inputs.router_logits.rank && r.chance(60) ? c.inputs.router_logits : c.inputs.x;
    const std::int64_t elements = t.shape[0] * t.shape[1];
    for (std::int64_t n = r.between(1, elements); n > 0; --n)
      store(t.data, t.dtype, r.below(elements), r.pick<double>({std::nan(""), INFINITY, -INFINITY, 3e38}));
    c.finite = false;
  }
  if (c.inputs.num_valid_tokens.rank && r.chance(20)) {
    store(c.inputs.num_valid_tokens.data, MOELITH_INT32, 0, r.pick({-1.0, 1e9, -2147483648.0, 2147483647.0}));
    values = Expect::refusal;
  }

  // Experts that lie apart, in the place of stacked weights.
  std::unique_ptr<struct moelith_bound_experts, void (*)(moelith_bound_experts_t)> bound(nullptr, moelith_bound_experts_destroy);
  if (r.chance(25)) {
    const auto pointers_to = [&](moelith_tensor_t& stacked) {
      std::vector<void*> list;
      for (std::int64_t e = 0; stacked.rank > 0 && e < c.config.num_experts; ++e) {
        list.push_back(static_cast<unsigned char*>(stacked.data) + e * stacked.stride[0] * element_size(stacked.dtype));
      }
      return list;
    };
    std::vector<void*> lists[4] = {pointers_to(c.inputs.gate_up_proj), pointers_to(c.inputs.gate_up_bias),
                                   pointers_to(c.inputs.down_proj), pointers_to(c.inputs.down_bias)};
    moelith_expert_pointers_t pointers{};
    pointers.struct_size = sizeof pointers;
    pointers.dtype = c.config.dtype;
    pointers.count = c.config.num_experts;
    const auto list_of = [&](int i) { return lists[i].empty() ? nullptr : lists[i].data(); };
    pointers.gate_up_proj = list_of(0), pointers.gate_up_bias = list_of(1);
    pointers.down_proj = list_of(2), pointers.down_bias = list_of(3);
    moelith_bound_experts_t made = nullptr;
    const auto bind = [&](const char* name, Expect expect, const moelith_expert_pointers_t& given) {
      check_call(name, expect, [&] { return moelith_plan_bind(plan, &given, &made); });
    };
    moelith_expert_pointers_t bad = pointers;
    std::vector<void*> holed = lists[2];
    switch (r.below(4)) {
      case 0: bad.count = static_cast<std::int32_t>(r.pick({-1, 0, c.config.num_experts - 1, 1 << 30})); break;
      case 1: holed[static_cast<std::size_t>(r.below(c.config.num_experts))] = nullptr, bad.down_proj = holed.data(); break;
      case 2: bad.dtype = r.pick({-1, 3, 5, 77}); break;
      default: bad.struct_size -= 8;
    }
    bind("plan_bind (spoilt)", Expect::refusal, bad);
    if (made != nullptr) violated("plan_bind gave a binding out although it refused");
    bind("plan_bind", Expect::success, pointers);
    bound.reset(made);
    c.inputs.bound = made;
    c.inputs.gate_up_proj = c.inputs.gate_up_bias = c.inputs.down_proj = c.inputs.down_bias = moelith_tensor_t{};
  }

  const bool keep = !r.chance(10);
  auto before = snapshot(c);
  moelith_status_t status = MOELITH_OK;
  check_call(
      "forward", values,
      [&] {
        return moelith_forward(plan, &c.inputs, &c.outputs, keep ? saved.data() : nullptr, workspace.data(), nullptr);
      },
      &status);
  check_memory(c, status == MOELITH_OK ? nullptr : &before, "forward");
  buffers_intact("forward");
  if (status != MOELITH_OK) return;
  if (c.finite) c.for_each_output([&](const char* name, moelith_tensor_t& t) { check_finite(name, t); });
  if (c.outputs.topk_ids.rank) {
    for (std::int64_t i = 0; i < c.tokens * c.config.top_k; ++i) {
      const double id = load(c.outputs.topk_ids.data, MOELITH_INT32, i);
      if (id < -1 || id >= c.config.num_experts) violated("outputs.topk_ids holds " + std::to_string(id));
    }
  }
  if (!keep) return;

  if (r.chance(40)) {
    const moelith_output_gradients_t up = c.output_gradients;
    const moelith_input_gradients_t down = c.input_gradients;
    const std::vector<moelith_shared_gradients_t> shared = c.shared_gradients;
    Expect expect = r.chance(40) ? spoil_one(r, [&](auto f) { c.for_each_upstream(f); })
                                 : spoil_one(r, [&](auto f) { c.for_each_gradient(f); });
    const void* saved_at = saved.data();
    Guarded unfilled(sizes.saved);
    if (r.chance(8)) {
      saved_at = r.pick<const void*>({nullptr, saved.data() + 16, unfilled.data()});
      expect = Expect::refusal;
    }
    if (spoil_struct_size(r, c.output_gradients) || spoil_struct_size(r, c.input_gradients)) expect = Expect::refusal;
    before = snapshot(c);
    check_call(
        "backward (spoilt)", expect,
        [&] {
          return moelith_backward(plan, &c.inputs, saved_at, &c.output_gradients, &c.input_gradients, workspace.data(),
                                  nullptr);
        },
        &status);
    check_memory(c, status == MOELITH_OK ? nullptr : &before, "backward (spoilt)");
    buffers_intact("backward (spoilt)");
    c.output_gradients = up;
    c.input_gradients = down;
    c.shared_gradients = shared;
    if (c.input_gradients.shared != nullptr) c.input_gradients.shared = c.shared_gradients.data();
  }
  check_call("backward", Expect::success, [&] {
    return moelith_backward(plan, &c.inputs, saved.data(), &c.output_gradients, &c.input_gradients, workspace.data(),
                            nullptr);
  });
  check_memory(c, nullptr, "backward");
  buffers_intact("backward");
  if (c.finite) c.for_each_gradient([&](const char* name, moelith_tensor_t& t) { check_finite(name, t); });
}

// Handles and pointers that are not there.
void run_null_case(Random& r) {
  moelith_layer_config_t config{};
  moelith_plan_options_t options{};
  options.struct_size = sizeof options;
  moelith_plan_t plan = nullptr;
  moelith_group_t groups[8] = {};
  check_call("config_init (null)", Expect::refusal, [&] { return moelith_layer_config_init(nullptr, sizeof config); });
  check_call("config_init (size)", Expect::refusal, [&] {
    return moelith_layer_config_init(&config,
                                     static_cast<std::size_t>(r.below(static_cast<std::int64_t>(sizeof config))));
  });
  check_call("plan_create (null config)", Expect::refusal,
             [&] { return moelith_plan_create(nullptr, &options, &plan); });
  (void)moelith_layer_config_init(&config, sizeof config);
  check_call("plan_create (null options)", Expect::refusal,
             [&] { return moelith_plan_create(&config, nullptr, &plan); });
  check_call("plan_create (null plan)", Expect::refusal,
             [&] { return moelith_plan_create(&config, &options, nullptr); });
  check_call("plan_create (empty config)", Expect::refusal,
             [&] { return moelith_plan_create(&config, &options, &plan); });
  check_call("forward (null)", Expect::refusal,
             [&] { return moelith_forward(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr); });
  check_call("backward (null)", Expect::refusal,
             [&] { return moelith_backward(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr); });
  check_call("layer_config_from_json (null)", Expect::refusal,
             [&] { return moelith_layer_config_from_json(&config, nullptr); });
  check_call("layer_config_from_preset", Expect::success, [&] {
    return moelith_layer_config_from_preset(&config, moelith_preset_name(static_cast<std::int32_t>(r.below(9))));
  });
  check_call("plan_config (null)", Expect::refusal, [&] { return moelith_plan_config(nullptr, &config); });
  check_call("group_create_single (null)", Expect::refusal, [&] { return moelith_group_create_single(nullptr); });
  check_call("group_create_threads (null)", Expect::refusal, [&] { return moelith_group_create_threads(2, nullptr); });
  moelith_group_t process = nullptr;
  check_call("group_create_process", Expect::refusal, [&] {
    switch (r.below(5)) {
      case 0: return moelith_group_create_process(nullptr, 0, 2, 1, &process);
      case 1: return moelith_group_create_process("fuzz", 0, 2, 1, nullptr);
      case 2: return moelith_group_create_process(r.pick({"", "a/b", "\xff"}), 0, 2, 1, &process);
      case 3: return moelith_group_create_process("fuzz", r.pick({-1, 2, 1 << 30}), 2, 1, &process);
      default: return moelith_group_create_process("fuzz", 0, r.pick({-1, 0, 65}), 1, &process);
    }
  });
  check_call("group_create_threads (count)", Expect::refusal, [&] {
    return moelith_group_create_threads(r.pick({0, -1, 1 << 20}), groups);
  });
  check_call("group_rank (null)", Expect::refusal, [&] { return moelith_group_rank(nullptr, nullptr, nullptr); });
  check_call("group_set_timeout (null)", Expect::refusal, [&] { return moelith_group_set_timeout(nullptr, 1); });
  check_call("group_fail (null)", Expect::refusal, [&] { return moelith_group_fail(nullptr, "nothing"); });
  check_call("update_selection_bias (null)", Expect::refusal,
             [&] { return moelith_update_selection_bias(nullptr, nullptr, 0.1); });
  moelith_plan_destroy(nullptr);
  moelith_group_destroy(nullptr);
  const auto ranks = static_cast<std::int32_t>(r.between(1, 4));
  check_call("group_create_threads", Expect::success, [&] { return moelith_group_create_threads(ranks, groups); });
  for (std::int32_t i = 0; i < ranks; ++i) {
    std::int32_t rank = -1, size = -1;
    check_call("group_rank", Expect::success, [&] { return moelith_group_rank(groups[i], &rank, &size); });
    if (rank != i || size != ranks) violated("group_rank is wrong");
    check_call("group_set_timeout", Expect::success,
               [&] { return moelith_group_set_timeout(groups[i], r.between(1, 100000)); });
    check_call("group_set_timeout (bad)", Expect::refusal, [&] {
      return moelith_group_set_timeout(groups[i], r.pick<std::int64_t>({0, -1, std::numeric_limits<std::int64_t>::max(),
                                                                        std::numeric_limits<std::int64_t>::min()}));
    });
    moelith_group_destroy(groups[i]);
  }
}

void run_bias_case(Case& c) {
  Random& r = c.random;
  const std::int64_t e = r.between(1, 20);
  const std::int32_t type = r.pick({MOELITH_FLOAT32, MOELITH_FLOAT64});
  moelith_tensor_t bias = c.filled(type, {e}, 1.0), counts = c.tensor(MOELITH_INT64, {e});
  for (std::int64_t i = 0; i < e; ++i) store(counts.data, MOELITH_INT64, i, static_cast<double>(r.below(100)));
  check_call("update_selection_bias", Expect::success,
             [&] { return moelith_update_selection_bias(&bias, &counts, 0.001); });
  check_memory(c, nullptr, "update_selection_bias");
  check_finite("bias", bias);
  const Expect expect = spoil(r, r.chance(50) ? bias : counts);
  check_call("update_selection_bias (spoilt)", expect == Expect::refusal ? Expect::refusal : Expect::anything,
             [&] { return moelith_update_selection_bias(&bias, &counts, r.chance(80) ? 0.001 : r.nasty_number()); });
  check_memory(c, nullptr, "update_selection_bias (spoilt)");
}

// A forward and backward of several ranks, all well formed but of unequal numbers of tokens; or a forward that one rank
// gets wrong, which ends it for all.
void run_rank_case(Random& r) {
  const auto ranks = static_cast<std::int32_t>(r.between(2, 3));
  moelith_group_t groups[4] = {};
  check_call("group_create_threads", Expect::success, [&] { return moelith_group_create_threads(ranks, groups); });
  const auto seed = static_cast<unsigned long long>(r.below(std::int64_t{1} << 62));
  const std::int32_t wrong = r.chance(30) ? static_cast<std::int32_t>(r.below(ranks)) : -1;
  std::vector<std::string> problems(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Case c(seed);
        c.make_config();  // the same on every rank
        c.expert_rank.clear();
        c.options.expert_rank = nullptr;
        c.options.expert_rank_count = 0;
        c.options.group = groups[rank];
        c.random = Random(seed + 1 + static_cast<unsigned long long>(rank));
        c.tokens = c.random.chance(20) ? 0 : c.random.between(1, 30);
        c.options.max_tokens = c.tokens;
        moelith_plan_t plan = nullptr;
        check_call("plan_create (ranks)", Expect::success,
                   [&] { return moelith_plan_create(&c.config, &c.options, &plan); });
        const std::unique_ptr<struct moelith_plan, void (*)(moelith_plan_t)> owner(plan, moelith_plan_destroy);
        std::int32_t local = 0;
        check_call("local_experts (ranks)", Expect::success,
                   [&] { return moelith_plan_local_experts(plan, &local, nullptr, 0); });
        moelith_buffer_sizes_t sizes{};
        sizes.struct_size = sizeof sizes;
        check_call("buffer_sizes (ranks)", Expect::success,
                   [&] { return moelith_plan_buffer_sizes(plan, c.tokens, &sizes); });

        const std::int64_t h = c.config.hidden_size, i = c.config.intermediate_size, rows = c.gate_up_rows(i),
                           k = c.config.top_k;
        const std::int32_t type = c.config.dtype, acc = c.accumulator();
        c.inputs.struct_size = sizeof c.inputs;
        c.inputs.x = c.filled(type, {c.tokens, h}, 1.0);
        c.inputs.router_logits = c.filled(acc, {c.tokens, c.config.num_experts}, 1.0);
        if (c.config.selection_bias) {
          // Must be equal on all ranks, or they would choose by different rules: zero.
          c.inputs.selection_bias = c.filled(acc, {c.config.num_experts}, 0.0);
        }
        c.inputs.gate_up_proj = c.filled(type, {local, rows, h}, 0.3);
        c.inputs.down_proj = c.filled(type, {local, h, i}, 0.3);
        if (c.config.gate_up_bias) c.inputs.gate_up_bias = c.filled(type, {local, rows}, 0.3);
        if (c.config.down_bias) c.inputs.down_bias = c.filled(type, {local, h}, 0.3);
        bool gated = false;
        for (std::int32_t s = 0; s < c.config.num_shared_experts; ++s) {
          const std::int64_t width = c.config.shared_experts[s].intermediate_size, pre = c.gate_up_rows(width);
          gated |= c.config.shared_experts[s].gated != 0;
          moelith_shared_weights_t w{};
          w.gate_up_proj = c.filled(type, {pre, h}, 0.3);
          w.down_proj = c.filled(type, {h, width}, 0.3);
          if (c.config.gate_up_bias) w.gate_up_bias = c.filled(type, {pre}, 0.3);
          if (c.config.down_bias) w.down_bias = c.filled(type, {h}, 0.3);
          c.shared.push_back(w);
        }
        c.inputs.shared = c.shared.empty() ? nullptr : c.shared.data();
        c.inputs.num_shared = c.config.num_shared_experts;
        if (gated) c.inputs.shared_gate_logits = c.filled(acc, {c.tokens, c.config.num_shared_experts}, 1.0);
        c.outputs.struct_size = sizeof c.outputs;
        c.outputs.y = c.tensor(type, {c.tokens, h});
        c.outputs.topk_weights = c.tensor(acc, {c.tokens, k});
        c.output_gradients.struct_size = sizeof c.output_gradients;
        c.output_gradients.y = c.filled(type, {c.tokens, h}, 1.0);
        c.input_gradients.struct_size = sizeof c.input_gradients;
        c.input_gradients.x = c.tensor(type, {c.tokens, h});
        c.input_gradients.router_logits = c.tensor(acc, {c.tokens, c.config.num_experts});
        c.input_gradients.gate_up_proj.tensor = c.tensor(type, {local, rows, h});
        c.input_gradients.down_proj.tensor = c.tensor(type, {local, h, i});

        Guarded saved(sizes.saved), workspace(sizes.workspace);
        if (rank == wrong) c.outputs.y.rank = c.random.pick({0, 1, 3, 77});
        moelith_status_t status = MOELITH_OK;
        check_call(
            "forward (ranks)", wrong < 0 ? Expect::success : Expect::refusal,
            [&] { return moelith_forward(plan, &c.inputs, &c.outputs, saved.data(), workspace.data(), nullptr); },
            &status);
        if (wrong >= 0) {
          if (status != (rank == wrong ? MOELITH_INVALID_ARGUMENT : MOELITH_GROUP_FAILED))
            violated(std::string("a forward that one rank gets wrong ends by ") + moelith_status_name(status));
          return;
        }
        check_call("backward (ranks)", Expect::success, [&] {
          return moelith_backward(plan, &c.inputs, saved.data(), &c.output_gradients, &c.input_gradients,
                                  workspace.data(), nullptr);
        });
        check_memory(c, nullptr, "a pass of several ranks");
        if (!saved.intact() || !workspace.intact()) violated("a pass of several ranks wrote beyond a buffer");
        c.for_each_output([&](const char* name, moelith_tensor_t& t) { check_finite(name, t); });
        c.for_each_gradient([&](const char* name, moelith_tensor_t& t) { check_finite(name, t); });
      } catch (const Violation& violation) {
        problems[static_cast<std::size_t>(rank)] = violation.text;
        (void)moelith_group_fail(groups[rank], violation.text.c_str());  // the others need not wait for this rank
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const moelith_group_t group : groups) moelith_group_destroy(group);
  for (const std::string& problem : problems) {
    if (!problem.empty()) violated(problem);
  }
}

// A config.json with some bytes changed.
void run_config_json_case(Random& r) {
  std::string text = r.pick<const char*>(
      {R"({"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2})",
       R"({"model_type": "deepseek_v3", "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1, "num_hidden_layers": 4})",
       R"({"model_type": "qwen2_moe", "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1, 2]})"});
  for (std::int64_t n = r.below(4); n > 0; --n) {
    const auto at = static_cast<std::size_t>(r.below(static_cast<std::int64_t>(text.size())));
    switch (r.below(3)) {
      case 0: text[at] = static_cast<char>(r.below(256)); break;
      case 1: text.erase(at, static_cast<std::size_t>(r.between(1, 5))); break;
      default:
        text.insert(at, r.pick<const char*>({"9", "-", "1e400", "null", "\"", "[", "99999999999999999999"}));
        break;
    }
    if (text.empty()) text = "{";
  }
  moelith_layer_config_t config{};
  config.struct_size = sizeof config;
  moelith_status_t status = MOELITH_OK;
  check_call(
      "layer_config_from_json", Expect::anything, [&] { return moelith_layer_config_from_json(&config, text.c_str()); },
      &status);
  if (status == MOELITH_DEVICE_ERROR) violated("a bad config.json was taken for a failing device");
  if (status == MOELITH_OK) {
    check_call("layer_config_validate", Expect::anything, [&] { return moelith_layer_config_validate(&config); });
  }
}

void run_case(unsigned long long seed, unsigned long long number) {
  std::seed_seq mixed{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                      static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32)};
  std::uint32_t parts[2];
  mixed.generate(parts, parts + 2);
  Case c(static_cast<unsigned long long>(parts[0]) << 32 | parts[1]);
  const std::int64_t kind = c.random.below(100);
  if (kind < 80)
    run_layer_case(c);
  else if (kind < 85)
    run_rank_case(c.random);
  else if (kind < 90)
    run_bias_case(c);
  else if (kind < 95)
    run_null_case(c.random);
  else
    run_config_json_case(c.random);
}

void tell_case() {
  std::fprintf(stderr, "fuzz: in case %llu of seed %llu (again: moelith_fuzz --seed %llu --case %llu --verbose)\n",
               current_case, current_seed, current_seed, current_case);
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 60;
  unsigned long long most_cases = std::numeric_limits<unsigned long long>::max(), first = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> const char* {
      if (i + 1 >= argc) {
        std::fprintf(stderr, "fuzz: %s needs a value\n", name.c_str());
        std::exit(2);
      }
      return argv[++i];
    };
    if (name == "--seconds")
      seconds = std::atof(value());
    else if (name == "--seed")
      current_seed = std::strtoull(value(), nullptr, 10);
    else if (name == "--cases")
      most_cases = std::strtoull(value(), nullptr, 10);
    else if (name == "--case")
      first = std::strtoull(value(), nullptr, 10), most_cases = 1;
    else if (name == "--verbose")
      verbose = true;
    else {
      std::fprintf(stderr, "fuzz: unknown option %s; known: --seconds, --seed, --cases, --case, --verbose\n",
                   name.c_str());
      return 2;
    }
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(tell_case);
#endif
  const auto start = std::chrono::steady_clock::now();
  unsigned long long done = 0;
  for (; done < most_cases; ++done) {
    if (most_cases != 1 && std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >= seconds)
      break;
    current_case = first + done;
    if (verbose) std::printf("case %llu\n", current_case);
    try {
      run_case(current_seed, current_case);
    } catch (const Violation& violation) {
      std::fprintf(stderr, "fuzz: %s\n", violation.text.c_str());
      tell_case();
      return 1;
    }
  }
  std::printf("fuzz: %llu cases of seed %llu, no failure\n", done, current_seed);
  return 0;
}
