"""Measuring one candidate: the inputs it gets, in which order, and what disqualifies it."""

import pytest
import torch

from fmoe.compile.candidates import Candidate
from fmoe.compile.measure import SETS, check_rows, draw_router, list_cases, make_measure, time_calls
from fmoe.compile.plan import linear_key, moe_key
from fmoe.functional.moe import MoEParams

KEY = moe_key(60, 4, 1, 1, 64, 24, torch.float32)
GROUPED, DENSE = Candidate("grouped", ()), Candidate("dense", ())


def make_params(count: int, *, bias: bool = False) -> list[MoEParams]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape)

    return [
        MoEParams(draw(61, 64), draw(61, 48, 64), draw(61, 64, 24), torch.ones(60) if bias else None, None)
        for _ in range(count)
    ]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def shares(key, router, x) -> torch.Tensor:
    """Part of the choices that each expert gets, the most wanted first."""
    experts, top_k = key.sizes[:2]
    ids = (x @ router.T)[:, :experts].topk(top_k).indices
    return ids.flatten().bincount(minlength=experts).sort(descending=True).values / ids.numel()


def test_routing_is_even_and_skewed_in_turn() -> None:
    cases = list_cases(KEY, 4096, make_params(2), rng())
    assert len(cases) == 2 * SETS  # small stacks are copied
    even, skewed = (shares(KEY, case.weights.w_router_ED, case.x_TD) for case in cases[:2])
    assert even[0] < 4 / 60
    assert skewed[0] > 6 / 60
    assert skewed[30:].sum() < 0.6 * even[30:].sum()


def test_a_skewed_router_has_the_logarithms_of_zipfs_law() -> None:
    router = draw_router(KEY, torch.float32, rng(), skewed=True)
    probabilities = (4.0 * router[:60, 0]).exp().sort(descending=True).values
    torch.testing.assert_close(probabilities, 1 / torch.arange(1, 61.0))
    assert router.shape == (61, 64)
    assert draw_router(KEY, torch.bfloat16, rng(), skewed=False).dtype == torch.bfloat16


def test_the_models_stacks_are_read_and_not_copied_where_they_are_large(monkeypatch) -> None:
    monkeypatch.setattr("fmoe.compile.measure.SMALL_BYTES", 1)
    params = make_params(3, bias=True)
    cases = list_cases(KEY, 8, params, rng())
    assert [case.weights.w_down_EDF is params[i // 2].w_down_EDF for i, case in enumerate(cases)] == [True] * 6
    assert not any(case.weights.bias_E.any() for case in cases)
    assert len(list_cases(KEY, 8, make_params(SETS + 2), rng())) == 2 * SETS
    assert len(list_cases(KEY, 4096, make_params(SETS + 2), rng())) == 4


def test_a_projection_has_one_case_for_each_set() -> None:
    weights = [torch.randn(5, 7, dtype=torch.bfloat16) for _ in range(3)]
    cases = list_cases(linear_key(5, 7, torch.bfloat16), 2, weights, rng())
    assert [case.x_TD.shape for case in cases] == [(2, 7)] * SETS
    assert [case.weights is w for case, w in zip(cases, weights, strict=False)] == [True] * 3
    assert len({case.weights.data_ptr() for case in cases}) == SETS


def test_sets_are_taken_in_turn() -> None:
    now, seen = [0.0], []

    def call(case):
        seen.append(case)
        now[0] += 1e-3 * case

    seconds = time_calls(call, [1, 3, 5, 7, 9, 11], 4, clock=lambda: now[0])
    assert seen == [1, 3, 5, 7, 9, 11, 1, 3]
    assert seconds == pytest.approx(4e-3)  # the median of 2, 6, 10, 2


def test_slow_calls_are_repeated_less_often() -> None:
    now, seen = [0.0], []

    def call(case):
        seen.append(case)
        now[0] += 0.2

    assert time_calls(call, [1, 2], 30, clock=lambda: now[0]) == pytest.approx(0.2)
    assert len(seen) == 4


def run_with(outcomes):
    """Make a run function: the sum of the rows by default, for some implementations something else."""
    calls = []

    def run(implementation, settings, x_TD, weights):
        calls.append(implementation)
        return outcomes.get(implementation, lambda x: x * 2)(x_TD)

    return run, calls


def test_a_right_candidate_is_checked_once_and_timed() -> None:
    run, calls = run_with({})
    measure = make_measure(KEY, 3, torch.device("cpu"), run, make_params(1), reference="grouped")
    assert calls == ["grouped"] * 2
    assert measure(DENSE, 3) > 0
    assert calls[2:] == ["dense"] * (2 + 6)
    measure(DENSE, 10)
    assert len(calls) == 2 + 8 + 20


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda x: x * 2.1, "relative error 0.05, expected at most 0.01"),
    (lambda x: x * torch.nan, "relative error nan"),
    (lambda x: torch.cat([x[:-1], x[:1] * torch.inf]), "relative error"),
    (lambda x: x[:-1], r"shape \(2, 64\), expected \(3, 64\)"),
])  # fmt: skip
def test_a_wrong_candidate_is_refused(wrong, message: str) -> None:
    run, _ = run_with({"dense": wrong})
    measure = make_measure(KEY, 3, torch.device("cpu"), run, make_params(1), reference="grouped")
    with pytest.raises(ValueError, match=f"wrong result: {message}"):
        measure(DENSE, 3)
    assert measure(GROUPED, 3) > 0


def test_half_precision_may_round() -> None:
    rows = torch.randn(4, 8)
    check_rows((rows * 1.03).bfloat16(), rows.bfloat16())
    with pytest.raises(ValueError, match=r"expected at most 0\.05"):
        check_rows((rows * 1.1).bfloat16(), rows.bfloat16())
    check_rows(torch.zeros(0, 8), torch.zeros(0, 8))
