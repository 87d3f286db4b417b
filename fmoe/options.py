"""What a generation was asked for: the caller's arguments over the checkpoint's defaults, checked once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal

from fmoe.functional.sampling import check_sampling

from .text import Text, eos_token_ids

Speculate = int | Literal["auto"]

MOST_DRAFTS = 8  # of a step
MOST_TRIED = 3  # of those that "auto" tries
_NUMBERS = MappingProxyType(
    {"temperature": Real, "top_p": Real, "top_k": Integral, "min_p": Real, "repetition_penalty": Real}
)


@dataclass(frozen=True, slots=True)
class Defaults:
    """How the checkpoint wants to be sampled (generation_config.json), and which tokens end a text."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """One generation, everything decided."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int
    stop: tuple[str, ...]
    eos_ids: tuple[int, ...]  # empty where EOS is ignored
    logprobs: int | None
    speculate: Speculate = 0  # drafts of a step; "auto" is as many as pays

    @property
    def most_drafts(self) -> int:
        """Drafts of the longest step."""
        return MOST_TRIED if self.speculate == "auto" else self.speculate

    @property
    def draft_room(self) -> int:
        """Positions behind a row's last token that its drafts take in the caches."""
        return 2 * (self.most_drafts + 1) if self.most_drafts else 0


def is_integer(value: object, /) -> bool:
    """Tell a whole number, numpy's too; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_speculate(speculate: Any, /) -> Speculate:
    """Raise ValueError unless this is what generate takes."""
    if isinstance(speculate, str) and speculate == "auto":
        return "auto"
    if not is_integer(speculate) or not 0 <= speculate <= MOST_DRAFTS:
        raise ValueError(f"speculate={speculate!r} must be 'auto' or an int in 0..{MOST_DRAFTS} (drafts of a step)")
    return int(speculate)


def read_defaults(
    generation_config: Mapping[str, Any] | None, config: Mapping[str, Any], text: Text | None, /
) -> Defaults:
    """Read generation_config.json; without ``do_sample`` it means greedy.

    Raises:
        ValueError: a value that cannot be sampled with; the message names the file.
    """
    eos_ids = eos_token_ids(generation_config, config, text)
    said = generation_config or {}
    do_sample = said.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ValueError(
            f"generation_config.json: do_sample must be true or false, got {do_sample!r:.80}; correct the file"
        )
    found = {key: value for key in _NUMBERS if (value := said.get(key)) is not None}
    for key, value in found.items():
        # of the right type even where it is not used: a file that is wrong here is wrong elsewhere
        if isinstance(value, bool) or not isinstance(value, _NUMBERS[key]):
            expected = "an int" if _NUMBERS[key] is Integral else "a number"
            raise ValueError(f"generation_config.json: {key}={value!r:.80} must be {expected}; correct the file")
    if not do_sample:
        found = {key: value for key, value in found.items() if key == "repetition_penalty"}
    else:
        found.setdefault("temperature", 1.0)
    try:
        check_sampling(**{"temperature": 0.0, **found})
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return Defaults(**found, eos_ids=eos_ids)


def resolve_options(
    defaults: Defaults,
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
    seed: int,
    stop: str | Sequence[str] | None,
    ignore_eos: bool,
    logprobs: int | None,
    speculate: Speculate = 0,
) -> Options:
    """Put arguments over defaults and check them.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """
    if not is_integer(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an int >= 1")
    if logprobs is not None and not (is_integer(logprobs) and 0 <= logprobs <= vocab_size):
        raise ValueError(f"logprobs={logprobs!r} must be None or an int in 0..{vocab_size} (the vocabulary)")
    stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    stops = () if stop is None else stops
    if any(not isinstance(s, str) or not s for s in stops):
        raise ValueError(f"stop={stop!r} must be a non-empty string or a list of them")
    options = Options(
        max_new_tokens=int(max_new_tokens),
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=defaults.top_k if top_k is None else top_k,
        min_p=defaults.min_p if min_p is None else min_p,
        repetition_penalty=defaults.repetition_penalty if repetition_penalty is None else repetition_penalty,
        seed=seed,
        stop=stops,
        eos_ids=() if ignore_eos else defaults.eos_ids,
        logprobs=None if logprobs is None else int(logprobs),
        speculate=check_speculate(speculate),
    )
    check_sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    return options
