// The command line `moelith`. One file for each subcommand; what they share: options, memory, random_problem, routes.
#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace moelith::tools {

// Exit statuses.
inline constexpr int success = 0;
inline constexpr int check_failed = 1;  // `check`: a result is not right
inline constexpr int bad_input = 2;     // options or files that make no sense, or a device that is not there

// The whole program; args[0] is the first argument, not the program's name. `out` gets results alone, so that --json
// can be piped; `err` gets errors and remarks. Never throws.
int run_command_line(const std::vector<std::string>& args, std::ostream& out, std::ostream& err);

// "0.1.0", of the library.
std::string version();

// Where a subcommand writes.
struct Streams {
  std::ostream& out;
  std::ostream& err;
};

// Writes a file by write(stream). Throws Error(invalid_argument) if that fails, also at its end (a full disk).
void write_file(const std::string& name, const std::function<void(std::ostream&)>& write);

// Throws Error(invalid_argument) where write_file could not even begin; changes nothing.
void check_writable(const std::string& name);

// Adds a subcommand to the program. Once the arguments are parsed, `run` is set if it is the one to run; run() returns
// the exit status and may throw.
using Run = std::function<int()>;
void add_info(CLI::App& program, Streams streams, Run& run);
void add_presets(CLI::App& program, Streams streams, Run& run);
void add_check(CLI::App& program, Streams streams, Run& run);
void add_bench(CLI::App& program, Streams streams, Run& run);
void add_schedule(CLI::App& program, Streams streams, Run& run);
void add_trace(CLI::App& program, Streams streams, Run& run);

}  // namespace moelith::tools
