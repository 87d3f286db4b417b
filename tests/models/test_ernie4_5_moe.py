"""models/ernie4_5_moe.py against transformers, on re-randomised tiny models that went through save_pretrained."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter, apply_rotary_pos_emb

import fmoe
from fmoe.architectures import find_architecture
from fmoe.checkpoint import read_config
from fmoe.functional.rotary import apply_rotary
from fmoe.functional.routing import route, router_logits
from fmoe.loading import named_tensors
from fmoe.models import ernie4_5_moe

from ..fp8_checkpoints import write_checkpoint
from .parity import (
    V,
    assert_equal_logits,
    check_compiled,
    check_flagship,
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

FILE = "model.safetensors"
BIAS = "mlp.moe_statics.e_score_correction_bias"
BASE = {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "moe_num_experts": 7,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 20,
    "moe_layer_start_index": 1,
    "moe_norm_min": 0.2,  # of the chosen's scores, whose sum is often less
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
VARIANTS = {
    "tied": {},
    "interval": {
        "num_hidden_layers": 6,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 2,
        "moe_layer_end_index": 4,
        "moe_num_shared_experts": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "none-shared": {
        "num_hidden_layers": 2,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 0,
        "moe_num_experts": 5,
        "moe_k": 5,
        "moe_norm_min": 1e-12,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
}  # fmt: skip
SPARSE = {"tied": [1, 2], "interval": [3], "none-shared": [0, 1]}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(Ernie4_5_MoeConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["tied"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def test_the_reference_has_biases_that_change_the_choice(variant, reference):
    """Of the order of the scores, so that a choice without them would be another one."""
    stored = load_file(reference.folder / FILE)
    for i in SPARSE[variant]:
        bias = stored[f"model.layers.{i}.{BIAS}"]
        assert bias.shape[0] == 1 and bias.std() > 0.1


def test_bfloat16_follows_the_reference(reference):
    """Means, as a near tie of two experts may go either way; router, its bias and the rotation stay in float32."""
    model = fmoe.load(reference.folder, dtype="bfloat16", compile=False)
    for name, tensor in named_tensors(model.params):
        is_router = name.endswith(("w_router_ED", "bias_E"))
        assert tensor.dtype == (torch.float32 if is_router else torch.bfloat16), name
    assert model.config.decoder.rotate_float32
    ids = draw_ids(65)
    found, expected = one_pass(model, ids), reference.logits(ids)
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_layers_between_the_two_indices_are_sparse(variant, model):
    sparse = [i for i, layer in enumerate(model.params.layers) if hasattr(layer.mlp, "w_router_ED")]
    assert sparse == SPARSE[variant]


def test_rows_of_q_and_k_are_parted(reference, model):
    """Even channels of each head come before odd ones; values stay as they are."""
    stored, sizes = load_file(reference.folder / FILE), model.config.attention
    for i, layer in enumerate(model.params.layers):
        q, k, v = (stored[f"model.layers.{i}.self_attn.{name}_proj.weight"] for name in "qkv")
        heads = [w[start : start + 10] for w in (q, k) for start in range(0, len(w), 10)]
        parted = [head[torch.tensor([0, 2, 4, 6, 8, 1, 3, 5, 7, 9])] for head in heads]
        assert len(heads) == sizes.heads + sizes.kv_heads
        assert torch.equal(layer.mixer.w_in_ND, torch.cat([*parted, v]))


def test_fused_and_separate_give_the_same_logits(variant, reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)
    count = (BASE | VARIANTS[variant])["moe_num_shared_experts"]
    assert (model.config.shared.slots, separate.config.shared.slots) == (count, 0)
    assert model.config.shared.width == separate.config.shared.width == 20 * count
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)
    for i in SPARSE[variant]:
        assert (separate.params.layers[i].mlp.shared is None) == (count == 0)
        assert len(model.params.layers[i].mlp.w_down_EDF) == len(separate.params.layers[i].mlp.w_down_EDF) + count


def test_draft_tensors_are_ignored(reference, model, tmp_path, caplog):
    stored = load_file(reference.folder / FILE)
    for name in ("mtp_block.0.self_attn.q_proj", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"):
        stored[f"model.{name}.weight"] = torch.ones(3)
    loaded = fmoe.load(write_checkpoint(tmp_path, stored, read_config(reference.folder)), compile=False)
    assert not [record for record in caplog.records if "mtp" in record.getMessage()]
    ids = draw_ids(9)
    assert torch.equal(one_pass(loaded, ids), one_pass(model, ids))


def test_a_missing_bias_is_an_error(variant, reference, tmp_path):
    layer = SPARSE[variant][-1]
    target = rewrite_config(reference, tmp_path / "without", dict)
    stored = load_file(target / FILE)
    del stored[f"model.layers.{layer}.{BIAS}"]
    save_file(stored, target / FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"missing tensors \(1\): model.layers.{layer}.mlp.moe_statics"):
        fmoe.load(target)


@pytest.mark.parametrize("floor", [1e-12, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("experts", "k"), [(7, 1), (7, 3), (64, 6), (5, 5)])
@torch.no_grad()
def test_router(experts, k, dtype, floor, rng):
    """Both operands are upcast, the choice is biased, the weights are not, and small sums are not divided by."""
    config = Ernie4_5_MoeConfig(**BASE | {"moe_num_experts": experts, "moe_k": k, "moe_norm_min": floor})
    rule = ernie4_5_moe.parse_config(config.to_dict()).router
    theirs = Ernie4_5_MoeTopKRouter(config)
    theirs.weight.copy_(0.3 * torch.randn(experts, 36, generator=rng))
    theirs.moe_statics.e_score_correction_bias.copy_(torch.randn(1, experts, generator=rng))
    x_TD = torch.randn(33, 36, generator=rng).to(dtype)
    _, weights, ids = theirs(x_TD)
    logits_TE = router_logits(x_TD, theirs.weight, float32=rule.float32_logits)
    found = route(logits_TE, theirs.moe_statics.e_score_correction_bias[0], rule)

    def to_dense(ids, weights):
        return torch.zeros(33, experts).scatter(1, ids.long(), weights.float())

    # moe_layer rounds to the dtype of its rows, which route does not see
    dense, expected = to_dense(found.experts_TK, found.weights_TK.to(dtype)), to_dense(ids, weights)
    assert rule.round_weights and weights.dtype == dtype
    torch.testing.assert_close(dense, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)
    short = (expected.sum(-1) < 0.98).sum()
    assert short > 0 if floor == 0.3 and k < experts else short == 0


def test_hub_config_keys(reference, model, tmp_path):
    """Published files have keys of the family's own code besides, and -1 for the last layer."""

    def change(raw):
        own = {"moe_gate": "topk", "moe_use_aux_free": True, "moe_capacity": [7, 7, 7], "use_rmsnorm": True}
        last = {"moe_layer_end_index": -1} if raw["moe_layer_end_index"] == raw["num_hidden_layers"] - 1 else {}
        return to_hub_keys(raw) | own | last

    old = fmoe.load(rewrite_config(reference, tmp_path / "old", change), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


A3B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_norm_min": 1e-12,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "vocab_size": 103424,
}
A47B = A3B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "moe_intermediate_size": 3584,
    "moe_k": 8,
    "moe_layer_start_index": 3,
    "moe_num_shared_experts": 0,
    "num_attention_heads": 64,
    "num_hidden_layers": 54,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


def test_flagship(tmp_path):
    info = check_flagship(A3B, tmp_path, total=21.83e9, active=3.35e9)
    assert round(info.active_inner / 1e9) == 3  # what its name counts
    dense, sparse = info.groups
    assert (dense.layers, dense.mlp, dense.width) == ((0,), "dense", 12288)
    assert (len(sparse.layers), sparse.experts, sparse.top_k, sparse.width) == (27, 64, 6, 1536)
    assert (sparse.shared_width, sparse.shared_slots) == (3072, 2)
    assert find_architecture(A3B) is find_architecture({"model_type": "ernie4_5_moe"}) is ernie4_5_moe


def test_the_larger_flagship(tmp_path):
    info = check_flagship(A47B, tmp_path, total=300e9, active=47.9e9)
    assert info.active_inner < 47e9 < info.active
    assert [len(group.layers) for group in info.groups] == [3, 51]


def test_absent_keys_take_the_familys_defaults():
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "max_position_embeddings": 9}
    config = ernie4_5_moe.parse_config({key: A3B[key] for key in kept} | sizes)
    assert (config.decoder.eps, config.decoder.rope.theta, config.decoder.tied) == (1e-5, 5e5, True)
    assert (config.attention.head_size, config.attention.kv_heads) == (128, 20)
    assert (config.router.sum_floor, config.shared.slots, config.sparse_layers) == (1e-12, 2, (False, *[True] * 27))
    named = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "max_position_embeddings": 9}
    assert ernie4_5_moe.parse_config({key: A3B[key] for key in kept} | named) == config


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"use_bias": True}, NotImplementedError, "use_bias=True is not implemented; implemented: False"),
        ({"moe_gate_act": "sigmoid"}, NotImplementedError, "moe_gate_act='sigmoid' is not .*; implemented: 'softmax'"),
        ({"moe_use_aux_free": False}, NotImplementedError, "moe_use_aux_free=False is not .*; implemented: True"),
        ({"moe_norm_gate_logits": False}, NotImplementedError, "moe_norm_gate_logits=False is not implemented"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not implemented"),
        ({"moe_k": 65}, ValueError, "moe_k=65 must be in 1..moe_num_experts=64"),
        ({"moe_k": 0}, ValueError, "moe_k must be an integer >= 1, got 0"),
        ({"moe_num_experts": [64, 64]}, ValueError, r"moe_num_experts must be an integer >= 1, got \[64, 64\]"),
        ({"num_experts": 8}, ValueError, "moe_num_experts=64 and num_experts=8 must be equal"),
        ({"moe_layer_interval": 0}, ValueError, "moe_layer_interval must be an integer >= 1, got 0"),
        ({"moe_layer_end_index": -2}, ValueError, "moe_layer_end_index must be an integer >= -1, got -2"),
        ({"moe_norm_min": -1.0}, ValueError, "moe_norm_min must be in 0..1, got -1.0"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        ernie4_5_moe.parse_config(A3B | change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_of_parted_channels_is_that_of_pairs(dtype, rng):
    """To the last bit, with tables in float32: they are what the placement of the family has."""
    x_BTHC = torch.randn(2, 5, 3, 10, generator=rng).to(dtype)
    angles_BTR = 40 * torch.rand(2, 5, 5, generator=rng)
    parted_BTHC = x_BTHC.unflatten(-1, (5, 2)).transpose(-1, -2).flatten(-2)
    found_BTHC = apply_rotary(parted_BTHC, angles_BTR.cos(), angles_BTR.sin())
    whole_BTC = torch.cat((angles_BTR, angles_BTR), -1)
    expected_BHTC, _ = apply_rotary_pos_emb(*[x_BTHC.transpose(1, 2)] * 2, whole_BTC.cos(), whole_BTC.sin())
    expected_BTHC = expected_BHTC.transpose(1, 2).unflatten(-1, (5, 2)).transpose(-1, -2).flatten(-2)
    assert found_BTHC.dtype == dtype and torch.equal(found_BTHC, expected_BTHC)
