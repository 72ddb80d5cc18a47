// A simulated or measured pass as a picture: time to the right, a line for each worker, a colour for each stage.
#pragma once

#include <string>
#include <vector>

#include "executors/simulator/simulate.hpp"

namespace moelith::tools {

struct Panel {
  std::string title;  // "forward: 1.2 ms"
  executors::simulator::Simulation simulation;
  int ranks = 1, workers = 1;
};

// Throws Error(invalid_argument) unless the name ends in .svg or .html.
void check_picture_name(const std::string& file);

// Writes one SVG document, or a page with it: the panels below each other, drawn to the same scale of time, with a legend.
// Tiles of one stage that follow each other on a worker without a gap are drawn as one block, and waits in a light grey.
// The critical path is outlined. A block tells stage, expert and times when pointed at. Throws Error(invalid_argument)
// for a name as above, or a file that cannot be written.
void draw(const std::string& file, const std::string& heading, const std::vector<Panel>& panels);

}  // namespace moelith::tools
