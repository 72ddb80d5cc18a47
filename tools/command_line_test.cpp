#include "command_line.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include <nlohmann/json.hpp>

namespace moelith::tools {
namespace {

using Json = nlohmann::json;

struct Result {
  int status;
  std::string out, err;
  Json json() const { return Json::parse(out); }
};

Result run(const std::string& line) {
  std::istringstream words(line);
  std::vector<std::string> args;
  for (std::string word; words >> word;) args.push_back(word);
  std::ostringstream out, err;
  const int status = run_command_line(args, out, err);
  return {status, out.str(), err.str()};
}

// A folder of this test's own, removed at its end.
class Folder {
 public:
  Folder() : path_(std::filesystem::path(testing::TempDir()) / ("moelith_tools_test_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name, const std::string& text = "") const {
    const std::string path = (path_ / name).string();
    if (!text.empty()) std::ofstream(path) << text;
    return path;
  }

 private:
  std::filesystem::path path_;
};

constexpr const char* small = " -H 32 -I 16 -E 8 -k 2 -T 24 ";

TEST(CommandLine, BadUseIsStatusTwoWithATextOnTheErrorStream) {
  for (const char* line :
       {"", "nonsense", "check --no-such-option", "check --top-k 0", "check --dtype half", "check --preset nothing",
        "check --config /nonexistent", "check --routing sideways", "check --routing file", "check --device tpu",
        "check --preset olmoe --config x", "presets nothing", "schedule --picture x.png", "trace --picture x.png", "check -H 12"}) {
    const Result result = run(line);
    EXPECT_EQ(result.status, bad_input) << line;
    EXPECT_NE(result.err, "") << line;
    EXPECT_EQ(result.out, "") << line;
  }
  EXPECT_EQ(run("check --top-k 17").err, "moelith: top_k is 17; accepted: 1 to min(num_experts, 32) = 16\n");
  EXPECT_EQ(run("--help").status, success);
  EXPECT_NE(run("check --help").out.find("--routing"), std::string::npos);
}

TEST(CommandLine, ResultsThatCannotBeWrittenAreAnError) {
  std::ostringstream out, err;
  out.setstate(std::ios::badbit);  // as behind a full disk
  EXPECT_EQ(run_command_line({"presets"}, out, err), bad_input);
  EXPECT_NE(err.str().find("could not be written"), std::string::npos) << err.str();
}

TEST(CommandLine, InfoSaysWhatRunsAndWhyNot) {
  const Json info = run("info --json").json();
  EXPECT_GE(info["threads"].get<int>(), 1);
  ASSERT_EQ(info["devices"].size(), 2u);
  EXPECT_EQ(info["devices"][0]["device"], "cpu");
  EXPECT_EQ(info["devices"][0]["usable"], true);
  for (const Json& device : info["devices"]) {
    for (const Json& state : device["dtypes"]) EXPECT_TRUE(state == true || state.get<std::string>().size() > 10);
  }
  EXPECT_NE(run("info").out.find("device cuda"), std::string::npos);
}

TEST(CommandLine, PresetsListsThemAll) {
  const Json list = run("presets --json").json()["presets"];
  EXPECT_EQ(list.size(), 9u);
  const Json one = run("presets deepseek-v3 --json").json()["presets"];
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0]["config"]["hidden_size"], 7168);
  EXPECT_EQ(one[0]["config"]["router"]["num_groups"], 8);
  EXPECT_NE(run("presets").out.find("kimi-k2"), std::string::npos);
}

TEST(CommandLine, CheckPassesForEveryKindOfRouting) {
  const Folder folder;
  const std::string routes = folder.file("routes.txt", "# token 0 and 1\n0 3\n5,-1\n\n7\n");
  for (const std::string& more :
       {std::string("--routing balanced"), std::string("--routing zipf --dtype float64"),
        std::string("--routing one-expert --dtype float32 --recompute"), "--routing file --routing-file " + routes,
        std::string("--entry ids --dtype float32"), std::string("--capacity-factor 0.5 --dtype float64")}) {
    const Result result = run("check --json --threads 2" + std::string(small) + more);
    ASSERT_EQ(result.status, success) << more << result.err << result.out;
    const Json json = result.json();
    EXPECT_EQ(json["pass"], true) << more;
    for (const char* name : {"y", "topk_ids", "expert_counts", "d_x", "d_gate_up_proj", "d_down_proj"}) {
      ASSERT_TRUE(json["tensors"].contains(name)) << more << ": " << name;
      EXPECT_TRUE(json["tensors"][name]["rel_fro"].is_number());
      EXPECT_TRUE(json["tensors"][name]["worst_row"].is_number());
    }
    // Not trivially: results were rounded.
    if (json["config"]["dtype"] == "bfloat16") { EXPECT_GT(json["tensors"]["y"]["rel_fro"].get<double>(), 1e-4); }
  }
}

TEST(CommandLine, CheckCoversLossesSharedExpertsAndPresets) {
  const Json json =
      run("check --json --dtype float64 --router sigmoid --selection-bias true --renormalize true --shared-expert 24 "
          "--shared-gate true --aux-loss sequence --aux-coefficient 0.1 --z-coefficient 0.01 --down-bias true" +
          std::string(small))
          .json();
  EXPECT_EQ(json["pass"], true) << json.dump(2);
  for (const char* name :
       {"aux_loss", "z_loss", "d_shared_gate_logits", "d_shared.0.down_proj", "d_shared.0.down_bias"}) {
    EXPECT_TRUE(json["tensors"].contains(name)) << name;
  }
  const Json preset = run("check --preset gpt-oss-20b --shrink 64 -T 32 --json").json();
  EXPECT_EQ(preset["pass"], true) << preset.dump(2);
  EXPECT_EQ(preset["config"]["hidden_size"], 48);
}

TEST(CommandLine, CheckFailsWithStatusOneWhenTheToleranceIsMissed) {
  const Result result = run("check --tolerance 1e-9 --json" + std::string(small));
  EXPECT_EQ(result.status, check_failed);
  EXPECT_EQ(result.json()["pass"], false);
  EXPECT_EQ(result.json()["tensors"]["y"]["pass"], false);
  EXPECT_NE(run("check --tolerance 1e-9" + std::string(small)).out.find("WRONG"), std::string::npos);
}

TEST(CommandLine, BenchGivesWhatMachinesRead) {
  const Result result = run("bench --seconds 0 --json --dtype float32 --threads 1" + std::string(small));
  ASSERT_EQ(result.status, success) << result.err;
  const Json json = result.json();
  for (const char* name : {"forward_ms", "backward_ms", "forward_tflops", "backward_tflops"})
    EXPECT_GT(json[name].get<double>(), 0) << name;
  EXPECT_GT(json["fraction_of_dense"]["forward"].get<double>(), 0);
  EXPECT_GT(json["fraction_of_dense"]["forward_backward"].get<double>(), 0);
  EXPECT_EQ(json["device"], "cpu");
  EXPECT_EQ(json["memory_bytes"]["weights"], 8 * 3 * 32 * 16 * 4);
  EXPECT_EQ(json["load"]["routes"], 48);
}

TEST(CommandLine, ScheduleCountsTilesAndDraws) {
  const Folder folder;
  const std::string picture = folder.file("pass.svg"), page = folder.file("pass.html");
  // Balanced: 128 tokens, k = 2, E = 2: each expert has 128 rows, one row block.
  const std::string layer =
      "schedule --json -H 256 -I 128 -E 2 -k 2 -T 128 --routing balanced --tile-columns 128 --workers 4 ";
  const Result result = run(layer + "--picture " + picture);
  ASSERT_EQ(result.status, success) << result.err;
  const Json json = result.json();
  EXPECT_EQ(json["forward"]["stages"]["gate_up"]["tiles"], 2);
  EXPECT_EQ(json["forward"]["stages"]["down"]["tiles"], 4);
  EXPECT_EQ(json["forward"]["stages"]["combine"]["tiles"], 4);
  EXPECT_EQ(json["backward"]["stages"]["down_dgrad"]["tiles"], 2);
  EXPECT_EQ(json["backward"]["stages"]["gate_up_dgrad"]["tiles"], 4);
  EXPECT_EQ(json["backward"]["stages"]["gate_up_wgrad"]["tiles"], 8);
  EXPECT_EQ(json["backward"]["stages"]["down_wgrad"]["tiles"], 4);
  EXPECT_EQ(json["forward"]["critical_path"].size(), 3u);  // gate_up, down, combine
  for (const char* pass : {"forward", "backward"}) {
    EXPECT_LE(json[pass]["critical_path_ms"].get<double>(), json[pass]["makespan_ms"].get<double>() * 1.000001);
    EXPECT_LE(json[pass]["busy"].get<double>(), 1.000001);
  }
  std::stringstream svg;
  svg << std::ifstream(picture).rdbuf();
  EXPECT_EQ(svg.str().rfind("<svg ", 0), 0u);
  EXPECT_NE(svg.str().find("gate_up_wgrad"), std::string::npos);
  EXPECT_NE(svg.str().find("</svg>"), std::string::npos);
  ASSERT_EQ(run(layer + "--picture " + page).status, success);
  EXPECT_TRUE(std::filesystem::exists(page));
  EXPECT_EQ(run(layer + "--picture /nonexistent/x.svg").status, bad_input);
}

TEST(CommandLine, TraceIsWhatWasMeasured) {
  const Folder folder;
  const std::string trace = folder.file("trace.json"), picture = folder.file("trace.svg");
  const Result result = run("trace --json -H 64 -I 32 -E 4 -k 2 -T 96 --threads 2 --dtype float32 --output " + trace + " --picture " + picture);
  ASSERT_EQ(result.status, success) << result.err;
  const Json summary = result.json();
  const Json events = Json::parse(std::ifstream(trace))["traceEvents"];
  const char* names[2] = {"forward", "backward"};
  for (int pass = 0; pass < 2; ++pass) {
    std::map<std::string, int> tiles;
    double last = 0;
    for (const Json& event : events) {
      if (event["pid"] != pass || event["ph"] != "X") continue;
      EXPECT_LT(event["tid"].get<int>(), 2);
      EXPECT_GE(event["dur"].get<double>(), 0);
      if (event["cat"] == "tile") ++tiles[event["name"]];
      last = std::max(last, event["ts"].get<double>() + event["dur"].get<double>());
    }
    const Json& of_pass = summary[names[pass]];
    EXPECT_NEAR(of_pass["ms"].get<double>() * 1e3, last, 1e-3 * last);
    EXPECT_LE(of_pass["work_share"].get<double>() + of_pass["wait_share"].get<double>(), 1.000001);
    EXPECT_EQ(of_pass["workers"], 2);
    ASSERT_EQ(of_pass["stages"].size(), tiles.size());
    for (const auto& [stage, count] : tiles) EXPECT_EQ(of_pass["stages"][stage]["tiles"], count) << stage;
  }
  EXPECT_TRUE(summary["forward"]["stages"].contains("combine"));
  EXPECT_TRUE(summary["backward"]["stages"].contains("down_wgrad"));
  std::stringstream svg;
  svg << std::ifstream(picture).rdbuf();
  EXPECT_NE(svg.str().find("gate_up_dgrad"), std::string::npos);
  EXPECT_EQ(run("trace -H 64 -I 32 -E 4 -k 2 -T 8 --output /nonexistent/x.json").status, bad_input);
  EXPECT_EQ(run("trace -H 64 -I 32 -E 4 -k 2 -T 8 --output " + picture + " --picture " + picture).status, bad_input);
  // Workers that got no tile count too.
  const Json few = run("trace --json -H 64 -I 32 -E 4 -k 2 -T 1 --threads 8 --output " + trace).json();
  EXPECT_EQ(few["forward"]["workers"], 8);
  EXPECT_LE(few["forward"]["work_share"].get<double>(), 1.000001);
}

TEST(CommandLine, ScheduleOfSeveralRanks) {
  const Folder folder;
  const std::string picture = folder.file("ranks.svg");
  // Each rank: 64 tokens, one chunk; 32 routes to each of the 4 experts, whose 96 rows of all ranks are one row block.
  const std::string layer =
      "schedule --json -H 256 -I 128 -E 4 -k 2 -T 64 --routing balanced --tile-columns 128 --workers 4 --row-block 128 ";
  const Json one = run(layer + "--ranks 1").json();
  EXPECT_FALSE(one["forward"]["stages"].contains("dispatch"));
  const Result result = run(layer + "--ranks 3 --picture " + picture);
  ASSERT_EQ(result.status, success) << result.err;
  const Json json = result.json();
  EXPECT_EQ(json["ranks"], 3);
  const Json& stages = json["forward"]["stages"];
  EXPECT_EQ(stages["publish"]["tiles"], 3);
  EXPECT_EQ(stages["layout"]["tiles"], 3);
  EXPECT_EQ(stages["collect"]["tiles"], 4);   // of each expert
  EXPECT_EQ(stages["dispatch"]["tiles"], 6);  // of each pair of ranks
  EXPECT_EQ(stages["gate_up"]["tiles"], 4);
  EXPECT_EQ(stages["down"]["tiles"], 8);
  EXPECT_EQ(stages["combine"]["tiles"], 6);
  EXPECT_EQ(json["backward"]["stages"]["dispatch"]["tiles"], 6);
  // Rank 0 has two experts, and room for one's rows: backward makes the other's pre-activation again.
  EXPECT_FALSE(json["backward"]["stages"].contains("gate_up"));
  EXPECT_EQ(run(layer + "--ranks 3 --round-rows 128").json()["backward"]["stages"]["gate_up"]["tiles"], 1);
  // Waiting for another rank's signal takes time.
  const Json slow = run(layer + "--ranks 3 --signal-us 1000").json();
  EXPECT_GT(slow["forward"]["critical_path_ms"].get<double>(), json["forward"]["critical_path_ms"].get<double>() + 1.0);
  for (const char* pass : {"forward", "backward"}) EXPECT_LE(json[pass]["busy"].get<double>(), 1.000001);
  std::stringstream svg;
  svg << std::ifstream(picture).rdbuf();
  EXPECT_NE(svg.str().find("rank 2, 3"), std::string::npos);
  EXPECT_EQ(run(layer + "--ranks 65").status, bad_input);
}

}  // namespace
}  // namespace moelith::tools
