"""Norms against sums over Python floats, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.norm import add_rms_norm, rms_norm, rms_norm_gated

B, T, H, D = 2, 5, 3, 7
EPS = 1e-5
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# x, weight: the weight's dtype chooses the convention
DTYPES = [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32)]
CASES = [
    *(((B, T, D), (D,), *dtypes, mode) for dtypes in DTYPES for mode in ("eager", "aot_eager")),
    *(((B, T, H, D), (H, D), F32, F32, mode) for mode in ("eager", "aot_eager")),
    *(((B, 0, D), (D,), BF16, BF16, mode) for mode in ("eager", "aot_eager")),
    *(((1, 1, D), (D,), F32, F32, mode) for mode in ("eager", "aot_eager")),
    ((B, T, D), (D,), F32, F32, "inductor"),  # the slow compiler runs once; it also skips roundings to bfloat16
]
IDS = ["-".join(["x".join(map(str, c[0])), str(c[2]), str(c[3]), c[4]]).replace("torch.", "") for c in CASES]
cases = pytest.mark.parametrize(("shape", "weight_shape", "dtype", "weight_dtype", "mode"), CASES, ids=IDS)


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def rounded(value, dtype):
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def norm_by_loop(x, weight, eps, dtype):
    """Give float64 values that are rounded where the docstring rounds: n to the weight's dtype, the product twice."""
    rows, weights = x.double().reshape(-1, x.shape[-1]).tolist(), weight.double().expand_as(x).reshape(-1, x.shape[-1])
    out = []
    for row, w_row in zip(rows, weights.tolist(), strict=True):
        root = math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
        products = (rounded(v / root, weight.dtype) * w for v, w in zip(row, w_row, strict=True))
        out.append([rounded(rounded(p, weight.dtype), dtype) for p in products])
    return torch.tensor(out, dtype=torch.float64).reshape(x.shape)


def assert_rounded_alike(actual, expected):
    """Float32 sums may fall on the other side of a tie, so one element in fifty may differ by one step."""
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=2 * step if actual.dtype != F32 else 1e-6, atol=1e-7)
    if actual.dtype != F32 and actual.numel():
        assert (actual.double() == expected).double().mean() >= 0.98


@cases
def test_rms_norm(shape, weight_shape, dtype, weight_dtype, mode, rng):
    x = (torch.randn(shape, generator=rng) * 3).to(dtype)
    weight = (1 + torch.randn(weight_shape, generator=rng) * 0.3).to(weight_dtype)

    y = in_mode(rms_norm, mode)(x, weight, eps=EPS)

    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert_rounded_alike(y, norm_by_loop(x, weight, EPS, dtype))


def test_the_dtype_of_the_weight_chooses_the_rounding(rng):
    x = torch.randn(64, D, generator=rng).to(BF16)
    weight = (1 + torch.randn(D, generator=rng) * 0.3).to(BF16)

    standard, late = rms_norm(x, weight, eps=EPS), rms_norm(x, weight.float(), eps=EPS)

    assert standard.dtype == late.dtype == BF16
    assert 0.05 < (standard != late).double().mean() < 0.6
    exact = norm_by_loop(x.double(), weight.double(), EPS, torch.float64)
    assert (late.double() - exact).abs().mean() < (standard.double() - exact).abs().mean()


@pytest.mark.parametrize("size", [0.0, 1e-4, 6e4], ids=["zeros", "below-eps", "squares-overflow"])
def test_rms_norm_keeps_float16_finite(size):
    x = torch.full((1, D), size, dtype=F16)

    y = rms_norm(x, torch.ones(D, dtype=F16), eps=EPS)

    stored = float(x[0, 0])
    assert y.tolist() == [[pytest.approx(stored / math.sqrt(stored * stored + EPS), rel=1e-3)] * D]


@cases
def test_rms_norm_gated(shape, weight_shape, dtype, weight_dtype, mode, rng):
    x = (torch.randn(shape, generator=rng) * 3).to(dtype)
    gate = (torch.randn(shape, generator=rng) * 4).to(dtype)
    weight = (1 + torch.randn(weight_shape, generator=rng) * 0.3).to(weight_dtype)

    y = in_mode(rms_norm_gated, mode)(x, gate, weight, eps=EPS)

    assert (y.shape, y.dtype) == (x.shape, dtype)
    silus = [v / (1 + math.exp(-v)) for v in gate.double().flatten().tolist()]
    normed = norm_by_loop(x, weight, EPS, dtype).flatten().tolist()
    products = [rounded(n * s, dtype) for n, s in zip(normed, silus, strict=True)]
    assert_rounded_alike(y, torch.tensor(products, dtype=torch.float64).reshape(shape))


@cases
def test_add_rms_norm(shape, weight_shape, dtype, weight_dtype, mode, rng):
    x, branch = (torch.randn(2, *shape, generator=rng) * 3).to(dtype)
    before = x.clone()
    weight = (1 + torch.randn(weight_shape, generator=rng) * 0.3).to(weight_dtype)

    normed, total = in_mode(add_rms_norm, mode)(x, branch, weight, eps=EPS)

    sums = [rounded(a + b, dtype) for a, b in zip(x.flatten().tolist(), branch.flatten().tolist(), strict=True)]
    expected = torch.tensor(sums, dtype=dtype).reshape(shape)
    assert torch.equal(total, expected)
    assert (normed.shape, normed.dtype) == (x.shape, dtype)
    assert_rounded_alike(normed, norm_by_loop(expected, weight, EPS, dtype))
    assert torch.equal(x, before)
