"""Every key of a config.json, replaced by every kind of wrong value: read, or refused with the key's name."""

import json
import math

import pytest

from fmoe.architectures import KNOWN, find_architecture
from fmoe.functional.rotary import rotary_frequencies

ABSENT = object()
VALUES = {
    "absent": ABSENT,
    "null": None,
    "0": 0,
    "-1": -1,
    "1": 1,
    "1.5": 1.5,
    "x": "x",
    "list": [],
    "object": {},
    "list of 5": [5],
    "true": True,
    "false": False,
    "10**19": 10**19,
    "-10**19": -(10**19),
    "2**31-1": 2**31 - 1,
    "10**400": 10**400,
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
    "1e-320": 1e-320,
    "1e308": 1e308,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "attention_factor": 1.5,
    "truncate": True,
}
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "num_mtp_layers": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "rope_parameters": YARN,
    "rope_scaling": {"type": "yarn", "factor": 2.0},
    "partial_rotary_factor": 1.0,
}
QWEN = COMMON | {
    "head_dim": 16,
    "num_experts": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 3,
    "layer_types": ["sliding_attention"] * 4,
    "qkv_bias": True,
}
NEXT = {
    "use_sliding_window": False,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "n_shared_experts": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope_interleave": True,
}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "mlp_bias": False,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK = COMMON | ROUTED | LATENT
V2 = {"topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False}
V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
FLASH = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"} | V3
FLASH |= {"mlp_layer_types": ["dense", *["sparse"] * 3]}
GLM = {"attention_bias": True, "use_qk_norm": True, "head_dim": 16, "partial_rotary_factor": 0.5}
DOTS = {
    "scoring_func": "noaux_tc",
    "head_dim": 16,
    "sliding_window": 16,
    "use_sliding_window": False,
    "max_window_layers": 3,
    "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
}
GRANITE = {
    "num_local_experts": 8,
    "shared_intermediate_size": 80,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 6.0,
}
HUNYUAN = {
    "head_dim": 16,
    "attention_head_dim": 16,
    "num_experts": 8,
    "moe_topk": [2] * 4,
    "moe_intermediate_size": [40] * 4,
    "num_shared_expert": [1] * 4,
    "use_qk_norm": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
ERNIE = {
    "moe_num_experts": 8,
    "num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
    "use_bias": False,
    "moe_gate_act": "softmax",
    "moe_use_aux_free": True,
    "moe_norm_gate_logits": True,
}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 8,
    "attention_bias": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
FIVE = {
    "mlp_only_layers": [],
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
}
FAMILIES = {
    "mixtral": COMMON | {"num_local_experts": 8, "head_dim": 8, "sliding_window": 16},
    "qwen2_moe": QWEN,
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN | NEXT,
    "qwen3_5_moe_text": QWEN | NEXT | FIVE,
    "deepseek_v2": DEEPSEEK | V2,
    "deepseek_v3": DEEPSEEK | V3,
    "glm4_moe": COMMON | ROUTED | V3 | GLM,
    "glm4_moe_lite": FLASH,
    "dots1": COMMON | ROUTED | V3 | DOTS,
    "granitemoeshared": COMMON | GRANITE,
    "hunyuan_v1_moe": COMMON | HUNYUAN,
    "ernie4_5_moe": COMMON | ERNIE,
    "olmoe": COMMON | {"num_experts": 8, "norm_topk_prob": False, "clip_qkv": 8.0},
    "gpt_oss": COMMON | GPT_OSS,
}


def read(raw):
    """Do what loading does with config.json before the first weight; the rotation is computed on the way."""
    config = find_architecture(raw).parse_config(raw)
    assert rotary_frequencies(config.decoder.rope).isfinite().all()
    assert math.isfinite(config.decoder.rope.attention_factor)
    return config


def replaced(raw, key, value):
    kept = {name: old for name, old in raw.items() if name != key}
    return kept if value is ABSENT else kept | {key: value}


def assert_read_or_named(raw, key, value, inside=None):
    changed = replaced(raw, key, value) if inside is None else raw | {inside: replaced(raw[inside], key, value)}
    try:
        changed = json.loads(json.dumps(changed))
        read(changed)
    except (ValueError, NotImplementedError) as error:
        assert key in str(error) or (key == "rope_type" and "rope type" in str(error)), f"{key}={value!r}: {error}"
        assert len(str(error)) < 400


def test_the_families_are_all_here():
    for name, raw in FAMILIES.items():
        assert read(raw | {"model_type": name}) is not None
    assert len(FAMILIES) == len(KNOWN)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_each_key_is_read_or_refused_by_name(name, value):
    raw = FAMILIES[name] | {"model_type": name}
    for key in raw:
        assert_read_or_named(raw, key, value)
    assert_read_or_named(raw, "architectures", value)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("inside", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_each_rope_key_is_read_or_refused_by_name(name, inside, value):
    rope = YARN | {"partial_rotary_factor": FAMILIES[name]["partial_rotary_factor"]}
    rope |= {"type": rope["rope_type"]} if inside == "rope_scaling" else {}
    raw = FAMILIES[name] | {"model_type": name, "rope_parameters": None, "rope_scaling": None, inside: rope}
    for key in rope:
        assert_read_or_named(raw, key, value, inside)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("value", [-1, 1.5, "x", [], {}, True, 10**19, 10**400, math.nan, math.inf], ids=repr)
def test_what_no_model_has_is_refused(name, value):
    """The sizes that every family reads: none of these values passes."""
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        with pytest.raises(ValueError, match=f"config.json: {key} must be an integer"):
            read(replaced(FAMILIES[name] | {"model_type": name}, key, value))
    if value not in (1.5, 10**19):  # a base of the rotation may be these
        with pytest.raises(ValueError, match=r"config.json: rope_theta must be "):
            read(FAMILIES[name] | {"model_type": name, "rope_parameters": {"rope_theta": value}})
    with pytest.raises(ValueError, match=r"config.json: rms_norm_eps must be "):
        read(replaced(FAMILIES[name] | {"model_type": name}, "rms_norm_eps", value))


@pytest.mark.parametrize("name", FAMILIES)
def test_zero_is_refused_where_it_makes_no_sense(name):
    raw = FAMILIES[name] | {"model_type": name}
    meaningful = {"rms_norm_eps", "first_k_dense_replace", "shared_expert_intermediate_size", "mscale"}
    meaningful |= {
        "shared_intermediate_size",
        "n_shared_experts",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "max_window_layers",
        "moe_num_shared_experts",
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_norm_min",
    }
    meaningful |= {"num_experts"} if name in ("qwen2_moe", "qwen3_moe", "qwen3_next") else set()  # may all be dense
    unread = {"rope_theta"}  # rope_parameters has its own
    unread |= {"sliding_window"} if name in ("qwen3_next", "qwen3_5_moe_text") else set()
    unread |= {"intermediate_size"} if name == "qwen3_5_moe_text" else set()  # no layer is dense
    unread |= {"partial_rotary_factor"} if name.startswith("deepseek") else set()
    numbers = [key for key, value in raw.items() if type(value) in (int, float)]
    for key in sorted({*numbers} - meaningful - unread):
        with pytest.raises((ValueError, NotImplementedError), match=key):
            read(raw | {key: 0})
    for key in sorted({*numbers} & meaningful):
        read(raw | {key: 0})
