"""The layer on the CPU beside its rivals, in one run on the same cores, in bfloat16.

    bench/cpu_layer.py [--threads N] [--rounds N] [--transformers-rounds N] [--output FILE]

Rivals: transformers' OLMoE block with each of its experts implementations that runs on the CPU, and oneDNN called in a
loop for the experts' matrix products alone (bench/onednn_experts.cpp). Ours is measured twice: the whole block, whose
router's linear layer is PyTorch's, beside transformers' block; and from router logits on, beside oneDNN's loop, which has
no router. Memory that was freed stays with the process, for all alike: else a backward pass that gives back and asks anew
for the memory of all its gradients spends a third of its time on page faults. Measurements take turns, a round each, since
a shared machine's speed moves; medians over rounds. Correctness first: our block's output and input gradient must be within
5e-2 of transformers' own in float32. Writes bench/results/cpu_layer.json.
"""

import argparse
import datetime
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import transformers
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

import moelith

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPES = {  # name: (hidden_size, intermediate_size, num_experts, top_k, tokens)
    "OLMoE": (2048, 1024, 64, 8, 512),
    "small": (512, 256, 64, 8, 2048),
}
LONG_MS = 10_000
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # of glibc
FROM_LOGITS = "moelith from router logits"
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def olmoe_config(shape, implementation):
    hidden, intermediate, experts, top_k, _ = shape
    config = OlmoeConfig(hidden_size=hidden, intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=top_k)
    config._experts_implementation = implementation
    return config


def make_block(shape, implementation, dtype):
    torch.manual_seed(1)
    block = OlmoeSparseMoeBlock(olmoe_config(shape, implementation))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return block.to(dtype)


def timed(block, x, dy, **inputs):
    """Milliseconds of forward, and of forward and backward."""
    begin = time.perf_counter()
    y = block(x, **inputs)
    middle = time.perf_counter()
    y.backward(dy)
    end = time.perf_counter()
    for parameter in block.parameters():
        parameter.grad = None
    for tensor in (x, *inputs.values()):
        tensor.grad = None
    return (middle - begin) * 1e3, (end - begin) * 1e3


def relative_error(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def check(ours, shape, x, dy):
    """Against transformers' block in float32 with the same weights."""
    block = make_block(shape, "eager", torch.bfloat16).float()
    x32 = x.detach().float().requires_grad_()
    y32 = block(x32)
    y32.backward(dy.float())
    y = ours(x)
    y.backward(dy)
    errors = relative_error(y, y32), relative_error(x.grad, x32.grad)
    x.grad = None
    for parameter in ours.parameters():
        parameter.grad = None
    # A router in bfloat16 may break a near-tie the other way: that moves whole tokens, so the bound is wider than a layer's.
    assert max(errors) < 5e-2, f"our output and dx are off by {errors}"
    return errors


def onednn(shape, counts, threads, seconds):
    program = os.environ.get("MOELITH_ONEDNN_BENCH", str(ROOT / os.environ.get("BUILD", "build") / "release/bin/bench_onednn_experts"))
    if not os.path.exists(program):
        return {}
    done = subprocess.run([program, str(shape[0]), str(shape[1]), str(threads), str(seconds), *map(str, counts)],
                          capture_output=True, text=True, check=True)
    return {f"oneDNN loop, {name}": value for name, value in json.loads(done.stdout).items() if value}


def measure(name, shape, threads, rounds, transformers_rounds):
    hidden, intermediate, experts, top_k, tokens = shape
    torch.manual_seed(2)
    dtype = torch.bfloat16
    reference = make_block(shape, "eager", dtype)
    ours = moelith.convert.from_transformers(reference, olmoe_config(shape, "eager"),
                                             options=moelith.PlanOptions(workers=threads))
    x = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    dy = torch.randn(1, tokens, hidden).to(dtype)
    errors = check(ours, shape, x, dy)
    counts = ours(x.detach(), return_routing=True).expert_counts.tolist()
    logits = ours.router_logits(x).float().detach().requires_grad_()
    del reference
    gc.collect()

    samples = {FROM_LOGITS: [], "moelith": []}
    blocks = {FROM_LOGITS: ours, "moelith": ours}
    for implementation in IMPLEMENTATIONS:
        if implementation == "batched_mm" and tokens * top_k * 3 * hidden * intermediate * 2 > 8 << 30:
            continue  # it copies a route's weights for each route
        blocks[f"transformers {implementation}"] = make_block(shape, implementation, dtype)
        samples[f"transformers {implementation}"] = []
    seconds_a_round = 2.0
    for round_ in range(rounds + 1):
        for key, block in list(blocks.items()):
            if key.startswith("transformers") and len(samples[key]) == transformers_rounds:
                continue
            try:
                sample = timed(block, x, dy, **({"router_logits": logits} if key == FROM_LOGITS else {}))
            except (RuntimeError, NotImplementedError) as error:
                print(f"{name}: {key} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
                del blocks[key], samples[key]
                continue
            # The first round warms up, except those that take so long that it makes no difference.
            if round_ or sample[1] > LONG_MS:
                samples[key].append(sample)
        for key, value in onednn(shape, counts, threads, seconds_a_round).items():
            if round_:
                samples.setdefault(key, []).append((value["forward_ms"], value["forward_backward_ms"]))

    medians = {
        key: {"forward_ms": statistics.median(s[0] for s in values), "forward_backward_ms": statistics.median(s[1] for s in values)}
        for key, values in samples.items()
    }
    from_logits, mine = medians.pop(FROM_LOGITS), medians.pop("moelith")
    flops = 6 * tokens * top_k * hidden * intermediate
    for key, value in {FROM_LOGITS: from_logits, "moelith": mine, **medians}.items():
        compared = from_logits if key.startswith("oneDNN") else mine
        print(f"{name:8} {key:27} forward {value['forward_ms']:9.1f} ms  forward + backward {value['forward_backward_ms']:9.1f} ms  "
              f"{3 * flops / value['forward_backward_ms'] * 1e-6:7.1f} GFLOP/s  "
              f"moelith is {value['forward_backward_ms'] / compared['forward_backward_ms']:.2f} times as fast", flush=True)
    return {
        "shape": name, "hidden_size": hidden, "intermediate_size": intermediate, "num_experts": experts, "top_k": top_k,
        "tokens": tokens, "ranks": 1, "routing": "the block's own router on random input", "dtype": "bfloat16", **mine,
        "from_router_logits": from_logits, "error_y_dx": errors, "rivals": medians,
    }


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers-rounds", type=int, default=1, help="theirs take up to a minute each")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "bench/results/cpu_layer.json")
    arguments = parser.parse_args()
    if any(name not in os.environ for name in KEEP_MEMORY):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], KEEP_MEMORY | os.environ)
    torch.set_num_threads(arguments.threads)
    rows = [measure(name, SHAPES[name], arguments.threads, arguments.rounds, arguments.transformers_rounds) for name in arguments.shape or SHAPES]
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "gpu": None, "cpu": f"{cpu_name()}, {arguments.threads} threads", "date": datetime.date.today().isoformat(),
        "commit": commit, "command": " ".join(["bench/cpu_layer.py", *sys.argv[1:]]), "rounds": arguments.rounds, "transformers_rounds": arguments.transformers_rounds, "torch": torch.__version__, "transformers": transformers.__version__,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
