"""The two products of an expert on one tile of rows, shared by the grouped and the sorted kernels.

Letters: D hidden, F expert width, BM rows of x in a tile, BN rows of a weight matrix, BK depth.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

import triton
import triton.language as tl


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
def gate_up_tile(
    x, w, h, source, target, inside, e, pn, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """h[target] = silu(g) u with g, u the gate and up products of x[source] with expert e, columns of block pn."""
    o_n = pn * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    even: tl.constexpr = (F % BN == 0) and (D % BK == 0)
    even_depth: tl.constexpr = D % BK == 0
    if SWAP:
        gate = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
    else:
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
    if not DESCRIPTOR:
        base = w + e.to(tl.int64) * (2 * F * D)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        if DESCRIPTOR:
            a = w.load([e * (2 * F) + pn * BN, k])
            b = w.load([e * (2 * F) + F + pn * BN, k])
        else:
            a = load_matrix(base, o_n, k + o_k, F, D, even)
            b = load_matrix(base + F * D, o_n, k + o_k, F, D, even)
        rows = load_rows(x, source, k, o_k, inside, D, even_depth)
        gate = multiply_add(rows, a, gate, SWAP)
        up = multiply_add(rows, b, up, SWAP)
    y = (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty)
    if SWAP:
        y = y.T
    at = h + target.to(tl.int64)[:, None] * F + o_n[None, :]
    tl.store(at, y, mask=inside[:, None] & (o_n[None, :] < F))


@triton.jit
def down_tile(
    h, w, y, source, target, inside, e, pn, D: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """y[target] = the down product of h[source] with expert e, columns of block pn; not weighted."""
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
    for k in tl.range(0, F, BK, num_stages=STAGES):
        if DESCRIPTOR:
            a = w.load([e * D + pn * BN, k])
        else:
            a = load_matrix(base, o_n, k + o_k, D, F, even)
        rows = load_rows(h, source, k, o_k, inside, F, even_depth)
        acc = multiply_add(rows, a, acc, SWAP)
    out = acc.to(y.dtype.element_ty)
    if SWAP:
        out = out.T
    at = y + target.to(tl.int64)[:, None] * D + o_n[None, :]
    tl.store(at, out, mask=inside[:, None] & (o_n[None, :] < D))
