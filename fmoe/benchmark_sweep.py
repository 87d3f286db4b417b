"""Measure cost against size in one process: prefill over tokens, decode over context, decode over sequences.

A prompt of a quarter of a million tokens takes longer than all steps behind it, and what a step takes does not depend
on what the caches hold, only on how much. So decode is measured behind caches of random numbers, placed at their
length as a prompt would be; nothing is prefilled for it. Sizes that do not fit are named with the reason.

Letters: B sequences, V vocabulary.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fmoe.compile.step import Steps

from .ambient import check_model, undisturbed
from .architectures import State
from .batches import Batch, Choice, Kind
from .benchmark import SPARE, WARM_UPS, WATCHED, Settings, count_step, greedy_options, measure_prefill, take
from .benchmark_machine import finish, read_peak_bytes, reset_peak
from .benchmark_parts import Watch, count_moe_layers
from .byte_limit import Rates, Work
from .cache_size import check_room
from .capture import DirectMachine, Machine
from .decoding import choose_machine
from .loading import named_tensors
from .model import Model, choose_steps
from .options import is_integer

LOG = logging.getLogger("fmoe")

Axis = Literal["tokens", "context", "batch"]

STATE_STD = 0.1  # of the numbers in the caches
DEFAULT_TOKENS = tuple(1 << i for i in range(15))
DEFAULT_CONTEXTS = tuple(512 << i for i in range(10))
DEFAULT_BATCHES = tuple(1 << i for i in range(7))


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to sweep over.

    tokens: of one prompt, whose prefill is measured.
    contexts: tokens behind which one sequence decodes.
    batches: sequences that decode together.
    context: tokens behind which those do.
    new_tokens: steps of one sample of decode.
    repetitions: samples of each size.
    seed: of prompts and caches.
    """

    tokens: tuple[int, ...] = DEFAULT_TOKENS
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    batches: tuple[int, ...] = DEFAULT_BATCHES
    context: int = 512
    new_tokens: int = 32
    repetitions: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "contexts", "batches"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or not all(is_integer(value) and value >= 1 for value in values):
                raise ValueError(f"the sweep's {name}={values!r} must be integers >= 1, such as (1, 8)")
        Settings(context=self.context, new_tokens=self.new_tokens, repetitions=self.repetitions, seed=self.seed)

    @property
    def decode_tokens(self) -> int:
        """Tokens that a sequence gets: the first, those that warm up, the timed and the spare ones."""
        return 1 + WARM_UPS + self.repetitions * self.new_tokens + SPARE


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One size; ``ms`` is of a whole prompt on the axis of tokens, else of a step."""

    axis: Axis
    size: int  # what varies along the axis
    batch: int
    context: int  # tokens in the caches before the first step
    samples_ms: tuple[float, ...]
    ms: float  # their median
    tokens_per_s: float
    bytes: float
    flops: float
    bytes_ms: float  # the least time of the bytes
    flops_ms: float  # and of the operations
    limit_ms: float  # the longer of them
    ratio: float  # ms / limit_ms
    experts: float  # distinct ones of a MoE layer: counted where several sequences choose, else expected
    compiled: bool
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A size that was not measured."""

    axis: Axis
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """Everything ``fmoe bench --sweep`` adds."""

    tokens: tuple[SweepPoint, ...]
    contexts: tuple[SweepPoint, ...]
    batches: tuple[SweepPoint, ...]
    left_out: tuple[LeftOut, ...]
    caches: str = "decode behind caches of random numbers, placed at their length; nothing was prefilled"


def run_sweep(model: Model, settings: SweepSettings, rates: Rates, /) -> Sweep:
    """Measure every size that fits.

    Args:
        model: from ``fmoe.load``.
        settings: what to sweep over.
        rates: of the machine, from ``measure_rates``.
    """
    check_model(model, "benchmark_sweep.run_sweep")
    left_out: list[LeftOut] = []

    def sweep(axis: Axis, sizes: Sequence[int], measure: Callable[[int], SweepPoint]) -> tuple[SweepPoint, ...]:
        points = []
        for size in dict.fromkeys(sizes):
            try:
                points.append(measure(size))
            except (ValueError, torch.OutOfMemoryError) as error:
                reason = str(error).partition("\n")[0]
                LOG.warning("left out %s %d: %s", axis, size, reason)
                left_out.append(LeftOut(axis, size, reason))
        return tuple(points)

    with undisturbed(model):
        return Sweep(
            tokens=sweep("tokens", settings.tokens, lambda n: _measure_tokens(model, n, settings, rates)),
            contexts=sweep(
                "context", settings.contexts, lambda n: measure_placed(model, "context", 1, n, settings, rates)
            ),
            batches=sweep(
                "batch",
                settings.batches,
                lambda n: measure_placed(model, "batch", n, settings.context, settings, rates),
            ),
            left_out=tuple(left_out),
        )


def _measure_tokens(model: Model, tokens: int, settings: SweepSettings, rates: Rates) -> SweepPoint:
    limit = model.config.decoder.max_context
    if tokens > limit:
        raise ValueError(f"the model's context is {limit} tokens")
    steps = choose_steps(model, tokens)
    _empty_shelf(model)
    check_room(model, steps, 1, tokens)
    usual = Settings((), 1, (), 1, settings.repetitions, settings.seed)
    case = measure_prefill(model, tokens, usual, rates)
    work = count_step(model, batch=1, context=0, tokens=tokens)
    known = {"tokens_per_s": case.tokens_per_s, "compiled": steps.compiled, "peak_bytes": case.peak_bytes}
    return _make_point("tokens", tokens, case.samples_ms, work, rates, batch=1, context=0, **known)


def measure_placed(
    model: Model, axis: Axis, batch: int, context: int, settings: SweepSettings, rates: Rates, /
) -> SweepPoint:
    """Time decode steps of ``batch`` sequences whose caches hold random numbers at ``context`` positions.

    Steps that would leave the model's context begin earlier, so that the last one ends it.

    Raises:
        ValueError: the sequences do not fit into the model's context or into memory.
    """
    tokens, limit = settings.decode_tokens, model.config.decoder.max_context
    begin = min(context, limit - tokens)
    if context > limit:
        raise ValueError(f"the model's context is {limit} tokens")
    if begin < 1:
        raise ValueError(f"the steps take {tokens} tokens of the model's context of {limit}; take fewer new_tokens")
    steps = choose_steps(model, batch * tokens)
    _empty_shelf(model)
    check_room(model, steps, batch, begin + tokens)
    reset_peak(model.device)
    samples_ms = _time_placed(model, steps, batch, begin, settings)
    peak = read_peak_bytes(model.device)
    distinct = _count_experts(model, batch, begin, settings) if batch > 1 else None
    middle = begin + 1 + WARM_UPS + settings.repetitions * settings.new_tokens // 2
    work = count_step(model, batch=batch, context=middle, distinct=distinct)
    size = batch if axis == "batch" else context
    rate = batch * 1e3 / statistics.median(samples_ms)
    known = {"batch": batch, "context": begin, "compiled": steps.compiled, "peak_bytes": peak}
    done = _make_point(axis, size, samples_ms, work, rates, tokens_per_s=rate, **known)
    LOG.info("decode, batch %d, context %d: %.3f ms a step, %.2f x the limit", batch, begin, done.ms, done.ratio)
    return done


def _time_placed(model: Model, steps: Steps, batch: int, begin: int, settings: SweepSettings) -> list[float]:
    run = decode_placed(model, steps, batch, begin, settings.decode_tokens, settings.seed)
    take(run, 1 + WARM_UPS)
    samples_ms = []
    for _ in range(settings.repetitions):
        finish(model.device)
        start = time.perf_counter()
        take(run, settings.new_tokens)
        finish(model.device)
        samples_ms.append((time.perf_counter() - start) * 1e3 / settings.new_tokens)
    return samples_ms


def decode_placed(
    model: Model, steps: Steps, batch: int, context: int, tokens: int, seed: int, /, *, machine: Machine | None = None
) -> Iterator[list[int]]:
    """Decode ``tokens`` greedy tokens of each sequence behind caches of random numbers at ``context`` positions.

    The steps and how they are launched are those of ``decode_batch``.

    Yields:
        One token per sequence.
    """
    options = greedy_options(model, tokens)
    machine = machine or choose_machine(model, steps)
    rows = Batch(model, steps, Kind(type(machine), batch, Choice.of(options), 0, False), context + tokens, machine)
    rows.begin([[]] * batch, options, 0)
    generator = torch.Generator(model.device).manual_seed(seed)
    fill_caches_(rows.state, generator)
    lengths = [context] * batch
    rows.place(lengths, 0)
    shape = (batch, model.config.decoder.vocab_size)
    logits_BV = torch.randn(shape, generator=generator, device=model.device)
    for turn, _ in rows.run(rows.choose(logits_BV), lengths, tokens, lambda row: True):
        yield [token.id for token in turn]


def fill_caches_(state: State, generator: torch.Generator, /) -> None:
    """Write small random numbers into the caches: what is read must be finite, and sequences must differ."""
    for cache in state.caches:
        for _, part in named_tensors(cache):
            part.normal_(std=STATE_STD, generator=generator)


def _count_experts(model: Model, batch: int, begin: int, settings: SweepSettings) -> list[float] | None:
    """Count the experts that each MoE layer reads in a few uncompiled steps."""
    layers = count_moe_layers(model.params.layers)
    if not layers:
        return None
    watch = Watch(model)
    run = decode_placed(model, watch.steps, batch, begin, 1 + WATCHED, settings.seed, machine=DirectMachine())
    take(run, 1 + WATCHED)
    return watch.distinct_per_layer(layers)


def _make_point(
    axis: Axis, size: int, samples_ms: Sequence[float], work: Work, rates: Rates, /, **rest: Any
) -> SweepPoint:
    """Put samples beside their limits; the rest is given to the point as it is."""
    ms = statistics.median(samples_ms)
    bytes_ms, flops_ms = work.total_bytes / rates.gbps / 1e6, work.total_flops / rates.tflops / 1e9
    limit_ms = max(bytes_ms, flops_ms)
    return SweepPoint(
        axis=axis,
        size=size,
        samples_ms=tuple(samples_ms),
        ms=ms,
        bytes=work.total_bytes,
        flops=work.total_flops,
        bytes_ms=bytes_ms,
        flops_ms=flops_ms,
        limit_ms=limit_ms,
        ratio=ms / limit_ms,
        experts=work.distinct,
        **rest,
    )


def _empty_shelf(model: Model) -> None:
    """Free the batch that decoded last: the next one is of another size."""
    model.shelf.take(lambda kept: False)
