"""A conversation whose turns pay for their own tokens: what the model has seen is kept from one to the next."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from fmoe.compile.step import Steps, cache_slots

from .ambient import check_model, undisturbed
from .architectures import State as RowState
from .cache_size import check_room, find_room
from .chat import render_chat
from .completion import Row, StreamedToken
from .generation import resolve, stream_row
from .model import Model, choose_steps
from .prefilling import run_prompt
from .prompts import Message, encode_prompt
from .states import State, keep_row, share_slots
from .text import encode

LOG = logging.getLogger("fmoe")
COPIES = 3  # of a turn's caches at once: what is kept, what the prompt gives, what decodes
USUAL: Mapping[str, Any] = {
    "max_new_tokens": 128,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "seed": 0,
    "stop": None,
    "ignore_eos": False,
    "logprobs": None,
    "speculate": 0,
}


class _Said(NamedTuple):
    """A prompt and its reply, as text and as the tokens that the model read and wrote."""

    text: str
    ids: tuple[int, ...]


class Conversation:
    """Replies to chats of which each continues the one before, and remembers what the model has seen.

    A chat that goes on otherwise costs what differs. A reply keeps the tokens that the model wrote, where the template
    renders it as it was said.
    """

    def __init__(self, model: Model, /) -> None:
        check_model(model, "conversation.Conversation")
        if model.text is None:
            raise ValueError(f"{model.folder} has no tokenizer.json, so it cannot chat; use fmoe.generate")
        self.model, self.text = model, model.text
        self.states: list[State] = []  # each the beginning of the next
        self._said: _Said | None = None

    def stream(self, messages: Sequence[Message], /, **options: Any) -> Iterator[StreamedToken]:
        """Reply to a chat; arguments, errors and tokens are those of ``fmoe.stream_tokens``."""
        resolved = resolve(self.model, **{**USUAL, **options})
        rendered = render_chat(self.text, messages)
        ids = encode_prompt(self.model, self._encode(rendered), max_new_tokens=resolved.max_new_tokens)
        tokens = len(ids) + resolved.max_new_tokens
        steps = choose_steps(self.model, tokens)
        check_room(self.model, steps, 1, tokens)
        if not find_room(self.model, tokens).fits(COPIES, cache_slots(tokens)):
            LOG.debug("chat: the caches of %d tokens fit once, but are not kept for the next turn", tokens)
            self.states.clear()
            return stream_row(self.model, steps, Row(self.model, ids, resolved))
        return self._reply(
            rendered, ids, self._find_cut(messages, rendered, ids), steps, Row(self.model, ids, resolved)
        )

    def _reply(self, rendered: str, ids: list[int], cut: int, steps: Steps, row: Row) -> Iterator[StreamedToken]:
        with undisturbed(self.model):
            origin = self._take_origin(ids)
            for end in sorted({cut, len(ids)}):
                if end > len(origin or ()):
                    origin = run_prompt(self.model, steps, ids[:end], origin)
                    if end == cut:
                        self._remember(origin)
        assert origin is not None
        replies: list[State] = []
        yield from stream_row(self.model, steps, row, origin=origin, keep=partial(self._keep_reply, replies))
        for state in replies:
            self._remember(state)
        tokens = tuple(takewhile(lambda i: i not in row.options.eos_ids, (token.id for token in row.tokens)))
        # of a reply that a stop string cut, or that holds hidden tokens, the text is not that of its tokens
        exact = row.finish_reason in ("eos", "length") and not self.text.special_ids.intersection(tokens)
        self._said = _Said(rendered + "".join(row.pieces), (*ids, *tokens)) if exact else None

    def _encode(self, rendered: str) -> list[int]:
        """Encode a chat; where it goes on with a special token behind what was said, that keeps its tokens."""
        if self._said is not None and rendered.startswith(self._said.text):
            rest = rendered[len(self._said.text) :]
            more = encode(self.text, rest, special_tokens=False)
            token = self.text.tokenizer.id_to_token(more[0]) if more else None
            if token is not None and more[0] in self.text.special_ids and rest.startswith(token):
                return [*self._said.ids, *more]
        return encode(self.text, rendered, special_tokens=False)

    def _find_cut(self, messages: Sequence[Message], rendered: str, ids: list[int]) -> int:
        """Count the tokens with which the next turn's prompt will begin too, whatever the reply.

        Templates that open a reply by more than they later put before it, such as <think>, end that part earlier.
        """
        render = partial(render_chat, self.text, add_generation_prompt=False)
        try:
            if render([*messages, {"role": "assistant", "content": "x"}]).startswith(rendered):
                return len(ids)
            asked = render(messages)
        except ValueError:  # a template may refuse what no user asked for
            return len(ids)
        begin = self._encode(asked)
        return len(begin) if begin and ids[: len(begin)] == begin else len(ids)

    def _take_origin(self, ids: list[int]) -> State | None:
        """Find the longest state with which the ids begin, and drop those that are longer."""
        while self.states and (
            len(self.states[-1]) >= len(ids) or list(self.states[-1].token_ids) != ids[: len(self.states[-1])]
        ):
            LOG.debug("chat: the prompt does not begin with the %d tokens that were seen", len(self.states[-1]))
            self.states.pop()
        origin = self.states[-1] if self.states else None
        LOG.debug("chat: %d of %d tokens were seen before", len(origin or ()), len(ids))
        return origin

    def _keep_reply(self, replies: list[State], rows: RowState, seen: list[list[int]]) -> None:
        # of no use where nothing follows, so there are no logits to keep
        size = self.model.config.decoder.vocab_size
        replies.append(keep_row(rows, 0, seen[0], torch.full((size,), torch.nan, device=self.model.device), self.model))

    def _remember(self, state: State) -> None:
        """Add a state, and keep the last turn's beginning, prompt and reply, whose slots are in memory once."""
        self.states = [*(share_slots(kept, state) for kept in self.states[-2:]), state]
