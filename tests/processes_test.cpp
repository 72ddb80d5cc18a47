// Ranks as processes: the same bits as one rank has, and what happens when one of them dies or does not come.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <random>
#include <thread>

#include "tests/call.hpp"
#include "tests/outcome.hpp"

// Not under ThreadSanitizer, which neither follows a fork nor sees memory of several processes.
#if !defined(__SANITIZE_THREAD__)

namespace moelith::test {
namespace {

using std::chrono::milliseconds;

TEST(Processes, SameBitsForAnyNumberOfRanks) {
  Random random(29);
  for (int n = 0; n < 4; ++n) {
    const auto config = tokens_apart(random_config(random, n % 2 ? DataType::bfloat16 : DataType::float32));
    const Problem p = random_problem(config, 150, random());
    RunOptions options;
    options.processes = true;
    const std::vector<std::string> own = of_each_rank(p);
    const Results one = run(p, {});
    for (const auto& tokens : std::vector<std::vector<std::int64_t>>{
             {150, 0}, {33, 100, 17}, {0, 64, 1, 85}, {20, 1, 0, 64, 13, 2, 0, 50}}) {
      options.tokens_of_rank = tokens;
      options.expert_rank.clear();
      if (n >= 2) {  // any placement, with ranks that hold no expert
        for (std::int32_t e = 0; e < config.num_experts; ++e) {
          options.expert_rank.push_back(static_cast<std::int32_t>(random() % tokens.size()));
        }
      }
      expect_identical(one, run(p, options), std::to_string(tokens.size()) + " processes", own);
    }
  }
}

TEST(Processes, NumbersOfPassesMayStartAnew) {
  Random random(31);
  const Problem p = random_problem(random_config(random, DataType::float32), 60, random());
  RunOptions options;
  options.tokens_of_rank = {40, 20};
  options.backwards = 4;
  const Results usual = run(p, options);
  for (bool processes : {false, true}) {
    options.processes = processes;
    options.passes_before = ~std::uint64_t(0) - 2;
    expect_identical(usual, run(p, options), processes ? "processes" : "threads");
  }
}

LayerConfig small_config() {
  LayerConfig c;
  c.dtype = DataType::float32;
  c.hidden_size = 64;
  c.intermediate_size = 64;
  c.num_experts = 8;
  c.top_k = 2;
  return c;
}

// A small layer of a rank, to be run again and again.
class Rank {
 public:
  Rank(const Group& group, std::int64_t tokens)
      : problem_(random_problem(small_config(), tokens, 7)),
        plan_(plan_of(group, tokens)),
        call_(problem_, plan_, 0, tokens) {}
  void iterate() {
    call_.forward();
    call_.backward();
  }

 private:
  static Plan plan_of(const Group& group, std::int64_t tokens) {
    PlanOptions options;
    options.max_tokens = tokens;
    options.workers = 1;
    options.group = group;
    return Plan::create(small_config(), options);
  }
  const Problem problem_;
  const Plan plan_;
  Call call_;
};

std::vector<std::string> left_in_shared_memory() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().rfind("moelith-test-" + std::to_string(getpid()), 0) == 0)
      names.push_back(entry.path());
  }
  return names;
}

TEST(Processes, AKilledRankEndsTheOthersWhoGoOnInANewGroup) {
  constexpr int ranks = 3, rounds = 50;
  std::mt19937 random(11);
  for (int n = 0; n < rounds; ++n) {
    const int victim = static_cast<int>(random() % ranks);
    const auto after = std::chrono::microseconds(random() % 20000);
    const std::string name = fresh_group_name();
    const auto ended = fork_ranks(
        ranks,
        [&](int r) -> std::string {
          const Outcome outcome = outcome_of([&] {
            Rank rank(Group::process(name, r, ranks, milliseconds(10000)), 48 + r);
            while (true) rank.iterate();
          });
          // Set-up has not come far enough to tell a death from a late start: then the limit ends it.
          if (outcome.status != Status::group_failed && outcome.status != Status::timed_out)
            return "status: " + outcome.text;
          if (outcome.text.find("rank " + std::to_string(victim)) == std::string::npos)
            return "unnamed: " + outcome.text;
          const int place = r > victim ? r - 1 : r;
          Rank again(Group::process(name + "-again", place, ranks - 1, milliseconds(10000)), 48 + r);
          for (int i = 0; i < 3; ++i) again.iterate();
          return "good";
        },
        [&](const std::vector<pid_t>& children) {
          // Once all have met, which takes their names out of sight.
          std::this_thread::sleep_for(milliseconds(20) + after);
          kill(children[victim], SIGKILL);
        });
    for (int r = 0; r < ranks; ++r) {
      if (r == victim) {
        EXPECT_EQ(ended[r].signal, SIGKILL);
      } else {
        EXPECT_EQ(ended[r].text, "good") << "round " << n << ", rank " << r << " of victim " << victim << ", signal "
                                         << ended[r].signal;
      }
    }
    if (HasFailure()) break;
  }
  EXPECT_TRUE(left_in_shared_memory().empty());
}

TEST(Processes, ARankThatNeverComesIsNamed) {
  const std::string name = fresh_group_name();
  const auto ended = fork_ranks(3, [&](int r) -> std::string {
    if (r == 1) return "";
    const Outcome outcome = outcome_of([&] { Group::process(name, r, 3, milliseconds(300)); });
    return outcome.took < milliseconds(5000) ? outcome.text : "late: " + outcome.text;
  });
  for (int r : {0, 2}) {
    EXPECT_TRUE(ended[r].returned);
    EXPECT_NE(ended[r].text.find("waited 300 ms for rank 1"), std::string::npos) << ended[r].text;
    EXPECT_EQ(ended[r].text.find("late"), std::string::npos) << ended[r].text;
  }
  EXPECT_TRUE(left_in_shared_memory().empty());
}

TEST(Processes, ARankThatIsAliveButDoesNotCallIsNamed) {
  const std::string name = fresh_group_name();
  const auto ended = fork_ranks(3, [&](int r) -> std::string {
    Group group = Group::process(name, r, 3, milliseconds(10000));
    Rank rank(group, 30);
    rank.iterate();
    group.set_timeout(milliseconds(300));
    if (r != 2) return outcome_of([&] { rank.iterate(); }).text;
    std::this_thread::sleep_for(milliseconds(1500));
    return outcome_of([&] { rank.iterate(); }).text;  // it comes too late
  });
  for (int r = 0; r < 3; ++r) {
    EXPECT_TRUE(ended[r].returned) << ended[r].text;
    EXPECT_NE(ended[r].text.find("300 ms for rank 2"), std::string::npos) << ended[r].text;
    EXPECT_NE(ended[r].text.find("stage "), std::string::npos) << ended[r].text;
  }
}

TEST(Processes, ARankThatEndsInGoodOrderDoesNotDisturbTheOthers) {
  for (int n = 0; n < 10; ++n) {
    const std::string name = fresh_group_name();
    const auto ended = fork_ranks(4, [&](int r) -> std::string {
      Rank rank(Group::process(name, r, 4, milliseconds(10000)), 20 + 40 * r);
      for (int i = 0; i < 5; ++i) rank.iterate();
      return "good";
    });
    for (const Ended& one : ended) EXPECT_EQ(one.text, "good");
  }
  EXPECT_TRUE(left_in_shared_memory().empty());
}

TEST(Processes, ANameMayBeUsedAgain) {
  const std::string name = fresh_group_name();
  const auto ended = fork_ranks(3, [&](int r) -> std::string {
    for (int i = 0; i < 30; ++i) {
      const Group first = Group::process(name, r, 3, milliseconds(10000));
      const Group second = Group::process(name, r, 3, milliseconds(10000));  // while the first one lives
      first.transport()->all_gather(i);
      second.transport()->all_gather(i);
    }
    return "good";
  });
  for (const Ended& one : ended) EXPECT_EQ(one.text, "good");
  EXPECT_TRUE(left_in_shared_memory().empty());
}

TEST(Processes, WrongArgumentsAreNamed) {
  auto refused = [](const std::string& name, int rank, int ranks) {
    const Outcome outcome = outcome_of([&] { Group::process(name, rank, ranks, milliseconds(100)); });
    EXPECT_EQ(outcome.status, Status::invalid_argument) << outcome.text;
    return outcome.text;
  };
  EXPECT_NE(refused("", 0, 2).find("name: got \"\""), std::string::npos);
  EXPECT_NE(refused("a/b", 0, 2).find("name: got \"a/b\""), std::string::npos);
  EXPECT_NE(refused("fine", 2, 2).find("rank: got 2"), std::string::npos);
  EXPECT_NE(refused("fine", -1, 2).find("rank: got -1"), std::string::npos);
  EXPECT_NE(refused("fine", 0, 0).find("ranks: got 0"), std::string::npos);
  EXPECT_NE(refused("fine", 0, 65).find("ranks: got 65"), std::string::npos);
  EXPECT_EQ(Group::process("alone", 0, 1).size(), 1);

  const std::string name = fresh_group_name();
  const auto ended = fork_ranks(2, [&](int r) -> std::string {
    return outcome_of([&] { Group::process(name, r, r == 0 ? 2 : 3, milliseconds(500)); }).text;
  });
  EXPECT_NE(ended[1].text.find("ranks: got 3, accepted is the number that rank 0 gave, 2"), std::string::npos)
      << ended[1].text;
  EXPECT_NE(ended[0].text.find("rank 1"), std::string::npos) << ended[0].text;
  const std::string twice = fresh_group_name();
  const auto both = fork_ranks(3, [&](int r) -> std::string {
    return outcome_of([&] { Group::process(twice, r == 0 ? 0 : 1, 3, milliseconds(500)); }).text;
  });
  const bool found = both[1].text.find("rank: got 1, which another process") != std::string::npos ||
                     both[2].text.find("rank: got 1, which another process") != std::string::npos;
  EXPECT_TRUE(found) << both[1].text << "\n" << both[2].text;
  EXPECT_TRUE(left_in_shared_memory().empty());
}

TEST(Processes, AnIdBringsRanksTogether) {
  // As an ncclUniqueId, most of which is zeros.
  std::array<std::byte, 128> id{}, other{};
  std::random_device random;
  for (int i = 0; i < 30; ++i) other[i] = id[i] = static_cast<std::byte>(random());
  other[127] = std::byte{1};
  const auto ended = fork_ranks(4, [&](int r) -> std::string {
    for (int i = 0; i < 10; ++i) {  // two groups of two at once, by ids that differ in one bit; each id serves again
      const Group group = Group::process_by_id(r < 2 ? id.data() : other.data(), id.size(), r % 2, 2, milliseconds(10000));
      const auto all = group.transport()->all_gather(r);
      if (all != std::vector<std::int64_t>{r / 2 * 2, r / 2 * 2 + 1}) return "mixed up";
    }
    return "good";
  });
  for (const Ended& one : ended) EXPECT_EQ(one.text, "good");

  auto refused = [&](const void* data, std::size_t bytes) {
    const Outcome outcome = outcome_of([&] { Group::process_by_id(data, bytes, 0, 2, milliseconds(100)); });
    EXPECT_EQ(outcome.status, Status::invalid_argument) << outcome.text;
    return outcome.text;
  };
  EXPECT_NE(refused(nullptr, 128).find("id: got none, accepted are 16 to 128 bytes"), std::string::npos);
  EXPECT_NE(refused(id.data(), 8).find("id: got 8 bytes, accepted are 16 to 128 bytes"), std::string::npos);
  EXPECT_NE(refused(id.data(), 129).find("id: got 129 bytes"), std::string::npos);
  EXPECT_EQ(Group::process_by_id(id.data(), id.size(), 0, 1).size(), 1);
  // Errors name what the caller gave, the id, and not the name that was made of it.
  const std::string name = fresh_group_name();
  for (bool by_id : {false, true}) {
    auto set_up = [&](int rank, int limit) {
      return outcome_of([&] {
               by_id ? Group::process_by_id(id.data(), id.size(), rank, 2, milliseconds(limit))
                     : Group::process(name, rank, 2, milliseconds(limit));
             }).text;
    };
    EXPECT_NE(set_up(1, 20).find(by_id ? "the group of this id in the" : "the group of this name, " + name + ", in the"),
              std::string::npos);
    std::string other_text;
    std::atomic<bool> ended{false};
    std::thread other([&] { other_text = set_up(0, 2000), ended = true; });
    std::string taken;
    while (!ended && taken.find("accepted is one that no other group has") == std::string::npos) {
      taken = set_up(0, 1);
    }
    other.join();
    const std::string& refusal = taken.find("accepted is") == std::string::npos ? other_text : taken;
    EXPECT_EQ(refusal.find((by_id ? "id: got one" : "name: got " + name) + ", which a group has that is being set up"), 0u)
        << refusal;
  }
  // Ids of all lengths: a name of shared memory has what they need.
  std::array<std::byte, 128> full;
  full.fill(std::byte{0xff});
  for (std::size_t bytes = 16; bytes <= 128; bytes += 16) {
    const Outcome alone = outcome_of([&] { Group::process_by_id(full.data(), bytes, 0, 2, milliseconds(20)); });
    EXPECT_NE(alone.text.find("waited 20 ms for rank 1"), std::string::npos) << alone.text;
  }
}

TEST(Processes, RanksOfSeveralHostsAreNamed) {
  const std::string here = Group::place();
  EXPECT_EQ(here, Group::place());
  EXPECT_LT(here.size(), 256u);
  Group::require_one_place({here, here, here}, "ranks");
  Group::require_one_place({"a 1 2", "b 1 2"}, "ranks");  // one machine, whose containers have names of their own
  const Outcome outcome = outcome_of([] { Group::require_one_place({"a 1 2", "a 1 2", "b 3 2", "a 1 4"}, "communicator"); });
  EXPECT_EQ(outcome.status, Status::unsupported);
  EXPECT_NE(outcome.text.find("communicator: its ranks do not share memory (rank 0 on a, rank 2 on b, rank 3 on a)"), std::string::npos)
      << outcome.text;
}

}  // namespace
}  // namespace moelith::test

#endif
