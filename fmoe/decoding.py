"""Prefill and the decode loop of one batch, on token ids alone.

Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor

from fmoe.compile.step import Steps, visible_slots
from fmoe.functional.attention import Placement, see_all

from .architectures import DecoderConfig, State, Stream, forward, start_step, state_row
from .batches import ROOM as ROOM
from .batches import Batch, Choice, IsActive, Kind
from .batches import Token as Token
from .batches import batch_capacity as batch_capacity
from .batches import new_state as new_state
from .capture import DirectMachine, GraphMachine, Machine
from .chunks import PREFILL_CHUNK as PREFILL_CHUNK
from .chunks import attends_causally, choose_chunk
from .model import Model
from .options import Options
from .speculation import SpeculativeBatch
from .states import State as Origin
from .states import copy_state_

SCORE_CHUNK = 512  # positions whose logits are in memory at once


Keep = Callable[[State, list[list[int]]], None]
Watch = Callable[[int, Tensor, int, Tensor], None]


def run(model: Model, steps: Steps, tokens_BT: Tensor, state: State, /, *, visible: int) -> tuple[Tensor, State]:
    """Run T more tokens of each row; ``visible`` is the longest row's length after them.

    Rows of several tokens all have that length.

    Returns:
        (hidden [B, T, D], the new state).
    """
    slots: int | None = visible_slots(visible)
    start: Callable[..., tuple[Stream, Placement]] | None = None
    if tokens_BT.shape[1] == 1 and not steps.masked:
        slots, start = None, steps.start
    elif tokens_BT.shape[1] > 1 and attends_causally(model):
        start = partial(_start_causally, config=model.config.decoder, visible=visible)
    x_BTD: Tensor
    x_BTD, state = forward(tokens_BT, model.params, state, model.config.decoder, steps.layers, slots=slots, start=start)
    return x_BTD, state


def _start_causally(
    tokens_BT: Tensor, embed_VD: Tensor, state: State, /, *, config: DecoderConfig, visible: int
) -> tuple[Stream, Placement]:
    stream, placement = start_step(tokens_BT, embed_VD, state, config=config, slots=None)
    return stream, see_all(placement, visible)


def compute_head(model: Model, steps: Steps, x_BD: Tensor, /) -> Tensor:
    """Final norm and head of [rows, D]; float32 [rows, V]."""
    return steps.logits(x_BD, model.params.norm_D, model.params.head_VD)


def prefill(
    model: Model,
    steps: Steps,
    prompts: Sequence[Sequence[int]],
    state: State,
    /,
    *,
    chunk: int | None = None,
    origin: Origin | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """Run each prompt through its row of a fresh state, ``chunk`` tokens at a time, without padding.

    Without a chunk, its size is that of ``choose_chunk``, which is the same for all prompts of a model on a device.

    Where the rows start from an origin, every prompt begins with its tokens, and only the others are run.

    Neighbours of one length run together while they fit into one chunk; in compiled steps each row runs alone, which
    saves their graphs a variant. ``watch`` is shown what each chunk gives, as ``SpeculativeBatch.watch``.

    Returns:
        float32 [B, V], logits after each prompt's last token.
    """
    logits, first, seen, chunk = [], 0, 0, choose_chunk(model) if chunk is None else chunk
    if origin is not None:
        state, seen = copy_state_(origin, state), len(origin)
    for length, group in groupby(prompts, key=len):
        rows = [ids[seen:] for ids in group]
        if origin is not None and length == seen:
            logits.append(origin.logits_V.expand(len(rows), -1))
            first += len(rows)
            continue
        together = 1 if steps.compiled else max(chunk // (length - seen), 1)
        for start in range(0, len(rows), together):
            part = rows[start : start + together]
            view = state_row(state, first + start, count=len(part))
            shown = None if watch is None else partial(watch, first + start)
            logits.append(_prefill_rows(model, steps, part, view, chunk, seen, shown))
        first += len(rows)
    return torch.cat(logits)


def _prefill_rows(
    model: Model,
    steps: Steps,
    rows: Sequence[Sequence[int]],
    state: State,
    chunk: int,
    seen: int,
    watch: Callable[[Tensor, int, Tensor], None] | None,
) -> Tensor:
    tokens_BT = torch.tensor(rows, dtype=torch.int64, device=model.device)
    for start in range(0, tokens_BT.shape[1], chunk):
        end = min(start + chunk, tokens_BT.shape[1])
        x_BTD, state = run(model, steps, tokens_BT[:, start:end], state, visible=seen + end)
        if watch is not None:
            watch(tokens_BT, start, x_BTD)
    # a single row not by [:, -1], whose odd stride would recompile
    return compute_head(model, steps, x_BTD[0, -1:] if len(rows) == 1 else x_BTD[:, -1])


def decode_batch(
    model: Model,
    steps: Steps,
    prompts: Sequence[Sequence[int]],
    options: Options,
    /,
    *,
    first_row: int = 0,
    chunk: int | None = None,
    is_active: IsActive = lambda row: True,
    machine: Machine | None = None,
    origin: Origin | None = None,
    keep: Keep | None = None,
) -> Generator[list[Token], None, None]:
    """Generate one token per row and turn, until max_new_tokens or until the caller stops asking.

    Row i is sampled with seed + first_row + i and the number of tokens it has, so its tokens do not depend on the
    other rows. NaN or infinity in a row that is no longer active concerns nobody. Captured steps run ahead of the
    tokens that were read; what nobody asks for any more is dropped.

    Args:
        machine: launches the steps; None captures them where the device and the kernels allow it.
        origin: what the rows start from; every prompt begins with its tokens, which are not run again.
        keep: called behind the last token that is asked for, with the rows' state, to be copied at once, and the
            tokens of each row that it has seen: all that were given, the last one perhaps aside; with drafts, where
            steps run ahead, also more.

    Yields:
        One Token per row.

    Raises:
        RuntimeError: a row's logits hold NaN or infinity; the message names the layer.
    """
    lengths, chunk = [len(ids) for ids in prompts], choose_chunk(model) if chunk is None else chunk
    machine = machine or choose_machine(model, steps)
    batch = _open_batch(model, steps, len(prompts), max(lengths) + options.max_new_tokens, options, machine)
    watch = batch.watch if isinstance(batch, SpeculativeBatch) else None
    generated: list[list[int]] = [[] for _ in prompts]
    try:
        batch.begin(prompts, options, first_row)
        logits_BV = prefill(model, steps, prompts, batch.state, chunk=chunk, origin=origin, watch=watch)
        batch.place(lengths, len(origin) if origin is not None else 0)
        for tokens, broken in batch.run(batch.choose(logits_BV), lengths, options.max_new_tokens, is_active):
            for row in filter(is_active, broken):
                drafted = isinstance(batch, SpeculativeBatch)
                told = batch.told[row] if isinstance(batch, SpeculativeBatch) else generated[row]
                raise RuntimeError(explain_nan(model, [*prompts[row], *told], steps, chunk=chunk, drafted=drafted))
            for ids, token in zip(generated, tokens, strict=True):
                ids.append(token.id)
            try:
                yield tokens
            except GeneratorExit:
                if keep is not None:
                    seen = batch.list_seen(prompts, generated)
                    keep(batch.state, seen)
                raise
    finally:
        if batch.launcher.machine.least is not None:
            model.shelf.put(batch)


def choose_machine(model: Model, steps: Steps, /) -> Machine:
    """Capture compiled steps on a GPU whose kernels read positions; call all others."""
    captured = model.device.type == "cuda" and steps.compiled and not steps.masked
    return GraphMachine(model.device) if captured else DirectMachine()


def _open_batch(
    model: Model, steps: Steps, rows: int, tokens: int, options: Options, machine: Machine, /
) -> Batch | SpeculativeBatch:
    """Take the batch that was kept, if it is of this kind and has room, or make one."""
    most, adapts = options.most_drafts, options.speculate == "auto"
    kind = Kind(type(machine), rows, Choice.of(options), most, adapts)
    tokens += options.draft_room

    def fits(kept: Batch | SpeculativeBatch) -> bool:
        same = kept.params is model.params and kept.steps is steps and kept.kind == kind
        return same and kept.capacity >= tokens

    kept: Batch | SpeculativeBatch | None = model.shelf.take(fits) if machine.least is not None else None
    if kept is not None:
        return kept
    batch = Batch(model, steps, kind, tokens, machine)
    return SpeculativeBatch(batch, model, model.drafts.get()) if most else batch


def explain_nan(model: Model, ids: Sequence[int], steps: Steps, /, *, chunk: int, drafted: bool = False) -> str:
    """Replay a row uncompiled from its first token and say where NaN or infinity first shows; a dropped draft's may."""
    state = new_state(model, 1, len(ids))
    tokens_1T = torch.tensor([ids], dtype=torch.int64, device=model.device)
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        where, x_1TD, state = _run_watched(model, tokens_1T[:, start:end], state, visible=end)
        if where is None and not _is_finite_head(model, x_1TD[0]):
            where = "the final norm and head"
        if where is not None:
            break
    if where is not None:
        return f"the logits hold NaN or infinity, which first shows in {where}; check its weights or load in float32"
    if drafted:
        return (
            "the logits hold NaN or infinity, which the same tokens without drafts do not give; call without speculate"
        )
    if steps.compiled:
        return (
            "the logits hold NaN or infinity, which the same tokens uncompiled do not give; "
            "load with compile=False and report it"
        )
    return "the logits hold NaN or infinity, but a second run of the same tokens gave none; check the machine's memory"


def _run_watched(model: Model, tokens_BT: Tensor, state: State, /, *, visible: int) -> tuple[str | None, Tensor, State]:
    """Run the layers uncompiled and say which is the first to break, if any; (where, hidden, the new state)."""
    found: list[str] = []
    index = count()

    def watch(kind: str, stream: Stream, *arguments: Any) -> Stream:
        i = next(index)
        if i == 0 and not _is_finite(stream.total_BTD):
            found.append("the embedding")
        stream = model.eager.layers[kind](stream, *arguments)
        if not _is_finite(stream.total_BTD + stream.branch_BTD):
            found.append(f"layer {i} ({kind})")
        return stream

    layers = {kind: partial(watch, kind) for kind in model.eager.layers}
    slots = visible_slots(visible)
    x_BTD, state = forward(tokens_BT, model.params, state, model.config.decoder, layers, slots=slots)
    return (found[0] if found else None), x_BTD, state


def _is_finite_head(model: Model, x_TD: Tensor) -> bool:
    return all(_is_finite(compute_head(model, model.eager, part_TD)) for part_TD in x_TD.split(SCORE_CHUNK))


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())
