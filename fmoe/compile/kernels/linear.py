"""Kernels of a dense projection of few tokens, bound by reading the weights once.

``s`` are the factors of weights in FP8 blocks, None of others. M rows that are not quantised may follow such weights;
programs of their own multiply them.

Letters: T tokens, N rows of the weight matrix, M unquantised rows behind them, D summed dimension.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"
# ruff: noqa: SIM108

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, Fp8, Weight, weight_shape

from ..linear_settings import FP8_TOKENS as FP8_TOKENS
from ..linear_settings import MAX_TOKENS as MAX_TOKENS
from ..linear_settings import LinearSettings as LinearSettings
from ..linear_settings import default_linear_settings as default_linear_settings
from ..linear_settings import linear_from_ints as linear_from_ints
from ..linear_settings import linear_to_ints as linear_to_ints
from .add_norm import MAX_CHANNELS, add_rms_norm_split
from .fp8 import SIDE, can_pack, check_blocks, check_fp8, factors_at, load_factors, split_weight
from .launch import LINE, cdiv, fetch_ahead, launch_options, next_power_of_2, start_next, wait_alone, wait_for_previous
from .layer import DTYPES
from .linear_steps import linear_dot, load_weights
from .linear_stream import run_stream, store_block
from .normed import Unnormed, check_unnormed, wait_for_rows
from .products import FEW_TOKENS, PART, add_bias, load_rows
from .split_rows import SplitRows, split_into_pairs

SUM_BLOCK = 256


@triton.jit
def sum_products(
    x, w, t, first, o_r, D: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """Sum [BN] of the products of token t and the rows o_r over SPLIT columns from ``first`` on."""
    o_k = tl.arange(0, BK)
    even: tl.constexpr = D % SPLIT == 0
    acc = tl.zeros((BN, BK), tl.float32)
    for k in tl.range(first, first + SPLIT, BK, num_stages=STAGES):
        a = load_weights(w, o_r, k + o_k, D, even)
        if even:
            b = tl.load(x + t * D + k + o_k)
        else:
            b = tl.load(x + t * D + k + o_k, mask=k + o_k < D, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def sum_products_fp8(
    x, w, s, t, first, o_r, row, N: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
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
            b = tl.load(x + t * D + k + o_k)
        else:
            a = tl.load(at + k, mask=k + o_k[None, :, :] < D, other=0.0)
            b = tl.load(x + t * D + k + o_k, mask=k + o_k < D, other=0.0)
        b32 = b.to(tl.float32) * load_factors(factors, k, o_c, D, even)[:, None]
        acc += a.to(tl.float32) * b32[None, :, :]
    return tl.sum(tl.sum(acc, 2), 1)


@triton.jit
def product_block(
    x, branch, norm, total, w, s, bias, y, T, t, block, TOKENS: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    LD: tl.constexpr, SPLIT: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Token t, BN of N rows, and one part of D; y has LD columns. Where there is a norm, x is that of x + branch.

    Where a block holds rows whole, TOKENS tokens from t on.
    """
    o_n = block * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    # Rows past the last repeat it: a load without a mask, and no store.
    o_r = tl.minimum(o_n, N - 1).to(tl.int64)
    at = y + (part.to(tl.int64) * T + t) * LD
    if (SPLIT >= D) and (BK >= D) and (BK >= PART):
        # The weights are asked for before x is there.
        a = load_rows(w, o_n.to(tl.int64), D, N, BN, BK, False)
        factor = None
        if s is not None:
            factor = load_factors(factors_at(s, 0, 0, block * BN, N, D, 1), 0, tl.arange(0, BK // PART), D, BK == D)
        stores = tl.program_id(0) == 0
        rows = wait_for_rows(x, branch, norm, total, None, t, stores, TOKENS, D, EPS, BK, False, PDL)
        store_block(a, rows, factor, bias, at, o_n, TOKENS, N, LD, HAS_BIAS, False)
    else:
        if AHEAD > 0:
            fetch_ahead(w, o_r, part * SPLIT, D, BK, AHEAD, LINE)
        wait_alone(PDL)
        if s is None:
            v = sum_products(x, w, t, part * SPLIT, o_r, D, SPLIT, BN, BK, STAGES)
        else:
            v = sum_products_fp8(x, w, s, t, part * SPLIT, o_r, block * BN, N, D, SPLIT, BN, BK, STAGES)
        v = add_bias(v, bias, o_n, N, HAS_BIAS)
        tl.store(at + o_n, v.to(y.dtype.element_ty), mask=o_n < N)


@triton.jit
def linear_product(
    x, branch, norm, total, w, s, rest, bias, y, T, TOKENS: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, SPLIT: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TOKENS of T tokens, BN rows and SPLIT of D; grid (N / BN * T / TOKENS, D / SPLIT), tokens of a block together."""
    start_next(PDL)
    t = (tl.program_id(0) % (T // TOKENS)).to(tl.int64) * TOKENS
    block = tl.program_id(0) // (T // TOKENS)
    if M > 0:
        # The rows of twice the bytes come first, so that nobody waits for them at the end.
        first: tl.constexpr = (M + BN - 1) // BN
        LD: tl.constexpr = N + M
        if block < first:
            product_block(
                x, branch, norm, total, rest, None, bias + N if HAS_BIAS else bias, y + N, T, t, block, TOKENS, M, D,
                LD, SPLIT, EPS, HAS_BIAS, BN, BK, STAGES, AHEAD, LINE, PDL,
            )  # fmt: skip
        else:
            product_block(
                x, branch, norm, total, w, s, bias, y, T, t, block - first, TOKENS, N, D, LD, SPLIT, EPS, HAS_BIAS, BN,
                BK, STAGES, AHEAD, LINE, PDL,
            )  # fmt: skip
    else:
        product_block(
            x, branch, norm, total, w, s, bias, y, T, t, block, TOKENS, N, D, N, SPLIT, EPS, HAS_BIAS, BN, BK, STAGES,
            AHEAD, LINE, PDL,
        )  # fmt: skip


@triton.jit
def sum_parts(
    parts, bias, y, T, N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the parts of y in order; grid (N / BN, T)."""
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    v = tl.zeros((BN,), tl.float32)
    for part in tl.static_range(SPLITS):
        v += tl.load(parts + (part * T + t) * N + o_n, mask=o_n < N, other=0.0)
    v = add_bias(v, bias, o_n, N, HAS_BIAS)
    tl.store(y + t * N + o_n, v.to(y.dtype.element_ty), mask=o_n < N)


def check_projection(x_TD: Tensor, w_ND: Weight, bias_N: Tensor | None, /) -> None:
    """Refuse what the kernel would read wrongly.

    Raises:
        ValueError: shapes that do not fit, too many tokens, mixed dtypes, or a tensor that is not contiguous.
        NotImplementedError: a dtype without a kernel, or FP8 on a device without it.
    """
    plain = [w_ND.rest_MD] if isinstance(w_ND, Fp8) else [w_ND]
    tensors = [tensor for tensor in (x_TD, *plain, bias_N) if tensor is not None]
    shape, outputs = weight_shape(w_ND), weight_shape(w_ND)[:1]
    shapes = [tuple(x_TD.shape), shape] + ([] if bias_N is None else [tuple(bias_N.shape)])
    fits = x_TD.dim() == len(shape) == 2 and x_TD.shape[1] == shape[1] > 0
    if not fits or (bias_N is not None and bias_N.shape != outputs):
        raise ValueError(f"x, w and bias must be [T, D], [N, D] and [N], got shapes {shapes}")
    most = FP8_TOKENS if isinstance(w_ND, Fp8) else MAX_TOKENS
    if x_TD.shape[0] > most:
        raise ValueError(f"{x_TD.shape[0]} tokens came, at most {most} fit; use torch's linear for more")
    if x_TD.dtype not in DTYPES:
        raise NotImplementedError(f"no projection kernel reads {x_TD.dtype}; use bfloat16, float16 or float32")
    if any(tensor.dtype != x_TD.dtype for tensor in tensors):
        raise ValueError(f"x, w and bias must have one dtype, got {[str(tensor.dtype) for tensor in tensors]}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("x, w and bias must be contiguous; call .contiguous() once after loading")
    if isinstance(w_ND, Fp8):
        check_fp8(w_ND)


def can_stream(x_TD: Tensor, w_ND: Weight, /) -> bool:
    """Tell whether programs can go on to their next rows: not of FP8 where it is multiplied one by one."""
    return not isinstance(w_ND, Fp8) or can_pack(x_TD, w_ND)


def takes_split(x_TD: Tensor, w_ND: Weight, settings: LinearSettings, /) -> bool:
    """Tell whether ``run_linear`` multiplies weights in FP8 as they are, with rows split into pairs."""
    return settings.dot == 2 and can_pack(x_TD, w_ND)


def run_linear(
    x_TD: Tensor,
    w_ND: Weight,
    settings: LinearSettings,
    /,
    *,
    bias_N: Tensor | None = None,
    split: SplitRows | None = None,
) -> Tensor:
    """Compute ``x w^T + bias`` with float32 sums, rounded once; equal on every run.

    Args:
        x_TD: rows, 0 <= T <= 16, of weights in FP8 blocks 64.
        w_ND: weights, contiguous; in FP8 blocks they are converted where they are multiplied, but not where
            ``takes_split``.
        settings: blocks.
        bias_N: of the dtype of x, or None.
        split: x, where it is split already; read where ``takes_split``, which else splits it in a launch of its own.

    Returns:
        [T, N], of the dtype of x.
    """
    check_projection(x_TD, w_ND, bias_N)
    in_steps = settings.dot and not settings.programs
    check_blocks(w_ND, settings.rows, settings.depth if in_steps else 0, name="linear")
    (tokens, hidden), outputs = x_TD.shape, weight_shape(w_ND)[0]
    y_TN = torch.empty(tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    if y_TN.numel() == 0:
        return y_TN
    if settings.programs:
        if tokens <= FEW_TOKENS and _holds_rows(hidden, settings) and can_stream(x_TD, w_ND):
            run_stream(x_TD, w_ND, bias_N, y_TN, settings)
            return y_TN
        settings = leave_programs(settings)
    # No part is empty: a depth that does not divide D can leave fewer parts than asked for.
    depth = cdiv(cdiv(hidden, settings.splits), settings.depth) * settings.depth
    splits = cdiv(hidden, depth)
    pairs = (split or split_into_pairs(x_TD, pdl=settings.pdl)) if takes_split(x_TD, w_ND, settings) else None
    if splits == 1:
        _launch(x_TD, w_ND, bias_N, y_TN, depth, settings, pairs=pairs)
        return y_TN
    parts = torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x_TD.device)
    _launch(x_TD, w_ND, None, parts, depth, settings, pairs=pairs)
    sum_parts[(cdiv(outputs, SUM_BLOCK), tokens)](
        parts, bias_N, y_TN, tokens, N=outputs, SPLITS=splits, HAS_BIAS=bias_N is not None, BN=SUM_BLOCK,
        PDL=settings.pdl, num_warps=4, **launch_options(settings.pdl),
    )  # fmt: skip
    return y_TN


def leave_programs(settings: LinearSettings, /) -> LinearSettings:
    """Give each block a program of its own, and to it as many registers as it has room for."""
    if settings.dot:
        return replace(settings, rows=16, depth=BLOCK, programs=0)
    return replace(settings, rows=min(settings.rows, 4), programs=0)


def _holds_rows(hidden: int, settings: LinearSettings) -> bool:
    return not settings.dot and settings.splits == 1 and settings.depth >= max(hidden, BLOCK)


def can_norm_linear(x_TD: Tensor, w_ND: Weight, settings: LinearSettings, /) -> bool:
    """Tell whether ``run_linear_normed`` saves a launch: a few rows that a block holds whole, or rows to be split."""
    tokens, hidden = x_TD.shape
    splits = takes_split(x_TD, w_ND, settings) and tokens <= FP8_TOKENS and hidden <= MAX_CHANNELS
    return tokens > 0 and (_norms_inside(x_TD, settings) or splits)


def _norms_inside(x_TD: Tensor, settings: LinearSettings) -> bool:
    return x_TD.shape[0] <= FEW_TOKENS and _holds_rows(x_TD.shape[1], settings)


def run_linear_normed(
    x: Unnormed, w_ND: Weight, settings: LinearSettings, /, *, bias_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``run_linear`` of rows that are yet to be normed, where ``can_norm_linear``.

    Args:
        x: of the dtype of the bias.
        w_ND, settings, bias_N: as there.

    Returns:
        (x + branch, what ``run_linear`` gives).
    """
    if not _norms_inside(x.x_TD, settings):
        normed_TD, total_TD, split = add_rms_norm_split(*x[:3], eps=x.eps, pdl=settings.pdl)
        return total_TD, run_linear(normed_TD, w_ND, settings, bias_N=bias_N, split=split)
    check_unnormed(x, most=FEW_TOKENS)
    check_projection(x.x_TD, w_ND, bias_N)
    check_blocks(w_ND, settings.rows, 0, name="linear")
    outputs, total_TD = weight_shape(w_ND)[0], torch.empty_like(x.x_TD)
    y_TN = x.x_TD.new_empty(len(x.x_TD), outputs)
    if settings.programs and can_stream(x.x_TD, w_ND):
        run_stream(x, w_ND, bias_N, y_TN, settings, total_TD=total_TD)
    else:
        apart = leave_programs(settings) if settings.programs else settings
        _launch(x, w_ND, bias_N, y_TN, settings.depth, apart, total_TD)
    return total_TD, y_TN


def _launch(
    x: Tensor | Unnormed,
    w_ND: Weight,
    bias_N: Tensor | None,
    y: Tensor,
    depth: int,
    settings: LinearSettings,
    total_TD: Tensor | None = None,
    pairs: SplitRows | None = None,
) -> None:
    x_TD, branch_TD, norm_D, eps = x if isinstance(x, Unnormed) else (x, None, None, 0.0)
    (tokens, hidden), (w, s) = x_TD.shape, split_weight(w_ND)
    rest_MD = w_ND.rest_MD if isinstance(w_ND, Fp8) else None
    rest = 0 if rest_MD is None else rest_MD.shape[0]
    blocks = cdiv(w.shape[0], settings.rows) + cdiv(rest, settings.rows)
    splits = cdiv(hidden, depth)
    constants = {
        "N": w.shape[0],
        "M": rest,
        "D": hidden,
        "SPLIT": depth,
        "HAS_BIAS": bias_N is not None,
        "BN": settings.rows,
        "BK": settings.depth,
        "STAGES": settings.stages,
        "AHEAD": settings.ahead,
        "LINE": LINE,
        "PDL": settings.pdl,
    }
    tensors = (w, s, rest_MD, bias_N, y)
    options = {"num_warps": settings.warps} | launch_options(settings.pdl)
    if settings.dot:
        # Of pairs, twice as many are columns of the product.
        block = max(MAX_TOKENS if pairs is None else MAX_TOKENS // 2, next_power_of_2(tokens))
        operands = (x_TD, *(pairs or (None, None)), *tensors)
        linear_dot[(blocks, splits)](*operands, tokens, **constants, BM=block, **options)
    else:
        few = tokens if tokens <= FEW_TOKENS and _holds_rows(hidden, settings) else 1
        linear_product[(blocks * tokens // few, splits)](
            x_TD, branch_TD, norm_D, total_TD, *tensors, tokens, TOKENS=few, EPS=eps, **constants, **options
        )
