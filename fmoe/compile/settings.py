"""Settings of the MoE kernels: plain frozen values, and the table that holds where nothing was tuned.

Letters: T tokens, E routed experts, S shared slots, K routed experts per token, D hidden, F expert width.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

import torch

# How the experts run. SLOTS: one matrix-vector product for each (token, expert) pair. GROUPED: each expert's rows
# together, its weights read once. SORTED: rows sorted by expert, tiles of a grouped product. QUANTIZED: as sorted, x
# and h in FP8, too; rows that are not in bfloat16, and weights that are not in whole FP8 blocks, run as sorted.
# SPLIT: as grouped, each row of x and h the sum of two in FP8, so that no weight is converted; rows that are not in
# bfloat16, and weights that are not in whole FP8 blocks, run as grouped.
Path = Literal["slots", "grouped", "sorted", "quantized", "split"]
PATHS: tuple[Path, ...] = ("slots", "grouped", "sorted", "quantized", "split")
TILED = ("sorted", "quantized")  # of any number of tokens
TABLED = ("grouped", "split")  # which ask for the rows of each expert
# What kernels are compiled for: CUDA devices of any kind, those with tensor memory access and 227 KB of shared memory
# for a program, or AMD's.
Target = Literal["cuda", "hopper", "hip"]
HOPPER = ("sm_90", "sm_100", "sm_103")
HIP_FP8 = ("gfx950", "gfx12")  # whose FP8 is that of the checkpoints; gfx942 reads e4m3fnuz
CUDA_FP8 = 89  # the first with it


def find_target(kind: str, arch: str, /) -> Target:
    """Name the target of a device of kind ``cuda`` or ``hip`` and an architecture such as ``sm_90``."""
    return "hip" if kind == "hip" else "hopper" if arch in HOPPER else "cuda"


def why_not_fp8(kind: str, arch: str, /) -> str:
    """Say why kernels of a device cannot read float8_e4m3fn, or nothing.

    Args:
        kind: ``cuda``, ``hip`` or ``cpu``.
        arch: such as ``sm_90`` or ``gfx950``; nothing is said of what is not known.
    """
    if kind == "hip" and arch and not arch.startswith(HIP_FP8):
        return f"{arch} reads FP8 of another form than float8_e4m3fn, gfx950 is the first with it; dequantise on load"
    if kind == "cuda" and arch and int(arch.removeprefix("sm_")) < CUDA_FP8:
        return f"{arch} has no FP8, sm_{CUDA_FP8} is the first with it; dequantise on load"
    return ""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's block: ``tokens`` rows of x, ``rows`` rows of a weight matrix, ``depth`` of the summed dimension."""

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the launch functions leave open.

    router: the logits' block; tokens = 0 is a matrix-vector product for each token.
    splits: parts of D that the logits are summed in; the choice adds them in order.
    fuse_choice: slots only: each program of gate-up chooses the experts itself, which saves a launch.
    token_down: slots, grouped and split: down sums all experts of a token in one program, with no second pass.
    owners: grouped and split: one program row for each (token, expert) pair, and only the expert's first goes on; else
        one for each expert.
    combine: columns of y that one program of the last sum writes.
    programs: sorted: programs that share the tiles; 0 is one for each tile. Split: programs that share an expert's
        rows of down; 0 is one for each block of them.
    group: sorted: row tiles that are visited together for each block of weight rows.
    descriptors: sorted: weights, and what stands between the products, are read through tensor descriptors.
    pdl: programmatic dependent launch, on CUDA devices of capability 9.0 and later.
    """

    path: Path
    router: Tile
    gate_up: Tile
    down: Tile
    splits: int = 1
    fuse_choice: bool = False
    token_down: bool = False
    owners: bool = False
    combine: int = 1024
    programs: int = 0
    group: int = 8
    descriptors: bool = False
    pdl: bool = False

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ValueError(f"path={self.path!r} must be one of {', '.join(PATHS)}")
        if self.path in TILED and self.gate_up.tokens != self.down.tokens:
            raise ValueError(
                f"gate_up.tokens={self.gate_up.tokens} must equal down.tokens={self.down.tokens} on the {self.path} "
                "path: both products share one list of tiles"
            )


def settings_to_ints(settings: Settings) -> list[int]:
    """Write settings as integers, for an op's ``int[]`` argument."""
    path, *rest = astuple(settings)
    flat = [PATHS.index(path)]
    for value in rest:
        flat += [int(v) for v in value] if isinstance(value, tuple) else [int(value)]
    return flat


def settings_from_ints(values: Sequence[int]) -> Settings:
    """Read what ``settings_to_ints`` wrote."""
    if len(values) != 25:
        raise ValueError(f"{len(values)} integers came; settings are 25, as settings_to_ints writes them")
    path, tiles, rest = values[0], values[1:16], values[16:]
    router, gate_up, down = (Tile(*tiles[i : i + 5]) for i in (0, 5, 10))
    splits, fuse, token_down, owners, combine, programs, group, descriptors, pdl = rest
    return Settings(
        path=PATHS[path],
        router=router,
        gate_up=gate_up,
        down=down,
        splits=splits,
        fuse_choice=bool(fuse),
        token_down=bool(token_down),
        owners=bool(owners),
        combine=combine,
        programs=programs,
        group=group,
        descriptors=bool(descriptors),
        pdl=bool(pdl),
    )


def default_settings(
    tokens: int,
    experts: int,
    top_k: int,
    slots: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    *,
    target: Target = "cuda",
    quantize: bool = True,
) -> Settings:
    """Choose settings by rule, for shapes that were never tuned.

    Args:
        tokens: T.
        experts: E.
        top_k: K.
        slots: S.
        hidden: D.
        width: F.
        dtype: of the weights; float8_e4m3fn are those in FP8 blocks.
        target: what the kernels are compiled for; AMD's shared memory holds less.
        quantize: whether the rows of many tokens may be rounded to FP8, as checkpoints in FP8 blocks are meant to run.

    Returns:
        Settings.
    """
    if dtype.itemsize == 1:
        whole = hidden % 128 == 0 and width % 128 == 0
        if quantize and whole and target == "hopper" and tokens * top_k > 24 * experts:
            return _quantized(tokens * top_k / experts)
        like = default_settings(tokens, experts, top_k, slots, hidden, width, torch.bfloat16, target=target)
        like = _narrow(like, width, target)
        if like.path == "slots":
            return _at_once(like, tokens, hidden, width, columns=width * (top_k + slots), target=target)
        if like.path == "grouped" and whole and target == "hopper":
            return _split(like)
        return like
    pairs_per_expert = tokens * top_k / experts
    wide = dtype.itemsize > 2
    if tokens == 1:
        return _slots(width, fuse=True, wide=wide, target=target)
    if tokens * top_k <= 1.25 * _distinct(tokens, experts, top_k) and tokens <= 8:
        return _slots(width, fuse=False, wide=wide, target=target)
    if pairs_per_expert <= 16 and tokens <= 256:
        owners = tokens * top_k < experts
        return _grouped(tokens, pairs_per_expert, owners, token_down=tokens <= 8, wide=wide, target=target)
    return _sorted(pairs_per_expert, wide=wide, target=target)


def _distinct(tokens: int, experts: int, top_k: int) -> float:
    """Experts hit when each token chooses uniformly."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def _slots(width: int, *, fuse: bool, wide: bool, target: Target) -> Settings:
    depth = 128 if wide else 256
    stages = 2 if target == "hip" else 4
    return Settings(
        path="slots",
        router=Tile(0, 4, 512 if wide else 1024, 4, 2),
        gate_up=Tile(1, 16, depth, 4, stages),
        # A depth that divides F needs no masks.
        down=Tile(1, 16, depth if width % depth == 0 else 128, 4, stages),
        fuse_choice=fuse,
        token_down=True,
    )


def _grouped(
    tokens: int, pairs_per_expert: float, owners: bool, *, token_down: bool, wide: bool, target: Target
) -> Settings:
    block = 16 if pairs_per_expert <= 8 else 32
    depth = 64 if wide or target == "cuda" else 128
    stages = 1 if target == "hip" else 3
    return Settings(
        path="grouped",
        router=_router(tokens, wide=wide, target=target),
        gate_up=Tile(block, 64, depth, 4, stages),
        down=Tile(1, 16, depth, 4, stages) if token_down else Tile(block, 64, depth, 4, stages),
        splits=4 if tokens <= 128 else 1,
        token_down=token_down,
        owners=owners,
    )


def _sorted(pairs_per_expert: float, *, wide: bool, target: Target) -> Settings:
    block = 16 if pairs_per_expert <= 12 else 32 if pairs_per_expert <= 24 else 64 if pairs_per_expert <= 96 else 128
    router = _router(1024, wide=wide, target=target)
    if block == 128 and target == "hopper" and not wide:
        gate_up, down = Tile(block, 128, 64, 8, 3), Tile(block, 256, 64, 8, 4)
        return Settings(path="sorted", router=router, gate_up=gate_up, down=down, programs=132, descriptors=True)
    rows, depth = 64, 32 if wide else 64
    tile = Tile(block, rows, depth, 8 if block == 128 and not wide else 4, 1 if target == "hip" else 3)
    return Settings(path="sorted", router=router, gate_up=tile, down=tile)


def _quantized(pairs_per_expert: float) -> Settings:
    tile = Tile(64 if pairs_per_expert < 96 else 128, 128, 128, 8, 4)
    router = _router(1024, wide=False, target="hopper")
    return Settings(path="quantized", router=router, gate_up=tile, down=tile, programs=132)


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _narrow(settings: Settings, width: int, target: Target) -> Settings:
    """Change the experts' blocks to those for weights of one byte: deeper vectors; tiles within a block of factors."""
    stages = 2 if target == "hip" else 4
    down = Tile(1, 8, next((k for k in (512, 256) if width % k == 0), 128), 4, stages)
    if settings.path == "slots":
        router, gate_up = Tile(0, 1, 2048, 4, 2), Tile(1, 8, 256, 2, stages)
        return replace(settings, router=router, gate_up=gate_up, down=down, fuse_choice=False, pdl=target == "hopper")
    depth = 128 if settings.path == "grouped" else 64
    block = settings.gate_up.tokens
    tile = Tile(block, 64, depth, 8 if block == 128 else 4, 1 if target == "hip" else 3)
    if settings.token_down:
        return replace(settings, gate_up=tile, down=down)
    return replace(settings, gate_up=tile, down=tile, descriptors=False, programs=0)


def _split(settings: Settings) -> Settings:
    """Take the blocks of weights that are not converted."""
    gate_up, down = (Tile(settings.gate_up.tokens, 64, 128, 4, stages) for stages in (4, 5))
    return replace(settings, path="split", gate_up=gate_up, down=down, token_down=False, programs=8, pdl=True)


def _at_once(settings: Settings, tokens: int, hidden: int, width: int, *, columns: int, target: Target) -> Settings:
    """Take blocks of weights in FP8 blocks, rows of down whole, with which Qwen3-Next ran fastest on an H200."""
    if target == "hopper" and hidden <= 2048:
        whole = max(128, _round_up(hidden))
        gate_up = Tile(1, 8, 256, 2, 3) if tokens == 2 else Tile(1, 8, 512, 4 if tokens == 1 else 2, 3)
        settings = replace(settings, router=Tile(0, 2, whole, 2, 1), gate_up=gate_up)
    if width % 128 == 0 and columns <= 8192:
        settings = replace(settings, down=Tile(1, 4 if target == "hopper" else 2, _round_up(columns), 4, 1))
    return settings


def _router(tokens: int, *, wide: bool, target: Target) -> Tile:
    depth = 64 if wide else 128
    stages = 1 if target == "hip" else 3
    return Tile(16, 16, depth, 4, stages) if tokens <= 128 else Tile(64, 64, 64 if not wide else 32, 4, stages)
