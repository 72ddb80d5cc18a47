"""What the benchmarks of this folder share: timing by CUDA events in turns, memory, and the JSON file."""

import datetime
import gc
import json
import os
import pathlib
import random
import shlex
import statistics
import subprocess
import sys
import time

import torch

HEAD_START = 5_000_000  # cycles, about 3 ms
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Clock:
    """Marks of a stretch of work, on the device's time line (the host's on a CPU)."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"
        self.marks = []

    def mark(self):
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append(event if self.cuda else time.perf_counter())

    def milliseconds(self):
        """Of each stretch between two marks; waits for the device."""
        if self.cuda:
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:])]


def in_turns(contenders, rounds, device, prepare=lambda: None, warm_up=2):
    """Medians of what `contenders` (name -> function of a Clock that marks its stretches) take, one after another in each
    round, since the card's clock moves with its heat; in another order each time, since it also depends on what ran just
    before. `prepare` makes fresh inputs before each round. The device idles a little before each, so that a host that is
    slow at launching is ahead of it and is not measured."""
    samples = {name: [] for name in contenders}
    order, dice = list(contenders.items()), random.Random(0)
    for round_ in range(warm_up + rounds):
        prepare()
        clocks = {}
        dice.shuffle(order)
        for name, run in order:
            clocks[name] = Clock(device)
            if clocks[name].cuda:
                torch.cuda._sleep(HEAD_START)
            run(clocks[name])
        for name, clock in clocks.items():
            if round_ >= warm_up:
                samples[name].append(clock.milliseconds())
        if device != "cpu":
            torch.cuda.synchronize()
    return {name: [statistics.median(stretch) for stretch in zip(*values)] for name, values in samples.items()}


def peak_bytes(run, device):
    """The most that the allocator held during run(), above what it held before."""
    if device == "cpu":
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graph_of(run):
    """A CUDA graph of run(), after three warm-up calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def free():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write(path, device, **results):
    """The results file: on what, when, by which command, and the results. `rows` are those that README.md shows: of the form
    that scripts/readme knows."""
    commit = os.environ.get("MOELITH_COMMIT")
    if not commit:
        commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    words = [word for at, word in enumerate(sys.argv) if at and "--json" not in sys.argv[at - 1 : at + 1]]
    command = shlex.join([os.path.relpath(sys.argv[0], ROOT), *words])
    result = {
        "gpu": torch.cuda.get_device_name() if device != "cpu" else None, "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown", "command": command, "torch": torch.__version__, **results,
    }
    pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n")
