"""Fit settings measured on one device to another: a start for the tuner there, and what ports are tested with.

Letters: T tokens, E routed experts, S shared slots, D hidden, F expert width.
"""

from dataclasses import replace

from .cost import activation_size, expert_block, shared_limit
from .linear_settings import LinearSettings, linear_from_ints, linear_to_ints
from .plan import KERNELS, Device, Entry, Key
from .settings import Settings, Tile, settings_from_ints, settings_to_ints

STAGES = {"cuda": 5, "hip": 2, "cpu": 5}  # AMD's compiler keeps a stage in registers, and more do not help
LEAST_ROWS = 16


def adapt_entry(entry: Entry, key: Key, tokens: int, device: Device, /) -> Entry:
    """Change the settings of an entry so that its kernels fit a device; what fits comes back as it is."""
    if entry.implementation not in KERNELS:
        return entry
    if key.operator == "linear":
        ints = tuple(linear_to_ints(adapt_linear(linear_from_ints(entry.settings), device)))
    else:
        ints = tuple(settings_to_ints(adapt_settings(settings_from_ints(entry.settings), key, tokens, device)))
    return replace(entry, settings=ints, timings=()) if ints != entry.settings else entry


def adapt_settings(settings: Settings, key: Key, tokens: int, device: Device, /) -> Settings:
    """Take away stages, then rows, until each block fits a device's shared memory, and what only CUDA devices have."""
    down = "token" if settings.token_down else settings.path
    changed = replace(
        settings,
        router=_shrink_router(settings.router, key, device),
        gate_up=_shrink(settings.gate_up, key, settings.path, "gate_up", tokens, device),
        down=_shrink(settings.down, key, down, "down", tokens, device),
    )
    return changed if device.kind == "cuda" else replace(changed, pdl=False, descriptors=False)


def adapt_linear(settings: LinearSettings, device: Device, /) -> LinearSettings:
    """Limit the stages of a projection kernel, and leave out what only CUDA devices have."""
    if device.kind == "cuda":
        return settings
    return replace(settings, stages=min(settings.stages, STAGES[device.kind]), pdl=False, ahead=0)


def _shrink(tile: Tile, key: Key, path: str, part: str, tokens: int, device: Device) -> Tile:
    tile = replace(tile, stages=min(tile.stages, STAGES[device.kind]))
    while expert_block(key, path, part, tile, tokens).shared > shared_limit(device):
        if tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.rows > LEAST_ROWS:
            tile = replace(tile, rows=tile.rows // 2)
        else:
            break
    return tile


def _shrink_router(tile: Tile, key: Key, device: Device) -> Tile:
    """The router's kernel without tokens in its block takes no shared memory for its operands."""
    stages = min(tile.stages, STAGES[device.kind])
    stage = (tile.tokens + tile.rows) * tile.depth * activation_size(key)
    while tile.tokens and stages > 1 and stages * stage > shared_limit(device):
        stages -= 1
    return replace(tile, stages=stages)
