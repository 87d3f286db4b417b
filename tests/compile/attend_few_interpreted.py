"""Attention of a few tokens in Triton's interpreter, against the formula; test_attend_few_kernel.py runs this file."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.library import opcheck
from triton.language.core import constexpr  # noqa: F401  (fails here, with a plain message, without Triton)

from fmoe.compile.attend_few_ops import attend_few_lengths_op, attend_few_step_op_
from fmoe.compile.attend_ops import attend_step_op_
from fmoe.compile.decode_settings import AttendSettings, decode_settings_to_ints
from fmoe.functional import KVCache, apply_rotary, attend_rows, place_tokens, rms_norm

pytestmark = [pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")]

SETTINGS = AttendSettings(splits=3, slots=16, heads=16, warps=4, stages=2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def draw(rng, dtype, *shape):
    return torch.randn(shape, generator=rng).to(dtype)


def attention_by_loop(q, k, v, visible, *, scale=None):
    """One token and head after the other, in float64; ``visible`` lists the slots of each row's tokens."""
    y = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b, t, h in product(*map(range, q.shape[:3])):
        j, slots = h * k.shape[1] // q.shape[2], list(visible[b][t])
        if slots:
            p = ((k[b, j, slots].double() @ q[b, t, h].double()) * (scale or q.shape[3] ** -0.5)).exp()
            y[b, t, h] = (p / p.sum()) @ v[b, j, slots].double()
    return y


def assert_close(y, expected):
    assert ((y.double() - expected).norm() / expected.norm()).item() < TOLERANCE[y.dtype]


def seen_by_lengths(lengths, tokens):
    return [[range(max(n - (tokens - 1 - t), 0)) for t in range(tokens)] for n in lengths]


def inputs(shape, dtype, rng):
    B, T, H, J, C, U, M = shape
    # Neighbouring slots that nobody may see hold NaN: a kernel that reads them fails.
    k, v = (torch.full((B, J, M + 9, size), torch.nan, dtype=dtype) for size in (C, U))
    k[:, :, :M], v[:, :, :M] = draw(rng, dtype, B, J, M, C), draw(rng, dtype, B, J, M, U)
    return draw(rng, dtype, B, T, H, C), k, v


# B, T, H, J, C, U, M
SHAPES = [(3, 2, 6, 2, 24, 24, 77), (2, 4, 5, 1, 72, 40, 35), (1, 2, 3, 3, 32, 32, 2)]


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.float32) for shape in SHAPES), (SHAPES[1], torch.float16)], ids=str
)
def test_attention_by_lengths_equals_the_formula(shape, dtype, rng):
    q, k, v = inputs(shape, dtype, rng)
    B, T, M = shape[0], shape[1], shape[-1]
    lengths = [M, T, M // 2][:B]

    y = attend_few_lengths_op(q, k, v, torch.tensor(lengths), scale=0.3, settings=SETTINGS)

    assert y.dtype == dtype
    assert_close(y, attention_by_loop(q, k, v, seen_by_lengths(lengths, T), scale=0.3))
    mask = torch.arange(M) < (torch.tensor(lengths)[:, None] - T + 1 + torch.arange(T))[..., None]
    assert_close(y, attend_rows(q.double(), k[:, :, :M].double(), v[:, :, :M].double(), mask, scale=0.3))


@pytest.mark.parametrize(("splits", "slots", "rows"), [(1, 16, 16), (2, 32, 32), (7, 16, 16), (3, 16, 64)])
def test_any_number_of_splits_and_rows_and_tokens_that_see_nothing(splits, slots, rows, rng):
    q, k, v = inputs((4, 3, 6, 1, 40, 40, 70), torch.float32, rng)
    settings = AttendSettings(splits, slots, rows, 4, 1)
    lengths = torch.tensor([70, 33, 1, 0])

    y = attend_few_lengths_op(q, k, v, lengths, settings=settings)

    assert_close(y, attention_by_loop(q, k, v, seen_by_lengths(lengths.tolist(), 3)))
    assert (y[2, :2] == 0).all() and (y[3] == 0).all()


@pytest.mark.parametrize(
    ("heads", "size", "rank", "dtype"), [(9, 80, 64, torch.float16), (3, 20, 16, torch.float32)], ids=str
)
def test_latents_are_keys_and_values_at_once(heads, size, rank, dtype, rng):
    k = draw(rng, dtype, 2, 60, size)[:, :45][:, None]
    q = draw(rng, dtype, 2, 2, heads, size)
    lengths = torch.tensor([45, 7])

    y = attend_few_lengths_op(q, k, k[..., :rank], lengths, scale=0.2, settings=SETTINGS)
    apart = attend_few_lengths_op(q, k, k[..., :rank].clone(), lengths, scale=0.2, settings=SETTINGS)

    assert_close(y, attention_by_loop(q, k, k[..., :rank], seen_by_lengths([45, 7], 2), scale=0.2))
    assert torch.equal(y, apart)


def test_queries_may_be_part_of_a_projection(rng):
    """Queries of a part of the columns, their channels apart: what cannot be read by rows is copied."""
    whole = draw(rng, torch.float32, 2, 3, 8, 2 * 24)
    _, k, v = inputs((2, 3, 6, 2, 24, 24, 30), torch.float32, rng)
    for q in (whole[:, :, 1:7, ::2], whole[..., :24].unflatten(2, (2, 4))[:, :, :, :3].flatten(2, 3), whole[:, 1:, :6]):
        q = q[..., :24]
        T = q.shape[1]
        y = attend_few_lengths_op(q, k, v, torch.tensor([30, 4]), settings=SETTINGS)
        assert_close(y, attention_by_loop(q, k, v, seen_by_lengths([30, 4], T)))


def step_by_reference(projected, norm, cache, placement, *, heads, gated, mask):
    """The functions that a layer calls one after the other, in the dtype of the model."""
    kv_heads, size = cache.k_BJMC.shape[1], cache.k_BJMC.shape[3]
    sizes = [(heads + kv_heads) * size, kv_heads * size, heads * size if gated else 0]
    qk, v, gate = projected.split_with_sizes(sizes, -1)
    qk, v = qk.unflatten(-1, (heads + kv_heads, size)), v.unflatten(-1, (kv_heads, size))
    if norm is not None:
        qk = rms_norm(qk, norm, eps=1e-5)
    qk = apply_rotary(qk, placement.cos_BTR, placement.sin_BTR)
    q, k = qk.split([heads, kv_heads], 2)
    keys, values = cache.k_BJMC.clone(), cache.v_BJMC.clone()
    for b, row in enumerate(placement.positions_BT.tolist()):
        for t, position in enumerate(row):
            keys[b, :, position], values[b, :, position] = k[b, t], v[b, t]
    visible = [[token.nonzero()[:, 0].tolist() for token in row] for row in mask]
    y = attention_by_loop(q, keys, values, visible).flatten(2)
    return y * gate.double().sigmoid() if gated else y, keys, values


def draw_step(shape, dtype, rng, *, window=None, gated=True, norm="float32", lengths=None):
    """Draw what a step takes: projection, norm's weight, cache, placement, mask."""
    B, T, H, J, C, M, rotated = shape
    # what stands behind the new tokens is a rejected draft's: nobody may read it
    cache = KVCache(*(draw(rng, dtype, B, J, M, C) for _ in range(2)))
    lengths = torch.tensor(lengths or [M - T, 0, M // 2][:B])
    for part in cache:
        for b, length in enumerate(lengths.tolist()):
            part[b, :, length:] = torch.nan
    placement = place_tokens(
        lengths, torch.rand(rotated // 2, generator=rng), tokens=T, slots=M, dtype=dtype, window=window
    )
    projected = draw(rng, dtype, B, T, (2 * H if gated else H) * C + 2 * J * C)
    weight = None
    if norm != "none":
        weight = (1 + draw(rng, torch.float32, H + J, C) / 4).to(dtype if norm == "model" else torch.float32)
    return projected, weight, cache, placement, placement.mask_BTM if window is None else placement.window_mask_BTM


# B, T, H, J, C, M, rotated channels; dtype, window, gated, norm
STEPS = [
    ((3, 2, 6, 2, 24, 40, 24), torch.float32, None, True, "float32"),
    ((3, 2, 6, 2, 24, 40, 24), torch.float16, 12, False, "model"),
    ((2, 3, 6, 1, 96, 35, 32), torch.float16, None, True, "float32"),
    ((2, 3, 6, 1, 96, 35, 32), torch.float32, 2, True, "none"),
    ((2, 4, 5, 1, 40, 33, 20), torch.float32, None, False, "model"),
    ((2, 4, 5, 1, 40, 33, 20), torch.float32, 1, True, "float32"),
    ((1, 9, 3, 3, 20, 20, 12), torch.float16, 7, False, "none"),
]


@pytest.mark.parametrize(("shape", "dtype", "window", "gated", "norm"), STEPS, ids=str)
def test_a_step_equals_the_functions_it_replaces(shape, dtype, window, gated, norm, rng):
    projected, weight, cache, placement, mask = draw_step(shape, dtype, rng, window=window, gated=gated, norm=norm)
    heads = shape[2]
    expected, keys, values = step_by_reference(projected, weight, cache, placement, heads=heads, gated=gated, mask=mask)

    y = attend_few_step_op_(
        projected, weight, cache, placement, heads=heads, eps=1e-5, window=window, settings=SETTINGS
    )

    assert_close(y, expected)
    torch.testing.assert_close(cache.k_BJMC, keys, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)
    torch.testing.assert_close(cache.v_BJMC, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("splits", "rows"), [(1, 16), (2, 32), (5, 16)])
@pytest.mark.parametrize("window", [None, 5])
def test_a_step_of_any_number_of_splits(splits, rows, window, rng):
    projected, weight, cache, placement, mask = draw_step((3, 3, 6, 1, 24, 60, 24), torch.float32, rng, window=window)
    expected, keys, _ = step_by_reference(projected, weight, cache, placement, heads=6, gated=True, mask=mask)
    settings = AttendSettings(splits, 16, rows, 4, 1)

    y = attend_few_step_op_(projected, weight, cache, placement, heads=6, eps=1e-5, window=window, settings=settings)

    assert_close(y, expected)
    torch.testing.assert_close(cache.k_BJMC, keys, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("splits", [1, 3])
def test_nan_of_a_draft_concerns_no_token_before_it(splits, rng):
    """As in the functions that a layer calls, its keys and values become zeros."""
    projected, weight, cache, placement, mask = draw_step((2, 3, 6, 2, 24, 40, 24), torch.float32, rng)
    expected, _, _ = step_by_reference(projected, weight, cache, placement, heads=6, gated=True, mask=mask)
    projected[0, 2] = torch.nan
    settings = replace(SETTINGS, splits=splits)

    y = attend_few_step_op_(projected, weight, cache, placement, heads=6, eps=1e-5, settings=settings)

    assert_close(y[0, :2], expected[0, :2])
    assert_close(y[1], expected[1])
    assert y[0, 2].isnan().all()
    assert all((part[0, :, placement.positions_BT[0, 2]] == 0).all() for part in cache)


def test_one_token_is_what_the_step_of_one_token_gives(rng):
    projected, weight, cache, placement, _ = draw_step((2, 1, 6, 2, 24, 40, 24), torch.float32, rng)
    single = KVCache(*(part.clone() for part in cache))
    options = {"heads": 6, "eps": 1e-5, "settings": SETTINGS}

    y = attend_few_step_op_(projected, weight, cache, placement, **options)

    torch.testing.assert_close(y, attend_step_op_(projected, weight, single, placement, **options))
    torch.testing.assert_close(cache, single, rtol=0, atol=0, equal_nan=True)


def test_a_projection_may_be_part_of_another(rng):
    projected, weight, cache, placement, mask = draw_step((2, 2, 6, 2, 24, 40, 24), torch.float32, rng)
    wide = draw(rng, torch.float32, 2, 5, projected.shape[2] + 6)
    part = wide[:, 1:3, 6:]
    expected, _, _ = step_by_reference(part, weight, cache, placement, heads=6, gated=True, mask=mask)

    assert_close(attend_few_step_op_(part, weight, cache, placement, heads=6, eps=1e-5, settings=SETTINGS), expected)


def test_the_ops_keep_their_schemas(rng):
    q, k, v = inputs((2, 3, 6, 2, 24, 24, 30), torch.float32, rng)
    k, v, lengths, ints = k.nan_to_num(), v.nan_to_num(), torch.tensor([30, 4]), decode_settings_to_ints(SETTINGS)

    opcheck(torch.ops.fmoe.attend_few.default, (q, k, v, lengths, 0.2, ints))
    opcheck(torch.ops.fmoe.attend_few.default, (q[:1, :2, ::3], k[:1], v[:1], lengths[:1], 0.2, []))
    projected, norm = draw(rng, torch.float32, 2, 3, 10 * 24), draw(rng, torch.float32, 8, 24)
    cos, sin = torch.rand(2, 3, 6, generator=rng), torch.rand(2, 3, 6, generator=rng)
    positions = lengths[:, None] + torch.arange(3)
    opcheck(torch.ops.fmoe.attend_few_step.default, (projected, norm, cos, sin, positions, k, v, 6, 1e-6, 0.2, 0, ints))


def test_a_step_traces_and_still_writes_the_cache(rng):
    projected, _, cache, placement, _ = draw_step((2, 2, 6, 2, 24, 40, 24), torch.float32, rng, norm="none")
    plain, traced = (KVCache(*(part.clone() for part in cache)) for _ in range(2))

    def block(projected, cache):
        return 2 * attend_few_step_op_(projected, None, cache, placement, heads=6, eps=1e-5, settings=SETTINGS)

    expected = block(projected, plain)
    y = torch.compile(block, fullgraph=True, backend="aot_eager")(projected, traced)

    assert torch.equal(y, expected) and not y.isnan().any()
    torch.testing.assert_close(traced, plain, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(traced.k_BJMC.nan_to_num(), cache.k_BJMC.nan_to_num())
