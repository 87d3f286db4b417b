"""A Qwen3-Next of four layers with random weights, written once for both libraries to load."""

from pathlib import Path

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

STD = 0.1  # logits of order 1 to 10, so that greedy tokens seldom hang on a tie
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_tiny_model(folder: Path, /, *, seed: int = 0) -> None:
    """Write config.json and float32 safetensors: three DeltaNet layers, then one of attention."""
    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=rng) * STD
            param.copy_(noise if param.dim() > 1 else param + noise)
    model.save_pretrained(folder)
