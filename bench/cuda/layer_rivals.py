"""The layer through Python beside its rivals, forward and forward + backward from router logits on, bfloat16, one GPU.

    bench/cuda/layer_rivals.py [--shape NAME] [--rival NAME] [--quick-tuning] [--rounds N] [--json FILE] [--device cpu]

Everything takes turns within one run (rivals.py; ours with weight gradients in bfloat16 and added to float32 main
gradients; three kinds of routing; cuBLAS over the two dense products of the same size), since the card's clock moves with its
heat: only ratios count. Fresh random inputs each round, medians of CUDA events. Correctness first: y and dx of some tokens
and one expert's weight gradients against float32 (1e-2 by row; of a rival that is further off it is said). The fraction of
dense is useful FLOPs / (time x the rate of the dense products). Memory: what a forward adds, beside the formula that the plan
prints, and the peak of forward + backward, gradients included, above weights and inputs.
"""

import torch

import rivals
import timing
from moelith import MoE
from moelith.runtime import Group
from shapes import ROUTINGS, SHAPES, options, router_logits

BOUND = 1e-2


def within_bound(errors, bound=BOUND):
    return all(error <= bound for error in errors.values())  # a NaN is not


class Problem:
    """One shape: the layer, inputs that are drawn anew, and the contenders: name -> (function, what it has gradients by)."""

    def __init__(self, shape, device):
        self.shape, self.device = shape, device
        config = shape.config
        self.layer = MoE(config, device=device, dtype=torch.bfloat16)
        for parameter in self.layer.parameters():
            if parameter.dim() < 3 and parameter is not self.layer.router.weight:
                torch.nn.init.normal_(parameter, std=0.02)
        self.layer.router.requires_grad_(False)  # logits are given
        for weight in self.layer.parameters():
            if weight.requires_grad:
                weight.main_grad = torch.zeros(weight.shape, device=device)
        size = (shape.tokens, config.hidden_size)
        self.x = torch.empty(size, device=device, dtype=torch.bfloat16).requires_grad_()
        self.dy = torch.empty(size, device=device, dtype=torch.bfloat16)
        self.logits = {}
        self.draw()
        parameters = list(self.layer.parameters())
        self.contenders = {
            "moelith": (lambda x, logits: self.ours(x, logits, False), parameters),
            "moelith, float32 main gradients": (lambda x, logits: self.ours(x, logits, True), parameters),
        }

    def ours(self, x, logits, main_gradients):
        self.layer.main_gradients = main_gradients
        return self.layer(x, router_logits=logits)

    def draw(self):
        c = self.shape.config
        with torch.no_grad():
            self.x.normal_()
            self.dy.normal_()
        for routing in ROUTINGS:
            self.logits[routing] = router_logits(routing, self.shape.tokens, c.num_experts, c.top_k, self.device).requires_grad_()

    def run(self, name, routing="uniform", clock=None):
        """Forward and backward; y, dx and the gradients of the weights."""
        function, parameters = self.contenders[name]
        mark = clock.mark if clock else lambda: None
        logits = self.logits[routing]
        mark()
        y = function(self.x, logits)
        mark()
        y.backward(self.dy)
        mark()
        leaves = [self.x, logits, *parameters]
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return y.detach(), gradients[0], dict(zip(map(id, parameters), gradients[2:]))


def reference(problem, tokens, expert):
    """y and dx of some tokens and the weight gradients of one expert, all in float32."""
    config, experts = problem.shape.config, rivals.Float32Experts(problem.layer)
    ids, weights = rivals.route(problem.logits["uniform"].detach(), config.top_k)
    x = problem.x.detach()[tokens].float().requires_grad_()
    y = torch.zeros_like(x)
    for e in ids[tokens].unique().tolist():
        rows, slots = (ids[tokens] == e).nonzero(as_tuple=True)
        y = y.index_add(0, rows, weights[tokens][rows, slots, None] * experts.routed(e, x[rows]))
    y = y + experts.shared(x)
    y.backward(problem.dy[tokens].float())

    rows, slots = (ids == expert).nonzero(as_tuple=True)
    of_expert = [w if w is None else w.requires_grad_() for w in experts.weights_of(expert)]
    out = weights[rows, slots, None] * experts.ffn(problem.x.detach()[rows].float(), *of_expert)
    out.backward(problem.dy[rows].float())
    return y.detach(), x.grad, [w.grad for w in of_expert[:2]]


def error(found, wanted):
    """The largest relative error of a row."""
    found, wanted = found.float(), wanted.float()
    return ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-20)).max().item()


def check(problem, name, tokens, expert, expected):
    y, dx, gradients = problem.run(name)
    errors = {"y": error(y[tokens], expected[0]), "dx": error(dx[tokens], expected[1])}
    for weight, kind, wanted in zip((problem.layer.gate_up_proj, problem.layer.down_proj), ("d_gate_up", "d_down"), expected[2]):
        gradient = gradients.get(id(weight))  # a rival with weights of its own is judged by y and dx
        if name.endswith("main gradients"):
            gradient = weight.main_grad
        if gradient is not None:
            errors[kind] = error(gradient[expert], wanted)
            if name.endswith("main gradients"):
                gradient.zero_()
    return errors


def kept_bytes(problem):
    """Bytes that a forward adds to what is allocated, without its outputs; and the plan's own figures."""
    shape, layer = problem.shape, problem.layer
    plan = Group.single().plan(layer.config.key, layer.options.key, torch.bfloat16, problem.device, shape.tokens)
    sizes = plan.buffer_sizes(shape.tokens)
    told = {"saved_bytes": sizes.saved, "workspace_bytes": sizes.workspace, "formula": sizes.formula}
    if problem.device == "cpu":
        return told
    before = torch.cuda.memory_allocated()
    layer.main_gradients = False
    out = layer(problem.x, router_logits=problem.logits["uniform"], return_routing=True)
    outputs = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in out)
    return told | {"measured_kept_bytes": torch.cuda.memory_allocated() - before - outputs}


def dense(problem):
    """cuBLAS over the two products of the same size, as a function of a clock."""
    c, tokens = problem.shape.config, problem.shape.tokens
    rows = tokens * c.top_k
    new = lambda *size: torch.randn(size, device=problem.device, dtype=torch.bfloat16)
    x, a = new(rows, c.hidden_size), new(rows, c.intermediate_size)
    gate_up, down = new(2 * c.intermediate_size, c.hidden_size) * 0.02, new(c.hidden_size, c.intermediate_size) * 0.02
    z, y = new(rows, 2 * c.intermediate_size), new(rows, c.hidden_size)

    def run(clock):
        clock.mark()
        torch.mm(x, gate_up.T, out=z)
        torch.mm(a, down.T, out=y)
        clock.mark()

    return run, 6 * rows * c.hidden_size * c.intermediate_size


def measure(name, shape, others, rounds, device):
    problem = Problem(shape, device)
    config = shape.config
    notes = {}
    for rival in others:
        try:
            function = rivals.RIVALS[rival](shape, problem.layer)
            problem.contenders[rival] = (function, function.parameters)
        except rivals.Unsupported as reason:
            notes[rival] = f"left out: {reason}"
        except Exception as failure:  # another's package may fail in its own ways; the rest is measured all the same
            notes[rival] = f"failed: {type(failure).__name__}: {str(failure).splitlines()[0][:200]}"

    tokens, expert = torch.randperm(shape.tokens, device=device)[:64], config.num_experts // 2
    expected = reference(problem, tokens, expert)
    errors = {}
    for contender in list(problem.contenders):
        try:
            errors[contender] = check(problem, contender, tokens, expert, expected)
            if contender.startswith("moelith"):
                assert within_bound(errors[contender]), f"{name}, {contender}: {errors[contender]}"
            elif not within_bound(errors[contender]):
                notes[contender] = f"errors {errors[contender]}"
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as failure:
            notes[contender] = f"failed: {type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
            del problem.contenders[contender]
    del expected
    timing.free()
    memory = kept_bytes(problem)
    peaks = {contender: timing.peak_bytes(lambda: problem.run(contender), device) for contender in problem.contenders}

    turns = {(c, "uniform"): lambda clock, c=c: problem.run(c, "uniform", clock) for c in problem.contenders}
    for routing in ROUTINGS[1:]:
        for c in [c for c in ("moelith", "plain PyTorch") if c in problem.contenders]:
            turns[c, routing] = lambda clock, c=c, routing=routing: problem.run(c, routing, clock)
    turns["dense"], dense_flops = dense(problem)
    medians = timing.in_turns(turns, rounds, device, problem.draw)
    dense_ms = medians.pop("dense")[0]
    times = {key: {"forward_ms": forward, "forward_backward_ms": forward + backward} for key, (forward, backward) in medians.items()}

    def fraction(times):
        """Of the rate of the dense products."""
        units = {"forward": shape.flops / dense_flops, "forward_backward": 3 * shape.flops / dense_flops}
        return {part: unit * dense_ms / times[part + "_ms"] for part, unit in units.items()}

    rows = []
    for routing in ROUTINGS:
        mine = times["moelith", routing]
        of_others = {c: t | {"fraction_of_dense": fraction(t)} for (c, r), t in times.items() if r == routing and c != "moelith"}
        row = {
            "shape": name, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
            "num_experts": config.num_experts, "top_k": config.top_k, "tokens": shape.tokens, "ranks": 1, "routing": routing,
            "dtype": "bfloat16", **mine, "fraction_of_dense": fraction(mine), "dense_tflops": dense_flops / dense_ms * 1e-9, "rivals": of_others,
        }
        if routing == "uniform":
            row |= memory | {"peak_bytes": peaks["moelith"], "largest_row_error": errors, "notes": notes}
            for c in of_others:
                of_others[c]["peak_bytes"] = peaks[c]
        else:
            even = times["moelith", "uniform"]
            row["time_of_uniform"] = {part: mine[part + "_ms"] / even[part + "_ms"] for part in ("forward", "forward_backward")}
        rows.append(row)
        show(row, peaks)
    for who, note in notes.items():
        print(f"  {who}: {note}")
    print(f"  memory: kept {memory.get('measured_kept_bytes', '?')} bytes, the plan says {memory['saved_bytes']}: {memory['formula']}; "
          f"workspace {memory['workspace_bytes'] / 2**20:.0f} MiB", flush=True)
    return rows


def show(row, peaks):
    for who, times in {"moelith": row, **row["rivals"]}.items():
        share = times["fraction_of_dense"]
        rate = {part: row["dense_tflops"] * value for part, value in share.items()}
        print(f"{row['shape']:12} {row['routing']:8} {who:32} {times['forward_ms']:9.3f} {times['forward_backward_ms']:9.3f} ms "
              f"{rate['forward']:5.0f} {rate['forward_backward']:5.0f} TFLOP/s  {share['forward']:.3f} {share['forward_backward']:.3f}"
              + (f"  peak {peaks[who] / 2**30:6.2f} GiB" if row["routing"] == "uniform" else ""), flush=True)


def main():
    parser = options(__doc__.splitlines()[0], "all but tiny", 7)
    parser.add_argument("--rival", choices=rivals.RIVALS, action="append", help="default: all")
    parser.add_argument("--quick-tuning", action="store_true", help="of sonic-moe: few of its tiles")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    others = arguments.rival or list(rivals.RIVALS)
    if arguments.quick_tuning and "sonic-moe" in others:
        rivals.tune_sonic_moe_quickly()
    print(f"{'shape':12} {'routing':8} {'who':32} {'forward':>9} {'fwd + bwd':>9}            rates of both  fractions of dense")
    rows = []
    for name in arguments.shape or [s for s in SHAPES if s != "tiny"]:
        rows += measure(name, SHAPES[name], others, arguments.rounds, arguments.device)
        timing.free()
        if arguments.json:
            timing.write(arguments.json, arguments.device, rounds=arguments.rounds, rows=rows)


if __name__ == "__main__":
    main()
