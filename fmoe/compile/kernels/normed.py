"""Residual and RMS norm inside the kernel behind them, few tokens: each program makes the whole rows, one stores them.

A launch of its own costs more than to make the rows again in each program. What is rounded, and the order of every sum
that could show in the result, is the same wherever a row is normed.

Letters: D the normalised channels, P parts of PART columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc, assignment"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .launch import wait_alone
from .products import PART, group_parts, load_row


class Unnormed(NamedTuple):
    """Rows that the kernel reading them has yet to make: the norm of x + branch."""

    x_TD: Tensor
    branch_TD: Tensor
    weight_D: Tensor  # its dtype chooses the rounding, as in ``rms_norm``
    eps: float


def check_unnormed(x: Unnormed, /, *, most: int) -> None:
    """Refuse what the kernels would read wrongly.

    Args:
        x: rows.
        most: rows that the kernel takes.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a tensor that is not contiguous.
    """
    rows, branch, weight = tensors = x.x_TD, x.branch_TD, x.weight_D
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if rows.dim() != 2 or branch.shape != rows.shape or weight.shape != rows.shape[1:] or not 0 < len(rows) <= most:
        raise ValueError(
            f"x, branch and norm must be [T, D], [T, D] and [D], T from 1 to {most}, got {shapes}; norm more rows apart"
        )
    if branch.dtype != rows.dtype or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"x and branch must have one dtype, {rows.dtype} and {branch.dtype} came, and be contiguous")


@triton.jit
def sum_squares(v, WIDE: tl.constexpr):
    """Sum the squares of v [N], float32: by fours, then in float64, so that the order of the rest does not show.

    WIDE: v has more digits than bfloat16 or float16, and its squares are not exact in float32.
    """
    N: tl.constexpr = v.numel
    if WIDE or (N < 4):
        v = v.to(tl.float64)
        squares = v * v
    else:
        squares = tl.sum(tl.sum(tl.reshape(v * v, (N // 4, 2, 2)), 2), 1).to(tl.float64)
    return tl.sum(squares, 0).to(tl.float32)


@triton.jit
def weigh_normed(v, scale, w, y):
    """Multiply v by what makes its mean square one, then by the norm's weight; round as ``rms_norm`` to y's type."""
    n = (v * scale).to(w.dtype).to(tl.float32)
    return (n * w.to(tl.float32)).to(w.dtype).to(y.dtype.element_ty)


@triton.jit
def unpack_pair(pairs):
    """Give the lower and the upper bfloat16 of int32 as float32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def load_four(at, o_j, inside):
    """Load the fours o_j of bfloat16 or float32, as four of the type."""
    if at.dtype.element_ty == tl.float32:
        pairs = at.to(tl.pointer_type(tl.int64))
        ab = tl.load(pairs + 2 * o_j, mask=inside, other=0)
        cd = tl.load(pairs + 2 * o_j + 1, mask=inside, other=0)
        a = ab.to(tl.int32).to(tl.float32, bitcast=True)
        b = (ab >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        c = cd.to(tl.int32).to(tl.float32, bitcast=True)
        d = (cd >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        four = tl.load(at.to(tl.pointer_type(tl.int64)) + o_j, mask=inside, other=0)
        a, b = unpack_pair(four.to(tl.int32))
        c, d = unpack_pair((four >> 32).to(tl.int32))
        a, b, c, d = a.to(tl.bfloat16), b.to(tl.bfloat16), c.to(tl.bfloat16), d.to(tl.bfloat16)
    return a, b, c, d


@triton.jit
def store_four(at, o_j, a, b, c, d, inside):
    """Store four values of bfloat16 each at the fours o_j."""
    ab = (a.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (b.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    cd = (c.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (d.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    four = (ab.to(tl.int64) & 0xFFFFFFFF) | (cd.to(tl.int64) << 32)
    tl.store(at.to(tl.pointer_type(tl.int64)) + o_j, four, mask=inside)


@triton.jit
def fours_of(BK: tl.constexpr):
    """Count the fours of a row part by part, [P, PART / 4]."""
    return tl.arange(0, BK // PART)[:, None] * (PART // 4) + tl.arange(0, PART // 4)[None, :]


@triton.jit
def columns_of(BK: tl.constexpr):
    """Count the columns of a row part by part, [P, PART]."""
    return tl.arange(0, BK // PART)[:, None] * PART + tl.arange(0, PART)[None, :]


@triton.jit
def load_norm(norm, D: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr):
    """Load the norm's weight for ``load_normed``; nothing has to be waited for."""
    if PACKED:
        o_j = fours_of(BK)
        return load_four(norm, o_j, o_j < D // 4)
    else:
        o_k = columns_of(BK)
        w = tl.load(norm + o_k, mask=o_k < D, other=0.0)
        return w, w, w, w


@triton.jit
def pack_scaled(a, b, inverse):
    """Give two float32 times ``inverse`` as float16, in an int32."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a, b; mul.f32 a, $1, $3; mul.f32 b, $2, $3; cvt.rn.f16x2.f32 $0, b, a; }",
        "=r,f,f,f", [a, b, inverse], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def load_normed(
    x, branch, w0, w1, w2, w3, total, normed, stores, D: tl.constexpr, EPS: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """``load_row`` of the one row that is the norm of x + branch, by what ``load_norm`` loaded.

    A program for which ``stores`` also stores the sum, and the norm where there is a place for it.
    """
    if PACKED:
        o_j = fours_of(BK)
        inside = o_j < D // 4
        a0, a1, a2, a3 = load_four(x, o_j, inside)
        b0, b1, b2, b3 = load_four(branch, o_j, inside)
        t0 = (a0.to(tl.float32) + b0.to(tl.float32)).to(tl.bfloat16)
        t1 = (a1.to(tl.float32) + b1.to(tl.float32)).to(tl.bfloat16)
        t2 = (a2.to(tl.float32) + b2.to(tl.float32)).to(tl.bfloat16)
        t3 = (a3.to(tl.float32) + b3.to(tl.float32)).to(tl.bfloat16)
        v0, v1, v2, v3 = t0.to(tl.float32), t1.to(tl.float32), t2.to(tl.float32), t3.to(tl.float32)
        squares = ((v0 * v0 + v1 * v1) + (v2 * v2 + v3 * v3)).to(tl.float64)
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0).to(tl.float32) / D + EPS)
        y0 = weigh_normed(v0, scale, w0, x)
        y1 = weigh_normed(v1, scale, w1, x)
        y2 = weigh_normed(v2, scale, w2, x)
        y3 = weigh_normed(v3, scale, w3, x)
        if stores:
            store_four(total, o_j, t0, t1, t2, t3, inside)
            if normed is not None:
                store_four(normed, o_j, y0, y1, y2, y3, inside)
        n0, n1, n2, n3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
        largest = tl.maximum(tl.maximum(tl.abs(n0), tl.abs(n1)), tl.maximum(tl.abs(n2), tl.abs(n3)))
        bits = tl.max(tl.max(largest, 1), 0).to(tl.int32, bitcast=True) & 0x7F800000
        inverse = tl.maximum(0x7F000000 - bits, 0x00800000).to(tl.float32, bitcast=True)
        x0, x1 = group_parts(pack_scaled(n0, n1, inverse), BK), group_parts(pack_scaled(n2, n3, inverse), BK)
        return x0, x1, bits.to(tl.float32, bitcast=True)
    else:
        o_k = columns_of(BK)
        inside = o_k < D
        v = tl.load(x + o_k, mask=inside, other=0.0).to(tl.float32)
        v += tl.load(branch + o_k, mask=inside, other=0.0).to(tl.float32)
        t = v.to(x.dtype.element_ty)
        v = t.to(tl.float32)
        wide: tl.constexpr = x.dtype.element_ty == tl.float32
        scale = tl.rsqrt(sum_squares(tl.reshape(v, (BK,)), wide) / D + EPS)
        y = weigh_normed(v, scale, w0, x)
        if stores:
            tl.store(total + o_k, t, mask=inside)
            if normed is not None:
                tl.store(normed + o_k, y, mask=inside)
        n = y.to(tl.float32)
        return n, n, 1.0


@triton.jit
def wait_for_rows(
    x, branch, norm, total, normed, first, stores, T: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr,
    BK: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``load_row`` of T rows of x from ``first`` on, a tuple, once they are there; with a norm, ``load_normed``."""
    rows = ()
    if norm is None:
        wait_alone(PDL)
        for t in tl.static_range(T):
            rows += (load_row(x, first + t, D, BK, PACKED),)
    else:
        w0, w1, w2, w3 = load_norm(norm, D, BK, PACKED)
        wait_alone(PDL)
        for t in tl.static_range(T):
            at = (first + t) * D
            of_normed = None if normed is None else normed + at
            rows += (
                load_normed(x + at, branch + at, w0, w1, w2, w3, total + at, of_normed, stores, D, EPS, BK, PACKED),
            )
    return rows
