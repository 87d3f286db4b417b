"""The four forms of expert compute with biases and another activation, against loops in float64."""

import math

import pytest
import torch

from fmoe.functional.experts import (
    ExpertBiases,
    compute_experts_dense,
    compute_experts_grouped,
    compute_experts_loop,
    compute_experts_per_slot,
)
from fmoe.functional.mlp import SWIGLU, Activation
from fmoe.functional.routing import Routing

FORMS = [compute_experts_grouped, compute_experts_loop, compute_experts_dense, compute_experts_per_slot]
CLAMPED = Activation(1.3, 0.7, 1.0)
ACTIVATIONS = {"swiglu": SWIGLU, "clamped": CLAMPED, "alpha": Activation(alpha=0.5)}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
SIZES = [(1, 1, 1, 8, 16), (1, 8, 2, 24, 16), (7, 8, 8, 25, 20), (5, 6, 3, 33, 36), (33, 60, 4, 16, 24)]
SHAPES = [pytest.param(*s, id="T{}-E{}-K{}-D{}-F{}".format(*s)) for s in SIZES]


def by_name(fn):
    return fn.__name__


def draw(T, E, K, D, F, rng, dtype=torch.float32, *, biased=True):
    def normal(*shape):
        return torch.randn(shape, generator=rng)

    ids = [torch.randperm(E, generator=rng)[:K] for _ in range(T)]
    experts_TK = torch.stack(ids).int() if ids else torch.empty(0, K, dtype=torch.int32)
    weights = (normal(E, 2 * F, D) / D**0.5).to(dtype), (normal(E, D, F) / F**0.5).to(dtype)
    biases = ExpertBiases(normal(E, 2 * F).to(dtype), normal(E, D).to(dtype)) if biased else None
    return normal(T, D).to(dtype), Routing(torch.rand(T, K, generator=rng), experts_TK), *weights, biases


def activate_by_loop(gate, up, activation):
    if activation.limit is not None:
        gate, up = min(gate, activation.limit), max(-activation.limit, min(up, activation.limit))
    return (up + activation.shift) * gate / (1 + math.exp(-activation.alpha * gate))


def experts_by_loop(x_TD, routing, w_gate_up_EPD, w_down_EDF, biases, activation):
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    width = w_down_EDF.shape[-1]
    for t, (weights, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            z_P = w_gate_up_EPD[e].double() @ x_TD[t].double()
            z_P = (z_P if biases is None else z_P + biases.bias_gate_up_EP[e].double()).tolist()
            hidden = [activate_by_loop(z_P[f], z_P[width + f], activation) for f in range(width)]
            out_D = w_down_EDF[e].double() @ torch.tensor(hidden, dtype=torch.float64)
            y_TD[t] += weight * (out_D if biases is None else out_D + biases.bias_down_ED[e].double())
    return y_TD


def rms_error(y, exact):
    return ((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("T", "E", "K", "D", "F"), SHAPES)
def test_biases_and_clamp(T, E, K, D, F, dtype, form, rng):
    inputs = draw(T, E, K, D, F, rng, dtype)
    y_TD = form(*inputs, activation=CLAMPED)
    assert (y_TD.shape, y_TD.dtype) == ((T, D), dtype)
    assert rms_error(y_TD, experts_by_loop(*inputs, CLAMPED)) < TOLERANCES[dtype]


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("biased", [False, True], ids=["unbiased", "biased"])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_each_alone(activation, biased, form, rng):
    inputs = draw(5, 6, 3, 24, 16, rng, biased=biased)
    y_TD = form(*inputs, activation=activation)
    assert rms_error(y_TD, experts_by_loop(*inputs, activation)) < 1e-6
    if activation is SWIGLU and not biased:
        assert torch.equal(y_TD, form(*inputs[:4]))


@pytest.mark.parametrize("form", FORMS, ids=by_name)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_no_tokens(dtype, form, rng):
    y_TD = form(*draw(0, 5, 3, 24, 16, rng, dtype), activation=CLAMPED)
    assert (y_TD.shape, y_TD.dtype) == ((0, 24), dtype)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (compute_experts_grouped, torch.bfloat16),  # float32 F.grouped_mm does not trace
        (compute_experts_dense, torch.float32),
        (compute_experts_per_slot, torch.float32),
        (compute_experts_per_slot, torch.bfloat16),
    ],
)
def test_compiled(form, dtype, rng):
    fn = torch.compile(form, fullgraph=True, backend="aot_eager", dynamic=False)
    for T, E, K in [(0, 5, 2), (1, 8, 2), (7, 8, 8)]:
        inputs = draw(T, E, K, 24, 16, rng, dtype)
        y_TD = fn(*inputs, activation=CLAMPED)
        assert (y_TD.shape, y_TD.dtype) == ((T, 24), dtype)
        if T:
            assert rms_error(y_TD, experts_by_loop(*inputs, CLAMPED)) < TOLERANCES[dtype]


@pytest.mark.parametrize("form", FORMS, ids=by_name)
def test_experts_without_tokens_leave_no_trace(form, rng):
    x_TD, routing, w_gate_up, w_down, biases = draw(4, 6, 2, 24, 16, rng)
    routing = routing._replace(experts_TK=torch.tensor([[0, 4], [4, 0], [0, 4], [4, 2]], dtype=torch.int32))
    expected_TD = experts_by_loop(x_TD, routing, w_gate_up, w_down, biases, CLAMPED)
    for tensor in biases:
        tensor[[1, 3, 5]] = math.nan
    y_TD = form(x_TD, routing, w_gate_up, w_down, biases, activation=CLAMPED)
    assert rms_error(y_TD, expected_TD) < 1e-6
