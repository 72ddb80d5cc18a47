#include "command_line.hpp"
namespace moelith::tools {
void add_schedule(CLI::App&, Streams, Run&) {}
}
