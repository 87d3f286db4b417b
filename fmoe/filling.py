"""Checkpoint tensors, as they were read, into their places in parameters: plain ones, FP8 blocks and MXFP4 as numbers.

Each function returns how many finite values became infinite, which float16 alone makes of large ones.
"""

import torch
from torch import Tensor

from fmoe.functional.quant import FP8, Fp8, dequantize, dequantize_mxfp4

from .architectures import Piece
from .fp8_blocks import copy_dequantized_


def copy_piece_(piece: Piece, source: Tensor, param: Tensor, /) -> int:
    """Write a tensor as it is."""
    place = param[piece.into]
    if source.dtype == FP8:  # as bytes: FP8 values do not pass through all that a take may call
        place, source = place.view(torch.uint8), source.view(torch.uint8)
    values = source if piece.take is None else piece.take(source)
    place.copy_(values)
    if param.dtype != torch.float16 or values.dtype == torch.float16:
        return 0
    return int(place.isinf().sum()) - int(values.isinf().sum())


def copy_blocks_(piece: Piece, source: Tensor, factors: Tensor, param: Tensor, /) -> int:
    """Write a tensor in FP8 blocks as plain numbers."""
    place = param[piece.into]
    if piece.take is None:
        copy_dequantized_(place, source, factors)
    else:
        place.copy_(piece.take(dequantize(Fp8(source, factors), torch.float32)))
    return _count_infinite(place)


def copy_mxfp4_(piece: Piece, codes: Tensor, exponents: Tensor, param: Tensor, /) -> int:
    """Write a stack in MXFP4 as plain numbers, matrix by matrix and on the device of the parameter."""
    place = param[piece.into]
    for matrix, own_codes, own_exponents in zip(place, codes, exponents, strict=True):
        values = dequantize_mxfp4(own_codes.to(place.device), own_exponents.to(place.device), param.dtype)
        matrix.copy_(values if piece.take is None else piece.take(values))
    return _count_infinite(place)


def _count_infinite(place: Tensor) -> int:
    return int(place.isinf().sum()) if place.dtype == torch.float16 else 0
