"""The layer against the MoE blocks of Hugging Face transformers, with copied weights: output, router choice, gradients.

Needs the package transformers, at least 5; its blocks run as they are, in float32 on the CPU.
"""

import importlib

import pytest
import torch
import transformers
from layer_cases import error

import moelith
from moelith import convert

TOLERANCE = 1e-5  # relative, of each row
SIZES = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=32)
DEEPSEEK = dict(
    moe_intermediate_size=40, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=2
)
# model_type -> (block class, config)
MODELS = {
    "mixtral": ("MixtralSparseMoeBlock", dict(intermediate_size=96, num_local_experts=8, num_experts_per_tok=2)),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        dict(moe_intermediate_size=40, shared_expert_intermediate_size=72, num_experts=12, num_experts_per_tok=4),
    ),
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock",
        dict(moe_intermediate_size=40, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True),
    ),
    "olmoe": ("OlmoeSparseMoeBlock", dict(intermediate_size=48, num_experts=16, num_experts_per_tok=8)),
    "qwen3_next": (
        "Qwen3NextSparseMoeBlock",
        dict(moe_intermediate_size=40, shared_expert_intermediate_size=72, num_experts=12, num_experts_per_tok=4),
    ),
    "deepseek_v2": (
        "DeepseekV2Moe",
        DEEPSEEK | dict(topk_method="group_limited_greedy", routed_scaling_factor=16.0),
    ),
    "deepseek_v3": ("DeepseekV3MoE", DEEPSEEK | dict(routed_scaling_factor=2.5)),
    "glm4_moe": ("Glm4MoeMoE", DEEPSEEK | dict(n_group=1, topk_group=1, routed_scaling_factor=1.5)),
    "gpt_oss": ("GptOssMLP", dict(intermediate_size=48, num_local_experts=8, num_experts_per_tok=4, head_dim=16)),
}


def make_block(model_type, seed=0):
    """A block with random weights that give outputs of order 1, and its config."""
    block_name, fields = MODELS[model_type]
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **fields)
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    block = getattr(modeling, block_name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in block.state_dict(keep_vars=True).items():
            if "correction_bias" in name:
                scale = 0.1
            elif name.endswith("bias"):
                scale = 0.5
            else:  # fan-in is the last dimension, but for the experts of GPT-OSS
                scale = tensor.shape[-2 if model_type == "gpt_oss" and tensor.dim() == 3 else -1] ** -0.5
            if model_type == "gpt_oss" and "gate_up" in name:
                scale *= 4  # so that a good part is clamped
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return block, config


def router_of(block):
    return block.router if hasattr(block, "router") else block.gate


def run_block(block, x):
    """-> y, router logits, chosen ids, weights"""
    seen = {}
    handle = router_of(block).register_forward_hook(lambda module, inputs, output: seen.update(routing=output))
    y = block(x)
    handle.remove()
    logits, weights, ids = seen["routing"]
    return y[0] if isinstance(y, tuple) else y, logits, ids, weights


def sorted_by_expert(ids, weights):
    order = ids.argsort(dim=-1)
    return ids.gather(1, order), weights.gather(1, order)


@pytest.mark.parametrize("model_type", MODELS)
def test_same_output_choice_and_gradients(model_type):
    block, config = make_block(model_type)
    layer = convert.from_transformers(block, config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 50, 64, generator=generator)
    upstream = torch.randn(x.shape, generator=generator)
    their_x, our_x = x.clone().requires_grad_(), x.clone().requires_grad_()

    their_y, _, their_ids, their_weights = run_block(block, their_x)
    output = layer(our_x, return_routing=True)
    their_ids, their_weights = sorted_by_expert(their_ids, their_weights)
    our_ids, our_weights = sorted_by_expert(output.topk_ids.long(), output.topk_weights)
    assert torch.equal(our_ids, their_ids)
    assert 0.1 < their_y.std() < 10
    errors = {"y": error(output.y, their_y), "topk_weights": error(our_weights, their_weights)}

    their_y.backward(upstream)
    output.y.backward(upstream)
    errors["dx"] = error(our_x.grad, their_x.grad)
    theirs = convert.to_moelith(
        {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in block.state_dict(keep_vars=True).items()},
        model_type,
    )
    ours = dict(layer.named_parameters())
    assert set(theirs) - {"selection_bias"} == set(ours)
    for name, parameter in ours.items():
        assert theirs[name].norm() > 0
        errors[f"d {name}"] = error(parameter.grad, theirs[name])
    assert {name: value for name, value in errors.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("model_type", MODELS)
def test_there_and_back_is_exact(model_type):
    block, config = make_block(model_type)
    layer = convert.from_transformers(block, config)
    back = convert.from_moelith(layer.state_dict(), model_type)
    original = block.state_dict()
    assert set(back) == set(original)
    for name, tensor in original.items():
        assert torch.equal(back[name], tensor), name
    block.load_state_dict(back)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "gpt_oss"])
def test_same_auxiliary_loss(model_type):
    block, config = make_block(model_type)
    config.router_aux_loss_coef = 0.02
    layer = convert.from_transformers(block, config, aux_loss=True)
    x = torch.randn(3, 40, 64)
    _, logits, _, _ = run_block(block, x)
    logits = logits.detach().requires_grad_()
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    top_k = config.num_experts_per_tok
    theirs = 0.02 * modeling.load_balancing_loss_func((logits,), logits.shape[-1], top_k)
    our_logits = logits.detach().requires_grad_()
    ours = layer(x.view(-1, 64), router_logits=our_logits, return_routing=True).aux_loss
    assert error(ours, theirs) < TOLERANCE
    theirs.backward()
    ours.backward()
    assert our_logits.grad.norm() > 0 and error(our_logits.grad, logits.grad) < TOLERANCE


def test_checkpoints_with_one_tensor_for_each_expert():
    """The names of checkpoint files, which transformers stacks while it loads them."""
    block, config = make_block("mixtral")
    fused = convert.to_moelith(block.state_dict(), "mixtral")
    older = {"gate.weight": fused["router.weight"]}
    for expert in range(8):
        gate, up = fused["gate_up_proj"][expert].chunk(2)
        older |= {f"experts.{expert}.w1.weight": gate, f"experts.{expert}.w3.weight": up}
        older[f"experts.{expert}.w2.weight"] = fused["down_proj"][expert]
    converted = convert.to_moelith(older, "mixtral")
    assert all(torch.equal(converted[name], fused[name]) for name in fused)
    del older["experts.5.w3.weight"]
    with pytest.raises(ValueError, match="no up_proj of expert 5 of 8"):
        convert.to_moelith(older, "mixtral")


def test_gpt_oss_layout():
    """[E, H, 2I] with gate and up columns in turn -> [E, 2I, H], rows [gate; up]."""
    columns = torch.arange(4.0)  # g0 u0 g1 u1
    state = {
        "router.weight": torch.zeros(1, 3),
        "router.bias": torch.zeros(1),
        "experts.gate_up_proj": columns + 10 * torch.arange(3.0)[:, None] + torch.zeros(1, 1, 1),
        "experts.gate_up_proj_bias": columns[None],
        "experts.down_proj": torch.zeros(1, 2, 3),
        "experts.down_proj_bias": torch.zeros(1, 3),
    }
    converted = convert.to_moelith(state, "gpt_oss")
    assert converted["gate_up_proj"].tolist() == [[[0, 10, 20], [2, 12, 22], [1, 11, 21], [3, 13, 23]]]
    assert converted["gate_up_bias"].tolist() == [[0, 2, 1, 3]]
    assert converted["down_proj"].shape == (1, 3, 2)


def test_configs_that_are_refused():
    config = {"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32, "num_experts": 8}
    config |= {"num_experts_per_tok": 2}
    assert convert.layer_config(config) == moelith.LayerConfig(64, 32, 8, 2)
    assert convert.layer_config({"model_type": "of_pictures_too", "text_config": config}).num_experts == 8
    for change, pattern in (
        ({"model_type": "llama"}, '"model_type" is "llama"; accepted: mixtral'),
        ({"hidden_act": "relu"}, '"hidden_act" is "relu"; accepted: silu'),
        ({"num_experts": None}, '"num_local_experts" is missing'),
        ({"intermediate_size": 30}, "intermediate_size is 30; accepted: a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=pattern):
            convert.layer_config(config | change)
    with pytest.raises(TypeError, match="config: .*; accepted: a configuration of transformers, or a dict"):
        convert.layer_config("config.json")


def test_entries_that_do_not_fit():
    block, _ = make_block("olmoe")
    state = block.state_dict()
    with pytest.raises(ValueError, match="has no 'experts.down_proj'"):
        convert.to_moelith({k: v for k, v in state.items() if k != "experts.down_proj"}, "olmoe")
    with pytest.raises(ValueError, match="not known: surprise"):
        convert.to_moelith(state | {"surprise": torch.zeros(1)}, "olmoe")
    with pytest.raises(ValueError, match="has no 'gate_up_bias'"):
        convert.from_moelith(
            {"router.weight": torch.zeros(1), "router.bias": torch.zeros(1), "gate_up_proj": torch.zeros(1, 2, 2)},
            "gpt_oss",
        )


def test_states_and_configs_that_would_be_misread():
    names = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
    state = {f"experts.{e}.{name}.weight": torch.zeros(shape) for e in range(2) for name, shape in names.items()}
    state["gate.weight"] = torch.zeros(2, 16)
    convert.to_moelith(state, "qwen3_moe")
    for more, pattern in (
        ({"experts.gate_up_proj": torch.zeros(2, 48, 16)}, "'experts.gate_up_proj' and tensors of single experts"),
        ({"experts.1.w1.weight": torch.zeros(24, 16)}, "gate_proj of expert 1 twice, once as 'experts.1.w1.weight'"),
        ({"experts.1.up_proj.weight": torch.zeros(8, 16)}, r"up_proj of expert 1: shape \(8, 16\).*\(24, 16\)"),
    ):
        with pytest.raises(ValueError, match=pattern):
            convert.to_moelith(state | more, "qwen3_moe")
    layer = {"router.weight": 0, "gate_up_proj": 0, "down_proj": 0, "shared_experts.0.gate_up_proj": 0}
    with pytest.raises(ValueError, match="not known: shared_experts.0.gate_up_proj"):
        convert.from_moelith(layer, "mixtral")
    config = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 24, "num_experts_per_tok": 2}
    config |= {"num_local_experts": 8}
    with pytest.raises(ValueError, match="block: Identity, without parameters"):
        convert.from_transformers(torch.nn.Identity(), config)
