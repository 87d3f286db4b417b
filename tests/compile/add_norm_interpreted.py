"""The norm kernels in Triton's interpreter, against the references; test_add_norm_kernel.py runs this file.

The interpreter is chosen when Triton is imported, for the whole process, hence a process of its own.
"""

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.delta_ops import add_rms_norm_op, rms_norm_op
from fmoe.compile.kernels.add_norm import add_rms_norm_rows, rms_norm_rows
from fmoe.functional import add_rms_norm, rms_norm

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

EPS = 1e-3
SHAPES = [(1, 1), (1, 96), (7, 33), (2, 3, 257), (0, 12)]
# dtype of the rows, dtype of the weight, tolerance relative to the largest element. The interpreter cuts bfloat16 off
# instead of rounding it, so float16 stands for it.
DTYPES = [
    (torch.float32, torch.float32, 1e-6),
    (torch.float16, torch.float16, 1e-3),
    (torch.float16, torch.float32, 1e-3),
]


def draw(*sizes, rng, dtype, scale=3.0):
    return (torch.randn(sizes, generator=rng) * scale).to(dtype)


def norm_exact(x, weight):
    """Follow the formula in float64, row by row."""
    rows = [row / (row.square().mean() + EPS).sqrt() * weight.double() for row in x.double().flatten(0, -2)]
    return torch.stack(rows).view(x.shape) if rows else x.double()


def assert_near(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    assert ((actual.double() - expected.double()).abs() <= tolerance * expected.double().abs().amax(-1, True)).all()


@pytest.mark.parametrize(("dtype", "weight_dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_and_its_norm(shape, dtype, weight_dtype, tolerance, rng):
    x, branch = (draw(*shape, rng=rng, dtype=dtype) for _ in range(2))
    weight = draw(shape[-1], rng=rng, dtype=weight_dtype)
    kept = x.clone()

    y, total = add_rms_norm_rows(x, branch, weight, eps=EPS)

    expected_y, expected_total = add_rms_norm(x, branch, weight, eps=EPS)
    assert y.dtype == total.dtype == dtype
    assert torch.equal(total, expected_total)
    assert_near(y, norm_exact(total, weight), tolerance)
    # nearly all elements agree to the bit only if both round at the same points
    assert dtype == torch.float32 or not y.numel() or (y == expected_y).float().mean() > 0.97
    assert torch.equal(x, kept)


@pytest.mark.parametrize(("dtype", "weight_dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_alone(shape, dtype, weight_dtype, tolerance, rng):
    x, weight = draw(*shape, rng=rng, dtype=dtype), draw(shape[-1], rng=rng, dtype=weight_dtype)

    y = rms_norm_rows(x, weight, eps=EPS)

    assert y.dtype == dtype
    assert_near(y, norm_exact(x, weight), tolerance)
    expected = rms_norm(x, weight, eps=EPS)
    assert dtype == torch.float32 or not y.numel() or (y == expected).float().mean() > 0.97


def test_rows_that_are_not_contiguous(rng):
    x = draw(33, 5, rng=rng, dtype=torch.float32).T
    branch, weight = draw(5, 66, rng=rng, dtype=torch.float32)[:, ::2], draw(33, rng=rng, dtype=torch.float32)

    y, total = add_rms_norm_rows(x, branch, weight, eps=EPS)

    assert torch.equal(total, x + branch)
    assert_near(y, norm_exact(x + branch, weight), 1e-6)


def test_the_ops(rng):
    x, branch = (draw(2, 1, 20, rng=rng, dtype=torch.float32) for _ in range(2))
    weight = draw(20, rng=rng, dtype=torch.float32)

    opcheck(torch.ops.fmoe.add_rms_norm.default, (x, branch, weight, EPS))
    opcheck(torch.ops.fmoe.rms_norm.default, (x, weight, EPS))
    graph = torch.compile(
        lambda *args: (add_rms_norm_op(*args, eps=EPS), rms_norm_op(args[0], args[2], eps=EPS)),
        fullgraph=True,
        backend="aot_eager",
    )
    (y, total), alone = graph(x, branch, weight)

    assert torch.equal(total, x + branch)
    assert_near(y, norm_exact(total, weight), 1e-6)
    assert_near(alone, norm_exact(x, weight), 1e-6)
