"""A decoder-only language model over bytes: attention by PyTorch, every feed-forward layer a moelith.MoE."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import moelith

from .clock import LayerClock
from .ranks import Ranks

BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class Preset:
    """A model size and how it is trained. A step sees batch windows of `context` bytes."""

    hidden_size: int
    layers: int
    heads: int
    num_experts: int
    top_k: int
    intermediate_size: int         # of each routed expert
    shared_intermediate_size: int  # of the one shared expert; 0: none
    context: int
    batch: int
    steps: int
    learning_rate: float
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 200
    balance_rate: float = 0.01     # of the selection bias, which alone evens out the load over a batch
    aux_loss_coefficient: float = 1e-4  # of the mean over sequences of their own imbalance


PRESETS = {
    # Minutes on two cores.
    "tiny": Preset(hidden_size=128, layers=4, heads=4, num_experts=16, top_k=2, intermediate_size=128,
                   shared_intermediate_size=128, context=256, batch=8, steps=750, learning_rate=4e-3,
                   log_every=20, eval_every=200),
    # An hour or two on a desktop machine.
    "small": Preset(hidden_size=256, layers=6, heads=4, num_experts=32, top_k=4, intermediate_size=128,
                    shared_intermediate_size=256, context=512, batch=16, steps=3000, learning_rate=2e-3,
                    eval_every=250, save_every=250),
    # A night on a server's CPU, minutes on a GPU.
    "base": Preset(hidden_size=512, layers=8, heads=8, num_experts=64, top_k=8, intermediate_size=256,
                   shared_intermediate_size=256, context=1024, batch=32, steps=5000, learning_rate=1e-3,
                   eval_every=250, save_every=500),
    # One data-centre GPU: 1.7 billion parameters, a sixth of them at work on any byte.
    "large": Preset(hidden_size=1024, layers=16, heads=16, num_experts=64, top_k=8, intermediate_size=512,
                    shared_intermediate_size=512, context=2048, batch=32, steps=20000, learning_rate=6e-4,
                    eval_every=500, save_every=1000, balance_rate=0.001),
}


def make_moe(preset: Preset, workers: int, ranks: Ranks) -> moelith.MoE:
    """DeepSeek-V3's recipe: sigmoid scores, a selection bias that evens out the load, one shared expert, and a small
    sequence loss against imbalance inside a window."""
    shared = preset.shared_intermediate_size
    config = moelith.LayerConfig(
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_experts=preset.num_experts,
        top_k=preset.top_k,
        shared_experts=(moelith.SharedExpert(shared),) if shared else (),
        router=moelith.Router(kind="sigmoid", renormalize=True, selection_bias=True,
                              aux_loss="sequence", aux_loss_coefficient=preset.aux_loss_coefficient / preset.batch),
    )
    spread = {}
    if ranks.group is not None:
        spread = {"group": ranks.group, "max_tokens": ranks.largest_share(preset.batch) * preset.context}
    return moelith.MoE(config, main_gradients=True, options=moelith.PlanOptions(workers=workers, **spread))


def rotary_table(context: int, size: int) -> torch.Tensor:
    """Rotary position embedding (RoPE, arXiv 2104.09864): cos and sin of the angles of each position,
    float32 [2, context, size / 2]."""
    frequency = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (x[i], x[i + size / 2]) of x [.., S, size] by the angles of their position."""
    cos, sin = table[:, :x.shape[-2]].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class LocalMixing(nn.Module):
    """Adds a weighted sum of each byte's vector and the vectors of the three before it, per channel (a causal depthwise
    convolution). Bytes mean little alone; with this a model need not first learn to attend to its neighbours.
    x: [B, S, H] -> [B, S, H]."""

    WIDTH = 4

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, self.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        S = x.shape[1]
        padded = F.pad(x, (0, 0, self.WIDTH - 1, 0))
        return x + sum(padded[:, i:i + S] * self.weight[:, i] for i in range(self.WIDTH))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys. x: [B, S, H] -> [B, S, H]."""

    def __init__(self, preset: Preset):
        super().__init__()
        self.heads = preset.heads
        self.mixing = LocalMixing(preset.hidden_size)
        size = preset.hidden_size // preset.heads
        self.qkv_proj = nn.Linear(preset.hidden_size, 3 * preset.hidden_size, bias=False)
        self.o_proj = nn.Linear(preset.hidden_size, preset.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=1e-6)
        self.k_norm = nn.RMSNorm(size, eps=1e-6)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        B, S, H = x.shape
        qkv = self.qkv_proj(self.mixing(x)).view(B, S, 3, self.heads, H // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, size]
        q = rotate(self.q_norm(q), table)
        k = rotate(self.k_norm(k), table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, S, H))


class Block(nn.Module):
    """x + attention, then + MoE, each of a normalised input. x: [B, S, H]."""

    def __init__(self, preset: Preset, clock: LayerClock, workers: int, ranks: Ranks):
        super().__init__()
        self.attention_norm = nn.RMSNorm(preset.hidden_size, eps=1e-6)
        self.attention = Attention(preset)
        self.moe_norm = nn.RMSNorm(preset.hidden_size, eps=1e-6)
        self.moe = make_moe(preset, workers, ranks)
        self.clock = clock

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Also returns the MoE layer's auxiliary loss and its expert counts [E]."""
        x = x + self.attention(self.attention_norm(x), table)
        routed = self.moe(self.clock.enter(self.moe_norm(x)), return_routing=True)
        return x + self.clock.leave(routed.y), routed.aux_loss, routed.expert_counts


class LanguageModel(nn.Module):
    """Bytes [B, S] -> logits of the byte that follows each, float32 [B, S, 256]."""

    def __init__(self, preset: Preset, clock: LayerClock, workers: int, ranks: Ranks):
        super().__init__()
        self.ranks, self.num_experts = ranks, preset.num_experts
        random = torch.get_rng_state()
        self.embedding = nn.Embedding(BYTES, preset.hidden_size)
        self.blocks = nn.ModuleList(Block(preset, clock, workers, ranks) for _ in range(preset.layers))
        self.norm = nn.RMSNorm(preset.hidden_size, eps=1e-6)
        self.head = nn.Linear(preset.hidden_size, BYTES, bias=False)
        table = rotary_table(preset.context, preset.hidden_size // preset.heads)
        self.register_buffer("rotary_table", table, persistent=False)
        # What modules drew for themselves depends on how many experts are here; the model's weights shall not.
        torch.set_rng_state(random)
        self._initialize(preset)

    @torch.no_grad()
    def _initialize(self, preset: Preset) -> None:
        """Normal with variance 1 / fan-in; what is added to the residual stream is smaller the more layers do so."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            scale = parameter.shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale /= math.sqrt(2 * preset.layers)
            elif "head" in name:
                scale *= 0.1  # the first predictions are close to uniform
            # All experts, whichever of them are here: a model's weights do not depend on the number of ranks.
            spread = parameter.ndim == 3 and self.ranks.ep_size > 1
            whole = parameter.new_empty(preset.num_experts, *parameter.shape[1:]) if spread else parameter
            whole.normal_(0.0, 1.0 if "embedding" in name else scale)
            if spread:
                parameter.copy_(self.own_experts(whole))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Also returns the sum of the MoE layers' auxiliary losses, and the routes to each expert [layers, E]."""
        x = self.embedding(tokens)
        losses, counts = [], []
        for block in self.blocks:
            x, loss, count = block(x, self.rotary_table)
            losses.append(loss)
            counts.append(count)
        return self.head(self.norm(x)).float(), torch.stack(losses).sum(), torch.stack(counts)

    def store_as(self, dtype: torch.dtype) -> "LanguageModel":
        """Parameters in this type; buffers (tables, selection biases) stay float32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def balance(self, counts: torch.Tensor, rate: float) -> None:
        """After a step: makes experts that got more than the mean a little less likely to be chosen, and others more.
        counts: [layers, E]."""
        for block, count in zip(self.blocks, counts):
            block.moe.update_selection_bias(count, rate)

    def spread_parameters(self) -> dict[str, nn.Parameter]:
        """The routed experts' by name, [local experts, ..]."""
        return {f"blocks.{i}.moe.{kind}": getattr(block.moe, kind)
                for i, block in enumerate(self.blocks) for kind in ("gate_up_proj", "down_proj")}

    def own_experts(self, whole: torch.Tensor) -> torch.Tensor:
        """[E, ..] -> [local experts, ..], the inverse of Ranks.whole. Raises ValueError for another E."""
        if self.ranks.ep_size == 1:
            return whole
        if whole.shape[0] != self.num_experts:
            raise ValueError(f"{whole.shape[0]} experts, where the model has {self.num_experts}")
        return whole[self.blocks[0].moe.local_experts]

    def whole_state(self) -> dict[str, torch.Tensor]:
        """The state dict of the model on one rank. Collective."""
        spread = self.spread_parameters()
        return {name: self.ranks.whole(t) if name in spread else t for name, t in self.state_dict().items()}

    def load_whole_state(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of whole_state."""
        spread = self.spread_parameters()
        self.load_state_dict({name: self.own_experts(t) if name in spread else t for name, t in state.items()})

    def expert_parameters(self) -> list[nn.Parameter]:
        """Of routed and shared experts: those whose gradients a moelith.MoE can add to a float32 main gradient."""
        return [parameter for block in self.blocks for name, parameter in block.moe.named_parameters()
                if not name.startswith("router.")]
