"""The DeltaNet decode kernel: runs delta_interpreted.py, compiles for devices that are not here, refuses by name."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmoe.compile.delta_settings import (
    DeltaSettings,
    default_delta_settings,
    delta_settings_from_ints,
    delta_settings_to_ints,
)
from fmoe.functional import DeltaConfig

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels.delta_decode import check_shares, decode_delta_
from fmoe.compile.kernels.offline import SHARED_LIMITS, find_misfits, recorded_launches

FILE = Path(__file__).with_name("delta_interpreted.py")
QWEN = DeltaConfig(16, 32, 128, 128, 4, 1e-6)
CONFIGS = {
    "qwen3next": QWEN,
    "ratio 4": replace(QWEN, value_heads=64),
    "odd": DeltaConfig(3, 9, 96, 80, 3, 1e-6),
    "large": DeltaConfig(4, 4, 256, 512, 4, 1e-6),
    "tiny": DeltaConfig(1, 1, 1, 1, 1, 1e-6),
}


def arguments(config, batch, dtype, *, device="meta"):
    def empty(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device=device)

    mixed, heads = config.split_sizes[0], config.value_heads
    return {
        "projected": empty(batch, 1, sum(config.split_sizes)),
        "window": empty(batch, config.conv_size - 1, mixed),
        "state": empty(batch, heads, config.key_size, config.value_size, dtype=torch.float32),
        "w_conv": empty(config.conv_size, mixed),
        "decay": empty(heads, dtype=torch.float32),
        "dt_bias": empty(heads, dtype=torch.float32),
        "norm": empty(config.value_size),
    }


def launches_of(config, settings, *, batch=2, dtype=torch.bfloat16):
    tensors = arguments(config, batch, dtype).values()
    arrivals = torch.empty(batch, config.key_heads, dtype=torch.int32, device="meta")
    with recorded_launches() as launches:
        decode_delta_(*tensors, config, settings, arrivals_BG=arrivals)
    return launches


def test_the_kernel_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_default_settings_fit(config, target):
    kind = "cuda" if target == "sm_90" else "hip"
    several = {default_delta_settings(config, batch, target=kind) for batch in (1, 64)}
    launches = [launch for settings in several for launch in launches_of(config, settings)]
    assert find_misfits(launches, target) == []


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_one_head_of_several_fits(target):
    launches = [launch for warps in (4, 8) for launch in launches_of(QWEN, DeltaSettings(1, 128, warps))]
    assert find_misfits(launches, target) == []


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_key_channels_in_lanes_fit(target):
    tried = (DeltaSettings(0, 16, 16, key_lanes=8), DeltaSettings(1, 16, 8, key_lanes=8))
    launches = [launch for settings in tried for launch in launches_of(QWEN, settings)]
    assert {launch.kernel.__name__ for launch in launches} == {"delta_token_lanes"}
    assert find_misfits(launches, target) == []


def test_other_dtypes_and_dependent_launch_fit():
    settings = default_delta_settings(QWEN, 1)
    launches = launches_of(QWEN, replace(settings, pdl=True))
    assert launches[0].options["launch_pdl"]
    launches += [
        launch for dtype in (torch.float16, torch.float32) for launch in launches_of(QWEN, settings, dtype=dtype)
    ]
    assert find_misfits(launches, "sm_90") == []


@pytest.mark.parametrize(("batch", "lanes"), [(1, 4), (8, 4), (9, 0)])
def test_up_to_eight_sequences_sum_within_warps(batch, lanes):
    assert default_delta_settings(QWEN, batch, target="hopper").key_lanes == lanes
    assert default_delta_settings(QWEN, batch, target="cuda").key_lanes == 0


def test_dependent_launch_is_never_named_when_off():
    assert "launch_pdl" not in launches_of(QWEN, default_delta_settings(QWEN, 1))[0].options


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_settings_survive_as_integers(config, batch):
    settings = default_delta_settings(config, batch)
    assert delta_settings_from_ints(delta_settings_to_ints(settings)) == settings


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"heads=-1 must be 0, or a divisor"):
        DeltaSettings(-1, 64, 4)
    with pytest.raises(ValueError, match="columns=48 must be a power of two"):
        DeltaSettings(0, 48, 4)
    with pytest.raises(ValueError, match="warps=3 must be a power of two"):
        DeltaSettings(0, 64, 3)
    with pytest.raises(ValueError, match="key_lanes=3 must be 0 or a power of two"):
        DeltaSettings(0, 64, 4, key_lanes=3)
    with pytest.raises(ValueError, match="3 integers came; settings of DeltaNet are 5"):
        delta_settings_from_ints([0, 1, 1])


WRONG = {
    "window": (lambda x: x[:, 1:], ValueError, r"window must be \(2, 2, 672\), got \(2, 1, 672\)"),
    "projected": (lambda x: x.expand(2, 3, -1), ValueError, r"projected must be .*the kernel takes one token"),
    "state": (lambda x: x.bfloat16(), ValueError, "must have one dtype and the state float32, got"),
    "w_conv": (lambda x: x.float(), ValueError, "must have one dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused(name):
    config, (change, error, match) = DeltaConfig(2, 4, 120, 48, 3, 1e-6), WRONG[name]
    tensors = arguments(config, 2, torch.bfloat16)
    tensors[name] = change(tensors[name])
    with pytest.raises(error, match=match):
        decode_delta_(*tensors.values(), config, DeltaSettings(0, 64, 4))


def test_a_dtype_or_cache_that_the_kernel_does_not_read_is_refused():
    config = DeltaConfig(2, 4, 12, 8, 3, 1e-6)
    with pytest.raises(NotImplementedError, match=r"no DeltaNet kernel reads torch.float64; use bfloat16"):
        decode_delta_(*arguments(config, 2, torch.float64).values(), config, DeltaSettings(0, 64, 4))
    tensors = arguments(config, 2, torch.float16)
    tensors["state"] = tensors["state"].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="window and state must be contiguous"):
        decode_delta_(*tensors.values(), config, DeltaSettings(0, 64, 4))


def test_heads_that_do_not_divide_or_lack_a_count_are_refused():
    config = DeltaConfig(2, 8, 12, 8, 3, 1e-6)
    tensors = arguments(config, 2, torch.float16).values()
    with pytest.raises(ValueError, match="heads=3 must divide the 4 value heads"):
        decode_delta_(*tensors, config, DeltaSettings(3, 64, 4))
    with pytest.raises(ValueError, match=r"heads=2 of 4 need arrivals, zeros of int32 \[2, 2\]"):
        decode_delta_(*tensors, config, DeltaSettings(2, 64, 4))
    with pytest.raises(ValueError, match="need arrivals"):
        decode_delta_(*tensors, config, DeltaSettings(2, 64, 4), arrivals_BG=torch.zeros(2, 2))


LANES = DeltaSettings(0, 16, 8, key_lanes=8)


@pytest.mark.parametrize(
    ("config", "settings", "match"),
    [
        (CONFIGS["odd"], LANES, r"are \(3, 96, 80\), not all powers of two; use key_lanes=0"),
        (QWEN, replace(LANES, columns=256), r"8 key channels and 256 columns of a warp are more than \(128, 128\)"),
        (replace(QWEN, conv_size=1), LANES, "a convolution of one tap has no past inputs"),
    ],
    ids=["sizes", "columns", "taps"],
)
def test_key_channels_in_lanes_that_do_not_fit_are_refused(config, settings, match):
    with pytest.raises(ValueError, match=match):
        check_shares(config, settings, None, 1, on_cuda=False)


@pytest.mark.parametrize(("columns", "on_cuda", "refused"), [(32, True, True), (64, True, False), (32, False, False)])
def test_blocks_that_gave_wrong_sums_are_refused_on_cuda(columns, on_cuda, refused):
    settings = DeltaSettings(0, columns, 4)
    if not refused:
        assert check_shares(QWEN, settings, None, 1, on_cuda=on_cuda) == 2
        return
    with pytest.raises(ValueError, match="columns=32 must be at least 64: fewer gave wrong sums on sm_90"):
        check_shares(QWEN, settings, None, 1, on_cuda=on_cuda)
