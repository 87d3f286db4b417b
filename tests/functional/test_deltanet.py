"""Gated DeltaNet against float64 loops over tokens and heads, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.cache import DeltaCache
from fmoe.functional.deltanet import (
    DeltaConfig,
    DeltaParams,
    causal_conv,
    delta_chunked,
    delta_gates,
    delta_mix,
    delta_recurrent,
    delta_step,
    l2_normalize,
)

B, T, G, H, K, V, W = 2, 5, 3, 6, 8, 10, 4
N = 2 * G * K + H * V  # mixed channels
CONFIG = DeltaConfig(key_heads=G, value_heads=H, key_size=K, value_size=V, conv_size=W, eps=1e-6)
MODES = ["eager", "aot_eager", "inductor"]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
TOLERANCES = {F32: 1e-5, BF16: 4e-2, F16: 4e-3}
# the slow compiler runs once
DTYPES_AND_MODES = [*((dtype, mode) for dtype in TOLERANCES for mode in MODES[:2]), (F32, "inductor")]
DECAYS = [0.0, -1e-6, -0.1, -1.0, -5.0, -25.0, -88.0, -200.0, -1e4]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def assert_near(actual, expected, tolerance):
    assert actual.isfinite().all()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def silu(x):
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def conv_by_loop(x, window, weight):
    """Sum the taps channel by channel in Python floats."""
    taps, history = weight.shape[0], torch.cat((window, x), 1).double().tolist()
    out = torch.zeros(x.shape, dtype=F64)
    for b, t, n in ((b, t, n) for b in range(x.shape[0]) for t in range(x.shape[1]) for n in range(x.shape[2])):
        total = math.fsum(weight[w, n].item() * history[b][t + w][n] for w in range(taps))
        out[b, t, n] = silu(total)
    return out


def recur(q, k, v, g, beta, state):
    """Run the recurrence in float64, one head of one sequence after the other."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state, out = state.double().clone(), torch.zeros(v.shape, dtype=F64)
    for b, h in ((b, h) for b in range(v.shape[0]) for h in range(v.shape[2])):
        memory = state[b, h]
        for t in range(v.shape[1]):
            memory = memory * math.exp(g[b, t, h])
            read = (memory * k[b, t, h][:, None]).sum(0)
            memory = memory + k[b, t, h][:, None] * ((v[b, t, h] - read) * beta[b, t, h])[None, :]
            out[b, t, h] = (memory * q[b, t, h][:, None]).sum(0)
        state[b, h] = memory
    return out, state


def unit_rows(*shape, rng):
    x = torch.randn(shape, generator=rng)
    return x / x.norm(dim=-1, keepdim=True)


def operands(tokens, rng, batch=B, heads=H, g=None):
    """Give q, k, v, g, beta and a state that is not empty."""
    q, k = unit_rows(batch, tokens, heads, K, rng=rng) * K**-0.5, unit_rows(batch, tokens, heads, K, rng=rng)
    v, state = torch.randn(batch, tokens, heads, V, generator=rng), torch.randn(batch, heads, K, V, generator=rng)
    if g is None:
        g = -2 * torch.rand(batch, tokens, heads, generator=rng)
    return q, k, v, g, torch.rand(batch, tokens, heads, generator=rng), state


CONVOLUTIONS = [
    *((T, W, dtype, mode) for dtype, mode in DTYPES_AND_MODES),
    *((tokens, W, F32, mode) for tokens in (0, 1, 2, 3) for mode in MODES[:2]),
    *((tokens, taps, F32, "eager") for tokens in (1, T) for taps in (1, 2)),
    (1, W, BF16, "eager"),
]


@pytest.mark.parametrize(("tokens", "taps", "dtype", "mode"), CONVOLUTIONS, ids=str)
def test_causal_conv(tokens, taps, dtype, mode, rng):
    x = torch.randn(B, tokens, 7, generator=rng).to(dtype)
    window = torch.randn(B, taps - 1, 7, generator=rng).to(dtype)
    weight = torch.randn(taps, 7, generator=rng).to(dtype)

    y, last = in_mode(causal_conv, mode)(x, window, weight)

    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert_near(y, conv_by_loop(x, window, weight), TOLERANCES[dtype])
    assert torch.equal(last, torch.cat((window, x), 1)[:, x.shape[1] :])


def test_the_last_tap_multiplies_the_current_token():
    x = torch.tensor([[[3.0], [5.0]]])

    y, window = causal_conv(x, torch.tensor([[[7.0]]]), torch.tensor([[0.0], [1.0]]))

    assert y.flatten().tolist() == pytest.approx([silu(3.0), silu(5.0)])
    assert window.flatten().tolist() == [5.0]


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES, ids=str)
def test_l2_normalize(dtype, mode, rng):
    sizes = torch.tensor([0.0, 1e-3, 1.0, 500.0, 6e3])[None, :, None, None]  # squares of the last overflow float16
    x = (torch.randn(B, T, G, K, generator=rng) * sizes).to(dtype)

    y = in_mode(l2_normalize, mode)(x)

    assert y.dtype == F32
    rows = [[v / math.sqrt(math.fsum(u * u for u in row) + 1e-6) for v in row] for row in x.reshape(-1, K).tolist()]
    assert_near(y, torch.tensor(rows, dtype=F64).view(x.shape), 2e-6)


@pytest.mark.parametrize("mode", MODES[:2])
def test_l2_normalize_adds_eps_to_the_sum(mode):
    y = in_mode(l2_normalize, mode)(torch.tensor([[3.0, 4.0]]), eps=11.0)

    assert y.tolist() == [pytest.approx([0.5, 4 / 6])]
    assert l2_normalize(torch.zeros(0, K)).shape == (0, K)


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES, ids=str)
def test_delta_gates(dtype, mode, rng):
    b, a = (torch.randn(2, B, T, H, generator=rng) * 8).to(dtype)
    a[0, 0], b[0, 0] = 60.0, -60.0
    decay, dt_bias = -torch.rand(H, generator=rng) * 16, torch.randn(H, generator=rng)

    beta, g = in_mode(delta_gates, mode)(b, a, decay, dt_bias)

    assert (beta.dtype, g.dtype, beta.shape, g.shape) == (F32, F32, b.shape, a.shape)
    sigmoids = [1 / (1 + math.exp(-x)) for x in b.double().flatten().tolist()]
    assert_near(beta, torch.tensor(sigmoids, dtype=F64).view(b.shape), 1e-6)
    sums = (a.double() + dt_bias.double()).tolist()
    logs = [[[decay[h].item() * math.log1p(math.exp(r[h])) for h in range(H)] for r in rows] for rows in sums]
    assert_near(g, torch.tensor(logs, dtype=F64), 1e-6)
    assert (g <= 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_delta_step(mode, rng):
    q, k, v, g, beta, state = operands(1, rng)
    before = state.clone()

    o, new = in_mode(delta_step, mode)(*(x[:, 0] for x in (q, k, v, g, beta)), state)

    expected, expected_state = recur(q, k, v, g, beta, state)
    assert_near(o, expected[:, 0], 1e-6)
    assert_near(new, expected_state, 1e-6)
    assert torch.equal(state, before)


def test_delta_step_decays_before_it_reads_and_writes_before_it_answers():
    """One channel by hand: S = 8 / 2; S = 4 + 1 * (0.5 * (10 - 4)) = 7; o = 3 * 7."""
    one = torch.ones(1, 1, 1)

    o, state = delta_step(
        3 * one, one, 10 * one, torch.tensor([[-math.log(2)]]), torch.tensor([[0.5]]), torch.full((1, 1, 1, 1), 8.0)
    )

    assert state.item() == pytest.approx(7.0)
    assert o.item() == pytest.approx(21.0)


RULES = [
    *((delta_recurrent, tokens, mode) for tokens in (0, 1, T) for mode in MODES[:2]),
    *((delta_chunked, tokens, "eager") for tokens in (0, 1, T, 63, 64, 65, 130)),
    *((delta_chunked, tokens, "aot_eager") for tokens in (0, 1, T, 130)),
    (delta_recurrent, 2, "inductor"),
    (delta_chunked, T, "inductor"),
]


@pytest.mark.parametrize(("rule", "tokens", "mode"), RULES)
def test_rules(rule, tokens, mode, rng):
    arguments = operands(tokens, rng)
    before = [x.clone() for x in arguments]

    o, state = in_mode(rule, mode)(*arguments)

    assert (o.shape, o.dtype, state.shape, state.dtype) == ((B, tokens, H, V), F32, (B, H, K, V), F32)
    expected, expected_state = recur(*arguments)
    assert_near(o, expected, 1e-5)
    assert_near(state, expected_state, 1e-5)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 100])
def test_the_chunk_size_changes_nothing(chunk, rng):
    arguments = operands(23, rng)

    o, state = delta_chunked(*arguments, chunk=chunk)

    for actual, expected in zip((o, state), recur(*arguments), strict=True):
        assert_near(actual, expected, 1e-5)


def strong_step(tokens):
    g = torch.full((B, tokens, 3), -0.01)
    g[:, tokens // 3] = -1e4
    return g


def mixed(tokens):
    return torch.tensor(DECAYS)[torch.randint(len(DECAYS), (B, tokens, 3), generator=torch.Generator().manual_seed(1))]


DECAY_CASES = {
    **{str(d): lambda tokens, d=d: torch.full((B, tokens, 3), d) for d in DECAYS},
    "mixed": mixed,
    "one-strong-step": strong_step,
}


@pytest.mark.parametrize("tokens", [64, 65, 128])
@pytest.mark.parametrize("name", DECAY_CASES)
def test_any_decay_keeps_both_rules_together(name, tokens, rng):
    """No quotient of exponentials: weak decay cannot overflow, strong decay cannot blur the weak ones behind it."""
    arguments = operands(tokens, rng, heads=3, g=DECAY_CASES[name](tokens))

    chunked, recurrent = delta_chunked(*arguments), delta_recurrent(*arguments)

    for expected, *actual in zip(recur(*arguments), chunked, recurrent, strict=True):
        for x in actual:
            assert x.isfinite().all()
            assert (x.double() - expected).abs().max() <= 2e-6


def test_silent_tokens_leave_the_state_alone(rng):
    zeros = [torch.zeros(B, 70, H, *size) for size in ((K,), (K,), (V,), (), ())]
    state = torch.randn(B, H, K, V, generator=rng)

    o, new = delta_chunked(*zeros, state)

    assert torch.equal(new, state)
    assert o.abs().max() == 0


def test_two_thousand_steps_with_low_decay(rng):
    steps, g = 2000, -1e-4 * torch.rand(2, 3, generator=rng)
    state = torch.zeros(2, 3, K, V)
    exact, errors, total = state.double(), 0.0, 0.0
    for _ in range(steps):
        q, k = unit_rows(2, 3, K, rng=rng), unit_rows(2, 3, K, rng=rng)
        v, beta = torch.randn(2, 3, V, generator=rng), torch.rand(2, 3, generator=rng) * 0.01
        o, state = delta_step(q, k, v, g, beta, state)
        exact = exact * g.double().exp()[..., None, None]
        read = (exact * k.double()[..., None]).sum(-2)
        exact = exact + k.double()[..., None] * ((v.double() - read) * beta.double()[..., None])[..., None, :]
        o_exact = (exact * q.double()[..., None]).sum(-2)
        errors, total = errors + (o - o_exact).square().sum().item(), total + o_exact.square().sum().item()

    assert math.sqrt(errors / total) < 4e-5  # RMS ratio; exp(g) itself is rounded to 24 bits at each step
    assert_near(state, exact, 4e-5)


def make_params(rng, dtype=F32, decay=1.0):
    return DeltaParams(
        w_in_ND=torch.zeros(0),  # delta_mix reads neither projection
        w_conv_WN=torch.randn(W, N, generator=rng).to(dtype),
        decay_H=-torch.rand(H, generator=rng) * decay,
        dt_bias_H=torch.randn(H, generator=rng),
        norm_V=(1 + torch.randn(V, generator=rng) * 0.3).to(dtype),
        w_out_DN=torch.zeros(0),
    )


def make_cache(rng, dtype=F32, batch=B):
    window = torch.randn(batch, W - 1, N, generator=rng).to(dtype)
    return DeltaCache(window, torch.randn(batch, H, K, V, generator=rng))


def project(tokens, rng, dtype=F32, batch=B):
    return torch.randn(batch, tokens, N + H * V + 2 * H, generator=rng).to(dtype)


def copied(cache):
    return DeltaCache(*(part.clone() for part in cache))


def mix_by_loop(projected, cache, params):
    """Follow one head after the other: value head h reads key head h // 2."""
    mixed = conv_by_loop(projected[..., :N], cache.window_BWN, params.w_conv_WN)
    z, b, a = (x.double() for x in projected[..., N:].split([H * V, H, H], -1))
    q, k = torch.zeros(*mixed.shape[:2], H, K, dtype=F64), torch.zeros(*mixed.shape[:2], H, K, dtype=F64)
    v = torch.zeros(*mixed.shape[:2], H, V, dtype=F64)
    for h in range(H):
        group = h // 2
        q[:, :, h] = mixed[..., group * K : (group + 1) * K]
        k[:, :, h] = mixed[..., G * K + group * K : G * K + (group + 1) * K]
        v[:, :, h] = mixed[..., 2 * G * K + h * V : 2 * G * K + (h + 1) * V]
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = params.decay_H.double() * torch.log1p((a + params.dt_bias_H.double()).exp())
    o, state = recur(q / math.sqrt(K), k, v, g, 1 / (1 + (-b).exp()), cache.state_BHKV)
    z = z.reshape(o.shape)
    o = o / (o.pow(2).mean(-1, keepdim=True) + CONFIG.eps).sqrt() * params.norm_V.double() * z / (1 + (-z).exp())
    return o.flatten(-2), torch.cat((cache.window_BWN, projected[..., :N]), 1)[:, projected.shape[1] :], state


MIXES = [
    *((T, dtype, mode) for dtype in TOLERANCES for mode in MODES[:2]),
    *((tokens, F32, mode) for tokens in (0, 1, 2, 65) for mode in MODES[:2]),
    (1, BF16, "eager"),
    (1, F16, "aot_eager"),
    (1, F32, "inductor"),
]


@pytest.mark.parametrize(("tokens", "dtype", "mode"), MIXES, ids=str)
def test_delta_mix(tokens, dtype, mode, rng):
    projected, cache, params = project(tokens, rng, dtype), make_cache(rng, dtype), make_params(rng, dtype)
    expected, window, state = mix_by_loop(projected, cache, params)
    addresses = [part.data_ptr() for part in cache]

    y = in_mode(delta_mix, mode)(projected, cache, params, CONFIG)

    assert (y.shape, y.dtype) == ((B, tokens, H * V), dtype)
    assert [part.data_ptr() for part in cache] == addresses
    assert (cache.window_BWN.dtype, cache.state_BHKV.dtype) == (dtype, F32)
    assert torch.equal(cache.window_BWN, window)
    if dtype == F32:
        assert_near(y, expected, 2e-4)
        assert_near(cache.state_BHKV, state, 1e-5)
    elif tokens:  # roundings of the convolution alone are up to 3 of 256 parts
        assert (y.double() - expected).norm() <= TOLERANCES[dtype] * expected.norm()
        assert (cache.state_BHKV.double() - state).norm() <= TOLERANCES[dtype] * state.norm()


def test_the_chunk_rule_is_an_argument(rng):
    projected, cache, params = project(T, rng), make_cache(rng), make_params(rng)
    calls = []

    def rule(*arguments):
        calls.append(arguments)
        return delta_recurrent(*arguments)

    y = delta_mix(projected, copied(cache), params, CONFIG, chunk_rule=rule)

    assert len(calls) == 1
    assert_near(y, mix_by_loop(projected, cache, params)[0], 2e-4)


SPLITS = {
    **{str(n): (n, 200 - n) for n in (1, 3, 4, 63, 64, 65, 128, 199)},
    "chunks-of-7": (7,) * 28 + (4,),
    "with-empty": (0, 100, 0, 100),
    "single-tail": (190,) + (1,) * 10,
}


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_any_split_equals_one_pass(sizes, rng):
    projected, cache, params = project(200, rng), make_cache(rng), make_params(rng)
    whole = copied(cache)
    expected = delta_mix(projected, whole, params, CONFIG)

    parts = [delta_mix(part, cache, params, CONFIG) for part in projected.split(list(sizes), 1)]

    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(cache.window_BWN, whole.window_BWN)
    torch.testing.assert_close(cache.state_BHKV, whole.state_BHKV, rtol=1e-5, atol=1e-5)


def test_rows_do_not_meet(rng):
    projected, cache, params = project(70, rng), make_cache(rng), make_params(rng)
    alone = [DeltaCache(*(part[b : b + 1].clone() for part in cache)) for b in range(B)]
    expected = [delta_mix(projected[b : b + 1], alone[b], params, CONFIG) for b in range(B)]

    y = delta_mix(projected, cache, params, CONFIG)

    torch.testing.assert_close(y, torch.cat(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.state_BHKV, torch.cat([c.state_BHKV for c in alone]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_state_is_kept_in_float32(dtype, rng):
    """A state rounded to half precision after every step would be some 100 times further off."""
    cache, params = make_cache(rng, dtype), make_params(rng, dtype, decay=1e-4)
    exact, rows = cache.state_BHKV.double(), []
    for _ in range(200):
        projected = project(1, rng, dtype)
        mixed, _ = causal_conv(projected[..., :N], cache.window_BWN, params.w_conv_WN)  # in the model's dtype
        q, k, v = mixed.split([G * K, G * K, H * V], -1)
        q, k = (l2_normalize(x.view(B, 1, G, K)).repeat_interleave(2, 2) for x in (q, k))
        beta, g = delta_gates(*projected[..., -2 * H :].split(H, -1), params.decay_H, params.dt_bias_H)
        delta_mix(projected, cache, params, CONFIG)
        exact = recur(q, k, v.view(B, 1, H, V), g, beta, exact)[1]
        rows.append((cache.state_BHKV - exact).norm() / exact.norm())

    assert cache.state_BHKV.dtype == F32
    assert max(rows) < 1e-5


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_large_state_stays_finite(dtype, tokens, rng):
    """The readout passes 65504, the largest float16, before the norm shrinks it."""
    projected, cache, params = project(tokens, rng, dtype), make_cache(rng, dtype), make_params(rng, dtype, decay=1e-4)
    cache.state_BHKV.mul_(1e7)
    expected, _, _ = mix_by_loop(projected, cache, params)

    y = delta_mix(projected, cache, params, CONFIG)

    assert y.isfinite().all()
    assert (y.double() - expected).norm() <= TOLERANCES[dtype] * expected.norm()


def test_split_sizes():
    assert CONFIG.split_sizes == [2 * 3 * 8 + 6 * 10, 60, 6, 6]


def test_value_heads_must_be_a_multiple_of_key_heads():
    message = r"linear_num_value_heads=7 must be a multiple of linear_num_key_heads=3; check config\.json"
    with pytest.raises(ValueError, match=message):
        DeltaConfig(key_heads=3, value_heads=7, key_size=K, value_size=V, conv_size=W, eps=1e-6)


@pytest.mark.parametrize("key", ["key_heads", "value_heads", "key_size", "value_size", "conv_size"])
def test_sizes_must_be_at_least_one(key):
    sizes = {"key_heads": G, "value_heads": H, "key_size": K, "value_size": V, "conv_size": W, key: 0}
    with pytest.raises(ValueError, match=rf"must be at least 1, got .*{key}=0.*check the linear_\* keys of config"):
        DeltaConfig(**sizes, eps=1e-6)
