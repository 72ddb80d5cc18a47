// What a wrong call does: to the rank that makes it, to the others of its group, and to what was written before.
#include <chrono>

#include "tests/call.hpp"
#include "tests/outcome.hpp"

namespace moelith {
namespace {

using namespace test;
using std::chrono::milliseconds;

LayerConfig small_config() {
  LayerConfig c;
  c.hidden_size = 16;
  c.intermediate_size = 24;
  c.num_experts = 6;
  c.top_k = 2;
  c.dtype = DataType::float32;
  return c;
}

bool is_filled_with_nan_bits(const Buffer& buffer, std::uint64_t bytes) {
  return std::all_of(buffer.data(), buffer.data() + bytes, [](std::byte b) { return b == std::byte{0xff}; });
}

// ---- an error on one rank -------------------------------------------------------------------------------------------

constexpr std::int64_t tokens_of_rank = 10;
constexpr int ranks = 3, wrong_rank = 1;

// Three ranks make a plan, a forward and a backward; `spoil` puts a fault into one rank's call, whose part of the passes
// before it has gone well. The limit is far away: whoever ends before it has been told.
std::vector<Outcome> with_a_wrong_rank(const Problem& p, bool in_backward, std::uint64_t shuffle_seed,
                                       const std::function<void(Call&)>& spoil) {
  auto groups = Group::threads(ranks);
  std::vector<Outcome> outcomes(ranks);
  on_threads(ranks, [&](int r) {
    PlanOptions options;
    options.max_tokens = tokens_of_rank;
    options.workers = 2;
    options.shuffle_seed = shuffle_seed;
    options.group = groups[r];
    options.group.set_timeout(std::chrono::minutes(10));
    const Plan plan = Plan::create(p.config, options);
    Call call(p, plan, r * tokens_of_rank, tokens_of_rank);
    outcomes[r] = outcome_of([&] {
      if (in_backward) call.forward();  // which another rank may still be in when the wrong one is done with it
      if (r == wrong_rank) spoil(call);
      in_backward ? call.backward() : call.forward();
    });
    // The group is over for everybody, each call saying why.
    const Outcome again = outcome_of([&] { call.forward(); });
    if (outcomes[r].status == Status::ok || again.status != Status::group_failed) outcomes[r] = again;
  });
  return outcomes;
}

TEST(AWrongRank, EndsTheCallsOfTheOthersAtOnce) {
  Problem p = random_problem(small_config(), ranks * tokens_of_rank, 3);
  bring_routes(p, 0.1, 4);
  struct Fault {
    bool in_backward;
    std::string text;  // of the error
    std::function<void(Call&)> put;
  };
  std::int32_t too_many = 11;
  const std::vector<Fault> faults{
      {false, "y: got float64[10, 16]", [](Call& c) { c.out.y.dtype = DataType::float64; }},
      {false, "topk_ids[3, 1] is 6", [](Call& c) { static_cast<std::int32_t*>(c.in.topk_ids.data)[7] = 6; }},
      {false, "num_valid_tokens: got 11", [&](Call& c) { c.in.num_valid_tokens = {&too_many, DataType::int32, {1}}; }},
      {true, "dx: got float32[10, 15]", [](Call& c) { c.grad.x.shape[1] = 15; }},
      {true, "saved: got a buffer that no forward has filled", [](Call& c) { std::memset(c.saved.data(), 0, 64); }},
  };
  for (const Fault& fault : faults) {
    for (const std::uint64_t seed : {0, 5}) {
      const auto begin = std::chrono::steady_clock::now();
      const auto outcomes = with_a_wrong_rank(p, fault.in_backward, seed, fault.put);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(5));
      for (int r = 0; r < ranks; ++r) {
        SCOPED_TRACE(fault.text + ", rank " + std::to_string(r));
        EXPECT_EQ(outcomes[r].status, r == wrong_rank ? Status::invalid_argument : Status::group_failed)
            << outcomes[r].text;
        EXPECT_NE(outcomes[r].text.find(fault.text), std::string::npos) << outcomes[r].text;
        EXPECT_TRUE(r == wrong_rank || outcomes[r].text.find("rank 1: ") != std::string::npos) << outcomes[r].text;
      }
    }
  }
  // A fresh group of the same threads' process is none the worse.
  RunOptions options;
  options.tokens_of_rank.assign(ranks, tokens_of_rank);
  expect_right(p, run(p, options), options, "a fresh group");
}

TEST(AWrongRank, EndsTheMakingOfAPlan) {
  auto groups = Group::threads(2);
  std::vector<Outcome> outcomes(2);
  on_threads(2, [&](int r) {
    LayerConfig c = small_config();
    if (r == 0) c.top_k = 7;
    PlanOptions options;
    options.group = groups[r];
    outcomes[r] = outcome_of([&] { Plan::create(c, options); });
  });
  EXPECT_EQ(outcomes[0].status, Status::invalid_argument);
  EXPECT_EQ(outcomes[1].status, Status::group_failed);
  EXPECT_NE(outcomes[1].text.find("rank 0: top_k is 7"), std::string::npos) << outcomes[1].text;
}

TEST(AWrongRank, MaySayThatItWillNotCome) {
  auto groups = Group::threads(2);
  Outcome other;
  on_threads(2, [&](int r) {
    PlanOptions options;
    options.group = groups[r];
    if (r == 1) {
      groups[1].fail("its data ran out");
    } else {
      other = outcome_of([&] { Plan::create(small_config(), options); });
    }
  });
  EXPECT_EQ(other.status, Status::group_failed);
  EXPECT_NE(other.text.find("rank 1: its data ran out"), std::string::npos) << other.text;
  const Group single = Group::single();
  single.fail("nobody to tell");
  PlanOptions options;
  options.group = single;
  Plan::create(small_config(), options);
}

// ---- nothing is written ---------------------------------------------------------------------------------------------

TEST(ARefusedForward, LeavesEverythingAsItWas) {
  LayerConfig c = small_config();
  c.router.capacity_factor = 0.5;
  Problem p = random_problem(c, tokens_of_rank, 5);
  bring_routes(p, 0.1, 6);
  PlanOptions options;
  options.max_tokens = tokens_of_rank;
  options.workers = 2;
  const Plan plan = Plan::create(c, options);
  std::int32_t negative = -1;
  for (int fault = 0; fault < 2; ++fault) {
    Call call(p, plan, 0, tokens_of_rank);
    if (fault == 0) {
      static_cast<std::int32_t*>(call.in.topk_ids.data)[tokens_of_rank * 2 - 1] = -2;  // the last one looked at
    } else {
      call.in.num_valid_tokens = {&negative, DataType::int32, {1}};
    }
    const auto sizes = plan.buffer_sizes(tokens_of_rank);
    const Buffer workspace(sizes.workspace);
    EXPECT_EQ(outcome_of([&] { plan.forward(call.in, call.out, call.saved.data(), workspace.data()); }).status,
              Status::invalid_argument);
    EXPECT_TRUE(is_filled_with_nan_bits(call.saved, sizes.saved));
    EXPECT_TRUE(is_filled_with_nan_bits(workspace, sizes.workspace));
    for (double v : call.get("y")) ASSERT_TRUE(std::isnan(v));
  }
}

// ---- the saved buffer of another forward ----------------------------------------------------------------------------

TEST(Saved, OfAnotherForwardIsRefused) {
  const LayerConfig c = small_config();
  const Problem p = random_problem(c, 2 * tokens_of_rank, 7);
  PlanOptions options;
  options.max_tokens = 2 * tokens_of_rank;
  options.workers = 1;
  const Plan plan = Plan::create(c, options);
  auto refusal = [](Call& call) {
    const std::vector<double> before = call.get("d_gate_up_proj");
    const Outcome outcome = outcome_of([&] { call.backward(); });
    EXPECT_EQ(outcome.status, Status::invalid_argument) << outcome.text;
    for (double v : call.get("d_gate_up_proj")) EXPECT_TRUE(std::isnan(v));
    return outcome.text;
  };

  Call never(p, plan, 0, tokens_of_rank);
  EXPECT_NE(refusal(never).find("saved: got a buffer that no forward has filled"), std::string::npos);

  // As many bytes or more, but of 10 tokens instead of 20.
  Call shorter(p, plan, 0, tokens_of_rank), whole(p, plan, 0, 2 * tokens_of_rank);
  whole.forward();
  shorter.forward();
  std::swap(shorter.saved, whole.saved);
  const std::string text = refusal(shorter);
  EXPECT_NE(text.find("a forward with 20 tokens"), std::string::npos) << text;
  EXPECT_NE(text.find("as many as x has here, 10"), std::string::npos) << text;

  // A forward of a layer whose buffers are as large.
  LayerConfig other_config = c;
  other_config.activation.kind = ActivationKind::geglu_erf;
  const Plan other_plan = Plan::create(other_config, options);
  Call other(p, other_plan, 0, tokens_of_rank);
  other.forward();
  std::swap(shorter.saved, other.saved);
  EXPECT_NE(refusal(shorter).find("another plan"), std::string::npos);

  // Of the caller's routes instead of logits.
  Problem brought = p;
  bring_routes(brought, 0.1, 8);
  Call caller(brought, plan, 0, tokens_of_rank), logits(p, plan, 0, tokens_of_rank);
  caller.forward();
  std::swap(logits.saved, caller.saved);
  EXPECT_NE(refusal(logits).find("a forward that had topk_ids"), std::string::npos);

  Call again(p, plan, 0, tokens_of_rank);
  again.forward();
  again.backward();
  again.backward();
}

// What does not decide how the buffer is laid out may differ.
TEST(Saved, OfAnEqualPlanIsTaken) {
  const LayerConfig c = small_config();
  const Problem p = random_problem(c, tokens_of_rank, 9);
  const Results expected = run(p, {});
  PlanOptions options;
  options.max_tokens = tokens_of_rank;
  options.workers = 1;
  const Plan first = Plan::create(c, options);
  options.max_tokens = 40;
  options.workers = 2;
  options.tile_columns = 64;
  const Plan second = Plan::create(c, options);
  Call call(p, first, 0, tokens_of_rank), by_second(p, second, 0, tokens_of_rank);
  call.forward();
  std::swap(call.saved, by_second.saved);
  by_second.backward();
  EXPECT_EQ(by_second.get("dx"), expected.at("dx"));
  EXPECT_EQ(by_second.get("d_gate_up_proj"), expected.at("d_gate_up_proj"));
}

TEST(Timeline, IsRefusedWhereThePlanWasMadeWithoutIt) {
  LayerConfig config;
  config.hidden_size = config.intermediate_size = 16;
  config.num_experts = 2;
  config.top_k = 1;
  PlanOptions options;
  const Outcome without = outcome_of([&] { (void)Plan::create(config, options).timeline(); });
  EXPECT_EQ(without.status, Status::invalid_argument);
  EXPECT_NE(without.text.find("options.timeline"), std::string::npos) << without.text;
  options.timeline = true;
  EXPECT_TRUE(Plan::create(config, options).timeline().empty());  // no pass has run
}

}  // namespace
}  // namespace moelith
