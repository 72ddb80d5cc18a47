// Ranks as processes, on one GPU and on several: the bits of one rank, captured graphs, and what happens when one of
// them dies or does not come. This process itself never calls CUDA, which does not survive a fork: whatever needs a GPU
// runs in children, one rank by itself too.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "tests/layer_fixture_gpu.cuh"
#include "tests/outcome.hpp"

namespace moelith {
namespace {

using namespace test;
using std::chrono::milliseconds;
using std::chrono::seconds;

bool patient() { return std::getenv("MOELITH_TEST_PATIENT") != nullptr; }  // under tools that slow all down

// body(rank) in a process for each rank, which ends after a minute at the latest. A GPU is its own to choose.
std::vector<Ended> on_processes(int ranks, const std::function<std::string(int)>& body,
                                const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  return fork_ranks(
      ranks,
      [&](int r) {
        alarm(patient() ? 900 : 60);
        return body(r);
      },
      meanwhile);
}

int gpus_here() {
  static const int gpus = [] {
    const auto ended = on_processes(1, [](int) {
      int count = 0;
      cudaGetDeviceCount(&count);
      return std::to_string(count);
    });
    return std::atoi(ended[0].text.c_str());
  }();
  return gpus;
}

// In the process of a rank: on GPU rank % gpus. hidden: sees no other GPU.
void choose_gpu(int rank, int gpus, bool hidden = false) {
  if (!hidden) return check(cudaSetDevice(rank % gpus));
  std::string visible = std::to_string(rank % gpus);
  if (const char* given = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::vector<std::string> all{""};
    for (const char* c = given; *c; ++c) *c == ',' ? (void)all.emplace_back() : (void)(all.back() += *c);
    visible = all.at(std::size_t(rank % gpus));
  }
  setenv("CUDA_VISIBLE_DEVICES", visible.c_str(), 1);
}

// The options of a run, with what a GPU's need.
RunOptions here(RunOptions options) {
  const RunOptions gpu = on_gpu();
  options.device = gpu.device, options.workers = gpu.workers, options.stream = gpu.stream, options.launch = gpu.launch;
  options.timeout = seconds(patient() ? 100 : 20);
  return options;
}

struct Case {
  std::string what;
  Problem problem;
  RunOptions options;
  int ranks() const { return static_cast<int>(options.tokens_of_rank.size()); }
};

// What a process runs, one part behind the other.
class Parts {
 public:
  void add(const RankPart& part) {
    const std::string bytes = part.packed();
    const std::uint64_t size = bytes.size();
    bytes_.append(reinterpret_cast<const char*>(&size), sizeof size).append(bytes);
  }
  const std::string& bytes() const { return bytes_; }
  static std::vector<RankPart> of(const std::string& bytes) {
    std::vector<RankPart> parts;
    for (std::size_t at = 0; at < bytes.size();) {
      std::uint64_t size = 0;
      std::memcpy(&size, bytes.data() + at, sizeof size);
      parts.push_back(RankPart::unpacked(bytes.substr(at + sizeof size, size)));
      at += sizeof size + size;
    }
    return parts;
  }

 private:
  std::string bytes_;
};

// Every case on one rank.
std::vector<Results> on_one_rank(const std::vector<Case>& cases) {
  const auto ended = on_processes(1, [&](int) {
    Parts parts;
    for (const Case& c : cases) {
      arena().reset();
      RunOptions alone = c.options;
      alone.tokens_of_rank.clear(), alone.expert_rank.clear(), alone.without_dy.clear(), alone.passes_before = 0;
      parts.add(run_rank(c.problem, here(alone), Group::single()));
    }
    return parts.bytes();
  });
  if (!ended[0].returned) throw std::runtime_error("one rank: " + ended[0].text);
  std::vector<Results> all;
  const auto parts = Parts::of(ended[0].text);
  for (std::size_t n = 0; n < cases.size(); ++n) all.push_back(joined({parts.at(n)}, cases[n].problem.config));
  return all;
}

// Every case on its ranks, each a process; a group for each case.
std::vector<Results> on_ranks_of(const std::vector<Case>& cases, int gpus, bool hidden = false) {
  int most = 0;
  for (const Case& c : cases) most = std::max(most, c.ranks());
  const std::string name = fresh_group_name();
  const auto ended = on_processes(most, [&](int r) {
    choose_gpu(r, gpus, hidden);
    Parts parts;
    for (std::size_t n = 0; n < cases.size(); ++n) {
      const Case& c = cases[n];
      if (r >= c.ranks()) continue;
      arena().reset();
      parts.add(run_rank(c.problem, here(c.options),
                         Group::process(name + "-" + std::to_string(n), r, c.ranks(), seconds(60))));
    }
    return parts.bytes();
  });
  std::vector<std::vector<RankPart>> parts(cases.size());
  for (int r = 0; r < most; ++r) {
    if (!ended[r].returned) {
      throw std::runtime_error("rank " + std::to_string(r) + " ended by signal " + std::to_string(ended[r].signal) +
                               ": " + ended[r].text);
    }
    const auto of_rank = Parts::of(ended[r].text);
    std::size_t next = 0;
    for (std::size_t n = 0; n < cases.size(); ++n) {
      if (r < cases[n].ranks()) parts[n].push_back(of_rank.at(next++));
    }
  }
  std::vector<Results> all;
  for (std::size_t n = 0; n < cases.size(); ++n) all.push_back(joined(parts[n], cases[n].problem.config));
  return all;
}

// Unequal numbers of tokens, none, all of them at one expert, any placement, and what else an exchange meets.
std::vector<Case> cases(std::uint64_t seed) {
  Random random(seed);
  std::vector<Case> all;
  auto add = [&](std::string what, const LayerConfig& config, std::vector<std::int64_t> tokens) -> Case& {
    std::int64_t sum = 0;
    for (const std::int64_t t : tokens) sum += t;
    all.push_back({std::move(what), random_problem(config, sum, random()), {}});
    all.back().options.tokens_of_rank = std::move(tokens);
    return all.back();
  };
  auto any = [&] { return tokens_apart(random_config(random, DataType::bfloat16)); };
  LayerConfig real;
  real.hidden_size = 1024, real.intermediate_size = 128, real.num_experts = 15, real.top_k = 6;
  real.shared_experts = {{256, true}};
  LayerConfig small;
  small.hidden_size = 136, small.intermediate_size = 72, small.num_experts = 8, small.top_k = 2;

  add("two ranks", any(), {150, 250}).options.backwards = 2;
  add("a rank without tokens", any(), {300, 0}).options.row_gap = 8;
  add("recompute", any(), {0, 170, 130}).options.recompute = true;
  add("four ranks", any(), {100, 50, 200, 1});
  {
    Case& skewed = add("all tokens to one expert", small, {200, 100, 50});
    bring_routes(skewed.problem, 0.0, 4);
    for (std::size_t i = 0; i < skewed.problem.inputs.topk_ids.size(); ++i)
      skewed.problem.inputs.topk_ids[i] = 7 - std::int64_t(i % 2);
  }
  {
    Case& placed = add("any placement, bound experts", small, {120, 80});
    placed.options.bound = true;
    for (std::int32_t e = 0; e < small.num_experts; ++e) placed.options.expert_rank.push_back(e == 3);
  }
  {
    Case& frozen = add("frozen experts", small, {90, 160});
    frozen.options.frozen = {"d_gate_up_proj", "d_gate_up_bias"};
  }
  add("numbers of passes that wrap around", small, {40, 60}).options.passes_before = ~0ull - 1;
  add("a real size", real, {1400, 1600}).options.backwards = 2;
  add("a real size, four ranks", real, {1000, 0, 1900, 100});
  return all;
}

void expect_bits_of_one_rank(int gpus, bool hidden = false) {
  static const std::vector<Case> all = cases(43);
  static const std::vector<Results> one = on_one_rank(all);
  const std::vector<Results> several = on_ranks_of(all, gpus, hidden);
  for (std::size_t n = 0; n < all.size(); ++n) {
    expect_identical(several[n], one[n], all[n].what, of_each_rank(all[n].problem));
  }
}

TEST(CudaProcesses, SameBitsOnOneGpu) { expect_bits_of_one_rank(1); }

TEST(CudaProcesses, SameBitsOnTwoGpus) {
  if (gpus_here() < 2) GTEST_SKIP() << "one GPU alone";
  expect_bits_of_one_rank(2);
}

TEST(CudaProcesses, SameBitsWhereEachSeesItsOwnGpuAlone) {
  if (gpus_here() < 2) GTEST_SKIP() << "one GPU alone";
  try {
    expect_bits_of_one_rank(2, true);
  } catch (const std::exception& error) {  // a driver that does not open such memory: by name
    const std::string text = error.what();
    if (text.find("CUDA_VISIBLE_DEVICES hides that GPU from this process") == std::string::npos) throw;
    GTEST_SKIP() << text;
  }
}

TEST(CudaProcesses, GraphsReplayWithOtherInputs) {
  Random random(37);
  const LayerConfig config = tokens_apart(random_config(random, DataType::bfloat16));
  RunOptions options;
  options.tokens_of_rank = {120, 100};
  std::vector<Case> all;
  for (int n = 0; n < 3; ++n) {
    all.push_back({"problem " + std::to_string(n), random_problem(config, 220, random()), options});
    for (std::int64_t t = 0; n == 1 && t < 220; ++t)
      all[1].problem.inputs.router_logits[t * config.num_experts] = -INFINITY;
  }
  const std::vector<Results> one = on_one_rank(all);
  const std::string name = fresh_group_name();
  const int gpus = std::min(gpus_here(), 2);
  const auto ended = on_processes(2, [&](int r) {
    choose_gpu(r, gpus);
    Captured captured;
    Parts parts;
    for (int n = 0; n < 4; ++n) {  // the first one is captured, and comes again
      arena().reset();
      const RunOptions base = here(options);
      const Group group = Group::process(name + std::to_string(n), r, 2, seconds(60));
      parts.add(run_rank(all[n % 3].problem, n == 0 ? capturing(captured, base) : replaying(captured, base), group));
    }
    return parts.bytes();
  });
  for (const Ended& e : ended) ASSERT_TRUE(e.returned) << e.text;
  const auto first = Parts::of(ended[0].text), second = Parts::of(ended[1].text);
  for (int n = 0; n < 4; ++n) {
    expect_identical(joined({first[n], second[n]}, config), one[n % 3], all[n % 3].what,
                     of_each_rank(all[n % 3].problem));
  }
}

// A small layer of a rank, called pass by pass.
class Member {
 public:
  explicit Member(const Group& group, std::int64_t tokens = 64) : group_(group) {
    arena();  // where its buffers lie
    config_.hidden_size = config_.intermediate_size = 64, config_.num_experts = 6, config_.top_k = 2;
    PlanOptions options;
    options.device = DeviceKind::cuda;
    options.max_tokens = tokens;
    options.group = group;
    plan_ = std::make_unique<Plan>(Plan::create(config_, options));
    const std::int64_t h = config_.hidden_size, l = plan_->num_local_experts();
    Random random(3);
    auto make = [&](DataType type, std::initializer_list<std::int64_t> shape) {
      Tensor& t = tensors_.emplace_back(type, shape);
      t.set(normal(random, std::size_t(t.view.numel()), 1.0, type).data());
      return t.view;
    };
    in_.x = make(config_.dtype, {tokens, h});
    in_.router_logits = make(DataType::float32, {tokens, config_.num_experts});
    in_.weights.gate_up_proj = make(config_.dtype, {l, 2 * h, h});
    in_.weights.down_proj = make(config_.dtype, {l, h, h});
    out_.y = make(config_.dtype, {tokens, h});
    workspace_ = Buffer(plan_->buffer_sizes(tokens).workspace);
  }
  void forward() { plan_->forward(in_, out_, nullptr, workspace_.data(), arena().stream); }
  void wait() { check(cudaStreamSynchronize(arena().stream)); }
  // What the next call throws, if any.
  std::string error() {
    const Outcome outcome = outcome_of([&] { forward(); });
    wait();
    return outcome.text;
  }
  Group& group() { return group_; }

 private:
  Group group_;
  LayerConfig config_;
  std::unique_ptr<Plan> plan_;
  std::deque<Tensor> tensors_;
  Inputs in_;
  Outputs out_;
  Buffer workspace_;
};

milliseconds since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begin);
}

// Rank 1 of three dies while the others wait for it: before it begins the pass, or at any moment of many passes.
TEST(CudaProcesses, AKilledRankEndsTheOthersWhoGoOnInANewGroup) {
  Random random(5);
  LayerConfig config;
  config.hidden_size = config.intermediate_size = 128, config.num_experts = 6, config.top_k = 2;
  Case after{"after a death", random_problem(config, 200, 11), {}};
  after.options.tokens_of_rank = {130, 70};
  const Results one = on_one_rank({after}).front();
  for (const int round : {0, 1, 2}) {
    const std::string name = fresh_group_name();
    const auto dies_after = milliseconds(200 + random() % 200);
    const auto ended = on_processes(3, [&](int r) -> std::string {
      choose_gpu(r, std::min(gpus_here(), 2));
      std::string told;
      {
        Member member(Group::process(name, r, 3, seconds(60)));
        member.forward();
        member.wait();
        member.group().transport()->all_gather(0);  // all go on from here
        if (r == 1) {
          std::thread([&] {
            std::this_thread::sleep_for(dies_after);
            kill(getpid(), SIGKILL);
          }).detach();
          for (; round == 0; sleep(1)) {}
        }
        const auto begin = std::chrono::steady_clock::now();
        while (told.empty()) told = member.error();
        told += " after " + std::to_string(since(begin).count()) + " ms; it died after " +
                std::to_string(dies_after.count());
        if (since(begin) > dies_after + seconds(5)) return "late: " + told;
        if (told.find("rank 1 is gone") == std::string::npos) return "unnamed: " + told;
      }
      if (r == 0) std::fprintf(stderr, "  rank 0 was told: %s\n", told.c_str());
      arena().reset();
      return run_rank(after.problem, here(after.options), Group::process(name + "-again", r / 2, 2, seconds(60)))
          .packed();
    });
    EXPECT_EQ(ended[1].signal, SIGKILL);
    for (const int r : {0, 2})
      ASSERT_TRUE(ended[r].returned && ended[r].text.size() > 1000) << ended[r].text << ", signal " << ended[r].signal;
    expect_identical(joined({RankPart::unpacked(ended[0].text), RankPart::unpacked(ended[2].text)}, config), one,
                     after.what, of_each_rank(after.problem));
  }
}

TEST(CudaProcesses, ARankThatEndsInGoodOrderDoesNotDisturbTheOthers) {
  const std::string name = fresh_group_name();
  const auto ended = on_processes(3, [&](int r) -> std::string {
    choose_gpu(r, std::min(gpus_here(), 2));
    Member member(Group::process(name, r, 3, seconds(20)));
    for (int i = 0; i < 20; ++i) member.forward();
    member.wait();
    if (r != 0) return "good";
    std::this_thread::sleep_for(seconds(2));
    return member.error();
  });
  EXPECT_EQ(ended[1].text, "good");
  EXPECT_EQ(ended[2].text, "good");
  EXPECT_NE(ended[0].text.find(" is gone: its process has ended"), std::string::npos)
      << ended[0].text;  // the next call
}

TEST(CudaProcesses, ARankThatIsAliveButDoesNotCallIsNamed) {
  const std::string name = fresh_group_name();
  const auto ended = on_processes(2, [&](int r) -> std::string {
    choose_gpu(r, std::min(gpus_here(), 2));
    Member member(Group::process(name, r, 2, seconds(20)));
    member.forward();
    member.wait();
    member.group().set_timeout(milliseconds(500));
    if (r == 0) return member.error() + member.error();
    std::this_thread::sleep_for(seconds(3));
    return member.error();  // it comes too late
  });
  for (const Ended& e : ended) {
    EXPECT_NE(e.text.find("rank 0, stage layout: waited 500 ms for rank 1, which has not begun this pass"),
              std::string::npos)
        << e.text;
  }
}

TEST(CudaProcesses, AnErrorOfOneRankEndsTheWaitsOfTheOthers) {
  const std::string name = fresh_group_name();
  const auto ended = on_processes(2, [&](int r) -> std::string {
    choose_gpu(r, std::min(gpus_here(), 2));
    Member member(Group::process(name, r, 2, seconds(30)));
    member.forward();
    member.wait();
    if (r == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      member.group().fail("because");
      return "";
    }
    const auto begin = std::chrono::steady_clock::now();
    std::string text = member.error() + member.error();
    return since(begin) > seconds(5) ? "late: " + text : text;
  });
  EXPECT_EQ(ended[0].text.find("the group has failed: rank 1: because"), 0u) << ended[0].text;
}

TEST(CudaProcesses, RanksOfOneProcessAreRefused) {
  const std::string name = fresh_group_name();
  const auto ended = on_processes(1, [&](int) -> std::string {
    std::string texts[2];
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back(
          [&, r] { texts[r] = outcome_of([&] { Member member(Group::process(name, r, 2, seconds(20))); }).text; });
    }
    for (auto& thread : threads) thread.join();
    return texts[0];
  });
  EXPECT_NE(ended[0].text.find("ranks 0 and 1 are of one process"), std::string::npos) << ended[0].text;
}

// Memory of plans and groups that are no more is given back, while the group lives and after it.
TEST(CudaProcesses, MemoryGoesWithPlansAndGroups) {
  const std::string name = fresh_group_name();
  const auto ended = on_processes(2, [&](int r) -> std::string {
    choose_gpu(r, std::min(gpus_here(), 2));
    std::vector<std::size_t> free_bytes;
    for (int g = 0; g < 3; ++g) {
      const Group group = Group::process(name, r, 2, seconds(20));
      for (int i = 0; i < 2; ++i) {
        arena().reset();
        Member member(group, 100'000 + 100 * i);  // more than 50 MB of symmetric memory each
        member.forward();
        member.wait();
      }
      group.transport()->all_gather(0);
      std::size_t free = 0, total = 0;
      check(cudaMemGetInfo(&free, &total));
      free_bytes.push_back(free);
      group.transport()->all_gather(0);
    }
    const std::size_t lost = free_bytes[1] > free_bytes[2] ? free_bytes[1] - free_bytes[2] : 0;
    return lost < (std::size_t(64) << 20) ? "good" : "lost " + std::to_string(lost >> 20) + " MiB";
  });
  for (const Ended& e : ended) EXPECT_EQ(e.text, "good");
}

}  // namespace
}  // namespace moelith
