"""Norms inside the kernels behind them: runs normed_interpreted.py, compiles for devices not here, refuses by name."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels import Tile, default_settings
from fmoe.compile.kernels.layer import run_moe_layer_normed
from fmoe.compile.kernels.linear import LinearSettings, default_linear_settings, run_linear_normed
from fmoe.compile.kernels.normed import Unnormed, check_unnormed
from fmoe.compile.kernels.offline import SHARED_LIMITS, empty_weight, find_misfits, recorded_launches
from fmoe.compile.linear_ops import linear_planned
from fmoe.compile.normed_ops import add_normed_kernels, compute_moe_normed_op, linear_normed_planned
from fmoe.compile.ops import compute_moe_op
from fmoe.functional import Kernels, RouterConfig
from fmoe.functional.quant import FP8

FILE = Path(__file__).with_name("normed_interpreted.py")
BF16, F32 = torch.bfloat16, torch.float32
D = 2048


def empty(*sizes, dtype=BF16):
    return torch.empty(sizes, dtype=dtype, device="meta")


def unnormed(norm_dtype=F32, hidden=D, tokens=1):
    return Unnormed(empty(tokens, hidden), empty(tokens, hidden), empty(hidden, dtype=norm_dtype), 1e-6)


def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize(("outputs", "rest"), [(12288, 64), (9216, 0)], ids=["DeltaNet", "attention"])
@pytest.mark.parametrize("norm_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
def test_projections_of_fp8_by_fours_fit(tokens, outputs, rest, norm_dtype):
    settings = default_linear_settings(tokens, outputs + rest, D, FP8, "hopper")
    with recorded_launches() as launches:
        run_linear_normed(
            unnormed(norm_dtype, tokens=tokens), empty_weight(outputs + rest, D, dtype=FP8, rest=rest), settings
        )
    assert [launch.kernel.__name__ for launch in launches] == ["linear_streamed"]
    assert find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize("programs", [0, 264])
@pytest.mark.parametrize(("rows", "warps"), [(1, 4), (2, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_projections_fit(target, rows, warps, programs):
    settings = LinearSettings(rows, D, warps, 1, 1, dot=False, pdl=target == "sm_90", programs=programs)
    with recorded_launches() as launches:
        run_linear_normed(unnormed(BF16), empty(5120, D), settings)
    assert [launch.kernel.__name__ for launch in launches] == ["linear_streamed" if programs else "linear_product"]
    assert find_misfits(launches, target) == []


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_layers_fit(target, tokens, rows):
    settings = default_settings(tokens, 512, 10, 1, D, 512, BF16, target="hopper" if target == "sm_90" else "hip")
    settings = replace(settings, router=Tile(0, rows, D, 4, 1))
    weights = (empty(513, D), None, empty(513, 1024, D), empty(513, D, 512))
    with recorded_launches() as launches:
        run_moe_layer_normed(unnormed(tokens=tokens), *weights, RouterConfig(512, 10, renormalize=True), settings)
    assert launches[0].kernel.__name__ == "logits_gemv"
    assert "norm_row" not in [launch.kernel.__name__ for launch in launches]
    assert find_misfits(launches, target) == []


def test_wrong_rows_are_refused():
    good = unnormed(hidden=9, tokens=2)
    check_unnormed(good, most=2)
    for wrong in (
        good._replace(x_TD=empty(1, 9)),
        good._replace(branch_TD=empty(2, 8)),
        good._replace(weight_D=empty(8)),
        unnormed(hidden=9, tokens=3),
        unnormed(hidden=9, tokens=0),
    ):
        with pytest.raises(
            ValueError, match=r"x, branch and norm must be \[T, D\], \[T, D\] and \[D\], T from 1 to 2, got"
        ):
            check_unnormed(wrong, most=2)
    with pytest.raises(ValueError, match=r"one dtype, torch.bfloat16 and torch.float32 came, and be contiguous"):
        check_unnormed(good._replace(branch_TD=empty(2, 9, dtype=F32)), most=2)
    with pytest.raises(ValueError, match="and be contiguous"):
        check_unnormed(good._replace(weight_D=empty(18)[::2]), most=2)


def test_norms_go_where_plans_are():
    kernels = Kernels(linear=partial(linear_planned, plans=("a",)), compute_moe=partial(compute_moe_op, plans=("b",)))
    found = add_normed_kernels(kernels)
    assert (found.linear_normed.func, found.linear_normed.keywords) == (linear_normed_planned, {"plans": ("a",)})
    assert (found.compute_moe_normed.func, found.compute_moe_normed.keywords) == (
        compute_moe_normed_op,
        {"plans": ("b",)},
    )
    assert add_normed_kernels(Kernels(compute_moe=max, linear=min)) == Kernels(compute_moe=max, linear=min)
