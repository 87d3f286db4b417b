"""Gated DeltaNet's steps and rules against float64 loops over tokens and heads, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.deltanet import (
    causal_conv,
    delta_chunked,
    delta_gates,
    delta_recurrent,
    delta_step,
    l2_normalize,
)

from .deltanet_oracles import (
    BF16,
    F32,
    F64,
    MODES,
    TOLERANCES,
    B,
    G,
    H,
    K,
    T,
    V,
    W,
    assert_near,
    conv_by_loop,
    in_mode,
    recur,
    silu,
)

# the slow compiler runs once
DTYPES_AND_MODES = [*((dtype, mode) for dtype in TOLERANCES for mode in MODES[:2]), (F32, "inductor")]
DECAYS = [0.0, -1e-6, -0.1, -1.0, -5.0, -25.0, -88.0, -200.0, -1e4]


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
