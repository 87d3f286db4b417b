"""The gated feed-forward block against loops over Python floats, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.mlp import MLPParams, mlp_layer, swiglu

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
