"""moelith.MoE: the layer with its parameters and its router, as an nn.Module."""

import contextlib
import math
from typing import Optional

import torch
from torch import Tensor, nn

from moelith import functional
from moelith.config import LayerConfig, PlanOptions


class SharedExpertWeights(nn.Module):
    """The parameters of one shared expert; their shapes are those of functional.SharedWeights."""

    def __init__(self, config: LayerConfig, intermediate_size: int, device=None, dtype=None):
        super().__init__()
        _add_weights(self, config, intermediate_size, (), device, dtype)

    def weights(self) -> functional.SharedWeights:
        return functional.SharedWeights(self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias)


def _add_weights(module, config, intermediate_size, leading, device, dtype):
    rows = config.gate_up_rows(intermediate_size)
    shapes = {
        "gate_up_proj": (*leading, rows, config.hidden_size),
        "gate_up_bias": (*leading, rows) if config.gate_up_bias else None,
        "down_proj": (*leading, config.hidden_size, intermediate_size),
        "down_bias": (*leading, config.hidden_size) if config.down_bias else None,
    }
    for name, shape in shapes.items():
        value = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        module.register_parameter(name, value)


class MoE(nn.Module):
    """A mixture-of-experts layer with its router.

    Parameters and buffers, which are also the entries of the state dict (E experts, or those of this rank where
    options.group has several; H hidden_size, I intermediate_size, S shared experts):

        router.weight [E, H], router.bias [E]               nn.Linear; bias with router_bias
        gate_up_proj [E, 2I, H], gate_up_bias [E, 2I]       rows [gate; up]; [E, I, H], [E, I] without a gate
        down_proj [E, H, I], down_bias [E, H]
        shared_experts.{s}.gate_up_proj [2 I_s, H], ...     the same of each shared expert, without the first dimension
        shared_gate.weight [S, H]                           nn.Linear, where a shared expert is gated
        selection_bias [E]                                  buffer, where config.router.selection_bias; float32 (float64
                                                            in a float64 layer) whatever dtype the module is moved to

    router_dtype: the router's product runs in this dtype (DeepSeek-V3: float32); None: in that of its input.
    main_gradients: backward adds the gradients of the experts' weights (routed and shared) to the float32 tensors
    (float64 in a float64 layer) that the caller has put at `parameter.main_grad`, as Megatron-Core does, and leaves
    `parameter.grad` at None. Parameters without that attribute get their .grad as usual. A parameter with an attribute
    `grad_added_to_main_grad` (set by Megatron-Core's data parallelism) gets it set to True, and zeros as its .grad,
    which trigger its hooks.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        router_bias: bool = False,
        router_dtype: Optional[torch.dtype] = None,
        main_gradients: bool = False,
        options: PlanOptions = PlanOptions(),
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        super().__init__()
        functional.check_type(config, "config", LayerConfig)
        functional.check_type(options, "options", PlanOptions)
        config.validate()
        self.config = config
        self.options = options
        self.router_dtype = router_dtype
        self.main_gradients = main_gradients
        self.local_experts = _local_experts(config.num_experts, options)

        factory = {"device": device, "dtype": dtype}
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=router_bias, **factory)
        _add_weights(self, config, config.intermediate_size, (len(self.local_experts),), **factory)
        self.shared_experts = nn.ModuleList(
            SharedExpertWeights(config, shared.intermediate_size, **factory) for shared in config.shared_experts
        )
        self.shared_gate = (
            nn.Linear(config.hidden_size, len(config.shared_experts), bias=False, **factory)
            if config.any_shared_gate
            else None
        )
        accumulator = functional.accumulator_dtype(self.gate_up_proj.dtype)
        selection_bias = (
            torch.zeros(config.num_experts, device=device, dtype=accumulator) if config.router.selection_bias else None
        )
        self.register_buffer("selection_bias", selection_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights uniform within 1/sqrt(columns), as nn.Linear has them; biases 0."""
        self.router.reset_parameters()
        if self.shared_gate is not None:
            self.shared_gate.reset_parameters()
        for holder in (self, *self.shared_experts):
            for projection in (holder.gate_up_proj, holder.down_proj):
                bound = 1 / math.sqrt(projection.shape[-1])
                nn.init.uniform_(projection, -bound, bound)
            for bias in (holder.gate_up_bias, holder.down_bias):
                if bias is not None:
                    nn.init.zeros_(bias)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(
        self,
        x: Tensor,
        *,
        num_valid_tokens: Optional[Tensor] = None,
        num_sequences: Optional[int] = None,
        router_logits: Optional[Tensor] = None,
        topk_ids: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        return_routing: bool = False,
    ):
        """x [..., H] -> y of the same shape; with return_routing a functional.MoEOutput, which has the losses too.

        num_sequences (for the sequence aux loss) is by default the product of x's dimensions before the last two.
        router_logits, or topk_ids and topk_weights, take the place of the layer's own router.
        """
        routed = functional.SharedWeights(self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias)
        autocast_dtype = self._check_x(x, routed.gate_up_proj.dtype)
        if num_sequences is None:
            num_sequences = 1 if x.dim() <= 2 else math.prod(x.shape[:-2]) or 1
        if router_logits is None and topk_ids is None and topk_weights is None:
            router_logits = self.router_logits(x)
        shared = [expert.weights() for expert in self.shared_experts] if self.config.shared_experts else ()
        main_gradients = self._main_gradients(routed, shared) if self.main_gradients else None
        if autocast_dtype is not None:
            x = x.to(autocast_dtype)
            routed = _cast(routed, autocast_dtype)
            shared = [_cast(expert, autocast_dtype) for expert in shared]
        return functional.moe(
            x,
            config=self.config,
            gate_up_proj=routed.gate_up_proj,
            down_proj=routed.down_proj,
            gate_up_bias=routed.gate_up_bias,
            down_bias=routed.down_bias,
            router_logits=router_logits,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            selection_bias=None if router_logits is None else self.selection_bias,
            shared=shared,
            shared_gate_logits=None if self.shared_gate is None else self.shared_gate(x),
            num_valid_tokens=num_valid_tokens,
            num_sequences=num_sequences,
            options=self.options,
            main_gradients=main_gradients,
            return_routing=return_routing,
        )

    def router_logits(self, x: Tensor) -> Tensor:
        """[..., E]"""
        if self.router_dtype is None:
            return self.router(x)
        weight, bias = self.router.weight, self.router.bias
        device = x.device.type
        with torch.autocast(device, enabled=False) if _has_autocast(device) else contextlib.nullcontext():
            return nn.functional.linear(
                x.to(self.router_dtype),
                weight.to(self.router_dtype),
                None if bias is None else bias.to(self.router_dtype),
            )

    @torch.no_grad()
    def update_selection_bias(self, expert_counts: Tensor, rate: float = 1e-3) -> None:
        """Balances without an auxiliary loss: bias[e] += rate * sign(mean(expert_counts) - expert_counts[e]).

        expert_counts [E] int64: the sum of MoEOutput.expert_counts over the batch (and the ranks) of a step.
        """
        if self.selection_bias is None:
            raise ValueError("selection_bias: this layer has none; set config.router.selection_bias")
        functional.update_selection_bias(self.selection_bias, expert_counts, rate)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"hidden_size={config.hidden_size}, intermediate_size={config.intermediate_size}, "
            f"num_experts={config.num_experts}, top_k={config.top_k}, activation={config.activation.kind}, "
            f"router={config.router.kind}"
        )

    def _check_x(self, x, dtype):
        """Refuses what the router's product would refuse without naming it. The dtype of autocast, or None."""
        functional.check_type(x, "x", Tensor)
        # As for the linear layers around this one; autocast leaves float64 as it is.
        device = x.device.type
        if x.dtype != torch.float64 and _has_autocast(device) and torch.is_autocast_enabled(device):
            dtype = None
        wrong_shape = x.dim() == 0 or x.shape[-1] != self.config.hidden_size
        if wrong_shape or dtype not in (None, x.dtype) or not x.is_floating_point():
            raise ValueError(
                f"x: {x.dtype}, shape {tuple(x.shape)}; accepted: {dtype or 'a floating-point dtype'}, "
                f"[..., {self.config.hidden_size}]"
            )
        return torch.get_autocast_dtype(device) if dtype is None else None

    def _main_gradients(self, routed, shared):
        named = _by_name(routed)
        for s, expert in enumerate(shared):
            named.update({f"shared.{s}.{kind}": tensor for kind, tensor in _by_name(expert).items()})
        main = {name: getattr(tensor, "main_grad", None) for name, tensor in named.items() if tensor is not None}
        return {name: tensor for name, tensor in main.items() if tensor is not None}

    def _apply(self, fn, recurse=True):
        selection_bias = self.selection_bias
        super()._apply(fn, recurse)
        accumulator = functional.accumulator_dtype(self.gate_up_proj.dtype)
        if selection_bias is not None and (accumulator != self.selection_bias.dtype):
            # Moved, but neither rounded to the layer's dtype nor left behind by it.
            self.selection_bias = selection_bias.to(self.selection_bias.device, accumulator)
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
        before = len(errors)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
        )
        errors[before:] = [error + self._layout_hint(state_dict, prefix, error) for error in errors[before:]]
        accumulator = functional.accumulator_dtype(self.gate_up_proj.dtype)
        if self.selection_bias is not None and self.selection_bias.dtype != accumulator:  # with assign=True
            self.selection_bias = self.selection_bias.to(accumulator)
        foreign = _foreign_layout(key[len(prefix) :] for key in state_dict if key.startswith(prefix))
        if foreign and any(key.startswith(prefix) for key in missing_keys):
            # Also where the caller is not strict: the layer would keep its random weights.
            errors.append(
                f"The state dict{f' under {prefix!r}' if prefix else ''} {foreign} This layer has {', '.join(self.state_dict())}. "
                "moelith.convert.to_moelith converts the blocks of Hugging Face transformers."
            )

    def _layout_hint(self, state_dict, prefix, error):
        for name in ("gate_up_proj", "down_proj"):
            found = state_dict.get(prefix + name)
            if f"size mismatch for {prefix}{name}:" not in error or found is None:
                continue
            expected = getattr(self, name).shape
            if found.shape == (expected[0], expected[2], expected[1]):
                return (
                    f" The last two dimensions are swapped: {name} is stored as [E, columns, rows], as GPT-OSS has it, "
                    "where its rows are interleaved too; moelith.convert.to_moelith converts it."
                )
            if found.shape[1:] == expected[1:]:
                return f" It holds {found.shape[0]} experts, and this rank has {expected[0]}."
        return ""


def _by_name(weights):
    """As _asdict(), which PyTorch 2.6 does not compile; nor does it unions of dictionaries."""
    return dict(zip(functional.SharedWeights._fields, weights))


@torch.compiler.assume_constant_result
def _has_autocast(device: str) -> bool:
    """False for the device meta, of which autocast's other functions raise."""
    return torch.amp.is_autocast_available(device)


def _cast(weights, dtype):
    return type(weights)(*(None if tensor is None else _cast_weight(tensor, dtype) for tensor in weights))


def _cast_weight(parameter, dtype):
    weight = parameter.to(dtype)
    if weight is not parameter and functional.parameter_to_mark(parameter) is not None:
        weight.cast_from = parameter
    return weight


def _foreign_layout(names):
    """What is told of a state dict that is laid out as another library has it; '' for one that is not."""
    for name in names:
        if name.startswith("experts.") or name.startswith("gate."):
            return f"holds '{name}', which is a name of the Hugging Face layout."
        if name.startswith(("w1", "w2", "w3", "gate_proj", "up_proj")):
            return f"holds '{name}': gate and up are one tensor here, gate_up_proj with rows [gate; up]."
    return ""


def _local_experts(num_experts, options):
    """Global ids of the experts of this rank, ascending (include/moelith/layer.hpp, PlanOptions::expert_rank)."""
    group = options.group
    if group is None or group.size == 1:
        return list(range(num_experts))
    if options.expert_rank:
        return [expert for expert, rank in enumerate(options.expert_rank) if rank == group.rank]
    fewest, more = divmod(num_experts, group.size)
    first = group.rank * fewest + min(group.rank, more)
    return list(range(first, first + fewest + (group.rank < more)))
