"""How many drafts pay: a running estimate of what steps of each number of drafts take and give."""

from collections import deque
from statistics import fmean

TRIAL = 6  # steps before one number of drafts is compared with another
REMEMBERED = 48  # steps that an estimate rests on
AGAIN = 256  # steps after which the others are tried again
MARGIN = 1.03  # by which another number must be faster


class Pace:
    """Seconds and tokens of steps, by their number of drafts.

    A number is tried for a few steps, then the fastest is taken, and now and then the neighbours are tried again: one
    draft more only while the estimate says that it could pay.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._tokens: dict[int, deque[int]] = {}
        self._trying: int | None = None
        self._left = 0  # steps of the trial
        self._since: dict[int, int] = {}  # steps since the last trial
        self._last_s = 0.0

    def note(self, drafts: int, tokens: int, now_s: float, /, *, began_s: float, warm: bool) -> None:
        """Take note of a step that gave tokens to all rows together, and of when it was launched and read."""
        seconds, self._last_s = now_s - max(began_s, self._last_s), now_s
        if not warm:
            return
        self._seconds.setdefault(drafts, deque(maxlen=REMEMBERED)).append(seconds)
        self._tokens.setdefault(drafts, deque(maxlen=REMEMBERED)).append(tokens)
        for known in self._seconds:
            self._since[known] = 0 if known == drafts else self._since.get(known, 0) + 1

    def choose(self, most: int, /) -> int:
        """Say how many drafts the next step has, at most ``most``."""
        if self._trying is not None and self._left > 0:
            self._left -= 1
            return self._trying
        self._trying = self._find_trial(most)
        if self._trying is None:
            return self.best(most)
        self._left = TRIAL
        return self._trying

    def best(self, most: int, /) -> int:
        """Say which number of drafts is fastest by what is known; the smaller where they are nearly as fast."""
        known = [drafts for drafts in sorted(self._seconds) if drafts <= most and self._is_known(drafts)]
        best = known[0] if known else min(1, most)
        for drafts in known[1:]:
            if self.rate(drafts) > MARGIN * self.rate(best):
                best = drafts
        return best

    def rate(self, drafts: int, /) -> float:
        """Give the tokens per second of a number of drafts that was tried."""
        return fmean(self._tokens[drafts]) / self.seconds(drafts)

    def seconds(self, drafts: int, /) -> float:
        """Give the seconds of a step: a low quartile, for whatever else the machine does only adds to them."""
        known = sorted(self._seconds[drafts])
        return known[len(known) // 4]

    def _is_known(self, drafts: int) -> bool:
        return len(self._seconds.get(drafts, ())) >= TRIAL

    def _find_trial(self, most: int) -> int | None:
        for drafts in (1, 0):
            if drafts <= most and not self._is_known(drafts):
                return drafts
        best = self.best(most)
        for drafts in (best - 1, best + 1):
            if not 0 <= drafts <= most:
                continue
            if not self._is_known(drafts):
                if self._could_pay(drafts):
                    return drafts
            elif self._since.get(drafts, 0) >= AGAIN:
                return drafts
        return None

    def _could_pay(self, drafts: int) -> bool:
        """Tell whether one draft more would be faster if it took as long and stayed as often as the one before."""
        before = drafts - 1
        if not (self._is_known(before) and self._is_known(before - 1)):
            return False
        alone, first = fmean(self._tokens[0]), fmean(self._tokens[1])
        stays = min(max(first / alone - 1, 0.0), 1.0)
        tokens = fmean(self._tokens[before]) + alone * stays**drafts
        seconds = self.seconds(before) + max(self.seconds(before) - self.seconds(before - 1), 0.0)
        return tokens / seconds > MARGIN * self.rate(before)
