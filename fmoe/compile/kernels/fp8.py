"""Weights in FP8 blocks on the GPU: checks, the factor of a block, and a kernel that dequantises.

Letters: E experts, N rows, M unquantised rows behind them, D columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return, misc"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmoe.functional.quant import BLOCK, FP8, Fp8, Weight, count_blocks, weight_shape

from ..settings import why_not_fp8
from .launch import cdiv

SIDE = tl.constexpr(BLOCK)
ROWS = 64  # of one program that dequantises


@triton.jit
def factors_at(s, e, part, row, N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """Point to the factors of a row of a part of N rows, one of PARTS, of matrix e."""
    blocks: tl.constexpr = (N + SIDE - 1) // SIDE
    columns: tl.constexpr = (D + SIDE - 1) // SIDE
    return s + ((e * PARTS + part) * blocks + row // SIDE) * columns


@triton.jit
def load_factors(at, k, o_c, D: tl.constexpr, EVEN: tl.constexpr):
    """Load the factors of the blocks of columns that begin at k; 0 past the last."""
    if EVEN:
        v = tl.load(at + k // SIDE + o_c)
    else:
        v = tl.load(at + k // SIDE + o_c, mask=k // SIDE + o_c < (D + SIDE - 1) // SIDE, other=0.0)
    return v


@triton.jit
def dequantize_rows(
    w, s, y, ROWS_ALL, N: tl.constexpr, D: tl.constexpr, LD: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN rows and one block of columns, of E matrices one after the other; grid (E N / BN, D / 128)."""
    part: tl.constexpr = N // PARTS
    blocks: tl.constexpr = (part + SIDE - 1) // SIDE
    o_r = tl.program_id(0) * BN + tl.arange(0, BN)
    o_d = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (o_r < ROWS_ALL)[:, None] & (o_d < D)[None, :]
    outer, n = (o_r // N).to(tl.int64), o_r % N
    row = outer * (PARTS * blocks) + n // part * blocks + n % part // SIDE
    factor = tl.load(s + row * ((D + SIDE - 1) // SIDE) + tl.program_id(1), mask=o_r < ROWS_ALL, other=0.0)
    v = tl.load(w + o_r.to(tl.int64)[:, None] * D + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    at = y + (outer * LD + n * D)[:, None] + o_d[None, :]
    tl.store(at, (v * factor[:, None]).to(y.dtype.element_ty), mask=inside)


def split_weight(w: Weight, /) -> tuple[Tensor, Tensor | None]:
    """Give the tensor that a kernel reads, and its factors or None."""
    return (w.w, w.scale) if isinstance(w, Fp8) else (w, None)


def take_outer(w: Weight, part: slice, /) -> Weight:
    """Give some matrices of a stack."""
    return Fp8(w.w[part], w.scale[part]) if isinstance(w, Fp8) else w[part]


@lru_cache(maxsize=64)
def _why_not_here(index: int | None) -> str:
    if torch.version.hip:
        return why_not_fp8("hip", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return why_not_fp8("cuda", f"sm_{major}{minor}")


def can_pack(x: Tensor, w: Weight, /) -> bool:
    """Tell whether rows are multiplied with a weight by NVIDIA's instructions for four values of FP8 at once."""
    return isinstance(w, Fp8) and x.dtype == torch.bfloat16 and w.w.shape[-1] % BLOCK == 0 and not torch.version.hip


def can_quantize(x: Tensor, *weights: Weight) -> bool:
    """Tell whether products in FP8 take these weights: in blocks, all of which are whole."""
    return x.dtype == torch.bfloat16 and all(
        isinstance(w, Fp8) and not (w.w.shape[-1] % BLOCK or w.w.shape[-2] % BLOCK) for w in weights
    )


def check_fp8(w: Fp8, /, *, parts: int = 1, name: str = "w") -> None:
    """Refuse FP8 blocks that the kernels would read wrongly.

    Raises:
        ValueError: a dtype, shape or layout that does not fit.
        NotImplementedError: a device that does not read this FP8.
    """
    *outer, rows, columns = w.w.shape
    expected = (*outer, count_blocks(rows, parts=parts), count_blocks(columns))
    if w.w.dtype != FP8 or w.scale.dtype != torch.float32 or tuple(w.scale.shape) != expected:
        raise ValueError(
            f"{name} {tuple(w.w.shape)} must be {FP8} with a scale float32 {expected}, got {w.w.dtype} and "
            f"{w.scale.dtype} {tuple(w.scale.shape)}"
        )
    if not (w.w.is_contiguous() and w.scale.is_contiguous()):
        raise ValueError(f"{name} and its scale must be contiguous; call .contiguous() once after loading")
    if w.w.is_cuda and (reason := _why_not_here(w.w.device.index)):
        raise NotImplementedError(f"no kernel reads {name} here: {reason}")


def check_blocks(w: Weight, rows: int, depth: int, /, *, name: str) -> None:
    """Refuse a kernel's block that does not lie in one row, or of matrix instructions one block, of factors.

    Raises:
        ValueError: the block is larger.
    """
    if isinstance(w, Fp8) and max(rows, depth) > BLOCK:
        raise ValueError(f"{name}: rows={rows} and depth={depth} must be at most {BLOCK} for weights in FP8 blocks")


def read_fp8(w: Weight, dtype: torch.dtype, /, *, parts: int = 1) -> Tensor:
    """Give a weight as a tensor, dequantised by one kernel; the formula of ``fmoe.functional.quant.read_weight``.

    Args:
        w: a weight; a tensor is given back as it is.
        dtype: of the result.
        parts: 2 for gate and up rows.

    Returns:
        [..., N + M, D].
    """
    if not isinstance(w, Fp8):
        return w
    check_fp8(w, parts=parts)
    rows, columns = w.w.shape[-2:]
    shape = weight_shape(w)
    y = torch.empty(shape, dtype=dtype, device=w.w.device)
    total = w.w.numel() // max(columns, 1)
    if total:
        dequantize_rows[(cdiv(total, ROWS), cdiv(columns, BLOCK))](
            w.w, w.scale, y, total, N=rows, D=columns, LD=shape[-2] * columns, PARTS=parts, BN=ROWS, num_warps=4
        )
    if w.rest_MD is not None:
        y[rows:] = w.rest_MD
    return y
