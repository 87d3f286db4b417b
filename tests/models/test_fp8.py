"""Whole models in FP8 blocks: kept, they give the logits of the same weights multiplied out, which load as such."""

import logging
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    OlmoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

import fmoe
from fmoe.architectures import compute_logits, ignored_tensors
from fmoe.checkpoint import open_checkpoint, read_config
from fmoe.compile.select import choose
from fmoe.compile.step import compile_steps
from fmoe.functional.quant import Fp8
from fmoe.info import describe
from fmoe.loading import load_params, named_tensors

from ..fp8_checkpoints import dequantize_tensors, quantize_tensors, write_checkpoint
from .parity import V, assert_equal_logits, decode, draw_ids, in_pieces, one_pass

PLAIN = (
    "embed_tokens",
    "lm_head",
    "mlp.gate.",
    "shared_expert_gate",
    "in_proj_ba",
    "in_proj_b.",
    "in_proj_a.",
    "conv1d",
)  # never in blocks
BASE = {
    "vocab_size": V,
    "hidden_size": 200,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 72,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
NEXT = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 72,
}
ROUTED = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-2,
}
LATENT = ROUTED | {
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
ERNIE = {"moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 1, "head_dim": 128}
V3 = {key: BASE[key] for key in BASE if key != "num_experts"} | ROUTED
MODELS = {
    "qwen3_next": Qwen3NextConfig(**BASE | NEXT),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**BASE | NEXT),
    "ernie4_5_moe": Ernie4_5_MoeConfig(**{key: BASE[key] for key in BASE if key[:4] != "num_e"} | ERNIE),
    "olmoe": OlmoeConfig(**BASE | {"hidden_size": 256, "eos_token_id": None}),
    "qwen3_moe": Qwen3MoeConfig(**BASE | {"head_dim": 128, "norm_topk_prob": True}),
    "deepseek_v3": DeepseekV3Config(**V3 | LATENT),
    "glm4_moe": Glm4MoeConfig(**V3 | {"head_dim": 128, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_lite": Glm4MoeLiteConfig(**V3 | LATENT),
    "dots1": Dots1Config(**V3 | {"head_dim": 128, "n_shared_experts": 2, "moe_intermediate_size": 128}),
}
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def is_quantised(name):
    matrix = name.endswith((".weight", "_proj")) and "norm" not in name
    return matrix and not any(part in name for part in PLAIN)


@pytest.fixture(scope="module", params=MODELS)
def folders(request, make_reference, tmp_path_factory):
    """Write a random model in FP8 blocks, its factors in bfloat16, and the same weights multiplied out."""
    reference = make_reference(MODELS[request.param])
    tensors = {name: 0.4 * t if is_quantised(name) else t for name, t in load_file(reference.folder / FILE).items()}
    tensors = quantize_tensors(tensors, is_quantised, torch.bfloat16)
    config, folder = read_config(reference.folder), tmp_path_factory.mktemp("fp8")
    fp8 = write_checkpoint(folder / "blocks", tensors, config | {"quantization_config": QUANTIZATION})
    return fp8, write_checkpoint(folder / "plain", dequantize_tensors(tensors), config)


FILE = "model.safetensors"


def load_kept(folder, dtype=torch.float32, **options):
    """Load with the blocks kept, as on a GPU."""
    model = fmoe.load(folder, compile=False, dtype=dtype, **options)
    build = partial(build_with, model.architecture, model.config)
    ignore = ignored_tensors(model.config.decoder)
    checkpoint = open_checkpoint(folder)
    params = load_params(build, checkpoint, dtype=dtype, device=model.device, ignore=ignore, keep_fp8=True)
    kernels = choose(model.device, compiled=False)
    eager = replace(model.eager, layers=model.architecture.make_layers(model.config, kernels))
    return replace(model, params=params, eager=eager, plans=())


def build_with(architecture, config, fill):
    return architecture.build_params(fill, config)


def count_blocks(params):
    return sum(path.endswith(".scale") for path, _ in named_tensors(params))


def test_on_a_cpu_the_weights_are_the_same_as_multiplied_out(folders):
    found, expected = (fmoe.load(folder, compile=False) for folder in folders)
    assert found.config == expected.config
    pairs = zip(named_tensors(found.params), named_tensors(expected.params), strict=True)
    for (path, tensor), (expected_path, expected_tensor) in pairs:
        assert path == expected_path
        assert torch.equal(tensor, expected_tensor), path


def test_logits(folders):
    blocks, plain = load_kept(folders[0]), fmoe.load(folders[1], compile=False)
    assert count_blocks(blocks.params) >= 7  # in two layers
    ids = draw_ids(37)
    expected = one_pass(plain, ids)
    assert 0.1 < expected.std() < 100
    assert_equal_logits(one_pass(blocks, ids), expected, within=1e-5)
    assert_equal_logits(in_pieces(blocks, ids, [17, *[1] * 20]), expected, within=1e-4)


def test_logits_in_bfloat16(folders):
    blocks, plain = load_kept(folders[0], torch.bfloat16), fmoe.load(folders[1], dtype="bfloat16", compile=False)
    ids = draw_ids(37)
    found, expected = one_pass(blocks, ids), one_pass(plain, ids)
    # the same rounded weights; a product may be summed in another order
    assert (found - expected).abs().mean() < 0.02 * expected.std()


def test_compiled(folders):
    blocks = load_kept(folders[0])
    layers = blocks.architecture.make_layers(blocks.config, choose(blocks.device, compiled=True))
    head = partial(compute_logits, eps=blocks.config.decoder.eps)
    steps = compile_steps(layers, head, device=blocks.device, backend="aot_eager")
    prompts = [draw_ids(9)]
    found, expected = decode(blocks, prompts, 4, steps), decode(blocks, prompts, 4)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]


@pytest.fixture(scope="module")
def next_tensors(make_reference):
    reference = make_reference(MODELS["qwen3_next"])
    return load_file(reference.folder / FILE), read_config(reference.folder)


def test_fields_of_qwen3_next(next_tensors, tmp_path):
    tensors, config = next_tensors
    params = load_kept(write_checkpoint(tmp_path, quantize_tensors(tensors, is_quantised), config)).params
    linear, full = params.layers
    assert linear.mixer.w_in_ND.w.shape == (1024, 200) and linear.mixer.w_in_ND.rest_MD.shape == (8, 200)
    assert full.mixer.w_in_ND.w.shape == (768, 200) and full.mixer.w_in_ND.rest_MD is None
    assert linear.mlp.w_gate_up_EPD.w.shape == (6, 144, 200)  # five experts and the shared one
    assert linear.mlp.w_gate_up_EPD.scale.shape == (6, 2, 2)
    assert linear.mlp.w_down_EDF.scale.shape == (6, 2, 1)
    assert linear.mlp.shared is None
    assert not any(isinstance(w, Fp8) for w in (params.embed_VD, params.head_VD, linear.mlp.w_router_ED))


@pytest.mark.parametrize("quantised", ["routed", "shared"])
def test_experts_of_two_kinds_stay_apart(next_tensors, tmp_path, caplog, quantised):
    tensors, config = next_tensors

    def chosen(name):
        return is_quantised(name) and ("shared_expert" in name) == (quantised == "shared")

    blocks = quantize_tensors(tensors, chosen)
    folder = write_checkpoint(tmp_path / "blocks", blocks, config)
    plain = fmoe.load(write_checkpoint(tmp_path / "plain", dequantize_tensors(blocks), config), compile=False)
    with caplog.at_level(logging.INFO, "fmoe"):
        model = load_kept(folder)

    why = "of the shared and the routed experts only one kind is in FP8 blocks"
    assert f"shared experts: separate: {why}" in caplog.text
    mlp = model.params.layers[0].mlp
    assert isinstance(mlp.w_down_EDF, Fp8) == (quantised == "routed")
    assert isinstance(mlp.shared.mlp.w_down_DF, Fp8) == (quantised == "shared")
    assert {group.shared for group in describe(folder).groups} == {f"separate: {why}"}
    ids = draw_ids(20)
    assert_equal_logits(one_pass(model, ids), one_pass(plain, ids), within=1e-4)
    with pytest.raises(ValueError, match=re.escape(f"shared_experts='fused' is not possible: {why}; use")):
        fmoe.load(folder, shared_experts="fused")
    fmoe.load(folder, shared_experts="separate", compile=False)


@pytest.mark.parametrize("request_", ["auto", "separate"])
def test_stacked_experts(make_reference, tmp_path, request_):
    reference = make_reference(Qwen3NextConfig(**BASE | NEXT), save_original_format=False)
    tensors = load_file(reference.folder / FILE)
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors
    tensors = quantize_tensors(tensors, is_quantised)
    config = read_config(reference.folder)
    model = load_kept(write_checkpoint(tmp_path / "blocks", tensors, config), shared_experts=request_)
    plain = fmoe.load(write_checkpoint(tmp_path / "plain", dequantize_tensors(tensors), config), compile=False)
    ids = draw_ids(20)
    assert_equal_logits(one_pass(model, ids), one_pass(plain, ids), within=1e-4)
