"""The ops: schema, fake and body agree, and each equals the function behind it."""

import pytest
import torch
from torch.library import opcheck

from fmoe.compile.ops import (
    compute_experts_few,
    compute_experts_op,
    compute_experts_planned,
    compute_moe_op,
    encode_plans,
    find_plan,
    rule_from_numbers,
    rule_to_numbers,
)
from fmoe.compile.plan import Plan, Row, moe_key
from fmoe.compile.variants import activation_to_numbers
from fmoe.functional import (
    Activation,
    ExpertBiases,
    MoEParams,
    RouterConfig,
    Routing,
    compute_experts_grouped,
    route_and_compute,
)
from fmoe.functional.quant import Fp8, count_blocks

E, K, D, F = 7, 3, 24, 20


def expert_inputs(tokens, rng, *, dtype=torch.float32):
    x = torch.randn(tokens, D, generator=rng).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=rng)[:K] for _ in range(tokens)] or [torch.arange(K)])[:tokens]
    weights = torch.rand(tokens, K, generator=rng)
    w_gate_up = torch.randn(E, 2 * F, D, generator=rng).to(dtype)
    w_down = torch.randn(E, D, F, generator=rng).to(dtype)
    return x, Routing(weights, ids.int()), w_gate_up, w_down


def experts_by_loop(x, routing, w_gate_up, w_down):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, (weights, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            gate, up = (w_gate_up[e].double() @ x[t].double()).split(F)
            y[t] += weight * (w_down[e].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return y


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 33, 80])
def test_experts_op_equals_the_formula(tokens, rng):
    inputs = expert_inputs(tokens, rng)

    y = compute_experts_op(*inputs)

    assert y.shape == inputs[0].shape
    torch.testing.assert_close(y.double(), experts_by_loop(*inputs), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("tokens", [1, 4, 33])
def test_experts_opcheck(tokens, rng):
    x, routing, w_gate_up, w_down = expert_inputs(tokens, rng)

    opcheck(torch.ops.fmoe.experts.default, (x, *routing, w_gate_up, w_down, [], 0))


def bias_inputs(rng):
    return ExpertBiases(torch.randn(E, 2 * F, generator=rng), torch.randn(E, D, generator=rng))


CLAMPED = Activation(1.3, 4.0, 1.0)


def clamped_by_loop(x, routing, w_gate_up, w_down, biases):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, (weights, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            z = w_gate_up[e].double() @ x[t].double() + biases.bias_gate_up_EP[e].double()
            gate, up = z[:F].clamp(max=4.0), z[F:].clamp(-4.0, 4.0)
            hidden = (up + 1) * gate / (1 + torch.exp(-1.3 * gate))
            y[t] += weight * (w_down[e].double() @ hidden + biases.bias_down_ED[e].double())
    return y


EXPERT_FUNCTIONS = [compute_experts_op, compute_experts_planned, compute_experts_few]


@pytest.mark.parametrize("function", EXPERT_FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", [None, "per_slot", "loop", "dense", "grouped", "triton", "apart"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_biases_and_an_activation_reach_every_function(tokens, name, function, rng):
    """A plan that names kernels is not followed: they would leave both out."""
    inputs, biases = expert_inputs(tokens, rng), bias_inputs(rng)
    row = Row(-1, name, (), "tuned")
    plans = () if name is None else encode_plans([Plan(moe_key(E, K, 0, 0, D, F, torch.float32), (row,))], "moe")

    y = function(*inputs, biases, plans=plans, activation=CLAMPED)

    expected = clamped_by_loop(*inputs, biases)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-4)
    zero = ExpertBiases(*map(torch.zeros_like, biases))
    unbiased = function(*inputs, None, plans=plans, activation=CLAMPED)
    torch.testing.assert_close(unbiased.double(), clamped_by_loop(*inputs, zero), rtol=1e-5, atol=2e-4)


def test_experts_opcheck_with_biases(rng):
    x, routing, w_gate_up, w_down = expert_inputs(4, rng)
    numbers = activation_to_numbers(CLAMPED)
    arguments = (x, *routing, w_gate_up, w_down, [], 0, None, None, *bias_inputs(rng), numbers)
    opcheck(torch.ops.fmoe.experts.default, arguments)
    opcheck(torch.ops.fmoe.experts.default, (*arguments[:-3], None, None, numbers))


@pytest.mark.parametrize("function", [compute_experts_op, compute_experts_few], ids=lambda function: function.__name__)
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_biases_and_an_activation_trace(tokens, function, rng):
    inputs, biases = expert_inputs(tokens, rng), bias_inputs(rng)
    compiled = torch.compile(
        lambda *given: function(*given, activation=CLAMPED), fullgraph=True, backend="aot_eager", dynamic=False
    )
    y = compiled(*inputs, biases)
    torch.testing.assert_close(y.double(), clamped_by_loop(*inputs, biases), rtol=1e-5, atol=2e-4)


def test_experts_op_traces_in_float32_and_keeps_its_input(rng):
    inputs = expert_inputs(5, rng)
    kept = inputs[0].clone()

    def block(x, *rest):
        return x + compute_experts_op(x, *rest)

    y = torch.compile(block, fullgraph=True, backend="aot_eager")(*inputs)

    torch.testing.assert_close(y, kept + compute_experts_planned(*inputs))
    assert torch.equal(inputs[0], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 6, 40])
def test_every_choice_by_size_agrees(tokens, dtype, rng):
    inputs = expert_inputs(tokens, rng, dtype=dtype)

    chosen, grouped = compute_experts_planned(*inputs), compute_experts_grouped(*inputs)

    assert chosen.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(chosen, grouped, rtol=tolerance, atol=tolerance * grouped.abs().max().item())


CONFIG = RouterConfig(E, K, renormalize=True)
SHARED = 1


def plan_of(name):
    key = moe_key(E, K, SHARED, SHARED, D, F, torch.float32)
    return encode_plans([Plan(key, (Row(2, name, (), "tuned"), Row(-1, "grouped", (), "tuned")))], "moe")


def moe_inputs(tokens, rng):
    x = torch.randn(tokens, D, generator=rng)
    router = torch.randn(E + SHARED, D, generator=rng)
    w_gate_up = torch.randn(E + SHARED, 2 * F, D, generator=rng)
    return x, MoEParams(router, w_gate_up, torch.randn(E + SHARED, D, F, generator=rng), None, None)


@pytest.mark.parametrize("name", ["per_slot", "loop", "dense", "grouped"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_moe_op_runs_what_its_plan_names(tokens, name, rng, monkeypatch):
    x, params = moe_inputs(tokens, rng)
    ran = []
    functions = {
        known: lambda *inputs, known=known: ran.append(known) or compute_experts_grouped(*inputs)
        for known in ("per_slot", "loop", "dense", "grouped")
    }
    monkeypatch.setattr("fmoe.compile.ops.FUNCTIONS", functions)

    y = compute_moe_op(x, params, CONFIG, plans=plan_of(name))

    assert ran == [name if tokens <= 2 else "grouped"]
    torch.testing.assert_close(y, route_and_compute(x, params, CONFIG))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_moe_opcheck(tokens, rng):
    x, params = moe_inputs(tokens, rng)
    rule, scales = rule_to_numbers(CONFIG)
    ((_, _, rows),) = plan_of("loop")

    arguments = (x, params.w_router_ED, None, params.w_gate_up_EPD, params.w_down_EDF, rule, scales, list(rows))
    opcheck(torch.ops.fmoe.moe.default, arguments)


def test_a_rule_survives_its_numbers():
    config = RouterConfig(
        16, 3, scoring="sigmoid", renormalize=True, sum_eps=1e-20, sum_floor=0.5, scale=2.5, groups=4, groups_kept=2,
        group_score="top2", float32_logits=True, round_weights=True,
    )  # fmt: skip
    for rule in (config, CONFIG):
        ints, floats = rule_to_numbers(rule)
        assert rule_from_numbers(tuple(ints), tuple(floats)) == rule
    with pytest.raises(ValueError, match="rule has 1 and scales 0 numbers"):
        rule_from_numbers((1,), ())


def test_a_plan_is_found_by_the_shape_and_dtype_of_the_weights(rng):
    _, params = moe_inputs(1, rng)
    other = encode_plans([Plan(moe_key(E, K, 0, 0, D, F, torch.float32), (Row(-1, "dense", (), "tuned"),))], "moe")
    ((_, _, rows),) = plan_of("loop")

    assert find_plan((*other, *plan_of("loop")), params.w_down_EDF) == rows
    assert find_plan(other, params.w_down_EDF) == ()
    assert find_plan(plan_of("loop"), params.w_down_EDF.half()) == ()


def quantised(weights):
    blocks = (*weights.shape[:-2], count_blocks(weights.shape[-2]), count_blocks(weights.shape[-1]))
    return Fp8(weights.to(torch.float8_e4m3fn), torch.full(blocks, 0.5))


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_layer_of_fp8_experts_is_one_op_in_a_graph(tokens, rng):
    x, params = moe_inputs(tokens, rng)
    gate_up = quantised(params.w_gate_up_EPD.view(E + SHARED, 2, F, D))
    gate_up = Fp8(gate_up.w.flatten(1, 2), gate_up.scale.flatten(1, 2))
    params = params._replace(w_gate_up_EPD=gate_up, w_down_EDF=quantised(params.w_down_EDF))
    key = moe_key(E, K, SHARED, SHARED, D, F, torch.float8_e4m3fn)
    plans = encode_plans([Plan(key, (Row(-1, "grouped", (), "tuned"),))], "moe")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    y = torch.compile(
        lambda x: compute_moe_op(x, params, CONFIG, plans=plans), fullgraph=True, backend=backend, dynamic=False
    )(x)

    (graph,) = graphs
    assert any("fmoe.moe" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(y, route_and_compute(x, params, CONFIG), rtol=1e-4, atol=1e-4)
