"""The projection of several tokens in Triton's interpreter, against float64; test_linear_few_kernel.py runs it."""

from dataclasses import replace

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels.linear import LinearSettings, run_linear
from fmoe.functional.quant import Fp8

# Triton's interpreter asks numpy for scalars of arrays; NaN and infinities are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

KEPT = LinearSettings(16, 512, 4, 2, 1, dot=True, pdl=False, programs=2)
SETTINGS = {
    "kept": KEPT,
    "in parts": replace(KEPT, depth=128, splits=2),
    "more programs than blocks": replace(KEPT, rows=32, programs=9),
}
TOLERANCE = 4e-4  # half a last bit of float16


@pytest.fixture(autouse=True)
def fill_empty_tensors():
    """Fill torch.empty with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def draw(tokens, outputs, hidden, rest, rng):
    """Draw x, weights whose factors differ from block to block by far more than the tolerance, and both in float64."""
    w = torch.randn(outputs, hidden, generator=rng).to(torch.float8_e4m3fn)
    blocks = (-(-outputs // 128), -(-hidden // 128))
    scale = 2.0 ** torch.randint(-4, 5, blocks, generator=rng) * hidden**-0.5
    exact = w.double()
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            exact[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scale[i, j]
    rest_MD = torch.randn(rest, hidden, generator=rng).half() if rest else None
    if rest_MD is not None:
        exact = torch.cat((exact, rest_MD.double()))
    # Tokens of very different size, as float16 alone would not hold them beside such factors.
    x = (torch.randn(tokens, hidden, generator=rng) * 2.0 ** torch.randint(-9, 3, (tokens, 1), generator=rng)).half()
    return x, Fp8(w, scale, rest_MD), exact


@pytest.mark.parametrize("rest", [0, 7])
@pytest.mark.parametrize("shape", [(2, 37, 384), (5, 131, 256), (16, 33, 384), (33, 16, 128)], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_projection_equals_the_product(name, shape, rest, rng):
    x, fp8, exact = draw(*shape, rest, rng)
    bias = torch.randn(shape[1] + rest, generator=rng).half() if rest else None

    y = run_linear(x, fp8, SETTINGS[name], bias_N=bias)

    assert (y.shape, y.dtype) == ((shape[0], shape[1] + rest), torch.float16)
    expected = (x.double()[:, None] * exact).sum(-1) + (0 if bias is None else bias.double())
    errors = (y.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max().item() < TOLERANCE


def test_a_token_of_zeros_and_one_of_the_least_numbers(rng):
    x, fp8, exact = draw(3, 20, 256, 0, rng)
    x[0], x[1] = 1, 0
    x[2] = torch.randint(-9, 9, (256,), generator=rng) * 2.0**-24
    fp8, exact = fp8._replace(scale=fp8.scale * 2.0**6), exact * 2.0**6
    y = run_linear(x, fp8, KEPT)
    assert y[1].eq(0).all()
    # What float16 holds of results so small.
    torch.testing.assert_close(y[2].double(), (x[2].double() * exact).sum(-1), rtol=1e-3, atol=2.0**-24)


def test_rows_do_not_affect_each_other(rng):
    x, fp8, _ = draw(4, 21, 256, 0, rng)
    expected = run_linear(x, fp8, KEPT)
    x[2, 7] = torch.nan
    y = run_linear(x, fp8, KEPT)
    assert torch.equal(y[[0, 1, 3]], expected[[0, 1, 3]]) and y[2].isnan().all()


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 256), (torch.float16, 200)])
def test_what_is_not_kept_is_multiplied_in_steps(dtype, hidden, rng):
    x, fp8, exact = draw(3, 21, hidden, 0, rng)
    y = run_linear(x.to(dtype), fp8, KEPT)
    expected = (x.double()[:, None] * exact).sum(-1)
    assert ((y.double() - expected).norm() / expected.norm()).item() < (1e-6 if dtype == torch.float32 else 1e-3)
