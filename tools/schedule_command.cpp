// `moelith schedule`: the tiles of forward and backward for a layer and a routing, the critical path, and a picture of
// how they would run. Nothing is computed: the schedule alone runs, against costs that follow from three numbers.
#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <ostream>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include "command_line.hpp"
#include "executors/cpu/thread_pool.hpp"
#include "executors/simulator/batch.hpp"
#include "executors/simulator/simulate.hpp"
#include "layer/expert_placement.hpp"
#include "layer/layer_sizes.hpp"
#include "options.hpp"
#include "schedule_picture.hpp"

namespace moelith::tools {
namespace {

using executors::simulator::Batch;
using executors::simulator::make_batch;
using executors::simulator::simulate;
using executors::simulator::Simulation;
using executors::simulator::tile_work;
using schedule::Direction;
using schedule::Pass;

struct ScheduleOptions {
  LayerOptions layer;
  RunOptions run;
  int workers = 0, ranks = 1;
  std::int32_t tile_columns = 256, row_block = 128, group_blocks = schedule::TileShape{}.group_blocks;
  std::int64_t round_rows = 0;
  double gflops = 0, gigabytes = 0, link_gigabytes = 0, overhead_us = -1, signal_us = -1;
  std::string picture;
};

// What one worker does, where the command line does not say. The CPU: a core with AVX2. The GPU: an SM of an H100 at a
// rate that dense products reach (600 TFLOP/s of 132 SMs), and its share of the memory's 3.35 TB/s; between ranks, the
// 360 GB/s that eight SMs move over NVLink and the time of a signal there.
struct WorkerSpeed {
  double flops, bytes, link_bytes;  // a second; bytes to or from other ranks by themselves
  double overhead, signal;          // seconds for each tile; until another rank sees a counter
};
WorkerSpeed speed_of(const ScheduleOptions& o) {
  WorkerSpeed speed =
      device_kind(o.run.device) == DeviceKind::cpu ? WorkerSpeed{60e9, 8e9, 8e9, 2e-6, 0.2e-6}
                                                   : WorkerSpeed{4.5e12, 25e9, 45e9, 0.5e-6, 1.2e-6};
  if (o.gflops > 0) speed.flops = o.gflops * 1e9;
  if (o.gigabytes > 0) speed.bytes = o.gigabytes * 1e9;
  if (o.link_gigabytes > 0) speed.link_bytes = o.link_gigabytes * 1e9;
  if (o.signal_us >= 0) speed.signal = o.signal_us * 1e-6;
  if (o.overhead_us >= 0) speed.overhead = o.overhead_us * 1e-6;
  return speed;
}

// The passes of all ranks; each has `tokens` tokens, whose ids stand one rank after another in `ids`.
Batch make_passes(const LayerConfig& config, const ScheduleOptions& o, std::int64_t tokens,
                  const std::vector<std::int32_t>& ids, Direction direction) {
  schedule::Sizes s = layer::layer_sizes(config);
  s.direction = direction;
  s.tile.row_block = o.row_block;
  s.tile.columns = s.tile.wgrad_rows = s.tile.wgrad_columns = o.tile_columns;
  s.tile.group_blocks = o.group_blocks;
  s.round_rows = o.round_rows;
  s.recompute = o.run.recompute;
  s.want_gate_up_bias_grad = config.gate_up_bias;
  s.want_down_bias_grad = config.down_bias;
  std::vector<std::vector<std::int32_t>> of_rank;
  for (int r = 0; r < o.ranks; ++r) {
    const auto begin = ids.begin() + r * tokens * config.top_k;
    of_rank.emplace_back(begin, begin + tokens * config.top_k);
  }
  return make_batch(s, layer::contiguous_placement(config.num_experts, o.ranks), of_rank);
}

struct StageSum {
  std::int64_t tiles = 0;
  double seconds = 0;
};

std::array<StageSum, schedule::stage_count> sums_of(const Simulation& simulation) {
  std::array<StageSum, schedule::stage_count> sums{};
  for (const auto& span : simulation.spans) {
    StageSum& sum = sums[static_cast<std::size_t>(span.tile.stage)];
    ++sum.tiles;
    sum.seconds += span.end - span.start;
  }
  return sums;
}

// workers: of all ranks together.
Json to_json(const Simulation& s, int workers) {
  Json stages = Json::object();
  const auto sums = sums_of(s);
  for (int i = 0; i < schedule::stage_count; ++i) {
    const StageSum& sum = sums[static_cast<std::size_t>(i)];
    if (sum.tiles == 0) continue;
    stages[schedule::to_string(static_cast<schedule::Stage>(i))] = {{"tiles", sum.tiles},
                                                                    {"work_ms", sum.seconds * 1e3}};
  }
  Json path = Json::array();
  for (const std::int64_t index : s.critical) {
    const auto& span = s.spans[static_cast<std::size_t>(index)];
    path.push_back({{"rank", span.rank},
                    {"stage", schedule::to_string(span.tile.stage)},
                    {"expert", span.tile.expert},
                    {"row_block", span.tile.row_block},
                    {"column_block", span.tile.column_block},
                    {"ms", (span.end - span.start) * 1e3}});
  }
  return {{"tiles", s.spans.size()},
          {"makespan_ms", s.makespan * 1e3},
          {"work_ms", s.work * 1e3},
          {"critical_path_ms", s.critical_path * 1e3},
          {"busy", s.makespan > 0 ? s.work / (s.makespan * workers) : 1.0},
          {"stages", stages},
          {"critical_path", path}};
}

void print(std::ostream& out, const char* name, const Simulation& s, int workers) {
  fmt::print(out, "\n{}: {} tiles, {:.3f} ms on {} workers ({:.0f} % busy), work {:.3f} ms, critical path {:.3f} ms\n",
             name, s.spans.size(), s.makespan * 1e3, workers,
             s.makespan > 0 ? 100 * s.work / (s.makespan * workers) : 100.0, s.work * 1e3, s.critical_path * 1e3);
  const auto sums = sums_of(s);
  for (int i = 0; i < schedule::stage_count; ++i) {
    const StageSum& sum = sums[static_cast<std::size_t>(i)];
    if (sum.tiles == 0) continue;
    fmt::print(out, "  {:<18} {:>9} tiles {:>12.3f} ms of work {:>5.1f} %\n",
               schedule::to_string(static_cast<schedule::Stage>(i)), sum.tiles, sum.seconds * 1e3,
               100 * sum.seconds / s.work);
  }
  fmt::print(out, "  critical path:");
  for (const std::int64_t index : s.critical) {
    const auto& span = s.spans[static_cast<std::size_t>(index)];
    fmt::print(out, " {} (rank {}, expert {}, {:.3f} ms)", schedule::to_string(span.tile.stage), span.rank,
               span.tile.expert, (span.end - span.start) * 1e3);
  }
  fmt::print(out, "\n");
}

int run_schedule(const Streams& streams, const ScheduleOptions& o) {
  const LayerConfig config = layer_config(o.layer, plain_layer(512, 256, 16, 4));
  const std::int64_t tokens = o.run.tokens > 0 ? o.run.tokens : 2048;
  if (o.tile_columns % 64 != 0) {
    throw Error(Status::invalid_argument,
                fmt::format("--tile-columns is {}; accepted: a multiple of 64", o.tile_columns));
  }
  const bool cpu = device_kind(o.run.device) == DeviceKind::cpu;
  int workers = o.workers > 0 ? o.workers : o.run.threads;
  if (workers == 0) workers = cpu ? executors::cpu::available_workers() : 132;
  const WorkerSpeed speed = speed_of(o);
  const auto element = static_cast<std::int64_t>(size_of(config.dtype));
  const auto cost = [&](const Pass& pass, const schedule::Tile& tile) {
    const auto work = tile_work(pass, tile, element);
    return speed.overhead + work.flops / speed.flops + work.bytes / speed.bytes + work.link_bytes / speed.link_bytes;
  };

  const std::vector<std::int32_t> ids = make_routes(config, o.run.routes(), tokens * o.ranks);
  const auto simulated = [&](Direction direction) {
    const Batch batch = make_passes(config, o, tokens, ids, direction);
    constexpr std::int64_t most_tiles = 20'000'000;
    std::int64_t tiles = 0;
    for (const Pass& pass : batch.passes) tiles += schedule::tile_count(pass);
    if (tiles > most_tiles) {
      throw Error(Status::invalid_argument,
                  fmt::format("the pass has {} tiles; accepted: at most {} (fewer --tokens)", tiles, most_tiles));
    }
    return simulate(batch.passes, workers, cost, speed.signal);
  };
  const Simulation forward = simulated(Direction::forward), backward = simulated(Direction::backward);

  const std::string of_each = o.ranks > 1 ? fmt::format(" of each of {} ranks", o.ranks) : "";
  const std::string heading = fmt::format("{}, T {}{}, routing {}", summary(config), tokens, of_each, o.run.routing);
  if (!o.picture.empty()) {
    const auto title = [&](const char* name, const Simulation& s) {
      return fmt::format("{}: {} tiles, {:.3g} ms on {} workers{}, critical path {:.3g} ms", name, s.spans.size(),
                         s.makespan * 1e3, workers, of_each, s.critical_path * 1e3);
    };
    const std::vector<Panel> panels{{title("forward", forward), forward, o.ranks, workers},
                                    {title("backward", backward), backward, o.ranks, workers}};
    draw(o.picture, heading, panels);
  }
  if (o.run.json) {
    streams.out << Json{{"device", o.run.device},
                        {"ranks", o.ranks},
                        {"workers", workers},
                        {"tokens", tokens},
                        {"routing", o.run.routing},
                        {"seed", o.run.seed},
                        {"worker",
                         {{"gflops", speed.flops * 1e-9},
                          {"gigabytes_per_s", speed.bytes * 1e-9},
                          {"link_gigabytes_per_s", speed.link_bytes * 1e-9},
                          {"overhead_us", speed.overhead * 1e6},
                          {"signal_us", speed.signal * 1e6}}},
                        {"tile",
                         {{"rows", o.row_block}, {"columns", o.tile_columns}, {"group_blocks", o.group_blocks}}},
                        {"round_rows", o.round_rows},
                        {"forward", to_json(forward, workers * o.ranks)},
                        {"backward", to_json(backward, workers * o.ranks)},
                        {"config", tools::to_json(config)}}
                       .dump(2)
                << "\n";
    return success;
  }
  fmt::print(streams.out,
             "{}\na worker: {:.0f} GFLOP/s, {:.0f} GB/s, {:.1f} us for each tile (simulated, not measured)\n", heading,
             speed.flops * 1e-9, speed.bytes * 1e-9, speed.overhead * 1e6);
  print(streams.out, "forward", forward, workers * o.ranks);
  print(streams.out, "backward", backward, workers * o.ranks);
  if (!o.picture.empty()) fmt::print(streams.out, "\npicture: {}\n", o.picture);
  return success;
}

}  // namespace

void add_schedule(CLI::App& program, Streams streams, Run& run) {
  auto* command =
      program.add_subcommand("schedule", "tiles per stage, critical path, and a picture of a simulated run");
  auto options = std::make_shared<ScheduleOptions>();
  add_layer_options(*command, options->layer);
  add_run_options(*command, options->run);
  command->add_option("--picture", options->picture, "a file to draw the run into: NAME.svg or NAME.html");
  command->add_option("--ranks", options->ranks, "of the expert-parallel group; each has --tokens tokens")
      ->check(CLI::Range(1, limits::ranks))
      ->capture_default_str();
  command->add_option("--workers", options->workers, "of each rank; 0: --threads for the CPU, 132 for the GPU")
      ->check(CLI::Range(0, 4096));
  command->add_option("--tile-columns", options->tile_columns, "columns of a tile")
      ->check(CLI::Range(64, 1024))
      ->capture_default_str();
  command->add_option("--row-block", options->row_block, "rows of a tile")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--group-blocks", options->group_blocks, "row blocks that pass from stage to stage together")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--round-rows", options->round_rows,
                   "routed rows that a rank has room for, at least --row-block; those beyond take further rounds; 0: room for "
                   "all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--gflops", options->gflops, "of one worker; 0: 60 for the CPU, 4500 for the GPU")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--gigabytes", options->gigabytes, "a second, moved by one worker; 0: 8 for the CPU, 25 for the GPU")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--link-gigabytes", options->link_gigabytes,
                   "a second, moved by one worker between ranks; 0: 8 for the CPU, 45 for the GPU")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--signal-us", options->signal_us,
                      "until another rank sees a counter; -1: 0.2 for the CPU, 1.2 for the GPU");
  command->add_option("--overhead-us", options->overhead_us,
                      "time that each tile costs by itself; -1: 2 for the CPU, 0.5 for the GPU");
  command->callback([=, &run] { run = [=] { return run_schedule(streams, *options); }; });
}

}  // namespace moelith::tools
