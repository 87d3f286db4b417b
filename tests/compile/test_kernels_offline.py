"""The built-in settings compile for devices that are not here, without spills and within their shared memory."""

import os

import pytest
import torch

from fmoe.functional import RouterConfig

pytest.importorskip("triton", reason="triton is not installed; it is what compiles the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels import Settings, Tile, default_settings, settings_from_ints, settings_to_ints
from fmoe.compile.kernels.offline import SHARED_LIMITS, Usage, compile_launch, find_misfits, record_layer
from fmoe.compile.settings import PATHS

# experts, top_k, slots, hidden, width
SHAPES = {
    "qwen3next": (512, 10, 1, 2048, 512),
    "qwen3": (128, 8, 0, 2048, 768),
    "dsv2lite": (64, 6, 2, 2048, 1408),
    "mixtral": (8, 2, 0, 4096, 14336),
}
TOKENS = (1, 2, 8, 64, 256, 2048, 16384)


def launches_of(shape, tokens, target, **changes):
    experts, top_k, slots, hidden, width = SHAPES[shape]
    kind = "hopper" if target == "sm_90" else "hip"
    settings = default_settings(tokens, experts, top_k, slots, hidden, width, torch.bfloat16, target=kind)
    values = {name: getattr(settings, name) for name in Settings.__dataclass_fields__} | changes
    config = RouterConfig(experts, top_k)
    return record_layer(
        Settings(**values), config, tokens=tokens, slots=slots, hidden=hidden, width=width, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_default_settings_fit(shape, target):
    seen, misfits = set(), []
    for tokens in TOKENS:
        for launch in launches_of(shape, tokens, target):
            constants = {k: v for k, v in launch.values.items() if not isinstance(v, torch.Tensor)}
            key = (launch.kernel.__name__, str(constants), str(launch.options))
            if key not in seen:
                misfits += find_misfits([launch], target)
            seen.add(key)
    assert misfits == []


@pytest.mark.parametrize("tokens", [1, 64, 16384])
def test_dependent_launch_and_descriptors_compile(tokens):
    launches = launches_of("qwen3next", tokens, "sm_90", pdl=True, descriptors=True)
    assert all(launch.options["launch_pdl"] for launch in launches)
    assert find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_tiles_fit_with_descriptors(shape):
    tiles = {"gate_up": Tile(128, 128, 64, 8, 4), "down": Tile(128, 256, 64, 8, 4)}
    gate_up, down = launches_of(shape, 16384, "sm_90", descriptors=True, programs=132, **tiles)[-3:-1]
    assert gate_up.values["w"].block_shape == [2, 128, 64]
    assert (down.values["h"].block_shape, down.values["w"].block_shape) == ([128, 64], [256, 64])
    assert find_misfits([gate_up, down], "sm_90") == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_path_compiles_for_odd_sizes(tokens, path):
    """One token makes constants of some sizes; other code paths then have to compile."""
    few, small = Tile(1, 16, 128, 4, 2), Tile(16, 64, 64, 4, 2)
    settings = Settings(path, few if path == "slots" else small, *([few] * 2 if path == "slots" else [small] * 2))
    config = RouterConfig(60, 4, scoring="sigmoid", groups=5, groups_kept=2, group_score="top2")
    launches = record_layer(settings, config, tokens=tokens, slots=3, hidden=96, width=40, dtype=torch.float16)
    assert find_misfits(launches, "sm_90") + find_misfits(launches, "gfx942") == []


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 1), (5, 1), (2, 2)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_choice_compiles_for_the_smallest_sizes(tokens, experts, top_k):
    """The interpreter takes what the compiler's sort and top-k do not."""
    for slots in (0, 1):
        settings = default_settings(tokens, experts, top_k, slots, 96, 40, torch.bfloat16)
        launches = record_layer(
            settings,
            RouterConfig(experts, top_k),
            tokens=tokens,
            slots=slots,
            hidden=96,
            width=40,
            dtype=torch.bfloat16,
        )
        assert find_misfits(launches, "sm_90") + find_misfits(launches, "gfx942") == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_rule_for_any_cuda_device_fits_the_smaller_ones(tokens, shape):
    """Consumer cards give a program 99 KB of shared memory."""
    experts, top_k, slots, hidden, width = SHAPES[shape]
    settings = default_settings(tokens, experts, top_k, slots, hidden, width, torch.bfloat16, target="cuda")
    launches = record_layer(
        settings, RouterConfig(experts, top_k), tokens=tokens, slots=slots, hidden=hidden, width=width,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert max(compile_launch(launch, "sm_90").shared for launch in launches) <= 101_376


def test_dependent_launch_is_never_named_when_off():
    assert not any("launch_pdl" in launch.options for launch in launches_of("qwen3next", 64, "sm_90"))


def test_a_spill_and_too_much_shared_memory_are_found():
    launches = launches_of("qwen3next", 64, "sm_90")[:2]
    usages = iter([Usage("a", 255, 8, 0), Usage("b", 32, 0, 227 * 1024 + 1)])
    assert len(find_misfits(launches, "sm_90", lambda launch, target: next(usages))) == 2


def test_usage_of_a_large_tile_is_read():
    launch = launches_of("mixtral", 16384, "sm_90", gate_up=Tile(128, 128, 64, 4, 3))[-3]
    usage = compile_launch(launch, "sm_90")
    assert usage.kernel == "gate_up_sorted"
    assert usage.registers == 255
    assert usage.spills > 0
    assert usage.shared >= 3 * 2 * (128 + 2 * 128) * 64 / 2


@pytest.mark.parametrize("tokens", TOKENS)
def test_settings_survive_as_integers(tokens):
    settings = default_settings(tokens, 512, 10, 1, 2048, 512, torch.bfloat16)
    assert settings_from_ints(settings_to_ints(settings)) == settings


def test_wrong_settings_are_refused():
    tile = Tile(16, 64, 64, 4, 3)
    with pytest.raises(ValueError, match="path='other' must be one of slots, grouped, sorted"):
        Settings("other", tile, tile, tile)
    with pytest.raises(ValueError, match=r"gate_up.tokens=16 must equal down.tokens=32"):
        Settings("sorted", tile, tile, Tile(32, 64, 64, 4, 3))
    with pytest.raises(ValueError, match="24 integers came; settings are 25"):
        settings_from_ints([0] * 24)
