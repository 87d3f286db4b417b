"""models/glm4_moe_lite.py against transformers, on re-randomised tiny models saved and loaded."""

import pytest
import torch
from transformers import Glm4MoeLiteConfig
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.decoding import new_state
from fmoe.loading import named_tensors
from fmoe.models import glm4_moe_lite
from fmoe.models.deepseek_v2 import layer_params

from .parity import V, check_compiled, check_flagship
from .parity import test_chunked_prefill_equals_one_chunk as test_chunked_prefill_equals_one_chunk
from .parity import (
    test_decoding_equals_the_reference_with_its_cache as test_decoding_equals_the_reference_with_its_cache,
)
from .parity import test_logits as test_logits
from .parity import test_mixed_lengths_equal_single_rows as test_mixed_lengths_equal_single_rows
from .parity import test_pieces_equal_one_pass as test_pieces_equal_one_pass
from .parity import test_the_reference_is_worth_comparing_with as test_the_reference_is_worth_comparing_with
from .v3_experts import EXPERTS, GRID, build_reference, check_biased_router, check_hub_config, count_stored
from .v3_experts import test_a_missing_bias_is_an_error as test_a_missing_bias_is_an_error
from .v3_experts import test_bfloat16_follows_the_reference as test_bfloat16_follows_the_reference
from .v3_experts import test_draft_layers_are_ignored as test_draft_layers_are_ignored
from .v3_experts import test_experts_are_what_the_checkpoint_holds as test_experts_are_what_the_checkpoint_holds
from .v3_experts import test_fused_and_separate_give_the_same_logits as test_fused_and_separate_give_the_same_logits

BASE = EXPERTS | {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 40.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "flash": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "yarn": {
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6},
    },
    "half-split": {
        "rope_interleave": False,
        "tie_word_embeddings": True,
        "n_shared_experts": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "mlp_layer_types": ["sparse"] * 3,
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return build_reference(make_reference, Glm4MoeLiteConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["flash"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def test_stacked_experts_load_alike(reference, model, tmp_path):
    reference.model.save_pretrained(tmp_path, save_original_format=False)
    stacked = fmoe.load(tmp_path, compile=False)
    found, expected = dict(named_tensors(stacked.params)), dict(named_tensors(model.params))
    assert stacked.config == model.config and found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sizes", GRID, ids=str)
def test_router(sizes, norm, scale, rng):
    keys = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    changes = dict(zip(keys, sizes, strict=True)) | {"norm_topk_prob": norm, "routed_scaling_factor": scale}
    config = Glm4MoeLiteConfig(**BASE | changes)
    check_biased_router(Glm4MoeLiteTopkRouter(config), glm4_moe_lite.parse_config(config.to_dict()).router, rng)


def test_hub_config_keys(reference, model, tmp_path):
    """Published files count the dense layers."""

    def publish(raw):
        dense = raw.pop("mlp_layer_types").count("dense")
        return raw | {"first_k_dense_replace": dense, "topk_method": "noaux_tc", "partial_rotary_factor": 1.0}

    check_hub_config(reference, model, tmp_path / "old", publish)


FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def test_flagship(tmp_path):
    """30B, of which a token takes 3.9B, embedding and head included; what the checkpoint holds has a draft layer."""
    info = check_flagship(FLASH, tmp_path, total=30e9, active=3.9e9)
    dense, sparse = info.groups
    assert (dense.layers, len(sparse.layers)) == ((0,), 46)
    assert (sparse.experts, sparse.top_k, sparse.shared_slots) == (64, 4, 1)
    assert count_stored(glm4_moe_lite, layer_params, FLASH) == 31_221_488_576
    config = glm4_moe_lite.parse_config(FLASH)
    assert config.attention.scale == 256**-0.5
    assert (config.decoder.rope.theta, config.decoder.eps, config.decoder.draft_layers) == (1e6, 1e-5, 1)
    assert find_architecture(FLASH) is find_architecture({"model_type": "glm4_moe_lite"}) is glm4_moe_lite


def test_caches_hold_latents(model):
    state = new_state(model, 2, 9)
    assert {tuple(cache.latent_BMR.shape)[::2] for cache in state.caches} == {(2, 18)}


def test_absent_keys_take_the_familys_defaults():
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings")
    kept += ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    raw = {key: FLASH[key] for key in kept}
    nulls = dict.fromkeys(set(FLASH) - set(kept) - {"architectures", "dtype"})
    for given, rank in ((raw, 768), (raw | nulls, None)):
        config = glm4_moe_lite.parse_config(given)
        assert (config.decoder.eps, config.decoder.rope.theta, config.decoder.tied) == (1e-5, 1e4, False)
        assert (config.attention.query_rank, config.attention.interleaved) == (rank, True)
        assert (config.decoder.draft_layers, config.dense_layers, config.shared.slots) == (1, 1, 1)
        router = config.router
        assert (router.groups, router.groups_kept, router.scale, router.renormalize) == (1, 1, 1.8, True)


def test_dense_layers():
    read = glm4_moe_lite.parse_config
    short = FLASH | {"num_hidden_layers": 3}
    kinds = {"mlp_layer_types": ["dense", "dense", "sparse"]}
    assert read(short | kinds | {"first_k_dense_replace": None}).dense_layers == 2
    assert read(short | kinds | {"first_k_dense_replace": 2}).dense_layers == 2
    assert read(short | {"first_k_dense_replace": 0}).dense_layers == 0
    assert read(short | {"mlp_layer_types": ["dense"] * 3, "first_k_dense_replace": None}).dense_layers == 3


DENSE, SPARSE = ["dense"], ["sparse"]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias=True is not implemented; implemented: False"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not .*; implemented: 1.0"),
        ({"num_key_value_heads": 5}, NotImplementedError, "num_key_value_heads=5 is not implemented; implemented: 20"),
        ({"scoring_func": "softmax"}, NotImplementedError, "scoring_func='softmax' is not .*; implemented: 'sigmoid'"),
        ({"topk_method": "greedy"}, NotImplementedError, "topk_method='greedy' is not .*; implemented: 'noaux_tc'"),
        ({"rope_scaling": {"type": "linear"}}, NotImplementedError, "rope type 'linear' is unknown"),
        (
            {"mlp_layer_types": DENSE + SPARSE + DENSE + SPARSE * 44},
            NotImplementedError,
            "mlp_layer_types=.* is not implemented; implemented: dense layers first",
        ),
        (
            {"mlp_layer_types": DENSE * 2 + SPARSE * 45},
            ValueError,
            "first_k_dense_replace=1 and mlp_layer_types with 2 dense layers must agree",
        ),
        ({"mlp_layer_types": SPARSE * 46}, ValueError, "must list 'dense' or 'sparse' for num_hidden_layers=47 layers"),
        (
            {"mlp_layer_types": ["moe"] * 47},
            ValueError,
            "must list 'dense' or 'sparse' for num_hidden_layers=47 layers",
        ),
        ({"qk_rope_head_dim": 63}, ValueError, "qk_rope_head_dim must be even, got 63"),
        ({"n_group": 3}, ValueError, "n_group=3 must divide n_routed_experts=64"),
        ({"q_lora_rank": 0}, ValueError, "q_lora_rank must be an integer >= 1, got 0"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        glm4_moe_lite.parse_config(FLASH | change)
