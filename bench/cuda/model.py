"""A whole model's training step: transformers' Qwen3-30B-A3B cut to 6 layers, with its own MoE blocks and with ours in place.

    bench/cuda/model.py [--steps N] [--turns N] [--json FILE] [--device cpu]

One model, bfloat16, experts_implementation="grouped_mm", 4 sequences of 4096 tokens, fused AdamW. Our layers hold the very
parameters of the blocks that they replace, so that either can take the next step. First the two loss curves, from the same
weights on the same data; then both by turns of 5 steps each, medians. The data: made-up text of 4096 tokens, all as frequent,
half of which follow from the one before.
"""

import argparse
import statistics
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import timing
from moelith import MoE, convert

TURN = 5


def model_config(small):
    """Qwen3-30B-A3B's config.json with fewer layers; small: one that a CPU can try."""
    sizes = dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_attention_heads=32,
                 num_key_value_heads=4, head_dim=128, intermediate_size=6144, vocab_size=151936, num_hidden_layers=6)
    if small:
        sizes |= dict(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, num_attention_heads=2,
                      num_key_value_heads=1, head_dim=32, intermediate_size=64, vocab_size=4096, num_hidden_layers=2)
    return Qwen3MoeConfig(**sizes, norm_topk_prob=True, max_position_embeddings=40960, rope_theta=1e6, use_cache=False,
                          tie_word_embeddings=False, experts_implementation="grouped_mm", attn_implementation="sdpa")


def initialise(model):
    """The same random weights each time, drawn where the model is."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


def our_layer(block, config):
    """A moelith.MoE with the parameters of a transformers block, not copies."""
    weight = block.experts.gate_up_proj
    with torch.device("meta"):
        layer = MoE(convert.layer_config(config), dtype=weight.dtype)
    layer.router.weight = block.gate.weight
    layer.gate_up_proj, layer.down_proj = weight, block.experts.down_proj
    return layer


def batches(count, shape, vocabulary, device):
    """[count, B, S] tokens."""
    used = min(4096, vocabulary)
    follower = torch.randperm(used, device=device)
    tokens = torch.randint(used, (count, *shape), device=device)
    follows = torch.rand(tokens.shape, device=device) < 0.5
    for i in range(1, shape[1]):
        tokens[..., i] = torch.where(follows[..., i], follower[tokens[..., i - 1]], tokens[..., i])
    return tokens


class Run:
    def __init__(self, small, device):
        self.device = device
        self.shape = (2, 64) if small else (4, 4096)
        config = model_config(small)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            self.model = Qwen3MoeForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        self.theirs = [layer.mlp for layer in self.model.model.layers]
        self.ours = [our_layer(block, config) for block in self.theirs]
        self.vocabulary = config.vocab_size
        self.restart()

    def restart(self):
        initialise(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def use(self, blocks):
        for layer, block in zip(self.model.model.layers, blocks):
            layer.mlp = block

    def step(self, tokens):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(self, tokens):
        """Losses, and seconds a step."""
        self.synchronize()
        began = time.perf_counter()
        losses = [self.step(batch) for batch in tokens]
        self.synchronize()
        return [loss.item() for loss in losses], (time.perf_counter() - began) / len(losses)

    def synchronize(self):
        if self.device != "cpu":
            torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a small model, to try the script")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    run = Run(arguments.device == "cpu", arguments.device)
    sides = {"transformers": run.theirs, "moelith": run.ours}
    torch.manual_seed(1)
    data = batches(arguments.steps, run.shape, run.vocabulary, arguments.device)
    losses, peaks = {}, {}
    for side, blocks in sides.items():
        run.restart()
        timing.free()
        run.use(blocks)
        peaks[side] = timing.peak_bytes(lambda: losses.update({side: run.steps(data)[0]}), arguments.device)
    seconds = {side: [] for side in sides}
    for _ in range(arguments.turns):
        for side, blocks in sides.items():
            run.use(blocks)
            seconds[side].append(run.steps(data[:TURN])[1])

    tokens = run.shape[0] * run.shape[1]
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    rates = {side: tokens / value for side, value in medians.items()}
    differences = [abs(a - b) for a, b in zip(losses["transformers"], losses["moelith"])]
    assert all(difference == difference for difference in differences), f"losses: {losses}"
    for i in sorted({0, *range(4, arguments.steps, 5), arguments.steps - 1}):
        print(f"step {i + 1:3}  loss: transformers {losses['transformers'][i]:.4f}  moelith {losses['moelith'][i]:.4f}")
    print(f"largest difference {max(differences):.4f}")
    for side in sides:
        print(f"{side:13} {rates[side]:9.0f} tokens/s, {medians[side] * 1e3:8.2f} ms a step (turns: {min(seconds[side]) * 1e3:.2f} to "
              f"{max(seconds[side]) * 1e3:.2f}), peak {peaks[side] / 2**30:.1f} GiB above weights")
    print(f"moelith's step is {medians['transformers'] / medians['moelith']:.3f} times as fast")
    if arguments.json:
        import transformers

        results = [{"side": side, "tokens_per_s": rates[side], "step_ms": medians[side] * 1e3, "turns_ms": [s * 1e3 for s in seconds[side]],
                 "peak_bytes": peaks[side], "losses": losses[side]} for side in sides]
        timing.write(arguments.json, arguments.device, transformers=transformers.__version__, tokens_a_step=tokens,
                     times_as_fast=medians["transformers"] / medians["moelith"], largest_loss_difference=max(differences), sides=results)


if __name__ == "__main__":
    main()
