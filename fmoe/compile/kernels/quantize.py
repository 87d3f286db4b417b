"""Rows in FP8 with a factor for each 128 columns: the operands of products in FP8.

Letters: T rows, D columns, B blocks of 128 columns of all rows.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, FP8, LARGEST, LEAST

from .fp8 import SIDE
from .launch import cdiv, launch_options, wait_for_previous

TOP = tl.constexpr(LARGEST)
FLOOR = tl.constexpr(LEAST)
BLOCKS = 32  # of one program


@triton.jit
def quantize_values(v, dtype: tl.constexpr):
    """Give the rows of v, [BM, 128], in FP8, and a factor for each."""
    factor = tl.maximum(tl.max(tl.abs(v), 1), FLOOR) / TOP
    return (v / factor[:, None]).to(dtype), factor


@triton.jit
def quantize_blocks(x, q, s, B, BB: tl.constexpr, PDL: tl.constexpr):
    """BB blocks of contiguous x; grid (B / BB,)."""
    o_b = tl.program_id(0) * BB + tl.arange(0, BB)
    at = o_b.to(tl.int64)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    inside = o_b < B
    wait_for_previous(PDL)
    v = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    y, factor = quantize_values(v, q.dtype.element_ty)
    tl.store(q + at, y, mask=inside[:, None])
    tl.store(s + o_b, factor, mask=inside)


def quantize_rows(x_TD: Tensor, /, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise rows in one launch; the formula of ``fmoe.functional.quant.quantize_rows``.

    Args:
        x_TD: contiguous, D whole blocks of 128.
        pdl: as in ``Settings``.

    Returns:
        float8_e4m3fn [T, D], and factors float32 [T, D / 128].

    Raises:
        ValueError: D is no whole number of blocks, or x is not contiguous.
    """
    tokens, hidden = x_TD.shape
    if hidden % BLOCK or not x_TD.is_contiguous():
        raise ValueError(
            f"x {tuple(x_TD.shape)} must be contiguous rows of whole blocks of {BLOCK} columns to be quantised, got "
            f"strides {x_TD.stride()}; use a product of unquantised rows"
        )
    q_TD = torch.empty(tokens, hidden, dtype=FP8, device=x_TD.device)
    scale = torch.empty(tokens, hidden // BLOCK, dtype=torch.float32, device=x_TD.device)
    if scale.numel():
        quantize_blocks[(cdiv(scale.numel(), BLOCKS),)](
            x_TD, q_TD, scale, scale.numel(), BB=BLOCKS, PDL=pdl, num_warps=4, **launch_options(pdl)
        )
    return q_TD, scale
