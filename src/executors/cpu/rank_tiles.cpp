// Tiles that move tokens and tables between ranks: publish, layout, collect, dispatch.
#include <algorithm>
#include <cstring>

#include "executors/cpu/pass_data.hpp"

namespace moelith::executors::cpu {
namespace {

using schedule::Direction;
using schedule::Pass;
using schedule::Stage;
using schedule::Tile;

// Tokens [begin, end) of a chunk of a rank that has `tokens` of them.
schedule::RowRange chunk_tokens_of(const Pass& pass, std::int64_t chunk, std::int64_t tokens) {
  const std::int64_t begin = chunk * pass.sizes.chunk_tokens;
  return {begin, std::min(begin + pass.sizes.chunk_tokens, tokens)};
}

template <class Storage>
void publish(const PassData<Storage>& data, const Tile& tile) {
  const auto& sizes = data.pass.sizes;
  const bool forward = sizes.direction == Direction::forward;
  const Storage* rows = forward ? data.x : data.dy;
  const std::int64_t stride = forward ? data.x_stride : data.dy_stride;
  const auto tokens = chunk_tokens_of(data.pass, tile.row_block, sizes.tokens);
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    std::copy_n(rows + t * stride, sizes.hidden_size, data.windows[sizes.rank] + t * sizes.hidden_size);
  }
}

template <class Storage>
void layout(const PassData<Storage>& data) {
  const Pass& pass = data.pass;
  for (std::int32_t r = 0; r < pass.sizes.ranks; ++r) pass.layout.tokens_of_rank[r] = *data.tables[r].tokens;
  schedule::fill_layout(pass.sizes, pass.layout, data.num_experts, data.expert_rank,
                        [&](std::int32_t rank, std::int32_t expert) {
                          const std::int64_t* offsets = data.tables[rank].offsets;
                          return offsets[expert + 1] - offsets[expert];
                        });
}

template <class Storage>
void collect(const PassData<Storage>& data, const Tile& tile) {
  const Pass& pass = data.pass;
  std::int32_t global = -1;  // the tile.expert-th expert of this rank
  for (std::int32_t local = -1; local < tile.expert;) {
    if (data.expert_rank[++global] == pass.sizes.rank) ++local;
  }
  for (std::int32_t r = 0; r < pass.sizes.ranks; ++r) {
    const auto& table = data.tables[r];
    const std::int64_t begin = pass.source_begin(tile.expert, r), end = pass.source_begin(tile.expert, r + 1);
    const std::int32_t* routes = table.routes + table.offsets[global];
    for (std::int64_t row = begin; row < end; ++row) {
      pass.layout.row_route[row] = routes[row - begin];
      data.row_weight[row] = table.topk_weights[routes[row - begin]];
    }
  }
}

template <class Storage>
void dispatch(const PassData<Storage>& data, const Tile& tile) {
  const Pass& pass = data.pass;
  const auto& sizes = pass.sizes;
  const std::int32_t source = tile.expert;
  const bool forward = sizes.direction == Direction::forward;
  const auto tokens = chunk_tokens_of(pass, tile.row_block, pass.layout.tokens_of_rank[source]);
  const std::int64_t base = source * sizes.max_chunks * sizes.chunk_tokens;
  Storage* received = forward ? data.received_x : data.received_dy;
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    std::uint8_t& needed = data.needed[base + t];
    if (forward) {
      needed = 0;
      for (std::int32_t j = 0; j < sizes.top_k; ++j) {
        const std::int32_t id = data.tables[source].topk_ids[t * sizes.top_k + j];
        if (id >= 0 && data.expert_rank[id] == sizes.rank) needed = 1;
      }
    }
    if (needed) {
      std::copy_n(data.windows[source] + t * sizes.hidden_size, sizes.hidden_size, received + (base + t) * sizes.hidden_size);
    }
  }
}

}  // namespace

template <class Storage>
void run_rank_tile(const PassData<Storage>& data, const Tile& tile) {
  switch (tile.stage) {
    case Stage::publish: return publish(data, tile);
    case Stage::layout: return layout(data);
    case Stage::collect: return collect(data, tile);
    default: return dispatch(data, tile);
  }
}

template void run_rank_tile(const PassData<numerics::bfloat16>&, const Tile&);
template void run_rank_tile(const PassData<float>&, const Tile&);
template void run_rank_tile(const PassData<double>&, const Tile&);

}  // namespace moelith::executors::cpu
