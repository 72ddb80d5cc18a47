"""The log of a run: log.jsonl, one JSON object a logged step, each with at least step, loss and tokens_per_s.

    step                   optimizer steps made so far
    loss                   mean cross-entropy in nats per byte over the steps since the row before
    tokens_per_s           bytes trained on per second in those steps
    moe_share              share of that time inside the MoE layers
    learning_rate          of this step
    gradient_norm          of this step, before clipping
    aux_loss               mean of the auxiliary losses summed over the layers
    expert_load            [layers][experts]: routes to each expert since the row before
    held_out_bits_per_byte only in rows of steps that were evaluated
"""

import json
import math
from pathlib import Path

from .files import write_whole


def _finite(value):
    """JSON has no NaN and no infinity."""
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _line(row: dict) -> str:
    return json.dumps({name: _finite(value) for name, value in row.items()}) + "\n"


class Log:
    """Appends rows to the log of a run."""

    def __init__(self, path: Path, keep_up_to: int = 0):
        """keep_up_to: rows of later steps, written after the checkpoint that is being resumed from, are dropped."""
        self.path = path
        kept = [row for row in read_log(path) if row["step"] <= keep_up_to] if keep_up_to and path.exists() else []
        write_whole(path, "".join(map(_line, kept)).encode())
        self._file = open(path, "a", encoding="utf-8")

    def write(self, row: dict) -> None:
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict]:
    """The rows of a log; a last line that was cut off is left out."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows
