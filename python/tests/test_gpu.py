"""The layer on a GPU: like the one on the CPU, and the same bits from a captured graph. Needs a GPU and a build with CUDA."""

import json
import os

import pytest
import torch
from test_processes import HERE, torchrun

from moelith import LayerConfig, MoE, functional

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CONFIG = LayerConfig(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4)


def layers():
    torch.manual_seed(0)
    cpu = MoE(CONFIG, dtype=torch.bfloat16)
    gpu = MoE(CONFIG, dtype=torch.bfloat16, device="cuda")
    gpu.load_state_dict(cpu.state_dict())
    return cpu, gpu


def step(layer, x):
    x = x.clone().requires_grad_(True)
    y = layer(x)
    y.float().square().mean().backward()
    return y.detach(), x.grad


def error(a, b):
    a, b = a.float().cpu(), b.float().cpu()
    return ((a - b).norm() / b.norm()).item()


def test_like_the_cpu():
    cpu, gpu = layers()
    x = torch.randn(3, 100, 256, dtype=torch.bfloat16)
    # The router's own product is rounded by another library, so a token may change its last expert.
    for a, b in zip(step(gpu, x.cuda()), step(cpu, x)):
        assert error(a, b) < 3e-2
    for (name, a), b in zip(gpu.named_parameters(), cpu.parameters()):
        assert error(a.grad, b.grad) < 5e-2, name


def test_a_whole_iteration_in_a_graph():
    _, gpu = layers()
    x = torch.randn(3, 100, 256, dtype=torch.bfloat16, device="cuda")
    held = x.clone().requires_grad_(True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def iteration():
        y = gpu(held)
        y.float().square().mean().backward()
        return y

    def clear():
        gpu.zero_grad(set_to_none=True)
        held.grad = None

    with torch.cuda.stream(stream):
        for _ in range(3):
            clear()
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
    clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = iteration().detach()
    other = torch.randn_like(x)
    with torch.no_grad():
        held.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    found = [y.clone(), held.grad.clone(), *(p.grad.clone() for p in gpu.parameters())]
    gpu.zero_grad(set_to_none=True)
    expected = [*step(gpu, other), *(p.grad for p in gpu.parameters())]
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def test_selection_bias():
    torch.manual_seed(1)
    bias, counts = torch.randn(16), torch.tensor([5, 0, 3, 4] * 4)
    on_gpu = bias.cuda()
    functional.update_selection_bias(bias, counts, 1e-3)
    functional.update_selection_bias(on_gpu, counts.cuda(), 1e-3)
    assert torch.equal(on_gpu.cpu(), bias)


def gpus_for_processes(count):
    """The environment of processes that see so many GPUs."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:count])}


@pytest.mark.parametrize("gpus, backend", [(1, "gloo"), (2, "nccl")])
def test_processes_have_the_bits_of_one(gpus, backend):
    """Two processes on one GPU, which NCCL refuses, and on two."""
    told = torchrun(2, HERE / "gpu_process_ranks.py", backend, **gpus_for_processes(gpus))
    assert told.count("good") == 2


@pytest.mark.parametrize("gpus", [1, 2])
def test_training_by_two_processes(tmp_path, gpus):
    """The losses of one process; a checkpoint of two goes on with one; between two GPUs a step is a graph."""
    variables = gpus_for_processes(gpus)
    one = losses(tmp_path, "one", "cuda")
    command = training(tmp_path, "two", "cuda", "--steps", "12")
    told = torchrun(2, "-m", "moelith.train", *command, **variables)
    assert "2 processes, 2 of which share the experts" in told
    assert "cannot be captured" not in told
    losses(tmp_path, "two", "cuda", "--steps", "16", "--resume")
    two = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in two] == list(range(1, 17))
    for a, b in zip(two, one, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2), a["step"]
        assert [sum(layer) for layer in a["expert_load"]] == [sum(layer) for layer in b["expert_load"]]


def training(folder, name, device, *options):
    """Arguments of moelith.train."""
    small = ("hidden_size=32", "layers=2", "heads=2", "num_experts=8", "intermediate_size=24",
             "shared_intermediate_size=16", "context=32", "batch=4", "log_every=1", "eval_every=8", "save_every=20")
    text = folder / "text"
    text.write_bytes(open(__file__, "rb").read() * 4)
    return [f"--set={field}" for field in small] + [
        "--data", str(text), "--runs", str(folder), "--name", name, "--device", device, "--dtype", "bf16",
        "--steps", "16", *options]


def losses(folder, name, device, *options):
    from moelith.train.__main__ import run

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        assert run(training(folder, name, device, *options)) == 0
    finally:
        torch.use_deterministic_algorithms(deterministic)
    rows = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
    return rows


def test_training_in_a_graph_gives_the_bits_of_eager_steps(tmp_path, monkeypatch):
    from moelith.train.loop import Stepper

    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(self), replay(self)))
    graph = losses(tmp_path, "graph", "cuda")
    assert len(replays) == 16 - Stepper.WARM_UP
    monkeypatch.setattr(Stepper, "WARM_UP", 1000)
    eager = losses(tmp_path, "eager", "cuda")
    for a, b in zip(graph, eager, strict=True):
        assert a["loss"] == b["loss"] and a["gradient_norm"] == b["gradient_norm"] and a["expert_load"] == b["expert_load"]
        assert a.get("held_out_bits_per_byte") == b.get("held_out_bits_per_byte")
    assert all(row["moe_share"] > 0 for row in graph)


def test_training_goes_on_in_a_graph(tmp_path):
    whole = losses(tmp_path, "whole", "cuda")
    losses(tmp_path, "parts", "cuda", "--steps", "7")
    losses(tmp_path, "parts", "cuda", "--steps", "16", "--resume")
    rows = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]


def test_training_like_the_cpu(tmp_path):
    on_gpu, on_cpu = losses(tmp_path, "gpu", "cuda"), losses(tmp_path, "cpu", "cpu")
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert abs(a["loss"] - b["loss"]) < 0.05 * b["loss"], a["step"]


def test_a_graph_keeps_its_workspace():
    _, gpu = layers()
    x = torch.randn(1, 100, 256, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = gpu(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gpu(x)
        gpu(torch.randn(1, 20000, 256, dtype=torch.bfloat16, device="cuda"))  # takes a larger workspace
        filling = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(64)]
        graph.replay()
        assert torch.equal(y, expected)
        assert all(bool(part.isnan().all()) for part in filling)  # nothing was written where they lie
