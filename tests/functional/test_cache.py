"""Caches against loops over positions, eager and compiled."""

import pytest
import torch

from fmoe.functional.cache import (
    DeltaCache,
    KVCache,
    LatentCache,
    append_kv_,
    append_latent_,
    copy_row_,
    select_row,
    select_slots,
    write_delta_,
)

B, T, J, M, K, V = 2, 5, 3, 11, 8, 10
MODES = ["eager", "aot_eager", "inductor"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# the slow compiler runs once
DTYPES_AND_MODES = [*((dtype, mode) for dtype in (F32, BF16, F16) for mode in MODES[:2]), (F32, "inductor")]
POSITIONS = {
    "start": [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
    "rows-differ": [[6, 7, 8, 9, 10], [2, 3, 4, 5, 6]],
    "scattered": [[10, 0, 3, 2, 7], [1, 9, 4, 10, 0]],
    "one": [[10], [4]],
    "none": [[], []],
}
APPENDS = [
    *(("rows-differ", dtype, mode) for dtype, mode in DTYPES_AND_MODES),
    *((name, F32, mode) for name in POSITIONS if name != "rows-differ" for mode in MODES[:2]),
]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def kv_cache(rng, dtype=F32, batch=B):
    """Keys and values of different widths, every slot holding something of its own."""
    return KVCache(*(torch.randn(batch, J, M, width, generator=rng).to(dtype) for width in (K, V)))


def delta_cache(rng, dtype=F32):
    return DeltaCache(torch.randn(B, 3, 7, generator=rng).to(dtype), torch.randn(B, J, K, V, generator=rng))


def latent_cache(rng, dtype=F32):
    return LatentCache(torch.randn(B, M, K, generator=rng).to(dtype))


def append_by_loop(cache, k, v, positions):
    parts = [part.clone() for part in cache]
    for b, row in enumerate(positions.tolist()):
        for t, position in enumerate(row):
            for j in range(J):
                parts[0][b, j, position] = k[b, t, j]
                parts[1][b, j, position] = v[b, t, j]
    return parts


def assert_same(cache, expected):
    assert all(torch.equal(actual, part) for actual, part in zip(cache, expected, strict=True))


@pytest.mark.parametrize(("name", "dtype", "mode"), APPENDS, ids=str)
def test_append_kv_(name, dtype, mode, rng):
    cache, positions = kv_cache(rng, dtype), torch.tensor(POSITIONS[name], dtype=torch.int64)
    k, v = (torch.randn(*positions.shape, J, width, generator=rng).to(dtype) for width in (K, V))
    expected, addresses = append_by_loop(cache, k, v, positions), [part.data_ptr() for part in cache]

    result = in_mode(append_kv_, mode)(cache, k, v, positions)

    assert isinstance(result, KVCache)
    assert_same(cache, expected)
    assert [part.data_ptr() for part in result] == [part.data_ptr() for part in cache] == addresses


@pytest.mark.parametrize(("name", "dtype", "mode"), APPENDS, ids=str)
def test_append_latent_(name, dtype, mode, rng):
    cache, positions = latent_cache(rng, dtype), torch.tensor(POSITIONS[name], dtype=torch.int64)
    latents = torch.randn(*positions.shape, K, generator=rng).to(dtype)
    expected, address = cache.latent_BMR.clone(), cache.latent_BMR.data_ptr()
    for b, row in enumerate(positions.tolist()):
        for t, position in enumerate(row):
            expected[b, position] = latents[b, t]

    result = in_mode(append_latent_, mode)(cache, latents, positions)

    assert isinstance(result, LatentCache)
    assert_same(cache, [expected])
    assert result.latent_BMR.data_ptr() == cache.latent_BMR.data_ptr() == address


def test_append_kv_reads_no_other_slot(rng):
    cache = KVCache(*(torch.full_like(part, torch.nan) for part in kv_cache(rng)))

    append_kv_(cache, torch.ones(B, 2, J, K), torch.ones(B, 2, J, V), torch.tensor([[4, 5], [0, 1]]))

    for part in cache:
        written = ~part.isnan().any(-1)
        assert written.nonzero().tolist() == [
            *([0, j, m] for j in range(J) for m in (4, 5)),
            *([1, j, m] for j in range(J) for m in (0, 1)),
        ]


def test_append_kv_takes_keys_that_are_views(rng):
    cache = kv_cache(rng)
    k, v = (torch.randn(B, J, T, width, generator=rng).transpose(1, 2) for width in (K, V))
    positions = torch.tensor(POSITIONS["scattered"])
    expected = append_by_loop(cache, k, v, positions)

    append_kv_(cache, k, v, positions)

    assert_same(cache, expected)


@pytest.mark.parametrize(("dtype", "mode"), DTYPES_AND_MODES, ids=str)
def test_write_delta_(dtype, mode, rng):
    cache, new = delta_cache(rng, dtype), delta_cache(rng, dtype)
    kept, addresses = [part.clone() for part in new], [part.data_ptr() for part in cache]

    result = in_mode(write_delta_, mode)(cache, *new)

    assert isinstance(result, DeltaCache)
    assert_same(cache, kept)
    assert_same(new, kept)
    assert [part.data_ptr() for part in result] == [part.data_ptr() for part in cache] == addresses
    assert (cache.window_BWN.dtype, cache.state_BHKV.dtype) == (dtype, F32)


def test_write_delta_copies(rng):
    cache, new = delta_cache(rng), delta_cache(rng)
    write_delta_(cache, *new)
    kept = [part.clone() for part in cache]

    for part in new:
        part.zero_()

    assert_same(cache, kept)


@pytest.mark.parametrize(
    ("make", "row", "mode"),
    [
        *((make, row, mode) for make in (kv_cache, delta_cache, latent_cache) for row in (0, 1) for mode in MODES[:2]),
        (kv_cache, 1, "inductor"),
    ],
)
def test_select_row(make, row, mode, rng):
    cache = make(rng)

    view = in_mode(select_row, mode)(cache, row)

    assert type(view) is type(cache)
    for part, whole in zip(view, cache, strict=True):
        assert part.shape == (1, *whole.shape[1:])
        assert part.data_ptr() == whole[row].data_ptr()
        assert part[0].tolist() == whole[row].tolist()


@pytest.mark.parametrize("mode", MODES[:2])
def test_select_row_writes_through(mode, rng):
    cache, positions = kv_cache(rng), torch.tensor([[3, 9]])
    k, v = (torch.randn(1, 2, J, width, generator=rng) for width in (K, V))
    expected = [part.clone() for part in cache]
    for whole, part in zip(expected, append_by_loop(KVCache(*(p[1:] for p in cache)), k, v, positions), strict=True):
        whole[1] = part[0]

    in_mode(append_kv_, mode)(select_row(cache, 1), k, v, positions)

    assert_same(cache, expected)


def test_select_row_writes_a_delta_state_through(rng):
    cache = delta_cache(rng)
    first = [part[0].clone() for part in cache]

    write_delta_(select_row(cache, 1), torch.full((1, 3, 7), 2.0), torch.full((1, J, K, V), 3.0))

    assert_same([part[0] for part in cache], first)
    assert [part[1].unique().tolist() for part in cache] == [[2.0], [3.0]]


def test_select_slots_views_the_first_ones(rng):
    kv, latent, delta = kv_cache(rng), latent_cache(rng), delta_cache(rng)
    for part, whole in zip(select_slots(kv, 4), kv, strict=True):
        assert torch.equal(part, whole[:, :, :4]) and part.data_ptr() == whole.data_ptr()
    assert torch.equal(select_slots(latent, 4).latent_BMR, latent.latent_BMR[:, :4])
    assert select_slots(delta, 4) is delta


@pytest.mark.parametrize("make", [kv_cache, latent_cache, delta_cache])
def test_copy_row_gives_every_row_the_first_slots(rng, make):
    target, source = make(rng), make(rng)
    one = select_row(source, 1)
    before, kept = [part.clone() for part in target], [part.clone() for part in source]

    assert copy_row_(target, one, 4) is target

    for part, old, mine, whole in zip(target, before, one, source, strict=True):
        for row in range(B):
            if make is delta_cache:
                assert torch.equal(part[row], mine[0])
            else:
                slots = mine.dim() - 3  # of [J, M, C] and [M, R]
                assert torch.equal(part[row].narrow(slots, 0, 4), mine[0].narrow(slots, 0, 4))
                assert torch.equal(part[row].narrow(slots, 4, M - 4), old[row].narrow(slots, 4, M - 4))
        assert not torch.equal(part[0], old[0])
        assert torch.equal(whole[1], mine[0])
    assert all(torch.equal(part, old) for part, old in zip(source, kept, strict=True))


def test_copy_row_takes_other_sizes_and_dtypes(rng):
    """Rows with room for more take what fits, converted to their dtype."""
    long, short = kv_cache(rng), kv_cache(rng, batch=1)
    short = KVCache(*(part[:, :, :6].double() for part in short))
    copy_row_(long, short, 6)
    assert all(torch.equal(part[1, :, :6], mine[0].float()) for part, mine in zip(long, short, strict=True))
