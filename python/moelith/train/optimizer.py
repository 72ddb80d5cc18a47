"""AdamW over float32 weights, whatever type the model stores, and the learning rate of a step."""

import math

import torch
from torch import nn

from .model import LanguageModel

BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
FINAL_SHARE = 0.1  # of the peak learning rate, once the schedule has run


def learning_rate(step: int, peak: float, warmup: int, horizon: int) -> float:
    """Linear warm-up, then a cosine from `peak` to FINAL_SHARE of it at step `horizon`, and constant after. Steps count
    from 1. It depends on the horizon and not on how many steps a run makes, so that stopping early changes nothing."""
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """AdamW with gradient clipping. Parameters of a narrower type than float32 have a float32 copy here, which is what
    is updated; the model gets it back rounded. The gradients of narrow expert weights are float32 too (main gradients).
    Matrices decay; vectors (norms, biases) do not."""

    def __init__(self, model: LanguageModel):
        self.model, self.ranks = model, model.ranks
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        for parameter in model.expert_parameters():
            if parameter.dtype != torch.float32:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        spread = model.spread_parameters()
        self.spread = [name in spread for name in self.names]
        matrices = [m for p, m in zip(self.parameters, self.masters) if p.ndim >= 2]
        vectors = [m for p, m in zip(self.parameters, self.masters) if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        on_gpu = self.parameters[0].device.type == "cuda"
        # A learning rate on the device, so that a captured CUDA graph sees the one of its own step.
        rate = torch.zeros((), device="cuda") if on_gpu else 0.0
        self.adamw = torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPS, fused=True, capturable=on_gpu)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps from now on."""
        for group in self.adamw.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self) -> torch.Tensor:
        """One update from the parameters' gradients, which are summed over the ranks and gone afterwards. Returns their norm
        before clipping."""
        for parameter, master in zip(self.parameters, self.masters):
            if master is not parameter:
                main = getattr(parameter, "main_grad", None)
                master.grad = main if main is not None else parameter.grad.float()
        dense = [m.grad for m, spread in zip(self.masters, self.spread) if not spread]
        experts = [m.grad for m, spread in zip(self.masters, self.spread) if spread]
        self.ranks.sum_gradients(dense, experts)
        norm = self.ranks.norm(nn.utils.get_total_norm(dense), nn.utils.get_total_norm(experts))
        nn.utils.clip_grads_with_norm_(self.masters, CLIP_NORM, norm)
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters):
            if master is not parameter:
                parameter.data.copy_(master)
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad.zero_()
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        for parameter, master in zip(self.parameters, self.masters):
            parameter.grad = master.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the optimizer under "<parameter>.<what>", with all experts. Collective."""
        tensors = {}
        for name, parameter, master, spread in zip(self.names, self.parameters, self.masters, self.spread):
            values = dict(self.adamw.state.get(master, {}))
            if master is not parameter:
                values["master"] = master.detach()
            for what, value in values.items():
                tensors[f"{name}.{what}"] = self.ranks.whole(value) if spread and value.ndim else value
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of state(). Raises KeyError or ValueError where names or shapes do not belong to this model."""
        known = dict(tensors)
        for name, parameter, master, spread in zip(self.names, self.parameters, self.masters, self.spread):
            state = {}
            for what in ("step", "exp_avg", "exp_avg_sq", "master"):
                value = known.pop(f"{name}.{what}", None)
                if value is None:
                    continue
                if spread and value.ndim:
                    value = self.model.own_experts(value)
                if what != "step" and value.shape != parameter.shape:
                    raise ValueError(f"{name}.{what} has shape {list(value.shape)}, the model {list(parameter.shape)}")
                if what == "master":
                    master.copy_(value)
                else:
                    state[what] = value.to(parameter.device)
            if state:
                self.adamw.state[master] = state
        if known:
            raise ValueError(f"unknown tensor {next(iter(known))}")
