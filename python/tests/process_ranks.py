"""What test_processes.py runs under torchrun: a layer over EP x replicas processes beside one process with all tokens.

    torchrun ... process_ranks.py EP

Prints "good" at its end on every rank, after having compared all bits or, where replicas' gradients are summed, values.
"""

import sys

import torch
import torch.distributed as dist
from layer_cases import DEEPSEEK, leaves, tensors_of
from test_groups import PER_EXPERT, PER_TOKEN, one_rank, share_of_rank, upstream

from moelith import Group, MoE, PlanOptions
from moelith import functional as MF

TOKENS = (9, 0, 20, 12)


def main():
    ep = int(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks_apart_are_refused(rank)
    groups = [(dist.new_group(list(range(first, first + ep))), range(first, first + ep)) for first in range(0, world, ep)]
    across = [dist.new_group(list(range(first, world, ep))) for first in range(ep)]
    mine, members = groups[rank // ep]
    group = Group.from_process_group(mine, seconds=30)
    assert (group.rank, group.size) == (rank % ep, ep)

    tensors = tensors_of(DEEPSEEK, sum(TOKENS[:world]))
    starts = [sum(TOKENS[:r]) for r in range(world)]
    options = PlanOptions(group=group, max_tokens=32, workers=1)
    with torch.device("meta"):
        experts = MoE(DEEPSEEK, options=options).local_experts
    # The batch of this EP group, on one rank: the same bits.
    whole = slice(starts[members[0]], starts[members[-1]] + TOKENS[members[-1]])
    joined = share_of_rank(tensors, whole, list(range(DEEPSEEK.num_experts)))
    dy = upstream(sum(TOKENS[:world]), torch.float64)
    output = MF.moe(config=DEEPSEEK, **joined)
    output.backward(dy[whole])
    wanted = {name: tensor.grad for name, tensor in leaves(joined).items()}
    rows = slice(starts[rank], starts[rank] + TOKENS[rank])
    inside = slice(rows.start - whole.start, rows.stop - whole.start)
    share = share_of_rank(tensors, rows, experts)
    y = MF.moe(config=DEEPSEEK, options=options, **share)
    y.backward(dy[rows])
    assert torch.equal(y, output[inside])
    for name, tensor in leaves(share).items():
        if name in PER_TOKEN:
            assert torch.equal(tensor.grad, wanted[name][inside]), name
        elif name in PER_EXPERT:
            assert torch.equal(tensor.grad, wanted[name][experts]), name

    # E3: summed over replicas, an expert's gradient is that of the whole batch, once.
    _, everything = one_rank(DEEPSEEK, tensors)
    for name, tensor in leaves(share).items():
        if name in PER_TOKEN:
            continue
        routed = name in PER_EXPERT
        dist.all_reduce(tensor.grad, group=across[rank % ep] if routed else None)
        expected = everything[name][experts] if routed else everything[name]
        torch.testing.assert_close(tensor.grad, expected, rtol=1e-12, atol=1e-12, msg=name)
    dist.barrier()
    print("good", flush=True)


def ranks_apart_are_refused(rank):
    """As if the second rank saw another host's shared memory."""
    place = Group._place
    if rank == 1:
        Group._place = staticmethod(lambda: place() + "1")
    try:
        Group.from_process_group()
        raise AssertionError("ranks of two hosts were taken for one group")
    except RuntimeError as error:
        assert "its ranks do not share memory" in str(error) and "rank 1 on" in str(error), error
    Group._place = staticmethod(place)


if __name__ == "__main__":
    main()
