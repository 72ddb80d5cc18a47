#include "schedule_picture.hpp"

#include <algorithm>
#include <array>
#include <ostream>

#include <fmt/format.h>

#include "command_line.hpp"
#include "moelith/tensor.hpp"

namespace moelith::tools {
namespace {

using executors::simulator::Simulation;
using executors::simulator::Span;
using schedule::Stage;

// Colours by Stage; neighbours in time differ in brightness too.
constexpr std::array<const char*, schedule::stage_count> colours = {
    "#9e9e9e", "#616161", "#8d6e63", "#bcaaa4", "#1565c0", "#42a5f5", "#ffb300",
    "#6a1b9a", "#ba68c8", "#2e7d32", "#81c784", "#00838f", "#4dd0e1"};
constexpr double left = 90, right = 20, plot_width = 1100, gap = 46;

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

std::string time_text(double seconds) {
  if (seconds >= 1) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} us", seconds * 1e6);
}

// A round step that divides `length` into about 8 parts.
double round_step(double length) {
  double step = 1e-9;
  for (int i = 0; step * 8 < length; ++i) step *= (i % 3 == 1) ? 2.5 : 2;
  return step;
}

void draw_panel(std::string& svg, const Panel& panel, double top, double line, double scale) {
  const int lines = panel.ranks * panel.workers;
  const auto row = [&](const Span& s) { return top + line * (s.rank * panel.workers + s.worker); };
  svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" class=\"t\">{}</text>\n", left, top - 22, escaped(panel.title));
  // Blocks: spans by worker, merged.
  std::vector<std::vector<const Span*>> of_worker(static_cast<std::size_t>(lines));
  for (const Span& span : panel.simulation.spans) {
    of_worker[static_cast<std::size_t>(span.rank * panel.workers + span.worker)].push_back(&span);
  }
  const double visible = 0.05;  // narrower blocks, in pixels, are left out
  for (const auto& spans : of_worker) {
    for (std::size_t i = 0; i < spans.size();) {
      const Span& first = *spans[i];
      if ((first.start - first.taken) * scale > 0.5) {
        svg += fmt::format("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"#e8e8e8\"/>",
                           left + first.taken * scale, row(first), (first.start - first.taken) * scale, line * 0.86);
      }
      std::size_t n = i + 1;
      while (n < spans.size() && spans[n]->tile.stage == first.tile.stage &&
             (spans[n]->start - spans[n - 1]->end) * scale < 0.5)
        ++n;
      const double end = spans[n - 1]->end, width = (end - first.start) * scale;
      if (width > visible) {
        svg += fmt::format(
            "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\"><title>{}, {} tile{} from "
            "expert {}, row "
            "block {}: {} to {}</title></rect>\n",
            left + first.start * scale, row(first), width, line * 0.86,
            colours[static_cast<std::size_t>(first.tile.stage)], schedule::to_string(first.tile.stage), n - i,
            n - i == 1 ? "" : "s", first.tile.expert, first.tile.row_block, time_text(first.start), time_text(end));
      }
      i = n;
    }
  }
  for (const std::int64_t index : panel.simulation.critical) {
    const Span& span = panel.simulation.spans[static_cast<std::size_t>(index)];
    svg += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"none\" stroke=\"#d50000\" "
        "stroke-width=\"1.5\"/>\n",
        left + span.start * scale, row(span), std::max(1.0, (span.end - span.start) * scale), line * 0.86);
  }
  // Names of some lines, and the axis.
  const int every = std::max(1, static_cast<int>(14 / line));
  for (int i = 0; i < lines; i += every) {
    const std::string name = panel.ranks > 1 ? fmt::format("rank {}, {}", i / panel.workers, i % panel.workers)
                                             : fmt::format("worker {}", i);
    svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" class=\"l\" text-anchor=\"end\">{}</text>\n", left - 8,
                       top + line * i + std::min(line, 14.0) * 0.7, name);
  }
  const double bottom = top + line * lines + 4, step = round_step(panel.simulation.makespan);
  for (double t = 0; t <= panel.simulation.makespan * 1.0001; t += step) {
    svg += fmt::format(
        "<path d=\"M{0:.1f} {1:.1f}v5\" stroke=\"#888\"/><text x=\"{0:.1f}\" y=\"{2:.1f}\" class=\"l\" "
        "text-anchor=\"middle\">{3}</text>\n",
        left + t * scale, bottom, bottom + 17, time_text(t));
  }
}

std::string svg_of(const std::string& heading, const std::vector<Panel>& panels) {
  double longest = 1e-12;
  for (const Panel& panel : panels) longest = std::max(longest, panel.simulation.makespan);
  const double scale = plot_width / longest;
  const auto line_of = [](const Panel& panel) { return std::clamp(420.0 / (panel.ranks * panel.workers), 3.0, 26.0); };
  double height = 96;
  for (const Panel& panel : panels) height += gap + 24 + line_of(panel) * panel.ranks * panel.workers;

  const double width = left + plot_width + right;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1:.0f}\" width=\"{0}\" height=\"{1:.0f}\">\n"
      "<style>text{{font-family:sans-serif;fill:#222}}.h{{font-size:17px;font-weight:bold}}.t{{font-size:14px}}"
      ".l{{font-size:10px;fill:#555}}.k{{font-size:12px}}</style>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<text x=\"{2}\" y=\"26\" class=\"h\">{3}</text>\n",
      width, height, left, escaped(heading));

  std::array<bool, schedule::stage_count> used{};
  for (const Panel& panel : panels) {
    for (const Span& span : panel.simulation.spans) used[static_cast<std::size_t>(span.tile.stage)] = true;
  }
  double x = left;
  const auto key = [&](const std::string& style, const std::string& name) {
    svg += fmt::format(
        "<rect x=\"{:.0f}\" y=\"40\" width=\"12\" height=\"12\" {}/><text x=\"{:.0f}\" y=\"51\" "
        "class=\"k\">{}</text>\n",
        x, style, x + 17, name);
    x += 34 + 7.0 * static_cast<double>(name.size());
  };
  for (int s = 0; s < schedule::stage_count; ++s) {
    if (used[static_cast<std::size_t>(s)]) {
      key(fmt::format("fill=\"{}\"", colours[static_cast<std::size_t>(s)]), schedule::to_string(static_cast<Stage>(s)));
    }
  }
  key("fill=\"#e8e8e8\"", "waiting");
  if (std::any_of(panels.begin(), panels.end(), [](const Panel& panel) { return !panel.simulation.critical.empty(); })) {
    key("fill=\"none\" stroke=\"#d50000\" stroke-width=\"1.5\"", "critical path");
  }

  double top = 76;
  for (const Panel& panel : panels) {
    top += gap - 16;
    draw_panel(svg, panel, top, line_of(panel), scale);
    top += line_of(panel) * panel.ranks * panel.workers + 40;
  }
  return svg + "</svg>\n";
}

std::string html_of(const std::string& heading, const std::vector<Panel>& panels) {
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>" + escaped(heading) +
         "</title><style>body{margin:1em;overflow-x:auto}</style></head>\n<body>\n" + svg_of(heading, panels) +
         "</body></html>\n";
}

}  // namespace

void check_picture_name(const std::string& file) {
  if (file.ends_with(".svg") || file.ends_with(".html")) return;
  throw Error(Status::invalid_argument, "--picture is \"" + file + "\"; accepted: a file name that ends in .svg or .html");
}

void draw(const std::string& file, const std::string& heading, const std::vector<Panel>& panels) {
  check_picture_name(file);
  write_file(file, [&](std::ostream& out) {
    out << (file.ends_with(".html") ? html_of(heading, panels) : svg_of(heading, panels));
  });
}

}  // namespace moelith::tools
