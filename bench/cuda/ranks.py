"""The layer over the ranks of one host, a GPU each, beside plain PyTorch with all-to-all and beside each GPU alone.

    torchrun --standalone --nproc-per-node=N bench/cuda/ranks.py [--shape NAME] [--rounds N] [--json FILE] [--device cpu]

T tokens a rank, experts split over all ranks, bfloat16, balanced random routing, from router logits on. Correctness first: y and
dx of some tokens of each rank against float32 (1e-2 by row), and an expert's weight gradients against plain PyTorch's (2e-2, since both are rounded). Then all
take turns (timing.py), each begun by all ranks together; the slowest rank's median counts. "alone" is the layer on one GPU with
as many experts as each rank has and the same T, so the same rows and no other rank: alone / moelith is what the ranks keep of it.

On a CPU with fewer cores than ranks it is torch.compile that takes the minutes, which builds the rivals in each process:
TORCHDYNAMO_DISABLE=1 leaves that out.
"""

import argparse
import os

import torch
import torch.distributed as dist

import rivals
import timing
from layer_rivals import BOUND, error, within_bound
from moelith import MoE, PlanOptions
from moelith.runtime import Group
from shapes import SEVERAL_RANKS, router_logits


class AllToAll(torch.autograd.Function):
    """Rows to other ranks: `sent[r]` of them to rank r, `received[r]` from it."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.splits = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.splits
        return AllToAll.apply(gradient, received, sent), None, None


def plain(shape, layer):
    """Rows sorted by expert, all-to-all, sorted again, torch._grouped_mm, and all of it back; as rivals.plain."""
    config, ranks = shape.config, dist.get_world_size()
    local = len(layer.local_experts)

    def run(x, logits):
        ids, weights = rivals.route(logits, config.top_k)
        experts, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=config.num_experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)  # [ranks, local]
        sent, received = torch.stack([counts, theirs]).view(2, ranks, local).sum(2).tolist()
        rows = AllToAll.apply(x.index_select(0, order // config.top_k), sent, received)
        of_row = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(theirs, output_size=sum(received))
        of_row, by_expert = of_row.sort(stable=True)
        ends = theirs.view(ranks, local).sum(0).cumsum(0, dtype=torch.int32)
        z = torch._grouped_mm(rows.index_select(0, by_expert), layer.gate_up_proj.mT, ends)
        if config.gate_up_bias:
            z = z + layer.gate_up_bias[of_row]
        out = torch._grouped_mm(rivals.activate(config.activation, z), layer.down_proj.mT, ends)
        if config.down_bias:
            out = out + layer.down_bias[of_row]
        out = AllToAll.apply(out.index_select(0, inverse(by_expert)), received, sent)
        y = rivals.combine(out.index_select(0, inverse(order)), weights.to(x.dtype).view(-1, 1), config.top_k)
        return rivals.with_shared_experts(y, layer, x)

    return run


def inverse(permutation):
    return torch.empty_like(permutation).scatter_(0, permutation, torch.arange(len(permutation), device=permutation.device))


class Problem:
    def __init__(self, shape, group, device):
        self.shape, self.device = shape, device
        config, ranks = shape.config, dist.get_world_size()
        if config.num_experts % ranks:
            raise SystemExit(f"--nproc-per-node: {ranks}; accepted here are divisors of {config.num_experts} experts")
        torch.manual_seed(1 + dist.get_rank())
        self.layer = MoE(config, options=PlanOptions(group=group, max_tokens=shape.tokens), device=device, dtype=torch.bfloat16)
        for shared in self.layer.shared_experts:  # alike on all ranks
            for weight in shared.parameters():
                dist.broadcast(weight.data, 0)
        self.layer.router.requires_grad_(False)
        self.x = torch.empty(shape.tokens, config.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
        self.dy = torch.empty_like(self.x)
        self.draw()
        run = plain(shape, self.layer)
        self.contenders = {
            "moelith": (lambda: self.layer(self.x, router_logits=self.logits), self.layer),
            "plain PyTorch": (lambda: run(self.x, self.logits), self.layer),
        }
        if config.num_experts // ranks >= config.top_k:
            mine = shape.with_experts(config.num_experts // ranks)
            alone = MoE(mine.config, device=device, dtype=torch.bfloat16)
            alone.router.requires_grad_(False)
            self.contenders["alone"] = (lambda: alone(self.x, router_logits=self.logits_alone), alone)
        self.token = torch.zeros(1, device=device)

    def draw(self):
        config = self.shape.config
        new = lambda experts: router_logits("uniform", self.shape.tokens, experts, config.top_k, self.device).requires_grad_()
        with torch.no_grad():
            self.x.normal_(), self.dy.normal_()
        self.logits, self.logits_alone = new(config.num_experts), new(config.num_experts // dist.get_world_size())

    def run(self, name, clock=None):
        forward, layer = self.contenders[name]
        mark = clock.mark if clock else lambda: None
        dist.all_reduce(self.token)  # all begin together
        mark()
        y = forward()
        mark()
        y.backward(self.dy)
        mark()
        dx, gradients = self.x.grad, {name: p.grad for name, p in layer.named_parameters()}
        for leaf in (self.x, self.logits, self.logits_alone, *layer.parameters()):
            leaf.grad = None
        return y.detach(), dx, gradients


def gather(tensor):
    all_ranks = tensor.new_empty(dist.get_world_size() * len(tensor), *tensor.shape[1:])
    dist.all_gather_into_tensor(all_ranks, tensor.contiguous())
    return all_ranks


def check(problem):
    """The largest errors; all ranks compute their experts' part of the tokens of all."""
    config, layer = problem.shape.config, problem.layer
    tokens = torch.randperm(problem.shape.tokens, device=problem.device)[:64]
    ids, weights = (gather(t[tokens]) for t in rivals.route(problem.logits.detach(), config.top_k))
    x, dy = gather(problem.x.detach()[tokens]).float().requires_grad_(), gather(problem.dy[tokens]).float()
    y = torch.zeros_like(x)
    reference = rivals.Float32Experts(layer)
    for at, expert in enumerate(layer.local_experts):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            y = y.index_add(0, rows, weights[rows, slots, None] * reference.routed(at, x[rows]))
    if dist.get_rank() == 0:
        y = y + reference.shared(x)
    y.backward(dy)
    y, dx = y.detach(), x.grad
    dist.all_reduce(y), dist.all_reduce(dx)
    mine = slice(dist.get_rank() * len(tokens), (dist.get_rank() + 1) * len(tokens))
    found = problem.run("moelith")
    others = problem.run("plain PyTorch")
    errors = {"y": error(found[0][tokens], y[mine]), "dx": error(found[1][tokens], dx[mine])}
    between = {name: error(found[2][name][0], others[2][name][0]) for name in ("gate_up_proj", "down_proj")}
    return largest(errors, problem.device), largest(between, problem.device)


def largest(numbers, device):
    """Of all ranks, each."""
    values = torch.tensor(list(numbers.values()), device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(numbers, values.tolist()))


def link_bytes(problem):
    """What has to leave this rank in a forward: a token once for each rank that has an expert of it, and each route's row back
    from there. Mean over ranks."""
    config, ranks = problem.shape.config, dist.get_world_size()
    home = rivals.route(problem.logits.detach(), config.top_k)[0] // (config.num_experts // ranks)
    away = home != dist.get_rank()
    tokens = sum(((home == r).any(1)).sum() for r in range(ranks) if r != dist.get_rank()) if ranks > 1 else torch.zeros(())
    total = torch.tensor([float(tokens), float(away.sum())], device=problem.device)
    dist.all_reduce(total)
    dispatch, combine = (total / ranks * config.hidden_size * 2).tolist()
    return {"dispatch": int(dispatch), "combine": int(combine)}


def measure(name, shape, group, rounds, device):
    problem = Problem(shape, group, device)
    errors, between = check(problem)
    assert within_bound(errors) and within_bound(between, 2 * BOUND), f"{name}: {errors}, {between}"
    timing.free()
    turns = {c: lambda clock, c=c: problem.run(c, clock) for c in problem.contenders}
    times = {}
    for c, (forward, backward) in timing.in_turns(turns, rounds, device, problem.draw).items():
        slowest = largest({"forward_ms": forward, "forward_backward_ms": forward + backward}, device)
        times[c] = slowest
    mine, config = times.pop("moelith"), shape.config
    row = {
        "shape": name, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts, "top_k": config.top_k, "tokens": shape.tokens, "ranks": dist.get_world_size(),
        "routing": "uniform", "dtype": "bfloat16", **mine, "rivals": times, "least_bytes_on_links": link_bytes(problem),
        "largest_row_error": errors, "weight_gradients_beside_plain_pytorch": between,
    }
    if dist.get_rank() == 0:
        for who, t in {"moelith": mine, **times}.items():
            kept = "" if who != "moelith" or "alone" not in times else "  of alone " + " / ".join(
                f"{times['alone'][part] / mine[part]:.3f}" for part in ("forward_ms", "forward_backward_ms"))
            print(f"{name:14} {row['ranks']} ranks  {who:14} {t['forward_ms']:9.3f} {t['forward_backward_ms']:9.3f} ms{kept}", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SEVERAL_RANKS, action="append", help="default: all but tiny")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    group = Group.from_process_group()
    rows = []
    for name in arguments.shape or [s for s in SEVERAL_RANKS if s != "tiny"]:
        rows.append(measure(name, SEVERAL_RANKS[name], group, arguments.rounds, device))
        timing.free()
        if arguments.json and dist.get_rank() == 0:
            timing.write(arguments.json, arguments.device, rounds=arguments.rounds, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
