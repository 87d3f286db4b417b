"""Expert kernels for many tokens: pairs sorted by expert, two grouped products over tiles, and the weighted sum.

Letters: T tokens, D hidden, E stacked experts (shared slots last), K columns of the routing, F expert width, P = 2F,
N = T * K pairs, X tiles.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fmoe.functional.quant import Fp8, Weight, weight_shape
from fmoe.functional.routing import Routing

from ..settings import Settings, Tile
from .fp8 import split_weight
from .launch import cdiv, launch_options, wait_for_previous
from .moe_decode import combine
from .sort import Tiles, sort_pairs
from .tiles import down_tile, gate_up_tile


@triton.jit
def locate_tile(tile, count, NB: tl.constexpr, GROUP: tl.constexpr):
    """Row tile and weight block of a tile number: GROUP row tiles together for each weight block."""
    group = tile // (GROUP * NB)
    first = group * GROUP
    size = tl.minimum(count - first, GROUP)
    inner = tile % (GROUP * NB)
    return first + inner % size, inner // size


@triton.jit
def gate_up_sorted(
    x, w, s, h, order, offsets, experts, starts, count, K, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    DESCRIPTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of h, rows in sorted order, rows of x gathered; the grid's programs share the tiles."""
    blocks: tl.constexpr = (F + BN - 1) // BN
    wait_for_previous(PDL)
    total = tl.load(count)
    for tile in tl.range(tl.program_id(0), total * blocks, tl.num_programs(0)):
        i, pn = locate_tile(tile, total, blocks, GROUP)
        e = tl.load(experts + i)
        o_m = tl.load(starts + i) + tl.arange(0, BM)
        inside = o_m < tl.load(offsets + e)
        source = tl.load(order + o_m, mask=inside, other=0) // K
        gate_up_tile(x, w, s, h, source, o_m, inside, e, pn, D, F, BM, BN, BK, STAGES, SWAP, DESCRIPTOR)


@triton.jit
def down_sorted(
    h, w, s, y, order, offsets, experts, starts, count, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    DESCRIPTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of the pairs' outputs, written in the order of the routing.

    With descriptors, the loops over tiles and depth become one, so that a tile's first loads run under the stores of
    the tile before.
    """
    blocks: tl.constexpr = (D + BN - 1) // BN
    wait_for_previous(PDL)
    total = tl.load(count)
    for tile in tl.range(tl.program_id(0), total * blocks, tl.num_programs(0), flatten=DESCRIPTOR):
        i, pn = locate_tile(tile, total, blocks, GROUP)
        e = tl.load(experts + i)
        start = tl.load(starts + i)
        o_m = start + tl.arange(0, BM)
        inside = o_m < tl.load(offsets + e)
        target = tl.load(order + o_m, mask=inside, other=0)
        if DESCRIPTOR:
            down_tile(h, w, s, y, start, target, inside, e, pn, D, F, BM, BN, BK, STAGES, SWAP, True)
        else:
            down_tile(h, w, s, y, o_m, target, inside, e, pn, D, F, BM, BN, BK, STAGES, SWAP, False)


def _describable(w: Tensor, tile: Tile, settings: Settings) -> bool:
    """Say whether descriptors are asked for, no block reaches past an expert's matrix, and it is not FP8."""
    rows, depth = w.shape[-2:]
    return (
        settings.descriptors
        and w.element_size() > 1
        and not (rows % tile.rows or depth % tile.depth or depth * w.element_size() % 16)
    )


def _describe(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _grid(tiles: Tiles, blocks: int, settings: Settings) -> tuple[int]:
    every = tiles.experts_X.shape[0] * blocks
    return (min(settings.programs, every) if settings.programs else every,)


def compute_experts_sorted(
    x_TD: Tensor, routing: Routing, w_gate_up_EPD: Weight, w_down_EDF: Weight, settings: Settings, /
) -> Tensor:
    """Sort, two grouped products, weighted sum: six launches; the formula of ``compute_experts_grouped``."""
    (tokens, columns), (experts, hidden, width) = routing.experts_TK.shape, weight_shape(w_down_EDF)
    pairs, block = tokens * columns, settings.gate_up.tokens
    tiles = sort_pairs(routing.experts_TK, num_experts=experts, block=block, pdl=settings.pdl)
    options = launch_options(settings.pdl)
    # Of FP8 the weights come first: converted in registers, they are multiplied from there.
    swap = block < 64 or isinstance(w_gate_up_EPD, Fp8)

    tile = settings.gate_up
    w, s = split_weight(w_gate_up_EPD)
    weights: Any = w.view(-1, width, hidden)
    if described := _describable(weights, tile, settings):
        weights = _describe(weights, 2, tile.rows, tile.depth)
    h_NF = torch.empty(pairs, width, dtype=x_TD.dtype, device=x_TD.device)
    gate_up_sorted[_grid(tiles, cdiv(width, tile.rows), settings)](
        x_TD, weights, s, h_NF, *tiles, columns, D=hidden, F=width, BM=block, BN=tile.rows, BK=tile.depth,
        STAGES=tile.stages, GROUP=settings.group, SWAP=swap, DESCRIPTOR=described, PDL=settings.pdl,
        num_warps=tile.warps, **options,
    )  # fmt: skip

    tile = settings.down
    w, s = split_weight(w_down_EDF)
    weights, h = w, h_NF
    if described := _describable(w, tile, settings):
        weights, h = _describe(w.view(-1, width), tile.rows, tile.depth), _describe(h_NF, block, tile.depth)
    pairs_ND = torch.empty(pairs, hidden, dtype=x_TD.dtype, device=x_TD.device)
    down_sorted[_grid(tiles, cdiv(hidden, tile.rows), settings)](
        h, weights, s, pairs_ND, *tiles, D=hidden, F=width, BM=block, BN=tile.rows, BK=tile.depth,
        STAGES=tile.stages, GROUP=settings.group, SWAP=swap, DESCRIPTOR=described, PDL=settings.pdl,
        num_warps=tile.warps, **options,
    )  # fmt: skip
    return combine(pairs_ND, routing.weights_TK, settings)
