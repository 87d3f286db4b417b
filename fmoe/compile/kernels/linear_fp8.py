"""Dense projections of many tokens, both operands in FP8.

Letters: T tokens, N rows of the weight matrix, M unquantised rows behind them, D summed dimension.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, Fp8, Weight, weight_shape

from .fp8 import check_fp8, factors_at
from .launch import cdiv
from .moe_prefill import locate_tile
from .moe_prefill_fp8 import add_products, describe_blocks
from .products import add_bias
from .quantize import quantize_rows
from .tiles import store_rows


class Form(NamedTuple):
    """What the launch leaves open.

    tokens: rows of x in one tile, whose columns are 256 rows of the weights.
    warps: of a program.
    stages: of its loop.
    programs: that share the tiles; 0 is one for each tile.
    group: row tiles that are visited together for each block of weight rows.
    """

    tokens: int = 128
    warps: int = 8
    stages: int = 4
    programs: int = 132
    group: int = 8


@triton.jit
def linear_quantized(
    x, sx, w, s, bias, y, T, N: tl.constexpr, D: tl.constexpr, LD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles of BM rows and 256 columns; y has LD columns, x and w are descriptors."""
    blocks: tl.constexpr = (N + 2 * BN - 1) // (2 * BN)
    depth: tl.constexpr = D // BN
    total = tl.cdiv(T, BM)
    for tile in tl.range(tl.program_id(0), total * blocks, tl.num_programs(0)):
        i, pn = locate_tile(tile, total, blocks, GROUP)
        o_m = i * BM + tl.arange(0, BM)
        inside = o_m < T
        row = pn * (2 * BN)
        of_rows = sx + o_m * depth
        of_left = factors_at(s, 0, 0, row, N, D, 1)
        of_right = factors_at(s, 0, 0, tl.minimum(row + BN, N - 1), N, D, 1)
        left = tl.zeros((BM, BN), tl.float32)
        right = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, depth, num_stages=STAGES):
            factors = tl.load(of_rows + k, mask=inside, other=0.0)
            a, b = tl.load(of_left + k), tl.load(of_right + k)
            left, right = add_products(
                x.load([i * BM, k * BN]), w.load([row, k * BN]), w.load([row + BN, k * BN]), factors, a, b,
                left, right,
            )  # fmt: skip
        o_n = row + tl.arange(0, BN)
        if HAS_BIAS:
            left += add_bias(tl.zeros((BN,), tl.float32), bias, o_n, N, HAS_BIAS)[None, :]
            right += add_bias(tl.zeros((BN,), tl.float32), bias, o_n + BN, N, HAS_BIAS)[None, :]
        at = y + o_m.to(tl.int64)[:, None] * LD + row
        store_rows(at, left, inside, row, N)
        store_rows(at + BN, right, inside, row + BN, N)


def can_multiply_quantized(x: Tensor, w: Weight, /) -> bool:
    """Tell whether a product in FP8 takes this weight, whose rows must be whole blocks."""
    return x.dtype == torch.bfloat16 and isinstance(w, Fp8) and w.w.dim() == 2 and w.w.shape[1] % BLOCK == 0


def run_linear_quantized(
    x_TD: Tensor, w_ND: Fp8, /, *, bias_N: Tensor | None = None, form: Form | None = None
) -> Tensor:
    """Compute ``x w^T + bias`` with the rows of x quantised, too; unquantised rows of w see x as it is.

    Args:
        x_TD: contiguous rows, D whole blocks of 128.
        w_ND: weights in FP8 blocks.
        bias_N: of the dtype of x, [N + M], or None.
        form: blocks; None is the rule's.

    Returns:
        [T, N + M], of the dtype of x; off by 2.5 % against float64 over the dequantised weights.
    """
    check_fp8(w_ND)
    (tokens, hidden), (rows, _), outputs = x_TD.shape, w_ND.w.shape, weight_shape(w_ND)[0]
    form = form or default_form(tokens)
    y_TN = torch.empty(tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    if y_TN.numel() == 0:
        return y_TN
    q_TD, scale = quantize_rows(x_TD)
    every = cdiv(tokens, form.tokens) * cdiv(rows, 2 * BLOCK)
    linear_quantized[(min(form.programs, every) if form.programs else every,)](
        describe_blocks(q_TD, form.tokens), scale, describe_blocks(w_ND.w, BLOCK), w_ND.scale, bias_N, y_TN, tokens,
        N=rows, D=hidden, LD=outputs, HAS_BIAS=bias_N is not None, BM=form.tokens, BN=BLOCK, STAGES=form.stages,
        GROUP=form.group, num_warps=form.warps,
    )  # fmt: skip
    if w_ND.rest_MD is not None:
        y_TN[:, rows:] = F.linear(x_TD, w_ND.rest_MD, None if bias_N is None else bias_N[rows:])
    return y_TN


def default_form(tokens: int, /) -> Form:
    """Choose blocks by rule."""
    return Form() if tokens > 512 else Form(tokens=64)
