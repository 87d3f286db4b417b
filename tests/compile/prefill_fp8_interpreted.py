"""Products of rows in FP8 with weights in FP8 blocks in Triton's interpreter, against sums over the rounded rows.

test_prefill_fp8_kernel.py runs this file, in a process of its own: the interpreter is chosen when Triton is imported.
"""

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels import Settings, Tile
from fmoe.compile.kernels.linear_fp8 import Form, run_linear_quantized
from fmoe.compile.kernels.moe_prefill_fp8 import compute_experts_quantized
from fmoe.compile.kernels.quantize import quantize_rows
from fmoe.functional import Routing
from fmoe.functional import quant as reference
from fmoe.functional.quant import FP8, Fp8, dequantize

# Triton's interpreter asks numpy for scalars of arrays.
pytestmark = [
    pytest.mark.usefixtures("round_as_devices_do"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
TILE = Tile(16, 128, 128, 4, 2)


def draw_fp8(*shape, rng, parts=1):
    """Draw values and factors that differ from block to block by far more than any tolerance."""
    *outer, rows, columns = shape
    w = torch.randn(shape, generator=rng).to(FP8)
    blocks = (parts * -(-(rows // parts) // 128), -(-columns // 128))
    return Fp8(w, 2.0 ** torch.randint(-2, 3, (*outer, *blocks), generator=rng) * columns**-0.5)


def round_rows(x):
    """Round 128 columns of each row, one after the other, to FP8 times the factor that their largest value needs."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, into in zip(x.float(), y, strict=True):
        for part, target in zip(row.split(128), into.split(128), strict=True):
            factor = part.abs().max() / 448
            target.copy_((part / factor if factor else part).to(FP8).double() * factor)
    return y


def relative_error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 256), (13, 384)])
def test_rows_are_quantised_as_the_reference_does(tokens, hidden, dtype, rng):
    magnitudes = 10.0 ** torch.randint(-3, 3, (tokens, 1), generator=rng)
    x = (torch.randn(tokens, hidden, generator=rng) * magnitudes).to(dtype)
    x[0, :128] = 0

    q, factors = quantize_rows(x)

    expected, expected_factors = reference.quantize_rows(x)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(factors, expected_factors, rtol=0, atol=0)
    back = q.double().view(tokens, -1, 128) * factors.double()[..., None]
    assert relative_error(back.view(tokens, hidden), round_rows(x)) < 1e-6
    assert back.isfinite().all() and not back[0, 0].any()


def experts_over_rounded_rows(x, routing, w_gate_up, w_down, *, rounded):
    gate_up, down = dequantize(w_gate_up, torch.float64, parts=2), dequantize(w_down, torch.float64)
    rows = round_rows(x) if rounded else x.double()
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, (weights, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            gate, up = (gate_up[e] @ rows[t]).chunk(2)
            h = gate / (1 + torch.exp(-gate)) * up
            y[t] += weight * (down[e] @ (round_rows(h[None])[0] if rounded else h))
    return y


# tokens, experts, top_k, hidden, width
CASES = [(1, 3, 2, 128, 128), (5, 7, 3, 384, 256), (21, 2, 2, 256, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("programs", [0, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_equal_the_sums_over_rounded_rows(case, programs, dtype, rng):
    tokens, experts, top_k, hidden, width = case
    stacks = draw_fp8(experts, 2 * width, hidden, rng=rng, parts=2), draw_fp8(experts, hidden, width, rng=rng)
    x = torch.randn(tokens, hidden, generator=rng).to(dtype)
    ids = torch.stack([torch.randperm(experts, generator=rng)[:top_k] for _ in range(tokens)]).int()
    routing = Routing(torch.rand(tokens, top_k, generator=rng), ids)
    settings = Settings("sorted", TILE, TILE, TILE, combine=64, programs=programs, group=2)

    y = compute_experts_quantized(x, routing, *stacks, settings)

    assert y.dtype == dtype
    assert relative_error(y, experts_over_rounded_rows(x, routing, *stacks, rounded=True)) < 3e-3
    off = relative_error(y, experts_over_rounded_rows(x, routing, *stacks, rounded=False))
    assert 0.01 < off < 0.06  # 4.3 % of many values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "rest", "hidden"), [(1, 100, 0, 128), (21, 300, 3, 256), (16, 520, 1, 384)])
def test_projections_equal_the_sums_over_rounded_rows(tokens, rows, rest, hidden, with_bias, dtype, rng):
    w = draw_fp8(rows, hidden, rng=rng)
    if rest:
        w = w._replace(rest_MD=torch.randn(rest, hidden, generator=rng).to(dtype))
    bias = torch.randn(rows + rest, generator=rng).to(dtype) if with_bias else None
    x = torch.randn(tokens, hidden, generator=rng).to(dtype)

    y = run_linear_quantized(x, w, bias_N=bias, form=Form(tokens=16, warps=4, stages=2, programs=3, group=2))

    exact = dequantize(w, torch.float64)
    expected = torch.cat((round_rows(x) @ exact[:rows].T, x.double() @ exact[rows:].T), 1)
    assert relative_error(y, expected + (bias.double() if with_bias else 0)) < (
        2e-6 if dtype == torch.float32 else 1e-3
    )
    assert y.shape == (tokens, rows + rest)


def test_no_rows(rng):
    assert run_linear_quantized(torch.empty(0, 128), draw_fp8(7, 128, rng=rng)).shape == (0, 7)
    assert quantize_rows(torch.empty(0, 256))[1].shape == (0, 2)
