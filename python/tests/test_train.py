"""The trainer as a whole, with a model of a few thousand parameters."""

import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moelith.train import checkpoint, data, loop, pictures
from moelith.train.__main__ import main, run
from moelith.train.errors import TrainError
from moelith.train.files import write_whole
from moelith.train.ranks import backend

SMALL = [f"--set={field}" for field in (
    "hidden_size=32", "layers=2", "heads=2", "num_experts=4", "intermediate_size=16", "shared_intermediate_size=16",
    "context=32", "batch=4", "log_every=4", "eval_every=8", "save_every=6")]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("DEVICE", "cpu")  # test_gpu.py has the trainer on a GPU


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(Path(data.__file__).read_bytes())
    return path


def train(tmp_path, text, name, *more):
    """run(), in this process, of a small model; returns (exit status, folder of the run)."""
    arguments = [f"--data={text}", f"--runs={tmp_path / 'runs'}", f"--name={name}", "--threads=1", *SMALL, *more]
    return run(arguments), tmp_path / "runs" / name


def resume(tmp_path, name, *more):
    return run([f"--runs={tmp_path / 'runs'}", f"--name={name}", "--resume", *more])


def tensors_of(folder):
    saved = checkpoint.latest(folder)
    return {**load_file(saved / "model.safetensors"), **load_file(saved / "optimizer.safetensors")}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def rows_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ten_steps_and_ten_resumed_are_twenty(tmp_path, text, dtype):
    assert train(tmp_path, text, "straight", "--steps=20", f"--dtype={dtype}")[0] == 0
    assert train(tmp_path, text, "halved", "--steps=10", f"--dtype={dtype}")[0] == 0
    text.unlink()  # a run keeps its own copy
    assert resume(tmp_path, "halved", "--steps=20") == 0
    straight, halved = tmp_path / "runs/straight", tmp_path / "runs/halved"
    tensors = tensors_of(straight)
    assert "optimizer.embedding.weight.exp_avg" in tensors
    assert_same_bits(tensors, tensors_of(halved))
    last = [rows_of(folder)[-1] for folder in (straight, halved)]
    assert last[0]["held_out_bits_per_byte"] == last[1]["held_out_bits_per_byte"]
    assert checkpoint.latest(halved).name == "checkpoint-00000020"


def test_an_interrupt_saves_and_resuming_goes_on_as_if_it_never_came(tmp_path, text, monkeypatch, capsys):
    _, straight = train(tmp_path, text, "straight", "--steps=12")
    step = loop.Stepper.step
    made = []

    def interrupted(*arguments):
        step(*arguments)
        made.append(1)
        if len(made) == 7:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.Stepper, "step", interrupted)
    status, stopped = train(tmp_path, text, "stopped", "--steps=12")
    assert status == 128 + signal.SIGINT and len(made) == 7
    assert checkpoint.read_state(checkpoint.latest(stopped)).step == 7
    assert "stopped by SIGINT and saved at step 7" in capsys.readouterr().out
    assert [row["step"] for row in rows_of(stopped)] == [1, 4, 7]
    assert resume(tmp_path, "stopped") == 0
    assert_same_bits(tensors_of(straight), tensors_of(stopped))
    assert [row["step"] for row in rows_of(stopped)] == [1, 4, 7, 8, 12]


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, text, monkeypatch):
    _, straight = train(tmp_path, text, "straight", "--steps=12")
    step = loop.Stepper.step
    made = []

    def killed(*arguments):
        made.append(1)
        if len(made) == 10:
            raise KeyboardInterrupt  # a second Ctrl-C
        step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Stepper, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, text, "killed", "--steps=12")
    folder = tmp_path / "runs/killed"
    assert [row["step"] for row in rows_of(folder)] == [1, 4, 8]
    assert resume(tmp_path, "killed") == 0
    assert_same_bits(tensors_of(straight), tensors_of(folder))
    assert [row["step"] for row in rows_of(folder)] == [1, 4, 8, 12]  # row 8 was made anew, from the checkpoint of 6


def start_program(tmp_path, text, *more, **popen):
    arguments = [f"--data={text}", f"--runs={tmp_path / 'runs'}", "--name=run", "--threads=1", *SMALL, *more]
    return subprocess.Popen([sys.executable, "-m", "moelith.train", *arguments], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **popen)


def test_sigterm_ends_the_program_with_a_checkpoint(tmp_path, text):
    program = start_program(tmp_path, text, "--steps=1000000")
    log = tmp_path / "runs/run/log.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and program.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    out, error = program.communicate(timeout=120)
    assert program.returncode == 128 + signal.SIGTERM, error
    saved = checkpoint.latest(log.parent)
    assert f"saved at step {checkpoint.read_state(saved).step}" in out
    assert saved.name == f"checkpoint-{rows_of(log.parent)[-1]['step']:08d}"


def test_a_full_disk_while_saving_keeps_the_former_checkpoint(tmp_path, text):
    _, folder = train(tmp_path, text, "run", "--steps=6")
    before = {p.name: p.read_bytes() for p in checkpoint.latest(folder).iterdir()}
    # No file may grow beyond the model: writing the optimizer's state then fails as on a full disk.
    limit = len(before["model.safetensors"]) + 5000
    assert limit < len(before["optimizer.safetensors"])
    program = subprocess.run(
        [sys.executable, "-m", "moelith.train", f"--runs={folder.parent}", "--name=run", "--resume", "--steps=12"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)), capture_output=True, text=True)
    assert program.returncode == 1
    assert "error: cannot save the checkpoint of step 12" in program.stderr and "Traceback" not in program.stderr
    assert f"the former checkpoint is intact: {folder}/checkpoint-00000006" in program.stderr
    assert sorted(p.name for p in folder.iterdir() if "checkpoint" in p.name) == ["checkpoint-00000006"]
    assert {p.name: p.read_bytes() for p in checkpoint.latest(folder).iterdir()} == before
    assert resume(tmp_path, "run", "--steps=7") == 0


def test_log_rows_and_pictures(tmp_path, text):
    status, folder = train(tmp_path, text, "run", "--steps=17")
    rows = rows_of(folder)
    assert status == 0 and [row["step"] for row in rows] == [1, 4, 8, 12, 16, 17]
    for row, steps in zip(rows, (1, 3, 4, 4, 4, 1)):
        assert math.isfinite(row["loss"]) and row["tokens_per_s"] > 0 and 0 < row["moe_share"] < 1
        assert row["learning_rate"] > 0 and row["gradient_norm"] > 0
        assert [sum(layer) for layer in row["expert_load"]] == [steps * 4 * 32 * 2] * 2
        assert ("held_out_bits_per_byte" in row) == (row["step"] in (8, 16, 17))
    assert rows[0]["loss"] == pytest.approx(math.log(256), rel=0.05)
    assert rows[-1]["held_out_bits_per_byte"] < 8
    for name in ("loss.png", "experts.png"):
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and (folder / name).stat().st_size > 10_000
    (folder / "loss.png").unlink()
    assert pictures.draw(folder) == [folder / "loss.png", folder / "experts.png"] and (folder / "loss.png").exists()


def test_it_learns(tmp_path, text):
    text.write_bytes(b"the cat sat on the mat. " * 2000)
    _, folder = train(tmp_path, text, "run", "--steps=60", "--set=learning_rate=0.02")
    unigram = json.loads((folder / "config.json").read_text())["unigram_entropy"]
    assert rows_of(folder)[-1]["held_out_bits_per_byte"] < unigram / 2


def test_a_run_of_the_same_name_is_set_aside(tmp_path, text):
    _, folder = train(tmp_path, text, "run", "--steps=2")
    first = tensors_of(folder)
    train(tmp_path, text, "run", "--steps=3")
    assert_same_bits(first, tensors_of(tmp_path / "runs/run.previous"))
    assert checkpoint.latest(folder).name == "checkpoint-00000003"


def test_bf16_trains_like_fp32(tmp_path, text):
    losses = {}
    for dtype in ("fp32", "bf16"):
        _, folder = train(tmp_path, text, dtype, "--steps=40", f"--dtype={dtype}")
        losses[dtype] = rows_of(folder)[-1]["held_out_bits_per_byte"]
    weights = load_file(checkpoint.latest(folder) / "model.safetensors")
    assert weights["blocks.0.moe.gate_up_proj"].dtype == torch.bfloat16
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


@pytest.mark.parametrize("arguments, expected", [
    (["--preset=huge"], "PRESET: 'huge'; accepted: tiny, small, base, large"),
    (["--steps=0"], "STEPS: '0'; accepted: whole numbers from 1 on"),
    (["--steps=many"], "STEPS: 'many'"),
    (["--dtype=fp16"], "DTYPE: 'fp16'; accepted: fp32, bf16"),
    (["--name=../x"], "NAME: '../x'"),
    (["--resume=yes"], "RESUME: 'yes'; accepted: 0, 1"),
    (["--resume"], "RESUME: there is no checkpoint in .*nothing"),
    (["--set=depth=3"], "--set: 'depth=3'; accepted: FIELD=VALUE"),
    (["--set=layers=x"], "--set: 'layers=x'; accepted: layers=<int>"),
    (["--data=/nowhere"], "DATA: cannot read /nowhere: No such file"),
])
def test_bad_options_are_named(tmp_path, arguments, expected):
    with pytest.raises(TrainError, match=expected):
        run([f"--runs={tmp_path}", "--name=nothing", *arguments])


@pytest.mark.parametrize("option, named", [("--seed=5", "SEED: 5"), ("--preset=small", "PRESET: small"), (
    "--dtype=bf16", "DTYPE: bf16"), ("--data=/nowhere", "DATA: /nowhere"), ("--set=layers=1", "--set: ")])
def test_a_resumed_run_cannot_become_another(tmp_path, text, option, named):
    train(tmp_path, text, "run", "--steps=1")
    with pytest.raises(TrainError, match=named):
        resume(tmp_path, "run", option)


def test_options_come_from_the_environment(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DATA", "/nowhere")
    monkeypatch.setenv("STEPS", "")
    monkeypatch.setattr(sys, "argv", ["train", f"--runs={tmp_path}"])
    assert main() == 1
    assert capsys.readouterr().err.startswith("error: DATA: cannot read /nowhere")


@pytest.mark.parametrize("damage", ["cut", "missing", "other model", "json"])
def test_a_damaged_checkpoint_is_an_error_that_names_it(tmp_path, text, damage):
    _, folder = train(tmp_path, text, "run", "--steps=1")
    saved = checkpoint.latest(folder)
    model = saved / "model.safetensors"
    if damage == "cut":
        model.write_bytes(model.read_bytes()[:-100])
    elif damage == "missing":
        (saved / "optimizer.safetensors").unlink()
    elif damage == "json":
        (saved / "state.json").write_text("{}")
    else:
        _, other = train(tmp_path, text, "other", "--steps=1", "--set=intermediate_size=24")
        shutil.copy(checkpoint.latest(other) / "model.safetensors", model)
    with pytest.raises(TrainError, match="cannot (load|read) the checkpoint .*checkpoint-00000001: "):
        resume(tmp_path, "run", "--steps=2")


def test_a_file_that_cannot_be_written_whole_is_named_and_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*file"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("live", [True, False])
def test_progress_shows_loss_speed_time_left_and_the_share_of_the_layers(live, monkeypatch, capsys):
    row = {"step": 5, "loss": 1.25, "tokens_per_s": 12345.6, "moe_share": 0.5, "held_out_bits_per_byte": 2.5}
    monkeypatch.setattr(sys.stderr, "isatty", lambda: live)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda handle: os.terminal_size((0, 0)))
    progress = loop.Progress(step=4, steps=10)
    progress.advance()
    progress.show(row)
    progress.close()
    out, error = capsys.readouterr()
    shown = error.split("\r")[-1] if live else out
    assert "5/10 " in shown and " to go  loss 1.250 nats/byte  held out 2.500 bits/byte  12,346 tokens/s  MoE 50% of time" in shown


@pytest.mark.parametrize("gpus, expected", [
    (["a", "b", "c"], "nccl"),          # each sees its own alone, or all see all
    (["a", "b", "a"], "gloo"),          # two processes on one
    (["a", "b", None], "gloo"),
    ([None, None, None], "gloo")])
def test_all_ranks_choose_the_same_backend(gpus, expected):
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(len(gpus)) as ranks:
        chosen = list(ranks.map(lambda rank: backend(store, rank, len(gpus), gpus[rank]), range(len(gpus))))
    assert chosen == [expected] * len(gpus)
