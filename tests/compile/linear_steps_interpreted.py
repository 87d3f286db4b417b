"""Tokens as sums of two FP8 values, in Triton's interpreter, against float64; test_linear_steps_kernel.py runs it."""

from dataclasses import replace

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels.add_norm import add_rms_norm_rows, add_rms_norm_split
from fmoe.compile.kernels.linear import LinearSettings, run_linear, run_linear_normed
from fmoe.compile.kernels.normed import Unnormed
from fmoe.compile.kernels.split_rows import split_into_pairs
from fmoe.functional.quant import FP8, Fp8

# Triton's interpreter asks numpy for scalars of arrays; NaN and infinities are meant.
pytestmark = [
    pytest.mark.usefixtures("round_as_devices_do"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
PAIRS = LinearSettings(64, 128, 4, 2, 1, dot=2, pdl=False)
SETTINGS = {
    "pairs": PAIRS,
    "in parts": replace(PAIRS, rows=128, splits=2),
    "half a block of columns": replace(PAIRS, rows=32, depth=64),
}
TOLERANCE = 3e-3  # bfloat16 rounds by 1.7e-3; one value of FP8 by 3e-2


def draw(tokens, outputs, hidden, rng):
    """Draw x, weights whose factors differ from block to block by far more than the tolerance, and these in float64."""
    w = torch.randn(outputs, hidden, generator=rng).to(FP8)
    blocks = (-(-outputs // 128), -(-hidden // 128))
    scale = 2.0 ** torch.randint(-4, 5, blocks, generator=rng) * hidden**-0.5
    whole = scale.double().repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :hidden]
    x = torch.randn(tokens, hidden, generator=rng) * 10.0 ** torch.randint(-20, 20, (tokens, 1), generator=rng)
    # Parts of a token of very different size, too.
    x[:, hidden // 2 :] *= 2.0**-7
    return x.bfloat16(), Fp8(w, scale), w.double() * whole


def worst_error(y, expected):
    return ((y.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


@pytest.mark.parametrize("shape", [(2, 37, 384), (5, 131, 256), (16, 33, 384), (33, 16, 128)], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_projection_equals_the_product(name, shape, rng):
    x, fp8, exact = draw(*shape, rng)
    y, again = (run_linear(x, fp8, SETTINGS[name]) for _ in range(2))
    assert (y.shape, y.dtype) == (shape[:2], torch.bfloat16)
    assert worst_error(y, x.double() @ exact.T) < TOLERANCE and torch.equal(y, again)


@pytest.mark.parametrize("depth", [32, 128])
def test_two_values_carry_all_digits_of_bfloat16(depth, rng):
    """Times one, what lies within 2^-8 of the largest comes back as it was, of tokens of any size."""
    x = (1 + torch.rand(9, 128, generator=rng)) * 2.0 ** torch.randint(-8, 1, (9, 128), generator=rng)
    x = (x * (torch.randint(0, 2, (9, 128), generator=rng) * 2 - 1)).bfloat16()
    x *= 10.0 ** torch.arange(-28, 35, 7)[:, None].bfloat16()
    x[3], x[4, 0] = 0, 0
    y = run_linear(x, Fp8(torch.eye(128).to(FP8), torch.ones(1, 1)), replace(PAIRS, depth=depth))
    assert torch.equal(y, x)


def test_a_bias_and_rows_that_are_not_quantised_stand_where_they_belong(rng):
    x, fp8, exact = draw(3, 150, 256, rng)
    x = x / x.abs().amax(1, keepdim=True)
    bias = torch.randn(157, generator=rng).bfloat16()

    y = run_linear(x, fp8._replace(rest_MD=torch.zeros(7, 256).bfloat16()), PAIRS, bias_N=bias)

    assert worst_error(y[:, :150], x.double() @ exact.T + bias[:150].double()) < TOLERANCE
    assert torch.equal(y[:, 150:], bias[150:].expand(3, 7))


def test_rows_beside_one_that_is_no_number_are_as_without_it(rng):
    x, fp8, _ = draw(4, 20, 128, rng)
    clean = run_linear(x, fp8, PAIRS)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    y = run_linear(x, fp8, PAIRS)
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert y[1].isnan().all() and not y[2].isfinite().any()


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 256), (torch.float16, 256), (torch.float32, 200)])
def test_what_is_not_split_is_converted(dtype, hidden, rng):
    _, fp8, exact = draw(1, 21, hidden, rng)
    x = torch.randn(3, hidden, generator=rng).to(dtype)
    y = run_linear(x, fp8, PAIRS)
    assert worst_error(y, x.double() @ exact.T) < (1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [96, 256])
def test_a_norm_splits_its_rows_as_a_launch_of_its_own_does(hidden, dtype, rng):
    x, branch = (torch.randn(7, hidden, generator=rng).to(dtype) for _ in range(2))
    x[3], branch[3] = 0, 0
    x[4, 5], x[5, 7] = torch.nan, torch.inf
    weight = torch.randn(hidden, generator=rng)

    normed, total, split = add_rms_norm_split(x, branch, weight, eps=1e-6)

    for found, expected in zip((normed, total), add_rms_norm_rows(x, branch, weight, eps=1e-6), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    alone, whole = split_into_pairs(normed, pdl=False), [0, 1, 2, 3, 6]
    assert split.power_N.isnan().tolist() == [row not in whole for row in range(7)]
    assert torch.equal(split.power_N[whole], alone.power_N[whole])
    assert torch.equal(split.pairs_2ND[:, whole].view(torch.uint8), alone.pairs_2ND[:, whole].view(torch.uint8))


@pytest.mark.parametrize("tokens", [3, 9])
def test_a_projection_of_a_norm_is_that_of_normed_rows(tokens, rng):
    x, fp8, _ = draw(tokens, 37, 256, rng)
    rows = Unnormed(x, torch.randn(x.shape, generator=rng).bfloat16(), torch.rand(256, generator=rng), 1e-6)
    fp8, bias = fp8._replace(rest_MD=torch.zeros(3, 256).bfloat16()), torch.randn(40, generator=rng).bfloat16()

    total, y = run_linear_normed(rows, fp8, PAIRS, bias_N=bias)

    normed, expected_total = add_rms_norm_rows(*rows[:3], eps=1e-6)
    assert torch.equal(total, expected_total)
    assert torch.equal(y, run_linear(normed, fp8, PAIRS, bias_N=bias))
