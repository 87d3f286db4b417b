"""The DeltaNet decode kernel in Triton's interpreter, against ``delta_mix``; test_delta_kernel.py runs this file.

The interpreter is chosen when Triton is imported, for the whole process, hence a process of its own.
"""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.delta_ops import delta_decode_op
from fmoe.compile.delta_settings import DeltaSettings, default_delta_settings, delta_settings_to_ints
from fmoe.compile.kernels.delta_decode import decode_delta_
from fmoe.functional import DeltaCache, DeltaConfig, DeltaParams, delta_mix

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

EPS = 1e-5
# G, H, K, V, W; nothing a power of two, one of each, several blocks of columns, more taps than usual
CONFIGS = {
    "odd": DeltaConfig(3, 6, 12, 10, 4, EPS),
    "single": DeltaConfig(1, 1, 1, 1, 1, EPS),
    "alone": DeltaConfig(3, 3, 5, 20, 2, EPS),
    "three": DeltaConfig(2, 6, 7, 9, 3, EPS),
    "wide": DeltaConfig(1, 4, 6, 24, 4, EPS),
    "taps": DeltaConfig(2, 4, 6, 5, 9, EPS),
    "powers": DeltaConfig(2, 4, 8, 16, 4, EPS),
    "two taps": DeltaConfig(3, 3, 16, 8, 2, EPS),
}
WHOLE = DeltaSettings(0, 32, 4)
SETTINGS = {
    "whole": WHOLE,
    "blocks": replace(WHOLE, columns=4),
    "one head": replace(WHOLE, heads=1),
    "one head, blocks": DeltaSettings(1, 8, 2),
    "lanes": DeltaSettings(0, 4, 2, key_lanes=4),
    "lanes of one head": DeltaSettings(1, 8, 1, key_lanes=2),
}
# Relative to the largest element. The interpreter cuts bfloat16 off instead of rounding it, so float16 stands for it.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


def make_layer(config, rng, dtype, *, norm_dtype=None):
    def draw(*sizes):
        return torch.randn(sizes, generator=rng)

    mixed, heads = config.split_sizes[0], config.value_heads
    return DeltaParams(
        w_in_ND=torch.empty(0),
        w_conv_WN=draw(config.conv_size, mixed).to(dtype),
        decay_H=-draw(heads).exp(),
        dt_bias_H=draw(heads),
        norm_V=(1 + draw(config.value_size) / 4).to(norm_dtype or dtype),
        w_out_DN=torch.empty(0),
    )


def make_cache(config, batch, rng, dtype):
    window = torch.randn(batch, config.conv_size - 1, config.split_sizes[0], generator=rng).to(dtype)
    state = torch.randn(batch, config.value_heads, config.key_size, config.value_size, generator=rng)
    return DeltaCache(window, state)


def copy(cache):
    return DeltaCache(*(part.clone() for part in cache))


def assert_near(actual, expected, tolerance):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    assert error.item() < tolerance  # NaN is not


def run_kernel(projected, cache, params, config, settings, arrivals):
    weights = params[1:5]
    return decode_delta_(projected, *cache, *weights, config, settings, arrivals_BG=arrivals)


# Each costs seconds in the interpreter.
CASES = [(config, "whole", torch.float32) for config in CONFIGS if config not in ("powers", "two taps")]
CASES += [("alone", "blocks", torch.float32), ("wide", "blocks", torch.float32), ("odd", "one head", torch.float32)]
CASES += [("three", "one head", torch.float32), ("wide", "one head, blocks", torch.float32)]
CASES += [(config, "whole", torch.float16) for config in ("odd", "alone", "taps")]
CASES += [("wide", "one head, blocks", torch.float16)]
CASES += [("powers", how, torch.float32) for how in ("lanes", "lanes of one head")]
CASES += [("two taps", "lanes", torch.float32), ("powers", "lanes", torch.float16)]


@pytest.mark.parametrize(("name", "how", "dtype"), CASES, ids=str)
def test_consecutive_steps_equal_the_reference(name, how, dtype, rng):
    config, settings = CONFIGS[name], SETTINGS[how]
    steps, batch = (3, 2) if dtype == torch.float32 else (2, 1)
    params, cache = make_layer(config, rng, dtype), make_cache(config, batch, rng, dtype)
    expected_cache = copy(cache)
    arrivals = torch.zeros(batch, config.key_heads, dtype=torch.int32) if settings.heads else None

    for _ in range(steps):
        projected = torch.randn(batch, 1, sum(config.split_sizes), generator=rng).to(dtype)
        y = run_kernel(projected, cache, params, config, settings, arrivals)
        expected = delta_mix(projected, expected_cache, params, config)
        assert_near(y, expected, TOLERANCES[dtype])
        # nearly all elements agree to the bit only if both round at the same points
        assert dtype == torch.float32 or (y == expected).float().mean() > 0.9
        assert torch.equal(cache.window_BWN, expected_cache.window_BWN)
        assert_near(cache.state_BHKV, expected_cache.state_BHKV, TOLERANCES[dtype])
    assert arrivals is None or not arrivals.any()


def test_a_float32_norm_weight_keeps_its_rounding(rng):
    config = CONFIGS["odd"]
    params = make_layer(config, rng, torch.float16, norm_dtype=torch.float32)
    cache = make_cache(config, 2, rng, torch.float16)
    projected = torch.randn(2, 1, sum(config.split_sizes), generator=rng).half()

    expected = delta_mix(projected, copy(cache), params, config)

    assert_near(run_kernel(projected, cache, params, config, WHOLE, None), expected, 2e-3)


@pytest.mark.parametrize("size", [-80.0, -17.0, 19.0, 21.0, 80.0])
def test_extreme_gates_and_inputs(size, rng):
    """Half of the softplus's inputs lie past where it is the identity, or below where 1 + exp(x) is 1."""
    config = CONFIGS["odd"]
    params, cache = make_layer(config, rng, torch.float32), make_cache(config, 2, rng, torch.float32)
    projected = torch.randn(2, 1, sum(config.split_sizes), generator=rng)
    projected[..., -2 * config.value_heads :] += size
    params = params._replace(decay_H=params.decay_H * 1e5 if size == -17 else params.decay_H)
    expected_cache = copy(cache)

    y = run_kernel(projected, cache, params, config, WHOLE, None)

    assert_near(y, delta_mix(projected, expected_cache, params, config), 1e-5)
    assert_near(cache.state_BHKV, expected_cache.state_BHKV, 1e-5)


def test_a_view_of_a_larger_cache_writes_its_rows_alone(rng):
    config = CONFIGS["three"]
    params, whole = make_layer(config, rng, torch.float32), make_cache(config, 4, rng, torch.float32)
    kept = copy(whole)
    projected = torch.randn(2, 1, sum(config.split_sizes), generator=rng)

    y = run_kernel(projected, DeltaCache(*(part[1:3] for part in whole)), params, config, WHOLE, None)

    rows = DeltaCache(*(part[1:3].clone() for part in kept))
    assert_near(y, delta_mix(projected, rows, params, config), 1e-5)
    for part, before in zip(whole, kept, strict=True):
        assert torch.equal(part[[0, 3]], before[[0, 3]])
        assert not torch.equal(part[1:3], before[1:3])


def test_no_sequences(rng):
    config = CONFIGS["odd"]
    cache, params = make_cache(config, 0, rng, torch.float32), make_layer(config, rng, torch.float32)
    y = run_kernel(torch.empty(0, 1, sum(config.split_sizes)), cache, params, config, WHOLE, None)
    assert y.shape == (0, 1, 60)


def test_the_op_equals_the_reference(rng):
    config = CONFIGS["odd"]
    params, cache = make_layer(config, rng, torch.float32), make_cache(config, 2, rng, torch.float32)
    projected = torch.randn(2, 1, sum(config.split_sizes), generator=rng)
    expected_cache = copy(cache)
    expected = delta_mix(projected, expected_cache, params, config)

    compiled_cache = copy(cache)
    y = delta_decode_op(projected, cache, params, config)
    graph = torch.compile(lambda *args: 2 * delta_decode_op(*args, config), fullgraph=True, backend="aot_eager")
    compiled = graph(projected, compiled_cache, params)

    assert_near(y, expected, 1e-5)
    assert_near(compiled, 2 * expected, 1e-5)
    for written in (cache, compiled_cache):
        assert torch.equal(written.window_BWN, expected_cache.window_BWN)
        assert_near(written.state_BHKV, expected_cache.state_BHKV, 1e-5)


@pytest.mark.parametrize("heads", [0, 1])
def test_the_op_names_what_it_writes(heads, rng):
    config = CONFIGS["three"]
    params, cache = make_layer(config, rng, torch.float32), make_cache(config, 2, rng, torch.float32)
    projected = torch.randn(2, 1, sum(config.split_sizes), generator=rng)
    arrivals = torch.zeros(2, 2, dtype=torch.int32) if heads else None
    settings = delta_settings_to_ints(replace(default_delta_settings(config, 2), heads=heads))

    opcheck(
        torch.ops.fmoe.delta_decode_.default,
        (projected, *cache, *params[1:5], arrivals, config.key_heads, config.eps, settings),
    )
