"""Experts over rows that are split into two values of FP8, in Triton's interpreter, against float64.

test_moe_split_kernel.py runs this file, in a process of its own: the interpreter is chosen when Triton is imported.
"""

from dataclasses import replace

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels import Settings, Tile
from fmoe.compile.kernels.moe_decode import compute_experts_split
from fmoe.compile.kernels.route import tabulate
from fmoe.compile.kernels.split_rows import split_into_pairs
from fmoe.functional import Routing
from fmoe.functional.quant import FP8, Fp8, dequantize

# Triton's interpreter asks numpy for scalars of arrays; NaN and infinities are meant.
pytestmark = [
    pytest.mark.usefixtures("round_as_devices_do"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
TILE = Tile(16, 64, 128, 4, 2)
SPLIT = Settings("split", TILE, TILE, TILE, combine=64)
FORMS = {
    "an expert's rows": SPLIT,
    "owners": replace(SPLIT, owners=True, gate_up=replace(TILE, rows=32)),
    "blocks in one program": replace(SPLIT, down=replace(TILE, rows=32), programs=3),
    "small depth": replace(SPLIT, gate_up=replace(TILE, depth=32), down=replace(TILE, depth=64)),
    "a token's experts": replace(SPLIT, token_down=True, down=Tile(1, 16, 128, 4, 2)),
}


def draw_fp8(*shape, rng, parts=1):
    """Draw values and factors that differ from block to block by far more than any tolerance."""
    *outer, rows, columns = shape
    w = torch.randn(shape, generator=rng).to(FP8)
    blocks = (parts * -(-(rows // parts) // 128), -(-columns // 128))
    return Fp8(w, 2.0 ** torch.randint(-2, 3, (*outer, *blocks), generator=rng) * columns**-0.5)


def draw_stacks(experts, hidden, width, rng):
    return draw_fp8(experts, 2 * width, hidden, rng=rng, parts=2), draw_fp8(experts, hidden, width, rng=rng)


def run(x, routing, stacks, settings, *, slots=1):
    table = tabulate(routing.experts_TK, settings, num_experts=stacks[1].w.shape[0] - slots, slots=slots)
    return compute_experts_split(x, routing, table, *stacks, settings)


def experts_by_loop(x, routing, w_gate_up, w_down):
    gate_up, down = dequantize(w_gate_up, torch.float64, parts=2), dequantize(w_down, torch.float64)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, (weights, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            gate, up = (gate_up[e] @ x[t].double()).chunk(2)
            y[t] += weight * (down[e] @ (gate / (1 + torch.exp(-gate)) * up))
    return y


def draw_routing(tokens, experts, top_k, rng):
    """Draw distinct experts of each token, and a shared slot behind them."""
    ids = torch.stack([torch.randperm(experts, generator=rng)[:top_k] for _ in range(tokens)])
    ids = torch.cat((ids, torch.full((tokens, 1), experts)), 1).to(torch.int32)
    return Routing(torch.rand(tokens, top_k + 1, generator=rng), ids)


def relative_error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("hidden", [96, 256])
def test_two_values_carry_the_digits_of_a_row(hidden, rng):
    x = torch.randn(9, hidden, generator=rng) * 10.0 ** torch.arange(-30, 33, 7)[:, None]
    x[3] = 0

    (high, low), power = split_into_pairs(x.bfloat16(), pdl=False)

    back = (high.double() + low.double()) * power[:, None]
    exact, top = x.bfloat16().double(), x.bfloat16().abs().amax(1, keepdim=True).double()
    # bfloat16 rounds by 2^-9 of a value; the pair by 2^-8 of it, or by 2^-18 of the row's largest.
    assert ((back - exact).abs() <= (2.0**-8 * exact.abs()).maximum(2.0**-17 * top)).all()
    assert not back[3].any() and high.double().abs().amax(1)[[0, 8]].ge(112).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "experts"), [(1, 4), (5, 7), (19, 3)])
def test_experts_equal_the_sums_in_float64(tokens, experts, form, rng):
    stacks = draw_stacks(experts + 1, 256, 128, rng)
    x = torch.randn(tokens, 256, generator=rng) * 10.0 ** torch.randint(-2, 3, (tokens, 1), generator=rng)
    routing = draw_routing(tokens, experts, 2, rng)

    y, again = (run(x, routing, stacks, FORMS[form]) for _ in range(2))

    expected = experts_by_loop(x, routing, *stacks)
    errors = (y.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 3e-3 and torch.equal(y, again)


def test_rows_beside_one_that_is_no_number_are_as_without_it(rng):
    stacks, routing = draw_stacks(4, 128, 128, rng), draw_routing(4, 3, 2, rng)
    x = torch.randn(4, 128, generator=rng)
    clean = run(x, routing, stacks, SPLIT)
    x[1, 5], x[2, 7] = torch.nan, torch.inf

    y = run(x, routing, stacks, SPLIT)

    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert y[1].isnan().all() and not y[2].isfinite().all()


def test_rows_of_zeros_give_zeros(rng):
    stacks, routing = draw_stacks(4, 128, 128, rng), draw_routing(2, 3, 2, rng)
    assert not run(torch.zeros(2, 128), routing, stacks, SPLIT).any()
