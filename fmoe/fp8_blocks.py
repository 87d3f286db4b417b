"""Which block of which checkpoint tensor each block of a parameter is; and blocks that become plain numbers.

A tensor in FP8 blocks has a second tensor of factors, one per block. A parameter made of such tensors keeps the
blocks where each of its own blocks lies within one block of one tensor: then the factors only move.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmoe.functional.quant import BLOCK, FP8, Fp8, count_blocks, dequantize

from .architectures import SCALE, Piece
from .checkpoint import TensorInfo
from .tiling import Box, box_shape, select_box

MIXED = "it joins tensors in FP8 blocks with others"
MISFIT = "its blocks are not whole blocks of what is stored"


class ScalePiece(NamedTuple):
    """Factors of one checkpoint tensor and the place they take in a parameter's scale."""

    name: str  # of the factors
    into: tuple[int | slice, ...]
    rows: tuple[int, ...]  # block rows that are taken, in this order
    columns: tuple[int, ...]


class BlockPlan(NamedTuple):
    """How a parameter in FP8 blocks is filled."""

    shape: tuple[int, ...]  # of the values
    pieces: tuple[Piece, ...]  # of the values
    scale_shape: tuple[int, ...]
    scales: tuple[ScalePiece, ...]
    rest: tuple[Piece, ...]  # what is not quantised, placed in a matrix of its own


def scale_shape(shape: Sequence[int], /, *, parts: int = 1) -> tuple[int, ...]:
    """Return the shape of the factors that values of a shape have."""
    return (*shape[:-2], count_blocks(shape[-2], parts=parts), count_blocks(shape[-1]))


def plan_blocks(
    shape: Sequence[int], pieces: Sequence[Piece], stored: Container[str], /, *, parts: int = 1
) -> BlockPlan | str:
    """Plan how the blocks of ``pieces`` become those of a parameter.

    Args:
        shape: of the parameter, [..., N, D].
        pieces: what fills it, at least one of them in blocks; rows at the end of a matrix may be unquantised.
        stored: names of the checkpoint's tensors.
        parts: equal parts of the rows, each of which starts its blocks anew.

    Returns:
        BlockPlan, or the reason why the parameter cannot have blocks.
    """
    quantised = list(takewhile(lambda piece: f"{piece.name}{SCALE}" in stored, pieces))
    rest = list(pieces[len(quantised) :])
    if any(f"{piece.name}{SCALE}" in stored for piece in rest) or not quantised:
        return MIXED
    shape = tuple(shape)
    moved: tuple[Piece, ...] = ()
    if rest:
        boxes = [_try_select(shape, piece) for piece in rest]
        if parts > 1 or len(shape) != 2 or any(box is None for box in boxes):
            return MIXED
        count = min(box[0].start for box in boxes if box is not None)
        moved = tuple(_move_up(piece, box, count) for piece, box in zip(rest, boxes, strict=True) if box is not None)
        shape = (count, shape[1])
    scales = []
    for piece in quantised:
        box = _try_select(shape, piece)
        placed = None if box is None else _place_scales(piece, box, shape, parts)
        if placed is None:
            return MISFIT
        scales.append(placed)
    return BlockPlan(shape, tuple(quantised), scale_shape(shape, parts=parts), tuple(scales), moved)


def _try_select(shape: tuple[int, ...], piece: Piece) -> Box | None:
    """Select a place; one that does not exist is the loader's to report."""
    try:
        return select_box(shape, piece.into)
    except IndexError:
        return None


def _move_up(piece: Piece, box: Box, count: int) -> Piece:
    into = (slice(box[0].start - count, box[0].stop - count), *piece.into[1:])
    return piece._replace(into=into)


def _place_scales(piece: Piece, box: Box, shape: tuple[int, ...], parts: int) -> ScalePiece | None:
    """Find the place and the order of one tensor's factors; None where blocks would be torn."""
    outer = len(shape) - 2
    if len(piece.into) > outer and any(isinstance(index, int) for index in piece.into[outer:]):
        return None
    rows, columns = box[outer:]
    sizes = ((rows, shape[-2], parts), (columns, shape[-1], 1))
    if any(span.step != 1 for span, _, _ in sizes):
        return None
    if piece.take is None:
        found = [_match_straight(span.start, span.stop, size, n) for span, size, n in sizes]
    else:
        sources = _find_sources(piece, box_shape(box, piece.into))
        if sources is None:
            return None
        found = [_match(src, s.start, s.stop, size, n) for src, (s, size, n) in zip(sources, sizes, strict=True)]
    if found[0] is None or found[1] is None:
        return None
    (row, row_ids), (column, column_ids) = found[0], found[1]
    place = (slice(row, row + len(row_ids)), slice(column, column + len(column_ids)))
    into = (*piece.into[:outer], *[slice(None)] * (outer - len(piece.into)), *place)
    return ScalePiece(f"{piece.name}{SCALE}", into, row_ids, column_ids)


def _find_sources(piece: Piece, taken: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """Ask ``take`` which stored row and column each row and column comes from, by showing it their numbers."""
    if len(piece.shape) != 2 or len(taken) != 2 or piece.take is None:
        return None
    rows, columns = piece.shape
    row_N1, column_1D = torch.arange(rows)[:, None], torch.arange(columns)[None]
    if taken[1] == columns:  # rows alone: a whole matrix of numbers would take a while
        row_ids = piece.take(row_N1)
        return (row_ids[:, 0].numpy(), column_1D[0].numpy()) if row_ids.shape == (taken[0], 1) else None
    row_ids, column_ids = (piece.take(ids.expand(rows, columns)) for ids in (row_N1, column_1D))
    if row_ids.shape != taken or (row_ids != row_ids[:, :1]).any() or (column_ids != column_ids[:1]).any():
        return None
    return row_ids[:, 0].numpy(), column_ids[0].numpy()


@lru_cache(maxsize=4096)
def _match_straight(start: int, stop: int, size: int, parts: int) -> tuple[int, tuple[int, ...]] | None:
    return _match(np.arange(stop - start), start, stop, size, parts)


def _match(source: np.ndarray, start: int, stop: int, size: int, parts: int) -> tuple[int, tuple[int, ...]] | None:
    """Name the stored block of each block in ``start:stop`` of a side, and the first block's place.

    Args:
        source: stored row of each row there.
        start: first row.
        stop: end.
        size: rows of the whole side.
        parts: of the side.

    Returns:
        None where ``start`` or ``stop`` cuts a block, or where a block's rows come from several.
    """
    if start == stop:
        return 0, ()
    part = max(size // parts, 1)
    edges = [first + row for first in range(0, size, part) for row in range(0, part, BLOCK)]
    if start not in edges or stop not in (*edges, size):
        return None
    first, last = edges.index(start), edges.index(stop) if stop < size else len(edges)
    begins = np.array(edges[first:last]) - start
    low, high = (function.reduceat(source // BLOCK, begins) for function in (np.minimum, np.maximum))
    return None if (low != high).any() else (first, tuple(low.tolist()))


def find_factor_faults(tensors: Mapping[str, TensorInfo], /) -> Iterator[tuple[str, str, str]]:
    """Yield (kind of fault, name of the factors, fault) of all factors that fit no tensor in FP8 blocks."""
    for name, info in tensors.items():
        if not name.endswith(SCALE):
            continue
        owner = name.removesuffix(SCALE)
        values = tensors.get(owner)
        if values is None or values.dtype != FP8:
            what = "is not there" if values is None else f"is {str(values.dtype).removeprefix('torch.')}"
            yield "factors without their float8_e4m3fn tensor", name, f"{name} ({owner} {what})"
            continue
        expected = scale_shape(values.shape) if len(values.shape) > 1 else ()
        if info.shape != expected:
            message = f"{name} (expected {list(expected)} for {list(values.shape)}, got {list(info.shape)})"
            yield "wrong shapes", name, message
        if info.dtype not in (torch.float32, torch.bfloat16):
            short = str(info.dtype).removeprefix("torch.")
            yield "wrong dtypes", name, f"{name} (expected float32 or bfloat16, got {short})"


def gather_scale_(scale: Tensor, pieces: Sequence[ScalePiece], factors: dict[str, Tensor], /) -> Tensor:
    """Write the factors of several tensors to their places in one parameter's scale, which is returned."""
    host = torch.empty(scale.shape, dtype=scale.dtype, device="cpu")
    for piece in pieces:
        stored = factors[piece.name]
        host[piece.into] = stored[..., list(piece.rows), :][..., list(piece.columns)]
    return scale.copy_(host)


def copy_dequantized_(place: Tensor, source: Tensor, factors: Tensor, /) -> None:
    """Write a stored tensor in blocks to a place of the same shape, in the place's dtype, matrix by matrix."""
    if source.dim() > 2:
        for matrix, values, own in zip(place, source, factors, strict=True):
            copy_dequantized_(matrix, values, own)
    else:
        place.copy_(dequantize(Fp8(source, factors), torch.float32))
