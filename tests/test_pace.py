"""How many drafts pay, on machines that are made up: what a step takes and how many tokens it gives."""

import pytest

from fmoe.pace import AGAIN, TRIAL, Pace


def play(pace, seconds, tokens, steps, *, most=3, start_s=0.0):
    """Let it choose; a step of n drafts takes seconds[n] and gives tokens[n]. Returns the choices and the time."""
    now, chosen = start_s, []
    for _ in range(steps):
        drafts = pace.choose(most)
        chosen.append(drafts)
        began, now = now, now + seconds[drafts]
        pace.note(drafts, tokens[drafts], now, began_s=began, warm=True)
    return chosen, now


@pytest.mark.parametrize(
    ("seconds", "tokens", "best"),
    [
        ([1.0, 1.3, 1.6, 1.9], [4, 4, 4, 4], 0),  # no draft is ever right
        ([1.0, 1.3, 1.6, 1.9], [4, 6, 7, 7], 1),
        ([1.0, 1.3, 1.6, 1.9], [4, 8, 12, 16], 3),  # all are
        ([1.0, 1.1, 1.8, 2.5], [1, 2, 3, 4], 1),
        ([1.0, 2.2, 3.0, 4.0], [1, 2, 3, 4], 0),
    ],
)
def test_the_fastest_is_found_and_kept(seconds, tokens, best):
    pace = Pace()
    chosen, _ = play(pace, seconds, tokens, 400)
    assert pace.best(3) == best
    assert chosen[60:].count(best) >= 0.9 * len(chosen[60:])


def test_what_does_not_pay_costs_little():
    pace, seconds, tokens = Pace(), [1.0, 1.4, 1.8, 2.2], [1, 1, 1, 1]
    _, first = play(pace, seconds, tokens, 40)
    assert first <= 40 + 0.4 * 2 * TRIAL
    _, end = play(pace, seconds, tokens, 4 * AGAIN, start_s=first)
    assert end - first <= 1.02 * 4 * AGAIN


def test_a_change_is_noticed():
    pace, seconds = Pace(), [1.0, 1.3, 1.6, 1.9]
    play(pace, seconds, [1, 1, 1, 1], 100)
    assert pace.best(3) == 0
    _, _ = play(pace, seconds, [1, 2, 3, 4], 6 * AGAIN, start_s=1000.0)
    assert pace.best(3) >= 1


def test_no_more_drafts_than_there_may_be():
    pace = Pace()
    chosen, _ = play(pace, [1.0, 1.01, 1.02, 1.03], [1, 2, 3, 4], 200, most=2)
    assert set(chosen) == {0, 1, 2} and pace.best(2) == 2 and pace.best(1) == 1


def test_steps_that_compile_and_the_callers_time_do_not_count():
    pace = Pace()
    pace.note(1, 2, 60.0, began_s=0.0, warm=False)
    for n in range(TRIAL):
        began = 100.0 * (n + 1)  # long after the step before was read
        pace.note(1, 2, began + 1.0, began_s=began, warm=True)
    assert pace.seconds(1) == 1.0 and pace.rate(1) == 2.0


def test_a_step_that_was_launched_ahead_takes_what_it_adds():
    pace = Pace()
    for n in range(TRIAL):
        pace.note(1, 2, n + 2.0, began_s=n, warm=True)  # launched while the one before ran
    assert pace.seconds(1) == 1.0
