"""States as values: what is in a file, what a file may hold, and whose state is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fmoe
from fmoe import states
from fmoe.fingerprint import hash_weights
from fmoe.functional.cache import KVCache
from fmoe.states import check_state, keep_row, share_slots

IDS = list(range(10, 80))


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture(scope="module")
def state(demo):
    return fmoe.prefill(demo, IDS)


@pytest.fixture(scope="module")
def half():
    return fmoe.load("demo", device="cpu", compile=False, dtype="bfloat16")


def other_weights(model):
    norm_D = nn.Parameter(model.params.norm_D * 1.01, requires_grad=False)
    return replace(model, params=model.params._replace(norm_D=norm_D))


def test_a_file_gives_the_state_back_bit_for_bit(demo, state, tmp_path):
    file = tmp_path / "a.safetensors"
    fmoe.save_state(state, file)
    loaded = fmoe.load_state(demo, str(file))
    assert loaded.token_ids == state.token_ids
    assert torch.equal(loaded.logits_V, state.logits_V)
    for cache, expected in zip(loaded.caches, state.caches, strict=True):
        for part, other in zip(cache, expected, strict=True):
            if isinstance(cache, KVCache):
                part, other = part[:, :, : len(IDS)], other[:, :, : len(IDS)]
            assert torch.equal(part, other)
    options = {"max_new_tokens": 9, "logprobs": 1}
    assert fmoe.generate(demo, state=loaded, **options) == fmoe.generate(demo, IDS, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_holds_the_tokens_and_no_empty_slots(state, tmp_path):
    file = tmp_path / "a.safetensors"
    fmoe.save_state(state, file)
    tensors = load_file(file)
    assert tensors["token_ids"].tolist() == IDS
    assert tensors["layers.3.k_BJMC"].shape[2] == len(IDS)
    assert tensors["layers.0.state_BHKV"].dtype == torch.float32


def test_bfloat16_is_written_as_it_is(half, tmp_path):
    state = fmoe.prefill(half, IDS)
    fmoe.save_state(state, tmp_path / "a")
    loaded = fmoe.load_state(half, tmp_path / "a")
    assert loaded.caches[3].k_BJMC.dtype == torch.bfloat16
    options = {"max_new_tokens": 5, "logprobs": 1}
    assert fmoe.generate(half, state=loaded, **options) == fmoe.generate(half, state=state, **options)


def test_a_file_is_replaced_whole_or_stays(state, tmp_path, monkeypatch):
    file = tmp_path / "a"
    fmoe.save_state(state, file)
    before = file.read_bytes()

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(states, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        fmoe.save_state(state, file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_weights,
            r"the state in .*a is of a model of other weights, or with kernels that lay them out in another",
        ),
        (
            lambda model: replace(model, config=replace(model.config, decoder=replace(model.config.decoder, eps=1e-5))),
            r"is of a model of another config; load that model, or make the state anew with fmoe.prefill",
        ),
    ],
    ids=["weights", "config"],
)
def test_a_state_of_another_model_is_refused(demo, state, tmp_path, change, message):
    fmoe.save_state(state, tmp_path / "a")
    other = change(demo)
    with pytest.raises(ValueError, match=message):
        fmoe.load_state(other, tmp_path / "a")
    with pytest.raises(ValueError, match=message.replace("the state in .*a", "state")):
        fmoe.generate(other, state=state)


def test_a_state_of_another_dtype_is_refused(half, state, tmp_path):
    fmoe.save_state(state, tmp_path / "a")
    with pytest.raises(ValueError, match="is of a model in float32, and this one is in bfloat16"):
        fmoe.load_state(half, tmp_path / "a")


def test_a_state_of_another_state_dtype_is_refused(demo, state):
    model = fmoe.load("demo", device="cpu", compile=False, state_dtype="bfloat16")
    with pytest.raises(
        ValueError, match="a model whose recurrent states are in float32, and this one's are in bfloat16"
    ):
        fmoe.prefill(model, [5], state=state)


def test_fused_and_separate_shared_experts_share_states(demo, state):
    separate = fmoe.load("demo", device="cpu", compile=False, shared_experts="separate")
    check_state(separate, state)
    options = {"max_new_tokens": 5}
    assert fmoe.generate(separate, state=state, **options) == fmoe.generate(demo, state=state, **options)


def test_a_state_elsewhere_is_refused(demo, state):
    moved = replace(state, logits_V=state.logits_V.to("meta"))
    with pytest.raises(
        ValueError, match=r"state lies on meta and the model on cpu; fmoe.save_state and fmoe.load_state"
    ):
        check_state(demo, moved)


def rewrite(source, target, change):
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(source)
    change(tensors, metadata)
    save_file(tensors, target, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: metadata.pop("format"), "has the format 'none', expected 'fmoe state 1'"),
        (lambda tensors, metadata: metadata.update(format="fmoe state 9"), "has the format 'fmoe state 9', expected"),
        (lambda tensors, metadata: metadata.pop("fingerprint"), "has no fingerprint of a model"),
        (lambda tensors, metadata: metadata.update(fingerprint="{"), "has no fingerprint of a model"),
        (lambda tensors, metadata: metadata.update(fingerprint='{"a": 1}'), "has no fingerprint of a model"),
        (
            lambda tensors, metadata: tensors.pop("layers.2.window_BWN"),
            r"lacks a part of a state .*layers.2.window_BWN",
        ),
        (
            lambda tensors, metadata: tensors.update({"layers.3.k_BJMC": torch.zeros(1, 1, 1, 1, 7)}),
            "lacks a part of a state or has one of another size",
        ),
        (
            lambda tensors, metadata: tensors.update(token_ids=torch.tensor([5000] * len(IDS))),
            r"has token id 5000; ids must be in 0..4095",
        ),
    ],
    ids=["no-format", "format", "no-fingerprint", "no-json", "fields", "part", "size", "ids"],
)
def test_a_damaged_file_is_refused(demo, state, tmp_path, change, message):
    fmoe.save_state(state, tmp_path / "a")
    rewrite(tmp_path / "a", tmp_path / "b", change)
    with pytest.raises(ValueError, match=message):
        fmoe.load_state(demo, tmp_path / "b")


def test_a_file_that_is_cut_or_of_another_kind_is_refused(demo, state, tmp_path):
    fmoe.save_state(state, tmp_path / "a")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-9])
    (tmp_path / "b").write_text(json.dumps({"no": "state"}))
    for name in "ab":
        with pytest.raises(ValueError, match=rf"{name} cannot be read \(.*\): it is no file of fmoe.save_state"):
            fmoe.load_state(demo, tmp_path / name)


def test_paths_are_checked(demo, state, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*x with a state; fmoe.save_state writes one"):
        fmoe.load_state(demo, tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"no folder .*x for the state; make it first"):
        fmoe.save_state(state, tmp_path / "x" / "y")
    with pytest.raises(ValueError, match=r"is a folder; name a file in it, such as .*state.safetensors"):
        fmoe.save_state(state, tmp_path)
    with pytest.raises(ValueError, match="path=7 must name the file of a state"):
        fmoe.save_state(state, 7)
    with pytest.raises(ValueError, match=r"state must come from fmoe.prefill, got int"):
        fmoe.save_state(7, tmp_path / "x")
    with pytest.raises(ValueError, match=r"write fmoe.load_state"):
        fmoe.load_state("demo", tmp_path / "x")


def test_a_state_is_short_to_read(state):
    assert len(state) == 70
    assert repr(state) == f"State(70 tokens, {state.nbytes} bytes, float32 on cpu)"
    assert state.nbytes == 4 * 4096 + sum(part.nbytes for cache in state.caches for part in cache)


def test_slots_are_shared_with_a_longer_state(demo, state):
    longer = fmoe.prefill(demo, [5] * 9, state=state)
    shared = share_slots(state, longer)
    for cache, own, theirs in zip(shared.caches, state.caches, longer.caches, strict=True):
        if isinstance(cache, KVCache):
            assert cache.k_BJMC.data_ptr() == theirs.k_BJMC.data_ptr()
            assert torch.equal(cache.k_BJMC[:, :, :70], own.k_BJMC[:, :, :70])
        else:
            assert cache is own
    options = {"max_new_tokens": 5, "logprobs": 1}
    assert fmoe.generate(demo, state=shared, **options) == fmoe.generate(demo, state=state, **options)


def test_a_row_of_a_batch_becomes_a_state(demo):
    with torch.inference_mode():
        rows = fmoe.decoding.new_state(demo, 3, 90)
        for cache in rows.caches:
            for part in cache:
                part.copy_(torch.randn(part.shape))
        kept = keep_row(rows, 1, IDS, torch.zeros(4096), demo)
        for cache, whole in zip(kept.caches, rows.caches, strict=True):
            for part, other in zip(cache, whole, strict=True):
                other = other[1:2, :, : part.shape[2]] if isinstance(cache, KVCache) else other[1:2]
                assert torch.equal(part, other)
                assert part.data_ptr() != other.data_ptr()
    check_state(demo, kept)


def test_weights_hash_sees_each_tensor(demo):
    """Whichever tensor was trained further, the hash differs."""
    found = {hash_weights(demo.params)}
    for layer in (0, 7):
        layers = list(demo.params.layers)
        mixer = layers[layer].mixer
        changed = nn.Parameter(mixer.w_out_DN * 1.001, requires_grad=False) if layer == 0 else None
        mixer = (
            mixer._replace(w_out_DN=changed)
            if layer == 0
            else mixer._replace(**{mixer._fields[0]: nn.Parameter(mixer[0] * 1.001, requires_grad=False)})
        )
        layers[layer] = layers[layer]._replace(mixer=mixer)
        found.add(hash_weights(demo.params._replace(layers=tuple(layers))))
    assert len(found) == 3
    assert hash_weights(fmoe.load("demo", device="cpu").params) in found
