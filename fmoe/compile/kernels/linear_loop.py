"""The product of one token with rows of a matrix, in a loop over the columns; the token's norm may be made on the way.

Letters: N rows of the weight matrix, D summed dimension.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

import triton
import triton.language as tl

from .fp8 import SIDE, factors_at, load_factors
from .normed import load_columns

MAX_CHANNELS = 4096  # of a row whose squares each program sums for itself
NORM_AHEAD = 4  # steps whose weights are fetched while that is done, where the settings leave it open


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
def sum_products(
    x, branch, norm, scale, w, first, o_r, D: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sum [BN] of the products of a token and the rows o_r over SPLIT columns from ``first`` on.

    Where there is a norm, it is that of x + branch, by the ``scale`` that ``norm_scale`` gave.
    """
    o_k = tl.arange(0, BK)
    even: tl.constexpr = D % SPLIT == 0
    acc = tl.zeros((BN, BK), tl.float32)
    for k in tl.range(first, first + SPLIT, BK, num_stages=STAGES):
        a = load_weights(w, o_r, k + o_k, D, even)
        b = load_columns(x, branch, norm, scale, k + o_k, D, even)
        acc += a.to(tl.float32) * b.to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def sum_products_fp8(
    x, branch, norm, scale, w, s, first, o_r, row, N: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``sum_products`` of weights in FP8 blocks, in steps of BK / Q parts that have one factor each."""
    Q: tl.constexpr = min(BK, SIDE)
    o_c = tl.arange(0, BK // Q)
    o_k = o_c[:, None] * Q + tl.arange(0, Q)[None, :]
    even: tl.constexpr = D % SPLIT == 0
    factors = factors_at(s, 0, 0, row, N, D, 1)
    at = w + o_r[:, None, None] * D + o_k[None, :, :]
    acc = tl.zeros((BN, BK // Q, Q), tl.float32)
    for k in tl.range(first, first + SPLIT, BK, num_stages=STAGES):
        if even:
            a = tl.load(at + k)
        else:
            a = tl.load(at + k, mask=k + o_k[None, :, :] < D, other=0.0)
        b = load_columns(x, branch, norm, scale, k + o_k, D, even)
        b32 = b.to(tl.float32) * load_factors(factors, k, o_c, D, even)[:, None]
        acc += a.to(tl.float32) * b32[None, :, :]
    return tl.sum(tl.sum(acc, 2), 1)
