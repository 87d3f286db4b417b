"""Choose among candidates by measuring them: successive halving within a time budget. Pure over what is passed in."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .candidates import Candidate
from .plan import Entry, Key, describe_choice

logger = logging.getLogger("fmoe")

# (repetitions, how many of n candidates are measured so often), one round after the other.
ROUNDS: tuple[tuple[int, Callable[[int], int]], ...] = (
    (3, lambda n: n),
    (10, lambda n: min(n, max(-(-n // 3), 4))),
    (30, lambda n: min(n, 4)),
)
TIE = 1.02  # a later candidate wins by more than this ratio only
PAIRS, PAIR_REPETITIONS = 4, 10  # of the last comparison with the default
ROUNDS_SHARE = 0.8  # of the budget; the rest is for the last comparison

Measure = Callable[[Candidate, int], float]  # candidate, repetitions -> seconds of one call
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Task:
    """One operator at one token count, and what may run it: the default first, then the likelier before the others."""

    key: Key
    tokens: int
    candidates: tuple[Candidate, ...]


def tune_key(
    key: Key,
    tokens: int,
    candidates: Sequence[Candidate],
    measure: Measure,
    clock: Clock,
    /,
    *,
    budget_s: float,
) -> Entry | None:
    """Find the fastest candidate.

    All are measured 3 times, the best third, four at least, 10 times, the best four 30 times. Within 2% the earlier
    candidate wins. A winner that is not the first candidate, the default, is then measured against it in turns, and
    replaces it only if it is faster by more than 2%. A candidate that raises is dropped.

    Args:
        key: the operator.
        tokens: token count that ``measure`` runs.
        candidates: the default first.
        measure: seconds of one call of a candidate, over a number of repetitions.
        clock: seconds.
        budget_s: when it is over, the best so far is taken.

    Returns:
        Entry with all timings; None where nothing was measured.
    """
    race = _Race(f"{key} at {tokens}", list(dict.fromkeys(candidates)), measure, clock)
    start = clock()
    left = list(race.candidates)
    for repetitions, count in ROUNDS:
        ranked = sorted(left, key=lambda c: (race.seconds.get(c, math.inf), race.candidates.index(c)))
        left = race.run(ranked[: count(len(left))], repetitions, start + ROUNDS_SHARE * budget_s)
    winner = race.find_winner(left)
    if winner is not None and winner != race.candidates[0] and race.candidates[0] in race.seconds:
        winner = race.compare(race.candidates[0], winner, start + budget_s)
    if winner is None:
        return None
    return Entry(winner.implementation, winner.settings, race.seconds[winner] * 1e6, race.list_timings())


class _Race:
    """Timings of the candidates of one task."""

    def __init__(self, name: str, candidates: list[Candidate], measure: Measure, clock: Clock) -> None:
        self.name = name
        self.candidates = candidates
        self.measure = measure
        self.clock = clock
        self.seconds: dict[Candidate, float] = {}
        self.dropped: dict[Candidate, str] = {}

    def run(self, candidates: Sequence[Candidate], repetitions: int, deadline: float) -> list[Candidate]:
        """Measure candidates until the deadline; give those that are still in the race."""
        for candidate in candidates:
            if self.clock() >= deadline:
                break
            self.time(candidate, repetitions)
        return [candidate for candidate in candidates if candidate in self.seconds]

    def time(self, candidate: Candidate, repetitions: int) -> float | None:
        """Measure one candidate; one that raises, or gives no time, is out."""
        try:
            seconds = self.measure(candidate, repetitions)
            if not 0 < seconds < math.inf:
                raise ValueError(f"a time of {seconds} s is none")
        except Exception as error:  # whatever a kernel fails with, another candidate may run
            reason = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            logger.debug("%s: %s is out (%s)", self.name, candidate, reason)
            self.dropped[candidate] = reason
            self.seconds.pop(candidate, None)
            return None
        self.seconds[candidate] = seconds
        return seconds

    def find_winner(self, left: Sequence[Candidate]) -> Candidate | None:
        """Give the earliest candidate within a tie of the best of those left, or else of all."""
        pool = [candidate for candidate in left if candidate in self.seconds] or list(self.seconds)
        if not pool:
            return None
        bound = TIE * min(self.seconds[candidate] for candidate in pool)
        return min((c for c in pool if self.seconds[c] <= bound), key=self.candidates.index)

    def compare(self, default: Candidate, winner: Candidate, deadline: float) -> Candidate | None:
        """Measure the default and the winner in turns; give the default unless it is beaten by more than a tie."""
        times: dict[Candidate, list[float]] = {default: [], winner: []}
        for turn in range(PAIRS):
            if self.clock() >= deadline:
                break
            pair = [self.time(c, PAIR_REPETITIONS) for c in ((default, winner) if turn % 2 else (winner, default))]
            if None in pair:
                return self.find_winner(self.candidates)
            times[default].append(self.seconds[default])
            times[winner].append(self.seconds[winner])
        for candidate, values in times.items():
            if values:
                self.seconds[candidate] = sum(values) / len(values)
        return default if self.seconds[default] <= TIE * self.seconds[winner] else winner

    def list_timings(self) -> tuple[tuple[str, float | str], ...]:
        """Give microseconds of each candidate, or why it has none."""
        found: list[tuple[str, float | str]] = []
        for candidate in self.candidates:
            name = describe_choice(candidate.implementation, candidate.settings)
            if candidate in self.seconds:
                found.append((name, round(self.seconds[candidate] * 1e6, 3)))
            else:
                found.append((name, self.dropped.get(candidate, "not measured: out of time")))
        return tuple(found)


def tune_keys(
    tasks: Sequence[Task],
    make_measure: Callable[[Key, int], Measure],
    clock: Clock,
    /,
    *,
    budget_s: float,
    key_budget_s: float,
    keep: Callable[[Key, int, Entry], object] = lambda key, tokens, entry: None,
    advance: Callable[[], object] = lambda: None,
) -> dict[Key, dict[int, Entry]]:
    """Tune one task after the other until the time is over.

    Args:
        tasks: the most valuable first.
        make_measure: called before each task; an operator that cannot be set up is left out with a warning.
        clock: seconds.
        budget_s: for all.
        key_budget_s: for one.
        keep: called with each entry as soon as it is there.
        advance: called after each task.

    Returns:
        What was found, by key and token count.
    """
    found: dict[Key, dict[int, Entry]] = {}
    deadline = clock() + budget_s
    for done, task in enumerate(tasks):
        left = deadline - clock()
        if left <= 0:
            logger.warning(
                "tuning stopped after its budget of %.1f s with %d of %d measured; tune again to go on",
                budget_s, done, len(tasks),
            )  # fmt: skip
            break
        entry = _tune_task(task, make_measure, clock, min(left, key_budget_s))
        if entry is not None:
            found.setdefault(task.key, {})[task.tokens] = entry
            keep(task.key, task.tokens, entry)
        advance()
    return found


def _tune_task(task: Task, make_measure: Callable[[Key, int], Measure], clock: Clock, budget_s: float) -> Entry | None:
    try:
        measure = make_measure(task.key, task.tokens)
    except RuntimeError as error:  # of memory, most likely
        logger.warning("could not measure %s at %d tokens (%s)", task.key, task.tokens, str(error).split("\n")[0])
        return None
    return tune_key(task.key, task.tokens, task.candidates, measure, clock, budget_s=budget_s)
