"""Decode attention in Triton's interpreter, against the formula; test_attend_kernel.py runs this file."""

from itertools import product

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.attend_ops import attend_lengths_op, attend_op, attend_step_op_
from fmoe.compile.decode_settings import AttendSettings, decode_settings_to_ints
from fmoe.functional import KVCache, apply_rotary, attend, place_tokens, rms_norm

pytestmark = [pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")]

SETTINGS = AttendSettings(splits=3, slots=16, heads=16, warps=4, stages=2, channels=16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
# B, H, J, C, U, M
SHAPES = [(1, 3, 3, 32, 32, 1), (3, 6, 2, 24, 24, 77), (2, 10, 2, 96, 96, 37), (2, 18, 1, 72, 40, 35)]


def draw(rng, dtype, *shape):
    return torch.randn(shape, generator=rng).to(dtype)


def attention_by_loop(q, k, v, visible, *, scale=None):
    """One row and head after the other, in float64; ``visible`` lists the slots of each row."""
    heads, size = q.shape[2:]
    y = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b, h in product(range(q.shape[0]), range(heads)):
        j = h * k.shape[1] // heads
        keys, values = k[b, j, visible[b]].double(), v[b, j, visible[b]].double()
        p = ((keys @ q[b, 0, h].double()) * (scale or size**-0.5)).exp()
        y[b, 0, h] = (p / p.sum()) @ values
    return y


def assert_close(y, expected):
    assert ((y.double() - expected).norm() / expected.norm()).item() < TOLERANCE[y.dtype]


def inputs(shape, dtype, rng):
    B, H, J, C, U, M = shape
    # Neighbouring slots that nobody may see hold NaN: a kernel that reads them fails.
    k, v = (torch.full((B, J, M + 9, size), torch.nan, dtype=dtype) for size in (C, U))
    k[:, :, :M], v[:, :, :M] = draw(rng, dtype, B, J, M, C), draw(rng, dtype, B, J, M, U)
    return draw(rng, dtype, B, 1, H, C), k, v


def mixed_lengths(batch, slots):
    return [slots, 1, slots // 2][:batch]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masked_attention_equals_the_formula(shape, dtype, rng):
    q, k, v = inputs(shape, dtype, rng)
    M = shape[-1]
    mask = torch.rand(q.shape[0], 1, M, generator=rng) < 0.4
    mask[:, :, M // 2] = True
    visible = [row[0].nonzero()[:, 0].tolist() for row in mask]

    y = attend_op(q, k[:, :, :M], v[:, :, :M], mask, scale=0.3, settings=SETTINGS)

    assert y.dtype == dtype
    assert_close(y, attention_by_loop(q, k, v, visible, scale=0.3))
    assert_close(y, attend(q.double(), k[:, :, :M].double(), v[:, :, :M].double(), mask, scale=0.3))


@pytest.mark.parametrize(
    ("dtype", "window", "gated"),
    [(torch.float32, None, True), (torch.float16, 1, False), (torch.float16, 20, True), (torch.float32, 1000, False)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_attention_by_lengths_equals_the_formula(shape, dtype, window, gated, rng):
    q, k, v = inputs(shape, dtype, rng)
    lengths = mixed_lengths(q.shape[0], shape[-1])
    gate = draw(rng, dtype, q.shape[0], 1, 7 + q.shape[2] * shape[4])[..., 7:] if gated else None

    y = attend_lengths_op(q, k, v, torch.tensor(lengths), gate_BTN=gate, window=window, settings=SETTINGS)

    expected = attention_by_loop(q, k, v, [range(max(n - (window or n), 0), n) for n in lengths])
    if gate is not None:
        expected = expected * gate.double().sigmoid().view_as(expected)
    assert_close(y, expected)


@pytest.mark.parametrize(("splits", "slots"), [(1, 16), (2, 32), (11, 16)])
def test_any_number_of_splits(splits, slots, rng):
    q, k, v = inputs((3, 4, 2, 40, 40, 70), torch.float32, rng)
    settings = AttendSettings(splits, slots, 16, 4, 1)
    lengths = torch.tensor([70, 33, 0])

    y = attend_lengths_op(q, k, v, lengths, settings=settings)

    expected = attention_by_loop(q[:2], k, v, [range(70), range(33)])
    assert_close(y[:2], expected)
    assert (y[2] == 0).all()
    assert torch.equal(attend_lengths_op(q, k, v, lengths, settings=settings), y)


def test_a_row_without_a_visible_slot_is_zero_and_one_that_holds_nan_is_nan(rng):
    q, k, v = inputs((2, 4, 2, 32, 32, 20), torch.float32, rng)
    mask = torch.tensor([False, True])[:, None, None].expand(2, 1, 20)
    k[1, 0, 3] = torch.nan

    y = attend_op(q, k[:, :, :20], v[:, :, :20], mask, settings=SETTINGS)

    assert (y[0] == 0).all()
    assert y[1, 0, :2].isnan().all()
    assert not y[1, 0, 2:].isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "size", "rank"), [(17, 80, 64), (3, 20, 16)])
def test_latents_are_keys_and_values_at_once(heads, size, rank, dtype, rng):
    latent = draw(rng, dtype, 2, 60, size)
    k = latent[:, :45][:, None]
    q = draw(rng, dtype, 2, 1, heads, size)
    mask = torch.arange(45)[None, None] < torch.tensor([45, 7])[:, None, None]

    y = attend_op(q, k, k[..., :rank], mask, scale=0.2, settings=SETTINGS)
    apart = attend_op(q, k, k[..., :rank].clone(), mask, scale=0.2, settings=SETTINGS)

    assert_close(y, attention_by_loop(q, k, k[..., :rank], [range(45), range(7)], scale=0.2))
    assert torch.equal(y, apart)


def test_queries_may_be_part_of_a_projection(rng):
    """Queries of every second row, their channels apart: what cannot be read by rows is copied."""
    whole = draw(rng, torch.float32, 2, 1, 8, 2 * 24)
    q, (_, k, v) = whole[:, :, 1:7, ::2], inputs((2, 6, 2, 24, 24, 30), torch.float32, rng)

    y = attend_lengths_op(q, k, v, torch.tensor([30, 4]), settings=SETTINGS)

    assert_close(y, attention_by_loop(q, k, v, [range(30), range(4)]))


def step_by_reference(projected, norm, cache, placement, *, heads, gated, mask):
    """The functions that a layer calls one after the other, in the dtype of the model."""
    kv_heads, size = cache.k_BJMC.shape[1], cache.k_BJMC.shape[3]
    sizes = [(heads + kv_heads) * size, kv_heads * size, heads * size if gated else 0]
    qk, v, gate = projected.split_with_sizes(sizes, -1)
    qk = qk.unflatten(-1, (heads + kv_heads, size))
    if norm is not None:
        qk = rms_norm(qk, norm, eps=1e-5)
    qk = apply_rotary(qk, placement.cos_BTR, placement.sin_BTR)
    q, k = qk.split([heads, kv_heads], 2)
    keys, values = cache.k_BJMC.clone(), cache.v_BJMC.clone()
    for b, position in enumerate(placement.positions_BT[:, 0].tolist()):
        keys[b, :, position], values[b, :, position] = k[b, 0], v[b, 0].view(kv_heads, size)
    y = attention_by_loop(q, keys, values, [row[0].nonzero()[:, 0].tolist() for row in mask]).flatten(2)
    return y * gate.double().sigmoid() if gated else y, keys, values


# B, H, J, C, M, rotated channels
STEPS = [(3, 6, 2, 24, 40, 24), (2, 9, 1, 96, 35, 32), (2, 20, 1, 40, 33, 20), (1, 4, 2, 64, 9, 16)]


@pytest.mark.parametrize(
    ("dtype", "window", "gated", "norm"),
    [
        (torch.float32, None, True, "float32"),
        (torch.float16, None, True, "float32"),
        (torch.float16, 12, False, "model"),
        (torch.float32, 1, True, "none"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_a_step_equals_the_functions_it_replaces(shape, dtype, window, gated, norm, rng):
    B, H, J, C, M, rotated = shape
    k, v = draw(rng, dtype, B, J, M, C), draw(rng, dtype, B, J, M, C)
    lengths = torch.tensor(mixed_lengths(B, M)) - 1
    placement = place_tokens(
        lengths, torch.rand(rotated // 2, generator=rng), tokens=1, slots=M, dtype=dtype, window=window
    )
    projected = draw(rng, dtype, B, 1, (2 * H if gated else H) * C + 2 * J * C)
    weight = None
    if norm != "none":
        weight = (1 + draw(rng, torch.float32, H + J, C) / 4).to(dtype if norm == "model" else torch.float32)
    mask = placement.mask_BTM if window is None else placement.window_mask_BTM
    cache = KVCache(k, v)
    expected, keys, values = step_by_reference(projected, weight, cache, placement, heads=H, gated=gated, mask=mask)

    y = attend_step_op_(projected, weight, cache, placement, heads=H, eps=1e-5, window=window, settings=SETTINGS)

    assert_close(y, expected)
    torch.testing.assert_close(k, keys, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(v, values)


def test_a_step_behind_a_mask(rng):
    k, v = draw(rng, torch.float32, 2, 2, 40, 24), draw(rng, torch.float32, 2, 2, 40, 24)
    placement = place_tokens(torch.tensor([30, 17]), torch.rand(12, generator=rng), tokens=1, slots=32, dtype=k.dtype)
    mask = placement.mask_BTM & ((torch.arange(32) % 3 != 0) | (torch.arange(32) == placement.positions_BT[..., None]))
    projected = draw(rng, torch.float32, 2, 1, 10 * 24)
    expected, _, _ = step_by_reference(projected, None, KVCache(k, v), placement, heads=6, gated=False, mask=mask)

    y = attend_step_op_(projected, None, KVCache(k, v), placement, heads=6, eps=1e-5, mask_BTM=mask, settings=SETTINGS)

    assert_close(y, expected)


def test_the_ops_keep_their_schemas(rng):
    q, k, v = inputs((2, 6, 2, 24, 24, 30), torch.float32, rng)
    mask, lengths = torch.ones(2, 1, 39, dtype=torch.bool), torch.tensor([30, 4])
    gate, ints = draw(rng, torch.float32, 2, 6 * 24), decode_settings_to_ints(SETTINGS)
    k, v = k.nan_to_num(), v.nan_to_num()

    opcheck(torch.ops.fmoe.attend_decode.default, (q[:1], k[:1], v[:1], mask[:1], None, None, 0.2, 0, []))
    opcheck(torch.ops.fmoe.attend_decode.default, (q, k, v, None, lengths, gate, 0.2, 5, ints))
    projected, norm = draw(rng, torch.float32, 2, 1, 10 * 24), draw(rng, torch.float32, 8, 24)
    cos, sin = torch.rand(2, 1, 6, generator=rng), torch.rand(2, 1, 6, generator=rng)
    opcheck(
        torch.ops.fmoe.attend_step.default,
        (projected, norm, cos, sin, lengths[:, None], k, v, None, 6, 1e-6, 0.2, 0, ints),
    )


def test_a_step_traces_and_still_writes_the_cache(rng):
    k, v = draw(rng, torch.float32, 2, 2, 40, 24), draw(rng, torch.float32, 2, 2, 40, 24)
    placement = place_tokens(torch.tensor([30, 17]), torch.rand(12, generator=rng), tokens=1, slots=32, dtype=k.dtype)
    projected = draw(rng, torch.float32, 2, 1, 10 * 24)
    plain, traced = KVCache(k.clone(), v.clone()), KVCache(k.clone(), v.clone())

    def block(projected, cache):
        return 2 * attend_step_op_(projected, None, cache, placement, heads=6, eps=1e-5, settings=SETTINGS)

    expected = block(projected, plain)
    y = torch.compile(block, fullgraph=True, backend="aot_eager")(projected, traced)

    assert torch.equal(y, expected)
    assert all(map(torch.equal, traced, plain))
    assert not torch.equal(traced.k_BJMC, k)
