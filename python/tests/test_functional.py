"""moelith.functional against the layer in plain PyTorch, and the behaviour of the operators under autograd."""

import dataclasses
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from layer_cases import BASE, CONFIGS, DEEPSEEK, error, in_float64, leaves, relative, tensors_of, with_router
from plain_layer import ffn, plain_moe
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from moelith import Activation, Group, LayerConfig, PlanOptions, _moelith, runtime
from moelith import functional as MF
from moelith.operators import accumulator_dtype

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
RESULTS = ("y", "topk_weights", "aux_loss", "z_loss")  # the differentiable ones


def upstream_of(output, seed=1):
    """Random gradients for the differentiable results."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        for t in (getattr(output, name) for name in RESULTS)
    ]


def run(tensors, config, **arguments):
    return MF.moe(config=config, return_routing=True, **tensors, **arguments)


def gradients(output, tensors, upstream=None, **arguments):
    results = [getattr(output, name) for name in RESULTS]
    upstream = upstream_of(output) if upstream is None else upstream
    wanted = leaves(tensors)
    values = torch.autograd.grad(results, list(wanted.values()), upstream, allow_unused=True, **arguments)
    return dict(zip(wanted, values))


def plain(tensors, config, upstream, **arguments):
    """The plain layer's results and gradients by name."""
    output = MF.MoEOutput(*plain_moe(config=config, **tensors, **arguments))
    used = [(getattr(output, name), up) for name, up in zip(RESULTS, upstream)]
    results, ups = zip(*((result, up.to(result.dtype)) for result, up in used if result.requires_grad))
    wanted = leaves(tensors)
    return output, dict(zip(wanted, torch.autograd.grad(results, list(wanted.values()), ups)))


def check_against_plain(tensors, config, tolerance, valid_tokens=None, num_sequences=1):
    valid = None if valid_tokens is None else torch.tensor([valid_tokens], dtype=torch.int32)
    output = run(tensors, config, num_valid_tokens=valid, num_sequences=num_sequences)
    upstream = upstream_of(output)
    actual = gradients(output, tensors, upstream)
    expected, wanted = plain(
        in_float64(tensors), config, upstream, valid_tokens=valid_tokens, num_sequences=num_sequences
    )
    assert torch.equal(output.topk_ids.long(), expected.topk_ids)
    assert torch.equal(output.expert_counts, expected.expert_counts)
    errors = {name: error(getattr(output, name), getattr(expected, name)) for name in RESULTS}
    errors |= {f"d {name}": error(actual[name], wanted[name]) for name in wanted}
    assert {name: value for name, value in errors.items() if not value <= tolerance} == {}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_matches_plain_pytorch(name, dtype):
    check_against_plain(tensors_of(CONFIGS[name], 24, dtype=dtype), CONFIGS[name], TOLERANCE[dtype], num_sequences=3)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_no_worse_than_an_unfused_layer(name):
    config = CONFIGS[name]
    # Logits in float32, so that no two are equal.
    tensors = tensors_of(config, 96, dtype=torch.bfloat16, logits_dtype=torch.float32)
    output = run(tensors, config)
    upstream = upstream_of(output)
    actual = gradients(output, tensors, upstream)
    expected, wanted = plain(in_float64(tensors), config, upstream)
    unfused, unfused_gradients = plain(tensors, config, upstream)
    assert torch.equal(output.topk_ids.long(), expected.topk_ids)
    worse = {}
    for what in [*RESULTS, *wanted]:
        pairs = (output, unfused, expected) if what in RESULTS else (actual, unfused_gradients, wanted)
        ours, theirs, exact = (getattr(x, what) if what in RESULTS else x[what] for x in pairs)
        if relative(ours, exact) > max(5e-3, 1.5 * relative(theirs, exact)):
            worse[what] = (relative(ours, exact), relative(theirs, exact))
    assert worse == {}


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "two_shared", "losses", "capacity_by_score"])
def test_tokens_past_the_valid_ones_are_absent(name):
    config = CONFIGS[name]
    tensors = tensors_of(config, 20)
    with torch.no_grad():
        tensors["x"][13:] = float("nan")
        tensors["router_logits"][13:] = float("nan")
    output = run(tensors, config, num_valid_tokens=torch.tensor([13], dtype=torch.int32))
    assert torch.equal(output.y[13:], torch.zeros(7, 16, dtype=torch.float64))
    actual = gradients(output, tensors)
    assert torch.equal(actual["x"][13:], torch.zeros(7, 16, dtype=torch.float64))
    with torch.no_grad():  # the plain layer would spread the NaN by 0 * NaN
        tensors["x"][13:] = 0
        tensors["router_logits"][13:] = 0
    check_against_plain(tensors, config, 1e-12, valid_tokens=13)


def brought_routing(config, tokens, ids_dtype):
    tensors = tensors_of(config, tokens)
    del tensors["router_logits"]
    tensors.pop("selection_bias", None)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, config.num_experts, (tokens, config.top_k), generator=generator)
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64).requires_grad_()
    return tensors | {"topk_ids": ids.to(ids_dtype), "topk_weights": weights}


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "deepseek", "before_down", "capacity_by_position"])
def test_routing_that_the_caller_brings(name, ids_dtype):
    check_against_plain(brought_routing(CONFIGS[name], 24, ids_dtype), CONFIGS[name], 1e-12)


def test_D1_empty_slots():
    """Ids of -1 anywhere in a row: [[0,-1],[-1,1],[1,0],[-1,-1]]."""
    config = dataclasses.replace(BASE, num_experts=2)
    tensors = tensors_of(config, 4)
    del tensors["router_logits"]
    ids = torch.tensor([[0, -1], [-1, 1], [1, 0], [-1, -1]])
    weights = torch.full((4, 2), 0.5, dtype=torch.float64).requires_grad_()
    tensors |= {"topk_ids": ids, "topk_weights": weights}
    output = run(tensors, config)
    assert output.expert_counts.tolist() == [2, 2]
    assert not output.y[3].any()
    actual = gradients(output, tensors)
    assert not actual["x"][3].any()
    assert not actual["topk_weights"][ids < 0].any()
    check_against_plain(tensors, config, 1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65, 200])
def test_any_number_of_tokens(tokens):
    check_against_plain(tensors_of(BASE, tokens), BASE, 1e-12) if tokens else None
    tensors = tensors_of(DEEPSEEK, tokens)
    output = run(tensors, DEEPSEEK)
    assert output.y.shape == (tokens, 16)
    for name, gradient in gradients(output, tensors).items():
        assert gradient.shape == leaves(tensors)[name].shape
        assert tokens or not gradient.any()


def test_leading_dimensions_and_strides():
    config = CONFIGS["qwen2"]
    tensors = tensors_of(config, 12)
    expected = run(tensors, config)
    shaped = {name: tensors[name].reshape(3, 4, -1) for name in ("x", "router_logits", "shared_gate_logits")}
    output = run(tensors | shaped, config)
    assert output.y.shape == (3, 4, 16)
    assert torch.equal(output.y.reshape(12, 16), expected.y)
    wide = torch.full((12, 40), float("nan"), dtype=torch.float64)
    wide[:, 8:24] = tensors["x"].detach()
    assert torch.equal(run(tensors | {"x": wide[:, 8:24]}, config).y, expected.y)
    columns = tensors["x"].detach().t().contiguous().t()
    assert torch.equal(run(tensors | {"x": columns}, config).y, expected.y)


def test_gradients_that_come_in_may_be_strided():
    config = CONFIGS["qwen2"]
    tensors = tensors_of(config, 12)
    output = run(tensors, config)
    upstream = upstream_of(output)
    expected = gradients(output, tensors, upstream, retain_graph=True)
    strided = [torch.stack([gradient, torch.full_like(gradient, float("nan"))], -1)[..., 0] for gradient in upstream]
    columns = [gradient.t().contiguous().t() if gradient.dim() == 2 else gradient for gradient in upstream]
    wide = [torch.cat([gradient, gradient], 1)[:, : gradient.shape[1]] if gradient.dim() == 2 else gradient for gradient in upstream]
    for other in (strided, columns, wide):
        actual = gradients(output, tensors, other, retain_graph=True)
        for name, gradient in expected.items():
            assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "relu_squared"])
@pytest.mark.parametrize("biases", [False, True])
def test_dense_mlp(activation, biases):
    config = LayerConfig(16, 24, 1, 1, Activation(activation), gate_up_bias=biases, down_bias=biases)
    tensors = tensors_of(config, 10)
    weights = [
        None if tensors[name] is None else tensors[name][0].detach().requires_grad_()
        for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
    ]
    x = tensors["x"]
    y = MF.mlp(x, *weights, activation=config.activation)
    expected = ffn(config, x, *weights)
    assert error(y, expected) < 1e-13
    inputs = [x, *(tensor for tensor in weights if tensor is not None)]
    upstream = torch.randn_like(y)
    for actual, wanted in zip(torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)):
        assert error(actual, wanted) < 1e-12


# --- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss", "two_shared", "sequence_loss", "losses", "before_down", "relu_squared"])
def test_gradcheck(name):
    config = CONFIGS[name]
    shared = tuple(dataclasses.replace(expert, intermediate_size=8) for expert in config.shared_experts)
    experts = 4 if config.router.num_groups == 4 else 3  # few, since each element of each tensor is one evaluation
    sizes = dict(hidden_size=8, intermediate_size=8, num_experts=experts, top_k=2, shared_experts=shared)
    config = with_router(dataclasses.replace(config, **sizes), group_score_size=1)
    tensors = tensors_of(config, 4, seed=3)
    named = leaves(tensors)
    fixed = {"config": config, "num_sequences": 2, "selection_bias": tensors.get("selection_bias")}
    kinds = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")

    def function(*values):
        given = dict(zip(named, values))
        shared = [
            tuple(given.pop(f"shared.{s}.{kind}", None) for kind in kinds) for s in range(len(config.shared_experts))
        ]
        output = MF.moe(**given, shared=shared, return_routing=True, **fixed)
        return tuple(getattr(output, result) for result in RESULTS)

    assert torch.autograd.gradcheck(function, tuple(named.values()))


def test_gradcheck_of_brought_weights():
    config = dataclasses.replace(BASE, hidden_size=8, intermediate_size=8)
    tensors = brought_routing(config, 5, torch.int32)

    def function(x, weights):
        return MF.moe(**(tensors | {"x": x, "topk_weights": weights}), config=config)

    assert torch.autograd.gradcheck(function, (tensors["x"], tensors["topk_weights"]))


@pytest.mark.parametrize("frozen", ["x", "router_logits", "gate_up_proj", "down_bias", "shared.1.down_proj", "all weights"])
def test_each_gradient_is_optional(frozen):
    config = CONFIGS["two_shared"]
    tensors = tensors_of(config, 12)
    everything = gradients(run(tensors, config), tensors)
    for name, tensor in leaves(tensors).items():
        if name == frozen or (frozen == "all weights" and ("proj" in name or "bias" in name)):
            tensor.requires_grad_(False)
    some = gradients(run(tensors, config), tensors)
    assert frozen not in some and 3 <= len(some) < len(everything)
    for name, gradient in some.items():
        assert torch.equal(gradient, everything[name]), name


@pytest.mark.parametrize("used", RESULTS)
def test_each_result_may_be_unused(used):
    config = dataclasses.replace(CONFIGS["losses"], shared_experts=())
    tensors = tensors_of(config, 12)
    exact = MF.MoEOutput(*plain_moe(config=config, **tensors))
    result = getattr(run(tensors, config), used)
    upstream = torch.randn_like(result)
    names = leaves(tensors)
    actual = torch.autograd.grad(result, list(names.values()), upstream)
    wanted = torch.autograd.grad(getattr(exact, used), list(names.values()), upstream, allow_unused=True)
    for name, gradient, expected in zip(names, actual, wanted):
        expected = torch.zeros_like(gradient) if expected is None else expected
        assert error(gradient, expected) < 1e-12, name


def test_several_backwards_of_one_forward():
    tensors = tensors_of(DEEPSEEK, 30)
    output = run(tensors, DEEPSEEK)
    first = gradients(output, tensors, retain_graph=True)
    run(tensors_of(DEEPSEEK, 50, seed=9), DEEPSEEK).y.sum().backward()
    second = gradients(output, tensors)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(output, tensors)


def test_several_forwards_await_their_backwards():
    cases = [tensors_of(BASE, tokens, seed=tokens) for tokens in (5, 70, 20)]
    alone = [gradients(run(tensors, BASE), tensors) for tensors in cases]
    outputs = [run(tensors, BASE) for tensors in cases]
    together = [gradients(output, tensors) for output, tensors in reversed(list(zip(outputs, cases)))][::-1]
    for one, other in zip(alone, together):
        assert all(torch.equal(one[name], other[name]) for name in one)


class Spy(TorchDispatchMode):
    """Keeps the results of torch.ops.moelith.moe."""

    def __init__(self):
        super().__init__()
        self.saved_bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.moelith.moe.default:
            self.saved_bytes.append(result[-1].numel())
        return result


def test_forward_without_gradients_saves_nothing():
    tensors = tensors_of(BASE, 30)
    with Spy() as spy:
        expected = run(tensors, BASE)
        with torch.no_grad():
            assert torch.equal(run(tensors, BASE).y, expected.y)
        with torch.inference_mode():
            assert torch.equal(run(tensors, BASE).y, expected.y)
        for tensor in leaves(tensors).values():
            tensor.requires_grad_(False)
        assert torch.equal(run(tensors, BASE).y, expected.y)
    assert spy.saved_bytes[0] > 0 and spy.saved_bytes[1:] == [0, 0, 0]


@pytest.mark.parametrize("name", ["mixtral", "two_shared", "capacity_by_score"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recomputing_saves_less_and_gives_the_same_bits(name, dtype):
    config = CONFIGS[name]
    tensors = tensors_of(config, 64, dtype=dtype)
    with Spy() as spy:
        kept = run(tensors, config)
        recomputed = run(tensors, config, options=PlanOptions(recompute=True))
    assert spy.saved_bytes[1] < spy.saved_bytes[0] / 2
    assert torch.equal(kept.y, recomputed.y)
    one, other = gradients(kept, tensors), gradients(recomputed, tensors)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_results_do_not_depend_on_how_it_is_run():
    tensors = tensors_of(DEEPSEEK, 150, dtype=torch.bfloat16)
    expected = run(tensors, DEEPSEEK)
    wanted = gradients(expected, tensors)
    for options in (
        PlanOptions(workers=1),
        PlanOptions(workers=3, shuffle_seed=7),
        PlanOptions(max_tokens=1000),
        PlanOptions(tile_columns=64, workers=2),
    ):
        output = run(tensors, DEEPSEEK, options=options)
        assert torch.equal(output.y, expected.y)
        actual = gradients(output, tensors)
        assert all(torch.equal(actual[name], wanted[name]) for name in wanted), options


def test_saved_memory_may_be_moved():
    """Hooks on saved tensors (offloading, checkpoints) put what was saved elsewhere, at any alignment."""
    tensors = tensors_of(BASE, 30)
    expected = gradients(run(tensors, BASE), tensors)

    def move(tensor):
        if tensor.dtype != torch.uint8:
            return tensor
        elsewhere = torch.empty(tensor.numel() + 8, dtype=torch.uint8)[8:]
        elsewhere.copy_(tensor)
        tensor.data.fill_(0xFF)
        return elsewhere

    with torch.autograd.graph.saved_tensors_hooks(move, lambda tensor: tensor):
        output = run(tensors, BASE)
    actual = gradients(output, tensors)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_activation_checkpointing():
    tensors = tensors_of(BASE, 30)
    expected = gradients(run(tensors, BASE), tensors)
    names = leaves(tensors)

    def layer(*values):
        return tuple(run(tensors | dict(zip(names, values)), BASE))

    output = MF.MoEOutput(*checkpoint(layer, *names.values(), use_reentrant=False))
    actual = gradients(output, tensors)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_weights_changed_between_forward_and_backward_are_noticed():
    tensors = tensors_of(BASE, 8)
    output = run(tensors, BASE)
    with torch.no_grad():
        tensors["gate_up_proj"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.y.sum().backward()


def test_second_derivatives_are_refused():
    tensors = tensors_of(BASE, 8)
    (dx,) = torch.autograd.grad(run(tensors, BASE).y.sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()
    for name, tensor in leaves(tensors).items():  # with constant weights too
        tensor.requires_grad_(name == "x")
    (dx,) = torch.autograd.grad(run(tensors, BASE).y.sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (dx.sum() + tensors["x"].sum()).backward()


def test_second_derivatives_by_what_is_asked_for_are_refused_too():
    tensors = tensors_of(BASE, 8)
    for asked in ("x", "down_proj", "router_logits"):
        (dx,) = torch.autograd.grad(run(tensors, BASE).y.sum(), tensors["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(dx.square().sum() + tensors[asked].sum(), tensors[asked])
        (dx,) = torch.autograd.grad(run(tensors, BASE).y.sum(), tensors["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            (dx.square().sum() + tensors[asked].sum()).backward(inputs=[tensors[asked]])
    x = tensors["x"].detach()
    of_x = lambda x: run(tensors | {"x": x}, BASE).y
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.functional.hvp(lambda x: of_x(x).square().sum(), x, torch.ones_like(x))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.functional.jvp(of_x, x, x)  # differentiates twice backward


def test_tensors_without_strided_memory_and_odd_lists_are_refused_by_name():
    tensors = tensors_of(BASE, 8)
    for name in ("gate_up_proj", "down_proj", "x", "router_logits"):
        with pytest.raises(ValueError, match=f"^{name}: layout"):
            run(tensors | {name: tensors[name].detach().to_sparse()}, BASE)
    with pytest.raises(TypeError, match="^main_gradients: list"):
        run(tensors, BASE, main_gradients=["down_proj"])
    target = torch.zeros(tensors["down_proj"].shape, dtype=accumulator_dtype(tensors["down_proj"].dtype))
    with pytest.raises(ValueError, match="main_gradients.*negat"):
        run(tensors, BASE, main_gradients={"down_proj": torch._neg_view(target)})
    with pytest.raises(ValueError, match="^router_logits: dtype int8; accepted: float64, float32, bfloat16$"):
        run(tensors | {"router_logits": torch.zeros(tensors["router_logits"].shape, dtype=torch.int8)}, BASE)
    with pytest.raises(ValueError, match="^x: dtype int64; accepted: float64, float32, bfloat16$"):
        run(tensors | {"x": torch.zeros(tensors["x"].shape, dtype=torch.int64)}, BASE)


def test_forward_mode_is_refused():
    tensors = tensors_of(BASE, 8)
    x = tensors["x"].detach()
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: run(tensors | {"x": x}, BASE).y, (x,), (x,))


def test_lazily_negated_tensors():
    tensors = tensors_of(BASE, 8)
    upstream = upstream_of(run(tensors, BASE))
    for name in ("x", "router_logits", "gate_up_proj"):
        plain = tensors | {name: (-tensors[name]).detach().requires_grad_()}
        negated = tensors | {name: torch._neg_view(tensors[name].detach()).requires_grad_()}
        assert negated[name].is_neg()
        wanted = gradients(run(plain, BASE), plain, upstream)
        actual = gradients(run(negated, BASE), negated, [torch._neg_view(-tensor) for tensor in upstream])
        assert all(torch.equal(actual[key], wanted[key]) for key in wanted), name


def test_tensors_asked_for_their_attributes():
    """As those of a PyTorch are that has no __dlpack_c_exchange_api__."""
    tensors = tensors_of(BASE, 8)
    apart = torch.randn(8, 2 * BASE.hidden_size, dtype=torch.float64)[:, : BASE.hidden_size]  # rows that are not adjacent
    tensors["x"] = apart.detach().requires_grad_()
    output = run(tensors, BASE)
    upstream = upstream_of(output)
    wanted = gradients(output, tensors, upstream)
    given = runtime._DTYPES, torch.Tensor
    _moelith.know_pytorch(*given, None)
    try:
        slow = run(tensors, BASE)
        actual = gradients(slow, tensors, upstream)
        with pytest.raises(ValueError, match="x: dtype float16"):
            run(tensors | {"x": torch.zeros(8, 16, dtype=torch.float16)}, BASE)
    finally:
        _moelith.know_pytorch(*given, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
    assert torch.equal(slow.y, output.y)
    assert all(torch.equal(actual[key], wanted[key]) for key in wanted)


def test_A2_sequence_loss_of_micro_batches_adds_up():
    config = with_router(aux_loss="sequence", aux_loss_coefficient=0.5)
    tensors = tensors_of(config, 8)
    joined = run(tensors, config, num_sequences=2).aux_loss
    (wanted,) = torch.autograd.grad(joined, tensors["router_logits"])
    halves = []
    for rows in (slice(0, 4), slice(4, 8)):
        part = tensors | {"x": tensors["x"][rows], "router_logits": tensors["router_logits"][rows]}
        halves.append(run(part, config).aux_loss)
    (actual,) = torch.autograd.grad(sum(halves), tensors["router_logits"])
    assert error(sum(halves), joined) < 1e-14
    assert wanted.abs().max() > 1e-3 and error(actual, wanted) < 1e-13


def test_E5_losses_are_the_same_in_every_run():
    config = with_router(aux_loss="batch", aux_loss_coefficient=0.1, z_loss_coefficient=0.1)
    tensors = tensors_of(config, 333, dtype=torch.float32)
    runs = []
    for _ in range(8):
        output = run(tensors, config)
        (gradient,) = torch.autograd.grad(output.aux_loss + output.z_loss, tensors["router_logits"])
        runs.append((output.aux_loss.item(), output.z_loss.item(), gradient))
    assert all(one[:2] == runs[0][:2] and torch.equal(one[2], runs[0][2]) for one in runs)


# --- main gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_G3_main_gradients_accumulate_in_float32(dtype):
    """E=2, H=16, I=32, 4 tokens each; main gradients preset to 1; two backward passes: 1 + 2 dW."""
    config = LayerConfig(16, 32, 2, 1)
    tensors = tensors_of(config, 8, dtype=dtype)
    del tensors["router_logits"]
    ids = torch.tensor([[0], [1]] * 4)
    tensors |= {"topk_ids": ids, "topk_weights": torch.ones(8, 1)}
    exact = in_float64(tensors)
    upstream = torch.randn(8, 16).to(dtype)
    wanted = torch.autograd.grad(
        plain_moe(config=config, **exact)[0], [exact["gate_up_proj"], exact["down_proj"]], upstream.double()
    )
    main = {name: torch.ones(tensors[name].shape) for name in ("gate_up_proj", "down_proj")}
    for _ in range(2):
        run(tensors, config, main_gradients=main).y.backward(upstream)
    for (name, actual), expected in zip(main.items(), wanted):
        assert tensors[name].grad is None
        assert error(actual, 1 + 2 * expected) < (1e-5 if dtype == torch.float32 else 1e-2), name
    assert tensors["x"].grad.norm() > 0


def test_main_gradients_of_a_float64_layer():
    tensors = tensors_of(BASE, 8)
    wanted = gradients(run(tensors, BASE), tensors)["down_proj"]
    main = torch.ones_like(wanted)
    actual = gradients(run(tensors, BASE, main_gradients={"down_proj": main}), tensors)
    assert actual["down_proj"] is None and error(main, 1 + wanted) < 1e-14


def test_main_gradients_of_some_weights():
    config = CONFIGS["two_shared"]
    tensors = tensors_of(config, 12, dtype=torch.float32)
    wanted = gradients(run(tensors, config), tensors)
    main = {name: torch.zeros(leaves(tensors)[name].shape) for name in ("down_bias", "shared.1.gate_up_proj", "down_proj")}
    tensors["down_proj"].requires_grad_(False)  # frozen: its main gradient stays as it is
    actual = gradients(run(tensors, config, main_gradients=main), tensors)
    assert actual["down_bias"] is None and actual["shared.1.gate_up_proj"] is None
    assert torch.equal(main["down_bias"], wanted["down_bias"])
    assert torch.equal(main["shared.1.gate_up_proj"], wanted["shared.1.gate_up_proj"])
    assert not main["down_proj"].any()
    assert torch.equal(actual["gate_up_proj"], wanted["gate_up_proj"])
    assert torch.equal(actual["x"], wanted["x"])


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["deepseek", "two_shared"])
def test_compile_without_graph_breaks(name, dynamic):
    config = CONFIGS[name]
    torch._dynamo.reset()

    def function(tensors):
        output = run({**tensors, "x": tensors["x"] * 2}, config)
        y, *routing = output
        return MF.MoEOutput(y + 1, *routing)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (12, 20, 7):
        tensors = tensors_of(config, tokens)
        expected, output = function(tensors), compiled(tensors)
        assert all(torch.equal(one, other) for one, other in zip(output, expected))
        wanted, actual = gradients(expected, tensors), gradients(output, tensors)
        assert all(torch.equal(actual[key], wanted[key]) for key in wanted)
        with torch.no_grad():
            assert torch.equal(compiled(tensors).y, expected.y)


def test_compile_with_inductor():
    torch._dynamo.reset()
    tensors = tensors_of(BASE, 12, dtype=torch.float32)

    def function(tensors):
        return run({**tensors, "x": torch.tanh(tensors["x"])}, BASE)

    output = torch.compile(function, fullgraph=True)(tensors)
    expected = function(tensors)
    assert error(output.y, expected.y) < 1e-6
    wanted, actual = gradients(expected, tensors), gradients(output, tensors)
    assert max(error(actual[key], wanted[key]) for key in wanted) < 1e-5


def test_compile_dense_mlp():
    torch._dynamo.reset()
    x, gate_up, down = (torch.randn(*shape) for shape in ((5, 16), (48, 16), (16, 24)))
    compiled = torch.compile(MF.mlp, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, gate_up, down), MF.mlp(x, gate_up, down))


def test_operator_registration():
    config = CONFIGS["two_shared"]
    tensors = tensors_of(config, 6)
    weights = [leaves(tensors)[name] for name in config.weights]
    routing = (tensors["router_logits"], None, None, None, tensors["shared_gate_logits"], None)
    settings = (config.key, PlanOptions().key, "0", 1, True)
    torch.library.opcheck(
        torch.ops.moelith.moe.default,
        (tensors["x"], *routing, weights, [], 0, *settings),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


# --- bad input -------------------------------------------------------------------------------------------------------


def bad(name, pattern, config=BASE, exception=ValueError, **arguments):
    return pytest.param(config, arguments, exception, pattern, id=name)


@pytest.mark.parametrize(
    "config, arguments, exception, pattern",
    [
        bad("columns of x", r"x: shape \(12, 8\).*16", x=torch.zeros(12, 8, dtype=torch.float64)),
        bad("dtype of x", "x: dtype float16", x=torch.zeros(12, 16, dtype=torch.float16)),
        bad("dtypes that differ", "float64.*float32", x=torch.zeros(12, 16)),
        bad("scalar x", r"x: shape \(\)", x=torch.tensor(1.0)),
        bad("experts", "gate_up_proj.*5, 48, 16.*6, 48, 16", gate_up_proj=torch.zeros(5, 48, 16, dtype=torch.float64)),
        bad(
            "transposed weights",
            "down_proj.*contiguous",
            down_proj=torch.zeros(6, 24, 16, dtype=torch.float64).transpose(1, 2),
        ),
        bad("logits", r"router_logits: shape \(12, 5\).*6", router_logits=torch.zeros(12, 5, dtype=torch.float64)),
        bad("tokens of logits", "router_logits.*13.*12", router_logits=torch.zeros(13, 6, dtype=torch.float64)),
        bad("dtype of logits", "router_logits", router_logits=torch.zeros(12, 6, dtype=torch.int32)),
        bad("no routing", "router_logits, topk_ids", router_logits=None),
        bad("two routings", "topk_ids", topk_ids=torch.zeros(12, 2, dtype=torch.int32)),
        bad("ids without weights", "topk_weights", router_logits=None, topk_ids=torch.zeros(12, 2, dtype=torch.int32)),
        bad(
            "ids out of range",
            "topk_ids.*6",
            router_logits=None,
            topk_ids=torch.full((12, 2), 6),
            topk_weights=torch.ones(12, 2, dtype=torch.float64),
        ),
        bad("bias not configured", "gate_up_bias", gate_up_bias=torch.zeros(6, 48, dtype=torch.float64)),
        bad("bias missing", "down_bias: None", config=dataclasses.replace(BASE, down_bias=True)),
        bad("selection bias missing", "selection_bias", config=with_router(kind="sigmoid", selection_bias=True)),
        bad("selection bias not configured", "selection_bias", selection_bias=torch.zeros(6, dtype=torch.float64)),
        bad("shared", "shared: 1 experts given; config has 0", shared=[(torch.zeros(1), torch.zeros(1))]),
        bad("valid tokens", "num_valid_tokens.*13.*12", num_valid_tokens=torch.tensor([13], dtype=torch.int32)),
        bad("dtype of valid tokens", "num_valid_tokens", num_valid_tokens=torch.tensor([3])),
        bad("sequences", "num_sequences.*5", num_sequences=5),
        bad("too many sequences", "num_sequences: got 1180591620717411303424, .*12", num_sequences=2**70),
        bad("type of top_k", "top_k: 2.5, a float.*int", dataclasses.replace(BASE, top_k=2.5), TypeError),
        bad("top_k", "top_k.*7", config=dataclasses.replace(BASE, top_k=7)),
        bad("hidden size", "hidden_size.*12", config=dataclasses.replace(BASE, hidden_size=12), x=torch.zeros(12, 12)),
        bad("router", "kind.*sofmax.*softmax_topk", config=with_router(kind="sofmax")),
        bad("groups", "num_groups.*4", config=with_router(kind="sigmoid", num_groups=4, top_groups=2)),
        bad("max_tokens", "12.*max_tokens = 10", options=PlanOptions(max_tokens=10)),
        bad("workers", "workers.*-1", options=PlanOptions(workers=-1)),
        bad("factor", "receive_capacity_factor: got -1,.*infinity", options=PlanOptions(receive_capacity_factor=-1.0)),
        bad(
            "type of factor",
            "receive_capacity_factor: '2'.*float",
            exception=TypeError,
            options=PlanOptions(receive_capacity_factor="2"),
        ),
        bad("main gradient name", "main_gradients: 'x'", main_gradients={"x": torch.zeros(1)}),
        bad("main gradient shape", r"main_gradients\['down_proj'\]", main_gradients={"down_proj": torch.zeros(1)}),
        bad("main gradient dtype", "float32.*float64", main_gradients={"down_proj": torch.zeros(6, 16, 24)}),
        bad(
            "strides of main gradient",
            "strides.*contiguous",
            main_gradients={"down_proj": torch.zeros(6, 24, 16, dtype=torch.float64).mT},
        ),
        bad("no main gradient", "down_proj.*NoneType", exception=TypeError, main_gradients={"down_proj": None}),
        bad("device", "gate_up_proj: on meta.*cpu", gate_up_proj=torch.zeros(6, 48, 16, device="meta")),
        bad("device of valid tokens", "num_valid_tokens: on meta", num_valid_tokens=torch.zeros(1, device="meta")),
        bad("sparse x", "x: layout torch.sparse_coo", x=torch.zeros(12, 16).to_sparse()),
        bad("list for x", "x: list.*Tensor", exception=TypeError, x=[[0.0] * 16]),
        bad("number of valid tokens", "num_valid_tokens: int.*Tensor", exception=TypeError, num_valid_tokens=3),
        bad("type of sequences", "num_sequences: float.*int", exception=TypeError, num_sequences=2.0),
        bad("type of options", "options: NoneType.*PlanOptions", exception=TypeError, options=None),
        bad("type of workers", "workers: '2'.*int", exception=TypeError, options=PlanOptions(workers="2")),
        bad("type of config", "config: dict.*LayerConfig", config={}, exception=TypeError),
    ],
)
def test_bad_arguments(config, arguments, exception, pattern):
    tensors = tensors_of(BASE, 12)
    with pytest.raises(exception) as caught:
        run(tensors | arguments, config) if "options" not in arguments else run(
            {k: v for k, v in (tensors | arguments).items() if k != "options"}, config, options=arguments["options"]
        )
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)
    # and the next call works
    assert run(tensors, BASE).y.isfinite().all()


def test_devices_without_an_executor_are_refused():
    with pytest.raises(NotImplementedError, match="device: 'mps'; accepted: 'cpu', 'cuda'"):
        Group.single().plan(BASE.key, PlanOptions().key, torch.float32, "mps", 8)


def test_shapes_on_the_meta_device():
    tensors = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in tensors_of(BASE, 12).items()
    }
    output = run(tensors, BASE)
    assert output.y.is_meta and output.y.shape == (12, 16) and output.topk_ids.shape == (12, 2)
    assert gradients(output, tensors, [torch.empty_like(getattr(output, name)) for name in RESULTS])["x"].is_meta


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {"gate_up_proj": torch.zeros(5, 48, 16, dtype=torch.float64)},
        {"down_proj": torch.zeros(6, 24, 16, dtype=torch.float64).transpose(1, 2)},
        {"router_logits": torch.zeros(13, 6, dtype=torch.float64)},
        {"router_logits": torch.zeros(12, 6, dtype=torch.int32)},
        {"router_logits": None},
        {"router_logits": None, "topk_ids": torch.zeros(12, 2, dtype=torch.int32)},
        {"num_valid_tokens": torch.zeros(2, dtype=torch.int32)},
        {"selection_bias": torch.zeros(6, dtype=torch.float64)},
        {"num_sequences": 5},
        {"x": torch.zeros(12, 16, dtype=torch.float16)},
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_meta_tensors_are_refused_as_others_are(arguments, grad):
    def error_on(device):
        given = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in (tensors_of(BASE, 12) | arguments).items()
        }
        with pytest.raises(ValueError) as caught, torch.set_grad_enabled(grad):
            run(given, BASE)
        return str(caught.value)

    assert error_on("meta") == error_on("cpu")


def test_more_meta_tokens_than_max_tokens():
    given = {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in tensors_of(BASE, 12).items()}
    for grad in (True, False):
        with pytest.raises(ValueError, match="12.*max_tokens = 10"), torch.set_grad_enabled(grad):
            run(given, BASE, options=PlanOptions(max_tokens=10))


def test_main_gradient_that_is_the_weight_itself():
    tensors = {
        name: value.float().detach().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in tensors_of(BASE, 12).items()
    }
    output = run(tensors, BASE, main_gradients={"down_proj": tensors["down_proj"].detach()})
    with pytest.raises(ValueError, match="d_down_proj.*memory of the weight itself"):
        output.y.sum().backward()


def test_R1_rows_of_nan_logits():
    """Row 0 all NaN, row 1 with one NaN: distinct ids in range, row 2 as without them."""
    config = dataclasses.replace(BASE, num_experts=8)
    tensors = tensors_of(config, 3)
    expected = run(tensors, config)
    with torch.no_grad():
        tensors["router_logits"][0] = float("nan")
        tensors["router_logits"][1, expected.topk_ids[1, 0]] = float("nan")
    output = run(tensors, config)
    for row in output.topk_ids.tolist():
        assert len(set(row)) == 2 and all(0 <= expert < 8 for expert in row)
    assert expected.topk_ids[1, 0] not in output.topk_ids[1]
    assert torch.equal(output.y[2], expected.y[2])
    assert torch.equal(output.topk_weights[2], expected.topk_weights[2])


def test_update_selection_bias():
    bias = torch.zeros(4)
    MF.update_selection_bias(bias, torch.tensor([10, 0, 5, 5]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="counts"):
        MF.update_selection_bias(bias, torch.tensor([1.0] * 4), 0.5)
    with pytest.raises(ValueError, match="expert_counts: on meta.*cpu"):
        MF.update_selection_bias(bias, torch.zeros(4, dtype=torch.int64, device="meta"), 0.5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_in_the_midst_of_another_thread_s_pass():
    code = """
import os, sys, threading, time, torch
sys.path.insert(0, sys.argv[1])
from layer_cases import BASE, tensors_of
from moelith import functional as MF
from moelith.operators import accumulator_dtype
tensors = tensors_of(BASE, 300)
stop = threading.Event()
def passes():
    while not stop.is_set():
        MF.moe(config=BASE, **tensors)
thread = threading.Thread(target=passes)
thread.start()
for _ in range(3):
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        MF.moe(config=BASE, **tensors)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
"""
    subprocess.run([sys.executable, "-c", code, os.path.dirname(__file__)], check=True, timeout=120)


def test_forward_mode_in_compiled_code_is_refused():
    config = CONFIGS["qwen2"]
    tensors = tensors_of(config, 6)
    frozen = {name: tensor.detach() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in tensors.items()}
    direction = torch.ones_like(frozen["x"])

    def layer(x):
        return MF.moe(config=config, **(frozen | {"x": x})).y

    def tangent(x):
        return torch.func.jvp(layer, (x,), (direction,))[1]

    for backend in ("eager", "aot_eager"):  # PyTorch itself refuses some of these, likewise by a NotImplementedError
        torch._dynamo.reset()
        with pytest.raises(NotImplementedError):
            torch.compile(tangent, backend=backend)(frozen["x"])
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=backend)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError):
            compiled(forward_ad.make_dual(frozen["x"], direction))
    torch._dynamo.reset()


def test_a_saved_buffer_that_a_hook_changed_is_refused():
    config = CONFIGS["qwen2"]
    tensors = tensors_of(config, 12)
    for change in (lambda saved: saved[:256].clone(), lambda saved: saved.to(torch.int32)):
        def unpack(saved, change=change):
            return change(saved) if saved.dtype == torch.uint8 else saved

        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            output = run(tensors, config)
        with pytest.raises(ValueError, match="saved: .*accepted: uint8"):
            output.y.sum().backward()


def test_a_call_within_a_call_on_one_thread_is_an_error():
    config = CONFIGS["qwen2"]
    tensors = tensors_of(config, 12)
    with Group.single().lock, pytest.raises(RuntimeError, match="within a call on the same thread"):
        run(tensors, config)
    run(tensors, config)


def test_a_signal_handler_that_raises_leaves_the_layer_usable():
    config = CONFIGS["qwen2"]
    tensors = tensors_of(config, 12)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    stopped = 0
    try:
        for i in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.00013 * (i % 17))
                for _ in range(50):
                    run(tensors, config).y.sum().backward()
            except Stop:
                stopped += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert Group.single().lock.acquire(timeout=10)
            Group.single().lock.release()
            assert not Group.single().lock._is_owned()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 30
