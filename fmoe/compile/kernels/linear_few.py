"""A dense projection of several tokens by weights in FP8 blocks: programs that keep x go from block to block of rows.

x is bfloat16 or float16; each row is divided by a power of two near its largest value, which changes its range alone,
and multiplied in float16, to which FP8 converts in one instruction. Two forms: matrix instructions, one for each part
of the columns, and for two to four tokens NVIDIA's instructions for four values of FP8 at once.

Letters: T tokens, N rows of the weight matrix, M unquantised rows behind them, D summed dimension, P parts of PART
columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, Fp8, Weight

from ..linear_settings import LinearSettings
from .fp8 import factors_at, load_factors
from .launch import launch_options, start_next, wait_alone
from .products import PART, add_bias, load_rows, pack_pairs

FOURS_TOKENS = 4  # that the form without matrix instructions takes
LINE = 128  # bytes that one prefetch brings
LEAST_TOKENS = 8  # of a matrix instruction


@triton.jit
def fetch_ahead(w, o_r, first, D: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr):
    """Ask for the first AHEAD steps of the rows' weights without waiting for them."""
    step: tl.constexpr = LINE * 8 // w.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = (AHEAD * BK + step - 1) // step
    o_k = tl.minimum(first + tl.arange(0, lines) * step, D - 1)
    at = (w + o_r[:, None] * D + o_k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


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
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All tokens, at most BM: each program keeps BK columns of x and goes through blocks of BN rows; grid (., D / BK).

    Programs of their own come first, 16 of the unquantised rows each.
    """
    start_next(PDL)
    LD: tl.constexpr = N + M
    BR: tl.constexpr = 16
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


@triton.jit
def load_token_pairs(x, T, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Load all tokens as float16 by twos, int32 [BM, P, PART / 4] twice, and what each is times [BM]."""
    o_t = tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    v = tl.load(x + o_t[:, None] * D + o_k[None, :], mask=(o_t < T)[:, None] & (o_k < D)[None, :], other=0.0)
    top, inverse = powers_of(tl.max(tl.abs(v.to(tl.float32)), 1))
    o_j = tl.arange(0, BK // PART)[:, None] * (PART // 2) + 2 * tl.arange(0, PART // 4)[None, :]
    at = o_t[:, None, None] * (D // 2) + o_j[None, :, :]
    inside = (o_t < T)[:, None, None] & (o_j < D // 2)[None, :, :]
    scale = tl.broadcast_to(inverse[:, None, None], (BM, BK // PART, PART // 4))
    return pack_pairs(x, at, inside, scale), pack_pairs(x, at + 1, inside, scale), top


@triton.jit
def unpack_fours(a):
    """Convert four values of FP8, an int32, to float16, by twos."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r", [a], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def multiply_pairs(a01, a23, x01, x23):
    """Sum the products of four values of float16, given by twos, in float16 two by two."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .b32 p; .reg .f32 u, v; mul.rn.f16x2 p, $1, $3; fma.rn.f16x2 p, $2, $4, p; "
        "mov.b32 {l, h}, p; cvt.f32.f16 u, l; cvt.f32.f16 v, h; add.f32 $0, u, v; }",
        "=f,r,r,r,r", [a01, a23, x01, x23], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def multiply_tokens(a, x0, x1, factor):
    """Sum [BN, BM] of the products of fours of FP8 [BN, P, PART / 4] and tokens [BM, P, PART / 4]."""
    a0, a1 = unpack_fours(a)
    v = multiply_pairs(a0[:, None, :, :], a1[:, None, :, :], x0[None, :, :, :], x1[None, :, :, :])
    return tl.sum(tl.sum(v, 3) * factor[None, None, :], 2)


@triton.jit
def stream_fours(
    x, w, s, bias, y, T, program, programs, N: tl.constexpr, D: tl.constexpr, LD: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All tokens and every ``programs``-th block of BN of N rows; the first is asked for before x is there."""
    o_c = tl.arange(0, BK // PART)
    o_n = program * BN + tl.arange(0, BN)
    a = load_rows(w, o_n.to(tl.int64), D, N, BN, BK, True)
    factor = load_factors(factors_at(s, 0, 0, program * BN, N, D, 1), 0, o_c, D, BK == D)
    wait_alone(PDL)
    x0, x1, top = load_token_pairs(x, T, D, BM, BK)
    for block in tl.range(program + programs, (N + BN - 1) // BN, programs):
        o_next = block * BN + tl.arange(0, BN)
        a_next = load_rows(w, o_next.to(tl.int64), D, N, BN, BK, True)
        factor_next = load_factors(factors_at(s, 0, 0, block * BN, N, D, 1), 0, o_c, D, BK == D)
        store_tokens(y, multiply_tokens(a, x0, x1, factor), top, bias, o_n, T, N, LD, HAS_BIAS, BM)
        a = a_next
        factor = factor_next
        o_n = o_next
    store_tokens(y, multiply_tokens(a, x0, x1, factor), top, bias, o_n, T, N, LD, HAS_BIAS, BM)


@triton.jit
def linear_fours(
    x, w, s, rest, bias, y, T, N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Two to four bfloat16 tokens: each program keeps them and goes through blocks of BN rows; BK >= D.

    Programs of their own come first, 4 of the unquantised rows each.
    """
    start_next(PDL)
    LD: tl.constexpr = N + M
    BR: tl.constexpr = 4
    rests: tl.constexpr = (M + BR - 1) // BR
    p = tl.program_id(0)
    if M > 0:
        if p < rests:
            rest_tokens(x, rest, bias + N if HAS_BIAS else bias, y + N, T, p, 0, M, D, LD, HAS_BIAS, BM, BR, BK, PDL)
        else:
            stream_fours(
                x, w, s, bias, y, T, p - rests, tl.num_programs(0) - rests, N, D, LD, HAS_BIAS, BM, BN, BK, PDL
            )
    else:
        stream_fours(x, w, s, bias, y, T, p, tl.num_programs(0), N, D, LD, HAS_BIAS, BM, BN, BK, PDL)


def can_keep(x_TD: Tensor, w: Weight, settings: LinearSettings, /) -> bool:
    """Tell whether ``run_few`` takes these: weights in FP8 blocks, whole parts, x of 16 bits, few tokens of fours."""
    if not isinstance(w, Fp8) or x_TD.dtype.itemsize != 2 or x_TD.shape[1] % BLOCK or settings.programs == 0:
        return False
    if settings.dot:
        return True
    fours = x_TD.dtype == torch.bfloat16 and 1 < x_TD.shape[0] <= FOURS_TOKENS and not torch.version.hip
    return fours and settings.depth >= x_TD.shape[1]


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
    least, of_rest = (LEAST_TOKENS, 16) if settings.dot else (2, 4)
    constants = {
        "N": outputs,
        "M": rest,
        "D": hidden,
        "HAS_BIAS": bias_N is not None,
        "BM": max(least, triton.next_power_of_2(tokens)),
        "BN": settings.rows,
        "BK": depth,
        "PDL": settings.pdl,
    }
    if settings.dot:
        constants |= {"STAGES": settings.stages, "AHEAD": settings.ahead, "LINE": LINE}
    kernel = linear_kept if settings.dot else linear_fours
    kernel[(programs + triton.cdiv(rest, of_rest), triton.cdiv(hidden, depth))](
        x_TD, fp8.w, fp8.scale, fp8.rest_MD, bias_N, y, tokens, **constants, num_warps=settings.warps,
        **launch_options(settings.pdl),
    )  # fmt: skip
