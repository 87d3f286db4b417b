"""Successive halving under an injected clock and timer: who wins, how often each is measured, and when it ends."""

import logging
import math

import pytest
import torch

from fmoe.compile.autotune import Task, tune_key, tune_keys
from fmoe.compile.candidates import Candidate
from fmoe.compile.plan import Entry, moe_key

KEY = moe_key(8, 2, 0, 0, 16, 24, torch.float32)
OTHER = moe_key(8, 2, 1, 1, 16, 24, torch.float32)


class Bench:
    """A clock that moves only while something is measured, and candidates with times of their own."""

    def __init__(self, seconds, *, cost_s=1e-3):
        self.candidates = [Candidate("triton", (i,)) for i in range(len(seconds))]
        self.seconds = dict(zip(self.candidates, seconds, strict=True))
        self.cost_s = cost_s
        self.now = 100.0
        self.calls = []

    def clock(self):
        return self.now

    def measure(self, candidate, repetitions):
        self.now += self.cost_s * repetitions
        self.calls.append((candidate.settings[0], repetitions))
        value = self.seconds[candidate]
        if isinstance(value, Exception):
            raise value
        return value(repetitions) if callable(value) else value

    def tune(self, budget_s=1e9):
        return tune_key(KEY, 8, self.candidates, self.measure, self.clock, budget_s=budget_s)

    def measured(self, repetitions):
        return [i for i, n in self.calls if n == repetitions]


def test_rounds_are_all_then_a_third_then_four():
    bench = Bench([1.0 + (7 * i) % 24 / 10 for i in range(24)])
    order = sorted(range(24), key=lambda i: (7 * i) % 24)
    entry = bench.tune()
    assert bench.calls[:24] == [(i, 3) for i in range(24)]
    assert bench.calls[24:32] == [(i, 10) for i in order[:8]]
    assert bench.calls[32:36] == [(i, 30) for i in order[:4]]
    assert bench.calls[36:] == []  # the default won
    assert entry.settings == (0,)
    assert entry.us == 1e6


def test_the_fastest_wins_and_is_compared_with_the_default_in_turns():
    bench = Bench([1.0, 0.9, 0.5, 0.8])
    entry = bench.tune()
    assert entry == Entry("triton", (2,), 5e5, entry.timings)
    assert entry.timings == (("triton:0", 1e6), ("triton:1", 9e5), ("triton:2", 5e5), ("triton:3", 8e5))
    assert bench.calls[-8:] == [(2, 10), (0, 10), (0, 10), (2, 10)] * 2


@pytest.mark.parametrize(("seconds", "winner"), [
    ([1.0, 0.981], 0),  # 1.9% is a tie with the default
    ([1.0, 0.97], 1),
    ([2.0, 1.0, 0.99], 1),  # so it is with any earlier one
    ([2.0, 1.0, 0.97], 2),
    ([2.0, 1.0, 0.99, 0.975], 2),  # only the fastest counts
    ([2.0, 1.0, 0.985, 0.96], 3),
    ([1.0, 1.0, 1.0], 0),
])  # fmt: skip
def test_within_two_percent_the_earlier_wins(seconds, winner):
    assert Bench(seconds).tune().settings == (winner,)


def test_the_default_keeps_its_place_where_its_first_time_was_bad_luck():
    slow_once = Bench([lambda n: 9.0 if n == 3 else 0.99, *[1.0] * 11])
    assert slow_once.tune().settings == (0,)
    assert 0 not in slow_once.measured(30)
    lucky = Bench([1.0, lambda n: 0.5 if n != 10 else 1.5, 2.0])
    assert lucky.tune().settings == (0,)


def test_repeated_candidates_are_measured_once():
    bench = Bench([1.0, 2.0])
    bench.candidates *= 3
    bench.tune()
    assert bench.measured(3) == [0, 1]


def test_what_raises_is_out_with_its_reason(caplog):
    caplog.set_level(logging.DEBUG, logger="fmoe")
    bench = Bench([1.0, RuntimeError("out of registers\nmore"), 0.5, math.nan, math.inf, 0.0])
    entry = bench.tune()
    assert entry.settings == (2,)
    assert dict(entry.timings)["triton:1"] == "RuntimeError: out of registers"
    assert "nan s is none" in dict(entry.timings)["triton:3"]
    assert "out of registers" in caplog.text
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 4


def test_a_default_that_raises_loses():
    assert Bench([ValueError("x"), 2.0, 1.0]).tune().settings == (2,)


def test_what_raises_later_is_out():
    def late(repetitions):
        if repetitions == 10:
            raise ValueError("wrong result")
        return 0.1

    assert Bench([1.0, late, 0.7]).tune().settings == (2,)
    in_comparison = Bench([1.0, lambda n: 0.1 if len(bench_calls) < 5 else 1 / 0, 0.7])
    bench_calls = in_comparison.calls
    assert in_comparison.tune().settings in ((0,), (2,))


def test_the_default_failing_in_the_last_comparison_loses():
    bench = Bench([lambda n: 1.0 if n == 3 else 1 / 0, *[2.0] * 2, 0.5])
    assert bench.tune().settings == (3,)


def test_only_failures_give_no_entry():
    assert Bench([ValueError("a"), ValueError("b")]).tune() is None
    assert tune_key(KEY, 8, [], lambda c, n: 1.0, lambda: 0.0, budget_s=1.0) is None


def test_no_time_gives_no_entry():
    bench = Bench([1.0, 0.5])
    assert bench.tune(budget_s=0.0) is None
    assert bench.calls == []


def test_the_best_so_far_is_taken_when_the_time_is_over():
    bench = Bench([1.0, 0.9, 0.2, 0.1, 0.05], cost_s=1.0)
    entry = bench.tune(budget_s=10.0)  # 80% of it are over after three candidates
    assert bench.calls[:3] == [(0, 3), (1, 3), (2, 3)]
    assert bench.calls[3:] == [(2, 10), (0, 10)]  # the rest is for the comparison
    assert entry.settings == (2,)
    assert dict(entry.timings)["triton:4"] == "not measured: out of time"


def test_times_of_an_unfinished_round_count():
    bench = Bench([1.0, lambda n: {3: 0.5, 10: 0.6}[n], lambda n: {3: 0.5, 10: 0.4}[n], *[3.0] * 3], cost_s=1.0)
    entry = bench.tune(budget_s=40.0)  # 18 s, then one of two
    assert bench.calls[6:8] == [(1, 10), (2, 10)]
    assert entry.settings == (2,)


def tune_two(bench, tasks, **options):
    return tune_keys(tasks, lambda key, tokens: bench.measure, bench.clock, **options)


def test_tasks_share_the_budget(caplog):
    bench = Bench([1.0], cost_s=1.0)
    tasks = [Task(key, tokens, tuple(bench.candidates)) for tokens in (1, 2) for key in (KEY, OTHER)]
    kept, done = [], []
    found = tune_two(
        bench, tasks, budget_s=50.0, key_budget_s=20.0,
        keep=lambda *args: kept.append(args[:2]), advance=lambda: done.append(1),
    )  # fmt: skip
    # 3 + 10 s and the 30 of a round that began in time
    assert {key: set(entries) for key, entries in found.items()} == {KEY: {1}, OTHER: {1}}
    assert kept == [(KEY, 1), (OTHER, 1)]
    assert len(done) == 2
    assert "tuning stopped after its budget of 50.0 s with 2 of 4 measured; tune again to go on" in caplog.text


def test_an_operator_that_cannot_be_set_up_is_left_out(caplog):
    bench = Bench([1.0])

    def make_measure(key, tokens):
        if key == KEY:
            raise RuntimeError("out of memory\nand more")
        return bench.measure

    tasks = [Task(key, 4, tuple(bench.candidates)) for key in (KEY, OTHER)]
    found = tune_keys(tasks, make_measure, bench.clock, budget_s=9.0, key_budget_s=9.0)
    assert set(found) == {OTHER}
    assert "could not measure moe E8 K2 S0 G0 D16 F24 float32 at 4 tokens (out of memory)" in caplog.text


def test_an_interruption_is_not_swallowed():
    bench = Bench([1.0, lambda n: (_ for _ in ()).throw(KeyboardInterrupt)])
    with pytest.raises(KeyboardInterrupt):
        bench.tune()
