"""The plan: which implementation, with which settings, runs an operator at each number of tokens. Pure values.

``make_plan`` looks measured entries up and falls back level by level: the same token count of this machine's table,
its nearest one, the same of the table that comes with fmoe, a built-in rule. Nothing here measures or reads a file.

Letters: T tokens, E routed experts, S shared slots, K routed experts per token, D hidden, F expert width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import torch

from .linear_settings import FP8_TOKENS, MAX_TOKENS, default_linear_settings, linear_to_ints
from .settings import PATHS, TILED, default_settings, find_target, settings_to_ints

# How an operator runs. Of "moe": per_slot, loop, dense and grouped are the functions of functional/experts.py;
# triton is the kernels; apart and beside are the kernels with the shared experts as a dense MLP, after the routed ones
# or on a second stream; aiter is AMD's. Of "linear": library is torch's product, triton the kernel of few rows, and
# quantized that of many, which are rounded to FP8.
Implementation = Literal[
    "per_slot", "loop", "dense", "grouped", "triton", "apart", "beside", "aiter", "library", "quantized"
]
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    "per_slot", "loop", "dense", "grouped", "triton", "apart", "beside", "aiter", "library", "quantized",
)  # fmt: skip
Operator = Literal["moe", "linear"]

# Token counts that are measured. Any other one takes the nearest, by ratio.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LINEAR_BUCKETS = (1, 2, 4, 8)  # rows above are the library's; in FP8 blocks, which it does not read, those above 16
FP8_BUCKETS = (16, 32, FP8_TOKENS)  # on Hopper, where kernels take more rows of FP8 blocks
QUANTIZED_TOKENS = 512  # rows from which products in FP8 pay for the rounding
FP8 = "float8_e4m3fn"
NEAR = 4.0  # an entry stands in for token counts up to this ratio away

# The kernels' first two paths have one program row for each (token, expert) pair, and a grid has no more rows.
MAX_PAIRS = 65535
KERNELS: tuple[Implementation, ...] = ("triton", "apart", "beside")
UNBOUNDED: tuple[Implementation, ...] = ("grouped", "aiter", "library")  # their memory grows with the tokens alone

# One operator of a table: token count -> entry.
Entries = Mapping[int, "Entry"]


@dataclass(frozen=True, slots=True)
class Key:
    """An operator and all that its speed depends on besides the device.

    sizes: of "moe" E, K, S, gate rows, D, F; of "linear" output rows, D.
    dtype: of the weights; float8_e4m3fn are those in FP8 blocks, whatever x has.
    variant: of "moe", what its experts are that those of kernels are not, such as "biased"; mostly nothing.
    """

    operator: Operator
    sizes: tuple[int, ...]
    dtype: str
    variant: str = ""

    def __str__(self) -> str:
        """Write it for a table and for people."""
        names = ("E", "K", "S", "G", "D", "F") if self.operator == "moe" else ("N", "D")
        sizes = " ".join(f"{n}{v}" for n, v in zip(names, self.sizes, strict=True))
        return f"{self.operator} {sizes} {self.dtype} {self.variant}".rstrip()


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device, with the versions that measurements on it depend on."""

    kind: Literal["cpu", "cuda", "hip"]
    name: str
    arch: str
    units: int  # multiprocessors, compute units, or CPU threads
    versions: str  # of torch, Triton, CUDA or HIP, and of the kernels' source


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured to be best.

    timings: each candidate, as ``describe_choice`` writes it, with its microseconds or why it has none; for audit.
    """

    implementation: Implementation
    settings: tuple[int, ...]
    us: float
    timings: tuple[tuple[str, float | str], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """What runs from the row before up to ``bound`` tokens; the last row's bound is -1, without end."""

    bound: int
    implementation: Implementation
    settings: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of one operator, by rising bound."""

    key: Key
    rows: tuple[Row, ...]


def moe_key(
    experts: int,
    top_k: int,
    slots: int,
    gate_rows: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    /,
    *,
    variant: str = "",
) -> Key:
    """Name a mixture-of-experts layer."""
    return Key("moe", (experts, top_k, slots, gate_rows, hidden, width), str(dtype).removeprefix("torch."), variant)


def linear_key(rows: int, hidden: int, dtype: torch.dtype, /) -> Key:
    """Name a dense projection of weights [rows, hidden]."""
    return Key("linear", (rows, hidden), str(dtype).removeprefix("torch."))


def buckets_of(operator: Operator) -> tuple[int, ...]:
    """Token counts that an operator is measured at."""
    return BUCKETS if operator == "moe" else LINEAR_BUCKETS


def bucket_bounds(buckets: Sequence[int]) -> list[int]:
    """Largest token count of each bucket: the geometric middle to the next, and -1, without end, for the last."""
    return [math.isqrt(a * b) for a, b in pairwise(buckets)] + [-1]


def make_plan(
    key: Key,
    device: Device,
    /,
    *,
    tuned: Entries | None = None,
    shipped: Entries | None = None,
    allowed: Sequence[Implementation],
) -> Plan:
    """Choose for every bucket of a key.

    Args:
        key: what is planned.
        device: where it will run.
        tuned: entries measured on this machine with these versions.
        shipped: entries of the same key and device name that come with fmoe.
        allowed: implementations that can run there and read the loaded weight layout; at least one.

    Returns:
        Plan.

    Raises:
        ValueError: nothing is allowed.
    """
    if not allowed:
        raise ValueError(f"no implementation of {key} is allowed; name at least one")
    levels = [(name, _allowed(entries, allowed)) for name, entries in (("tuned", tuned), ("shipped", shipped))]
    buckets = buckets_of(key.operator)
    rows = [
        _choose_row(key, device, bucket, bound, levels, allowed)
        for bucket, bound in zip(buckets, bucket_bounds(buckets), strict=True)
    ]
    if key.operator == "linear":
        end = MAX_TOKENS if key.dtype == FP8 and not _multiplies_fp8(key, device, allowed) else max(LINEAR_BUCKETS)
        rows = [*(row if row.bound >= 0 else _bounded(row, end) for row in rows), *_rows_of_many(key, device, allowed)]
    return Plan(key, tuple(rows))


def _multiplies_fp8(key: Key, device: Device, allowed: Sequence[Implementation]) -> bool:
    """Tell whether weights are in whole FP8 blocks and kernels for them are tuned for the device."""
    whole = key.dtype == FP8 and key.sizes[1] % 128 == 0
    return whole and "triton" in allowed and find_target(device.kind, device.arch) == "hopper"


def _rows_of_many(key: Key, device: Device, allowed: Sequence[Implementation]) -> list[Row]:
    """Leave many rows to the library; on Hopper, those of FP8 blocks only from more than the kernel takes.

    There they are rounded to FP8 from some number on.
    """
    rows = [Row(-1, "library", (), "rule")]
    if _multiplies_fp8(key, device, allowed):
        few = [Row(n, *_default_linear(key, device, n, allowed), "rule") for n in FP8_BUCKETS]
        return [*few, _bounded(rows[0], QUANTIZED_TOKENS - 1), Row(-1, "quantized", (), "rule")]
    return rows


def _bounded(row: Row, bound: int) -> Row:
    return Row(bound, row.implementation, row.settings, row.source)


def _allowed(entries: Entries | None, allowed: Sequence[Implementation]) -> dict[int, Entry]:
    return {tokens: entry for tokens, entry in (entries or {}).items() if entry.implementation in allowed}


def _choose_row(
    key: Key,
    device: Device,
    bucket: int,
    bound: int,
    levels: Sequence[tuple[str, Mapping[int, Entry]]],
    allowed: Sequence[Implementation],
) -> Row:
    for name, entries in levels:
        near = find_near(key, entries, bucket, bound)
        if near is not None:
            source = name if near == bucket else f"{name} at {near}"
            return Row(bound, entries[near].implementation, entries[near].settings, source)
    implementation, settings = default_choice(key, device, bucket, allowed)
    return Row(bound, implementation, settings, "rule")


def find_near(key: Key, entries: Entries, bucket: int, bound: int, /) -> int | None:
    """Find the token count of the entry nearest to a bucket, by ratio, that runs up to its bound; None is too far.

    Of two as near, the smaller count wins.
    """
    usable = [
        tokens
        for tokens, entry in entries.items()
        if 1 / NEAR <= tokens / bucket <= NEAR and runs_up_to(key, entry.implementation, entry.settings, bound)
    ]
    return min(usable, key=lambda tokens: (abs(math.log2(tokens / bucket)), tokens), default=None)


def runs_up_to(key: Key, implementation: Implementation, settings: tuple[int, ...], bound: int, /) -> bool:
    """Say whether an implementation of an operator takes ``bound`` tokens; -1 is any number of them."""
    if key.operator == "linear" or implementation in UNBOUNDED:
        return True
    if implementation in KERNELS and PATHS[settings[0]] in TILED:
        return True
    pairs = bound * (key.sizes[1] + key.sizes[2])
    return bound >= 0 and (implementation not in KERNELS or pairs <= MAX_PAIRS)


def default_choice(
    key: Key, device: Device, tokens: int, allowed: Sequence[Implementation], /
) -> tuple[Implementation, tuple[int, ...]]:
    """Choose by rule, for what was never measured."""
    if key.operator == "linear":
        return _default_linear(key, device, tokens, allowed)
    experts, top_k, slots, _, hidden, width = key.sizes
    if "aiter" in allowed:
        return "aiter", ()
    if "triton" in allowed:
        target = find_target(device.kind, device.arch)
        dtype: torch.dtype = getattr(torch, key.dtype)
        settings = default_settings(tokens, experts, top_k, slots, hidden, width, dtype, target=target)
        return "triton", tuple(settings_to_ints(settings))
    # On a GPU one by one waits for the host, and densely reads all experts.
    wanted = default_function(tokens, top_k + slots, experts + slots) if device.kind == "cpu" else "grouped"
    return (wanted if wanted in allowed else allowed[-1]), ()


def _default_linear(
    key: Key, device: Device, tokens: int, allowed: Sequence[Implementation]
) -> tuple[Implementation, tuple[int, ...]]:
    """Leave to the library what it reads, all but FP8 blocks."""
    if "triton" in allowed and key.dtype == FP8:
        dtype: torch.dtype = getattr(torch, key.dtype)
        target = find_target(device.kind, device.arch)
        outputs, hidden = key.sizes
        return "triton", tuple(linear_to_ints(default_linear_settings(tokens, outputs, hidden, dtype, target)))
    return ("library" if "library" in allowed else allowed[0]), ()


# Up to this many tokens, one row after the other is fastest (float32, one core, 17 experts of 64 x 256, weights not in
# the cache: 2 tokens 222 us, grouped 294 us, dense 340 us).
LOOP_TOKENS = 2

# Up to this many tokens, when every expert is hit about twice, running all experts densely is at least as fast as
# sorting on one core (8 tokens 570 us, grouped 583 us), and faster on two, which share its products.
DENSE_TOKENS = 32


def default_function(tokens: int, chosen: int, experts: int, /) -> Implementation:
    """Choose among the functions of functional/experts.py: one by one, all experts densely, or sorted and grouped.

    Args:
        tokens: T.
        chosen: columns of the routing, K + S.
        experts: of the stacks, E + S.
    """
    if tokens <= LOOP_TOKENS:
        return "loop"
    if tokens <= DENSE_TOKENS and tokens * chosen >= 2 * experts:
        return "dense"
    return "grouped"


def plan_to_ints(plan: Plan, /) -> tuple[int, ...]:
    """Write a plan as integers, for an op's ``int[]`` argument; neighbours that run the same become one row."""
    rows: list[Row] = []
    for row in plan.rows:
        if rows and (rows[-1].implementation, rows[-1].settings) == (row.implementation, row.settings):
            rows.pop()
        rows.append(row)
    flat: list[int] = []
    for row in rows:
        flat += [row.bound, IMPLEMENTATIONS.index(row.implementation), len(row.settings), *row.settings]
    return tuple(flat)


@lru_cache(maxsize=256)
def rows_from_ints(values: tuple[int, ...], /) -> tuple[tuple[int, Implementation, tuple[int, ...]], ...]:
    """Read what ``plan_to_ints`` wrote: (bound, implementation, settings) of each row."""
    rows, at = [], 0
    while at < len(values):
        bound, index, count = values[at : at + 3]
        rows.append((bound, IMPLEMENTATIONS[index], values[at + 3 : at + 3 + count]))
        at += 3 + count
    if at != len(values) or not rows or rows[-1][0] != -1:
        raise ValueError(f"{len(values)} integers are no plan; write one with plan_to_ints")
    return tuple(rows)


def select_implementation(values: Sequence[int], tokens: int, /) -> tuple[Implementation, tuple[int, ...]]:
    """Find the implementation and settings for a number of tokens in a plan written as integers."""
    for bound, implementation, settings in rows_from_ints(tuple(values)):
        if tokens <= bound or bound == -1:
            return implementation, settings
    raise AssertionError("the last row has no bound")


def describe_choice(implementation: Implementation, settings: tuple[int, ...], /) -> str:
    """Write an implementation with its settings in one word."""
    return ":".join([implementation, *([",".join(map(str, settings))] if settings else [])])


def entry_to_json(entry: Entry, /) -> dict[str, Any]:
    """Write an entry for a table in a file."""
    values = {"implementation": entry.implementation, "settings": list(entry.settings), "us": round(entry.us, 2)}
    return values | ({"timings": dict(entry.timings)} if entry.timings else {})


def entries_from_json(values: Any, /) -> dict[int, Entry]:
    """Read one key of a table in a file.

    Raises:
        ValueError: it is not of that form.
    """
    try:
        if any(int(tokens) < 1 for tokens in values):
            raise ValueError("a token count below 1")
        return {
            int(tokens): Entry(
                IMPLEMENTATIONS[IMPLEMENTATIONS.index(entry["implementation"])],
                tuple(int(value) for value in entry["settings"]),
                float(entry["us"]),
                tuple(
                    (str(name), value if isinstance(value, str) else float(value))
                    for name, value in entry.get("timings", {}).items()
                ),
            )
            for tokens, entry in values.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a tuned table holds {str(values)[:80]!r}: expected token counts with entries") from error
