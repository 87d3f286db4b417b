"""The whole of Gated DeltaNet between its projections, against float64 loops, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.cache import DeltaCache
from fmoe.functional.deltanet import (
    DeltaConfig,
    DeltaParams,
    causal_conv,
    delta_gates,
    delta_mix,
    delta_recurrent,
    l2_normalize,
)

from .deltanet_oracles import (
    BF16,
    F16,
    F32,
    F64,
    MODES,
    TOLERANCES,
    B,
    G,
    H,
    K,
    N,
    T,
    V,
    W,
    assert_near,
    conv_by_loop,
    in_mode,
    recur,
)

CONFIG = DeltaConfig(key_heads=G, value_heads=H, key_size=K, value_size=V, conv_size=W, eps=1e-6)


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
