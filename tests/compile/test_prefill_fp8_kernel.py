"""Products of rows in FP8 with weights in FP8 blocks: interpreted, compiled for Hopper, refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs and compiles the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels import Settings, Tile
from fmoe.compile.kernels.linear_fp8 import can_multiply_quantized, default_form, run_linear_quantized
from fmoe.compile.kernels.moe_prefill_fp8 import can_quantize, compute_experts_quantized
from fmoe.compile.kernels.offline import empty_weight, find_misfits, recorded_launches
from fmoe.compile.kernels.quantize import quantize_rows
from fmoe.functional import Routing
from fmoe.functional.quant import FP8

FILE = Path(__file__).with_name("prefill_fp8_interpreted.py")
# experts, columns of the routing, hidden, width
SHAPES = {"qwen3next": (513, 11, 2048, 512), "dsv3": (257, 9, 7168, 2048)}


def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_fit(shape, block):
    experts, columns, hidden, width = SHAPES[shape]
    tile = Tile(block, 128, 128, 8, 4)
    routing = Routing(
        torch.empty(4096, columns, device="meta"), torch.empty(4096, columns, dtype=torch.int32, device="meta")
    )
    stacks = (
        empty_weight(experts, 2 * width, hidden, dtype=FP8, parts=2),
        empty_weight(experts, hidden, width, dtype=FP8),
    )
    x = torch.empty(4096, hidden, dtype=torch.bfloat16, device="meta")
    for pdl in (False, True):
        with recorded_launches() as launches:
            compute_experts_quantized(x, routing, *stacks, Settings("sorted", tile, tile, tile, programs=132, pdl=pdl))
        names = [launch.kernel.__name__ for launch in launches]
        assert names[0] == "quantize_blocks" and names[-3:] == ["gate_up_quantized", "down_quantized", "combine_pairs"]
        assert find_misfits([launches[0], *launches[-3:-1]], "sm_90") == []


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(12288, 2048, 64), (9216, 2048, 0), (2048, 4096, 0), (300, 384, 0)], ids=str)
def test_projections_fit(shape, with_bias):
    outputs, hidden, rest = shape
    for tokens in (512, 4096):
        w = empty_weight(outputs + rest, hidden, dtype=FP8, rest=rest)
        bias = torch.empty(outputs + rest, dtype=torch.bfloat16, device="meta") if with_bias else None
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
        with recorded_launches() as launches:
            y = run_linear_quantized(x, w, bias_N=bias, form=default_form(tokens))
        assert y.shape == (tokens, outputs + rest)
        assert [launch.kernel.__name__ for launch in launches] == ["quantize_blocks", "linear_quantized"]
        assert find_misfits(launches, "sm_90") == []


def test_what_products_in_fp8_take():
    def rows(dtype, hidden):
        return torch.empty(3, hidden, dtype=dtype, device="meta")

    bf16, whole = torch.bfloat16, empty_weight(256, 384, dtype=FP8)
    assert can_quantize(rows(bf16, 384), whole, empty_weight(2, 384, 128, dtype=FP8))
    assert not can_quantize(rows(torch.float16, 384), whole)
    assert not can_quantize(rows(bf16, 384), whole, empty_weight(256, 384, dtype=bf16))
    assert not can_quantize(rows(bf16, 160), empty_weight(256, 160, dtype=FP8))
    assert not can_quantize(rows(bf16, 384), empty_weight(136, 384, dtype=FP8))
    assert can_multiply_quantized(rows(bf16, 384), empty_weight(140, 384, dtype=FP8, rest=4))
    assert not can_multiply_quantized(rows(bf16, 160), empty_weight(256, 160, dtype=FP8))
    assert not can_multiply_quantized(rows(torch.float32, 384), whole)
    assert not can_multiply_quantized(rows(bf16, 384), empty_weight(256, 384, dtype=bf16))


@pytest.mark.parametrize("x", [torch.ones(3, 160), torch.ones(256, 3).T], ids=["partial", "transposed"])
def test_rows_that_have_no_whole_blocks_are_refused(x):
    with pytest.raises(ValueError, match="must be contiguous rows of whole blocks of 128 columns to be quantised, got"):
        quantize_rows(x)
