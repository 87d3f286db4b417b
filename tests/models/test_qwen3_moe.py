"""models/qwen3_moe.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.functional.moe import MoEParams
from fmoe.models import qwen3_moe

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

F, S = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
BASE = {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "num_experts": 60,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
}
VARIANTS = {
    "plain": {},
    "mixed": {
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "rope_parameters": YARN,
    },
    "yarn-mscale": {
        "num_experts": 5,
        "num_experts_per_tok": 5,
        "tie_word_embeddings": True,
        "rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6},
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(Qwen3MoeConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["mixed"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


@pytest.mark.parametrize("variant", ["mixed"], scope="module")
def test_kinds_of_layers(reference, model):
    """Layer i is sparse where (i + 1) % 2 == 0 and i is not listed; all of them slide."""
    assert model.config.sparse_layers == (False, True, False, False, False, True)
    assert [isinstance(layer.mlp, MoEParams) for layer in model.params.layers] == [*model.config.sparse_layers]
    assert model.config.decoder.layer_kinds == (S,) * 6
    assert model.config.decoder.window == 7


def test_norms_and_biases_are_loaded(variant, reference, model):
    stored = load_file(reference.folder / "model.safetensors")
    heads = (BASE | VARIANTS[variant])["num_attention_heads"]
    for i, layer in enumerate(model.params.layers):
        base = f"model.layers.{i}.self_attn"
        assert torch.equal(layer.mixer.norm_HC[:heads], stored[f"{base}.q_norm.weight"].expand(heads, -1))
        assert torch.equal(layer.mixer.norm_HC[heads], stored[f"{base}.k_norm.weight"])
        if variant == "mixed":
            assert torch.equal(layer.mixer.bias_N, torch.cat([stored[f"{base}.{name}_proj.bias"] for name in "qkv"]))
            assert torch.equal(layer.mixer.bias_out_D, stored[f"{base}.o_proj.bias"])
            assert layer.mixer.bias_out_D.abs().max() > 0.1
        else:
            assert layer.mixer.bias_N is layer.mixer.bias_out_D is None


def test_bfloat16_follows_the_reference(reference):
    check_bfloat16(reference)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(60, 8), (7, 7)])
def test_router(experts, k, norm, rng):
    config = Qwen3MoeConfig(**BASE | {"num_experts": experts, "num_experts_per_tok": k, "norm_topk_prob": norm})
    rule = qwen3_moe.parse_config(config.to_dict()).router
    check_router(Qwen3MoeTopKRouter(config), rule, 36, rng)


def test_hub_config_keys(reference, model, tmp_path):
    """Published files count ``num_experts``, and transformers 4 wrote max_window_layers and a window not in use."""

    def change(raw):
        raw["num_experts"] = raw.pop("num_local_experts")
        return to_hub_keys(raw) | {"max_window_layers": 2}

    old = fmoe.load(rewrite_config(reference, tmp_path / "old", change), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
A22B = A3B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}


@pytest.mark.parametrize(
    ("raw", "total", "active"),
    [pytest.param(A3B, 30.5e9, 3.35e9, id="30B-A3B"), pytest.param(A22B, 235.1e9, 22.2e9, id="235B-A22B")],
)
def test_flagships(raw, total, active, tmp_path):
    info = check_flagship(raw, tmp_path, total=total, active=active)
    [group] = info.groups
    assert (group.kind, group.experts, group.top_k, group.shared_width) == (F, 128, 8, 0)
    assert find_architecture(raw).parse_config(raw).router.renormalize


def test_long_context_as_the_model_card_advises():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = qwen3_moe.parse_config(A3B | {"rope_scaling": scaling}).decoder.rope
    assert (rope.rotary_size, rope.theta, rope.factor, rope.original_context) == (128, 1e6, 4.0, 32768)
    assert rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1


def test_absent_keys_take_the_familys_defaults():
    absent = ("rms_norm_eps", "rope_theta", "norm_topk_prob", "sliding_window", "attention_bias", "mlp_only_layers")
    bare = {key: value for key, value in A3B.items() if key not in (*absent, "decoder_sparse_step")}
    config = qwen3_moe.parse_config(bare | {"use_sliding_window": True})
    assert (config.decoder.eps, config.attention.eps, config.decoder.rope.theta) == (1e-6, 1e-6, 1e4)
    assert (config.decoder.window, set(config.decoder.layer_kinds)) == (4096, {S})
    assert all(config.sparse_layers)
    assert not config.router.renormalize
    assert config.biased == ""
    assert find_architecture({"model_type": "qwen3_moe"}) is qwen3_moe
    assert qwen3_moe.parse_config(A3B | {"use_sliding_window": True}).decoder.window is None


@pytest.mark.parametrize("experts", [0, 4], ids=["no experts", "all layers listed"])
def test_without_sparse_layers(experts, make_reference):
    dense = {"num_experts": experts, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1] if experts else []}
    reference = make_reference(Qwen3MoeConfig(**BASE | dense))
    ids = draw_ids(17)
    assert_equal_logits(one_pass(fmoe.load(reference.folder, compile=False), ids), reference.logits(ids))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not implemented"),
        ({"rope_scaling": {"type": "llama3"}}, NotImplementedError, "rope type 'llama3' is unknown"),
        ({"layer_types": [F, S] * 24}, NotImplementedError, "not implemented for qwen3_moe; implemented: use_sliding"),
        ({"num_local_experts": 64}, ValueError, "num_experts=128 and num_local_experts=64 must be equal"),
        ({"attention_bias": 1}, ValueError, "attention_bias must be true or false, got 1"),
        ({"mlp_only_layers": "3"}, ValueError, "mlp_only_layers must be a list of integers, got '3'"),
        ({"num_experts_per_tok": 129}, ValueError, "num_experts_per_tok=129 must be in 1..num_experts=128"),
        ({"num_key_value_heads": 5}, ValueError, "num_attention_heads=32 must be a multiple of num_key_value_heads=5"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        qwen3_moe.parse_config(A3B | change)
