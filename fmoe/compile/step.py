"""Compiled graphs: one per kind of layer and variant, whatever the number of layers.

Bucket policy. Batch, tokens and cache slots are symbolic, so one graph serves every size from 2 up; torch.compile
specialises sizes 0 and 1, which leaves four variants of each layer kind (batch 1 or more, tokens 1 or more). Two
sizes are rounded so that they never are 1 and never meet: a cache holds a multiple of 64 slots plus 64, and a step
looks at a multiple of 64 of them. Prefill runs row by row in chunks, decode in batches.

Guards. What a call checks is its arguments but the parameters: these choose a graph by their structure, once. The
function itself, its config and kernels cannot change behind a graph, for each function has code of its own. Checking
all that again took 45 us a layer on a CPU, 75 us with drafts.
"""

import functools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmoe.functional.sampling import sample_greedy
from fmoe.functional.speculate import count_kept, take_last

SLOTS = 64
MAX_GRAPHS = 64  # per function; far above what any mix of sizes needs

Layer = Callable[..., Any]


class Cursor(NamedTuple):
    """Where decoding stands in each row, at addresses that do not change."""

    tokens_B: Tensor  # int64, the newest, which no layer has seen
    lengths_B: Tensor  # int64, tokens in the caches
    counters_B: Tensor  # int64, tokens generated


def advance_(tokens_B: Tensor, check_B: Tensor, cursor: Cursor, /) -> Tensor:
    """Move on by one token, in place.

    Args:
        tokens_B: the tokens just chosen.
        check_B: NaN or infinite where a row's logits were.
        cursor: written.

    Returns:
        int64, the tokens, or ``-1 - token`` where ``check`` is not finite; one transfer tells the host both.
    """
    codes_B = torch.where(check_B.isfinite(), tokens_B, -1 - tokens_B)
    cursor.tokens_B.copy_(tokens_B)
    cursor.lengths_B.add_(1)
    cursor.counters_B.add_(1)
    return codes_B


class Verdict(NamedTuple):
    """What became of the drafts of each row's last step, and how far it may go, at addresses that do not change."""

    kept_B: Tensor  # int64, tokens that the last step gave
    limits_B: Tensor  # int64, tokens in the caches with which a row ends
    drafts_BN: Tensor  # int64, of the step


def accept_(chosen_BT: Tensor, check_BT: Tensor, cursor: Cursor, verdict: Verdict, /) -> Tensor:
    """Move on by the drafts that are right and the token behind them, in place; a row at its limit stands still.

    Args:
        chosen_BT: the tokens chosen behind the newest one and behind each draft.
        check_BT: NaN or infinite where the logits were.
        cursor: written.
        verdict: read, and kept written.

    Returns:
        int64 [B, T + 1]: codes as of ``advance_``, of which the first ones count, and how many.
    """
    codes_BT = torch.where(check_BT.isfinite(), chosen_BT, -1 - chosen_BT)
    kept_B = count_kept(chosen_BT, verdict.drafts_BN, verdict.limits_B - cursor.lengths_B)
    newest_B = torch.where(kept_B > 0, take_last(kept_B, chosen_BT)[:, 0], cursor.tokens_B)
    cursor.tokens_B.copy_(newest_B)
    cursor.lengths_B.add_(kept_B)
    cursor.counters_B.add_(kept_B)
    verdict.kept_B.copy_(kept_B)
    return torch.cat((codes_BT, kept_B[:, None]), 1)


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Steps:
    """The functions that a step calls: one per layer kind, and the head.

    start: looks one token of each row up and places it, where no mask is needed; None composes it.
    choose: the head and the greedy choice in one, ``(stream, norm, head) -> (tokens [B], best logits [B])``; or None.
    advance: ``advance_``.
    masked: one token of each row needs a mask over visible slots, whose number grows; else kernels read positions.
    forget: lets go of parameters that were seen; called where a generation begins.
    """

    layers: Mapping[str, Layer]
    logits: Callable[..., Tensor]
    compiled: bool
    start: Callable[..., Any] | None = None
    choose: Callable[..., tuple[Tensor, Tensor]] | None = None
    advance: Callable[..., Tensor] = advance_
    masked: bool = True
    forget: Callable[[], None] = _do_nothing


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """The functions that a step of the newest token and its drafts calls, T tokens of each row.

    layers: one per layer kind, as in Steps, with drafts that may be dropped.
    join: what the draft layer reads, ``(hidden [B, T, D], DraftParams, Following) -> stream``.
    head: ``(stream, norm, head) -> (normed [B, T, D], logits [B, T, V])``.
    take: the stream behind the last token that was kept, ``(stream, kept [B]) -> stream``.
    start: as in Steps, where no mask is needed.
    choose: norm and greedy choice, ``(stream, norm, head) -> (normed, tokens [B, T], best logits [B, T])``; or None.
    accept: ``accept_``.
    finish: ``head``, the greedy choice and ``accept`` in one, ``(stream, norm, head, cursor, verdict) -> (normed,
        codes, tokens [B, T])``; None composes it.
    draft: ``join``, the draft layer and the greedy choice behind the last token that was kept in one, as
        ``draft_greedily``; None composes it.
    masked: the T tokens need a mask.
    forget: as in Steps.
    """

    layers: Mapping[str, Layer]
    join: Callable[..., Any]
    head: Callable[..., tuple[Tensor, Tensor]]
    take: Callable[..., Any]
    start: Callable[..., Any] | None = None
    choose: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    accept: Callable[..., Tensor] = accept_
    finish: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    draft: Callable[..., tuple[Tensor, Tensor]] | None = None
    masked: bool = True
    forget: Callable[[], None] = _do_nothing


def finish_greedily(
    stream: Any, norm_D: Tensor, head_VD: Tensor, cursor: Cursor, verdict: Verdict, /, *, head: Callable[..., Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compose ``DraftSteps.finish`` of a ``head``."""
    normed_BTD, logits_BTV = head(stream, norm_D, head_VD)
    chosen_BT = sample_greedy(logits_BTV.flatten(0, 1)).view(logits_BTV.shape[:2])
    return normed_BTD, accept_(chosen_BT, logits_BTV.sum(-1), cursor, verdict), chosen_BT


def compile_draft_steps(steps: DraftSteps, *, device: torch.device, backend: str = "inductor") -> DraftSteps:
    """Compile each function when it is first called, for a fixed number of tokens; ``choose`` consists of kernels."""

    held: list[dict[int, Any]] = []

    def compiled(name: str, function: Layer) -> Layer:
        return _compile_lazily(name, function, device, backend, held, few=True)

    return replace(
        steps,
        forget=functools.partial(_clear, held),
        layers={kind: compiled(kind, layer) for kind, layer in steps.layers.items()},
        join=compiled("join", steps.join),
        head=compiled("head", steps.head),
        take=steps.take if device.type == "cpu" else _compile_sizes("take", steps.take, backend),
        start=None if steps.start is None else compiled("start", steps.start),
        finish=None if steps.finish is None else compiled("finish", steps.finish),
        draft=None if steps.draft is None else compiled("draft", steps.draft),
        accept=steps.accept if device.type == "cpu" else _compile_sizes("accept", steps.accept, backend),
    )


def cache_slots(tokens: int) -> int:
    """Slots that a cache for ``tokens`` positions gets."""
    return visible_slots(tokens) + SLOTS


def visible_slots(tokens: int) -> int:
    """Slots that a step looks at when the longest row will have ``tokens`` positions."""
    return max(-(-tokens // SLOTS), 1) * SLOTS


def compile_steps(
    layers: Mapping[str, Layer],
    logits: Callable[..., Tensor],
    *,
    device: torch.device,
    backend: str = "inductor",
    start: Callable[..., Any] | None = None,
    choose: Callable[..., tuple[Tensor, Tensor]] | None = None,
    masked: bool = True,
) -> Steps:
    """Compile each function when it is first called; nothing of the compiler is loaded before.

    Args:
        layers: one function per layer kind, ``(x [B, T, D] or a tuple of such, params, ...)``.
        logits: the head, ``(x [rows, D], ...)``.
        device: where they will run.
        backend: of torch.compile.
        start: as in Steps, ``(tokens [B, 1], ...)``.
        choose: as in Steps; it consists of kernels, so it is not compiled.
        masked: as in Steps.
    """

    held: list[dict[int, Any]] = []

    def compiled(name: str, function: Layer) -> Layer:
        return _compile_lazily(name, function, device, backend, held)

    return Steps(
        {kind: compiled(kind, layer) for kind, layer in layers.items()},
        compiled("logits", logits),
        compiled=True,
        start=None if start is None else compiled("start", start),
        choose=choose,
        advance=advance_ if masked else _compile_sizes("advance", advance_, backend),
        masked=masked,
        forget=functools.partial(_clear, held),
    )


def _clear(held: list[dict[int, Any]]) -> None:
    for known in held:
        known.clear()


class _Graphs(NamedTuple):
    """The graphs of one function for one use, and the variants that were traced."""

    get: Callable[[], Callable[..., Any]]
    traced: set[tuple[int, ...]]


def _compile_lazily(
    name: str,
    function: Callable[..., Any],
    device: torch.device,
    backend: str,
    held: list[dict[int, Any]],
    /,
    *,
    few: bool = False,
) -> Callable[..., Any]:
    """Compile for one token and for many of any number, or for each number of a ``few``, which is a constant then.

    What is put into ``held`` holds parameters, until it is cleared.
    """
    # On a CPU the small kernels of a decode step cost less than the Python that calls them: C++ calls them there.
    fast = {"cpp_wrapper": True} if backend == "inductor" and device.type == "cpu" else {}
    known: dict[int, tuple[Any, _Graphs, _Graphs]] = {}  # by the parameters, held here: an id may be used again
    held.append(known)
    graphs: dict[Hashable, tuple[_Graphs, _Graphs]] = {}  # by their structure

    def find(params: Any) -> tuple[Any, _Graphs, _Graphs]:
        structure = describe_structure(params)
        if structure not in graphs:
            graphs[structure] = (
                _make_graphs(name, function, backend, fast, fixed=_FIXED),
                _make_graphs(name, function, backend, {}, fixed=_FIXED),
            )
        return known.setdefault(id(params), (params, *graphs[structure]))

    def call(x: Any, params: Any, *arguments: Any) -> Any:
        _, decode, prefill = known.get(id(params)) or find(params)
        first = x if isinstance(x, Tensor) else x[0]
        get, traced = decode if few or first.dim() == 2 or first.shape[1] == 1 else prefill
        # Other parameters of one structure may come with other caches, which are traced anew: marked, too.
        variant: tuple[int, ...] = (id(params), *(size == 1 for size in first.shape[:-1]))
        if few:
            variant = (id(params), first.shape[0] == 1, first.shape[1])
        elif first.dim() > 2:
            # A row's part of a cache begins behind the start of its memory, or at it, which is another graph.
            variant += tuple(_begins_memory(argument) for argument in arguments)
            if first.shape[1] > 1:
                variant += tuple(getattr(argument, "visible_M", None) is None for argument in arguments)
        if variant in traced:
            return get()(x, params, *arguments)
        # Marks and the limit matter while tracing alone; this may trace. Each dtype and 0/1 variant is one more graph
        # of the same code object, and torch's own limit is 8.
        _mark_sizes(x, arguments, few)
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            y = get()(x, params, *arguments)
        traced.add(variant)
        return y

    return call


def _begins_memory(argument: Any) -> bool:
    first = argument[0] if isinstance(argument, tuple) else argument
    return not isinstance(first, Tensor) or first.storage_offset() == 0


def _compile_sizes(name: str, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function all of whose sizes may change."""
    graphs = _make_graphs(name, function, backend, {}, dynamic=True)
    return lambda *arguments: graphs.get()(*arguments)


def describe_structure(params: Any, /) -> Hashable:
    """Describe what a graph depends on in parameters: types, and of each tensor all but its values and its place.

    Args:
        params: nested tuples of tensors and of what can be hashed.
    """
    places: dict[int, int] = {}

    def describe(part: Any) -> Hashable:
        if isinstance(part, tuple):
            return type(part), *map(describe, part)
        if not isinstance(part, Tensor):
            return type(part), part
        place = places.setdefault(id(part), len(places))  # a graph takes a tensor that stands twice once
        kept = (part.is_inference(), part.requires_grad)
        return type(part), place, part.dtype, part.device, tuple(part.shape), part.stride(), *kept

    return describe(params)


# Names of what guards look at and no call can change: globals, the function; and the parameters.
_CODE = re.compile(r"G\[|(L\[')?function\b")
_FIXED = re.compile(rf"{_CODE.pattern}|(L\[')?arguments('\])?\[1\]")
_ALIASES = ("DUPLICATE_INPUT", "NO_TENSOR_ALIASING")


def _make_graphs(
    name: str,
    function: Callable[..., Any],
    backend: str,
    options: dict[str, Any],
    *,
    dynamic: bool = False,
    fixed: re.Pattern[str] = _CODE,
) -> _Graphs:
    def keep(guards: Sequence[Any]) -> list[bool]:
        return [not (_CODE if guard.guard_type in _ALIASES else fixed).match(guard.name) for guard in guards]

    def graph(*arguments: Any) -> Any:
        return function(*arguments)

    # Graphs are kept with the code object. A code of its own for each function of each model keeps their graphs
    # apart, so that a call searches only its own.
    graph.__code__ = graph.__code__.replace(co_name=name)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        chosen = {**options, "guard_filter_fn": keep}
        return torch.compile(graph, fullgraph=True, dynamic=dynamic, backend=backend, options=chosen)

    return _Graphs(compiled, set())


# Dimensions whose size changes from step to step, by the letters that end a tensor's name.
_SYMBOLIC = {
    "k_BJMC": (0, 2),
    "v_BJMC": (0, 2),
    "latent_BMR": (0, 1),
    "window_mask_BTM": (0, 1, 2),
    "window_BWN": (0,),
    "state_BHKV": (0,),
    "inputs_BTN": (0,),
    "k_BTGK": (0,),
    "written_BTHV": (0,),
    "g_BTH": (0,),
    "tokens_BT": (0, 1),
    "tokens_B": (0,),
    "counters_B": (0,),
    "kept_B": (0,),
    "limits_B": (0,),
    "drafts_BN": (0,),
    "positions_BT": (0, 1),
    "cos_BTR": (0, 1),
    "sin_BTR": (0, 1),
    "mask_BTM": (0, 1, 2),
    "visible_M": (0,),
    "lengths_B": (0,),
}


def _mark_sizes(x: Any, arguments: tuple[Any, ...], few: bool) -> None:
    for part in (x,) if isinstance(x, Tensor) else x:
        for dim in (0,) if few else range(part.dim() - 1):
            _mark(part, dim)
    for argument in arguments:
        for name in getattr(argument, "_fields", ()):
            for dim in _SYMBOLIC.get(name, ()):
                if not few or name.rpartition("_")[2][dim] != "T":
                    _mark(getattr(argument, name), dim)


def _mark(tensor: Tensor | None, dim: int) -> None:
    if tensor is not None and tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)
