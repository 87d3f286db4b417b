"""Prompts as users give them -> token ids, checked before anything runs."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import text as texts
from .ambient import check_model
from .chat import encode_chat
from .model import Model
from .options import is_integer

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Tensor | np.ndarray[Any, Any]


def encode(model: Model, text: str | Sequence[Message], /) -> list[int]:
    """Turn a text or chat messages into the token ids that ``generate`` makes of them.

    Raises:
        ValueError: no text, or the model has no tokenizer.
    """
    check_model(model, "encode")
    if not _is_text(text):
        raise ValueError(f"text must be a string or a list of chat messages, got {type(text).__name__}")
    return _token_ids(model, text, "text")


def decode(model: Model, token_ids: Sequence[int] | Tensor | np.ndarray[Any, Any], /) -> str:
    """Turn token ids into text, as ``generate`` does: without special tokens.

    Raises:
        ValueError: no token ids of the model's vocabulary, or the model has no tokenizer.
    """
    check_model(model, "decode")
    if _is_text(token_ids):
        raise ValueError(f"token_ids must be a list of token ids, got {type(token_ids).__name__}")
    ids = _token_ids(model, token_ids, "token_ids")
    check_ids(ids, model.config.decoder.vocab_size, "token_ids")
    if model.text is None:
        raise ValueError(f"{model.folder} has no tokenizer.json, so there is no text of token ids")
    return texts.decode(model.text, ids)


def split_prompts(prompts: Prompt | Iterable[Prompt], /, *, name: str = "prompts") -> list[Any]:
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
            f"{name} must be a string, token ids, chat messages or a list of these, "
            f"got {type(prompts).__name__}; {hint}"
        )
    listed = list(prompts)
    is_single = bool(listed) and not isinstance(listed[0], str | list | tuple | Tensor | np.ndarray)
    return [listed] if is_single else listed


def encode_prompt(
    model: Model,
    prompt: Prompt,
    /,
    *,
    max_new_tokens: int,
    name: str = "the prompt",
    seen: Sequence[int] | None = None,
) -> list[int]:
    """Turn a string, token ids or chat messages into checked token ids.

    Args:
        model: its tokenizer, vocabulary and context decide.
        prompt: one prompt.
        max_new_tokens: tokens that must still fit behind it.
        name: how messages call the prompt.
        seen: token ids that a state holds. The prompt is then what follows: a text, encoded alone and without what the
            checkpoint puts before one; token ids; nothing (an empty text or list); or a whole chat that begins with
            them.

    Returns:
        All token ids, those that were seen in front.

    Raises:
        ValueError: empty, unknown ids, too long, or text without a tokenizer.
    """
    ids = _token_ids(model, prompt, name) if seen is None else _continue_ids(model, prompt, name, seen)
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token")
    vocab_size, limit = model.config.decoder.vocab_size, model.config.decoder.max_context
    check_ids(ids, vocab_size, name)
    name = name if seen is None else f"{name} with the {len(seen)} tokens of its state"
    if len(ids) > limit:
        raise ValueError(f"{name} has {len(ids)} tokens, more than the model's context of {limit}; shorten it")
    if len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"{name} has {len(ids)} tokens and max_new_tokens={max_new_tokens}; together they pass the model's context "
            f"of {limit} tokens; shorten one of them"
        )
    return ids


def stack_ids(token_ids: Tensor | np.ndarray[Any, Any] | Sequence[Sequence[int]], vocab_size: int, /) -> Tensor:
    """Give checked token ids as an integer tensor [B, T], from a tensor, an array or rows of one length.

    Raises:
        ValueError: another shape, no integers, or ids out of range.
    """
    if isinstance(token_ids, Tensor | np.ndarray):
        is_whole = token_ids.dtype in INTEGERS if isinstance(token_ids, Tensor) else token_ids.dtype.kind in "iu"
        fault = "" if token_ids.ndim == 2 and is_whole else f"{tuple(token_ids.shape)} {token_ids.dtype}"
    else:
        fault = _find_row_fault(token_ids)
    if fault:
        raise ValueError(f"token_ids must be an integer tensor [B, T] or rows of integers of one length, got {fault}")
    rows = token_ids.tolist() if isinstance(token_ids, Tensor | np.ndarray) else token_ids
    for row in rows:
        check_ids(row, vocab_size, "token_ids")
    if isinstance(token_ids, Tensor):
        return token_ids
    flat = [int(i) for row in rows for i in row]
    width = token_ids.shape[1] if isinstance(token_ids, np.ndarray) else len(rows[0])
    return torch.tensor(flat, dtype=torch.int64, device="cpu").view(len(rows), width)


def _find_row_fault(rows: object) -> str:
    """Say what is wrong with rows of token ids, "" where nothing is."""
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, list | tuple) for row in rows):
        return f"{type(rows).__name__}; put a single row in a list"
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        return f"rows of {min(widths)} to {max(widths)} ids; give them one by one"
    kinds = {type(item).__name__ for row in rows for item in row if not is_integer(item)}
    return f"rows of {', '.join(sorted(kinds))}" if kinds else ""


def check_ids(ids: Sequence[int], vocab_size: int, name: str, /) -> None:
    """Raise ValueError unless every id is in 0..vocab_size-1."""
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{name} has token id {i}; ids must be in 0..{vocab_size - 1} (vocabulary {vocab_size})")


def _is_text(prompt: object) -> bool:
    """Tell a string and chat messages from token ids."""
    if isinstance(prompt, list | tuple):
        return bool(prompt) and all(isinstance(item, Mapping) for item in prompt)
    return isinstance(prompt, str)


def _continue_ids(model: Model, prompt: Prompt, name: str, seen: Sequence[int]) -> list[int]:
    """Put what a state holds before the ids of what follows; a chat holds it already."""
    if isinstance(prompt, str):
        if prompt and model.text is None:
            _token_ids(model, prompt, name)  # raises
        rest = texts.encode(model.text, prompt, special_tokens=False) if model.text is not None else []
        return [*seen, *rest]
    ids = _token_ids(model, prompt, name)
    if not _is_text(prompt):
        return [*seen, *ids]
    if ids[: len(seen)] != list(seen):
        shared = next((i for i, (one, other) in enumerate(zip(ids, seen, strict=False)) if one != other), len(ids))
        raise ValueError(
            f"{name} is a chat that differs from its state at token {shared} of {len(seen)}; give the whole chat, "
            "beginning with the messages of the state, or leave the state out"
        )
    return ids


def _token_ids(model: Model, prompt: Prompt, name: str) -> list[int]:
    if isinstance(prompt, str):
        if model.text is None:
            raise ValueError(f"{name} is a string, but {model.folder} has no tokenizer.json; give a list of token ids")
        return texts.encode(model.text, prompt)
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
