"""How much of a training step passes inside the MoE layers.

LayerClock.enter and LayerClock.leave are identities placed around a layer. Forward, the clock runs from enter to leave;
backward, which comes the other way, from leave to enter.
"""

import contextlib
import time

import torch


class _Mark(torch.autograd.Function):
    """The identity; calls `forward` now and `backward` when the gradient passes."""

    @staticmethod
    def forward(ctx, tensor, on_forward, on_backward):
        ctx.on_backward = on_backward
        on_forward()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.on_backward()
        return gradient, None, None


class LayerClock:
    """Adds up the time inside the layers it surrounds.

    On a GPU it records pairs of events in the stream and reads them only when asked, so it never makes the CPU wait
    inside a step. `running` switches it off for steps that need no measurement. A graph that was captured under
    in_graph() records its events at every replay; only those of the last one can be read, so they stand for all.
    """

    def __init__(self, device: torch.device):
        self.running = True
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._open = None
        self._pairs = []
        self._graph_pairs, self._replays, self._capturing = [], 0, False

    @contextlib.contextmanager
    def in_graph(self):
        """Around the capture of a graph."""
        self._capturing, self._graph_pairs = True, []
        try:
            yield
        finally:
            self._capturing, self._open = False, None

    def replayed(self) -> None:
        """A graph that was captured under in_graph() has been launched."""
        self._replays += 1

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return self._mark(x, self._start, self._stop)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        return self._mark(y, self._stop, self._start)

    def take_seconds(self) -> float:
        """Seconds since the last call. On a GPU the work must have finished."""
        seconds, self._seconds = self._seconds, 0.0
        seconds += sum(start.elapsed_time(stop) for start, stop in self._pairs) / 1e3
        self._pairs.clear()
        if self._replays:
            seconds += self._replays * sum(start.elapsed_time(stop) for start, stop in self._graph_pairs) / 1e3
            self._replays = 0
        return seconds

    def _mark(self, tensor, on_forward, on_backward):
        if not self.running:
            return tensor
        if not torch.is_grad_enabled():
            on_forward()
            return tensor
        return _Mark.apply(tensor, on_forward, on_backward)

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=self._capturing)
        event.record()
        return event

    def _start(self):
        self._open = self._now()

    def _stop(self):
        if self._open is None:
            return
        if self._cuda:
            (self._graph_pairs if self._capturing else self._pairs).append((self._open, self._now()))
        else:
            self._seconds += self._now() - self._open
        self._open = None
