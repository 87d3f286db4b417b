"""fmoe.prefill and what goes on from a state: bit for bit what one run gives, at any border, as often as wanted."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fmoe
from fmoe import decoding, prefilling
from fmoe.functional.cache import KVCache, select_slots

V = 4096
TEXT = "In the beginning God created the heaven and the earth."


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


def draw_ids(count, seed=0):
    return torch.randint(3, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def tensors_of(state):
    """List what a state holds, without the slots behind its tokens."""
    parts = [part for cache in state.caches for part in select_slots(cache, len(state))]
    return [*parts, state.logits_V]


def assert_equal_states(one, other):
    assert one.token_ids == other.token_ids
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


class Counter:
    """Count the tokens that run through a model's layers, those of prompts and those of decode steps."""

    def __init__(self, model):
        first = model.config.decoder.layer_kinds[0]
        layer, self.prompt, self.steps = model.eager.layers[first], 0, 0
        count = model.config.decoder.layer_kinds.count(first)

        def counted(stream, *arguments):
            batch, tokens = stream.total_BTD.shape[:2]
            self.prompt += batch * tokens * (tokens > 1) / count
            self.steps += batch * (tokens == 1) / count
            return layer(stream, *arguments)

        self.model = replace(model, eager=replace(model.eager, layers={**model.eager.layers, first: counted}))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_going_on_from_a_state_is_the_prompt_itself(demo, length):
    ids = draw_ids(length)
    options = {"max_new_tokens": 9, "logprobs": 2}
    expected = fmoe.generate(demo, ids, **options)
    state = fmoe.prefill(demo, ids)
    assert fmoe.generate(demo, [], state=state, **options) == []
    assert fmoe.generate(demo, [[]], state=state, **options) == expected
    assert fmoe.generate(demo, state=state, **options) == expected
    assert list(fmoe.stream_tokens(demo, state=state, **options)) == list(fmoe.stream_tokens(demo, ids, **options))
    assert "".join(fmoe.stream(demo, state=state, max_new_tokens=9)) == expected[0].text


@pytest.mark.parametrize("border", [16, 32, 48])
def test_parts_of_whole_chunks_are_one_run_bit_for_bit(demo, border, monkeypatch):
    monkeypatch.setitem(decoding.prefill.__kwdefaults__, "chunk", 16)
    ids = draw_ids(57)
    whole = fmoe.prefill(demo, ids)
    assert_equal_states(fmoe.prefill(demo, ids[border:], state=fmoe.prefill(demo, ids[:border])), whole)


@pytest.mark.parametrize("border", [1, 3, 4, 63, 64, 65, 128, 199])
def test_any_other_border_changes_rounding_alone(demo, border):
    ids = draw_ids(200)
    whole = fmoe.prefill(demo, ids)
    parts = fmoe.prefill(demo, ids[border:], state=fmoe.prefill(demo, ids[:border]))
    assert parts.token_ids == whole.token_ids
    for one, other in zip(tensors_of(parts), tensors_of(whole), strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_parts_run_twice_are_equal_bit_for_bit(demo):
    ids = draw_ids(90)
    one, other = (fmoe.prefill(demo, ids[41:], state=fmoe.prefill(demo, ids[:41])) for _ in range(2))
    assert_equal_states(one, other)


def test_a_fork_gives_what_each_continuation_gives_alone_and_pays_once(demo):
    counter = Counter(demo)
    ids, ends = draw_ids(50), [[], draw_ids(7, 1), draw_ids(7, 2), draw_ids(3, 3), []]
    options = {"max_new_tokens": 5, "temperature": 1.0, "logprobs": 0}
    state = fmoe.prefill(counter.model, ids)

    done = fmoe.generate(counter.model, ends, state=state, seed=5, **options)

    assert round(counter.prompt, 6) == 50 + 7 + 7 + 3
    for row, (end, completion) in enumerate(zip(ends, done, strict=True)):
        [alone] = fmoe.generate(demo, [ids + end], seed=5 + row, **options)
        assert completion.prompt_token_ids == (*ids, *end)
        assert completion.token_ids == alone.token_ids
        found = [entry.logprob for entry in completion.logprobs]
        assert found == pytest.approx([entry.logprob for entry in alone.logprobs], abs=1e-4)


def test_one_state_gives_several_samples(demo):
    state = fmoe.prefill(demo, TEXT)
    done = fmoe.generate(demo, [""] * 4, state=state, temperature=1.0, seed=3, max_new_tokens=6, batch_size=3)
    assert len({completion.token_ids for completion in done}) > 1
    for row, completion in enumerate(done):
        assert [completion] == fmoe.generate(demo, state=state, temperature=1.0, seed=3 + row, max_new_tokens=6)


def test_a_state_is_not_changed(demo):
    state = fmoe.prefill(demo, TEXT)
    before = [tensor.clone() for tensor in (part for cache in state.caches for part in cache)]
    fmoe.generate(demo, ["", " And", draw_ids(80)], state=state, max_new_tokens=20)
    list(fmoe.stream(demo, " And", state=state, max_new_tokens=3))
    fmoe.prefill(demo, draw_ids(70), state=state)
    after = [part for cache in state.caches for part in cache]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_tokens_of_the_state_count_as_seen(demo):
    """A repetition penalty knows them."""
    ids = draw_ids(30)
    ids = [*fmoe.generate(demo, ids, max_new_tokens=12)[0].token_ids, *ids]
    options = {"max_new_tokens": 12, "repetition_penalty": 1.8}
    expected = fmoe.generate(demo, ids, **options)
    assert fmoe.generate(demo, state=fmoe.prefill(demo, ids), **options) == expected
    assert fmoe.generate(demo, ids, max_new_tokens=12) != expected


def test_a_text_goes_on_without_what_opens_one(demo):
    class Opened:
        prefix_ids = (7,)

    text = replace(demo.text, prefix_ids=Opened.prefix_ids)
    model = replace(demo, text=text)
    assert fmoe.prefill(model, TEXT).token_ids[:1] == (7,)
    state = fmoe.prefill(model, TEXT)
    longer = fmoe.prefill(model, " And", state=state)
    assert longer.token_ids == (*state.token_ids, *demo.text.tokenizer.encode(" And").ids)
    assert fmoe.prefill(model, "", state=state) is state


def test_a_chat_is_given_whole(demo):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    model = replace(demo, text=replace(demo.text, chat_template=template))
    first = [{"role": "user", "content": "Who art thou?"}]
    state = fmoe.prefill(model, first)
    chat = [*first, {"role": "assistant", "content": "I am"}, {"role": "user", "content": "What?"}]
    [completion] = fmoe.generate(model, [chat], state=state, max_new_tokens=4)
    assert completion.prompt_token_ids == fmoe.prefill(model, chat).token_ids
    with pytest.raises(ValueError, match=r"prompt 0 is a chat that differs from its state at token 1 of \d+; give the"):
        fmoe.generate(model, [[{"role": "user", "content": "So"}]], state=state)


def test_a_model_without_a_tokenizer_goes_on_too(demo):
    model = replace(demo, text=None)
    state = fmoe.prefill(model, [5, 6, 7])
    [expected] = fmoe.generate(model, [5, 6, 7], max_new_tokens=3)
    assert fmoe.generate(model, state=state, max_new_tokens=3) == [expected]
    with pytest.raises(ValueError, match=r"prompt 0 is a string, but .* has no tokenizer.json; give a list of token"):
        fmoe.generate(model, "x", state=state)


def test_the_context_counts_the_tokens_of_the_state(demo):
    state = fmoe.prefill(demo, [5] * 4000)
    with pytest.raises(
        ValueError,
        match=r"prompt 0 with the 4000 tokens of its state has 4002 tokens and max_new_tokens=95; together they pass",
    ):
        fmoe.generate(demo, [[6, 7]], state=state, max_new_tokens=95)
    with pytest.raises(ValueError, match=r"the prompt with the 4000 tokens of its state has 4097 tokens, more than"):
        fmoe.prefill(demo, [6] * 97, state=state)


@pytest.mark.parametrize("bad", ["state", (1, 2), 0])
def test_what_is_no_state_is_refused(demo, bad):
    for call in (fmoe.generate, fmoe.prefill, fmoe.stream, fmoe.stream_tokens):
        with pytest.raises(ValueError, match=r"state must come from fmoe.prefill or fmoe.load_state, got \w+"):
            call(demo, "x", state=bad)


def test_prefill_checks_what_it_is_given(demo):
    with pytest.raises(ValueError, match=r"write fmoe.prefill\(fmoe.load\('demo'\)"):
        fmoe.prefill("demo", "x")
    with pytest.raises(ValueError, match="the prompt is empty; give at least one token"):
        fmoe.prefill(demo, "")
    with pytest.raises(ValueError, match=r"must be in 0..4095"):
        fmoe.prefill(demo, [5000])


def test_prefill_names_the_layer_of_nan(demo):
    bad_VD = demo.params.embed_VD.clone()
    bad_VD[9] = torch.nan
    model = replace(demo, params=demo.params._replace(embed_VD=nn.Parameter(bad_VD, requires_grad=False)))
    with pytest.raises(RuntimeError, match="first shows in the embedding"):
        fmoe.prefill(model, [5, 9, 6])
    assert prefilling.prefill is fmoe.prefill


def test_what_was_decoded_is_kept_with_the_tokens_that_were_seen(demo):
    """``keep`` of decode_batch: the state after a prompt and all its tokens but the newest."""
    ids, kept = draw_ids(20), []
    with torch.inference_mode():
        options = fmoe.generation.resolve(
            demo, max_new_tokens=9, temperature=0.0, top_p=None, top_k=None, min_p=None, repetition_penalty=None,
            seed=0, stop=None, ignore_eos=True, logprobs=None,
        )  # fmt: skip
        turns = decoding.decode_batch(
            demo, demo.eager, [ids], options, keep=lambda rows, seen: kept.append((rows.lengths_B.tolist(), rows, seen))
        )
        given = [next(turns)[0].id for _ in range(5)]
        assert not kept
        turns.close()
    [(_, rows, seen)] = kept
    assert seen == [[*ids, *given[:4]]]
    whole = fmoe.prefill(demo, seen[0])
    for cache, expected in zip(rows.caches, whole.caches, strict=True):
        count = 24 if isinstance(cache, KVCache) else 1
        for part, other in zip(select_slots(cache, count), select_slots(expected, count), strict=True):
            assert (part - other).abs().max() <= 1e-4 * other.abs().max()


TINY = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "dtype": "float32", "head_dim": 8,
    "moe_intermediate_size": 20, "intermediate_size": 40,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9},
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 3},
    "deepseek_v2": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 12, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_have_states_too(family, tmp_path):
    """A sliding window, and latent attention, over caches that begin in a file."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **FAMILIES[family], "model_type": family}))
    model = fmoe.load(tmp_path, device="cpu", weights="random", compile=False)
    ids = [i % 97 for i in draw_ids(90)]
    state = fmoe.prefill(model, ids[:70])
    fmoe.save_state(state, tmp_path / "state")
    state = fmoe.load_state(model, tmp_path / "state")
    options = {"max_new_tokens": 6, "logprobs": 1}
    assert fmoe.generate(model, state=state, **options) == fmoe.generate(model, ids[:70], **options)
    [found], [expected] = fmoe.generate(model, [ids[70:]], state=state, **options), fmoe.generate(model, ids, **options)
    assert found.token_ids == expected.token_ids
    logprobs = [[entry.logprob for entry in done.logprobs] for done in (found, expected)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
