"""The mixture-of-experts layer against loops in float64; shared experts fused and apart."""

from dataclasses import replace

import pytest
import torch

from fmoe.functional.attention import attend
from fmoe.functional.deltanet import delta_mix
from fmoe.functional.experts import (
    compute_experts_dense,
    compute_experts_grouped,
    compute_experts_loop,
    compute_experts_per_slot,
)
from fmoe.functional.kernels import Kernels
from fmoe.functional.mlp import MLPParams
from fmoe.functional.moe import (
    MoEParams,
    SharedParams,
    SharedPlan,
    add_shared_expert,
    keep_apart,
    moe_layer,
    plan_shared_experts,
    route_and_compute,
)
from fmoe.functional.norm import add_rms_norm
from fmoe.functional.routing import RouterConfig, Routing, fuse_router_weights, route_fused

E, K, D, WIDTH = 12, 3, 24, 16
MODES = ["eager", "aot_eager"]
FORMS = [compute_experts_grouped, compute_experts_loop, compute_experts_dense, compute_experts_per_slot]
RULES = {
    "qwen": RouterConfig(E, K, renormalize=True, round_weights=True),
    "v2": RouterConfig(E, K, scale=16.0, float32_logits=True, groups=4, groups_kept=2),
    "v3": RouterConfig(
        E, K, scoring="sigmoid", renormalize=True, sum_eps=1e-20, scale=2.5, float32_logits=True,
        groups=4, groups_kept=2, group_score="top2",
    ),
}  # fmt: skip
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2}  # relative RMS error


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode, dynamic=False)


def rms_error(y, exact):
    return ((y.double() - exact.double()).square().mean().sqrt() / exact.double().square().mean().sqrt()).item()


def make_shared(slots, gated, rng, dtype=torch.float32):
    width = slots * WIDTH
    w_gate_up_PD = (torch.randn(2 * width, D, generator=rng) / D**0.5).to(dtype)
    w_down_DF = (torch.randn(D, width, generator=rng) / WIDTH**0.5).to(dtype)
    gate = (torch.randn(1, D, generator=rng) / D**0.5).to(dtype) if gated else None
    return SharedParams(MLPParams(w_gate_up_PD, w_down_DF), gate)


def make_params(shared, rng, dtype=torch.float32, *, biased=False):
    """One layer with the shared expert apart."""
    w_router_ED = (torch.randn(E, D, generator=rng) / D**0.5).to(dtype)
    w_gate_up_EPD = (torch.randn(E, 2 * WIDTH, D, generator=rng) / D**0.5).to(dtype)
    w_down_EDF = (torch.randn(E, D, WIDTH, generator=rng) / WIDTH**0.5).to(dtype)
    bias_E = torch.randn(E, generator=rng) / 4 if biased else None
    return MoEParams(w_router_ED, w_gate_up_EPD, w_down_EDF, bias_E, shared)


def fuse(params):
    """The same layer with the shared expert cut into slots of the stacks."""
    (w_gate_up_PD, w_down_DF), w_gate_1D = params.shared
    gates, ups = (half.split(WIDTH) for half in w_gate_up_PD.chunk(2))
    stacked = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    router = params.w_router_ED
    return params._replace(
        w_router_ED=router if w_gate_1D is None else fuse_router_weights(router, w_gate_1D),
        w_gate_up_EPD=torch.cat((params.w_gate_up_EPD, stacked)),
        w_down_EDF=torch.cat((params.w_down_EDF, torch.stack(w_down_DF.split(WIDTH, 1)))),
        shared=None,
    )


def swiglu_by_loop(x_D, w_gate_up_PD, w_down_DF):
    gates_F, ups_F = (w_gate_up_PD.double() @ x_D.double()).chunk(2)
    hidden = [g / (1 + torch.exp(-g)) * u for g, u in zip(gates_F, ups_F, strict=True)]
    return w_down_DF.double() @ torch.stack(hidden)


def shared_by_loop(x_TD, shared):
    """Output of the shared expert for each token."""
    rows = [swiglu_by_loop(x_D, *shared.mlp) for x_D in x_TD]
    if shared.w_gate_1D is not None:
        gates = [1 / (1 + torch.exp(-(shared.w_gate_1D[0].double() @ x_D.double()))) for x_D in x_TD]
        rows = [gate * row for gate, row in zip(gates, rows, strict=True)]
    return torch.stack(rows)


def layer_by_loop(x_TD, params, config):
    """One token after the other, routed by a stand-alone rule for each config above."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for t, x_D in enumerate(x_TD):
        logits_E = params.w_router_ED.double() @ x_D.double()
        scores_E = 1 / (1 + torch.exp(-logits_E)) if config.scoring == "sigmoid" else torch.exp(logits_E)
        if config.scoring == "softmax":
            scores_E = scores_E / scores_E.sum()
        choice = (scores_E if params.bias_E is None else scores_E + params.bias_E.double()).tolist()
        if config.groups > 1:
            size, best = E // config.groups, 1 if config.group_score == "max" else 2
            groups = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(config.groups)]
            kept = sorted(range(config.groups), key=lambda g: -groups[g])[: config.groups_kept]
            choice = [c if e // size in kept else -torch.inf for e, c in enumerate(choice)]
        ids = sorted(range(E), key=lambda e: -choice[e])[:K]
        total = sum(scores_E[e] for e in ids) if config.renormalize else 1.0
        for e in ids:
            weight = config.scale * scores_E[e] / total
            y_TD[t] += weight * swiglu_by_loop(x_D, params.w_gate_up_EPD[e], params.w_down_EDF[e])
    return y_TD if params.shared is None else y_TD + shared_by_loop(x_TD, params.shared)


# The decision

SIZE_TABLE = {  # (count, width of each in sixteenths of F): slots, where fusing is possible; None where it is not
    (None, None): 0, (None, 0): 0, (None, 16): 1, (None, 24): None, (None, 32): 2,
    (0, None): 0, (0, 0): 0, (0, 16): 0, (0, 24): 0, (0, 32): 0,
    (1, None): 1, (1, 0): 0, (1, 16): 1, (1, 24): None, (1, 32): 2,
    (2, None): 2, (2, 0): 0, (2, 16): 2, (2, 24): None, (2, 32): 4,
}  # fmt: skip


@pytest.mark.parametrize("requested", ["auto", "fused", "separate"])
@pytest.mark.parametrize(("count", "size"), SIZE_TABLE)
def test_plan_shared_experts(count, size, requested):
    slots = SIZE_TABLE[count, size]
    width = 0 if slots == 0 else (count or 1) * (16 if size is None else size)
    if slots == 0:
        expected = SharedPlan(0, 0, "no shared expert")
    elif requested == "separate":
        expected = SharedPlan(0, width, "separate as requested")
    elif slots is None and requested == "auto":
        expected = SharedPlan(0, width, f"separate: shared width {size} is not a multiple of the expert width 16")
    elif slots is None:
        with pytest.raises(
            ValueError, match=r"'fused' is not possible: shared width 24 is not a multiple .* width 16; use"
        ):
            plan_shared_experts(count, size, 16, requested=requested)
        return
    else:
        reason = f"fused into {slots} slot" + ("s" if slots > 1 else "")
        expected = SharedPlan(slots, width, reason, required=requested == "fused")
    assert plan_shared_experts(count, size, 16, requested=requested) == expected


def test_plan_shared_experts_refuses_an_unknown_request():
    with pytest.raises(ValueError, match="shared_experts='yes' must be 'auto', 'fused' or 'separate'"):
        plan_shared_experts(1, 16, 16, requested="yes")


def test_keep_apart():
    plan = plan_shared_experts(2, 16, 16, requested="auto")
    assert keep_apart(plan, "why") == SharedPlan(0, 32, "separate: why")
    for requested in ("separate", "auto"):
        plan = plan_shared_experts(2, 24, 16, requested=requested)
        assert keep_apart(plan, "why") == plan
    with pytest.raises(ValueError, match="shared_experts='fused' is not possible: why; use 'auto' or 'separate'"):
        keep_apart(plan_shared_experts(2, 16, 16, requested="fused"), "why")


# The layer


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gated", [None, False, True], ids=["no-shared", "ungated", "gated"])
def test_moe_layer(gated, rule, dtype, form, rng):
    config, kernels = RULES[rule], Kernels(compute_experts=form)
    shared = None if gated is None else make_shared(2, gated, rng, dtype)
    params = make_params(shared, rng, dtype, biased=rule == "v3")
    if dtype == torch.bfloat16:
        config = replace(config, float32_logits=True)  # so that rounded logits do not change the choice
    for T in (0, 1, 7):
        x_TD = torch.randn(T, D, generator=rng).to(dtype)
        y_TD = moe_layer(x_TD, params, config, kernels=kernels)
        assert (y_TD.shape, y_TD.dtype) == ((T, D), dtype)
        if T:
            assert rms_error(y_TD, layer_by_loop(x_TD, params, config)) < TOLERANCES[dtype]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_fused_equals_separate(slots, gated, rule, form, rng):
    params, kernels = (
        make_params(make_shared(slots, gated, rng), rng, biased=rule == "v3"),
        Kernels(compute_experts=form),
    )
    for T in (0, 1, 9):
        x_TD = torch.randn(T, D, generator=rng)
        apart_TD = moe_layer(x_TD, params, RULES[rule], kernels=kernels)
        fused_TD = moe_layer(x_TD, fuse(params), RULES[rule], kernels=kernels)
        assert fused_TD.shape == (T, D)
        if T:
            assert (fused_TD - apart_TD).abs().max() <= 1e-6 * apart_TD.abs().max()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize(("gate", "weight"), [(0.0, 0.5), (-torch.inf, 0.0), (torch.inf, 1.0)])
def test_extreme_shared_gates(gate, weight, fused, form, rng):
    shared = make_shared(2, True, rng)
    params = make_params(shared._replace(w_gate_1D=torch.full((1, D), gate)), rng)
    x_TD = torch.rand(5, D, generator=rng) + 0.1  # positive, so that the gate's logit is ``gate`` itself
    y_TD = moe_layer(x_TD, fuse(params) if fused else params, RULES["qwen"], kernels=Kernels(compute_experts=form))
    exact_TD = layer_by_loop(x_TD, params._replace(shared=None), RULES["qwen"])
    exact_TD += weight * shared_by_loop(x_TD, shared._replace(w_gate_1D=None))
    assert rms_error(y_TD, exact_TD) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1.0, 1.5, 2.5, 16.0])
def test_scale_reaches_the_routed_part_alone(scale, rule, fused, rng):
    params = make_params(make_shared(2, True, rng), rng)
    x_TD, config = torch.randn(7, D, generator=rng), replace(RULES[rule], scale=scale)
    y_TD = moe_layer(x_TD, fuse(params) if fused else params, config, kernels=Kernels())
    routed_TD = layer_by_loop(x_TD, params._replace(shared=None), replace(config, scale=1.0))
    assert rms_error(y_TD, scale * routed_TD + shared_by_loop(x_TD, params.shared)) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("form", [compute_experts_dense, compute_experts_per_slot], ids=lambda form: form.__name__)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("rule", RULES)
def test_moe_layer_compiled(rule, fused, form, rng):
    params, kernels = make_params(make_shared(2, True, rng), rng, biased=rule == "v3"), Kernels(compute_experts=form)
    compiled = in_mode(moe_layer, "aot_eager")
    for T in (0, 1, 7):
        x_TD = torch.randn(T, D, generator=rng)
        y_TD = compiled(x_TD, fuse(params) if fused else params, RULES[rule], kernels=kernels)
        assert y_TD.shape == (T, D)
        if T:
            assert rms_error(y_TD, layer_by_loop(x_TD, params, RULES[rule])) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_add_shared_expert(dtype, gated, mode, rng):
    shared = make_shared(2, gated, rng, dtype)
    for T in (0, 1, 7):
        x_TD, y_TD = (torch.randn(T, D, generator=rng).to(dtype) for _ in range(2))
        sum_TD = in_mode(add_shared_expert, mode)(y_TD, x_TD, shared)
        assert (sum_TD.shape, sum_TD.dtype) == ((T, D), dtype)
        if T:
            assert rms_error(sum_TD, y_TD.double() + shared_by_loop(x_TD, shared)) < TOLERANCES[dtype]


def test_moe_layer_with_inductor(rng):
    apart = make_params(make_shared(2, True, rng), rng, biased=True)
    joined, kernels = fuse(apart), Kernels(compute_experts=compute_experts_dense)

    def both(x_TD):
        return tuple(moe_layer(x_TD, params, RULES["v3"], kernels=kernels) for params in (apart, joined))

    x_TD = torch.randn(7, D, generator=rng)
    exact_TD = layer_by_loop(x_TD, apart, RULES["v3"])
    for y_TD in torch.compile(both, fullgraph=True)(x_TD):
        assert rms_error(y_TD, exact_TD) < TOLERANCES[torch.float32]


# What runs is an argument


@pytest.mark.parametrize(("float32", "rounds"), [(False, True), (True, True), (True, False), (False, False)])
def test_routing_weights_have_the_precision_of_the_rule(float32, rounds, rng):
    seen = []

    def compute(x_TD, routing, *weights):
        seen.append(routing)
        return compute_experts_grouped(x_TD, routing, *weights)

    params = make_params(None, rng, torch.bfloat16)
    config = RouterConfig(E, K, renormalize=True, float32_logits=float32, round_weights=rounds)
    moe_layer(torch.randn(7, D, generator=rng).bfloat16(), params, config, kernels=Kernels(compute_experts=compute))
    weights_TK = seen[0].weights_TK
    assert weights_TK.dtype == torch.float32
    assert torch.equal(weights_TK.bfloat16().float(), weights_TK) == rounds


def test_moe_layer_calls_the_kernels_it_is_given(rng):
    params = fuse(make_params(make_shared(2, True, rng), rng))
    calls = []

    def route(logits_TE, bias_E, config, /, *, slots):
        calls.append((logits_TE.shape, slots))
        ids_TK = torch.tensor([[0, E, E + 1]] * len(logits_TE), dtype=torch.int32)
        return Routing(torch.ones(ids_TK.shape), ids_TK)

    x_TD = torch.randn(4, D, generator=rng)
    y_TD = moe_layer(x_TD, params, RULES["qwen"], kernels=Kernels(route=route))
    assert calls == [((4, E + 1), 2)]
    rows = [
        sum(swiglu_by_loop(x_D, params.w_gate_up_EPD[e], params.w_down_EDF[e]) for e in (0, E, E + 1)) for x_D in x_TD
    ]
    assert rms_error(y_TD, torch.stack(rows)) < TOLERANCES[torch.float32]


def test_moe_layer_gives_a_whole_layer_to_compute_moe_and_adds_the_separate_shared_expert(rng):
    params = make_params(make_shared(1, True, rng), rng)
    x_TD = torch.randn(4, D, generator=rng)

    def compute_moe(x_TD, given, config, /):
        assert given is params
        return 2.0 * route_and_compute(x_TD, given, config)

    y_TD = moe_layer(x_TD, params, RULES["v2"], kernels=Kernels(compute_moe=compute_moe))

    routed_TD = layer_by_loop(x_TD, params._replace(shared=None), RULES["v2"])
    shared_TD = torch.stack([shared_by_loop(x_D[None], params.shared)[0] for x_D in x_TD])
    assert rms_error(y_TD, 2.0 * routed_TD + shared_TD) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("rule", RULES)
def test_route_and_compute_leaves_the_separate_shared_expert_out(rule, rng):
    params = make_params(make_shared(1, True, rng), rng)
    x_TD = torch.randn(5, D, generator=rng)

    y_TD = route_and_compute(x_TD, params, RULES[rule], compute_experts=compute_experts_loop)

    assert rms_error(y_TD, layer_by_loop(x_TD, params._replace(shared=None), RULES[rule])) < TOLERANCES[torch.float32]


def test_kernels_default_to_the_references():
    kernels = Kernels()
    assert kernels.compute_moe is None
    assert (kernels.route, kernels.compute_experts) == (route_fused, compute_experts_grouped)
    assert (kernels.attend_prefill, kernels.attend_decode) == (attend, attend)
    assert (kernels.delta_prefill, kernels.delta_decode) == (delta_mix, delta_mix)
    assert kernels.add_norm is add_rms_norm
    assert kernels == Kernels()
    assert kernels != Kernels(compute_experts=compute_experts_dense)
