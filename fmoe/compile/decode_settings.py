"""Settings of the attention and head kernels of a decode step: plain frozen values, and what holds untuned.

Letters: B sequences, J kv heads, H query heads, C head channels, M cache slots, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from fmoe.functional.quant import BLOCK

from .linear_settings import PROCESSORS
from .settings import Target

# Programs that keep a large GPU busy; fewer leave part of the memory's rate unused.
PROGRAMS = 256
MOST_SPLITS = 128
MANY_SLOTS = 4096  # from which on larger blocks of slots read faster than more programs do


@dataclass(frozen=True, slots=True)
class AttendSettings:
    """What the launch functions of decode attention leave open.

    splits: programs that share the slots of one kv head; their sums are added in order by a second launch.
    slots: cache slots that one program reads at a time.
    heads: query heads of one kv head that one program serves, counted once for each token of a sequence.
    channels: output channels that one program of the second launch writes.
    pdl: programmatic dependent launch, on CUDA devices of capability 9.0 and later. The kernels that take a projection
        then read all else before the launch in front is over: positions, angles and earlier slots must not be written
        by that launch, nor by one that let its next start at once.
    """

    splits: int
    slots: int
    heads: int
    warps: int
    stages: int
    channels: int = 64
    pdl: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= MOST_SPLITS:
            raise ValueError(f"splits={self.splits} must be in 1..{MOST_SPLITS}")
        for name in ("slots", "heads", "channels"):
            _check_block(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What the launch functions of the head leave open.

    rows: rows of the head that one program multiplies.
    depth: of the summed dimension that one program reads at a time.
    dot: one product of matrices for all sequences; else a matrix-vector product, for a single sequence.
    pdl: as in AttendSettings.
    """

    rows: int
    depth: int
    warps: int
    stages: int
    dot: bool
    pdl: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "depth"):
            _check_block(name, getattr(self, name), minimum=16 if self.dot else 1)


@dataclass(frozen=True, slots=True)
class QuantizedHeadSettings:
    """What the launch function of a head in FP8 blocks leaves open.

    rows: of the head, that a program multiplies at a time, whole, a power of two up to 128.
    programs: that go through all of them.
    pdl: as in AttendSettings.
    """

    rows: int
    warps: int
    programs: int
    pdl: bool = False

    def __post_init__(self) -> None:
        _check_block("rows", self.rows, minimum=1)
        if self.rows > BLOCK or self.programs < 1:
            raise ValueError(f"rows={self.rows} must be at most {BLOCK}, and programs={self.programs} at least 1")


def _check_block(name: str, value: int, *, minimum: int = 16) -> None:
    if value < minimum or value & (value - 1):
        raise ValueError(f"{name}={value} must be a power of two of at least {minimum}")


def decode_settings_to_ints(settings: AttendSettings | HeadSettings) -> list[int]:
    """Write settings as integers, for an op's ``int[]`` argument."""
    return [int(value) for value in astuple(settings)]


def attend_settings_from_ints(values: Sequence[int]) -> AttendSettings:
    """Read what ``decode_settings_to_ints`` wrote."""
    if len(values) != 7:
        raise ValueError(f"{len(values)} integers came; settings of attention are 7, as decode_settings_to_ints writes")
    splits, slots, heads, warps, stages, channels, pdl = values
    return AttendSettings(splits, slots, heads, warps, stages, channels, bool(pdl))


def head_settings_from_ints(values: Sequence[int]) -> HeadSettings:
    """Read what ``decode_settings_to_ints`` wrote."""
    if len(values) != 6:
        raise ValueError(f"{len(values)} integers came; settings of the head are 6, as decode_settings_to_ints writes")
    rows, depth, warps, stages, dot, pdl = values
    return HeadSettings(rows, depth, warps, stages, bool(dot), bool(pdl))


def default_attend_settings(
    batch: int,
    heads: int,
    kv_heads: int,
    size: int,
    slots: int,
    dtype: torch.dtype,
    *,
    target: Target = "cuda",
    tokens: int = 1,
    own: bool = False,
) -> AttendSettings:
    """Choose settings by rule.

    Args:
        batch: B.
        heads: H.
        kv_heads: J.
        size: C, of the keys.
        slots: M.
        dtype: of the cache.
        target: what the kernels are compiled for; AMD's shared memory holds less.
        tokens: of each sequence.
        own: whether one more program takes the new tokens' own keys, as where these come as projected.

    Returns:
        AttendSettings.
    """
    wide, rows = dtype.itemsize > 2, 16
    block = 64 if size <= 256 and slots > MANY_SLOTS else 32
    wide_heads = target == "hopper" and 128 < size <= 256 and tokens == 1
    if wide_heads:
        # 64 slots held by twice the warps took a fifth longer for 32 and 64 sequences of 4,096 tokens on an H200.
        block = 32
    if target == "hip":
        block = 32 if size <= 128 else 16
    if wide:
        block = 16
    if tokens > 1 and not (wide and size > 256):
        # Two blocks of rows would read the cache twice; four would not fit into the registers of every device.
        rows = 16 if tokens * heads <= 16 * kv_heads else 32
        block = min(block, 32) if rows > 16 and size > 128 else block
    programs = batch * kv_heads * -(-tokens * heads // (kv_heads * rows))
    # Every split leaves a sum for each token: fewer are read back faster.
    wanted = PROGRAMS if tokens <= 2 else PROGRAMS // 2
    splits = min(-(-wanted // programs), -(-slots // block))
    splits = min(splits + 1 if own and splits > 1 else splits, MOST_SPLITS)
    # More would not fit into the shared memory of GPUs that are not made for data centres.
    stages = 1 if target == "hip" else 2 if wide or (size > 128 and not wide_heads) else 3
    # Threads enough to hold a block of keys and one of values besides the queries.
    warps = 8 if target != "hip" and (wide or (size > 128 and (rows > 16 or block > 32))) else 4
    channels = 32 if target == "hopper" and size <= 128 and tokens == 1 else 64
    return AttendSettings(max(splits, 1), block, rows, warps, stages, channels, pdl=target == "hopper")


def default_head_settings(batch: int, dtype: torch.dtype, *, target: Target = "cuda") -> HeadSettings:
    """Choose settings by rule.

    Args:
        batch: B, at most 16.
        dtype: of the weights.
        target: as for ``default_attend_settings``.

    Returns:
        HeadSettings.
    """
    wide = dtype.itemsize > 2
    stages, pdl = 2 if target == "hip" else 4, target == "hopper"
    if batch == 1:
        return HeadSettings(16, 128 if wide else 256, 4, stages, dot=False, pdl=pdl)
    return HeadSettings(64, 32 if wide else 128, 4, 1 if target == "hip" else stages, dot=True, pdl=pdl)


def default_quantized_head_settings(hidden: int, *, target: Target = "cuda") -> QuantizedHeadSettings:
    """Choose settings by rule: programs that fill an H200's multiprocessors, with as many values as they hold.

    Args:
        hidden: D.
        target: as for ``default_attend_settings``; on Hopper four values share a register.
    """
    size = 1 << (hidden - 1).bit_length()
    rows = min(max((32768 if target == "hopper" else 8192) // size, 1), 16)
    deep = size > 4096
    return QuantizedHeadSettings(rows, 8 if deep else 4, (2 if deep else 3) * PROCESSORS, pdl=target == "hopper")
