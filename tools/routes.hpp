// Which experts each token goes to: the load that `check`, `bench` and `schedule` run with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moelith/config.hpp"

namespace moelith::tools {

enum class RouteKind : std::uint8_t {
  balanced,    // every expert the same number of routes, give or take one
  uniform,     // each token k experts at random
  zipf,        // the same, expert number r (in a random order) drawn with a weight of 1 / r^exponent
  one_expert,  // expert 0 by every token, the others at random
  file,        // from a text file
};
// "balanced", "uniform", "zipf", "one-expert", "file"; throws Error(invalid_argument) listing them.
RouteKind route_kind_from(const std::string& name);

struct RouteSpec {
  RouteKind kind = RouteKind::uniform;
  double zipf_exponent = 1.0;
  std::string file;
  std::uint64_t seed = 1;
};

// topk_ids, [T, k] row-major. Ids of a row are distinct and, if the router keeps top_groups of its groups, in that many
// groups at most (balanced: as balanced as that allows), except from a file: there a row may be shorter than k (the
// rest becomes -1) and hold -1. In the file, a line is a token: ids separated by spaces, tabs or commas; '#' begins a
// comment; lines without ids are left out; if it has fewer tokens than asked for, it starts over.
// Throws Error(invalid_argument): naming file and line for what cannot be used.
std::vector<std::int32_t> make_routes(const LayerConfig& config, const RouteSpec& spec, std::int64_t tokens);

}  // namespace moelith::tools
