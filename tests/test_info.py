"""Counts by hand against what describe() reads off meta parameters."""

import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fmoe
from fmoe.info import ModelInfo, describe, format_bytes
from fmoe.loading import count_params
from fmoe.model import CPU_COMPILE_TOKENS, resolve_folder
from fmoe.report import format_count, format_info

QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 5120,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
DEMO = resolve_folder("demo")
DEMO_CONFIG = json.loads((DEMO / "config.json").read_text())


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def sizes(info: ModelInfo) -> dict[str, tuple[int, int]]:
    return {part.name: (part.params, part.active) for part in info.parts}


def test_the_demo_counted_by_hand() -> None:
    info = describe("demo", device="cpu", dtype="float32")
    delta = 256 * (2 * 128 + 2 * 256 + 2 * 8) + 4 * (2 * 128 + 256) + 8 + 8 + 32 + 256 * 256
    # query, gate, key, value, output, and a norm of 64 for each of 4 query and 2 key heads
    attention = 256 * (2 * 256 + 2 * 128) + 256 * 256 + (4 + 2) * 64
    expert = 3 * 256 * 64
    assert sizes(info) == {
        "embedding": (4096 * 256, 4096 * 256),
        "head": (4096 * 256, 4096 * 256),
        "mixers, linear_attention": (6 * delta, 6 * delta),
        "mixers, full_attention": (2 * attention, 2 * attention),
        "routers": (8 * 16 * 256, 8 * 16 * 256),
        "routed experts": (8 * 16 * expert, 8 * 4 * expert),
        "shared experts": (8 * (expert + 256), 8 * (expert + 256)),
        "norms": (17 * 256, 17 * 256),
    }
    assert info.params == 2 * 4096 * 256 + 6 * delta + 2 * attention + 8 * (17 * expert + 17 * 256) + 17 * 256
    assert format_count(info.params) == "10.96 M"
    assert info.active == info.params - 8 * 12 * expert
    assert info.active_inner == info.active - 2 * 4096 * 256
    assert info.bytes == 4 * info.params


@pytest.mark.parametrize("shared_experts", ["fused", "separate"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_is_what_is_loaded(shared_experts: Any, dtype: str) -> None:
    options: Any = {"shared_experts": shared_experts, "dtype": dtype, "device": "cpu"}
    info, model = describe("demo", **options), fmoe.load("demo", **options)
    assert (info.params, info.bytes) == count_params(model.params)


def test_the_80b_from_its_config_alone(tmp_path: Path) -> None:
    info = describe(write(tmp_path, QWEN3_NEXT_80B), device="cpu", dtype="bfloat16")
    assert info.params == pytest.approx(80e9, rel=0.01)
    expert, keys, values = 3 * 2048 * 512, 16 * 128, 32 * 128
    delta = 2048 * (2 * keys + 2 * values + 2 * 32) + values * 2048
    attention = 2048 * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * 2048
    inner = 36 * delta + 12 * attention + 48 * ((10 + 1) * expert + 513 * 2048)
    assert info.active_inner == pytest.approx(inner, rel=0.01)
    assert round(info.active_inner / 1e9) == 3
    assert info.active == info.active_inner + 2 * 151936 * 2048
    assert info.params - info.active == 48 * (512 - 10) * expert
    assert info.weights == "none in the folder"
    assert (info.hidden_size, info.vocab_size, info.max_context) == (2048, 151936, 262144)


def test_state_of_the_80b_by_hand(tmp_path: Path) -> None:
    info = describe(write(tmp_path, QWEN3_NEXT_80B), device="cpu", dtype="bfloat16")
    usual, full = info.state
    assert [s.tokens for s in (usual, full)] == [4096, 262144]
    per_slot = 12 * 2 * 2 * 256 * 2  # layers, k and v, heads, channels, bytes
    # a cache has a multiple of 64 slots, and 64 more
    assert [s.kv_bytes for s in (usual, full)] == [per_slot * n for n in (4096 + 64, 262144 + 64)]
    assert info.token_bytes == per_slot == 24 * 1024
    recurrent = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert [s.recurrent_bytes for s in (usual, full)] == [recurrent] * 2
    text = format_info(info)
    assert re.search("for one more token +24.00 KiB KV cache\n", text)
    assert re.search("at 262,144 tokens +6.00 GiB KV cache [+] [0-9.]+ MiB recurrent state\n", text)
    assert "at 1 token" not in text


def test_what_a_family_does_not_have_is_left_out(tmp_path: Path) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": 99,
        "dtype": "float32",
    }
    info = describe(write(tmp_path, config), device="cpu")
    assert info.token_bytes == 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, channels, bytes
    text = format_info(info)
    assert "recurrent state" not in text and "delta_" not in text
    for name in ("route", "compute_experts", "compute_experts_decode", "attend_prefill", "attend_decode", "add_norm"):
        assert f"{name}=" in text
    assert "delta_prefill=" in format_info(describe("demo", device="cpu"))
    dense = describe(write(tmp_path, DEMO_CONFIG, mlp_only_layers=list(range(8))), device="cpu")
    assert set(dense.machine.kernels) == {
        "add_norm",
        "attend_prefill",
        "attend_decode",
        "delta_prefill",
        "delta_decode",
    }


def test_a_lone_config_of_quantised_weights(tmp_path: Path) -> None:
    info = describe(write(tmp_path, DEMO_CONFIG, quantization_config={"quant_method": "gptq"}))
    assert info.weights.startswith("none in the folder; those of this config.json cannot be loaded: config.json has ")
    assert "quant_method 'gptq'" in info.weights


def test_a_lone_config_of_fp8_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, DEMO_CONFIG, quantization_config={"quant_method": "fp8"})
    dequantised = describe(folder, device="cpu", dtype="bfloat16")
    monkeypatch.setattr(fmoe.info, "why_not_fp8", lambda device: "")
    kept = describe(folder, device="cpu", dtype="bfloat16")
    assert "FP8 blocks" in kept.stored_dtype and "cannot be loaded" not in kept.weights
    assert (kept.params, kept.active, kept.groups) == (dequantised.params, dequantised.active, dequantised.groups)
    sizes = {part.name: (part.params, part.bytes) for part in kept.parts}
    params, size = sizes["routed experts"]
    assert params < size < 1.1 * params  # a byte each, and the factors
    assert sizes["embedding"][1] == 2 * sizes["embedding"][0]
    assert kept.bytes == sum(part.bytes for part in kept.parts) < dequantised.bytes


def test_a_context_below_the_usual_length(tmp_path: Path) -> None:
    info = describe(write(tmp_path, DEMO_CONFIG, max_position_embeddings=50), device="cpu")
    assert [s.tokens for s in info.state] == [50]
    assert all(s.kv_bytes == 2 * 2 * 2 * 128 * 64 * 4 for s in info.state)  # layers, k and v, heads, slots, ...
    assert info.machine.tokens == 50


def test_layers_are_grouped_by_kind() -> None:
    linear, full = describe("demo").groups
    assert (linear.kind, linear.mlp, linear.layers) == ("linear_attention", "sparse", (0, 1, 2, 4, 5, 6))
    assert (full.kind, full.layers) == ("full_attention", (3, 7))
    assert (full.width, full.experts, full.top_k, full.shared_width, full.shared_slots) == (64, 16, 4, 64, 1)
    assert full.shared == "fused into 1 slot"


def test_dense_layers_stand_apart(tmp_path: Path) -> None:
    info = describe(write(tmp_path, DEMO_CONFIG, mlp_only_layers=[1, 2], tie_word_embeddings=True), device="cpu")
    groups = {group.layers: group for group in info.groups}
    assert set(groups) == {(0, 4, 5, 6), (1, 2), (3, 7)}
    dense = groups[1, 2]
    assert (dense.mlp, dense.width, dense.experts, dense.top_k, dense.shared_width) == ("dense", 512, 0, 0, 0)
    assert sizes(info)["dense MLPs"] == (2 * 3 * 256 * 512, 2 * 3 * 256 * 512)
    assert sizes(info)["routed experts"][0] == 6 * 16 * 3 * 256 * 64
    assert "head" not in sizes(info)  # a tied head is the embedding
    assert "2 x linear_attention, dense: width 512 (layers 1-2)" in format_info(info)
    assert "(layers 0, 4-6)" in format_info(info)


@pytest.mark.parametrize(
    ("width", "request_", "slots", "reason"),
    [
        (64, "auto", 1, "fused into 1 slot"),
        (128, "auto", 2, "fused into 2 slots"),
        (64, "separate", 0, "separate as requested"),
        (96, "auto", 0, "separate: shared width 96 is not a multiple of the expert width 64"),
        (0, "auto", 0, "no shared expert"),
    ],
)
def test_shared_experts(tmp_path: Path, width: int, request_: Any, slots: int, reason: str) -> None:
    folder = write(tmp_path, DEMO_CONFIG, shared_expert_intermediate_size=width)
    info = describe(folder, shared_experts=request_)
    assert {(g.shared_width, g.shared_slots, g.shared) for g in info.groups} == {(width, slots, reason)}
    expected = 8 * (3 * 256 * width + 256) if width else 0
    assert sizes(info).get("shared experts", (0, 0)) == (expected, expected)
    assert sizes(info)["routed experts"] == (8 * 16 * 3 * 256 * 64, 8 * 4 * 3 * 256 * 64)
    assert sizes(info)["routers"][0] == 8 * 16 * 256
    assert reason in format_info(info)


def test_weights_are_described_and_not_loaded(tmp_path: Path) -> None:
    assert describe("demo").weights.startswith("497 tensors (20.90 MiB) that agree with config.json; 65 more")
    for file in DEMO.iterdir():
        if file.name not in ("config.json", "model-00002-of-00002.safetensors"):
            (tmp_path / file.name).symlink_to(file)
    info = describe(write(tmp_path, DEMO_CONFIG))
    assert info.weights.startswith("these cannot be loaded: ")
    assert "model-00002-of-00002.safetensors" in info.weights


def test_weights_of_another_shape(tmp_path: Path) -> None:
    for file in DEMO.glob("model*"):
        (tmp_path / file.name).symlink_to(file)
    info = describe(write(tmp_path, DEMO_CONFIG, vocab_size=5000))
    assert "these cannot be loaded" in info.weights
    assert "[5000, 256]" in info.weights
    assert info.vocab_size == 5000


def test_dtype_that_the_config_leaves_open(tmp_path: Path) -> None:
    config = {key: value for key, value in DEMO_CONFIG.items() if key != "dtype"}
    info = describe(write(tmp_path, config))
    assert "bfloat16 is assumed" in info.weights
    assert info.stored_dtype == "bfloat16"


def test_a_nested_text_config(tmp_path: Path) -> None:
    nested = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "text_config": DEMO_CONFIG}
    assert describe(write(tmp_path, nested)).params == describe("demo").params


def test_what_runs_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.info.available_bytes", lambda: 1 << 40)
    info = describe("demo", device="cpu")
    machine = info.machine
    assert (machine.device, machine.dtype, machine.tokens) == ("cpu", "float32", 4096)
    assert machine.kernels["compute_experts"] == "compute_experts_planned"
    assert machine.compiled_kernels["compute_experts"] == "compute_experts_op"
    assert f"{CPU_COMPILE_TOKENS:,}" in machine.compile
    last = info.state[-1]
    assert machine.needed_bytes == info.bytes + last.kv_bytes + last.recurrent_bytes
    assert (machine.free_bytes, machine.fits) == (1 << 40, True)
    assert "1.00 TiB free: fits" in format_info(info)
    assert describe("demo", device="cpu", compile=True).machine.compile == "compiled, as requested"
    assert describe("demo", device="cpu", compile=False).machine.compile == "uncompiled, as requested"


@pytest.mark.parametrize(
    ("free", "fits", "words"), [(1000, False, "1000 B free: does not fit"), (None, None, "free is unknown")]
)
def test_memory_that_is_short_or_unknown(
    free: int | None, fits: bool | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmoe.info.available_bytes", lambda: free)
    info = describe("demo", device="cpu")
    assert info.machine.fits is fits
    assert words in format_info(info)


def test_what_could_be_done_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.info.available_bytes", lambda: 1000)
    info = describe("demo", device="cpu", dtype="float32")
    advice = "does not fit; load in half the bytes (--dtype bfloat16) or load on another machine"
    assert advice in format_info(info)
    half = describe("demo", device="cpu", dtype="bfloat16")
    assert format_info(half).endswith("does not fit; load on another machine")
    on_gpu = replace(half, machine=replace(half.machine, device="cuda:0 (a name)"))
    assert format_info(on_gpu).endswith("does not fit; load on the CPU (--device cpu)")


def test_auto_dtype_follows_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fmoe.placing.available_bytes", lambda: 200 << 30)
    with caplog.at_level(logging.INFO, "fmoe"):
        info = describe(write(tmp_path, QWEN3_NEXT_80B), device="cpu")
    assert info.machine.dtype == "bfloat16"
    assert "float32 needs" in caplog.text


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "mixtrl", "architectures": []}, ValueError, "known model types: .*qwen3_next"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented"),
        ({"dtype": "int3"}, ValueError, "has dtype 'int3'"),
    ],
)
def test_a_config_that_cannot_be_used(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        describe(write(tmp_path, DEMO_CONFIG | change))


def test_impossible_requests(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        (tmp_path / "notes.txt").touch()
        describe(tmp_path)
    with pytest.raises(ValueError, match="shared_experts='fused' is not possible"):
        describe(write(tmp_path, DEMO_CONFIG, shared_expert_intermediate_size=96), shared_experts="fused")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch finds no GPU"):
            describe("demo", device="cuda")


def test_an_info_is_plain_values() -> None:
    info = describe("demo")
    assert json.loads(json.dumps(asdict(info)))["groups"][0]["layers"] == [0, 1, 2, 4, 5, 6]
    assert replace(info, machine=replace(info.machine, free_bytes=None, fits=None)) != info


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (1 << 40, "1.00 TiB")]
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (1500, "1.50 K"), (79_674_440_448, "79.67 B")])
def test_format_count(count: int, text: str) -> None:
    assert format_count(count) == text
