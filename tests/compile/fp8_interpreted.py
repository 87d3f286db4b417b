"""The kernels over weights in FP8 blocks in Triton's interpreter, against products of dequantised weights.

test_fp8_kernels.py runs this file, in a process of its own: the interpreter is chosen when Triton is imported.
"""

from dataclasses import replace

import pytest
import torch
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.kernels import Settings, Tile, compute_experts_kernels, run_moe_layer, run_moe_layer_apart
from fmoe.compile.kernels.fp8 import read_fp8
from fmoe.compile.kernels.linear import LinearSettings, run_linear
from fmoe.functional import RouterConfig, Routing, route_fused
from fmoe.functional.quant import Fp8

# Triton's interpreter asks numpy for scalars of arrays; NaN and infinities are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

D, F = 160, 136  # a whole and a partial block each
MV = Tile(1, 32, 128, 4, 2)
DEEP = Tile(1, 16, 512, 4, 2)
SMALL = Tile(16, 32, 64, 4, 2)
SLOTS = Settings("slots", Tile(0, 16, 64, 4, 2), MV, MV, token_down=True, combine=64)
GROUPED = Settings("grouped", SMALL, SMALL, SMALL, splits=2, combine=64)
PATHS = {
    "slots": SLOTS,
    "deep": replace(SLOTS, gate_up=DEEP, down=replace(DEEP, depth=256)),
    "shallow": replace(SLOTS, gate_up=replace(MV, depth=32), down=replace(MV, depth=64)),
    "fused": replace(SLOTS, gate_up=DEEP, fuse_choice=True),
    "grouped": GROUPED,
    "owners": replace(GROUPED, owners=True, gate_up=replace(SMALL, depth=128)),
    "token": replace(GROUPED, token_down=True, down=DEEP),
    "sorted": Settings("sorted", SMALL, SMALL, replace(SMALL, rows=128, depth=128), combine=64, group=3),
    "large tiles": Settings("sorted", SMALL, Tile(64, 64, 32, 4, 2), Tile(64, 32, 32, 4, 2), programs=5),
}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}


def quantise(*shape, rng, parts=1):
    """Draw values and factors that differ from block to block by far more than any tolerance."""
    *outer, rows, columns = shape
    w = torch.randn(shape, generator=rng).to(torch.float8_e4m3fn)
    blocks = (parts * -(-(rows // parts) // 128), -(-columns // 128))
    return Fp8(w, 2.0 ** torch.randint(-4, 5, (*outer, *blocks), generator=rng) * columns**-0.5)


def dequantise_by_block(fp8, *, parts=1):
    """Follow the definition one block at a time, in float64."""
    *outer, rows, columns = fp8.w.shape
    w = fp8.w.double().reshape(-1, rows, columns).clone()
    scale = fp8.scale.double().reshape(w.shape[0], *fp8.scale.shape[-2:])
    part = rows // parts
    starts = [(p * part + first, min(first + 128, part) - first) for p in range(parts) for first in range(0, part, 128)]
    for e in range(w.shape[0]):
        for i, (row, height) in enumerate(starts):
            for j, column in enumerate(range(0, columns, 128)):
                w[e, row : row + height, column : column + 128] *= scale[e, i, j]
    return w.view(*outer, rows, columns)


def experts_by_loop(x, routing, w_gate_up, w_down):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, (row, ids) in enumerate(zip(routing.weights_TK.tolist(), routing.experts_TK.tolist(), strict=True)):
        for weight, e in zip(row, ids, strict=True):
            gate, up = (w_gate_up[e] @ x[t].double()).chunk(2)
            y[t] += weight * (w_down[e] @ (gate / (1 + torch.exp(-gate)) * up))
    return y


def relative_error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def draw_layer(experts, slots, gate_rows, rng, dtype, *, width=F):
    router = (torch.randn(experts + gate_rows, D, generator=rng) * D**-0.5).to(dtype)
    gate_up = quantise(experts + slots, 2 * width, D, rng=rng, parts=2)
    down = quantise(experts + slots, D, width, rng=rng)
    # Products stay within the range of float16.
    return router, Fp8(gate_up.w, gate_up.scale / 32), Fp8(down.w, down.scale / 32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [(1, 7, 3, 1, 1), (3, 3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_the_layer_equals_the_formula(path, case, dtype, rng):
    tokens, experts, top_k, slots, gate_rows = case
    if tokens > 1 and dtype == torch.float16 and PATHS[path].path == "slots":
        pytest.skip("as with one token; it costs many seconds in the interpreter")
    config = RouterConfig(experts, top_k, renormalize=True)
    router, w_gate_up, w_down = draw_layer(experts, slots, gate_rows, rng, dtype)
    x = torch.randn(tokens, D, generator=rng).to(dtype)

    y = run_moe_layer(x, router, None, w_gate_up, w_down, config, PATHS[path])

    routing = route_fused((x.double() @ router.double().T).to(dtype), None, config, slots=slots)
    exact = experts_by_loop(x, routing, dequantise_by_block(w_gate_up, parts=2), dequantise_by_block(w_down))
    assert y.dtype == dtype
    assert relative_error(y, exact) < TOLERANCE[dtype]


WHOLE = Tile(1, 32, 256, 4, 1)  # a depth from D on: a row at once
ROUTER_ROW = Tile(0, 2, 256, 4, 1)
BY_ROWS = {
    "whole rows": replace(SLOTS, router=ROUTER_ROW, gate_up=WHOLE),
    "two experts at a time": replace(SLOTS, gate_up=WHOLE, down=replace(WHOLE, depth=512)),
    "one and a half": replace(SLOTS, down=Tile(1, 8, 512, 4, 2)),
    "all experts at once": replace(
        SLOTS, router=ROUTER_ROW, gate_up=replace(WHOLE, rows=4), down=Tile(1, 4, 1024, 4, 1)
    ),
    "after a choice of their own": replace(SLOTS, down=Tile(1, 4, 1024, 4, 1), fuse_choice=True),
}


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("width", [256, 384])
@pytest.mark.parametrize("path", BY_ROWS)
def test_products_of_whole_rows_and_of_experts_side_by_side(path, width, quantised, rng):
    config = RouterConfig(4, 2, renormalize=True)
    router, w_gate_up, w_down = draw_layer(4, 1, 1, rng, torch.float32, width=width)
    exact = dequantise_by_block(w_gate_up, parts=2), dequantise_by_block(w_down)
    stacks = (w_gate_up, w_down) if quantised else tuple(w.float() for w in exact)
    x = torch.randn(2, D, generator=rng)

    y = run_moe_layer(x, router, None, *stacks, config, BY_ROWS[path])

    routing = route_fused(x @ router.T, None, config, slots=1)
    assert relative_error(y, experts_by_loop(x, routing, *exact)) < 3e-6


@pytest.mark.parametrize("quantised", ["gate_up", "down"])
@pytest.mark.parametrize("path", ["slots", "grouped", "sorted"])
def test_one_stack_may_be_quantised_alone(path, quantised, rng):
    _, w_gate_up, w_down = draw_layer(3, 0, 0, rng, torch.float32)
    exact = dequantise_by_block(w_gate_up, parts=2), dequantise_by_block(w_down)
    stacks = (w_gate_up, exact[1].float()) if quantised == "gate_up" else (exact[0].float(), w_down)
    x = torch.randn(3, D, generator=rng)
    routing = Routing(torch.rand(3, 2, generator=rng), torch.randint(3, (3, 2), generator=rng, dtype=torch.int32))

    y = compute_experts_kernels(x, routing, *stacks, PATHS[path])

    assert relative_error(y, experts_by_loop(x, routing, *exact)) < 3e-6


def test_shared_slots_apart(rng):
    config = RouterConfig(4, 2, renormalize=True)
    layer = draw_layer(4, 1, 1, rng, torch.float32)
    x = torch.randn(3, D, generator=rng)

    apart = run_moe_layer_apart(x, layer[0], None, *layer[1:], config, SLOTS, beside=False)

    assert relative_error(apart, run_moe_layer(x, layer[0], None, *layer[1:], config, SLOTS).double()) < 1e-5


PRODUCT = LinearSettings(4, 64, 4, 2, 1, dot=False, pdl=False)
DOT = LinearSettings(32, 64, 4, 2, 1, dot=True, pdl=False)
SETTINGS = {
    "product": PRODUCT,
    "product-split": replace(PRODUCT, splits=3),
    "one-row": replace(PRODUCT, rows=1, depth=512),
    "many-rows": replace(PRODUCT, rows=128, depth=256),
    "whole-rows": replace(PRODUCT, depth=512, stages=1),
    "shared-by-programs": replace(PRODUCT, rows=16, depth=512, stages=1, programs=3),
    "dot": DOT,
    "dot-split": replace(DOT, rows=16, depth=128, splits=2),
    "empty-part": replace(DOT, splits=7, depth=128),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rest", [0, 7])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 137, 200), (2, 131, 256), (16, 3, 449)], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_projection_equals_the_product(name, shape, rest, dtype, rng):
    tokens, outputs, hidden = shape
    if dtype == torch.float16:
        tokens, outputs = min(tokens, 3), min(outputs, 9)  # larger ones cost seconds in the interpreter
    x = torch.randn(tokens, hidden, generator=rng).to(dtype)
    fp8 = quantise(outputs, hidden, rng=rng)
    exact = dequantise_by_block(fp8)
    if rest:
        fp8 = fp8._replace(rest_MD=torch.randn(rest, hidden, generator=rng).to(dtype))
        exact = torch.cat((exact, fp8.rest_MD.double()))
    bias = 10 * torch.randn(outputs + rest, generator=rng).to(dtype) if rest else None

    y = run_linear(x, fp8, SETTINGS[name], bias_N=bias)

    expected = (x.double()[:, None] * exact).sum(-1) + (0 if bias is None else bias.double())
    assert (y.shape, y.dtype) == ((tokens, outputs + rest), dtype)
    assert relative_error(y, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("rest", [0, 5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "parts"), [((3, 2 * F, D), 2), ((2, D, F), 1), ((130, 7), 1)])
def test_dequantised_at_once(shape, parts, dtype, rest, rng):
    fp8 = quantise(*shape, rng=rng, parts=parts)
    exact = dequantise_by_block(fp8, parts=parts)
    if rest and len(shape) == 2:
        fp8 = fp8._replace(rest_MD=torch.randn(rest, shape[1], generator=rng).to(dtype))
        exact = torch.cat((exact, fp8.rest_MD.double()))

    y = read_fp8(fp8, dtype, parts=parts)

    # Exact but for one rounding: the factors are float32 numbers, of which the product is rounded to float32 first.
    torch.testing.assert_close(y, exact.to(dtype), rtol=1e-3 if dtype == torch.float16 else 2e-7, atol=1e-7)
    w = torch.randn(3, 2)
    assert read_fp8(w, dtype) is w
