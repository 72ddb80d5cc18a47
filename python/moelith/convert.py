"""Weights and configurations of Hugging Face transformers' MoE blocks <-> moelith.MoE.

    layer_config(config)                 config.json (or a PretrainedConfig) -> LayerConfig
    to_moelith(state, model_type)        state dict of a block -> state dict of moelith.MoE
    from_moelith(state, model_type)      the way back, exactly
    from_transformers(block, config)     a block -> a moelith.MoE with copies of its weights

transformers itself is not needed. model_type is that of config.json; MODEL_TYPES lists the accepted ones. A block is the
module that transformers calls `mlp` (Mixtral: `block_sparse_moe` in checkpoint files) of a decoder layer; its names are
those of transformers 5, or the older ones of checkpoint files with one tensor for each expert and projection
(`experts.3.gate_proj.weight`, Mixtral `experts.3.w1.weight`).

    here                            transformers
    router.weight [E, H]            gate.weight; GPT-OSS router.weight, and router.bias
    gate_up_proj [E, 2I, H]         experts.gate_up_proj, the same; GPT-OSS [E, H, 2I], gate and up columns in turn
    down_proj [E, H, I]             experts.down_proj, the same; GPT-OSS [E, I, H]
    gate_up_bias, down_bias         GPT-OSS experts.gate_up_proj_bias (gate and up in turn), experts.down_proj_bias
    shared_experts.0.gate_up_proj   shared_experts.gate_proj.weight above shared_experts.up_proj.weight (Qwen:
    shared_experts.0.down_proj      shared_expert....); shared_experts.down_proj.weight
    shared_gate.weight [1, H]       shared_expert_gate.weight
    selection_bias [E]              gate.e_score_correction_bias

Every entry is a rearrangement, so the same two functions convert gradients and optimizer moments as well.
"""

import dataclasses
import json
import re
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from moelith import _moelith
from moelith.config import LayerConfig, PlanOptions, python_config

MODEL_TYPES = tuple(_moelith.hugging_face_model_types())
_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe")  # router in float32, shared experts without a gate
_GATED = ("qwen2_moe", "qwen3_next")  # one shared expert with a sigmoid gate
_SHARED_NAME = dict.fromkeys(_DEEPSEEK, "shared_experts") | dict.fromkeys(_GATED, "shared_expert")
_OLDER_EXPERT_NAME = re.compile(r"experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_OLDER_PROJECTION = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def layer_config(config: Any, *, aux_loss: bool = False) -> LayerConfig:
    """The LayerConfig of the MoE blocks of a model; config: a PretrainedConfig, or config.json as a dict.

    The fields, and transformers' defaults of those left out, are read by the C++ library (include/moelith/presets.hpp).
    Raises ValueError that names the field, NotImplementedError for what the layer cannot compute.

    aux_loss: with the load balancing loss by router_aux_loss_coef. transformers counts routes per token, not per route,
    hence top_k times the coefficient here; and it takes one loss over the tokens of all layers together, which the sum
    of this layer's losses equals where the model has one MoE layer.
    """
    return _layer_config(_model(config), aux_loss)


def _model(config):
    """What the C++ library reads in a config: model_type, layer, coefficient of transformers' auxiliary loss."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise TypeError(
            f"config: {config!r}, a {type(config).__name__}; accepted: a configuration of transformers, or a dict"
        )
    fields = dict(config) if isinstance(config, Mapping) else config.to_dict()
    return _moelith.model_from_hugging_face(json.dumps(fields, default=str))


def _layer_config(model, aux_loss):
    config = python_config(model.config)
    if not aux_loss or not model.aux_loss_coefficient:
        return config
    losses = {"aux_loss": "batch", "aux_loss_coefficient": model.aux_loss_coefficient * config.top_k}
    return dataclasses.replace(config, router=dataclasses.replace(config.router, **losses))


def to_moelith(state: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """The state dict of moelith.MoE from that of a block. Raises ValueError for entries that are missing or unknown."""
    _checked(model_type)
    source = _Entries(_fused_experts(state), f"the state dict of a {model_type} block")
    result = {}
    if model_type == "gpt_oss":
        result["router.weight"] = source.take("router.weight")
        result["router.bias"] = source.take("router.bias")
        result["gate_up_proj"] = _apart(source.take("experts.gate_up_proj")).mT.contiguous()
        result["gate_up_bias"] = _apart(source.take("experts.gate_up_proj_bias"))
        result["down_proj"] = source.take("experts.down_proj").mT.contiguous()
        result["down_bias"] = source.take("experts.down_proj_bias")
    else:
        result["router.weight"] = source.take("gate.weight")
        result["gate_up_proj"] = source.take("experts.gate_up_proj")
        result["down_proj"] = source.take("experts.down_proj")
        if model_type in _DEEPSEEK:
            result["selection_bias"] = source.take("gate.e_score_correction_bias", optional=True)
        shared = _SHARED_NAME.get(model_type)
        gate = source.take(f"{shared}.gate_proj.weight", optional=model_type not in _GATED)
        if gate is not None:
            result["shared_experts.0.gate_up_proj"] = torch.cat((gate, source.take(f"{shared}.up_proj.weight")))
            result["shared_experts.0.down_proj"] = source.take(f"{shared}.down_proj.weight")
        if model_type in _GATED:
            result["shared_gate.weight"] = source.take("shared_expert_gate.weight")
    source.check_all_taken()
    return {name: tensor for name, tensor in result.items() if tensor is not None}


def from_moelith(state: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """The state dict of a block, in the names of transformers 5, from that of moelith.MoE. Inverse of to_moelith."""
    _checked(model_type)
    source = _Entries(state, "the state dict of the layer")
    result = {}
    if model_type == "gpt_oss":
        result["router.weight"] = source.take("router.weight")
        result["router.bias"] = source.take("router.bias")
        result["experts.gate_up_proj"] = _in_turn(source.take("gate_up_proj").mT)
        result["experts.gate_up_proj_bias"] = _in_turn(source.take("gate_up_bias"))
        result["experts.down_proj"] = source.take("down_proj").mT.contiguous()
        result["experts.down_proj_bias"] = source.take("down_bias")
    else:
        result["gate.weight"] = source.take("router.weight")
        result["experts.gate_up_proj"] = source.take("gate_up_proj")
        result["experts.down_proj"] = source.take("down_proj")
        if model_type in _DEEPSEEK:
            result["gate.e_score_correction_bias"] = source.take("selection_bias", optional=True)
        shared = _SHARED_NAME.get(model_type)  # None: what the layer has of them is left over, and noticed
        gate_up = shared and source.take("shared_experts.0.gate_up_proj", optional=model_type not in _GATED)
        if gate_up is not None:
            gate, up = gate_up.chunk(2)
            result[f"{shared}.gate_proj.weight"] = gate.contiguous()
            result[f"{shared}.up_proj.weight"] = up.contiguous()
            result[f"{shared}.down_proj.weight"] = source.take("shared_experts.0.down_proj")
        if model_type in _GATED:
            result["shared_expert_gate.weight"] = source.take("shared_gate.weight")
    source.check_all_taken()
    return {name: tensor for name, tensor in result.items() if tensor is not None}


def from_transformers(
    block: torch.nn.Module,
    config: Any,
    *,
    aux_loss: bool = False,
    options: PlanOptions = PlanOptions(),
    main_gradients: bool = False,
):
    """A moelith.MoE that computes what a transformers block computes, with copies of its weights, on its device.

    config: that of the model. The DeepSeek family's routers run in float32, as there.
    """
    from moelith.module import MoE

    model = _model(config)
    model_type = model.name
    weight = next(block.parameters(), None)
    if weight is None:
        raise ValueError(f"block: {type(block).__name__}, without parameters; accepted: an MoE block")
    layer = MoE(
        _layer_config(model, aux_loss),
        router_bias=model_type == "gpt_oss",
        router_dtype=torch.float32 if model_type in _DEEPSEEK and weight.dtype != torch.float64 else None,
        options=options,
        main_gradients=main_gradients,
        device=weight.device,
        dtype=weight.dtype,
    )
    layer.load_state_dict(to_moelith(block.state_dict(), model_type))
    return layer


class _Entries:
    """A state dict whose entries are taken one by one, so that what is left over is noticed."""

    def __init__(self, state: Mapping[str, Tensor], what: str):
        self.remaining = dict(state)
        self.what = what

    def take(self, name: str, optional: bool = False) -> Optional[Tensor]:
        if name not in self.remaining and not optional:
            raise ValueError(f"{self.what} has no '{name}'; it has {', '.join(self.remaining) or 'nothing'}")
        return self.remaining.pop(name, None)

    def check_all_taken(self):
        if self.remaining:
            raise ValueError(f"{self.what} has entries that are not known: {', '.join(self.remaining)}")


def _checked(model_type):
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type: {model_type!r}; accepted: {', '.join(MODEL_TYPES)}")
    return model_type


def _fused_experts(state):
    """The state dict with one stacked tensor a projection, made where it has one tensor for each expert."""
    fused, single = {}, {}
    for name, tensor in state.items():
        match = _OLDER_EXPERT_NAME.fullmatch(name)
        if match:
            projection = _OLDER_PROJECTION.get(match[2], match[2])
            tensors = single.setdefault(projection, {})
            if int(match[1]) in tensors:
                raise ValueError(f"the state dict has {projection} of expert {match[1]} twice, once as '{name}'")
            tensors[int(match[1])] = tensor
        else:
            fused[name] = tensor
    if not single:
        return fused
    experts = 1 + max(max(tensors) for tensors in single.values())
    for projection in ("gate_proj", "up_proj", "down_proj"):
        missing = [expert for expert in range(experts) if expert not in single.get(projection, {})]
        if missing:
            raise ValueError(f"the state dict has no {projection} of expert {missing[0]} of {experts}")
        first = single[projection][0].shape
        for expert, tensor in single[projection].items():
            if tensor.shape != first:
                raise ValueError(
                    f"{projection} of expert {expert}: shape {tuple(tensor.shape)}; accepted: {tuple(first)}, "
                    "that of expert 0"
                )
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        if name in fused:
            raise ValueError(f"the state dict has '{name}' and tensors of single experts; accepted: one of the two")
    stacked = {name: torch.stack([tensors[expert] for expert in range(experts)]) for name, tensors in single.items()}
    fused["experts.gate_up_proj"] = torch.cat((stacked["gate_proj"], stacked["up_proj"]), dim=1)
    fused["experts.down_proj"] = stacked["down_proj"]
    return fused


def _apart(tensor):
    """[..., g0 u0 g1 u1 ...] -> [..., g0 g1 ... u0 u1 ...]"""
    return torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1)


def _in_turn(tensor):
    """The inverse of _apart."""
    return torch.stack(tensor.chunk(2, dim=-1), dim=-1).flatten(-2)
