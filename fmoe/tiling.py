"""Do the places that fill a tensor cover it exactly once? Asked of shapes and indices alone."""

from collections.abc import Sequence

import numpy as np

Box = tuple[range, ...]  # the selected indices of each dimension


def select_box(shape: Sequence[int], into: Sequence[int | slice], /) -> Box:
    """Return what ``into`` selects of a tensor of ``shape``; IndexError where torch could not select it."""
    if len(into) > len(shape):
        raise IndexError(f"{len(into)} indices for {len(shape)} dimensions")
    box = []
    for size, index in zip(shape, [*into, *[slice(None)] * (len(shape) - len(into))], strict=True):
        if isinstance(index, int):
            if not -size <= index < size:
                raise IndexError(f"index {index} for a dimension of {size}")
            box.append(range(index % size, index % size + 1))
        else:
            if index.step is not None and index.step < 1:
                raise IndexError(f"step {index.step}; a positive one was expected")
            box.append(range(size)[index])
    return tuple(box)


def box_shape(box: Box, into: Sequence[int | slice], /) -> tuple[int, ...]:
    """Return the shape of what was selected: a dimension that ``into`` indexes by an int is gone."""
    return tuple(len(span) for dim, span in enumerate(box) if dim >= len(into) or not isinstance(into[dim], int))


def count_uncovered(shape: Sequence[int], boxes: Sequence[Box], /) -> tuple[int, int]:
    """Return how many elements no box covers and how many more than one does.

    The boxes' edges cut the shape into cells, which are few even where the elements are many.
    """
    cuts = []
    for dim, size in enumerate(shape):
        spans = [box[dim] for box in boxes]
        edges = {edge for span in spans for edge in (span.start, span.stop)}
        # a span with gaps needs every index as a cell of its own
        cuts.append(range(size + 1) if any(span.step != 1 for span in spans) else sorted({0, size, *edges}))
    cell_at = [{cut: cell for cell, cut in enumerate(row)} for row in cuts]
    times = np.zeros([len(row) - 1 for row in cuts], dtype=np.int32)
    for box in boxes:
        times[tuple(slice(at[s.start], at[s.stop], s.step) for at, s in zip(cell_at, box, strict=True))] += 1
    volumes = np.ones((), dtype=np.int64)
    for row in cuts:
        volumes = np.multiply.outer(volumes, np.diff(row))
    return int(volumes[times == 0].sum()), int(volumes[times > 1].sum())
