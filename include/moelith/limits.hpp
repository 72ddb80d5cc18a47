// The largest sizes of a layer and of its group: each number stands here alone.
#pragma once

#include <cstdint>

namespace moelith::limits {

inline constexpr std::int32_t num_experts = 1024;    // E
inline constexpr std::int32_t top_k = 32;            // k
inline constexpr std::int32_t shared_experts = 8;    // S
inline constexpr std::int64_t width = 1 << 20;       // H and every intermediate size: keeps each product of sizes
                                                     // (E x 2I x H elements of 8 bytes) far inside 63 bits
inline constexpr std::int32_t ranks = 64;            // R
inline constexpr std::int32_t device_ranks = 16;     // R of a group that works on GPUs
inline constexpr std::int32_t workers = 1024;        // CPU threads, or SMs

}  // namespace moelith::limits
