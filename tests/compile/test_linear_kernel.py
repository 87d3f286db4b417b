"""The projection kernel: in the interpreter, compiled for devices that are not here, and what it refuses."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs and compiles the kernel")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.kernels.linear import (
    LinearSettings,
    default_linear_settings,
    linear_from_ints,
    linear_to_ints,
    run_linear,
)
from fmoe.compile.kernels.offline import SHARED_LIMITS, find_misfits, recorded_launches

FILE = Path(__file__).with_name("linear_interpreted.py")
# outputs, hidden: large and small projections of published models, and sizes that nothing divides
SHAPES = [(12352, 2048), (9216, 2048), (2048, 4096), (576, 2048), (64, 2048), (151936, 2048), (27, 100), (513, 2049)]
TOKENS = (1, 2, 4, 8, 13, 16)
PRODUCT = LinearSettings(8, 256, 4, 4, 1, dot=False, pdl=False)


def test_the_kernel_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def record(tokens, outputs, hidden, settings, dtype=torch.bfloat16, *, biased=False):
    def empty(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    with recorded_launches() as launches:
        bias = empty(outputs) if biased else None
        y = run_linear(empty(tokens, hidden), empty(outputs, hidden), settings, bias_N=bias)
    assert y.shape == (tokens, outputs)
    return launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_default_settings_fit(target, dtype):
    seen, misfits = set(), []
    kind = "cuda" if target == "sm_90" else "hip"
    for outputs, hidden in SHAPES:
        for tokens in TOKENS:
            settings = default_linear_settings(tokens, outputs, hidden, dtype, kind)
            if settings in seen and hidden == 2048:
                continue
            seen.add(settings)
            misfits += find_misfits(record(tokens, outputs, hidden, settings, dtype, biased=tokens > 4), target)
    assert misfits == []
    assert len(seen) >= 5 and {settings.dot for settings in seen} == {False, True}


@pytest.mark.parametrize("dot", [False, True], ids=["product", "dot"])
def test_dependent_launch_and_fetching_ahead_compile(dot):
    settings = replace(PRODUCT, rows=16, dot=dot, pdl=True, ahead=4, splits=2)
    launches = record(3, 100, 2048, settings)
    assert [launch.kernel.__name__ for launch in launches] == ["linear_dot" if dot else "linear_product", "sum_parts"]
    assert all(launch.options["launch_pdl"] for launch in launches)
    assert find_misfits(launches, "sm_90") == []


def test_dependent_launch_is_never_named_when_off():
    assert not any("launch_pdl" in launch.options for launch in record(3, 100, 2048, replace(PRODUCT, splits=2)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_default_settings_start_enough_programs(shape):
    """Each token count has a program for most of 132 processors, unless rows of weights are fewer."""
    for tokens in TOKENS:
        settings = default_linear_settings(tokens, *shape, torch.bfloat16)
        blocks = -(-shape[0] // settings.rows) * (1 if settings.dot else tokens)
        assert blocks * settings.splits >= min(64, shape[0])
        assert settings.depth < 4 * max(shape[1], 32)


@pytest.mark.parametrize(("tokens", "outputs"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_compute(tokens, outputs):
    with recorded_launches() as launches:
        assert run_linear(torch.ones(tokens, 8), torch.ones(outputs, 8), PRODUCT).shape == (tokens, outputs)
    assert launches == []


@pytest.mark.parametrize(
    ("x", "w", "bias", "error", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), None, ValueError, r"\[T, D\], .* got shapes \[\(2, 3\), \(4, 5\)\]"),
        (torch.ones(2, 1, 3), torch.ones(4, 3), None, ValueError, r"got shapes \[\(2, 1, 3\)"),
        (torch.ones(2, 0), torch.ones(4, 0), None, ValueError, r"got shapes \[\(2, 0\)"),
        (torch.ones(2, 3), torch.ones(4, 3), torch.ones(5), ValueError, r"got shapes .*\(5,\)"),
        (torch.ones(17, 3), torch.ones(4, 3), None, ValueError, "17 tokens came, at most 16 fit; use torch's linear"),
        (torch.ones(2, 3).double(), torch.ones(4, 3).double(), None, NotImplementedError, r"reads torch.float64; use"),
        (torch.ones(2, 3).half(), torch.ones(4, 3), None, ValueError, r"one dtype, got \['torch.float16', 'torch.fl"),
        (torch.ones(2, 3), torch.ones(3, 4).T, None, ValueError, r"must be contiguous; call .contiguous\(\)"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(x, w, bias, error, message):
    with pytest.raises(error, match=message):
        run_linear(x, w, PRODUCT, bias_N=bias)


def test_settings_survive_as_integers():
    for settings in (PRODUCT, replace(PRODUCT, rows=16, dot=True, splits=3), replace(PRODUCT, pdl=True, ahead=8)):
        assert linear_from_ints(linear_to_ints(settings)) == settings
    with pytest.raises(ValueError, match="3 integers came; settings are 9, as linear_to_ints writes them"):
        linear_from_ints([1, 2, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 3}, "rows=3 must be a power of two"),
        ({"depth": 0}, "depth=0 must be a power of two"),
        ({"warps": 6}, "warps=6 must be a power of two"),
        ({"stages": 0}, "stages=0 must be at least 1"),
        ({"splits": 0}, "splits=0 must be at least 1"),
        ({"dot": True}, "rows=8 and depth=256 must be at least 16 with dot=True"),
        ({"ahead": 2}, "ahead=2 must be 0, or a power of two with pdl=True; got pdl=False"),
        ({"pdl": True, "ahead": 3}, "ahead=3 must be 0, or a power of two"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PRODUCT, **change)
