"""models/qwen3_5_moe.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.checkpoint import read_config
from fmoe.loading import named_tensors
from fmoe.model import text_config
from fmoe.models import qwen3_5_moe

from ..fp8_checkpoints import write_checkpoint
from .conftest import Reference, randomize_
from .parity import (
    V,
    assert_equal_logits,
    check_bfloat16,
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
