"""README.md shows the examples and results as they are."""

import pathlib
import subprocess
import sys


def test_readme_is_up_to_date():
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, root / "scripts/readme", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
