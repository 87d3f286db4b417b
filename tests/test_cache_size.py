"""What caches take, against the caches themselves; and what is said before any that cannot fit."""

from dataclasses import replace

import pytest
import torch

import fmoe
from fmoe import cache_size, generation
from fmoe.cache_size import CacheSize, Room, check_room, choose_batch_size, find_room, free_bytes, measure_caches
from fmoe.compile.step import cache_slots
from fmoe.decoding import batch_capacity, new_state

MIB = 2**20


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


def bytes_of(model, rows, tokens):
    return sum(part.nbytes for cache in new_state(model, rows, tokens).caches for part in cache)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 64), (2, 65), (5, 1000)])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_caches_take_what_was_measured(rows, tokens, state_dtype):
    model = fmoe.load("demo", device="cpu", compile=False, state_dtype=state_dtype)
    assert measure_caches(model).count(rows, cache_slots(tokens)) == bytes_of(model, rows, tokens)


@pytest.fixture
def limited(demo, monkeypatch):
    """Leave so many bytes free; a chunk's mask is taken from them."""

    def limit(free):
        monkeypatch.setattr(cache_size, "available_bytes", lambda: free)
        return free

    return limit


def test_free_memory_is_what_the_machine_tells(demo, limited):
    limited(12345)
    assert free_bytes(torch.device("cpu")) == 12345
    assert find_room(demo, 100).free == 12345 - 100 * 100 * 5
    limited(None)
    assert find_room(demo, 100).free is None
    check_room(demo, demo.eager, 10**9, 4096)


def test_a_batch_that_is_only_kept_counts_as_free(demo, limited):
    class Kept:
        state = new_state(demo, 2, 100)

    limited(0)
    model = replace(demo, shelf=fmoe.capture.Shelf())
    model.shelf.put(Kept)
    assert find_room(model, 1).free == bytes_of(demo, 2, 100) - 5
    assert model.shelf.peek() is Kept


def test_the_largest_that_fits_fits_and_no_more(demo):
    size = measure_caches(demo)
    for free in (3 * MIB, 7 * MIB + 1, 20 * MIB):
        room = Room(size, free)
        for rows in (1, 2, 5):
            tokens = room.most_tokens(rows)
            assert tokens == 0 or room.fits(rows, cache_slots(tokens))
            assert not room.fits(rows, cache_slots(tokens + 1))
        for tokens in (1, 500):
            rows = room.most_rows(cache_slots(tokens))
            assert room.fits(rows, cache_slots(tokens))
            assert not room.fits(rows + 1, cache_slots(tokens))


def test_caches_without_slots_or_rows_count_too():
    assert Room(CacheSize(row_bytes=10, slot_bytes=0), 35).most_rows(64) == 3
    assert Room(CacheSize(row_bytes=0, slot_bytes=1), 0).most_tokens(1) == 0
    assert Room(CacheSize(row_bytes=100, slot_bytes=1), 50).most_tokens(1) == 0


def test_a_batch_has_room_for_its_capacity(demo):
    plain = replace(demo.eager, masked=False)
    assert [batch_capacity(demo.eager, n) for n in (1, 513)] == [1, 513]
    assert [batch_capacity(plain, n) for n in (1, 512, 513)] == [512, 512, 1024]


def test_the_message_says_what_would_fit(demo, limited):
    mask = 2048 * 4000 * 5
    limited(mask + measure_caches(demo).count(3, cache_slots(4000)))
    with pytest.raises(ValueError) as caught:
        check_room(demo, demo.eager, 8, 4000)
    size = measure_caches(demo)
    longest = Room(size, size.count(3, cache_slots(4000))).most_tokens(8)
    needed, free = size.count(8, cache_slots(4000)) / MIB, size.count(3, cache_slots(4000)) / MIB
    assert str(caught.value) == (
        f"the caches of 8 sequences of 4000 tokens (prompt and max_new_tokens) need {needed:.2f} MiB, and {free:.2f} "
        f"MiB are free for them on cpu; 8 sequences of up to {longest} tokens or 3 sequences of 4000 tokens would fit: "
        "shorten one of them, or run fewer prompts together"
    )
    check_room(demo, demo.eager, 3, 4000)
    check_room(demo, demo.eager, 8, longest)


def test_the_message_says_where_nothing_fits(demo, limited):
    limited(1000)
    with pytest.raises(ValueError, match=r"the caches of 1 sequence of 100 .* and 0 B are free .*; nothing would fit:"):
        check_room(demo, demo.eager, 1, 100)


@pytest.mark.parametrize("given", [None, 2, 3])
def test_batches_shrink_to_what_fits_unless_their_size_was_given(demo, limited, given):
    limited(500 * 500 * 5 + measure_caches(demo).count(2, cache_slots(500)))
    lengths = [100, 500, 500, 90]

    def choose():
        return choose_batch_size(demo, demo.eager, lengths, batch_size=given, usual=16)

    if given == 3:
        with pytest.raises(ValueError, match=r"3 sequences of 500 tokens .* or 2 sequences of 500 tokens would fit"):
            choose()
    else:
        assert choose() == 2


def test_batches_that_fit_stay(demo, limited):
    limited(500 * 500 * 5 + measure_caches(demo).count(2, cache_slots(500)))
    # the long one stands alone in its batch
    assert choose_batch_size(demo, demo.eager, [64, 64, 500], batch_size=2, usual=16) == 2
    assert choose_batch_size(demo, demo.eager, [], batch_size=None, usual=16) == 16
    limited(10**12)
    assert choose_batch_size(demo, demo.eager, [500] * 99, batch_size=None, usual=16) == 16
    assert choose_batch_size(demo, demo.eager, [500] * 99, batch_size=64, usual=16) == 64


def test_nothing_is_allocated_where_nothing_fits(demo, limited, monkeypatch):
    limited(1000)

    def fail(*arguments, **options):
        raise AssertionError("caches were made")

    monkeypatch.setattr(generation, "decode_batch", fail)
    monkeypatch.setattr("fmoe.prefilling.new_state", fail)
    for call in (fmoe.generate, fmoe.stream, fmoe.stream_tokens):
        with pytest.raises(ValueError, match=r"the caches of 1 sequence of 5 tokens .* nothing would fit"):
            call(demo, [1, 2], max_new_tokens=3)
    with pytest.raises(ValueError, match="the caches of 1 sequence of 2 tokens"):
        fmoe.prefill(demo, [1, 2])


def test_generate_runs_fewer_together_where_memory_is_short(demo, limited, monkeypatch):
    limited(8 * 8 * 5 + measure_caches(demo).count(2, cache_slots(8)))
    sizes, plain = [], generation.decode_batch

    def watch(model, steps, prompts, *arguments, **options):
        sizes.append(len(prompts))
        return plain(model, steps, prompts, *arguments, **options)

    monkeypatch.setattr(generation, "decode_batch", watch)
    done = fmoe.generate(demo, [[5, 6], [7, 8], [9], [4]], max_new_tokens=6)
    assert sizes == [2, 2]
    assert all(len(completion.token_ids) == 6 for completion in done)


def test_a_context_of_262144_is_sized_by_its_keys():
    """A published config at its whole context: the numbers of one sequence, without weights."""
    meta = torch.device("meta")
    raw = {
        "model_type": "qwen3_next", "hidden_size": 2048, "vocab_size": 151936, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "intermediate_size": 5120, "max_position_embeddings": 262144,
    }  # fmt: skip
    family = fmoe.architectures.find_architecture(raw)

    class Model:
        architecture, config, dtype, device = family, family.parse_config(raw), torch.bfloat16, meta

    size = measure_caches(Model)
    assert size.slot_bytes == 12 * 2 * 2 * 256 * 2  # full-attention layers, keys and values, heads, channels, bytes
    assert size.row_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert size.count(1, cache_slots(262144)) < 7 * 10**9
    steps = fmoe.load("demo", device="cpu").eager
    assert batch_capacity(replace(steps, masked=False), 262144) == 262144
