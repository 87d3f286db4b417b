"""The chunk rule's op: schema, fake and body agree, and it equals the recurrence where kernels are not asked for."""

import pytest
import torch
from torch.library import opcheck

from fmoe.compile.chunk_ops import delta_chunked_op, delta_prefill_kernels, delta_prefill_op
from fmoe.compile.chunk_settings import ChunkSettings, default_chunk_settings, fits_kernels
from fmoe.functional import DeltaCache, DeltaConfig, DeltaParams, delta_mix, delta_recurrent

H, K, V = 3, 8, 10
CONFIG = DeltaConfig(2, 4, 8, 6, 3, 1e-6)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LAYER_ERRORS = {F32: 1e-6, F16: 2e-3, BF16: 8e-3}  # of the norm; keys and queries are rounded, and so is y


def chunk_inputs(tokens, rng, *, batch=2):
    def draw(*shape):
        return torch.randn(shape, generator=rng)

    q, k = (torch.nn.functional.normalize(draw(batch, tokens, H, K), dim=-1) for _ in range(2))
    g, beta = -draw(batch, tokens, H).exp(), draw(batch, tokens, H).sigmoid()
    return q, k, draw(batch, tokens, H, V), g, beta, draw(batch, H, K, V)


def layer(rng, dtype, tokens):
    def draw(*shape):
        return torch.randn(shape, generator=rng)

    mixed, empty = CONFIG.split_sizes[0], torch.empty(0)
    params = DeltaParams(empty, draw(3, mixed).to(dtype), -draw(4).exp(), draw(4), draw(6).to(dtype), empty)
    cache = DeltaCache(draw(2, 2, mixed).to(dtype), draw(2, 4, 8, 6))
    return draw(2, tokens, sum(CONFIG.split_sizes)).to(dtype), cache, params


@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 65, 200])
def test_opcheck(tokens, rng):
    opcheck(torch.ops.fmoe.delta_chunked.default, chunk_inputs(tokens, rng))


@pytest.mark.parametrize("tokens", [0, 1, 3, 65])
def test_the_op_equals_the_recurrence(tokens, rng):
    inputs = chunk_inputs(tokens, rng)

    o, state = delta_chunked_op(*inputs)

    expected_o, expected_state = delta_recurrent(*inputs)
    torch.testing.assert_close(o, expected_o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)
    assert state.data_ptr() != inputs[-1].data_ptr()


@pytest.mark.parametrize("prefill", [delta_prefill_op, delta_prefill_kernels])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_the_layer_equals_the_reference_eager_and_compiled(dtype, prefill, rng):
    projected, cache, params = layer(rng, dtype, 23)
    caches = [DeltaCache(*(part.clone() for part in cache)) for _ in range(2)]
    expected = delta_mix(projected, cache, params, CONFIG)
    graph = torch.compile(prefill, fullgraph=True, backend="aot_eager", dynamic=False)

    for run, own in zip((prefill, graph), caches, strict=True):
        y = run(projected, own, params, CONFIG)
        assert y.dtype == dtype
        assert (y.double() - expected.double()).norm() <= LAYER_ERRORS[dtype] * expected.double().norm()
        assert torch.equal(own.window_BWN, cache.window_BWN)
        torch.testing.assert_close(own.state_BHKV, cache.state_BHKV, rtol=2e-3, atol=2e-3)


def test_which_sizes_the_kernels_take():
    takes = [fits_kernels(tokens, size, F16, target="hopper") for tokens, size in ((63, 128), (64, 256), (64, 257))]
    assert takes == [False, True, False]
    takes = [
        fits_kernels(64, size, F32, target=target) for size, target in ((128, "cuda"), (129, "cuda"), (256, "hip"))
    ]
    assert takes == [True, False, True]


@pytest.mark.parametrize(("target", "stages", "split"), [("cuda", 1, True), ("hopper", 3, True), ("hip", 1, False)])
def test_settings_by_rule(target, stages, split):
    assert default_chunk_settings(128, 128, F16, target=target) == ChunkSettings(64, 32, 4, stages, 4, split)
    assert default_chunk_settings(5, 7, F16, target=target).columns == 16


def test_wrong_settings_are_refused():
    right = (64, 32, 4, 2, 4, True)
    for place, value, match in (
        (0, 128, "chunk=128 must be a power of two from 16 to 64"),
        (1, 24, "columns=24 must be a power of two from 16 to 256"),
        (2, 3, "warps=3 must be a power of two from 1 to 16"),
        (3, 0, "stages=0 must be at least 1"),
        (4, 32, "matrix_warps=32 must be"),
    ):
        with pytest.raises(ValueError, match=match):
            ChunkSettings(*right[:place], value, *right[place + 1 :])
