"""Rotary embedding against complex numbers and hand formulas in Python floats, eager and compiled."""

import cmath
import math

import pytest
import torch

from fmoe.functional.rotary import (
    RopeConfig,
    apply_rotary,
    apply_rotary_interleaved,
    rotary_frequencies,
    rotary_tables,
    yarn_mscale,
)

B, T, H, C = 2, 5, 3, 10
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MODES = ["eager", "aot_eager", "inductor"]
TOLERANCES = {F32: 1e-6, BF16: 1e-2, F16: 1e-3}
# the slow compiler runs once
DTYPES_AND_MODES = [*((dtype, mode) for dtype in TOLERANCES for mode in MODES[:2]), (F32, "inductor")]
CONFIGS = {
    "plain": RopeConfig(8, 1e6),
    "one-pair": RopeConfig(2, 1e4),
    "qwen3-next": RopeConfig(64, 1e7),
    "deepseek-v3": RopeConfig(64, 1e4, factor=40.0, original_context=4096),
    "kimi-k2": RopeConfig(64, 5e4, factor=32.0, original_context=4096, beta_fast=1.0, beta_slow=1.0),
    "gpt-oss": RopeConfig(64, 1.5e5, factor=32.0, original_context=4096, truncate=False),
    "ramp-ends-meet": RopeConfig(
        64, 5e4, factor=32.0, original_context=4096, beta_fast=1.0, beta_slow=1.0, truncate=False
    ),
    "ramp-passes-the-end": RopeConfig(6, 50.0, factor=4.0, original_context=4096, beta_fast=300.0),
    "ramp-starts-at-zero": RopeConfig(12, 1e4, factor=8.0, original_context=100),
}


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def frequencies_by_hand(config):
    d, base = config.rotary_size, config.theta
    plain = [base ** (-2 * j / d) for j in range(d // 2)]
    if config.factor == 1:
        return plain
    low, high = (
        d * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (config.beta_fast, config.beta_slow)
    )
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    high += 0.001 if low == high else 0
    ramp = [min(max((j - low) / (high - low), 0), 1) for j in range(d // 2)]
    return [f / config.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, mode) for name in CONFIGS for mode in MODES[:2]), ("deepseek-v3", "inductor")]
)
def test_rotary_frequencies(name, mode):
    frequencies = in_mode(rotary_frequencies, mode)(CONFIGS[name])

    assert (frequencies.dtype, frequencies.device.type) == (F32, "cpu")
    expected = torch.tensor(frequencies_by_hand(CONFIGS[name]), dtype=torch.float64)
    torch.testing.assert_close(frequencies.double(), expected, rtol=4e-6, atol=0)


def test_yarn_leaves_fast_channels_and_slows_slow_ones():
    """DeepSeek-V3 by hand: 64 ln(4096 / 64 pi) / (2 ln 1e4) = 10.47, and 22.51 for one turn."""
    yarn, plain = (rotary_frequencies(c) for c in (CONFIGS["deepseek-v3"], RopeConfig(64, 1e4)))

    torch.testing.assert_close(yarn[:11], plain[:11], rtol=1e-6, atol=0)
    torch.testing.assert_close(yarn[23:], plain[23:] / 40, rtol=1e-6, atol=0)
    assert ((yarn[11:23] < plain[11:23]) & (yarn[11:23] > plain[11:23] / 40)).all()


@pytest.mark.parametrize(
    ("factor", "mscale", "expected"),
    [
        (40.0, 1.0, 1.3688879454113936),
        (40.0, 0.707, 1.2608037774058553),
        (32.0, 1.0, 1.3465735902799727),
        (1.0, 1.0, 1.0),
        (0.5, 1.0, 1.0),
        (40.0, 0.0, 1.0),
    ],
)
def test_yarn_mscale(factor, mscale, expected):
    assert yarn_mscale(factor, mscale) == pytest.approx(expected, rel=1e-12)


def test_yarn_mscale_defaults_to_one():
    assert yarn_mscale(32.0) == yarn_mscale(32.0, 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_yarn_mscale_inside_a_graph(mode):
    def scale(x):
        return x * yarn_mscale(40.0, 0.707)

    torch.testing.assert_close(in_mode(scale, mode)(torch.ones(3)), torch.full((3,), 1.2608037774058553))


@pytest.mark.parametrize(
    ("factor", "mscale_all_dim", "published"),
    [
        pytest.param(40.0, 1.0, 0.1352338, id="DeepSeek-V3"),
        pytest.param(40.0, 0.707, 0.1147214, id="DeepSeek-V2-Lite"),
        pytest.param(32.0, 1.0, 0.1308608, id="Kimi-K2"),
    ],
)
def test_softmax_scale_takes_the_square_of_mscale_all_dim(factor, mscale_all_dim, published):
    scale = (128 + 64) ** -0.5 * yarn_mscale(factor, mscale_all_dim) ** 2

    assert scale == pytest.approx(published, abs=5e-8)


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(0.707, 0.707), (1.0, 1.0), (1.0, 0.707), (0.5, 1.3)])
def test_tables_take_the_ratio_of_both_mscales(mscale, mscale_all_dim):
    """The other rule: cos and sin are multiplied by m(mscale) / m(mscale_all_dim), 1 in all published configs."""
    config = CONFIGS["deepseek-v3"]
    ratio = yarn_mscale(40.0, mscale) / yarn_mscale(40.0, mscale_all_dim)
    positions = torch.tensor([[0, 1, 100, 4097]])

    cos, sin = rotary_tables(positions, rotary_frequencies(config), dtype=F32, scale=ratio)

    by_hand = (0.1 * mscale * math.log(40) + 1) / (0.1 * mscale_all_dim * math.log(40) + 1)
    for t, position in enumerate([0, 1, 100, 4097]):
        for j, frequency in enumerate(frequencies_by_hand(config)):
            slack = 1e-6 + 5e-6 * position * frequency  # float32 holds the angle to 24 bits
            assert cos[0, t, j].item() == pytest.approx(math.cos(position * frequency) * by_hand, abs=slack)
            assert sin[0, t, j].item() == pytest.approx(math.sin(position * frequency) * by_hand, abs=slack)


@pytest.mark.parametrize(
    ("dtype", "mode", "scale"),
    [*((dtype, mode, 1.37) for dtype, mode in DTYPES_AND_MODES), (F32, "eager", 1.0), (BF16, "aot_eager", 1.0)],
    ids=str,
)
def test_rotary_tables(dtype, mode, scale):
    positions = torch.tensor([[0, 1, 2, 63, 300], [70, 71, 4096, 40000, 262143]])
    frequencies = torch.tensor([1.0, 0.1, 0.007, 1e-5])

    cos, sin = in_mode(rotary_tables, mode)(positions, frequencies, dtype=dtype, scale=scale)

    assert cos.shape == sin.shape == (2, 5, 4)
    assert cos.dtype == sin.dtype == dtype
    angles = positions.double()[..., None] * frequencies.double()
    slack = TOLERANCES[dtype] * scale + angles * 2.0**-23
    for actual, function in ((cos, math.cos), (sin, math.sin)):
        expected = torch.tensor([function(a) * scale for a in angles.flatten().tolist()], dtype=torch.float64)
        assert ((actual.double() - expected.view_as(angles)).abs() <= slack).all()


def test_half_precision_tables_are_computed_in_float32():
    """Positions beyond 256 have no bfloat16, so a table computed there would be far off."""
    positions, frequencies = torch.tensor([[257, 4097, 65537]]), torch.tensor([1.0])

    exact = rotary_tables(positions, frequencies, dtype=F32)
    rough = rotary_tables(positions, frequencies, dtype=BF16)

    assert all(torch.equal(b, a.to(BF16)) for a, b in zip(exact, rough, strict=True))


def rotate_by_complex(x, angles, pairs):
    """Turn the channel pairs of every head of every token by its angles."""
    out = x.double().clone()
    for b, t, h in ((b, t, h) for b in range(x.shape[0]) for t in range(x.shape[1]) for h in range(x.shape[2])):
        for (i, j), angle in zip(pairs, angles[b, t].tolist(), strict=True):
            turned = complex(x[b, t, h, i], x[b, t, h, j]) * cmath.exp(1j * angle)
            out[b, t, h, i], out[b, t, h, j] = turned.real, turned.imag
    return out


def rotation_inputs(shape, pairs, dtype, rng):
    x = torch.randn(shape, generator=rng).to(dtype)
    angles = torch.rand(*shape[:2], pairs, generator=rng, dtype=torch.float64) * 6
    return x, angles


ROTATIONS = [
    *(((B, T, H, C), dtype, mode) for dtype, mode in DTYPES_AND_MODES),
    *((shape, F32, mode) for shape in [(B, 0, H, C), (1, 1, 1, C), (B, 1, H, C)] for mode in MODES[:2]),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "mode", "pairs"),
    [*((*case, 3) for case in ROTATIONS), *((*case, C // 2) for case in ROTATIONS[:2])],
    ids=str,
)
def test_apply_rotary(shape, dtype, mode, pairs, rng):
    x, angles = rotation_inputs(shape, pairs, dtype, rng)

    y = in_mode(apply_rotary, mode)(x, angles.cos().to(dtype), angles.sin().to(dtype))

    assert (y.shape, y.dtype) == (x.shape, dtype)
    expected = rotate_by_complex(x, angles, [(j, j + pairs) for j in range(pairs)])
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=3 * TOLERANCES[dtype])
    assert torch.equal(y[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize(("shape", "dtype", "mode"), ROTATIONS, ids=str)
def test_apply_rotary_interleaved(shape, dtype, mode, rng):
    x, angles = rotation_inputs(shape, C // 2, dtype, rng)
    before = x.clone()

    y = in_mode(apply_rotary_interleaved, mode)(x, angles.cos().to(dtype), angles.sin().to(dtype))

    assert (y.shape, y.dtype) == (x.shape, dtype)
    expected = rotate_by_complex(x, angles, [(2 * j, 2 * j + 1) for j in range(C // 2)])
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=3 * TOLERANCES[dtype])
    assert torch.equal(x, before)


@pytest.mark.parametrize("rotate", [apply_rotary, apply_rotary_interleaved])
def test_float32_tables_rotate_in_float32(rotate, rng):
    x, angles = rotation_inputs((B, T, H, C), C // 2, BF16, rng)

    y = rotate(x, angles.cos().float(), angles.sin().float())

    assert y.dtype == BF16
    assert torch.equal(y, rotate(x.float(), angles.cos().float(), angles.sin().float()).to(BF16))


@pytest.mark.parametrize("rotate", [apply_rotary, apply_rotary_interleaved])
def test_scores_depend_on_the_distance_alone(rotate, rng):
    q, k = torch.randn(2, 1, 1, H, C, generator=rng).unbind(0)
    frequencies = rotary_frequencies(RopeConfig(C, 100.0))

    def score(at_q, at_k):
        tables = [rotary_tables(torch.tensor([[p]]), frequencies, dtype=F32) for p in (at_q, at_k)]
        return (rotate(q, *tables[0]) * rotate(k, *tables[1])).sum(-1)

    torch.testing.assert_close(score(17, 4), score(113, 100), rtol=1e-4, atol=1e-5)
    assert (score(17, 4) - score(4, 17)).abs().max() > 1e-2


@pytest.mark.parametrize("size", [0, 1, 7, -2])
def test_rotary_size_must_be_even(size):
    with pytest.raises(ValueError, match=f"rotary_size={size} must be even and at least 2; check head_dim and"):
        RopeConfig(size, 1e4)


def test_yarn_needs_the_original_context():
    with pytest.raises(ValueError, match="yarn needs original_max_position_embeddings >= 1 in the rope parameters"):
        RopeConfig(8, 1e4, factor=4.0)
