"""The layer in plain PyTorch, expert by expert, differentiated by autograd: what tests compare with.

In float64 it is the truth. In bfloat16 it is an ordinary unfused layer: every product is rounded to bfloat16.
"""

import math

import torch
import torch.nn.functional as F


def activate(activation, z):
    """z [..., 2I] (or [..., I] without a gate) -> [..., I]"""
    if activation.kind == "relu_squared":
        return F.relu(z) ** 2
    gate, up = z.chunk(2, dim=-1)
    if activation.kind == "swiglu":
        return F.silu(gate) * up
    if activation.kind == "geglu_erf":
        return F.gelu(gate) * up
    if activation.kind == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)


def ffn(config, x, gate_up_proj, down_proj, gate_up_bias=None, down_bias=None, weight=None):
    """One expert on x [n, H]; weight [n] or None for 1."""
    a = activate(config.activation, F.linear(x, gate_up_proj, gate_up_bias))
    if weight is None:
        return F.linear(a, down_proj, down_bias)
    weight = weight[:, None].to(x.dtype)
    if config.weight_placement == "before_down":
        return F.linear(weight * a, down_proj, down_bias)
    return weight * F.linear(a, down_proj, down_bias)


def route(config, logits, selection_bias=None):
    """logits [T, E] -> ids [T, k], weights [T, k], scores [T, E]"""
    router, k = config.router, config.top_k
    scores = torch.sigmoid(logits) if router.kind == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores if selection_bias is None else scores + selection_bias
    if router.top_groups < router.num_groups:
        grouped = choice.unflatten(-1, (router.num_groups, -1))
        group_scores = grouped.topk(router.group_score_size, dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores).scatter(1, group_scores.topk(router.top_groups, dim=-1).indices, 1.0)
        choice = grouped.masked_fill(kept[..., None] == 0, -math.inf).flatten(1)
    ids = choice.topk(k, dim=-1).indices
    if router.kind == "topk_softmax":
        weights = torch.softmax(logits.gather(1, ids), dim=-1)
    else:
        weights = scores.gather(1, ids)
        if router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * router.scaling_factor, scores


def drop(config, ids, weights, tokens):
    """Capacity: ids of dropped routes become -1. ids, weights [T, k]."""
    router = config.router
    if router.capacity_factor == 0:
        return ids
    capacity = math.ceil(router.capacity_factor * tokens * config.top_k / config.num_experts)
    kept = ids.clone()
    for expert in range(config.num_experts):
        routes = (ids == expert).nonzero().tolist()
        if router.drop_policy == "by_score":
            routes.sort(key=lambda route: -weights[route[0], route[1]].item())
        for token, slot in routes[capacity:]:
            kept[token, slot] = -1
    return kept


def losses(config, ids, scores, logits, num_sequences):
    router, k, experts = config.router, config.top_k, config.num_experts
    aux = logits.new_zeros(())
    if router.aux_loss != "none":
        if router.kind == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        parts = num_sequences if router.aux_loss == "sequence" else 1
        for part_ids, part_scores in zip(ids.chunk(parts), scores.chunk(parts)):
            f = torch.bincount(part_ids.flatten(), minlength=experts).double() / (k * len(part_ids))
            aux = aux + router.aux_loss_coefficient * experts * (f * part_scores.mean(0)).sum()
    z = router.z_loss_coefficient * torch.logsumexp(logits, dim=-1).square().mean()
    return aux, z


def plain_moe(
    x,
    config,
    gate_up_proj,
    down_proj,
    gate_up_bias=None,
    down_bias=None,
    router_logits=None,
    topk_ids=None,
    topk_weights=None,
    selection_bias=None,
    shared=(),
    shared_gate_logits=None,
    valid_tokens=None,
    num_sequences=1,
):
    """-> y, topk_ids (-1: dropped or empty), topk_weights, expert_counts, aux_loss, z_loss of x [T, H]"""
    tokens, valid = len(x), len(x) if valid_tokens is None else valid_tokens
    aux = z = x.new_zeros(())
    if router_logits is not None:
        ids, weights, scores = route(config, router_logits[:valid], selection_bias)
        aux, z = losses(config, ids, scores, router_logits[:valid], num_sequences)
    else:
        ids, weights = topk_ids[:valid], topk_weights[:valid]
    ids = drop(config, ids, weights, tokens)
    weights = torch.where(ids >= 0, weights, 0)

    y = x.new_zeros(valid, x.shape[1])
    for expert in range(config.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        out = ffn(config, x[token], gate_up_proj[expert], down_proj[expert], *biases, weight=weights[token, slot])
        y = y.index_add(0, token, out)
    for s, expert in enumerate(shared):
        out = ffn(config, x[:valid], *expert)
        gated = config.shared_experts[s].gated
        y = y + (torch.sigmoid(shared_gate_logits[:valid, s, None]).to(x.dtype) * out if gated else out)

    pad = tokens - valid
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=config.num_experts)
    return (
        F.pad(y, (0, 0, 0, pad)),
        F.pad(ids, (0, 0, 0, pad), value=-1),
        F.pad(weights, (0, 0, 0, pad)),
        counts,
        aux,
        z,
    )
