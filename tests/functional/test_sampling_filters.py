"""Settings and filters of next-token choice against loops over Python numbers, eager and compiled."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fmoe.functional.sampling import (
    SamplingParams,
    check_sampling,
    count_candidates,
    filter_logits,
    mark_seen_,
    penalize_repetition,
    sample,
    sampling_params,
)

from .sampling_oracles import (
    DTYPES_AND_MODES,
    FAST_MODES,
    INF,
    MODES,
    SETTINGS,
    candidates,
    filters,
    in_mode,
    probabilities_by_loop,
)

# Settings


def test_sampling_params_gives_row_i_seed_plus_i():
    params = sampling_params(
        3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.25, repetition_penalty=1.5, seed=41, device="cpu"
    )
    assert isinstance(params, SamplingParams)
    assert [t.dtype for t in params] == [torch.float32, torch.int64, *[torch.float32] * 3, torch.int64]
    assert params.seeds_B.tolist() == [41, 42, 43]
    assert params.top_k_B.tolist() == [7] * 3
    assert params.temperature_B.tolist() == [0.5] * 3
    assert params.top_p_B.tolist() == pytest.approx([0.9] * 3)
    assert params.min_p_B.tolist() == [0.25] * 3
    assert params.repetition_penalty_B.tolist() == [1.5] * 3


def test_sampling_params_wraps_the_last_seed():
    assert sampling_params(2, temperature=1, seed=2**63 - 1).seeds_B.tolist() == [2**63 - 1, -(2**63)]


def test_sampling_params_refuses_what_check_sampling_refuses():
    with pytest.raises(ValueError, match="top_p=2 must be"):
        sampling_params(1, temperature=1, top_p=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 1e-30, "top_p": 1e-9, "min_p": 1, "seed": -(2**63)},
        {"temperature": 1e30, "top_p": 1, "top_k": 2**40, "min_p": 0, "repetition_penalty": 0.1, "seed": 2**63 - 1},
    ],
)
def test_check_sampling_accepts(settings):
    check_sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1 must be a finite number >= 0; pass 0 for greedy"),
        ({"temperature": math.nan}, "temperature=nan must be a finite number"),
        ({"temperature": INF}, "temperature=inf must be a finite number"),
        ({"temperature": "1"}, "temperature='1' must be a finite number"),
        ({"temperature": True}, "temperature=True must be a finite number"),
        ({"top_p": 0}, r"top_p=0 must be a number in \(0, 1\]; pass 1 to switch it off"),
        ({"top_p": 1.01}, r"top_p=1\.01 must be"),
        ({"top_p": math.nan}, "top_p=nan must be"),
        ({"top_k": -1}, "top_k=-1 must be an int >= 0; pass 0 to switch it off"),
        ({"top_k": 2.0}, r"top_k=2\.0 must be an int"),
        ({"top_k": 2**63}, "top_k=9223372036854775808 must be an int"),
        ({"min_p": -0.1}, r"min_p=-0\.1 must be a number in \[0, 1\]; pass 0 to switch it off"),
        ({"min_p": 1.5}, r"min_p=1\.5 must be"),
        ({"min_p": math.nan}, "min_p=nan must be"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be a finite number > 0; pass 1 to switch it off"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan must be"),
        ({"repetition_penalty": INF}, "repetition_penalty=inf must be"),
        ({"seed": 1.0}, r"seed=1\.0 must be an int in -2\*\*63\.\.2\*\*63-1; pass 0 for a fixed default"),
        ({"seed": None}, "seed=None must be an int"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be an int"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809 must be an int"),
    ],
)
def test_check_sampling_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        check_sampling(**{"temperature": 1.0, **settings})


def test_count_candidates():
    assert count_candidates(top_k=0, top_p=1.0) == 0
    assert count_candidates(top_k=5, top_p=1.0) == 5
    assert count_candidates(top_k=5, top_p=0.5) == 5
    assert count_candidates(top_k=0, top_p=0.5) is None


# Repetition


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES, ids=str)
def test_penalize_repetition(dtype, mode, rng):
    logits_BV = torch.randn(3, 17, generator=rng).to(dtype)
    logits_BV[0, :3] = torch.tensor([0.0, -INF, 2.0])
    seen_BV = torch.rand(3, 17, generator=rng) < 0.5
    seen_BV[0, :3] = True
    penalty_B = torch.tensor([1.5, 1.0, 0.5])

    out_BV = in_mode(penalize_repetition, mode)(logits_BV, seen_BV, penalty_B)

    want = logits_BV.tolist()
    for b, row in enumerate(want):
        for v, logit in enumerate(row):
            if seen_BV[b, v]:
                row[v] = logit / penalty_B[b].item() if logit > 0 else logit * penalty_B[b].item()
    assert out_BV.dtype == torch.float32
    torch.testing.assert_close(out_BV, torch.tensor(want), rtol=1e-6, atol=0)
    assert torch.equal(out_BV[1], logits_BV[1].float())


@pytest.mark.parametrize("mode", MODES)
def test_mark_seen(mode, rng):
    seen_BV = torch.rand(5, 11, generator=rng) < 0.2
    seen_BV[:, 0] = torch.tensor([True, False, False, True, False])
    tokens_BT = torch.tensor([[-1, -1, 4, 4], [-1, 7, 0, 0], [-1, -1, -1, 10], [-1, 0, 1, 2], [0, -1, -1, 3]])
    want = [row.copy() for row in seen_BV.tolist()]
    for row, tokens in zip(want, tokens_BT.tolist(), strict=True):
        for token in tokens:
            if token >= 0:
                row[token] = True

    out_BV = in_mode(mark_seen_, mode)(seen_BV, tokens_BT)

    assert seen_BV.tolist() == want
    assert out_BV.tolist() == want


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_mark_seen_takes_one_token_a_row(dtype):
    seen_BV = torch.zeros(3, 4, dtype=torch.bool)
    mark_seen_(seen_BV, torch.tensor([3, -1, 0], dtype=dtype))
    assert seen_BV.nonzero().tolist() == [[0, 3], [2, 0]]


# Filters


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES, ids=str)
def test_filter_logits(dtype, mode, rng):
    """All settings in one batch, a row each, so that nothing may be promised about the candidates."""
    logits_BV = (2 * torch.randn(len(SETTINGS), 37, generator=rng)).to(dtype)
    logits_BV[:, 30:] = -INF
    rows = [sampling_params(1, **settings) for settings in SETTINGS]
    params = SamplingParams(*(torch.cat(tensors) for tensors in zip(*rows, strict=True)))

    out_BV = in_mode(filter_logits, mode)(logits_BV, *filters(params))

    want_BV = [probabilities_by_loop(x, **s) for x, s in zip(logits_BV.tolist(), SETTINGS, strict=True)]
    assert out_BV.dtype == torch.float32
    assert (out_BV.amax(dim=1) == 0).all()
    torch.testing.assert_close(out_BV.softmax(-1), torch.tensor(want_BV), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mode", FAST_MODES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filter_logits_needs_only_the_promised_candidates(settings, mode, rng):
    levels_BV = torch.randint(-3, 3, (5, 23), generator=rng).float()
    params = sampling_params(5, **settings)

    out_BV = in_mode(filter_logits, mode)(levels_BV, *filters(params), num_candidates=candidates(settings))

    assert torch.equal(out_BV, filter_logits(levels_BV, *filters(params)))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filter_logits_equals_transformers(settings, rng):
    logits_BV = 3 * torch.randn(4, 301, generator=rng)
    warpers = [
        TemperatureLogitsWarper(settings["temperature"]),
        TopKLogitsWarper(settings.get("top_k", 301)),
        TopPLogitsWarper(settings.get("top_p", 1.0)),
        MinPLogitsWarper(settings.get("min_p", 0.0)),
    ]
    want_BV = logits_BV
    for warper in warpers:
        want_BV = warper(None, want_BV)

    out_BV = filter_logits(logits_BV, *filters(sampling_params(4, **settings)))

    assert torch.equal(out_BV == -INF, want_BV == -INF)
    torch.testing.assert_close(out_BV.softmax(-1), want_BV.softmax(-1), rtol=1e-5, atol=1e-7)


def test_penalize_repetition_equals_transformers(rng):
    logits_BV = torch.randn(2, 19, generator=rng)
    tokens_BT = torch.randint(0, 19, (2, 7), generator=rng)
    seen_BV = mark_seen_(torch.zeros(2, 19, dtype=torch.bool), tokens_BT)

    out_BV = penalize_repetition(logits_BV, seen_BV, torch.full((2,), 1.3))

    assert torch.equal(out_BV, RepetitionPenaltyLogitsProcessor(1.3)(tokens_BT, logits_BV.clone()))


KEPT_CASES = [
    pytest.param([5.0], {"top_p": 0.1, "top_k": 1, "min_p": 1.0}, [0], id="V1"),
    pytest.param([2.0] * 4, {"top_k": 3}, [0, 1, 2], id="all-equal-top_k"),
    pytest.param([2.0] * 4, {"top_p": 0.5}, [0, 1], id="all-equal-top_p-met-exactly"),
    pytest.param([2.0] * 4, {"top_p": 0.51}, [0, 1, 2], id="all-equal-top_p-crossed"),
    pytest.param([2.0] * 4, {"min_p": 1.0}, [0, 1, 2, 3], id="all-equal-min_p"),
    pytest.param([1.0, 3.0, 1.0, 3.0, 1.0], {"top_k": 3}, [0, 1, 3], id="ties-lowest-id"),
    pytest.param([0.0, -0.0, 0.0, 9.0], {"top_k": 3}, [0, 1, 3], id="signed-zeros-tie"),
    pytest.param([1.0, -INF, 2.0], {"top_k": 3, "top_p": 1.0}, [0, 2], id="inf-is-never-kept"),
    pytest.param([1.0, 2.0, 3.0], {"top_k": 9}, [0, 1, 2], id="top_k-above-V"),
    pytest.param([1.0, 3.0, 2.0], {"top_p": 1e-9}, [1], id="top_p-tiny"),
    pytest.param([1.0, 3.0, 2.0], {"top_p": 1e-60}, [1], id="top_p-0-in-float32"),
    pytest.param([0.0, -90.0, -900.0], {"top_k": 3, "top_p": 1.0}, [0, 1, 2], id="top_p-1-keeps-the-rarest"),
    pytest.param([1.0, 3.0, 2.0], {"temperature": 1.2e-38, "top_p": 0.9}, [1], id="cold"),
    pytest.param([1.0, 3.0, -2.0], {"temperature": 1e30, "top_p": 0.6}, [0, 1], id="hot"),
    pytest.param([1.0, INF, 2.0, INF], {}, [1, 3], id="plus-inf"),
    pytest.param([-INF, -INF], {}, [0, 1], id="only-minus-inf"),
    pytest.param([math.log(p) for p in (0.1, 0.6, 0.3)], {"top_k": 2, "top_p": 0.66}, [1], id="top_p-after-top_k"),
    pytest.param([1.0, 3.0, 2.0], {"temperature": 0.0, "top_k": 2}, [1, 2], id="greedy-is-scaled-by-1"),
]


@pytest.mark.parametrize("mode", FAST_MODES)
@pytest.mark.parametrize("promise", [False, True], ids=["sort-all", "sort-few"])
@pytest.mark.parametrize(("logits", "settings", "kept"), KEPT_CASES)
def test_filter_logits_keeps(logits, settings, kept, promise, mode):
    params = sampling_params(1, **{"temperature": 1.0, **settings})
    limit = {"num_candidates": candidates(settings)} if promise else {}

    out_BV = in_mode(filter_logits, mode)(torch.tensor([logits]), *filters(params), **limit)

    assert (out_BV[0] > -INF).nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_nan_rows_stay_nan_and_leave_their_neighbours_alone(settings, rng):
    clean_BV = torch.randn(4, 13, generator=rng)
    logits_BV = clean_BV.clone()
    logits_BV[0, 5] = math.nan
    logits_BV[2] = -math.nan
    params = sampling_params(4, **settings)
    steps_B = torch.zeros(4, dtype=torch.int64)
    limit = candidates(settings)

    out_BV = filter_logits(logits_BV, *filters(params), num_candidates=limit)
    tokens_B = sample(logits_BV, params, steps_B, num_candidates=limit)

    clean_out_BV = filter_logits(clean_BV, *filters(params), num_candidates=limit)
    assert out_BV[[0, 2]].isnan().all()
    assert torch.equal(out_BV[[1, 3]], clean_out_BV[[1, 3]])
    assert torch.equal(tokens_B[[1, 3]], sample(clean_BV, params, steps_B, num_candidates=limit)[[1, 3]])
    assert ((tokens_B >= 0) & (tokens_B < 13)).all()
