"""The projection of several tokens by FP8 weights as they are: in the interpreter, and compiled for a device."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs and compiles the kernel")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

import triton

from fmoe.compile.kernels.linear import (
    LinearSettings,
    can_norm_linear,
    default_linear_settings,
    linear_from_ints,
    linear_to_ints,
    run_linear,
    run_linear_normed,
)
from fmoe.compile.kernels.normed import Unnormed
from fmoe.compile.kernels.offline import compile_launch, empty_weight, find_misfits, recorded_launches
from fmoe.functional.quant import FP8

FILE = Path(__file__).with_name("linear_steps_interpreted.py")
SHAPES = {"in": (12288, 2048, 64), "attention in": (9216, 2048, 0), "out": (2048, 4096, 0)}  # outputs, hidden, rest
TARGETS = {"sm_90": "hopper", "gfx950": "hip"}
STREAMED = LinearSettings(8, 2048, 4, 1, 1, dot=0, pdl=True, programs=264)
PAIRS = LinearSettings(64, 128, 4, 4, 1, dot=2, pdl=True, ahead=2)


def test_the_kernel_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def record(tokens, shape, settings, *, dtype=torch.bfloat16):
    outputs, hidden, rest = shape
    w = empty_weight(outputs + rest, hidden, dtype=FP8, rest=rest, activations=dtype)
    with recorded_launches() as launches:
        y = run_linear(torch.empty(tokens, hidden, dtype=dtype, device="meta"), w, settings)
    assert y.shape == (tokens, outputs + rest)
    return launches


def names(launches):
    return [launch.kernel.__name__ for launch in launches]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_default_settings_fit(shape, target):
    outputs, hidden, rest = SHAPES[shape]
    misfits = []
    for tokens in (1, 2, 3, 8, 16, 32, 64):
        settings = default_linear_settings(tokens, outputs + rest, hidden, FP8, TARGETS[target])
        misfits += find_misfits(record(tokens, SHAPES[shape], settings), target)
    assert misfits == []


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        ("in", (1,), [16, 2048, 4, 1, 1, 0, 1, 0, 396]),
        ("in", (2,), [8, 2048, 4, 1, 1, 0, 1, 0, 528]),
        ("in", (3, 64), [64, 128, 4, 4, 1, 2, 1, 2, 0]),
        ("attention in", (1,), [16, 2048, 4, 1, 1, 0, 1, 0, 396]),
        ("attention in", (2,), [8, 2048, 4, 1, 1, 0, 1, 0, 384]),
        ("attention in", (3, 32), [64, 128, 4, 6, 1, 2, 1, 2, 0]),
        ("attention in", (33, 64), [64, 128, 4, 4, 1, 2, 1, 2, 0]),
        ("out", (1,), [2, 4096, 4, 1, 1, 0, 1, 0, 0]),
        ("out", (2,), [4, 4096, 4, 1, 1, 0, 1, 0, 0]),
        ("out", (3, 16), [64, 128, 4, 4, 4, 2, 1, 2, 0]),
        ("out", (17, 64), [64, 128, 4, 4, 8, 2, 1, 2, 0]),
    ],
)
def test_the_rule_takes_what_was_fastest(shape, tokens, expected):
    outputs, hidden, rest = SHAPES[shape]
    for count in tokens:
        assert linear_to_ints(default_linear_settings(count, outputs + rest, hidden, FP8, "hopper")) == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (8, PAIRS),
        (32, replace(PAIRS, splits=2)),
        (64, replace(PAIRS, rows=128, warps=8)),
    ],
)
def test_blocks_fit(tokens, settings, shape):
    assert find_misfits(record(tokens, SHAPES[shape], settings), "sm_90") == []


@pytest.mark.parametrize(("rows", "tokens"), [(64, 2), (128, 33)])
def test_both_operands_of_the_matrix_instructions_are_fp8(rows, tokens):
    launches = record(tokens, SHAPES["attention in"], replace(PAIRS, rows=rows))
    assert names(launches) == ["split_row", "linear_dot"]
    compiled, compile_it = [], triton.compile

    def keep(*args, **options):
        compiled.append(compile_it(*args, **options))
        return compiled[-1]

    with patch.object(triton, "compile", keep):
        compile_launch(launches[1], "sm_90")
    products = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S*", compiled[0].asm["ptx"]))
    assert products and all(re.search(r"^wgmma.*\.e4m3\.e4m3$", name) for name in products)


@pytest.mark.parametrize(
    ("dtype", "shape", "split"),
    [
        (torch.bfloat16, (256, 384, 3), True),
        (torch.float16, (256, 384, 0), False),  # of more digits than two values carry
        (torch.float32, (256, 384, 0), False),
        (torch.bfloat16, (256, 200, 0), False),
    ],
)
def test_only_bfloat16_and_whole_blocks_are_split(dtype, shape, split):
    launches = record(5, shape, PAIRS, dtype=dtype)
    assert names(launches) == [*["split_row"] * split, "linear_dot"]
    assert (launches[-1].values["pairs"] is not None) == split


def test_weights_in_other_dtypes_are_multiplied_as_before():
    with recorded_launches() as launches:
        x, w = (torch.empty(n, 256, dtype=torch.bfloat16, device="meta") for n in (5, 64))
        run_linear(x, w, PAIRS)
    assert names(launches) == ["linear_dot"] and launches[0].values["pairs"] is None


@pytest.mark.parametrize("tokens", [3, 64])
def test_behind_a_norm_its_launch_splits_the_tokens(tokens):
    outputs, hidden, rest = SHAPES["in"]
    x, branch = (torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta") for _ in range(2))
    rows = Unnormed(x, branch, torch.empty(hidden, device="meta"), 1e-6)
    w = empty_weight(outputs + rest, hidden, dtype=FP8, rest=rest)
    assert can_norm_linear(x, w, PAIRS) and not can_norm_linear(x, w, replace(PAIRS, dot=1))
    with recorded_launches() as launches:
        run_linear_normed(rows, w, PAIRS)
    assert names(launches) == ["norm_row", "linear_dot"]
    assert find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize(("tokens", "columns"), [(2, 8), (9, 16), (17, 32)])
def test_tokens_fill_a_block_of_a_power_of_two(tokens, columns):
    assert record(tokens, SHAPES["in"], PAIRS)[-1].values["BM"] == columns


def test_parts_are_added_by_a_launch_behind():
    launches = record(8, SHAPES["out"], replace(PAIRS, splits=2))
    assert names(launches) == ["split_row", "linear_dot", "sum_parts"]
    assert find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize(
    ("tokens", "settings", "dtype", "shape", "name"),
    [
        (2, STREAMED, torch.bfloat16, "in", "linear_streamed"),
        (3, STREAMED, torch.bfloat16, "in", "linear_product"),
        (2, STREAMED, torch.float16, "in", "linear_product"),
        (2, STREAMED, torch.bfloat16, "out", "linear_product"),
        (2, replace(STREAMED, rows=16, dot=1), torch.bfloat16, "in", "linear_dot"),
    ],
)
def test_what_a_form_does_not_take_runs_without_it(tokens, settings, dtype, shape, name):
    assert names(record(tokens, SHAPES[shape], settings, dtype=dtype))[0] == name


def test_more_tokens_than_fit_are_refused():
    with pytest.raises(ValueError, match="65 tokens came, at most 64 fit; use torch's linear"):
        record(65, SHAPES["in"], PAIRS)


def test_settings_survive_as_nine_integers():
    assert linear_to_ints(PAIRS) == [64, 128, 4, 4, 1, 2, 1, 2, 0]
    assert linear_from_ints(linear_to_ints(PAIRS)) == PAIRS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dot": 3}, "dot=3 must be 0, 1, or 2 for products of FP8 weights as they are"),
        ({"depth": 16}, "depth=16 must be at least 32 with dot=2, and programs=0 0"),
        ({"programs": 4}, "depth=128 must be at least 32 with dot=2, and programs=4 0"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PAIRS, **change)
