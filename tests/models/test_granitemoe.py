"""models/granitemoe.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import GraniteMoeConfig, GraniteMoeSharedConfig
from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.checkpoint import read_config
from fmoe.models import granitemoe

from ..fp8_checkpoints import dequantize_tensors, quantize_tensors, write_checkpoint
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
    "hidden_size": 36,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.6,
}
PLAIN = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0)
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "plain": (GraniteMoeConfig, {}),
    "wide": (GraniteMoeSharedConfig, {"shared_intermediate_size": 40, "tie_word_embeddings": True}),  # 2 F
    "apart": (  # 1.5 F
        GraniteMoeSharedConfig,
        {"shared_intermediate_size": 30, "num_local_experts": 5, "num_experts_per_tok": 5, "rope_parameters": YARN},
    ),
    "ones": (GraniteMoeSharedConfig, PLAIN | {"shared_intermediate_size": 20, "attention_bias": True}),
}
SLOTS = {"plain": 0, "wide": 2, "apart": 0, "ones": 1}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    kind, changes = VARIANTS[variant]
    return make_reference(kind(**BASE | changes))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["apart"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


@pytest.mark.parametrize("variant", ["wide", "ones"], scope="module")
def test_bfloat16_follows_the_reference(reference):
    check_bfloat16(reference)


@pytest.mark.parametrize("key", PLAIN)
@pytest.mark.parametrize("value", [0.01, 0.7, 2.0])
def test_each_multiplier(key, value, make_reference):
    """One at a time, other than 1: the logits follow the reference, and would not without the multiplier."""
    changes = PLAIN | {"shared_intermediate_size": 20, key: value}
    reference = make_reference(GraniteMoeSharedConfig(**BASE | changes))
    ids = draw_ids(33)
    found, expected = one_pass(fmoe.load(reference.folder, compile=False), ids), reference.logits(ids)
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
    without = make_reference(GraniteMoeSharedConfig(**BASE | PLAIN | {"shared_intermediate_size": 20}))
    assert (without.logits(ids) - expected).abs().max() > 1e-2


def test_fused_and_separate_give_the_same_logits(variant, reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)
    width = VARIANTS[variant][1].get("shared_intermediate_size", 0)
    assert (model.config.shared.slots, separate.config.shared.slots) == (SLOTS[variant], 0)
    assert model.config.shared.width == separate.config.shared.width == width
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)
    assert all((layer.mlp.shared is None) == (width == 0) for layer in separate.params.layers)


@pytest.mark.parametrize("variant", ["wide"], scope="module")
def test_slots_are_cut_from_the_wide_mlp(reference, model):
    """Slots 7 and 8 hold the checkpoint's numbers, byte for byte: gate rows first there, per slot here."""
    stored = load_file(reference.folder / "model.safetensors")
    for i, layer in enumerate(model.params.layers):
        gate_up = stored[f"model.layers.{i}.shared_mlp.input_linear.weight"]
        down = stored[f"model.layers.{i}.shared_mlp.output_linear.weight"]
        for slot in range(2):
            part = slice(20 * slot, 20 * (slot + 1))
            assert torch.equal(layer.mlp.w_gate_up_EPD[7 + slot], torch.cat((gate_up[:40][part], gate_up[40:][part])))
            assert torch.equal(layer.mlp.w_down_EDF[7 + slot], down[:, part])
        assert torch.equal(
            layer.mlp.w_gate_up_EPD[:7], stored[f"model.layers.{i}.block_sparse_moe.input_linear.weight"]
        )


def test_fused_is_refused_where_widths_differ(make_reference):
    kind, changes = VARIANTS["apart"]
    with pytest.raises(ValueError, match=r"'fused' is not possible: shared width 30 is not a multiple of .* 20; use"):
        fmoe.load(make_reference(kind(**BASE | changes)).folder, shared_experts="fused")


@pytest.mark.parametrize("part", ["shared_mlp", "block_sparse_moe"])
def test_experts_of_two_kinds_stay_apart(part, make_reference, tmp_path):
    """A shared MLP or routed experts alone in FP8 blocks cannot be rows of one stack."""
    kind, changes = VARIANTS["wide"]
    reference = make_reference(kind(**BASE | changes))
    tensors, config = load_file(reference.folder / "model.safetensors"), read_config(reference.folder)
    blocks = quantize_tensors(tensors, lambda name: f"{part}." in name and "router" not in name)
    assert any(name.endswith("_scale_inv") for name in blocks)
    folder = write_checkpoint(tmp_path / "blocks", blocks, config)
    plain = fmoe.load(write_checkpoint(tmp_path / "plain", dequantize_tensors(blocks), config), compile=False)
    model = fmoe.load(folder, dtype="float32", compile=False)
    assert all(layer.mlp.shared is not None for layer in model.params.layers)
    assert all(layer.mlp.shared is None for layer in plain.params.layers)
    ids = draw_ids(20)
    assert_equal_logits(one_pass(model, ids), one_pass(plain, ids))
    with pytest.raises(ValueError, match="'fused' is not possible: of the shared and the routed experts only one kind"):
        fmoe.load(folder, shared_experts="fused")


@pytest.mark.parametrize(("experts", "k"), [(7, 2), (8, 3), (60, 60)])
def test_router(experts, k, rng):
    config = GraniteMoeSharedConfig(**BASE | {"num_local_experts": experts, "num_experts_per_tok": k})
    rule = granitemoe.parse_config(config.to_dict()).router
    check_router(GraniteMoeSharedTopKRouter(config), rule, 36, rng)


def test_hub_config_keys(reference, model, tmp_path):
    old = fmoe.load(rewrite_config(reference, tmp_path / "old", to_hub_keys), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


GRANITE_3B = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 4096,
    "model_type": "granitemoe",
    "num_attention_heads": 24,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "output_router_logits": False,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}
SHARED_7B = GRANITE_3B | {
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "attention_multiplier": 0.0078125,
    "model_type": "granitemoeshared",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 62,
    "shared_intermediate_size": 1024,
    "vocab_size": 50257,
}


def test_flagships(tmp_path):
    """The 3.3 B of the first model's card, of which 800 M are active without the embedding."""
    info = check_flagship(GRANITE_3B, tmp_path, total=3.30e9, active=0.882e9)
    assert info.active_inner == pytest.approx(0.80e9, rel=0.01)
    [group] = info.groups
    assert (group.kind, group.experts, group.top_k, group.width) == ("full_attention", 40, 8, 512)
    assert (group.shared_width, group.shared_slots) == (0, 0)
    config = granitemoe.parse_config(GRANITE_3B)
    assert config.decoder.rope.attention_factor == pytest.approx((64 / 8**2 / 8) ** 0.5)
    assert config.decoder.eps == pytest.approx(1e-6 / 0.22**2)

    info = check_flagship(SHARED_7B, tmp_path, total=6.37e9, active=1.09e9)
    [group] = info.groups
    assert (group.experts, group.top_k, group.shared_width, group.shared_slots) == (62, 6, 1024, 2)


def test_absent_keys_take_the_familys_defaults():
    absent = ("rms_norm_eps", "rope_theta", "attention_bias", "tie_word_embeddings", *PLAIN, "num_key_value_heads")
    config = granitemoe.parse_config({key: value for key, value in GRANITE_3B.items() if key not in absent})
    assert (config.decoder.eps, config.decoder.rope.theta, config.decoder.tied) == (1e-6, 1e4, False)
    assert (config.decoder.embedding_scale, config.decoder.logits_divisor) == (1.0, 1.0)
    assert config.decoder.rope.attention_factor == 64**0.25
    assert (config.attention.kv_heads, config.biased, config.shared.width) == (24, "", 0)
    for name in ("granitemoe", "granitemoeshared"):
        assert find_architecture({"model_type": name}) is granitemoe


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"rope_scaling": {"type": "linear"}}, NotImplementedError, "rope type 'linear' is unknown"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not implemented"),
        ({"residual_multiplier": 0.0}, ValueError, r"residual_multiplier must be in 1e-06..1e\+06, got 0.0"),
        ({"attention_multiplier": -0.1}, ValueError, r"attention_multiplier must be in 1e-06..1e\+06, got -0.1"),
        ({"logits_scaling": 1e9}, ValueError, r"logits_scaling must be in 1e-06..1e\+06, got 1000000000.0"),
        ({"embedding_multiplier": "12"}, ValueError, "embedding_multiplier must be a number, got '12'"),
        ({"num_local_experts": None}, ValueError, "num_local_experts must be an integer >= 1, got None"),
        ({"num_experts_per_tok": 41}, ValueError, "num_experts_per_tok=41 must be in 1..num_local_experts=40"),
        ({"shared_intermediate_size": -1}, ValueError, "shared_intermediate_size must be an integer >= 0, got -1"),
        ({"shared_intermediate_size": 10**9}, ValueError, "shared_intermediate_size must be an integer <= 524288"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        granitemoe.parse_config(GRANITE_3B | change)
