"""The norm kernels: runs add_norm_interpreted.py, compiles for devices that are not here, refuses by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels.add_norm import MAX_CHANNELS, add_rms_norm_rows, rms_norm_rows
from fmoe.compile.kernels.offline import SHARED_LIMITS, find_misfits, recorded_launches

FILE = Path(__file__).with_name("add_norm_interpreted.py")
BF16, F32 = torch.bfloat16, torch.float32


def rows(*sizes, dtype=BF16):
    return torch.empty(sizes, dtype=dtype, device="meta")


def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize(("size", "weight_dtype"), [(96, BF16), (2048, F32), (7168, BF16), (MAX_CHANNELS, F32)])
def test_the_kernels_fit(size, weight_dtype, target):
    with recorded_launches() as launches:
        add_rms_norm_rows(rows(3, size), rows(3, size), rows(size, dtype=weight_dtype), eps=1e-6)
        rms_norm_rows(rows(3, size), rows(size, dtype=weight_dtype), eps=1e-6)
    assert len(launches) == 2
    assert find_misfits(launches, target) == []


def test_dependent_launch_is_named_only_when_on():
    with recorded_launches() as launches:
        for pdl in (False, True):
            add_rms_norm_rows(rows(1, 2048), rows(1, 2048), rows(2048), eps=1e-6, pdl=pdl)
    assert ["launch_pdl" in launch.options for launch in launches] == [False, True]
    assert find_misfits(launches, "sm_90") == []


def test_wrong_rows_are_refused():
    with pytest.raises(ValueError, match=r"weight must be \[D\] for rows \[..., D\], got \(8,\) and \(2, 9\)"):
        rms_norm_rows(rows(2, 9), rows(8), eps=1e-6)
    with pytest.raises(ValueError, match=r"the branch must be like x, \(2, 9\) torch.bfloat16, got \(1, 9\)"):
        add_rms_norm_rows(rows(2, 9), rows(1, 9), rows(9), eps=1e-6)
    with pytest.raises(ValueError, match="the branch must be like x"):
        add_rms_norm_rows(rows(2, 9), rows(2, 9, dtype=F32), rows(9), eps=1e-6)
    with pytest.raises(
        NotImplementedError, match=r"no norm kernel reads torch.float64 with a weight of torch.bfloat16"
    ):
        rms_norm_rows(rows(2, 9, dtype=torch.float64), rows(9), eps=1e-6)
    with pytest.raises(NotImplementedError, match="rows of 16385 are longer than 16384; use rms_norm"):
        rms_norm_rows(rows(1, MAX_CHANNELS + 1), rows(MAX_CHANNELS + 1), eps=1e-6)
