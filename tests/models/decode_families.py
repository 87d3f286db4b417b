"""Small configs of every family that has kernels for one token, with random weights."""

import json

import fmoe

COMMON = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {"head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 5, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
FAMILIES = {
    "qwen3_next": QWEN | DELTA,
    "qwen3_5_moe_text": QWEN | DELTA,
    "qwen3_moe": QWEN | {"mlp_only_layers": [1]},
    "qwen2_moe": QWEN | {"qkv_bias": True, "shared_expert_intermediate_size": 36, "num_key_value_heads": 3},
    "mixtral": {"head_dim": 10, "num_local_experts": 3, "sliding_window": 4},
    "deepseek_v2": {
        "num_key_value_heads": 6, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_routed_experts": 5, "n_shared_experts": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "glm4_moe": ROUTED | {"head_dim": 12, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": ROUTED | {
        "num_key_value_heads": 6, "q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
    "dots1": ROUTED | {"head_dim": 10, "sliding_window": 4, "max_window_layers": 1, "n_shared_experts": 2},
    "granitemoeshared": {
        "head_dim": 10, "num_local_experts": 5, "shared_intermediate_size": 80, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 6.0, "tie_word_embeddings": True,
    },
    "hunyuan_v1_moe": {"head_dim": 12, "num_experts": 5, "rope_scaling": {"type": "dynamic", "alpha": 50.0}},
    "ernie4_5_moe": {
        "num_hidden_layers": 1, "head_dim": 10, "moe_num_experts": 5, "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 0,
    },
    "olmoe": {"num_hidden_layers": 1, "head_dim": 10, "num_experts": 5, "clip_qkv": 0.7},
}  # fmt: skip


def load_random(folder, name, /, **options):
    """Write the config and load it with random weights, the same ones each time."""
    (folder / "config.json").write_text(json.dumps(COMMON | FAMILIES[name] | {"model_type": name}))
    return fmoe.load(folder, **{"device": "cpu", "weights": "random", "compile": False} | options)
