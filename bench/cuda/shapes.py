"""The shapes of the speed tables, and router logits for three kinds of routing."""

import argparse
import dataclasses

import torch

from moelith.config import Activation, LayerConfig, Router, SharedExpert


@dataclasses.dataclass(frozen=True)
class Shape:
    config: LayerConfig
    tokens: int

    @property
    def flops(self):
        """Useful ones of a forward; a backward has twice as many. Router, activations and sums are not counted."""
        c = self.config
        return 6 * self.tokens * c.hidden_size * (c.top_k * c.intermediate_size + sum(s.intermediate_size for s in c.shared_experts))


    def with_experts(self, num_experts):
        return Shape(dataclasses.replace(self.config, num_experts=num_experts), self.tokens)


def _shape(tokens, hidden, intermediate, experts, top_k, **more):
    return Shape(LayerConfig(hidden, intermediate, experts, top_k, router=Router("softmax_topk", renormalize=True), **more), tokens)


SHAPES = {
    "Qwen3-30B": _shape(16384, 2048, 768, 128, 8),
    "OLMoE": _shape(16384, 2048, 1024, 64, 8),
    "Qwen3-235B": _shape(8192, 4096, 1536, 128, 8),
    "GPT-OSS-120B": _shape(16384, 2880, 2880, 128, 4, activation=Activation("swiglu_clamped"), gate_up_bias=True, down_bias=True),
    "DeepSeek-V3": _shape(8192, 7168, 2048, 64, 8, shared_experts=(SharedExpert(2048),)),  # a quarter of its 256 experts
    "Mixtral": _shape(16384, 4096, 14336, 8, 2),
    "4096x512": _shape(32768, 4096, 512, 128, 8),
    "fine": _shape(24576, 1536, 256, 128, 8),
    "tiny": _shape(64, 64, 32, 8, 2),  # to try the scripts on a CPU
}
# Tokens of each rank.
SEVERAL_RANKS = {
    "Qwen3-30B": SHAPES["Qwen3-30B"],
    "GPT-OSS-120B": SHAPES["GPT-OSS-120B"],
    "DeepSeek-V3/4": SHAPES["DeepSeek-V3"],
    "DeepSeek-V3": SHAPES["DeepSeek-V3"].with_experts(256),
    "Kimi-K2": _shape(4096, 7168, 2048, 384, 8, shared_experts=(SharedExpert(2048),)),
    "FlashMoE-32": _shape(8192, 2048, 2048, 32, 2),
    "FlashMoE-128": _shape(8192, 2048, 2048, 128, 2),
    "tiny": SHAPES["tiny"],
}
ROUTINGS = ("uniform", "equal", "zipf")


def router_logits(routing, tokens, experts, top_k, device):
    """[T, E] float32. uniform: independent normal ones; equal: every expert gets the same number of tokens (T k must be
    a multiple of E); zipf: the n-th most popular expert is drawn with a probability proportional to 1/n."""
    logits = torch.randn(tokens, experts, device=device)
    if routing == "equal":
        assert tokens * top_k % experts == 0
        chosen = torch.randperm(experts, device=device)[torch.arange(tokens * top_k, device=device) % experts]
        chosen = chosen.view(tokens, top_k)[torch.randperm(tokens, device=device)]
        logits.scatter_add_(1, chosen, torch.full(chosen.shape, 20.0, device=device))
    elif routing == "zipf":
        popularity = -torch.log(1.0 + torch.randperm(experts, device=device))
        logits = popularity - torch.log(-torch.log(torch.rand(tokens, experts, device=device).clamp(1e-20, 1 - 1e-7)))
    return logits


def options(description, default, rounds):
    """A parser of what the scripts have in common: --shape, --rounds, --json. default: says which shapes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=SHAPES, action="append", help=f"default: {default}")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", metavar="FILE")
    return parser
