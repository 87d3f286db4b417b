"""The kernels around the chunk rule: interpreted, compiled for devices that are not here, and what they refuse."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmoe.compile.chunk_settings import InputSettings, default_chunk_settings, default_input_settings
from fmoe.functional import DeltaConfig

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels.delta_inputs import prefill_delta_
from fmoe.compile.kernels.offline import SHARED_LIMITS, find_misfits, recorded_launches

FILE = Path(__file__).with_name("delta_inputs_interpreted.py")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CONFIGS = {
    "qwen3next": DeltaConfig(16, 32, 128, 128, 4, 1e-6),
    "odd": DeltaConfig(3, 9, 96, 80, 3, 1e-6),
    "large": DeltaConfig(2, 4, 256, 256, 4, 1e-6),
}


def arguments(name, dtype, tokens=1000):
    config = CONFIGS[name]

    def empty(*sizes, dtype=F32):
        return torch.empty(sizes, dtype=dtype, device="meta")

    mixed, heads = config.split_sizes[0], config.value_heads
    return {
        "projected": empty(2, tokens, sum(config.split_sizes), dtype=dtype),
        "window": empty(2, config.conv_size - 1, mixed, dtype=dtype),
        "state": empty(2, heads, config.key_size, config.value_size),
        "w_conv": empty(config.conv_size, mixed, dtype=dtype),
        "decay": empty(heads),
        "dt_bias": empty(heads),
        "norm": empty(config.value_size, dtype=dtype),
    }


def run(name, tensors, dtype, kind="hopper"):
    config = CONFIGS[name]
    rule = default_chunk_settings(config.key_size, config.value_size, dtype, target=kind)
    return prefill_delta_(*tensors.values(), config, rule, default_input_settings(config.value_size))


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
@pytest.mark.parametrize("name", CONFIGS)
def test_default_settings_fit(name, target):
    kind = "hopper" if target == "sm_90" else "hip"
    with recorded_launches() as launches:
        run(name, arguments(name, BF16), F16, kind)
    assert len(launches) == 4
    assert find_misfits(launches, target) == []


WRONG = {
    "projected": (
        lambda x: x[..., 1:],
        ValueError,
        r"projected must be \(2, 70, .*\), got .*; check the layer's config",
    ),
    "window": (lambda x: x.half(), ValueError, "projected, window and w_conv must have one dtype, got"),
    "state": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), ValueError, "must be contiguous, for they are"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused(name):
    change, error, match = WRONG[name]
    tensors = arguments("odd", F32, tokens=70)
    tensors[name] = change(tensors[name])
    with pytest.raises(error, match=match):
        run("odd", tensors, F32)


def test_other_dtypes_are_refused():
    tensors = {name: x.double() for name, x in arguments("odd", F32).items()}
    with pytest.raises(NotImplementedError, match=r"no DeltaNet kernel reads torch.float64; use bfloat16"):
        run("odd", tensors, F32)


def test_wrong_settings_are_refused():
    for name, most in (("tokens", 256), ("warps", 16), ("rows", 256), ("norm_warps", 16)):
        for value in (0, 3, 2 * most):
            with pytest.raises(ValueError, match=f"{name}={value} must be a power of two from 1 to {most}"):
                replace(InputSettings(), **{name: value})
    assert default_input_settings(128) == InputSettings()
    assert default_input_settings(256) == InputSettings(tokens=16, rows=16)
