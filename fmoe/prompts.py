"""Prompts as users give them -> token ids, checked before anything runs."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from torch import Tensor

from .model import Model
from .options import is_integer
from .text import encode, encode_chat

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Tensor | np.ndarray[Any, Any]


def split_prompts(prompts: Prompt | Iterable[Prompt], /) -> list[Any]:
    """Give the prompts one by one; one prompt alone (a string, token ids, or a chat) is a list of one.

    Arrays and tensors are token ids: one dimension is a prompt, two are a prompt per row.

    Raises:
        ValueError: neither a prompt nor an ordered collection of prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor | np.ndarray):
        is_text = isinstance(prompts, np.ndarray) and prompts.dtype.kind in "OU"
        return list(prompts) if prompts.ndim == 2 or is_text else [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping | Set) or not isinstance(prompts, Iterable):
        hint = "put them in a list"
        if isinstance(prompts, bytes | bytearray):
            hint = "decode them"
        elif isinstance(prompts, Mapping):
            hint = "put a message in a list"
        raise ValueError(
            "prompts must be a string, token ids, chat messages or a list of these, "
            f"got {type(prompts).__name__}; {hint}"
        )
    listed = list(prompts)
    is_single = bool(listed) and not isinstance(listed[0], str | list | tuple | Tensor | np.ndarray)
    return [listed] if is_single else listed


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
    if len(ids) > limit:
        raise ValueError(f"{name} has {len(ids)} tokens, more than the model's context of {limit}; shorten it")
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
    if isinstance(prompt, Tensor | np.ndarray):
        return _array_ids(prompt, name)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        if prompt and all(isinstance(item, Mapping) for item in prompt):
            if model.text is None:
                raise ValueError(
                    f"{name} is a chat, but {model.folder} has no tokenizer.json; give a list of token ids"
                )
            return encode_chat(model.text, prompt)  # type: ignore[arg-type]
        if all(map(is_integer, prompt)):
            return [int(item) for item in prompt]  # type: ignore[arg-type]
    got = type(prompt).__name__
    if isinstance(prompt, list | tuple):
        got = f"a {got} of {', '.join(sorted({type(item).__name__ for item in prompt}))}"
    raise ValueError(f"{name} must be a string, a list of token ids or a list of chat messages, got {got}")


def _array_ids(prompt: Tensor | np.ndarray[Any, Any], name: str) -> list[int]:
    values = prompt.tolist()
    if prompt.ndim != 1 or not all(map(is_integer, values)):
        raise ValueError(
            f"{name} must have one dimension of integers, got {type(prompt).__name__} of shape {tuple(prompt.shape)} "
            f"and {prompt.dtype}"
        )
    return values
