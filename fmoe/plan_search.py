"""Measure what a model's operators run best with on this machine, keep it, and plan by it."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from fmoe.compile.adapt import adapt_entry
from fmoe.compile.autotune import Clock, Measure, Task, tune_keys
from fmoe.compile.candidates import MOST, Candidate, Inputs, list_candidates
from fmoe.compile.device import describe_device
from fmoe.compile.linear_ops import linear_planned
from fmoe.compile.measure import activation_dtype, make_measure
from fmoe.compile.ops import compute_moe_op, moe_sizes
from fmoe.compile.plan import (
    BUCKETS,
    LINEAR_BUCKETS,
    NEAR,
    Device,
    Entry,
    Implementation,
    Key,
    Plan,
    Row,
    bucket_bounds,
    linear_key,
    make_plan,
    plan_to_ints,
)
from fmoe.compile.plan_tables import Tables, read_other_tables, read_tables, write_entries
from fmoe.compile.select import Requested, list_allowed
from fmoe.compile.tune_ops import keep_compiling
from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import Fp8, Weight, weight_dtype, weight_shape
from fmoe.functional.routing import RouterConfig

from .options import is_integer

LOG = logging.getLogger("fmoe")

BATCH_SIZES = (1, 2, 4, 8, 16)
MAX_TOKENS = 16384
BUDGET_S = 60.0
KEY_BUDGET_S = 2.0
PREFILL_FROM = 32  # tokens; shorter prompts run as batches of their length do
COMPILE_SHARE = 0.4  # of the budget


@dataclass(frozen=True, slots=True)
class Search:
    """What to measure, and for how long.

    batch_sizes: of decode steps.
    max_tokens: of a prompt, or of a chunk of it.
    budget_s: for everything; what is not measured when it is over keeps its place in the tables or the rule.
    key_budget_s: for one operator at one token count.
    force: measure again what was measured on this machine.
    candidates: most of one operator at one token count.
    """

    batch_sizes: tuple[int, ...] = BATCH_SIZES
    max_tokens: int = MAX_TOKENS
    budget_s: float = BUDGET_S
    key_budget_s: float = KEY_BUDGET_S
    force: bool = False
    candidates: int = MOST

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not isinstance(sizes, tuple) or not all(is_integer(size) and size >= 1 for size in sizes):
            raise ValueError(f"batch_sizes={sizes!r} must be integers >= 1, such as (1, 8)")
        for name in ("max_tokens", "candidates"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be an int >= 1")
        for name in ("budget_s", "key_budget_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name}={value!r} must be a number of seconds, 0 or more")


def list_buckets(key: Key, search: Search, /) -> list[int]:
    """List the token counts to measure an operator at, decode first, then prompts with the widest steps first."""
    buckets = BUCKETS if key.operator == "moe" else LINEAR_BUCKETS
    ends = bucket_bounds(buckets)
    decode = [
        next(bucket for bucket, end in zip(buckets, ends, strict=True) if size <= end or end < 0)
        for size in sorted(search.batch_sizes)
        if key.operator == "moe" or size <= max(LINEAR_BUCKETS)
    ]
    prefill = [bucket for bucket in buckets if PREFILL_FROM <= bucket <= search.max_tokens]
    # An entry stands in for its neighbours: when the time is over, every third count is better than the first third.
    turns = [bucket for first in (1, 0, 2) for bucket in prefill[first::3]]
    return list(dict.fromkeys([*decode, *turns]))


def find_weights(params: Any, router: RouterConfig | None, keys: Sequence[Key], /) -> dict[Key, list[Any]]:
    """Find the weights of each key: MoEParams, or the matrices of dense projections, layer by layer."""
    found: dict[Key, list[Any]] = {key: [] for key in keys}
    for layer in params.layers:
        if isinstance(layer.mlp, MoEParams) and router is not None:
            found.get(_moe_key(layer.mlp, router), []).append(layer.mlp)
    for w in _find_matrices(params):
        rows, columns = weight_shape(w)
        found.get(linear_key(rows, columns, weight_dtype(w)), []).append(w)
    return {key: weights for key, weights in found.items() if weights}


def _find_matrices(values: Any) -> Iterator[Weight]:
    """Find the matrices in nested tuples; one in FP8 blocks is found with its factors and the rows behind it."""
    if isinstance(values, Fp8 | Tensor):
        wide = isinstance(values, Fp8) or (values.is_floating_point() and values.dtype.itemsize > 1)
        if wide and len(weight_shape(values)) == 2:
            yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _find_matrices(value)


def _moe_key(params: MoEParams, router: RouterConfig) -> Key:
    dtype = str(weight_dtype(params.w_down_EDF)).removeprefix("torch.")
    return Key("moe", moe_sizes(params.w_router_ED, params.w_down_EDF, router), dtype)


def search_plans(
    params: Any,
    router: RouterConfig | None,
    keys: Sequence[Key],
    device: torch.device,
    /,
    *,
    requested: Requested,
    search: Search,
    progress: bool | None = None,
    clock: Clock = time.monotonic,
) -> tuple[Plan, ...]:
    """Measure what was never measured here, keep it in the cache folder, and plan by all that is known.

    Args:
        params: the model's; read only.
        router: the routing rule of its MoE layers.
        keys: its operators.
        device: where the parameters are.
        requested: kernels asked for by name.
        search: what to measure.
        progress: show a bar; None does so on a terminal only.
        clock: seconds.

    Returns:
        One plan for each key, in their order.

    Raises:
        RuntimeError: called while a graph is captured or traced, or kernels asked for by name cannot run.
    """
    _check_not_captured(device)
    described = describe_device(device)
    tables = read_tables(described)
    allowed = {key: list_allowed(key, device, requested=requested) for key in keys}
    weights = find_weights(params, router, keys)
    for key in keys:
        if key.variant:
            LOG.info("not tuned: %s (functions alone run it, by rule)", key)
    tasks = _list_tasks([key for key in keys if key in weights], described, allowed, tables, search)
    found: dict[Key, dict[int, Entry]] = {}
    if tasks:
        with (
            torch.inference_mode(),
            torch.autocast(device.type, enabled=False),
            _show_bar(len(tasks), progress) as bar,
        ):
            found = _measure_tasks(tasks, described, device, weights, router, search, clock, bar.update)
    tuned = {key: {**tables.tuned.get(str(key), {}), **found.get(key, {})} for key in keys}
    return tuple(
        make_plan(key, described, tuned=tuned[key], shipped=tables.shipped.get(str(key)), allowed=allowed[key])
        for key in keys
    )


def _show_bar(total: int, progress: bool | None) -> "tqdm[NoReturn]":
    disable = None if progress is None else not progress
    return tqdm(total=total, desc="tuning", unit="sizes", file=sys.stderr, disable=disable)


def _check_not_captured(device: torch.device) -> None:
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if captured or torch.compiler.is_compiling():
        raise RuntimeError("tuning was started inside a captured or compiled region; call fmoe.tune before it")


def _list_tasks(
    keys: Sequence[Key],
    device: Device,
    allowed: Mapping[Key, Sequence[Implementation]],
    tables: Tables,
    search: Search,
) -> list[Task]:
    """List what to measure, the decode steps of all operators first."""
    sizes = [(key, turn, tokens) for key in keys for turn, tokens in enumerate(list_buckets(key, search))]
    sizes.sort(key=lambda size: (size[2] >= PREFILL_FROM, size[1]))
    others = read_other_tables(device)
    tasks = []
    for key, _, tokens in sizes:
        tuned = tables.tuned.get(str(key), {})
        if tokens in tuned and not search.force:
            continue
        near = [*_find_near(tuned, tokens), *_find_near(tables.shipped.get(str(key), {}), tokens)]
        near += [adapt_entry(entry, key, tokens, device) for entry in _find_near(others.get(str(key), {}), tokens)]
        candidates = list_candidates(key, device, tokens, allowed[key], near=near, limit=search.candidates)
        if len(candidates) > 1:
            tasks.append(Task(key, tokens, tuple(candidates)))
    return tasks


def _find_near(entries: Mapping[int, Entry], tokens: int) -> list[Entry]:
    near = [count for count in entries if 1 / NEAR <= count / tokens <= NEAR]
    return [entries[count] for count in sorted(near, key=lambda count: max(count / tokens, tokens / count))]


def _measure_tasks(
    tasks: list[Task],
    described: Device,
    device: torch.device,
    weights: Mapping[Key, Sequence[Any]],
    router: RouterConfig | None,
    search: Search,
    clock: Clock,
    update: Callable[[], object],
) -> dict[Key, dict[int, Entry]]:
    start = clock()
    inputs = {task.key: _describe_inputs(weights[task.key][0], router) for task in tasks}
    tasks = keep_compiling(tasks, described, inputs, budget_s=COMPILE_SHARE * search.budget_s)
    run = make_run(router)

    def prepare(key: Key, tokens: int) -> Measure:
        reference: Literal["grouped", "library"] = "grouped" if key.operator == "moe" else "library"
        return make_measure(key, tokens, device, run, weights[key], reference=reference)

    def keep(key: Key, tokens: int, entry: Entry) -> None:
        chosen = Candidate(entry.implementation, entry.settings)
        LOG.debug("tuned %s at %d tokens: %s, %.1f us", key, tokens, chosen, entry.us)
        write_entries(described, key, {tokens: entry})

    return tune_keys(
        tasks,
        prepare,
        clock,
        budget_s=max(search.budget_s - (clock() - start), 0.0),
        key_budget_s=search.key_budget_s,
        keep=keep,
        advance=update,
    )


def _describe_inputs(weights: MoEParams | Weight, router: RouterConfig | None) -> Inputs:
    rest_MD = weights.rest_MD if isinstance(weights, Fp8) else None
    return Inputs(
        router if isinstance(weights, MoEParams) else None,
        activation_dtype(weights),
        0 if rest_MD is None else rest_MD.shape[0],
    )


def make_run(router: RouterConfig | None, /) -> Callable[[Implementation, tuple[int, ...], Tensor, Any], Tensor]:
    """Make the function that runs an operator in a given way, through the ops that a model runs.

    Args:
        router: the routing rule of the MoE layers.
    """

    def run(implementation: Implementation, settings: tuple[int, ...], x_TD: Tensor, weights: Any) -> Tensor:
        row = Row(-1, implementation, settings, "candidate")
        if not isinstance(weights, MoEParams):
            shape, dtype = weight_shape(weights), weight_dtype(weights)
            rows = plan_to_ints(Plan(linear_key(shape[0], shape[1], dtype), (row,)))
            return linear_planned(x_TD, weights, plans=((shape, dtype, rows),))
        assert router is not None
        rows = plan_to_ints(Plan(_moe_key(weights, router), (row,)))
        plans = ((weight_shape(weights.w_down_EDF), weight_dtype(weights.w_down_EDF), rows),)
        return compute_moe_op(x_TD, weights, router, plans=plans)

    return run
