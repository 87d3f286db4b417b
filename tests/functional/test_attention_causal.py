"""Attention of the last tokens to all before them, against loops; and that no mask is placed for it."""

import math

import pytest
import torch

from fmoe.functional.attention import attend_causal, causal_mask, place_tokens, see_all

B, H, J, C, V = 2, 6, 3, 8, 10
F32, BF16 = torch.float32, torch.bfloat16


def attend_by_loop(q, k, v, scale):
    batch, tokens, heads, _ = q.shape
    slots = k.shape[2]
    out = torch.zeros(batch, tokens, heads, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                j, seen = h * k.shape[1] // heads, slots - tokens + t + 1
                scores = [float(q[b, t, h].double() @ k[b, j, m].double()) * scale for m in range(seen)]
                powers = [math.exp(s - max(scores)) for s in scores]
                out[b, t, h] = sum(p / sum(powers) * v[b, j, m].double() for m, p in enumerate(powers))
    return out


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("dtype", "error"), [(F32, 1e-5), (BF16, 2e-2)], ids=str)
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 5), (5, 11), (2, 3), (1, 4)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_tokens_see_all_before_them(tokens, slots, dtype, error, backend, scale, rng):
    q = torch.randn(B, tokens, H, C, generator=rng).to(dtype)
    k, v = (torch.randn(B, J, slots, size, generator=rng).to(dtype) for size in (C, V))
    run = attend_causal if backend is None else torch.compile(attend_causal, fullgraph=True, backend=backend)

    out = run(q, k, v, scale=scale)

    assert (out.dtype, out.shape) == (dtype, (B, tokens, H, V))
    expected = attend_by_loop(q, k, v, C**-0.5 if scale is None else scale)
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)


def test_causal_mask():
    mask = causal_mask(torch.zeros(1, 2, 3, 4), 5)
    assert mask.int().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]


def test_see_all_takes_the_place_of_lengths():
    placed = place_tokens(torch.tensor([4, 4]), torch.ones(2), tokens=3, slots=None, dtype=F32)

    placement = see_all(placed, 7)

    assert placement.visible_M.shape == (7,)
    assert placement.mask_BTM is None and placement.lengths_B is None
    assert all(map(torch.equal, placement[:3], placed[:3]))
