"""models/glm4_moe.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.models import glm4_moe
from fmoe.models.gqa_decoder import layer_params

from .parity import V, check_compiled, check_flagship
from .parity import test_chunked_prefill_equals_one_chunk as test_chunked_prefill_equals_one_chunk
from .parity import (
    test_decoding_equals_the_reference_with_its_cache as test_decoding_equals_the_reference_with_its_cache,
)
from .parity import test_logits as test_logits
from .parity import test_mixed_lengths_equal_single_rows as test_mixed_lengths_equal_single_rows
from .parity import test_pieces_equal_one_pass as test_pieces_equal_one_pass
from .parity import test_stacked_and_single_experts_load_alike as test_stacked_and_single_experts_load_alike
from .parity import test_the_reference_is_worth_comparing_with as test_the_reference_is_worth_comparing_with
from .v3_experts import EXPERTS, GRID, build_reference, check_biased_router, check_hub_config, count_stored
from .v3_experts import test_a_missing_bias_is_an_error as test_a_missing_bias_is_an_error
from .v3_experts import test_bfloat16_follows_the_reference as test_bfloat16_follows_the_reference
from .v3_experts import test_draft_layers_are_ignored as test_draft_layers_are_ignored
from .v3_experts import test_experts_are_what_the_checkpoint_holds as test_experts_are_what_the_checkpoint_holds
from .v3_experts import test_fused_and_separate_give_the_same_logits as test_fused_and_separate_give_the_same_logits

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
BASE = EXPERTS | {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
}
VARIANTS = {
    "4.5": {},
    "air": {
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "num_hidden_layers": 2,
        "rope_parameters": YARN | {"partial_rotary_factor": 1 / 3},
    },
    "plain": {
        "attention_bias": False,
        "norm_topk_prob": False,
        "n_shared_experts": 3,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return build_reference(make_reference, Glm4MoeConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["4.5"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def test_norms_and_biases_are_loaded(variant, reference, model):
    """q, k and v have biases where there are any, the output projection never; norms per head are an option."""
    stored, options = load_file(reference.folder / "model.safetensors"), BASE | VARIANTS[variant]
    heads = options["num_attention_heads"]
    for i, layer in enumerate(model.params.layers):
        base, mixer = f"model.layers.{i}.self_attn", layer.mixer
        assert mixer.bias_out_D is None and f"{base}.o_proj.bias" not in stored
        assert (mixer.bias_N is not None) == options["attention_bias"]
        assert (mixer.norm_HC is not None) == options["use_qk_norm"]
        if mixer.bias_N is not None:
            assert torch.equal(mixer.bias_N, torch.cat([stored[f"{base}.{name}_proj.bias"] for name in "qkv"]))
        if mixer.norm_HC is not None:
            assert torch.equal(mixer.norm_HC[:heads], stored[f"{base}.q_norm.weight"].expand(heads, -1))
            assert torch.equal(mixer.norm_HC[heads], stored[f"{base}.k_norm.weight"])


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sizes", GRID, ids=str)
def test_router(sizes, norm, scale, rng):
    keys = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    changes = dict(zip(keys, sizes, strict=True)) | {"norm_topk_prob": norm, "routed_scaling_factor": scale}
    config = Glm4MoeConfig(**BASE | changes)
    check_biased_router(Glm4MoeTopkRouter(config), glm4_moe.parse_config(config.to_dict()).router, rng)


def test_hub_config_keys(reference, model, tmp_path):
    def publish(raw):
        scaling = raw["rope_scaling"] or {}
        part = (reference.model.config.rope_parameters | scaling)["partial_rotary_factor"]
        scaling.pop("partial_rotary_factor", None)
        return raw | {"partial_rotary_factor": part}

    check_hub_config(reference, model, tmp_path / "old", publish)


AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM = AIR | {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}


@pytest.mark.parametrize(
    ("raw", "total", "active", "stored"),
    [
        pytest.param(AIR, 106e9, 13.4e9, 110_468_824_832, id="4.5-Air"),
        pytest.param(GLM, 355e9, 33.6e9, 358_337_791_296, id="4.5"),
    ],
)
def test_flagships(raw, total, active, stored, tmp_path):
    """Totals are the published ones; what the checkpoints hold, draft layers included, agrees to the last element."""
    info = check_flagship(raw, tmp_path, total=total, active=active)
    dense, sparse = info.groups
    assert (dense.experts, sparse.experts, sparse.top_k) == (0, raw["n_routed_experts"], 8)
    assert (sparse.shared_width, sparse.shared_slots) == (raw["moe_intermediate_size"], 1)
    assert count_stored(glm4_moe, layer_params, raw) == stored
    config = glm4_moe.parse_config(raw)
    assert (config.decoder.rope.rotary_size, config.attention.head_size, config.biased) == (64, 128, "qkv")
    assert (config.decoder.draft_layers, sum(not sparse for sparse in config.sparse_layers)) == (
        1,
        raw["first_k_dense_replace"],
    )
    assert find_architecture(raw) is find_architecture({"model_type": "glm4_moe"}) is glm4_moe


def test_absent_keys_take_the_familys_defaults():
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings")
    raw = {key: AIR[key] for key in kept} | {"num_attention_heads": 32}
    nulls = dict.fromkeys(set(AIR) - set(kept) - {"architectures", "torch_dtype"})
    for given in (raw, raw | nulls):
        config = glm4_moe.parse_config(given)
        assert (config.decoder.eps, config.attention.eps) == (1e-5, 1e-5)
        assert (config.decoder.rope.theta, config.decoder.rope.rotary_size) == (1e4, 64)
        assert (config.attention.head_size, config.attention.kv_heads) == (128, 32)
        assert (config.biased, config.head_norms, config.decoder.tied) == ("", False, False)
        assert (config.decoder.draft_layers, config.sparse_layers) == (1, (False, *[True] * 45))
        router = config.router
        assert (router.groups, router.groups_kept, router.scale, router.renormalize) == (1, 1, 1.0, True)
        assert config.shared.slots == 1


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"mlp_bias": True}, NotImplementedError, "mlp_bias=True is not implemented; implemented: False"),
        ({"moe_layer_freq": 2}, NotImplementedError, "moe_layer_freq=2 is not implemented; implemented: 1"),
        ({"scoring_func": "softmax"}, NotImplementedError, "scoring_func='softmax' is not .*; implemented: 'sigmoid'"),
        ({"topk_method": "greedy"}, NotImplementedError, "topk_method='greedy' is not .*; implemented: 'noaux_tc'"),
        ({"rope_scaling": {"type": "linear"}}, NotImplementedError, "rope type 'linear' is unknown"),
        ({"partial_rotary_factor": 1.5}, ValueError, r"partial_rotary_factor must be in 1e-30..1, got 1.5"),
        ({"n_routed_experts": None}, ValueError, "n_routed_experts must be an integer >= 1, got None"),
        ({"num_experts_per_tok": 129}, ValueError, "num_experts_per_tok=129 must be in 1..n_routed_experts=128"),
        ({"n_group": 3}, ValueError, "n_group=3 must divide n_routed_experts=128"),
        ({"num_key_value_heads": 7}, ValueError, "num_attention_heads=96 must be a multiple of num_key_value_heads=7"),
        ({"attention_bias": 1}, ValueError, "attention_bias must be true or false, got 1"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        glm4_moe.parse_config(AIR | change)
