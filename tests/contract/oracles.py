"""Routing and expert compute from their definitions, in float64 and by loops; no code of fmoe."""

import math

import torch


def scores_of(row, scoring):
    if scoring == "softmax":
        top = max(row)
        powers = [math.exp(x - top) for x in row]
        return [power / sum(powers) for power in powers]
    return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]


def order_of(values):
    """Indices, the largest value first, the lowest index among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def route_by_loop(logits, bias, config, *, slots):
    """Give each token's {id: weight}: K routed experts by the rule, then S shared ones that every token has."""
    experts, size = config.num_experts, config.num_experts // config.groups
    routings = []
    for logit_row in logits.double().tolist():
        scores = scores_of(logit_row[:experts], config.scoring)
        choice = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        members = [choice[g * size : (g + 1) * size] for g in range(config.groups)]
        best = 1 if config.group_score == "max" else min(2, size)
        kept = order_of([sum(sorted(group)[-best:]) for group in members])[: config.groups_kept]
        allowed = [c if e // size in kept else -math.inf for e, c in enumerate(choice)]
        chosen = order_of(allowed)[: config.top_k]
        total = sum(scores[e] for e in chosen)
        total = max(total, config.sum_floor) + config.sum_eps if config.renormalize else 1.0
        weights = torch.tensor([scores[e] / total * config.scale for e in chosen])
        if config.round_weights:
            weights = weights.to(logits.dtype)
        gates = logit_row[experts:]
        shared = [1 / (1 + math.exp(-gates[s if len(gates) > 1 else 0])) if gates else 1.0 for s in range(slots)]
        routings.append(
            dict(zip(chosen, weights.tolist(), strict=True)) | {experts + s: weight for s, weight in enumerate(shared)}
        )
    return routings


def assert_routing(routing, expected, *, tolerance):
    """Compare as sets, since grouped kernels promise no order; ids and weights of every column count."""
    assert routing.experts_TK.dtype == torch.int32
    assert routing.weights_TK.dtype == torch.float32
    assert routing.experts_TK.shape == routing.weights_TK.shape
    rows = zip(routing.experts_TK.tolist(), routing.weights_TK.tolist(), expected, strict=True)
    for ids, weights, wanted in rows:
        assert sorted(ids) == sorted(wanted)
        for expert, weight in zip(ids, weights, strict=True):
            assert abs(weight - wanted[expert]) <= tolerance, (expert, weight, wanted[expert])


def experts_by_loop(x, routing, w_gate_up, w_down):
    """Sum of ``weight * down(silu(gate x) * up x)`` in float64."""
    width = w_down.shape[2]
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, (weights, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            both = w_gate_up[e].double() @ x[t].double()
            gate, up = both[:width], both[width:]
            y[t] += weight * (w_down[e].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return y


def difference(x, y):
    """1 - 2 sum(xy) / sum(x^2 + y^2), the measure of AITER's own tests."""
    x, y = x.double().cpu(), y.double().cpu()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())
