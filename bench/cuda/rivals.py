"""The layer by others, from router logits on: plain PyTorch, sonic-moe and liger-cute-kernels.

Each is a function make(shape, weights) -> f(x, logits) -> y whose gradients autograd makes, or raises Unsupported. The
weights are a moelith.MoE; a rival that wants another layout gets copies (f.parameters: what gradients are taken by). None
of the two packages knows shared experts: there the dense MLP of plain PyTorch is added.
"""

import types

import torch
import torch.nn.functional as F


class Unsupported(Exception):
    pass


@torch.compile(dynamic=True)
def _swiglu(z):
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.compile(dynamic=True)
def _swiglu_clamped(z, limit, alpha, up_offset):
    gate, up = z.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


@torch.compile(dynamic=True)
def combine(rows, weights, top_k):
    """[T k, H], [T k, 1] -> [T, H]. T is not an argument's own dimension: one of 1 would be compiled apart."""
    return (rows * weights).unflatten(0, (-1, top_k)).sum(1)


def activate(activation, z):
    if activation.kind == "swiglu":
        return _swiglu(z)
    if activation.kind == "swiglu_clamped":
        return _swiglu_clamped(z, activation.limit, activation.alpha, activation.up_offset)
    raise Unsupported(activation.kind)


def route(logits, top_k):
    """ids [T, k], weights [T, k] float32: the softmax over the chosen logits."""
    values, ids = logits.topk(top_k, dim=-1)
    return ids, values.softmax(dim=-1)


def with_shared_experts(y, layer, x):
    for s in layer.shared_experts:
        y = y + F.linear(_swiglu(F.linear(x, s.gate_up_proj)), s.down_proj)
    return y


class Float32Experts:
    """What all of them are held against: a layer's experts in float32, one at a time."""

    def __init__(self, layer):
        self.layer, self.activation = layer, layer.config.activation

    def weights_of(self, at):
        """gate_up_proj, down_proj and their biases (or None) of local expert `at`."""
        names = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
        weights = (getattr(self.layer, name) for name in names)
        return [None if w is None else w[at].detach().float() for w in weights]

    def ffn(self, x, gate_up, down, gate_up_bias=None, down_bias=None):
        gate, up = F.linear(x, gate_up, gate_up_bias).chunk(2, dim=-1)
        a = self.activation
        if a.kind == "swiglu_clamped":
            gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
            return F.linear(gate * torch.sigmoid(a.alpha * gate) * (up + a.up_offset), down, down_bias)
        return F.linear(F.silu(gate) * up, down, down_bias)

    def routed(self, at, x):
        return self.ffn(x, *self.weights_of(at))

    def shared(self, x):
        y = torch.zeros_like(x)
        for s in self.layer.shared_experts:
            y = y + self.ffn(x, s.gate_up_proj.detach().float(), s.down_proj.detach().float())
        return y


def require_swiglu(config):
    if config.activation.kind != "swiglu":
        raise Unsupported(f"no {config.activation.kind}")


def plain(shape, layer):
    """Rows sorted by expert, torch._grouped_mm, a compiled activation, rows back in place, a compiled sum."""
    config = shape.config

    def run(x, logits):
        ids, weights = route(logits, config.top_k)
        experts, order = ids.flatten().sort(stable=True)
        ends = torch.histc(experts.int() if x.is_cuda else experts.float(), config.num_experts, 0, config.num_experts - 1)
        ends = ends.cumsum(0, dtype=torch.int32)
        z = torch._grouped_mm(x.index_select(0, order // config.top_k), layer.gate_up_proj.mT, ends)
        if config.gate_up_bias:
            z = z + layer.gate_up_bias[experts]
        rows = torch._grouped_mm(activate(config.activation, z), layer.down_proj.mT, ends)
        if config.down_bias:
            rows = rows + layer.down_bias[experts]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        y = combine(rows.index_select(0, place), weights.to(x.dtype).view(-1, 1), config.top_k)
        return with_shared_experts(y, layer, x)

    run.parameters = list(layer.parameters())
    return run


LIKELY_TILES = {(128, 128, True), (128, 160, True), (128, 192, True), (128, 256, False), (256, 128, False), (256, 192, False)}


def tune_sonic_moe_quickly():
    """Its tuners try some 80 tiles for products and 60 for sums, a minute and more for each new shape: here the likeliest
    few. What they chose, and what they compiled, is kept on disk with QUACK_CACHE_DIR and TRITON_CACHE_AUTOTUNING=1."""
    from quack import gemm_interface
    from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel

    for tuner in (gemm_interface.gemm_tuned, gemm_interface.gemm_gated_tuned, gemm_interface.gemm_dgated_tuned):
        tiles = [(c, c.kwargs["config"]) for c in tuner.configs]
        tuner.configs = [c for c, tile in tiles if (tile.tile_m, tile.tile_n, tile.pingpong) in LIKELY_TILES and tile.cluster_m == 2]
    sums = token_gather_sum_kernel
    sums.configs = [c for c in sums.configs if c.num_warps == 4 and 512 <= c.kwargs["BLOCK_H"] <= 2048 and c.kwargs["BLOCK_K"] in (2, 8)]


def sonic_moe(shape, layer):
    """sonic-moe's softmax(topk) layer, gate and up rows in turns, as it likes them best."""
    config = shape.config
    require_swiglu(config)
    try:
        from sonicmoe import functional
        from sonicmoe.enums import ActivationType
    except ImportError as error:
        raise Unsupported(f"not installed ({error})") from None
    functional.F = types.SimpleNamespace(linear=lambda _, logits: logits.mT)  # its router's product: the logits are given here
    w1 = torch.stack(layer.gate_up_proj.detach().chunk(2, dim=1), dim=2).flatten(1, 2).requires_grad_()
    w2 = layer.down_proj.detach().clone().requires_grad_()
    stream = torch.cuda.current_stream().cuda_stream

    def run(x, logits):
        y, _, _ = functional.moe_TC_softmax_topk_layer(
            x, logits.mT, w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, config.top_k, stream, ActivationType.SWIGLU)
        return with_shared_experts(y, layer, x)

    run.parameters = [w1, w2, *layer.shared_experts.parameters()]
    return run


def liger_cute(shape, layer):
    """liger-cute-kernels on one GPU; routing by PyTorch."""
    config = shape.config
    require_swiglu(config)
    try:
        from liger_cute_kernels import MoEConfig, configure, nvshmem
        from liger_kernel.ops.cute.ops.moe import moe_fused
    except ImportError as error:
        raise Unsupported(f"not installed ({error})") from None
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        configure()
    nvshmem.pool_clear_all()
    configure(moe=MoEConfig(max_tokens=shape.tokens, hidden_size=config.hidden_size, num_experts=config.num_experts,
                            top_k=config.top_k, num_hosts=1, gpus_per_host=1))
    gate, up = (half.contiguous().requires_grad_() for half in layer.gate_up_proj.detach().chunk(2, dim=1))
    down = layer.down_proj.detach().clone().requires_grad_()

    def run(x, logits):
        ids, weights = route(logits, config.top_k)
        y = moe_fused(x, ids.int(), weights.to(x.dtype), gate, up, down, config.num_experts, config.top_k)
        return with_shared_experts(y, layer, x)

    run.parameters = [gate, up, down, *layer.shared_experts.parameters()]
    return run


RIVALS = {"plain PyTorch": plain, "sonic-moe": sonic_moe, "liger-cute-kernels": liger_cute}
