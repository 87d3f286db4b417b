"""What users call: generate, stream, stream_tokens, logits, score."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fmoe.compile.step import Steps

from .ambient import check_model, undisturbed
from .completion import Completion, Row, StreamedToken, shown_logprobs
from .decoding import PREFILL_CHUNK, SCORE_CHUNK, compute_head, decode_batch, explain_nan, new_state, run
from .model import Model, check_progress, choose_steps
from .options import Options, is_integer, resolve_options
from .prompts import Prompt, encode_prompt, split_prompts, stack_ids

BATCH_SIZE = 16


def generate(
    model: Model,
    prompts: Prompt | Iterable[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
    logprobs: int | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool | None = None,
) -> list[Completion]:
    """Continue each prompt.

    Args:
        model: from ``fmoe.load``.
        prompts: strings, lists of token ids or chats (lists of messages with role and content); one of these alone
            is a list of one. Integer tensors and arrays are token ids, [T] of one prompt or [B, T].
        max_new_tokens: at most this many tokens per prompt.
        temperature: 0 is greedy. This and the next four: None takes the checkpoint's generation_config.json.
        top_p: keep the smallest set of tokens whose probability reaches it.
        top_k: keep the k most probable tokens; 0 is off.
        min_p: keep tokens at least this fraction as probable as the best.
        repetition_penalty: above 1 makes tokens that occurred less likely.
        seed: row i is sampled with seed + i and gives what a call of its own with that seed gives.
        stop: strings that end a text; they are not part of it.
        ignore_eos: go on after end-of-sequence tokens.
        logprobs: n gives each token's own log-probability and the n largest; None gives none.
        batch_size: prompts that run together.
        progress: a bar of tokens on standard error; None shows it on a terminal for work of over two seconds.

    Returns:
        One Completion per prompt, in their order.

    Raises:
        ValueError: a prompt or an argument cannot be used; nothing was generated.
        RuntimeError: the model's logits held NaN or infinity; the message names the layer.
    """
    check_model(model, "generate")
    options = _resolve(
        model,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    if not is_integer(batch_size) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be an int >= 1")
    check_progress(progress)
    encoded = [
        encode_prompt(model, prompt, max_new_tokens=max_new_tokens, name=f"prompt {i}")
        for i, prompt in enumerate(split_prompts(prompts))
    ]
    rows = [Row(model, ids, options) for ids in encoded]
    _run_rows(model, rows, options, batch_size=batch_size, progress=progress)
    return [row.completion() for row in rows]


def _resolve(model: Model, *, ignore_eos: bool, **options: Any) -> Options:
    """Put arguments over the model's defaults and check them."""
    if not isinstance(ignore_eos, bool):
        raise ValueError(f"ignore_eos={ignore_eos!r} must be True or False")
    resolved = resolve_options(
        model.defaults, vocab_size=model.config.decoder.vocab_size, ignore_eos=ignore_eos, **options
    )
    if resolved.stop and model.text is None:
        raise ValueError(f"stop={list(resolved.stop)} needs text, but {model.folder} has no tokenizer.json; drop it")
    return resolved


def _run_rows(model: Model, rows: Sequence[Row], options: Options, *, batch_size: int, progress: bool | None) -> None:
    """Finish every row, batch by batch, with a bar of tokens."""
    steps = choose_steps(model, sum(len(row.prompt_ids) + options.max_new_tokens for row in rows))
    bar = tqdm(
        total=options.max_new_tokens * len(rows),
        desc="generating",
        unit="tok",
        delay=0.0 if progress else 2.0,
        file=sys.stderr,
        disable=None if progress is None else not progress,
    )
    with undisturbed(model), bar:
        for start in range(0, len(rows), batch_size):
            for count in _run_batch(model, steps, rows[start : start + batch_size], options, first_row=start):
                bar.update(count)


def _run_batch(model: Model, steps: Steps, batch: Sequence[Row], options: Options, *, first_row: int) -> Iterator[int]:
    """Finish the rows of one batch; give the number of tokens done after each, those that a row will not need too."""
    prompts, is_active = [row.prompt_ids for row in batch], partial(_is_unfinished, batch)
    for tokens in decode_batch(model, steps, prompts, options, first_row=first_row, is_active=is_active):
        active = [(row, token) for row, token in zip(batch, tokens, strict=True) if row.finish_reason is None]
        for row, token in active:
            row.push(token)
            yield 1 + (options.max_new_tokens - len(row.tokens) if row.finish_reason else 0)
        if all(row.finish_reason for row in batch):
            return


def _is_unfinished(rows: Sequence[Row], row: int) -> bool:
    return rows[row].finish_reason is None


def stream(
    model: Model,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
) -> Iterator[str]:
    """Continue one prompt and give its text piece by piece; the pieces join to ``generate``'s text.

    Arguments and errors are those of ``generate``; they are checked by this call, before the first piece is asked
    for. Never half a character, never the beginning of a stop string, never "".
    """
    check_model(model, "stream")
    if model.text is None:
        raise ValueError(
            f"{model.folder} has no tokenizer.json, so there is no text to stream; "
            "use fmoe.generate or fmoe.stream_tokens"
        )
    tokens = stream_tokens(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    return (token.text for token in tokens if token.text)


def stream_tokens(
    model: Model,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
    logprobs: int | None = None,
) -> Iterator[StreamedToken]:
    """Continue one prompt and give its tokens one by one; ids, texts and logprobs join to ``generate``'s Completion.

    Arguments and errors are those of ``generate``; they are checked by this call, before the first token is asked
    for. Without a tokenizer the texts are "".
    """
    check_model(model, "stream_tokens")
    options = _resolve(
        model,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    row = Row(model, encode_prompt(model, prompt, max_new_tokens=max_new_tokens), options)
    return _stream_row(model, row, options)


def _stream_row(model: Model, row: Row, options: Options) -> Iterator[StreamedToken]:
    steps = choose_steps(model, len(row.prompt_ids) + options.max_new_tokens)
    turns = decode_batch(model, steps, [row.prompt_ids], options)
    while row.finish_reason is None:
        with undisturbed(model):
            [token] = next(turns)
        text = row.push(token)
        yield StreamedToken(token.id, text, row.finish_reason, shown_logprobs(token))


def logits(model: Model, token_ids: Tensor | np.ndarray[Any, Any] | Sequence[Sequence[int]], /) -> Tensor:
    """Compute next-token logits at every position in one pass, without a cache to keep.

    What the model gives is returned as it is, NaN and infinity too, where ``generate`` and ``score`` raise.

    Args:
        model: from ``fmoe.load``.
        token_ids: integer [B, T], rows of one length; a tensor, an array or lists.

    Returns:
        float32 [B, T, V].

    Raises:
        ValueError: another shape or dtype, ids out of range, or T past the model's context.
    """
    check_model(model, "logits")
    config = model.config.decoder
    ids_BT = stack_ids(token_ids, config.vocab_size)
    batch, tokens = ids_BT.shape
    if tokens > config.max_context:
        raise ValueError(f"token_ids has {tokens} positions; the model's context is {config.max_context}")
    if batch == 0 or tokens == 0:
        return torch.empty(batch, tokens, config.vocab_size, dtype=torch.float32, device=model.device)
    steps = choose_steps(model, batch * tokens)
    with undisturbed(model):
        state = new_state(model, batch, tokens)
        x_BTD, _ = run(model, steps, ids_BT.to(model.device).long(), state, visible=tokens)
        flat_TV = compute_head(model, steps, x_BTD.flatten(0, 1))
    return flat_TV.view(batch, tokens, -1).clone()


def score(model: Model, texts: Prompt | Iterable[Prompt], /) -> list[float]:
    """Compute the mean negative log-likelihood per token of each text, in nats; the first token is not predicted.

    Args:
        model: from ``fmoe.load``.
        texts: whatever ``generate`` takes as prompts, two tokens at least each; one alone is a list of one.

    Raises:
        ValueError: a text cannot be used, or has a single token.
        RuntimeError: the model's logits held NaN or infinity; the message names the layer.
    """
    check_model(model, "score")
    encoded = [
        encode_prompt(model, text, max_new_tokens=0, name=f"text {i}")
        for i, text in enumerate(split_prompts(texts, name="texts"))
    ]
    for i, ids in enumerate(encoded):
        if len(ids) < 2:
            raise ValueError(f"text {i} has {len(ids)} token; a score needs two at least, one to predict")
    steps = choose_steps(model, sum(map(len, encoded)))
    with undisturbed(model):
        return [_score_row(model, steps, ids) for ids in encoded]


def _score_row(model: Model, steps: Steps, ids: Sequence[int]) -> float:
    state = new_state(model, 1, len(ids))
    tokens_1T = torch.tensor([ids], dtype=torch.int64, device=model.device)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        end = min(start + SCORE_CHUNK, len(ids) - 1)
        x_1TD, state = run(model, steps, tokens_1T[:, start:end], state, visible=end)
        logits_TV = compute_head(model, steps, x_1TD[0])
        # NaN and infinity of any logit show in its sum, and make the total NaN
        broken = ~logits_TV.sum(dtype=torch.float64).isfinite()
        logprobs_TV = logits_TV.log_softmax(-1)
        total -= logprobs_TV.gather(1, tokens_1T[0, start + 1 : end + 1, None]).sum(dtype=torch.float64)
        total = total.masked_fill(broken, torch.nan)
    if not total.isfinite():
        raise RuntimeError(explain_nan(model, ids[:-1], steps, chunk=PREFILL_CHUNK))
    return float(total) / (len(ids) - 1)
