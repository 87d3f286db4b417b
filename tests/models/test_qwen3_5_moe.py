"""models/qwen3_5_moe.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.checkpoint import read_config
from fmoe.loading import make_meta_params, named_tensors
from fmoe.model import text_config
from fmoe.models import qwen3_5_moe
from fmoe.random_weights import quantised_names

from ..fp8_checkpoints import write_checkpoint
from .conftest import Reference, randomize_
from .parity import (
    V,
    assert_equal_logits,
    check_compiled,
    check_flagship,
    check_router,
    draw_ids,
    one_pass,
    rewrite_config,
)
from .parity import test_chunked_prefill_equals_one_chunk as test_chunked_prefill_equals_one_chunk
from .parity import (
    test_decoding_equals_the_reference_with_its_cache as test_decoding_equals_the_reference_with_its_cache,
)
from .parity import test_logits as test_logits
from .parity import test_mixed_lengths_equal_single_rows as test_mixed_lengths_equal_single_rows
from .parity import test_pieces_equal_one_pass as test_pieces_equal_one_pass
from .parity import test_stacked_and_single_experts_load_alike as test_stacked_and_single_experts_load_alike
from .parity import test_the_reference_is_worth_comparing_with as test_the_reference_is_worth_comparing_with

FILE = "model.safetensors"
L, A = "linear_attention", "full_attention"
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
BASE = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": [L, A],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5} | MROPE,
}
VARIANTS = {
    "plain": {},
    "wide-shared": {
        "num_hidden_layers": 3,
        "layer_types": [A, A, L],
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "num_experts": 5,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 20,  # 2 F
        "tie_word_embeddings": True,
    },
    "odd-shared": {
        "num_hidden_layers": 3,
        "layer_types": [L, A, L],
        "shared_expert_intermediate_size": 36,  # 1.5 F
        "num_experts_per_tok": 1,
    },
}
SLOTS = {"plain": 1, "wide-shared": 2, "odd-shared": 0}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(Qwen3_5MoeTextConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def test_bfloat16_follows_the_reference(reference):
    """Means, as a near tie of two experts may go either way; decay and zero-centred norms stay in float32."""
    model = fmoe.load(reference.folder, dtype="bfloat16", compile=False)
    for name, tensor in named_tensors(model.params):
        kept = name.endswith(("norm_D", "norm_HC", "decay_H", "dt_bias_H"))
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
    ids = draw_ids(65)
    found, expected = one_pass(model, ids), reference.logits(ids)
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_fused_and_separate_give_the_same_logits(variant, reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)
    width = (BASE | VARIANTS[variant])["shared_expert_intermediate_size"]
    assert (model.config.shared.slots, separate.config.shared.slots) == (SLOTS[variant], 0)
    assert model.config.shared.width == separate.config.shared.width == width
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)
    assert all(layer.mlp.shared is not None for layer in separate.params.layers)
    assert all((layer.mlp.shared is None) == (SLOTS[variant] > 0) for layer in model.params.layers)


@pytest.mark.parametrize(("experts", "k"), [(7, 1), (7, 3), (256, 8), (5, 5)])
def test_router(experts, k, rng):
    config = Qwen3_5MoeTextConfig(**BASE | {"num_experts": experts, "num_experts_per_tok": k})
    check_router(Qwen3_5MoeTopKRouter(config), qwen3_5_moe.parse_config(config.to_dict()).router, 32, rng)


def to_old_keys(raw):
    """Write the keys as published files do."""
    raw["partial_rotary_factor"] = raw["rope_parameters"]["partial_rotary_factor"]
    raw["full_attention_interval"] = 2
    own = {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
    return raw | own | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": []}


def test_hub_config_keys(reference, model, tmp_path):
    old = fmoe.load(rewrite_config(reference, tmp_path / "old", to_old_keys), compile=False)
    assert old.config == model.config


def test_an_interval_stands_for_the_kinds():
    raw = Qwen3_5MoeTextConfig(**BASE).to_dict() | {"num_hidden_layers": 5, "layer_types": None}
    kinds = qwen3_5_moe.parse_config(raw).decoder.layer_kinds
    assert kinds == (L, L, L, A, L)
    assert qwen3_5_moe.parse_config(raw | {"full_attention_interval": 2}).decoder.layer_kinds == (L, A, L, A, L)


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A whole model with its vision part, as save_pretrained writes it."""
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5MoeConfig(text_config=BASE, vision_config=vision)
    model = Qwen3_5MoeForConditionalGeneration._from_config(config, experts_implementation="eager").float().eval()
    randomize_(model, 0)
    folder = tmp_path_factory.mktemp("multimodal")
    model.save_pretrained(folder)
    return Reference(model, folder)


def test_the_language_model_of_a_multimodal_checkpoint(multimodal, caplog):
    raw = read_config(multimodal.folder)
    assert raw["architectures"] == ["Qwen3_5MoeForConditionalGeneration"] and "hidden_size" not in raw
    assert find_architecture(raw) is qwen3_5_moe
    names = load_file(multimodal.folder / FILE).keys()
    assert "model.language_model.layers.1.self_attn.q_proj.weight" in names
    assert sum(name.startswith("model.visual.") for name in names) > 5
    with caplog.at_level(logging.INFO, logger="fmoe"):
        model = fmoe.load(multimodal.folder, compile=False)
    [message] = [record.getMessage() for record in caplog.records if "vision" in record.getMessage()]
    assert message.startswith("the vision model is not read (the checkpoint has model.visual.")
    ids = draw_ids(33)
    assert_equal_logits(one_pass(model, ids), multimodal.logits(ids))


def test_stacked_experts_below_the_nested_prefix(multimodal, tmp_path):
    """As published: experts stacked, beside a draft layer whose experts are not."""
    multimodal.model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = load_file(tmp_path / "stacked" / FILE)
    assert stored["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (7, 48, 32)
    stored["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.ones(24, 32)
    model = fmoe.load(write_checkpoint(tmp_path / "drafts", stored, read_config(multimodal.folder)), compile=False)
    ids = draw_ids(33)
    assert_equal_logits(one_pass(model, ids), multimodal.logits(ids))


def test_layers_behind_the_last_are_named(multimodal, tmp_path, caplog):
    """A number of layers that is too small would drop trained ones unseen."""

    def change(raw):
        return raw | {"text_config": raw["text_config"] | {"num_hidden_layers": 1, "layer_types": [L]}}

    fmoe.load(rewrite_config(multimodal, tmp_path / "short", change), compile=False)
    assert "layers from model.layers.1 on are not read (the checkpoint has model.language_model.layers.1" in caplog.text


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, False, True), (False, True, False), (None, True, True)])
def test_a_tied_head_is_named_at_either_level(outer, inner, tied):
    raw = {"tie_word_embeddings": outer, "text_config": PUBLISHED["text_config"] | {"tie_word_embeddings": inner}}
    assert qwen3_5_moe.parse_config(text_config(raw)).decoder.tied is tied


def test_a_text_model_keeps_the_nested_prefix(reference, model, tmp_path):
    """A language model that was cut out of a checkpoint with vision may keep its names."""
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(reference.folder / FILE).items()
    }
    found = fmoe.load(write_checkpoint(tmp_path, stored, read_config(reference.folder)), compile=False)
    expected = dict(named_tensors(model.params))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named_tensors(found.params))


PUBLISHED = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": [L, L, L, A] * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152},
}  # fmt: skip
LARGER = {
    "hidden_size": 4096, "layer_types": [L, L, L, A] * 15, "linear_num_value_heads": 64, "num_attention_heads": 32,
    "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 60,
}  # fmt: skip
MIDDLE = LARGER | {
    "hidden_size": 3072, "layer_types": [L, L, L, A] * 12, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "total", "active"),
    [({}, 35e9, 3.46e9), (MIDDLE, 122e9, 9.77e9), (LARGER, 397e9, 17.3e9)],
    ids=["35B-A3B", "122B-A10B", "397B-A17B"],
)
def test_flagships(changes, total, active, tmp_path):
    raw = PUBLISHED | {"text_config": PUBLISHED["text_config"] | changes}
    info = check_flagship(raw, tmp_path, total=total, active=active)
    assert {group.kind: len(group.layers) / len(raw["text_config"]["layer_types"]) for group in info.groups} == {
        L: 0.75,
        A: 0.25,
    }
    assert {(group.shared_slots, group.mlp) for group in info.groups} == {(1, "sparse")}


def test_a_flat_config_of_the_text_model():
    raw = PUBLISHED["text_config"] | {"architectures": ["Qwen3_5MoeForCausalLM"], "output_gate_type": "swish"}
    assert find_architecture(raw) is find_architecture({"model_type": "qwen3_5_moe_text"}) is qwen3_5_moe
    config = qwen3_5_moe.parse_config(raw)
    assert (config.decoder.rope.rotary_size, config.decoder.rope.theta, config.decoder.eps) == (64, 1e7, 1e-6)


def test_absent_keys_take_the_familys_defaults():
    absent = ("head_dim", "num_key_value_heads", "shared_expert_intermediate_size", "rope_parameters", "rms_norm_eps")
    absent += ("layer_types", "full_attention_interval", "linear_conv_kernel_dim", "partial_rotary_factor")
    raw = {key: value for key, value in PUBLISHED["text_config"].items() if key not in absent}
    config = qwen3_5_moe.parse_config(raw)
    assert (config.attention.head_size, config.attention.kv_heads, config.shared.width) == (256, 2, 512)
    assert (config.decoder.rope.rotary_size, config.decoder.rope.theta, config.decoder.eps) == (64, 1e4, 1e-6)
    assert (config.decoder.layer_kinds, config.delta.conv_size) == ((L, L, L, A) * 10, 4)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias=True is not implemented; implemented: False"),
        ({"attn_output_gate": False}, NotImplementedError, "attn_output_gate=False is not .*; implemented: True"),
        (
            {"output_gate_type": "sigmoid"},
            NotImplementedError,
            "output_gate_type='sigmoid' is not implemented; implemented: 'swish', 'silu'",
        ),
        ({"mamba_ssm_dtype": "bfloat16"}, NotImplementedError, "mamba_ssm_dtype='bfloat16' is not implemented"),
        ({"norm_topk_prob": False}, NotImplementedError, "norm_topk_prob=False is not implemented"),
        ({"mlp_only_layers": [1]}, NotImplementedError, r"mlp_only_layers=\[1\] is not implemented; implemented: \[\]"),
        ({"decoder_sparse_step": 2}, NotImplementedError, "decoder_sparse_step=2 is not implemented; implemented: 1"),
        (
            {"layer_types": ["sliding_attention"] * 40},
            NotImplementedError,
            "layer_types .*'sliding_attention'.* unknown",
        ),
        ({"num_experts": 0}, ValueError, "num_experts must be an integer >= 1, got 0"),
        ({"num_experts_per_tok": 257}, ValueError, "num_experts_per_tok=257 must be in 1..num_experts=256"),
        ({"linear_num_value_heads": 24}, ValueError, "linear_num_value_heads=24 must be a multiple of linear_num_key"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        qwen3_5_moe.parse_config(PUBLISHED["text_config"] | change)


def test_random_weights_in_fp8_blocks():
    """As published in FP8: the small projections b and a stay plain, the large ones beside them do not."""
    raw = PUBLISHED | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}}
    sizes = {"num_hidden_layers": 1, "layer_types": [L], "num_experts": 8}
    config = qwen3_5_moe.parse_config(text_config(raw) | sizes)
    params = make_meta_params(partial(build, config), dtype=torch.bfloat16, names=quantised_names(raw), keep_fp8=True)
    w_in_ND = params.layers[0].mixer.w_in_ND
    assert w_in_ND.w.shape == (12288, 2048) and w_in_ND.rest_MD.shape == (64, 2048)
    assert params.layers[0].mlp.w_gate_up_EPD.w.dtype == torch.float8_e4m3fn


def build(config, fill):
    return qwen3_5_moe.build_params(fill, config)


def test_the_language_model_is_found_beside_keys_of_the_whole() -> None:
    inner = PUBLISHED["text_config"]
    assert text_config({"hidden_size": 32, "text_config": inner}) == inner
    assert text_config(inner | {"text_config": {}}) == inner | {"text_config": {}}  # the file itself is one
