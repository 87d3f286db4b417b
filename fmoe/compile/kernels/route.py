"""Kernels of the router: logits, the choice of K experts and their weights, and which rows each expert gets.

Letters: T tokens, D hidden, E routed experts, R rows of the router (E and the shared gates'), K routed experts per
token, S shared slots. The rule is that of ``fmoe.functional.routing``, in float32.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK
from fmoe.functional.routing import RouterConfig, Routing

from ..settings import TABLED, Settings
from .choice import choose_row as choose_row
from .choice import ordered_key as ordered_key
from .choice import round_to as round_to
from .choice import store_row, weigh_shared
from .choice import weigh_row as weigh_row
from .choice import write_row as write_row
from .launch import cdiv, launch_options, next_power_of_2, start_next, wait_alone, wait_for_previous
from .normed import Unnormed, wait_for_rows
from .products import PART, load_rows, sum_rows

SCORINGS = ("softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid")
ROUNDINGS = {torch.bfloat16: 1, torch.float16: 2}


class Table(NamedTuple):
    """The rows of each expert, as far as ``counts_E`` says; the order within an expert is not defined."""

    counts_E: Tensor  # int32, of routed experts
    rows_ET: Tensor  # int32 [E + S, T]: places t * (K + S) + k in the routing
    ranks_TK: Tensor  # int32 [T, K]: place of a routed pair among its expert's rows


NORMED_TOKENS = 4  # whose programs norm them anew
MANY = 512  # tokens from which one warp for each is enough to fill the device (16,384 tokens, E = 512: 52 us less)


@triton.jit
def logits_gemv(
    x, branch, norm, total, normed, w, logits, counts, T, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    EPS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and BR rows of the router; grid (R / BR, T).

    Where there is a norm, x is that of x + branch; both are stored.
    """
    start_next(PDL)
    t = tl.program_id(1)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    if (BK >= D) and (BK >= PART):
        # The weights are asked for before x is there.
        a = load_rows(w, o_r.to(tl.int64), D, R, BR, BK, False)
        stores = tl.program_id(0) == 0
        rows = wait_for_rows(x, branch, norm, total, normed, t.to(tl.int64), stores, 1, D, EPS, BK, False, PDL)
        x0, x1, top = rows[0]
        v = sum_rows(a, x0, x1, None, top, False)
    else:
        wait_alone(PDL)
        acc = tl.zeros((BR, BK), tl.float32)
        for k in tl.range(0, D, BK, num_stages=STAGES):
            inside = (o_r[:, None] < R) & (k + o_k[None, :] < D)
            a = tl.load(w + o_r[:, None].to(tl.int64) * D + k + o_k[None, :], mask=inside, other=0.0)
            b = tl.load(x + t.to(tl.int64) * D + k + o_k, mask=k + o_k < D, other=0.0)
            acc += a.to(tl.float32) * b.to(tl.float32)[None, :]
        v = tl.sum(acc, 1)
    tl.store(logits + t.to(tl.int64) * R + o_r, v, mask=o_r < R)
    if t == 0:
        tl.store(counts + o_r, tl.zeros((BR,), tl.int32), mask=o_r < E)


@triton.jit
def logits_dot(
    x, w, logits, counts, T, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BM tokens, BR rows of the router and SPLIT of D; grid (R / BR, T / BM, D / SPLIT), one partial sum each."""
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_t = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    o_k = tl.arange(0, BK)
    wait_for_previous(PDL)
    acc = tl.zeros((BR, BM), tl.float32)
    for k in tl.range(part * SPLIT, part * SPLIT + SPLIT, BK, num_stages=STAGES):
        inside = k + o_k < D
        a = tl.load(
            w + o_r[:, None].to(tl.int64) * D + k + o_k[None, :], mask=(o_r[:, None] < R) & inside[None, :], other=0.0
        )
        b = tl.load(x + o_t[None, :] * D + k + o_k[:, None], mask=(o_t[None, :] < T) & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    place = (part.to(tl.int64) * T + o_t[None, :]) * R + o_r[:, None]
    tl.store(logits + place, acc, mask=(o_t[None, :] < T) & (o_r[:, None] < R))
    if (tl.program_id(1) == 0) & (part == 0):
        tl.store(counts + o_r, tl.zeros((BR,), tl.int32), mask=o_r < E)


@triton.jit
def enter_rows(
    chosen, counts, rows, ranks, t, T, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    """Enter token t's pairs with their experts. Which place a pair gets depends on timing; no result does."""
    o_k = tl.arange(0, KP)
    first = t * (K + S)
    rank = tl.atomic_add(counts + chosen, 1, mask=o_k < K, sem="relaxed")
    tl.store(rows + chosen.to(tl.int64) * T + rank, first + o_k, mask=o_k < K)
    tl.store(ranks + t.to(tl.int64) * K + o_k, rank, mask=o_k < K)
    if S > 0:
        o_s = tl.arange(0, SP)
        tl.store(rows + (E + o_s).to(tl.int64) * T + t, first + K + o_s, mask=o_s < S)


@triton.jit
def choose_experts(
    logits, bias, ids_out, weights_out, counts, rows, ranks, T, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr, G: tl.constexpr,
    KEPT: tl.constexpr, TOP2: tl.constexpr, SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, RENORM: tl.constexpr,
    FLOOR: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr, ROUND: tl.constexpr,
    ROUND_WEIGHTS: tl.constexpr, TABLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's choice; grid (T,)."""
    t = tl.program_id(0)
    wait_for_previous(PDL)
    # First of all, to be there when the rest is.
    shared = weigh_shared(logits, t, T, E, R, S, SP, SPLITS, ROUND)
    chosen, largest, total = choose_row(
        logits, bias, t, T, E, R, K, KP, GP, EP, G, KEPT, TOP2, SCORING, HAS_BIAS, SPLITS, ROUND
    )
    if TABLE:
        enter_rows(chosen, counts, rows, ranks, t, T, E, K, KP, S, SP)
    weights = weigh_row(
        logits, chosen, t, T, largest, total, R, K, KP, SCORING, RENORM, FLOOR, EPS, SCALE, SPLITS, ROUND,
        ROUND_WEIGHTS,
    )  # fmt: skip
    store_row(chosen, weights, shared, ids_out, weights_out, t, E, K, KP, S, SP)


@triton.jit
def tabulate_rows(
    ids, counts, rows, ranks, T, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Enter one token's pairs from a routing that is already there; grid (T,)."""
    t = tl.program_id(0)
    wait_for_previous(PDL)
    o_k = tl.arange(0, KP)
    chosen = tl.load(ids + t.to(tl.int64) * (K + S) + o_k, mask=o_k < K, other=0)
    enter_rows(chosen, counts, rows, ranks, t, T, E, K, KP, S, SP)


def choice_constants(
    config: RouterConfig, *, rows: int, slots: int, splits: int, dtype: torch.dtype, has_bias: bool
) -> dict[str, Any]:
    """Name the compile-time arguments that ``choose_row``, ``weigh_row`` and ``write_row`` share."""
    rounding = ROUNDINGS.get(dtype, 0)
    return {
        "E": config.num_experts,
        "R": rows,
        "K": config.top_k,
        # At least two: the compiler's top-k of a single value gives no block.
        "KP": max(next_power_of_2(config.top_k), 2),
        "S": slots,
        "SP": next_power_of_2(max(slots, 1)),
        "GP": next_power_of_2(config.groups),
        "EP": max(next_power_of_2(config.num_experts // config.groups), 2),
        "G": config.groups,
        "KEPT": config.groups_kept,
        "TOP2": config.group_score == "top2",
        "SCORING": SCORINGS.index(config.scoring),
        "HAS_BIAS": has_bias,
        "RENORM": config.renormalize,
        "FLOOR": config.sum_floor,
        "EPS": config.sum_eps,
        "SCALE": config.scale,
        "SPLITS": splits,
        "ROUND": 0 if config.float32_logits else rounding,
        "ROUND_WEIGHTS": rounding if config.round_weights else 0,
    }


def compute_logits(x_TD: Tensor, w_router_RD: Tensor, settings: Settings, /, *, num_experts: int) -> tuple[Tensor, ...]:
    """Compute the router's logits in float32, as ``splits`` partial sums.

    Returns:
        float32 [splits, T, R], and the counts of a ``Table``, int32 [E], set to zero.
    """
    (tokens, hidden), rows, tile = x_TD.shape, w_router_RD.shape[0], settings.router
    splits = settings.splits if tile.tokens else 1
    logits = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x_TD.device)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=x_TD.device)
    options = launch_options(settings.pdl)
    shape = {"D": hidden, "E": num_experts, "R": rows, "BR": tile.rows, "BK": tile.depth, "STAGES": tile.stages}
    if tile.tokens == 0:
        grid = (cdiv(rows, tile.rows), tokens)
        logits_gemv[grid](
            x_TD, None, None, None, None, w_router_RD, logits, counts_E, tokens, **shape, EPS=0.0, PDL=settings.pdl,
            num_warps=tile.warps, **options,
        )  # fmt: skip
        return logits, counts_E
    split = cdiv(cdiv(hidden, splits), tile.depth) * tile.depth
    grid3 = (cdiv(rows, tile.rows), cdiv(tokens, tile.tokens), splits)
    logits_dot[grid3](
        x_TD, w_router_RD, logits, counts_E, tokens, **shape, SPLIT=split, BM=tile.tokens, PDL=settings.pdl,
        num_warps=tile.warps, **options,
    )  # fmt: skip
    return logits, counts_E


def can_norm_logits(tokens: int, hidden: int, settings: Settings, /) -> bool:
    """Tell whether ``compute_logits_normed`` takes rows of these sizes: a few, where a block holds one whole."""
    return 0 < tokens <= NORMED_TOKENS and settings.router.tokens == 0 and settings.router.depth >= max(hidden, BLOCK)


def compute_logits_normed(
    x: Unnormed, w_router_RD: Tensor, settings: Settings, /, *, num_experts: int
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Compute ``compute_logits`` of rows that are yet to be normed, where ``can_norm_logits``.

    Returns:
        (x + branch, its norm, what ``compute_logits`` gives).
    """
    x_TD, (tokens, hidden), rows, tile = x.x_TD, x.x_TD.shape, w_router_RD.shape[0], settings.router
    logits = torch.empty(1, tokens, rows, dtype=torch.float32, device=x_TD.device)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=x_TD.device)
    normed_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    logits_gemv[(cdiv(rows, tile.rows), tokens)](
        x_TD, x.branch_TD, x.weight_D, total_TD, normed_TD, w_router_RD, logits, counts_E, tokens, D=hidden,
        E=num_experts, R=rows, EPS=x.eps, BR=tile.rows, BK=tile.depth, STAGES=tile.stages, PDL=settings.pdl,
        num_warps=tile.warps, **launch_options(settings.pdl),
    )  # fmt: skip
    return total_TD, normed_TD, (logits, counts_E)


def empty_table(counts_E: Tensor, tokens: int, top_k: int, slots: int) -> Table:
    """Allocate the rest of a table for T tokens."""
    rows_ET = counts_E.new_empty(counts_E.shape[0] + slots, tokens)
    return Table(counts_E, rows_ET, counts_E.new_empty(tokens, top_k))


def _choice_warps(config: RouterConfig, tokens: int, dtype: torch.dtype, *, biased: bool) -> int:
    """One warp for short keys, which need no sorting; else four for many experts where they do not fill the device."""
    rounded = ROUNDINGS.get(dtype, 0) > 0 and not config.float32_logits
    if rounded and config.scoring != "sigmoid" and not biased:
        return 1
    return 4 if config.num_experts > 128 and tokens < MANY else 1


def route_tokens(
    x_TD: Tensor,
    w_router_RD: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    settings: Settings,
    /,
    *,
    slots: int,
    computed: tuple[Tensor, ...] | None = None,
) -> tuple[Routing, Table]:
    """Route each token: ``route_fused`` over the router's linear, and the rows of each expert.

    Args:
        x_TD: rows, T >= 1.
        w_router_RD: [E + gate rows, D]; gate rows is 0, 1 or S.
        bias_E: float32, or None.
        config: the rule.
        settings: ``router``, ``splits``, ``path`` and ``pdl`` are read.
        slots: S.
        computed: what ``compute_logits`` gave, where it ran already.

    Returns:
        Routing of K + S columns, and a Table, filled where the path is ``grouped``.
    """
    tokens, columns = x_TD.shape[0], config.top_k + slots
    logits, counts_E = computed or compute_logits(x_TD, w_router_RD, settings, num_experts=config.num_experts)
    weights_TK = torch.empty(tokens, columns, dtype=torch.float32, device=x_TD.device)
    experts_TK = torch.empty(tokens, columns, dtype=torch.int32, device=x_TD.device)
    has_table = settings.path in TABLED
    table = empty_table(counts_E, tokens if has_table else 0, config.top_k, slots)
    constants = choice_constants(
        config,
        rows=w_router_RD.shape[0],
        slots=slots,
        splits=logits.shape[0],
        dtype=x_TD.dtype,
        has_bias=bias_E is not None,
    )
    choose_experts[(tokens,)](
        logits, bias_E, experts_TK, weights_TK, *table, tokens, **constants, TABLE=has_table, PDL=settings.pdl,
        num_warps=_choice_warps(config, tokens, x_TD.dtype, biased=bias_E is not None), **launch_options(settings.pdl),
    )  # fmt: skip
    return Routing(weights_TK, experts_TK), table


def tabulate(experts_TK: Tensor, settings: Settings, /, *, num_experts: int, slots: int) -> Table:
    """Build the table of a routing whose last S columns are the shared slots."""
    tokens, columns = experts_TK.shape
    top_k = columns - slots
    table = empty_table(experts_TK.new_zeros(num_experts), tokens, top_k, slots)
    tabulate_rows[(tokens,)](
        experts_TK, *table, tokens, E=num_experts, K=top_k, KP=next_power_of_2(top_k), S=slots,
        SP=next_power_of_2(max(slots, 1)), PDL=settings.pdl, num_warps=1, **launch_options(settings.pdl),
    )  # fmt: skip
    return table
