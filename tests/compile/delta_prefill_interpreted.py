"""The chunk rule's kernels in Triton's interpreter; test_delta_prefill_kernel.py runs this file.

The interpreter is chosen when Triton is imported, for the whole process, hence a process of its own.
"""

import pytest
import torch
import torch.nn.functional as F
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.chunk_ops import delta_prefill_kernels
from fmoe.compile.chunk_settings import ChunkSettings, default_chunk_settings
from fmoe.compile.kernels.delta_prefill import chunk_delta
from fmoe.functional import DeltaCache, DeltaConfig, DeltaParams, delta_mix, delta_recurrent

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

F16, F32, F64 = torch.float16, torch.float32, torch.float64
# B, H, K, V; nothing a power of two, one of each, several blocks of columns
SIZES = {
    "odd": (2, 3, 12, 20),
    "single": (1, 1, 1, 1),
    "blocks": (1, 2, 20, 37),
    "pair": (1, 2, 12, 20),
    "whole": (1, 1, 32, 32),
}
WHOLE = ChunkSettings(64, 32, 4, 1, 4, False)
SETTINGS = {
    "whole": WHOLE,
    "half": ChunkSettings(32, 16, 4, 3, 8, True),
    "small": default_chunk_settings(12, 20, F32),
}
ERRORS = {F32: 1e-6, F16: 1e-3}  # of the norm
DECAYS = [0.0, -1e-6, -0.1, -5.0, -88.0, -200.0, -1e4]


def draw_inputs(tokens, rng, name="odd", *, dtype=F32, g=None, beta=None, parallel=0.0, size=1.0):
    """Give q, k, v, g, beta and a state; ``parallel`` brings the keys of a head together."""
    batch, heads, key_size, value_size = SIZES[name]

    def draw(*shape):
        return torch.randn(shape, generator=rng)

    shared = parallel * draw(batch, 1, heads, key_size)
    q, k = (F.normalize(draw(batch, tokens, heads, key_size) + shared, dim=-1) for _ in range(2))
    v, state = size * draw(batch, tokens, heads, value_size), size * draw(batch, heads, key_size, value_size)
    g = -torch.rand(batch, tokens, heads, generator=rng) if g is None else g
    beta = torch.rand(batch, tokens, heads, generator=rng) if beta is None else beta
    return (q * key_size**-0.5).to(dtype), k.to(dtype), v, g, beta, state


def assert_near(actual, inputs, error):
    """Compare outputs and state with the recurrence in float64, from the same rounded inputs."""
    for one, other in zip(actual, delta_recurrent(*(x.to(F64) for x in inputs)), strict=True):
        assert (one.dtype, one.shape) == (F32, other.shape)
        assert one.isfinite().all()
        assert (one.to(F64) - other).norm() <= error * other.norm().clamp_min(1e-30)


# Each costs seconds in the interpreter.
CASES = [("odd", tokens, "whole", F32) for tokens in (1, 63, 64, 65, 200)]
CASES += [("single", 65, "whole", F32), ("blocks", 65, "half", F32), ("whole", 65, "whole", F32)]
CASES += [("blocks", 1, "half", F32), ("single", 33, "small", F32), ("odd", 17, "small", F32)]
CASES += [("odd", 200, "whole", F16), ("blocks", 65, "half", F16), ("odd", 1, "half", F16)]


@pytest.mark.parametrize(("name", "tokens", "how", "dtype"), CASES, ids=str)
def test_the_kernels_equal_the_recurrence(name, tokens, how, dtype, rng):
    inputs = draw_inputs(tokens, rng, name, dtype=dtype)
    before = [x.clone() for x in inputs]

    actual = chunk_delta(*inputs, SETTINGS[how])

    assert_near(actual, inputs, ERRORS[dtype])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def strong_step(tokens):
    g = torch.full((1, tokens, 2), -0.01)
    g[:, tokens // 3] = -1e4
    return g


def mixed(tokens):
    return torch.tensor(DECAYS)[torch.randint(len(DECAYS), (1, tokens, 2), generator=torch.Generator().manual_seed(1))]


DECAY_CASES = {
    **{str(d): lambda tokens, d=d: torch.full((1, tokens, 2), d) for d in DECAYS},
    "mixed": mixed,
    "one strong step": strong_step,
}


@pytest.mark.parametrize("name", DECAY_CASES)
def test_any_decay(name, rng):
    """Strong decay neither overflows nor blurs the weak decays behind it."""
    inputs = draw_inputs(70, rng, "pair", g=DECAY_CASES[name](70))
    assert_near(chunk_delta(*inputs, WHOLE), inputs, ERRORS[F32])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("strength", [0.0, 1e-6, 0.999, 1.0])
def test_any_strength_with_keys_that_are_nearly_parallel(strength, dtype, rng):
    """The triangle's entries are then near one, where powers of it, in place of substitution, grow to 1e18."""
    g, beta = torch.full((1, 66, 2), -1e-3), torch.full((1, 66, 2), strength)
    inputs = draw_inputs(66, rng, "pair", dtype=dtype, g=g, beta=beta, parallel=5.0)
    assert_near(chunk_delta(*inputs, WHOLE), inputs, 5 * ERRORS[dtype])


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e6])
def test_float16_operands_neither_overflow_nor_vanish(size, rng):
    inputs = draw_inputs(66, rng, "pair", dtype=F16, size=size)
    assert_near(chunk_delta(*inputs, WHOLE), inputs, ERRORS[F16])


def test_inputs_are_read_where_they_stand(rng):
    """Queries and keys are slices of one tensor, values have gaps, the state and the gates are transposed."""
    q, k, v, g, beta, state = draw_inputs(66, rng)
    expected = chunk_delta(q, k, v, g, beta, state, WHOLE)
    both = torch.cat((q, k), 2)
    gaps = torch.stack((v, torch.full_like(v, torch.nan)), 3)[..., 0, :]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (g, beta)]

    actual = chunk_delta(*both.split(3, 2), gaps, *turned, state.mT.contiguous().mT, WHOLE)

    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("batch", "tokens"), [(2, 0), (0, 5)])
def test_nothing_to_do(batch, tokens, rng):
    q, k, v, g, beta, state = draw_inputs(5, rng)
    inputs = [x[:batch, :tokens] for x in (q, k, v, g, beta)]

    o, new = chunk_delta(*inputs, state[:batch], WHOLE)

    assert o.shape == (batch, tokens, 3, 20)
    assert torch.equal(new, state[:batch])
    assert new.data_ptr() != state.data_ptr() or batch == 0


def test_two_calls_equal_one(rng):
    """A state may be carried on at the end of a chunk without any difference."""
    *inputs, state = draw_inputs(100, rng, dtype=F16)
    o, expected = chunk_delta(*inputs, state, WHOLE)

    first, half = chunk_delta(*(x[:, :64] for x in inputs), state, WHOLE)
    second, new = chunk_delta(*(x[:, 64:] for x in inputs), half, WHOLE)

    assert torch.equal(torch.cat((first, second), 1), o)
    assert torch.equal(new, expected)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_the_layer_equals_the_reference(dtype, rng):
    def draw(*shape):
        return torch.randn(shape, generator=rng)

    config = DeltaConfig(2, 4, 8, 6, 3, 1e-6)
    mixed_size, empty = config.split_sizes[0], torch.empty(0)
    params = DeltaParams(
        empty, draw(3, mixed_size).to(dtype), -draw(4).exp(), draw(4), (1 + draw(6) / 4).to(dtype), empty
    )
    cache = DeltaCache(draw(1, 2, mixed_size).to(dtype), draw(1, 4, 8, 6))
    own = DeltaCache(*(part.clone() for part in cache))
    projected = draw(1, 70, sum(config.split_sizes)).to(dtype)

    # in bfloat16 the rounding of values decides; the reference in it errs as much
    cache, wide = (type(parts)(*(part.float() for part in parts)) for parts in (cache, params))
    y, expected = (
        delta_prefill_kernels(projected, own, params, config),
        delta_mix(projected.float(), cache, wide, config),
    )

    assert (y.dtype, own.state_BHKV.dtype) == (dtype, F32)
    for one, other, error in ((y, expected, 1.2e-2), (own.state_BHKV, cache.state_BHKV, 5e-3)):
        near = 1e-6 if dtype == F32 else error
        assert (one.double() - other.double()).norm() <= near * other.double().norm()
