"""The head: its interpreter tests run, its settings compile for devices that are not here, errors teach."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmoe.compile.decode_settings import (
    HeadSettings,
    QuantizedHeadSettings,
    decode_settings_to_ints,
    default_head_settings,
    default_quantized_head_settings,
    head_settings_from_ints,
)

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.head_ops import choose_tokens_op
from fmoe.compile.kernels import offline
from fmoe.compile.kernels.head import choose_tokens
from fmoe.compile.kernels.head_quantized import choose_token_quantized
from fmoe.functional.quant import quantize_blocks

FILE = Path(__file__).with_name("head_interpreted.py")
# V, D
SHAPES = {"qwen3next": (151936, 2048), "mixtral": (32000, 4096), "odd": (1003, 200)}


def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("target", offline.SHARED_LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_head_fits(shape, target):
    vocabulary, hidden = SHAPES[shape]
    with offline.recorded_launches() as launches:
        for dtype in (torch.bfloat16, torch.float32):
            for batch in (1, 8):
                settings = default_head_settings(batch, dtype, target="cuda" if target == "sm_90" else "hip")
                x, head = (torch.empty(n, hidden, dtype=dtype, device="meta") for n in (batch, vocabulary))
                choose_tokens(x, head, settings, with_logits=dtype == torch.bfloat16)

    assert len(launches) == 8
    assert offline.find_misfits(launches, target) == []


@pytest.mark.parametrize(("target", "dtype"), [("sm_90", torch.bfloat16), ("gfx950", torch.float16)], ids=str)
@pytest.mark.parametrize("shape", [(151936, 2048), (129280, 7168), (1003, 256)], ids=str)
def test_a_head_in_fp8_fits(shape, target, dtype):
    settings = default_quantized_head_settings(shape[1], target="hopper" if target == "sm_90" else "hip")
    x = torch.empty(1, shape[1], dtype=dtype, device="meta")
    with offline.recorded_launches() as launches:
        choose_token_quantized(x, quantize_blocks(torch.empty(shape, device="meta")), settings)

    assert len(launches) == 2
    assert offline.find_misfits(launches, target) == []


def test_dependent_launch_compiles_and_is_never_named_when_off():
    for pdl in (False, True):
        with offline.recorded_launches() as launches:
            x, head = (torch.empty(n, 256, dtype=torch.bfloat16, device="meta") for n in (2, 999))
            choose_tokens(x, head, HeadSettings(64, 128, 4, 3, dot=True, pdl=pdl))
        assert all(("launch_pdl" in launch.options) == pdl for launch in launches)
        assert offline.find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize("batch", [1, 16])
def test_settings_survive_as_integers(batch):
    settings = default_head_settings(batch, torch.bfloat16)
    assert settings.dot == (batch > 1)
    assert head_settings_from_ints(decode_settings_to_ints(settings)) == settings


def test_wrong_settings_and_shapes_are_refused():
    with pytest.raises(ValueError, match="rows=8 must be a power of two of at least 16"):
        HeadSettings(8, 64, 4, 2, dot=True)
    with pytest.raises(ValueError, match="depth=48 must be a power of two of at least 1"):
        HeadSettings(8, 48, 4, 2, dot=False)
    with pytest.raises(ValueError, match="rows=256 must be at most 128, and programs=0 at least 1"):
        QuantizedHeadSettings(256, 4, 0)
    with pytest.raises(ValueError, match="7 integers came; settings of the head are 6"):
        head_settings_from_ints([1] * 7)
    for shape in ((17, 8), (0, 8), (1, 1, 8)):
        with pytest.raises(ValueError, match=r"x of shape .* came; the head takes \[B, D\] with 1\.\.16 rows"):
            choose_tokens_op(torch.zeros(shape), torch.zeros(9, 8))
