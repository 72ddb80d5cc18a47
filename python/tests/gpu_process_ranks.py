"""What test_gpu.py runs under torchrun: a layer over processes on GPUs beside one process with all tokens.

    torchrun ... gpu_process_ranks.py BACKEND

Prints "good" at its end on every rank, after having compared all bits. With nccl, also what may run beside a pass.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from layer_cases import leaves, tensors_of
from test_groups import PER_EXPERT, PER_TOKEN, share_of_rank

from moelith import Group, LayerConfig, MoE, PlanOptions, Router, SharedExpert
from moelith import functional as MF

CONFIG = LayerConfig(hidden_size=256, intermediate_size=128, num_experts=12, top_k=4, router=Router(renormalize=True),
                     shared_experts=(SharedExpert(64),))
TOKENS = (300, 81)
MAX_TOKENS = 4096


def tensors(tokens, seed):
    made = tensors_of(CONFIG, tokens, seed=seed, dtype=torch.bfloat16, logits_dtype=torch.float32)

    def move(tensor):
        return None if tensor is None else tensor.detach().cuda().requires_grad_(tensor.requires_grad)

    return {name: [tuple(map(move, e)) for e in t] if name == "shared" else move(t) for name, t in made.items()}


def upstream(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, CONFIG.hidden_size, generator=generator).to(torch.bfloat16).cuda()


def step(given, dy, **options):
    for tensor in leaves(given).values():
        tensor.grad = None
    y = MF.moe(config=CONFIG, **options, **given)
    y.backward(dy)
    return y.detach(), {name: tensor.grad for name, tensor in leaves(given).items()}


def check_bits(rank, options, tokens, seed):
    """The bits of one rank on the joined batch."""
    joined, dy = tensors(sum(tokens), seed), upstream(sum(tokens), seed)
    y, gradients = step(joined, dy)
    rows = slice(sum(tokens[:rank]), sum(tokens[:rank + 1]))
    with torch.device("meta"):
        experts = MoE(CONFIG, options=options).local_experts
    share = share_of_rank(joined, rows, experts)
    mine, ours = step(share, dy[rows], options=options)
    assert torch.equal(mine, y[rows])
    for name, gradient in ours.items():
        if name in PER_TOKEN:
            assert torch.equal(gradient, gradients[name][rows]), name
        elif name in PER_EXPERT:
            assert torch.equal(gradient, gradients[name][experts]), name
    return share, dy[rows]


def check_graph(options, share, dy):
    """A captured step gives the bits of an eager one, also after a larger call has had another workspace."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(share, dy, options=options)
    torch.cuda.current_stream().wait_stream(stream)
    for tensor in leaves(share).values():
        tensor.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, gradients = step(share, dy, options=options)
    x = share["x"]
    for seed in (5, 6):
        with torch.no_grad():
            x.copy_(upstream(len(x), seed))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [y.clone(), *(g.clone() for g in gradients.values())]
        eager = step({**share, "x": x.detach().clone().requires_grad_()}, dy, options=options)
        for a, b in zip(replayed, (eager[0], *eager[1].values()), strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():  # takes a larger workspace
            larger = tensors(MAX_TOKENS, 1)
            names = {n: share[n] for n in share if n not in PER_TOKEN}
            MF.moe(config=CONFIG, options=options, **names, x=larger["x"], router_logits=larger["router_logits"])


def check_beside_nccl(rank, share):
    """Collectives on another stream, enqueued in another order on each rank."""
    side, other = torch.cuda.Stream(), torch.ones(1 << 22, device="cuda")
    dist.all_reduce(other)  # connections are made at the first
    torch.cuda.synchronize()

    def collective(stream):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other.fill_(1)
            dist.all_reduce(other)

    def layer(options):
        with torch.no_grad():
            return MF.moe(config=CONFIG, options=options, **share)

    all_sms = PlanOptions(group=Group.from_process_group(seconds=20), max_tokens=MAX_TOKENS)
    some = PlanOptions(group=Group.from_process_group(seconds=20), max_tokens=MAX_TOKENS, workers=96)
    wanted = layer(all_sms)
    assert torch.equal(layer(some), wanted)
    for _ in range(20):  # no pass behind a collective
        if rank == 0:
            collective(side)
        y = layer(all_sms)
        if rank != 0:
            collective(side)
    for _ in range(20):  # one rank's pass behind it: SMs are left for the other's
        if rank == 0:
            collective(torch.cuda.current_stream())
            y = layer(some)
        else:
            began = torch.cuda.Event()
            began.record()
            side.wait_event(began)
            y = layer(some)
            with torch.cuda.stream(side):
                other.fill_(1)
                dist.all_reduce(other)
    torch.cuda.synchronize()
    assert torch.equal(y, wanted)
    assert bool((other == dist.get_world_size()).all())
    # A circle: each rank's stream has the other's first behind its own. It ends with the limit, by an error.
    circle = PlanOptions(group=Group.from_process_group(seconds=2), max_tokens=MAX_TOKENS)
    layer(circle)
    torch.cuda.synchronize()
    dist.barrier()
    began = time.monotonic()
    if rank == 0:
        collective(torch.cuda.current_stream())
        layer(circle)
    else:
        layer(circle)
        collective(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert time.monotonic() - began < 10
    try:
        layer(circle)
        raise AssertionError("a pass that waited in vain told nobody")
    except (TimeoutError, RuntimeError) as error:
        assert "waited 2000 ms for rank" in str(error), error


def main():
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(sys.argv[1])
    group = Group.from_process_group(seconds=60)
    options = PlanOptions(group=group, max_tokens=MAX_TOKENS)
    share, dy = check_bits(rank, options, TOKENS, 1)
    check_bits(rank, options, (0, 200), 2)
    check_bits(rank, options, (1, 3000), 3)
    check_graph(options, share, dy)
    if sys.argv[1] == "nccl":
        check_beside_nccl(rank, share)
    dist.barrier()
    print("good", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
