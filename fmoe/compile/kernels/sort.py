"""Sort pairs by expert on the device: a stable counting sort, and the tiles of a grouped product.

Letters: N pairs, E stacked experts (shared slots last), B blocks of pairs, X an upper bound of the number of tiles.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch_options, next_power_of_2, wait_for_previous

BLOCK = 128  # pairs of one block
EXPERTS = 8  # experts whose counts one program sums
LISTED = 4  # tiles that one program lists


class Tiles(NamedTuple):
    """Pairs sorted by expert, and the row tiles that cover them."""

    order_N: Tensor  # int32, the pair at each place
    offsets_E: Tensor  # int32, inclusive end of each expert's pairs
    experts_X: Tensor  # int32, expert of each tile
    starts_X: Tensor  # int32, first place of each tile
    used: Tensor  # int32 [1], tiles in use


@triton.jit
def count_block(ids, counts, ranks, N, EP: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, PDL: tl.constexpr):
    """Count the experts of one block, and each pair's rank among the block's pairs of its expert; grid (B,)."""
    b = tl.program_id(0)
    o_n = tl.arange(0, BN)
    n = b * BN + o_n
    row = counts + b.to(tl.int64) * EP
    wait_for_previous(PDL)
    tl.store(row + tl.arange(0, EP), tl.zeros((EP,), tl.int32))
    e = tl.load(ids + n, mask=n < N, other=-1)
    # Sums run down the columns: a thread adds its own values, and no lanes have to exchange theirs.
    earlier = tl.zeros((BI, BN), tl.int32)
    equal = tl.zeros((BI, BN), tl.int32)
    for first in range(0, BN, BI):
        o_i = first + tl.arange(0, BI)
        other = tl.load(ids + b * BN + o_i, mask=b * BN + o_i < N, other=-1)
        same = other[:, None] == e[None, :]
        equal += same.to(tl.int32)
        earlier += (same & (o_i[:, None] < o_n[None, :])).to(tl.int32)
    tl.store(ranks + n, tl.sum(earlier, 0), mask=n < N)
    tl.debug_barrier()  # the zeros are in place
    tl.store(row + e, tl.sum(equal, 0), mask=n < N)


@triton.jit
def sum_blocks(counts, totals, B, EP: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr):
    """Replace BE experts' counts by their sums over earlier blocks; grid (EP / BE,)."""
    o_e = tl.program_id(0) * BE + tl.arange(0, BE)
    wait_for_previous(PDL)
    total = tl.zeros((BE,), tl.int32)
    for b in range(0, B, BB):
        o_b = b + tl.arange(0, BB)
        at = counts + o_b[:, None].to(tl.int64) * EP + o_e[None, :]
        v = tl.load(at, mask=o_b[:, None] < B, other=0)
        tl.store(at, total[None, :] + tl.cumsum(v, 0) - v, mask=o_b[:, None] < B)
        total += tl.sum(v, 0)
    tl.store(totals + o_e, total)


@triton.jit
def place_pairs(ids, counts, ranks, totals, order, N, b, EP: tl.constexpr, BN: tl.constexpr):
    """Write block b's pairs to their places: the expert's start, its pairs in earlier blocks, and in this one."""
    v = tl.load(totals + tl.arange(0, EP))
    n = b * BN + tl.arange(0, BN)
    e = tl.load(ids + n, mask=n < N, other=0)
    before = tl.load(counts + b.to(tl.int64) * EP + e, mask=n < N, other=0) + tl.load(ranks + n, mask=n < N, other=0)
    tl.store(order + tl.gather(tl.cumsum(v, 0) - v, e, 0) + before, n, mask=n < N)


@triton.jit
def list_tiles(
    totals, offsets, experts, starts, count, part, X, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BX: tl.constexpr,
):  # fmt: skip
    """List BX tiles: tile i belongs to the first expert with more than i tiles up to its own."""
    o_e = tl.arange(0, EP)
    v = tl.load(totals + o_e)
    ends = tl.cumsum(v, 0)
    tiles = (v + BM - 1) // BM
    through = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    if part == 0:
        tl.store(offsets + o_e, ends, mask=o_e < E)
        tl.store(count, total)
    i = part * BX + tl.arange(0, BX)
    e = tl.sum((through[None, :] <= i[:, None]).to(tl.int32), 1)
    e = tl.minimum(e, E - 1)
    start = tl.gather(ends - v, e, 0) + (i - tl.gather(through - tiles, e, 0)) * BM
    tl.store(experts + i, e, mask=i < X)
    tl.store(starts + i, start, mask=i < X)


@triton.jit
def place_and_list(
    ids, counts, ranks, totals, order, offsets, experts, starts, count, N, B, X, E: tl.constexpr, EP: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Place one block's pairs, or list BX tiles; grid (B + X / BX,)."""
    p = tl.program_id(0)
    wait_for_previous(PDL)
    if p < B:
        place_pairs(ids, counts, ranks, totals, order, N, p, EP, BN)
    else:
        list_tiles(totals, offsets, experts, starts, count, p - B, X, E, EP, BM, BX)


def sort_pairs(experts_TK: Tensor, /, *, num_experts: int, block: int, pdl: bool = False) -> Tiles:
    """Sort all pairs by expert, stably, and cut each expert's into tiles of ``block`` places; three launches.

    Args:
        experts_TK: int32 ids in 0..E-1, at least one.
        num_experts: E.
        block: places of a tile.
        pdl: as in ``Settings``.

    Returns:
        Tiles; nothing of it is read by the host.
    """
    pairs = experts_TK.numel()
    padded = next_power_of_2(max(num_experts, EXPERTS))
    blocks = cdiv(pairs, BLOCK)
    bound = min(cdiv(pairs, block) + num_experts, pairs)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts_TK.device)

    counts, ranks, totals = empty(blocks, padded), empty(pairs), empty(padded)
    tiles = Tiles(empty(pairs), empty(num_experts), empty(bound), empty(bound), empty(1))
    options = launch_options(pdl)
    count_block[(blocks,)](
        experts_TK, counts, ranks, pairs, EP=padded, BN=BLOCK, BI=32, PDL=pdl, num_warps=4, **options
    )
    sum_blocks[(padded // EXPERTS,)](
        counts, totals, blocks, EP=padded, BE=EXPERTS, BB=128 if blocks <= 128 else 512, PDL=pdl, num_warps=8, **options
    )
    place_and_list[(blocks + cdiv(bound, LISTED),)](
        experts_TK, counts, ranks, totals, *tiles, pairs, blocks, bound, E=num_experts, EP=padded, BN=BLOCK, BM=block,
        BX=LISTED, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
    return tiles
