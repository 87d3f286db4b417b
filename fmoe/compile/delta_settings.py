"""Settings of the DeltaNet decode kernels: plain frozen values, and what holds untuned.

Letters: B sequences, T tokens, G key heads, H value heads, K key channels, V value channels.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from fmoe.functional.deltanet import DeltaConfig

from .settings import Target

TILE = 32768  # elements of the state that one program holds at most: 64 registers of each of 512 threads
FEW = 128  # programs up to which one that sums within its warps is the fastest
MANY = 256  # programs from which on several run on one multiprocessor
LEAST_COLUMNS = 64  # blocks of 32 columns of two heads gave wrong sums on sm_90 where the compiler prefetched them
MOST_TAPS = 8  # over which the kernel with drafts is unrolled
MOST_DRAFTED = 16  # tokens of a step with drafts


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """What the launch function of DeltaNet decode leaves open.

    heads: value heads of one key head that one program serves, a divisor of H / G; 0 is all of them. With fewer, the
        programs that share a key head count in ``arrivals`` which of them comes last and moves its window.
    columns: of the state, that one program holds at a time, a power of two.
    pdl: programmatic dependent launch, on CUDA devices of capability 9.0 and later. The state is then read
        before the launch in front is over, so that one must not write it.
    key_lanes: key channels that lie side by side in the lanes of a warp, a power of two; 0 is the kernel whose warps
        share the key channels. With them, ``columns`` are those of one warp, and ``why_not_lanes`` must be silent.
    """

    heads: int
    columns: int
    warps: int
    pdl: bool = False
    key_lanes: int = 0

    def __post_init__(self) -> None:
        if self.heads < 0:
            raise ValueError(f"heads={self.heads} must be 0, or a divisor of the value heads of one key head")
        for name in ("columns", "warps"):
            if not _is_power(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a power of two")
        if self.key_lanes and not _is_power(self.key_lanes):
            raise ValueError(f"key_lanes={self.key_lanes} must be 0 or a power of two")


def delta_settings_to_ints(settings: DeltaSettings) -> list[int]:
    """Write settings as integers, for an op's ``int[]`` argument."""
    return [int(value) for value in astuple(settings)]


def delta_settings_from_ints(values: Sequence[int]) -> DeltaSettings:
    """Read what ``delta_settings_to_ints`` wrote."""
    if len(values) != 5:
        raise ValueError(f"{len(values)} integers came; settings of DeltaNet are 5, as delta_settings_to_ints writes")
    heads, columns, warps, pdl, key_lanes = values
    return DeltaSettings(heads, columns, warps, bool(pdl), key_lanes)


def default_delta_settings(config: DeltaConfig, batch: int, /, *, target: Target = "cuda") -> DeltaSettings:
    """Choose settings by rule: few sequences take the state at once, many share it among more, smaller programs.

    Args:
        config: sizes of the layer.
        batch: B.
        target: what the kernel is compiled for; AMD's warps have twice the lanes.

    Returns:
        DeltaSettings with all value heads of a key head in one program, which needs no count of arrivals.
    """
    lanes_settings = DeltaSettings(0, 32, 8, pdl=True, key_lanes=4)
    ratio = config.value_heads // config.key_heads
    if target == "hopper" and batch * config.key_heads <= FEW and not why_not_lanes(config, ratio, lanes_settings):
        # Qwen3-Next on an H200, one sequence, in a chain: 3.9 us, where the other kernel takes 5.9; eight save 1.4 us.
        return lanes_settings
    rows = _round_up(ratio) * _round_up(config.key_size)
    values = _round_up(config.value_size)
    tile = TILE // 4
    if batch * config.key_heads < MANY:
        tile = TILE if rows * values <= TILE else TILE // 2
    least = 1 if target == "hip" else LEAST_COLUMNS
    columns = min(values, max(tile // rows, least))
    lanes = 64 if target == "hip" else 32
    warps = min(max(rows * columns // 4096, 1), 512 // lanes)
    return DeltaSettings(0, columns, warps, pdl=target == "hopper")


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What the launch function of DeltaNet over drafts leaves open.

    heads: value heads of one key head that one program serves, a divisor of H / G; 0 is all of them, in one launch.
        With fewer there are two: one part of each key head waits for the others, and writes what they all read.
    pdl: as in DeltaSettings. All of the cache, and how many tokens stay, are then read before the launch in front is
        over, so that one must not write them.
    columns: of the state, in one warp; with key_lanes alone.
    key_lanes: as in DeltaSettings.
    """

    heads: int
    warps: int
    pdl: bool = False
    columns: int = 0
    key_lanes: int = 0

    def __post_init__(self) -> None:
        if self.heads < 0:
            raise ValueError(f"heads={self.heads} must be 0, or a divisor of the value heads of one key head")
        if not _is_power(self.warps):
            raise ValueError(f"warps={self.warps} must be a power of two")
        if self.key_lanes and not (_is_power(self.key_lanes) and _is_power(self.columns)):
            raise ValueError(
                f"key_lanes={self.key_lanes} and columns={self.columns} must be powers of two, or key_lanes=0"
            )


def verify_settings_to_ints(settings: VerifySettings) -> list[int]:
    """Write settings as integers, for an op's ``int[]`` argument."""
    return [int(value) for value in astuple(settings)]


def verify_settings_from_ints(values: Sequence[int]) -> VerifySettings:
    """Read what ``verify_settings_to_ints`` wrote."""
    if len(values) != 5:
        raise ValueError(f"{len(values)} integers came; settings over drafts are 5, as verify_settings_to_ints writes")
    heads, warps, pdl, columns, key_lanes = values
    return VerifySettings(heads, warps, bool(pdl), columns, key_lanes)


def default_verify_settings(config: DeltaConfig, /, *, target: Target = "cuda") -> VerifySettings:
    """Choose settings by rule: as many value heads of a key head as fit one program, and threads that hold them.

    Args:
        config: sizes of the layer, for which ``why_not_verify`` has no reason.
        target: what the kernel is compiled for; AMD's warps have twice the lanes.
    """
    lanes = VerifySettings(0, 8, pdl=True, columns=16, key_lanes=8)
    ratio = config.value_heads // config.key_heads
    if target == "hopper" and _state_size(config, ratio) <= TILE and not why_not_lanes(config, ratio, lanes):
        # Two tokens of Qwen3-Next in a chain on an H200: 2.9 us, where the other kernel takes 4.0.
        return lanes
    heads = _heads_within(config, TILE)
    most = 4 if target == "hip" else 8
    return VerifySettings(heads, min(max(_state_size(config, heads) // 2048, 1), most), pdl=target == "hopper")


def why_not_verify(config: DeltaConfig, tokens: int, /) -> str:
    """Say why the kernel over drafts does not take a layer and a step; an empty text takes it."""
    if not 2 <= tokens <= MOST_DRAFTED:
        return f"{tokens} tokens are not 2 to {MOST_DRAFTED}"
    if config.conv_size > MOST_TAPS:
        return f"{config.conv_size} taps are more than {MOST_TAPS}"
    if _state_size(config, 1) > TILE:
        return f"a state of {config.key_size} x {config.value_size} does not fit one program"
    return ""


def why_not_lanes(config: DeltaConfig, heads: int, settings: DeltaSettings | VerifySettings, /) -> str:
    """Say why the kernel with key channels in lanes does not take a layer, so many heads at a time; or nothing."""
    sizes = (heads, config.key_size, config.value_size)
    if not all(map(_is_power, sizes)):
        return f"value heads of a program, key and value channels are {sizes}, not all powers of two"
    if settings.columns > config.value_size or settings.key_lanes > config.key_size:
        return f"{settings.key_lanes} key channels and {settings.columns} columns of a warp are more than {sizes[1:]}"
    if config.conv_size < 2:
        return "a convolution of one tap has no past inputs"
    return ""


def _heads_within(config: DeltaConfig, tile: int) -> int:
    """The most value heads of one key head, a divisor of them all, whose states are at most a tile; at least one."""
    ratio = config.value_heads // config.key_heads
    fits = [heads for heads in range(1, ratio + 1) if ratio % heads == 0 and _state_size(config, heads) <= tile]
    return max(fits, default=1)


def _state_size(config: DeltaConfig, heads: int) -> int:
    return _round_up(heads) * _round_up(config.key_size) * _round_up(config.value_size)


def _is_power(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length()
