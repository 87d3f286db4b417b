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

from fmoe.compile.kernels.linear import LinearSettings, linear_from_ints, linear_to_ints, run_linear
from fmoe.compile.kernels.offline import compile_launch, empty_weight, find_misfits, recorded_launches
from fmoe.functional.quant import FP8

FILE = Path(__file__).with_name("linear_steps_interpreted.py")
SHAPES = {"in": (12288, 2048, 64), "attention in": (9216, 2048, 0), "out": (2048, 4096, 0)}  # outputs, hidden, rest
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (8, PAIRS),
        (32, replace(PAIRS, splits=2)),
        (64, replace(PAIRS, rows=128)),
        (64, replace(PAIRS, rows=128, warps=8)),
    ],
)
def test_blocks_fit(tokens, settings, shape):
    assert find_misfits(record(tokens, SHAPES[shape], settings), "sm_90") == []


@pytest.mark.parametrize(("rows", "tokens"), [(64, 2), (128, 33)])
def test_both_operands_of_the_matrix_instructions_are_fp8(rows, tokens):
    (launch,) = record(tokens, SHAPES["attention in"], replace(PAIRS, rows=rows))
    compiled, compile_it = [], triton.compile

    def keep(*args, **options):
        compiled.append(compile_it(*args, **options))
        return compiled[-1]

    with patch.object(triton, "compile", keep):
        compile_launch(launch, "sm_90")
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
    (launch,) = record(5, shape, PAIRS, dtype=dtype)
    assert (launch.kernel.__name__, launch.values["PAIRS"]) == ("linear_dot", split)


def test_weights_in_other_dtypes_are_multiplied_as_before():
    with recorded_launches() as launches:
        x, w = (torch.empty(n, 256, dtype=torch.bfloat16, device="meta") for n in (5, 64))
        run_linear(x, w, PAIRS)
    assert launches[0].values["PAIRS"] is False


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
