"""Expert kernels for many tokens, both operands in FP8: x and h are quantised, a row's 128 columns with one factor.

Each step of 128 columns is a product in FP8, which its factors multiply before it is added to sums in float32. Against
float64 over the dequantised weights a layer of normally distributed rows is off by 4.3 %: rounding to four bits makes
2.5 % a product. Against sums over the same rounded rows it is within 3e-3 where the sums are those of float32; less
exact ones put some values of h on the next step of FP8.

Letters: T tokens, D hidden, E stacked experts (shared slots last), K columns of the routing, F expert width, P = 2F,
N = T * K pairs, X tiles; BN is the 128 columns of a block of factors.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fmoe.functional.quant import BLOCK, FP8, Fp8, Weight
from fmoe.functional.routing import Routing

from ..settings import Settings, Tile
from .fp8 import can_quantize
from .launch import cdiv, launch_options, wait_for_previous
from .moe_decode import combine
from .moe_prefill import compute_experts_sorted, locate_tile
from .quantize import quantize_rows, quantize_values
from .sort import sort_pairs
from .tiles import store_rows


@triton.jit
def add_products(rows, a, b, factors, of_a, of_b, left, right):
    """Add the products of rows [BM, 128] with two blocks of weights, times their factors."""
    left += tl.dot(rows, a.T) * (factors * of_a)[:, None]
    right += tl.dot(rows, b.T) * (factors * of_b)[:, None]
    return left, right


@triton.jit
def gate_up_quantized(
    x, sx, w, s, h, sh, order, offsets, experts, starts, count, K, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of 128 columns of h in FP8 and their factors, rows in sorted order; w is a descriptor of [E P, D]."""
    blocks: tl.constexpr = F // BN
    depth: tl.constexpr = D // BN
    o_k = tl.arange(0, BN)
    wait_for_previous(PDL)
    total = tl.load(count)
    for tile in tl.range(tl.program_id(0), total * blocks, tl.num_programs(0)):
        i, pn = locate_tile(tile, total, blocks, GROUP)
        e = tl.load(experts + i)
        o_m = tl.load(starts + i) + tl.arange(0, BM)
        inside = o_m < tl.load(offsets + e)
        source = tl.load(order + o_m, mask=inside, other=0) // K
        at = x + source.to(tl.int64)[:, None] * D + o_k[None, :]
        of_rows = sx + source * depth
        of_gate = s + (e * (2 * blocks) + pn) * depth
        row = e * (2 * F) + pn * BN
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, depth, num_stages=STAGES):
            factors, of_g, of_u = tl.load(of_rows + k), tl.load(of_gate + k), tl.load(of_gate + blocks * depth + k)
            rows = tl.load(at + k * BN, mask=inside[:, None], other=0.0)
            a, b = w.load([row, k * BN]), w.load([row + F, k * BN])
            gate, up = add_products(rows, a, b, factors, of_g, of_u, gate, up)
        v, factor = quantize_values(gate * tl.sigmoid(gate) * up, h.dtype.element_ty)
        # Read anew: kept through the loop, it would take the last registers.
        o_m = tl.load(starts + i, volatile=True) + tl.arange(0, BM)
        inside = o_m < tl.load(offsets + e, volatile=True)
        tl.store(sh + o_m * blocks + pn, factor, mask=inside)
        tl.store(h + o_m.to(tl.int64)[:, None] * F + pn * BN + o_k[None, :], v, mask=inside[:, None])


@triton.jit
def down_quantized(
    h, sh, w, s, y, order, offsets, experts, starts, count, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of 256 columns of the pairs' outputs, in the order of the routing; h and w are descriptors."""
    blocks: tl.constexpr = (D + 2 * BN - 1) // (2 * BN)
    parts: tl.constexpr = D // BN
    depth: tl.constexpr = F // BN
    wait_for_previous(PDL)
    total = tl.load(count)
    for tile in tl.range(tl.program_id(0), total * blocks, tl.num_programs(0)):
        i, pn = locate_tile(tile, total, blocks, GROUP)
        e = tl.load(experts + i)
        start = tl.load(starts + i)
        of_rows = sh + (start + tl.arange(0, BM)) * depth
        within = start + tl.arange(0, BM) < tl.load(offsets + e)
        row = e * D + pn * (2 * BN)
        of_left = s + (e * parts + 2 * pn) * depth
        # The last block of an odd number of them has no right half: what it reads is never stored.
        of_right = s + (e * parts + tl.minimum(2 * pn + 1, parts - 1)) * depth
        left = tl.zeros((BM, BN), tl.float32)
        right = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, depth, num_stages=STAGES):
            factors = tl.load(of_rows + k, mask=within, other=0.0)
            of_l, of_r = tl.load(of_left + k), tl.load(of_right + k)
            a, b = w.load([row, k * BN]), w.load([row + BN, k * BN])
            left, right = add_products(h.load([start, k * BN]), a, b, factors, of_l, of_r, left, right)
        o_m = tl.load(starts + i, volatile=True) + tl.arange(0, BM)
        inside = o_m < tl.load(offsets + e, volatile=True)
        target = tl.load(order + o_m, mask=inside, other=0)
        at = y + target.to(tl.int64)[:, None] * D + pn * (2 * BN)
        store_rows(at, left, inside, pn * (2 * BN), D)
        store_rows(at + BN, right, inside, pn * (2 * BN) + BN, D)


def describe_blocks(tensor: Tensor, rows: int, /) -> TensorDescriptor:
    """Describe a matrix of contiguous rows, read ``rows`` and 128 columns at a time."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, BLOCK])


def compute_experts_quantized(
    x_TD: Tensor, routing: Routing, w_gate_up: Fp8, w_down: Fp8, settings: Settings, /
) -> Tensor:
    """Quantise, sort, two grouped products in FP8, weighted sum; seven launches.

    The formula of ``compute_experts_grouped`` with x and ``silu(g) u`` through ``quantize_rows``.

    Args:
        x_TD: rows.
        routing: of K columns.
        w_gate_up: [E, P, D] in FP8 blocks, D and F whole blocks.
        w_down: [E, D, F] in FP8 blocks.
        settings: of the blocks, ``tokens`` (64 or more), ``warps`` and ``stages`` are read.

    Returns:
        A tensor like x.
    """
    (tokens, columns), (experts, hidden, width) = routing.experts_TK.shape, w_down.w.shape
    pairs, block, pdl = tokens * columns, settings.gate_up.tokens, settings.pdl
    q_TD, x_scale = quantize_rows(x_TD, pdl=pdl)
    tiles = sort_pairs(routing.experts_TK, num_experts=experts, block=block, pdl=pdl)

    def grid(blocks: int) -> tuple[int]:
        every = tiles.experts_X.shape[0] * blocks
        return (min(settings.programs, every) if settings.programs else every,)

    h_NF = torch.empty(pairs, width, dtype=FP8, device=x_TD.device)
    h_scale = torch.empty(pairs, width // BLOCK, dtype=torch.float32, device=x_TD.device)
    shape = {"D": hidden, "F": width, "BM": block, "BN": BLOCK, "GROUP": settings.group, "PDL": pdl}
    options, tile = launch_options(pdl), settings.gate_up
    gate_up_quantized[grid(width // BLOCK)](
        q_TD, x_scale, describe_blocks(w_gate_up.w.view(-1, hidden), BLOCK), w_gate_up.scale, h_NF, h_scale, *tiles,
        columns, **shape, STAGES=tile.stages, num_warps=tile.warps, **options,
    )  # fmt: skip
    pairs_ND, tile = torch.empty(pairs, hidden, dtype=x_TD.dtype, device=x_TD.device), settings.down
    down_quantized[grid(cdiv(hidden, 2 * BLOCK))](
        describe_blocks(h_NF, block), h_scale, describe_blocks(w_down.w.view(-1, width), BLOCK), w_down.scale,
        pairs_ND, *tiles, **shape, STAGES=tile.stages, num_warps=tile.warps, **options,
    )  # fmt: skip
    return combine(pairs_ND, routing.weights_TK, settings)


def compute_experts_tiled(
    x_TD: Tensor, routing: Routing, w_gate_up_EPD: Weight, w_down_EDF: Weight, settings: Settings, /
) -> Tensor:
    """Run ``compute_experts_quantized`` where the path says so and can, else ``compute_experts_sorted``."""
    if settings.path != "quantized":
        return compute_experts_sorted(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
    if isinstance(w_gate_up_EPD, Fp8) and isinstance(w_down_EDF, Fp8) and can_quantize(x_TD, w_gate_up_EPD, w_down_EDF):
        return compute_experts_quantized(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
    # Wider values take smaller blocks.
    block = min(settings.gate_up.tokens, 64)
    tile = Tile(block, 64, 32, 4, 1 if torch.version.hip else 3)
    plain = replace(settings, path="sorted", gate_up=tile, down=tile, programs=0)
    return compute_experts_sorted(x_TD, routing, w_gate_up_EPD, w_down_EDF, plain)
