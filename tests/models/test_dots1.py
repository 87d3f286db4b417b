"""models/dots1.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Dots1Config
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.models import dots1
from fmoe.models.gqa_decoder import layer_params

from .parity import V, assert_equal_logits, check_compiled, check_flagship, draw_ids, one_pass, rewrite_config
from .parity import test_chunked_prefill_equals_one_chunk as test_chunked_prefill_equals_one_chunk
from .parity import (
    test_decoding_equals_the_reference_with_its_cache as test_decoding_equals_the_reference_with_its_cache,
)
from .parity import test_logits as test_logits
from .parity import test_mixed_lengths_equal_single_rows as test_mixed_lengths_equal_single_rows
from .parity import test_pieces_equal_one_pass as test_pieces_equal_one_pass
from .parity import test_stacked_and_single_experts_load_alike as test_stacked_and_single_experts_load_alike
from .parity import test_the_reference_is_worth_comparing_with as test_the_reference_is_worth_comparing_with
from .v3_experts import (
    EXPERTS,
    GRID,
    build_reference,
    check_biased_router,
    check_hub_config,
    count_stored,
    rewrite_tensors,
)
from .v3_experts import test_a_missing_bias_is_an_error as test_a_missing_bias_is_an_error
from .v3_experts import test_bfloat16_follows_the_reference as test_bfloat16_follows_the_reference
from .v3_experts import test_draft_layers_are_ignored as test_draft_layers_are_ignored
from .v3_experts import test_experts_are_what_the_checkpoint_holds as test_experts_are_what_the_checkpoint_holds
from .v3_experts import test_fused_and_separate_give_the_same_logits as test_fused_and_separate_give_the_same_logits

F, S = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
BASE = EXPERTS | {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
VARIANTS = {
    "llm1": {"n_group": 1, "topk_group": 1},
    "window": {
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "sliding_window": 7,
        "max_window_layers": 1,
        "rope_parameters": YARN,
    },
    "plain": {
        "norm_topk_prob": False,
        "n_shared_experts": 3,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return build_reference(make_reference, Dots1Config(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["window"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


@pytest.mark.parametrize("variant", ["window"], scope="module")
def test_kinds_of_layers(model):
    """Layers slide from max_window_layers on, and are sparse from first_k_dense_replace on."""
    assert model.config.decoder.layer_kinds == (F, S, S, S)
    assert model.config.decoder.window == 7
    assert model.config.sparse_layers == (False, False, True, True)


def test_norms_and_biases_are_loaded(variant, reference, model):
    stored = load_file(reference.folder / "model.safetensors")
    heads = (BASE | VARIANTS[variant])["num_attention_heads"]
    for i, layer in enumerate(model.params.layers):
        base, mixer = f"model.layers.{i}.self_attn", layer.mixer
        assert torch.equal(mixer.norm_HC[:heads], stored[f"{base}.q_norm.weight"].expand(heads, -1))
        assert torch.equal(mixer.norm_HC[heads], stored[f"{base}.k_norm.weight"])
        if variant == "window":
            assert torch.equal(mixer.bias_N, torch.cat([stored[f"{base}.{name}_proj.bias"] for name in "qkv"]))
            assert torch.equal(mixer.bias_out_D, stored[f"{base}.o_proj.bias"])
        else:
            assert mixer.bias_N is mixer.bias_out_D is None


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sizes", GRID, ids=str)
def test_router(sizes, norm, scale, rng):
    keys = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    changes = dict(zip(keys, sizes, strict=True)) | {"norm_topk_prob": norm, "routed_scaling_factor": scale}
    config = Dots1Config(**BASE | changes)
    check_biased_router(Dots1TopkRouter(config), dots1.parse_config(config.to_dict()).router, rng)


def test_hub_config_keys(reference, model, tmp_path):
    """Published files have no list of layers, and call the rule of the router by the name of its choice."""

    def publish(raw):
        raw.pop("layer_types")
        return raw | {"scoring_func": "noaux_tc", "moe_layer_freq": 1, "use_sliding_window": False}

    check_hub_config(reference, model, tmp_path / "old", publish)


def test_no_shared_expert(make_reference, tmp_path):
    """An absent count is none; transformers stores empty tensors for it, others store nothing."""
    reference = build_reference(make_reference, Dots1Config(**BASE | {"n_shared_experts": 0}))

    def drop(stored):
        return {name: tensor for name, tensor in stored.items() if "shared_experts" not in name}

    folder = rewrite_config(reference, tmp_path / "none", lambda raw: raw | {"n_shared_experts": None})
    model = fmoe.load(rewrite_tensors(folder, drop), compile=False)
    assert model.config.shared.width == 0
    ids = draw_ids(17)
    assert_equal_logits(one_pass(model, ids), reference.logits(ids))
    assert_equal_logits(one_pass(fmoe.load(reference.folder, compile=False), ids), reference.logits(ids))


LLM1 = {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_flagship(tmp_path):
    info = check_flagship(LLM1, tmp_path, total=142e9, active=14e9)
    dense, sparse = info.groups
    assert (dense.kind, dense.layers, len(sparse.layers)) == (F, (0,), 61)
    assert (sparse.experts, sparse.top_k, sparse.shared_width, sparse.shared_slots) == (128, 6, 2816, 2)
    assert count_stored(dots1, layer_params, LLM1) == 142_774_381_696
    config = dots1.parse_config(LLM1)
    assert (config.decoder.rope.theta, config.decoder.rope.rotary_size, config.decoder.draft_layers) == (1e7, 128, 0)
    assert find_architecture(LLM1) is find_architecture({"model_type": "dots1"}) is dots1


def test_absent_keys_take_the_familys_defaults():
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings")
    raw = {key: LLM1[key] for key in kept}
    nulls = dict.fromkeys(set(LLM1) - set(kept) - {"architectures", "torch_dtype"})
    for given in (raw, raw | nulls):
        config = dots1.parse_config(given)
        assert (config.decoder.eps, config.attention.eps, config.decoder.rope.theta) == (1e-6, 1e-6, 1e4)
        assert (config.attention.head_size, config.attention.kv_heads) == (128, 32)
        assert (config.biased, config.head_norms, config.decoder.tied) == ("", True, False)
        assert all(config.sparse_layers) and config.decoder.layer_kinds == (F,) * 62
        router = config.router
        assert (router.groups, router.groups_kept, router.scale, router.renormalize) == (1, 1, 1.0, False)
        assert config.shared.width == 0


def test_windows():
    """Only an absent width is 4096; null is no window."""
    absent = {key: value for key, value in LLM1.items() if key not in ("sliding_window", "max_window_layers")}
    assert set(dots1.parse_config(absent).decoder.layer_kinds) == {F}  # from layer 62 on
    deep = dots1.parse_config(absent | {"num_hidden_layers": 64}).decoder
    assert (deep.layer_kinds, deep.window) == ((F,) * 62 + (S,) * 2, 4096)
    wide = dots1.parse_config(LLM1 | {"sliding_window": 9, "max_window_layers": 60}).decoder
    assert (wide.layer_kinds, wide.window) == ((F,) * 60 + (S,) * 2, 9)
    assert dots1.parse_config(LLM1 | {"max_window_layers": 0}).decoder.window is None


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"moe_layer_freq": 2}, NotImplementedError, "moe_layer_freq=2 is not implemented; implemented: 1"),
        ({"scoring_func": "softmax"}, NotImplementedError, "scoring_func='softmax' .* 'sigmoid', 'noaux_tc'"),
        ({"topk_method": "greedy"}, NotImplementedError, "topk_method='greedy' is not .*; implemented: 'noaux_tc'"),
        ({"rope_scaling": {"type": "linear"}}, NotImplementedError, "rope type 'linear' is unknown"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not implemented"),
        ({"layer_types": [F] * 61 + ["odd"]}, NotImplementedError, r"layer_types \['odd'\] are unknown"),
        ({"layer_types": [F] * 61}, ValueError, "layer_types must list num_hidden_layers=62 kinds"),
        ({"layer_types": [S] * 62}, ValueError, "layer_types has sliding_attention, but sliding_window is null; make"),
        ({"sliding_window": 0, "max_window_layers": 9}, ValueError, "sliding_window must be an integer >= 1, got 0"),
        ({"n_routed_experts": None}, ValueError, "n_routed_experts must be an integer >= 1, got None"),
        ({"num_experts_per_tok": 129}, ValueError, "num_experts_per_tok=129 must be in 1..n_routed_experts=128"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        dots1.parse_config(LLM1 | change)
