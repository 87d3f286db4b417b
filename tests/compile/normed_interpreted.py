"""Norms inside the kernels behind them, in Triton's interpreter; test_normed_kernels.py runs this file.

Each is held to the bit against the same with a launch of its own for the norm.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels import Settings, Tile, run_moe_layer
from fmoe.compile.kernels.add_norm import add_rms_norm_rows
from fmoe.compile.kernels.layer import run_moe_layer_normed
from fmoe.compile.kernels.linear import LinearSettings, run_linear, run_linear_normed
from fmoe.compile.kernels.normed import Unnormed
from fmoe.compile.linear_settings import linear_to_ints
from fmoe.compile.normed_ops import compute_moe_normed_op, linear_normed_planned
from fmoe.compile.ops import encode_plans, rule_to_numbers
from fmoe.compile.plan import Key, Plan, Row
from fmoe.compile.settings import settings_to_ints
from fmoe.functional import Fp8, MoEParams, RouterConfig, add_rms_norm, route_and_compute
from fmoe.functional.quant import dequantize

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

EPS, N = 1e-3, 37
EXPERTS = RouterConfig(7, 3, renormalize=True)
# dtype of the row and the weights, dtype of the norm's weight
DTYPES = [(torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.float32)]
WHOLE = LinearSettings(4, 256, 4, 2, 1, dot=False, pdl=False)
TILE = Tile(1, 32, 128, 4, 2)
SLOTS = Settings("slots", Tile(0, 4, 256, 4, 2), TILE, TILE, token_down=True, combine=64)


def draw(*sizes, rng, dtype, scale=1.0):
    return (torch.randn(sizes, generator=rng) * scale).to(dtype)


def draw_rows(hidden, rng, dtype, norm_dtype, tokens=1):
    x, branch = (draw(tokens, hidden, rng=rng, dtype=dtype, scale=3.0) for _ in range(2))
    return Unnormed(x, branch, draw(hidden, rng=rng, dtype=norm_dtype), EPS)


def draw_layer(hidden, rng, dtype):
    sizes = ((8, hidden), (8, 80, hidden), (8, hidden, 40))
    return [draw(*shape, rng=rng, dtype=dtype, scale=shape[-1] ** -0.5) for shape in sizes]


@pytest.mark.parametrize(("dtype", "norm_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("programs", [0, 3])
@pytest.mark.parametrize(("hidden", "tokens"), [(256, 2), (200, 1), (200, 2), (3, 1)])
def test_a_projection_of_a_norm(hidden, tokens, programs, dtype, norm_dtype, rng):
    rows, w = draw_rows(hidden, rng, dtype, norm_dtype, tokens), draw(N, hidden, rng=rng, dtype=dtype)
    bias, settings = draw(N, rng=rng, dtype=dtype), replace(WHOLE, programs=programs)

    total, y = run_linear_normed(rows, w, settings, bias_N=bias)

    normed, expected_total = add_rms_norm_rows(*rows[:3], eps=EPS)
    assert torch.equal(total, expected_total)
    assert torch.equal(y, run_linear(normed, w, settings, bias_N=bias))


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_projection_with_rows_that_are_not_quantised(tokens, rng):
    rows = draw_rows(200, rng, torch.float16, torch.float32, tokens)
    w, rest = (draw(rows, 200, rng=rng, dtype=torch.float16) for rows in (N, 5))
    fp8 = Fp8(w.to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0]]), rest)

    total, y = run_linear_normed(rows, fp8, WHOLE)

    normed, expected_total = add_rms_norm_rows(*rows[:3], eps=EPS)
    assert torch.equal(total, expected_total)
    assert torch.equal(y, run_linear(normed, fp8, WHOLE))
    exact = normed.double() @ torch.cat((dequantize(Fp8(fp8.w, fp8.scale), torch.float64), rest.double())).T
    assert (y.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize(("dtype", "norm_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize(("fuse_choice", "tokens"), [(False, 1), (True, 1), (False, 4)])
def test_a_moe_layer_of_a_norm(fuse_choice, tokens, dtype, norm_dtype, rng):
    rows, (router, gate_up, down) = draw_rows(200, rng, dtype, norm_dtype, tokens), draw_layer(200, rng, dtype)
    settings = replace(SLOTS, fuse_choice=fuse_choice)

    total, normed, y = run_moe_layer_normed(rows, router, None, gate_up, down, EXPERTS, settings)

    expected_normed, expected_total = add_rms_norm_rows(*rows[:3], eps=EPS)
    assert torch.equal(total, expected_total)
    assert torch.equal(normed, expected_normed)
    assert torch.equal(y, run_moe_layer(normed, router, None, gate_up, down, EXPERTS, settings))


def planned(operator, sizes, dtype, settings):
    key = Key(operator, sizes, str(dtype).removeprefix("torch."))
    return encode_plans([Plan(key, (Row(-1, "triton", tuple(settings), ""),))], operator)


@pytest.mark.parametrize("depth", [256, 64], ids=["inside", "apart"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_ops_take_any_rows_and_settings(rows, depth, compiled, rng):
    x, branch = (draw(rows, 1, 200, rng=rng, dtype=torch.float32) for _ in range(2))
    norm, w = draw(200, rng=rng, dtype=torch.float32), draw(N, 200, rng=rng, dtype=torch.float32)
    router, gate_up, down = draw_layer(200, rng, torch.float32)
    params = MoEParams(router, gate_up, down, None, None)
    linear = LinearSettings(4, depth, 4, 2, 1, dot=False, pdl=False)
    moe = Settings("slots", Tile(0, 4, depth, 4, 2), TILE, TILE, token_down=True, combine=64)
    project = partial(
        linear_normed_planned, eps=EPS, plans=planned("linear", (N, 200), w.dtype, linear_to_ints(linear))
    )
    sizes = (7, 3, 1, 1, 200, 40)
    compute = partial(
        compute_moe_normed_op, eps=EPS, plans=planned("moe", sizes, w.dtype, settings_to_ints(moe))
    )  # fmt: skip

    def run(x, branch):
        return *project(x, branch, norm, w, None), *compute(x[:, 0], branch[:, 0], norm, params, EXPERTS)

    total, y, moe_total, normed, moe_y = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(
        x, branch
    )

    expected_normed, expected_total = add_rms_norm(x, branch, norm, eps=EPS)
    assert torch.equal(total, expected_total)
    assert torch.equal(moe_total, expected_total[:, 0])
    torch.testing.assert_close(normed, expected_normed[:, 0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(y, expected_normed @ w.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(moe_y, route_and_compute(expected_normed[:, 0], params, EXPERTS), rtol=1e-5, atol=1e-4)


def test_a_projection_without_a_plan(rng):
    x, branch = (draw(2, 1, 20, rng=rng, dtype=torch.float32) for _ in range(2))
    norm, w = draw(20, rng=rng, dtype=torch.float32), draw(N, 20, rng=rng, dtype=torch.float32)
    total, y = linear_normed_planned(x, branch, norm, w, None, eps=EPS, plans=())
    torch.testing.assert_close(y, add_rms_norm(x, branch, norm, eps=EPS)[0] @ w.T, rtol=1e-5, atol=1e-4)
    assert torch.equal(total, x + branch)


def test_the_ops_say_what_they_give(rng):
    x, branch, norm, _ = draw_rows(200, rng, torch.float32, torch.float32)
    w = draw(N, 200, rng=rng, dtype=torch.float32)
    plan = planned("linear", (N, 200), w.dtype, linear_to_ints(WHOLE))[0][2]
    opcheck(torch.ops.fmoe.linear_normed.default, (x, branch, norm, EPS, w, None, list(plan)))
    plan = planned("moe", (7, 3, 1, 1, 200, 40), w.dtype, settings_to_ints(SLOTS))[0][2]
    router, gate_up, down = draw_layer(200, rng, torch.float32)
    weights = (router, None, gate_up, down)
    opcheck(torch.ops.fmoe.moe_normed.default, (x, branch, norm, EPS, *weights, *rule_to_numbers(EXPERTS), list(plan)))
