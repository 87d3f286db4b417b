"""Expert kernels for few tokens: a matrix-vector product for each pair, or each expert's rows together.

Letters: T tokens, D hidden, E routed experts, K routed experts per token, S shared slots (ids E.., in every row),
F expert width, N = T * (K + S) pairs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, Fp8, Weight, weight_shape
from fmoe.functional.routing import RouterConfig, Routing

from ..settings import Settings
from .fp8 import can_quantize, split_weight
from .launch import cdiv, launch_options, start_next, wait_alone, wait_for_previous
from .moe_split import compute_down_split, compute_gate_up_split, find_rows
from .products import (
    down_part,
    down_products,
    down_products_fp8,
    down_side_by_side,
    gate_up_at_once,
    gate_up_products,
    gate_up_products_fp8,
    load_row,
    multiply_part,
)
from .route import Table, choice_constants, choose_row, compute_logits, weigh_row, write_row
from .tiles import down_tile, gate_up_tile


@triton.jit
def gate_up_pair(
    x, w, s, h, e, t, n, pn, D: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """h[n] = silu(g) u of token t with expert e, columns of block pn."""
    if s is None:
        g, u = gate_up_products(x, w, e, t, pn, D, F, BN, BK, STAGES)
    else:
        g, u = gate_up_products_fp8(x, w, s, e, t, pn, D, F, BN, BK, STAGES)
    store_pair(h, g, u, n, pn, F, BN)


@triton.jit
def store_pair(h, g, u, n, pn, F: tl.constexpr, BN: tl.constexpr):
    """h[n] = silu(g) u, columns of block pn."""
    o_n = pn * BN + tl.arange(0, BN)
    tl.store(h + n.to(tl.int64) * F + o_n, (g * tl.sigmoid(g) * u).to(h.dtype.element_ty), mask=o_n < F)


@triton.jit
def gate_up_slots(
    x, w, s, h, ids, D: tl.constexpr, F: tl.constexpr, KS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One pair and BN gate and up rows; grid (F / BN, N). EARLY: x is older than the launch in front."""
    n = tl.program_id(1)
    pn = tl.program_id(0)
    if AT_ONCE:
        if EARLY:
            x0, _, _ = load_row(x, n // KS, D, BK, False)
            wait_for_previous(PDL)
        else:
            wait_for_previous(PDL)
            x0, _, _ = load_row(x, n // KS, D, BK, False)
        g, u = gate_up_at_once(x0, w, s, tl.load(ids + n), pn, D, F, BN, BK)
        store_pair(h, g, u, n, pn, F, BN)
    else:
        wait_for_previous(PDL)
        gate_up_pair(x, w, s, h, tl.load(ids + n), n // KS, n, pn, D, F, BN, BK, STAGES)


@triton.jit
def gate_up_choosing(
    x, w, s, h, logits, bias, ids_out, weights_out, T, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, GP: tl.constexpr,
    EP: tl.constexpr,
    G: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr, SCORING: tl.constexpr, HAS_BIAS: tl.constexpr,
    RENORM: tl.constexpr, FLOOR: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr,
    ROUND: tl.constexpr, ROUND_WEIGHTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``gate_up_slots`` that chooses the token's experts in every program; a token's first writes the routing."""
    pn = tl.program_id(0)
    n = tl.program_id(1)
    t = n // (K + S)
    j = n % (K + S)
    wait_for_previous(PDL)
    e = E + j - K
    if j < K:
        chosen, largest, total = choose_row(
            logits, bias, t, T, E, R, K, KP, GP, EP, G, KEPT, TOP2, SCORING, HAS_BIAS, SPLITS, ROUND
        )
        e = tl.sum(tl.where(tl.arange(0, KP) == j, chosen, 0), 0)
        if (pn == 0) & (j == 0):
            weights = weigh_row(
                logits, chosen, t, T, largest, total, R, K, KP, SCORING, RENORM, FLOOR, EPS, SCALE, SPLITS, ROUND,
                ROUND_WEIGHTS,
            )  # fmt: skip
            write_row(logits, chosen, weights, ids_out, weights_out, t, T, E, R, K, KP, S, SP, SPLITS, ROUND)
    gate_up_pair(x, w, s, h, e, t, n, pn, D, F, BN, BK, STAGES)


@triton.jit
def down_token(
    h, w, s, ids, weights, y, D: tl.constexpr, F: tl.constexpr, KS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of one token's y, over its experts in order; grid (D / BN, T).

    EARLY: the routing is older than the launch in front, so that the weights are asked for before h is there.
    """
    start_next(PDL)
    t = tl.program_id(1)
    pn = tl.program_id(0)
    if SIDE_BY_SIDE and EARLY and (BK >= KS * F):
        a, factor = down_part(w, s, ids, weights, t, pn, 0, D, F, KS, BN, BK)
        wait_alone(PDL)
        out = multiply_part(h, a, factor, t, 0, F, KS, BK)
    else:
        wait_alone(PDL)
        if SIDE_BY_SIDE:
            out = down_side_by_side(h, w, s, ids, weights, t, pn, D, F, KS, BN, BK, STAGES)
        elif s is None:
            out = down_products(h, w, ids, weights, t, pn, D, F, KS, BN, BK, STAGES)
        else:
            out = down_products_fp8(h, w, s, ids, weights, t, pn, D, F, KS, BN, BK, STAGES)
    o_n = pn * BN + tl.arange(0, BN)
    tl.store(y + t.to(tl.int64) * D + o_n, out.to(y.dtype.element_ty), mask=o_n < D)


@triton.jit
def gate_up_grouped(
    x, w, s, h, ids, counts, rows, ranks, T, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, OWNERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one expert and BN gate and up rows; grid (F / BN, shared tiles + experts or pairs)."""
    wait_for_previous(PDL)
    e, first, last = find_rows(ids, counts, ranks, tl.program_id(1), T, E, K, S, BM, OWNERS)
    for m in range(first, last, BM):
        o_m = m + tl.arange(0, BM)
        n = tl.load(rows + e.to(tl.int64) * T + o_m, mask=o_m < last, other=0)
        gate_up_tile(
            x, w, s, h, n // (K + S), n, o_m < last, e, tl.program_id(0), D, F, BM, BN, BK, STAGES, True, False
        )


@triton.jit
def down_grouped(
    h, w, s, y, ids, counts, rows, ranks, T, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, OWNERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one expert and BN of its D rows; y holds one row for each pair."""
    wait_for_previous(PDL)
    e, first, last = find_rows(ids, counts, ranks, tl.program_id(1), T, E, K, S, BM, OWNERS)
    for m in range(first, last, BM):
        o_m = m + tl.arange(0, BM)
        n = tl.load(rows + e.to(tl.int64) * T + o_m, mask=o_m < last, other=0)
        down_tile(h, w, s, y, n, n, o_m < last, e, tl.program_id(0), D, F, BM, BN, BK, STAGES, True, False)


@triton.jit
def combine_pairs(pairs, weights, y, D: tl.constexpr, KS: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    """Weighted sum of a token's K + S rows in order; grid (T, D / BD)."""
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    wait_for_previous(PDL)
    acc = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(KS):
        row = tl.load(pairs + (t * KS + j) * D + o_d, mask=o_d < D, other=0.0)
        acc += tl.load(weights + t * KS + j) * row.to(tl.float32)
    tl.store(y + t * D + o_d, acc.to(y.dtype.element_ty), mask=o_d < D)


def combine(pairs_ND: Tensor, weights_TK: Tensor, settings: Settings, /) -> Tensor:
    """Sum each token's rows, weighted, in float32 and in the order of the columns."""
    (tokens, columns), hidden = weights_TK.shape, pairs_ND.shape[1]
    y_TD = torch.empty(tokens, hidden, dtype=pairs_ND.dtype, device=pairs_ND.device)
    grid = (tokens, cdiv(hidden, settings.combine))
    combine_pairs[grid](
        pairs_ND, weights_TK, y_TD, D=hidden, KS=columns, BD=settings.combine, PDL=settings.pdl, num_warps=4,
        **launch_options(settings.pdl),
    )  # fmt: skip
    return y_TD


def sum_token_experts(
    h_NF: Tensor, routing: Routing, w_down_EDF: Weight, settings: Settings, /, *, early: bool = False
) -> Tensor:
    """Compute y from h with one program for each token and block of D.

    A depth above F takes the columns of several experts side by side, where F is whole parts of 128.

    Args:
        h_NF: what gate and up gave for each pair.
        routing: of the pairs.
        w_down_EDF: down rows of all experts.
        settings: ``down`` and ``pdl`` are read.
        early: the launch in front wrote h alone, not the routing.
    """
    tokens, columns = routing.experts_TK.shape
    (_, hidden, width), tile = weight_shape(w_down_EDF), settings.down
    y_TD = torch.empty(tokens, hidden, dtype=h_NF.dtype, device=h_NF.device)
    down_token[(cdiv(hidden, tile.rows), tokens)](
        h_NF, *split_weight(w_down_EDF), routing.experts_TK, routing.weights_TK, y_TD, D=hidden, F=width, KS=columns,
        BN=tile.rows, BK=tile.depth, STAGES=tile.stages, SIDE_BY_SIDE=tile.depth > width and width % BLOCK == 0,
        EARLY=early, PDL=settings.pdl, num_warps=tile.warps, **launch_options(settings.pdl),
    )  # fmt: skip
    return y_TD


def compute_experts_slots(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    settings: Settings,
    /,
    *,
    early: bool = False,
) -> Tensor:
    """Two launches, one matrix-vector product for each pair; the formula of ``compute_experts_grouped``.

    Args:
        x_TD, routing, w_gate_up_EPD, w_down_EDF: as there.
        settings: blocks; a depth of gate_up from D on takes whole rows at once.
        early: the launch in front wrote the routing alone, not x.
    """
    (tokens, columns), width, tile = routing.experts_TK.shape, weight_shape(w_down_EDF)[2], settings.gate_up
    hidden = x_TD.shape[1]
    h_NF = torch.empty(tokens * columns, width, dtype=x_TD.dtype, device=x_TD.device)
    gate_up_slots[(cdiv(width, tile.rows), tokens * columns)](
        x_TD, *split_weight(w_gate_up_EPD), h_NF, routing.experts_TK, D=hidden, F=width, KS=columns, BN=tile.rows,
        BK=tile.depth, STAGES=tile.stages, AT_ONCE=tile.depth >= max(hidden, BLOCK), EARLY=early, PDL=settings.pdl,
        num_warps=tile.warps, **launch_options(settings.pdl),
    )  # fmt: skip
    return sum_token_experts(h_NF, routing, w_down_EDF, settings, early=True)


def route_and_gate_up(
    x_TD: Tensor,
    w_router_RD: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    w_gate_up_EPD: Weight,
    settings: Settings,
    /,
    *,
    computed: tuple[Tensor, ...] | None = None,
) -> tuple[Routing, Tensor]:
    """Two launches: logits, unless they are ``computed`` already, then the choice and gate-up in one.

    Returns:
        Routing of K + S columns, and h [N, F].
    """
    tokens, hidden = x_TD.shape
    (stacked, rows, _), tile = weight_shape(w_gate_up_EPD), settings.gate_up
    slots, width = stacked - config.num_experts, rows // 2
    columns = config.top_k + slots
    logits, _ = computed or compute_logits(x_TD, w_router_RD, settings, num_experts=config.num_experts)
    routing = Routing(
        torch.empty(tokens, columns, dtype=torch.float32, device=x_TD.device),
        torch.empty(tokens, columns, dtype=torch.int32, device=x_TD.device),
    )
    h_NF = torch.empty(tokens * columns, width, dtype=x_TD.dtype, device=x_TD.device)
    constants = choice_constants(
        config,
        rows=w_router_RD.shape[0],
        slots=slots,
        splits=logits.shape[0],
        dtype=x_TD.dtype,
        has_bias=bias_E is not None,
    )
    gate_up_choosing[(cdiv(width, tile.rows), tokens * columns)](
        x_TD, *split_weight(w_gate_up_EPD), h_NF, logits, bias_E, routing.experts_TK, routing.weights_TK, tokens,
        D=hidden, F=width, **constants, BN=tile.rows, BK=tile.depth, STAGES=tile.stages, PDL=settings.pdl,
        num_warps=tile.warps,
        **launch_options(settings.pdl),
    )  # fmt: skip
    return routing, h_NF


def compute_experts_tabled(
    x_TD: Tensor, routing: Routing, table: Table, w_gate_up_EPD: Weight, w_down_EDF: Weight, settings: Settings, /
) -> Tensor:
    """Run each expert once over its rows of the table; the formula of ``compute_experts_grouped``."""
    if (
        isinstance(w_gate_up_EPD, Fp8)
        and isinstance(w_down_EDF, Fp8)
        and (settings.path == "split" and can_quantize(x_TD, w_gate_up_EPD, w_down_EDF))
    ):
        return compute_experts_split(x_TD, routing, table, w_gate_up_EPD, w_down_EDF, settings)
    tokens, columns = routing.experts_TK.shape
    experts, top_k = table.counts_E.shape[0], table.ranks_TK.shape[1]
    slots, (_, hidden, width), tile = columns - top_k, weight_shape(w_down_EDF), settings.gate_up
    programs = tokens * top_k if settings.owners else experts
    shape = {"D": hidden, "F": width, "E": experts, "K": top_k, "S": slots, "OWNERS": settings.owners}
    h_NF = torch.empty(tokens * columns, width, dtype=x_TD.dtype, device=x_TD.device)
    grid = (cdiv(width, tile.rows), slots * cdiv(tokens, tile.tokens) + programs)
    gate_up_grouped[grid](
        x_TD, *split_weight(w_gate_up_EPD), h_NF, routing.experts_TK, *table, tokens, **shape, BM=tile.tokens,
        BN=tile.rows, BK=tile.depth, STAGES=tile.stages, PDL=settings.pdl, num_warps=tile.warps,
        **launch_options(settings.pdl),
    )  # fmt: skip
    if settings.token_down:
        return sum_token_experts(h_NF, routing, w_down_EDF, settings, early=True)
    tile = settings.down
    pairs_ND = torch.empty(tokens * columns, hidden, dtype=x_TD.dtype, device=x_TD.device)
    grid = (cdiv(hidden, tile.rows), slots * cdiv(tokens, tile.tokens) + programs)
    down_grouped[grid](
        h_NF, *split_weight(w_down_EDF), pairs_ND, routing.experts_TK, *table, tokens, **shape, BM=tile.tokens,
        BN=tile.rows, BK=tile.depth, STAGES=tile.stages, PDL=settings.pdl, num_warps=tile.warps,
        **launch_options(settings.pdl),
    )  # fmt: skip
    return combine(pairs_ND, routing.weights_TK, settings)


def compute_experts_split(
    x_TD: Tensor, routing: Routing, table: Table, w_gate_up_EPD: Fp8, w_down_EDF: Fp8, settings: Settings, /
) -> Tensor:
    """``compute_experts_tabled`` of weights in FP8 blocks that are not converted."""
    h_NF = compute_gate_up_split(x_TD, routing, table, w_gate_up_EPD, settings)
    if settings.token_down:
        return sum_token_experts(h_NF, routing, w_down_EDF, settings, early=True)
    return combine(compute_down_split(h_NF, routing, table, w_down_EDF, settings), routing.weights_TK, settings)
