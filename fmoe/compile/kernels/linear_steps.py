"""A dense projection of several tokens by matrix instructions, in steps over blocks of both operands.

Letters: T tokens, N rows of the weight matrix, M unquantised rows behind them, D summed dimension.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

import triton
import triton.language as tl

from .fp8 import SIDE, factors_at
from .launch import fetch_ahead, start_next, wait_alone
from .products import add_bias


@triton.jit
def load_weights(w, o_r, o_k, D: tl.constexpr, EVEN: tl.constexpr):
    """Load [len(o_r), len(o_k)] of the weights, whose rows are inside; 0 past column D."""
    at = w + o_r[:, None] * D + o_k[None, :]
    if EVEN:
        v = tl.load(at)
    else:
        v = tl.load(at, mask=o_k[None, :] < D, other=0.0)
    return v


@triton.jit
def dot_block(
    x, pairs, power, w, s, bias, y, T, block, N: tl.constexpr, D: tl.constexpr, LD: tl.constexpr, SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens, BN of N rows, and one part of D; y has LD columns.

    Where there are pairs, both values of each token are columns of one product with weights in FP8 as they are.
    """
    o_n = block * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    o_t = tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    even: tl.constexpr = D % SPLIT == 0
    o_r = tl.minimum(o_n, N - 1).to(tl.int64)
    COLUMNS: tl.constexpr = BM if pairs is None else 2 * BM
    o_c = tl.arange(0, COLUMNS)
    if AHEAD > 0:
        fetch_ahead(w, o_r, part * SPLIT, D, BK, AHEAD, LINE)
    wait_alone(PDL)
    if s is not None:
        factors = factors_at(s, 0, 0, block * BN, N, D, 1)
    if pairs is None:
        at_b = x + o_c * D
    else:
        at_b = pairs + (o_c // BM * T + o_c % BM) * D
    acc = tl.zeros((BN, COLUMNS), tl.float32)
    for k in tl.range(part * SPLIT, part * SPLIT + SPLIT, BK, num_stages=STAGES):
        a = load_weights(w, o_r, k + o_k, D, even)
        inside = (o_c % BM < T)[:, None]
        if not even:
            inside = inside & (k + o_k[None, :] < D)
        b = tl.load(at_b[:, None] + k + o_k[None, :], mask=inside, other=0.0)
        if s is None:
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        else:
            # A part that is not even may have a step past the last block: its products are 0, whatever they are times.
            factor = tl.load(factors + tl.minimum(k, D - 1) // SIDE)
            if pairs is None:
                acc += tl.dot(a.to(b.dtype), b.T, input_precision="ieee") * factor
            else:
                acc += tl.dot(a, b.T) * factor
    if pairs is not None:
        acc = tl.sum(tl.reshape(acc, (BN, 2, BM)), 1) * tl.load(power + o_t, mask=o_t < T, other=0.0)[None, :]
    if HAS_BIAS:
        acc += add_bias(tl.zeros((BN,), tl.float32), bias, o_n, N, HAS_BIAS)[:, None]
    at = y + (part.to(tl.int64) * T + o_t[None, :]) * LD + o_n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(o_t[None, :] < T) & (o_n[:, None] < N))


@triton.jit
def linear_dot(
    x, pairs, power, w, s, rest, bias, y, T, N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens, at most BM, BN rows of the weights and SPLIT of D; grid (N / BN, D / SPLIT).

    Where the tokens are there as pairs, too, these are multiplied with the weights in FP8.
    """
    start_next(PDL)
    block = tl.program_id(0)
    if M > 0:
        first: tl.constexpr = (M + BN - 1) // BN
        LD: tl.constexpr = N + M
        # Beside weights in FP8, rows of twice the bytes shall not take shared memory from all.
        stages: tl.constexpr = STAGES if pairs is None else min(STAGES, 3)
        if block < first:
            dot_block(
                x, None, None, rest, None, bias + N if HAS_BIAS else bias, y + N, T, block, M, D, LD, SPLIT, HAS_BIAS,
                max(BM, 16), BN, BK, stages, AHEAD, LINE, PDL,
            )  # fmt: skip
        else:
            dot_block(
                x, pairs, power, w, s, bias, y, T, block - first, N, D, LD, SPLIT, HAS_BIAS, BM, BN, BK, STAGES, AHEAD,
                LINE, PDL,
            )  # fmt: skip
    else:
        dot_block(
            x, pairs, power, w, s, bias, y, T, block, N, D, N, SPLIT, HAS_BIAS, BM, BN, BK, STAGES, AHEAD, LINE, PDL
        )
