"""models/olmoe.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.models import olmoe

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
    to_hub_keys,
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

BASE = {
    "vocab_size": V,
    "hidden_size": 60,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
VARIANTS = {
    "plain": {},
    "clipped": {"clip_qkv": 0.8, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 6},
    "yarn": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "num_experts": 5,
        "num_experts_per_tok": 5,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(OlmoeConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["clipped"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def test_bfloat16_follows_the_reference(reference):
    check_bfloat16(reference)


def test_each_channel_has_a_norm_weight_of_its_own(reference, model):
    stored, heads = load_file(reference.folder / "model.safetensors"), model.config.attention.heads
    for i, layer in enumerate(model.params.layers):
        for name, rows_HC in (("q", layer.mixer.norm_HC[:heads]), ("k", layer.mixer.norm_HC[heads:])):
            assert torch.equal(rows_HC.flatten(), stored[f"model.layers.{i}.self_attn.{name}_norm.weight"])


def keep_output(kept, module, args, output):
    kept.append(output.clone())  # it is clipped in place


@pytest.mark.parametrize("variant", ["clipped"], scope="module")
def test_a_clip_changes_q_k_and_v(variant, reference, model, tmp_path):
    """Each of the three has values beyond it, so that the logits of the reference hold it to the test."""
    wide = fmoe.load(rewrite_config(reference, tmp_path / "wide", lambda raw: raw | {"clip_qkv": None}), compile=False)
    assert wide.config.attention.clip is None and model.config.attention.clip == 0.8
    ids = draw_ids(17)
    assert (one_pass(wide, ids) - one_pass(model, ids)).abs().max() > 0.1
    seen, modules = [], dict(reference.model.named_modules())
    hooks = [
        modules[f"model.layers.0.self_attn.{name}"].register_forward_hook(partial(keep_output, seen))
        for name in ("q_norm", "k_norm", "v_proj")
    ]
    reference.logits(ids)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 3
    assert all((value.abs() > 0.8).any() and (value.abs() < 0.8).any() for value in seen)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(7, 1), (7, 3), (64, 8), (5, 5)])
def test_router(experts, k, norm, rng):
    changes = {"num_experts": experts, "num_experts_per_tok": k, "norm_topk_prob": norm}
    config = OlmoeConfig(**BASE | changes)
    check_router(OlmoeTopKRouter(config), olmoe.parse_config(config.to_dict()).router, 60, rng)


def test_hub_config_keys(reference, model, tmp_path):
    old = fmoe.load(rewrite_config(reference, tmp_path / "old", to_hub_keys), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


PUBLISHED = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 50304,
}


def test_flagship(tmp_path):
    info = check_flagship(PUBLISHED, tmp_path, total=6.92e9, active=1.28e9)
    [group] = info.groups
    assert (group.kind, group.mlp, group.experts, group.top_k, group.width) == (
        "full_attention", "sparse", 64, 8, 1024,
    )  # fmt: skip
    assert (group.shared_width, group.shared) == (0, "no shared expert")
    assert find_architecture(PUBLISHED) is find_architecture({"model_type": "olmoe"}) is olmoe


def test_absent_keys_take_the_familys_defaults():
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 9}
    config = olmoe.parse_config({key: PUBLISHED[key] for key in kept} | sizes)
    assert (config.decoder.eps, config.attention.eps, config.decoder.rope.theta) == (1e-5, 1e-5, 1e4)
    assert (config.decoder.tied, config.biased, config.router.renormalize) == (False, "", False)
    assert (config.attention.head_size, config.attention.kv_heads, config.attention.clip) == (128, 16, None)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"sliding_window": 16}, NotImplementedError, "sliding_window=16 is not implemented; implemented: None"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not implemented"),
        ({"clip_qkv": 0}, ValueError, "clip_qkv must be in 1e-30..1e\\+30, got 0"),
        ({"clip_qkv": "8"}, ValueError, "clip_qkv must be a number, got '8'"),
        ({"num_experts": 0}, ValueError, "num_experts must be an integer >= 1, got 0"),
        ({"num_local_experts": 8}, ValueError, "num_experts=64 and num_local_experts=8 must be equal"),
        ({"num_experts_per_tok": 65}, ValueError, "num_experts_per_tok=65 must be in 1..num_experts=64"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size must be an integer >= 1, got 0"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        olmoe.parse_config(PUBLISHED | change)
