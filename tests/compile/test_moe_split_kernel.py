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
from fmoe.compile.kernels.offline import find_misfits, record_layer
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
    assert names[-5:] == ["split_row", "gate_up_split", "split_row", "down_split", "combine_pairs"]
    assert find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_other_devices_convert_the_weights(target):
    assert default_settings(32, *SHAPES["qwen3next"], FP8, target=target).path == "grouped"


@pytest.mark.parametrize("hidden", [160, 192])
def test_weights_in_partial_blocks_are_converted(hidden):
    assert default_settings(32, 16, 2, 0, hidden, 128, FP8, target="hopper").path != "split"


def test_rows_that_are_not_in_bfloat16_run_as_grouped():
    tile = Tile(16, 64, 128, 4, 3)
    settings = Settings("split", Tile(16, 16, 128, 4, 3), tile, tile)
    names = [launch.kernel.__name__ for launch in record("qwen3next", settings, 8, activations=torch.float16)]
    grouped = record("qwen3next", replace(settings, path="grouped"), 8, activations=torch.float16)
    assert names == [launch.kernel.__name__ for launch in grouped]
    assert "gate_up_grouped" in names
