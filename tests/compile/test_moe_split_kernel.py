"""Experts over weights in FP8 that are not converted: interpreted, compiled for Hopper, and where they are taken."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs and compiles the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels import Settings, Tile
from fmoe.compile.kernels.layer import can_norm_layer, run_moe_layer_normed
from fmoe.compile.kernels.normed import Unnormed
from fmoe.compile.kernels.offline import empty_weight, find_misfits, record_layer, recorded_launches
from fmoe.compile.settings import default_settings
from fmoe.functional import RouterConfig
from fmoe.functional.quant import FP8

FILE = Path(__file__).with_name("moe_split_interpreted.py")
# E, K, S, D, F
SHAPES = {"qwen3next": (512, 10, 1, 2048, 512), "dsv3": (256, 8, 1, 7168, 2048)}


def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def record(name, settings, tokens, **options):
    experts, top_k, slots, hidden, width = SHAPES[name]
    shape = {"slots": slots, "hidden": hidden, "width": width, "dtype": FP8}
    return record_layer(settings, RouterConfig(experts, top_k), tokens=tokens, **shape, **options)


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_the_layer_fits_hopper(name, tokens):
    settings = default_settings(tokens, *SHAPES[name], FP8, target="hopper")
    assert settings.path == "split"

    launches = record(name, settings, tokens)

    names = [launch.kernel.__name__ for launch in launches]
    assert names[-4:] == ["split_rows", "gate_up_split", "down_split", "combine_pairs"]
    assert [launch.values["EARLY"] for launch in launches if "EARLY" in launch.values] == [True]
    assert find_misfits(launches, "sm_90") == []


def empty(*sizes, dtype=torch.bfloat16):
    return torch.empty(sizes, dtype=dtype, device="meta")


def record_normed(name, settings, tokens):
    experts, top_k, slots, hidden, width = SHAPES[name]
    rows = Unnormed(empty(tokens, hidden), empty(tokens, hidden), empty(hidden, dtype=torch.float32), 1e-6)
    gate_up = empty_weight(experts + slots, 2 * width, hidden, dtype=FP8, parts=2)
    stacks = gate_up, empty_weight(experts + slots, hidden, width, dtype=FP8)
    assert can_norm_layer(rows.x_TD, *stacks, settings)
    with recorded_launches() as launches:
        run_moe_layer_normed(rows, empty(experts + 1, hidden), None, *stacks, RouterConfig(experts, top_k), settings)
    return launches


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_the_norm_splits_the_rows(name, tokens):
    settings = default_settings(64, *SHAPES[name], FP8, target="hopper")

    launches = record_normed(name, settings, tokens)

    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["norm_row", "logits_dot", "choose_experts", "gate_up_split", "down_split", "combine_pairs"]
    # The launch in front of gate-up now is the choice: what it writes must be waited for.
    assert [launch.values["EARLY"] for launch in launches if "EARLY" in launch.values] == [False]
    assert find_misfits(launches, "sm_90") == []


WIDE = Tile(16, 128, 128, 8, 3)
BLOCKS = {
    "wide": {"gate_up": WIDE, "down": Tile(16, 128, 128, 4, 4)},
    "narrow": {"gate_up": Tile(16, 32, 128, 4, 6), "down": Tile(16, 64, 32, 4, 6)},
    "down of 128 rows": {"down": Tile(16, 128, 64, 4, 8), "programs": 8},
    "a token's experts": {"gate_up": WIDE, "down": Tile(1, 8, 512, 4, 4), "token_down": True},
}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_other_blocks_fit_hopper(blocks):
    settings = replace(default_settings(64, *SHAPES["qwen3next"], FP8, target="hopper"), **BLOCKS[blocks])
    launches = record_normed("qwen3next", settings, 16)
    names = [launch.kernel.__name__ for launch in launches]
    assert names[3:] == (
        ["gate_up_split", "down_token"] if settings.token_down else ["gate_up_split", "down_split", "combine_pairs"]
    )
    assert find_misfits(launches, "sm_90") == []


def test_a_step_of_down_lies_in_a_block_of_gate_up():
    tile = Tile(16, 64, 128, 4, 3)
    with pytest.raises(ValueError, match=r"down.depth=128 must divide gate_up.rows=64 on the split path"):
        Settings("split", tile, tile, tile)
    for good in (replace(tile, depth=64), replace(tile, depth=32)):
        assert Settings("split", tile, tile, good).down == good
    assert Settings("split", tile, tile, tile, token_down=True).down == tile


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_other_devices_convert_the_weights(target):
    assert default_settings(32, *SHAPES["qwen3next"], FP8, target=target).path == "grouped"


@pytest.mark.parametrize("hidden", [160, 192])
def test_weights_in_partial_blocks_are_converted(hidden):
    assert default_settings(32, 16, 2, 0, hidden, 128, FP8, target="hopper").path != "split"


def test_rows_that_are_not_in_bfloat16_run_as_grouped():
    settings = Settings("split", Tile(16, 16, 128, 4, 3), Tile(16, 64, 128, 4, 3), Tile(16, 64, 64, 4, 3))
    names = [launch.kernel.__name__ for launch in record("qwen3next", settings, 8, activations=torch.float16)]
    grouped = record("qwen3next", replace(settings, path="grouped"), 8, activations=torch.float16)
    assert names == [launch.kernel.__name__ for launch in grouped]
    assert "gate_up_grouped" in names
