"""Expert parallelism between processes that torchrun starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from moelith.train import checkpoint, data
from moelith.train.__main__ import run

HERE = Path(__file__).parent


def torchrun(processes, *command, **variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command]
    done = subprocess.run(list(map(str, started)), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_E3_processes_equal_one():
    """Two ranks, two replicas of them; and ranks that do not share memory are refused by name."""
    assert torchrun(4, HERE / "process_ranks.py", 2).count("good") == 4


SMALL = [f"--set={field}" for field in (
    "hidden_size=32", "layers=2", "heads=2", "num_experts=5", "intermediate_size=16", "shared_intermediate_size=16",
    "context=32", "log_every=1", "eval_every=4", "save_every=100")]


def losses_of(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], [r["held_out_bits_per_byte"] for r in rows if "held_out_bits_per_byte" in r], rows


@pytest.mark.parametrize("dtype, processes, ep, batch", [
    pytest.param("fp32", 4, 2, 3, id="two ranks, two replicas, one process without a window"),
    pytest.param("bf16", 2, 2, 6, id="two ranks"),
])
def test_training_with_any_number_of_processes(tmp_path, dtype, processes, ep, batch):
    """The same losses; and a checkpoint of one number of ranks goes on with another."""
    text = tmp_path / "text"
    text.write_bytes(Path(data.__file__).read_bytes())
    run_of = [f"--runs={tmp_path}", "--threads=1"]
    new = [f"--data={text}", f"--dtype={dtype}", "--seed=3", *SMALL, f"--set=batch={batch}"]
    assert run([*run_of, "--name=one", "--steps=8", *new]) == 0
    told = torchrun(processes, "-m", "moelith.train", *run_of, "--name=several", "--steps=4", f"--ep={ep}", *new)
    assert f"{processes} processes, {ep} of which share the experts" in told
    assert run([*run_of, "--name=several", "--steps=8", "--resume"]) == 0
    wanted, wanted_held_out, _ = losses_of(tmp_path / "one")
    losses, held_out, rows = losses_of(tmp_path / "several")
    assert [row["step"] for row in rows] == list(range(1, 9))
    tolerance = 1e-5 if dtype == "fp32" else 3e-3
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert held_out == pytest.approx(wanted_held_out, rel=tolerance)
    # Every route counts once.
    assert all(sum(layer) == batch * 32 * 2 for row in rows for layer in row["expert_load"])
    ours, theirs = (load_file(checkpoint.latest(tmp_path / name) / "model.safetensors") for name in ("several", "one"))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
