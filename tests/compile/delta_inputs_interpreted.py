"""The kernels around the chunk rule in Triton's interpreter; test_delta_inputs_kernel.py runs this file.

The interpreter is chosen when Triton is imported, for the whole process, hence a process of its own.
"""

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.chunk_ops import delta_prefill_kernels
from fmoe.compile.chunk_settings import ChunkSettings, InputSettings
from fmoe.compile.kernels.delta_inputs import mix_chunk_inputs, norm_chunk_outputs, prefill_delta_
from fmoe.compile.kernels.delta_prefill import chunk_delta
from fmoe.functional import DeltaCache, DeltaConfig, DeltaParams, delta_mix, rms_norm_gated

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
RULE = ChunkSettings(16, 16, 4, 1, 4, False)
SMALL = InputSettings(tokens=8, rows=4)
# key heads, value heads, key and value channels, taps
CONFIGS = {
    "odd": DeltaConfig(3, 9, 5, 7, 4, 1e-6),
    "equal": DeltaConfig(2, 2, 6, 6, 3, 1e-6),
    "single": DeltaConfig(1, 1, 1, 1, 1, 1e-6),
}
ERRORS = {F32: 2e-6, F16: 3e-3, BF16: 2e-2}  # of the norm


def draw_layer(rng, config, tokens, dtype=F32, *, batch=2, state_dtype=F32):
    """Draw a projection, a cache and weights."""

    def draw(*shape):
        return torch.randn(shape, generator=rng)

    mixed, heads = config.split_sizes[0], config.value_heads
    params = DeltaParams(
        torch.empty(0),
        draw(config.conv_size, mixed).to(dtype),
        -draw(heads).exp(),
        draw(heads),
        (1 + draw(config.value_size) / 4).to(dtype),
        torch.empty(0),
    )
    state = draw(batch, heads, config.key_size, config.value_size).to(state_dtype)
    cache = DeltaCache(draw(batch, config.conv_size - 1, mixed).to(dtype), state)
    return draw(batch, tokens, sum(config.split_sizes)).to(dtype), cache, params


def run(projected, cache, params, config, settings=SMALL):
    weights = (params.w_conv_WN, params.decay_H, params.dt_bias_H, params.norm_V)
    return prefill_delta_(projected, *cache, *weights, config, RULE, settings)


def assert_near(actual, expected, error):
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    assert (actual.double() - expected.double()).norm() <= error * expected.double().norm().clamp_min(1e-30)


CASES = [("odd", tokens, F32, F32) for tokens in (1, 2, 3, 9, 20)]
CASES += [("equal", 17, F32, F32), ("single", 5, F32, F32), ("odd", 9, F16, F32), ("odd", 9, F32, BF16)]


@pytest.mark.parametrize(("name", "tokens", "dtype", "state_dtype"), CASES, ids=str)
def test_the_layer_equals_the_reference_in_float32(name, tokens, dtype, state_dtype, rng):
    config = CONFIGS[name]
    projected, cache, params = draw_layer(rng, config, tokens, dtype, state_dtype=state_dtype)
    wide = DeltaCache(*(part.float().clone() for part in cache))
    expected = delta_mix(projected.float(), wide, DeltaParams(*(part.float() for part in params)), config)
    before = projected.clone()

    y = run(projected, cache, params, config)

    assert y.dtype == dtype and torch.equal(projected, before)
    assert_near(y, expected, ERRORS[dtype])
    assert torch.equal(cache.window_BWN.float(), wide.window_BWN)
    assert cache.state_BHKV.dtype == state_dtype
    assert_near(cache.state_BHKV, wide.state_BHKV, 5e-3 if state_dtype == BF16 else ERRORS[dtype])


def test_two_calls_equal_one(rng):
    config = CONFIGS["odd"]
    projected, cache, params = draw_layer(rng, config, 37)
    twice = DeltaCache(*(part.clone() for part in cache))

    y = run(projected, cache, params, config)
    parts = [run(part, twice, params, config) for part in (projected[:, :32], projected[:, 32:])]

    assert torch.equal(torch.cat(parts, 1), y)
    assert all(map(torch.equal, cache, twice))


def test_the_size_of_programs_changes_nothing(rng):
    config = CONFIGS["odd"]
    projected, cache, params = draw_layer(rng, config, 21)
    inputs = (projected, cache.window_BWN, params.w_conv_WN, params.decay_H, params.dt_bias_H, config)
    first, second = (mix_chunk_inputs(*inputs, settings) for settings in (SMALL, InputSettings(tokens=32)))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_gated_norm(dtype, rng):
    config = CONFIGS["odd"]
    projected, _, params = draw_layer(rng, config, 5, dtype)
    o = torch.randn(2, 5, 9, 7, generator=rng)
    z = projected.split_with_sizes(config.split_sizes, -1)[1].view(2, 5, 9, 7)

    y = norm_chunk_outputs(o, projected, params.norm_V, config, SMALL)

    expected = rms_norm_gated(o, z, params.norm_V, eps=config.eps).to(dtype).flatten(-2)
    torch.testing.assert_close(y, expected, rtol=1e-3 if dtype == F16 else 1e-6, atol=1e-6)


def test_key_heads_serve_several_value_heads_in_place(rng):
    """Repeated keys give the same; the new state may take the place of the old one."""

    def draw(*shape):
        return torch.randn(shape, generator=rng)

    q, k = (torch.nn.functional.normalize(draw(2, 20, 2, 5), dim=-1) for _ in range(2))
    rest = draw(2, 20, 6, 7), -draw(2, 20, 6).abs(), draw(2, 20, 6).sigmoid()
    state = draw(2, 6, 5, 7)
    expected = chunk_delta(*(x.repeat_interleave(3, 2) for x in (q, k)), *rest, state, RULE)

    o, new = chunk_delta(q, k, *rest, state, RULE, into_BHKV=state)

    assert torch.equal(o, expected[0])
    assert new is state and torch.equal(new, expected[1])


def test_the_op_takes_the_kernels(rng):
    """In half precision the result differs from the reference's, so that it is the kernels' can be seen."""
    config = DeltaConfig(1, 2, 5, 7, 3, 1e-6)
    projected, cache, params = draw_layer(rng, config, 64, F16, batch=1)
    caches = [DeltaCache(*(part.clone() for part in cache)) for _ in range(3)]
    graph = torch.compile(delta_prefill_kernels, fullgraph=True, backend="aot_eager", dynamic=False)

    y = delta_prefill_kernels(projected, caches[0], params, config)

    assert not torch.equal(y, delta_mix(projected, caches[1], params, config))
    assert torch.equal(graph(projected, caches[2], params, config), y)
    assert all(map(torch.equal, caches[0], caches[2]))
    weights = (params.w_conv_WN, params.decay_H, params.dt_bias_H, params.norm_V)
    opcheck(torch.ops.fmoe.delta_prefill_.default, (projected, *cache, *weights, 1, 1e-6))


@pytest.mark.parametrize(("batch", "tokens"), [(2, 0), (0, 5)])
def test_nothing_to_do(batch, tokens, rng):
    config = CONFIGS["odd"]
    projected, cache, params = draw_layer(rng, config, tokens, batch=batch)
    before = [part.clone() for part in cache]
    assert run(projected, cache, params, config).shape == (batch, tokens, 63)
    assert all(map(torch.equal, cache, before))
