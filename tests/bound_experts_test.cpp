// Experts whose tensors lie apart (Plan::bind): the same bits as stacked ones, and what is refused.
#include <cstring>

#include "moelith/moelith.h"
#include "tests/call.hpp"

namespace moelith {
namespace {

using namespace test;

TEST(BoundExperts, GiveTheBitsOfStackedOnes) {
  Random random(61);
  for (int n = 0; n < 8; ++n) {
    const LayerConfig config = random_config(random, n % 2 ? DataType::bfloat16 : DataType::float32);
    Problem p = random_problem(config, 70, random());
    if (n == 6) p.upstream.y.clear(), p.upstream.z_loss = {1.0};
    RunOptions options;
    if (n % 4 >= 2 && n != 6) options.tokens_of_rank = {40, 30};
    options.wide_gradients = n % 3 != 0;
    if (options.wide_gradients && n % 2) options.preset = 1.0, options.backwards = 2;
    const Results stacked = run(p, options);
    options.bound = true;
    expect_identical(run(p, options), stacked, "configuration " + std::to_string(n));
    options.frozen = {"d_down_proj", "d_gate_up_bias"};
    expect_identical(run(p, options), stacked, "some left out, configuration " + std::to_string(n));
  }
}

TEST(LayerViews, GapsBetweenRowsAndNarrowLogitsGiveTheSameBits) {
  Random random(67);
  for (int n = 0; n < 6; ++n) {
    LayerConfig config = random_config(random, DataType::bfloat16);
    Problem p = random_problem(config, 70, random());
    round_logits(p);
    if (n == 5) bring_routes(p, 0.2, random());
    RunOptions options;
    const Results plain = run(p, options);
    options.row_gap = 8;
    options.logits_gap = 3;
    options.wide_ids = true;
    expect_identical(run(p, options), plain, "gaps");
    options.narrow_logits = true;
    const Results narrow = run(p, options);
    expect_identical(narrow, plain, "narrow logits", {"d_router_logits", "d_shared_gate_logits"});
    expect_right(p, narrow, options, "narrow logits");
  }
}

template <class F>
void expect_refusal(const std::string& part, F&& f) {
  try {
    f();
    FAIL() << "nothing thrown; expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(BoundExperts, WrongOnesAreRefused) {
  LayerConfig c;
  c.hidden_size = 16, c.intermediate_size = 8, c.num_experts = 2, c.top_k = 1;
  PlanOptions plan_options;
  plan_options.max_tokens = 4;
  const Plan plan = Plan::create(c, plan_options), other = Plan::create(c, plan_options);
  Tensor gate_up(c.dtype, {2, 16, 16}), down(c.dtype, {2, 16, 8}), x(c.dtype, {4, 16}), y(c.dtype, {4, 16}),
      logits(DataType::float32, {4, 2});
  const std::vector<double> zeros(512, 0.0);
  for (Tensor* t : {&gate_up, &down, &x, &logits}) t->set(zeros.data());
  auto* a = static_cast<numerics::bfloat16*>(gate_up.view.data);
  auto* b = static_cast<numerics::bfloat16*>(down.view.data);
  ExpertPointers good;
  good.gate_up_proj = {a, a + 256};
  good.down_proj = {b, b + 128};
  const auto changed = [&](auto change) {
    ExpertPointers pointers = good;
    change(pointers);
    return pointers;
  };
  expect_refusal("gate_up_proj: got 1 pointers, accepted is 2", [&] { plan.bind(changed([](auto& p) { p.gate_up_proj.pop_back(); })); });
  expect_refusal("down_proj[1]: got a null pointer", [&] { plan.bind(changed([](auto& p) { p.down_proj[1] = nullptr; })); });
  expect_refusal("down_proj[0]: got memory that is not aligned", [&] {
    plan.bind(changed([](auto& p) { p.down_proj[0] = static_cast<std::byte*>(p.down_proj[0]) + 1; }));
  });
  expect_refusal("down_bias: got 2 pointers, accepted is none", [&] { plan.bind(changed([](auto& p) { p.down_bias = p.down_proj; })); });
  expect_refusal("dtype of the pointers: got int32", [&] { plan.bind(changed([](auto& p) { p.dtype = DataType::int32; })); });
  expect_refusal("at least one list", [&] { plan.bind(ExpertPointers{}); });

  Inputs in;
  in.x = x.view, in.router_logits = logits.view;
  in.weights.bound = plan.bind(good);
  Outputs out;
  out.y = y.view;
  const auto sizes = plan.buffer_sizes(4);
  const Buffer saved(sizes.saved), workspace(sizes.workspace);
  const auto forward = [&](const Plan& with, const Inputs& inputs) {
    with.forward(inputs, out, saved.data(), workspace.data());
  };
  forward(plan, in);
  expect_refusal("weights.bound: got tensors that another plan has bound", [&] { forward(other, in); });
  Inputs both = in;
  both.weights.down_proj = down.view;
  expect_refusal("down_proj: got bfloat16[2, 16, 8], accepted is nothing, since weights.bound has it", [&] { forward(plan, both); });
  Inputs wide = in;
  wide.weights.bound = plan.bind(changed([](auto& p) { p.dtype = DataType::float32; }));
  expect_refusal("gate_up_proj: got float32, accepted is bfloat16", [&] { forward(plan, wide); });
  Inputs half = in;  // each tensor either here or there
  half.weights.bound = plan.bind(changed([](auto& p) { p.down_proj.clear(); }));
  expect_refusal("down_proj: got nothing", [&] { forward(plan, half); });
  half.weights.down_proj = down.view;
  forward(plan, half);

  OutputGradients up;
  up.y = x.view;
  InputGradients grad;
  Tensor d_gate_up(c.dtype, {2, 16, 16}), d_down(c.dtype, {2, 16, 8});
  auto* da = static_cast<numerics::bfloat16*>(d_gate_up.view.data);
  auto* db = static_cast<numerics::bfloat16*>(d_down.view.data);
  ExpertPointers apart;
  apart.gate_up_proj = {da, da + 256};
  apart.down_proj = {db, db + 128};
  grad.weights.bound = plan.bind(apart);
  grad.weights.down_proj.accumulate = true;
  const auto backward = [&] { plan.backward(in, saved.data(), up, grad, workspace.data()); };
  expect_refusal("d_down_proj (accumulated): got bfloat16, accepted is float32", backward);
  grad.weights.down_proj = {down.view, false};
  expect_refusal("d_down_proj: got bfloat16[2, 16, 8], accepted is nothing", backward);
  grad.weights.down_proj = {};
  grad.weights.bound = other.bind(good);
  expect_refusal("d_weights.bound: got tensors that another plan has bound", backward);

  // Memory of a weight as its own gradient: of one expert, stacked where the weights are apart, and both stacked.
  apart.down_proj[1] = b + 128;
  grad.weights.bound = plan.bind(apart);
  expect_refusal("d_down_proj: got the memory of the weight itself, accepted is memory of its own", backward);
  grad.weights.bound = nullptr;
  grad.weights.gate_up_proj = {gate_up.view, false};
  expect_refusal("d_gate_up_proj: got the memory of the weight itself", backward);
  LayerConfig wide_config = c;
  wide_config.dtype = DataType::float32;
  wide_config.shared_experts = {{8, false}};
  const Plan wide_plan = Plan::create(wide_config, plan_options);
  const auto p = random_problem(wide_config, 4, 3);
  Call call(p, wide_plan, 0, 4);
  call.forward();
  call.grad.weights.down_proj = {call.in.weights.down_proj, true};
  expect_refusal("d_down_proj: got the memory of the weight itself", [&] { call.backward(); });
  call.grad.weights.down_proj = {};
  call.grad.weights.shared.resize(1);
  call.grad.weights.shared[0].gate_up_proj = {call.in.weights.shared[0].gate_up_proj, true};
  expect_refusal("d_shared.0.gate_up_proj: got the memory of the weight itself", [&] { call.backward(); });
  call.grad.weights.shared.clear();
  call.backward();
}

TEST(BoundExperts, ThroughTheCInterface) {
  moelith_layer_config_t config;
  ASSERT_EQ(moelith_layer_config_init(&config, sizeof config), MOELITH_OK);
  config.hidden_size = 16, config.intermediate_size = 8, config.num_experts = 3, config.top_k = 2, config.dtype = MOELITH_FLOAT32;
  moelith_plan_options_t options{};
  options.struct_size = sizeof options;
  options.max_tokens = 5;
  moelith_plan_t plan = nullptr;
  ASSERT_EQ(moelith_plan_create(&config, &options, &plan), MOELITH_OK) << moelith_last_error();
  Random random(71);
  const auto tensor = [&](std::initializer_list<std::int64_t> shape) {
    Tensor t(DataType::float32, shape);
    t.set(normal(random, static_cast<std::size_t>(t.view.numel()), 0.5, DataType::float32).data());
    return t;
  };
  const auto c_view = [](const Tensor& t) {
    moelith_tensor_t view;
    EXPECT_EQ(moelith_tensor_init(&view, t.view.data, MOELITH_FLOAT32, t.view.rank, t.view.shape.data()), MOELITH_OK);
    return view;
  };
  const Tensor x = tensor({5, 16}), logits = tensor({5, 3}), gate_up = tensor({3, 16, 16}), down = tensor({3, 16, 8}), dy = tensor({5, 16});
  moelith_buffer_sizes_t sizes{};
  sizes.struct_size = sizeof sizes;
  ASSERT_EQ(moelith_plan_buffer_sizes(plan, 5, &sizes), MOELITH_OK);
  const Buffer saved(sizes.saved), workspace(sizes.workspace);
  const auto pointers_to = [](const Tensor& t) {
    std::vector<void*> list;
    for (std::int64_t e = 0; e < 3; ++e) list.push_back(static_cast<float*>(t.view.data) + e * t.view.stride[0]);
    return list;
  };
  std::vector<std::vector<double>> results[2];
  for (const bool bound : {false, true}) {
    const Tensor y = tensor({5, 16}), dx = tensor({5, 16}), d_gate_up = tensor({3, 16, 16}), d_down = tensor({3, 16, 8});
    moelith_inputs_t in{};
    in.struct_size = sizeof in;
    in.x = c_view(x), in.router_logits = c_view(logits);
    moelith_input_gradients_t grad{};
    grad.struct_size = sizeof grad;
    grad.x = c_view(dx);
    moelith_bound_experts_t weights = nullptr, gradients = nullptr;
    if (bound) {
      const auto bind = [&](const Tensor& a, const Tensor& b, moelith_bound_experts_t* made) {
        const auto list_a = pointers_to(a), list_b = pointers_to(b);
        moelith_expert_pointers_t pointers{};
        pointers.struct_size = sizeof pointers;
        pointers.dtype = MOELITH_FLOAT32, pointers.count = 3;
        pointers.gate_up_proj = list_a.data(), pointers.down_proj = list_b.data();
        return moelith_plan_bind(plan, &pointers, made);
      };
      ASSERT_EQ(bind(gate_up, down, &weights), MOELITH_OK) << moelith_last_error();
      ASSERT_EQ(bind(d_gate_up, d_down, &gradients), MOELITH_OK) << moelith_last_error();
      in.bound = weights, grad.bound = gradients;
    } else {
      // A caller of the first header, whose structs end before `bound`.
      in.struct_size = offsetof(moelith_inputs_t, bound), grad.struct_size = offsetof(moelith_input_gradients_t, bound);
      in.gate_up_proj = c_view(gate_up), in.down_proj = c_view(down);
      grad.gate_up_proj.tensor = c_view(d_gate_up), grad.down_proj.tensor = c_view(d_down);
    }
    moelith_outputs_t out{};
    out.struct_size = sizeof out;
    out.y = c_view(y);
    moelith_output_gradients_t up{};
    up.struct_size = sizeof up;
    up.y = c_view(dy);
    ASSERT_EQ(moelith_forward(plan, &in, &out, saved.data(), workspace.data(), nullptr), MOELITH_OK) << moelith_last_error();
    ASSERT_EQ(moelith_backward(plan, &in, saved.data(), &up, &grad, workspace.data(), nullptr), MOELITH_OK) << moelith_last_error();
    for (const Tensor* t : {&y, &dx, &d_gate_up, &d_down}) results[bound].push_back(t->get());
    moelith_bound_experts_destroy(weights);
    moelith_bound_experts_destroy(gradients);
  }
  EXPECT_EQ(results[0], results[1]);
  moelith_expert_pointers_t bad{};
  bad.struct_size = sizeof bad;
  bad.dtype = MOELITH_FLOAT32, bad.count = 2;
  const auto list = pointers_to(down);
  bad.down_proj = list.data();
  moelith_bound_experts_t none = nullptr;
  EXPECT_EQ(moelith_plan_bind(plan, &bad, &none), MOELITH_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moelith_last_error()).find("down_proj: got 2 pointers"), std::string::npos) << moelith_last_error();
  EXPECT_EQ(none, nullptr);
  moelith_plan_destroy(plan);
}

}  // namespace
}  // namespace moelith
