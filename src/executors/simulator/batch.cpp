#include "executors/simulator/batch.hpp"

#include <algorithm>

namespace moelith::executors::simulator {

Batch make_batch(const schedule::Sizes& like, const std::vector<std::int32_t>& expert_rank,
                 const std::vector<std::vector<std::int32_t>>& ids) {
  const auto ranks = static_cast<std::int32_t>(ids.size()), experts = static_cast<std::int32_t>(expert_rank.size());
  const auto tokens_of = [&](std::int32_t r) { return static_cast<std::int64_t>(ids[r].size()) / like.top_k; };
  std::int64_t most = 0, all = 0;
  // Each rank's routes to each expert, in token order: [E][R].
  const std::vector<std::vector<std::int32_t>> none(ids.size());
  std::vector<std::vector<std::vector<std::int32_t>>> rows(expert_rank.size(), none);
  for (std::int32_t r = 0; r < ranks; ++r) {
    most = std::max(most, tokens_of(r));
    all += static_cast<std::int64_t>(ids[r].size());
    for (std::size_t n = 0; n < ids[r].size(); ++n) {
      if (ids[r][n] >= 0) rows[ids[r][n]][r].push_back(static_cast<std::int32_t>(n));
    }
  }
  Batch batch;
  batch.headers.resize(ids.size());
  batch.routes.resize(ids.size());
  for (std::int32_t r = 0; r < ranks; ++r) {
    schedule::Pass pass;
    schedule::Sizes& s = pass.sizes = like;
    s.rank = r;
    s.ranks = ranks;
    s.local_experts = static_cast<std::int32_t>(std::count(expert_rank.begin(), expert_rank.end(), r));
    s.tokens = tokens_of(r);
    s.max_chunks = schedule::ceil_div(most, s.chunk_tokens);
    s.max_row_blocks = all / s.tile.row_block + s.local_experts;
    s.set_room(all, like.round_rows > 0 ? like.round_rows : all);
    for (std::int32_t e = 0; e < experts; ++e) {
      if (expert_rank[e] != r) continue;
      auto& routes = batch.routes[r];
      for (const auto& of_source : rows[e]) routes.insert(routes.end(), of_source.begin(), of_source.end());
    }
    const std::int64_t length = schedule::Layout::header_length(ranks, s.local_experts, s.max_rounds);
    batch.headers[r].resize(static_cast<std::size_t>(length));
    pass.layout =
        schedule::Layout::at(batch.headers[r].data(), batch.routes[r].data(), ranks, s.local_experts, s.max_rounds);
    *pass.layout.valid_tokens = s.tokens;
    for (std::int32_t source = 0; source < ranks; ++source) pass.layout.tokens_of_rank[source] = tokens_of(source);
    schedule::fill_layout(s, pass.layout, experts, expert_rank.data(), [&](std::int32_t source, std::int32_t e) {
      return static_cast<std::int64_t>(rows[e][source].size());
    });
    batch.passes.push_back(pass);
  }
  return batch;
}

}  // namespace moelith::executors::simulator
