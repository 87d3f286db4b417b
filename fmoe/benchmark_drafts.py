"""Measure decode with drafts: what a step takes, how many tokens it gives, and how many drafts stay."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from .benchmark_machine import finish
from .decoding import Token, decode_batch
from .model import Model, choose_steps
from .options import Options, Speculate


@dataclass(frozen=True, slots=True)
class DraftCase:
    """Decode with drafts at one batch size."""

    batch: int
    context: int
    speculate: Speculate
    samples_ms: tuple[float, ...]  # per token of each sequence
    tokens_per_s: float
    ms_per_step: float
    tokens_per_step: float  # of a sequence
    drafted: int
    accepted: int
    acceptance: float  # of the drafts; 0 where there was none
    speedup: float | None  # over the tokens/s without drafts, where these were measured


def measure_drafts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: Options,
    /,
    *,
    new_tokens: int,
    repetitions: int,
    warm_ups: int,
    plain: float | None,
) -> DraftCase:
    """Time tokens of sequences behind prompts.

    Args:
        model: from ``fmoe.load``.
        prompts: of one length.
        options: of the generation, drafts and all.
        new_tokens: tokens of one sample, of each sequence.
        repetitions: samples.
        warm_ups: tokens before the clock starts.
        plain: tokens/s without drafts.
    """
    batch, context = len(prompts), len(prompts[0])
    steps = choose_steps(model, batch * (context + options.max_new_tokens))
    run = decode_batch(model, steps, prompts, options)
    taken = list(islice(run, 1 + warm_ups))
    samples_ms: list[float] = []
    timed: list[list[Token]] = []
    for _ in range(repetitions):
        finish(model.device)
        begin = time.perf_counter()
        timed += islice(run, new_tokens)
        finish(model.device)
        samples_ms.append((time.perf_counter() - begin) * 1e3 / new_tokens)
    taken += timed
    taken += run
    tokens = [token for turn in taken for token in turn]
    drafted, accepted = sum(token.drafted for token in tokens), sum(token.accepted for token in tokens)
    # each step gives one token that no draft stood for
    per_step = len(timed) * batch / max(sum(not token.accepted for turn in timed for token in turn), 1)
    ms = statistics.median(samples_ms)
    rate = batch / ms * 1e3
    return DraftCase(
        batch=batch,
        context=context,
        speculate=options.speculate,
        samples_ms=tuple(samples_ms),
        tokens_per_s=rate,
        ms_per_step=ms * per_step,
        tokens_per_step=per_step,
        drafted=drafted,
        accepted=accepted,
        acceptance=accepted / drafted if drafted else 0.0,
        speedup=None if plain is None else rate / plain,
    )
