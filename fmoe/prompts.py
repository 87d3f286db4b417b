"""Prompts as users give them -> token ids, checked before anything runs."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from .model import Model
from .text import encode, encode_chat

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def encode_prompt(model: Model, prompt: Prompt, /, *, max_new_tokens: int, name: str = "the prompt") -> list[int]:
    """Turn a string, token ids or chat messages into checked token ids.

    Args:
        model: its tokenizer, vocabulary and context decide.
        prompt: one prompt.
        max_new_tokens: tokens that must still fit behind it.
        name: how messages call the prompt.

    Raises:
        ValueError: empty, unknown ids, too long, or text without a tokenizer.
    """
    ids = _token_ids(model, prompt, name)
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token")
    vocab_size, limit = model.config.decoder.vocab_size, model.config.decoder.max_context
    check_ids(ids, vocab_size, name)
    if len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"{name} has {len(ids)} tokens and max_new_tokens={max_new_tokens}; together they pass the model's context "
            f"of {limit} tokens; shorten one of them"
        )
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, name: str, /) -> None:
    """Raise ValueError unless every id is in 0..vocab_size-1."""
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{name} has token id {i}; ids must be in 0..{vocab_size - 1} (vocabulary {vocab_size})")


def _token_ids(model: Model, prompt: Prompt, name: str) -> list[int]:
    if isinstance(prompt, str):
        if model.text is None:
            raise ValueError(f"{name} is a string, but {model.folder} has no tokenizer.json; give a list of token ids")
        return encode(model.text, prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if prompt and all(isinstance(item, Mapping) for item in prompt):
            if model.text is None:
                raise ValueError(
                    f"{name} is a chat, but {model.folder} has no tokenizer.json; give a list of token ids"
                )
            return encode_chat(model.text, prompt)  # type: ignore[arg-type]
        if all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
            return [int(item) for item in prompt]  # type: ignore[call-overload]
    kinds = sorted({type(item).__name__ for item in prompt}) if isinstance(prompt, Sequence) else type(prompt).__name__
    raise ValueError(f"{name} must be a string, a list of token ids or a list of chat messages, got {kinds}")
