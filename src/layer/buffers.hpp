// Where everything lies inside the caller's buffers and the symmetric memory. Offsets in bytes, aligned to 256, or
// `absent`. One description for every device; what a device keeps beside it, its executor's layer adds behind it
// (cuda_layer.cu: packed rows, descriptions of tiles, the counters of backward).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "moelith/layer.hpp"
#include "schedule/dependencies.hpp"
#include "schedule/extents.hpp"

namespace moelith::layer {

inline constexpr std::uint64_t absent = ~std::uint64_t(0);

// What the buffers' sizes follow from.
struct Geometry {
  LayerConfig config;
  std::int32_t ranks = 1, local_experts = 0;
  bool recompute = false;
  std::int64_t tokens = 0;          // T of this rank
  std::int64_t global_tokens = 0;   // the most that all ranks together may have in this call
  std::int64_t max_chunks = 0;      // chunks of the rank with the largest max_tokens
  schedule::Sizes sizes;            // for the counters

  std::int64_t routes() const { return tokens * config.top_k; }               // slots of this rank's tokens
  std::int64_t rows() const { return global_tokens * config.top_k; }          // routed rows that may come here, at most
  std::int64_t tokens_of_others() const { return global_tokens - tokens; }    // at most
  // Whether a row of another rank's token may be copied from one that is here already; and is: there is room for all of them
  // at once. (Room for what it takes is there in either case: buffers for many tokens are large enough for few.)
  bool may_copy_rows_here() const { return sizes.peer_access && config.top_k > 1; }
  bool copies_rows_here() const { return may_copy_rows_here() && !sizes.has_rounds(); }
  // Of those, the rows that pre-activation, activation and their gradients have room for at a time.
  std::int64_t held_rows() const { return sizes.has_rounds() ? sizes.round_rows : rows(); }
  // Rows that are packed for the copy engine (device cuda): of two rounds at a time. The second place is for those that the
  // first round leaves, which is short of its room by less than a row block.
  std::int64_t packed_rows() const {
    return sizes.has_rounds() ? std::min(2 * sizes.round_rows, rows() + sizes.tile.row_block) : rows();
  }
  std::int64_t received_rows() const { return ranks * max_chunks * sizes.chunk_tokens; }
  std::int64_t dprob_groups(std::int64_t width) const;
};

// Of one forward call, for its backward. `formula` names each part with its size.
struct SavedBuffer {
  // Which forward filled the buffer, written when all else is there; what backward can tell a wrong buffer by. The CPU
  // checks it; a GPU neither writes nor reads it, since the host could not look without waiting.
  struct Stamp {
    std::uint64_t mark = 0;    // of the plan: equal where the contents mean the same
    std::uint64_t filled = 0;  // a constant; 0 while a forward writes
    std::int64_t tokens = 0;
    std::int64_t routes = 0;   // RouteSource
  };
  std::uint64_t stamp;
  std::uint64_t layout_header, row_route, row_weight;   // int64 [header_length], int32 [rows], T [rows]
  std::uint64_t row_rank;                               // uint8 [rows]: the rank of each, with peer access
  std::uint64_t first_row;                              // 8 bytes for each token of other ranks, where rows may be copied
                                                        // here from each other; otherwise absent
  std::uint64_t topk_ids, topk_weights, chosen_ids;     // int32 [T, k], T [T, k], int32 [T, k]
  std::uint64_t counts;                                 // int64 [E + 1]: routes before capacity, and valid tokens, as the
                                                        // aux loss counts them (of all ranks for the global one)
  std::uint64_t pre_activation;                         // [held rows, F I] of the first round; absent when recomputing
  std::vector<std::uint64_t> shared_pre_activation;     // S x [T, F I_s]
  std::uint64_t received_x, needed;                     // ranks with transfers: [R, .., H] and bytes [R, ..]
  std::uint64_t size;
  std::string formula;

  // keep: for a backward. Otherwise only the tables, which a forward without gradients has in its workspace.
  static SavedBuffer of(const Geometry& geometry, bool keep);
};

struct ForwardWorkspace {
  std::uint64_t local_counters, arrivals;
  std::uint64_t activated;                              // [held rows, I]
  std::vector<std::uint64_t> shared_activated;          // S x [T, I_s]
  std::uint64_t route_rows;                             // one rank: [T k, H]
  std::vector<std::uint64_t> shared_rows;               // S x [T, H]
  std::uint64_t shared_gates, score_sums, offsets, router_scratch;
  std::uint64_t tables;                                 // a SavedBuffer without `keep`
  std::uint64_t size;

  static ForwardWorkspace of(const Geometry& geometry, std::uint64_t router_scratch_bytes);
};

struct BackwardWorkspace {
  std::uint64_t local_counters, arrivals;
  std::uint64_t pre_activation;                         // [held rows, F I], when recomputing
  std::vector<std::uint64_t> shared_pre_activation;
  std::uint64_t activated, d_pre_activation;            // [held rows, I], [held rows, F I]
  // With rounds, of the expert that goes on in the next one, twice: sums of its gradients in the accumulator dtype. Their
  // size does not depend on the number of tokens.
  struct Sums {
    std::uint64_t gate_up, gate_up_bias, down, down_bias;  // [F I, H], [F I], [H, I], [H]; on a GPU weights' in whole tiles
  };
  Sums sums[2];
  std::vector<std::uint64_t> shared_activated, shared_d_pre_activation;
  std::uint64_t route_rows, route_dprob;                // one rank: [T k, H], [T k, groups]
  std::vector<std::uint64_t> shared_rows, shared_dprob;
  std::uint64_t shared_gates, d_topk_weights, d_shared_gates, received_dy, router_scratch;
  std::uint64_t size;

  static BackwardWorkspace of(const Geometry& geometry, std::uint64_t router_scratch_bytes);
};

// A rank's symmetric memory, several ranks only. Sized by max_tokens, alike on every call of the plan.
struct Window {
  // [T, H]: x or dY for the others; with peer access absent if they read those where they lie, otherwise each has a place
  // of its own, since a backward shows both, and what one pass left is not read in another.
  std::uint64_t rows, dy_rows;
  std::uint64_t route_rows, route_dprob;                // [T k, H], [T k, groups]
  struct Table {
    std::uint64_t header;                               // int64 [8]: T, valid tokens, whether forward saves; with peer
                                                        // access also where x and dY are (routing::RankTable)
    std::uint64_t offsets, counts;                      // int64 [E + 1], [E] before capacity
    std::uint64_t routes;                               // int32 [T k]
    std::uint64_t topk_ids;                             // int32 [T k]; absent with peer access
    std::uint64_t topk_weights;                         // T [T k]: by route; with peer access in the order of `routes`
  };
  Table table[2];
  // With peer access counters are here too, and 8-byte words of the rank's own state (RankTables); otherwise absent.
  std::uint64_t arrivals, flags, state;
  std::uint64_t size;

  // `tokens`: max_tokens of the rank whose window it is. map: of peers' counters, null without peer access. staged: with
  // peer access, whether rows are copied here for the others.
  static Window of(const LayerConfig& config, std::int64_t tokens, const schedule::CounterMap* map = nullptr,
                   bool staged = false);
};
// Of all ranks' windows and counters: equal for plans that have them alike; not 0.
std::uint64_t layout_number(const std::vector<Window>& windows, const schedule::CounterMap& map);

}  // namespace moelith::layer
