"""Grouped expert kernels over weights in FP8 blocks, which matrix instructions multiply as they are.

Rows in bfloat16 become sums of two values of FP8, p and q, times a power of two (split_rows.py). So no weight is
converted, and the time is that of reading them.

Letters: T tokens, D hidden, E routed experts, K routed experts per token, S shared slots (ids E.., in every row),
F expert width, N = T * (K + S) pairs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import Fp8, weight_shape
from fmoe.functional.routing import Routing

from ..settings import Settings
from .fp8 import SIDE, factors_at, split_weight
from .launch import LINE, cdiv, fetch_ahead, launch_options, next_power_of_2, wait_for_previous
from .route import Table
from .split_rows import split_into_pairs
from .tiles import load_matrix, load_rows, store_rows

AHEAD = 2  # lines of each row that are asked for before x is there


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
    p, q, power, w, s, h, ids, counts, rows, ranks, T, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    OWNERS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one expert, BN gate rows and as many up rows behind them; grid (F / BN, shared tiles + experts).

    The table is older than the launch in front.
    """
    e, first, last = find_rows(ids, counts, ranks, tl.program_id(1), T, E, K, S, BM, OWNERS)
    pn = tl.program_id(0)
    o_k = tl.arange(0, BK)
    o_r = tl.arange(0, 2 * BN)
    is_up = o_r >= BN
    o_n = pn * BN + o_r % BN
    # Rows past the last repeat it: a load without a mask, and no store.
    o_w = tl.minimum(o_n, F - 1) + tl.where(is_up, F, 0)
    base = w + e.to(tl.int64) * (2 * F * D)
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
        at = h + n.to(tl.int64)[None, :] * F + o_f[:, None]
        tl.store(at, y.to(h.dtype.element_ty), mask=inside[None, :] & (o_f[:, None] < F))


@triton.jit
def down_split(
    p, q, power, w, s, y, ids, counts, rows, ranks, T, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, OWNERS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one expert and BLOCKS times BN of its D rows; y holds one row for each pair, not weighted.

    One loop leads over blocks and depth, so that the first loads of a block run under the products of the one before.
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
        back = tl.load(power + n, mask=inside, other=0.0)
        at = y + n.to(tl.int64)[:, None] * D
        acc = tl.zeros((BN, BM), tl.float32)
        for i in tl.range(0, BLOCKS * steps, num_stages=STAGES):
            row = begin + i // steps * BN
            k = i % steps * BK
            a = load_matrix(base, tl.minimum(row + o_n, D - 1), k + o_k, D, F, even)
            factor = tl.load(factors_at(s, e, 0, tl.minimum(row, D - 1), D, F, 1) + k // SIDE)
            acc += multiply_split(a, p, q, n, k, o_k, inside, F, even) * factor
            if i % steps == steps - 1:
                store_rows(at + row, (acc * back[None, :]).T, inside, row, D)
                acc = tl.zeros((BN, BM), tl.float32)


def compute_gate_up_split(
    x_TD: Tensor, routing: Routing, table: Table, w_gate_up_EPD: Fp8, settings: Settings, /
) -> Tensor:
    """Two launches: x split, and h [N, F], gate and up of each pair.

    Args:
        x_TD: rows, in bfloat16 or another dtype.
        routing, table: of the pairs.
        w_gate_up_EPD: gate and up rows of all experts.
        settings: ``gate_up``, ``owners`` and ``pdl`` are read.
    """
    (tokens, columns), hidden, tile = routing.experts_TK.shape, x_TD.shape[1], settings.gate_up
    experts, top_k, width = table.counts_E.shape[0], table.ranks_TK.shape[1], weight_shape(w_gate_up_EPD)[1] // 2
    slots = columns - top_k
    h_NF = x_TD.new_empty(tokens * columns, width)
    programs = tokens * top_k if settings.owners else experts
    gate_up_split[(cdiv(width, tile.rows), slots * cdiv(tokens, tile.tokens) + programs)](
        *_split(x_TD, settings), *split_weight(w_gate_up_EPD), h_NF, routing.experts_TK, *table, tokens, D=hidden,
        F=width, E=experts, K=top_k, S=slots, BM=tile.tokens, BN=tile.rows, BK=tile.depth,
        STAGES=tile.stages, OWNERS=settings.owners, LINES=AHEAD, LINE=LINE, PDL=settings.pdl, num_warps=tile.warps,
        **launch_options(settings.pdl),
    )  # fmt: skip
    return h_NF


def compute_down_split(h_NF: Tensor, routing: Routing, table: Table, w_down_EDF: Fp8, settings: Settings, /) -> Tensor:
    """Two launches: h split, and the down product of each pair, not weighted, [N, D].

    Args:
        h_NF: of the pairs.
        routing, table: of the pairs.
        w_down_EDF: down rows of all experts.
        settings: ``down``, ``programs``, ``owners`` and ``pdl`` are read.
    """
    (tokens, columns), (_, hidden, width), tile = routing.experts_TK.shape, weight_shape(w_down_EDF), settings.down
    experts, top_k = table.counts_E.shape[0], table.ranks_TK.shape[1]
    slots, blocks = columns - top_k, cdiv(hidden, tile.rows)
    repeated = cdiv(blocks, settings.programs or blocks)
    programs = tokens * top_k if settings.owners else experts
    pairs_ND = h_NF.new_empty(tokens * columns, hidden)
    down_split[(cdiv(blocks, repeated), slots * cdiv(tokens, tile.tokens) + programs)](
        *_split(h_NF, settings), *split_weight(w_down_EDF), pairs_ND, routing.experts_TK, *table, tokens, D=hidden,
        F=width, E=experts, K=top_k, S=slots, BM=tile.tokens, BN=tile.rows, BK=tile.depth, BLOCKS=repeated,
        STAGES=tile.stages, OWNERS=settings.owners,
        LINES=min(next_power_of_2(cdiv(width, LINE)), 8), LINE=LINE, PDL=settings.pdl,
        num_warps=tile.warps, **launch_options(settings.pdl),
    )  # fmt: skip
    return pairs_ND


def _split(x_ND: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    pairs_2ND, power_N = split_into_pairs(x_ND, pdl=settings.pdl)
    return pairs_2ND[0], pairs_2ND[1], power_N
