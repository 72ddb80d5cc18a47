"""moelith.MoE: parameters, state dicts, main gradients, the selection bias, and what PyTorch does with modules."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from layer_cases import BASE, CONFIGS, DEEPSEEK, error, with_router
from torch.utils.checkpoint import checkpoint

import moelith
from moelith import MoE, PlanOptions
from moelith import functional as MF


def test_parameters_and_buffers():
    layer = MoE(CONFIGS["two_shared"], router_bias=True)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "router.weight": (6, 16),
        "router.bias": (6,),
        "gate_up_proj": (6, 48, 16),
        "gate_up_bias": (6, 48),
        "down_proj": (6, 16, 24),
        "down_bias": (6, 16),
        "shared_experts.0.gate_up_proj": (16, 16),
        "shared_experts.0.gate_up_bias": (16,),
        "shared_experts.0.down_proj": (16, 8),
        "shared_experts.0.down_bias": (16,),
        "shared_experts.1.gate_up_proj": (64, 16),
        "shared_experts.1.gate_up_bias": (64,),
        "shared_experts.1.down_proj": (16, 32),
        "shared_experts.1.down_bias": (16,),
        "shared_gate.weight": (2, 16),
    }
    assert set(MoE(DEEPSEEK).state_dict()) > {"selection_bias"}
    assert MoE(CONFIGS["relu_squared"]).gate_up_proj.shape == (6, 24, 16)
    assert "num_experts=6" in repr(layer)


@pytest.mark.parametrize("name", ["two_shared", "deepseek", "gpt_oss"])
def test_forward_is_the_functional_form(name):
    config = CONFIGS[name]
    layer = MoE(config, router_bias=name == "gpt_oss")
    if layer.selection_bias is not None:
        layer.selection_bias.normal_(std=0.1)
    x = torch.randn(3, 5, 16)
    output = layer(x, return_routing=True)
    expected = MF.moe(
        x,
        config=config,
        gate_up_proj=layer.gate_up_proj,
        down_proj=layer.down_proj,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
        router_logits=layer.router(x),
        selection_bias=layer.selection_bias,
        shared=[expert.weights() for expert in layer.shared_experts],
        shared_gate_logits=None if layer.shared_gate is None else layer.shared_gate(x),
        num_sequences=3,
        return_routing=True,
    )
    assert all(torch.equal(one, other) for one, other in zip(output, expected))
    assert torch.equal(layer(x), output.y)
    brought = layer(x, topk_ids=output.topk_ids.view(3, 5, -1), topk_weights=output.topk_weights.detach().view(3, 5, -1))
    assert torch.equal(brought, output.y)
    output.y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_sequences_are_the_first_dimension():
    layer = MoE(with_router(aux_loss="sequence", aux_loss_coefficient=0.1))
    x = torch.randn(4, 6, 16)
    together = layer(x, return_routing=True).aux_loss
    alone = sum(layer(row, return_routing=True).aux_loss for row in x)
    assert error(together, alone) < 1e-6
    assert layer(torch.randn(0, 6, 16)).shape == (0, 6, 16)


def test_router_in_float32():
    layer = MoE(BASE, router_dtype=torch.float32, dtype=torch.bfloat16)
    x = torch.randn(10, 16, dtype=torch.bfloat16)
    logits = layer.router_logits(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ layer.router.weight.float().T)
    output = layer(x)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.router.weight.grad.dtype == torch.bfloat16


# --- state dicts -----------------------------------------------------------------------------------------------------


def test_state_dict_round_trip(tmp_path):
    layer, other = MoE(DEEPSEEK), MoE(DEEPSEEK)
    layer.selection_bias.normal_()
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    x = torch.randn(9, 16)
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize(
    "change, pattern",
    [
        (lambda s: s | {"down_proj": s["down_proj"].mT}, "last two dimensions are swapped.*GPT-OSS.*to_moelith"),
        (lambda s: s | {"gate_up_proj": s["gate_up_proj"][:4]}, "holds 4 experts, and this rank has 6"),
        (lambda s: s | {"gate_up_proj": s["gate_up_proj"][:, :40]}, r"\[6, 40, 16\].*\[6, 48, 16\]"),
        (lambda s: {"experts." + name: t for name, t in s.items()}, "'experts.*Hugging Face.*to_moelith"),
        (lambda s: {"gate_proj.weight": s["down_proj"], "router.weight": s["router.weight"]}, "'gate_proj.weight'.*gate and up are one tensor"),
        (lambda s: {name: t for name, t in s.items() if name != "router.weight"}, "Missing key.*router.weight"),
    ],
)
def test_state_dicts_of_another_layout(change, pattern):
    layer = MoE(BASE)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="(?s)" + pattern):
        layer.load_state_dict(change(before))


def test_inside_of_a_model_the_prefix_is_told():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), MoE(BASE))
    state = model.state_dict() | {"1.experts.0.w1.weight": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)
    del state["1.gate_up_proj"]
    for strict in (True, False):  # what it asks for is there under another name, so leaving it out is a mistake
        with pytest.raises(RuntimeError, match="under '1.' holds 'experts.0.w1.weight'.*Hugging Face"):
            model.load_state_dict(state, strict=strict)


# --- the selection bias ----------------------------------------------------------------------------------------------


def test_selection_bias_keeps_its_dtype():
    layer = MoE(DEEPSEEK)
    layer.selection_bias.normal_()
    exact = layer.selection_bias.clone()
    layer.bfloat16()
    assert layer.gate_up_proj.dtype == torch.bfloat16
    assert layer.selection_bias.dtype == torch.float32 and torch.equal(layer.selection_bias, exact)
    layer.double()
    assert layer.selection_bias.dtype == torch.float64 and torch.equal(layer.selection_bias.float(), exact)
    assert layer(torch.randn(3, 16, dtype=torch.float64)).dtype == torch.float64
    assert MoE(DEEPSEEK, dtype=torch.bfloat16).selection_bias.dtype == torch.float32
    layer.load_state_dict({name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}, assign=True)
    assert layer.gate_up_proj.dtype == torch.bfloat16 and layer.selection_bias.dtype == torch.float32


def test_update_of_the_selection_bias_balances():
    torch.manual_seed(0)
    layer = MoE(DEEPSEEK)
    x = 1 + torch.randn(512, 16)

    def imbalance():
        counts = layer(x, return_routing=True).expert_counts
        return (counts.max() / counts.double().mean()).item(), counts

    before, _ = imbalance()
    for _ in range(200):
        layer.update_selection_bias(imbalance()[1], rate=0.005)
    after, _ = imbalance()
    assert before > 1.3 and after < 1.1
    # An update may come before the backward of a forward that it does not concern.
    output = layer(x, return_routing=True)
    layer.update_selection_bias(output.expert_counts)
    output.y.sum().backward()
    with pytest.raises(ValueError, match="this layer has none"):
        MoE(BASE).update_selection_bias(output.expert_counts)


# --- main gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_gradients_of_parameters(dtype):
    config = CONFIGS["two_shared"]
    plain, fused = MoE(config, dtype=dtype), MoE(config, dtype=dtype, main_gradients=True)
    fused.load_state_dict(plain.state_dict())
    experts = [name for name, _ in fused.named_parameters() if not name.startswith(("router", "shared_gate"))]
    for name in experts:
        fused.get_parameter(name).main_grad = torch.ones(fused.get_parameter(name).shape)
    for step in range(2):
        x = torch.randn(20, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        plain(x).sum().backward()
        fused(x).sum().backward()
    for name, parameter in fused.named_parameters():
        wanted = plain.get_parameter(name).grad
        if name in experts:
            assert parameter.grad is None
            assert error(parameter.main_grad, 1 + wanted.float()) < (1e-5 if dtype == torch.float32 else 2e-2), name
        else:
            assert torch.equal(parameter.grad, wanted), name


def test_parameters_without_a_main_gradient_get_their_grad():
    layer = MoE(BASE, main_gradients=True)
    layer.down_proj.main_grad = torch.zeros(layer.down_proj.shape)
    layer(torch.randn(5, 16)).sum().backward()
    assert layer.down_proj.grad is None and layer.down_proj.main_grad.any()
    assert layer.gate_up_proj.grad.any()


def test_megatron_s_protocol():
    """With `grad_added_to_main_grad` on the parameter, hooks on .grad run and find it True."""
    layer = MoE(BASE, main_gradients=True)
    layer.down_proj.main_grad = torch.zeros(layer.down_proj.shape)
    layer.down_proj.grad_added_to_main_grad = False
    seen = []
    layer.down_proj.register_post_accumulate_grad_hook(
        lambda parameter: seen.append((parameter.grad_added_to_main_grad, bool(parameter.grad.any())))
    )
    layer(torch.randn(5, 16)).sum().backward()
    assert seen == [(True, False)] and layer.down_proj.main_grad.any()
    layer.down_proj.grad_added_to_main_grad = False
    checkpoint(layer, torch.randn(5, 16), use_reentrant=False).sum().backward()
    assert seen == [(True, False)] * 2
    layer.down_proj.grad_added_to_main_grad = False
    layer.down_proj.grad = None
    layer.down_proj.main_grad.zero_()
    with torch.autocast("cpu", torch.bfloat16):  # the layer computes with a rounded copy of the parameter
        layer(torch.randn(5, 16)).float().sum().backward()
    assert seen == [(True, False)] * 3 and layer.down_proj.main_grad.any()


def test_compiled_main_gradients():
    torch._dynamo.reset()
    layer = MoE(DEEPSEEK, main_gradients=True)
    x = torch.randn(5, 16)
    for parameter in (layer.gate_up_proj, layer.shared_experts[0].down_proj):
        parameter.main_grad = torch.zeros(parameter.shape)
    layer(x).sum().backward()
    wanted = {name: (p.grad, getattr(p, "main_grad", None)) for name, p in layer.named_parameters()}
    wanted = {name: [None if t is None else t.clone() for t in pair] for name, pair in wanted.items()}
    for parameter in layer.parameters():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum().backward()
    for name, parameter in layer.named_parameters():
        grad, main = wanted[name]
        assert (parameter.grad is None) == (grad is None), name
        assert grad is None or torch.equal(parameter.grad, grad), name
        assert main is None or torch.equal(parameter.main_grad, main), name


# --- what PyTorch does with modules ----------------------------------------------------------------------------------


def test_compiled_module():
    torch._dynamo.reset()
    layer = MoE(with_router(DEEPSEEK, aux_loss="batch", aux_loss_coefficient=0.1))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for shape in ((2, 4, 16), (3, 4, 16), (3, 7, 16)):
        x = torch.randn(shape)
        results = []
        for module in (layer, compiled):
            layer.zero_grad()
            output = module(x, return_routing=True)
            (output.y.square().sum() + output.aux_loss).backward()
            results.append([*output, *(parameter.grad for parameter in layer.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*results))


def test_autocast():
    layer = MoE(CONFIGS["two_shared"])
    x = torch.randn(12, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    assert error(y, layer(x)) < 0.1
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        assert layer.double()(x.double()).dtype == torch.float64


def test_copies_and_pickles():
    layer = MoE(DEEPSEEK, options=PlanOptions(workers=1))
    x = torch.randn(5, 16)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))
    assert pickle.loads(pickle.dumps(DEEPSEEK)) == DEEPSEEK
    assert moelith.LayerConfig.from_key(DEEPSEEK.key) == DEEPSEEK
    assert len({DEEPSEEK, dataclasses.replace(DEEPSEEK), BASE}) == 2


def test_copies_belong_to_the_same_group():
    layer = MoE(BASE, options=PlanOptions(group=moelith.Group.threads(2)[0], max_tokens=8))
    assert copy.deepcopy(layer).options.group is layer.options.group
    single = MoE(BASE, options=PlanOptions(group=moelith.Group.single()))
    assert pickle.loads(pickle.dumps(single)).options.group is moelith.Group.single()
    with pytest.raises(TypeError, match="Group.*cannot be pickled"):
        pickle.dumps(layer)


def test_meta_device():
    with torch.device("meta"):
        layer = MoE(DEEPSEEK)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    x = torch.empty(2, 3, 16, device="meta", requires_grad=True)
    for meta in (layer, MoE(DEEPSEEK, router_dtype=torch.float32, device="meta", dtype=torch.bfloat16)):
        y = meta(x.to(meta.down_proj.dtype))
        assert y.is_meta and y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape and meta.down_proj.grad.shape == meta.down_proj.shape
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(3, 16)).isfinite().all()


def test_bad_configs_are_refused_when_the_layer_is_made():
    with pytest.raises(ValueError, match="hidden_size"):
        MoE(dataclasses.replace(BASE, hidden_size=12))
    with pytest.raises(ValueError, match="aux_loss.*sequnce.*sequence"):
        MoE(with_router(aux_loss="sequnce"))
    for fields in ({"activation": "swiglu"}, {"router": "sigmoid"}, {"shared_experts": [16]}, {"gate_up_bias": 1}):
        with pytest.raises(TypeError, match=f"{next(iter(fields))}.*accepted"):
            MoE(dataclasses.replace(BASE, **fields))
    with pytest.raises(TypeError, match="group: 3.*Group"):
        PlanOptions(group=3)


def test_package_without_pytorch():
    """`import moelith` alone stays cheap: names come at first use."""
    import subprocess
    import sys

    code = "import sys, moelith; assert 'torch' not in sys.modules; moelith.LayerConfig; print(len(dir(moelith)))"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Moe'"):
        moelith.Moe
    for name in moelith.__all__:
        assert getattr(moelith, name) is not None


def test_bad_inputs_of_a_module_are_named():
    layer, x = MoE(BASE), torch.randn(5, 16)
    for bad, exception, pattern in (
        (x.numpy(), TypeError, "x: ndarray; accepted: Tensor"),
        (x.half(), ValueError, r"x: torch.float16, shape \(5, 16\); accepted: torch.float32, \[..., 16\]"),
        (x.long(), ValueError, "x: torch.int64"),
        (x[:, :8], ValueError, r"x: torch.float32, shape \(5, 8\)"),
        (x[0, 0], ValueError, r"x: torch.float32, shape \(\)"),
    ):
        with pytest.raises(exception, match=pattern):
            layer(bad)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="accepted: a floating-point dtype"):
        layer(x.long())
    for arguments, pattern in (
        ({"config": {"hidden_size": 16}}, "config: dict; accepted: LayerConfig"),
        ({"config": BASE, "options": {"workers": 1}}, "options: dict; accepted: PlanOptions"),
    ):
        with pytest.raises(TypeError, match=pattern):
            MoE(**arguments)
    with pytest.raises(TypeError, match="shared_experts: 64, a int; accepted: tuple or list"):
        dataclasses.replace(BASE, shared_experts=64)


def test_numbers_of_numpy_in_a_config():
    config = dataclasses.replace(BASE, hidden_size=np.int64(16), router=moelith.Router(scaling_factor=np.float32(2)))
    assert config.key == dataclasses.replace(BASE, router=moelith.Router(scaling_factor=2.0)).key
    assert MoE(config)(torch.randn(3, 16)).shape == (3, 16)


def test_transforms_of_torch_func_are_refused():
    layer, x = MoE(BASE), torch.randn(3, 5, 16)
    with pytest.raises(NotImplementedError, match="torch.func's transforms"):
        torch.func.vmap(layer)(x)
    with pytest.raises(NotImplementedError, match="torch.func's transforms"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    parameters = {name: 2 * parameter for name, parameter in layer.named_parameters()}
    assert torch.func.functional_call(layer, parameters, (x,)).shape == x.shape
