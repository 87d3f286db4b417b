"""Next-token choice against loops over Python numbers, eager and compiled."""

import math
from collections import Counter

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
    random_uniform,
    sample,
    sample_greedy,
    sampling_params,
    token_logprobs,
)

INF = math.inf
MODES = ["eager", "aot_eager", "inductor"]
FAST_MODES = MODES[:2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# the slow compiler runs once
DTYPES_AND_MODES = [*((dtype, mode) for dtype in DTYPES for mode in FAST_MODES), (torch.bfloat16, "inductor")]
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.7, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.5, "top_k": 100, "top_p": 0.95},
]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def candidates(settings):
    return count_candidates(top_k=settings.get("top_k", 0), top_p=settings.get("top_p", 1.0))


def filters(params):
    return params.temperature_B, params.top_k_B, params.top_p_B, params.min_p_B


def probabilities_by_loop(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Filter one row of Python floats; the dropped tokens get probability 0."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    if top_p == 1:
        kept = order
    kept = [i for i in kept if weights[i] >= min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def uniform_by_big_ints(seed, counter):
    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    key = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    return (mix((key + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53


def seed_of_first_bits(bits):
    """Run splitmix64 backwards: the seed whose counter 0 hashes to these 64 bits."""

    def unmix(z):
        z = z ^ (z >> 31) ^ (z >> 62)
        z = z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
        z = z ^ (z >> 27) ^ (z >> 54)
        z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
        return z ^ (z >> 30) ^ (z >> 60)

    gamma = 0x9E3779B97F4A7C15
    seed = (unmix((unmix(bits) - gamma) % 2**64) - gamma) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def draw_by_loop(probabilities, u):
    mass = 0.0
    for token, p in enumerate(probabilities):
        mass += p
        if mass > u:
            return token
    raise AssertionError("the probabilities do not sum to one")


def chi_square(observed, probabilities):
    total = sum(observed.values())
    assert all(probabilities[token] > 0 for token in observed)
    return sum((observed.get(i, 0) - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities) if p > 0)


def chi_square_limit(degrees):
    """Bound that chance passes about once in 10,000 (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


def assert_uniform(u, cells=100):
    counts = torch.bincount((u * cells).long(), minlength=cells).tolist()
    assert len(counts) == cells
    assert chi_square(Counter(dict(enumerate(counts))), [1 / cells] * cells) < chi_square_limit(cells - 1)


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


# Random numbers


@pytest.mark.parametrize("mode", MODES)
def test_random_uniform_is_splitmix64(mode):
    ends = [0, 1, 2, 3, -1, -2, 12345678901234567, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63)]
    pairs = [(seed, counter) for seed in ends for counter in (0, 1, 2, 4095, 2**40, 2**63 - 1)]
    seeds_B, counters_B = torch.tensor(pairs).unbind(1)

    u_B = in_mode(random_uniform, mode)(seeds_B, counters_B)

    assert u_B.dtype == torch.float64
    assert u_B.tolist() == [uniform_by_big_ints(*pair) for pair in pairs]


def test_random_uniform_follows_the_published_generator():
    # splitmix64 from state 0 begins with this output; a seed whose first hash is 0 starts there
    u_B = random_uniform(torch.tensor([-0x9E3779B97F4A7C15 + 2**64]), torch.tensor([0]))
    assert u_B.item() == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_random_uniform_is_uniform_over_seeds_and_over_counters():
    many_B, none_B = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    for fixed in (0, 1, 77):
        assert_uniform(random_uniform(many_B, none_B + fixed))
        assert_uniform(random_uniform(none_B + fixed, many_B))


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1), (1, -1)], ids=str)
def test_random_uniform_of_neighbours_is_independent(step):
    seeds_B, counters_B = torch.arange(100_000), torch.arange(100_000) % 317 + 1
    first_B = random_uniform(seeds_B, counters_B)
    second_B = random_uniform(seeds_B + step[0], counters_B + step[1])
    assert_uniform((first_B * 10).floor() / 10 + second_B / 10)
    assert_uniform((first_B - second_B) % 1)


# Draws


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES, ids=str)
def test_sample(dtype, mode, rng):
    logits_BV = (2 * torch.randn(7, 29, generator=rng)).to(dtype)
    rows = [sampling_params(1, **settings, seed=90 + i) for i, settings in enumerate(SETTINGS)]
    rows.insert(3, sampling_params(1, temperature=0.0, seed=5))
    params = SamplingParams(*(torch.cat(tensors) for tensors in zip(*rows, strict=True)))
    want_probabilities = [probabilities_by_loop(logits_BV[i].tolist(), **SETTINGS[i - (i > 3)]) for i in range(7)]
    want_probabilities[3] = [float(v == logits_BV[3].tolist().index(max(logits_BV[3].tolist()))) for v in range(29)]
    fn = in_mode(sample, mode)

    for step in range(20):
        tokens_B = fn(logits_BV, params, torch.full((7,), step))
        u = [uniform_by_big_ints(seed, step) for seed in params.seeds_B.tolist()]
        assert tokens_B.dtype == torch.int64
        assert tokens_B.tolist() == list(map(draw_by_loop, want_probabilities, u))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sample_draws_the_filtered_distribution(settings):
    logits = [0.3, -1.0, 2.0, 1.9, -INF, 0.3, -0.4]
    params = sampling_params(20_000, **settings, seed=123)
    logits_BV = torch.tensor([logits]).expand(20_000, -1)

    tokens_B = sample(logits_BV, params, torch.arange(20_000) % 7, num_candidates=candidates(settings))

    probabilities = probabilities_by_loop(logits, **settings)
    degrees = sum(p > 0 for p in probabilities) - 1
    assert chi_square(Counter(tokens_B.tolist()), probabilities) < chi_square_limit(max(degrees, 1))


@pytest.mark.parametrize("equal", [1, 2, 3, 1000, 8193, 50_001])
def test_sample_never_draws_what_has_no_probability(equal):
    """The least and the largest uniform number meet impossible tokens at both ends of the row."""
    seeds_B = torch.tensor([seed_of_first_bits(0), seed_of_first_bits(2**64 - 1)])
    zeros_B = torch.zeros_like(seeds_B)
    assert random_uniform(seeds_B, zeros_B).tolist() == [0, 1 - 2**-53]
    logits_BV = torch.full((2, equal + 9), -INF)
    logits_BV[:, 4:-5] = 0.0
    params = sampling_params(2, temperature=1.0)._replace(seeds_B=seeds_B)
    assert sample(logits_BV, params, zeros_B).tolist() == [4, 3 + equal]


def test_sample_is_greedy_below_the_normal_numbers():
    params = sampling_params(50, temperature=1e-40)
    logits_BV = torch.tensor([[1.0, 2.0, 2.0, 2.0]]).expand(50, -1)
    assert sample(logits_BV, params, torch.zeros(50, dtype=torch.int64)).tolist() == [1] * 50


@pytest.mark.parametrize("mode", FAST_MODES)
@pytest.mark.parametrize("settings", [*SETTINGS, {"temperature": 0.0}], ids=str)
def test_a_row_alone_equals_the_row_in_a_batch(settings, mode, rng):
    logits_BV = torch.randn(6, 1031, generator=rng)
    params = sampling_params(6, **settings, seed=7)
    params.temperature_B[2] = 0.0
    steps_B = torch.randint(0, 50, (6,), generator=rng)
    limit = candidates(settings)

    tokens_B = in_mode(sample, mode)(logits_BV, params, steps_B, num_candidates=limit)
    filtered_BV = filter_logits(logits_BV, *filters(params), num_candidates=limit)

    assert tokens_B[2] == logits_BV[2].argmax()
    for i in range(6):
        one = SamplingParams(*(tensor[i : i + 1] for tensor in params))
        row_1V, step_1 = logits_BV[i : i + 1].clone(), steps_B[i : i + 1]
        assert torch.equal(filter_logits(row_1V, *filters(one), num_candidates=limit), filtered_BV[i : i + 1])
        assert sample(row_1V, one, step_1, num_candidates=limit).tolist() == [tokens_B[i].item()]
        if i != 2:
            alone = sampling_params(1, **settings, seed=7 + i)
            assert sample(row_1V, alone, step_1, num_candidates=limit).tolist() == [tokens_B[i].item()]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sample_compiles_once_for_all_batches(settings, rng):
    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5, 8):
        logits_BV = torch.randn(batch, 33, generator=rng)
        params = sampling_params(batch, **settings, seed=batch)
        steps_B = torch.arange(batch)
        for tensor in (logits_BV, *params, steps_B):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch._dynamo.config.patch(error_on_recompile=batch > 2):
            tokens_B = compiled(logits_BV, params, steps_B, num_candidates=candidates(settings))
        assert torch.equal(tokens_B, sample(logits_BV, params, steps_B))


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES, ids=str)
def test_sample_greedy(dtype, mode, rng):
    logits_BV = torch.randint(0, 3, (9, 41), generator=rng).to(dtype)
    logits_BV[0] = -INF
    tokens_B = in_mode(sample_greedy, mode)(logits_BV)
    assert tokens_B.dtype == torch.int64
    assert tokens_B.tolist() == [row.index(max(row)) for row in logits_BV.tolist()]


# Log-probabilities


@pytest.mark.parametrize(
    ("n", "dtype", "mode"),
    [*((n, dtype, mode) for n in (0, 1, 21) for dtype, mode in DTYPES_AND_MODES[:-1]), (6, *DTYPES_AND_MODES[-1])],
)
def test_token_logprobs(n, dtype, mode, rng):
    logits_BV = (torch.randn(5, 21, generator=rng) * 4).to(dtype)
    logits_BV[1] = torch.randint(-2, 3, (21,), generator=rng).to(dtype)
    logits_BV[2] = torch.tensor([-0.0, 0.0, 0.0] * 7)
    logits_BV[3, ::2] = -INF
    tokens_B = torch.tensor([0, 20, 3, 2, 7])

    logprob_B, top_ids_Bn, top_logprobs_Bn = in_mode(token_logprobs, mode)(logits_BV, tokens_B, n=n)

    assert (logprob_B.dtype, top_ids_Bn.dtype, top_logprobs_Bn.dtype) == (torch.float32, torch.int64, torch.float32)
    assert top_ids_Bn.shape == top_logprobs_Bn.shape == (5, n)
    for b, row in enumerate(logits_BV.tolist()):
        norm = math.log(math.fsum(math.exp(x - max(row)) for x in row)) + max(row)
        order = sorted(range(21), key=lambda v: (-row[v], v))[:n]
        assert top_ids_Bn[b].tolist() == order
        assert top_logprobs_Bn[b].tolist() == pytest.approx([row[v] - norm for v in order], rel=1e-5, abs=1e-6)
        assert logprob_B[b].item() == pytest.approx(row[tokens_B[b]] - norm, rel=1e-5, abs=1e-6)
