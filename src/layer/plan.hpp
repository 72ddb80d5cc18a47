// What a Plan holds, and what each device provides for it.
#pragma once

#include <memory>
#include <vector>

#include "layer/arguments.hpp"
#include "layer/buffers.hpp"
#include "moelith/layer.hpp"
#include "schedule/extents.hpp"
#include "transport/transport.hpp"

namespace moelith::layer {

// The layer on one kind of device. Arguments have been checked.
class DeviceLayer {
 public:
  virtual ~DeviceLayer() = default;
  virtual BufferSizes buffer_sizes(std::int64_t tokens) const = 0;
  // What the device needs of tensors that lie apart, beside their addresses.
  virtual std::shared_ptr<const void> bind(const ExpertPointers&) const { return nullptr; }
  virtual void forward(const CallFacts& facts, const Inputs& inputs, const Outputs& outputs, void* saved, void* workspace,
                       void* stream) const = 0;
  virtual void backward(const CallFacts& facts, const Inputs& inputs, const void* saved,
                        const OutputGradients& output_gradients, const InputGradients& input_gradients, void* workspace,
                        void* stream) const = 0;
  virtual std::vector<TileSpan> timeline() const = 0;
};

std::unique_ptr<DeviceLayer> make_cpu_layer(const Plan::Impl& plan);
// Only in builds with CUDA. bfloat16, on a GPU of compute capability 9.0; Error(unsupported) otherwise.
std::unique_ptr<DeviceLayer> make_cuda_layer(const Plan::Impl& plan);

}  // namespace moelith::layer

namespace moelith {

class Plan::Impl {
 public:
  LayerConfig config;
  PlanOptions options;
  std::vector<std::int32_t> expert_rank;         // [E]
  std::vector<std::int32_t> local_experts;       // [L] global ids
  std::vector<std::int64_t> max_tokens_of_rank;  // [R]
  std::uint64_t saved_mark = 0;                  // equal where a saved buffer means the same, but for tiles
  std::unique_ptr<layer::DeviceLayer> device;

  transport::Transport& transport() const { return *options.group.transport(); }
  // The factor that options.receive_capacity_factor stands for; infinity: room for all rows.
  double receive_capacity_factor() const;
  // Of a call with T tokens, for tiles of the given shape; sizes as for a backward of everything.
  layer::Geometry geometry(std::int64_t tokens, const schedule::TileShape& tile) const;
};

}  // namespace moelith
