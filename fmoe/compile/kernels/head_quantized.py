"""The greedy choice of a single row's token by a head in FP8 blocks: programs that keep x go through the matrix's rows.

Letters: D hidden, V vocabulary, X programs.

As in head.py, each program leaves one integer that orders by logit and then by the lowest id.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, Fp8

from ..decode_settings import QuantizedHeadSettings
from .fp8 import can_pack, factors_at, load_factors
from .head import pick_best
from .launch import cdiv, launch_options, next_power_of_2, start_next, wait_alone
from .products import PART, group_parts, load_row, load_rows, sum_rows
from .route import ROUNDINGS, ordered_key, round_to


@triton.jit
def load_block(w, s, block, D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr):
    """Load a block of BV rows and its factors; gives the rows' numbers, too."""
    o_v = block * BV + tl.arange(0, BV)
    o_c = tl.arange(0, BK // PART)
    if PACKED:
        o_c = group_parts(o_c, BK)
    factor = load_factors(factors_at(s, 0, 0, block * BV, V, D, 1), 0, o_c, D, BK == D)
    return load_rows(w, o_v.to(tl.int64), D, V, BV, BK, PACKED), factor, o_v


@triton.jit
def head_streamed(
    x, w, s, keys, D: tl.constexpr, V: tl.constexpr, ROUND: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every X-th block of BV rows; grid (X,), BK >= D. PACKED as in products.py."""
    start_next(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    a, factor, o_v = load_block(w, s, program, D, V, BV, BK, PACKED)
    wait_alone(PDL)
    x0, x1, top = load_row(x, 0 * program, D, BK, PACKED)
    best = tl.full((BV,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for block in tl.range(program + programs, (V + BV - 1) // BV, programs):
        a_next, factor_next, o_next = load_block(w, s, block, D, V, BV, BK, PACKED)
        v = round_to(sum_rows(a, x0, x1, factor, top, PACKED), ROUND)
        best = tl.maximum(best, ordered_key(v, o_v))  # all but the last block are whole
        a = a_next
        factor = factor_next
        o_v = o_next
    v = round_to(sum_rows(a, x0, x1, factor, top, PACKED), ROUND)
    best = tl.maximum(best, tl.where(o_v < V, ordered_key(v, o_v), -0x7FFFFFFFFFFFFFFF))
    tl.store(keys + program, tl.max(best, 0))


def choose_token_quantized(x_1D: Tensor, head_VD: Fp8, settings: QuantizedHeadSettings, /) -> tuple[Tensor, Tensor]:
    """Run ``choose_tokens`` of a single row by a head in FP8 blocks; two launches.

    Args:
        x_1D: normed hidden state.
        head_VD: without unquantised rows, D whole blocks.
        settings: blocks.

    Returns:
        tokens_1 int64, and best_1 float32, NaN where a logit is.

    Raises:
        ValueError: another shape.
    """
    vocabulary, hidden = head_VD.w.shape
    if x_1D.shape != (1, hidden) or hidden % BLOCK or head_VD.rest_MD is not None:
        raise ValueError(
            f"x {list(x_1D.shape)} must be one row of the head's {hidden} columns, and these whole blocks of {BLOCK} "
            "with all rows quantised; use choose_tokens with a head that is not quantised"
        )
    programs = min(settings.programs, cdiv(vocabulary, settings.rows))
    keys_1X = torch.empty(1, programs, dtype=torch.int64, device=x_1D.device)
    options = launch_options(settings.pdl)
    head_streamed[(programs,)](
        x_1D.contiguous(), head_VD.w, head_VD.scale, keys_1X, D=hidden, V=vocabulary,
        ROUND=ROUNDINGS.get(x_1D.dtype, 0), BV=settings.rows, BK=next_power_of_2(hidden),
        PACKED=can_pack(x_1D, head_VD), PDL=settings.pdl, num_warps=settings.warps, **options,
    )  # fmt: skip
    tokens_1 = torch.empty(1, dtype=torch.int64, device=x_1D.device)
    best_1 = torch.empty(1, dtype=torch.float32, device=x_1D.device)
    block = min(next_power_of_2(programs), 2048)
    pick_best[(1,)](keys_1X, tokens_1, best_1, programs, BX=block, PDL=settings.pdl, num_warps=8, **options)
    return tokens_1, best_1
