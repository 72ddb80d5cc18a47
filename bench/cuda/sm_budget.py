"""How the layer's rate follows the number of SMs that it may use (PlanOptions.workers).

    bench/cuda/sm_budget.py [--shape NAME] [--rounds N] [--json FILE]

Budgets take turns, fresh inputs each round, medians of CUDA events. `of_proportion`: the rate divided by the whole card's rate
times the share of SMs; 1 is in proportion, above 1 better.
"""

import torch

import timing
from moelith import MoE, PlanOptions
from shapes import SHAPES, options, router_logits

BUDGETS = (132, 96, 64, 32)


def measure(name, shape, rounds):
    config = shape.config
    layer = MoE(config, device="cuda", dtype=torch.bfloat16)
    layer.router.requires_grad_(False)
    x = torch.empty(shape.tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.empty_like(x)
    logits = torch.empty(shape.tokens, config.num_experts, device="cuda").requires_grad_()
    leaves = [x, logits, *(p for p in layer.parameters() if p.requires_grad)]

    def draw():
        with torch.no_grad():
            x.normal_()
            dy.normal_()
            logits.copy_(router_logits("uniform", shape.tokens, config.num_experts, config.top_k, "cuda"))

    def run(clock, options):
        layer.options = options
        clock.mark()
        y = layer(x, router_logits=logits)
        clock.mark()
        torch.autograd.grad(y, leaves, dy)
        clock.mark()

    turns = {sms: lambda clock, options=PlanOptions(workers=sms): run(clock, options) for sms in BUDGETS}
    medians = timing.in_turns(turns, rounds, "cuda", draw)
    rows = []
    for sms, (forward, backward) in medians.items():
        whole = medians[BUDGETS[0]]
        share = BUDGETS[0] / sms
        row = {"shape": name, "tokens": shape.tokens, "sms": sms, "forward_ms": forward, "forward_backward_ms": forward + backward,
               "of_proportion": {"forward": share * whole[0] / forward, "forward_backward": share * sum(whole) / (forward + backward)}}
        print(f"{name:12} {sms:4} {forward:9.3f} {forward + backward:9.3f} ms   {row['of_proportion']['forward']:.3f} "
              f"{row['of_proportion']['forward_backward']:.3f}", flush=True)
        rows.append(row)
    return rows


def main():
    arguments = options(__doc__.splitlines()[0], "Qwen3-30B", 7).parse_args()
    torch.manual_seed(0)
    print(f"{'shape':12} {'SMs':>4} {'forward':>9} {'fwd + bwd':>9}      rate of proportion")
    rows = []
    for name in arguments.shape or ["Qwen3-30B"]:
        rows += measure(name, SHAPES[name], arguments.rounds)
        timing.free()
    if arguments.json:
        timing.write(arguments.json, "cuda", rounds=arguments.rounds, budgets=rows)


if __name__ == "__main__":
    main()
