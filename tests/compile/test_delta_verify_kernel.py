"""DeltaNet's kernel over drafts: runs delta_verify_interpreted.py, compiles for other devices, refuses by name."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmoe.compile.delta_settings import (
    MOST_DRAFTED,
    VerifySettings,
    default_verify_settings,
    verify_settings_from_ints,
    verify_settings_to_ints,
    why_not_verify,
)
from fmoe.functional import DeltaCache, DeltaConfig, pend_delta
from fmoe.functional.delta_drafts import select_pending

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels.delta_verify import verify_delta_
from fmoe.compile.kernels.offline import SHARED_LIMITS, find_misfits, recorded_launches

FILE = Path(__file__).with_name("delta_verify_interpreted.py")
QWEN = DeltaConfig(16, 32, 128, 128, 4, 1e-6)
CONFIGS = {
    "qwen3next": QWEN,
    "ratio 4": replace(QWEN, value_heads=64),
    "odd": DeltaConfig(3, 9, 96, 80, 3, 1e-6),
    "wide": DeltaConfig(2, 2, 128, 256, 4, 1e-6),
    "tiny": DeltaConfig(1, 1, 1, 1, 1, 1e-6),
}
SMALL = DeltaConfig(2, 8, 12, 10, 3, 1e-6)


def arguments(config, tokens, dtype, *, batch=2, room=5):
    def empty(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    mixed, heads = config.split_sizes[0], config.value_heads
    state = empty(batch, heads, config.key_size, config.value_size, dtype=torch.float32)
    cache = pend_delta(DeltaCache(empty(batch, config.conv_size - 1, mixed), state), config, max(room, tokens))
    return {
        "projected": empty(batch, tokens, sum(config.split_sizes)),
        "cache": select_pending(cache, tokens),
        "w_conv": empty(config.conv_size, mixed),
        "decay": empty(heads, dtype=torch.float32),
        "dt_bias": empty(heads, dtype=torch.float32),
        "norm": empty(config.value_size),
        "kept": empty(batch, dtype=torch.int64),
    }


def launches_of(config, settings, *, tokens=3, dtype=torch.bfloat16):
    with recorded_launches() as launches:
        verify_delta_(*arguments(config, tokens, dtype).values(), config, settings)
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
    settings = default_verify_settings(config, target="hopper" if target == "sm_90" else "hip")
    assert find_misfits(launches_of(config, settings), target) == []


@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize("tokens", [2, 4, MOST_DRAFTED])
def test_other_numbers_of_tokens_fit(tokens, target):
    settings = default_verify_settings(QWEN, target="hopper" if target == "sm_90" else "hip")
    assert find_misfits(launches_of(QWEN, settings, tokens=tokens), target) == []


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_other_dtypes_fit(target):
    settings = default_verify_settings(QWEN, target="cuda" if target == "sm_90" else "hip")
    launches = [
        launch for dtype in (torch.float16, torch.float32) for launch in launches_of(QWEN, settings, dtype=dtype)
    ]
    assert find_misfits(launches, target) == []


def test_one_launch_serves_all_value_heads_and_two_serve_parts():
    """The last launch alone writes what a key head's value heads share."""
    [whole] = launches_of(QWEN, default_verify_settings(QWEN))
    assert (whole.values["START"], whole.values["PARTS"], whole.values["SHARED"]) == (0, 1, True)
    for config, heads, parts in ((QWEN, 1, 2), (CONFIGS["odd"], 1, 3), (CONFIGS["ratio 4"], 2, 2)):
        first, last = launches_of(config, VerifySettings(heads, 8))
        assert (first.values["SHARED"], last.values["SHARED"]) == (False, True)
        assert (first.values["PARTS"], last.values["PARTS"]) == (parts - 1, 1)
        assert (first.values["START"], last.values["START"]) == (0, parts - 1)


@pytest.mark.parametrize(("target", "expected"), [("hopper", True), ("cuda", False), ("hip", False)])
def test_dependent_launch_is_the_rule_where_it_exists(target, expected):
    settings = default_verify_settings(QWEN, target=target)
    assert settings.pdl == expected
    assert ("launch_pdl" in launches_of(QWEN, settings)[0].options) == expected


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_settings_survive_as_integers(config):
    settings = default_verify_settings(config, target="hopper")
    assert verify_settings_from_ints(verify_settings_to_ints(settings)) == settings


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"heads=-1 must be 0, or a divisor"):
        VerifySettings(-1, 4)
    with pytest.raises(ValueError, match="warps=3 must be a power of two"):
        VerifySettings(0, 3)
    with pytest.raises(ValueError, match="2 integers came; settings over drafts are 5"):
        verify_settings_from_ints([0, 1])
    with pytest.raises(ValueError, match="heads=3 must divide the 4 value heads"):
        launches_of(SMALL, VerifySettings(3, 4))


@pytest.mark.parametrize(
    ("config", "tokens", "reason"),
    [
        (QWEN, 1, "1 tokens are not 2 to 16"),
        (QWEN, 17, "17 tokens are not 2 to 16"),
        (replace(QWEN, conv_size=9), 2, "9 taps are more than 8"),
        (replace(QWEN, value_size=512), 2, "a state of 128 x 512 does not fit one program"),
    ],
)
def test_what_the_kernel_does_not_take_is_said_and_refused(config, tokens, reason):
    assert why_not_verify(config, tokens) == reason
    with pytest.raises(NotImplementedError, match=f"{reason}, so the kernel over drafts does not take it; use the ref"):
        launches_of(config, VerifySettings(0, 4), tokens=tokens)


@pytest.mark.parametrize("config", [*CONFIGS.values(), SMALL], ids=[*CONFIGS, "small"])
def test_what_the_kernel_takes(config):
    assert [why_not_verify(config, tokens) for tokens in (2, 3, 16)] == [""] * 3


WRONG = {
    "projected": (lambda x: x[..., 1:], r"projected must be torch.bfloat16 \(2, 3, 224\), got .*\(2, 3, 223\)"),
    "w_conv": (lambda x: x.float(), r"w_conv must be torch.bfloat16 \(3, 128\), got torch.float32"),
    "kept": (lambda x: x.int(), r"kept must be torch.int64 \(2,\), got torch.int32"),
}
WRONG_PARTS = {
    "window_BWN": (lambda x: x[:, 1:], r"window must be .* \(2, 2, 128\), got .* \(2, 1, 128\)"),
    "state_BHKV": (lambda x: x.bfloat16(), r"state must be torch.float32 .*, got torch.bfloat16"),
    "inputs_BTN": (lambda x: x[:, :2], r"inputs must be .* \(2, 3, 128\), got .* \(2, 2, 128\)"),
    "k_BTGK": (lambda x: x.half(), "k must be torch.float32 .*, got torch.float16"),
    "written_BTHV": (lambda x: x[..., :9], "written must be"),
    "g_BTH": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "each sequence of what is pending must be con"),
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_PARTS])
def test_wrong_tensors_are_refused(name):
    tensors = arguments(SMALL, 3, torch.bfloat16)
    change, match = (WRONG | WRONG_PARTS)[name]
    if name in WRONG:
        tensors[name] = change(tensors[name])
    else:
        part = getattr(tensors["cache"], name)
        tensors["cache"] = tensors["cache"]._replace(**{name: change(part)})
    with pytest.raises(ValueError, match=match):
        verify_delta_(*tensors.values(), SMALL, VerifySettings(0, 4))


def test_a_dtype_or_cache_that_the_kernel_does_not_read_is_refused():
    with pytest.raises(NotImplementedError, match=r"no DeltaNet kernel reads torch.float64; use bfloat16"):
        launches_of(SMALL, VerifySettings(0, 4), dtype=torch.float64)
    tensors = arguments(SMALL, 3, torch.float16)
    state = tensors["cache"].state_BHKV
    tensors["cache"] = tensors["cache"]._replace(state_BHKV=state.transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(ValueError, match="window and state must be contiguous"):
        verify_delta_(*tensors.values(), SMALL, VerifySettings(0, 4))
