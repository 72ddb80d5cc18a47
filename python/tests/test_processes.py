"""Expert parallelism between processes that torchrun starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from moelith.train import checkpoint, data

HERE = Path(__file__).parent


def torchrun(processes, *command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command]
    done = subprocess.run(list(map(str, started)), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "processes, ep", [pytest.param(2, 2, id="two ranks"), pytest.param(4, 2, id="E3 two ranks, two replicas")]
)
def test_E3_processes_equal_one(processes, ep):
    assert torchrun(processes, HERE / "process_ranks.py", ep).count("good") == processes


def test_ranks_that_do_not_share_memory_are_refused_by_name():
    assert torchrun(2, HERE / "process_ranks.py", 2, "apart").count("good") == 2


SMALL = [f"--set={field}" for field in (
    "hidden_size=32", "layers=2", "heads=2", "num_experts=5", "intermediate_size=16", "shared_intermediate_size=16",
    "context=32", "batch=6", "log_every=1", "eval_every=4", "save_every=100")]


def losses_of(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], [r["held_out_bits_per_byte"] for r in rows if "held_out_bits_per_byte" in r], rows


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_with_any_number_of_processes(tmp_path, dtype):
    """The same losses; and a checkpoint of one number of ranks goes on with another."""
    text = tmp_path / "text"
    text.write_bytes(Path(data.__file__).read_bytes())

    def train(processes, name, *more):
        common = ["-m", "moelith.train", f"--runs={tmp_path}", f"--name={name}", "--threads=1", *more]
        if processes > 1:
            return torchrun(processes, *common)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run([sys.executable, *common], env=environment, check=True, capture_output=True, text=True).stdout

    new = [f"--data={text}", f"--dtype={dtype}", "--seed=3", *SMALL]
    train(1, "one", "--steps=8", *new)
    told = train(4, "four", "--steps=4", "--ep=2", *new)
    assert "4 processes, 2 of which share the experts" in told
    train(2, "four", "--steps=8", "--resume=1")
    wanted, wanted_held_out, _ = losses_of(tmp_path / "one")
    losses, held_out, rows = losses_of(tmp_path / "four")
    assert [row["step"] for row in rows] == list(range(1, 9))
    tolerance = 1e-5 if dtype == "fp32" else 3e-3
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert held_out == pytest.approx(wanted_held_out, rel=tolerance)
    # Every route counts once.
    assert all(sum(layer) == 6 * 32 * 2 for row in rows for layer in row["expert_load"])
    ours, theirs = (load_file(checkpoint.latest(tmp_path / name) / "model.safetensors") for name in ("four", "one"))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
