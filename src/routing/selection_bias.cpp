#if defined(MOELITH_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "moelith/layer.hpp"

namespace moelith {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, text); }

// The host cannot read a GPU's memory.
bool on_a_gpu(const TensorView& view) {
#if defined(MOELITH_WITH_CUDA)
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, view.data) != cudaSuccess) {
    cudaGetLastError();  // without a GPU there is none of its memory
    return false;
  }
  return attributes.type == cudaMemoryTypeDevice;
#else
  return (void)view, false;
#endif
}

bool aligned(const TensorView& view) { return reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) == 0; }

// In the type of the bias, as a framework would compute bias + rate * sign.
template <class T>
void update(T* bias, const std::int64_t* counts, std::int64_t num_experts, double rate) {
  // mean - count_e has the sign of total - E * count_e, which integers tell exactly.
  __extension__ typedef __int128 Wide;
  Wide total = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) total += counts[e];
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const Wide scaled = static_cast<Wide>(counts[e]) * num_experts;
    if (total > scaled) bias[e] += T(rate);
    if (total < scaled) bias[e] -= T(rate);
  }
}

}  // namespace

void update_selection_bias(const TensorView& bias, const TensorView& counts, double rate) {
  if (bias.rank != 1 || !bias.contiguous() || (bias.dtype != DataType::float32 && bias.dtype != DataType::float64) ||
      (!bias.data && bias.shape[0] > 0) || !aligned(bias))
    refuse("bias is " + describe(bias) + "; accepted is a contiguous, aligned [E] of float32 or float64");
  const std::int64_t num_experts = bias.shape[0];
  if (counts.rank != 1 || !counts.contiguous() || counts.dtype != DataType::int64 || counts.shape[0] != num_experts ||
      (!counts.data && num_experts > 0) || !aligned(counts))
    refuse("counts is " + describe(counts) + "; accepted is a contiguous, aligned int64[" + std::to_string(num_experts) +
           "]");
  for (const auto& [name, view] : {std::pair("bias", &bias), std::pair("counts", &counts)}) {
    if (on_a_gpu(*view)) refuse(std::string(name) + " is in a GPU's memory; accepted is the host's");
  }
  if (!std::isfinite(rate) || rate < 0 || (bias.dtype == DataType::float32 && rate > std::numeric_limits<float>::max()))
    refuse("rate is " + std::to_string(rate) + "; accepted are finite numbers from 0");
  const std::int64_t* values = static_cast<const std::int64_t*>(counts.data);
  for (std::int64_t e = 0; e < num_experts; ++e)
    if (values[e] < 0)
      refuse("counts[" + std::to_string(e) + "] is " + std::to_string(values[e]) + "; accepted are numbers from 0");
  if (bias.dtype == DataType::float32)
    update(static_cast<float*>(bias.data), values, num_experts, rate);
  else
    update(static_cast<double*>(bias.data), values, num_experts, rate);
}

}  // namespace moelith
