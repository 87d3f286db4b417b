"""Matrix-vector products of one token with its experts' weights: by loops, and at once where a tile holds a whole row.

``s`` are the factors of weights in FP8 blocks, None of others. Products at once let their weights be asked for before
the launch in front is over, where it is known which ones they are.

PACKED, for weights in FP8 and bfloat16 on NVIDIA GPUs: four weights stay together in a register until they are
multiplied, with float16 that the row's largest value scales, and are summed in float16 by twos before float32. It takes
a fifth of the instructions, which are what bounds such a product otherwise.

The order of dimensions decides what a thread holds: Triton 3.6 gives the lanes to the last one, 16 bytes each, then to
the first, the second and so on. So the C loads of a part come first, then parts, then rows: a thread converts its
columns of x once for all rows, and sums what one load gave by itself. Packed, parts come first, in J groups, as many as
a warp reads at once: each warp sums rows of its own.

Letters: D hidden, F expert width, KS experts of a token, P parts of PART columns, in C loads of V, or in J groups of G.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fmoe.functional.quant import BLOCK

from .fp8 import SIDE, factors_at, load_factors

FEW_TOKENS = 2  # that one program multiplies with rows of weights that it holds
FOURS = tl.constexpr(4)  # of FP8 values that a lane loads at once
ABREAST = tl.constexpr(4)  # parts of fours of FP8 that a warp reads at once, 16 bytes in each lane
LOAD = tl.constexpr(128)  # bits that a lane loads at once
PART = tl.constexpr(BLOCK)  # columns that have one expert, and of weights in FP8 blocks one factor


@triton.jit
def gate_up_products(
    x, w, e, t, pn, D: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """Gate and up products [BN] of token t with expert e, rows of block pn."""
    o_n = pn * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    even: tl.constexpr = (F % BN == 0) and (D % BK == 0)
    at = w + e.to(tl.int64) * (2 * F * D) + o_n[:, None] * D + o_k[None, :]
    gate = tl.zeros((BN, BK), tl.float32)
    up = tl.zeros((BN, BK), tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        if even:
            a = tl.load(at + k, eviction_policy="evict_first")
            b = tl.load(at + F * D + k, eviction_policy="evict_first")
            v = tl.load(x + t.to(tl.int64) * D + k + o_k)
        else:
            inside = (o_n[:, None] < F) & (k + o_k[None, :] < D)
            a = tl.load(at + k, mask=inside, other=0.0)
            b = tl.load(at + F * D + k, mask=inside, other=0.0)
            v = tl.load(x + t.to(tl.int64) * D + k + o_k, mask=k + o_k < D, other=0.0)
        v32 = v.to(tl.float32)[None, :]
        gate += a.to(tl.float32) * v32
        up += b.to(tl.float32) * v32
    return tl.sum(gate, 1), tl.sum(up, 1)


@triton.jit
def gate_up_products_fp8(
    x, w, s, e, t, pn, D: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """``gate_up_products`` of weights in FP8 blocks, in steps of BK / Q parts that have one factor each."""
    Q: tl.constexpr = min(BK, SIDE)
    V: tl.constexpr = LOAD // 8
    o_n = pn * BN + tl.arange(0, BN)
    o_c = tl.arange(0, BK // Q)
    o_k = o_c[:, None] * Q + tl.arange(0, Q)[None, :]
    even: tl.constexpr = (F % BN == 0) and (D % BK == 0)
    at = w + e.to(tl.int64) * (2 * F * D) + o_n[:, None, None] * D + o_k[None, :, :]
    gate_factors = factors_at(s, e, 0, pn * BN, F, D, 2)
    up_factors = factors_at(s, e, 1, pn * BN, F, D, 2)
    gate = tl.zeros((BN, BK // Q, Q // V), tl.float32)
    up = tl.zeros((BN, BK // Q, Q // V), tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        if even:
            a = tl.load(at + k, eviction_policy="evict_first")
            b = tl.load(at + F * D + k, eviction_policy="evict_first")
            v = tl.load(x + t.to(tl.int64) * D + k + o_k)
        else:
            inside = (o_n[:, None, None] < F) & (k + o_k[None, :, :] < D)
            a = tl.load(at + k, mask=inside, other=0.0)
            b = tl.load(at + F * D + k, mask=inside, other=0.0)
            v = tl.load(x + t.to(tl.int64) * D + k + o_k, mask=k + o_k < D, other=0.0)
        v32 = v.to(tl.float32)[None, :, :]
        # What one load gave is summed by its thread before the factor.
        of_gate = tl.sum(tl.reshape(a.to(tl.float32) * v32, (BN, BK // Q, Q // V, V)), 3)
        of_up = tl.sum(tl.reshape(b.to(tl.float32) * v32, (BN, BK // Q, Q // V, V)), 3)
        gate += of_gate * load_factors(gate_factors, k, o_c, D, even)[None, :, None]
        up += of_up * load_factors(up_factors, k, o_c, D, even)[None, :, None]
    return tl.sum(tl.sum(gate, 2), 1), tl.sum(tl.sum(up, 2), 1)


@triton.jit
def down_products(
    h, w, ids, weights, t, pn, D: tl.constexpr, F: tl.constexpr, KS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sum [BN] of the weighted down products of token t's experts, rows of block pn."""
    o_n = pn * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    steps: tl.constexpr = (F + BK - 1) // BK
    even: tl.constexpr = (D % BN == 0) and (F % BK == 0)
    acc = tl.zeros((BN, BK), tl.float32)
    for i in tl.range(0, KS * steps, num_stages=STAGES):
        n = t * KS + i // steps
        k = (i % steps) * BK
        e = tl.load(ids + n).to(tl.int64)
        weight = tl.load(weights + n)
        at = w + e * (D * F) + o_n[:, None] * F + k + o_k[None, :]
        if even:
            a = tl.load(at)
            v = tl.load(h + n.to(tl.int64) * F + k + o_k)
        else:
            a = tl.load(at, mask=(o_n[:, None] < D) & (k + o_k[None, :] < F), other=0.0)
            v = tl.load(h + n.to(tl.int64) * F + k + o_k, mask=k + o_k < F, other=0.0)
        acc += a.to(tl.float32) * (v.to(tl.float32) * weight)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def down_products_fp8(
    h, w, s, ids, weights, t, pn, D: tl.constexpr, F: tl.constexpr, KS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``down_products`` of weights in FP8 blocks, in steps of BK / Q parts that have one factor each."""
    Q: tl.constexpr = min(BK, SIDE)
    o_n = pn * BN + tl.arange(0, BN)
    o_c = tl.arange(0, BK // Q)
    o_k = o_c[:, None] * Q + tl.arange(0, Q)[None, :]
    steps: tl.constexpr = (F + BK - 1) // BK
    even: tl.constexpr = (D % BN == 0) and (F % BK == 0)
    acc = tl.zeros((BN, BK // Q, Q), tl.float32)
    for i in tl.range(0, KS * steps, num_stages=STAGES):
        n = t * KS + i // steps
        k = (i % steps) * BK
        e = tl.load(ids + n).to(tl.int64)
        weight = tl.load(weights + n)
        at = w + e * (D * F) + o_n[:, None, None] * F + k + o_k[None, :, :]
        if even:
            a = tl.load(at)
            v = tl.load(h + n.to(tl.int64) * F + k + o_k)
        else:
            a = tl.load(at, mask=(o_n[:, None, None] < D) & (k + o_k[None, :, :] < F), other=0.0)
            v = tl.load(h + n.to(tl.int64) * F + k + o_k, mask=k + o_k < F, other=0.0)
        factor = weight * load_factors(factors_at(s, e, 0, pn * BN, D, F, 1), k, o_c, F, even)
        acc += a.to(tl.float32) * (v.to(tl.float32) * factor[:, None])[None, :, :]
    return tl.sum(tl.sum(acc, 2), 1)


@triton.jit
def add_bias(v, bias, o_r, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Add the bias of the rows to v, [len(o_r)]."""
    if HAS_BIAS:
        v += tl.load(bias + o_r, mask=o_r < N, other=0.0).to(tl.float32)
    return v


@triton.jit
def largest_of(x, size, BK: tl.constexpr):
    """Give the largest magnitude of x, rounded down to a power of two, and its inverse."""
    o_k = tl.arange(0, BK)
    top = tl.max(tl.abs(tl.load(x + o_k, mask=o_k < size, other=0.0).to(tl.float32)), 0)
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), tl.maximum(0x7F000000 - bits, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def pack_pairs(x, o_j, inside, inverse):
    """Load the pairs o_j of x, bfloat16, times ``inverse``: float16, two to an int32."""
    pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + o_j, mask=inside, other=0)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a, b; .reg .b32 t; shl.b32 t, $1, 16; mov.b32 a, t; and.b32 t, $1, 0xffff0000; mov.b32 b, t; "
        "mul.f32 a, a, $2; mul.f32 b, b, $2; cvt.rn.f16x2.f32 $0, b, a; }",
        "=r,r,f", [pairs, inverse], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def multiply_fours(a, x01, x23):
    """Multiply four values of FP8, an int32 each, with four of float16: two sums of two products, float16, an int32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .b32 p, q; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; "
        "mul.rn.f16x2 p, p, $2; fma.rn.f16x2 $0, q, $3, p; }",
        "=r,r,r,r", [a, x01, x23], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def add_twos(a, b):
    """Add two times two values of float16, an int32 each."""
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def sum_twos(a):
    """Add the two values of float16 in an int32, in float32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .f32 u, v; mov.b32 {l, h}, $1; cvt.f32.f16 u, l; cvt.f32.f16 v, h; "
        "add.f32 $0, u, v; }",
        "=f,r", [a], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def group_parts(v, BK: tl.constexpr):
    """View what stands part by part, [P, PART / 4] or [P], in groups, [J, G, PART / 4] or [J, G]."""
    J: tl.constexpr = min(ABREAST, BK // PART)
    if len(v.shape) == 1:
        return tl.reshape(v, (J, BK // PART // J))
    else:
        return tl.reshape(v, (J, BK // PART // J, PART // 4))


@triton.jit
def load_row(x, t, D: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr):
    """Load row t of x, 0 past D: float32 [P, PART] twice, and 1; packed, int32 [J, G, PART / 4] twice, and a factor."""
    x += t.to(tl.int64) * D
    if PACKED:
        top, inverse = largest_of(x, D, BK)
        o_j = tl.arange(0, BK // PART)[:, None] * (PART // 2) + 2 * tl.arange(0, PART // 4)[None, :]
        inside = o_j < D // 2
        x0, x1 = pack_pairs(x, o_j, inside, inverse), pack_pairs(x, o_j + 1, inside, inverse)
        return group_parts(x0, BK), group_parts(x1, BK), top
    else:
        o_k = tl.arange(0, BK // PART)[:, None] * PART + tl.arange(0, PART)[None, :]
        if BK == D:
            v = tl.load(x + o_k).to(tl.float32)
        else:
            v = tl.load(x + o_k, mask=o_k < D, other=0.0).to(tl.float32)
        return v, v, 1.0


@triton.jit
def columns_by_loads(BK: tl.constexpr, V: tl.constexpr):
    """Count BK columns load by load, [C, P, 1, V]."""
    o_k = tl.arange(0, PART // V)[:, None] * V + tl.arange(0, BK // PART)[None, :] * PART
    return o_k[:, :, None, None] + tl.arange(0, V)[None, None, None, :]


@triton.jit
def group_loads(v, V: tl.constexpr):
    """View [P, PART] load by load, [C, P, 1, V]."""
    return tl.permute(tl.reshape(v, (v.shape[0], PART // V, V)), (1, 0, 2))[:, :, None, :]


@triton.jit
def load_rows(w, o_n, D: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr):
    """Load rows o_n of a matrix [N, D] whole, as [C, P, BN, V], or fours of FP8 [J, BN, G, PART / 4]; 0 outside.

    Each weight is read once in a step: what is fetched ahead shall outlive it in the cache.
    """
    LD: tl.constexpr = D // 4 if PACKED else D
    if PACKED:
        o_p = group_parts(tl.arange(0, BK // PART), BK)[:, None, :, None]
        o_k = o_p * (PART // 4) + tl.arange(0, PART // 4)[None, None, None, :]
        o_n = o_n[None, :, None, None]
        w = w.to(tl.pointer_type(tl.int32))
    else:
        V: tl.constexpr = LOAD // w.dtype.element_ty.primitive_bitwidth
        o_k = columns_by_loads(BK, V)
        o_n = o_n[None, None, :, None]
    at = w + o_n * LD + o_k
    if (N % BN == 0) and (BK == D):
        a = tl.load(at, eviction_policy="evict_first")
    else:
        a = tl.load(at, mask=(o_n < N) & (o_k < LD), other=0 if PACKED else 0.0, eviction_policy="evict_first")
    return a


@triton.jit
def sum_rows(a, x0, x1, factor, top, PACKED: tl.constexpr):
    """Sum [BN] of the products of what ``load_rows`` and ``load_row`` gave.

    ``factor`` is of each part, [P], or None; packed, [J, G].
    """
    if PACKED:
        v = multiply_fours(a, x0[:, None, :, :], x1[:, None, :, :])
        v = tl.reduce(tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2], v.shape[3] // FOURS, FOURS)), 4, add_twos)
        v = sum_twos(v) * factor[:, None, :, None]
        return tl.sum(tl.sum(tl.sum(v, 2), 2), 0) * top
    else:
        v = tl.sum(a.to(tl.float32) * group_loads(x0, a.shape[3]), 3)
        if factor is not None:
            v *= factor[None, :, None]
        return tl.sum(tl.sum(v, 1), 0)


@triton.jit
def gate_up_at_once(v, w, s, e, pn, D: tl.constexpr, F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Gate and up products [BN] of v, which ``load_row`` loaded, with expert e, rows of block pn; BK >= D."""
    o_n = pn * BN + tl.arange(0, BN)
    o_c = tl.arange(0, BK // PART)
    at = w + e.to(tl.int64) * (2 * F * D)
    a = load_rows(at, o_n, D, F, BN, BK, False)
    b = load_rows(at + F * D, o_n, D, F, BN, BK, False)
    if s is None:
        g = sum_rows(a, v, v, None, 1.0, False)
        u = sum_rows(b, v, v, None, 1.0, False)
    else:
        of_gate = load_factors(factors_at(s, e, 0, pn * BN, F, D, 2), 0, o_c, D, BK == D)
        of_up = load_factors(factors_at(s, e, 1, pn * BN, F, D, 2), 0, o_c, D, BK == D)
        g = sum_rows(a, v, v, of_gate, 1.0, False)
        u = sum_rows(b, v, v, of_up, 1.0, False)
    return g, u


@triton.jit
def down_part(
    w, s, ids, weights, t, pn, first, D: tl.constexpr, F: tl.constexpr, KS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Load BK of the F * KS columns that token t's experts have side by side, from ``first`` on; F is whole parts.

    Returns:
        Weights [C, P, BN, V], and what each part is times [P], the routing's weight and the factor.
    """
    of_expert: tl.constexpr = F // PART
    V: tl.constexpr = LOAD // w.dtype.element_ty.primitive_bitwidth
    o_n = pn * BN + tl.arange(0, BN)
    o_p = tl.arange(0, BK // PART) + first // PART
    inside = o_p < KS * of_expert
    n = t * KS + tl.minimum(o_p // of_expert, KS - 1)
    e = tl.load(ids + n).to(tl.int64)
    factor = tl.where(inside, tl.load(weights + n), 0.0)
    columns = (e * (D * F) + o_p % of_expert * PART)[None, :, None, None] + columns_by_loads(PART, V)
    at = w + columns + o_n[None, None, :, None] * F
    inside = inside[None, :, None, None]
    if D % BN == 0:
        a = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        a = tl.load(at, mask=inside & (o_n[None, None, :, None] < D), other=0.0, eviction_policy="evict_first")
    if s is not None:
        factor *= tl.load(factors_at(s, e, 0, pn * BN, D, F, 1) + o_p % of_expert)
    return a, factor


@triton.jit
def multiply_part(h, a, factor, t, first, F: tl.constexpr, KS: tl.constexpr, BK: tl.constexpr):
    """Sum [BN] of the products of what ``down_part`` loaded with the token's rows of h."""
    o_k = first + tl.arange(0, BK // PART)[:, None] * PART + tl.arange(0, PART)[None, :]
    v = tl.load(h + t.to(tl.int64) * (KS * F) + o_k, mask=o_k < KS * F, other=0.0).to(tl.float32)
    return sum_rows(a, v, v, factor, 1.0, False)


@triton.jit
def down_side_by_side(
    h, w, s, ids, weights, t, pn, D: tl.constexpr, F: tl.constexpr, KS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``down_products`` over the columns of all of the token's experts, BK at a time, whichever expert they are of."""
    acc = tl.zeros((BN,), tl.float32)
    for first in tl.range(0, KS * F, BK, num_stages=STAGES):
        a, factor = down_part(w, s, ids, weights, t, pn, first, D, F, KS, BN, BK)
        acc += multiply_part(h, a, factor, t, first, F, KS, BK)
    return acc
