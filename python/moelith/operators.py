"""The layer as operators of PyTorch: torch.ops.moelith.*, with fake kernels and autograd.

Private: moelith.functional is the interface. `config` is a LayerConfig.key, `options` a PlanOptions.key, `group` the
handle of a Group ("0": one rank). `weights` is the list in the order of LayerConfig.weights.

  moe                        forward; differentiable
  moe_backward               its gradients
  moe_backward_accumulate    likewise, and adds weight gradients to float32 main gradients in place
  update_selection_bias      the bias update of balancing without an auxiliary loss
"""

import functools
import json
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.autograd import forward_ad

from moelith import _moelith
from moelith.config import LayerConfig
from moelith.runtime import BUFFER_ALIGNMENT, SINGLE_HANDLE, Group, aligned_empty, config_for, dtype_name

_TENSOR_INPUTS = _moelith.INPUTS
_DIFFERENTIABLE = _moelith.DIFFERENTIABLE_INPUTS


@functools.lru_cache(maxsize=None)
def parsed_config(key: str) -> LayerConfig:
    return LayerConfig.from_key(key)


@functools.lru_cache(maxsize=None)
def _places(key: str):
    config = parsed_config(key)
    return _moelith.WeightPlaces(list(config.weights), len(config.shared_experts))


def accumulator_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# By torch.library's lower level, since torch.library.custom_op puts a dozen microseconds on each call, for which a small
# layer's kernel on a GPU would wait. What writes into its arguments is a custom_op, which tells autograd of that.
_library = torch.library.Library("moelith", "FRAGMENT")


def _define(name, function, fake):
    """Makes an operator of the function. Dynamo is kept out of it, as custom_op does: where it leaves a frame to Python,
    it would compile what that calls."""
    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"moelith::{name}", fake, lib=_library)
    return getattr(torch.ops.moelith, name).default


def _stream(x):
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


def _empty_outputs(x, config):
    """Uninitialised tensors for y, topk_ids, topk_weights, expert_counts, aux_loss and z_loss."""
    layer = parsed_config(config)
    accumulator = accumulator_dtype(x.dtype)
    tokens, columns = x.shape[0], x.shape[1]
    device, k, empty = x.device, layer.top_k, torch.empty_strided  # the quickest way to a new tensor
    return (
        empty((tokens, columns), (columns, 1), dtype=x.dtype, device=device),
        empty((tokens, k), (k, 1), dtype=torch.int32, device=device),
        empty((tokens, k), (k, 1), dtype=accumulator, device=device),
        empty((layer.num_experts,), (1,), dtype=torch.int64, device=device),
        empty((), (), dtype=accumulator, device=device),
        empty((), (), dtype=accumulator, device=device),
    )


def _run_forward(
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
    tensors = (x, router_logits, topk_ids, topk_weights, selection_bias, shared_gate_logits, num_valid_tokens)
    owner = Group.of(group)

    def run():
        tokens, device = x.shape[0], x.device
        plan = owner.plan(config, options, x.dtype, device.type, tokens)
        sizes = owner.buffer_sizes(plan, tokens)
        results = _empty_outputs(x, config)
        saved = aligned_empty(sizes.saved, device) if save else None
        plan.forward(
            tensors,
            weights,
            _places(config),
            num_sequences,
            results,
            saved,
            owner.workspace(sizes.workspace, device),
            _stream(x),
            owner.waits_on_main_thread(device.type),
        )
        return (*results, x.new_empty((0,), dtype=torch.uint8) if saved is None else saved)

    return owner.in_turn(run)


def _check_without_memory(tensors, weights, config, options, group, num_sequences):
    """Refuses dtypes, shapes and strides as _run_forward would, without a plan. Symbols are left to the call itself."""
    given = [tensor for tensor in (*tensors, *weights) if tensor is not None]
    numbers = (number for tensor in given for number in (*tensor.shape, *tensor.stride()))
    if not all(isinstance(number, int) for number in (num_sequences, *numbers)):
        return
    x = tensors[0]
    native = config_for(config, x.dtype)
    max_tokens = json.loads(options)["max_tokens"]
    _moelith.check_inputs(
        native,
        # How many of a group's experts are this rank's is known to its plan alone.
        native.num_experts if Group.of(group).size == 1 else weights[0].shape[0],
        x.shape[0] if max_tokens is None else max_tokens,
        tensors,
        weights,
        _places(config),
        num_sequences,
    )


def _fake_forward(
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
    tensors = (x, router_logits, topk_ids, topk_weights, selection_bias, shared_gate_logits, num_valid_tokens)
    _check_without_memory(tensors, weights, config, options, group, num_sequences)
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


moe = _define("moe", _run_forward, _fake_forward)


def _differentiable_forward(keyset, *arguments):
    _refuse_forward_mode(arguments)
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
        return _below_autograd(keyset, *arguments)
    n = len(_TENSOR_INPUTS)
    weights, *others = arguments[n:]
    return _Layer.apply(keyset, others, *arguments[:n], *weights)


def _refuse_forward_mode(arguments):
    """Without this, forward-mode differentiation would take the layer for a constant."""
    if forward_ad._current_level < 0:
        return
    for argument in arguments:
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError("forward-mode differentiation (jvp): accepted is reverse mode, backward()")


def _below_autograd(keyset, *arguments):
    """moe's results without its autograd formula."""
    if _nothing_between(keyset):
        return _run_forward(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return moe.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


_straight = {}  # by the bits of a keyset: a few sets come again and again


def _nothing_between(keyset) -> bool:
    """Whether all that PyTorch has to do below autograd is to call the operator on the device (no mode that watches,
    no fake tensors, no lazily negated ones)."""
    bits = keyset.raw_repr()
    if bits not in _straight:
        first = (keyset & torch._C._after_autograd_keyset).highestPriorityTypeId()
        _straight[bits] = first in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
    return _straight[bits]


class _Layer(torch.autograd.Function):
    """moe with its autograd formula. `others`: its arguments after the weights; the tensors are flat for autograd."""

    @staticmethod
    def forward(ctx, keyset, others, *tensors):
        n = len(_TENSOR_INPUTS)
        weights = list(tensors[n:])
        results = _below_autograd(keyset, *tensors[:n], weights, *others)
        _keep(ctx, tensors[:n], weights, *others, results[-1])
        return results

    @staticmethod
    def backward(ctx, *upstream):
        return (None, None, *_gradients(ctx, *upstream))


def _keep(ctx, tensors, weights, main_gradients, mask, config, options, group, num_sequences, _save, saved):
    """What backward needs, into ctx."""
    tensors = list(tensors)
    ctx.set_materialize_grads(False)
    # save_for_backward refuses a backward after a change to a tensor. Main gradients do change between forward and
    # backward (that is their purpose), and the selection bias may: backward needs its presence, not its values.
    at = _TENSOR_INPUTS.index("selection_bias")
    ctx.selection_bias, tensors[at] = tensors[at], None
    ctx.save_for_backward(*tensors, *weights, saved)
    ctx.main_gradients = list(main_gradients)
    ctx.main_gradient_mask = mask
    ctx.settings = (config, options, group, num_sequences)
    # The tensors themselves: under a hook on saved tensors (a checkpoint), backward gets others.
    ctx.marked = {i: w for i, w in enumerate(weights) if mask >> i & 1 and parameter_to_mark(w) is not None}


def _gradients(ctx, grad_y, _ids, grad_topk_weights, _counts, grad_aux_loss, grad_z_loss, _saved):
    """Of the tensors and then of the weights."""
    n = len(_TENSOR_INPUTS)
    *tensors, saved = ctx.saved_tensors
    tensors, weights = list(tensors[:n]), list(tensors[n:])
    tensors[_TENSOR_INPUTS.index("selection_bias")] = ctx.selection_bias
    needs = ctx.needs_input_grad[-n - len(weights) :]
    needs_weights = needs[n:]
    masked = ctx.main_gradient_mask
    wanted = [needs[_TENSOR_INPUTS.index(name)] for name in _DIFFERENTIABLE]
    wanted += [need and not masked >> i & 1 for i, need in enumerate(needs_weights)]
    upstream = [grad_y, grad_topk_weights, grad_aux_loss, grad_z_loss]
    # Frozen weights have no main gradient to add to.
    accumulate = [i for i, need in enumerate(needs_weights) if need and masked >> i & 1]
    nothing_comes = all(gradient is None for gradient in upstream)
    if nothing_comes or not (any(wanted) or accumulate):
        group = ctx.settings[2]
        if group == SINGLE_HANDLE or Group.of(group).size == 1:
            return (None,) * len(needs)
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
    return (*of_tensors.values(), *of_weights)


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


_library.impl("moe", torch.compiler.disable(_differentiable_forward), "Autograd", with_keyset=True)


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
    owner = Group.of(group)

    def run():
        x = tensors[0]
        tokens, device = x.shape[0], x.device
        plan = owner.plan(config, options, x.dtype, device.type, tokens)
        sizes = owner.buffer_sizes(plan, tokens)
        remaining, remaining_main = iter(gradients), iter(main_gradients)
        of_inputs = [next(remaining) if wanted >> i & 1 else None for i in range(len(_DIFFERENTIABLE))]
        of_weights = [None] * len(weights)
        for i in range(len(weights)):
            if main_gradient_mask >> i & 1:
                of_weights[i] = next(remaining_main)
            elif wanted >> len(_DIFFERENTIABLE) + i & 1:
                of_weights[i] = next(remaining)
        plan.backward(
            tensors,
            weights,
            _places(config),
            num_sequences,
            _as_saved(saved, sizes.saved),
            upstream,
            of_inputs,
            of_weights,
            main_gradient_mask,
            owner.workspace(sizes.workspace, device),
            _stream(x),
            owner.waits_on_main_thread(device.type),
        )

    owner.in_turn(run)


def _as_saved(saved, size):
    """`saved` as forward left it: a hook on saved tensors may have moved it."""
    if saved.dtype != torch.uint8 or saved.numel() != size or not saved.is_contiguous():
        raise ValueError(
            f"saved: {dtype_name(saved.dtype)}{list(saved.shape)}; accepted: uint8[{size}], as forward saved it (a hook on "
            "saved tensors may move it, but not change it)"
        )
    return aligned_empty(size, saved.device).copy_(saved) if saved.data_ptr() % BUFFER_ALIGNMENT else saved


def _backward(
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
    y, topk_weights, aux_loss and z_loss.
    """
    gradients = _gradient_buffers(tensors, weights, wanted)
    settings = (config, options, group, num_sequences)
    _run_backward(gradients, wanted, [], 0, tensors, weights, saved, upstream, *settings)
    return gradients


def _fake_backward(tensors, weights, saved, upstream, wanted, config, options, group, num_sequences):
    return _gradient_buffers(tensors, weights, wanted)


moe_backward = _define("moe_backward", _backward, _fake_backward)


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
