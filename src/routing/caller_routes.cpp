#include "routing/caller_routes.hpp"

#include <algorithm>
#include <string>
#include <type_traits>

namespace moelith::routing {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, text); }

void check_shape(const char* name, const TensorView& view, std::int64_t tokens, std::int32_t top_k,
                 const std::string& dtypes) {
  const std::string accepted =
      std::string("[") + std::to_string(tokens) + ", " + std::to_string(top_k) + "] of " + dtypes;
  if (!view.given()) refuse(std::string(name) + " is missing; accepted is " + accepted);
  if (view.rank != 2 || view.shape[0] != tokens || view.shape[1] != top_k || (!view.data && tokens > 0))
    refuse(std::string(name) + " is " + (view.data || tokens == 0 ? describe(view) : "a null pointer") +
           "; accepted is " + accepted);
}

template <class Id, class T>
void check_and_copy(const TensorView& topk_ids, const TensorView& topk_weights, std::int64_t tokens, std::int32_t top_k,
                    std::int32_t num_experts, std::int64_t valid_tokens, std::int32_t* out_ids, T* out_weights) {
  const Id* ids = static_cast<const Id*>(topk_ids.data);
  const T* weights = static_cast<const T*>(topk_weights.data);
  const auto id_at = [&](std::int64_t t, std::int64_t j) {
    return ids[t * topk_ids.stride[0] + j * topk_ids.stride[1]];
  };
  for (std::int64_t t = 0; t < valid_tokens; ++t)
    for (std::int64_t j = 0; j < top_k; ++j)
      if (const Id id = id_at(t, j); id < -1 || id >= num_experts)
        refuse("topk_ids[" + std::to_string(t) + ", " + std::to_string(j) + "] is " + std::to_string(id) +
               "; accepted are -1 to " + std::to_string(num_experts - 1));
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int32_t id = t < valid_tokens ? static_cast<std::int32_t>(id_at(t, j)) : -1;
      if (out_ids) out_ids[t * top_k + j] = id;
      if (out_weights)
        out_weights[t * top_k + j] = id < 0 ? T(0) : weights[t * topk_weights.stride[0] + j * topk_weights.stride[1]];
    }
}

}  // namespace

template <class T>
void copy_caller_routes(const TensorView& topk_ids, const TensorView& topk_weights, std::int64_t tokens,
                        std::int32_t top_k, std::int32_t num_experts, std::int64_t valid_tokens, std::int32_t* out_ids,
                        T* out_weights) {
  constexpr DataType weight_type = std::is_same_v<T, double> ? DataType::float64 : DataType::float32;
  check_shape("topk_ids", topk_ids, tokens, top_k, "int32 or int64");
  if (topk_ids.dtype != DataType::int32 && topk_ids.dtype != DataType::int64)
    refuse(std::string("topk_ids has dtype ") + to_string(topk_ids.dtype) + "; accepted are int32 and int64");
  check_shape("topk_weights", topk_weights, tokens, top_k, to_string(weight_type));
  if (topk_weights.dtype != weight_type)
    refuse(std::string("topk_weights has dtype ") + to_string(topk_weights.dtype) + "; accepted is " +
           to_string(weight_type));
  valid_tokens = std::clamp<std::int64_t>(valid_tokens, 0, tokens);
  if (topk_ids.dtype == DataType::int32)
    check_and_copy<std::int32_t>(topk_ids, topk_weights, tokens, top_k, num_experts, valid_tokens, out_ids,
                                 out_weights);
  else
    check_and_copy<std::int64_t>(topk_ids, topk_weights, tokens, top_k, num_experts, valid_tokens, out_ids,
                                 out_weights);
}

template void copy_caller_routes<float>(const TensorView&, const TensorView&, std::int64_t, std::int32_t, std::int32_t,
                                        std::int64_t, std::int32_t*, float*);
template void copy_caller_routes<double>(const TensorView&, const TensorView&, std::int64_t, std::int32_t, std::int32_t,
                                         std::int64_t, std::int32_t*, double*);

}  // namespace moelith::routing
