/* The layer through the C interface: forward and backward of a small layer, in C. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "moelith/moelith.h"

enum { tokens = 8, hidden = 16, width = 32, experts = 4, top_k = 2 };

static void must(moelith_status_t status, const char* what) {
  if (status == MOELITH_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, moelith_status_name(status), moelith_last_error());
  exit(1);
}

/* A contiguous float32 tensor of values between -scale and scale. */
static moelith_tensor_t tensor(int32_t rank, const int64_t* shape, float scale) {
  static uint32_t state = 1;
  int64_t count = 1;
  for (int32_t d = 0; d < rank; ++d) count *= shape[d];
  float* data = malloc((size_t)count * sizeof *data);
  if (data == NULL) exit(1);
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = scale * (float)(((double)(state >> 8) / 8388608.0) - 1.0);
  }
  moelith_tensor_t made;
  must(moelith_tensor_init(&made, data, MOELITH_FLOAT32, rank, shape), "tensor");
  return made;
}

static void* buffer(uint64_t bytes) {
  void* memory = aligned_alloc(256, (size_t)((bytes + 255) / 256 * 256 + 256));
  if (memory == NULL) exit(1);
  return memory;
}

int main(void) {
  moelith_layer_config_t config;
  must(moelith_layer_config_init(&config, sizeof config), "config");
  config.hidden_size = hidden;
  config.intermediate_size = width;
  config.num_experts = experts;
  config.top_k = top_k;
  config.dtype = MOELITH_FLOAT32;
  config.router_kind = MOELITH_SOFTMAX_TOPK;
  config.renormalize = 1;

  moelith_plan_options_t options = {.struct_size = sizeof options};
  options.max_tokens = tokens;
  moelith_plan_t plan;
  must(moelith_plan_create(&config, &options, &plan), "plan");
  moelith_buffer_sizes_t sizes = {.struct_size = sizeof sizes};
  must(moelith_plan_buffer_sizes(plan, tokens, &sizes), "buffer sizes");
  void* saved = buffer(sizes.saved);
  void* workspace = buffer(sizes.workspace);

  const int64_t x_shape[] = {tokens, hidden}, logit_shape[] = {tokens, experts};
  const int64_t gate_up_shape[] = {experts, 2 * width, hidden}, down_shape[] = {experts, hidden, width};
  moelith_inputs_t inputs = {.struct_size = sizeof inputs};
  inputs.x = tensor(2, x_shape, 1.0f);
  inputs.router_logits = tensor(2, logit_shape, 1.0f);
  inputs.gate_up_proj = tensor(3, gate_up_shape, 0.5f);
  inputs.down_proj = tensor(3, down_shape, 0.5f);
  moelith_outputs_t outputs = {.struct_size = sizeof outputs};
  outputs.y = tensor(2, x_shape, 0.0f);
  must(moelith_forward(plan, &inputs, &outputs, saved, workspace, NULL), "forward");

  /* The loss sum(y^2) / 2 has the gradient y. */
  moelith_output_gradients_t output_gradients = {.struct_size = sizeof output_gradients};
  output_gradients.y = outputs.y;
  moelith_input_gradients_t gradients = {.struct_size = sizeof gradients};
  gradients.x = tensor(2, x_shape, 0.0f);
  gradients.gate_up_proj.tensor = tensor(3, gate_up_shape, 0.0f);
  must(moelith_backward(plan, &inputs, saved, &output_gradients, &gradients, workspace, NULL), "backward");

  /* Against a finite difference of the loss by one element of x. */
  float* x = inputs.x.data;
  float* y = outputs.y.data;
  const float gradient = ((float*)gradients.x.data)[5], step = 1e-2f;
  double loss[2];
  for (int side = 0; side < 2; ++side) {
    const float kept = x[5];
    x[5] += side == 0 ? step : -step;
    must(moelith_forward(plan, &inputs, &outputs, NULL, workspace, NULL), "forward without gradients");
    x[5] = kept;
    loss[side] = 0.0;
    for (int i = 0; i < tokens * hidden; ++i) loss[side] += 0.5 * (double)y[i] * (double)y[i];
  }
  const double difference = (loss[0] - loss[1]) / (2.0 * (double)step);
  printf("moelith %d: dx[5] = %g, by differences %g\n", (int)moelith_version(), (double)gradient, difference);
  if (!(fabs((double)gradient - difference) <= 1e-2 * fabs(difference) + 1e-3)) return 1;

  /* What does not fit is refused, and the text says what is wrong. */
  inputs.x.shape[1] = hidden + 8;
  if (moelith_forward(plan, &inputs, &outputs, saved, workspace, NULL) != MOELITH_INVALID_ARGUMENT) return 1;
  printf("a wrong shape: %s\n", moelith_last_error());

  moelith_plan_destroy(plan);
  free(inputs.x.data);
  free(inputs.router_logits.data);
  free(inputs.gate_up_proj.data);
  free(inputs.down_proj.data);
  free(outputs.y.data);
  free(gradients.x.data);
  free(gradients.gate_up_proj.tensor.data);
  free(saved);
  free(workspace);
  return 0;
}
