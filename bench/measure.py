"""Interleaved timing, and the arithmetic of its samples.

Every contender is a function that starts a sequence and returns an iterator of steps. Contenders take turns of a few
steps (A B A B ...) at the same length, so what else the machine does meets all of them; each turn is one sample and
a ratio is the median of the ratios of turns that stood side by side.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

TIE = 1e-3  # two logits this close may change places under another summation order

Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}

Samples = dict[str, list[float]]  # seconds per step of each turn, by contender
Start = Callable[[], Iterator[Sequence[int]]]  # runs the prompt, then gives one token per row and step


def run_interleaved(
    starts: Mapping[str, Start], /, *, skip: int, turns: int, turn_steps: int, clock: Clock
) -> tuple[Samples, dict[str, list[list[int]]]]:
    """Run one sequence of each contender in turns.

    The prompt, the first token and ``skip`` steps after it are not timed.

    Returns:
        (seconds per step of each turn, the tokens of each row), by contender.
    """
    running = {name: start() for name, start in starts.items()}
    steps = {name: [next(run) for _ in range(1 + skip)] for name, run in running.items()}
    samples: Samples = {name: [] for name in starts}
    names = list(starts)
    for turn in range(turns):
        for name in names if turn % 2 == 0 else names[::-1]:  # A B, B A: nobody always comes second
            run, taken = running[name], steps[name]
            begin = clock()
            for _ in range(turn_steps):
                taken.append(next(run))
            samples[name].append((clock() - begin) / turn_steps)
    return samples, {name: rows_of(taken) for name, taken in steps.items()}


def time_calls(calls: Mapping[str, Callable[[], object]], /, *, rounds: int, clock: Clock) -> Samples:
    """Time one call of each contender per round, in turns."""
    samples: Samples = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            begin = clock()
            calls[name]()
            samples[name].append(clock() - begin)
    return samples


def add_samples(total: Samples, more: Samples, /) -> None:
    """Append the samples of another sequence, in place."""
    for name, values in more.items():
        total.setdefault(name, []).extend(values)


def rows_of(steps: Sequence[Sequence[int]], /) -> list[list[int]]:
    """Turn tokens by step into tokens by row."""
    return [list(row) for row in zip(*steps, strict=True)]


def median_ratio(ours_s: Sequence[float], theirs_s: Sequence[float], /) -> float:
    """Say how many times as fast we are: the median over pairs of theirs / ours."""
    return statistics.median(theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True))


def spread_of_ratio(ours_s: Sequence[float], theirs_s: Sequence[float], /) -> tuple[float, float]:
    """Return the first and third quartile of the ratios of pairs."""
    ratios = [theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return first, third


def rate(seconds: Sequence[float], tokens: int, /) -> float:
    """Compute tokens per second at the median time."""
    return tokens / statistics.median(seconds)


def fastest(samples: Samples, names: Sequence[str], /) -> str:
    """Name the contender with the least median time."""
    return min(names, key=lambda name: statistics.median(samples[name]))


def find_difference(
    expected: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]], got: Sequence[Sequence[int]], /
) -> str | None:
    """Compare greedy tokens by row; a row may leave the expected one only where its best two logits nearly tie.

    Args:
        expected: tokens of each row.
        gaps: best minus second-best logit that each of them was chosen by.
        got: tokens to judge, as many.

    Returns:
        What differs, or None.
    """
    for row, (want, gap, have) in enumerate(zip(expected, gaps, got, strict=True)):
        if len(want) != len(have):
            return f"row {row} has {len(have)} tokens, expected {len(want)}"
        step = next((i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b), None)
        if step is not None and gap[step] >= TIE:
            return f"row {row}, step {step}: token {have[step]}, expected {want[step]} by {gap[step]:.4f}"
    return None
