"""Which part of a step a kernel belongs to, and what a watched model notes."""

from typing import Any

import pytest
import torch

import fmoe
from fmoe.benchmark_parts import (
    Kernel,
    Watch,
    add_rest,
    classify_kernels,
    count_moe_layers,
    profile_kernels,
    read_trace,
)
from fmoe.decoding import decode_batch
from fmoe.options import Defaults, Options, resolve_options


def greedy(tokens: int) -> Options:
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "stop", "logprobs")
    chosen: dict[str, Any] = dict.fromkeys(names)
    return resolve_options(
        Defaults(), vocab_size=4096, max_new_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True, **chosen
    )


def event(name: str, start: float, duration: float, category: str = "kernel", ph: str = "X") -> dict[str, Any]:
    return {"ph": ph, "cat": category, "name": name, "ts": start, "dur": duration}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("delta_token", "DeltaNet"),
        ("chunk_gated_delta_rule_fwd", "DeltaNet"),
        ("attend_projected", "attention"),
        ("down_split", "MoE"),
        ("down_quantized", "MoE"),
        ("attend_splits", "attention"),
        ("add_splits", "attention"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("head_gemv", "head"),
        ("pick_best", "head"),
        ("gate_up_pair", "MoE"),
        ("down_token", "MoE"),
        ("combine_pairs", "MoE"),
        ("logits_gemv", "MoE"),
        ("choose_experts", "MoE"),
        ("tabulate_rows", "MoE"),
        ("place_and_list", "MoE"),
        ("void at::native::sbtopk::gatherTopK<float>", "MoE"),
        ("add_norm_rows", "rest"),
        ("void at::native::unrolled_elementwise_kernel", "rest"),
    ],
)
def test_a_name_tells_the_part(name: str, part: str) -> None:
    assert classify_kernels([name]) == [part]


def test_products_belong_to_the_mixer_beside_them() -> None:
    step = [
        ("add_norm_rows", "rest"),
        ("linear_product", "DeltaNet"),
        ("delta_token", "DeltaNet"),
        ("nvjet_tst_64x8_2x1", "DeltaNet"),
        ("add_norm_rows", "rest"),
        ("logits_gemv", "MoE"),
        ("gate_up_choosing", "MoE"),
        ("down_token", "MoE"),
        ("linear_product", "attention"),
        ("sum_parts", "attention"),
        ("attend_splits", "attention"),
        ("triton_poi_fused_mul_sigmoid_0", "attention"),
        ("split_row", "attention"),
        ("linear_product", "attention"),
        ("gate_up_choosing", "MoE"),
        ("split_row", "MoE"),
        ("cutlass_80_gemm", "MoE"),
        ("down_token", "MoE"),
        ("linear_product", "head"),
        ("head_gemv", "head"),
        ("pick_best", "head"),
    ]
    assert classify_kernels([name for name, _ in step]) == [part for _, part in step]
    assert classify_kernels(["linear_product"]) == ["rest"]
    assert classify_kernels([]) == []


def test_a_trace_is_read_in_the_order_of_its_starts() -> None:
    events = [
        event("b", 5.0, 1.0),
        event("aten::mm", 0.0, 9.0, "cpu_op"),
        event("Memcpy DtoH", 3.0, 2.0, "gpu_memcpy"),
        event("a", 1.0, 1.0),
        event("Memset", 7.0, 1.0, "gpu_memset"),
        event("a", 1.0, 1.0, ph="s"),
        {"ph": "M", "name": "process_name"},
    ]
    found = read_trace({"traceEvents": events})
    assert [kernel.name for kernel in found] == ["a", "Memcpy DtoH", "b", "Memset"]
    assert [kernel.is_copy for kernel in found] == [False, True, False, True]


def test_overlapping_kernels_are_counted_once() -> None:
    kernels = [
        Kernel("delta_token", 0.0, 1000.0, False),
        Kernel("gate_up_pair", 600.0, 1000.0, False),  # its first 400 us run beside the other
        Kernel("down_token", 700.0, 100.0, False),  # wholly beside it
        Kernel("Memcpy DtoH", 1800.0, 200.0, True),  # after a gap of 200 us
        Kernel("gate_up_pair", 3000.0, 400.0, False),
    ]
    profile = profile_kernels(kernels, 2)
    assert (profile.kernels, profile.copies) == (2.0, 0.5)
    assert profile.parts_ms == pytest.approx(
        {"MoE": (0.6 + 0.4) / 2, "DeltaNet": 0.5, "attention": 0.0, "head": 0.0, "rest": 0.1}
    )
    assert profile.busy_ms == pytest.approx(1.1)
    assert profile.parts_kernels == {"MoE": 1.5, "DeltaNet": 0.5, "attention": 0.0, "head": 0.0, "rest": 0.0}


def test_what_no_part_took_is_the_rest() -> None:
    assert add_rest({"MoE": 1.0, "rest": 0.5}, 4.0) == {"MoE": 1.0, "rest": 3.0}
    assert add_rest({"MoE": 1.0, "rest": 0.5}, 1.0) == {"MoE": 1.0, "rest": 0.5}


@pytest.fixture(scope="module")
def model() -> fmoe.Model:
    return fmoe.load("demo", device="cpu", compile=False)


def test_a_watched_model_gives_the_same_tokens(model: fmoe.Model) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    with torch.inference_mode():
        watch = Watch(model)
        plain = list(decode_batch(model, model.eager, prompts, greedy(6)))
        assert list(decode_batch(model, watch.steps, prompts, greedy(6))) == plain
    assert count_moe_layers(model.params.layers) == 8
    # eight layers, two prompts of different lengths one by one, then five steps of both
    assert len(watch.distinct) == 8 * (2 + 5)


def test_the_experts_of_each_step_are_counted(model: fmoe.Model) -> None:
    with torch.inference_mode():
        watch = Watch(model)
        run = decode_batch(model, watch.steps, [[3, 1, 4], [3, 1, 4]], greedy(4))
        next(run)
        watch.forget()
        assert len(list(run)) == 3
    assert len(watch.distinct) == 3 * 8
    # two equal rows choose the same four; a shared expert is none of them
    assert watch.distinct_per_layer(8) == [4.0] * 8


def test_the_experts_are_counted_where_one_kernel_does_all(model: fmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compute_moe(x: torch.Tensor, params: Any, config: Any) -> torch.Tensor:
        calls.append(x.shape)
        return torch.zeros_like(x)

    kernels = model.eager.layers["linear_attention"].keywords["kernels"]
    chosen = lambda *_, **__: type(kernels)(compute_moe=compute_moe)  # noqa: E731
    monkeypatch.setattr("fmoe.benchmark_parts.choose", chosen)
    with torch.inference_mode():
        watch = Watch(model)
        list(decode_batch(model, watch.steps, [[3, 1, 4]], greedy(2)))
    assert len(calls) == len(watch.distinct) == 16
    assert watch.distinct[-8:] == [4] * 8


def test_the_time_of_a_layer_is_parted_at_its_second_norm(model: fmoe.Model) -> None:
    ticks = iter(range(10_000))
    with torch.inference_mode():
        watch = Watch(model, clock=lambda: float(next(ticks)))
        run = decode_batch(model, watch.steps, [[3, 1, 4]], greedy(3))
        next(run)
        watch.forget()
        next(run)
    # a layer reads the clock at its begin, its two norms and its end; six of eight layers are DeltaNet
    assert watch.seconds == {"MoE": 8.0, "DeltaNet": 12.0, "attention": 4.0, "head": 1.0, "rest": 0.0}
