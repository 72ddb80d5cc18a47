"""The comparisons of bench/cuda/, as far as a CPU goes: they are scripts that otherwise run only where there is a GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench/cuda"


@pytest.fixture
def layer_rivals(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import layer_rivals

    return layer_rivals


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_they_are_python(script):
    compile(script.read_text(), str(script), "exec")


def test_an_error_that_is_not_a_number_is_out_of_bounds(layer_rivals):
    assert layer_rivals.within_bound({"y": 1e-3, "dx": 5e-3})
    assert not layer_rivals.within_bound({"y": 1e-3, "dx": math.nan})
    assert not layer_rivals.within_bound({"y": 2e-2, "dx": 1e-3})


def test_the_layer_beside_plain_pytorch(tmp_path):
    result = tmp_path / "rows.json"
    options = ["--device", "cpu", "--shape", "tiny", "--rival", "plain PyTorch", "--rounds", "1", "--json", str(result)]
    subprocess.run([sys.executable, str(FOLDER / "layer_rivals.py"), *options], check=True, timeout=300,
                   env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    rows = json.loads(result.read_text())["rows"]
    assert [row["routing"] for row in rows] == ["uniform", "equal", "zipf"]
    assert all(row["forward_ms"] > 0 and row["rivals"]["plain PyTorch"]["forward_ms"] > 0 for row in rows)


def test_ranks_beside_plain_pytorch(tmp_path):
    result = tmp_path / "rows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(FOLDER / "ranks.py")]
    options = ["--device", "cpu", "--shape", "tiny", "--rounds", "1", "--json", str(result)]
    # Each process would compile the rivals for itself, which takes longer than all else.
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([*command, *options], check=True, timeout=300, env=os.environ | variables)
    (row,) = json.loads(result.read_text())["rows"]
    assert row["ranks"] == 2 and row["forward_ms"] > 0
    assert set(row["rivals"]) == {"plain PyTorch", "alone"}
    assert 0 < row["least_bytes_on_links"]["dispatch"] <= row["least_bytes_on_links"]["combine"] <= 64 * 2 * 64 * 2
