"""Small random checkpoints of every family, written by what its ``build_params`` asks for."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from fmoe.architectures import find_architecture

V = 61
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6,
}
MLA = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
TINY = {
    "mixtral": {
        "model_type": "mixtral",
        **ATTENTION,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **ATTENTION,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 96,  # four slots behind one gate
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **ATTENTION,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        **MLA,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **MLA,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **MLA,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


class Asked:
    """A Fill that keeps the shape of every checkpoint tensor it is asked for."""

    names = frozenset()

    def __init__(self):
        self.shapes = {}

    def __call__(self, shape, pieces, /, **options):
        for piece in pieces:
            self.shapes[piece.name] = tuple(piece.shape)
        return torch.empty(shape, device="meta")

    weight = __call__


def write_checkpoint(folder: Path, family: str, /, *, seed: int = 0, **changes) -> Path:
    """Write one of TINY: matrices with a spread that lets every layer count, vectors about one, biases about zero."""
    raw = COMMON | TINY[family] | changes
    architecture = find_architecture(raw)
    asked = Asked()
    architecture.build_params(asked, architecture.parse_config(raw, shared_experts="separate"))
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in asked.shapes.items():
        noise = torch.randn(shape, generator=rng)
        if name.endswith("bias"):
            tensors[name] = 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = 1.0 + 0.1 * noise if not name.endswith(("A_log", "dt_bias")) else noise - 1.0
        else:
            tensors[name] = noise * (1.0 if "embed" in name else 2.0 / shape[-1] ** 0.5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
