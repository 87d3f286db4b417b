"""Attention of a few tokens: its interpreter tests run, its settings compile for devices that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmoe.compile.decode_settings import AttendSettings, default_attend_settings

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.attend_few_ops import attend_few_lengths_op, attend_few_step_op_
from fmoe.compile.kernels import offline
from fmoe.compile.kernels.attend_few import attend_few_tokens, attend_projected_few_
from fmoe.functional import KVCache, Placement

FILE = Path(__file__).with_name("attend_few_interpreted.py")
SLOTS = 4160
# H, J, C, T
STEPS = {"qwen3next": (16, 2, 256, 2), "qwen3": (32, 4, 128, 3), "glm4": (96, 8, 128, 4), "odd": (15, 5, 80, 9)}


def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def settings_for(heads, kv_heads, size, tokens, target, dtype=torch.bfloat16):
    kind = {"sm_90": "hopper", "cuda": "cuda"}.get(target, "hip")
    return default_attend_settings(1, heads, kv_heads, size, SLOTS, dtype, target=kind, tokens=tokens)


def record_step(heads, kv_heads, size, tokens, settings, *, dtype, gated, window=0):
    """Record the launches of a step."""
    projected = empty(1, tokens, ((2 if gated else 1) * heads + 2 * kv_heads) * size, dtype=dtype)
    k, norm = empty(1, kv_heads, SLOTS, size, dtype=dtype), empty(heads + kv_heads, size, dtype=torch.float32)
    angle, positions = empty(1, tokens, size // 8, dtype=dtype), empty(1, tokens, dtype=torch.int64)
    with offline.recorded_launches() as launches:
        attend_projected_few_(
            projected, norm, angle, angle, positions, k, k, settings, heads=heads, eps=1e-6, scale=0.1, window=window
        )
    return launches


@pytest.mark.parametrize("target", offline.SHARED_LIMITS)
@pytest.mark.parametrize("shape", STEPS)
def test_a_step_fits(shape, target):
    *sizes, tokens = STEPS[shape]
    launches = []
    for dtype, gated, T in ((torch.bfloat16, True, tokens), (torch.float32, False, tokens + 1)):
        settings = settings_for(*sizes, T, target, dtype)
        launches += record_step(*sizes, T, settings, dtype=dtype, gated=gated, window=512 if gated else 0)

    assert len(launches) == 4
    assert offline.find_misfits(launches, target) == []


@pytest.mark.parametrize("target", offline.SHARED_LIMITS)
def test_latents_fit(target):
    latent, launches = empty(1, 1, SLOTS, 576), []
    for heads, tokens, dtype in ((16, 2, torch.bfloat16), (128, 3, torch.bfloat16), (16, 2, torch.float32)):
        latent, settings = empty(1, 1, SLOTS, 576, dtype=dtype), settings_for(heads, 1, 576, tokens, target, dtype)
        with offline.recorded_launches() as new:
            q, lengths = empty(1, tokens, heads, 576, dtype=dtype), empty(1, dtype=torch.int64)
            attend_few_tokens(q, latent, latent[..., :512], lengths, settings, scale=0.1)
        launches += new[:1]

    assert all(launch.values["SHARED"] for launch in launches)
    assert offline.find_misfits(launches, target) == []


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 2, 256), (32, 4, 128), (128, 1, 576)])
def test_default_settings_fit_smaller_gpus(heads, kv_heads, size):
    settings = settings_for(heads, kv_heads, size, 4, "cuda")
    k = empty(1, kv_heads, SLOTS, size)
    with offline.recorded_launches() as launches:
        v = k[..., :512]
        attend_few_tokens(empty(1, 4, heads, size), k, v, empty(1, dtype=torch.int64), settings, scale=0.1)
    assert offline.compile_launch(launches[0], "sm_90").shared <= 99 * 1024


def test_dependent_launch_is_named_where_it_is_asked_for():
    for pdl in (False, True):
        settings = AttendSettings(2, 64, 16, 4, 2, pdl=pdl)
        launches = record_step(16, 2, 64, 2, settings, dtype=torch.bfloat16, gated=True)
        assert [launch.options.get("launch_pdl", False) for launch in launches] == [pdl, pdl]


@pytest.mark.parametrize(
    ("tokens", "rows", "splits"), [(1, 16, 128), (2, 16, 128), (3, 32, 64), (4, 32, 64), (5, 32, 32)]
)
def test_a_program_takes_the_tokens_of_a_kv_head_together(tokens, rows, splits):
    settings = default_attend_settings(1, 16, 2, 256, 32768, torch.bfloat16, target="hopper", tokens=tokens)
    assert (settings.heads, settings.splits, settings.pdl) == (rows, splits, True)
    assert settings_for(128, 1, 576, tokens, "sm_90", torch.float32).heads == 16


def test_more_tokens_than_a_block_are_refused():
    q, k = torch.zeros(1, 17, 4, 16), torch.zeros(1, 2, 40, 16)
    with pytest.raises(ValueError, match=r"T=17 tokens came; attention of drafts takes 1\.\.16"):
        attend_few_lengths_op(q, k, k, torch.tensor([20]))
    placement = Placement(torch.zeros(1, 17), *[torch.zeros(1, 17, 4)] * 2, None)
    with pytest.raises(ValueError, match="T=17 tokens came"):
        attend_few_step_op_(torch.zeros(1, 17, 128), None, KVCache(k, k), placement, heads=4, eps=1e-6)
