"""Settings of the dense projection kernel: plain frozen values, and the rule that holds where nothing was tuned.

Letters: T tokens, N rows of the weight matrix, D summed dimension.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from .settings import Target

MAX_TOKENS = 16  # rows of x that one program multiplies with its rows of the weights
FP8_TOKENS = 64  # the same of weights in FP8 blocks, which torch's product reads only after they are dequantised
BLOCK = 2048  # weights that a program of four warps loads at once, of FP8 twice as many
VECTOR_TOKENS = 2  # of weights in FP8 blocks, that are multiplied by vectors
PROGRAMS = 512  # enough to keep all processors of a large GPU reading
PROCESSORS = 132  # multiprocessors of an H200, for programs that go on to their next blocks
MANY_OUTPUTS = 96 * 128  # whose blocks of 128 rows fill most of the 132 multiprocessors of an H200
FEW_OUTPUTS = 1024  # so few outputs are launched as one program each


@dataclass(frozen=True, slots=True)
class LinearSettings:
    """Everything that ``run_linear`` leaves open.

    rows: rows of the weights in one program.
    depth: columns in one step of its loop.
    warps: of a program.
    stages: of its loop; 1 loads a step when it is needed.
    splits: parts of D with programs of their own; a second launch adds them in order.
    dot: 1, all tokens together, padded to 16, by matrix instructions; 2, the same of weights in FP8 blocks as they are,
        x in bfloat16 being sums of two values of FP8, and of anything else as 1; 0, by vectors, where a program takes
        one token, and of several tokens all but the first read the weights from the cache; two together where its
        depth holds a row whole.
    pdl: programmatic dependent launch, on CUDA devices of capability 9.0 and later.
    ahead: with pdl, steps whose weights are fetched into the cache before x is waited for; 0 or a power of two.
    programs: with a depth from D on and one token or two, programs that share the blocks of rows and keep x; 0 is one
        for each block. Of weights in FP8 blocks only NVIDIA's kernels for bfloat16 have it.
    """

    rows: int
    depth: int
    warps: int
    stages: int
    splits: int
    dot: int
    pdl: bool
    ahead: int = 0
    programs: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "depth", "warps"):
            value = getattr(self, name)
            if not _is_power_of_two(value):
                raise ValueError(f"{name}={value} must be a power of two, since Triton's blocks are")
        for name in ("stages", "splits"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.programs < 0:
            raise ValueError(f"programs={self.programs} must be 0, or how many programs share the blocks of rows")
        if self.dot not in (0, 1, 2):
            raise ValueError(f"dot={self.dot} must be 0, 1, or 2 for products of FP8 weights as they are")
        if self.dot == 2 and (self.depth < 32 or self.programs):
            raise ValueError(f"depth={self.depth} must be at least 32 with dot=2, and programs={self.programs} 0")
        if self.dot and (self.rows < 16 or self.depth < 16):
            raise ValueError(f"rows={self.rows} and depth={self.depth} must be at least 16 with dot=True")
        if self.ahead and not (self.pdl and _is_power_of_two(self.ahead)):
            raise ValueError(f"ahead={self.ahead} must be 0, or a power of two with pdl=True; got pdl={self.pdl}")


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def linear_to_ints(settings: LinearSettings) -> list[int]:
    """Write settings as integers, for an op's ``int[]`` argument."""
    return [int(value) for value in astuple(settings)]


def linear_from_ints(values: Sequence[int]) -> LinearSettings:
    """Read what ``linear_to_ints`` wrote."""
    expected = len(fields(LinearSettings))
    if len(values) != expected:
        raise ValueError(f"{len(values)} integers came; settings are {expected}, as linear_to_ints writes them")
    rows, depth, warps, stages, splits, dot, pdl, ahead, programs = values
    return LinearSettings(rows, depth, warps, stages, splits, dot, bool(pdl), ahead, programs)


def default_linear_settings(
    tokens: int, outputs: int, hidden: int, dtype: torch.dtype, target: Target = "cuda"
) -> LinearSettings:
    """Choose settings by rule, for shapes that were never tuned.

    Args:
        tokens: T.
        outputs: N.
        hidden: D.
        dtype: of the weights; float8_e4m3fn are those in FP8 blocks.
        target: what the kernel is compiled for; AMD's shared memory holds less.

    Returns:
        LinearSettings.
    """
    wide = dtype.itemsize > 2
    if dtype.itemsize == 1 and tokens <= (VECTOR_TOKENS if target == "hopper" else 1) and target != "hip":
        return _by_vectors(tokens, outputs, hidden, pdl=target == "hopper")
    if dtype.itemsize == 1 and target == "hopper" and hidden % 128 == 0:
        return _few_tokens(tokens, outputs)
    if tokens <= 1 or tokens * outputs <= FEW_OUTPUTS:
        rows = next((rows for rows in (8, 4, 2) if tokens * outputs >= rows * PROGRAMS), 1)
        depth = min((2 * BLOCK if dtype.itemsize == 1 else BLOCK) // rows, _round_up(hidden))
        return LinearSettings(rows, depth, 4, 2 if target == "hip" else 4, 1, dot=False, pdl=False)
    rows = next((rows for rows in (64, 32) if outputs >= rows * PROGRAMS // 2), 16)
    depth = (64 if wide else 128) * (2 if rows == 16 and target != "hip" and dtype.itemsize > 1 else 1)
    programs = -(-outputs // rows)
    splits = 1
    while programs * splits < PROGRAMS // 8 and hidden >= 2 * splits * 512:
        splits *= 2
    stages = 2 if target == "hip" else 4
    return LinearSettings(rows, depth, 4, stages, splits, dot=True, pdl=False)


def _by_vectors(tokens: int, outputs: int, hidden: int, *, pdl: bool) -> LinearSettings:
    """Choose for few tokens: inside a chain of layers on an H200, a kernel starting before the one in front is over."""
    depth = max(128, _round_up(hidden))
    if outputs >= 8 * PROGRAMS and hidden <= 2048:
        if tokens == 1:
            return LinearSettings(16, depth, 4, 1, 1, dot=False, pdl=pdl, programs=3 * PROCESSORS)
        programs = 4 * PROCESSORS if outputs >= MANY_OUTPUTS else 3 * (PROCESSORS - 4)
        return LinearSettings(8, depth, 4, 1, 1, dot=False, pdl=pdl, programs=programs)
    if outputs >= 8 * PROGRAMS:
        return LinearSettings(16, 256, 4, 4, 1, dot=False, pdl=pdl)
    if hidden <= 4096:
        return LinearSettings(2 * tokens, depth, 4, 1, 1, dot=False, pdl=pdl)
    return LinearSettings(4, 2048, 8, 1, 1, dot=False, pdl=pdl)


def _few_tokens(tokens: int, outputs: int) -> LinearSettings:
    """Choose for 3 to 64 tokens on Hopper: the fastest for Qwen3-Next's projections on an H200."""
    if outputs >= MANY_OUTPUTS:
        stages, splits = 4, 1
    elif outputs >= 8 * PROGRAMS:
        stages, splits = 6 if tokens <= 32 else 4, 1
    else:
        stages, splits = 4, 4 if tokens <= 16 else 8
    return LinearSettings(64, 128, 4, stages, splits, dot=2, pdl=True, ahead=2)


def _round_up(size: int) -> int:
    """Give the next power of two, 32 or more: a warp reads whole lines."""
    return max(32, 1 << (size - 1).bit_length())
