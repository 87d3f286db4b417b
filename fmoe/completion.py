"""What a generation gives: tokens with their texts and log-probabilities, one by one and together."""

from dataclasses import dataclass

from .decoding import Token
from .model import Model
from .options import Options
from .streaming import StreamDecoder


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated token: its own, and the most probable tokens as (id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt gave.

    token_ids are all generated tokens, the end-of-sequence token or the tokens of a stop string included; text has
    neither, and is None without a tokenizer. finish_reason is "stop" (a stop string), "length" or "eos". drafted counts
    the draft tokens that were proposed, accepted those among token_ids; both are 0 without speculation.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    drafted: int = 0
    accepted: int = 0


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


class Row:
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
            logprobs = tuple(found for token in self.tokens if (found := shown_logprobs(token)) is not None)
        return Completion(
            text=None if self.decoder is None else "".join(self.pieces),
            token_ids=tuple(token.id for token in self.tokens),
            finish_reason=self.finish_reason,
            prompt_token_ids=tuple(self.prompt_ids),
            logprobs=logprobs,
            drafted=sum(token.drafted for token in self.tokens),
            accepted=sum(token.accepted for token in self.tokens),
        )


def shown_logprobs(token: Token, /) -> TokenLogprobs | None:
    """Give a token's log-probabilities as users get them; None unless they were asked for."""
    return None if token.logprob is None else TokenLogprobs(token.logprob, token.top)
