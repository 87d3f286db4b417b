"""Gated DeltaNet over drafts: what comes is what the tokens that stayed give, one after another."""

import math

import pytest
import torch

from fmoe.functional.cache import DeltaCache
from fmoe.functional.delta_drafts import delta_verify, pend_delta, select_pending, settle_delta_
from fmoe.functional.deltanet import DeltaConfig, DeltaParams

from .deltanet_oracles import BF16, F32, F64, G, H, K, N, V, W, assert_near, conv_by_loop, in_mode, recur

CONFIG = DeltaConfig(key_heads=G, value_heads=H, key_size=K, value_size=V, conv_size=W, eps=1e-6)
KEPT = {  # by step and row: every count of two drafts, rows that differ, rows that stand still
    "all": [(3, 3), (3, 3), (3, 3), (3, 3)],
    "one": [(1, 1), (1, 1), (1, 1), (1, 1)],
    "none": [(0, 0), (0, 0), (2, 2), (0, 0)],
    "mixed": [(0, 3), (1, 2), (3, 0), (2, 1), (1, 3), (2, 2)],
}


def make_params(rng, taps=W):
    return DeltaParams(
        w_in_ND=torch.zeros(0),
        w_conv_WN=torch.randn(taps, N, generator=rng),
        decay_H=-torch.rand(H, generator=rng),
        dt_bias_H=torch.randn(H, generator=rng),
        norm_V=1 + torch.randn(V, generator=rng) * 0.3,
        w_out_DN=torch.zeros(0),
    )


def make_cache(rng, batch=2, taps=W, dtype=F32):
    window = torch.randn(batch, taps - 1, N, generator=rng).to(dtype)
    return DeltaCache(window, torch.randn(batch, H, K, V, generator=rng))


def project(tokens, rng, batch=2):
    return torch.randn(batch, tokens, N + H * V + 2 * H, generator=rng)


def follow(projected, cache, params):
    """Run one row's tokens in float64, head by head: (outputs, the last inputs, the state)."""
    mixed = conv_by_loop(projected[..., :N], cache.window_BWN, params.w_conv_WN)
    z, b, a = (x.double() for x in projected[..., N:].split([H * V, H, H], -1))
    parts = mixed.split([G * K, G * K, H * V], -1)
    heads = [parts[i].unflatten(-1, (G, K))[:, :, [h // (H // G) for h in range(H)]] for i in range(2)]
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in heads)
    g = params.decay_H.double() * torch.log1p((a + params.dt_bias_H.double()).exp())
    v = parts[2].unflatten(-1, (H, V))
    o, state = recur(q / math.sqrt(K), k, v, g, 1 / (1 + (-b).exp()), cache.state_BHKV)
    z = z.reshape(o.shape)
    o = o / (o.pow(2).mean(-1, keepdim=True) + CONFIG.eps).sqrt() * params.norm_V.double() * z / (1 + (-z).exp())
    inputs = torch.cat((cache.window_BWN, projected[..., :N]), 1)
    return o.flatten(-2), inputs[:, projected.shape[1] :], state


def row_of(cache, row):
    return DeltaCache(*(part[row : row + 1].clone() for part in cache[:2]))


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_was_dropped_leaves_no_trace(kept, mode, rng):
    params, start = make_params(rng), make_cache(rng)
    cache = pend_delta(DeltaCache(*(part.clone() for part in start)), CONFIG, 3)
    stayed = [torch.empty(1, 0, N + H * V + 2 * H) for _ in range(2)]
    verify, kept_B = in_mode(delta_verify, mode), torch.tensor([0, 0])
    for counts in kept:
        projected = project(3, rng)
        y = verify(projected, cache, params, CONFIG, kept_B)
        assert y.shape == (2, 3, H * V)
        for row in range(2):
            whole = torch.cat((stayed[row], projected[row : row + 1]), 1)
            expected, _, _ = follow(whole, row_of(start, row), params)
            assert_near(y[row : row + 1], expected[:, -3:], 3e-4)
            stayed[row] = torch.cat((stayed[row], projected[row : row + 1, : counts[row]]), 1)
        kept_B = torch.tensor(counts)

    settled = settle_delta_(cache, kept_B)

    assert settled.window_BWN.data_ptr() == cache.window_BWN.data_ptr()
    for row in range(2):
        _, window, state = follow(stayed[row], row_of(start, row), params)
        assert torch.equal(cache.window_BWN[row : row + 1], window)
        assert_near(cache.state_BHKV[row : row + 1], state, 1e-4)


def test_rows_do_not_see_each_other(rng):
    params, start, projected = make_params(rng), make_cache(rng), project(2, rng)
    together = pend_delta(DeltaCache(*(part.clone() for part in start)), CONFIG, 2)
    first = delta_verify(projected, together, params, CONFIG, torch.tensor([0, 0]))
    second = delta_verify(projected, together, params, CONFIG, torch.tensor([2, 1]))
    for row, count in ((0, 2), (1, 1)):
        alone, part = pend_delta(row_of(start, row), CONFIG, 2), projected[row : row + 1]
        torch.testing.assert_close(
            delta_verify(part, alone, params, CONFIG, torch.tensor([0])), first[row : row + 1], rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            delta_verify(part, alone, params, CONFIG, torch.tensor([count])),
            second[row : row + 1],
            rtol=1e-5,
            atol=1e-6,
        )


def test_infinity_in_a_dropped_draft_is_dropped(rng):
    params, start, projected = make_params(rng), make_cache(rng), project(2, rng)
    cache = pend_delta(DeltaCache(*(part.clone() for part in start)), CONFIG, 2)
    broken = projected.clone()
    broken[:, 1] = torch.inf
    delta_verify(broken, cache, params, CONFIG, torch.tensor([0, 0]))
    y = delta_verify(projected, cache, params, CONFIG, torch.tensor([1, 0]))
    assert y.isfinite().all() and all(part.isfinite().all() for part in cache)


@pytest.mark.parametrize("taps", [1, 2, 6])
def test_windows_shorter_and_longer_than_a_step(taps, rng):
    config = DeltaConfig(key_heads=G, value_heads=H, key_size=K, value_size=V, conv_size=taps, eps=1e-6)
    params, start = make_params(rng, taps), make_cache(rng, taps=taps)
    cache = pend_delta(DeltaCache(*(part.clone() for part in start)), config, 3)
    parts = [project(3, rng) for _ in range(3)]
    for i, projected in enumerate(parts):
        y = delta_verify(projected, cache, params, config, torch.tensor([2, 3] if i else [0, 0]))
    for row, count in ((0, 2), (1, 3)):
        whole = torch.cat([*(part[row : row + 1, :count] for part in parts[:2]), parts[2][row : row + 1]], 1)
        expected, _, _ = follow(whole, row_of(start, row), params)
        assert_near(y[row : row + 1], expected[:, -3:], 3e-4)


def test_room_beside_a_cache_is_of_its_kind(rng):
    cache = make_cache(rng, dtype=BF16)
    pending = pend_delta(cache, CONFIG, 4)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(pending[:2], cache, strict=True))
    assert [part.shape for part in pending[2:]] == [(2, 4, N), (2, 4, G, K), (2, 4, H, V), (2, 4, H)]
    assert [part.dtype for part in pending[2:]] == [BF16, F32, F32, F32]
    few = select_pending(pending, 2)
    assert [part.shape[1] for part in few[2:]] == [2] * 4
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(few, pending, strict=True))


def test_strong_decay_stays_finite(rng):
    params, start = make_params(rng)._replace(decay_H=torch.full((H,), -1e4)), make_cache(rng)
    cache = pend_delta(start, CONFIG, 3)
    for _ in range(3):
        y = delta_verify(project(3, rng), cache, params, CONFIG, torch.tensor([3, 2]))
    assert y.isfinite().all() and cache.state_BHKV.to(F64).isfinite().all()
