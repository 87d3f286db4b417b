"""What users call: generate, stream, stream_tokens, logits, score."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from .decoding import Token, compute_head, decode_batch, new_state, run
from .model import Model, choose_steps
from .options import Options, is_integer, resolve_options
from .prompts import Message, Prompt, check_ids, encode_prompt, split_prompts
from .streaming import StreamDecoder

BATCH_SIZE = 16
SCORE_CHUNK = 512  # positions whose logits are in memory at once
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated token: its own, and the most probable tokens as (id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt gave.

    token_ids are all generated tokens, the end-of-sequence token or the tokens of a stop string included; text has
    neither, and is None without a tokenizer. finish_reason is "stop" (a stop string), "length" or "eos".
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One generated token as it comes.

    text is what became safe to show with it, of this token or of earlier ones, and often ""; without a tokenizer it
    always is. finish_reason is None until the last token, and there what ``Completion`` says; logprobs is None unless
    asked for.
    """

    token_id: int
    text: str
    finish_reason: str | None
    logprobs: TokenLogprobs | None


class _Row:
    """One sequence while it is generated."""

    def __init__(self, model: Model, prompt_ids: list[int], options: Options) -> None:
        self.prompt_ids = prompt_ids
        self.options = options
        self.tokens: list[Token] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.decoder = StreamDecoder(model.text, options.stop) if model.text is not None else None

    def push(self, token: Token) -> str:
        """Take the next token; return the text that is now safe to show."""
        self.tokens.append(token)
        piece = ""
        if token.id in self.options.eos_ids:
            self.finish_reason = "eos"
        elif self.decoder is not None:
            piece = self.decoder.push(token.id)
            if self.decoder.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.tokens) == self.options.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.decoder is not None:
            piece += self.decoder.finish()
            if self.decoder.stopped and self.finish_reason == "length":
                self.finish_reason = "stop"
        self.pieces.append(piece)
        return piece

    def completion(self) -> Completion:
        """Give the result of a finished row."""
        assert self.finish_reason is not None
        logprobs = None
        if self.options.logprobs is not None:
            logprobs = tuple(found for token in self.tokens if (found := _token_logprobs(token)) is not None)
        return Completion(
            text=None if self.decoder is None else "".join(self.pieces),
            token_ids=tuple(token.id for token in self.tokens),
            finish_reason=self.finish_reason,
            prompt_token_ids=tuple(self.prompt_ids),
            logprobs=logprobs,
        )


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
    options = resolve_options(
        model.defaults,
        vocab_size=model.config.decoder.vocab_size,
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
    _check_stop(model, options)
    encoded = [
        encode_prompt(model, prompt, max_new_tokens=max_new_tokens, name=f"prompt {i}")
        for i, prompt in enumerate(split_prompts(prompts))
    ]
    rows = [_Row(model, ids, options) for ids in encoded]
    steps = choose_steps(model, sum(map(len, encoded)) + max_new_tokens * len(rows))
    disable = None if progress is None else not progress
    with (
        torch.inference_mode(),
        tqdm(
            total=max_new_tokens * len(rows),
            desc="generating",
            unit="tok",
            delay=0.0 if progress else 2.0,
            file=sys.stderr,
            disable=disable,
        ) as bar,
    ):
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            turns = decode_batch(
                model,
                steps,
                [row.prompt_ids for row in batch],
                options,
                first_row=start,
                is_active=partial(_is_unfinished, batch),
            )
            for tokens in turns:
                active = [(row, token) for row, token in zip(batch, tokens, strict=True) if row.finish_reason is None]
                for row, token in active:
                    row.push(token)
                    skipped = max_new_tokens - len(row.tokens) if row.finish_reason else 0
                    bar.update(1 + skipped)
                if all(row.finish_reason for row in batch):
                    break
    return [row.completion() for row in rows]


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
    options = resolve_options(
        model.defaults,
        vocab_size=model.config.decoder.vocab_size,
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
    _check_stop(model, options)
    row = _Row(model, encode_prompt(model, prompt, max_new_tokens=max_new_tokens), options)
    return _stream_row(model, row, options)


def _stream_row(model: Model, row: _Row, options: Options) -> Iterator[StreamedToken]:
    steps = choose_steps(model, len(row.prompt_ids) + options.max_new_tokens)
    turns = decode_batch(model, steps, [row.prompt_ids], options)
    while row.finish_reason is None:
        with torch.inference_mode():
            [token] = next(turns)
        text = row.push(token)
        yield StreamedToken(token.id, text, row.finish_reason, _token_logprobs(token))


def _token_logprobs(token: Token) -> TokenLogprobs | None:
    return None if token.logprob is None else TokenLogprobs(token.logprob, token.top)


def _is_unfinished(rows: Sequence[_Row], row: int) -> bool:
    return rows[row].finish_reason is None


def _check_stop(model: Model, options: Options) -> None:
    if options.stop and model.text is None:
        raise ValueError(f"stop={list(options.stop)} needs text, but {model.folder} has no tokenizer.json; drop it")


def logits(model: Model, token_ids: Tensor, /) -> Tensor:
    """Compute next-token logits at every position in one pass, without a cache to keep.

    Args:
        model: from ``fmoe.load``.
        token_ids: integer [B, T], rows of one length.

    Returns:
        float32 [B, T, V].

    Raises:
        ValueError: another shape or dtype, ids out of range, or T past the model's context.
    """
    config = model.config.decoder
    if not isinstance(token_ids, Tensor) or token_ids.dim() != 2 or token_ids.dtype not in INTEGERS:
        got = f"{tuple(token_ids.shape)} {token_ids.dtype}" if isinstance(token_ids, Tensor) else type(token_ids)
        raise ValueError(f"token_ids must be an integer tensor [B, T], got {got}")
    batch, tokens = token_ids.shape
    if tokens > config.max_context:
        raise ValueError(f"token_ids has {tokens} positions; the model's context is {config.max_context}")
    if batch == 0 or tokens == 0:
        return torch.empty(batch, tokens, config.vocab_size, device=model.device)
    check_ids(token_ids.flatten().tolist(), config.vocab_size, "token_ids")
    steps = choose_steps(model, batch * tokens)
    with torch.inference_mode():
        state = new_state(model, batch, tokens)
        x_BTD, _ = run(model, steps, token_ids.to(model.device).long(), state, visible=tokens)
        flat_TV = compute_head(model, steps, x_BTD.flatten(0, 1))
    return flat_TV.view(batch, tokens, -1).clone()


def score(model: Model, texts: Sequence[str | Sequence[int] | Sequence[Message]], /) -> list[float]:
    """Compute the mean negative log-likelihood per token of each text, in nats; the first token is not predicted.

    Args:
        model: from ``fmoe.load``.
        texts: strings or lists of token ids, two tokens at least each.

    Raises:
        ValueError: a text cannot be used, or has a single token.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of texts, got one string; put it in a list")
    encoded = [encode_prompt(model, text, max_new_tokens=0, name=f"text {i}") for i, text in enumerate(texts)]
    for i, ids in enumerate(encoded):
        if len(ids) < 2:
            raise ValueError(f"text {i} has {len(ids)} token; a score needs two at least, one to predict")
    steps = choose_steps(model, sum(map(len, encoded)))
    return [_score_row(model, steps, ids) for ids in encoded]


@torch.inference_mode()
def _score_row(model: Model, steps, ids: list[int]) -> float:  # type: ignore[no-untyped-def]
    state = new_state(model, 1, len(ids))
    tokens_1T = torch.tensor([ids], dtype=torch.int64, device=model.device)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        end = min(start + SCORE_CHUNK, len(ids) - 1)
        x_1TD, state = run(model, steps, tokens_1T[:, start:end], state, visible=end)
        logprobs_TV = compute_head(model, steps, x_1TD[0]).log_softmax(-1)
        total -= logprobs_TV.gather(1, tokens_1T[0, start + 1 : end + 1, None]).sum(dtype=torch.float64)
    return float(total) / (len(ids) - 1)
