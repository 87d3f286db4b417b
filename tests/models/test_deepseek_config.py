"""Published config.json files of DeepSeek and Kimi: what is read from them and what is refused."""

import pytest
import torch

from fmoe.architectures import find_architecture
from fmoe.models import deepseek_v2, deepseek_v3

from .parity import check_flagship

ROPE = {"rope_theta": 10000.0, "max_position_embeddings": 163840}
SCALING = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
COMMON = ROPE | MLA | {"hidden_act": "silu", "attention_bias": False, "moe_layer_freq": 1, "rms_norm_eps": 1e-6}
V2 = COMMON | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "rope_scaling": SCALING | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
LITE = V2 | {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
V3 = V2 | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": SCALING | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}
KIMI = V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": SCALING | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize(
    ("raw", "total", "active", "scale", "slots"),
    [
        pytest.param(LITE, 15.7e9, 2.66e9, 0.1147214, 2, id="V2-Lite"),
        pytest.param(V2, 235.7e9, 21.4e9, 0.1147214, 2, id="V2"),
        pytest.param(V3, 671.0e9, 37.5e9, 0.1352338, 1, id="V3"),
        pytest.param(KIMI, 1026.4e9, 32.9e9, 0.1308608, 1, id="Kimi-K2"),
    ],
)
def test_flagships(raw, total, active, scale, slots, tmp_path):
    """Totals are the published ones; active parameters those of a token, embedding and head included."""
    info = check_flagship(raw, tmp_path, total=total, active=active)
    config = find_architecture(raw).parse_config(raw)
    assert info.family == ("deepseek_v2" if raw["model_type"] == "deepseek_v2" else "deepseek_v3")
    assert sum(part.active for part in info.parts) == info.active
    assert config.attention.scale == pytest.approx(scale, abs=5e-8)
    assert config.decoder.rope.attention_factor == 1.0
    assert config.shared.slots == slots
    assert (config.decoder.rope.factor, config.decoder.rope.original_context) == (raw["rope_scaling"]["factor"], 4096)
    state = find_architecture(raw).init_state(config, 1, 64, dtype=torch.bfloat16, device=torch.device("meta"))
    assert {tuple(cache.latent_BMR.shape) for cache in state.caches} == {(1, 64, 576)}


def test_architectures_decide_before_model_type():
    assert find_architecture(KIMI) is deepseek_v3
    assert find_architecture(KIMI | {"model_type": "unheard_of"}) is deepseek_v3
    assert find_architecture(KIMI | {"architectures": None}) is deepseek_v3
    assert find_architecture(V2 | {"architectures": None}) is deepseek_v2


BOTH = [pytest.param(LITE, id="V2"), pytest.param(V3, id="V3")]


@pytest.mark.parametrize("raw", BOTH)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("moe_layer_freq", 2),
        ("topk_method", "greediest"),
        ("scoring_func", "tanh"),
        ("num_key_value_heads", 3),
    ],
)
def test_values_not_implemented_are_refused_by_name(raw, key, value):
    with pytest.raises(NotImplementedError, match=f"config.json: {key}={value!r} is not implemented"):
        find_architecture(raw).parse_config(raw | {key: value})


def test_each_version_refuses_the_others_routing():
    for raw, changes in (
        (LITE, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}),
        (V3, {"scoring_func": "softmax", "topk_method": "group_limited_greedy"}),
    ):
        for key, value in changes.items():
            with pytest.raises(NotImplementedError, match=f"{key}={value!r} is not implemented; implemented: "):
                find_architecture(raw).parse_config(raw | {key: value})


@pytest.mark.parametrize("raw", BOTH)
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rope_scaling": SCALING | {"type": "linear"}}, NotImplementedError, "rope type 'linear' is unknown"),
        ({"n_routed_experts": None}, ValueError, "n_routed_experts must be an integer >= 1, got None"),
        (
            {"num_experts_per_tok": 65, "n_routed_experts": 64},
            ValueError,
            "num_experts_per_tok=65 must be in 1..n_routed_experts=64",
        ),
        ({"qk_rope_head_dim": 63}, ValueError, "qk_rope_head_dim must be even, got 63"),
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads must be an integer >= 1, got 0"),
    ],
)
def test_values_that_cannot_be(raw, change, error, match):
    with pytest.raises(error, match=match):
        find_architecture(raw).parse_config(raw | change)


def test_groups_that_cannot_be():
    with pytest.raises(ValueError, match="n_group must be an integer >= 1, got None"):
        deepseek_v3.parse_config(V3 | {"n_group": None})
    with pytest.raises(ValueError, match="n_group=7 must divide n_routed_experts=160"):
        deepseek_v2.parse_config(V2 | {"n_group": 7})
    with pytest.raises(
        ValueError, match=r"topk_group=1 of n_group=80 .* 2 of n_routed_experts=160, fewer than num_exp"
    ):
        deepseek_v2.parse_config(V2 | {"n_group": 80, "topk_group": 1})
    with pytest.raises(ValueError, match="n_group=256 leaves 1 expert per group"):
        deepseek_v3.parse_config(V3 | {"n_group": 256, "topk_group": 8})


def test_absent_keys_take_the_families_defaults():
    bare = {key: value for key, value in V3.items() if key not in ("routed_scaling_factor", "norm_topk_prob")}
    assert deepseek_v3.parse_config(bare).router.scale == 2.5
    assert deepseek_v3.parse_config(bare).router.renormalize
    bare = {key: value for key, value in V2.items() if key not in ("routed_scaling_factor", "topk_method")}
    assert (deepseek_v2.parse_config(bare).router.scale, deepseek_v2.parse_config(bare).router.groups) == (1.0, 1)
    assert not deepseek_v3.parse_config(V3).decoder.tied
