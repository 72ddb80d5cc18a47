#include "routes.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <numeric>

#include "random.hpp"

namespace moelith::tools {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(Status::invalid_argument, text); }

// Streams of Random, one for each use.
enum Stream : std::uint64_t { group_stream = 1, expert_stream, permutation_stream };

// The `count` indices with the highest keys among those that are allowed, highest first.
template <class Key>
std::vector<std::int32_t> highest(std::int32_t size, std::int32_t count, Key key) {
  std::vector<std::pair<double, std::int32_t>> keyed;
  for (std::int32_t i = 0; i < size; ++i) keyed.emplace_back(-key(i), i);
  std::partial_sort(keyed.begin(), keyed.begin() + count, keyed.end());
  std::vector<std::int32_t> chosen;
  for (std::int32_t i = 0; i < count; ++i) chosen.push_back(keyed[static_cast<std::size_t>(i)].second);
  return chosen;
}

std::vector<std::int32_t> permutation(std::int32_t size, const Random& random) {
  return highest(size, size, [&](std::int32_t i) { return random.uniform(static_cast<std::uint64_t>(i)); });
}

// Draws without replacement, expert e with weight w(e): the k highest of log(u_e) / w_e (Efraimidis, Spirakis 2006).
class Sampler {
 public:
  Sampler(const LayerConfig& config, const RouteSpec& spec)
      : config_(config), groups_(spec.seed, group_stream), experts_(spec.seed, expert_stream) {
    const std::int32_t count = config.num_experts;
    weights_.assign(static_cast<std::size_t>(count), 1.0);
    if (spec.kind == RouteKind::zipf) {
      const std::vector<std::int32_t> order = permutation(count, Random(spec.seed, permutation_stream));
      for (std::int32_t r = 0; r < count; ++r) {
        weights_[static_cast<std::size_t>(order[static_cast<std::size_t>(r)])] = std::pow(r + 1.0, -spec.zipf_exponent);
      }
    }
    first_ = spec.kind == RouteKind::one_expert ? 0 : -1;
  }

  std::vector<std::int32_t> draw(std::int64_t token) const {
    const std::int32_t groups = config_.router.num_groups, size = config_.num_experts / groups;
    const std::uint64_t base = static_cast<std::uint64_t>(token) * 1024;
    std::vector<bool> allowed(static_cast<std::size_t>(groups), true);
    if (config_.router.top_groups < groups) {
      allowed.assign(static_cast<std::size_t>(groups), false);
      for (const std::int32_t g : highest(groups, config_.router.top_groups, [&](std::int32_t g) {
             return first_ >= 0 && g == first_ / size ? 2.0 : groups_.uniform(base + static_cast<std::uint64_t>(g));
           })) {
        allowed[static_cast<std::size_t>(g)] = true;
      }
    }
    return highest(config_.num_experts, config_.top_k, [&](std::int32_t e) {
      if (!allowed[static_cast<std::size_t>(e / size)]) return -INFINITY;
      if (e == first_) return float(INFINITY);
      return float(std::log(experts_.uniform(base + static_cast<std::uint64_t>(e))) /
                   weights_[static_cast<std::size_t>(e)]);
    });
  }

 private:
  const LayerConfig& config_;
  Random groups_, experts_;
  std::vector<double> weights_;  // [E]
  std::int32_t first_;           // in every row; -1: none
};

// Token t takes k experts in a row from a fixed random order, one token starting where the one before ended: after any
// number of tokens two experts differ by at most one route. With groups, the order goes through whole sets of
// top_groups neighbouring groups, since a row must stay within such a set.
std::vector<std::int32_t> balanced(const LayerConfig& config, const RouteSpec& spec, std::int64_t tokens) {
  const std::int32_t size = config.num_experts / config.router.num_groups, k = config.top_k;
  const bool limited = config.router.top_groups < config.router.num_groups;
  const std::int32_t set_size = limited ? size * config.router.top_groups : config.num_experts;
  const std::int32_t sets = config.num_experts / set_size;  // groups beyond the last whole set get nothing
  const std::vector<std::int32_t> order = permutation(set_size, Random(spec.seed, permutation_stream));
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(tokens * k));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t set = t % sets, begin = t / sets * k;
    for (std::int32_t j = 0; j < k; ++j) {
      ids.push_back(static_cast<std::int32_t>(set * set_size) +
                    order[static_cast<std::size_t>((begin + j) % set_size)]);
    }
  }
  return ids;
}

std::vector<std::int32_t> from_file(const LayerConfig& config, const std::string& path, std::int64_t tokens) {
  std::ifstream file(path);
  if (!file) refuse("routing file \"" + path + "\" cannot be read");
  const auto k = static_cast<std::size_t>(config.top_k);
  std::vector<std::int32_t> ids;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string where = "routing file \"" + path + "\", line " + std::to_string(number) + ": ";
    std::vector<std::int32_t> row;
    const char* at = line.data();
    const char* end = at + std::min(line.find('#'), line.size());
    while (at != end) {
      if (*at == ' ' || *at == '\t' || *at == ',' || *at == '\r') {
        ++at;
        continue;
      }
      std::int32_t id = 0;
      const auto [next, problem] = std::from_chars(at, end, id);
      if (problem != std::errc() || id < -1 || id >= config.num_experts) {
        const char* stop = std::find_if(at, end, [](char c) { return c == ' ' || c == ',' || c == '\t'; });
        refuse(where + "\"" + std::string(at, stop) + "\"; accepted: expert ids from -1 (none) to " +
               std::to_string(config.num_experts - 1));
      }
      row.push_back(id);
      at = next;
    }
    if (row.empty()) continue;
    if (row.size() > k) {
      refuse(where + std::to_string(row.size()) + " ids; accepted: at most top_k = " + std::to_string(k));
    }
    row.resize(k, -1);
    ids.insert(ids.end(), row.begin(), row.end());
  }
  if (file.bad()) refuse("routing file \"" + path + "\" cannot be read to its end");
  if (ids.empty()) refuse("routing file \"" + path + "\" has no ids");
  const std::size_t given = ids.size(), wanted = static_cast<std::size_t>(tokens) * k;
  ids.resize(wanted);
  for (std::size_t i = given; i < wanted; ++i) ids[i] = ids[i - given];
  return ids;
}

}  // namespace

RouteKind route_kind_from(const std::string& name) {
  if (name == "balanced") return RouteKind::balanced;
  if (name == "uniform") return RouteKind::uniform;
  if (name == "zipf") return RouteKind::zipf;
  if (name == "one-expert") return RouteKind::one_expert;
  if (name == "file") return RouteKind::file;
  refuse("routing is \"" + name + "\"; accepted: balanced, uniform, zipf, one-expert, file");
}

std::vector<std::int32_t> make_routes(const LayerConfig& config, const RouteSpec& spec, std::int64_t tokens) {
  if (spec.kind == RouteKind::balanced) return balanced(config, spec, tokens);
  if (spec.kind == RouteKind::file) return from_file(config, spec.file, tokens);
  const Sampler sampler(config, spec);
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(tokens * config.top_k));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::vector<std::int32_t> row = sampler.draw(t);
    ids.insert(ids.end(), row.begin(), row.end());
  }
  return ids;
}

}  // namespace moelith::tools
