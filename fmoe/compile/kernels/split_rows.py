"""Rows as sums of two values of FP8, which matrix instructions multiply with weights in FP8 as these are.

The nearest value to the row times a power of two, and what that is off by: together they carry the eight digits of
bfloat16, down to 2^-18 of the row's largest value.

Letters: N rows, D columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import FP8

from .launch import launch_options, next_power_of_2, wait_for_previous


class SplitRows(NamedTuple):
    """Rows as sums of two values of FP8, times a power of two for each row."""

    pairs_2ND: Tensor  # the nearest values, then what they are off by
    power_N: Tensor  # float32


@triton.jit
def power_of(top):
    """Give the power of two that brings ``top`` to 2^7..2^8, where FP8 ends at 448, and its inverse."""
    f = tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 0xFF, 8)
    return ((261 - f) << 23).to(tl.float32, bitcast=True), ((f - 7) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_values(v, by):
    """Split v times ``by`` into the nearest values of FP8 and what these are off by.

    The nearest value is found in float32: converted to FP8 and back (sm_90, Triton 3.6), the second was off by more
    than the value itself.
    """
    scaled = v * by
    bits = scaled.to(tl.int32, bitcast=True)
    # Three binary digits behind the first, half to even; below 2^-6 steps of 2^-9, as where 1.5 * 2^14 is added.
    near = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    near = tl.where(tl.abs(scaled) < 0.015625, (scaled + 24576.0) - 24576.0, near)
    return near.to(tl.float8e4nv), (scaled - near).to(tl.float8e4nv)


@triton.jit
def store_pairs(v, pairs, power, row, rows, o_d, D: tl.constexpr):
    """Store a row of D values, v in float32, 0 from D on; ``rows`` is N.

    With NaN or infinity among them, which FP8 does not hold, the power is NaN.
    """
    by, back = power_of(tl.max(tl.abs(v), 0))
    high, low = split_values(v, by)
    at = pairs + row * D + o_d
    tl.store(at, high, mask=o_d < D)
    tl.store(at + rows.to(tl.int64) * D, low, mask=o_d < D)
    tl.store(power + row, back + tl.sum(v * 0.0, 0))


@triton.jit
def split_row(x, pairs, power, D: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    """One row of [N, D]; grid (N,)."""
    n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    wait_for_previous(PDL)
    v = tl.load(x + n * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    store_pairs(v, pairs, power, n, tl.num_programs(0), o_d, D)


def empty_pairs(x_ND: Tensor, /) -> SplitRows:
    """Give the place for split rows."""
    pairs_2ND = x_ND.new_empty(2, *x_ND.shape, dtype=FP8)
    return SplitRows(pairs_2ND, x_ND.new_empty(x_ND.shape[0], dtype=torch.float32))


def split_into_pairs(x_ND: Tensor, /, *, pdl: bool) -> SplitRows:
    """Split rows in a launch of their own.

    Args:
        x_ND: bfloat16 or another dtype, contiguous.
        pdl: programmatic dependent launch.
    """
    (rows, size), split = x_ND.shape, empty_pairs(x_ND)
    block = next_power_of_2(size)
    split_row[(rows,)](
        x_ND, *split, D=size, BD=block, PDL=pdl, num_warps=min(max(block // 512, 1), 8), **launch_options(pdl)
    )
    return split
