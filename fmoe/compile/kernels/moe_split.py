"""Grouped expert kernels over weights in FP8 blocks, which matrix instructions multiply as they are.

Rows in bfloat16 become sums of two values of FP8: the nearest one to the row times a power of two, and what that is off
by. Together they carry the eight digits of bfloat16, down to 2^-18 of the row's largest value. So no weight is
converted, and the time is that of reading them.

Letters: T tokens, D hidden, E routed experts, K routed experts per token, S shared slots (ids E.., in every row),
F expert width, N = T * (K + S) pairs, B blocks of columns with a power of two of their own.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import FP8, Fp8, weight_shape
from fmoe.functional.routing import Routing

from ..settings import Settings
from .fp8 import SIDE, factors_at, split_weight
from .launch import LINE, fetch_ahead, launch_options, wait_for_previous
from .quantize import power_of, split_values
from .route import Table
from .tiles import load_matrix, load_rows, store_rows

AHEAD = 2  # lines of each row that are asked for before x is there


class SplitRows(NamedTuple):
    """Rows as sums of two values of FP8, times a power of two for each row or each block of its columns."""

    high_ND: Tensor
    low_ND: Tensor
    power_NB: Tensor  # float32; B is 1 for a power of whole rows


@triton.jit
def make_pairs(v):
    """Give v, float32, as sums of two values of FP8 times a power of two, one for all along the first axis.

    With NaN or infinity among these, which FP8 does not hold, the power is NaN.
    """
    by, back = power_of(tl.max(tl.abs(v), 0))
    high, low = split_values(v, by)
    return high, low, back + tl.sum(v * 0.0, 0)


@triton.jit
def store_pairs(v, high, low, power, row, o_d, D: tl.constexpr):
    """Store a row of D values, v in float32, as ``make_pairs`` gives it; v is 0 from D on."""
    h, r, back = make_pairs(v)
    tl.store(high + row * D + o_d, h, mask=o_d < D)
    tl.store(low + row * D + o_d, r, mask=o_d < D)
    tl.store(power + row, back)


@triton.jit
def split_rows(x, high, low, power, D: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    """One row of [N, D]; grid (N,)."""
    n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    wait_for_previous(PDL)
    v = tl.load(x + n * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    store_pairs(v, high, low, power, n, o_d, D)


@triton.jit
def find_rows(
    ids, counts, ranks, p, T, E: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, OWNERS: tl.constexpr
):
    """Expert and range of its rows for program row p: first the shared slots tile by tile, then the routed experts."""
    tiles = tl.cdiv(T, BM)
    e = E + p // tiles
    first = (p % tiles) * BM
    last = tl.minimum(first + BM, T)
    q = p - S * tiles
    if q >= 0:
        e = q
        owner = q >= 0
        if OWNERS:
            e = tl.load(ids + q // K * (K + S) + q % K)
            owner = tl.load(ranks + q) == 0
        first = 0 * q
        last = tl.where(owner, tl.load(counts + e), 0)
    return e, first, last


@triton.jit
def multiply_split(a, p, q, row, k, o_k, inside, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Products [BN, BM] of weights a [BN, BK] with columns k + o_k of rows split into p and q."""
    high = load_rows(p, row, k, o_k, inside, COLUMNS, EVEN)
    low = load_rows(q, row, k, o_k, inside, COLUMNS, EVEN)
    v = tl.dot(a, high.T)
    return tl.dot(a, low.T, v)


@triton.jit
def gate_up_split(
    p, q, power, w, s, h, h_low, h_power, ids, counts, rows, ranks, T, D: tl.constexpr, F: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, OWNERS: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one expert, BN gate rows and as many up rows behind them; grid (F / BN, shared tiles + experts).

    h holds the rows' higher values, with a power for each BN columns; plain rows where there is no place for the lower.
    EARLY: the table is older than the launch in front, so that weights are asked for before x is there.
    """
    if not EARLY:
        wait_for_previous(PDL)
    e, first, last = find_rows(ids, counts, ranks, tl.program_id(1), T, E, K, S, BM, OWNERS)
    pn = tl.program_id(0)
    o_k = tl.arange(0, BK)
    o_r = tl.arange(0, 2 * BN)
    is_up = o_r >= BN
    o_n = pn * BN + o_r % BN
    # Rows past the last repeat it: a load without a mask, and no store.
    o_w = tl.minimum(o_n, F - 1) + tl.where(is_up, F, 0)
    base = w + e.to(tl.int64) * (2 * F * D)
    if EARLY:
        if PDL and (first < last):
            fetch_ahead(base, o_w, 0, D, LINE, LINES, LINE)
        wait_for_previous(PDL)
    even: tl.constexpr = D % BK == 0
    gate_factors = factors_at(s, e, 0, pn * BN, F, D, 2)
    up_factors = factors_at(s, e, 1, pn * BN, F, D, 2)
    for m in range(first, last, BM):
        o_m = m + tl.arange(0, BM)
        inside = o_m < last
        n = tl.load(rows + e.to(tl.int64) * T + o_m, mask=inside, other=0)
        t = n // (K + S)
        both = tl.zeros((2 * BN, BM), tl.float32)
        for k in tl.range(0, D, BK, num_stages=STAGES):
            a = load_matrix(base, o_w, k + o_k, 2 * F, D, even)
            factor = tl.where(is_up, tl.load(up_factors + k // SIDE), tl.load(gate_factors + k // SIDE))
            both += multiply_split(a, p, q, t, k, o_k, inside, D, even) * factor[:, None]
        both *= tl.load(power + t, mask=inside, other=0.0)[None, :]
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, BN, BM)), (1, 2, 0)))
        y = gate * tl.sigmoid(gate) * up
        o_f = pn * BN + tl.arange(0, BN)
        at = n.to(tl.int64)[None, :] * F + o_f[:, None]
        stored = inside[None, :] & (o_f[:, None] < F)
        if h_low is None:
            tl.store(h + at, y.to(h.dtype.element_ty), mask=stored)
        else:
            # Not rounded first: a pair has more digits than bfloat16.
            high, low, back = make_pairs(y)
            tl.store(h + at, high, mask=stored)
            tl.store(h_low + at, low, mask=stored)
            tl.store(h_power + n * ((F + BN - 1) // BN) + pn, back, mask=inside)


@triton.jit
def down_split(
    p, q, power, w, s, y, ids, counts, rows, ranks, T, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr, OWNERS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one expert and BLOCKS times BN of its D rows; y holds one row for each pair, not weighted.

    The rows have a power for each BP columns, whole steps of BK. The table is older than the launch in front. One loop
    leads over blocks and depth, so that the first loads of a block run under the products of the one before.
    """
    e, first, last = find_rows(ids, counts, ranks, tl.program_id(1), T, E, K, S, BM, OWNERS)
    o_k = tl.arange(0, BK)
    o_n = tl.arange(0, BN)
    begin = tl.program_id(0) * (BLOCKS * BN)
    base = w + e.to(tl.int64) * (D * F)
    if PDL and (first < last):
        fetch_ahead(base, tl.minimum(begin + o_n, D - 1), 0, F, LINE, LINES, LINE)
    wait_for_previous(PDL)
    steps: tl.constexpr = (F + BK - 1) // BK
    even: tl.constexpr = F % BK == 0
    for m in range(first, last, BM):
        o_m = m + tl.arange(0, BM)
        inside = o_m < last
        n = tl.load(rows + e.to(tl.int64) * T + o_m, mask=inside, other=0)
        powers = power + n * ((F + BP - 1) // BP)
        at = y + n.to(tl.int64)[:, None] * D
        acc = tl.zeros((BN, BM), tl.float32)
        for i in tl.range(0, BLOCKS * steps, num_stages=STAGES):
            row = begin + i // steps * BN
            k = i % steps * BK
            a = load_matrix(base, tl.minimum(row + o_n, D - 1), k + o_k, D, F, even)
            factor = tl.load(factors_at(s, e, 0, tl.minimum(row, D - 1), D, F, 1) + k // SIDE)
            back = tl.load(powers + k // BP, mask=inside, other=0.0) * factor
            acc += multiply_split(a, p, q, n, k, o_k, inside, F, even) * back[None, :]
            if i % steps == steps - 1:
                store_rows(at + row, acc.T, inside, row, D)
                acc = tl.zeros((BN, BM), tl.float32)


def empty_split(rows: int, columns: int, /, *, blocks: int, device: torch.device) -> SplitRows:
    """Allocate rows with a power for each of B ``blocks`` of their columns."""
    return SplitRows(
        torch.empty(rows, columns, dtype=FP8, device=device),
        torch.empty(rows, columns, dtype=FP8, device=device),
        torch.empty(rows, blocks, dtype=torch.float32, device=device),
    )


def split_into_pairs(x_ND: Tensor, settings: Settings, /) -> SplitRows:
    """Give each row as a sum of two values of FP8 times a power of two.

    Args:
        x_ND: bfloat16 or another dtype.
        settings: ``pdl`` is read.
    """
    rows, size = x_ND.shape
    split = empty_split(rows, size, blocks=1, device=x_ND.device)
    block = triton.next_power_of_2(size)
    split_rows[(rows,)](
        x_ND, *split, D=size, BD=block, PDL=settings.pdl, num_warps=min(max(block // 512, 1), 8),
        **launch_options(settings.pdl),
    )  # fmt: skip
    return split


def compute_gate_up_split(
    x: SplitRows,
    routing: Routing,
    table: Table,
    w_gate_up_EPD: Fp8,
    settings: Settings,
    /,
    *,
    dtype: torch.dtype,
    early: bool,
) -> SplitRows | Tensor:
    """Compute h [N, F], gate and up of each pair, split with a power for each ``gate_up.rows`` columns.

    Args:
        x: [T, D], with a power for each row.
        routing, table: of the pairs.
        w_gate_up_EPD: gate and up rows of all experts.
        settings: ``gate_up``, ``token_down``, ``owners`` and ``pdl`` are read.
        dtype: of the plain h that there is with ``token_down``.
        early: the table is older than the launch in front, where launches are dependent.
    """
    (tokens, columns), hidden, tile = routing.experts_TK.shape, x.high_ND.shape[1], settings.gate_up
    experts, top_k, width = table.counts_E.shape[0], table.ranks_TK.shape[1], weight_shape(w_gate_up_EPD)[1] // 2
    slots, blocks, device = columns - top_k, triton.cdiv(width, tile.rows), x.high_ND.device
    h: SplitRows | Tensor
    if settings.token_down:
        h = torch.empty(tokens * columns, width, dtype=dtype, device=device)
    else:
        h = empty_split(tokens * columns, width, blocks=blocks, device=device)
    programs = tokens * top_k if settings.owners else experts
    gate_up_split[(blocks, slots * triton.cdiv(tokens, tile.tokens) + programs)](
        *x, *split_weight(w_gate_up_EPD), *((h, None, None) if isinstance(h, Tensor) else h), routing.experts_TK,
        *table, tokens, D=hidden, F=width, E=experts, K=top_k, S=slots, BM=tile.tokens, BN=tile.rows, BK=tile.depth,
        STAGES=tile.stages, OWNERS=settings.owners, EARLY=early, LINES=AHEAD, LINE=LINE, PDL=settings.pdl,
        num_warps=tile.warps, **launch_options(settings.pdl),
    )  # fmt: skip
    return h


def compute_down_split(
    h: SplitRows, routing: Routing, table: Table, w_down_EDF: Fp8, settings: Settings, /, *, dtype: torch.dtype
) -> Tensor:
    """Compute the down product of each pair, not weighted, [N, D].

    Args:
        h: of the pairs, as ``compute_gate_up_split`` gives it.
        routing, table: of the pairs.
        w_down_EDF: down rows of all experts.
        settings: ``gate_up.rows``, ``down``, ``programs``, ``owners`` and ``pdl`` are read.
        dtype: of the result.
    """
    (tokens, columns), (_, hidden, width), tile = routing.experts_TK.shape, weight_shape(w_down_EDF), settings.down
    experts, top_k = table.counts_E.shape[0], table.ranks_TK.shape[1]
    slots, blocks = columns - top_k, triton.cdiv(hidden, tile.rows)
    repeated = triton.cdiv(blocks, settings.programs or blocks)
    programs = tokens * top_k if settings.owners else experts
    pairs_ND = torch.empty(tokens * columns, hidden, dtype=dtype, device=h.high_ND.device)
    down_split[(triton.cdiv(blocks, repeated), slots * triton.cdiv(tokens, tile.tokens) + programs)](
        *h, *split_weight(w_down_EDF), pairs_ND, routing.experts_TK, *table, tokens, D=hidden, F=width, E=experts,
        K=top_k, S=slots, BM=tile.tokens, BN=tile.rows, BK=tile.depth, BP=settings.gate_up.rows, BLOCKS=repeated,
        STAGES=tile.stages, OWNERS=settings.owners,
        LINES=min(triton.next_power_of_2(triton.cdiv(width, LINE)), 8), LINE=LINE, PDL=settings.pdl,
        num_warps=tile.warps, **launch_options(settings.pdl),
    )  # fmt: skip
    return pairs_ND
