"""Attention with sinks against a softmax over Python floats with one more score, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.attention import attend, attend_rows

B, M, H, J, C, V = 2, 11, 6, 3, 14, 14
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {F32: 1e-5, BF16: 2e-2, F16: 4e-3}
MODES = ["eager", "aot_eager", "inductor"]
# the slow compiler runs once for each of the two ways
CASES = [
    *((tokens, dtype, mode) for tokens in (1, 5) for dtype in TOLERANCES for mode in MODES[:2]),
    *((tokens, F32, "inductor") for tokens in (1, 5)),
    *((0, F32, mode) for mode in MODES[:2]),
]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def attend_by_loop(q, k, v, mask, sinks, scale):
    """Average the values of the visible slots; the sink has a part of the weights and no value."""
    batch, tokens, heads, _ = q.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(batch, tokens, heads, v.shape[-1], dtype=torch.float64)
    for b, t, h in ((b, t, h) for b in range(batch) for t in range(tokens) for h in range(heads)):
        j = h * k.shape[1] // heads
        slots = mask[b, t].nonzero().flatten().tolist()
        scores = [
            math.fsum(x * y for x, y in zip(q[b, t, h].tolist(), k[b, j, m].tolist(), strict=True)) * scale
            for m in slots
        ]
        total = math.fsum(math.exp(score) for score in [*scores, sinks[h].item()])
        for m, score in zip(slots, scores, strict=True):
            out[b, t, h] += math.exp(score) / total * v[b, j, m]
    return out


def draw(rng, tokens, *, kv_heads=J, size=C, value_size=V, dtype=F32):
    q = torch.randn(B, tokens, H, size, generator=rng).to(dtype)
    k = torch.randn(B, kv_heads, M, size, generator=rng).to(dtype)
    v = torch.randn(B, kv_heads, M, value_size, generator=rng).to(dtype)
    mask = torch.rand(B, tokens, M, generator=rng) < 0.5
    return q, k, v, mask, (2 * torch.randn(H, generator=rng)).to(dtype)


def assert_near(found, expected, dtype):
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize(("tokens", "dtype", "mode"), CASES, ids=str)
def test_attend(tokens, dtype, mode, rng):
    inputs = draw(rng, tokens, dtype=dtype)
    inputs[3][0, :1] = False  # a query that sees nothing but its sink

    found = in_mode(attend, mode)(*inputs)

    expected = attend_by_loop(*inputs, C**-0.5)
    assert_near(found, expected, dtype)
    if tokens:
        assert (found[0, 0] == 0).all()
        assert (expected - attend(*inputs[:4]).double()).abs().max() > 0.1  # the sinks matter


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("scale", [0.3, 1.0])
@pytest.mark.parametrize(("kv_heads", "size", "value_size"), [(1, 8, 8), (2, 8, 3), (6, 3, 20)])
def test_sizes_and_scales(kv_heads, size, value_size, scale, tokens, rng):
    inputs = draw(rng, tokens, kv_heads=kv_heads, size=size, value_size=value_size)
    for function in (attend, attend_rows):
        found = function(*inputs, scale=scale)
        assert found.shape == (B, tokens, H, value_size)
        assert_near(found, attend_by_loop(*inputs, scale), F32)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_attend_rows(tokens, dtype, mode, rng):
    inputs = draw(rng, tokens, dtype=dtype)
    assert_near(in_mode(attend_rows, mode)(*inputs), attend_by_loop(*inputs, C**-0.5), dtype)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_extreme_scores_stay_finite(dtype, tokens, rng):
    q, k, v, mask, sinks = draw(rng, tokens, dtype=dtype)
    mask[..., 1] = True
    for scores, sink in ((60.0, 0.0), (60.0, 5000.0), (1.0, 5000.0), (1.0, -5000.0)):
        found = attend(scores * q, k, v, mask, torch.full_like(sinks, sink))
        assert found.isfinite().all()
        if sink > 1000:
            assert found.abs().max() == 0
    without = attend(q, k, v, mask)
    torch.testing.assert_close(found, without, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_hidden_slot_changes_nothing(tokens, rng):
    q, k, v, mask, sinks = draw(rng, tokens)
    mask[:, :, 4] = False
    before = attend(q, k, v, mask, sinks)
    k[:, :, 4], v[:, :, 4] = 1e4, -1e4
    assert torch.equal(attend(q, k, v, mask, sinks), before)
