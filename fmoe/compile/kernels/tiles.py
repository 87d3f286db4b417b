"""The two products of an expert on one tile of rows, shared by the grouped and the sorted kernels.

``s`` are the factors of weights in FP8 blocks, None of others. Such a kernel's block lies in one block of factors,
which multiplies its product.

Letters: D hidden, F expert width, BM rows of x in a tile, BN rows of a weight matrix, BK depth.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

import triton
import triton.language as tl

from .fp8 import SIDE, factors_at


@triton.jit
def load_matrix(p, o_row, o_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Load [len(o_row), len(o_column)] of a row-major [ROWS, COLUMNS] matrix; 0 outside."""
    at = p + o_row[:, None] * COLUMNS + o_column[None, :]
    if EVEN:
        v = tl.load(at)
    else:
        v = tl.load(at, mask=(o_row[:, None] < ROWS) & (o_column[None, :] < COLUMNS), other=0.0)
    return v


@triton.jit
def load_rows(p, row, k, o_k, inside, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Load columns k + o_k of the given rows; 0 where a row is not inside."""
    at = p + row.to(tl.int64)[:, None] * COLUMNS + k + o_k[None, :]
    if EVEN:
        v = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        v = tl.load(at, mask=inside[:, None] & (k + o_k[None, :] < COLUMNS), other=0.0)
    return v


@triton.jit
def multiply_add(a, w, acc, SWAP: tl.constexpr):
    """Add a w^T ([BM, BN]), or with SWAP w a^T ([BN, BM]), whose larger side then is the weights'."""
    if SWAP:
        acc = tl.dot(w, a.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def multiply_add_scaled(a, w, acc, factor, SWAP: tl.constexpr):
    """Add the product of ``multiply_add``, the weights converted to the dtype of a, times a factor."""
    v = w.to(a.dtype)
    if SWAP:
        acc += tl.dot(v, a.T, input_precision="ieee") * factor
    else:
        acc += tl.dot(a, v.T, input_precision="ieee") * factor
    return acc


@triton.jit
def split_columns(v, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Left and right halves of [ROWS, 2 HALF]."""
    return tl.split(tl.permute(tl.reshape(v, (ROWS, 2, HALF)), (0, 2, 1)))


@triton.jit
def store_rows(at, v, inside, first, COLUMNS: tl.constexpr):
    """Store [BM, n] at rows of pointers; first is the column of the first value."""
    o_n = tl.arange(0, v.shape[1])
    tl.store(at + o_n[None, :], v.to(at.dtype.element_ty), mask=inside[:, None] & (first + o_n[None, :] < COLUMNS))


@triton.jit
def gate_up_tile(
    x, w, s, h, source, target, inside, e, pn, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """h[target] = silu(g) u with g, u the gate and up products of x[source] with expert e, columns of block pn."""
    o_n = pn * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    even_depth: tl.constexpr = D % BK == 0
    if DESCRIPTOR:
        # One block holds the gate rows and, behind them, the up rows: one product of twice the width.
        if SWAP:
            both = tl.zeros((2 * BN, BM), tl.float32)
        else:
            both = tl.zeros((BM, 2 * BN), tl.float32)
        for k in tl.range(0, D, BK, num_stages=STAGES):
            a = w.load([2 * e, pn * BN, k]).reshape(2 * BN, BK)
            rows = load_rows(x, source, k, o_k, inside, D, even_depth)
            both = multiply_add(rows, a, both, SWAP)
        if SWAP:
            gate, up = tl.split(tl.permute(tl.reshape(both, (2, BN, BM)), (1, 2, 0)))
        else:
            gate, up = split_columns(both, BM, BN)
    else:
        even: tl.constexpr = (F % BN == 0) and even_depth
        if SWAP:
            gate = tl.zeros((BN, BM), tl.float32)
            up = tl.zeros((BN, BM), tl.float32)
        else:
            gate = tl.zeros((BM, BN), tl.float32)
            up = tl.zeros((BM, BN), tl.float32)
        base = w + e.to(tl.int64) * (2 * F * D)
        if s is not None:
            gate_factors = factors_at(s, e, 0, pn * BN, F, D, 2)
            up_factors = factors_at(s, e, 1, pn * BN, F, D, 2)
        for k in tl.range(0, D, BK, num_stages=STAGES):
            a = load_matrix(base, o_n, k + o_k, F, D, even)
            b = load_matrix(base + F * D, o_n, k + o_k, F, D, even)
            rows = load_rows(x, source, k, o_k, inside, D, even_depth)
            if s is None:
                gate = multiply_add(rows, a, gate, SWAP)
                up = multiply_add(rows, b, up, SWAP)
            else:
                gate = multiply_add_scaled(rows, a, gate, tl.load(gate_factors + k // SIDE), SWAP)
                up = multiply_add_scaled(rows, b, up, tl.load(up_factors + k // SIDE), SWAP)
    y = (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty)
    if SWAP:
        y = y.T
    at = h + target.to(tl.int64)[:, None] * F + o_n[None, :]
    tl.store(at, y, mask=inside[:, None] & (o_n[None, :] < F))


@triton.jit
def down_tile(
    h, w, s, y, source, target, inside, e, pn, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """y[target] = the down product of h[source] with expert e, columns of block pn; not weighted.

    With DESCRIPTOR, source is the first of BM neighbouring rows.
    """
    o_n = pn * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    even: tl.constexpr = (D % BN == 0) and (F % BK == 0)
    even_depth: tl.constexpr = F % BK == 0
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    if not DESCRIPTOR:
        base = w + e.to(tl.int64) * (D * F)
    if s is not None:
        factors = factors_at(s, e, 0, pn * BN, D, F, 1)
    for k in tl.range(0, F, BK, num_stages=STAGES):
        if DESCRIPTOR:
            a = w.load([e * D + pn * BN, k])
            rows = h.load([source, k])
        else:
            a = load_matrix(base, o_n, k + o_k, D, F, even)
            rows = load_rows(h, source, k, o_k, inside, F, even_depth)
        if s is None:
            acc = multiply_add(rows, a, acc, SWAP)
        else:
            acc = multiply_add_scaled(rows, a, acc, tl.load(factors + k // SIDE), SWAP)
    at = y + target.to(tl.int64)[:, None] * D + pn * BN
    if BN >= 256 and not SWAP:
        # Half after half, because the way to the store leads through shared memory, which the loads fill.
        half: tl.constexpr = BN // 2
        left, right = split_columns(acc, BM, half)
        store_rows(at, left, inside, pn * BN, D)
        store_rows(at + half, right, inside, pn * BN + half, D)
    else:
        if SWAP:
            acc = acc.T
        store_rows(at, acc, inside, pn * BN, D)
