"""Which implementations are allowed and chosen where, and what is said where something cannot run."""

import pytest
import torch

from fmoe.compile.ops import compute_moe_op, encode_plans
from fmoe.compile.plan import Device, Plan, Row, linear_key, make_plan, moe_key
from fmoe.compile.select import check_requested, choose, list_allowed
from fmoe.functional import Kernels, delta_mix

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KEY = moe_key(6, 2, 1, 1, 24, 20, torch.float32)
FUNCTIONS = ("per_slot", "loop", "dense", "grouped")


def plan_of(*allowed):
    return make_plan(KEY, Device("cuda", "", "", 1, ""), allowed=allowed)


def test_a_cpu_runs_the_functions_that_its_plan_names(rng):
    plan = Plan(KEY, (Row(3, "dense", (), "tuned"), Row(-1, "loop", (), "tuned")))
    kernels = choose(CPU, compiled=False, plans=[plan])

    assert kernels.compute_moe is None
    assert kernels.compute_experts.keywords == {"plans": encode_plans([plan], "moe")}
    assert kernels.delta_prefill is delta_mix


def test_without_plans_nothing_is_fused():
    for device in (CPU, GPU):
        for compiled in (False, True):
            kernels = choose(device, compiled=compiled)
            assert kernels.compute_moe is None
            assert kernels.route is Kernels().route


def test_a_plan_that_names_kernels_puts_the_whole_layer_behind_one_op():
    plan = plan_of("triton")
    for compiled in (False, True):
        kernels = choose(GPU, compiled=compiled, plans=[plan])
        assert kernels.compute_moe.func is compute_moe_op
        assert kernels.compute_moe.keywords == {"plans": encode_plans([plan], "moe")}


def test_a_gpu_allows_the_kernels_first_and_apart_only_with_shared_slots(monkeypatch):
    monkeypatch.setattr("fmoe.compile.select.find_spec", lambda name: object())
    without = moe_key(6, 2, 0, 0, 24, 20, torch.bfloat16)

    assert list_allowed(KEY, GPU) == ("triton", "apart", "beside", *FUNCTIONS)
    assert list_allowed(without, GPU) == ("triton", *FUNCTIONS)
    assert list_allowed(KEY, GPU, requested="reference") == FUNCTIONS
    assert list_allowed(KEY, GPU, requested="triton") == ("triton", "apart", "beside")
    assert list_allowed(linear_key(8, 8, torch.bfloat16), GPU) == ("library", "triton")


def test_a_cpu_allows_the_functions():
    assert list_allowed(KEY, CPU) == FUNCTIONS
    assert list_allowed(linear_key(8, 8, torch.float32), CPU) == ("library",)


def test_what_is_asked_for_by_name_and_cannot_run_is_an_error_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("fmoe.compile.select.find_spec", lambda name: object())
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: Triton's kernels need a GPU"):
        list_allowed(KEY, CPU, requested="triton")
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: no Triton kernel reads float64"):
        list_allowed(moe_key(6, 2, 1, 1, 24, 20, torch.float64), GPU, requested="triton")
    monkeypatch.setattr("fmoe.compile.select.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: triton is not installed"):
        list_allowed(KEY, GPU, requested="triton")
    assert list_allowed(KEY, GPU) == FUNCTIONS


def test_an_unknown_request_names_the_known_ones():
    with pytest.raises(ValueError, match="kernels='cuda' must be one of auto, reference, triton, aiter"):
        check_requested("cuda")
