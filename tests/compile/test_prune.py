"""What is dropped before anything runs: candidates that do not compile, spill, or are not compiled in time."""

import logging
import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is what compiles the kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

from fmoe.compile.autotune import Task
from fmoe.compile.candidates import Candidate, Inputs, list_candidates
from fmoe.compile.kernels.offline import Usage, compile_launch
from fmoe.compile.kernels.prune import identify, prune_tasks, record_candidate
from fmoe.compile.plan import BUCKETS, KERNELS, LINEAR_BUCKETS, Device, linear_key, moe_key
from fmoe.compile.tune_ops import keep_compiling
from fmoe.functional.quant import FP8
from fmoe.functional.routing import RouterConfig

H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, "v")
KEY = moe_key(60, 4, 3, 1, 96, 40, torch.bfloat16)
PROJECTION = linear_key(48, 96, torch.bfloat16)
ALLOWED = ("triton", "apart", "grouped")
NARROW_KEY = moe_key(512, 10, 1, 1, 2048, 512, FP8)
NARROW_PROJECTION = linear_key(12352, 2048, FP8)


def make_tasks() -> list[Task]:
    return [
        *(Task(KEY, tokens, tuple(list_candidates(KEY, H200, tokens, ALLOWED))) for tokens in (1, 2048)),
        Task(PROJECTION, 2, tuple(list_candidates(PROJECTION, H200, 2, ("library", "triton")))),
    ]


def compiler(usage=lambda launch: Usage("k", 32, 0, 0)):
    seen = []

    def compile_one(launch, target):
        assert target == "sm_90"
        seen.append(identify(launch))
        return usage(launch)

    return compile_one, seen


def prune(tasks, compile_one, budget_s=60.0, device=H200):
    return prune_tasks(tasks, device, {}, budget_s=budget_s, compile_one=compile_one)


def test_what_compiles_stays_and_nothing_is_compiled_twice():
    tasks = make_tasks()
    compile_one, seen = compiler()
    assert prune(tasks, compile_one) == tasks
    assert len(seen) == len(set(seen))
    launched = [
        launch
        for task in tasks
        for candidate in task.candidates
        if candidate.implementation in KERNELS
        for launch in record_candidate(task.key, task.tokens, candidate, Inputs())
    ]
    assert set(seen) == {identify(launch) for launch in launched}
    assert 2 * len(seen) < len(launched)


def test_what_spills_is_dropped_but_for_the_default(caplog):
    caplog.set_level(logging.DEBUG, logger="fmoe")
    compile_one, _ = compiler(lambda launch: Usage("k", 255, 8, 0))
    kept = prune(make_tasks(), compile_one)
    for before, after in zip(make_tasks(), kept, strict=True):
        assert after.candidates[0] == before.candidates[0]
        assert not any(candidate.implementation in KERNELS for candidate in after.candidates[1:])
    assert "is out (sm_90: Usage(kernel='k', registers=255, spills=8, shared=0))" in caplog.text


def test_one_kernels_fault_drops_the_candidates_that_launch_it():
    wide = [c for c in make_tasks()[1].candidates[1:] if c.implementation in KERNELS and c.settings[7] == 128]
    assert wide

    def usage(launch):
        if launch.kernel.__name__ == "gate_up_sorted" and launch.values["BN"] == 128:
            raise RuntimeError("cannot select\nthis")
        return Usage("k", 32, 0, 0)

    task = make_tasks()[1]
    (kept,) = prune([task], compiler(usage)[0])
    assert set(task.candidates) - set(kept.candidates) == set(wide)


def test_what_is_not_compiled_in_time_is_dropped():
    (kept,) = prune(make_tasks()[:1], compiler()[0], budget_s=-1.0)
    assert kept.candidates[0] == make_tasks()[0].candidates[0]
    assert len(kept.candidates) < len(make_tasks()[0].candidates)


def test_settings_that_cannot_be_launched_are_dropped():
    broken = Candidate("triton", (0, 1))
    task = make_tasks()[2]
    (kept,) = prune([Task(task.key, 2, (*task.candidates, broken))], compiler()[0])
    assert kept == task


def test_an_unknown_architecture_is_not_compiled_for():
    tasks = make_tasks()
    compile_one, seen = compiler()
    device = Device("cuda", "", "sm_80", 108, "v")
    assert prune(tasks, compile_one, device=device) == tasks
    assert keep_compiling(tasks, Device("cpu", "", "x", 2, "v"), {}, budget_s=1.0) == tasks
    assert seen == []


def test_the_models_routing_rule_is_compiled():
    rule = RouterConfig(60, 4, scoring="sigmoid", groups=5, groups_kept=2, group_score="top2")
    candidate = make_tasks()[1].candidates[0]
    plain, own = (record_candidate(KEY, 2048, candidate, Inputs(router)) for router in (None, rule))
    assert [identify(launch) for launch in plain] != [identify(launch) for launch in own]


def test_equal_names_compile_to_the_same():
    candidate = make_tasks()[1].candidates[0]
    first, second, third = (record_candidate(KEY, tokens, candidate, Inputs())[0] for tokens in (2048, 4096, 2049))
    assert first.values["T"] != second.values["T"]
    assert identify(first) == identify(second)
    assert identify(first) != identify(third)  # not a multiple of 16


def test_a_real_compilation():
    task = Task(PROJECTION, 1, tuple(list_candidates(PROJECTION, H200, 1, ("library", "triton")))[:2])
    assert prune_tasks([task], H200, {}, budget_s=300.0) == [task]
    (launch,) = record_candidate(PROJECTION, 1, task.candidates[1], Inputs())
    assert compile_launch(launch, "sm_90").spills == 0


def reads(launches):
    """Dtypes of what each kernel is given, by name."""
    return [
        {name: value.dtype for name, value in launch.values.items() if isinstance(value, torch.Tensor)}
        for launch in launches
    ]


@pytest.mark.parametrize("tokens", BUCKETS)
def test_layers_in_fp8_blocks_can_be_launched(tokens):
    candidates = list_candidates(NARROW_KEY, H200, tokens, ("triton",), limit=60)
    assert len(candidates) > 30
    for candidate in candidates:
        # record_candidate raises for a block that needs several factors
        found = reads(record_candidate(NARROW_KEY, tokens, candidate, Inputs(activations=torch.float16)))
        kernels = [given for given in found if FP8 in given.values()]
        assert len(kernels) == 2
        assert all(given["s"] == torch.float32 for given in kernels)
        assert {given["x"] for given in found if "x" in given} == {torch.float16}


def record_product(*case):
    """Give the first launch but for the one that splits rows."""
    return next(launch for launch in record_candidate(*case) if launch.kernel.__name__ != "split_row")


@pytest.mark.parametrize("tokens", LINEAR_BUCKETS)
def test_projections_in_fp8_blocks_are_recorded_with_the_rows_behind_them(tokens):
    for candidate in list_candidates(NARROW_PROJECTION, H200, tokens, ("library", "triton"), limit=60):
        if candidate.implementation in KERNELS:
            launch = record_product(NARROW_PROJECTION, tokens, candidate, Inputs(rest=64))
            assert (launch.values["N"], launch.values["M"]) == (12288, 64)
            (given,) = reads([launch])
            assert (given["w"], given["s"], given["rest"]) == (FP8, torch.float32, torch.bfloat16)
            plain = record_product(NARROW_PROJECTION, tokens, candidate, Inputs())
            assert identify(plain) != identify(launch)


def test_each_key_is_compiled_for_its_inputs():
    task = Task(NARROW_PROJECTION, 1, tuple(list_candidates(NARROW_PROJECTION, H200, 1, ("library", "triton"))))
    compile_one, seen = compiler()
    inputs = {NARROW_PROJECTION: Inputs(activations=torch.float16, rest=64)}
    assert prune_tasks([task], H200, inputs, budget_s=60.0, compile_one=compile_one) == [task]
    assert seen and all("'M': '64'" in name and "'x': 'torch.float16'" in name for name in seen)


def test_a_real_compilation_of_fp8_blocks():
    key = moe_key(60, 4, 3, 1, 160, 136, FP8)
    task = Task(key, 1, tuple(list_candidates(key, H200, 1, ("triton",)))[:4])
    assert prune_tasks([task], H200, {}, budget_s=300.0) == [task]
    gfx942 = Device("hip", "", "gfx942", 304, "v")
    (kept,) = prune_tasks([Task(key, 1, task.candidates)], gfx942, {}, budget_s=300.0)
    assert kept.candidates == task.candidates[:1]  # which has no FP8 of this form
