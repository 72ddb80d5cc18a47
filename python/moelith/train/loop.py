"""The training loop: steps, log rows, evaluations, checkpoints, and leaving in good order."""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from . import checkpoint, data, pictures
from .clock import LayerClock
from .errors import TrainError
from .files import write_whole
from .log import Log
from .model import LanguageModel, Preset
from .optimizer import Optimizer, learning_rate
from .ranks import Ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EVAL_WINDOWS_BYTES = 64 * 1024  # of the held-out text, in evaluations before the last


@dataclass(frozen=True)
class Config:
    """What a run computes; a checkpoint carries it, and resuming takes it from there."""

    preset_name: str
    preset: Preset
    data: str | None  # DATA; None: the default text
    dtype: str        # of DTYPES
    seed: int
    threads: int
    steps: int
    horizon: int      # of the learning rate's schedule
    unigram_entropy: float = 0.0  # of the held-out text, bits per byte

    def to_json(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_json(content: dict) -> "Config":
        return Config(**{**content, "preset": Preset(**content["preset"])})


class StopRequest:
    """Ctrl-C or SIGTERM ends the loop after the step at hand; another one later ends the program at once. (One stop may
    come as several signals, from make, its process group and a terminal: those right after the first do not count.)"""

    def __init__(self):
        self.signal = None

    def __enter__(self) -> "StopRequest":
        self._former = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since > 2:
            raise KeyboardInterrupt


class Stepper:
    """One training step over buffers that stay where they are. Nothing in it waits for the device, and on a GPU all of
    it, from the embedding to the new weights, is one CUDA graph, captured once the first steps have warmed up. Sums over
    steps are read and cleared by take_sums."""

    WARM_UP = 3  # steps before the capture: libraries make their plans and workspaces

    def __init__(self, model: LanguageModel, optimizer: Optimizer, preset: Preset, device: torch.device, clock: LayerClock):
        self.model = model
        self.clock = clock
        self.optimizer = optimizer
        self.ranks = model.ranks
        self.captures = device.type == "cuda" and self.ranks.captures
        self.graph, self.stream, self.warm_steps = None, torch.cuda.Stream() if self.captures else None, 0
        self.balance_rate = preset.balance_rate
        self.bytes_of_all = preset.batch * preset.context
        windows = len(self.ranks.share(np.empty(preset.batch)))
        self.tokens = torch.zeros(windows, preset.context + 1, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.aux_sum = torch.zeros((), device=device)
        self.load_sum = torch.zeros(preset.layers, preset.num_experts, dtype=torch.int64, device=device)
        self.gradient_norm = torch.zeros((), device=device)
        self.steps = 0

    def step(self, batch: np.ndarray, rate: float) -> None:
        """batch: uint8 [B, context + 1], the windows of all ranks."""
        self.tokens.copy_(torch.from_numpy(self.ranks.share(batch)))
        self.optimizer.set_rate(rate)
        if self.captures and self.graph is None and self.warm_steps == self.WARM_UP:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
            self.clock.replayed()
        elif self.captures:
            self.warm_steps += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._iteration()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            self._iteration()
        self.steps += 1

    def _capture(self) -> None:
        """Makes the graph; nothing of a step happens. Where it cannot be made, the steps go on one by one."""
        graph = torch.cuda.CUDAGraph()
        try:
            with self.clock.in_graph(), torch.cuda.graph(graph, stream=self.stream):
                self._iteration()
        except RuntimeError as error:
            print(f"a step cannot be captured as a CUDA graph and is launched piece by piece instead: {error}", file=sys.stderr)
            self.captures = False
            self.optimizer.drop_gradients()
            torch.cuda.synchronize()
        else:
            self.graph = graph

    def release_graph(self) -> None:
        """Before the process groups go whose collectives it holds: NCCL would wait for it."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph = None

    def _iteration(self) -> None:
        logits, aux_loss, load = self.model(self.tokens[:, :-1])
        # This rank's part of the mean over the whole batch.
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten(), reduction="sum") / self.bytes_of_all
        (loss + aux_loss).backward()
        self.gradient_norm.copy_(self.optimizer.step())
        load = self.ranks.sum(load)
        self.model.balance(load, self.balance_rate)
        self.loss_sum += loss.detach()
        self.aux_sum += aux_loss.detach()
        self.load_sum += load

    def take_sums(self) -> dict:
        """Means and sums over all ranks since the last call, as fields of a log row."""
        for total in (self.loss_sum, self.aux_sum):
            self.ranks.sum(total)
        fields = {
            "loss": self.loss_sum.item() / self.steps,
            "gradient_norm": self.gradient_norm.item(),
            "aux_loss": self.aux_sum.item() / self.steps,
            "expert_load": self.load_sum.tolist(),
        }
        for total in (self.loss_sum, self.aux_sum, self.load_sum):
            total.zero_()
        self.steps = 0
        return fields


@torch.no_grad()
def bits_per_byte(model: LanguageModel, windows: np.ndarray, batch: int, device: torch.device) -> float:
    """Mean over every predicted byte of windows [n, context + 1] of -log2 of its probability. Collective."""
    model.eval()
    ranks = model.ranks
    mine = ranks.share(windows)
    total = torch.zeros((), dtype=torch.float64, device=device)
    # As many calls on every rank, since the layers' ranks work together; the last may have no windows on some.
    batch = ranks.largest_share(batch)
    for start in range(0, ranks.largest_share(len(windows)), batch):
        tokens = torch.from_numpy(mine[start:start + batch]).to(device, torch.int64)
        logits = model(tokens[:, :-1])[0]
        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    model.train()
    return ranks.sum(total).item() / (windows.shape[0] * (windows.shape[1] - 1)) / math.log(2)


class Progress:
    """A live bar on a terminal, otherwise a line for each log row."""

    def __init__(self, step: int, steps: int, shown: bool = True):
        self.steps = steps
        self.live = shown and sys.stderr.isatty()
        self.started, self.first = time.monotonic(), step
        width = os.get_terminal_size(sys.stderr.fileno()).columns if self.live else 0
        self.bar = tqdm(total=steps, initial=step, disable=not self.live, dynamic_ncols=width > 0,
                        **({} if width > 0 else {"ncols": 100, "nrows": 24}),  # a terminal that does not tell its size
                        bar_format="{n_fmt}/{total_fmt}  {remaining} to go  {desc} {bar}")
        self.held_out = ""

    def advance(self) -> None:
        self.bar.update()

    def show(self, row: dict) -> None:
        if "held_out_bits_per_byte" in row:
            self.held_out = f"held out {row['held_out_bits_per_byte']:.3f} bits/byte  "
        text = (f"loss {row['loss']:.3f} nats/byte  {self.held_out}{row['tokens_per_s']:,.0f} tokens/s  "
                f"MoE {row['moe_share']:.0%} of time")
        if self.live:
            self.bar.set_description_str(text)
        else:
            per_step = (time.monotonic() - self.started) / max(1, row["step"] - self.first)
            left = round(per_step * (self.steps - row["step"]))
            print(f"step {row['step']}/{self.steps}  {left // 60}:{left % 60:02} to go  {text}", flush=True)
            self.held_out = ""

    def close(self) -> None:
        self.bar.close()


class Run:
    """A run in its folder: everything between reading the text and the last picture."""

    def __init__(self, folder: Path, config: Config, device: torch.device, resumed_from: Path | None, text: bytes,
                 ranks: Ranks):
        self.folder, self.config, self.device, self.ranks = folder, config, device, ranks
        preset = config.preset
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        training, held_out = data.split(text, preset.context)
        self.windows = data.Windows(training, preset.context, config.seed)
        self.held_out = data.held_out_windows(held_out, preset.context)
        self.held_out_sample = data.held_out_windows(held_out, preset.context,
                                                     max(1, EVAL_WINDOWS_BYTES // preset.context))
        self.clock = LayerClock(device)
        # On a GPU workers are SMs: all of them.
        self.model = LanguageModel(preset, self.clock, workers=config.threads if device.type == "cpu" else 0, ranks=ranks)
        self.model.store_as(DTYPES[config.dtype]).to(device)
        self.optimizer = Optimizer(self.model)
        self.step, self.rate, self.started = 0, 0.0, 0.0
        if resumed_from is not None:
            state = checkpoint.read_state(resumed_from)
            checkpoint.load_tensors(resumed_from, self.model, self.optimizer)
            self.step, self.windows.position = state.step, state.position
        self.stepper = Stepper(self.model, self.optimizer, preset, device, self.clock)
        self.log = Log(folder / "log.jsonl", keep_up_to=self.step) if ranks.first else None

    def save(self) -> Path:
        state = checkpoint.State(self.step, self.windows.position, self.config.to_json())
        return checkpoint.save(self.folder, state, self.model, self.optimizer)

    def evaluate(self, windows: np.ndarray) -> float:
        self.clock.running = False
        result = bits_per_byte(self.model, windows, self.config.preset.batch, self.device)
        self.clock.running = True
        return result

    def train(self) -> int | None:
        """Trains up to config.steps; returns the signal that ended it before, or None. Saved either way."""
        preset, steps = self.config.preset, self.config.steps
        with StopRequest() as stop, contextlib.closing(Progress(self.step, steps, self.ranks.first)) as progress:
            self.started = time.perf_counter()
            ended_by = self.ranks.any(stop.signal or 0)
            while self.step < steps and not ended_by:
                self.step += 1
                self.rate = learning_rate(self.step, preset.learning_rate, self.warmup(), self.config.horizon)
                self.stepper.step(self.windows.next_batch(preset.batch), self.rate)
                progress.advance()
                last = self.step == steps
                if last or self.step % preset.eval_every == 0:
                    row = self.row()
                    row["held_out_bits_per_byte"] = self.evaluate(self.held_out if last else self.held_out_sample)
                    self.write(row, progress)
                elif self.step == 1 or self.step % preset.log_every == 0:
                    self.write(self.row(), progress)
                if not last and self.step % preset.save_every == 0:
                    paused = time.perf_counter()
                    self.save()
                    self.started += time.perf_counter() - paused
                ended_by = self.ranks.any(stop.signal or 0)  # all ranks stop at the same step
            if self.stepper.steps > 0:
                self.write(self.row(), progress)
            self.stepper.release_graph()
            self.save()
            return None if self.step >= steps else ended_by

    def warmup(self) -> int:
        return max(1, self.config.horizon // 20)

    def row(self) -> dict:
        """The log row of the steps since the one before."""
        count, preset = self.stepper.steps, self.config.preset
        sums = self.stepper.take_sums()  # on a GPU this waits for the steps
        seconds = time.perf_counter() - self.started
        return {
            "step": self.step,
            "loss": sums.pop("loss"),
            "tokens_per_s": count * preset.batch * preset.context / seconds,
            "moe_share": self.clock.take_seconds() / seconds,
            "learning_rate": self.rate,
            **sums,
        }

    def write(self, row: dict, progress: Progress) -> None:
        self.ranks.on_first(lambda: self.log.write(row))
        if self.ranks.first:
            progress.show(row)
        if not math.isfinite(row["loss"]):
            raise TrainError(f"the loss is {row['loss']} at step {row['step']}; the checkpoint before it is kept")
        self.started = time.perf_counter()

    def describe(self) -> str:
        preset = self.config.preset
        spread = self.model.spread_parameters().values()
        experts = sum(p[0].numel() for p in spread) * preset.num_experts  # of all ranks
        total = sum(p.numel() for p in self.model.parameters()) - sum(p.numel() for p in spread) + experts
        idle = experts * (1 - preset.top_k / preset.num_experts)
        shared = " and a shared one" if preset.shared_intermediate_size else ""
        return (f"{self.config.preset_name}: {total / 1e6:.3g} M parameters, {(total - idle) / 1e6:.3g} M at work on a "
                f"byte; {preset.layers} layers of {preset.num_experts} experts, {preset.top_k} chosen{shared}; "
                f"{self.config.steps} steps of {preset.batch} x {preset.context} bytes; {self.config.dtype}, "
                f"{self.device.type}, {self.config.threads} threads"
                + (f" in each of {self.ranks.world} processes, {self.ranks.ep_size} of which share the experts"
                   if self.ranks.world > 1 else ""))


def set_aside(folder: Path) -> Path | None:
    """Moves a run with a checkpoint out of the way of a new one of its name. Only one such is kept."""
    if checkpoint.latest(folder) is None:
        return None
    aside = folder.with_name(folder.name + ".previous")
    if (aside / "config.json").is_file():
        shutil.rmtree(aside)
    folder.rename(aside)
    return aside


def start(folder: Path, config: Config, device: torch.device, ranks: Ranks) -> Run:
    """A new run in the folder, with its own copy of the text, so that resuming needs nothing else."""
    def prepare():
        text = data.default_text() if config.data is None else data.text_from(config.data)
        _, held_out = data.split(text.data, config.preset.context)
        complete = Config(**{**vars(config), "unigram_entropy": data.unigram_entropy(held_out)})
        print(f"{text.describe()}; {data.readable(len(held_out))} of it held out")
        aside = set_aside(folder)
        if aside:
            print(f"the former run of this name is now {aside}")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "text.bin", text.data)
        write_whole(folder / "config.json", json.dumps(complete.to_json(), indent=1).encode())

    ranks.on_first(prepare)
    config = Config.from_json(json.loads((folder / "config.json").read_text()))
    return Run(folder, config, device, None, read_text(folder), ranks)


def read_text(folder: Path) -> bytes:
    try:
        return (folder / "text.bin").read_bytes()
    except OSError as error:
        raise TrainError(f"cannot read the run's text: {error}") from error


def resume(folder: Path, config: Config, saved: Path, device: torch.device, ranks: Ranks) -> Run:
    """The run of a checkpoint; config: the checkpoint's, perhaps with more steps."""
    text = read_text(folder)
    ranks.on_first(lambda: write_whole(folder / "config.json", json.dumps(config.to_json(), indent=1).encode()))
    return Run(folder, config, device, saved, text, ranks)


def finish(run: Run) -> None:
    """Pictures, and what came out of it."""
    drawn = pictures.draw(run.folder)
    rows = pictures.read_log(run.folder / "log.jsonl")
    held_out = [r["held_out_bits_per_byte"] for r in rows if "held_out_bits_per_byte" in r]
    if held_out and run.step >= run.config.steps:
        print(f"held-out text: {held_out[-1]:.3f} bits per byte (entropy of its single bytes: "
              f"{run.config.unigram_entropy:.3f})")
    for what, path in [("log", run.folder / "log.jsonl"), ("checkpoint", checkpoint.latest(run.folder)),
                       *(("picture", p) for p in drawn)]:
        print(f"{what + ':':12}{path}")
