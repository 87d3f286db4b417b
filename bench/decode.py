"""What is measured: decode and prefill of two small checkpoints, fmoe against transformers, batch 1 and 8.

Tokens are compared first: a contender whose greedy tokens differ from transformers' is reported and not timed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmoe.model import Model, resolve_folder

from .contenders import (
    Prompts,
    StaticRunner,
    load_fmoe,
    load_transformers,
    reference_tokens,
    start_fmoe,
    start_transformers,
)
from .measure import (
    Clock,
    Samples,
    Start,
    add_samples,
    fastest,
    find_difference,
    median_ratio,
    rate,
    run_interleaved,
    spread_of_ratio,
    time_calls,
)
from .tiny import write_tiny_model

PROMPT, SKIP, TURN = 16, 3, 8  # tokens of a prompt, steps before the clock starts, steps of one turn
PREFILL = (2, 200)  # prompts, tokens of each
BATCHES = (1, 8)
MODELS = ("demo", "tiny")
TARGETS = {
    ("decode", "uncompiled", 1): 2.0,
    ("decode", "uncompiled", 8): 1.5,
    ("decode", "compiled", 1): 1.5,
    ("decode", "compiled", 8): 1.1,
    ("prefill", "uncompiled", 2): 1.0,
}
OURS = "fmoe"
GROUPED, BATCHED = "transformers grouped_mm", "transformers batched_mm"


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    sequences: int
    turns: int  # of each sequence
    rounds: int  # of prefill


FULL, QUICK = Size(sequences=4, turns=6, rounds=15), Size(sequences=2, turns=4, rounds=5)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    task: str
    model: str
    mode: str
    batch: int

    @property
    def name(self) -> str:
        """What ``--only`` selects by."""
        return f"{self.task}-{self.model}-{self.mode}-{self.batch}"

    @property
    def target(self) -> float:
        """The ratio that the project aims at."""
        return TARGETS[self.task, self.mode, self.batch]

    @property
    def tokens(self) -> int:
        """Tokens of one timed unit: a step of all rows, or all prompts."""
        return self.batch * (PREFILL[1] if self.task == "prefill" else 1)


@dataclass(frozen=True, slots=True)
class Result:
    """Measured, or what was wrong instead."""

    case: Case
    samples_s: Samples  # seconds per step (decode) or per call (prefill)
    peer: str
    wrong: str | None = None

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer."""
        return median_ratio(self.samples_s[OURS], self.samples_s[self.peer])

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Quartiles of the ratio of pairs."""
        return spread_of_ratio(self.samples_s[OURS], self.samples_s[self.peer])

    def rate(self, name: str) -> float:
        """Tokens per second at the median."""
        return rate(self.samples_s[name], self.case.tokens)


def all_cases() -> list[Case]:
    """List every case, in the order of the table."""
    cases = [Case("decode", m, mode, b) for m in MODELS for mode in ("uncompiled", "compiled") for b in BATCHES]
    return cases + [Case("prefill", model, "uncompiled", PREFILL[0]) for model in MODELS]


def select_cases(cases: Sequence[Case], only: Sequence[str], /) -> list[Case]:
    """Keep the cases whose name holds all words of one of ``only``, such as ``decode-demo-1``."""
    if not only:
        return list(cases)
    chosen = [set(words.split("-")) for words in only]
    return [case for case in cases if any(words <= set(case.name.split("-")) for words in chosen)]


def run_cases(cases: Sequence[Case], folder: Path, size: Size, clock: Clock, /) -> Iterator[Result]:
    """Measure; ``folder`` is where the tiny model is written."""
    for model in MODELS:
        chosen = [case for case in cases if case.model == model]
        if not chosen:
            continue
        if model == "tiny":
            write_tiny_model(folder)
        loaded = _Loaded(resolve_folder("demo") if model == "demo" else folder)
        with torch.inference_mode():
            for case in chosen:
                yield (
                    _measure_prefill(case, loaded, size, clock)
                    if case.task == "prefill"
                    else _measure_decode(case, loaded, size, clock)
                )


class _Loaded:
    """The models of one checkpoint, each loaded when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[Any, Any] = {}

    def _get(self, key: object, load: Callable[[], Any]) -> Any:
        if key not in self.models:
            self.models[key] = load()
        return self.models[key]

    def fmoe(self, mode: str) -> Model:
        model: Model = self._get(mode, partial(load_fmoe, self.folder, compile=mode == "compiled"))
        return model

    def transformers(self, experts: str) -> Any:
        return self._get(experts, partial(load_transformers, self.folder, experts))


def _random_prompts(rows: int, tokens: int, vocab_size: int) -> Prompts:
    rng = torch.Generator().manual_seed(rows)
    prompts: Prompts = torch.randint(1, vocab_size, (rows, tokens), generator=rng).tolist()
    return prompts


def _contenders(case: Case, loaded: _Loaded, prompts: Prompts, tokens: int) -> dict[str, Start]:
    starts: dict[str, Start] = {OURS: partial(start_fmoe, loaded.fmoe(case.mode), prompts, tokens)}
    if case.mode == "uncompiled":
        return starts | {GROUPED: partial(start_transformers, loaded.transformers("grouped_mm"), prompts, tokens)}
    static = {name: name.split()[-1] for name in (GROUPED, BATCHED)}
    return starts | {
        name: StaticRunner(loaded.transformers(experts), prompts, tokens) for name, experts in static.items()
    }


def _measure_decode(case: Case, loaded: _Loaded, size: Size, clock: Clock) -> Result:
    prompts = _random_prompts(case.batch, PROMPT, loaded.fmoe(case.mode).config.decoder.vocab_size)
    tokens = 1 + SKIP + size.turns * TURN
    expected, gaps = reference_tokens(loaded.transformers("grouped_mm"), prompts, tokens)
    starts = _contenders(case, loaded, prompts, tokens)
    run = partial(run_interleaved, starts, skip=SKIP, turns=size.turns, turn_steps=TURN, clock=clock)
    _, got = run()  # warms up, compiles, and shows whether the tokens are right
    wrong = _judge(expected, gaps, got)
    samples: Samples = {}
    # Compiling inside a timed turn would be a fault of the measurement.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(size.sequences if wrong is None else 0):
            more, got = run()
            wrong = wrong or _judge(expected, gaps, got)
            add_samples(samples, more)
    return _finish(case, samples, wrong)


def _measure_prefill(case: Case, loaded: _Loaded, size: Size, clock: Clock) -> Result:
    rows, length = PREFILL
    prompts = _random_prompts(rows, length, loaded.fmoe(case.mode).config.decoder.vocab_size)
    expected, gaps = reference_tokens(loaded.transformers("grouped_mm"), prompts, 1)
    starts = _contenders(case, loaded, prompts, 1)
    wrong = _judge(expected, gaps, {name: [[token] for token in next(start())] for name, start in starts.items()})
    calls: Mapping[str, Callable[[], object]] = {name: lambda s=start: next(s()) for name, start in starts.items()}
    if wrong is None:
        time_calls(calls, rounds=2, clock=clock)
    return _finish(case, {} if wrong else time_calls(calls, rounds=size.rounds, clock=clock), wrong)


def _judge(expected: list[list[int]], gaps: list[list[float]], got: Mapping[str, list[list[int]]]) -> str | None:
    for name, rows in got.items():
        if difference := find_difference(expected, gaps, rows):
            return f"{name}: {difference}"
    return None


def _finish(case: Case, samples: Samples, wrong: str | None) -> Result:
    if wrong is not None:
        return Result(case, {}, "", wrong)
    return Result(case, samples, fastest(samples, [name for name in samples if name != OURS]))
