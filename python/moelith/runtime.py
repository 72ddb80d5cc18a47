"""Groups, and what is kept for each of them between calls: plans and the workspace."""

import functools
import itertools
import json
import os
import threading
import uuid
import weakref

import torch

from moelith import _moelith
from moelith.config import assign, native_config

_DTYPES = {
    torch.float64: _moelith.DataType.float64,
    torch.float32: _moelith.DataType.float32,
    torch.bfloat16: _moelith.DataType.bfloat16,
    torch.int64: _moelith.DataType.int64,
    torch.int32: _moelith.DataType.int32,
    torch.uint8: _moelith.DataType.uint8,
}
# A PyTorch that hands out no table of C functions has its tensors asked for their attributes.
_moelith.know_pytorch(_DTYPES, torch.Tensor, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
SINGLE_HANDLE = "0"  # of the group of one rank
BUFFER_ALIGNMENT = 256  # bytes, of saved buffers and of the workspace (include/moelith/layer.hpp)
_SMALLEST_PLAN = 64  # tokens


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def config_for(key: str, dtype: torch.dtype):
    """The C++ LayerConfig of LayerConfig.key for x of that dtype."""
    if dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"x: dtype {dtype_name(dtype)}; accepted: float64, float32, bfloat16")
    return native_config(key, dtype_name(dtype))


def aligned_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """nbytes uninitialised bytes that start at a multiple of BUFFER_ALIGNMENT."""
    if device.type == "cpu":  # PyTorch aligns to 64 bytes there
        return _moelith.aligned_bytes(nbytes, BUFFER_ALIGNMENT)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Group:
    """One rank's membership of an expert-parallel group (include/moelith/group.hpp).

    Passes of one group run one after another: calls from several threads wait for each other, and share one workspace.
    """

    _by_handle = weakref.WeakValueDictionary()
    _handles = itertools.count(1)
    _single = None
    _single_lock = threading.Lock()

    def __init__(self, native, handle=None):
        # A string, which torch.compile takes as a constant (it may make a symbol of a number).
        self.handle = str(next(Group._handles)) if handle is None else handle
        self.lock = threading.RLock()  # that knows its owner
        self.size = native.size
        self._native = native
        self._plans = {}
        self._buffer_sizes = functools.lru_cache(maxsize=256)(_moelith.Plan.buffer_sizes)
        self._workspaces = {}
        self._on_gpus = True  # whether its layers may be on GPUs
        self._captured = {}  # workspaces that CUDA graphs hold the addresses of
        Group._by_handle[self.handle] = self

    @staticmethod
    def single() -> "Group":
        """The group of one rank that calls without a group use."""
        with Group._single_lock:
            if Group._single is None:
                Group._single = Group(_moelith.Group.single(), handle=SINGLE_HANDLE)
            return Group._single

    @staticmethod
    def threads(ranks: int) -> list["Group"]:
        """A group of `ranks` ranks of this process; every rank calls from a thread of its own, with its own Group. For
        layers on the CPU: PyTorch's threads share streams, where on a GPU one rank's pass would wait behind another's."""
        groups = [Group(native) for native in _moelith.Group.threads(ranks)]
        for group in groups:
            group._on_gpus = ranks == 1
        return groups

    @staticmethod
    def process(name: str, rank: int, ranks: int, seconds: float = 60.0) -> "Group":
        """This process's rank among `ranks` processes of one host. Collective: all give the same name (letters, digits,
        '-', '_'), which no other group has at that time. `seconds`: as for set_timeout. Layers on GPUs: each process's is
        on its current GPU (torch.cuda.set_device) when it first runs; GPUs reach each other by load and store, or are
        one."""
        return Group(_moelith.Group.process(name, rank, ranks, seconds))

    @staticmethod
    def from_process_group(process_group=None, seconds: float = 60.0) -> "Group":
        """The same ranks as those of a torch.distributed process group (None: the default one). Collective over it.

        Raises RuntimeError on every rank, naming those concerned, if its ranks are not processes of one host.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError("process_group: torch.distributed is not initialised; call init_process_group first")
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        if rank < 0:
            raise ValueError("process_group: this process is not a rank of it")
        facts = [None] * ranks
        dist.all_gather_object(facts, (Group._place(), uuid.uuid4().hex), process_group)
        _moelith.Group.require_one_place([place for place, _ in facts], "process_group")
        return Group(_moelith.Group.process(facts[0][1], rank, ranks, seconds, "process_group"))

    @staticmethod
    def _place() -> str:
        """The host and the shared memory that this process sees."""
        return _moelith.Group.place()

    @staticmethod
    def of(handle: str) -> "Group":
        if handle == SINGLE_HANDLE:
            return Group._single or Group.single()
        group = Group._by_handle.get(handle)
        if group is None:
            raise ValueError("group: the expert-parallel group of this call no longer exists; keep its Group alive")
        return group

    def __deepcopy__(self, _memo):
        return self  # a copy of a layer belongs to the same group

    def __reduce__(self):
        if self.handle == SINGLE_HANDLE:
            return Group.single, ()
        raise TypeError(f"{self!r} is a connection between ranks of this run; it cannot be pickled")

    @property
    def rank(self) -> int:
        return self._native.rank

    def set_timeout(self, seconds: float) -> None:
        """The longest wait for another rank; past it a pass raises TimeoutError and the group is unusable.

        So is it after any other error of a pass, and when a signal handler raises during one on the main thread
        (Ctrl-C): the other ranks get a RuntimeError at once.
        """
        self._native.set_timeout(seconds)

    def in_turn(self, call):
        """call(), a call of all ranks: threads take turns, and if it raises, the other ranks' calls end."""
        if self.lock._is_owned():
            raise RuntimeError("the layer was called, by a signal handler or a finaliser, within a call on the same thread")
        # The lock's own context manager: a signal handler that raises finds it either not taken or given back again.
        with self.lock:
            try:
                return call()
            except BaseException as error:
                self.fail(error)
                raise

    def fail(self, reason) -> None:
        """Tells all ranks that this one will not come: their calls end at once, with this reason, and so do later ones. A
        call that raises does so by itself. Of a group of one rank it does nothing."""
        self._native.fail(str(reason) or type(reason).__name__)

    def __repr__(self):
        return f"Group(rank={self.rank}, size={self.size})"

    def plan(self, config_key: str, options_key: str, dtype: torch.dtype, device_type: str, tokens: int):
        """The plan for calls of this many tokens; made at the first such call."""
        key = (config_key, options_key, dtype, device_type)
        plans = self._plans.get(key)
        if plans is None:
            plans = self._plans[key] = {}
        elif "of_any_call" in plans:
            return plans["of_any_call"]
        capacity = max(_SMALLEST_PLAN, 1 << (tokens - 1).bit_length()) if tokens > 0 else _SMALLEST_PLAN
        # A call and its backward have the same number of tokens and so get the same plan, whatever came in between.
        found = plans.get(capacity)
        return found if found is not None else self._make_plan(key, plans, capacity)

    def _make_plan(self, key, plans, capacity):
        config_key, options_key, dtype, device_type = key
        fields = json.loads(options_key)
        del fields["library"]
        given = fields.pop("max_tokens")
        if given is None and self.size > 1:
            raise ValueError(
                "PlanOptions.max_tokens: None; accepted for a group of several ranks: the largest number of tokens of "
                "any call on this rank"
            )
        config = config_for(config_key, dtype)
        if device_type == "cuda" and not self._on_gpus:
            raise NotImplementedError(
                f"group: {self.size} ranks of one process on device cuda; accepted there from Python is a process for each "
                "rank (Group.from_process_group, Group.process)"
            )
        native = _moelith.PlanOptions()
        assign(native, fields | {"max_tokens": capacity if given is None else given})
        native.device = device_type
        native.group = self._native
        plan = _moelith.Plan.create(config, native, watch_signals=self.waits_on_main_thread())
        # Where the caller says max_tokens, one plan serves all calls.
        plans[capacity if given is None else "of_any_call"] = plan
        return plan

    def buffer_sizes(self, plan, tokens: int):
        """plan.buffer_sizes(tokens); the layers of a model ask for the same."""
        return self._buffer_sizes(plan, tokens)

    def waits_on_main_thread(self, device_type: str = "cpu") -> bool:
        """Whether a pass called now may wait for another rank on the thread where Python's signal handlers run. (Not on a
        GPU, where the kernels wait.)"""
        return self.size > 1 and device_type == "cpu" and threading.current_thread() is threading.main_thread()

    def workspace(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Scratch memory for one pass; to be called, and used, with the lock held."""
        held = self._workspaces.get(device)
        if held is None or held.numel() < nbytes:
            self._workspaces.pop(device, None)  # so that the old one can be reused
            held = aligned_empty(nbytes + nbytes // 4, device)
            self._workspaces[device] = held
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.setdefault(held.data_ptr(), held)  # the graph uses it on, whatever comes in its place
        return held

    def release_workspace(self) -> None:
        """Gives the scratch memory back; the next pass allocates it anew. Captured CUDA graphs must not be replayed."""
        with self.lock:
            self._workspaces.clear()
            self._captured.clear()


class _Fork:
    """Keeps a fork apart from passes of other threads: the child, which has not these threads, would wait for them."""

    held = []

    @classmethod
    def before(cls):
        Group._single_lock.acquire()
        single = Group._single
        # Not for ever: a signal handler may fork in the midst of a pass.
        cls.held = [single.lock] if single is not None and single.lock.acquire(timeout=10) else []

    @classmethod
    def after(cls):
        for lock in cls.held:
            lock.release()
        cls.held = []
        Group._single_lock.release()


os.register_at_fork(before=_Fork.before, after_in_parent=_Fork.after, after_in_child=_Fork.after)
