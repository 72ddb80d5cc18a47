"""The layer as operators of PyTorch: torch.ops.moelith.*, with fake kernels and autograd.

Private: moelith.functional is the interface. `config` is a LayerConfig.key, `options` a PlanOptions.key, `group` the
handle of a Group ("0": one rank). `weights` is the list in the order of LayerConfig.weights.

  moe                        forward; differentiable
  moe_backward               its gradients
  moe_backward_accumulate    likewise, and adds weight gradients to float32 main gradients in place
  update_selection_bias      the bias update of balancing without an auxiliary loss
"""

import functools
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from moelith import _moelith
from moelith.config import LayerConfig
from moelith.runtime import BUFFER_ALIGNMENT, SINGLE_HANDLE, Group, aligned_empty

_TENSOR_INPUTS = tuple(_moelith.Inputs.names)
_DIFFERENTIABLE = tuple(_moelith.InputGradients.names)


@functools.lru_cache(maxsize=None)
def parsed_config(key: str) -> LayerConfig:
    return LayerConfig.from_key(key)


@functools.lru_cache(maxsize=None)
def _places(key: str):
    config = parsed_config(key)
    return _moelith.WeightPlaces(list(config.weights), len(config.shared_experts))


def _prepared(tensors):
    """The inputs, copied where their layout is none that the library takes; weights are never copied."""
    # PyTorch resolves a lazy negation (as the imaginary part of a conjugate has) in arguments, but not in lists of them.
    x, *others = (tensor if tensor is None else tensor.resolve_neg() for tensor in tensors)
    return [_rows(x), *(tensor if tensor is None else tensor.contiguous() for tensor in others)]


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its rows are not contiguous or overlap."""
    if tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]):
        return tensor
    return tensor.contiguous()


def accumulator_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _stream(device):
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _empty_outputs(x, config):
    """Uninitialised tensors for _moelith.Outputs.names."""
    layer = parsed_config(config)
    accumulator = accumulator_dtype(x.dtype)
    tokens = x.shape[0]
    return (
        x.new_empty((tokens, x.shape[1])),
        x.new_empty((tokens, layer.top_k), dtype=torch.int32),
        x.new_empty((tokens, layer.top_k), dtype=accumulator),
        x.new_empty((layer.num_experts,), dtype=torch.int64),
        x.new_empty((), dtype=accumulator),
        x.new_empty((), dtype=accumulator),
    )


@torch.library.custom_op("moelith::moe", mutates_args=())
def moe(
    x: Tensor,
    router_logits: Optional[Tensor],
    topk_ids: Optional[Tensor],
    topk_weights: Optional[Tensor],
    selection_bias: Optional[Tensor],
    shared_gate_logits: Optional[Tensor],
    num_valid_tokens: Optional[Tensor],
    weights: List[Tensor],
    main_gradients: List[Tensor],
    main_gradient_mask: int,
    config: str,
    options: str,
    group: str,
    num_sequences: int,
    save: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> y, topk_ids, topk_weights, expert_counts, aux_loss, z_loss, and what backward needs (empty without `save`).

    main_gradients: float32 tensors that backward adds the gradients of some weights to; bit i of main_gradient_mask
    says that weight i has one.
    """
    with Group.of(group) as owner:
        tensors = _prepared(
            (x, router_logits, topk_ids, topk_weights, selection_bias, shared_gate_logits, num_valid_tokens)
        )
        x = tensors[0]
        plan = owner.plan(config, options, x.dtype, x.device.type, x.shape[0])
        sizes = plan.buffer_sizes(x.shape[0])
        inputs = _moelith.Inputs(tensors, weights, _places(config), num_sequences)
        results = _empty_outputs(x, config)
        outputs = _moelith.Outputs(results)
        saved = aligned_empty(sizes.saved, x.device) if save else x.new_empty((0,), dtype=torch.uint8)
        workspace = owner.workspace(sizes.workspace, x.device)
        plan.forward(
            inputs,
            outputs,
            saved.data_ptr() if save else 0,
            workspace.data_ptr(),
            _stream(x.device),
            watch_signals=owner.waits_on_main_thread(),
        )
    return (*results, saved)


@moe.register_fake
def _(
    x,
    router_logits,
    topk_ids,
    topk_weights,
    selection_bias,
    shared_gate_logits,
    num_valid_tokens,
    weights,
    main_gradients,
    main_gradient_mask,
    config,
    options,
    group,
    num_sequences,
    save,
):
    tokens = x.shape[0]
    size = 0
    if save and not isinstance(tokens, int):
        # A symbolic number of tokens: the plan is made, and asked, when the number is known.
        try:
            size = torch.library.get_ctx().new_dynamic_size()
        except DynamicOutputShapeException:  # PyTorch 2.6: that number of tokens is compiled for alone
            tokens = int(tokens)
    if save and isinstance(tokens, int):
        owner = Group.of(group)
        with owner.lock:
            device = "cpu" if x.is_meta else x.device.type
            size = owner.plan(config, options, x.dtype, device, tokens).buffer_sizes(tokens).saved
    return (*_empty_outputs(x, config), x.new_empty((size,), dtype=torch.uint8))


def _setup_context(ctx, inputs, output):
    *tensors, weights, main_gradients, mask, config, options, group, num_sequences, save = inputs
    ctx.set_materialize_grads(False)
    # save_for_backward refuses a backward after a change to a tensor. Main gradients do change between forward and
    # backward (that is their purpose), and the selection bias may: backward needs its presence, not its values.
    at = _TENSOR_INPUTS.index("selection_bias")
    ctx.selection_bias, tensors[at] = tensors[at], None
    ctx.save_for_backward(*tensors, *weights, output[-1])
    ctx.main_gradients = list(main_gradients)
    ctx.main_gradient_mask = mask
    ctx.settings = (config, options, group, num_sequences)
    # The tensors themselves: under a hook on saved tensors (a checkpoint), backward gets others.
    ctx.marked = {i: weight for i, weight in enumerate(weights) if parameter_to_mark(weight) is not None}


def _backward(ctx, grad_y, _ids, grad_topk_weights, _counts, grad_aux_loss, grad_z_loss, _saved):
    n = len(_TENSOR_INPUTS)
    *tensors, saved = ctx.saved_tensors
    tensors, weights = list(tensors[:n]), list(tensors[n:])
    tensors[_TENSOR_INPUTS.index("selection_bias")] = ctx.selection_bias
    needs = list(ctx.needs_input_grad)
    needs_weights = needs[n] or [False] * len(weights)
    masked = ctx.main_gradient_mask
    wanted = [needs[_TENSOR_INPUTS.index(name)] for name in _DIFFERENTIABLE]
    wanted += [need and not masked >> i & 1 for i, need in enumerate(needs_weights)]
    no_gradients = (None,) * n + ([None] * len(weights), [None] * len(ctx.main_gradients)) + (None,) * 6
    upstream = [grad_y, grad_topk_weights, grad_aux_loss, grad_z_loss]
    # Frozen weights have no main gradient to add to.
    accumulate = [i for i, need in enumerate(needs_weights) if need and masked >> i & 1]
    nothing_comes = all(gradient is None for gradient in upstream)
    if nothing_comes or not (any(wanted) or accumulate):
        group = ctx.settings[2]
        if group == SINGLE_HANDLE or Group.of(group).size == 1:
            return no_gradients
        # Rows of other ranks went through the experts of this one: it takes part in their backward all the same.
        if nothing_comes:
            upstream[0] = torch.zeros_like(tensors[0])
    mask = sum(1 << i for i, want in enumerate(wanted) if want)
    arguments = (tensors, weights, saved, upstream, mask, *ctx.settings)
    if accumulate:
        position = {i: at for at, i in enumerate(i for i in range(len(weights)) if masked >> i & 1)}
        targets = [ctx.main_gradients[position[i]] for i in accumulate]
        gradients = _gradient_buffers(tensors, weights, mask)
        moe_backward_accumulate(targets, gradients, sum(1 << i for i in accumulate), *arguments)
    else:
        gradients = moe_backward(*arguments)

    remaining = iter(gradients)
    of_tensors = dict.fromkeys(_TENSOR_INPUTS)
    for name, want in zip(_DIFFERENTIABLE, wanted):
        if want:
            of_tensors[name] = next(remaining)
    of_weights = [next(remaining) if want else None for want in wanted[len(_DIFFERENTIABLE) :]]
    for i in accumulate:
        of_weights[i] = _placeholder_of_main_gradient(ctx.marked.get(i))
    if torch.is_grad_enabled():  # create_graph
        sources = (*tensors, *weights, grad_y, grad_topk_weights, grad_aux_loss, grad_z_loss)
        of_tensors, of_weights = _not_differentiable_again(of_tensors, of_weights, sources)
    return (*of_tensors.values(), of_weights, [None] * len(ctx.main_gradients)) + (None,) * 6


class _NotDifferentiableAgain(torch.autograd.Function):
    """Hands the layer's gradients on as functions of all that they follow from, with a backward that raises.

    Detached gradients would count as constants, and autograd would leave out a node that leads to none of the tensors
    it is asked about: either way a second derivative would silently be zero.
    """

    @staticmethod
    def forward(_ctx, count, *tensors):
        return tuple(gradient.detach() for gradient in tensors[:count])

    @staticmethod
    def backward(_ctx, *_upstream):
        raise RuntimeError("moelith: second derivatives of the layer are asked for; no autograd formula for them")


def _not_differentiable_again(of_tensors, of_weights, sources):
    """The gradients, which raise when they are differentiated; sources: all that they follow from."""
    given = [gradient for gradient in (*of_tensors.values(), *of_weights) if gradient is not None]
    sources = [tensor for tensor in sources if tensor is not None and tensor.requires_grad]
    remaining = iter(_NotDifferentiableAgain.apply(len(given), *given, *sources))
    of_tensors = {name: None if gradient is None else next(remaining) for name, gradient in of_tensors.items()}
    return of_tensors, [None if gradient is None else next(remaining) for gradient in of_weights]


def _placeholder_of_main_gradient(weight):
    """What .grad gets where the gradient went to the main gradient: nothing, or, by Megatron's protocol, zeros.

    Megatron-Core's data parallelism sets `grad_added_to_main_grad = False` on its parameters, waits for the hook that
    a .grad triggers, and skips its own addition where the attribute has become True.
    """
    if weight is None:
        return None
    parameter_to_mark(weight).grad_added_to_main_grad = True
    return torch.zeros_like(weight)


def parameter_to_mark(weight):
    """The parameter behind a weight (itself, or what module.MoE cast it from) if it follows Megatron's protocol."""
    parameter = getattr(weight, "cast_from", weight)
    return parameter if hasattr(parameter, "grad_added_to_main_grad") else None


moe.register_autograd(_backward, setup_context=_setup_context)


def _gradient_buffers(tensors, weights, wanted):
    """Uninitialised tensors for the gradients whose bits are set in `wanted`: of _DIFFERENTIABLE, then of the weights."""
    named = dict(zip(_TENSOR_INPUTS, tensors))
    sources = [*(named[name] for name in _DIFFERENTIABLE), *weights]
    return [source.new_empty(source.shape) for i, source in enumerate(sources) if wanted >> i & 1]


def _run_backward(
    gradients,
    wanted,
    main_gradients,
    main_gradient_mask,
    tensors,
    weights,
    saved,
    upstream,
    config,
    options,
    group,
    num_sequences,
):
    with Group.of(group) as owner:
        tensors = _prepared(tensors)
        x = tensors[0]
        if saved.data_ptr() % BUFFER_ALIGNMENT:  # a hook on saved tensors moved it
            saved = aligned_empty(saved.numel(), saved.device).copy_(saved)

        upstream = [tensor if tensor is None else _rows(tensor.resolve_neg()) for tensor in upstream]
        remaining, remaining_main = iter(gradients), iter(main_gradients)
        of_inputs = [next(remaining) if wanted >> i & 1 else None for i in range(len(_DIFFERENTIABLE))]
        of_weights = [None] * len(weights)
        for i in range(len(weights)):
            if main_gradient_mask >> i & 1:
                of_weights[i] = next(remaining_main)
            elif wanted >> len(_DIFFERENTIABLE) + i & 1:
                of_weights[i] = next(remaining)
        places = _places(config)
        plan = owner.plan(config, options, x.dtype, x.device.type, x.shape[0])
        workspace = owner.workspace(plan.buffer_sizes(x.shape[0]).workspace, x.device)
        plan.backward(
            _moelith.Inputs(tensors, weights, places, num_sequences),
            saved.data_ptr(),
            _moelith.OutputGradients(upstream),
            _moelith.InputGradients(of_inputs, of_weights, places, main_gradient_mask),
            workspace.data_ptr(),
            _stream(x.device),
            watch_signals=owner.waits_on_main_thread(),
        )


@torch.library.custom_op("moelith::moe_backward", mutates_args=())
def moe_backward(
    tensors: List[Optional[Tensor]],
    weights: List[Tensor],
    saved: Tensor,
    upstream: List[Optional[Tensor]],
    wanted: int,
    config: str,
    options: str,
    group: str,
    num_sequences: int,
) -> List[Tensor]:
    """-> the gradients whose bits are set in `wanted`: of _DIFFERENTIABLE, then of the weights.

    tensors: the inputs of `moe` named in _TENSOR_INPUTS; upstream: the gradients of its outputs
    named in _moelith.OutputGradients.names.
    """
    gradients = _gradient_buffers(tensors, weights, wanted)
    settings = (config, options, group, num_sequences)
    _run_backward(gradients, wanted, [], 0, tensors, weights, saved, upstream, *settings)
    return gradients


@moe_backward.register_fake
def _(tensors, weights, saved, upstream, wanted, config, options, group, num_sequences):
    return _gradient_buffers(tensors, weights, wanted)


# Writes into its arguments only: torch.compile takes no operator that both changes a list and returns one.
@torch.library.custom_op("moelith::moe_backward_accumulate", mutates_args=("main_gradients", "gradients"))
def moe_backward_accumulate(
    main_gradients: List[Tensor],
    gradients: List[Tensor],
    main_gradient_mask: int,
    tensors: List[Optional[Tensor]],
    weights: List[Tensor],
    saved: Tensor,
    upstream: List[Optional[Tensor]],
    wanted: int,
    config: str,
    options: str,
    group: str,
    num_sequences: int,
) -> None:
    """Writes what moe_backward returns into `gradients`, and adds the gradients of the weights in main_gradient_mask to
    main_gradients."""
    settings = (config, options, group, num_sequences)
    _run_backward(gradients, wanted, main_gradients, main_gradient_mask, tensors, weights, saved, upstream, *settings)


@moe_backward_accumulate.register_fake
def _(
    main_gradients,
    gradients,
    main_gradient_mask,
    tensors,
    weights,
    saved,
    upstream,
    wanted,
    config,
    options,
    group,
    num_sequences,
):
    return None


@torch.library.custom_op("moelith::update_selection_bias", mutates_args=("bias",))
def update_selection_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    _moelith.update_selection_bias(_moelith.view(bias, "bias"), _moelith.view(counts, "counts"), rate)


@update_selection_bias.register_fake
def _(bias, counts, rate):
    return None
