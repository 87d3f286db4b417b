"""The least work of a step, counted by hand."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch

from fmoe.architectures import find_architecture
from fmoe.byte_limit import PARTS, Rates, Work, count_work, expected_experts, limit_seconds, part_limits
from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import Fp8
from fmoe.info import describe
from fmoe.loading import make_meta_params
from fmoe.random_weights import quantised_names

CONFIGS = Path(__file__).parents[1] / "bench" / "configs"
MB = 1e6


def count(raw: dict[str, Any], *, names: Container[str] = frozenset(), **options: Any) -> Work:
    """Count the work of a model that exists as its config alone."""
    family = find_architecture(raw)
    config = family.parse_config(raw)
    dtype = torch.bfloat16
    params = make_meta_params(lambda fill: family.build_params(fill, config), dtype=dtype, names=names)
    caches = family.init_state(config, 1, 64, dtype=dtype, device=torch.device("meta")).caches
    return count_work(params, config, caches, **options)


def published(name: str, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return raw | changes


def test_the_distinct_experts_of_few_and_of_many_rows() -> None:
    assert expected_experts(512, 10, 1) == pytest.approx(10.0)
    # of two rows, the second meets each of its ten experts again with probability 10/512
    assert expected_experts(512, 10, 2) == pytest.approx(20 - 10 * 10 / 512)
    assert expected_experts(512, 10, 8) == pytest.approx(74.7, abs=0.05)
    assert expected_experts(8, 8, 5) == 8.0
    assert expected_experts(64, 6, 10_000) == pytest.approx(64.0)


def test_qwen3_next_one_sequence_counted_by_hand() -> None:
    work = count(published("qwen3_next_80b_a3b"), batch=1, context=4095)
    hidden, layers, expert = 2048, 48, 3 * 512 * 2048
    router = (512 + 1) * hidden  # with the shared expert's gate
    assert work.bytes["MoE"] == pytest.approx(2 * layers * (11 * expert + router))
    assert work.bytes["head"] == 2 * 151936 * hidden
    attention = hidden * (2 * 4096 + 2 * 512) + 4096 * hidden
    norms = 4 * (16 + 2) * 256  # float32, a row for each head
    cache = 2 * 2 * 2 * 256 * 4096  # keys and values, two heads of 256, in bfloat16
    assert work.bytes["attention"] == 12 * (2 * attention + norms + cache)
    channels = 2 * 2048 + 4096
    delta = 2 * (hidden * (channels + 4096 + 64) + 4 * channels + 4096 * hidden + 128) + 4 * 2 * 32
    state = 4 * 32 * 128 * 128 + 2 * 3 * channels
    assert work.bytes["DeltaNet"] == 36 * (delta + 2 * state)
    assert work.bytes["rest"] == 2 * hidden + 4 * hidden * (2 * layers + 1)  # a row of the embedding, float32 norms
    assert work.total_bytes == pytest.approx(7384 * MB, rel=2e-3)
    assert work.distinct == 10.0
    assert set(work.bytes) == set(work.flops) == set(PARTS)


def test_qwen3_next_in_fp8_blocks_reads_about_half() -> None:
    raw = published("qwen3_next_80b_a3b_fp8")
    work = count(raw, names=quantised_names(raw), batch=1, context=4095)
    # 0.97 ms at 4.3 TB/s
    assert work.total_bytes == pytest.approx(4188 * MB, rel=1e-3)
    assert work.bytes["head"] == 2 * 151936 * 2048
    blocks = 3 * 512 * 2048 // 128**2
    assert work.bytes["MoE"] == pytest.approx(48 * (11 * (3 * 512 * 2048 + 4 * blocks) + 2 * 513 * 2048))


def test_operations_are_two_for_each_weight_that_works_on_a_token() -> None:
    raw = published("qwen3_30b_a3b")
    one, eight = count(raw, batch=1, context=0), count(raw, batch=8, context=0)
    assert one.flops["MoE"] == pytest.approx(2 * 48 * (8 * 3 * 768 * 2048 + 128 * 2048))
    assert one.flops["head"] == 2 * 151936 * 2048
    projections = 2048 * (4096 + 2 * 512) + 4096 * 2048 + 128 * (32 + 4)
    assert one.flops["attention"] == 48 * (2 * projections + 4 * 32 * 128 * 1)  # it sees itself
    assert eight.total_flops == pytest.approx(8 * one.total_flops)
    assert one.flops["DeltaNet"] == one.flops["rest"] == 0


def test_a_prompt_reads_each_weight_once_and_attends_to_half_of_itself() -> None:
    raw = published("qwen3_30b_a3b")
    step, prompt = count(raw, batch=1, context=0), count(raw, batch=1, context=0, tokens=1001)
    assert prompt.bytes["head"] == step.bytes["head"]
    assert prompt.flops["head"] == step.flops["head"]  # the last token's logits alone
    assert prompt.distinct == pytest.approx(128.0)
    assert prompt.flops["MoE"] == pytest.approx(1001 * step.flops["MoE"])
    each = 4 * 32 * 128
    assert prompt.flops["attention"] - 1001 * step.flops["attention"] == pytest.approx(48 * 1001 * each * (501 - 1))


def test_counted_experts_take_the_place_of_the_expected_ones() -> None:
    raw = published("qwen3_30b_a3b", num_hidden_layers=3)
    expected, counted = count(raw, batch=4, context=9), count(raw, batch=4, context=9, distinct=[20.0, 30.0, 10.0])
    assert counted.distinct == 20.0
    expert = 2 * 3 * 768 * 2048
    assert counted.bytes["MoE"] - expected.bytes["MoE"] == pytest.approx(expert * (60 - 3 * expected.distinct))
    assert counted.flops == expected.flops


def test_a_sliding_layer_reads_its_window_alone() -> None:
    raw = published("mixtral_8x7b", num_hidden_layers=2)
    near = count(raw | {"sliding_window": 100}, batch=3, context=999).bytes["attention"]
    far = count(raw, batch=3, context=999).bytes["attention"]
    assert far - near == 2 * 3 * (1000 - 100) * (2 * 8 * 128 * 2)


def test_latents_are_read_once_for_all_heads() -> None:
    raw = published("deepseek_v2_lite")
    short, long = count(raw, batch=2, context=10), count(raw, batch=2, context=110)
    assert long.bytes["attention"] - short.bytes["attention"] == 27 * 2 * 100 * (512 + 64) * 2
    assert long.flops["attention"] - short.flops["attention"] == pytest.approx(27 * 2 * 100 * 2 * 16 * (192 + 128))
    # the first layer is dense
    assert short.bytes["rest"] >= 2 * 3 * 2048 * 10944
    assert short.flops["rest"] == 2 * 2 * 3 * 2048 * 10944


@pytest.mark.parametrize("name", ["qwen3_next_80b_a3b", "qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v2_lite"])
def test_weights_are_those_that_info_counts(name: str) -> None:
    info = describe(CONFIGS / name, device="cpu", dtype="bfloat16")
    raw = published(name)
    family = find_architecture(raw)
    config = family.parse_config(raw)
    caches = family.init_state(config, 1, 64, dtype=torch.bfloat16, device=torch.device("meta")).caches
    state = sum(tensor.nbytes for cache in caches for tensor in cache)
    # a step of so many rows reads every expert; what its caches and embedding rows are is known
    rows = 100_000
    work = count(raw, batch=rows, context=0)
    recurrent = sum(tensor.nbytes for cache in caches for tensor in cache if type(cache).__name__ == "DeltaCache")
    per_row = 2 * recurrent + (state - recurrent) / 64 + 2 * config.decoder.hidden_size
    embedding = next(part.bytes for part in info.parts if part.name == "embedding")
    assert work.total_bytes - rows * per_row == pytest.approx(info.bytes - embedding, rel=1e-9)
    # and one row works with what info calls active, its embedding row apart
    one = count(raw, batch=1, context=0)
    norms = sum(part.params for part in info.parts if part.name == "norms")
    known = info.active - norms - config.decoder.vocab_size * config.decoder.hidden_size
    assert one.total_flops == pytest.approx(2 * known, rel=5e-4)  # a token that sees itself


def test_blocks_of_fp8_are_counted_with_their_factors() -> None:
    raw = published("qwen3_30b_a3b", num_hidden_layers=1)
    family = find_architecture(raw)
    config = family.parse_config(raw)
    params = make_meta_params(lambda fill: family.build_params(fill, config), dtype=torch.bfloat16)
    caches = family.init_state(config, 1, 64, dtype=torch.bfloat16, device=torch.device("meta")).caches
    mlp = params.layers[0].mlp
    assert isinstance(mlp, MoEParams)

    def quantise(w: Any) -> Fp8:
        values = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device="meta")
        return Fp8(values, torch.empty(w.shape[0], w.shape[1] // 128, w.shape[2] // 128, device="meta"))

    mlp = mlp._replace(w_gate_up_EPD=quantise(mlp.w_gate_up_EPD), w_down_EDF=quantise(mlp.w_down_EDF))
    params = params._replace(layers=(params.layers[0]._replace(mlp=mlp),))
    size = count_work(params, config, caches, batch=1, context=0).bytes["MoE"]
    assert size == pytest.approx(2 * 128 * 2048 + 8 * (3 * 768 * 2048 + 4 * 3 * 6 * 16))


def test_biases_are_read_with_their_experts() -> None:
    raw = {
        "model_type": "gpt_oss", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    family = find_architecture(raw)
    config = family.parse_config(raw)
    params = make_meta_params(lambda fill: family.build_params(fill, config), dtype=torch.bfloat16)
    caches = family.init_state(config, 1, 64, dtype=torch.bfloat16, device=torch.device("meta")).caches
    size = count_work(params, config, caches, batch=1, context=0).bytes["MoE"]
    assert size == 2 * (8 * (64 + 1) + 2 * (3 * 64 * 32 + 2 * 32 + 64))


def test_the_limit_is_that_of_the_bytes_or_of_the_operations() -> None:
    work = Work({"MoE": 3e9, "head": 1e9}, {"MoE": 1e9, "head": 8e12}, 0.0)
    assert limit_seconds(work, Rates(2000.0, 4000.0, 100.0)) == pytest.approx(8.001e12 / 100e12)
    assert limit_seconds(work, Rates(2000.0, 4000.0, 1e6)) == pytest.approx(1e-3)
    assert limit_seconds(work, Rates(2000.0, None, 1e6)) == pytest.approx(2e-3)
    assert limit_seconds(work, Rates(5000.0, 4000.0, 1e6)) == pytest.approx(0.8e-3)
    assert part_limits(work, Rates(2000.0, 4000.0, 100.0)) == pytest.approx({"MoE": 0.75e-3, "head": 8e-2})
