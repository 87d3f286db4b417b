"""A dense projection of one token or two: programs that keep x go from block to block of the rows.

Of weights in FP8 blocks by NVIDIA's instructions for four values of FP8 at once, for x in bfloat16.

Letters: T tokens, N rows of the weight matrix, M unquantised rows behind them, D summed dimension.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import Fp8, Weight

from ..linear_settings import LinearSettings
from .fp8 import factors_at, load_factors
from .launch import cdiv, launch_options, start_next
from .normed import Unnormed, wait_for_rows
from .products import PART, add_bias, group_parts, load_rows, sum_rows


@triton.jit
def rest_block(
    x, branch, norm, total, w, bias, y, block, T: tl.constexpr, M: tl.constexpr, D: tl.constexpr, LD: tl.constexpr,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens and BM of M unquantised rows, whole."""
    o_m = block * BM + tl.arange(0, BM)
    a = load_rows(w, o_m, D, M, BM, BK, False)
    rows = wait_for_rows(x, branch, norm, total, None, 0 * block, False, T, D, EPS, BK, False, PDL)
    store_block(a, rows, None, bias, y, o_m, T, M, LD, HAS_BIAS, False)


@triton.jit
def factors_of(s, row, N: tl.constexpr, D: tl.constexpr, BK: tl.constexpr):
    """Load the factors of the block of ``row``; of weights without, a one that is not read."""
    if s is None:
        return tl.full((), 1.0, tl.float32)
    else:
        o_c = group_parts(tl.arange(0, BK // PART), BK)
        return load_factors(factors_at(s, 0, 0, row, N, D, 1), 0, o_c, D, BK == D)


@triton.jit
def store_block(
    a, rows, factor, bias, y, o_n, T: tl.constexpr, N: tl.constexpr, LD: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Multiply the rows o_n, which ``load_rows`` loaded, with each token and store the results."""
    for t in tl.static_range(T):
        x0, x1, top = rows[t]
        v = add_bias(sum_rows(a, x0, x1, factor, top, PACKED), bias, o_n, N, HAS_BIAS)
        tl.store(y + t * LD + o_n, v.to(y.dtype.element_ty), mask=o_n < N)


@triton.jit
def stream_blocks(
    x, branch, norm, total, w, s, bias, y, program, programs, T: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    LD: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens and every ``programs``-th block of BN of N rows; the first is asked for before x is there.

    Weights in FP8 blocks are multiplied by fours.
    """
    PACKED: tl.constexpr = s is not None
    o_n = program * BN + tl.arange(0, BN)
    a = load_rows(w, o_n.to(tl.int64), D, N, BN, BK, PACKED)
    factor = factors_of(s, program * BN, N, D, BK)
    rows = wait_for_rows(x, branch, norm, total, None, 0 * program, program == 0, T, D, EPS, BK, PACKED, PDL)
    for block in tl.range(program + programs, (N + BN - 1) // BN, programs):
        o_next = block * BN + tl.arange(0, BN)
        a_next = load_rows(w, o_next.to(tl.int64), D, N, BN, BK, PACKED)
        factor_next = factors_of(s, block * BN, N, D, BK)
        store_block(a, rows, factor if PACKED else None, bias, y, o_n, T, N, LD, HAS_BIAS, PACKED)
        a = a_next
        factor = factor_next
        o_n = o_next
    store_block(a, rows, factor if PACKED else None, bias, y, o_n, T, N, LD, HAS_BIAS, PACKED)


@triton.jit
def linear_streamed(
    x, branch, norm, total, w, s, rest, bias, y, T: tl.constexpr, N: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All tokens: each program keeps them and goes through blocks of BN rows; BK >= D.

    Programs of their own come first, BM of the unquantised rows each. Where there is a norm, it is that of x + branch
    that is multiplied, and the sum is stored.
    """
    start_next(PDL)
    LD: tl.constexpr = N + M
    first: tl.constexpr = (M + BM - 1) // BM
    p = tl.program_id(0)
    if M > 0:
        if p < first:
            rest_block(
                x, branch, norm, total, rest, bias + N if HAS_BIAS else bias, y + N, p, T, M, D, LD, EPS, HAS_BIAS, BM,
                BK, PDL,
            )  # fmt: skip
        else:
            stream_blocks(
                x, branch, norm, total, w, s, bias, y, p - first, tl.num_programs(0) - first, T, N, D, LD, EPS,
                HAS_BIAS, BN, BK, PDL,
            )  # fmt: skip
    else:
        stream_blocks(
            x, branch, norm, total, w, s, bias, y, p, tl.num_programs(0), T, N, D, LD, EPS, HAS_BIAS, BN, BK, PDL
        )


def run_stream(
    x: Tensor | Unnormed,
    w_ND: Weight,
    bias_N: Tensor | None,
    y_TN: Tensor,
    settings: LinearSettings,
    /,
    *,
    total_TD: Tensor | None = None,
) -> None:
    """Compute y; ``settings`` has programs and a depth from D on.

    Args:
        x: one row or two, or what they are the norm of; bfloat16 where the weights are in FP8 blocks.
        w_ND: weights; of those in FP8 blocks, D is whole blocks.
        bias_N: or None.
        y_TN: written.
        settings: blocks.
        total_TD: written, where x is yet to be normed.
    """
    x_TD, branch_TD, norm_D, eps = x if isinstance(x, Unnormed) else (x, None, None, 0.0)
    w, s, rest_MD = w_ND if isinstance(w_ND, Fp8) else (w_ND, None, None)
    (outputs, hidden), rest = w.shape, 0 if rest_MD is None else rest_MD.shape[0]
    blocks, rest_rows = cdiv(outputs, settings.rows), max(settings.rows // 4, 1)
    programs = min(settings.programs, blocks) + cdiv(rest, rest_rows)
    linear_streamed[(programs,)](
        x_TD, branch_TD, norm_D, total_TD, w, s, rest_MD, bias_N, y_TN, T=x_TD.shape[0], N=outputs, M=rest, D=hidden,
        EPS=eps, HAS_BIAS=bias_N is not None, BN=settings.rows, BM=rest_rows, BK=settings.depth, PDL=settings.pdl,
        num_warps=settings.warps, **launch_options(settings.pdl),
    )  # fmt: skip
