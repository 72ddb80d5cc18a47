"""Configurations of Hugging Face transformers: what the reader of config.json (src/layer/hugging_face_config.cpp) makes
of them, against the blocks that transformers itself builds, fields left out and given.

Expectations are read off the built block (on the device meta): shapes of its parameters, attributes of its router.
"""

import importlib
import json

import pytest
import torch
import transformers

import moelith
from moelith import convert

# model_type -> block class, names of sizes that must be given, sizes that differ from transformers' own defaults
EXPERTS = ("hidden_size", "num_experts_per_tok")
MODELS = {
    "mixtral": ("MixtralSparseMoeBlock", ("intermediate_size", "num_local_experts"), {}),
    "olmoe": ("OlmoeSparseMoeBlock", ("intermediate_size", "num_experts"), {}),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        ("moe_intermediate_size", "num_experts", "shared_expert_intermediate_size"),
        {},
    ),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", ("moe_intermediate_size", "num_experts"), {}),
    "qwen3_next": (
        "Qwen3NextSparseMoeBlock",
        ("moe_intermediate_size", "num_experts", "shared_expert_intermediate_size"),
        {},
    ),
    "gpt_oss": ("GptOssMLP", ("intermediate_size", "num_local_experts"), {}),
    # Its class has no default for the number of experts a token, and a width that no layer here takes.
    "deepseek_v2": (
        "DeepseekV2Moe",
        ("moe_intermediate_size", "n_routed_experts"),
        {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    ),
    "deepseek_v3": ("DeepseekV3MoE", ("moe_intermediate_size", "n_routed_experts"), {}),
    "glm4_moe": ("Glm4MoeMoE", ("moe_intermediate_size", "n_routed_experts"), {}),
}
# Fields beside the sizes that change what a block computes, each with a value that is not the default.
GROUPS = {"n_group": 16, "topk_group": 2}
CHANGES = {
    "mixtral": [{"hidden_act": "gelu"}, {"num_local_experts": 24}],
    "olmoe": [{"norm_topk_prob": True}, {"hidden_act": "gelu_pytorch_tanh"}],
    "qwen2_moe": [{"norm_topk_prob": True}, {"shared_expert_intermediate_size": 64}],
    "qwen3_moe": [{"norm_topk_prob": True}, {"num_experts": 96}],
    "qwen3_next": [{"norm_topk_prob": False}, {"shared_expert_intermediate_size": 64}],
    "gpt_oss": [{"num_local_experts": 32}],
    "deepseek_v2": [
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
        {"routed_scaling_factor": 16.0},
        {"n_shared_experts": 1},
    ],
    "deepseek_v3": [GROUPS, {"norm_topk_prob": False}, {"n_shared_experts": 3}, {"routed_scaling_factor": 1.0}],
    "glm4_moe": [GROUPS, {"norm_topk_prob": False}, {"n_shared_experts": 2}, {"routed_scaling_factor": 2.5}],
}


def layer_of_block(model_type, config):
    """The LayerConfig that the block built by transformers shows."""
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    with torch.device("meta"):
        block = getattr(modeling, MODELS[model_type][0])(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}
    router = block.router if hasattr(block, "router") else block.gate
    experts, rows, columns = shapes["experts.gate_up_proj"]
    if model_type == "gpt_oss":
        rows, columns = columns, rows
        activation = moelith.Activation("swiglu_clamped", limit=block.experts.limit, alpha=block.experts.alpha)
    else:
        kinds = {"SiLUActivation": "swiglu", "GELUActivation": "geglu_erf", "GELUTanh": "geglu_tanh"}
        activation = moelith.Activation(kinds[type(block.experts.act_fn).__name__])
    bias = {f"gate.{name}" for name in ("e_score_correction_bias",)} & set(shapes)
    kind = "topk_softmax" if model_type == "gpt_oss" else "sigmoid" if bias else "softmax_topk"
    grouped = getattr(router, "topk_method", "") == "group_limited_greedy" or kind == "sigmoid"
    more = {"group_score_size": 1} if getattr(router, "topk_method", "") == "group_limited_greedy" else {}
    shared = [shape[0] for name, shape in shapes.items() if name.startswith("shared") and "gate_proj" in name]
    return moelith.LayerConfig(
        hidden_size=columns,
        intermediate_size=rows // 2,
        num_experts=experts,
        top_k=router.top_k,
        activation=activation,
        gate_up_bias="experts.gate_up_proj_bias" in shapes,
        down_bias="experts.down_proj_bias" in shapes,
        shared_experts=[moelith.SharedExpert(width, gated="shared_expert_gate.weight" in shapes) for width in shared],
        router=moelith.Router(
            kind,
            renormalize=getattr(router, "norm_topk_prob", model_type == "mixtral"),
            scaling_factor=getattr(router, "routed_scaling_factor", 1.0),
            selection_bias=bool(bias),
            num_groups=router.num_group if grouped else 1,
            top_groups=router.topk_group if grouped else 1,
            **more,
        ),
    )


def config_of(model_type, **fields):
    return transformers.AutoConfig.for_model(model_type, **MODELS[model_type][2] | fields)


def test_every_model_type_is_compared():
    assert set(convert.MODEL_TYPES) == {*MODELS, "kimi_k2"}  # Kimi K2 is loaded as deepseek_v3, with its own numbers


@pytest.mark.parametrize("model_type", MODELS)
def test_fields_left_out_are_transformers_own_defaults(model_type):
    config = config_of(model_type)
    expected = layer_of_block(model_type, config)
    fields = config.to_dict()
    sizes = {"model_type": model_type} | {name: getattr(config, name) for name in (*EXPERTS, *MODELS[model_type][1])}
    assert convert.layer_config(config) == expected
    assert convert.layer_config(fields) == expected
    assert convert.layer_config(sizes) == expected
    for name in set(fields) & {*GROUPS, "norm_topk_prob", "n_shared_experts", "routed_scaling_factor", "hidden_act"}:
        assert convert.layer_config({key: value for key, value in fields.items() if key != name}) == expected, name
    losses = convert.layer_config(sizes, aux_loss=True).router
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    assert losses.aux_loss_coefficient == coefficient * config.num_experts_per_tok
    assert losses.aux_loss == ("batch" if coefficient else "none")
    if model_type == "deepseek_v3":
        assert convert.layer_config(sizes | {"model_type": "kimi_k2"}) == expected


@pytest.mark.parametrize(
    "model_type, change", [(name, change) for name in MODELS for change in CHANGES[name]], ids=lambda value: str(value)
)
def test_fields_that_are_given(model_type, change):
    config = config_of(model_type, **change)
    expected = layer_of_block(model_type, config)
    assert convert.layer_config(config) == expected
    assert expected != layer_of_block(model_type, config_of(model_type))


@pytest.mark.parametrize("model_type", MODELS)
def test_sizes_must_be_given(model_type):
    config = config_of(model_type)
    sizes = {name: getattr(config, name) for name in (*EXPERTS, *MODELS[model_type][1])}
    for name in sizes:
        left = {"model_type": model_type} | {key: value for key, value in sizes.items() if key != name}
        with pytest.raises(ValueError, match='"(num_experts|num_local_experts|' + name + ')" is missing'):
            convert.layer_config(left)


def test_null_and_what_cannot_be_computed():
    config = config_of("deepseek_v3")
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    layer = convert.layer_config(fields | {"n_shared_experts": None, "n_group": None, "topk_group": None})
    assert layer.shared_experts == () and (layer.router.num_groups, layer.router.top_groups) == (1, 1)
    assert not convert.layer_config(fields | {"norm_topk_prob": None}).router.renormalize
    assert convert.layer_config(fields | {"routed_scaling_factor": None}).router.scaling_factor == 2.5
    with pytest.raises(NotImplementedError, match='"scoring_func" is "softmax"; accepted: sigmoid'):
        convert.layer_config(fields | {"scoring_func": "softmax"})
    older = config_of("deepseek_v2").to_dict()
    with pytest.raises(NotImplementedError, match='"norm_topk_prob" is true'):
        convert.layer_config(older | {"norm_topk_prob": True})
    with pytest.raises(NotImplementedError, match='"mlp_bias" is true'):
        convert.layer_config(older | {"mlp_bias": True})
