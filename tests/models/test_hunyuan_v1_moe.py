"""models/hunyuan_v1_moe.py against transformers, on re-randomised tiny models that go through save_pretrained and load.

``moe_topk`` is a list in these files, as in published ones.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import HunYuanMoEV1Config
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate

import fmoe
from fmoe.architectures import find_architecture
from fmoe.functional.routing import route, router_logits
from fmoe.loading import named_tensors
from fmoe.models import hunyuan_v1_moe

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

pytestmark = pytest.mark.filterwarnings("ignore:.*alpha.*")  # which transformers' check of the keys does not know

BASE = {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_experts": 7,
    "moe_topk": [3, 3],
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 20.0, "factor": 1.0},
}
VARIANTS = {
    "alpha": {},
    "plain": {
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_experts": 5,
        "moe_topk": 5,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(HunYuanMoEV1Config(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["alpha"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def test_bfloat16_follows_the_reference(reference):
    """Means, as a near tie of two experts may go either way; the router stays in float32."""
    model = fmoe.load(reference.folder, dtype="bfloat16", compile=False)
    for name, tensor in named_tensors(model.params):
        assert tensor.dtype == (torch.float32 if name.endswith("w_router_ED") else torch.bfloat16), name
    ids = draw_ids(65)
    found, expected = one_pass(model, ids), reference.logits(ids)
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_norms_come_after_the_rotation(reference, model):
    """The weights of a pair of rotated channels differ, so the other order would give other logits."""
    assert model.config.attention.rotates_first
    stored, heads = load_file(reference.folder / "model.safetensors"), model.config.attention.heads
    for i, layer in enumerate(model.params.layers):
        parts = [(layer.mixer.norm_HC[:heads], "query"), (layer.mixer.norm_HC[heads:], "key")]
        for rows_HC, name in parts:
            weight_C = stored[f"model.layers.{i}.self_attn.{name}_layernorm.weight"]
            assert torch.equal(rows_HC, weight_C.expand_as(rows_HC))
        first, second = layer.mixer.norm_HC.chunk(2, -1)
        assert (first - second).abs().max() > 0.1


def test_fused_and_separate_give_the_same_logits(reference, model):
    separate = fmoe.load(reference.folder, shared_experts="separate", compile=False)
    assert (model.config.shared.slots, separate.config.shared.slots) == (1, 0)
    assert model.config.shared.width == separate.config.shared.width == 20
    ids = draw_ids(65)
    assert_equal_logits(one_pass(separate, ids), reference.logits(ids))
    assert_equal_logits(one_pass(separate, ids), one_pass(model, ids), within=3e-5)
    assert all(layer.mlp.shared is not None for layer in separate.params.layers)


def test_the_last_slot_is_the_shared_mlp(reference, model):
    stored = load_file(reference.folder / "model.safetensors")
    for i, layer in enumerate(model.params.layers):
        base = f"model.layers.{i}.mlp.shared_mlp"
        gate_up = [stored[f"{base}.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(layer.mlp.w_gate_up_EPD[-1], torch.cat(gate_up))
        assert torch.equal(layer.mlp.w_down_EDF[-1], stored[f"{base}.down_proj.weight"])


@pytest.mark.parametrize(("experts", "k"), [(7, 2), (8, 3), (60, 60)])
@torch.no_grad()
def test_router(experts, k, rng):
    """A float32 router of bfloat16 rows, as dense [T, E] weights."""
    config = HunYuanMoEV1Config(**BASE | {"num_experts": experts, "moe_topk": k})
    rule = hunyuan_v1_moe.parse_config(config.to_dict()).router
    theirs = HunYuanMoEV1Gate(SimpleNamespace(hidden_size=36, num_experts=experts, moe_topk=[k, 0]), layer_idx=0)
    theirs.wg.weight.data = torch.randn(experts, 36, generator=rng)
    x_TD = torch.randn(33, 36, generator=rng).bfloat16()
    _, weights, ids = theirs(x_TD)
    found = route(router_logits(x_TD, theirs.wg.weight, float32=rule.float32_logits), None, rule)

    def to_dense(ids, weights):
        return torch.zeros(33, experts).scatter(1, ids.long(), weights)

    torch.testing.assert_close(to_dense(*reversed(found)), to_dense(ids, weights), rtol=1e-5, atol=0)
    assert not rule.round_weights and weights.dtype == torch.float32


def test_hub_config_keys(variant, reference, model, tmp_path):
    """Published files list values per layer and have the keys of the family's own code besides."""

    def change(raw):
        layers = raw["num_hidden_layers"]
        top_k = raw["moe_topk"] if isinstance(raw["moe_topk"], list) else [raw["moe_topk"]] * layers
        own = {"moe_topk": top_k, "num_shared_expert": [1] * layers, "moe_intermediate_size": [20] * layers}
        return to_hub_keys(raw) | own | {"use_qk_norm": True, "use_cla": False, "attention_head_dim": 10}

    old = fmoe.load(rewrite_config(reference, tmp_path / "old", change), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


A13B = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "group_limited_greedy": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_moe",
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "vocab_size": 128167,
}  # fmt: skip


def test_flagship(tmp_path):
    info = check_flagship(A13B, tmp_path, total=80.4e9, active=12.75e9)
    [group] = info.groups
    assert (group.kind, group.experts, group.top_k, group.width) == ("full_attention", 64, 8, 3072)
    assert (group.shared_width, group.shared_slots) == (3072, 1)
    assert find_architecture(A13B) is find_architecture({"model_type": "hunyuan_v1_moe"}) is hunyuan_v1_moe
    assert hunyuan_v1_moe.parse_config(A13B).decoder.rope.theta == 1e4 * 1000 ** (128 / 126)


def test_absent_keys_take_the_familys_defaults():
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_experts")
    config = hunyuan_v1_moe.parse_config({key: A13B[key] for key in kept} | {"max_position_embeddings": 9})
    assert (config.decoder.eps, config.attention.eps, config.decoder.rope.theta) == (1e-5, 1e-5, 1e4)
    assert (config.decoder.tied, config.biased, config.router.top_k) == (False, "", 1)
    assert (config.attention.head_size, config.attention.kv_heads) == (128, 32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"use_qk_norm": False}, NotImplementedError, "use_qk_norm=False is not implemented; implemented: True"),
        ({"use_cla": True}, NotImplementedError, "use_cla=True is not implemented; implemented: False"),
        ({"moe_layer_num_skipped": 1}, NotImplementedError, "moe_layer_num_skipped=1 is not implemented"),
        ({"num_shared_expert": [2] * 32}, NotImplementedError, "num_shared_expert=2 is not implemented"),
        (
            {"moe_intermediate_size": [8] * 32},
            NotImplementedError,
            "moe_intermediate_size=8 is not .*; implemented: 3072",
        ),
        ({"attention_head_dim": 64}, NotImplementedError, "attention_head_dim=64 is not implemented; implemented: 128"),
        ({"moe_topk": [8] * 31 + [4]}, NotImplementedError, "moe_topk=.* implemented: the same value for every layer"),
        ({"moe_topk": [8] * 31}, ValueError, "moe_topk must list num_hidden_layers=32 values, got"),
        ({"moe_topk": 65}, ValueError, "moe_topk=65 must be in 1..num_experts=64"),
        ({"num_experts_per_tok": 4}, ValueError, "moe_topk=8 and num_experts_per_tok=4 must be equal"),
        ({"num_experts": [64] * 31 + [63]}, NotImplementedError, "num_experts=.* the same value for every layer"),
        ({"num_experts": 0}, ValueError, "num_experts must be an integer >= 1, got 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, NotImplementedError, "rope type 'dynamic' is unknown"),
        ({"rope_scaling": {"type": "dynamic", "alpha": "x"}}, ValueError, "alpha must be a number, got 'x'"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not implemented"),
        ({"head_dim": 2, "attention_head_dim": 2}, ValueError, "head_dim=2 must be above 2 with alpha in the rope"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        hunyuan_v1_moe.parse_config(A13B | change)


@pytest.mark.parametrize("keys", [("num_experts_per_tok",), ("moe_topk", "num_experts_per_tok")])
def test_the_other_name_of_top_k_may_be_a_list_too(keys):
    raw = HunYuanMoEV1Config(**BASE).to_dict()
    raw = {key: value for key, value in raw.items() if key not in ("moe_topk", "num_experts_per_tok")}
    layers = raw["num_hidden_layers"]
    assert hunyuan_v1_moe.parse_config(raw | dict.fromkeys(keys, [2] * layers)).router.top_k == 2
