"""The layer, and a dense MLP, as functions of tensors. moelith.MoE holds the parameters and calls these.

Shapes: T tokens, H hidden_size, I intermediate_size, E num_experts, L experts of this rank (E for one rank), k top_k,
S shared experts. `dtype` below is that of x: bfloat16, float32 or float64; "accumulator" is float64 for float64,
otherwise float32.
"""

import functools
from typing import Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from moelith import operators
from moelith.config import Activation, LayerConfig, PlanOptions


class SharedWeights(NamedTuple):
    """The weights of one shared expert of width I_s, all of x's dtype."""

    gate_up_proj: Tensor  # [2 I_s, H]; [I_s, H] without a gate
    down_proj: Tensor  # [H, I_s]
    gate_up_bias: Optional[Tensor] = None  # [2 I_s]
    down_bias: Optional[Tensor] = None  # [H]


class MoEOutput(NamedTuple):
    y: Tensor  # the shape and dtype of x
    topk_ids: Tensor  # [T, k] int32, -1: an empty or dropped slot
    topk_weights: Tensor  # [T, k] accumulator; differentiable
    expert_counts: Tensor  # [E] int64: routes of this call to each expert
    aux_loss: Tensor  # scalar, accumulator; differentiable; 0 without a loss or where the caller routed
    z_loss: Tensor  # likewise


_DEFAULT_OPTIONS = PlanOptions()
accumulator_dtype = operators.accumulator_dtype  # of topk_weights, losses and biases of choice, by dtype


def moe(
    x: Tensor,
    *,
    config: LayerConfig,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Optional[Tensor] = None,
    down_bias: Optional[Tensor] = None,
    router_logits: Optional[Tensor] = None,
    topk_ids: Optional[Tensor] = None,
    topk_weights: Optional[Tensor] = None,
    selection_bias: Optional[Tensor] = None,
    shared: Sequence[SharedWeights] = (),
    shared_gate_logits: Optional[Tensor] = None,
    num_valid_tokens: Optional[Tensor] = None,
    num_sequences: int = 1,
    options: PlanOptions = _DEFAULT_OPTIONS,
    main_gradients: Optional[Mapping[str, Tensor]] = None,
    return_routing: bool = False,
):
    """y = sum_j p_j FFN_{e_j}(x) + shared experts; with return_routing a MoEOutput, otherwise y.

    x                   [..., H]; the leading dimensions together are the T tokens
    config              what is computed; its sizes must be those of the tensors
    gate_up_proj        [L, 2I, H], rows [gate; up]; [L, I, H] without a gate;     gate_up_bias [L, 2I]
    down_proj           [L, H, I];                                                 down_bias [L, H]
    router_logits       [..., E] of x's or the accumulator dtype. Or, instead, the caller's own routing:
    topk_ids            [..., k] int32 or int64, global expert ids, -1: an empty slot, and
    topk_weights        [..., k] of the accumulator dtype
    selection_bias      [E] of the accumulator dtype, where config.router.selection_bias
    shared              SharedWeights of each shared expert
    shared_gate_logits  [..., S] where a shared expert is gated
    num_valid_tokens    [1] int32 on x's device: tokens from it on count as absent (y = 0, dx = 0)
    num_sequences       for the sequence aux loss: the tokens are this many sequences of equal length
    options             how it is run
    main_gradients      name of a weight ("gate_up_proj", "down_bias", "shared.0.down_proj", ...) -> a float32 tensor of
                        its shape: backward adds the gradient to it, and the weight's .grad stays None

    Differentiable by x, router_logits, topk_weights, shared_gate_logits and all weights; what needs no gradient gets
    none, and a call without any keeps nothing. Raises ValueError for bad arguments, NotImplementedError for what this
    build or device cannot do, TimeoutError where another rank did not come.
    """
    names = config.weights
    given = {"gate_up_proj": gate_up_proj, "gate_up_bias": gate_up_bias, "down_proj": down_proj, "down_bias": down_bias}
    if len(shared) != len(config.shared_experts):
        raise ValueError(f"shared: {len(shared)} experts given; config has {len(config.shared_experts)}")
    experts = [(-1, given)] + [(i, SharedWeights(*expert)._asdict()) for i, expert in enumerate(shared)]
    tensors = {}
    for owner, expert in experts:
        for kind, tensor in expert.items():
            if tensor is None and (owner, kind) not in names:
                continue
            name = weight_name(owner, kind)
            if tensor is None:
                raise ValueError(f"{name}: None; config asks for it ({kind}=True)")
            if (owner, kind) not in names:
                raise ValueError(f"{name}: given, but config.{kind} is False")
            tensors[owner, kind] = tensor
    weights = [tensors[name] for name in names]
    main, mask = _main_gradients(main_gradients, names, weights)
    _check_entry(router_logits, topk_ids, topk_weights)

    differentiable = (x, router_logits, topk_weights, shared_gate_logits, *weights)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable)
    y, *routing, _ = operators.moe(
        _rows_of(x, "x", config.hidden_size),
        _rows_of(router_logits, "router_logits", config.num_experts),
        _rows_of(topk_ids, "topk_ids", config.top_k),
        _rows_of(topk_weights, "topk_weights", config.top_k),
        selection_bias,
        _rows_of(shared_gate_logits, "shared_gate_logits", len(config.shared_experts)),
        num_valid_tokens,
        weights,
        main,
        mask,
        config.key,
        options.key,
        options.group_handle,
        num_sequences,
        save,
    )
    y = y.reshape(x.shape)
    return MoEOutput(y, *routing) if return_routing else y


@torch.compiler.assume_constant_result
@functools.lru_cache(maxsize=None)
def _dense_config(hidden_size, intermediate_size, activation, gate_up_bias, down_bias):
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=1,
        top_k=1,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def mlp(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Optional[Tensor] = None,
    down_bias: Optional[Tensor] = None,
    *,
    activation: Activation = Activation(),
    num_valid_tokens: Optional[Tensor] = None,
    options: PlanOptions = _DEFAULT_OPTIONS,
) -> Tensor:
    """A dense MLP: the layer with one expert and no router. gate_up_proj [2I, H] (or [I, H]), down_proj [H, I]."""
    if gate_up_proj.dim() != 2 or down_proj.dim() != 2:
        raise ValueError(
            f"gate_up_proj, down_proj: shapes {tuple(gate_up_proj.shape)}, {tuple(down_proj.shape)}; accepted: [2I, H] "
            "([I, H] without a gate) and [H, I]"
        )
    config = _dense_config(
        down_proj.shape[0], down_proj.shape[1], activation, gate_up_bias is not None, down_bias is not None
    )
    leading = (*x.shape[:-1], 1)
    return moe(
        x,
        config=config,
        gate_up_proj=gate_up_proj[None],
        down_proj=down_proj[None],
        gate_up_bias=None if gate_up_bias is None else gate_up_bias[None],
        down_bias=None if down_bias is None else down_bias[None],
        topk_ids=torch.zeros(leading, dtype=torch.int32, device=x.device),
        topk_weights=torch.ones(leading, dtype=operators.accumulator_dtype(x.dtype), device=x.device),
        num_valid_tokens=num_valid_tokens,
        options=options,
    )


def update_selection_bias(bias: Tensor, expert_counts: Tensor, rate: float) -> None:
    """bias[e] += rate * sign(mean(expert_counts) - expert_counts[e]), in place (DeepSeek-V3's balancing).

    bias [E] float32 or float64; expert_counts [E] int64, summed over whatever batch and ranks it shall balance.
    """
    operators.update_selection_bias(bias, expert_counts, rate)


def weight_name(owner: int, kind: str) -> str:
    """The name of a weight: of the routed experts (owner -1) or of a shared one, as in `main_gradients`."""
    return kind if owner < 0 else f"shared.{owner}.{kind}"


def _rows_of(tensor, name, columns):
    """[..., columns] -> [T, columns]"""
    if tensor is None:
        return None
    if tensor.dim() == 0 or tensor.shape[-1] != columns:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}; accepted: [..., {columns}]")
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, columns)


def _check_entry(router_logits, topk_ids, topk_weights):
    if (topk_ids is None) != (topk_weights is None):
        missing = "topk_ids" if topk_ids is None else "topk_weights"
        raise ValueError(f"{missing}: None; topk_ids and topk_weights come together")
    if (router_logits is None) == (topk_ids is None):
        raise ValueError("routing: give either router_logits, or topk_ids and topk_weights")


def _main_gradients(main_gradients, names, weights):
    if not main_gradients:
        return [], 0
    by_name = {weight_name(*name): i for i, name in enumerate(names)}
    tensors, mask = [], 0
    unknown = [name for name in main_gradients if name not in by_name]
    if unknown:
        raise ValueError(f"main_gradients: '{unknown[0]}'; accepted: {', '.join(by_name)}")
    for name, i in by_name.items():  # in the order of the weights
        if name in main_gradients:
            tensor = main_gradients[name]
            if tensor.dtype != torch.float32 or tensor.shape != weights[i].shape:
                raise ValueError(
                    f"main_gradients['{name}']: {tensor.dtype}, shape {tuple(tensor.shape)}; accepted: torch.float32, "
                    f"shape {tuple(weights[i].shape)}"
                )
            tensors.append(tensor)
            mask |= 1 << i
    return tensors, mask
