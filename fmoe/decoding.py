"""Prefill and the decode loop of one batch, on token ids alone.

Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmoe.compile.step import Steps, cache_slots, visible_slots
from fmoe.functional.sampling import (
    count_candidates,
    mark_seen_,
    penalize_repetition,
    sample,
    sample_greedy,
    sampling_params,
    token_logprobs,
)

from .architectures import State, forward, state_row
from .model import Model
from .options import Options

PREFILL_CHUNK = 2048
SCORE_CHUNK = 512  # positions whose logits are in memory at once


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


def run(model: Model, steps: Steps, tokens_BT: Tensor, state: State, /, *, visible: int) -> tuple[Tensor, State]:
    """Run T more tokens of each row; ``visible`` is the longest row's length after them.

    Returns:
        (hidden [B, T, D], the new state).
    """
    slots = visible_slots(visible)
    return forward(tokens_BT, model.params, state, model.config.decoder, steps.layers, slots=slots)


def compute_head(model: Model, steps: Steps, x_BD: Tensor, /) -> Tensor:
    """Final norm and head of [rows, D]; float32 [rows, V]."""
    return steps.logits(x_BD, model.params.norm_D, model.params.head_VD)


def prefill(
    model: Model, steps: Steps, prompts: Sequence[Sequence[int]], state: State, /, *, chunk: int = PREFILL_CHUNK
) -> Tensor:
    """Run each prompt through its row of a fresh state, ``chunk`` tokens at a time, without padding.

    Neighbours of one length run together while they fit into one chunk; in compiled steps each row runs alone, which
    saves their graphs a variant.

    Returns:
        float32 [B, V], logits after each prompt's last token.
    """
    logits, first = [], 0
    for length, group in groupby(prompts, key=len):
        rows = list(group)
        together = 1 if steps.compiled else max(chunk // length, 1)
        for start in range(0, len(rows), together):
            part = rows[start : start + together]
            view = state_row(state, first + start, count=len(part))
            logits.append(_prefill_rows(model, steps, part, view, chunk))
        first += len(rows)
    return torch.cat(logits)


def _prefill_rows(model: Model, steps: Steps, rows: Sequence[Sequence[int]], state: State, chunk: int) -> Tensor:
    tokens_BT = torch.tensor(rows, dtype=torch.int64, device=model.device)
    for start in range(0, tokens_BT.shape[1], chunk):
        end = min(start + chunk, tokens_BT.shape[1])
        x_BTD, state = run(model, steps, tokens_BT[:, start:end], state, visible=end)
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
) -> Iterator[list[Token]]:
    """Generate one token per row and turn, until max_new_tokens or until the caller stops asking.

    Row i is sampled with seed + first_row + i and the number of tokens it has, so its tokens do not depend on the
    other rows. NaN or infinity in a row that is no longer active concerns nobody.

    Yields:
        One Token per row.

    Raises:
        RuntimeError: a row's logits hold NaN or infinity; the message names the layer.
    """
    lengths = [len(ids) for ids in prompts]
    longest = max(lengths)
    state = new_state(model, len(prompts), longest + options.max_new_tokens)
    logits_BV = prefill(model, steps, prompts, state, chunk=chunk)
    state = state._replace(lengths_B=torch.tensor(lengths, dtype=torch.int64, device=model.device))
    choose = _Chooser(model, prompts, options, first_row)
    generated: list[list[int]] = [[] for _ in prompts]
    tokens_B = state.lengths_B  # before the first turn, none
    for n in range(options.max_new_tokens):
        if n > 0:
            x_B1D, state = run(model, steps, tokens_B[:, None], state, visible=longest + n)
            logits_BV = compute_head(model, steps, x_B1D[:, -1])
        tokens_B, tokens, broken = choose(logits_BV, n)
        for row in filter(is_active, broken):
            raise RuntimeError(explain_nan(model, [*prompts[row], *generated[row]], steps, chunk=chunk))
        for ids, token in zip(generated, tokens, strict=True):
            ids.append(token.id)
        yield tokens


class _Chooser:
    """Choose each row's next token; holds what sampling needs from step to step."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], options: Options, first_row: int) -> None:
        self.options = options
        self.params = sampling_params(
            len(prompts),
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            device=model.device,
        )
        self.params = self.params._replace(seeds_B=self.params.seeds_B + first_row)
        self.candidates = count_candidates(top_k=options.top_k, top_p=options.top_p)
        self.seen_BV: Tensor | None = None
        if options.repetition_penalty != 1.0:
            vocab_size = model.config.decoder.vocab_size
            self.seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=model.device)
            for row, ids in enumerate(prompts):
                self.seen_BV[row, torch.tensor(ids, device=model.device)] = True

    def __call__(self, logits_BV: Tensor, n: int, /) -> tuple[Tensor, list[Token], list[int]]:
        """Return tokens_B, one Token per row, and the rows whose logits hold NaN or infinity."""
        options, raw_BV = self.options, logits_BV
        if self.seen_BV is not None:
            logits_BV = penalize_repetition(logits_BV, self.seen_BV, self.params.repetition_penalty_B)
        if options.temperature == 0:
            tokens_B = sample_greedy(logits_BV)
        else:
            counters_B = torch.full_like(self.params.seeds_B, n)
            tokens_B = sample(logits_BV, self.params, counters_B, num_candidates=self.candidates)
        if self.seen_BV is not None:
            mark_seen_(self.seen_BV, tokens_B)
        # NaN and infinity show in the sum; one transfer brings tokens and flags to the host.
        flags_B = ~raw_BV.sum(-1).isfinite()
        ids, flags = torch.stack((tokens_B, flags_B.long())).tolist()
        broken = [row for row, flag in enumerate(flags) if flag]
        if options.logprobs is None:
            return tokens_B, [Token(i, None, ()) for i in ids], broken
        own_B, top_ids_Bn, top_Bn = token_logprobs(raw_BV, tokens_B, n=options.logprobs)
        rows = zip(ids, own_B.tolist(), top_ids_Bn.tolist(), top_Bn.tolist(), strict=True)
        tokens = [Token(i, own, tuple(zip(top_ids, top, strict=True))) for i, own, top_ids, top in rows]
        return tokens_B, tokens, broken


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

    def watch(kind: str, x: Tensor, *arguments: Any) -> Tensor:
        i = next(index)
        if i == 0 and not _is_finite(x):
            found.append("the embedding")
        x = model.eager.layers[kind](x, *arguments)
        if not _is_finite(x):
            found.append(f"layer {i} ({kind})")
        return x

    layers = {kind: partial(watch, kind) for kind in model.eager.layers}
    slots = visible_slots(visible)
    x_BTD, state = forward(tokens_BT, model.params, state, model.config.decoder, layers, slots=slots)
    return (found[0] if found else None), x_BTD, state


def _is_finite_head(model: Model, x_TD: Tensor) -> bool:
    return all(_is_finite(compute_head(model, model.eager, part_TD)) for part_TD in x_TD.split(SCORE_CHUNK))


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())
