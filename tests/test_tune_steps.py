"""What bench/tune_steps.py tries; it is timed on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what runs the kernels")

from bench.tune_steps import candidates
from fmoe.compile.linear_settings import LinearSettings, linear_from_ints, linear_to_ints
from fmoe.compile.plan import Device, Entry, Key, linear_key, make_plan, moe_key
from fmoe.compile.settings import settings_from_ints

H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, "")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("hidden", [2048, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_candidates_of_a_projection_are_read_and_differ(dtype: torch.dtype, hidden: int) -> None:
    known = {1: Entry("triton", tuple(linear_to_ints(LinearSettings(8, 256, 4, 4, 1, dot=False, pdl=False))), 1.0)}
    plan = make_plan(linear_key(12352, hidden, dtype), H200, tuned=known, allowed=("library", "triton"))
    found = [tuple(values) for values in candidates(plan)]
    assert len(set(found)) >= len(found) - 1 > 10  # what the plan has now may be among them
    shared = [settings for values in found if (settings := linear_from_ints(values)).programs]
    assert bool(shared) == (hidden == 2048)
    assert max((settings.rows for settings in shared), default=0) in (0, 16 if dtype == FP8 else 8)


@pytest.mark.parametrize(
    ("key", "whole"), [(moe_key(512, 10, 1, 1, 2048, 512, FP8), True), (moe_key(8, 2, 0, 0, 4096, 14336, FP8), False)]
)
def test_candidates_of_a_layer_take_experts_side_by_side_where_they_fit(key: Key, whole: bool) -> None:
    plan = make_plan(key, H200, allowed=("triton",))
    found = [settings_from_ints(values) for values in candidates(plan)]
    assert all(settings.path == "slots" for settings in found)
    assert any(settings.down.depth > key.sizes[-1] for settings in found) == whole
