// The layer on one Hopper GPU: the routing kernels, then one persistent kernel; backward one persistent kernel, then the
// kernel of the router's gradient. Launches alone: nothing is allocated, copied, cleared or awaited in a call, so a call
// can be captured in a CUDA graph. Several ranks exchange their tables (executors/cuda/exchange.hpp) before each pass.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_check.hpp"
#include "executors/cuda/pass_data.hpp"
#include "executors/cuda/timeline.hpp"
#include "layer/bound_experts.hpp"
#include "layer/cuda_ranks.hpp"
#include "layer/plan.hpp"
#include "routing/device_router.hpp"
#include "schedule/dependencies.hpp"

namespace moelith::layer {
namespace {

using executors::cuda::ExpertGroup;
using executors::cuda::GradientTarget;
using executors::cuda::PassCounters;
using executors::cuda::PassData;
using executors::cuda::PassError;
using executors::cuda::TileEvent;
using numerics::bfloat16;
using schedule::Direction;

template <class U>
U* at(void* base, std::uint64_t offset) {
  return offset == absent || !base ? nullptr : reinterpret_cast<U*>(static_cast<std::byte*>(base) + offset);
}
template <class U>
U* data_of(const TensorView& view) {
  return view.given() ? static_cast<U*>(view.data) : nullptr;
}
routing::DeviceFloats floats_of(const TensorView& view) {
  if (!view.given()) return {};
  return {view.data, view.dtype == DataType::bfloat16, view.stride[0]};
}

[[noreturn]] void unsupported(const std::string& text) { throw Error(Status::unsupported, text); }

// Rows move 16 bytes at a time.
void check_rows(const TensorView& view, const char* name, std::int64_t shared = -1) {
  if (!view.given() || view.numel() == 0) return;
  auto full_name = [&] { return shared < 0 ? std::string(name) : "shared." + std::to_string(shared) + "." + name; };
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % 16 != 0) throw Error(Status::invalid_argument, full_name() + ": got memory that is not aligned, accepted is an address divisible by 16");
  if (view.rank == 2 && view.shape[0] > 1 && view.stride[0] * std::int64_t(size_of(view.dtype)) % 16 != 0) {
    throw Error(Status::invalid_argument, full_name() + ": got " + describe(view) + ", accepted are rows at distances of a multiple of 16 bytes");
  }
}

// Gradients of a y that has none.
struct ZeroTensors {
  static constexpr int most = 5 + 4 * schedule::max_shared_experts;
  struct Tensor {
    unsigned short* data;
    std::int64_t rows, length, stride;  // in 2-byte words
    void* const* apart;                 // where each row lies, in the place of data and stride
  } tensor[most];
  int count = 0;

  void add(const TensorView& view) {
    if (!view.given() || view.numel() == 0) return;
    const std::int64_t words = std::int64_t(size_of(view.dtype)) / 2, rows = view.rank == 2 ? view.shape[0] : 1;
    tensor[count++] = {static_cast<unsigned short*>(view.data), rows, view.numel() / rows * words, (rows > 1 ? view.stride[0] : 0) * words, nullptr};
  }
  void add(void* const* apart, std::int64_t count, std::int64_t size, DataType type) {
    tensor[this->count++] = {nullptr, count, size * std::int64_t(size_of(type)) / 2, 0, apart};
  }
  void add(const Gradient& gradient) {
    if (!gradient.accumulate) add(gradient.tensor);
  }
};
__global__ void zero_tensors(const __grid_constant__ ZeroTensors tensors) {
  for (int i = 0; i < tensors.count; ++i) {
    const auto& t = tensors.tensor[i];
    for (std::int64_t row = blockIdx.x; row < t.rows; row += gridDim.x) {
      auto* data = t.apart ? static_cast<unsigned short*>(t.apart[row]) : t.data + row * t.stride;
      for (std::int64_t n = threadIdx.x; n < t.length; n += blockDim.x) data[n] = 0;
    }
  }
}

// What bind() makes: in one piece of device memory the pointers of each kind, and the tensor maps of the projections.
struct DeviceExperts {
  DeviceExperts() = default;
  DeviceExperts(const DeviceExperts&) = delete;
  DeviceExperts& operator=(const DeviceExperts&) = delete;
  ~DeviceExperts() { cudaFree(memory); }

  void* memory = nullptr;
  void* const* gate_up_proj = nullptr;
  void* const* gate_up_bias = nullptr;
  void* const* down_proj = nullptr;
  void* const* down_bias = nullptr;
  const void *gate_up_maps = nullptr, *down_maps = nullptr;

  static const DeviceExperts& of(const std::shared_ptr<const BoundExperts>& bound) {
    static const DeviceExperts none;
    return bound ? *static_cast<const DeviceExperts*>(bound->of_device()) : none;
  }
};

// What a forward keeps beside SavedBuffer's parts: the gates, and the counters of backward, which a pass leaves at zero.
struct Extras {
  std::uint64_t gates, local_counters, arrivals, control, size;

  static Extras behind(std::uint64_t offset, const Geometry& g) {
    const auto map = schedule::CounterMap::of(g.sizes);
    auto part = [&](std::uint64_t bytes) {
      const std::uint64_t here = offset;
      offset += (bytes + 255) / 256 * 256;
      return here;
    };
    Extras e;
    e.gates = part(4 * std::uint64_t(g.tokens) * g.config.shared_experts.size());
    e.local_counters = part(8 * std::uint64_t(map.local_size));
    e.arrivals = part(8 * std::uint64_t(map.arrivals_size));
    e.control = part(8 * PassCounters::control_counters);
    e.size = offset;
    return e;
  }
};

// Where everything of a call with T tokens lies.
struct Placement {
  Geometry geometry;
  SavedBuffer kept, bare;  // with `keep` and without
  Extras extras;           // behind `kept`
  ForwardWorkspace forward;
  BackwardWorkspace backward;
  // Behind them the routed rows of x (and dY) one after the other, as the copy engine reads them.
  std::uint64_t forward_packed_x, backward_packed_x, backward_packed_dy;
  std::uint64_t forward_tiles, backward_tiles;  // the descriptions of all tiles
  std::uint64_t backward_zero_dy;               // [T, H]: the gradient of y of a rank that has none; several ranks
  schedule::CounterMap counters;
  BufferSizes sizes;
};

class CudaLayer final : public DeviceLayer {
 public:
  explicit CudaLayer(const Plan::Impl& plan) : plan_(plan), config_(plan.config), shared_count_(plan.config.shared_experts.size()) {
    if (config_.dtype != DataType::bfloat16) {
      unsupported(std::string("dtype: got ") + to_string(config_.dtype) + ", accepted on device cuda is bfloat16");
    }
    int device = 0, devices = 0, major = 0, minor = 0;
    if (const cudaError_t status = cudaGetDeviceCount(&devices); status != cudaSuccess || devices == 0) {
      unsupported(std::string("device cuda: no GPU can be used: ") + (status == cudaSuccess ? "none is there" : cudaGetErrorString(status)));
    }
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
    if (major != 9 || minor != 0) {
      unsupported("device cuda: got a GPU of compute capability " + std::to_string(major) + "." + std::to_string(minor) + ", accepted is 9.0 (Hopper)");
    }
    const std::int32_t columns = plan.options.tile_columns == 0 ? 192 : plan.options.tile_columns;
    if (columns != 128 && columns != 192) {
      throw Error(Status::invalid_argument, "tile_columns: got " + std::to_string(columns) + ", accepted on device cuda are 0, 128 and 192");
    }
    tile_ = tile_shape(columns);
    check_cuda(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    for (std::size_t s = 0; s < shared_count_; ++s) gated_ |= std::uint32_t(config_.shared_experts[s].gated) << s;
    if (plan.options.group.size() > 1) {
      cudaFuncAttributes attributes;
      check_cuda(cudaFuncGetAttributes(&attributes, zero_tensors), "kernel of the zeros");  // loaded now, as CudaRanks says
      ranks_ = std::make_unique<CudaRanks>(plan, tile_);
    } else {
      check_cuda(cudaMallocHost(&error_, sizeof(PassError)), "the word for errors");
      *error_ = PassError{};
    }
    if (plan.options.timeline) {
      check_cuda(cudaMalloc(&trace_, trace_events() * sizeof(TileEvent)), "memory of the timeline");
      check_cuda(cudaMemset(trace_, 0xff, trace_events() * sizeof(TileEvent)), "memory of the timeline");
    }
  }
  ~CudaLayer() override {
    cudaFreeHost(error_);
    cudaFree(trace_);
  }

  std::vector<TileSpan> timeline() const override {
    check_cuda(cudaDeviceSynchronize(), "the pass whose timeline is asked for");
    std::vector<TileEvent> events(trace_events());
    check_cuda(cudaMemcpy(events.data(), trace_, events.size() * sizeof(TileEvent), cudaMemcpyDeviceToHost), "timeline");
    return executors::cuda::spans_of(events, trace_room);
  }

  BufferSizes buffer_sizes(std::int64_t tokens) const override {
    return placement(tokens)->sizes;
  }

  std::shared_ptr<const void> bind(const ExpertPointers& pointers) const override {
    auto check_list = [](const std::vector<void*>& list, const char* name) {
      for (std::size_t e = 0; e < list.size(); ++e) {
        if (reinterpret_cast<std::uintptr_t>(list[e]) % 16 == 0) continue;
        throw Error(Status::invalid_argument, std::string(name) + "[" + std::to_string(e) +
                                                  "]: got memory that is not aligned, accepted is an address divisible by 16");
      }
    };
    check_list(pointers.gate_up_proj, "gate_up_proj");
    check_list(pointers.gate_up_bias, "gate_up_bias");
    check_list(pointers.down_proj, "down_proj");
    check_list(pointers.down_bias, "down_bias");
    const std::int64_t h = config_.hidden_size, i = config_.intermediate_size;
    const auto experts = static_cast<std::int32_t>(plan_.local_experts.size());
    auto made = std::make_shared<DeviceExperts>();
    std::vector<std::byte> bytes;
    auto place = [&bytes](const void* data, std::size_t size) {  // where it will lie, behind what is there already
      const std::size_t offset = (bytes.size() + 63) / 64 * 64;
      bytes.resize(offset + size);
      std::copy_n(static_cast<const std::byte*>(data), size, bytes.data() + offset);
      return offset;
    };
    constexpr std::size_t none = ~std::size_t(0);
    auto place_list = [&](const std::vector<void*>& list) { return list.empty() ? none : place(list.data(), list.size() * sizeof(void*)); };
    auto place_maps = [&](const std::vector<void*>& list, auto&& make) {
      if (list.empty() || pointers.dtype != DataType::bfloat16) return none;
      const std::vector<std::byte> maps = make(list.data());
      return place(maps.data(), maps.size());
    };
    const int factor = config_.activation.gated() ? 2 : 1;
    const std::size_t offsets[6] = {place_list(pointers.gate_up_proj), place_list(pointers.gate_up_bias),
                                    place_list(pointers.down_proj), place_list(pointers.down_bias),
                                    place_maps(pointers.gate_up_proj, [&](auto* list) { return executors::cuda::sm90_gate_up_maps(list, experts, factor, i, h); }),
                                    place_maps(pointers.down_proj, [&](auto* list) { return executors::cuda::sm90_down_maps(list, experts, h, i); })};
    check_cuda(cudaMalloc(&made->memory, std::max<std::size_t>(bytes.size(), 64)), "memory of bound experts");
    check_cuda(cudaMemcpy(made->memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "copy of bound experts");
    auto at = [&](std::size_t offset) { return offset == none ? nullptr : static_cast<void*>(static_cast<std::byte*>(made->memory) + offset); };
    made->gate_up_proj = static_cast<void* const*>(at(offsets[0]));
    made->gate_up_bias = static_cast<void* const*>(at(offsets[1]));
    made->down_proj = static_cast<void* const*>(at(offsets[2]));
    made->down_bias = static_cast<void* const*>(at(offsets[3]));
    made->gate_up_maps = at(offsets[4]);
    made->down_maps = at(offsets[5]);
    return made;
  }

  void forward(const CallFacts& facts, const Inputs& inputs, const Outputs& outputs, void* saved, void* workspace,
               void* stream) const override {
    check_error();
    check_inputs_alignment(inputs);
    check_rows(outputs.y, "y");
    const auto place = placement(facts.tokens);
    const bool keep = saved != nullptr;
    const Geometry& geometry = place->geometry;
    const SavedBuffer& kept = keep ? place->kept : place->bare;
    const Extras& extras = place->extras;
    const ForwardWorkspace& scratch = place->forward;
    void* tables = keep ? saved : at<std::byte>(workspace, scratch.tables);
    float* gates = keep ? at<float>(saved, extras.gates) : at<float>(workspace, scratch.shared_gates);
    if (!inputs.shared_gate_logits.given()) gates = nullptr;

    PassData data = pass_data(geometry, inputs, Direction::forward, tables, kept, gates);
    data.out = data_of<bfloat16>(outputs.y);
    data.out_stride = outputs.y.stride[0];
    const auto& map = place->counters;
    data.counters = {at<unsigned long long>(workspace, scratch.local_counters), at<unsigned long long>(workspace, scratch.arrivals),
                     at<unsigned long long>(workspace, scratch.router_scratch)};
    data.packed_x = at<bfloat16>(workspace, place->forward_packed_x);
    data.tiles = at<std::byte>(workspace, place->forward_tiles);
    auto& routed = data.groups[0];
    routed.activated = at<bfloat16>(workspace, scratch.activated);
    routed.pre_activation = keep ? at<bfloat16>(saved, kept.pre_activation) : nullptr;
    routed.slots = at<bfloat16>(workspace, scratch.route_rows);
    for (std::size_t s = 0; s < shared_count_; ++s) {
      auto& group = data.groups[1 + s];
      group.activated = at<bfloat16>(workspace, scratch.shared_activated[s]);
      group.pre_activation = keep ? at<bfloat16>(saved, kept.shared_pre_activation[s]) : nullptr;
      group.slots = at<bfloat16>(workspace, scratch.shared_rows[s]);
    }

    routing::DeviceRouteJob job;
    job.config = config_.router;
    job.num_experts = config_.num_experts;
    job.top_k = config_.top_k;
    job.tokens = facts.tokens;
    job.num_sequences = inputs.num_sequences;
    job.num_valid_tokens = data_of<std::int32_t>(inputs.num_valid_tokens);
    if (facts.routes == RouteSource::logits) {
      job.logits = floats_of(inputs.router_logits);
      job.selection_bias = data_of<float>(inputs.selection_bias);
    } else if (facts.routes == RouteSource::caller) {
      job.caller_ids = inputs.topk_ids.data;
      job.caller_ids_64 = inputs.topk_ids.dtype == DataType::int64;
      job.caller_weights = data_of<float>(inputs.topk_weights);
    }
    job.gate_logits = floats_of(inputs.shared_gate_logits);
    job.shared_experts = static_cast<std::int32_t>(shared_count_);
    job.gated = gated_;
    job.gates = gates;
    job.topk_ids = at<std::int32_t>(tables, kept.topk_ids);
    job.topk_weights = at<float>(tables, kept.topk_weights);
    job.chosen_ids = at<std::int32_t>(tables, kept.chosen_ids);
    job.counts = at<std::int64_t>(tables, kept.counts);
    job.sizes = geometry.sizes;
    job.layout = data.pass.layout;
    job.out_ids = data_of<std::int32_t>(outputs.topk_ids);
    job.out_weights = data_of<float>(outputs.topk_weights);
    job.out_counts = data_of<std::int64_t>(outputs.expert_counts);
    job.aux_loss = data_of<float>(outputs.aux_loss);
    job.z_loss = data_of<float>(outputs.z_loss);
    job.zero[0] = {data.counters.local, map.local_size};
    // Of several ranks passes leave them at zero.
    if (!ranks_) job.zero[1] = {data.counters.arrivals, map.arrivals_size};
    if (geometry.copies_rows_here()) job.zero[1] = {at<unsigned long long>(tables, kept.first_row), geometry.tokens_of_others()};
    job.zero[2] = {data.counters.control, PassCounters::control_counters};
    if (keep) {
      job.zero[3] = {at<unsigned long long>(saved, extras.local_counters), map.local_size};
      job.zero[4] = {at<unsigned long long>(saved, extras.arrivals), map.arrivals_size};
      job.zero[5] = {at<unsigned long long>(saved, extras.control), PassCounters::control_counters};
    }
    job.scratch = at<std::byte>(workspace, scratch.router_scratch + control_bytes);
    if (ranks_) {
      ranks_->complete(data, tables, kept);
      job.tables = ranks_->tables();
      job.score_sums = at<float>(workspace, scratch.score_sums);
    }
    routing::device_route(job, stream);
    if (!ranks_) return run_pass(data, stream, true);
    const executors::cuda::ExchangeJob exchange = ranks_->exchange(data, keep);
    executors::cuda::run_exchange(exchange, stream);
    if (routing::wants_global_aux_loss(job)) routing::device_global_aux_loss(job, stream);
    run_pass(data, stream, false);
    executors::cuda::end_exchange(exchange, stream);
  }

  void backward(const CallFacts& facts, const Inputs& inputs, const void* const_saved, const OutputGradients& upstream,
                const InputGradients& gradients, void* workspace, void* stream) const override {
    check_error();
    check_inputs_alignment(inputs);
    check_rows(upstream.y, "gradient of y");
    check_rows(gradients.x, "dx");
    const auto place = placement(facts.tokens);
    const Geometry& geometry = place->geometry;
    const SavedBuffer& kept = place->kept;
    const Extras& extras = place->extras;
    const BackwardWorkspace& scratch = place->backward;
    void* saved = const_cast<void*>(const_saved);  // only its counters are written, and left as they were
    float* gates = inputs.shared_gate_logits.given() ? at<float>(saved, extras.gates) : nullptr;
    PassData data = pass_data(geometry, inputs, Direction::backward, saved, kept, gates);
    // Among several ranks one without a gradient of y has to take part: others' tokens went through its experts.
    const bool runs = upstream.y.given() || ranks_;
    auto* d_weights = at<float>(workspace, scratch.d_topk_weights);
    auto* d_gates = at<float>(workspace, scratch.d_shared_gates);
    if (runs) {
      data.counters = {at<unsigned long long>(saved, extras.local_counters), at<unsigned long long>(saved, extras.arrivals),
                       at<unsigned long long>(saved, extras.control)};
      data.dy = data_of<bfloat16>(upstream.y);
      data.dy_stride = upstream.y.stride[0];
      if (!upstream.y.given()) place_zero_dy(data, at<bfloat16>(workspace, place->backward_zero_dy), stream);
      data.out = data_of<bfloat16>(gradients.x);
      data.out_stride = gradients.x.stride[0];
      data.d_topk_weights = d_weights;
      data.d_shared_gates = gates ? d_gates : nullptr;
      place_backward(data, geometry, gradients, saved, kept, workspace, scratch);
      const auto& sizes = data.pass.sizes;
      if (sizes.recompute || sizes.has_rounds() || sizes.want_gate_up_wgrad) data.packed_x = at<bfloat16>(workspace, place->backward_packed_x);
      data.packed_dy = at<bfloat16>(workspace, place->backward_packed_dy);
      data.tiles = at<std::byte>(workspace, place->backward_tiles);
      if (ranks_) {
        ranks_->complete(data, saved, kept);
        const executors::cuda::ExchangeJob exchange = ranks_->exchange(data, true);
        executors::cuda::run_exchange(exchange, stream);
        run_pass(data, stream, false);
        executors::cuda::end_exchange(exchange, stream);
      } else {
        run_pass(data, stream, false);
      }
    } else {
      zero_gradients(gradients, stream);
    }

    routing::DeviceRouteGradientJob job;
    job.config = config_.router;
    job.num_experts = config_.num_experts;
    job.top_k = config_.top_k;
    job.tokens = facts.tokens;
    job.num_sequences = inputs.num_sequences;
    job.valid_tokens = data.pass.layout.valid_tokens;
    job.logits = floats_of(inputs.router_logits);
    job.topk_ids = data.topk_ids;
    job.chosen_ids = kept.chosen_ids == absent ? data.topk_ids : at<std::int32_t>(saved, kept.chosen_ids);
    job.counts = at<std::int64_t>(saved, kept.counts);
    job.d_pass_weights = runs ? d_weights : nullptr;
    job.d_given_weights = data_of<float>(upstream.topk_weights);
    job.d_aux_loss = data_of<float>(upstream.aux_loss);
    job.d_z_loss = data_of<float>(upstream.z_loss);
    job.gate_logits = floats_of(inputs.shared_gate_logits);
    job.d_gates = runs ? d_gates : nullptr;
    job.shared_experts = static_cast<std::int32_t>(shared_count_);
    job.gated = gated_;
    job.d_logits = data_of<void>(gradients.router_logits);
    job.d_logits_stride = gradients.router_logits.stride[0];
    job.d_topk_weights = data_of<float>(gradients.topk_weights);
    job.d_gate_logits = data_of<void>(gradients.shared_gate_logits);
    job.d_gate_logits_bfloat16 = gradients.shared_gate_logits.dtype == DataType::bfloat16;
    routing::device_route_gradient(job, stream);
  }

 private:
  static constexpr std::uint64_t control_bytes = 256;  // at the start of the scratch memory

  schedule::TileShape tile_shape(int columns) const {
    return executors::cuda::sm90_tile_shape(columns, config_.activation.gated() ? 2 : 1, config_.top_k);
  }
  // Up to so many tokens even tiles of 128 columns are too few for all pairs of SMs, and they are more than those of 192.
  std::int64_t narrow_tokens() const {
    if (plan_.options.tile_columns != 0 || ranks_) return 0;
    return multiprocessors_ / 2 / (config_.top_k * schedule::ceil_div(config_.intermediate_size, tile_shape(128).gate_up));
  }
  schedule::TileShape tile_of(std::int64_t tokens) const {
    const std::int64_t few = narrow_tokens();
    return few > 0 && tokens <= few ? tile_shape(128) : tile_;
  }

  // Remembers the last one, since calls of one size follow each other.
  std::shared_ptr<const Placement> placement(std::int64_t tokens) const {
    const std::lock_guard lock(placement_mutex_);
    if (placement_ && placement_->geometry.tokens == tokens) return placement_;
    auto made = place(tokens);
    // More and smaller tiles take up more room: buffers for many tokens are large enough for few, too.
    if (const std::int64_t few = narrow_tokens(); few > 0 && tokens > few) {
      const BufferSizes sizes = place(few)->sizes;
      made->sizes.saved = std::max(made->sizes.saved, sizes.saved);
      made->sizes.workspace = std::max(made->sizes.workspace, sizes.workspace);
    }
    placement_ = made;
    return made;
  }
  std::shared_ptr<Placement> place(std::int64_t tokens) const {
    auto made = std::make_shared<Placement>();
    const Geometry& geometry = made->geometry = plan_.geometry(tokens, tile_of(tokens));
    made->kept = SavedBuffer::of(geometry, true);
    made->bare = SavedBuffer::of(geometry, false);
    made->extras = Extras::behind(made->kept.size, geometry);
    made->forward = ForwardWorkspace::of(geometry, scratch_bytes(tokens));
    made->backward = BackwardWorkspace::of(geometry, scratch_bytes(tokens));
    made->counters = schedule::CounterMap::of(geometry.sizes);
    const std::uint64_t packed = (2 * std::uint64_t(geometry.packed_rows()) * geometry.config.hidden_size + 255) / 256 * 256;
    made->forward_packed_x = (made->forward.size + 255) / 256 * 256;
    made->backward_packed_x = (made->backward.size + 255) / 256 * 256;
    made->backward_packed_dy = made->backward_packed_x + packed;
    made->forward_tiles = made->forward_packed_x + packed;
    made->backward_tiles = made->backward_packed_dy + packed;
    const std::uint64_t table = executors::cuda::sm90_tile_table_bytes(geometry.sizes);
    made->backward_zero_dy = (made->backward_tiles + table + 255) / 256 * 256;
    const std::uint64_t zero_dy = ranks_ ? 2 * std::uint64_t(tokens) * geometry.config.hidden_size : 0;
    made->sizes = {made->extras.size, std::max(made->forward_tiles + table, made->backward_zero_dy + zero_dy),
                   made->kept.formula + ", and " + std::to_string(made->extras.size - made->kept.size) + " bytes of gates and counters"};
    return made;
  }

  std::uint64_t scratch_bytes(std::int64_t tokens) const {
    return control_bytes + routing::device_router_scratch_bytes(config_.router, config_.num_experts, config_.top_k, tokens);
  }

  static constexpr std::int32_t trace_room = 4096;  // events of a warpgroup
  std::size_t trace_events() const { return std::size_t(multiprocessors_) * 2 * trace_room; }

  // behind_router: the launch before was the router's.
  void run_pass(PassData& data, void* stream, bool behind_router) const {
    if (trace_) {
      data.trace = trace_, data.trace_room = trace_room;
      check_cuda(cudaMemsetAsync(trace_, 0xff, trace_events() * sizeof(TileEvent), static_cast<cudaStream_t>(stream)),
                 "memory of the timeline");
    }
    executors::cuda::sm90_run_pass(data, ranks_ ? ranks_->blocks(plan_.options.workers) : plan_.options.workers, stream,
                                  behind_router && !trace_);
  }

  void place_zero_dy(PassData& data, bfloat16* zeros, void* stream) const {
    data.dy = zeros;
    data.dy_stride = config_.hidden_size;
    ZeroTensors zero{};
    zero.add(TensorView(zeros, DataType::bfloat16, {data.pass.sizes.tokens, config_.hidden_size}));
    launch(zero, stream);
  }

  // A pass that gave up has told so since the last call.
  void check_error() const {
    if (ranks_) return ranks_->check_error();
    volatile PassError& error = *error_;
    if (error.state != PassError::there) return;
    const std::string text = std::string("an earlier pass of this plan gave up waiting in stage ") +
                             schedule::to_string(static_cast<schedule::Stage>(error.stage)) + ", expert " + std::to_string(error.expert) +
                             ", row block " + std::to_string(error.row_block) + "; its results are incomplete";
    error.state = PassError::none;  // told once
    throw Error(Status::timed_out, text);
  }

  void check_inputs_alignment(const Inputs& inputs) const {
    check_rows(inputs.x, "x");
    auto check_set = [](const auto& set, std::int64_t shared) {
      check_rows(set.gate_up_proj, "gate_up_proj", shared);
      check_rows(set.gate_up_bias, "gate_up_bias", shared);
      check_rows(set.down_proj, "down_proj", shared);
      check_rows(set.down_bias, "down_bias", shared);
    };
    check_set(inputs.weights, -1);
    for (std::size_t s = 0; s < shared_count_; ++s) check_set(inputs.weights.shared[s], std::int64_t(s));
  }

  // What both directions share.
  PassData pass_data(const Geometry& geometry, const Inputs& inputs, Direction direction, void* tables, const SavedBuffer& kept,
                     float* gates) const {
    PassData data;
    data.pass.sizes = geometry.sizes;
    data.pass.sizes.direction = direction;
    data.pass.layout = schedule::Layout::at(at<std::int64_t>(tables, kept.layout_header), at<std::int32_t>(tables, kept.row_route), geometry.ranks,
                                            geometry.local_experts, geometry.sizes.max_rounds);
    data.error = error_;
    data.activation = numerics::Activation(config_.activation);
    data.weight_after_down = config_.weight_placement == WeightPlacement::after_down;
    data.total_rows = geometry.held_rows();
    data.packed_rows = geometry.packed_rows();
    data.x = data_of<bfloat16>(inputs.x);
    data.x_stride = inputs.x.stride[0];
    data.topk_ids = at<std::int32_t>(tables, kept.topk_ids);
    data.topk_weights = at<float>(tables, kept.topk_weights);
    data.shared_gates = gates;
    auto set = [](ExpertGroup& group, const auto& weights, std::int32_t experts, std::int64_t width) {
      group.experts = experts;
      group.width = width;
      group.gate_up_proj = data_of<bfloat16>(weights.gate_up_proj);
      group.gate_up_bias = data_of<bfloat16>(weights.gate_up_bias);
      group.down_proj = data_of<bfloat16>(weights.down_proj);
      group.down_bias = data_of<bfloat16>(weights.down_bias);
    };
    set(data.groups[0], inputs.weights, geometry.local_experts, config_.intermediate_size);
    const DeviceExperts& apart = DeviceExperts::of(inputs.weights.bound);
    auto take = [](executors::cuda::ExpertTensors& tensors, void* const* list) {
      tensors.apart = reinterpret_cast<const bfloat16* const*>(list);
    };
    take(data.groups[0].gate_up_proj, apart.gate_up_proj);
    take(data.groups[0].gate_up_bias, apart.gate_up_bias);
    take(data.groups[0].down_proj, apart.down_proj);
    take(data.groups[0].down_bias, apart.down_bias);
    data.groups[0].gate_up_maps = apart.gate_up_maps;
    data.groups[0].down_maps = apart.down_maps;
    for (std::size_t s = 0; s < shared_count_; ++s) {
      set(data.groups[1 + s], inputs.weights.shared[s], 1, config_.shared_experts[s].intermediate_size);
    }
    return data;
  }

  void place_backward(PassData& data, const Geometry& geometry, const InputGradients& gradients, void* saved, const SavedBuffer& kept,
                      void* workspace, const BackwardWorkspace& scratch) const {
    auto& sizes = data.pass.sizes;
    sizes.want_dx = gradients.x.given() || ranks_;  // of several ranks: others' tiles write into it
    sizes.want_gate_up_wgrad = sizes.want_down_wgrad = sizes.want_gate_up_bias_grad = sizes.want_down_bias_grad = false;
    auto target = [](const Gradient& gradient, const char* name, std::int64_t shared, bool& wanted) {
      GradientTarget t;
      if (!gradient.tensor.given()) return t;
      check_rows(gradient.tensor, name, shared);
      wanted = true;
      t.data = gradient.tensor.data;
      t.is_float = gradient.tensor.dtype == DataType::float32;
      t.accumulate = gradient.accumulate;
      return t;
    };
    auto set = [&](ExpertGroup& group, const auto& g, std::int64_t shared = -1) {
      group.gate_up_grad = target(g.gate_up_proj, "d_gate_up_proj", shared, sizes.want_gate_up_wgrad);
      group.gate_up_bias_grad = target(g.gate_up_bias, "d_gate_up_bias", shared, sizes.want_gate_up_bias_grad);
      group.down_grad = target(g.down_proj, "d_down_proj", shared, sizes.want_down_wgrad);
      group.down_bias_grad = target(g.down_bias, "d_down_bias", shared, sizes.want_down_bias_grad);
    };
    auto& routed = data.groups[0];
    routed.pre_activation = geometry.recompute ? at<bfloat16>(workspace, scratch.pre_activation) : at<bfloat16>(saved, kept.pre_activation);
    routed.activated = at<bfloat16>(workspace, scratch.activated);
    routed.d_pre_activation = at<bfloat16>(workspace, scratch.d_pre_activation);
    routed.slots = at<bfloat16>(workspace, scratch.route_rows);
    routed.dprob = at<float>(workspace, scratch.route_dprob);
    for (int place = 0; place < 2; ++place) {
      const BackwardWorkspace::Sums& sums = scratch.sums[place];
      data.round_sums.gate_up[place] = at<float>(workspace, sums.gate_up);
      data.round_sums.gate_up_bias[place] = at<float>(workspace, sums.gate_up_bias);
      data.round_sums.down[place] = at<float>(workspace, sums.down);
      data.round_sums.down_bias[place] = at<float>(workspace, sums.down_bias);
    }
    set(routed, gradients.weights);
    const auto& bound = gradients.weights.bound;
    const DeviceExperts& apart = DeviceExperts::of(bound);
    auto take = [&](GradientTarget& t, const Gradient& gradient, void* const* list, bool& wanted) {
      if (!list) return;
      wanted = true;
      t = {nullptr, list, bound->pointers().dtype == DataType::float32, gradient.accumulate};
    };
    take(routed.gate_up_grad, gradients.weights.gate_up_proj, apart.gate_up_proj, sizes.want_gate_up_wgrad);
    take(routed.gate_up_bias_grad, gradients.weights.gate_up_bias, apart.gate_up_bias, sizes.want_gate_up_bias_grad);
    take(routed.down_grad, gradients.weights.down_proj, apart.down_proj, sizes.want_down_wgrad);
    take(routed.down_bias_grad, gradients.weights.down_bias, apart.down_bias, sizes.want_down_bias_grad);
    for (std::size_t s = 0; s < shared_count_; ++s) {
      auto& group = data.groups[1 + s];
      group.pre_activation = geometry.recompute ? at<bfloat16>(workspace, scratch.shared_pre_activation[s])
                                                : at<bfloat16>(saved, kept.shared_pre_activation[s]);
      group.activated = at<bfloat16>(workspace, scratch.shared_activated[s]);
      group.d_pre_activation = at<bfloat16>(workspace, scratch.shared_d_pre_activation[s]);
      group.slots = at<bfloat16>(workspace, scratch.shared_rows[s]);
      group.dprob = at<float>(workspace, scratch.shared_dprob[s]);
      if (!gradients.weights.shared.empty()) set(group, gradients.weights.shared[s], std::int64_t(s));
    }
    const bool want_dz = sizes.want_dx || sizes.want_gate_up_wgrad || sizes.want_gate_up_bias_grad;
    for (std::size_t i = 0; i <= shared_count_; ++i) {
      auto& group = data.groups[i];
      group.dprob_groups = static_cast<std::int32_t>(geometry.dprob_groups(group.width));
      if (!want_dz) group.d_pre_activation = nullptr;
      if (!sizes.want_down_wgrad) group.activated = nullptr;
    }
  }

  void zero_gradients(const InputGradients& gradients, void* stream) const {
    ZeroTensors zero{};
    auto add_set = [&](const auto& set) {
      zero.add(set.gate_up_proj);
      zero.add(set.gate_up_bias);
      zero.add(set.down_proj);
      zero.add(set.down_bias);
    };
    zero.add(gradients.x);
    add_set(gradients.weights);
    for (const auto& shared : gradients.weights.shared) add_set(shared);
    const auto& bound = gradients.weights.bound;
    const DeviceExperts& apart = DeviceExperts::of(bound);
    const std::int64_t h = config_.hidden_size, i = config_.intermediate_size;
    auto add_apart = [&](const Gradient& gradient, void* const* list, std::int64_t size) {
      if (list && !gradient.accumulate) zero.add(list, std::int64_t(plan_.local_experts.size()), size, bound->pointers().dtype);
    };
    add_apart(gradients.weights.gate_up_proj, apart.gate_up_proj, config_.gate_up_rows(i) * h);
    add_apart(gradients.weights.gate_up_bias, apart.gate_up_bias, config_.gate_up_rows(i));
    add_apart(gradients.weights.down_proj, apart.down_proj, h * i);
    add_apart(gradients.weights.down_bias, apart.down_bias, h);
    launch(zero, stream);
  }

  static void launch(const ZeroTensors& zero, void* stream) {
    if (zero.count == 0) return;
    zero_tensors<<<264, 512, 0, static_cast<cudaStream_t>(stream)>>>(zero);
    check_cuda(cudaGetLastError(), "launch of the zeros");
  }

  const Plan::Impl& plan_;
  const LayerConfig& config_;
  const std::size_t shared_count_;
  std::uint32_t gated_ = 0;
  schedule::TileShape tile_;
  std::unique_ptr<CudaRanks> ranks_;  // null: one rank
  PassError* error_ = nullptr;        // written by the GPU; of one rank
  TileEvent* trace_ = nullptr;  // [multiprocessors_, 2, trace_room], with PlanOptions::timeline
  int multiprocessors_ = 0;
  mutable std::mutex placement_mutex_;
  mutable std::shared_ptr<const Placement> placement_;
};

}  // namespace

std::unique_ptr<DeviceLayer> make_cuda_layer(const Plan::Impl& plan) { return std::make_unique<CudaLayer>(plan); }

}  // namespace moelith::layer
