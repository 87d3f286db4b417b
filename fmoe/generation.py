"""What users call: generate, stream, stream_tokens, logits, score."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fmoe.compile.step import Steps

from .ambient import check_model, undisturbed
from .cache_size import check_room, choose_batch_size
from .completion import Completion, Row, StreamedToken, shown_logprobs
from .decoding import SCORE_CHUNK, Keep, compute_head, decode_batch, explain_nan, new_state, run
from .model import Model, check_progress, choose_steps
from .options import Options, Speculate, is_integer, resolve_options
from .prompts import Prompt, encode_prompt, split_prompts, stack_ids
from .states import State, check_state

LOG = logging.getLogger("fmoe")
BATCH_SIZE = 16


def generate(
    model: Model,
    prompts: Prompt | Iterable[Prompt] = "",
    *,
    state: State | None = None,
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
    speculate: Speculate = 0,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> list[Completion]:
    """Continue each prompt.

    Args:
        model: from ``fmoe.load``.
        prompts: strings, lists of token ids or chats (lists of messages with role and content); one of these alone
            is a list of one. Integer tensors and arrays are token ids, [T] of one prompt or [B, T].
        state: what all prompts go on from, of ``fmoe.prefill``; it is not run again, and not changed. A prompt is then
            a continuation: a text, encoded alone and without what opens a text; token ids; ``""``, which adds nothing;
            or a chat, given whole, that begins with the state's tokens. ``[""] * n`` are n continuations of one state.
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
        speculate: tokens that the model's own draft (MTP) layer drafts for each step, which verifies them all at once;
            the tokens are those of 0, which is off, and come faster where many drafts are right. "auto" takes as many
            as the steps so far show to be fastest, none where the model has no draft layer.
        batch_size: prompts that run together; None takes 16, or as many as the free memory holds.
        progress: a bar of tokens on standard error; None shows it on a terminal for work of over two seconds.

    Returns:
        One Completion per prompt, in their order.

    Raises:
        ValueError: a prompt, the state or an argument cannot be used, the caches do not fit into memory, or the
            checkpoint has no draft layer to speculate with; nothing was generated.
        RuntimeError: the model's logits held NaN or infinity; the message names the layer.
    """
    check_model(model, "generate")
    options = resolve(
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
        speculate=speculate,
    )
    if batch_size is not None and (not is_integer(batch_size) or batch_size < 1):
        raise ValueError(f"batch_size={batch_size!r} must be None or an int >= 1")
    check_progress(progress)
    seen = _check_origin(model, state)
    encoded = [
        encode_prompt(model, prompt, max_new_tokens=max_new_tokens, name=f"prompt {i}", seen=seen)
        for i, prompt in enumerate(split_prompts(prompts))
    ]
    rows = [Row(model, ids, options) for ids in encoded]
    _run_rows(model, rows, options, origin=state, batch_size=batch_size, progress=progress)
    return [row.completion() for row in rows]


def _check_origin(model: Model, state: State | None) -> tuple[int, ...] | None:
    """Refuse what is no state of this model, and give the tokens that a state holds."""
    if state is None:
        return None
    check_state(model, state)
    return state.token_ids


def resolve(model: Model, *, ignore_eos: bool, **options: Any) -> Options:
    """Put arguments over the model's defaults and check them."""
    if not isinstance(ignore_eos, bool):
        raise ValueError(f"ignore_eos={ignore_eos!r} must be True or False")
    resolved = resolve_options(
        model.defaults, vocab_size=model.config.decoder.vocab_size, ignore_eos=ignore_eos, **options
    )
    if resolved.stop and model.text is None:
        raise ValueError(f"stop={list(resolved.stop)} needs text, but {model.folder} has no tokenizer.json; drop it")
    return replace(resolved, speculate=find_drafts(model, resolved.speculate))


def find_drafts(model: Model, speculate: Speculate, /) -> Speculate:
    """Read the draft head where it is asked for; "auto" goes without where there is none, and says so."""
    if not speculate:
        return 0
    try:
        with undisturbed(model):
            model.drafts.get()
    except ValueError as error:
        if speculate != "auto":
            raise
        LOG.info("speculate: off (%s)", error)
        return 0
    return speculate


def _run_rows(
    model: Model,
    rows: Sequence[Row],
    options: Options,
    *,
    origin: State | None,
    batch_size: int | None,
    progress: bool | None,
) -> None:
    """Finish every row, batch by batch, with a bar of tokens."""
    more = options.max_new_tokens + options.draft_room
    lengths = [len(row.prompt_ids) + more for row in rows]
    steps = choose_steps(model, sum(lengths) - len(rows) * (len(origin) if origin is not None else 0))
    size = choose_batch_size(model, steps, lengths, batch_size=batch_size, usual=BATCH_SIZE)
    bar = tqdm(
        total=options.max_new_tokens * len(rows),
        desc="generating",
        unit="tok",
        delay=0.0 if progress else 2.0,
        file=sys.stderr,
        disable=None if progress is None else not progress,
    )
    with undisturbed(model), bar:
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            for count in _run_batch(model, steps, batch, options, first_row=start, origin=origin):
                bar.update(count)


def _run_batch(
    model: Model, steps: Steps, batch: Sequence[Row], options: Options, *, first_row: int, origin: State | None
) -> Iterator[int]:
    """Finish the rows of one batch; give the number of tokens done after each, those that a row will not need too."""
    prompts, is_active = [row.prompt_ids for row in batch], partial(_is_unfinished, batch)
    turns = decode_batch(model, steps, prompts, options, first_row=first_row, is_active=is_active, origin=origin)
    for tokens in turns:
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
    prompt: Prompt = "",
    *,
    state: State | None = None,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
    speculate: Speculate = 0,
) -> Iterator[str]:
    """Continue one prompt, or a state, and give its text piece by piece; the pieces join to ``generate``'s text.

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
        state=state,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        speculate=speculate,
    )
    return (token.text for token in tokens if token.text)


def stream_tokens(
    model: Model,
    prompt: Prompt = "",
    *,
    state: State | None = None,
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
    speculate: Speculate = 0,
) -> Iterator[StreamedToken]:
    """Continue one prompt and give its tokens one by one; ids, texts and logprobs join to ``generate``'s Completion.

    Arguments and errors are those of ``generate``; they are checked by this call, before the first token is asked
    for. Without a tokenizer the texts are "".
    """
    check_model(model, "stream_tokens")
    options = resolve(
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
        speculate=speculate,
    )
    seen = _check_origin(model, state)
    ids = encode_prompt(model, prompt, max_new_tokens=max_new_tokens, seen=seen)
    steps = choose_steps(model, len(ids) - len(seen or ()) + options.max_new_tokens)
    check_room(model, steps, 1, len(ids) + options.max_new_tokens + options.draft_room)
    return stream_row(model, steps, Row(model, ids, options), origin=state)


def stream_row(
    model: Model, steps: Steps, row: Row, /, *, origin: State | None = None, keep: Keep | None = None
) -> Iterator[StreamedToken]:
    """Generate one row token by token; ``origin`` and ``keep`` as in ``decode_batch``."""
    turns = decode_batch(model, steps, [row.prompt_ids], row.options, origin=origin, keep=keep)
    finished = False
    while not finished:
        with undisturbed(model):
            [token] = next(turns)
        text = row.push(token)
        finished = row.finish_reason is not None
        if finished:
            with undisturbed(model):
                turns.close()
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
        raise RuntimeError(explain_nan(model, ids[:-1], steps, chunk=SCORE_CHUNK))
    return float(total) / (len(ids) - 1)
