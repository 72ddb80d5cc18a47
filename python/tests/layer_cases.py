"""Configs of every option of the layer, and random tensors for them, with values of order 1."""

import dataclasses

import torch

from moelith import Activation, LayerConfig, Router, SharedExpert

BASE = LayerConfig(hidden_size=16, intermediate_size=24, num_experts=6, top_k=2, router=Router(renormalize=True))


def with_router(config=BASE, **fields):
    return dataclasses.replace(config, router=dataclasses.replace(config.router, **fields))


DEEPSEEK = dataclasses.replace(
    BASE,
    num_experts=8,
    top_k=3,
    shared_experts=(SharedExpert(40),),
    router=Router(
        "sigmoid", renormalize=True, scaling_factor=2.5, selection_bias=True, num_groups=4, top_groups=2
    ),
)
CONFIGS = {
    "mixtral": BASE,
    "olmoe": with_router(renormalize=False),
    "gpt_oss": dataclasses.replace(
        BASE,
        activation=Activation("swiglu_clamped", limit=0.8),
        gate_up_bias=True,
        down_bias=True,
        router=Router("topk_softmax"),
    ),
    "deepseek": DEEPSEEK,
    "qwen2": dataclasses.replace(BASE, shared_experts=(SharedExpert(8, gated=True),)),
    "two_shared": dataclasses.replace(
        BASE, shared_experts=(SharedExpert(8), SharedExpert(32, gated=True)), gate_up_bias=True, down_bias=True
    ),
    "geglu_erf": dataclasses.replace(BASE, activation=Activation("geglu_erf"), gate_up_bias=True),
    "geglu_tanh": dataclasses.replace(BASE, activation=Activation("geglu_tanh"), down_bias=True),
    "relu_squared": dataclasses.replace(
        BASE, activation=Activation("relu_squared"), gate_up_bias=True, shared_experts=(SharedExpert(16),)
    ),
    "before_down": dataclasses.replace(BASE, weight_placement="before_down", gate_up_bias=True, down_bias=True),
    "losses": with_router(aux_loss="batch", aux_loss_coefficient=0.3, z_loss_coefficient=0.2),
    "sequence_loss": with_router(DEEPSEEK, aux_loss="sequence", aux_loss_coefficient=0.3),
    "global_loss": with_router(aux_loss="global", aux_loss_coefficient=0.3),
    "capacity_by_score": with_router(capacity_factor=0.75, renormalize=False),
    "capacity_by_position": with_router(capacity_factor=0.75, drop_policy="by_position"),
    "one_expert_each": dataclasses.replace(BASE, top_k=1, router=Router()),
    "every_expert": dataclasses.replace(BASE, top_k=6, router=Router()),
}


def tensors_of(config, tokens, seed=0, dtype=torch.float64, logits_dtype=None):
    """The differentiable arguments of functional.moe, and those of plain_moe, by the same names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    def expert(width, *leading):
        h, rows = config.hidden_size, config.gate_up_rows(width)
        return {
            "gate_up_proj": normal(*leading, rows, h, scale=h**-0.5),
            "down_proj": normal(*leading, h, width, scale=width**-0.5),
            "gate_up_bias": normal(*leading, rows, scale=0.3) if config.gate_up_bias else None,
            "down_bias": normal(*leading, h, scale=0.3) if config.down_bias else None,
        }

    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    result = {"x": normal(tokens, config.hidden_size)} | expert(config.intermediate_size, config.num_experts)
    result["router_logits"] = normal(tokens, config.num_experts, dtype=logits_dtype or dtype)
    result["shared"] = [tuple(expert(shared.intermediate_size).values()) for shared in config.shared_experts]
    if config.router.selection_bias:
        result["selection_bias"] = normal(config.num_experts, scale=0.1, dtype=accumulator).detach()
    if config.any_shared_gate:
        result["shared_gate_logits"] = normal(tokens, len(config.shared_experts))
    return result


def leaves(tensors):
    """name -> tensor of all that need a gradient."""
    flat = {name: tensor for name, tensor in tensors.items() if name != "shared"}
    for s, expert in enumerate(tensors.get("shared", ())):
        for kind, tensor in zip(("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"), expert):
            flat[f"shared.{s}.{kind}"] = tensor
    return {name: tensor for name, tensor in flat.items() if tensor is not None and tensor.requires_grad}


def in_float64(tensors):
    """The same values as float64 leaves."""

    def convert(tensor):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    result = {name: convert(tensor) for name, tensor in tensors.items() if name != "shared"}
    result["shared"] = [tuple(convert(tensor) for tensor in expert) for expert in tensors.get("shared", ())]
    return result


def relative(actual, expected):
    """||actual - expected|| / ||expected|| over the whole tensor."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item() if bool((actual != expected).any()) else 0.0


def error(actual, expected):
    """The largest relative Frobenius error of a row, rows measured against at least 1e-2 of their root mean square."""
    actual = actual.detach().double().reshape(-1, actual.shape[-1] if actual.dim() else 1)
    expected = expected.detach().double().reshape(actual.shape)
    if expected.numel() == 0:
        return 0.0
    size = expected.norm(dim=-1)
    difference = (actual - expected).norm(dim=-1)
    floor = 1e-2 * size.square().mean().sqrt()
    if floor == 0:
        return 0.0 if bool((actual == expected).all()) else float("inf")
    return (difference / size.clamp(min=floor)).nan_to_num(float("inf")).max().item()
