"""models/qwen2_moe.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.functional.moe import MoEParams
from fmoe.models import qwen2_moe

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
BASE = {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 48,  # 4 F
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
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 18,  # 1.5 F
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "layer-types": {
        "num_hidden_layers": 3,
        "head_dim": 10,
        "num_experts": 5,
        "shared_expert_intermediate_size": 12,  # F
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": [F, S, S],
        "tie_word_embeddings": True,
    },
    "no-shared": {"num_experts": 9, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 0},
}
SLOTS = {"plain": 4, "mixed": 0, "layer-types": 1, "no-shared": 0}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(Qwen2MoeConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["mixed"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


@pytest.mark.parametrize("variant", ["mixed"], scope="module")
def test_kinds_of_layers(reference, model):
    """Layer i is sparse where (i + 1) % 2 == 0 and i is not listed; it slides where i is even and below 4."""
    assert model.config.sparse_layers == (False, True, False, False, False, True)
    assert [isinstance(layer.mlp, MoEParams) for layer in model.params.layers] == [*model.config.sparse_layers]
    assert model.config.decoder.layer_kinds == (S, F, S, F, F, F)
    assert model.config.decoder.window == 6


def test_biases_are_loaded(variant, reference, model):
    stored = load_file(reference.folder / "model.safetensors")
    for i, layer in enumerate(model.params.layers):
        if variant == "layer-types":
            assert layer.mixer.bias_N is None
            continue
        parts = [stored[f"model.layers.{i}.self_attn.{name}_proj.bias"] for name in "qkv"]
        assert all(part.abs().max() > 0.1 for part in parts)
        assert torch.equal(layer.mixer.bias_N, torch.cat(parts))
        assert layer.mixer.bias_out_D is None


def test_fused_and_separate_give_the_same_logits(variant, reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)
    width = (BASE | VARIANTS[variant])["shared_expert_intermediate_size"]
    assert (model.config.shared.slots, separate.config.shared.slots) == (SLOTS[variant], 0)
    assert model.config.shared.width == separate.config.shared.width == width
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)
    sparse = [layer.mlp for layer in separate.params.layers if isinstance(layer.mlp, MoEParams)]
    assert sparse and all((mlp.shared is None) == (width == 0) for mlp in sparse)


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_four_slots_are_cut_from_the_wide_expert(reference, model):
    """Slots 60..63 hold the checkpoint's numbers, byte for byte, and one gate row serves all four."""
    stored = load_file(reference.folder / "model.safetensors")
    for i, layer in enumerate(model.params.layers):
        base = f"model.layers.{i}.mlp.shared_expert"
        assert torch.equal(layer.mlp.w_router_ED[60:], stored[f"{base}_gate.weight"])
        for slot in range(4):
            part = slice(12 * slot, 12 * (slot + 1))
            gate_up = [stored[f"{base}.{name}_proj.weight"][part] for name in ("gate", "up")]
            assert torch.equal(layer.mlp.w_gate_up_EPD[60 + slot], torch.cat(gate_up))
            assert torch.equal(layer.mlp.w_down_EDF[60 + slot], stored[f"{base}.down_proj.weight"][:, part])


def test_a_width_that_does_not_fit_is_logged_once(variant, reference, caplog):
    with caplog.at_level(logging.INFO, logger="fmoe"):
        fmoe.load(reference.folder, compile=False)
    lines = [record.getMessage() for record in caplog.records if "shared experts" in record.getMessage()]
    reason = "shared width 18 is not a multiple of the expert width 12"
    assert lines == ([f"shared experts: separate: {reason}"] if variant == "mixed" else [])
    if variant == "mixed":
        with pytest.raises(ValueError, match=f"'fused' is not possible: {reason}; use 'auto' or 'separate'"):
            fmoe.load(reference.folder, shared_experts="fused")


def test_bfloat16_follows_the_reference(reference):
    check_bfloat16(reference)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(60, 4), (7, 7)])
def test_router(experts, k, norm, rng):
    config = Qwen2MoeConfig(**BASE | {"num_experts": experts, "num_experts_per_tok": k, "norm_topk_prob": norm})
    rule = qwen2_moe.parse_config(config.to_dict()).router
    check_router(Qwen2MoeTopKRouter(config), rule, 36, rng)


def test_hub_config_keys(variant, reference, model, tmp_path):
    """Published files have no layer_types, and leave out qkv_bias where it is true."""

    def change(raw):
        dropped = ("layer_types",) * (variant != "layer-types") + ("qkv_bias",) * raw["qkv_bias"]
        return {key: value for key, value in to_hub_keys(raw).items() if key not in dropped}

    old = fmoe.load(rewrite_config(reference, tmp_path / "old", change), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


QWEN15 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
}


def test_flagship(tmp_path):
    info = check_flagship(QWEN15, tmp_path, total=14.3e9, active=2.69e9)
    [group] = info.groups
    assert (group.kind, group.experts, group.top_k, group.width) == (F, 60, 4, 1408)
    assert (group.shared_width, group.shared_slots) == (5632, 4)
    assert find_architecture(QWEN15) is find_architecture({"model_type": "qwen2_moe"}) is qwen2_moe
    assert not qwen2_moe.parse_config(QWEN15).router.renormalize


def test_absent_keys_take_the_familys_defaults():
    absent = ("rms_norm_eps", "rope_theta", "norm_topk_prob", "sliding_window", "max_window_layers")
    bare = {key: value for key, value in QWEN15.items() if key not in (*absent, "decoder_sparse_step")}
    config = qwen2_moe.parse_config(bare | {"use_sliding_window": True, "num_hidden_layers": 30})
    assert (config.decoder.eps, config.attention.eps, config.decoder.rope.theta) == (1e-6, 1e-6, 1e4)
    assert config.decoder.window == 4096
    assert config.decoder.layer_kinds == (S, F) * 14 + (F, F)
    assert config.sparse_layers == (True,) * 30
    assert not config.router.renormalize
    assert config.biased == "qkv"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias=True is not implemented"),
        ({"rope_scaling": {"type": "dynamic"}}, NotImplementedError, "rope type 'dynamic' is unknown"),
        (
            {"layer_types": [F] * 23 + ["odd"]},
            NotImplementedError,
            r"layer_types \['odd'\] are unknown; known: full_at",
        ),
        ({"layer_types": [F] * 3}, ValueError, "layer_types must list num_hidden_layers=24 kinds, got"),
        ({"layer_types": [F, S] * 12}, ValueError, "layer_types has sliding_attention, but use_sliding_window is not"),
        (
            {"use_sliding_window": True, "sliding_window": 0},
            ValueError,
            "sliding_window must be an integer >= 1, got 0",
        ),
        ({"decoder_sparse_step": 0}, ValueError, "decoder_sparse_step must be an integer >= 1, got 0"),
        ({"num_experts_per_tok": 61}, ValueError, "num_experts_per_tok=61 must be in 1..num_experts=60"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        qwen2_moe.parse_config(QWEN15 | change)
