"""The text side of a checkpoint: token ids from prompts and chat messages, text from token ids, end-of-text ids."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Text:
    """A checkpoint's tokenizer with what its side files say about it.

    Args:
        tokenizer: reads and writes token ids.
        vocab_size: one more than the largest id; the model's own vocabulary may be padded beyond it.
        chat_template: jinja source, None where the checkpoint has none.
        special_tokens: (name, content) pairs, such as ("eos_token", "<|im_end|>").
        special_ids: the ids that are never shown.
        prefix_ids: what the tokenizer's configuration puts before a prompt and its post-processor does not.
        byte_fallback: the decoder joins tokens such as <0xE2> to characters.
    """

    tokenizer: Tokenizer
    vocab_size: int
    chat_template: str | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()
    special_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    byte_fallback: bool = False

    @property
    def bos_token(self) -> str | None:
        """The string that opens a text, None where there is none."""
        return dict(self.special_tokens).get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The string that ends a text or turn, None where there is none."""
        return dict(self.special_tokens).get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The string that fills finished rows, None where there is none."""
        return dict(self.special_tokens).get("pad_token")


def load_text(folder: Path, /) -> Text | None:
    """Read the tokenizer and chat template of a checkpoint folder; None where it has no tokenizer.json.

    The chat template is chat_template.jinja, else tokenizer_config.json["chat_template"] (a string, or a list of
    named ones of which "default" is taken), else chat_template.json. Truncation and padding that tokenizer.json
    may ask for are switched off: a prompt is never cut silently.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself, whatever is wrong
        raise ValueError(
            f"{path} is not a tokenizer that the tokenizers library reads ({error}); fetch the file again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_object(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_object(folder / "special_tokens_map.json") | config)
    named_ids = (tokenizer.token_to_id(content) for _, content in special_tokens)
    flagged_ids = (i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    decoder = tokenizer.decoder
    return Text(
        tokenizer=tokenizer,
        vocab_size=max(tokenizer.get_vocab().values(), default=-1) + 1,
        chat_template=_load_chat_template(folder, config),
        special_tokens=special_tokens,
        special_ids=frozenset(i for i in (*named_ids, *flagged_ids) if i is not None),
        prefix_ids=_prefix_ids(tokenizer, config, dict(special_tokens).get("bos_token")),
        # told by behaviour, since a decoder may nest this step at any depth
        byte_fallback=decoder is not None and decoder.decode(["<0x41>"]) == "A",
    )


def encode(text: Text, prompt: str, /) -> list[int]:
    """Turn a prompt into token ids, with the special tokens that the checkpoint puts around a text."""
    return [*text.prefix_ids, *_encode(text, prompt, add_special_tokens=True)]


def decode(text: Text, ids: Sequence[int], /) -> str:
    """Turn token ids into text; special tokens and ids that the tokenizer lacks give nothing, spaces stay as they are.

    Bytes that are not UTF-8 give U+FFFD, one per broken character, and leave the characters around them alone: the
    text of a sequence always begins with the text of its beginning, a last unfinished character aside.
    """
    shown = [i for i in ids if i not in text.special_ids]
    if any(i < 0 for i in shown):
        raise ValueError(f"token ids must be 0 or more, got {min(shown)}; remove padding before decoding")
    if not text.byte_fallback:
        return text.tokenizer.decode(shown, skip_special_tokens=False)
    assert text.tokenizer.decoder is not None
    tokens = [token for i in shown if (token := text.tokenizer.id_to_token(i)) is not None]
    decoded: str = text.tokenizer.decoder.decode(list(_separate_characters(tokens)))
    return decoded


def render_chat(
    text: Text,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render chat messages with the checkpoint's chat template, in jinja's immutable sandbox.

    Args:
        messages: mappings with role and content; content is a string or a list of parts, None beside tool_calls.
        tools: JSON schemas of the functions that the model may call.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: further names that the template reads, such as enable_thinking.

    Returns:
        The prompt as text, its special tokens written out.
    """
    if text.chat_template is None:
        raise ValueError(
            "this checkpoint has no (default) chat template, so messages cannot be rendered; pass a string prompt"
        )
    _check_messages(messages)
    names = {
        **dict(text.special_tokens),
        **(variables or {}),
        "messages": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return _render(text.chat_template, names)


def encode_chat(
    text: Text,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Turn chat messages into token ids; the template writes every special token, so none is added again."""
    rendered = render_chat(
        text, messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
    )
    return _encode(text, rendered, add_special_tokens=False)


def eos_token_ids(
    generation_config: Mapping[str, Any] | None, config: Mapping[str, Any], text: Text | None, /
) -> tuple[int, ...]:
    """Collect the ids that end a sequence, in the order in which they are found, each once.

    generation_config.json's eos_token_id overrides config.json's, which overrides the one of its nested text_config;
    absent and null are silence, an empty list is an answer. The tokenizer's own eos_token is always added: some chat
    releases list only <|endoftext|> in generation_config.json although turns end with the tokenizer's <|im_end|>,
    and no model goes on after the token that its tokenizer calls the end. An eos_token without an id adds nothing.
    """
    sources = (
        ("generation_config.json", generation_config),
        ("config.json", config),
        ("config.json's text_config", config.get("text_config")),
    )
    found: tuple[int, ...] = ()
    for name, source in sources:
        value = source.get("eos_token_id") if isinstance(source, Mapping) else None
        if value is not None:
            found = _checked_eos(name, value)
            break
    own = None
    if text is not None and text.eos_token is not None:
        own = text.tokenizer.token_to_id(text.eos_token)
    return tuple(dict.fromkeys(found if own is None else (*found, own)))


def _checked_eos(name: str, value: object) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(
                f"eos_token_id in {name} must be a token id or a list of token ids (0 or more), got {value!r}; "
                "correct the file"
            )
    return ids


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON in UTF-8 ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}; fetch the file again")
    return value


def _special_tokens(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Keep the ``*_token`` entries, written as a string or as an object with content."""
    found = []
    for name, value in config.items():
        if not name.endswith("_token") or value is None or isinstance(value, bool):
            continue  # add_bos_token and its like are switches
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str):
            raise ValueError(
                f"{name} in tokenizer_config.json or special_tokens_map.json must be a string or an object with "
                f"content, got {value!r}; correct the file"
            )
        found.append((name, content))
    return tuple(found)


def _prefix_ids(tokenizer: Tokenizer, config: Mapping[str, Any], bos_token: str | None) -> tuple[int, ...]:
    if not config.get("add_bos_token") or bos_token is None:
        return ()
    bos_id = tokenizer.token_to_id(bos_token)
    if bos_id is None:
        raise ValueError(
            f"tokenizer_config.json asks for bos_token {bos_token!r} before each text, but tokenizer.json has no such "
            "token; set add_bos_token to false or correct bos_token"
        )
    return () if tokenizer.encode("").ids[:1] == [bos_id] else (bos_id,)


def _load_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}); fetch the file again") from error
    template = _default_template("tokenizer_config.json", config.get("chat_template"))
    if template is not None:
        return template
    old = _read_object(folder / "chat_template.json")
    return _default_template("chat_template.json", old.get("chat_template"))


def _default_template(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(e, dict) and isinstance(e.get("template"), str) for e in value):
        return {entry.get("name"): entry["template"] for entry in value}.get("default")
    raise ValueError(
        f"chat_template in {name} must be a string or a list of objects with name and template, got "
        f"{type(value).__name__} {value!r:.80}; correct the file or add chat_template.jinja"
    )


def _encode(text: Text, prompt: str, *, add_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        raise ValueError(
            f"a prompt to encode must be a string, got {type(prompt).__name__}; token ids need no encoding"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt holds half of a surrogate pair at character {error.start}, which is no text; remove it"
        ) from error
    return text.tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids


def _separate_characters(tokens: Iterable[str]) -> Iterable[str]:
    """Part the characters of each run of byte tokens by empty tokens.

    The decoder gives U+FFFD for a whole run when any byte of it is broken or still to come, which would take back
    characters that were complete, and shown. It reads each run of byte tokens up to a token that is none.
    """
    run = bytearray()
    for token in (*tokens, ""):
        byte = _byte_of(token)
        if byte is not None:
            run.append(byte)
            continue
        for char in run.decode("utf-8", errors="replace"):
            yield from (_REPLACEMENT,) if char == _REPLACEMENT else (*(f"<0x{b:02X}>" for b in char.encode()), "")
        run.clear()
        yield token


def _byte_of(token: str) -> int | None:
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _render(template: str, names: Mapping[str, Any]) -> str:
    try:
        return _compile_template(template).render(names)
    except TemplateError as error:
        raise ValueError(f"the checkpoint's chat template does not take these messages: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint's chat template failed on these messages with {type(error).__name__}: {error}; "
            "check the type of each content"
        ) from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"messages must be a non-empty list of mappings with role and content, got {messages!r:.80}; "
            'write [{"role": "user", "content": "..."}]'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a mapping with role and content, got {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ValueError(f"messages[{i}] needs a role that is a string, such as 'user', got {role!r}")
        if not isinstance(content, str | list | tuple) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"messages[{i}] needs a content that is a string or a list of parts (None only beside tool_calls), "
                f"got {content!r}"
            )


class _GenerationTag(Extension):
    """Let ``{% generation %}`` ... ``{% endgeneration %}`` pass: it marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 names and types it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Give the tag's body in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML and non-ASCII characters and sorts the keys: other tokens than in training
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
