"""Where the decode kernels are taken, and what their wrappers do with sizes that the kernels do not take."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fmoe.compile import decode_choice, delta_ops
from fmoe.compile.capabilities import Availability
from fmoe.compile.decode_choice import (
    add_decode_kernels,
    add_norm_few,
    add_norm_single,
    choose_draft_kernels,
    choose_tokens_any,
    delta_verify_any,
    quantize_draft_head,
)
from fmoe.compile.decode_settings import default_attend_settings, default_head_settings
from fmoe.compile.delta_settings import default_delta_settings
from fmoe.compile.linear_ops import linear_planned
from fmoe.compile.linear_settings import default_linear_settings
from fmoe.compile.normed_ops import compute_moe_normed_op, linear_normed_planned
from fmoe.compile.ops import compute_moe_op
from fmoe.compile.settings import default_settings
from fmoe.functional import DeltaCache, DeltaConfig, Kernels, add_rms_norm, attend, dequantize, pend_delta

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FIELDS = (
    "attend_step",
    "attend_lengths",
    "attend_few_step",
    "attend_few_lengths",
    "delta_prefill",
    "delta_decode",
    "delta_verify",
    "add_norm",
    "choose_tokens",
)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(decode_choice, "probe_triton", lambda device: Availability(True, ""))


@pytest.mark.parametrize(("device", "requested"), [(GPU, "auto"), (GPU, "triton"), (GPU, "aiter"), (CPU, "triton")])
def test_kernels_are_taken_where_triton_runs(device, requested, with_triton):
    before = Kernels(attend_prefill=len, linear=max)

    kernels = add_decode_kernels(before, device, torch.bfloat16, requested)

    assert all(getattr(kernels, field) is not getattr(before, field) for field in FIELDS)
    assert (kernels.attend_prefill, kernels.linear, kernels.attend_decode) == (len, max, attend)


def test_norms_go_into_the_kernels_that_plans_name(with_triton):
    before = Kernels(linear=partial(linear_planned, plans=()), compute_moe=partial(compute_moe_op, plans=()))
    kernels = add_decode_kernels(before, GPU, torch.bfloat16, "auto")
    assert kernels.linear_normed.func is linear_normed_planned
    assert kernels.compute_moe_normed.func is compute_moe_normed_op
    assert add_decode_kernels(before, GPU, torch.bfloat16, "reference").linear_normed is None


@pytest.mark.parametrize(
    ("device", "dtype", "requested"),
    [
        (GPU, torch.bfloat16, "reference"),
        (GPU, torch.float64, "auto"),
        (CPU, torch.float32, "auto"),
        (CPU, torch.float32, "aiter"),
    ],
    ids=str,
)
def test_the_references_stay(device, dtype, requested, with_triton):
    kernels = Kernels()
    assert add_decode_kernels(kernels, device, dtype, requested) is kernels


def test_attention_with_sinks_keeps_the_references_and_the_rest_its_kernels(with_triton):
    kernels, plain = (
        add_decode_kernels(Kernels(), GPU, torch.bfloat16, "auto", sinks=sinks) for sinks in (True, False)
    )
    attention = ("attend_step", "attend_lengths", "attend_few_step", "attend_few_lengths")
    assert kernels == replace(plain, **dict.fromkeys(attention))
    assert (kernels.attend_decode, kernels.attend_prefill) == (attend, attend)


def test_the_references_stay_where_triton_cannot_run(monkeypatch):
    monkeypatch.setattr(decode_choice, "probe_triton", lambda device: Availability(False, "older"))
    kernels = Kernels()
    assert add_decode_kernels(kernels, GPU, torch.bfloat16, "auto") is kernels


@pytest.mark.parametrize(
    ("norm", "tokens", "channels", "called"),
    [
        (add_norm_single, 1, 24, True),
        (add_norm_single, 2, 24, False),
        (add_norm_single, 1, 16_385, False),
        (add_norm_few, 1, 24, True),
        (add_norm_few, 9, 24, True),
        (add_norm_few, 17, 24, False),
        (add_norm_few, 2, 16_385, False),
    ],
)
def test_norms_of_many_tokens_and_of_long_rows_stay_with_the_reference(
    norm, tokens, channels, called, monkeypatch, rng
):
    calls = []

    def op(*arguments, **options):
        calls.append(arguments)
        return add_rms_norm(*arguments, **options)

    monkeypatch.setattr(delta_ops, "add_rms_norm_op", op)
    x, branch = torch.randn(2, 3, tokens, channels, generator=rng)
    weight = torch.rand(channels, generator=rng)

    found = norm(x, branch, weight, eps=1e-5)

    assert bool(calls) == called
    assert all(map(torch.equal, found, add_rms_norm(x, branch, weight, eps=1e-5)))


def test_steps_with_drafts_take_one_launch_for_a_norm(with_triton):
    kernels = add_decode_kernels(Kernels(), GPU, torch.bfloat16, "auto")
    assert choose_draft_kernels(kernels) == replace(kernels, add_norm=add_norm_few, normed_tokens=16)
    assert choose_draft_kernels(Kernels()) == Kernels()


def test_more_rows_than_the_head_takes_choose_from_logits(monkeypatch, rng):
    monkeypatch.setattr(decode_choice, "choose_tokens_op", lambda x, head: "op")
    x, head = torch.randn(17, 8, generator=rng), torch.randn(30, 8, generator=rng)
    x[3, 2] = torch.nan
    assert choose_tokens_any(x[:16], head) == "op"

    tokens_B, best_B = choose_tokens_any(x, head)

    for row in range(17):
        logits = [sum(a * b for a, b in zip(x[row].tolist(), word, strict=True)) for word in head.tolist()]
        if row == 3:
            assert best_B[row].isnan() and 0 <= tokens_B[row] < 30
        else:
            assert tokens_B[row] == max(range(30), key=logits.__getitem__)
            assert best_B[row].item() == pytest.approx(max(logits), abs=1e-5)


def test_dependent_launch_is_the_rule_where_it_exists():
    config = DeltaConfig(16, 32, 128, 128, 4, 1e-6)
    for target, expected in (("hopper", True), ("cuda", False), ("hip", False)):
        chosen = [
            default_delta_settings(config, 1, target=target),
            default_head_settings(1, torch.bfloat16, target=target),
            default_head_settings(8, torch.bfloat16, target=target),
            default_attend_settings(1, 16, 2, 256, 1024, torch.bfloat16, target=target),
            default_linear_settings(1, 12352, 2048, torch.float8_e4m3fn, target),
            default_settings(1, 512, 10, 1, 2048, 512, torch.float8_e4m3fn, target=target),
        ]
        assert [settings.pdl for settings in chosen] == [expected] * len(chosen)


@pytest.mark.parametrize(
    ("tokens", "dtype", "called"), [(2, torch.float32, True), (17, torch.float32, False), (2, torch.bfloat16, False)]
)
def test_drafts_that_the_kernel_does_not_take_stay_with_the_reference(tokens, dtype, called, monkeypatch):
    monkeypatch.setattr(decode_choice, "delta_verify_op", lambda *arguments: "op")
    monkeypatch.setattr(decode_choice, "delta_verify", lambda *arguments: "reference")
    config = DeltaConfig(2, 4, 6, 8, 4, 1e-6)
    cache = pend_delta(DeltaCache(torch.zeros(1, 3, 56), torch.zeros(1, 4, 6, 8, dtype=dtype)), config, tokens)

    found = delta_verify_any(torch.zeros(1, tokens, 96), cache, None, config, torch.tensor([0]))

    assert found == ("op" if called else "reference")


@pytest.mark.parametrize(
    ("dtype", "hidden", "target", "requested", "quantised"),
    [
        (torch.bfloat16, 256, "hopper", "auto", True),
        (torch.bfloat16, 256, "hopper", "aiter", True),
        (torch.bfloat16, 256, "hopper", "reference", False),
        (torch.bfloat16, 256, "cuda", "auto", False),
        (torch.float32, 256, "hopper", "auto", False),
        (torch.bfloat16, 200, "hopper", "auto", False),
    ],
)
def test_a_head_for_drafts_is_quantised_where_a_kernel_reads_it(
    dtype, hidden, target, requested, quantised, with_triton, monkeypatch
):
    monkeypatch.setattr(decode_choice, "target_of", lambda device: target)
    monkeypatch.setattr(decode_choice, "_runs_triton", lambda device, dtype, requested: requested != "reference")
    head = torch.ones(300, hidden, dtype=dtype)

    found = quantize_draft_head(head, requested)

    assert (found is not None) == quantised
    if found is not None:
        assert torch.equal(dequantize(found, torch.bfloat16), head)
