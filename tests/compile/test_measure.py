"""Measuring one candidate: the inputs it gets, in which order, and what disqualifies it."""

from typing import Any

import pytest
import torch

from fmoe.compile import measure as measuring
from fmoe.compile.candidates import Candidate
from fmoe.compile.measure import (
    ENOUGH_BYTES,
    MOST_SETS,
    SETS,
    activation_dtype,
    check_rows,
    count_bytes,
    draw_router,
    list_cases,
    make_measure,
    multiply_out,
    time_calls,
)
from fmoe.compile.plan import linear_key, moe_key
from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import FP8, Fp8

from ..fp8_checkpoints import dequantize_blocks, quantize_blocks

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
    monkeypatch.setattr(measuring, "ENOUGH_BYTES", 1)
    params = make_params(3, bias=True)
    cases = list_cases(KEY, 8, params, rng())
    assert [case.weights.w_down_EDF is params[i // 2 % 3].w_down_EDF for i, case in enumerate(cases)] == [True] * 16
    assert len({case.weights.w_router_ED.data_ptr() for case in cases}) == 16  # which choose other experts each time
    assert not any(case.weights.bias_E.any() for case in cases)
    assert len(list_cases(KEY, 8, make_params(SETS + 2), rng())) == 2 * SETS
    assert len(list_cases(KEY, 4096, make_params(SETS + 2), rng())) == 4


def test_copies_end_where_the_caches_are_full(monkeypatch) -> None:
    (params,) = make_params(1)
    monkeypatch.setattr(measuring, "ENOUGH_BYTES", 3 * count_bytes(params) - 1)
    stacks = {case.weights.w_down_EDF.data_ptr() for case in list_cases(KEY, 8, [params], rng())}
    assert len(stacks) == 3


def test_copies_end_where_memory_gets_short(monkeypatch) -> None:
    (params,) = make_params(1)
    free = [9 * count_bytes(params), 5 * count_bytes(params), 3 * count_bytes(params)]
    monkeypatch.setattr(measuring, "_free_bytes", lambda weights: free.pop(0))
    stacks = {case.weights.w_down_EDF.data_ptr() for case in list_cases(KEY, 8, [params], rng())}
    assert (len(stacks), free) == (3, [])


def test_a_projection_has_one_case_for_each_set() -> None:
    weights = [torch.randn(5, 7, dtype=torch.bfloat16) for _ in range(3)]
    cases = list_cases(linear_key(5, 7, torch.bfloat16), 2, weights, rng())
    assert [case.x_TD.shape for case in cases] == [(2, 7)] * MOST_SETS
    assert [case.weights is w for case, w in zip(cases, weights, strict=False)] == [True] * 3
    assert len({case.weights.data_ptr() for case in cases}) == MOST_SETS


def test_a_projections_own_layers_fill_the_caches() -> None:
    def cases_of(rows: int, count: int) -> list[Any]:
        weights = [torch.empty(rows, 1024, dtype=FP8, device="meta") for _ in range(count)]
        generator = torch.Generator()
        cases = list_cases(linear_key(rows, 1024, FP8), 1, [Fp8(w, w[:1, :1].float()) for w in weights], generator)
        return [case.weights.w for case in cases]

    size = ENOUGH_BYTES // 20  # twenty of these and their factors are enough
    assert len(cases_of(size // 1024 - 1, 36)) == 21
    assert len({id(w) for w in cases_of(size // 1024 - 1, 36)}) == 21
    assert len(cases_of(ENOUGH_BYTES // 1024, 36)) == SETS
    assert len(cases_of(ENOUGH_BYTES // 1024, 1)) == 1
    assert len(cases_of(ENOUGH_BYTES // 2048, 1)) == 2


def quantise(*shape: int, parts: int = 1) -> Fp8:
    """Put values in FP8 blocks, each part's rows by themselves."""
    pieces = [quantize_blocks(piece) for piece in torch.randn(shape).chunk(parts, -2)]
    return Fp8(*(torch.cat(column, -2) for column in zip(*pieces, strict=True)))


def make_narrow(dtype: torch.dtype = torch.bfloat16) -> MoEParams:
    return MoEParams(torch.randn(61, 64).to(dtype), quantise(61, 48, 64, parts=2), quantise(61, 64, 24), None, None)


NARROW_KEY = moe_key(60, 4, 1, 1, 64, 24, FP8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_have_the_dtype_of_the_model_and_not_that_of_fp8_blocks(dtype: torch.dtype) -> None:
    cases = list_cases(NARROW_KEY, 3, [make_narrow(dtype)], rng())
    assert {case.x_TD.dtype for case in cases} == {case.weights.w_router_ED.dtype for case in cases} == {dtype}
    assert all(case.x_TD.isfinite().all() for case in cases)
    w = quantise(150, 130)
    assert activation_dtype(w) == torch.bfloat16
    assert activation_dtype(w._replace(rest_MD=torch.ones(2, 130, dtype=dtype))) == dtype
    assert activation_dtype(torch.ones(2, 3, dtype=dtype)) == dtype
    assert activation_dtype(make_params(1)[0]) == torch.float32


def test_fp8_blocks_are_copied_with_what_belongs_to_them() -> None:
    params = make_narrow()
    cases = list_cases(NARROW_KEY, 3, [params], rng())
    assert len(cases) == 2 * SETS
    for name in ("w_gate_up_EPD", "w_down_EDF"):
        stacks, own = [getattr(case.weights, name) for case in cases[::2]], getattr(params, name)
        assert stacks[0] is own
        for part in ("w", "scale"):
            assert len({getattr(stack, part).data_ptr() for stack in stacks}) == SETS
            assert all(torch.equal(getattr(stack, part).float(), getattr(own, part).float()) for stack in stacks)
    w = quantise(150, 130)._replace(rest_MD=torch.randn(3, 130).bfloat16())
    cases = list_cases(linear_key(153, 130, FP8), 2, [w], rng())
    assert {case.x_TD.dtype for case in cases} == {torch.bfloat16}
    assert len({case.weights.rest_MD.data_ptr() for case in cases}) == MOST_SETS
    assert torch.equal(cases[-1].weights.rest_MD, w.rest_MD)
    assert count_bytes(w) == 150 * 130 + 4 * 4 + 2 * 3 * 130


def test_the_reference_gets_fp8_blocks_multiplied_out() -> None:
    params, seen = make_narrow(torch.float32), []

    def run(implementation, settings, x_TD, weights):
        seen.append(weights)
        return x_TD

    make_measure(NARROW_KEY, 3, torch.device("cpu"), run, [params], reference="grouped")
    assert len(seen) == 2
    for weights in seen:
        gate, up = (
            dequantize_blocks(w, s)
            for w, s in zip(params.w_gate_up_EPD.w.chunk(2, 1), params.w_gate_up_EPD.scale.chunk(2, 1), strict=True)
        )
        torch.testing.assert_close(weights.w_gate_up_EPD, torch.cat((gate, up), 1), rtol=1e-6, atol=0)
        torch.testing.assert_close(weights.w_down_EDF, dequantize_blocks(*params.w_down_EDF[:2]), rtol=1e-6, atol=0)
    w = quantise(150, 130)._replace(rest_MD=torch.randn(3, 130).bfloat16())
    plain = multiply_out(w)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(plain, torch.cat((dequantize_blocks(w.w, w.scale).bfloat16(), w.rest_MD)))
    tensor = torch.ones(3, 4)
    assert multiply_out(tensor) is tensor


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_candidate_that_takes_another_blocks_factor_is_refused(wrong: int) -> None:
    """One factor of four is that of its neighbour, and of half the size."""
    w = quantise(256, 256)
    w = w._replace(scale=w.scale * torch.tensor([[1.0, 0.5], [2.0, 1.0]]))
    broken = w.scale.clone()
    broken.view(-1)[wrong] = w.scale[0, 0]

    def run(implementation, settings, x_TD, weights):
        plain = weights
        if isinstance(weights, Fp8):
            plain = dequantize_blocks(weights.w, broken if settings else weights.scale)
        return (x_TD.float() @ plain.float().T).to(x_TD.dtype)

    key = linear_key(256, 256, FP8)
    measure = make_measure(key, 2, torch.device("cpu"), run, [w], reference="library")
    assert measure(Candidate("triton", ()), 1) > 0
    with pytest.raises(ValueError, match=r"wrong result: relative error 0\.\d+, expected at most 0\.05"):
        measure(Candidate("triton", (1,)), 1)


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
