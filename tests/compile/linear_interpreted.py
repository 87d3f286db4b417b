"""The projection kernel in Triton's interpreter, against a float64 product; test_linear_kernel.py runs this file."""

from dataclasses import replace

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels.linear import LinearSettings, default_linear_settings, run_linear

# Triton's interpreter asks numpy for scalars of arrays; NaN and infinities are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

PRODUCT = LinearSettings(4, 64, 4, 2, 1, dot=False, pdl=False)
DOT = LinearSettings(32, 64, 4, 2, 1, dot=True, pdl=False)
SETTINGS = {
    "product": PRODUCT,
    "product-split": replace(PRODUCT, splits=3),
    "one-row": replace(PRODUCT, rows=1, depth=256),
    "stream": replace(PRODUCT, depth=512, programs=4),  # of one token; more have programs of their own
    "dot": DOT,
    "dot-split": replace(DOT, rows=16, splits=2),
    "empty-part": replace(DOT, splits=7, depth=128),  # steps of 128 leave fewer than 7 parts
}
SHAPES = [(1, 1, 1), (1, 37, 200), (2, 5, 192), (7, 35, 96), (16, 9, 449)]  # tokens, outputs, hidden
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


def draw(tokens, outputs, hidden, rng, dtype):
    return tuple(torch.randn(shape, generator=rng).to(dtype) for shape in ((tokens, hidden), (outputs, hidden)))


def relative_error(y, exact):
    return ((y.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_projection_equals_the_product(name, shape, dtype, rng):
    x_TD, w_ND = draw(*shape, rng, dtype)
    y_TN = run_linear(x_TD, w_ND, SETTINGS[name])
    assert (y_TN.shape, y_TN.dtype) == (shape[:2], dtype)
    exact_TN = (x_TD.double()[:, None] * w_ND.double()).sum(-1)
    assert relative_error(y_TN, exact_TN) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bias_is_added_once(name, rng):
    x_TD, w_ND = draw(3, 37, 200, rng, torch.float32)
    bias_N = 100 * torch.randn(37, generator=rng)
    y_TN = run_linear(x_TD, w_ND, SETTINGS[name], bias_N=bias_N)
    exact_TN = (x_TD.double()[:, None] * w_ND.double()).sum(-1) + bias_N.double()
    assert relative_error(y_TN, exact_TN) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "outputs"), [(1, 7), (2, 7), (2, 515)])
def test_default_settings_are_right(tokens, outputs, dtype, rng):
    x_TD, w_ND = draw(tokens, outputs, 40, rng, dtype)
    y_TN = run_linear(x_TD, w_ND, default_linear_settings(tokens, outputs, 40, dtype))
    assert relative_error(y_TN, (x_TD.double()[:, None] * w_ND.double()).sum(-1)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", SETTINGS)
def test_parts_are_added_in_order_and_rounded_once(name):
    """In float16, 2048 + 1 - 2048 is 1 only where the sum is kept in float32."""
    x_TD, w_ND = torch.zeros(2, 400).half(), torch.ones(3, 400).half()
    x_TD[:, 0], x_TD[:, 170], x_TD[:, 399] = 2048, 1, -2048
    assert run_linear(x_TD, w_ND, SETTINGS[name]).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_do_not_affect_each_other(name, rng):
    x_TD, w_ND = draw(4, 21, 100, rng, torch.float32)
    expected_TN = run_linear(x_TD, w_ND, SETTINGS[name])
    x_TD[2], w_ND[5] = torch.nan, torch.inf
    y_TN = run_linear(x_TD, w_ND, SETTINGS[name])
    kept = [0, 1, 3], [n for n in range(21) if n != 5]
    assert torch.equal(y_TN[kept[0]][:, kept[1]], expected_TN[kept[0]][:, kept[1]])
    assert y_TN[2].isnan().all() and not y_TN[kept[0], 5].isfinite().any()
