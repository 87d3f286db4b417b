"""Whether caches fit into the memory that is free, and what would: known before any is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fmoe.compile.step import SLOTS, Steps, cache_slots

from .chunks import chunk_bytes
from .decoding import batch_capacity
from .info import format_bytes
from .loading import named_tensors
from .model import Model
from .placing import available_bytes

META = torch.device("meta")
WORKSPACE = 2**30  # what a GPU needs beside the caches and one chunk of a prompt


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes of the caches of one sequence."""

    row_bytes: int  # whatever its length
    slot_bytes: int  # for each cache slot

    def count(self, rows: int, slots: int, /) -> int:
        """Count the bytes of ``rows`` sequences of ``slots`` slots."""
        return rows * (self.row_bytes + slots * self.slot_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """What is there for caches."""

    size: CacheSize
    free: int | None  # bytes; None where the machine does not tell

    def fits(self, rows: int, slots: int, /) -> bool:
        """Tell whether sequences fit."""
        return self.free is None or self.size.count(rows, slots) <= self.free

    def most_rows(self, slots: int, /) -> int:
        """Count the sequences of ``slots`` slots that fit."""
        return max(self.free or 0, 0) // max(self.size.count(1, slots), 1)

    def most_tokens(self, rows: int, /) -> int:
        """Count the tokens of each of ``rows`` sequences that fit; rounded as caches are."""
        spare = max(self.free or 0, 0) // rows - self.size.row_bytes
        slots = spare // max(self.size.slot_bytes, 1) // SLOTS * SLOTS
        return max(slots - SLOTS, 0)


def measure_caches(model: Model, /) -> CacheSize:
    """Measure one sequence's caches, without memory."""

    def measure(slots: int) -> int:
        caches = model.architecture.init_state(model.config, 1, slots, dtype=model.dtype, device=META).caches
        return sum(part.nbytes for _, part in named_tensors(caches))

    small, large = measure(SLOTS), measure(2 * SLOTS)
    slot_bytes = (large - small) // SLOTS
    return CacheSize(small - SLOTS * slot_bytes, slot_bytes)


def free_bytes(device: torch.device, /) -> int | None:
    """Give the memory that tensors on a device may still take; None where the machine does not tell."""
    if device.type != "cuda":
        return available_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def find_room(model: Model, tokens: int, /) -> Room:
    """Find out what is free for caches beside a prompt's chunk; a batch that is only kept counts as free."""
    free = free_bytes(model.device)
    if free is None:
        return Room(measure_caches(model), None)
    kept = model.shelf.peek()
    if kept is not None:
        free += sum(part.nbytes for _, part in named_tensors(kept.state.caches))
    workspace = WORKSPACE if model.device.type == "cuda" else 0
    return Room(measure_caches(model), free - chunk_bytes(model, tokens) - workspace)


def check_room(model: Model, steps: Steps, rows: int, tokens: int, /) -> None:
    """Refuse sequences whose caches do not fit.

    Args:
        model: as loaded.
        steps: what will run them.
        rows: sequences that run together.
        tokens: of the longest, those to be generated included.

    Raises:
        ValueError: the message says what would fit.
    """
    room = find_room(model, tokens)
    if not room.fits(rows, cache_slots(batch_capacity(steps, tokens))):
        raise ValueError(_explain(model, room, steps, rows, tokens))


def choose_batch_size(
    model: Model, steps: Steps, tokens: Sequence[int], /, *, batch_size: int | None, usual: int
) -> int:
    """Choose how many sequences run together.

    Args:
        model: as loaded.
        steps: what will run them.
        tokens: of each sequence in their order, those to be generated included.
        batch_size: the caller's choice, which is kept; None takes ``usual``, or as many as fit.
        usual: at most.

    Raises:
        ValueError: the caller's choice does not fit, or not even one sequence does; the message says what would.
    """
    if not tokens:
        return batch_size or usual
    room = find_room(model, longest := max(tokens))
    size = batch_size or usual
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        if not room.fits(len(part), cache_slots(batch_capacity(steps, max(part)))):
            break
    else:
        return size
    fitting = room.most_rows(cache_slots(batch_capacity(steps, longest)))
    if batch_size is None and fitting:
        return min(fitting, usual)
    raise ValueError(_explain(model, room, steps, min(size, len(tokens)) if batch_size else 1, longest))


def _explain(model: Model, room: Room, steps: Steps, rows: int, tokens: int) -> str:
    slots = cache_slots(batch_capacity(steps, tokens))
    needed, free = format_bytes(room.size.count(rows, slots)), format_bytes(max(room.free or 0, 0))
    step = batch_capacity(steps, 1) if not steps.masked else 1
    longest = min(room.most_tokens(rows) // step * step, model.config.decoder.max_context)
    fewer = min(room.most_rows(slots), rows - 1)
    fitting = [f"{_count(rows, 'sequence')} of up to {longest} tokens"] if longest else []
    fitting += [f"{_count(fewer, 'sequence')} of {tokens} tokens"] if fewer else []
    hint = " or ".join(fitting) + " would fit" if fitting else "nothing would fit"
    return (
        f"the caches of {_count(rows, 'sequence')} of {tokens} tokens (prompt and max_new_tokens) need {needed}, and "
        f"{free} are free for them on {model.device}; {hint}: shorten one of them, or run fewer prompts together"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
