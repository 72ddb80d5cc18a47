// `moelith info`: the devices of this machine, what runs on them, and why something does not.
#include <fstream>
#include <memory>
#include <ostream>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include "command_line.hpp"
#include "executors/cpu/gemm.hpp"
#include "executors/cpu/thread_pool.hpp"
#include "moelith/layer.hpp"
#include "options.hpp"

namespace moelith::tools {
namespace {

std::string value_in(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(':');
    if (line.rfind(key, 0) == 0 && colon != std::string::npos && colon + 2 <= line.size())
      return line.substr(colon + 2);
  }
  return "unknown";
}

// "" if a plan can be made for the device, otherwise why not.
std::string obstacle(DeviceKind device, DataType dtype) {
  LayerConfig config;
  config.hidden_size = config.intermediate_size = 64;
  config.num_experts = config.top_k = 1;
  config.dtype = dtype;
  PlanOptions options;
  options.device = device;
  try {
    Plan::create(config, options);
    return "";
  } catch (const Error& error) { return error.what(); }
}

int run_info(const Streams& streams, bool json) {
  namespace cpu = executors::cpu;
  Json sets = Json::array();
  for (const cpu::InstructionSet set : cpu::available_instruction_sets()) sets.push_back(cpu::to_string(set));
  std::string used;
  try {
    used = cpu::to_string(cpu::instruction_set());
  } catch (const Error& error) { used = std::string("none: ") + error.what(); }
  Json devices = Json::array();
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    Json types = Json::object();
    bool any = false;
    for (const DataType dtype : {DataType::bfloat16, DataType::float32, DataType::float64}) {
      const std::string why = obstacle(device, dtype);
      types[to_string(dtype)] = why.empty() ? Json(true) : Json(why);
      any |= why.empty();
    }
    devices.push_back({{"device", device == DeviceKind::cpu ? "cpu" : "cuda"}, {"usable", any}, {"dtypes", types}});
  }
  const Json result{{"version", version()},
                    {"processor", value_in("/proc/cpuinfo", "model name")},
                    {"threads", cpu::available_workers()},
                    {"memory", value_in("/proc/meminfo", "MemTotal")},
                    {"instruction_sets", sets},
                    {"instruction_set_used", used},
                    {"devices", devices}};
  if (json) {
    streams.out << result.dump(2) << "\n";
    return success;
  }
  fmt::print(streams.out, "moelith {}\n\n", version());
  fmt::print(streams.out, "processor         {}\n", result["processor"].get<std::string>());
  fmt::print(streams.out, "threads           {} (all that this process may use)\n", cpu::available_workers());
  fmt::print(streams.out, "memory            {}\n", result["memory"].get<std::string>());
  std::string names;
  for (const Json& name : sets) names += (names.empty() ? "" : ", ") + name.get<std::string>();
  fmt::print(streams.out, "instruction sets  {}; used: {} (MOELITH_CPU_ISA chooses)\n\n", names, used);
  for (const Json& device : devices) {
    fmt::print(streams.out, "device {}\n", device["device"].get<std::string>());
    for (const auto& [dtype, state] : device["dtypes"].items()) {
      fmt::print(streams.out, "  {:<10}{}\n", dtype,
                 state.is_boolean() ? "runs" : "does not run: " + state.get<std::string>());
    }
  }
  return success;
}

}  // namespace

void add_info(CLI::App& program, Streams streams, Run& run) {
  auto* command =
      program.add_subcommand("info", "devices of this machine, what runs on them and why something does not");
  auto json = std::make_shared<bool>(false);
  add_json_option(*command, *json);
  command->callback([=, &run] { run = [=] { return run_info(streams, *json); }; });
}

}  // namespace moelith::tools
