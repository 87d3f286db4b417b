"""Prefill and the decode loop of one batch, on token ids alone.

Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import count, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmoe.compile.step import Cursor, Steps, cache_slots, visible_slots
from fmoe.functional.sampling import (
    count_candidates,
    mark_seen_,
    penalize_repetition,
    sample,
    sample_greedy,
    sampling_params,
    token_logprobs,
)

from .architectures import State, Stream, forward, run_layers, state_row
from .capture import DirectMachine, GraphMachine, Launcher, Machine, Outputs
from .model import Model
from .options import Options
from .states import State as Origin
from .states import copy_state_

PREFILL_CHUNK = 2048
ROOM = 512  # positions by which caches grow where steps do not depend on their size
SCORE_CHUNK = 512  # positions whose logits are in memory at once


Keep = Callable[[State, list[list[int]]], None]


class Token(NamedTuple):
    """One generated token; the log-probabilities are those of the model's own distribution."""

    id: int
    logprob: float | None  # None unless asked for
    top: tuple[tuple[int, float], ...]  # the most probable (id, log-probability), as many as asked for


def new_state(model: Model, batch: int, tokens: int, /) -> State:
    """Make an empty state of ``batch`` rows with room for ``tokens`` positions."""
    return model.architecture.init_state(
        model.config, batch, cache_slots(tokens), dtype=model.dtype, device=model.device
    )


def batch_capacity(steps: Steps, tokens: int, /) -> int:
    """Give the positions of a batch; where nothing depends on their number, more of them serve longer prompts."""
    return tokens if steps.masked else -(-tokens // ROOM) * ROOM


def run(model: Model, steps: Steps, tokens_BT: Tensor, state: State, /, *, visible: int) -> tuple[Tensor, State]:
    """Run T more tokens of each row; ``visible`` is the longest row's length after them.

    Returns:
        (hidden [B, T, D], the new state).
    """
    slots: int | None = visible_slots(visible)
    start = None
    if tokens_BT.shape[1] == 1 and not steps.masked:
        slots, start = None, steps.start
    x_BTD: Tensor
    x_BTD, state = forward(tokens_BT, model.params, state, model.config.decoder, steps.layers, slots=slots, start=start)
    return x_BTD, state


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
    chunk: int = PREFILL_CHUNK,
    origin: Origin | None = None,
) -> Tensor:
    """Run each prompt through its row of a fresh state, ``chunk`` tokens at a time, without padding.

    Where the rows start from an origin, every prompt begins with its tokens, and only the others are run.

    Neighbours of one length run together while they fit into one chunk; in compiled steps each row runs alone, which
    saves their graphs a variant.

    Returns:
        float32 [B, V], logits after each prompt's last token.
    """
    logits, first, seen = [], 0, 0
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
            logits.append(_prefill_rows(model, steps, part, view, chunk, seen))
        first += len(rows)
    return torch.cat(logits)


def _prefill_rows(
    model: Model, steps: Steps, rows: Sequence[Sequence[int]], state: State, chunk: int, seen: int
) -> Tensor:
    tokens_BT = torch.tensor(rows, dtype=torch.int64, device=model.device)
    for start in range(0, tokens_BT.shape[1], chunk):
        end = min(start + chunk, tokens_BT.shape[1])
        x_BTD, state = run(model, steps, tokens_BT[:, start:end], state, visible=seen + end)
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
    chunk: int = PREFILL_CHUNK,
    is_active: Callable[[int], bool] = lambda row: True,
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
            tokens of each row that it has seen: all that were given, the last one perhaps aside.

    Yields:
        One Token per row.

    Raises:
        RuntimeError: a row's logits hold NaN or infinity; the message names the layer.
    """
    lengths = [len(ids) for ids in prompts]
    machine = machine or choose_machine(model, steps)
    batch = _open_batch(model, steps, len(prompts), max(lengths) + options.max_new_tokens, options, machine)
    generated: list[list[int]] = [[] for _ in prompts]
    try:
        batch.begin(prompts, options, first_row)
        logits_BV = prefill(model, steps, prompts, batch.state, chunk=chunk, origin=origin)
        batch.place(lengths)
        for tokens, broken in batch.run(batch.choose(logits_BV), max(lengths), options.max_new_tokens):
            for row in filter(is_active, broken):
                raise RuntimeError(explain_nan(model, [*prompts[row], *generated[row]], steps, chunk=chunk))
            for ids, token in zip(generated, tokens, strict=True):
                ids.append(token.id)
            try:
                yield tokens
            except GeneratorExit:
                if keep is not None:
                    keep(batch.state, batch.list_seen(prompts, generated))
                raise
    finally:
        if batch.launcher.machine.least is not None:
            model.shelf.put(batch)


def choose_machine(model: Model, steps: Steps, /) -> Machine:
    """Capture compiled steps on a GPU whose kernels read positions; call all others."""
    captured = model.device.type == "cuda" and steps.compiled and not steps.masked
    return GraphMachine(model.device) if captured else DirectMachine()


def _open_batch(model: Model, steps: Steps, rows: int, tokens: int, options: Options, machine: Machine, /) -> "_Batch":
    """Take the batch that was kept, if it is of this kind and has room, or make one."""
    kind = (type(machine), rows, _Choice.of(options))

    def fits(kept: _Batch) -> bool:
        same = kept.params is model.params and kept.steps is steps and kept.kind == kind
        return same and kept.capacity >= tokens

    kept: _Batch | None = model.shelf.take(fits) if machine.least is not None else None
    return kept or _Batch(model, steps, kind, tokens, machine)


class _Choice(NamedTuple):
    """What of the options decides which operations choose a token."""

    greedy: bool
    candidates: int | None
    penalized: bool
    logprobs: int | None

    @property
    def is_plain(self) -> bool:
        """The most probable token and nothing else."""
        return self.greedy and not self.penalized and self.logprobs is None

    @classmethod
    def of(cls, options: Options, /) -> "_Choice":
        candidates = count_candidates(top_k=options.top_k, top_p=options.top_p)
        return cls(options.temperature == 0, candidates, options.repetition_penalty != 1.0, options.logprobs)


class _Batch:
    """Rows that decode together: their state, what sampling needs, and the step, all at addresses that do not change.

    It knows nothing of the model that may keep it.
    """

    def __init__(
        self, model: Model, steps: Steps, kind: tuple[type, int, _Choice], tokens: int, machine: Machine
    ) -> None:
        _, rows, self.choice = self.kind = kind
        self.params, self.steps, self.decoder = model.params, steps, model.config.decoder
        self.launcher = Launcher(machine)
        self.capacity = batch_capacity(steps, tokens)
        self.state = new_state(model, rows, self.capacity)
        tokens_B, counters_B = torch.zeros(2, rows, dtype=torch.int64, device=model.device).unbind()
        self.cursor = Cursor(tokens_B.clone(), self.state.lengths_B, counters_B.clone())
        self.sampling = sampling_params(rows, temperature=0.0, device=model.device)
        self.seen_BV: Tensor | None = None
        if self.choice.penalized:
            self.seen_BV = torch.zeros(rows, self.decoder.vocab_size, dtype=torch.bool, device=model.device)
        self.visible = 0
        self.launched = 0
        self.used = False

    def begin(self, prompts: Sequence[Sequence[int]], options: Options, first_row: int, /) -> None:
        """Forget what was there, and take the settings and the tokens that count as seen."""
        written = [part for cache in self.state.caches for part in cache]
        for part in [*(written if self.used else []), *self.cursor]:
            part.zero_()
        self.used = True
        device = self.state.lengths_B.device
        fresh = sampling_params(
            len(prompts),
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            device=device,
        )
        fresh = fresh._replace(seeds_B=fresh.seeds_B + first_row)
        for kept_B, fresh_B in zip(self.sampling, fresh, strict=True):
            kept_B.copy_(fresh_B)
        if self.seen_BV is not None:
            self.seen_BV.zero_()
            for row, ids in enumerate(prompts):
                self.seen_BV[row, torch.tensor(ids, device=device)] = True

    def place(self, lengths: Sequence[int], /) -> None:
        """Say how long the prompts are; choosing the first token moves on by one, though no layer has seen it."""
        lengths_B = self.state.lengths_B
        lengths_B.copy_(torch.tensor([length - 1 for length in lengths], dtype=torch.int64, device=lengths_B.device))

    def run(self, first: Outputs, longest: int, count: int, /) -> Iterator[tuple[list[Token], list[int]]]:
        """Give the tokens of ``count`` steps, of which the first is done, and the rows whose logits were broken."""
        machine = self.launcher.machine
        self.launched = 1
        reads = deque([machine.fetch(first)])
        for n in range(count):
            # What compiles does not run ahead: the token before it is there already.
            while self.launched < min(n + 1 + (machine.ahead if self.launcher.warm else 0), count):
                self.visible = longest + self.launched
                reads.append(machine.fetch(self.launcher.launch(self.step, remaining=count - self.launched)))
                self.launched += 1
            yield self._read(reads.popleft()())

    def list_seen(self, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], /) -> list[list[int]]:
        """List the tokens that the layers have seen of each row: no step has run with the newest one yet."""
        return [[*ids, *more[: self.launched - 1]] for ids, more in zip(prompts, generated, strict=True)]

    def step(self) -> Outputs:
        """Run the newest token of each row and choose the next, on the device alone."""
        steps, params = self.steps, self.params
        slots = visible_slots(self.visible) if steps.masked else None
        tokens_B1 = self.cursor.tokens_B[:, None]
        start = None if steps.masked else steps.start
        stream = run_layers(tokens_B1, params, self.state, self.decoder, steps.layers, slots=slots, start=start)
        if steps.choose is not None and self.choice.is_plain:
            tokens_B, best_B = steps.choose(stream, params.norm_D, params.head_VD)
            return (steps.advance(tokens_B, best_B, self.cursor),)
        x_B1D = stream.total_BTD + stream.branch_BTD
        return self.choose(steps.logits(x_B1D[:, -1], params.norm_D, params.head_VD))

    def choose(self, logits_BV: Tensor, /) -> Outputs:
        """Choose from logits: codes of ``advance_``, and log-probabilities where they are asked for."""
        raw_BV, choice = logits_BV, self.choice
        if self.seen_BV is not None:
            logits_BV = penalize_repetition(logits_BV, self.seen_BV, self.sampling.repetition_penalty_B)
        if choice.greedy:
            tokens_B = sample_greedy(logits_BV)
        else:
            tokens_B = sample(logits_BV, self.sampling, self.cursor.counters_B, num_candidates=choice.candidates)
        if self.seen_BV is not None:
            mark_seen_(self.seen_BV, tokens_B)
        # NaN and infinity show in the sum
        codes_B = self.steps.advance(tokens_B, raw_BV.sum(-1), self.cursor)
        if choice.logprobs is None:
            return (codes_B,)
        return codes_B, *token_logprobs(raw_BV, tokens_B, n=choice.logprobs)

    def _read(self, outputs: Sequence[Tensor]) -> tuple[list[Token], list[int]]:
        codes = outputs[0].tolist()
        ids = [code if code >= 0 else -1 - code for code in codes]
        broken = [row for row, code in enumerate(codes) if code < 0]
        if self.choice.logprobs is None:
            return [Token(i, None, ()) for i in ids], broken
        own_B, top_ids_Bn, top_Bn = outputs[1:]
        rows = zip(ids, own_B.tolist(), top_ids_Bn.tolist(), top_Bn.tolist(), strict=True)
        return [Token(i, own, tuple(zip(top_ids, top, strict=True))) for i, own, top_ids, top in rows], broken


def explain_nan(model: Model, ids: Sequence[int], steps: Steps, /, *, chunk: int) -> str:
    """Replay a row uncompiled from its first token and say where NaN or infinity first shows."""
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
