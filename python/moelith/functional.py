"""The layer, and a dense MLP, as functions of tensors. moelith.MoE holds the parameters and calls these.

Shapes: T tokens, H hidden_size, I intermediate_size, E num_experts, L experts of this rank (E for one rank), k top_k,
S shared experts. `dtype` below is that of x: bfloat16, float32 or float64; "accumulator" is float64 for float64,
otherwise float32.
"""

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
parameter_to_mark = operators.parameter_to_mark
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
    topk_weights        [..., k] of the accumulator dtype. Neither is needed where E = 1: the one weight is 1.
    selection_bias      [E] of the accumulator dtype, where config.router.selection_bias
    shared              SharedWeights of each shared expert
    shared_gate_logits  [..., S] where a shared expert is gated
    num_valid_tokens    [1] int32 on x's device: tokens from it on count as absent (y = 0, dx = 0)
    num_sequences       for the sequence aux loss: the tokens are this many sequences of equal length
    options             how it is run
    main_gradients      name of a weight ("gate_up_proj", "down_bias", "shared.0.down_proj", ...) -> a contiguous tensor
                        of its shape, of the accumulator dtype: backward adds the gradient to it, and the weight's .grad
                        stays None

    Differentiable by x, router_logits, topk_weights, shared_gate_logits and all weights; what needs no gradient gets
    none, and a call without any keeps nothing. Raises ValueError or TypeError for bad arguments, NotImplementedError
    for what this build or device cannot do, TimeoutError where another rank did not come.
    """
    check_type(x, "x", Tensor)
    check_type(config, "config", LayerConfig)
    check_type(shared, "shared", (tuple, list))
    if len(shared) != len(config.shared_experts):
        raise ValueError(f"shared: {len(shared)} experts given; config has {len(config.shared_experts)}")
    given = {"gate_up_proj": gate_up_proj, "gate_up_bias": gate_up_bias, "down_proj": down_proj, "down_bias": down_bias}
    for s, expert in enumerate(shared):
        check_type(expert, f"shared.{s}", (SharedWeights, tuple, list))
        if len(expert) > len(SharedWeights._fields):
            raise ValueError(f"shared.{s}: {len(expert)} tensors; accepted: {', '.join(SharedWeights._fields)}")
        for kind, tensor in zip(SharedWeights._fields, expert):
            given[f"shared.{s}.{kind}"] = tensor
    weights = _weights_of(config, given)
    main, mask = _main_gradients(main_gradients, weights) if main_gradients else ([], 0)

    device = x.device
    results = _forward(
        _rows_of(x, "x", config.hidden_size, device),
        weights,
        config.key,
        options,
        router_logits=_rows_of(router_logits, "router_logits", config.num_experts, device),
        topk_ids=_rows_of(topk_ids, "topk_ids", config.top_k, device),
        topk_weights=_rows_of(topk_weights, "topk_weights", config.top_k, device),
        selection_bias=selection_bias,
        shared_gate_logits=_rows_of(shared_gate_logits, "shared_gate_logits", len(config.shared_experts), device),
        num_valid_tokens=num_valid_tokens,
        num_sequences=num_sequences,
        main=main,
        main_mask=mask,
    )
    y = _shaped_as(results[0], x)
    return MoEOutput(y, *results[1:6]) if return_routing else y


def _weights_of(config, given):
    """The weights by name, in the order of LayerConfig.weights."""
    names = config.weights
    for name, tensor in given.items():
        if tensor is not None and name not in names:
            raise ValueError(f"{name}: given; config has no such weight ({name.rpartition('.')[2]}=False)")
    weights = {}
    for name in names:
        tensor = given.get(name)
        if tensor is None:
            raise ValueError(f"{name}: None; config asks for it")
        weights[name] = tensor
    return weights


def _forward(
    x,
    weights,
    config_key,
    options,
    *,
    router_logits=None,
    topk_ids=None,
    topk_weights=None,
    selection_bias=None,
    shared_gate_logits=None,
    num_valid_tokens=None,
    num_sequences=1,
    main=(),
    main_mask=0,
):
    """The results of operators.moe, of x [T, H]. weights: by name, in the order of LayerConfig.weights. What comes by
    _rows_of is checked; the others are here."""
    check_type(options, "options", PlanOptions)
    check_type(num_sequences, "num_sequences", (int, torch.SymInt))
    if isinstance(num_sequences, int) and not -(2**63) <= num_sequences < 2**63:  # PyTorch could not carry it
        raise ValueError(f"num_sequences: got {num_sequences}, accepted is a divisor of the {x.shape[0]} tokens")
    device = x.device
    for name, tensor in weights.items():
        _check_tensor(tensor, name, device)
    if selection_bias is not None:
        _check_tensor(selection_bias, "selection_bias", device)
    if num_valid_tokens is not None:
        _check_tensor(num_valid_tokens, "num_valid_tokens", device)
    weights = list(weights.values())
    differentiable = (x, router_logits, topk_weights, shared_gate_logits, *weights)
    _refuse_transforms()
    return operators.moe(
        x,
        router_logits,
        topk_ids,
        topk_weights,
        selection_bias,
        shared_gate_logits,
        num_valid_tokens,
        weights,
        list(main),
        main_mask,
        config_key,
        options.key,
        options.group_handle,
        num_sequences,
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable),
    )


@torch.compiler.assume_constant_result
def _dense_key(hidden_size, intermediate_size, kind, limit, alpha, up_offset, gate_up_bias, down_bias):
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=1,
        top_k=1,
        activation=Activation(kind, limit, alpha, up_offset),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    ).key


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
    check_type(x, "x", Tensor)
    check_type(gate_up_proj, "gate_up_proj", Tensor)
    check_type(down_proj, "down_proj", Tensor)
    check_type(activation, "activation", Activation)
    if gate_up_proj.dim() != 2 or down_proj.dim() != 2:
        raise ValueError(
            f"gate_up_proj, down_proj: shapes {tuple(gate_up_proj.shape)}, {tuple(down_proj.shape)}; accepted: [2I, H] "
            "([I, H] without a gate) and [H, I]"
        )
    key = _dense_key(
        down_proj.shape[0],
        down_proj.shape[1],
        activation.kind,
        activation.limit,
        activation.alpha,
        activation.up_offset,
        gate_up_bias is not None,
        down_bias is not None,
    )
    given = {"gate_up_proj": gate_up_proj, "gate_up_bias": gate_up_bias, "down_proj": down_proj, "down_bias": down_bias}
    weights = {name: tensor[None] for name, tensor in given.items() if tensor is not None}
    rows = _rows_of(x, "x", down_proj.shape[0], x.device)
    return _shaped_as(_forward(rows, weights, key, options, num_valid_tokens=num_valid_tokens)[0], x)


def update_selection_bias(bias: Tensor, expert_counts: Tensor, rate: float) -> None:
    """bias[e] += rate * sign(mean(expert_counts) - expert_counts[e]), in place (DeepSeek-V3's balancing).

    bias [E] float32 or float64; expert_counts [E] int64, summed over whatever batch and ranks it shall balance.
    """
    check_type(bias, "bias", Tensor)
    check_type(expert_counts, "expert_counts", Tensor)
    if expert_counts.device != bias.device:
        raise ValueError(f"expert_counts: on {expert_counts.device}; accepted: {bias.device}, where bias is")
    if bias.device.type == "cuda":  # the library's function reads and writes the host's memory
        if bias.dim() != 1 or bias.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"bias: {bias.dtype}{list(bias.shape)}; accepted: float32 or float64 [E]")
        if expert_counts.shape != bias.shape or expert_counts.dtype != torch.int64:
            raise ValueError(f"expert_counts: {expert_counts.dtype}{list(expert_counts.shape)}; accepted: int64{list(bias.shape)}")
        below_mean = torch.sign(expert_counts.sum() - expert_counts * expert_counts.numel())
        bias.add_(below_mean.to(bias.dtype), alpha=rate)
        return
    operators.update_selection_bias(bias, expert_counts, rate)


def check_type(value, name, accepted):
    if not isinstance(value, accepted):
        accepted = accepted[0] if isinstance(accepted, tuple) else accepted
        raise TypeError(f"{name}: {type(value).__name__}; accepted: {accepted.__name__}")


def _refuse_transforms():
    """Without this, the transforms of torch.func would end in an error that tells nothing."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError("torch.func's transforms (grad, vmap, jvp, ...): accepted is reverse mode, backward()")


def _check_tensor(tensor, name, device):
    check_type(tensor, name, Tensor)
    _check_layout(tensor, name)
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}; accepted: {device}, where x is")


def _check_layout(tensor, name):
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "of a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name}: layout {layout}; accepted: {torch.strided}")


def _rows_of(tensor, name, columns, device):
    """[..., columns] on the device -> [T, columns]"""
    if tensor is None:
        return None
    _check_tensor(tensor, name, device)
    dimensions = tensor.dim()
    if dimensions == 0 or tensor.shape[-1] != columns:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}; accepted: [..., {columns}]")
    return tensor if dimensions == 2 else tensor.reshape(-1, columns)


def _shaped_as(y, x):
    return y if x.dim() == 2 else y.reshape(x.shape)


def _main_gradients(main_gradients, weights):
    check_type(main_gradients, "main_gradients", Mapping)
    tensors, mask = [], 0
    for name in main_gradients:
        if name not in weights:
            raise ValueError(f"main_gradients: '{name}'; accepted: {', '.join(weights)}")
    for i, (name, weight) in enumerate(weights.items()):
        if name in main_gradients:
            tensor = main_gradients[name]
            check_type(tensor, f"main_gradients['{name}']", Tensor)
            _check_layout(tensor, f"main_gradients['{name}']")
            if not torch.compiler.is_compiling() and tensor.is_neg():  # a graph cannot ask that
                raise ValueError(f"main_gradients['{name}']: a lazily negated view; accepted: memory that can be added to")
            dtype, shape, device = accumulator_dtype(weight.dtype), tuple(weight.shape), weight.device
            if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
                raise ValueError(
                    f"main_gradients['{name}']: {tensor.dtype}, shape {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}, on {tensor.device}; accepted: {dtype}, shape {shape}, contiguous, on {device}"
                )
            tensors.append(tensor)
            mask |= 1 << i
    return tensors, mask
