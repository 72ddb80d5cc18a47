"""Expert parallelism between ranks that are threads of this process, through the Python interface."""

import dataclasses
import math
import signal
import threading
import time

import pytest
import torch
from layer_cases import BASE, DEEPSEEK, leaves, tensors_of, with_router

import moelith
from moelith import Group, MoE, PlanOptions
from moelith import functional as MF

MAX_TOKENS = 64


def on_ranks(groups, function):
    """function(rank, group) on a thread for each rank -> the results; raises what the first failed rank raised."""
    results, failures = [None] * len(groups), []

    def body(rank):
        try:
            results[rank] = function(rank, groups[rank])
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def one_rank(config, tensors):
    output = MF.moe(config=config, return_routing=True, **tensors)
    output.y.backward(upstream(len(output.y), output.y.dtype))
    return output, {name: tensor.grad for name, tensor in leaves(tensors).items()}


def upstream(tokens, dtype):
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


PER_TOKEN = ("x", "router_logits", "shared_gate_logits")
PER_EXPERT = ("gate_up_proj", "gate_up_bias", "down_proj", "down_bias")


def share_of_rank(tensors, rows, experts):
    """The tensors that one rank holds, as leaves of its own."""
    share = {}
    for name, tensor in tensors.items():
        if name == "shared":
            share[name] = [tuple(None if t is None else t.detach().clone().requires_grad_() for t in e) for e in tensor]
        elif name in PER_TOKEN:
            share[name] = tensor[rows].detach().clone().requires_grad_()
        elif name in PER_EXPERT and tensor is not None:
            share[name] = tensor[experts].detach().clone().requires_grad_()
        else:
            share[name] = tensor
    return share


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config, tokens, expert_rank",
    [
        pytest.param(BASE, (20, 13), (), id="two ranks"),
        pytest.param(BASE, (7, 0), (1, 0, 0, 1, 0, 1), id="E1 no tokens on one rank, experts in turn"),
        pytest.param(DEEPSEEK, (9, 1, 31), (), id="three ranks, uneven experts"),
        pytest.param(dataclasses.replace(BASE, num_experts=2), (5, 6, 4), (), id="E7 a rank without experts"),
    ],
)
def test_E3_ranks_equal_one_rank_on_the_joined_batch(config, tokens, expert_rank, dtype):
    tensors = tensors_of(config, sum(tokens), dtype=dtype, logits_dtype=torch.float32 if dtype == torch.bfloat16 else None)
    expected, wanted = one_rank(config, tensors)
    groups = Group.threads(len(tokens))
    starts = [sum(tokens[:rank]) for rank in range(len(tokens))]

    def rank_pass(rank, group):
        assert (group.rank, group.size) == (rank, len(tokens))
        rows = slice(starts[rank], starts[rank] + tokens[rank])
        options = PlanOptions(group=group, max_tokens=MAX_TOKENS, workers=1, expert_rank=expert_rank)
        with torch.device("meta"):
            experts = MoE(config, options=options).local_experts
        share = share_of_rank(tensors, rows, experts)
        output = MF.moe(config=config, options=options, return_routing=True, **share)
        output.y.backward(upstream(sum(tokens), dtype)[rows])
        return rows, experts, output, {name: tensor.grad for name, tensor in leaves(share).items()}

    covered = []
    shared_sums = {}
    for rows, experts, output, gradients in on_ranks(groups, rank_pass):
        assert torch.equal(output.y, expected.y[rows])
        assert torch.equal(output.topk_ids, expected.topk_ids[rows])
        covered += experts
        for name, gradient in gradients.items():
            if name in PER_TOKEN:
                assert torch.equal(gradient, wanted[name][rows]), name
            elif name in PER_EXPERT:
                assert torch.equal(gradient, wanted[name][experts]), name
            else:  # every rank has the gradient of its own tokens
                shared_sums[name] = shared_sums.get(name, 0) + gradient.double()
    assert sorted(covered) == list(range(config.num_experts))
    for name, total in shared_sums.items():
        tolerance = 1e-12 if dtype == torch.float64 else 2e-2
        assert (total - wanted[name].double()).norm() <= tolerance * wanted[name].double().norm(), name


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_rows_beyond_the_receive_capacity_take_further_rounds(recompute):
    """Of 600 tokens, nearly all for the experts of rank 0: the same bits, in less memory."""
    config = dataclasses.replace(BASE, gate_up_bias=True, down_bias=True)
    tensors = tensors_of(config, 600, dtype=torch.float32)
    with torch.no_grad():
        tensors["router_logits"][:, :3] += 5.0
    expected, wanted = one_rank(config, tensors)
    tokens, starts = (400, 200), (0, 400)
    workspace = {}
    for factor in (0.3, 0.0, math.inf):

        def rank_pass(rank, group, factor=factor):
            options = PlanOptions(
                group=group, max_tokens=400, workers=1, recompute=recompute, receive_capacity_factor=factor
            )
            plan = group.plan(config.key, options.key, torch.float32, "cpu", tokens[rank])
            rows = slice(starts[rank], starts[rank] + tokens[rank])
            share = share_of_rank(tensors, rows, plan.local_experts)
            y = MF.moe(config=config, options=options, **share)
            y.backward(upstream(600, torch.float32)[rows])
            assert torch.equal(y, expected.y[rows])
            for name, gradient in leaves(share).items():
                part = rows if name in PER_TOKEN else plan.local_experts
                assert torch.equal(gradient.grad, wanted[name][part]), name
            return plan.buffer_sizes(tokens[rank]).workspace

        workspace[factor] = on_ranks(Group.threads(2), rank_pass)[0]
    assert workspace[0.3] < workspace[0.0] < workspace[math.inf]


def test_modules_hold_their_rank_s_experts():
    groups = Group.threads(2)
    config = with_router(aux_loss="global", aux_loss_coefficient=0.1)

    def rank_pass(rank, group):
        layer = MoE(config, options=PlanOptions(group=group, max_tokens=MAX_TOKENS, workers=1))
        assert layer.gate_up_proj.shape == (3, 48, 16)
        with pytest.raises(RuntimeError, match="It holds 6 experts, and this rank has 3"):
            layer.load_state_dict(MoE(config).state_dict())
        output = layer(torch.randn(5, 16), return_routing=True)
        (output.y.sum() + output.aux_loss).backward()
        return layer.router.weight.grad.norm()

    assert all(norm > 0 for norm in on_ranks(groups, rank_pass))


def test_an_error_outside_of_the_library_ends_the_other_rank_s_call():
    groups = Group.threads(2)
    tensors = tensors_of(BASE, 8)
    half = share_of_rank(tensors, slice(0, 4), [0, 1, 2])

    def no_memory(*_):
        raise MemoryError("no memory for a workspace")

    groups[1].workspace = no_memory

    def rank_pass(rank, group):
        options = PlanOptions(group=group, max_tokens=MAX_TOKENS, workers=1)
        with pytest.raises(MemoryError if rank else RuntimeError, match="no memory for a workspace") as raised:
            MF.moe(config=BASE, options=options, **half)
        assert rank or "rank 1" in str(raised.value)

    on_ranks(groups, rank_pass)


def test_a_rank_that_does_not_come_is_named():
    groups = Group.threads(2)
    for group in groups:
        group.set_timeout(0.3)
    tensors = tensors_of(BASE, 8)
    half = share_of_rank(tensors, slice(0, 4), [0, 1, 2])

    def lonely_pass(rank, group):
        options = PlanOptions(group=group, max_tokens=MAX_TOKENS, workers=1)
        if rank == 1:
            return
        with pytest.raises(TimeoutError, match="rank"):
            MF.moe(config=BASE, options=options, **half)
        with pytest.raises((TimeoutError, RuntimeError)):  # the group is over
            MF.moe(config=BASE, options=options, **half)

    on_ranks(groups, lonely_pass)
    MF.moe(config=BASE, **tensors)  # the process goes on


def test_a_rank_without_a_gradient_of_y_takes_part_in_backward():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.sum()

        @staticmethod
        def backward(ctx, _):
            return None

    groups = Group.threads(2)
    for group in groups:
        group.set_timeout(5)
    tensors = tensors_of(BASE, 8)

    def rank_pass(rank, group):
        share = share_of_rank(tensors, slice(4 * rank, 4 * rank + 4), [0, 1, 2] if rank == 0 else [3, 4, 5])
        y = MF.moe(config=BASE, options=PlanOptions(group=group, max_tokens=MAX_TOKENS, workers=1), **share)
        (Nothing.apply(y) if rank == 1 else y.sum()).backward()
        return share

    _, second = on_ranks(groups, rank_pass)
    MF.moe(config=BASE, **tensors)[:4].sum().backward()
    assert tensors["down_proj"].grad[3:].any()
    assert torch.equal(second["down_proj"].grad, tensors["down_proj"].grad[3:])
    assert not second["x"].grad.any()


def test_ranks_save_for_a_backward_together():
    """A rank under no_grad would not come to the backward of the others: all ranks are told in forward."""
    groups = Group.threads(2)
    tensors = tensors_of(BASE, 8)

    def rank_pass(rank, group):
        share = share_of_rank(tensors, slice(4 * rank, 4 * rank + 4), [0, 1, 2] if rank == 0 else [3, 4, 5])
        call = {"config": BASE, "options": PlanOptions(group=group, max_tokens=MAX_TOKENS, workers=1)} | share
        # ValueError; RuntimeError where the other rank was first and ended the group.
        with pytest.raises((ValueError, RuntimeError), match="saved: rank 0 saves for a backward and rank 1 does not"):
            with torch.set_grad_enabled(rank == 0):
                MF.moe(**call)

    on_ranks(groups, rank_pass)


def test_a_rank_on_the_main_thread_can_be_interrupted():
    groups = Group.threads(2)
    tensors = tensors_of(BASE, 8)
    shares = [share_of_rank(tensors, slice(4 * r, 4 * r + 4), [3 * r, 3 * r + 1, 3 * r + 2]) for r in range(2)]

    def rank_pass(rank, group):
        return MF.moe(config=BASE, options=PlanOptions(group=group, max_tokens=MAX_TOKENS, workers=1), **shares[rank])

    results = []
    other = threading.Thread(target=lambda: results.append(rank_pass(1, groups[1])))
    other.start()
    results.insert(0, rank_pass(0, groups[0]))
    other.join()
    assert torch.equal(torch.cat(results), MF.moe(config=BASE, **tensors))

    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            rank_pass(0, groups[0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 20  # and not the minute of the time limit
    with pytest.raises(RuntimeError, match="rank 0.*interrupted by a signal"):
        rank_pass(1, groups[1])


def test_max_tokens_must_be_said():
    group = Group.threads(2)[0]
    with pytest.raises(ValueError, match="max_tokens: None"):
        MF.moe(config=BASE, options=PlanOptions(group=group), **tensors_of(BASE, 4))


def test_a_group_must_be_kept_alive():
    group = Group.threads(1)[0]
    options = PlanOptions(group=group, max_tokens=8)
    tensors = tensors_of(BASE, 4)
    MF.moe(config=BASE, options=options, **tensors)
    handle = options.group_handle
    assert moelith.Group.of(handle) is group
    del group, options
    with pytest.raises(ValueError, match="keep its Group alive"):
        moelith.Group.of(handle)


def test_threads_of_one_rank_share_a_workspace():
    """Calls from several threads on the group of one rank: one after another, each with its own results."""
    cases = [tensors_of(BASE, 30 + i, seed=i) for i in range(4)]
    expected = [MF.moe(config=BASE, **tensors) for tensors in cases]

    def calls(rank, _):
        for _ in range(10):
            output = MF.moe(config=BASE, **cases[rank])
            assert torch.equal(output, expected[rank])
            output.sum().backward()

    on_ranks([None] * 4, calls)
    Group.single().release_workspace()
    assert torch.equal(MF.moe(config=BASE, **cases[0]), expected[0])
