"""The chunk rule's kernels: interpreted, compiled for devices that are not here, and what they refuse by name."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmoe.compile.chunk_settings import ChunkSettings, default_chunk_settings

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels.delta_prefill import chunk_delta
from fmoe.compile.kernels.offline import SHARED_LIMITS, compile_launch, find_misfits, recorded_launches

FILE = Path(__file__).with_name("delta_prefill_interpreted.py")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = {"qwen3next": (32, 128, 128), "odd": (3, 96, 80), "large": (4, 256, 256), "tiny": (1, 1, 1)}  # H, K, V


def arguments(name, dtype, *, values=None, tokens=1000):
    heads, key_size, value_size = SIZES[name]

    def empty(*sizes, dtype=F32):
        return torch.empty(sizes, dtype=dtype, device="meta")

    return {
        "q": empty(2, tokens, heads, key_size, dtype=dtype),
        "k": empty(2, tokens, heads, key_size, dtype=dtype),
        "v": empty(2, tokens, heads, value_size, dtype=values or dtype),
        "g": empty(2, tokens, heads),
        "beta": empty(2, tokens, heads),
        "state": empty(2, heads, key_size, value_size),
    }


def launches_of(name, dtype, kind, *, values=None, **changes):
    settings = replace(default_chunk_settings(*SIZES[name][1:], dtype, target=kind), **changes)
    with recorded_launches() as launches:
        chunk_delta(*arguments(name, dtype, values=values).values(), settings)
    return launches


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
@pytest.mark.parametrize("name", SIZES)
def test_default_settings_fit(name, target):
    kind = "hopper" if target == "sm_90" else "hip"
    launches = launches_of(name, F16, kind, values=BF16)
    if name != "large" or kind == "hip":  # the op keeps the reference of float32 with many channels
        launches += launches_of(name, F32, kind)
    assert find_misfits(launches, target) == []


@pytest.mark.parametrize("name", ["qwen3next", "large"])
def test_the_rule_for_any_cuda_device_fits_the_smaller_ones(name):
    """Consumer cards give a program 99 KB of shared memory."""
    usages = [compile_launch(launch, "sm_90") for launch in launches_of(name, F16, "cuda", values=BF16)]
    assert max(usage.shared for usage in usages) <= 101_376
    assert not any(usage.spills for usage in usages)


def test_bfloat16_operands_fit():
    assert find_misfits(launches_of("qwen3next", BF16, "hopper"), "sm_90") == []


def test_any_length_shares_a_kernel():
    def constants(tokens):
        with recorded_launches() as launches:
            chunk_delta(*arguments("odd", F16, tokens=tokens).values(), ChunkSettings(64, 32, 4, 2, 4, True))
        return [{p.name for p in launch.kernel.params if p.do_not_specialize} for launch in launches]

    assert constants(1000) == constants(64) == [{"T"}, {"T"}]


WRONG = {
    "k": (
        lambda x: x[:, 1:],
        ValueError,
        r"k must be \(2, 70, 3, 96\) beside q .*, got \(2, 69, 3, 96\)",
    ),
    "v": (lambda x: x.double(), NotImplementedError, "no chunk kernel reads v in torch.float64; use bfloat16"),
    "q": (lambda x: x.half(), ValueError, "q and k must have one dtype, g, beta and the state float32, got"),
    "beta": (lambda x: x.bfloat16(), ValueError, "the state float32, got"),
    "state": (lambda x: x[:1], ValueError, r"state must be \(2, 3, 96, 80\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused(name):
    change, error, match = WRONG[name]
    tensors = arguments("odd", F32, tokens=70)
    tensors[name] = change(tensors[name])
    with pytest.raises(error, match=match):
        chunk_delta(*tensors.values(), default_chunk_settings(96, 80, F32))


def test_heads_that_do_not_share_are_refused():
    tensors = arguments("odd", F32, tokens=70)
    shared = {name: tensors[name][:, :, :2] for name in ("q", "k")}
    with pytest.raises(ValueError, match="the 3 heads of v must be a multiple of the 2 heads of q and k"):
        chunk_delta(*(tensors | shared).values(), default_chunk_settings(96, 80, F32))


def test_too_many_key_channels_are_refused():
    tensors = arguments("odd", F16)
    v, g, beta = (tensors[name] for name in ("v", "g", "beta"))
    wide, state = v.new_empty(*v.shape[:3], 257), g.new_empty(2, 3, 257, 80)
    with pytest.raises(NotImplementedError, match="no chunk kernel has 257 key channels, 256 at most; use"):
        chunk_delta(wide, wide, v, g, beta, state, default_chunk_settings(257, 80, F16))
