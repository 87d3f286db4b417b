"""Attention and placement against loops over Python floats, eager and compiled."""

import math

import pytest
import torch

from fmoe.functional.attention import Placement, attend, attend_rows, place_tokens

B, T, M, H, J, C, V = 2, 5, 11, 6, 3, 8, 10
MODES = ["eager", "aot_eager", "inductor"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {F32: 1e-5, BF16: 2e-2, F16: 3e-3}
# the slow compiler runs once
DTYPES_AND_MODES = [*((dtype, mode) for dtype in TOLERANCES for mode in MODES[:2]), (F32, "inductor")]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def visible_slots(position, slots, window):
    """Give the slots that a token may see; W counts the token itself."""
    first = 0 if window is None else max(position - window + 1, 0)
    return [m for m in range(slots) if first <= m <= position]


PLACEMENTS = [
    *((T, window, mode) for window in (None, 1, 3, 100) for mode in MODES[:2]),
    *((tokens, window, mode) for tokens in (0, 1) for window in (None, 3) for mode in MODES[:2]),
    (T, 3, "inductor"),
]


@pytest.mark.parametrize(("tokens", "window", "mode"), PLACEMENTS, ids=str)
def test_place_tokens(tokens, window, mode):
    lengths, frequencies = torch.tensor([6, 0]), torch.tensor([1.0, 0.25, 0.01])

    placement = in_mode(place_tokens, mode)(
        lengths, frequencies, tokens=tokens, slots=M, dtype=F32, window=window, scale=1.25
    )

    assert isinstance(placement, Placement)
    assert (placement.window_mask_BTM is None) == (window is None)
    positions = [[length + t for t in range(tokens)] for length in (6, 0)]
    assert placement.positions_BT.dtype == torch.int64
    assert placement.positions_BT.tolist() == positions
    assert (placement.mask_BTM.dtype, placement.mask_BTM.shape) == (torch.bool, (B, tokens, M))
    assert (placement.window_mask_BTM is None) == (window is None)
    for b, row in enumerate(positions):
        for t, position in enumerate(row):
            assert placement.mask_BTM[b, t].nonzero().flatten().tolist() == visible_slots(position, M, None)
            if window is not None:
                seen = placement.window_mask_BTM[b, t].nonzero().flatten().tolist()
                assert seen == visible_slots(position, M, window)
            for j, frequency in enumerate(frequencies.tolist()):
                assert placement.cos_BTR[b, t, j].item() == pytest.approx(
                    1.25 * math.cos(position * frequency), abs=3e-6
                )
                assert placement.sin_BTR[b, t, j].item() == pytest.approx(
                    1.25 * math.sin(position * frequency), abs=3e-6
                )
    assert placement.cos_BTR.shape == placement.sin_BTR.shape == (B, tokens, 3)
    assert lengths.tolist() == [6, 0]


@pytest.mark.parametrize("tokens", [1, 3])
def test_without_slots_lengths_take_the_place_of_masks(tokens):
    arguments = torch.tensor([4, 0]), torch.ones(2)
    placement = place_tokens(*arguments, tokens=tokens, slots=None, dtype=F32, window=3)
    masked = place_tokens(*arguments, tokens=tokens, slots=M, dtype=F32, window=3)

    assert placement.mask_BTM is None and placement.window_mask_BTM is None
    assert placement.lengths_B.tolist() == [4 + tokens, tokens] and masked.lengths_B is None
    assert all(map(torch.equal, placement[:3], masked[:3]))


def test_a_window_counts_the_token_itself():
    mask = place_tokens(torch.tensor([4]), torch.ones(1), tokens=2, slots=7, dtype=F32, window=3).window_mask_BTM

    assert mask.int().tolist() == [[[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0]]]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tables_take_the_dtype_asked_for(dtype):
    placement = place_tokens(torch.tensor([0, 3]), torch.ones(4), tokens=2, slots=M, dtype=dtype)

    assert placement.cos_BTR.dtype == placement.sin_BTR.dtype == dtype
    assert placement.cos_BTR[0, 0].tolist() == [1.0] * 4  # the scale is 1 where none is given


def attend_by_loop(q, k, v, mask, scale):
    """Average the values of the visible slots with softmax weights, one query head after the other."""
    batch, tokens, heads, _ = q.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(batch, tokens, heads, v.shape[-1], dtype=torch.float64)
    for b, t, h in ((b, t, h) for b in range(batch) for t in range(tokens) for h in range(heads)):
        j = h * k.shape[1] // heads
        slots = mask[b, t].nonzero().flatten().tolist()
        logits = [
            math.fsum(x * y for x, y in zip(q[b, t, h].tolist(), k[b, j, m].tolist(), strict=True)) * scale
            for m in slots
        ]
        powers = [math.exp(x - max(logits)) for x in logits]
        for m, power in zip(slots, powers, strict=True):
            out[b, t, h] += power / math.fsum(powers) * v[b, j, m]
    return out


def attention_inputs(rng, tokens=T, heads=H, kv_heads=J, dtype=F32, size=1.0):
    q = (torch.randn(B, tokens, heads, C, generator=rng) * size).to(dtype)
    k = (torch.randn(B, kv_heads, M, C, generator=rng) * size).to(dtype)
    v = torch.randn(B, kv_heads, M, V, generator=rng).to(dtype)
    mask = torch.rand(B, tokens, M, generator=rng) < 0.5
    return q, k, v, mask.scatter(2, torch.randint(M, (B, tokens, 1), generator=rng), True)


CASES = [
    *((T, H, J, dtype, mode, None) for dtype, mode in DTYPES_AND_MODES),
    *((tokens, H, J, F32, mode, 0.7) for tokens in (0, 1) for mode in MODES[:2]),
    *((T, heads, kv, F32, mode, None) for heads, kv in [(3, 3), (4, 1), (1, 1)] for mode in MODES[:2]),
]


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dtype", "mode", "scale"), CASES, ids=str)
def test_attend(tokens, heads, kv_heads, dtype, mode, scale, rng):
    q, k, v, mask = attention_inputs(rng, tokens, heads, kv_heads, dtype)

    out = in_mode(attend, mode)(q, k, v, mask, scale=scale)

    assert (out.shape, out.dtype) == ((B, tokens, heads, V), dtype)
    expected = attend_by_loop(q, k, v, mask, C**-0.5 if scale is None else scale)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (6, 2), (6, 1), (6, 6)])
def test_each_kv_head_serves_its_neighbours(heads, kv_heads, rng):
    q, k, v, mask = attention_inputs(rng, heads=heads, kv_heads=kv_heads)
    v = torch.arange(kv_heads).float()[None, :, None, None].expand_as(v)  # every value says whose it is

    out = attend(q, k, v, mask)

    served_by = out.mean((0, 1, 3)).round().int().tolist()
    assert served_by == sorted(list(range(kv_heads)) * (heads // kv_heads))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_large_logits_stay_finite(dtype, rng):
    q, k, v, mask = attention_inputs(rng, dtype=dtype, size=60.0)

    out = attend(q, k, v, mask)

    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), attend_by_loop(q, k, v, mask, C**-0.5), rtol=0.05, atol=0.05)


def test_a_hidden_slot_changes_nothing(rng):
    q, k, v, mask = attention_inputs(rng)
    mask[:, :, 4] = False
    mask[:, :, 5] = True
    out = attend(q, k, v, mask)

    k[:, :, 4], v[:, :, 4] = 1e4, -1e4

    assert torch.equal(attend(q, k, v, mask), out)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 7])
def test_attention_over_a_prefilled_cache_equals_a_loop_over_positions(window, rng):
    lengths = torch.tensor([6, 2])
    q, k, v, _ = attention_inputs(rng)
    placement = place_tokens(lengths, torch.ones(C // 2), tokens=T, slots=M, dtype=F32, window=window)

    seen = placement.mask_BTM if window is None else placement.window_mask_BTM
    out = attend(q, k, v, seen)

    mask = torch.zeros(B, T, M, dtype=torch.bool)
    for b, t in ((b, t) for b in range(B) for t in range(T)):
        mask[b, t, visible_slots(int(lengths[b]) + t, M, window)] = True
    torch.testing.assert_close(out.double(), attend_by_loop(q, k, v, mask, C**-0.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize(("tokens", "kv_heads"), [(1, J), (2, J), (T, 1), (3, H)])
def test_attend_rows_is_attend(tokens, kv_heads, mode, rng):
    """The same numbers in other rows; ``attend`` itself is held to loops above."""
    q = torch.randn(B, tokens, H, C, generator=rng)
    k, v = torch.randn(B, kv_heads, M, C, generator=rng), torch.randn(B, kv_heads, M, V, generator=rng)
    mask = torch.rand(B, tokens, M, generator=rng) < 0.5
    mask[..., 2] = True

    found = in_mode(attend_rows, mode)(q, k, v, mask, scale=0.4)

    assert found.shape == (B, tokens, H, V)
    torch.testing.assert_close(found, attend(q, k, v, mask, scale=0.4), rtol=1e-5, atol=1e-6)
