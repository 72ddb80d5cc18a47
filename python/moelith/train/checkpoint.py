"""Checkpoints: all that a run needs to go on as if it had never stopped.

    RUN/checkpoint-00000200/model.safetensors      the model's state_dict
                            optimizer.safetensors  AdamW's state, "optimizer.<parameter>.<what>", and the states of
                                                   the random number generators
                            state.json             step, data position, and the run's configuration

Tensors are those of the whole model, so a run may be resumed with another number of ranks. A checkpoint is written into a folder of another name, made durable, and renamed: a folder with its final name is whole.
Older ones are deleted after that, so a failed save leaves the former checkpoint as it was.
"""

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .errors import TrainError
from .files import sync_folder, write_whole

FORMAT = 1
NAME = re.compile(r"checkpoint-(\d{8,})")


@dataclass
class State:
    """The part of a checkpoint that is not tensors."""

    step: int
    position: int  # of data.Windows
    config: dict


def _tensors(model, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Of each file. Collective over the run's ranks."""
    optimizer_tensors = {f"optimizer.{name}": tensor for name, tensor in optimizer.state().items()}
    optimizer_tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        optimizer_tensors["random.cuda"] = torch.cuda.get_rng_state()
    return {"model": model.whole_state(), "optimizer": optimizer_tensors}


def _fill(folder: Path, state: State, files: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, tensors in files.items():
        path = folder / f"{name}.safetensors"
        save_file({k: t.detach().contiguous() for k, t in tensors.items()}, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    content = {"format": FORMAT, "step": state.step, "position": state.position, "config": state.config}
    write_whole(folder / "state.json", json.dumps(content, indent=1).encode())


def save(run: Path, state: State, model, optimizer) -> Path:
    """Writes the checkpoint of a step, unless it is there, and deletes older ones; collective over the run's ranks, of
    which the first writes. Raises TrainError on all of them if that fails; the former one is then untouched."""
    final = run / f"checkpoint-{state.step:08d}"
    files = _tensors(model, optimizer)
    model.ranks.on_first(lambda: final.exists() or _write(run, final, state, files))
    return final


def _write(run: Path, final: Path, state: State, files: dict[str, dict[str, torch.Tensor]]) -> None:
    temporary = run / f"{final.name}.part"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _fill(temporary, state, files)
        sync_folder(temporary)
        temporary.rename(final)
        sync_folder(run)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        former = latest(run)
        kept = f"the former checkpoint is intact: {former}" if former else "there is no earlier checkpoint"
        raise TrainError(f"cannot save the checkpoint of step {state.step} in {run}: {error}; {kept}") from error
    for old in run.iterdir():
        if NAME.fullmatch(old.name.removesuffix(".part")) and old != final:
            with contextlib.suppress(OSError):
                shutil.rmtree(old)


def latest(run: Path) -> Path | None:
    """The checkpoint of the most steps, or None."""
    found = [p for p in run.iterdir() if NAME.fullmatch(p.name)] if run.is_dir() else []
    return max(found, key=lambda p: int(NAME.fullmatch(p.name)[1]), default=None)


def read_state(folder: Path) -> State:
    """Raises TrainError if the folder is no checkpoint of this format."""
    try:
        content = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}; this program reads format {FORMAT}")
        return State(content["step"], content["position"], content["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"cannot read the checkpoint {folder}: {error}") from error


def load_tensors(folder: Path, model, optimizer) -> None:
    """Puts a checkpoint's tensors into the model, the optimizer and the random number generators. Raises TrainError if
    a file is damaged or belongs to another model."""
    try:
        model.load_whole_state(load_file(folder / "model.safetensors"))
        tensors = load_file(folder / "optimizer.safetensors")
        prefix = "optimizer."
        optimizer.load_state({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["random.cuda"])
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise TrainError(f"cannot load the checkpoint {folder}: {error}") from error
