"""The projection of several tokens by weights in FP8 blocks: in the interpreter, and compiled for absent devices."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs and compiles the kernel")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels.linear import LinearSettings, default_linear_settings, linear_to_ints, run_linear
from fmoe.compile.kernels.offline import empty_weight, find_misfits, recorded_launches
from fmoe.functional.quant import FP8

FILE = Path(__file__).with_name("linear_few_interpreted.py")
TARGETS = {"sm_90": "hopper", "gfx950": "hip"}
SHAPES = {"in": (12288, 2048, 64), "attention in": (9216, 2048, 0), "out": (2048, 4096, 0)}  # outputs, hidden, rest
KEPT = LinearSettings(16, 2048, 8, 4, 1, dot=True, pdl=True, ahead=2, programs=132)
STREAMED = LinearSettings(8, 2048, 4, 1, 1, dot=False, pdl=True, programs=264)


def test_the_kernel_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def record(tokens, shape, settings, *, dtype=torch.bfloat16, biased=False):
    outputs, hidden, rest = shape
    w = empty_weight(outputs + rest, hidden, dtype=FP8, rest=rest, activations=dtype)
    bias = torch.empty(outputs + rest, dtype=dtype, device="meta") if biased else None
    with recorded_launches() as launches:
        y = run_linear(torch.empty(tokens, hidden, dtype=dtype, device="meta"), w, settings, bias_N=bias)
    assert y.shape == (tokens, outputs + rest)
    return launches


def names(launches):
    return [launch.kernel.__name__ for launch in launches]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_default_settings_fit(shape, target):
    outputs, hidden, rest = SHAPES[shape]
    misfits = []
    for tokens in (2, 4, 8, 16, 32, 64):
        settings = default_linear_settings(tokens, outputs + rest, hidden, FP8, TARGETS[target])
        misfits += find_misfits(record(tokens, SHAPES[shape], settings), target)
    assert misfits == []


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        ("in", (1,), [16, 2048, 4, 1, 1, 0, 1, 0, 396]),
        ("in", (2,), [16, 2048, 4, 1, 1, 0, 1, 0, 264]),
        ("in", (3, 8), [16, 2048, 4, 3, 1, 1, 1, 2, 264]),
        ("in", (9, 32), [64, 128, 4, 3, 2, 1, 1, 2, 0]),
        ("in", (33, 64), [128, 128, 8, 4, 1, 1, 1, 2, 0]),
        ("attention in", (1,), [16, 2048, 4, 1, 1, 0, 1, 0, 396]),
        ("attention in", (2,), [8, 2048, 4, 1, 1, 0, 1, 0, 264]),
        ("attention in", (3, 8), [16, 2048, 4, 3, 1, 1, 1, 2, 264]),
        ("attention in", (33, 64), [64, 128, 4, 4, 1, 1, 1, 4, 0]),
        ("out", (1,), [2, 4096, 4, 1, 1, 0, 1, 0, 0]),
        ("out", (2,), [4, 4096, 4, 1, 1, 0, 1, 0, 0]),
        ("out", (3, 8), [16, 1024, 4, 2, 4, 1, 1, 1, 132]),
        ("out", (9, 32), [64, 128, 4, 5, 8, 1, 1, 2, 0]),
        ("out", (33, 64), [64, 128, 4, 4, 4, 1, 1, 2, 0]),
    ],
)
def test_the_rule_takes_what_was_fastest(shape, tokens, expected):
    outputs, hidden, rest = SHAPES[shape]
    for count in tokens:
        assert linear_to_ints(default_linear_settings(count, outputs + rest, hidden, FP8, "hopper")) == expected


@pytest.mark.parametrize(("tokens", "block"), [(2, 8), (9, 16), (17, 32)])
def test_tokens_fill_a_block_of_a_power_of_two(tokens, block):
    (launch,) = record(tokens, SHAPES["in"], KEPT, biased=True)
    assert (launch.kernel.__name__, launch.values["BM"]) == ("linear_kept", block)


def test_parts_are_added_by_a_second_launch():
    launches = record(8, SHAPES["out"], replace(KEPT, splits=2), biased=True)
    assert names(launches) == ["linear_kept", "sum_parts"]
    assert find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize(
    ("tokens", "settings", "dtype", "shape", "name"),
    [
        (2, STREAMED, torch.bfloat16, "in", "linear_streamed"),
        (3, STREAMED, torch.bfloat16, "in", "linear_product"),
        (2, STREAMED, torch.float16, "in", "linear_product"),
        (2, STREAMED, torch.bfloat16, "out", "linear_product"),
        (2, KEPT, torch.float32, "in", "linear_dot"),
    ],
)
def test_what_a_form_does_not_take_runs_without_it(tokens, settings, dtype, shape, name):
    assert names(record(tokens, SHAPES[shape], settings, dtype=dtype))[0] == name


def test_more_tokens_than_fit_are_refused():
    with pytest.raises(ValueError, match="65 tokens came, at most 64 fit; use torch's linear"):
        record(65, SHAPES["in"], KEPT)
