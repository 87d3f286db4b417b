"""A dense projection of several tokens by weights in FP8 blocks: programs that keep x go from block to block of rows.

x is bfloat16 or float16; each row is divided by a power of two near its largest value, which changes its range alone,
and multiplied in float16, to which FP8 converts in one instruction, part by part of the columns.

Letters: T tokens, N rows of the weight matrix, M unquantised rows behind them, D summed dimension, P parts of PART
columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, Fp8, Weight

from ..linear_settings import LinearSettings
from .fp8 import factors_at, load_factors
from .launch import LINE, fetch_ahead, launch_options, start_next, wait_alone
from .products import PART, add_bias

LEAST_TOKENS = 8  # of a matrix instruction
REST_ROWS = 16  # unquantised rows of one program


@triton.jit
def powers_of(largest):
    """Give the largest magnitudes rounded down to powers of two, and the inverse of these."""
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), tl.maximum(0x7F000000 - bits, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def load_tokens(x, T, first, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr):
    """Load BK columns of all tokens, 0 outside, as [P, PART, BM], and what each token is times [BM]."""
    o_t = tl.arange(0, BM)
    o_k = first + tl.arange(0, BK // PART)[:, None] * PART + tl.arange(0, PART)[None, :]
    inside = (o_t < T)[:, None, None] & (o_k < D)[None, :, :]
    v = tl.load(x + o_t[:, None, None] * D + o_k[None, :, :], mask=inside, other=0.0)
    if SCALED:
        top, inverse = powers_of(tl.max(tl.max(tl.abs(v.to(tl.float32)), 2), 1))
        v = (v.to(tl.float32) * inverse[:, None, None]).to(tl.float16)
    else:
        top = tl.full((BM,), 1.0, tl.float32)
    return tl.permute(v, (1, 2, 0)), top


@triton.jit
def multiply_parts(a, b, factor):
    """Sum [BN, BM] of the products of rows [P, BN, PART] and tokens [P, PART, BM]; ``factor`` [P] is of each part."""
    v = tl.dot(a.to(b.dtype), b, input_precision="ieee")
    if factor is not None:
        v *= factor[:, None, None]
    return tl.sum(v, 0)


@triton.jit
def store_tokens(
    y, v, top, bias, o_n, T, N: tl.constexpr, LD: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store v [BN, BM] times the tokens' powers of two, with the bias of the rows."""
    o_t = tl.arange(0, BM)
    v *= top[None, :]
    if HAS_BIAS:
        v += add_bias(tl.zeros_like(o_n).to(tl.float32), bias, o_n, N, HAS_BIAS)[:, None]
    at = y + o_t[None, :] * LD + o_n[:, None]
    tl.store(at, v.to(y.dtype.element_ty), mask=(o_t[None, :] < T) & (o_n[:, None] < N))


@triton.jit
def rest_tokens(
    x, w, bias, y, T, block, first, M: tl.constexpr, D: tl.constexpr, LD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens and BN of M unquantised rows, BK columns of them."""
    o_n = block * BN + tl.arange(0, BN)
    a = load_columns(w, o_n, first, D, M, BN, BK)
    wait_alone(PDL)
    b, top = load_tokens(x, T, first, D, BM, BK, False)
    store_tokens(y, multiply_parts(a, b, None), top, bias, o_n, T, M, LD, HAS_BIAS, BM)


@triton.jit
def load_columns(w, o_n, first, D: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Load BK columns of rows o_n of a matrix [N, D] from ``first`` on, as [P, BN, PART]; 0 outside."""
    o_k = first + tl.arange(0, BK // PART)[:, None] * PART + tl.arange(0, PART)[None, :]
    at = w + o_n.to(tl.int64)[None, :, None] * D + o_k[:, None, :]
    if (N % BN == 0) and (D % BK == 0):
        a = tl.load(at, eviction_policy="evict_first")
    else:
        inside = (o_n < N)[None, :, None] & (o_k < D)[:, None, :]
        a = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return a


@triton.jit
def keep_tokens(
    x, w, s, bias, y, T, program, programs, first, N: tl.constexpr, D: tl.constexpr, LD: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens, BK columns and every ``programs``-th block of BN of N rows; AHEAD blocks are fetched before x is."""
    o_c = tl.arange(0, BK // PART)
    if AHEAD > 0:
        o_i = tl.arange(0, AHEAD * BN)
        o_r = (program + o_i // BN * programs) * BN + o_i % BN
        fetch_ahead(w, tl.minimum(o_r, N - 1).to(tl.int64), first, D, BK, 1, LINE)
    wait_alone(PDL)
    b, top = load_tokens(x, T, first, D, BM, BK, True)
    for block in tl.range(program, (N + BN - 1) // BN, programs, num_stages=STAGES):
        o_n = block * BN + tl.arange(0, BN)
        a = load_columns(w, o_n, first, D, N, BN, BK)
        factor = load_factors(factors_at(s, 0, 0, block * BN, N, D, 1), first, o_c, D, D % BK == 0)
        store_tokens(y, multiply_parts(a, b, factor), top, bias, o_n, T, N, LD, HAS_BIAS, BM)


@triton.jit
def linear_kept(
    x, w, s, rest, bias, y, T, N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens, at most BM: each program keeps BK columns of x and goes through blocks of BN rows; grid (., D / BK).

    Programs of their own come first, BR of the unquantised rows each.
    """
    start_next(PDL)
    LD: tl.constexpr = N + M
    rests: tl.constexpr = (M + BR - 1) // BR
    p = tl.program_id(0)
    first = tl.program_id(1) * BK
    y += tl.program_id(1).to(tl.int64) * T * LD
    if M > 0:
        if p < rests:
            rest_tokens(
                x, rest, bias + N if HAS_BIAS else bias, y + N, T, p, first, M, D, LD, HAS_BIAS, BM, BR, BK, PDL
            )
        else:
            keep_tokens(
                x, w, s, bias, y, T, p - rests, tl.num_programs(0) - rests, first, N, D, LD, HAS_BIAS, BM, BN, BK,
                STAGES, AHEAD, LINE, PDL,
            )  # fmt: skip
    else:
        keep_tokens(
            x, w, s, bias, y, T, p, tl.num_programs(0), first, N, D, LD, HAS_BIAS, BM, BN, BK, STAGES, AHEAD, LINE, PDL
        )


def can_keep(x_TD: Tensor, w: Weight, settings: LinearSettings, /) -> bool:
    """Tell whether ``run_few`` takes these: weights in FP8 blocks, columns of whole parts, x of 16 bits."""
    fits = isinstance(w, Fp8) and x_TD.dtype.itemsize == 2 and not x_TD.shape[1] % BLOCK
    return fits and settings.dot and settings.programs > 0


def run_few(x_TD: Tensor, fp8: Fp8, bias_N: Tensor | None, y: Tensor, depth: int, settings: LinearSettings, /) -> None:
    """Compute y, or with a leading dimension the parts of ``depth`` columns each; ``can_keep`` holds.

    Args:
        x_TD: bfloat16 or float16.
        fp8: weights.
        bias_N: or None.
        y: written, [T, N] or [D / depth, T, N].
        depth: columns of one program, a power of two.
        settings: the rest.
    """
    (outputs, hidden), rest, tokens = fp8.w.shape, 0 if fp8.rest_MD is None else fp8.rest_MD.shape[0], x_TD.shape[0]
    programs = min(settings.programs, triton.cdiv(outputs, settings.rows))
    constants = {
        "N": outputs,
        "M": rest,
        "D": hidden,
        "HAS_BIAS": bias_N is not None,
        "BM": max(LEAST_TOKENS, triton.next_power_of_2(tokens)),
        "BN": settings.rows,
        "BR": REST_ROWS,
        "BK": depth,
        "STAGES": settings.stages,
        "AHEAD": settings.ahead,
        "LINE": LINE,
        "PDL": settings.pdl,
    }
    linear_kept[(programs + triton.cdiv(rest, REST_ROWS), triton.cdiv(hidden, depth))](
        x_TD, fp8.w, fp8.scale, fp8.rest_MD, bias_N, y, tokens, **constants, num_warps=settings.warps,
        **launch_options(settings.pdl),
    )  # fmt: skip
