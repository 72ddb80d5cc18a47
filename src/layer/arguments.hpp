// Checks of a call's tensors, before anything is written. Every failure is Error(invalid_argument) that names the
// argument, what came, and what is accepted.
#pragma once

#include "moelith/layer.hpp"

namespace moelith::layer {

// What a forward or backward call brings its routes as.
enum class RouteSource { logits, caller, dense };
const char* to_string(RouteSource source);  // the argument's name: "router_logits", "topk_ids", or that there is neither

struct CallFacts {
  std::int64_t tokens = 0;
  RouteSource routes = RouteSource::logits;
};

// max_tokens: the plan's. Returns what the inputs say of the call.
CallFacts check_inputs(const LayerConfig& config, std::int32_t local_experts, std::int64_t max_tokens, const Inputs& inputs);
void check_pointers(const LayerConfig& config, std::int32_t local_experts, const ExpertPointers& pointers);
// Of bound tensors: that they are this plan's.
void check_bound(const BoundExperts* bound, const Plan::Impl* plan, const char* name);
void check_outputs(const LayerConfig& config, const CallFacts& facts, const Outputs& outputs);
void check_gradients(const LayerConfig& config, std::int32_t local_experts, const CallFacts& facts, const Inputs& inputs,
                     const OutputGradients& output_gradients, const InputGradients& input_gradients);
// The caller's buffer: not null unless of size 0, aligned to 256 bytes.
void check_buffer(const void* buffer, std::uint64_t size, const char* name);

}  // namespace moelith::layer
