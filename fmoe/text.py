"""The text side of a checkpoint: token ids from prompts, text from token ids, end-of-text ids."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .checkpoint import is_present, read_json, read_text

_REPLACEMENT = "\ufffd"
# where no file tells the vocabulary; ids are 32-bit numbers in the tokenizers library
_MAX_IDS = 2**31


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
    if not is_present(path):
        return None
    with _explained(f"{path} is not a tokenizer that the tokenizers library reads; fetch the file again"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    config = _read_optional(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_optional(folder / "special_tokens_map.json") | config)
    named_ids = (tokenizer.token_to_id(content) for _, content in special_tokens)
    flagged_ids = (i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    with _explained(f"{path} has a decoder that fails; fetch the file again"):
        decoder = tokenizer.decoder
        # told by behaviour, since a decoder may nest this step at any depth
        byte_fallback = decoder is not None and decoder.decode(["<0x41>"]) == "A"
    return Text(
        tokenizer=tokenizer,
        vocab_size=max(tokenizer.get_vocab().values(), default=-1) + 1,
        chat_template=_load_chat_template(folder, config),
        special_tokens=special_tokens,
        special_ids=frozenset(i for i in (*named_ids, *flagged_ids) if i is not None),
        prefix_ids=_prefix_ids(tokenizer, config, dict(special_tokens).get("bos_token")),
        byte_fallback=byte_fallback,
    )


def encode(text: Text, prompt: str, /, *, special_tokens: bool = True) -> list[int]:
    """Turn a prompt into token ids, with the special tokens that the checkpoint puts around a text unless told not to.

    Special tokens that the prompt writes out are read as such either way.
    """
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
    with _explained("tokenizer.json cannot encode the prompt"):
        ids: list[int] = text.tokenizer.encode(prompt, add_special_tokens=special_tokens).ids
    return [*text.prefix_ids, *ids] if special_tokens else ids


def decode(text: Text, ids: Sequence[int], /) -> str:
    """Turn token ids into text; special tokens and ids that the tokenizer lacks give nothing, spaces stay as they are.

    Bytes that are not UTF-8 give U+FFFD, one per broken character, and leave the characters around them alone: the
    text of a sequence always begins with the text of its beginning, a last unfinished character aside.
    """
    shown = [i for i in ids if i not in text.special_ids]
    if any(i < 0 for i in shown):
        raise ValueError(f"token ids must be 0 or more, got {min(shown)}; remove padding before decoding")
    with _explained("tokenizer.json cannot decode the token ids"):
        if not text.byte_fallback:
            return text.tokenizer.decode(shown, skip_special_tokens=False)
        assert text.tokenizer.decoder is not None
        tokens = [token for i in shown if (token := text.tokenizer.id_to_token(i)) is not None]
        decoded: str = text.tokenizer.decoder.decode(list(_separate_characters(tokens)))
    return decoded


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
            found = _checked_eos(name, value, _vocab_size(config))
            break
    own = None
    if text is not None and text.eos_token is not None:
        own = text.tokenizer.token_to_id(text.eos_token)
    return tuple(dict.fromkeys(found if own is None else (*found, own)))


def _checked_eos(name: str, value: object, vocab_size: int | None) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(
                f"eos_token_id in {name} must be a token id or a list of token ids (0 or more), got {value!r:.80}; "
                "correct the file"
            )
        if i >= (vocab_size or _MAX_IDS):
            limit = f"vocab_size={vocab_size}" if vocab_size else str(_MAX_IDS)
            raise ValueError(f"eos_token_id in {name} must be below {limit}, got {i!r:.80}; correct the file")
    return ids


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return what config.json or its text_config says, None where neither says a usable number."""
    nested = config.get("text_config")
    for part in (nested if isinstance(nested, Mapping) else {}, config):
        size = part.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what the tokenizers library raises, Exception itself or a Rust panic, into a ValueError."""
    try:
        yield
    except BaseException as error:
        # a panic is no Exception, and its type cannot be imported
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        what, _, hint = what.partition("; ")
        raise ValueError(f"{what} ({error})" + (f"; {hint}" if hint else "")) from error


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if is_present(path) else {}


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
    with _explained("tokenizer.json cannot encode an empty text"):
        first = tokenizer.encode("").ids[:1]
    return () if first == [bos_id] else (bos_id,)


def _load_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if is_present(path):
        return read_text(path)
    template = _default_template("tokenizer_config.json", config.get("chat_template"))
    if template is not None:
        return template
    old = _read_optional(folder / "chat_template.json")
    return _default_template("chat_template.json", old.get("chat_template"))


def _default_template(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = [(entry.get("name"), entry.get("template")) for entry in value]
        if all(isinstance(word, str) for pair in named for word in pair):
            return dict(named).get("default")
    raise ValueError(
        f"chat_template in {name} must be a string or a list of objects with name and template, got "
        f"{type(value).__name__} {value!r:.80}; correct the file or add chat_template.jinja"
    )


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
