"""A model of how long a kernel with given blocks takes on a GPU: good enough to order candidates and to drop some.

Letters: T tokens, E routed experts, S shared slots, K routed experts per token, D hidden, F expert width.
"""

from dataclasses import dataclass

import torch

from fmoe.functional.quant import FP8

from .linear_settings import MAX_TOKENS, LinearSettings
from .plan import Device, Key
from .settings import Path, Tile

# Of one multiprocessor of an H200 (4.4 TB/s and 660 TFLOP/s over 132 of them); only ratios matter here.
BYTES_PER_S = 33e9
FLOPS_PER_S = 5e12
IN_FLIGHT = 33_000  # bytes that must be on their way to keep up that rate, at a latency of about a microsecond
LAUNCH_S = 1e-6
CACHED = 0.3  # cost of a byte that another program has just read, as a part of one from memory

THREADS_PER_UNIT = 2048
REGISTERS_PER_UNIT = 65536
MOST_ACCUMULATORS = 128  # float32 values of a thread; more leave no registers for addresses and operands

# The most that any device of an architecture grants, 99 KiB and 64 KiB where it is not named. gfx950 has 160 KiB, of
# which the offline check grants 64.
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_103": 227 * 1024}
LEAST_SHARED = {"cuda": 99 * 1024, "hip": 64 * 1024, "cpu": 0}
WARP = {"cuda": 32, "hip": 64, "cpu": 32}


@dataclass(frozen=True, slots=True)
class Block:
    """What one program of a kernel holds and how many there are."""

    programs: int
    accumulators: int  # float32 values
    stage_bytes: int  # that one step of its loop loads
    stages: int
    warps: int
    shared: int  # bytes
    read: float  # bytes of the whole kernel, those from a cache at their part
    flops: float  # of the whole kernel, padding included


def shared_limit(device: Device, /) -> int:
    """Shared memory that one program may take."""
    return SHARED.get(device.arch, LEAST_SHARED[device.kind])


def fits(block: Block, device: Device, /) -> bool:
    """Say whether a block's accumulators and stages can be held."""
    per_thread = block.accumulators / (block.warps * WARP[device.kind])
    return per_thread <= MOST_ACCUMULATORS and block.shared <= shared_limit(device)


def estimate_s(block: Block, device: Device, /) -> float:
    """Estimate the seconds of a kernel: its bytes or its products, whichever take longer, products in whole waves."""
    threads = block.warps * WARP[device.kind]
    registers = 32 * threads + 2 * block.accumulators
    resident = min(
        THREADS_PER_UNIT // threads,
        max(REGISTERS_PER_UNIT // registers, 1),
        shared_limit(device) // max(block.shared, 1),
        16,
    )
    places = max(resident, 1) * max(device.units, 1)
    working = min(block.programs, places)
    in_flight = working / max(device.units, 1) * block.stage_bytes * max(block.stages - 1, 1)
    reading = min(1.0, in_flight / IN_FLIGHT)
    bytes_s = block.read / (BYTES_PER_S * max(device.units, 1) * reading)
    flops_s = block.flops / (FLOPS_PER_S * min(max(device.units, 1), block.programs))
    # A last wave that is not full leaves matrix units idle; memory has less to do, but no less in all.
    waves = max(block.programs / places, 1.0)
    return LAUNCH_S + max(bytes_s, flops_s * -(-block.programs // places) / waves)


def distinct_experts(key: Key, tokens: int, /) -> float:
    """Experts hit when each token chooses uniformly, shared slots included."""
    experts, top_k, slots = key.sizes[:3]
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens) + slots


def expert_block(key: Key, path: Path | str, part: str, tile: Tile, tokens: int, /) -> Block:
    """Describe gate-up or down of a path; ``token`` is down with all experts of a token in one program."""
    _, top_k, slots, _, hidden, width = key.sizes
    size = _item_size(key)
    x_size = size if path == "quantized" else activation_size(key)
    gate_up = part == "gate_up"
    matrices, outputs, depth = (2, width, hidden) if gate_up else (1, hidden, width)
    pairs, hit = tokens * (top_k + slots), distinct_experts(key, tokens)
    weights = hit * matrices * outputs * depth * size
    blocks = -(-outputs // tile.rows)
    vector = path in ("slots", "token")
    if vector:
        programs = blocks * (tokens if path == "token" else pairs)
        flops = 2.0 * pairs * matrices * outputs * depth
        # Sums are kept apart over the depth; products of vectors run outside of the matrix units, 8 times slower.
        accumulators, flops = matrices * tile.rows * tile.depth, flops * 8
        read = weights * (1 + CACHED * (pairs / hit - 1))
        stage = matrices * tile.rows * tile.depth * size
        return Block(programs, accumulators, stage, tile.stages, tile.warps, stage * (tile.stages - 1), read, flops)
    row_tiles = hit * max(1.0, -(-(pairs / hit) // tile.tokens))
    stage = (matrices * tile.rows * size + tile.tokens * x_size) * tile.depth
    return Block(
        programs=max(int(blocks * row_tiles), 1),
        accumulators=matrices * tile.rows * tile.tokens,
        stage_bytes=stage,
        stages=tile.stages,
        warps=tile.warps,
        shared=stage * tile.stages,
        read=weights * (1 + CACHED * (row_tiles / hit - 1)) + CACHED * blocks * pairs * depth * x_size,
        flops=2.0 * row_tiles * tile.tokens * matrices * outputs * depth,
    )


def linear_block(key: Key, settings: LinearSettings, tokens: int, /) -> Block:
    """Describe a dense projection of a few tokens."""
    outputs, hidden = key.sizes
    size = _item_size(key)
    blocks = -(-outputs // settings.rows) * settings.splits
    weights = float(outputs * hidden * size)
    stage = settings.rows * settings.depth * size
    partial = 8.0 * settings.splits * tokens * outputs if settings.splits > 1 else 0.0
    if not settings.dot:
        return Block(
            programs=blocks * tokens,
            accumulators=settings.rows * settings.depth,
            stage_bytes=stage,
            stages=settings.stages,
            warps=settings.warps,
            shared=stage * (settings.stages - 1),
            read=weights * (1 + CACHED * (tokens - 1)) + partial,
            flops=16.0 * tokens * outputs * hidden,
        )
    return Block(
        programs=blocks,
        accumulators=settings.rows * MAX_TOKENS,
        stage_bytes=stage,
        stages=settings.stages,
        warps=settings.warps,
        shared=(stage + MAX_TOKENS * settings.depth * activation_size(key)) * settings.stages,
        read=weights + partial,
        flops=2.0 * MAX_TOKENS * outputs * hidden,
    )


def activation_size(key: Key, /) -> int:
    """Give the bytes of a value of x, which of FP8 weights has two."""
    dtype: torch.dtype = getattr(torch, key.dtype)
    return 2 if dtype == FP8 else dtype.itemsize


def _item_size(key: Key) -> int:
    dtype: torch.dtype = getattr(torch, key.dtype)
    return dtype.itemsize
