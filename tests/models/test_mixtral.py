"""models/mixtral.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.models import mixtral

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
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
}
VARIANTS = {
    "plain": {},
    "window": {
        "sliding_window": 5,
        "head_dim": 10,
        "num_local_experts": 5,
        "num_experts_per_tok": 5,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(MixtralConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["window"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


@pytest.mark.parametrize("variant", ["window"], scope="module")
def test_every_layer_sees_the_window_alone(reference, model):
    """Three layers that see five tokens each reach back twelve, and not one more."""
    assert model.config.decoder.layer_kinds == ("sliding_attention",) * 3
    ids = draw_ids(40)
    logits = one_pass(model, ids)
    for back, reached in ((12, True), (13, False)):
        changed = list(ids)
        changed[39 - back] = (changed[39 - back] + 1) % V
        assert torch.equal(one_pass(model, changed)[-1], logits[-1]) != reached


def test_bfloat16_follows_the_reference(reference):
    check_bfloat16(reference)


@pytest.mark.parametrize(("experts", "k"), [(7, 2), (8, 3), (60, 60)])
def test_router(experts, k, rng):
    config = MixtralConfig(**BASE | {"num_local_experts": experts, "num_experts_per_tok": k})
    rule = mixtral.parse_config(config.to_dict()).router
    check_router(MixtralTopKRouter(config), rule, 36, rng)


def test_hub_config_keys(reference, model, tmp_path):
    def change(raw):
        return {key: value for key, value in to_hub_keys(raw).items() if key != "head_dim" or value is not None}

    old = fmoe.load(rewrite_config(reference, tmp_path / "old", change), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


EIGHT_7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
EIGHT_22B = EIGHT_7B | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
}


@pytest.mark.parametrize(
    ("raw", "total", "active"),
    [pytest.param(EIGHT_7B, 46.7e9, 12.9e9, id="8x7B"), pytest.param(EIGHT_22B, 140.6e9, 39.1e9, id="8x22B")],
)
def test_flagships(raw, total, active, tmp_path):
    info = check_flagship(raw, tmp_path, total=total, active=active)
    [group] = info.groups
    assert (group.kind, group.experts, group.top_k, group.shared_width) == ("full_attention", 8, 2, 0)
    config = find_architecture(raw).parse_config(raw)
    assert config.attention.head_size == 128
    assert config.decoder.rope.theta == 1e6


def test_absent_keys_take_the_familys_defaults():
    bare = {key: value for key, value in EIGHT_7B.items() if key not in ("rms_norm_eps", "rope_theta")}
    config = mixtral.parse_config(bare)
    assert (config.decoder.eps, config.attention.eps, config.decoder.rope.theta) == (1e-5, 1e-5, 1e6)
    assert find_architecture({"model_type": "mixtral"}) is mixtral


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not implemented"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not implemented"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25 is not implemented"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is unknown"),
    ],
)
def test_values_not_implemented_are_refused_by_name(change, match):
    with pytest.raises(NotImplementedError, match=match):
        mixtral.parse_config(EIGHT_7B | change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
        ({"num_local_experts": None}, "num_local_experts must be an integer >= 1, got None"),
        ({"num_experts": 9}, "num_experts=9 and num_local_experts=8 must be equal"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be in 1..num_local_experts=8"),
    ],
)
def test_values_that_cannot_be(change, match):
    with pytest.raises(ValueError, match=match):
        mixtral.parse_config(EIGHT_7B | change)
