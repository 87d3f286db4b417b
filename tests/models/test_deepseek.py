"""models/deepseek_v2.py and deepseek_v3.py against transformers, on re-randomised tiny models saved and loaded."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

import fmoe
from fmoe.decoding import new_state
from fmoe.functional.moe import MoEParams
from fmoe.functional.routing import route, router_logits
from fmoe.loading import named_tensors
from fmoe.models import deepseek_v2, deepseek_v3

from .parity import V, assert_equal_logits, check_compiled, draw_ids, one_pass, rewrite_config, to_hub_keys
from .parity import test_chunked_prefill_equals_one_chunk as test_chunked_prefill_equals_one_chunk
from .parity import (
    test_decoding_equals_the_reference_with_its_cache as test_decoding_equals_the_reference_with_its_cache,
)
from .parity import test_logits as test_logits
from .parity import test_mixed_lengths_equal_single_rows as test_mixed_lengths_equal_single_rows
from .parity import test_pieces_equal_one_pass as test_pieces_equal_one_pass
from .parity import test_the_reference_is_worth_comparing_with as test_the_reference_is_worth_comparing_with

BASE = {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 15,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 14,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
}


def yarn(**keys):
    """YaRN over 16 positions, so that most of what is tested lies beyond them."""
    return {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 40.0, "original_max_position_embeddings": 16, **keys}


LIMITED = {"topk_method": "group_limited_greedy"}
VARIANTS = {
    "v2-lite": (
        DeepseekV2Config,
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707),
        },
    ),
    "v2": (DeepseekV2Config, LIMITED | {"rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)}),
    "v2-plain-yarn": (DeepseekV2Config, LIMITED | {"rope_parameters": yarn(), "first_k_dense_replace": 0}),
    "v2-default-rope": (DeepseekV2Config, {"n_group": None, "topk_group": None, "n_shared_experts": 1}),
    "v3": (DeepseekV3Config, {"rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)}),
    "v3-direct-queries": (
        DeepseekV3Config,
        {
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "n_shared_experts": 3,
            "first_k_dense_replace": 2,
            "rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707),
        },
    ),
    "v3-plain-yarn": (DeepseekV3Config, {"rope_parameters": yarn(), "n_group": 5, "topk_group": 3}),
    "v3-mscale-ratio": (DeepseekV3Config, {"rope_parameters": yarn(mscale=1.3, mscale_all_dim=0.6)}),
    "v3-half-split": (DeepseekV3Config, {"rope_interleave": False, "tie_word_embeddings": True}),
    "kimi": (
        DeepseekV3Config,
        {
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),
        },
    ),
}


def build_reference(make_reference, variant, **changes):
    kind, options = VARIANTS[variant]
    reference = make_reference(kind(**BASE | options | changes))
    rng = torch.Generator().manual_seed(1)
    for name, buffer in reference.model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=rng))
    reference.model.save_pretrained(reference.folder)
    return reference


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return build_reference(make_reference, variant)


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


def test_fused_and_separate_give_the_same_logits(variant, reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)
    count = (BASE | VARIANTS[variant][1])["n_shared_experts"]
    assert (model.config.shared.slots, separate.config.shared.slots) == (count, 0)
    assert model.config.shared.width == separate.config.shared.width == 14 * count
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)


def test_shared_slots_are_cut_from_the_wide_expert(reference, model):
    """Slots E.. hold the checkpoint's numbers, byte for byte, and only sparse layers have them."""
    stored = load_file(reference.folder / "model.safetensors")
    dense = model.config.dense_layers
    for i, layer in enumerate(model.params.layers):
        assert isinstance(layer.mlp, MoEParams) == (i >= dense)
        if i < dense:
            continue
        for s in range(model.config.shared.slots):
            part, base = slice(14 * s, 14 * (s + 1)), f"model.layers.{i}.mlp.shared_experts"
            gate_up = [stored[f"{base}.{name}_proj.weight"][part] for name in ("gate", "up")]
            assert torch.equal(layer.mlp.w_gate_up_EPD[15 + s], torch.cat(gate_up))
            assert torch.equal(layer.mlp.w_down_EDF[15 + s], stored[f"{base}.down_proj.weight"][:, part])
        biased = f"model.layers.{i}.mlp.gate.e_score_correction_bias" in stored
        assert biased == (layer.mlp.bias_E is not None) == (model.config.router.scoring == "sigmoid")


@pytest.mark.parametrize("variant", ["v2-lite", "v3"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def to_dense(experts_TK, weights_TK, count):
    dense_TE = torch.zeros(len(experts_TK), count)
    return dense_TE.scatter_add(1, experts_TK.long(), weights_TK)


GRID = [(15, 3, 2, 4), (12, 6, 2, 3), (10, 1, 1, 10), (24, 4, 4, 6), (24, 4, 1, 6), (9, 3, 1, 1)]


@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
@pytest.mark.parametrize("sizes", GRID, ids=str)
def test_v2_router(sizes, method, scale, rng):
    experts, groups, kept, k = sizes
    sizes = {"n_routed_experts": experts, "n_group": groups, "topk_group": kept, "num_experts_per_tok": k}
    config = DeepseekV2Config(**BASE | sizes | {"topk_method": method, "routed_scaling_factor": scale})
    router = DeepseekV2TopkRouter(config)
    router.weight.data = 0.3 * torch.randn(experts, 36, generator=rng)
    x_TD = torch.randn(33, 36, generator=rng).to(torch.bfloat16)
    with torch.no_grad():
        _, weights, ids = router(x_TD)

    rule = deepseek_v2.parse_config(config.to_dict()).router
    found = route(router_logits(x_TD, router.weight.data, float32=rule.float32_logits), None, rule)

    torch.testing.assert_close(to_dense(found.experts_TK, found.weights_TK, experts), to_dense(ids, weights, experts))


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sizes", GRID, ids=str)
def test_v3_router(sizes, norm, scale, rng):
    experts, groups, kept, k = sizes
    sizes = {"n_routed_experts": experts, "n_group": groups, "topk_group": kept, "num_experts_per_tok": k}
    config = DeepseekV3Config(**BASE | sizes | {"norm_topk_prob": norm, "routed_scaling_factor": scale})
    router = DeepseekV3TopkRouter(config)
    router.weight.data = 0.3 * torch.randn(experts, 36, generator=rng)
    router.e_score_correction_bias.copy_(torch.randn(experts, generator=rng))
    x_TD = torch.randn(33, 36, generator=rng).to(torch.bfloat16)
    with torch.no_grad():
        _, weights, ids = router(x_TD)

    rule = deepseek_v3.parse_config(config.to_dict()).router
    logits_TE = router_logits(x_TD, router.weight.data, float32=rule.float32_logits)
    found = route(logits_TE, router.e_score_correction_bias, rule)

    torch.testing.assert_close(to_dense(found.experts_TK, found.weights_TK, experts), to_dense(ids, weights, experts))
    if k < experts:
        unbiased = route(logits_TE, None, rule)
        assert not torch.equal(unbiased.experts_TK.sort().values, found.experts_TK.sort().values)


def test_bfloat16_follows_the_reference(make_reference):
    """V2 rotates in float32, V3 in bfloat16; routers stay float32 in both."""
    for variant in ("v2", "v3"):
        reference = build_reference(make_reference, variant)
        model = fmoe.load(reference.folder, dtype="bfloat16", compile=False)
        assert model.config.decoder.rotate_float32 == (variant == "v2")
        moe = model.params.layers[-1].mlp
        assert moe.w_router_ED.dtype == torch.float32 and moe.w_down_EDF.dtype == torch.bfloat16
        assert (moe.bias_E is None) if variant == "v2" else moe.bias_E.dtype == torch.float32
        assert new_state(model, 1, 1).caches[0].latent_BMR.dtype == torch.bfloat16
        ids = draw_ids(65)
        found, expected = one_pass(model, ids), reference.logits(ids)
        assert (found - expected).abs().mean() < 0.1 * expected.std()


def published(raw):
    """Write the keys as DeepSeek and Moonshot publish them."""
    raw = to_hub_keys(raw)
    for key in ("head_dim", "qk_head_dim"):
        raw.pop(key)
    v3 = raw["model_type"] == "deepseek_v3"
    raw |= {"moe_layer_freq": 1, "scoring_func": "sigmoid" if v3 else "softmax", "ep_size": 1, "seq_aux": True}
    raw.setdefault("topk_method", "noaux_tc")
    return raw | ({"model_type": "kimi_k2"} if v3 and raw["n_group"] == 1 else {})


def rewrite_tensors(folder, change):
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_hub_config_keys(variant, reference, model, tmp_path):
    old = fmoe.load(rewrite_config(reference, tmp_path / "old", published), compile=False)
    assert old.config == model.config
    assert old.architecture is (deepseek_v2 if variant.startswith("v2") else deepseek_v3)
    ids = draw_ids(65)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


def test_draft_layers_are_ignored(make_reference, tmp_path):
    reference = build_reference(make_reference, "v3")

    def add_layer(stored):
        extra = {
            name.replace("layers.2.", "layers.3."): tensor + 1 for name, tensor in stored.items() if "layers.2." in name
        }
        return stored | extra | {"model.layers.3.eh_proj.weight": torch.ones(36, 72)}

    folder = rewrite_config(reference, tmp_path / "draft", lambda raw: raw | {"num_nextn_predict_layers": 1})
    rewrite_tensors(folder, add_layer)
    ids = draw_ids(17)
    assert_equal_logits(one_pass(fmoe.load(folder, compile=False), ids), reference.logits(ids))


def test_a_missing_bias_is_an_error(make_reference, tmp_path):
    reference = build_reference(make_reference, "v3")

    def drop(stored):
        return {name: tensor for name, tensor in stored.items() if "layers.1.mlp.gate.e_score" not in name}

    folder = rewrite_tensors(rewrite_config(reference, tmp_path / "unbiased", lambda raw: raw), drop)
    with pytest.raises(ValueError, match=r"missing tensors \(1\): model.layers.1.mlp.gate.e_score_correction_bias"):
        fmoe.load(folder)


def test_stacked_experts_load_alike(reference, model, tmp_path):
    reference.model.save_pretrained(tmp_path, save_original_format=False)
    stacked = fmoe.load(tmp_path, compile=False)
    found, expected = dict(named_tensors(stacked.params)), dict(named_tensors(model.params))
    assert stacked.config == model.config and found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_no_shared_expert(make_reference, tmp_path):
    """Without shared experts the released code stores no tensors for them; transformers stores empty ones."""
    reference = build_reference(make_reference, "v3", n_shared_experts=0)

    def drop(stored):
        return {name: tensor for name, tensor in stored.items() if "shared_experts" not in name}

    folder = rewrite_config(reference, tmp_path / "none", lambda raw: raw | {"n_shared_experts": None})
    model = fmoe.load(rewrite_tensors(folder, drop), compile=False)
    assert model.config.shared.width == 0
    ids = draw_ids(17)
    assert_equal_logits(one_pass(model, ids), reference.logits(ids))
