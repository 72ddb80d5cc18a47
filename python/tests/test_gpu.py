"""The layer on a GPU: like the one on the CPU, and the same bits from a captured graph. Needs a GPU and a build with CUDA."""

import pytest
import torch

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
