// `moelith trace`: what the workers do in a forward and a backward, tile by tile, measured: a trace that Perfetto and
// chrome://tracing open, a picture, and a summary by stage.
#include <algorithm>
#include <array>
#include <memory>
#include <ostream>
#include <string>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include "command_line.hpp"
#include "options.hpp"
#include "placed_problem.hpp"
#include "random_problem.hpp"
#include "schedule_picture.hpp"

namespace moelith::tools {
namespace {

using executors::simulator::Span;

struct TraceOptions {
  LayerOptions layer;
  RunOptions run;
  std::int64_t shrink = 1;
  std::string output = "trace.json", picture;
};

struct Pass {
  std::string name;
  std::vector<TileSpan> spans;
  int workers;
  double length = 0;  // until the last tile ended

  // all_workers: of the plan, if they are known; some may have got no tile.
  Pass(std::string pass_name, std::vector<TileSpan> tiles, int all_workers)
      : name(std::move(pass_name)), spans(std::move(tiles)), workers(all_workers) {
    std::sort(spans.begin(), spans.end(), [](const TileSpan& a, const TileSpan& b) {
      return a.worker != b.worker ? a.worker < b.worker : a.taken < b.taken;
    });
    for (const TileSpan& span : spans) workers = std::max(workers, span.worker + 1), length = std::max(length, span.end);
  }
};

// Trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (format of
// chrome://tracing, which Perfetto reads). A process for each pass, a thread for each worker; times in microseconds.
void write_trace(std::ostream& out, const std::vector<Pass>& passes) {
  out << "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [";
  const char* separator = "\n";
  const auto write = [&](const Json& event) {
    out << separator << event.dump();
    separator = ",\n";
  };
  for (std::size_t p = 0; p < passes.size(); ++p) {
    const Pass& pass = passes[p];
    write({{"ph", "M"}, {"name", "process_name"}, {"pid", p}, {"args", {{"name", pass.name}}}});
    for (int worker = 0; worker < pass.workers; ++worker) {
      write({{"ph", "M"}, {"name", "thread_name"}, {"pid", p}, {"tid", worker}, {"args", {{"name", fmt::format("worker {}", worker)}}}});
    }
    for (const TileSpan& span : pass.spans) {
      const auto slice = [&](const std::string& name, const char* category, double from, double to) {
        Json event{{"ph", "X"}, {"name", name}, {"cat", category}, {"pid", p}, {"tid", span.worker}, {"ts", from * 1e6}, {"dur", (to - from) * 1e6}};
        event["args"] = {{"expert", span.expert}, {"row_block", span.row_block}, {"column_block", span.column_block}};
        write(event);
      };
      if (span.start > span.taken) slice(fmt::format("wait for {}", span.stage), "wait", span.taken, span.start);
      slice(std::string(span.stage), "tile", span.start, span.end);
    }
  }
  out << "\n]}\n";
}

struct StageSum {
  std::int64_t tiles = 0;
  double work = 0, wait = 0;
};
using StageSums = std::array<StageSum, schedule::stage_count>;

schedule::Stage stage_named(std::string_view name) {
  for (int i = 0; i < schedule::stage_count; ++i) {
    if (name == schedule::to_string(static_cast<schedule::Stage>(i))) return static_cast<schedule::Stage>(i);
  }
  throw Error(Status::internal, "no stage is named " + std::string(name));
}

StageSums sums_of(const Pass& pass) {
  StageSums sums{};
  for (const TileSpan& span : pass.spans) {
    StageSum& sum = sums[static_cast<std::size_t>(stage_named(span.stage))];
    sum.tiles += 1, sum.work += span.end - span.start, sum.wait += span.start - span.taken;
  }
  return sums;
}

Json to_json(const Pass& pass) {
  const double all = pass.length * pass.workers;
  Json stages = Json::object();
  double work = 0, wait = 0;
  const StageSums sums = sums_of(pass);
  for (int i = 0; i < schedule::stage_count; ++i) {
    const StageSum& s = sums[static_cast<std::size_t>(i)];
    if (s.tiles == 0) continue;
    stages[schedule::to_string(static_cast<schedule::Stage>(i))] = {
        {"tiles", s.tiles}, {"mean_us", s.work / static_cast<double>(s.tiles) * 1e6}, {"share", s.work / all}, {"wait_share", s.wait / all}};
    work += s.work, wait += s.wait;
  }
  return {{"ms", pass.length * 1e3}, {"workers", pass.workers}, {"work_share", all > 0 ? work / all : 0}, {"wait_share", all > 0 ? wait / all : 0}, {"stages", stages}};
}

void print(std::ostream& out, const Pass& pass) {
  const Json summary = to_json(pass);
  const double work = 100 * summary["work_share"].get<double>(), wait = 100 * summary["wait_share"].get<double>();
  fmt::print(out,
             "\n{}: {:.3f} ms, {} worker{}: {:.1f} % of their time at tiles, {:.1f} % waiting for other tiles, {:.1f} % "
             "before their first tile, after their last or between tiles\n",
             pass.name, summary["ms"].get<double>(), pass.workers, pass.workers == 1 ? "" : "s", work, wait, std::max(0.0, 100 - work - wait));
  fmt::print(out, "{:<18} {:>8} {:>12} {:>8} {:>10}\n", "stage", "tiles", "mean, us", "share", "waiting");
  for (const auto& [name, stage] : summary["stages"].items()) {
    fmt::print(out, "{:<18} {:>8} {:>12.2f} {:>7.1f}% {:>9.1f}%\n", name, stage["tiles"].get<std::int64_t>(),
               stage["mean_us"].get<double>(), 100 * stage["share"].get<double>(), 100 * stage["wait_share"].get<double>());
  }
}

Panel panel_of(const Pass& pass) {
  Panel panel{fmt::format("{}: {:.3g} ms", pass.name, pass.length * 1e3), {}, 1, std::max(1, pass.workers)};
  panel.simulation.makespan = pass.length;
  for (const TileSpan& s : pass.spans) {
    Span span;
    span.worker = s.worker;
    span.tile = {stage_named(s.stage), s.expert, s.row_block, s.column_block};
    span.taken = s.taken, span.start = s.start, span.end = s.end;
    panel.simulation.spans.push_back(span);
  }
  return panel;
}

int run_trace(const Streams& streams, const TraceOptions& o) {
  // Before all that work.
  if (!o.picture.empty()) {
    check_picture_name(o.picture);
    if (o.picture == o.output) throw Error(Status::invalid_argument, "--picture and --output are both \"" + o.output + "\"");
    check_writable(o.picture);
  }
  check_writable(o.output);
  const PlacedLayer layer(o.layer, o.run, plain_layer(512, 256, 16, 4), o.shrink, 1, true, "the trace");
  const auto& [config, tokens, plan, sizes, problem, placed] = layer;
  const auto& [inputs, output_gradients] = placed.variants()[0];
  const int workers = plan.options().device == DeviceKind::cpu ? threads_of(o.run) : 0;  // a GPU's are seen in its spans
  std::vector<Pass> passes;
  for (const bool warm : {false, true}) {  // the first time warms up
    placed.seconds_of([&] { plan.forward(inputs, placed.outputs(), placed.saved(), placed.workspace()); });
    if (warm) passes.emplace_back("forward", plan.timeline(), workers);
    placed.seconds_of([&] { plan.backward(inputs, placed.saved(), output_gradients, placed.gradients(), placed.workspace()); });
    if (warm) passes.emplace_back("backward", plan.timeline(), workers);
  }
  const std::string heading = fmt::format("{}, T {}, routing {}{}, {}, measured", summary(config), tokens, o.run.routing,
                                          o.run.recompute ? ", recomputing" : "", o.run.device);
  write_file(o.output, [&](std::ostream& file) { write_trace(file, passes); });
  if (!o.picture.empty()) draw(o.picture, heading, {panel_of(passes[0]), panel_of(passes[1])});
  if (o.run.json) {
    streams.out << Json{{"device", o.run.device}, {"tokens", tokens}, {"routing", o.run.routing}, {"seed", o.run.seed},
                        {"workers", passes[0].workers}, {"entry", o.run.entry}, {"recompute", o.run.recompute}, {"trace", o.output}, {"forward", to_json(passes[0])}, {"backward", to_json(passes[1])}, {"config", tools::to_json(config)}}
                       .dump(2, ' ', false, Json::error_handler_t::replace)  // file names may be anything
                << "\n";
    return success;
  }
  fmt::print(streams.out, "{}\n", heading);
  for (const Pass& pass : passes) print(streams.out, pass);
  fmt::print(streams.out, "\ntrace:   {} (open it at ui.perfetto.dev or chrome://tracing)\n", o.output);
  if (!o.picture.empty()) fmt::print(streams.out, "picture: {}\n", o.picture);
  return success;
}

}  // namespace

void add_trace(CLI::App& program, Streams streams, Run& run) {
  auto* command = program.add_subcommand("trace", "what each worker does when, measured: a trace for Perfetto, a picture, shares");
  auto options = std::make_shared<TraceOptions>();
  add_layer_options(*command, options->layer);
  add_run_options(*command, options->run);
  add_shrink_option(*command, options->shrink);
  command->add_option("--output", options->output, "the trace, a JSON file")->capture_default_str();
  command->add_option("--picture", options->picture, "a file to draw the passes into: NAME.svg or NAME.html");
  command->callback([=, &run] { run = [=] { return run_trace(streams, *options); }; });
}

}  // namespace moelith::tools
