"""Decode attention: its interpreter tests run, its settings compile for devices that are not here, errors teach."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmoe.compile.decode_settings import (
    AttendSettings,
    attend_settings_from_ints,
    decode_settings_to_ints,
    default_attend_settings,
)

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.attend_ops import attend_lengths_op, attend_op, attend_step_op_
from fmoe.compile.kernels import offline
from fmoe.compile.kernels.attend_decode import attend_one_token, cut_channels
from fmoe.compile.kernels.attend_project import attend_projected_token_
from fmoe.functional import KVCache, Placement

FILE = Path(__file__).with_name("attend_interpreted.py")
# H, J, C
SHAPES = {"qwen3next": (16, 2, 256), "qwen3": (32, 4, 128), "mixtral": (32, 8, 128), "odd": (15, 5, 80)}
SLOTS = 4160


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


def settings_for(heads, kv_heads, size, target, dtype, batch=2):
    kind = "cuda" if target == "sm_90" else "hip"
    return default_attend_settings(batch, heads, kv_heads, size, SLOTS, dtype, target=kind)


@pytest.mark.parametrize("target", offline.SHARED_LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_fits(shape, target):
    heads, kv_heads, size = SHAPES[shape]
    with offline.recorded_launches() as launches:
        for dtype in (torch.bfloat16, torch.float32):
            settings = settings_for(heads, kv_heads, size, target, dtype)
            q, k, v = (empty(2, n, m, size, dtype=dtype) for n, m in ((1, heads), (kv_heads, SLOTS), (kv_heads, SLOTS)))
            gate, mask = empty(2, heads * size, dtype=dtype), empty(2, 1, SLOTS, dtype=torch.bool)
            lengths = empty(2, dtype=torch.int64)
            attend_one_token(q, k, v, mask, None, None, settings, scale=0.1)
            attend_one_token(q, k, v, None, lengths, gate, settings, scale=0.1, window=512)

    assert len(launches) == 8
    assert offline.find_misfits(launches, target) == []


@pytest.mark.parametrize("target", offline.SHARED_LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_step_fits(shape, target):
    heads, kv_heads, size = SHAPES[shape]
    with offline.recorded_launches() as launches:
        for dtype, gated in ((torch.bfloat16, True), (torch.float32, False)):
            settings = settings_for(heads, kv_heads, size, target, dtype)
            projected = empty(2, ((2 if gated else 1) * heads + 2 * kv_heads) * size, dtype=dtype)
            k, v = empty(2, kv_heads, SLOTS, size, dtype=dtype), empty(2, kv_heads, SLOTS, size, dtype=dtype)
            norm, angle = empty(heads + kv_heads, size, dtype=torch.float32), empty(2, size // 8, dtype=dtype)
            positions = empty(2, dtype=torch.int64)
            attend_projected_token_(
                projected, norm, angle, angle, positions, k, v, None, settings, heads=heads, eps=1e-6, scale=0.1
            )

    assert len(launches) == 4
    assert offline.find_misfits(launches, target) == []


@pytest.mark.parametrize("target", offline.SHARED_LIMITS)
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_fit(heads, target):
    settings = settings_for(heads, 1, 576, target, torch.bfloat16)
    latent = empty(2, 1, SLOTS, 576)
    with offline.recorded_launches() as launches:
        attend_one_token(
            empty(2, 1, heads, 576), latent, latent[..., :512], empty(2, 1, SLOTS, dtype=torch.bool), None, None,
            settings, scale=0.1,
        )  # fmt: skip

    assert launches[0].values["SHARED"]
    assert offline.find_misfits(launches, target) == []


def test_dependent_launch_compiles_and_is_never_named_when_off():
    for pdl in (False, True):
        with offline.recorded_launches() as launches:
            attend_one_token(
                empty(1, 1, 16, 128), empty(1, 2, 64, 128), empty(1, 2, 64, 128), None, empty(1, dtype=torch.int64),
                None, AttendSettings(2, 64, 16, 4, 2, pdl=pdl), scale=0.1,
            )  # fmt: skip
        assert all(("launch_pdl" in launch.options) == pdl for launch in launches)
        assert offline.find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(64, (64, 0)), (96, (64, 32)), (80, (64, 16)), (112, (128, 0)), (192, (128, 64)), (576, (512, 64)), (5, (16, 0))],
)
def test_channels_are_cut_with_little_waste(size, blocks):
    assert cut_channels(size) == blocks


@pytest.mark.parametrize("batch", [1, 8, 300])
def test_default_settings_share_a_cache_among_many_programs(batch):
    settings = default_attend_settings(batch, 16, 2, 256, 32768, torch.bfloat16)
    assert settings.splits == {1: 128, 8: 16, 300: 1}[batch]
    assert default_attend_settings(batch, 16, 2, 256, 1, torch.bfloat16).splits == 1
    own = default_attend_settings(batch, 16, 2, 256, 32768, torch.bfloat16, own=True)
    assert own.splits == {1: 128, 8: 17, 300: 1}[batch]
    assert attend_settings_from_ints(decode_settings_to_ints(settings)) == settings


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"splits=0 must be in 1\.\.128"):
        AttendSettings(0, 64, 16, 4, 2)
    with pytest.raises(ValueError, match="slots=48 must be a power of two of at least 16"):
        AttendSettings(1, 48, 16, 4, 2)
    with pytest.raises(ValueError, match="heads=8 must be a power of two of at least 16"):
        AttendSettings(1, 64, 8, 4, 2)
    with pytest.raises(ValueError, match="6 integers came; settings of attention are 7"):
        attend_settings_from_ints([1] * 6)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [*SHAPES.values(), (128, 1, 576)])
def test_default_settings_fit_smaller_gpus(heads, kv_heads, size):
    settings = settings_for(heads, kv_heads, size, "sm_90", torch.bfloat16)
    k = empty(2, kv_heads, SLOTS, size)
    with offline.recorded_launches() as launches:
        lengths = empty(2, dtype=torch.int64)
        attend_one_token(empty(2, 1, heads, size), k, k, None, lengths, None, settings, scale=0.1)
    assert offline.compile_launch(launches[0], "sm_90").shared <= 99 * 1024


def test_more_than_one_token_is_refused():
    q, k = torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 8, 16)
    mask, lengths = torch.ones(1, 2, 8, dtype=torch.bool), torch.tensor([3])
    for call in (lambda: attend_op(q, k, k, mask), lambda: attend_lengths_op(q, k, k, lengths)):
        with pytest.raises(ValueError, match="T=2 tokens came; decode attention takes 1"):
            call()
    placement = Placement(torch.zeros(1, 2), *[torch.zeros(1, 2, 4)] * 2, mask)
    with pytest.raises(ValueError, match="T=2 tokens came"):
        attend_step_op_(torch.zeros(1, 2, 128), None, KVCache(k, k), placement, heads=4, eps=1e-6)
