"""Random numbers, draws and log-probabilities against loops over Python numbers, eager and compiled."""

import math
from collections import Counter

import pytest
import torch

from fmoe.functional.sampling import (
    SamplingParams,
    filter_logits,
    random_uniform,
    sample,
    sample_greedy,
    sampling_params,
    token_logprobs,
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
