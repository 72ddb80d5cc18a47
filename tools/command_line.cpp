#include "command_line.hpp"

#include <exception>
#include <filesystem>
#include <fstream>
#include <new>
#include <ostream>

#include "moelith/moelith.h"
#include "moelith/tensor.hpp"

namespace moelith::tools {

std::string version() {
  const std::int32_t v = moelith_version();
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

void write_file(const std::string& name, const std::function<void(std::ostream&)>& write) {
  std::ofstream file(name, std::ios::binary);
  if (file) write(file);
  file.close();
  if (!file) throw Error(Status::invalid_argument, "\"" + name + "\" cannot be written");
}

void check_writable(const std::string& name) {
  const bool there = std::filesystem::exists(name);
  const bool opens = std::ofstream(name, std::ios::app).is_open();
  if (!there && opens) std::filesystem::remove(name);
  if (!opens) throw Error(Status::invalid_argument, "\"" + name + "\" cannot be written");
}

int run_command_line(const std::vector<std::string>& args, std::ostream& out, std::ostream& err) {
  CLI::App program{"Moelith: the mixture-of-experts layer of a transformer, for training", "moelith"};
  program.set_version_flag("--version", version());
  program.require_subcommand(1);
  program.get_formatter()->column_width(34);
  Run run;
  const Streams streams{out, err};
  add_info(program, streams, run);
  add_presets(program, streams, run);
  add_check(program, streams, run);
  add_bench(program, streams, run);
  add_schedule(program, streams, run);
  add_trace(program, streams, run);
  try {
    program.parse(std::vector<std::string>(args.rbegin(), args.rend()));  // CLI11 wants them last first
    const int status = run();
    out.flush();
    if (out) return status;
    err << "moelith: the results could not be written to the output\n";
  } catch (const CLI::ParseError& error) {
    return program.exit(error, out, err) == 0 ? success : bad_input;
  } catch (const Error& error) { err << "moelith: " << error.what() << "\n"; } catch (const std::bad_alloc&) {
    err << "moelith: out of memory; fewer tokens or smaller sizes need less\n";
  } catch (const std::exception& error) { err << "moelith: " << error.what() << "\n"; }
  return bad_input;
}

}  // namespace moelith::tools
