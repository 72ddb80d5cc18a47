// The C interface against the C++ one, and its rules for structs, handles and errors. That the header is C is shown by
// examples/c_interface.c, which is compiled as C; random misuse is in tests/fuzz/.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "moelith/layer.hpp"
#include "moelith/moelith.h"
#include "moelith/presets.hpp"

namespace moelith {
namespace {

constexpr std::int64_t tokens = 5, hidden = 16, width = 8, experts = 4, top_k = 2, shared_width = 24;

moelith_layer_config_t c_config() {
  moelith_layer_config_t config;
  EXPECT_EQ(moelith_layer_config_init(&config, sizeof config), MOELITH_OK);
  config.hidden_size = hidden;
  config.intermediate_size = width;
  config.num_experts = experts;
  config.top_k = top_k;
  config.dtype = MOELITH_FLOAT32;
  config.activation = MOELITH_GEGLU_TANH;
  config.down_bias = 1;
  config.num_shared_experts = 1;
  config.shared_experts[0] = {shared_width, 1, 0};
  config.router_kind = MOELITH_SIGMOID;
  config.selection_bias = 1;
  config.renormalize = 1;
  config.scaling_factor = 2.5;
  config.aux_loss = MOELITH_AUX_BATCH;
  config.aux_loss_coefficient = 0.1;
  return config;
}

struct Data {
  explicit Data(std::int64_t size) : values(static_cast<std::size_t>(size)) {
    static std::uint32_t state = 7;
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
    }
  }
  moelith_tensor_t tensor(std::vector<std::int64_t> shape) {
    moelith_tensor_t made;
    EXPECT_EQ(moelith_tensor_init(&made, values.data(), MOELITH_FLOAT32, static_cast<std::int32_t>(shape.size()),
                                  shape.data()),
              MOELITH_OK);
    return made;
  }
  std::vector<float> values;
};

struct Aligned {
  explicit Aligned(std::uint64_t bytes) : memory(bytes + 256) {}
  void* data() {
    const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (256 - at % 256) % 256;
  }
  std::vector<unsigned char> memory;
};

TEST(CInterface, GivesTheBitsOfTheCppInterface) {
  const moelith_layer_config_t config = c_config();
  moelith_plan_options_t options{};
  options.struct_size = sizeof options;
  options.max_tokens = tokens;
  options.workers = 2;
  moelith_plan_t plan = nullptr;
  ASSERT_EQ(moelith_plan_create(&config, &options, &plan), MOELITH_OK) << moelith_last_error();

  Data x(tokens * hidden), logits(tokens * experts), bias(experts), gate(tokens), gate_up(experts * 2 * width * hidden),
      down(experts * hidden * width), down_bias(experts * hidden), shared_gate_up(2 * shared_width * hidden),
      shared_down(hidden * shared_width), shared_bias(hidden), dy(tokens * hidden);
  Data y(tokens * hidden), dx(tokens * hidden), d_gate(tokens), d_shared(hidden * shared_width), aux(1);
  moelith_inputs_t in{};
  in.struct_size = sizeof in;
  in.x = x.tensor({tokens, hidden});
  in.router_logits = logits.tensor({tokens, experts});
  in.selection_bias = bias.tensor({experts});
  in.shared_gate_logits = gate.tensor({tokens, 1});
  in.gate_up_proj = gate_up.tensor({experts, 2 * width, hidden});
  in.down_proj = down.tensor({experts, hidden, width});
  in.down_bias = down_bias.tensor({experts, hidden});
  moelith_shared_weights_t shared{};
  shared.gate_up_proj = shared_gate_up.tensor({2 * shared_width, hidden});
  shared.down_proj = shared_down.tensor({hidden, shared_width});
  shared.down_bias = shared_bias.tensor({hidden});
  in.shared = &shared;
  in.num_shared = 1;
  moelith_outputs_t out{};
  out.struct_size = sizeof out;
  out.y = y.tensor({tokens, hidden});
  out.aux_loss = aux.tensor({1});
  moelith_output_gradients_t up{};
  up.struct_size = sizeof up;
  up.y = dy.tensor({tokens, hidden});
  moelith_input_gradients_t grad{};
  grad.struct_size = sizeof grad;
  grad.x = dx.tensor({tokens, hidden});
  grad.shared_gate_logits = d_gate.tensor({tokens, 1});
  moelith_shared_gradients_t shared_grad{};
  shared_grad.down_proj.tensor = d_shared.tensor({hidden, shared_width});
  grad.shared = &shared_grad;
  grad.num_shared = 1;

  moelith_buffer_sizes_t sizes{};
  sizes.struct_size = sizeof sizes;
  ASSERT_EQ(moelith_plan_buffer_sizes(plan, tokens, &sizes), MOELITH_OK);
  Aligned saved(sizes.saved), workspace(sizes.workspace);
  ASSERT_EQ(moelith_forward(plan, &in, &out, saved.data(), workspace.data(), nullptr), MOELITH_OK)
      << moelith_last_error();
  ASSERT_EQ(moelith_backward(plan, &in, saved.data(), &up, &grad, workspace.data(), nullptr), MOELITH_OK)
      << moelith_last_error();

  LayerConfig same;
  same.hidden_size = hidden;
  same.intermediate_size = width;
  same.num_experts = experts;
  same.top_k = top_k;
  same.dtype = DataType::float32;
  same.activation.kind = ActivationKind::geglu_tanh;
  same.down_bias = true;
  same.shared_experts = {{shared_width, true}};
  same.router.kind = RouterKind::sigmoid;
  same.router.selection_bias = same.router.renormalize = true;
  same.router.scaling_factor = 2.5;
  same.router.aux_loss = AuxLossKind::batch;
  same.router.aux_loss_coefficient = 0.1;
  PlanOptions same_options;
  same_options.max_tokens = tokens;
  same_options.workers = 2;
  const Plan cpp = Plan::create(same, same_options);
  EXPECT_EQ(cpp.buffer_sizes(tokens).saved, sizes.saved);
  EXPECT_EQ(cpp.buffer_sizes(tokens).workspace, sizes.workspace);
  const auto view = [](Data& data, std::initializer_list<std::int64_t> shape) {
    return TensorView(data.values.data(), DataType::float32, shape);
  };
  Data y2(tokens * hidden), dx2(tokens * hidden), d_gate2(tokens), d_shared2(hidden * shared_width), aux2(1);
  Inputs inputs;
  inputs.x = view(x, {tokens, hidden});
  inputs.router_logits = view(logits, {tokens, experts});
  inputs.selection_bias = view(bias, {experts});
  inputs.shared_gate_logits = view(gate, {tokens, 1});
  inputs.weights.gate_up_proj = view(gate_up, {experts, 2 * width, hidden});
  inputs.weights.down_proj = view(down, {experts, hidden, width});
  inputs.weights.down_bias = view(down_bias, {experts, hidden});
  inputs.weights.shared = {{view(shared_gate_up, {2 * shared_width, hidden}),
                            {},
                            view(shared_down, {hidden, shared_width}),
                            view(shared_bias, {hidden})}};
  Outputs outputs;
  outputs.y = view(y2, {tokens, hidden});
  outputs.aux_loss = view(aux2, {1});
  OutputGradients upstream;
  upstream.y = view(dy, {tokens, hidden});
  InputGradients gradients;
  gradients.x = view(dx2, {tokens, hidden});
  gradients.shared_gate_logits = view(d_gate2, {tokens, 1});
  gradients.weights.shared.resize(1);
  gradients.weights.shared[0].down_proj.tensor = view(d_shared2, {hidden, shared_width});
  cpp.forward(inputs, outputs, saved.data(), workspace.data());
  cpp.backward(inputs, saved.data(), upstream, gradients, workspace.data());
  EXPECT_EQ(y.values, y2.values);
  EXPECT_EQ(aux.values, aux2.values);
  EXPECT_EQ(dx.values, dx2.values);
  EXPECT_EQ(d_gate.values, d_gate2.values);
  EXPECT_EQ(d_shared.values, d_shared2.values);

  std::int32_t count = 0, ids[experts] = {};
  EXPECT_EQ(moelith_plan_local_experts(plan, &count, ids, experts), MOELITH_OK);
  EXPECT_EQ(count, experts);
  EXPECT_EQ(ids[3], 3);
  moelith_layer_config_t back{};
  back.struct_size = sizeof back;
  EXPECT_EQ(moelith_plan_config(plan, &back), MOELITH_OK);
  EXPECT_EQ(back.hidden_size, hidden);
  EXPECT_EQ(back.activation, MOELITH_GEGLU_TANH);
  EXPECT_EQ(back.shared_experts[0].intermediate_size, shared_width);
  EXPECT_EQ(back.scaling_factor, 2.5);
  moelith_plan_destroy(plan);
}

TEST(CInterface, DefaultsAreThoseOfTheCppInterface) {
  moelith_layer_config_t config;
  ASSERT_EQ(moelith_layer_config_init(&config, sizeof config), MOELITH_OK);
  EXPECT_EQ(config.struct_size, sizeof config);
  EXPECT_EQ(config.dtype, MOELITH_BFLOAT16);
  EXPECT_EQ(config.activation_limit, 7.0);
  EXPECT_EQ(config.activation_alpha, 1.702);
  EXPECT_EQ(config.activation_up_offset, 1.0);
  EXPECT_EQ(config.scaling_factor, 1.0);
  EXPECT_EQ(config.num_groups, 1);
  EXPECT_EQ(config.top_groups, 1);
  EXPECT_EQ(config.group_score_size, 2);
}

TEST(CInterface, FailuresHaveAStatusAndAText) {
  moelith_layer_config_t config = c_config();
  config.top_k = 5;
  EXPECT_EQ(moelith_layer_config_validate(&config), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(), "top_k is 5; accepted: 1 to min(num_experts, 32) = 4");

  config = c_config();
  config.activation = 300;  // 44 in a byte
  EXPECT_EQ(moelith_layer_config_validate(&config), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(),
               "activation is 300; accepted: 0 (swiglu), 1 (swiglu_clamped), 2 (geglu_erf), 3 (geglu_tanh), 4 "
               "(relu_squared)");

  config = c_config();
  config.struct_size += 8;
  EXPECT_EQ(moelith_layer_config_validate(&config), MOELITH_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moelith_last_error()).find("config.struct_size is "), std::string::npos);
  EXPECT_NE(std::string(moelith_last_error()).find("newer than this library"), std::string::npos);

  moelith_plan_t plan = nullptr;
  EXPECT_EQ(moelith_plan_create(nullptr, nullptr, &plan), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(), "options is NULL; accepted: a valid pointer");
  moelith_plan_options_t options{};
  options.struct_size = sizeof options;
  EXPECT_EQ(moelith_plan_create(nullptr, &options, &plan), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(), "config is NULL; accepted: a valid pointer");
  EXPECT_EQ(plan, nullptr);
  config = c_config();
  options.receive_capacity_factor = -0.5;
  EXPECT_EQ(moelith_plan_create(&config, &options, &plan), MOELITH_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moelith_last_error()).find("receive_capacity_factor: got -0.5, accepted is 0 ("), std::string::npos);
  // A caller of the header that did not have it yet has whatever there.
  options.struct_size = offsetof(moelith_plan_options_t, receive_capacity_factor);
  EXPECT_EQ(moelith_plan_create(&config, &options, &plan), MOELITH_OK) << moelith_last_error();
  moelith_plan_destroy(plan);
  options.struct_size -= 8;
  EXPECT_EQ(moelith_plan_create(&config, &options, &plan), MOELITH_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moelith_last_error()).find("options.struct_size is "), std::string::npos);
  EXPECT_EQ(moelith_forward(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(), "plan is NULL; accepted: a valid pointer");

  EXPECT_STREQ(moelith_status_name(MOELITH_TIMED_OUT), "timed_out");
  EXPECT_STREQ(moelith_status_name(MOELITH_GROUP_FAILED), "group_failed");
  EXPECT_STREQ(moelith_status_name(static_cast<moelith_status_t>(77)), "unknown status");
}

TEST(CInterface, TheLastErrorBelongsToItsThread) {
  EXPECT_EQ(moelith_layer_config_init(nullptr, 0), MOELITH_INVALID_ARGUMENT);
  const std::string mine = moelith_last_error();
  std::string before, after;
  std::thread([&] {
    before = moelith_last_error();
    (void)moelith_group_create_threads(0, nullptr);
    after = moelith_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_NE(after, "");
  EXPECT_NE(after, mine);
  EXPECT_EQ(moelith_last_error(), mine);
}

TEST(CInterface, TensorInitFillsStridesAndRefusesBadShapes) {
  float data[12];
  moelith_tensor_t tensor;
  const std::int64_t shape[] = {3, 4};
  ASSERT_EQ(moelith_tensor_init(&tensor, data, MOELITH_FLOAT32, 2, shape), MOELITH_OK);
  EXPECT_EQ(tensor.stride[0], 4);
  EXPECT_EQ(tensor.stride[1], 1);
  const std::int64_t negative[] = {3, -4};
  EXPECT_EQ(moelith_tensor_init(&tensor, data, MOELITH_FLOAT32, 2, negative), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(), "tensor.shape[1] is -4; accepted: 0 or more");
  EXPECT_EQ(tensor.shape[1], 4);  // as before
  EXPECT_EQ(moelith_tensor_init(&tensor, data, MOELITH_FLOAT32, 5, shape), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(), "tensor.rank is 5; accepted: 0 to 4");
  EXPECT_EQ(moelith_tensor_init(&tensor, data, 9, 2, shape), MOELITH_INVALID_ARGUMENT);
  EXPECT_EQ(moelith_tensor_init(&tensor, data, MOELITH_FLOAT32, 0, nullptr), MOELITH_OK);
  EXPECT_EQ(tensor.rank, 0);
}

TEST(CInterface, Groups) {
  moelith_group_t groups[3] = {};
  ASSERT_EQ(moelith_group_create_threads(3, groups), MOELITH_OK) << moelith_last_error();
  for (int i = 0; i < 3; ++i) {
    std::int32_t rank = -1, size = -1;
    EXPECT_EQ(moelith_group_rank(groups[i], &rank, &size), MOELITH_OK);
    EXPECT_EQ(rank, i);
    EXPECT_EQ(size, 3);
    EXPECT_EQ(moelith_group_set_timeout(groups[i], 0), MOELITH_INVALID_ARGUMENT);
    EXPECT_EQ(moelith_group_set_timeout(groups[i], 1000), MOELITH_OK);
    moelith_group_destroy(groups[i]);
  }
  const char id[128] = "an id";
  moelith_group_t alone = nullptr;
  EXPECT_EQ(moelith_group_create_process_by_id(nullptr, sizeof id, 0, 1, 1000, &alone), MOELITH_INVALID_ARGUMENT);
  EXPECT_STREQ(moelith_last_error(), "id: got none, accepted are 16 to 128 bytes");
  ASSERT_EQ(moelith_group_create_process_by_id(id, sizeof id, 0, 1, 1000, &alone), MOELITH_OK) << moelith_last_error();
  moelith_group_destroy(alone);
  moelith_group_t single = nullptr;
  ASSERT_EQ(moelith_group_create_single(&single), MOELITH_OK);
  moelith_layer_config_t config = c_config();
  moelith_plan_options_t options{};
  options.struct_size = sizeof options;
  options.group = single;
  moelith_plan_t plan = nullptr;
  ASSERT_EQ(moelith_plan_create(&config, &options, &plan), MOELITH_OK) << moelith_last_error();
  moelith_group_destroy(single);  // the plan stays valid
  std::int32_t count = 0;
  EXPECT_EQ(moelith_plan_local_experts(plan, &count, nullptr, 0), MOELITH_OK);
  EXPECT_EQ(count, experts);
  moelith_plan_destroy(plan);
  moelith_plan_destroy(nullptr);
  moelith_group_destroy(nullptr);
}

TEST(CInterface, LayersOfPublishedModels) {
  int count = 0;
  for (; moelith_preset_name(count) != nullptr; ++count) {
    moelith_layer_config_t config;
    ASSERT_EQ(moelith_layer_config_init(&config, sizeof config), MOELITH_OK);
    ASSERT_EQ(moelith_layer_config_from_preset(&config, moelith_preset_name(count)), MOELITH_OK) << moelith_last_error();
    EXPECT_EQ(moelith_layer_config_validate(&config), MOELITH_OK) << moelith_last_error();
  }
  EXPECT_EQ(count, static_cast<int>(presets().size()));
  EXPECT_EQ(moelith_preset_name(-1), nullptr);

  moelith_layer_config_t config;
  ASSERT_EQ(moelith_layer_config_init(&config, sizeof config), MOELITH_OK);
  ASSERT_EQ(moelith_layer_config_from_preset(&config, "deepseek-v3"), MOELITH_OK) << moelith_last_error();
  EXPECT_EQ(config.hidden_size, 7168);
  EXPECT_EQ(config.num_experts, 256);
  EXPECT_EQ(config.router_kind, MOELITH_SIGMOID);
  EXPECT_EQ(config.num_groups, 8);
  EXPECT_EQ(config.top_groups, 4);
  EXPECT_EQ(config.num_shared_experts, 1);
  EXPECT_EQ(config.shared_experts[0].intermediate_size, 2048);

  const char* json =
      R"({"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2})";
  ASSERT_EQ(moelith_layer_config_from_json(&config, json), MOELITH_OK) << moelith_last_error();
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.num_shared_experts, 0);
  const std::string folder = ::testing::TempDir() + "/moelith_c_interface";
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << json;
  config.hidden_size = 0;
  ASSERT_EQ(moelith_layer_config_from_file(&config, folder.c_str()), MOELITH_OK) << moelith_last_error();
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.top_k, 2);
  std::filesystem::remove_all(folder);

  EXPECT_EQ(moelith_layer_config_from_preset(&config, "gpt-9"), MOELITH_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moelith_last_error()).find("mixtral-8x7b"), std::string::npos) << moelith_last_error();
  EXPECT_EQ(moelith_layer_config_from_json(&config, "{}"), MOELITH_INVALID_ARGUMENT);
  EXPECT_EQ(moelith_layer_config_from_file(&config, folder.c_str()), MOELITH_INVALID_ARGUMENT);
  EXPECT_EQ(moelith_layer_config_from_preset(&config, nullptr), MOELITH_INVALID_ARGUMENT);
  EXPECT_EQ(moelith_layer_config_from_json(nullptr, json), MOELITH_INVALID_ARGUMENT);
  EXPECT_EQ(config.hidden_size, 64);  // as before
}

// What only the C interface can refuse reaches the other ranks too.
TEST(CInterface, AWrongRankEndsTheCallsOfTheOthers) {
  for (const int fault : {0, 1, 2}) {
    moelith_group_t groups[2] = {};
    ASSERT_EQ(moelith_group_create_threads(2, groups), MOELITH_OK) << moelith_last_error();
    moelith_status_t status[2] = {};
    std::string text[2];
    auto call = [&](int rank) {
      const moelith_layer_config_t config = c_config();
      moelith_plan_options_t options{};
      options.struct_size = sizeof options;
      options.group = groups[rank];
      options.device = rank == 1 && fault == 0 ? 7 : 0;
      moelith_plan_t plan = nullptr;
      if (rank == 1 && fault == 2) {
        status[rank] = moelith_group_fail(groups[rank], nullptr);
        return;
      }
      status[rank] = moelith_plan_create(&config, &options, &plan);
      if (status[rank] == MOELITH_OK) {
        if (rank == 0) {  // waits in another collective call
          moelith_plan_t second = nullptr;
          status[rank] = moelith_plan_create(&config, &options, &second);
        } else {
          moelith_inputs_t in{};
          in.struct_size = sizeof in;
          in.x.rank = 9;
          moelith_outputs_t out{};
          out.struct_size = sizeof out;
          status[rank] = moelith_forward(plan, &in, &out, nullptr, nullptr, nullptr);
        }
      }
      text[rank] = moelith_last_error();
      moelith_plan_destroy(plan);
    };
    std::thread other(call, 1);
    call(0);
    other.join();
    EXPECT_EQ(status[0], MOELITH_GROUP_FAILED) << text[0];
    EXPECT_EQ(status[1], fault == 2 ? MOELITH_OK : MOELITH_INVALID_ARGUMENT) << text[1];
    const char* reason[] = {"rank 1: options.device is 7", "rank 1: x.rank is 9", "rank 1: no reason was given"};
    EXPECT_NE(text[0].find(reason[fault]), std::string::npos) << text[0];
    for (const moelith_group_t group : groups) moelith_group_destroy(group);
  }
}

}  // namespace
}  // namespace moelith
