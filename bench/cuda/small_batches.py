"""Small batches, replayed from a CUDA graph: ours beside plain PyTorch, and beside the time to read the weights needed.

    bench/cuda/small_batches.py [--shape NAME] [--rounds N] [--json FILE]

Forward without gradients, and forward + backward. Replays take turns, fresh inputs and routes each round (so the weights come
from memory, not from a cache), medians of CUDA events. `floor_us` is the time to read the weights of the experts that were
chosen, once, at 4.8 TB/s.
"""

import statistics

import torch

import rivals
import timing
from moelith import MoE
from shapes import SHAPES, options, router_logits

BYTES_PER_US = 4.8e6  # an H200's memory, by its data sheet
TOKENS = (512, 64, 8, 1)  # falling: what PyTorch compiles for the first then serves the others


def measure(name, shape, tokens, rounds):
    config = shape.config
    layer = MoE(config, device="cuda", dtype=torch.bfloat16)
    layer.router.requires_grad_(False)
    x = torch.randn(tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)
    logits = torch.randn(tokens, config.num_experts, device="cuda").requires_grad_()
    functions = {"moelith": lambda: layer(x, router_logits=logits), "plain PyTorch": None}
    plain = rivals.plain(shape, layer)
    functions["plain PyTorch"] = lambda: plain(x, logits)
    leaves = [x, logits, *(p for p in layer.parameters() if p.requires_grad)]

    def forward(function):
        with torch.no_grad():
            return function()

    errors = forward(functions["moelith"]).float() - forward(functions["plain PyTorch"]).float()
    error = (errors.norm() / forward(functions["plain PyTorch"]).float().norm()).item()
    assert error < 2e-2, f"{name}, {tokens} tokens: ours and plain PyTorch differ by {error}"

    turns, graphs = {}, []
    for who, function in functions.items():
        for part, run in {"forward": lambda f=function: forward(f),
                          "forward_backward": lambda f=function: torch.autograd.grad(f(), leaves, dy)}.items():
            graphs.append(timing.graph_of(run))

            def replay(clock, graph=graphs[-1]):
                clock.mark()
                graph.replay()
                clock.mark()

            turns[who, part] = replay
    needed = []

    def draw():
        with torch.no_grad():
            x.normal_()
            dy.normal_()
            logits.copy_(router_logits("uniform", tokens, config.num_experts, config.top_k, "cuda"))
        needed.append(rivals.route(logits, config.top_k)[0].unique().numel())

    medians = {key: value[0] for key, value in timing.in_turns(turns, rounds, "cuda", draw).items()}
    weights = 3 * config.hidden_size * config.intermediate_size * 2 * statistics.median(needed)
    times = {who: {f"{part}_ms": medians[who, part] for part in ("forward", "forward_backward")} for who in functions}
    mine = times.pop("moelith")
    row = {
        "shape": name, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts, "top_k": config.top_k, "tokens": tokens, "ranks": 1, "routing": "uniform", **mine,
        "floor_us": weights / BYTES_PER_US, "difference": error, "rivals": times,
    }
    other = times["plain PyTorch"]
    print(f"{name:12} {tokens:5}  {mine['forward_ms'] * 1e3:9.1f} {other['forward_ms'] * 1e3:9.1f} {row['floor_us']:9.1f} "
          f"{mine['forward_ms'] * 1e3 - row['floor_us']:+9.1f}   {mine['forward_backward_ms'] * 1e3:9.1f} {other['forward_backward_ms'] * 1e3:9.1f}", flush=True)
    return row


def main():
    arguments = options(__doc__.splitlines()[0], "Qwen3-30B", 50).parse_args()
    torch.manual_seed(0)
    print("microseconds          forward                                       forward + backward")
    print(f"{'shape':12} {'T':>5}  {'moelith':>9} {'plain':>9} {'floor':>9} {'above it':>9}   {'moelith':>9} {'plain':>9}")
    rows = []
    for name in arguments.shape or ["Qwen3-30B"]:
        for tokens in TOKENS:
            rows.append(measure(name, SHAPES[name], tokens, arguments.rounds))
            timing.free()
    if arguments.json:
        timing.write(arguments.json, "cuda", rounds=arguments.rounds, rows=rows)


if __name__ == "__main__":
    main()
