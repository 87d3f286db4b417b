"""What may run an operator: the default first, then what won nearby, then its neighbours by the cost model.

Letters: T tokens, E routed experts, S shared slots, K routed experts per token, D hidden, F expert width.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

import torch

from fmoe.functional.quant import BLOCK
from fmoe.functional.routing import RouterConfig

from .cost import distinct_experts, estimate_s, expert_block, fits, linear_block
from .linear_settings import LinearSettings, default_linear_settings, linear_from_ints, linear_to_ints
from .plan import (
    FP8,
    KERNELS,
    Device,
    Entry,
    Implementation,
    Key,
    bucket_bounds,
    buckets_of,
    default_choice,
    runs_up_to,
)
from .settings import TABLED, TILED, Settings, Tile, default_settings, find_target, settings_from_ints, settings_to_ints

MOST = 24  # candidates of one operator at one token count
MOST_NEAR = 3
FUNCTION_BYTES = 1 << 30  # that a plain function may gather or compute for nothing
LOOP_PAIRS = 4096
SLOT_PAIRS = 256
DENSE_TOKENS = 1024
STAGES: dict[str, tuple[int, ...]] = {"cuda": (4, 3, 5, 2), "hip": (2, 1), "cpu": (2,)}  # the likelier first
APART: tuple[Implementation, ...] = ("apart", "beside")
APART_TOKENS = 512  # beyond, a launch more or less does not show

# Of weights in FP8 blocks. (rows, depth, warps) of products of vectors:
FP8_VECTORS = (
    (8, 256, 2), (16, 128, 2), (4, 2048, 8), (8, 512, 4), (1, 2048, 4), (1, 4096, 4), (2, 1024, 2), (2, 2048, 4),
    (4, 512, 2), (4, 512, 4), (4, 1024, 4), (8, 256, 4), (8, 512, 2), (8, 512, 8), (8, 1024, 4), (8, 1024, 8),
    (16, 128, 4), (16, 256, 4), (16, 512, 4), (16, 512, 8), (32, 128, 4), (32, 256, 8), (2, 4096, 8), (1, 8192, 8),
    (2, 8192, 8), (4, 2048, 4), (8, 2048, 8), (4, 4096, 8),
)  # fmt: skip
FP8_STAGES: dict[str, tuple[int, ...]] = {"cuda": (5, 4, 3, 1), "hip": (2, 1), "cpu": (2,)}
# What was fastest for one row on an H200: of 12352 x 2048, 9216 x 2048 and 2048 x 4096.
FP8_LINEAR = tuple(
    LinearSettings(rows, depth, warps, stages, 1, dot=False, pdl=False)
    for rows, depth, warps, stages in ((8, 256, 2, 5), (16, 128, 2, 5), (4, 2048, 8, 1))
)
# And of Qwen3-Next's layer:
FP8_LAYER = Settings("slots", Tile(0, 1, 2048, 4, 2), Tile(1, 8, 256, 2, 4), Tile(1, 8, 512, 4, 4), token_down=True)
FUSED_TOKENS = 4  # beyond, choosing the experts in each program of gate-up takes longer than a launch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an operator."""

    implementation: Implementation
    settings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What kernels are compiled for besides an operator's key.

    router: the routing rule of an MoE layer; None is the plainest one.
    activations: dtype of x, where the weights are in FP8 blocks.
    rest: rows of a projection in FP8 blocks that are not quantised.
    """

    router: RouterConfig | None = None
    activations: torch.dtype = torch.bfloat16
    rest: int = 0


def list_candidates(
    key: Key,
    device: Device,
    tokens: int,
    allowed: Sequence[Implementation],
    /,
    *,
    near: Sequence[Entry] = (),
    limit: int = MOST,
) -> list[Candidate]:
    """List candidates, the rule's choice first and then the more promising before the others.

    Args:
        key: the operator.
        device: where it will run.
        tokens: its token count, one of the operator's buckets.
        allowed: implementations that can run there and read the loaded weight layout.
        near: what was best for this operator before, the nearest first; the neighbours tried are those of the first.
        limit: of their number.

    Returns:
        Candidates that fit by the cost model, each once; the first is the default even if it does not.
    """
    default = Candidate(*default_choice(key, device, tokens, allowed))
    known = [Candidate(entry.implementation, entry.settings) for entry in near if entry.implementation in allowed]
    plain = [Candidate(name, ()) for name in allowed if name not in KERNELS and _is_sensible(key, device, name, tokens)]
    kernels: Iterable[Candidate] = ()
    if "triton" in allowed:
        base = next((c for c in [*known, default] if c.implementation in KERNELS), None)
        kernels = _list_linear(key, device, tokens, base) if key.operator == "linear" else _list_moe(
            key, device, tokens, allowed, base or Candidate("triton", ())
        )  # fmt: skip
    buckets = buckets_of(key.operator)
    bound = dict(zip(buckets, bucket_bounds(buckets), strict=True)).get(tokens, tokens)
    usable = (c for c in (*known[:MOST_NEAR], *plain, *kernels) if runs_up_to(key, c.implementation, c.settings, bound))
    return list(dict.fromkeys([default, *usable]))[:limit]


def _is_sensible(key: Key, device: Device, name: Implementation, tokens: int) -> bool:
    """Leave out functions that would gather or compute far too much, or read ids on the host of a GPU."""
    if key.operator == "linear":
        return True
    experts, top_k, slots, _, hidden, width = key.sizes
    size = 4 if key.dtype == FP8 else getattr(torch, key.dtype).itemsize  # FP8 is multiplied out in float32
    pairs = tokens * (top_k + slots)
    if name == "per_slot":
        return bool(pairs <= SLOT_PAIRS and pairs * 3 * width * hidden * size <= FUNCTION_BYTES)
    if name == "loop":
        return device.kind == "cpu" and pairs <= LOOP_PAIRS
    if name == "dense":
        few = device.kind != "cpu" and distinct_experts(key, tokens) < (experts + slots) / 2
        rows = tokens * (experts + slots)
        return bool(tokens <= DENSE_TOKENS and rows * (2 * width + hidden) * 4 <= FUNCTION_BYTES and not few)
    return True


def _list_moe(
    key: Key, device: Device, tokens: int, allowed: Sequence[Implementation], base: Candidate
) -> Iterator[Candidate]:
    starts = list_starts(key, device, tokens)
    current = settings_from_ints(base.settings) if base.settings else starts[0]
    if key.sizes[2] and tokens <= APART_TOKENS:
        routed = Key("moe", (*key.sizes[:2], 0, *key.sizes[3:]), key.dtype)
        forms = [name for name in APART if name in allowed]
        for settings in dict.fromkeys([list_starts(routed, device, tokens)[0], current]):
            yield from (_candidate(name, settings) for name in forms)
    yield from (_candidate("triton", start) for start in starts)
    neighbours = list_neighbours(current, key, device, tokens)
    yield from (_candidate(base.implementation, neighbour) for neighbour in neighbours)


def _candidate(implementation: Implementation, settings: Settings) -> Candidate:
    return Candidate(implementation, tuple(settings_to_ints(settings)))


def list_starts(key: Key, device: Device, tokens: int, /) -> list[Settings]:
    """Give the rule's settings, and those that it has for the other paths that may win at a token count."""
    experts, top_k, slots, _, hidden, width = key.sizes
    target = find_target(device.kind, device.arch)

    def settings_at(count: int, *, quantize: bool = True) -> Settings:
        dtype: torch.dtype = getattr(torch, key.dtype)
        return default_settings(count, experts, top_k, slots, hidden, width, dtype, target=target, quantize=quantize)

    found = {settings_at(tokens).path: settings_at(tokens)}
    allowed = ["slots"] * (tokens <= 16) + ["grouped", "split"] * (2 <= tokens <= 512) + ["sorted"] * (tokens >= 16)
    if settings_at(tokens).path == "quantized":
        found["sorted"] = settings_at(tokens, quantize=False)
    for count in (2, 4, 8, 16, 64, 256, 2048):
        settings = replace(settings_at(count), fuse_choice=False)
        if settings.path in allowed:
            found.setdefault(settings.path, settings)
    if "split" in found:
        found.setdefault("grouped", replace(found["split"], path="grouped", pdl=False))
    turned = [replace(s, owners=not s.owners) for s in found.values() if s.path in TABLED]
    launched = _turn_launches(found["slots"], device) if key.dtype == FP8 and tokens <= FUSED_TOKENS else []
    if launched and device.kind == "cuda":
        launched += _turn_launches(FP8_LAYER, device)
    return [*found.values(), *launched, *(turned if tokens * top_k <= 2 * experts else [])]


def _turn_launches(settings: Settings, device: Device) -> list[Settings]:
    """Give settings with and without the choice in gate-up, each launched dependently and not."""
    early = (False, True) if _launches_early(device) else (False,)
    return [replace(settings, fuse_choice=fuse, pdl=pdl) for fuse in (False, True) for pdl in early]


def _launches_early(device: Device) -> bool:
    return device.arch.startswith("sm_") and int(device.arch.removeprefix("sm_")) >= 90


def list_neighbours(settings: Settings, key: Key, device: Device, tokens: int, /) -> list[Settings]:
    """Give settings that differ in one kernel, the kernels in turn, each one's likelier blocks first."""
    gate_up = _order_tiles(settings, key, device, tokens, "gate_up")
    down = _order_tiles(settings, key, device, tokens, "down")
    families: list[list[Settings]] = [
        [_with_gate_up(settings, tile) for tile in gate_up],
        [
            replace(_with_gate_up(settings, first), down=second)
            for first, second in zip(gate_up, down, strict=False)
            if settings.path not in TILED or first.tokens == second.tokens
        ],
        [replace(settings, down=tile) for tile in down],
        _list_flags(settings, key, device, tokens),
        [replace(settings, router=tile) for tile in list_router_tiles(settings.path, tokens, device)],
    ]
    return [s for s in _take_turns(families) if s != settings]


def _with_gate_up(settings: Settings, tile: Tile) -> Settings:
    if settings.path not in TILED:
        return replace(settings, gate_up=tile)
    return replace(settings, gate_up=tile, down=replace(settings.down, tokens=tile.tokens))


def _take_turns(families: Sequence[Sequence[T]]) -> list[T]:
    return [value for turn in zip_longest(*families) for value in turn if value is not None]


def _order_tiles(settings: Settings, key: Key, device: Device, tokens: int, part: str) -> list[Tile]:
    """Give the blocks of one kernel that fit, the fastest by the cost model first."""
    kind = "token" if settings.token_down and part == "down" else settings.path
    tiles = list_tiles(key, kind, tokens, device)
    one, every = _find_reach(key, part)
    if key.dtype == FP8 and kind in ("slots", "token"):
        # What a tile holds whole has no stages.
        once = min(FP8_STAGES[device.kind])
        tiles = [t for t in tiles if t.depth < every or (t.depth < 2 * every and t.stages == once)]
    if settings.path in TILED and part == "down":
        tiles = [tile for tile in tiles if tile.tokens == settings.gate_up.tokens]
    blocks = {tile: expert_block(key, kind, part, tile, tokens) for tile in tiles}
    fitting = [tile for tile in tiles if fits(blocks[tile], device)]
    fitting.sort(key=lambda tile: estimate_s(blocks[tile], device))
    ordered = _spread(fitting, lambda tile: (tile.tokens, tile.rows, tile.depth, tile.warps))
    if key.dtype != FP8:
        return ordered
    # The model does not know what it is worth to load without a loop: in turns.
    return _take_turns(list(_group(ordered, lambda tile: (tile.depth > one, tile.depth >= every)).values()))


def _find_reach(key: Key, part: str) -> tuple[int, int]:
    """Give the columns of one matrix, and those that a product of vectors can take at once, BLOCK at least.

    Down has the columns of all of a token's experts side by side, where F is whole blocks of factors.
    """
    _, top_k, slots, _, hidden, width = key.sizes
    one = max(hidden if part == "gate_up" else width, BLOCK)
    return one, one * (top_k + slots) if part == "down" and width % BLOCK == 0 else one


def _spread(ordered: Sequence[T], family: Callable[[T], Hashable]) -> list[T]:
    """Put the best of each family before the second best of any: near the top, many differ in little."""
    return _take_turns(list(_group(ordered, family).values()))


def _group(values: Iterable[T], family: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    found: dict[Hashable, list[T]] = {}
    for value in values:
        found.setdefault(family(value), []).append(value)
    return found


def list_tiles(key: Key, kind: str, tokens: int, device: Device, /) -> list[Tile]:
    """List blocks of the experts' kernels, whether they fit or not."""
    narrow, all_stages = key.dtype == FP8, STAGES[device.kind]
    if kind in ("slots", "token"):
        if narrow:
            return [Tile(1, *vector, stages) for vector in FP8_VECTORS for stages in FP8_STAGES[device.kind]]
        return [
            Tile(1, rows, depth, warps, stages)
            for rows, depth, warps in (
                (4, 512, 4), (8, 256, 2), (8, 256, 4), (8, 512, 4), (16, 128, 2), (16, 128, 4), (16, 256, 4),
                (16, 256, 8), (16, 512, 8), (32, 128, 4), (32, 256, 8), (64, 64, 4),
            )
            for stages in all_stages
        ]  # fmt: skip
    if kind == "quantized":
        shapes = ((128, 8), (64, 8), (64, 4))
        return [Tile(block, BLOCK, BLOCK, warps, stages) for block, warps in shapes for stages in (2, 3, 4)]
    load = tokens * key.sizes[1] / key.sizes[0]
    if kind in TABLED:
        blocks = [16, 32, 64] if load > 8 else [16]
    else:
        blocks = [16, 32] if load <= 12 else [32, 64] if load <= 24 else [64, 128]
    return [
        Tile(block, rows, depth, warps, stages)
        for block in blocks
        for rows, depth, warps in (
            (32, 128, 4), (32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8),
            (128, 128, 8), (256, 64, 8),
        )
        for stages in all_stages
        # A block of matrix instructions lies in one block of factors.
        if (block >= 64 or rows * depth <= 128 * 128) and not (narrow and max(rows, depth) > BLOCK)
    ]  # fmt: skip


def list_router_tiles(path: str, tokens: int, device: Device, /) -> list[Tile]:
    """List blocks of the router's kernel."""
    deep = device.kind == "cuda"
    if path == "slots":
        return [Tile(0, r, k, w, 2) for k in (1024, 2048, 512) for r in (4, 2, 1, 8) for w in (4, 2)]
    if tokens <= 128:
        stages = ((128, 3), (64, 4), (256, 2)) if deep else ((128, 1), (64, 2))
        return [Tile(16, r, k, w, s) for k, s in stages for r in (16, 32) for w in (4, 2)]
    return [Tile(m, r, 64, 4, s) for s in ((3, 4) if deep else (1, 2)) for m in (32, 64, 128) for r in (64, 128)]


def _list_flags(settings: Settings, key: Key, device: Device, tokens: int) -> list[Settings]:
    """Give settings that differ in what concerns the launch and not a block."""
    dependent, narrow = _launches_early(device), key.dtype == FP8
    changed = [replace(settings, pdl=not settings.pdl)] if dependent else []
    if settings.path == "slots" and tokens <= FUSED_TOKENS:
        changed.append(replace(settings, fuse_choice=not settings.fuse_choice))
    if settings.path in TILED:
        changed += [replace(settings, descriptors=not settings.descriptors)] if dependent and not narrow else []
        changed += [replace(settings, programs=n * device.units) for n in (0, 1, 2, 3)]
        changed += [replace(settings, group=n) for n in (1, 4, 8, 16)]
    if settings.path in TABLED:
        stages = settings.gate_up.stages
        vectors = [Tile(1, rows, _deep(key), 4, stages) for rows in (8, 4)] if narrow else [Tile(1, 16, 128, 4, stages)]
        for tile in [settings.gate_up] if settings.token_down else vectors:
            changed.append(replace(settings, token_down=not settings.token_down, down=tile))
        changed.append(replace(settings, owners=not settings.owners))
    if settings.router.tokens:
        changed += [replace(settings, splits=n) for n in (1, 2, 4, 8)]
    if settings.path != "slots":
        changed += [replace(settings, combine=n) for n in (256, 512, 1024, 2048)]
    return [s for s in changed if s != settings]


def _deep(key: Key) -> int:
    """Give the largest depth up to 512 that divides F, 128 at least."""
    return next((depth for depth in (512, 256) if key.sizes[5] % depth == 0), 128)


def _list_linear(key: Key, device: Device, tokens: int, base: Candidate | None) -> list[Candidate]:
    """List settings of the projection kernel: the rule's, and those that the cost model puts first."""
    dtype: torch.dtype = getattr(torch, key.dtype)
    outputs, hidden = key.sizes
    rule = default_linear_settings(tokens, outputs, hidden, dtype, find_target(device.kind, device.arch))
    first = [rule] if base is None else [linear_from_ints(base.settings), rule]
    if key.dtype == FP8 and tokens == 1 and device.kind == "cuda":
        first += [s for s in FP8_LINEAR if s.depth < 2 * max(hidden, BLOCK)]
    turned: list[LinearSettings] = []
    if _launches_early(device):
        # A row at once is asked for as a whole, and nothing is ahead of it.
        turned = [replace(s, pdl=True, ahead=0) for s in first]
        turned += [replace(s, pdl=True, ahead=4) for s in first if s.depth < hidden]
        turned += [replace(first[0], pdl=True, ahead=ahead) for ahead in (1, 2)]
    blocks = {s: linear_block(key, s, tokens) for s in list_linear_settings(key, tokens, device)}
    fitting = [s for s in blocks if fits(blocks[s], device)]
    fitting.sort(key=lambda s: estimate_s(blocks[s], device))
    # Launched as what they are neighbours of.
    pdl, ahead = (first[0].pdl, first[0].ahead) if _launches_early(device) else (False, 0)
    ordered = _spread(fitting, lambda s: (s.rows, s.dot, s.depth >= hidden))
    spread = [replace(s, pdl=pdl, ahead=ahead if s.depth < hidden else 0) for s in ordered]
    return [Candidate("triton", tuple(linear_to_ints(s))) for s in [*first, *turned, *spread]]


def list_linear_settings(key: Key, tokens: int, device: Device, /) -> list[LinearSettings]:
    """List settings of the projection kernel, whether they fit or not."""
    narrow, all_stages = key.dtype == FP8, STAGES[device.kind]
    blocks = ((1, 1024), (1, 2048), (2, 1024), (4, 512), (4, 1024), (8, 256), (8, 512), (16, 128), (16, 256))
    shapes = [
        (*block, warps, n, splits)
        for block in blocks
        for warps in (2, 4, 8)
        for n in all_stages
        for splits in (1, 2, 4)
    ]
    if narrow:
        shapes = [(*block, n, 1) for block in FP8_VECTORS for n in FP8_STAGES[device.kind]]
        columns, once = max(key.sizes[1], BLOCK), min(FP8_STAGES[device.kind])
        shapes = [s for s in shapes if s[1] < columns or (s[1] < 2 * columns and s[3] == once)]
    vector = [LinearSettings(*shape, dot=False, pdl=False) for shape in shapes]
    dots = [
        LinearSettings(rows, depth, warps, stages, splits, dot=True, pdl=False)
        for rows in (16, 32, 64, 128)
        for depth in (64, 128, 256)
        for warps in (2, 4, 8)
        for stages in all_stages
        for splits in (1, 2, 4, 8)
        if not (narrow and depth > BLOCK)
    ]
    return vector if tokens == 1 else [*vector, *dots]
