"""The gated feed-forward block against loops over Python floats, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.mlp import SWIGLU, Activation, MLPParams, activate, mlp_layer, swiglu

D, F = 6, 9
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {F32: 1e-5, BF16: 3e-2, F16: 4e-3}
CASES = [
    *((shape, dtype, mode) for shape in [(2, 5), (1, 1)] for dtype in TOLERANCES for mode in ("eager", "aot_eager")),
    *((shape, F32, mode) for shape in [(2, 0), (7,), (0,)] for mode in ("eager", "aot_eager")),
    ((2, 5), F32, "inductor"),  # the slow compiler runs once
]
IDS = ["-".join([*map(str, shape), str(dtype), mode]).replace("torch.", "") for shape, dtype, mode in CASES]
cases = pytest.mark.parametrize(("shape", "dtype", "mode"), CASES, ids=IDS)


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def swiglu_by_loop(row):
    half = len(row) // 2
    return [row[j] / (1 + math.exp(-row[j])) * row[half + j] for j in range(half)]


def product_by_loop(matrix, row):
    return [math.fsum(w * v for w, v in zip(line, row, strict=True)) for line in matrix]


def assert_near(actual, rows, shape, dtype):
    assert (actual.shape, actual.dtype) == (shape, dtype)
    expected = torch.tensor(rows, dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@cases
def test_swiglu(shape, dtype, mode, rng):
    x = (torch.randn(*shape, 2 * F, generator=rng) * 2).to(dtype)

    y = in_mode(swiglu, mode)(x)

    rows = [swiglu_by_loop(row) for row in x.double().reshape(-1, 2 * F).tolist()]
    assert_near(y, rows, (*shape, F), dtype)


def test_swiglu_saturates():
    y = swiglu(torch.tensor([[-100.0, 100.0, 0.0, 2.0, 3.0, 5.0]]))

    assert y.tolist() == [[pytest.approx(0.0, abs=1e-30), 300.0, 0.0]]


def activate_by_loop(row, alpha, limit, shift):
    half, out = len(row) // 2, []
    for gate, up in zip(row[:half], row[half:], strict=True):
        gate, up = min(gate, limit), max(min(up, limit), -limit)
        out.append((up + shift) * gate / (1 + math.exp(-alpha * gate)))
    return out


@cases
def test_activate(shape, dtype, mode, rng):
    x = (torch.randn(*shape, 2 * F, generator=rng) * 2).to(dtype)
    fn = in_mode(activate, mode)
    for alpha, limit, shift in ((1.702, 1.5, 1.0), (0.5, math.inf, 0.0), (1.0, 0.3, 0.0), (1.0, math.inf, 1.0)):
        activation = Activation(alpha, None if limit == math.inf else limit, shift)
        assert not activation.is_plain
        y = fn(x, activation)
        rows = [activate_by_loop(row, alpha, limit, shift) for row in x.double().reshape(-1, 2 * F).tolist()]
        assert_near(y, rows, (*shape, F), dtype)


def test_the_default_activation_is_swiglu(rng):
    x = torch.randn(3, 2 * F, generator=rng)
    assert Activation() == SWIGLU and SWIGLU.is_plain
    assert torch.equal(activate(x, SWIGLU), swiglu(x))


def test_the_clamps_are_one_sided_for_the_gate():
    y = activate(torch.tensor([-50.0, 50.0, 2.0, 9.0, -9.0, 0.5]), Activation(limit=3.0, shift=1.0))
    expected = [-50 * 4 / (1 + math.exp(50)), 3 * -2 / (1 + math.exp(-3)), 2 * 1.5 / (1 + math.exp(-2))]
    assert y.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_leaves_nothing_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit={limit} of the activation must be above 0, or None for no clamp"):
        Activation(limit=limit)


@cases
def test_mlp_layer(shape, dtype, mode, rng):
    x = torch.randn(*shape, D, generator=rng).to(dtype)
    w_gate_up = (torch.randn(2 * F, D, generator=rng) * 0.4).to(dtype)
    w_down = (torch.randn(D, F, generator=rng) * 0.3).to(dtype)

    y = in_mode(mlp_layer, mode)(x, MLPParams(w_gate_up, w_down))

    up, down = w_gate_up.double().tolist(), w_down.double().tolist()
    rows = [
        product_by_loop(down, swiglu_by_loop(product_by_loop(up, row))) for row in x.double().reshape(-1, D).tolist()
    ]
    assert_near(y, rows, (*shape, D), dtype)
