"""Text from token ids as they come: whole characters only, and nothing that may belong to a stop string."""

from collections.abc import Callable, Sequence
from functools import partial

from .text import Text, decode

_REPLACEMENT = "\ufffd"
# An unfinished character has at most three bytes and a token at least one: three tokens hold all of it.
_TAIL_TOKENS = 3
_MAX_TAIL_TOKENS = 16


def find_stop(text: str, stops: Sequence[str], /) -> int | None:
    """Find where to cut a text: the start of the stop string that ends first, of several ending there the longest."""
    ends = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(ends)[1] if ends else None


class StreamDecoder:
    """Turn one sequence's token ids into pieces of text that are safe to show at once.

    The pieces of ``push`` and the rest from ``finish`` join to the text of all ids, cut at the first stop string.
    Each id costs two decodings of the last few ids, however long the text is. A U+FFFD at the end is held
    until the next id shows whether the character is broken or only unfinished. Ids that give no text pass unseen.

    Args:
        source: the checkpoint's text side, or a function from ids to text whose text only grows with more ids, an
            unfinished character at the end (one U+FFFD) aside.
        stop: strings that end the text; the one that ends first wins, then the longest. It is not part of the text.
    """

    __slots__ = ("_context", "_decode", "_finished", "_given", "_held", "_stops", "_text", "_window", "stopped")

    def __init__(self, source: Text | Callable[[Sequence[int]], str], /, stop: Sequence[str] = ()) -> None:
        self._decode: Callable[[Sequence[int]], str] = partial(decode, source) if isinstance(source, Text) else source
        self._stops = _checked_stops(stop)
        self._window: list[int] = []  # the last ids; the text of the first _context of them was given before
        self._text = ""  # of the window
        self._context = 0
        self._given = 0  # characters of the window's text that were given
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self._finished = False
        self.stopped = False

    def push(self, token_id: int, /) -> str:
        """Take the next id and give the text that became safe to show, often none; nothing once stopped."""
        if self._finished:
            raise ValueError("push() came after finish(); make a new StreamDecoder for each sequence")
        return "" if self.stopped else self._release(self._advance(token_id))

    def finish(self) -> str:
        """Give what was held back; the sequence has ended. A second call gives nothing."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        piece = self._release(self._text[self._given :])
        return piece if self.stopped else piece + self._held

    def _advance(self, token_id: int) -> str:
        """Decode the window with the new id and return the characters that are new and complete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        # Such an id must not become context: it cannot take the leading space that some decoders strip. A lone
        # space token also decodes to nothing, but several do not.
        if text == self._text and not self._decode([token_id] * 3):
            self._window.pop()
            return ""
        self._text = text
        settled = len(text) - text.endswith(_REPLACEMENT)
        fresh = text[self._given : settled]
        self._given = max(self._given, settled)
        self._trim(clean=settled == len(text))
        return fresh

    def _trim(self, *, clean: bool) -> None:
        """Shorten the window to the ids that later text depends on."""
        if clean:
            recent = self._window[self._context :]
            text = self._decode(recent)
            if text:
                self._window, self._text, self._context, self._given = recent, text, len(recent), len(text)
        elif len(self._window) > _MAX_TAIL_TOKENS:
            # broken bytes without end: wherever decoding starts, UTF-8 reads right from the next first byte on
            self._window, self._context = self._window[-_TAIL_TOKENS:], 0
            self._text = self._decode(self._window)
            self._given = len(self._text) - 1

    def _release(self, fresh: str) -> str:
        """Add text to what is held and return what no stop string can reach any more."""
        text = self._held + fresh
        cut = find_stop(text, self._stops)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        safe = len(text) - _longest_beginning(text, self._stops)
        self._held = text[safe:]
        return text[:safe]


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Count the characters at the end of the text that may be the beginning of a stop string."""
    lengths = (n for stop in stops for n in range(1, min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def _checked_stops(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f'stop must be a list of non-empty strings, got {stop!r}; write ["..."] for a single one')
    return tuple(stop)
