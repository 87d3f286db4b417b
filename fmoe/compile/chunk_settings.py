"""Settings of the chunk rule's kernels: plain frozen values, and what holds untuned.

Letters: T tokens, K key channels, V value channels, C tokens of a chunk.
"""

from dataclasses import dataclass

import torch

from .settings import Target

LEAST_TOKENS = 64  # of a sequence; fewer are one chunk, for which the reference is as good
MOST_CHANNELS = 256  # K; a program holds all key channels of its columns of the state


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """What the launch function of the chunk rule leaves open.

    chunk: C, 16, 32 or 64.
    columns: V columns of the state that one program keeps, a power of two and at least 16.
    warps: of a program that goes through the chunks.
    stages: chunks whose operands are under way or in use at a time, 1 or more.
    matrix_warps: of a program that makes the matrices of one chunk.
    split: products that give the triangular inverse take float32 numbers as two parts in bfloat16, which errs by 2^-16;
        NVIDIA's matrix units take no float32.
    """

    chunk: int
    columns: int
    warps: int
    stages: int
    matrix_warps: int
    split: bool

    def __post_init__(self) -> None:
        for name, least, most in (("chunk", 16, 64), ("columns", 16, 256), ("warps", 1, 16), ("matrix_warps", 1, 16)):
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two from {least} to {most}")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages} must be at least 1")


@dataclass(frozen=True, slots=True)
class InputSettings:
    """What the launches around the chunk rule leave open.

    tokens: of a program that convolves one head.
    warps: of such a program.
    rows: of one token's head that a program of the gated norm takes.
    norm_warps: of such a program.
    """

    tokens: int = 32
    warps: int = 4
    rows: int = 32
    norm_warps: int = 4

    def __post_init__(self) -> None:
        for name, most in (("tokens", 256), ("warps", 16), ("rows", 256), ("norm_warps", 16)):
            value = getattr(self, name)
            if not 1 <= value <= most or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two from 1 to {most}")


def default_chunk_settings(
    key_size: int, value_size: int, dtype: torch.dtype, /, *, target: Target = "cuda"
) -> ChunkSettings:
    """Choose settings by rule: few columns, so that one sequence has programs for all multiprocessors.

    Args:
        key_size: K.
        value_size: V.
        dtype: of q and k.
        target: what the kernels are compiled for.
    """
    keys, values = _round_up(key_size), _round_up(value_size)
    if target == "hip":
        return ChunkSettings(32 if keys * dtype.itemsize > 512 else 64, min(32, values), 4, 1, 4, False)
    if dtype == torch.float32:  # by fused multiply-adds, whose operands are all in registers
        return ChunkSettings(16, 16, 8, 1, 8, False)
    columns = min(16 if keys > 128 else 32, values)
    if target == "cuda":
        return ChunkSettings(32 if keys > 128 else 64, columns, 4, 1, 4, True)
    return ChunkSettings(64, columns, 4, 2 if keys > 128 else 3, 4, True)


def default_input_settings(value_size: int, /) -> InputSettings:
    """Choose by rule: tiles of 4,096 numbers.

    Args:
        value_size: V.
    """
    rows = max(4096 // _round_up(value_size), 1)
    return InputSettings(tokens=min(rows, 32), rows=min(rows, 32))


def fits_kernels(tokens: int, key_size: int, dtype: torch.dtype, /, *, target: Target) -> bool:
    """Tell whether the kernels take these sizes, and are worth their launches.

    Args:
        tokens: T.
        key_size: K.
        dtype: of q, k and v; float32 ones of many channels do not fit in the registers of an NVIDIA device.
        target: what the kernels are compiled for.
    """
    most = 128 if dtype == torch.float32 and target != "hip" else MOST_CHANNELS
    return tokens >= LEAST_TOKENS and key_size <= most


def _round_up(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
