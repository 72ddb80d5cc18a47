"""Two runs of moelith.train beside each other, from their logs: python bench/cuda/loss_curves.py CPU_LOG GPU_LOG [OUT.json]

Prints the loss of each logged stretch of steps on the CPU and on the GPU, and their largest
difference; MOELITH_COMMIT is noted in OUT.json."""

import datetime
import json
import os
import sys
from pathlib import Path


def rows(path):
    return {row["step"]: row for row in map(json.loads, Path(path).read_text().splitlines())}


def main(cpu_log, gpu_log, out=None):
    cpu, gpu = rows(cpu_log), rows(gpu_log)
    steps = sorted(cpu.keys() & gpu.keys())
    curve = [{"step": s, "cpu": cpu[s]["loss"], "gpu": gpu[s]["loss"]} for s in steps]
    for point in curve:
        print(f"step {point['step']:5}  cpu {point['cpu']:.5f}  gpu {point['gpu']:.5f}  {point['gpu'] - point['cpu']:+.5f}")
    largest = max(abs(p["gpu"] - p["cpu"]) for p in curve)
    held_out = {name: [r["held_out_bits_per_byte"] for r in run.values() if "held_out_bits_per_byte" in r][-1:]
                for name, run in (("cpu", cpu), ("gpu", gpu))}
    print(f"largest difference {largest:.5f}; held-out bits per byte {held_out}")
    if out:
        result = {"command": "bench/cuda/loss_curves.py", "commit": os.environ.get("MOELITH_COMMIT", "unknown"),
                  "date": datetime.date.today().isoformat(), "steps": curve, "largest_difference": largest, "held_out_bits_per_byte": held_out,
                  "tokens_per_s": {"cpu": cpu[steps[-1]]["tokens_per_s"], "gpu": gpu[steps[-1]]["tokens_per_s"]}}
        Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
