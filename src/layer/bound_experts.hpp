// Tensors of experts that lie apart, made ready by Plan::bind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "moelith/layer.hpp"

namespace moelith {

class BoundExperts {
 public:
  BoundExperts(std::shared_ptr<const Plan::Impl> plan, ExpertPointers pointers, std::shared_ptr<const void> of_device)
      : plan_(std::move(plan)), pointers_(std::move(pointers)), of_device_(std::move(of_device)) {}

  const Plan::Impl* plan() const { return plan_.get(); }
  const ExpertPointers& pointers() const { return pointers_; }
  // What the plan's device has made of them; null on the CPU.
  const void* of_device() const { return of_device_.get(); }

 private:
  std::shared_ptr<const Plan::Impl> plan_;  // outlives what its device made
  ExpertPointers pointers_;
  std::shared_ptr<const void> of_device_;
};

namespace layer {

// The pointers to one kind of tensor, or null where that kind is not bound.
using PointerList = std::vector<void*> ExpertPointers::*;
inline void* const* bound_list(const std::shared_ptr<const BoundExperts>& bound, PointerList list) {
  return bound && !(bound->pointers().*list).empty() ? (bound->pointers().*list).data() : nullptr;
}

// A gradient of the local experts, as a call wants it.
struct ExpertGradient {
  void* stacked = nullptr;
  void* const* apart = nullptr;
  DataType dtype = DataType::bfloat16;
  bool accumulate = false;

  ExpertGradient(const Gradient& gradient, const std::shared_ptr<const BoundExperts>& bound, PointerList list)
      : stacked(gradient.tensor.given() ? gradient.tensor.data : nullptr),
        apart(bound_list(bound, list)),
        dtype(apart ? bound->pointers().dtype : gradient.tensor.dtype),
        accumulate(gradient.accumulate),
        wanted_(apart || gradient.tensor.given()) {}
  bool wanted() const { return wanted_; }
  // Expert e's, of `size` elements.
  void* of(std::int64_t e, std::int64_t size) const {
    return apart ? apart[e] : static_cast<std::byte*>(stacked) + e * size * static_cast<std::int64_t>(size_of(dtype));
  }

 private:
  bool wanted_;  // a stacked tensor without elements has no memory
};

}  // namespace layer
}  // namespace moelith
