"""Routing rules against loops over Python numbers, eager and compiled."""

import math
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from fmoe.functional.routing import (
    RouterConfig,
    Routing,
    fuse_router_weights,
    inject_shared_experts,
    keep_best_groups,
    route,
    route_fused,
    router_logits,
    select_largest,
    weigh_chosen,
)

INF, NAN = math.inf, math.nan
NEGATIVE_NAN = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32).item()
MODES = ["eager", "aot_eager"]
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    pytest.param(*s, id="T{}-E{}-K{}".format(*s)) for s in [(0, 5, 2), (1, 1, 1), (1, 8, 2), (7, 8, 8), (33, 60, 4)]
]
RULES = {
    "softmax": {},
    "softmax-renormalised": {"renormalize": True},
    "softmax-floor": {"renormalize": True, "sum_floor": 0.4},
    "softmax-rounded": {"renormalize": True, "round_weights": True},
    "softmax-scaled": {"scale": 16.0},
    "sigmoid": {"scoring": "sigmoid"},
    "sigmoid-renormalised-scaled": {"scoring": "sigmoid", "renormalize": True, "sum_eps": 1e-20, "scale": 2.5},
    "sigmoid-eps": {"scoring": "sigmoid", "renormalize": True, "sum_eps": 0.5},
    "chosen-softmax": {"scoring": "chosen_softmax", "round_weights": True},
    "chosen-sigmoid": {"scoring": "chosen_sigmoid"},
}
V3 = RouterConfig(
    24, 5, scoring="sigmoid", renormalize=True, sum_eps=1e-20, scale=2.5, groups=4, groups_kept=2, group_score="top2"
)
NAN_RULES = [RouterConfig(24, 5, renormalize=True), V3, RouterConfig(24, 24), RouterConfig(72, 6, scoring="sigmoid")]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode, dynamic=False)


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


def softmax(row):
    powers = [math.exp(z - max(row)) for z in row]
    return [p / sum(powers) for p in powers]


def largest_by_loop(row, k):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def keep_groups_by_loop(row, groups, kept, rule):
    size = len(row) // groups
    members = [row[g * size : (g + 1) * size] for g in range(groups)]
    best = largest_by_loop([max(m) if rule == "max" else sum(sorted(m)[-2:]) for m in members], kept)
    return [v if i // size in best else (0.0 if rule == "max" else -INF) for i, v in enumerate(row)]


def weigh_by_loop(scores, config, dtype):
    if config.scoring == "chosen_softmax":
        scores = softmax(scores)
    elif config.scoring == "chosen_sigmoid":
        scores = [sigmoid(z) for z in scores]
    if config.renormalize:
        total = max(sum(scores), config.sum_floor) + config.sum_eps
        scores = [s / total for s in scores]
    scores = [s * config.scale for s in scores]
    return torch.tensor(scores, dtype=torch.float64).to(dtype).double().tolist() if config.round_weights else scores


def route_by_loop(logits_TE, bias_E, config):
    """Ids and weights of each token, as lists."""
    ids, weights = [], []
    for row in logits_TE.double().tolist():
        scores = {"softmax": softmax, "sigmoid": lambda r: [sigmoid(z) for z in r]}.get(config.scoring, list)(row)
        choice = scores if bias_E is None else [s + b for s, b in zip(scores, bias_E.tolist(), strict=True)]
        if config.groups > 1:
            choice = keep_groups_by_loop(choice, config.groups, config.groups_kept, config.group_score)
        ids.append(largest_by_loop(choice, config.top_k))
        weights.append(weigh_by_loop([scores[i] for i in ids[-1]], config, logits_TE.dtype))
    return ids, weights


def assert_routes(routing, ids, weights, *, rtol=2e-6, atol=1e-7):
    assert routing.experts_TK.tolist() == ids
    assert (routing.weights_TK.dtype, routing.experts_TK.dtype) == (torch.float32, torch.int32)
    shape = routing.experts_TK.shape
    assert_close(routing.weights_TK.double(), torch.tensor(weights).double().view(shape), rtol=rtol, atol=atol)


# Choosing


@pytest.mark.parametrize("mode", MODES)
def test_select_largest_orders_by_value_then_index(mode, rng):
    fn = in_mode(select_largest, mode)
    for rows, count, k in [(1, 1, 1), (5, 8, 8), (9, 37, 5), (3, 64, 5), (3, 65, 65), (4, 384, 8)]:
        values_TE = torch.randn(rows, count, generator=rng)
        four_TE = torch.tensor([-1.5, -0.0, 0.0, 2.0])[torch.randint(0, 4, (rows, count), generator=rng)]
        infinite_TE = torch.tensor([-INF, INF, 1e38, -1e-45])[torch.randint(0, 4, (rows, count), generator=rng)]
        for case_TE in (values_TE, torch.zeros(rows, count), four_TE, infinite_TE):
            assert fn(case_TE, k).tolist() == [largest_by_loop(row, k) for row in case_TE.tolist()]
    assert fn(torch.zeros(0, 6), 2).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_select_largest_reads_other_dtypes_by_value(dtype, rng):
    for count in (12, 70):
        values_TE = torch.randn(6, count, generator=rng).bfloat16().to(dtype)
        assert select_largest(values_TE, 4).tolist() == [largest_by_loop(row, 4) for row in values_TE.tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [4, 70])  # few are sorted, many go through integers
def test_select_largest_puts_nan_of_either_sign_first(count, mode):
    values_TE = torch.tensor([[1, NAN, INF, NAN], [NAN] * 4, [NEGATIVE_NAN] * 4, [2.0, 3, -INF, 1], [0, 0, 0, 9]])
    values_TE[0, 3] = NEGATIVE_NAN
    assert values_TE[0].view(torch.int32)[[1, 3]].sign().tolist() == [1, -1]
    values_TE = torch.nn.functional.pad(values_TE, (0, count - 4), value=-INF)
    chosen = in_mode(select_largest, mode)(values_TE, 3).tolist()
    assert chosen == [[1, 3, 2], [0, 1, 2], [0, 1, 2], [1, 0, 3], [3, 0, 1]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["max", "top2"])
def test_keep_best_groups(rule, mode, rng):
    values_TE = torch.randint(-4, 5, (40, 12), generator=rng) / 8  # many groups tie
    masked_TE = in_mode(keep_best_groups, mode)(values_TE, groups=4, kept=2, group_score=rule)
    assert masked_TE.tolist() == [keep_groups_by_loop(row, 4, 2, rule) for row in values_TE.tolist()]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "E", "K"), SHAPES)
def test_route(T, E, K, dtype, rule, rng):
    config = RouterConfig(E, K, **RULES[rule])
    logits_TE = (2 * torch.randn(T, E, generator=rng)).to(dtype)
    for bias_E in (None, torch.randn(E, generator=rng)):
        assert_routes(route(logits_TE, bias_E, config), *route_by_loop(logits_TE, bias_E, config))


@pytest.mark.parametrize("rule", RULES)
def test_route_compiled(rule, rng):
    config = RouterConfig(60, 4, **RULES[rule])
    logits_TE, bias_E = torch.randn(33, 60, generator=rng).bfloat16(), torch.randn(60, generator=rng)
    routing = in_mode(route, "aot_eager")(logits_TE, bias_E, config)
    assert_routes(routing, *route_by_loop(logits_TE, bias_E, config))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen_softmax"])
def test_route_gives_ties_to_the_lowest_id(scoring, mode, rng):
    fn = in_mode(route, mode)
    for E, K in [(384, 8), (60, 7), (37, 5)]:
        four_TE = torch.tensor([-2.0, -0.3, 0.7, 1.1])[torch.randint(0, 4, (9, E), generator=rng)]
        config = RouterConfig(E, K, scoring=scoring)
        stable_TK = torch.sort(four_TE, dim=-1, descending=True, stable=True).indices[:, :K]
        assert torch.equal(fn(four_TE, None, config).experts_TK, stable_TK.int())
        for value in (0.0, -1.8125, 0.3125, 1.0625):  # at these a float32 sigmoid rounds both ways within one tensor
            assert fn(torch.full((3, E), value), None, config).experts_TK.tolist() == [list(range(K))] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "config", [RouterConfig(24, 5, renormalize=True), V3, RouterConfig(24, 24)], ids=["softmax", "v3", "all"]
)
def test_route_of_nan_rows_gives_unique_ids_and_leaves_neighbours_alone(config, mode, rng):
    logits_TE = torch.randn(9, config.num_experts, generator=rng)
    broken_TE = logits_TE.clone()
    broken_TE[0], broken_TE[3], broken_TE[5, 7], broken_TE[8, 1:] = NAN, NEGATIVE_NAN, NAN, INF
    fn = in_mode(route, mode)
    clean, broken = fn(logits_TE, None, config), fn(broken_TE, None, config)
    for row in broken.experts_TK.tolist():
        assert len(set(row)) == config.top_k
        assert set(row) <= set(range(config.num_experts))
    whole = [1, 2, 4, 6, 7]
    assert torch.equal(broken.experts_TK[whole], clean.experts_TK[whole])
    assert torch.equal(broken.weights_TK[whole], clean.weights_TK[whole])


@pytest.mark.parametrize("mode", MODES)
def test_bias_steers_the_choice_and_enters_no_weight(mode):
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias_E = torch.tensor([-1.0, 0.0, 0.0, 5.0])
    routing = in_mode(route, mode)(logits_TE, bias_E, RouterConfig(4, 2, scoring="sigmoid"))
    assert_routes(routing, [[3, 1]], [[sigmoid(-1), sigmoid(1)]])


@pytest.mark.parametrize("rule", ["max", "top2"])
@pytest.mark.parametrize("E", [8, 16, 64, 160, 256])
def test_group_limited_grid(E, rule, rng):
    logits_TE = torch.randn(2, E, generator=rng)
    bias_E = None if rule == "max" else torch.randn(E, generator=rng) / 4
    scoring = "softmax" if rule == "max" else "sigmoid"
    for groups in (1, 2, 4, 8):
        for kept, K in product(range(1, groups + 1), sorted({1, 2, 6, 8, E})):
            settings = {"scoring": scoring, "groups": groups, "groups_kept": kept, "group_score": rule}
            if kept * E // groups < K or (rule == "top2" and groups == E):
                with pytest.raises(ValueError, match="hold fewer than top_k" if kept * E // groups < K else "two best"):
                    RouterConfig(E, K, **settings)
                continue
            routing = route(logits_TE, bias_E, RouterConfig(E, K, **settings))
            assert_routes(routing, *route_by_loop(logits_TE, bias_E, RouterConfig(E, K, **settings)))
            if kept == groups:
                plain = route(logits_TE, bias_E, RouterConfig(E, K, scoring=scoring))
                assert torch.equal(routing.experts_TK, plain.experts_TK)


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_expert_weighs_nothing_where_kept_ones_underflow(mode):
    logits_TE = torch.tensor([[5.0, 0, 0, 0, 9, -200, -200, -200]])  # float32 scores of the second group: one, 0, 0, 0
    routing = in_mode(route, mode)(logits_TE, None, RouterConfig(8, 2, groups=2, groups_kept=1))
    assert routing.experts_TK[0, 0] == 4
    assert routing.weights_TK[0, 0] > 0.9
    assert routing.weights_TK[0, 1] == 0


# Weighing


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_weigh_chosen(rule, mode, rng):
    config = RouterConfig(9, 4, **RULES[rule])
    scores_TK = torch.rand(6, 4, generator=rng)
    weights_TK = in_mode(weigh_chosen, mode)(scores_TK, config, dtype=torch.bfloat16)
    expected = [weigh_by_loop(row, config, torch.bfloat16) for row in scores_TK.double().tolist()]
    assert_close(weights_TK, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0)


def test_weigh_chosen_guards_an_empty_sum():
    zeros_TK = torch.zeros(2, 3)
    for guard in ({"sum_eps": 1e-20}, {"sum_floor": 1e-12}):
        config = RouterConfig(8, 3, scoring="sigmoid", renormalize=True, scale=2.5, **guard)
        assert weigh_chosen(zeros_TK, config, dtype=torch.float32).tolist() == zeros_TK.tolist()


@pytest.mark.parametrize(
    ("renormalize", "scale", "scoring"), [*product([False, True], [1.0, 1.5, 2.5, 16.0], ["softmax", "sigmoid"])]
)
def test_scale_multiplies_the_routed_columns_once(renormalize, scale, scoring, rng):
    logits_TE = torch.randn(7, 13, generator=rng)
    config = RouterConfig(12, 4, scoring=scoring, renormalize=renormalize, scale=scale)
    scaled = route_fused(logits_TE, None, config, slots=2)
    plain = route_fused(logits_TE, None, RouterConfig(12, 4, scoring=scoring, renormalize=renormalize), slots=2)
    assert torch.equal(scaled.weights_TK[:, :4], plain.weights_TK[:, :4] * scale)
    assert torch.equal(scaled.weights_TK[:, 4:], plain.weights_TK[:, 4:])
    if renormalize:
        assert_close(scaled.weights_TK[:, :4].sum(-1), torch.full((7,), scale), rtol=1e-6, atol=0)


# Shared slots


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("slots", "gates"), [(1, 0), (1, 1), (2, 0), (2, 1), (4, 1), (4, 4)])
def test_inject_shared_experts_appends_columns(slots, gates, mode, rng):
    for T in (0, 1, 5):
        routing = route(torch.randn(T, 12, generator=rng), None, RouterConfig(12, 3, scale=2.5))
        gates_TS = torch.randn(T, gates, generator=rng).bfloat16() if gates else None
        joined = in_mode(inject_shared_experts, mode)(routing, gates_TS, slots=slots, first=12)
        ids, weights = routing.experts_TK.tolist(), routing.weights_TK.tolist()
        for t in range(T):
            ids[t] += [12 + s for s in range(slots)]
            weights[t] += [sigmoid(gates_TS[t, s % gates].item()) if gates else 1.0 for s in range(slots)]
        assert joined.experts_TK.shape == (T, 3 + slots)
        assert_routes(joined, ids, weights)
        assert torch.equal(joined.weights_TK[:, :3], routing.weights_TK)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("value", "weight"), [(1e4, 1.0), (-1e4, 0.0), (-INF, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("config", [RouterConfig(24, 5, renormalize=True), V3], ids=["softmax", "v3"])
def test_route_fused_keeps_the_shared_column_out_of_the_routed_ones(config, value, weight, mode, rng):
    logits_TE = torch.randn(6, 25, generator=rng)
    logits_TE[:, 24] = value
    alone = route(logits_TE[:, :24].clone(), None, config)
    routing = in_mode(route_fused, mode)(logits_TE, None, config, slots=1)
    assert torch.equal(routing.experts_TK, torch.nn.functional.pad(alone.experts_TK, (0, 1), value=24))
    assert_close(routing.weights_TK[:, :5], alone.weights_TK, rtol=1e-6, atol=0)
    assert routing.weights_TK[:, 5].tolist() == [weight] * 6
    assert_close(routing.weights_TK[:, :5].sum(-1), torch.full((6,), config.scale), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("slots", "gates"), [(0, 0), (0, 1), (1, 0), (2, 1), (4, 4)])
def test_route_fused(slots, gates, rng):
    logits_TE, bias_E = torch.randn(7, 24 + gates, generator=rng), torch.randn(24, generator=rng)
    routing = route_fused(logits_TE, bias_E, V3, slots=slots)
    ids, weights = route_by_loop(logits_TE[:, :24], bias_E, V3)
    for t, row in enumerate(logits_TE.tolist()):
        ids[t] += range(24, 24 + slots)
        weights[t] += [sigmoid(row[24 + s % gates]) if gates else 1.0 for s in range(slots)]
    assert_routes(routing, ids, weights)


# The linear


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_logits(dtype, float32, mode, rng):
    x_TD, w_ED = torch.randn(5, 24, generator=rng).to(dtype), torch.randn(7, 24, generator=rng).to(dtype)
    logits_TE = in_mode(router_logits, mode)(x_TD, w_ED, float32=float32)
    exact_TE = torch.tensor(
        [[sum(map(math.prod, zip(x, w, strict=True))) for w in w_ED.tolist()] for x in x_TD.tolist()]
    )
    assert logits_TE.dtype == (torch.float32 if float32 else dtype)
    tolerance = 1e-5 if logits_TE.dtype == torch.float32 else 2**-7
    assert_close(logits_TE.float(), exact_TE, rtol=tolerance, atol=tolerance)
    bias_E = torch.randn(7, generator=rng).to(dtype)
    biased_TE = in_mode(router_logits, mode)(x_TD, w_ED, bias_E, float32=float32)
    assert biased_TE.dtype == logits_TE.dtype
    assert_close(biased_TE.float(), exact_TE + bias_E.float(), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_fuse_router_weights_appends_the_gate_rows(mode, rng):
    w_ED, w_SD = torch.randn(5, 8, generator=rng), torch.randn(2, 8, generator=rng)
    assert in_mode(fuse_router_weights, mode)(w_ED, w_SD).tolist() == w_ED.tolist() + w_SD.tolist()
    x_TD = torch.randn(3, 8, generator=rng)
    logits_TE = router_logits(x_TD, fuse_router_weights(w_ED, w_SD), float32=False)
    assert_close(logits_TE, torch.cat((x_TD @ w_ED.T, x_TD @ w_SD.T), -1))


@pytest.mark.parametrize("other", [torch.zeros(1, 7), torch.zeros(1, 8, dtype=torch.bfloat16)], ids=["width", "dtype"])
def test_fuse_router_weights_refuses_another_width_or_dtype(other):
    with pytest.raises(ValueError, match="must have the hidden size and dtype of the router"):
        fuse_router_weights(torch.zeros(5, 8), other)


# Settings and the slow compiler


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"top_k": 0}, ValueError, r"top_k=0 must be in 1\.\.num_experts=8"),
        ({"top_k": 9}, ValueError, r"top_k=9 must be in 1\.\.num_experts=8"),
        ({"groups": 3}, ValueError, "n_group=3 must divide num_experts=8"),
        ({"groups": 0}, ValueError, "n_group=0 must divide num_experts=8"),
        ({"groups": 4, "groups_kept": 5}, ValueError, r"topk_group=5 must be in 1\.\.n_group=4"),
        ({"groups": 4, "groups_kept": 0}, ValueError, r"topk_group=0 must be in 1\.\.n_group=4"),
        ({"groups": 4, "top_k": 3}, ValueError, "topk_group=1 groups of 2 experts hold fewer than top_k=3"),
        ({"groups": 8, "groups_kept": 8, "group_score": "top2"}, ValueError, "n_group=8 leaves 1 expert per group"),
        (
            {"scoring": "softplus"},
            NotImplementedError,
            "scoring='softplus' is not built; choose one of softmax, sigmoid",
        ),
        ({"group_score": "sum"}, NotImplementedError, "group_score='sum' is not built; choose one of max, top2"),
        ({"groups": 2, "scoring": "chosen_softmax"}, NotImplementedError, "n_group=2 with scoring='chosen_softmax'"),
    ],
)
def test_router_config_refuses(settings, error, message):
    with pytest.raises(error, match=message):
        RouterConfig(**{"num_experts": 8, "top_k": 2, **settings})


def test_every_function_with_inductor(rng):
    w_ED, w_1D, bias_E = (torch.randn(*size, generator=rng) for size in ((24, 16), (1, 16), (24,)))
    values_TE = torch.tensor([-1.0, -0.0, 0.0, 2.0])[torch.randint(0, 4, (7, 24), generator=rng)]
    values_TE[2], values_TE[5, 3] = NAN, NEGATIVE_NAN

    def every(x_TD, values_TE):
        logits_TE = router_logits(x_TD, fuse_router_weights(w_ED, w_1D), float32=True)
        chosen_TK = select_largest(values_TE, 5), select_largest(values_TE.repeat(1, 3), 5)
        groups_TE = keep_best_groups(values_TE, groups=4, kept=2, group_score="max")
        weights_TK = weigh_chosen(values_TE[:, :5], V3, dtype=torch.bfloat16)
        routed = route(values_TE, None, RouterConfig(24, 5))
        joined = inject_shared_experts(routed, logits_TE[:, 24:], slots=4, first=24)
        return logits_TE, chosen_TK, groups_TE, weights_TK, joined, route_fused(logits_TE, bias_E, V3, slots=2)

    x_TD = torch.randn(7, 16, generator=rng)
    compiled = torch.compile(every, fullgraph=True)(x_TD, values_TE)
    assert isinstance(compiled[-1], Routing)
    assert_close(compiled, every(x_TD, values_TE), rtol=1e-5, atol=1e-6, equal_nan=True)
