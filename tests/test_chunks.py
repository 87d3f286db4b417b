"""How prompts are cut on a GPU, what a chunk takes, and that chunks without masks change nothing."""

from dataclasses import replace

import pytest
import torch

import fmoe
from fmoe import chunks, decoding, speculation
from fmoe.chunks import CHUNKS, PREFILL_CHUNK, attends_causally, choose_chunk, chunk_bytes, fit_chunk, token_bytes
from fmoe.decoding import new_state, prefill
from fmoe.functional.attention import Placement
from fmoe.functional.cache import KVCache


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


def draw_ids(count, seed=0):
    return torch.randint(1, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_cpu_keeps_its_chunk(demo):
    assert choose_chunk(demo) == PREFILL_CHUNK
    assert not attends_causally(demo)
    assert chunk_bytes(demo, 5000) == PREFILL_CHUNK * 5000 * 5


def test_which_models_attend_without_a_mask(demo):
    model = replace(demo, device=torch.device("cuda"))
    assert attends_causally(model)
    windowed = replace(demo.config, decoder=replace(demo.config.decoder, window=7))
    assert not attends_causally(replace(model, config=windowed))
    assert not attends_causally(replace(model, config=replace(demo.config, attention=object())))


@pytest.mark.parametrize(
    ("row", "total", "masked", "chunk"),
    [
        (200_000, 150 * 10**9, False, 16384),
        (200_000, 150 * 10**9, True, 4096),
        (200_000, 50 * 10**9, False, 8192),
        (200_000, 24 * 10**9, False, 4096),
        (200_000, 8 * 10**9, False, PREFILL_CHUNK),
        (1, 16 * 16384, False, 16384),
        (1, 16 * 16384 - 1, False, 8192),
    ],
)
def test_chunks_are_a_small_part_of_the_memory(row, total, masked, chunk):
    assert fit_chunk(row, total, masked=masked) == chunk
    assert all(size % PREFILL_CHUNK == 0 for size in CHUNKS)


def test_a_chunk_counts_what_its_products_give(demo, monkeypatch):
    """One layer's rows, by the names of its sizes."""
    config = demo.config
    attention, router, hidden = config.attention, config.router, config.decoder.hidden_size
    delta = sum(config.delta.split_sizes) + hidden + config.delta.conv_size
    mixer = max(sum(attention.split_sizes) + hidden + attention.heads + attention.kv_heads, delta)
    shared = demo.params.layers[0].mlp.w_gate_up_EPD.shape[0] - router.num_experts
    experts = (router.top_k + shared) * (2 * config.expert_size + hidden) + router.num_experts + 1
    own = demo.params.layers[0].mlp.shared
    beside = 0 if own is None else sum(w.shape[0] for w in own if w is not None and w.dim() > 1)
    expected = 2 * (mixer + experts + beside + 4 * hidden) * demo.dtype.itemsize
    assert expected <= token_bytes(demo) <= 1.05 * expected

    monkeypatch.setattr(chunks, "choose_chunk", lambda model: 4096)
    model = replace(demo, device=torch.device("cuda"))
    assert chunk_bytes(model, 10**5) == 4096 * token_bytes(demo)
    assert chunk_bytes(model, 10) == 10 * token_bytes(demo)


def run_prompt(model, ids, chunk, steps=None):
    state = new_state(model, 1, len(ids))
    with torch.inference_mode():
        return prefill(model, steps or model.eager, [ids], state, chunk=chunk), state


@pytest.mark.parametrize("chunk", [64, 70, 200])
def test_chunks_without_masks_give_what_masks_give(demo, monkeypatch, chunk):
    ids = draw_ids(131)
    expected, whole = run_prompt(demo, ids, chunk)
    placed = []
    monkeypatch.setattr(decoding, "attends_causally", lambda model: True)
    plain = decoding.see_all

    def watch(placement: Placement, visible: int) -> Placement:
        placed.append(visible)
        return plain(placement, visible)

    monkeypatch.setattr(decoding, "see_all", watch)

    logits, state = run_prompt(demo, ids, chunk)

    assert placed == [min(end, 131) for end in range(chunk, 131 + chunk, chunk)]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for cache, other in zip(state.caches, whole.caches, strict=True):
        if isinstance(cache, KVCache):
            torch.testing.assert_close(cache.k_BJMC[:, :, :131], other.k_BJMC[:, :, :131], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("speculate", [0, 2])
def test_texts_stay_the_same(demo, monkeypatch, speculate):
    prompts = [draw_ids(70), draw_ids(70, seed=1), draw_ids(3)]
    options = {"max_new_tokens": 6, "temperature": 0.0, "speculate": speculate}
    expected = [row.token_ids for row in fmoe.generate(demo, prompts, **options)]
    for module in (decoding, speculation):
        monkeypatch.setattr(module, "attends_causally", lambda model: True)
    model = replace(demo, shelf=fmoe.capture.Shelf())
    assert [row.token_ids for row in fmoe.generate(model, prompts, **options)] == expected


def test_compiled_layers_take_chunks_of_any_size_and_place(monkeypatch):
    """Nothing is traced anew behind the first prompt, which has a first chunk and a later one."""
    monkeypatch.setattr(decoding, "attends_causally", lambda model: True)
    model = fmoe.load("demo", device="cpu", compile=True)
    traced = []
    for tokens, chunk in ((150, 64), (131, 70), (40, 64), (99, 33)):
        ids = draw_ids(tokens)
        logits, _ = run_prompt(model, ids, chunk, model.graphs)
        expected, _ = run_prompt(model, ids, chunk)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        traced.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert traced == traced[:1] * 4
