"""The ranks of a run under torchrun: data parallel for all parameters but the routed experts', which are spread over the
ranks of an expert-parallel (EP) group. World = EP x replicas; ranks of an EP group follow each other.

Every rank trains on its share of each step's windows. The loss is the mean over the whole batch, so a gradient is the sum
over ranks of what each rank's part of that mean gives; the layer brings that sum to an expert from all ranks of its EP
group, and what is left is the sum over replicas.

On GPUs each process has its own, by LOCAL_RANK among those that it sees, and NCCL does what is not the layer's. Where a
host has more processes than GPUs they share them in turn, and gloo takes NCCL's place on all ranks, since it refuses two
ranks on one GPU: slow, for trying things out.
"""

import os

import numpy as np
import torch
import torch.distributed as dist

import moelith

from .errors import TrainError


def choose_gpu() -> None:
    """Makes this process's GPU the current one."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def backend(store, rank: int, world: int, gpu: str | None) -> str:
    """What all ranks talk by: NCCL if each has a GPU of its own. gpu: this rank's as every process knows it; None: it has
    none. Collective by the store, so that all decide alike whatever each of them sees."""
    store.set(f"gpu of rank {rank}", gpu or "")
    gpus = {store.get(f"gpu of rank {r}") for r in range(world)}
    return "nccl" if len(gpus) == world and b"" not in gpus else "gloo"


class Ranks:
    """One process of a run. The default is a run of one."""

    def __init__(self):
        self.rank, self.world = 0, 1
        self.captures = True    # whether what is done here between ranks can be part of a CUDA graph
        self.ep_rank, self.ep_size = 0, 1
        self.group = None       # moelith.Group of the layers
        self._ep = self._replicas = None  # process groups

    @staticmethod
    def from_environment(ep: int | None, device: torch.device) -> "Ranks":
        """As torchrun started this process; ep: the size of an EP group, None: all processes of a host."""
        ranks = Ranks()
        on_gpu = device.type == "cuda"
        ranks.world = int(os.environ.get("WORLD_SIZE", "1"))
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world)))
        if on_gpu:
            choose_gpu()
        ep = local_world if ep is None else ep
        if ranks.world % ep:
            raise TrainError(f"EP: {ep}; accepted: divisors of the number of processes, {ranks.world}")
        if ranks.world == 1:
            return ranks
        ranks.rank = int(os.environ["RANK"])
        ranks.ep_size, ranks.ep_rank = ep, ranks.rank % ep
        store, rank, world = next(dist.rendezvous("env://"))
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if on_gpu else None
        name = backend(store, rank, world, gpu)
        ranks.captures = name == "nccl"
        dist.init_process_group(name, store=store, rank=rank, world_size=world)
        # Every process takes part in making every group.
        for first in range(0, ranks.world, ep):
            members = list(range(first, first + ep))
            made = dist.new_group(members)
            if ranks.rank in members:
                ranks._ep = made
        for first in range(ep):
            members = list(range(first, ranks.world, ep))
            made = dist.new_group(members)
            if ranks.rank in members:
                ranks._replicas = made
        if ep > 1:
            ranks.group = moelith.Group.from_process_group(ranks._ep)
        return ranks

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files and talks to the person."""
        return self.rank == 0

    def share(self, windows: np.ndarray) -> np.ndarray:
        """This rank's part of windows [n, ..]: ranks in order, of sizes that differ by one at most."""
        begin, end = (len(windows) * r // self.world for r in (self.rank, self.rank + 1))
        return windows[begin:end]

    def largest_share(self, count: int) -> int:
        return -(-count // self.world)

    def wait_for_all(self) -> None:
        if self.world > 1:
            dist.barrier()

    def on_first(self, action) -> None:
        """Runs action() on the first rank. A TrainError there is raised on every rank, so that none waits for it."""
        error = None
        if self.first:
            try:
                action()
            except (TrainError, OSError) as raised:
                error = raised
        if not self.any(int(error is not None)):
            return
        raise error if error is not None else TrainError("the first process could not write the run's files")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, mine: int) -> int:
        """The largest of all ranks' numbers."""
        if self.world == 1:
            return mine
        number = torch.tensor(mine)
        if dist.get_backend() == "nccl":
            number = number.cuda()
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def sum_gradients(self, dense: list[torch.Tensor], experts: list[torch.Tensor]) -> None:
        for gradient in dense:
            self.sum(gradient)
        if self.world > self.ep_size:
            for gradient in experts:
                dist.all_reduce(gradient, group=self._replicas)

    def norm(self, dense: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, from that of the dense parameters and that of this rank's experts."""
        square = experts.square()
        if self.ep_size > 1:
            dist.all_reduce(square, group=self._ep)
        return (dense.square() + square).sqrt()

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """[local experts, ..] of the ranks of this EP group -> [E, ..]. Collective."""
        if self.ep_size == 1:
            return local
        parts = [None] * self.ep_size
        dist.all_gather_object(parts, local.cpu(), self._ep)  # a GPU's tensor would name the sender's GPU
        return torch.cat(parts).to(local.device)

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()
