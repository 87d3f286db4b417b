"""What is decided, allowed and chosen where, and what is said where something cannot run."""

import itertools
from dataclasses import replace

import pytest
import torch

from fmoe.compile.aiter_kernels import BIASED_GROUPED_TOPK, SYMBOLS
from fmoe.compile.aiter_ops import compute_experts_aiter, route_aiter
from fmoe.compile.capabilities import AiterRecord, Availability, Capabilities
from fmoe.compile.ops import compute_moe_op, encode_plans
from fmoe.compile.plan import Device, Plan, Row, linear_key, make_plan, moe_key
from fmoe.compile.select import Decision, check_requested, choose, decide, list_allowed
from fmoe.functional import Kernels, RouterConfig, delta_mix
from fmoe.functional.routing import route_fused

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KEY = moe_key(6, 2, 1, 1, 24, 20, torch.float32)
FUNCTIONS = ("per_slot", "loop", "dense", "grouped")
RUNS, LACKS = Availability(True, "", "3.6.0"), Availability(False, "triton needs a GPU; the device is cpu")

ABSENT = AiterRecord(present=False, reason="aiter not installed")
AITER = AiterRecord(
    present=True,
    version="0.1.20",
    arch="gfx942",
    topk_arity=7,
    gating_stride_safe=True,
    slow_path_stride_safe=True,
    symbols=tuple(SYMBOLS),
    fused_moe_params=SYMBOLS["aiter.fused_moe.fused_moe"].generations[0].parameters,
)
OLD = replace(AITER, version="0.1.9", topk_arity=5, gating_stride_safe=False, slow_path_stride_safe=False)
MOE = moe_key(64, 8, 1, 1, 2048, 512, torch.bfloat16)
QWEN = RouterConfig(64, 8, renormalize=True, round_weights=True)

# Every rule of routing that a family has, and whether it has a correction bias.
RULES = {
    "mixtral": (RouterConfig(64, 8, renormalize=True), False),
    "qwen": (QWEN, False),
    "deepseek-v2": (RouterConfig(64, 8, scale=16.0, groups=8, groups_kept=3, float32_logits=True), False),
    "deepseek-v3": (
        RouterConfig(
            64, 8, scoring="sigmoid", renormalize=True, sum_eps=1e-20, scale=2.5, groups=8, groups_kept=4,
            group_score="top2", float32_logits=True,
        ),
        True,
    ),
    "kimi": (RouterConfig(64, 8, scoring="sigmoid", renormalize=True, scale=2.8, float32_logits=True), True),
    "ernie": (RouterConfig(64, 8, renormalize=True, sum_floor=1e-12, float32_logits=True), True),
    "hunyuan": (RouterConfig(64, 8, renormalize=True, float32_logits=True), False),
    "gpt-oss": (RouterConfig(64, 8, scoring="chosen_softmax", round_weights=True), False),
    "granite": (RouterConfig(64, 8, scoring="chosen_softmax"), False),
    "llama4": (RouterConfig(64, 1, scoring="chosen_sigmoid"), False),
}  # fmt: skip
WITHOUT_KERNEL = {
    "ernie": "AITER has no softmax top-k with a correction bias",
    "gpt-oss": "AITER has no kernel for scoring='chosen_softmax'",
    "granite": "AITER has no kernel for scoring='chosen_softmax'",
    "llama4": "AITER has no kernel for scoring='chosen_sigmoid'",
}


def plan_of(*allowed):
    return make_plan(KEY, Device("cuda", "", "", 1, ""), allowed=allowed)


def machine(kind="cuda", *, triton=RUNS, aiter=ABSENT):
    return Capabilities(kind, "", "", 1, torch.__version__, triton, aiter, Availability(True))


def ask(key=MOE, router=QWEN, *, biased=False, requested="auto", sinks=False, **options):
    return decide(key, router, biased=biased, capabilities=machine(**options), requested=requested, sinks=sinks)


# The decision


@pytest.mark.parametrize("requested", ["auto", "reference", "triton", "aiter"])
@pytest.mark.parametrize("aiter", [ABSENT, OLD, AITER], ids=["absent", "old", "new"])
@pytest.mark.parametrize("slots", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_decided_or_refused_with_a_reason(rule, slots, aiter, requested):
    router, biased = RULES[rule]
    key = moe_key(64, router.top_k, slots, min(slots, 1), 2048, 512, torch.bfloat16)
    refused = requested == "aiter" and (aiter is ABSENT or rule in WITHOUT_KERNEL)
    if refused:
        with pytest.raises(RuntimeError, match=r"kernels='aiter' cannot run here: .*; use kernels='auto'"):
            ask(key, router, biased=biased, requested=requested, aiter=aiter)
        return

    decision = ask(key, router, biased=biased, requested=requested, aiter=aiter)

    if requested in ("reference", "triton"):
        assert (decision.experts, decision.routing, decision.record) == (requested, requested, None)
    elif aiter is ABSENT:
        assert (decision.experts, decision.routing, decision.requested) == ("triton", "triton", "auto")
        assert decision.lines == ("experts: triton (aiter not installed)", "routing: triton, with the experts")
    else:
        assert (decision.experts, decision.requested, decision.record) == ("aiter", "aiter", aiter)
        assert decision.routing == ("reference" if rule in WITHOUT_KERNEL else "aiter")
        assert decision.lines[0] == f"experts: aiter {aiter.version}"
        assert decision.lines[1].startswith(f"routing: {decision.routing} (")
        assert WITHOUT_KERNEL.get(rule, "") in decision.lines[1]


def test_what_auto_says_on_a_cpu():
    decision = ask(kind="cpu", triton=LACKS, aiter=replace(ABSENT, reason="aiter needs an AMD GPU"))
    assert decision == Decision(
        lines=(
            "experts: reference (aiter needs an AMD GPU; triton needs a GPU; the device is cpu)",
            "routing: reference, as the experts",
        )
    )
    assert ask(kind="cpu").experts == "reference"  # an interpreter has to be asked for
    assert ask(kind="cpu", requested="triton").experts == "triton"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (moe_key(64, 8, 1, 1, 2048, 512, torch.float32), "takes bfloat16 or float16, not torch.float32"),
        (moe_key(64, 8, 1, 1, 2040, 512, torch.bfloat16), "hidden sizes that are multiples of 32, not 2040"),
        (moe_key(300, 127, 1, 1, 2048, 512, torch.bfloat16), "at most 127 experts per token, not 128"),
    ],
    ids=["dtype", "hidden", "columns"],
)
def test_a_layer_that_aiter_cannot_compute(key, reason):
    assert reason in ask(key, aiter=AITER).lines[0]
    assert ask(key, aiter=AITER).experts == "triton"
    with pytest.raises(RuntimeError, match=f"kernels='aiter' cannot run here: .*{reason}"):
        ask(key, aiter=AITER, requested="aiter")


def test_experts_of_aiter_with_the_routing_of_the_reference():
    router, biased = RULES["deepseek-v3"]
    lacking = replace(AITER, symbols=tuple(name for name in SYMBOLS if name != BIASED_GROUPED_TOPK))
    decision = ask(MOE, router, biased=biased, aiter=lacking)
    assert (decision.experts, decision.routing) == ("aiter", "reference")
    assert decision.lines[1] == "routing: reference (AITER 0.1.20 has no biased_grouped_topk_hip)"


@pytest.mark.parametrize(
    ("slots", "gate_rows", "record", "rows"),
    [(4, 1, AITER, 4), (1, 1, AITER, 0), (2, 0, AITER, 0), (3, 1, AITER, 0), (4, 4, AITER, 0), (4, 1, OLD, 0)],
)
def test_one_gate_gets_a_row_for_each_slot_where_a_kernel_reads_them(slots, gate_rows, record, rows):
    assert ask(moe_key(64, 8, slots, gate_rows, 2048, 512, torch.bfloat16), aiter=record).gate_rows == rows


def test_the_gate_of_a_slow_path_is_replicated_where_its_strides_are_safe():
    key, router = moe_key(60, 4, 4, 1, 2048, 1408, torch.bfloat16), RouterConfig(60, 4)
    assert ask(key, router, aiter=AITER).gate_rows == 4
    assert ask(key, router, aiter=replace(AITER, slow_path_stride_safe=False)).gate_rows == 0


def test_a_model_without_experts():
    assert ask(None, aiter=AITER) == Decision()
    with pytest.raises(RuntimeError, match="kernels='aiter' cannot run here: the model has no experts"):
        ask(None, aiter=AITER, requested="aiter")


def test_triton_asked_for_by_name_and_absent():
    for key in (MOE, None):
        with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: triton needs a GPU"):
            ask(key, requested="triton", triton=LACKS)
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: no Triton kernel reads float64"):
        ask(replace(MOE, dtype="float64"), requested="triton")


def test_an_unknown_request_names_the_known_ones():
    with pytest.raises(ValueError, match="kernels='cuda' must be one of auto, reference, triton, aiter"):
        check_requested("cuda")


BIASED = replace(MOE, variant="biased non-SwiGLU")


def test_experts_that_no_kernel_computes():
    router, _ = RULES["gpt-oss"]
    for aiter in (ABSENT, AITER):
        decision = ask(BIASED, router, aiter=aiter)
        assert (decision.experts, decision.routing, decision.record) == ("reference", "reference", None)
        first = aiter.reason or "AITER is not asked to compute biased non-SwiGLU experts"
        why = f"{first}; no Triton kernel computes biased non-SwiGLU experts"
        assert decision.lines == (f"experts: reference ({why})", "routing: reference, as the experts")
        assert decision.requested == "auto"  # projections and norms keep their kernels
    assert ask(BIASED, router, requested="reference").lines == ()
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: no Triton kernel computes biased non"):
        ask(BIASED, router, requested="triton")
    with pytest.raises(RuntimeError, match="kernels='aiter' cannot run here: AITER is not asked to compute biased"):
        ask(BIASED, router, requested="aiter", aiter=AITER)


@pytest.mark.parametrize("key", [MOE, None], ids=["sparse", "dense"])
def test_attention_that_no_kernel_computes(key):
    for options in ({}, {"aiter": AITER}, {"kind": "cpu", "triton": LACKS}):
        plain, sinks = (ask(key, sinks=sinks, **options) for sinks in (False, True))
        line = "attention: reference (no kernel of attention has sinks)"
        assert (plain.sinks, sinks) == (False, replace(plain, sinks=True, lines=(*plain.lines, line)))
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: no kernel of attention has sinks; use"):
        ask(key, sinks=True, requested="triton")
    assert ask(key, sinks=True, requested="reference").sinks


# What the plans may name


def test_a_gpu_allows_the_kernels_first_and_apart_only_with_shared_slots():
    without = moe_key(6, 2, 0, 0, 24, 20, torch.bfloat16)

    assert list_allowed(KEY, GPU, triton=RUNS) == ("triton", "apart", "beside", *FUNCTIONS)
    assert list_allowed(without, GPU, triton=RUNS) == ("triton", *FUNCTIONS)
    assert list_allowed(KEY, GPU, requested="reference", triton=RUNS) == FUNCTIONS
    assert list_allowed(KEY, GPU, requested="triton", triton=RUNS) == ("triton", "apart", "beside")
    assert list_allowed(linear_key(8, 8, torch.bfloat16), GPU, triton=RUNS) == ("library", "triton")


def test_aiters_layout_is_read_by_aiter_alone():
    assert list_allowed(MOE, GPU, requested="aiter", triton=RUNS) == ("aiter",)
    assert list_allowed(linear_key(8, 8, torch.bfloat16), GPU, requested="aiter", triton=RUNS) == ("library", "triton")


def test_experts_that_no_kernel_computes_are_left_to_the_functions():
    assert list_allowed(BIASED, GPU, triton=RUNS) == FUNCTIONS
    assert list_allowed(BIASED, GPU, requested="reference", triton=RUNS) == FUNCTIONS
    with pytest.raises(RuntimeError, match="no Triton kernel computes biased non-SwiGLU experts"):
        list_allowed(BIASED, GPU, requested="triton", triton=RUNS)
    plan = make_plan(BIASED, Device("cuda", "", "", 1, ""), allowed=FUNCTIONS)
    assert {row.implementation for row in plan.rows} == {"grouped"}
    assert choose(GPU, compiled=True, plans=[plan]).compute_moe is None


def test_a_cpu_allows_the_functions():
    assert list_allowed(KEY, CPU) == FUNCTIONS
    assert list_allowed(linear_key(8, 8, torch.float32), CPU) == ("library",)


def test_what_cannot_run_is_not_allowed(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: triton"):
        list_allowed(KEY, CPU, requested="triton")
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run here: no Triton kernel reads float64"):
        list_allowed(moe_key(6, 2, 1, 1, 24, 20, torch.float64), GPU, requested="triton", triton=RUNS)
    assert list_allowed(KEY, GPU, triton=LACKS) == FUNCTIONS


# The functions


def test_a_cpu_runs_the_functions_that_its_plan_names():
    plan = Plan(KEY, (Row(3, "dense", (), "tuned"), Row(-1, "loop", (), "tuned")))
    kernels = choose(CPU, compiled=False, plans=[plan])

    assert kernels.compute_moe is None
    assert kernels.compute_experts.keywords == {"plans": encode_plans([plan], "moe")}
    assert kernels.delta_prefill is delta_mix


def test_without_plans_nothing_is_fused():
    for device, compiled in itertools.product((CPU, GPU), (False, True)):
        kernels = choose(device, compiled=compiled)
        assert kernels.compute_moe is None
        assert kernels.route is Kernels().route


def test_a_plan_that_names_kernels_puts_the_whole_layer_behind_one_op():
    plan = plan_of("triton")
    for compiled in (False, True):
        kernels = choose(GPU, compiled=compiled, plans=[plan])
        assert kernels.compute_moe.func is compute_moe_op
        assert kernels.compute_moe.keywords == {"plans": encode_plans([plan], "moe")}


@pytest.mark.parametrize("compiled", [False, True])
def test_aiter_runs_what_was_decided(compiled):
    decision = Decision("aiter", "aiter", "aiter", AITER)
    kernels = choose(GPU, compiled=compiled, plans=[plan_of("aiter")], decision=decision)
    assert (kernels.route.func, kernels.route.keywords) == (route_aiter, {"record": AITER})
    assert kernels.compute_experts is kernels.compute_experts_decode is compute_experts_aiter
    assert kernels.compute_moe is None

    apart = choose(GPU, compiled=compiled, decision=replace(decision, routing="reference"))
    assert apart.route is route_fused
    assert apart.compute_experts is compute_experts_aiter


def test_fp8_is_left_to_the_kernels_on_a_gpu():
    """Every function dequantises whole stacks first."""
    layer, projection = moe_key(6, 2, 1, 1, 24, 20, torch.float8_e4m3fn), linear_key(8, 8, torch.float8_e4m3fn)

    assert list_allowed(layer, GPU, triton=Availability(True)) == ("triton",)
    assert list_allowed(projection, GPU, triton=Availability(True)) == ("library", "triton")
    assert list_allowed(layer, CPU, triton=Availability(False, "no GPU")) == ("per_slot", "loop", "dense", "grouped")
