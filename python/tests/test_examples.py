"""The Python examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_moe_layer_learns():
    run = subprocess.run([sys.executable, EXAMPLES / "moe_layer.py"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", run.stdout)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 4, run.stdout
