"""Weights in blocks of FP8: their form, and what reads a weight whether it is quantised or not; MXFP4 as numbers.

A block of BLOCK x BLOCK values of float8_e4m3fn shares one float32 factor: ``W[n, d] = w[n, d] * scale[n // 128,
d // 128]``; blocks at the end of a side may be partial. Letters: E experts, N rows, M unquantised rows behind them,
D columns, F expert width, P = 2F.

Source: arXiv:2412.19437, section 3.3.2 (fine-grained quantisation of weights).
"""

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of its values
LEAST = 1e-30  # what a block of rows is taken to reach: one of zeros has a factor, too
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0..7; 8..15 are their negatives
FP4_BLOCK = 32  # values of MXFP4 that share a factor


class Fp8(NamedTuple):
    """A matrix, or a stack of matrices, that stands where a weight tensor stands.

    The rows of a ``gate and up`` stack are two parts of F: each part's blocks start at its own first row, so that
    its scale is [E, 2 * ceil(F / 128), ceil(D / 128)] whatever F is.
    """

    w: Tensor  # float8_e4m3fn, contiguous [..., N, D]
    scale: Tensor  # float32, contiguous [..., ceil(N / 128), ceil(D / 128)], a factor
    rest_MD: Tensor | None = None  # rows behind the N that are not quantised, of a single matrix only


Weight: TypeAlias = Tensor | Fp8


def count_blocks(size: int, /, *, parts: int = 1) -> int:
    """Return how many blocks ``size`` rows or columns take; each of ``parts`` equal parts starts anew."""
    return parts * -(-(size // parts) // BLOCK)


def weight_shape(w: Weight, /) -> tuple[int, ...]:
    """Return the shape of the tensor that a weight is or stands for, [..., N + M, D]."""
    if not isinstance(w, Fp8):
        return tuple(w.shape)
    *outer, rows, columns = w.w.shape
    return (*outer, rows + (0 if w.rest_MD is None else w.rest_MD.shape[0]), columns)


def weight_dtype(w: Weight, /) -> torch.dtype:
    """Return the dtype in which a weight is kept, of an Fp8 float8_e4m3fn."""
    return w.w.dtype if isinstance(w, Fp8) else w.dtype


def dequantize(fp8: Fp8, dtype: torch.dtype, /, *, parts: int = 1) -> Tensor:
    """Multiply each value with its block's factor, in float32, and round once to ``dtype``.

    Args:
        fp8: any form.
        dtype: of the result.
        parts: 2 for gate and up rows, whose blocks start anew with the up rows.

    Returns:
        [..., N + M, D]; the M unquantised rows last, as they are.
    """
    rows, columns = fp8.w.shape[-2:]
    factors = fp8.scale.unflatten(-2, (parts, -1)).repeat_interleave(BLOCK, -2)[..., : rows // parts, :]
    factors = factors.flatten(-3, -2).repeat_interleave(BLOCK, -1)[..., :columns]
    w = (fp8.w.float() * factors).to(dtype)
    return w if fp8.rest_MD is None else torch.cat((w, fp8.rest_MD.to(dtype)))


def quantize_rows(x: Tensor, /) -> tuple[Tensor, Tensor]:
    """Round each 128 columns of each row to FP8, times a factor that brings their largest value to the largest of FP8.

    ``factor = max |x| / 448``, in float32. FP8 has four significant bits: values of a normal distribution come back
    with a relative error of 2.7 %.

    Args:
        x: [..., D], D whole blocks.

    Returns:
        float8_e4m3fn [..., D], and float32 factors [..., D / 128].

    Source: arXiv:2412.19437, section 3.3.2 (fine-grained quantisation of activations).
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    factors = blocks.abs().amax(-1).clamp_min(LEAST) / LARGEST
    # A value may come out a last bit above the largest, which torch does not round down to it everywhere.
    q = (blocks / factors[..., None]).clamp(-LARGEST, LARGEST).to(FP8)
    return q.flatten(-2), factors


def quantize_blocks(w_ND: Tensor, /) -> Fp8:
    """Round a matrix to FP8 blocks, each with a factor that brings its largest value to the largest of FP8.

    Args:
        w_ND: a matrix; blocks at the end of a side may be partial.

    Returns:
        Fp8, of which ``dequantize`` gives a normal distribution back with a relative error of 2.7 %.

    Source: arXiv:2412.19437, section 3.3.2 (fine-grained quantisation of weights).
    """
    rows, columns = w_ND.shape
    w = torch.empty(rows, columns, dtype=FP8, device=w_ND.device)
    scale = torch.empty(count_blocks(rows), count_blocks(columns), device=w_ND.device)
    for n in range(scale.shape[0]):  # a head in float32 would take many times the room of the result
        part = F.pad(w_ND[n * BLOCK : (n + 1) * BLOCK].float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        scale[n] = part.abs().amax((0, 2)).clamp_min(LEAST) / LARGEST
        q = (part / scale[n, :, None]).clamp(-LARGEST, LARGEST).flatten(1)[:, :columns]
        w[n * BLOCK : (n + 1) * BLOCK] = q.to(FP8)
    return Fp8(w, scale)


def dequantize_mxfp4(codes: Tensor, exponents: Tensor, dtype: torch.dtype, /) -> Tensor:
    """Multiply blocks of 32 values of FP4 (E2M1) with their powers of two, in float32, and round once to ``dtype``.

    A byte holds two codes, the first value's in its low half. All but the smallest numbers are exact in bfloat16.

    Args:
        codes: uint8 [..., D / 32, 16].
        exponents: uint8 [..., D / 32] (E8M0): e is the factor ``2^(e - 127)``, 255 is NaN.
        dtype: of the result.

    Returns:
        [..., D].

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
    """
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
    bytes_ = torch.arange(256, device=codes.device)
    pairs = torch.stack((values[bytes_ & 15], values[bytes_ >> 4]), -1)
    blocks = pairs.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], FP4_BLOCK)
    factors = exponents.view(torch.float8_e8m0fnu).float()
    return (blocks * factors[..., None]).to(dtype).flatten(-2)


def read_weight(w: Weight, dtype: torch.dtype, /, *, parts: int = 1) -> Tensor:
    """Give a weight as a tensor: one that is quantised in ``dtype``, any other as it is.

    Args:
        w: a weight.
        dtype: of the rows that it is multiplied with.
        parts: as in ``dequantize``.
    """
    return dequantize(w, dtype, parts=parts) if isinstance(w, Fp8) else w


def read_experts(w_END: Weight, experts: Tensor | int, dtype: torch.dtype, /, *, parts: int = 1) -> Tensor:
    """Give the matrices of some experts of a stack; only those are dequantised.

    Args:
        w_END: a stack.
        experts: one id, or any number of them.
        dtype: as in ``read_weight``.
        parts: as in ``dequantize``.

    Returns:
        [..., N, D], the outer shape that of ``experts``.
    """
    if not isinstance(w_END, Fp8):
        return w_END[experts]
    # as bytes: not every device gathers FP8
    w = w_END.w.view(torch.uint8)[experts].view(FP8)
    return dequantize(Fp8(w, w_END.scale[experts]), dtype, parts=parts)


def linear(x: Tensor, w_ND: Weight, bias_N: Tensor | None = None, /) -> Tensor:
    """Compute ``x w^T + bias``; a quantised weight is dequantised to the dtype of x first.

    Args:
        x: [..., D].
        w_ND: weights.
        bias_N: or None.

    Returns:
        [..., N].
    """
    return F.linear(x, read_weight(w_ND, x.dtype), bias_N)
