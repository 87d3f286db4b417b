"""models/gpt_oss.py against transformers, on re-randomised tiny models that go through save_pretrained and load."""

import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

import fmoe
from fmoe.architectures import find_architecture
from fmoe.compile import decode_choice
from fmoe.compile.capabilities import AiterRecord, Availability, Capabilities
from fmoe.compile.decode_choice import add_decode_kernels
from fmoe.doctor import diagnose
from fmoe.functional.routing import route, router_logits
from fmoe.models import gpt_oss
from fmoe.planning import decide_for, list_keys

from .parity import (
    V,
    assert_equal_logits,
    check_bfloat16,
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

F, S = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
BASE = {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "swiglu_limit": 1.5,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 640,
    "eos_token_id": None,
    "rope_parameters": YARN,
}
VARIANTS = {
    "plain": {},
    "wide": {
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_local_experts": 40,
        "num_experts_per_tok": 4,
        "layer_types": [F, S, S, F],
        "swiglu_alpha": 0.9,
        "swiglu_limit": 0.8,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "unbiased": {"attention_bias": False, "num_local_experts": 5, "num_experts_per_tok": 5, "swiglu_limit": 7.0},
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def reference(variant, make_reference):
    return make_reference(GptOssConfig(**BASE | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(reference):
    return fmoe.load(reference.folder, compile=False)


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_compiled_equals_eager_and_never_compiles_again(model):
    check_compiled(model)


def test_bfloat16_follows_the_reference(reference):
    check_bfloat16(reference)
    params = fmoe.load(reference.folder, dtype="bfloat16", compile=False).params
    norms = [params.norm_D, *(norm for layer in params.layers for norm in (layer.input_norm_D, layer.post_norm_D))]
    assert {norm.dtype for norm in norms} == {torch.float32}  # which makes them round late


def test_kinds_of_layers(variant, model):
    kinds = {"plain": (S, F, S), "wide": (F, S, S, F), "unbiased": (S, F, S)}[variant]
    assert (model.config.decoder.layer_kinds, model.config.decoder.window) == (kinds, 7)


def test_vectors_are_loaded(variant, reference, model):
    stored = load_file(reference.folder / "model.safetensors")
    for i, layer in enumerate(model.params.layers):
        base = f"model.layers.{i}"
        assert torch.equal(layer.mixer.sinks_H, stored[f"{base}.self_attn.sinks"])
        assert torch.equal(layer.mlp.bias_logits_E, stored[f"{base}.mlp.router.bias"])
        gate_up, down = (stored[f"{base}.mlp.experts.{name}_proj_bias"] for name in ("gate_up", "down"))
        assert torch.equal(layer.mlp.biases.bias_down_ED, down)
        assert torch.equal(layer.mlp.biases.bias_gate_up_EP, torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1))
        if variant == "unbiased":
            assert layer.mixer.bias_N is layer.mixer.bias_out_D is None
        else:
            names = [f"{base}.self_attn.{name}_proj.bias" for name in "qkv"]
            assert torch.equal(layer.mixer.bias_N, torch.cat([stored[name] for name in names]))
            assert torch.equal(layer.mixer.bias_out_D, stored[f"{base}.self_attn.o_proj.bias"])


def test_stacks_have_gate_rows_first(reference, model):
    stored, width = load_file(reference.folder / "model.safetensors"), BASE["intermediate_size"]
    for i, layer in enumerate(model.params.layers):
        gate_up, down = (stored[f"model.layers.{i}.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
        for e in range(model.config.router.num_experts):
            for f in (0, 1, width - 1):
                assert torch.equal(layer.mlp.w_gate_up_EPD[e, f], gate_up[e, :, 2 * f])
                assert torch.equal(layer.mlp.w_gate_up_EPD[e, width + f], gate_up[e, :, 2 * f + 1])
            assert torch.equal(layer.mlp.w_down_EDF[e], down[e].T)
        assert layer.mlp.w_gate_up_EPD.is_contiguous() and layer.mlp.w_down_EDF.is_contiguous()


@pytest.mark.parametrize("variant", ["plain"], scope="module")
@pytest.mark.parametrize("part", ["sinks", "logits", "gate_up", "down", "limit", "alpha", "window"])
def test_every_part_matters(part, reference, model):
    """Without it the logits are others, so that the comparisons above hold it."""
    config, layers = model.config, []
    for layer in model.params.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if part == "sinks":
            mixer = mixer._replace(sinks_H=torch.zeros_like(mixer.sinks_H))
        elif part == "logits":
            mlp = mlp._replace(bias_logits_E=None)
        elif part in ("gate_up", "down"):
            field = {"gate_up": "bias_gate_up_EP", "down": "bias_down_ED"}[part]
            mlp = mlp._replace(biases=mlp.biases._replace(**{field: torch.zeros_like(getattr(mlp.biases, field))}))
        layers.append(layer._replace(mixer=mixer, mlp=mlp))
    if part in ("limit", "alpha"):
        config = replace(config, activation=replace(config.activation, **{part: {"limit": None, "alpha": 1.0}[part]}))
    if part == "window":
        config = replace(config, decoder=replace(config.decoder, window=9))
    functions = model.architecture.make_layers(config, fmoe.functional.Kernels())
    changed = replace(
        model,
        config=config,
        params=model.params._replace(layers=tuple(layers)),
        eager=replace(model.eager, layers=functions),
    )
    ids = draw_ids(17)
    assert (one_pass(changed, ids) - reference.logits(ids)).abs().max() > 1e-2


@pytest.mark.parametrize(("experts", "k"), [(32, 4), (7, 1), (5, 5)])
def test_router(experts, k, rng):
    """In bfloat16: the linear with its bias, the choice, and the softmax over the chosen, which rounds."""
    config = GptOssConfig(**BASE | {"num_local_experts": experts, "num_experts_per_tok": k})
    rule, router = gpt_oss.parse_config(config.to_dict()).router, GptOssTopKRouter(config).bfloat16()
    router.weight.data = 0.3 * torch.randn(experts, 36, generator=rng).bfloat16()
    router.bias.data = torch.randn(experts, generator=rng).bfloat16()
    x_TD = torch.randn(60, 36, generator=rng).bfloat16()
    logits_TE = router_logits(x_TD, router.weight.data, router.bias.data, float32=rule.float32_logits)
    best = logits_TE.float().sort(-1, descending=True).values
    clear = (best[:, : k + 1].diff() < 0).all(-1)  # equal logits are nobody's to decide
    assert clear.sum() > 20
    with torch.no_grad():
        expected_logits, weights, ids = router(x_TD)
    found = route(logits_TE, None, rule)
    assert torch.equal(logits_TE, expected_logits)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(found.experts_TK[clear], ids[clear].int())
    assert torch.equal(found.weights_TK[clear], weights[clear].float())


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_hub_config_keys(reference, model, tmp_path):
    """Published files name the experts of a token and the first context twice, and transformers reads neither."""

    def change(raw):
        return to_hub_keys(raw) | {"experts_per_token": 3, "initial_context_length": 16}

    old = fmoe.load(rewrite_config(reference, tmp_path / "old", change), compile=False)
    assert old.config == model.config
    ids = draw_ids(17)
    assert_equal_logits(one_pass(old, ids), reference.logits(ids))


# What runs it

RUNS = Availability(True, "", "3.6.0")
GPU = Capabilities("cuda", "", "", 1, torch.__version__, RUNS, AiterRecord(False, "aiter not installed"), RUNS)


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_where_kernels_would_run_the_references_are_taken_and_named(model):
    decision = decide_for(model.params, model.config, GPU, requested="auto")
    why = "no Triton kernel computes biased non-SwiGLU experts"
    assert (decision.experts, decision.routing, decision.sinks) == ("reference", "reference", True)
    assert decision.lines == (
        f"experts: reference (aiter not installed; {why})",
        "routing: reference, as the experts",
        "attention: reference (no kernel of attention has sinks)",
    )
    with pytest.raises(RuntimeError, match=f"kernels='triton' cannot run here: {why}; use kernels='auto'"):
        decide_for(model.params, model.config, GPU, requested="triton")
    with pytest.raises(RuntimeError, match="kernels='aiter' cannot run here: aiter not installed"):
        decide_for(model.params, model.config, GPU, requested="aiter")


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_what_runs_it_is_logged_and_in_doctor(reference, model, caplog):
    with caplog.at_level(logging.DEBUG, "fmoe"):
        loaded = fmoe.load(reference.folder, compile=False)
    lines = diagnose(model=reference.folder, device="cpu").model.decision
    assert lines == loaded.decision.lines == model.decision.lines
    assert lines[0].startswith("experts: reference (")
    assert lines[2] == "attention: reference (no kernel of attention has sinks)"
    assert [message for message in caplog.messages if message in lines] == list(lines)


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_decode_with_the_kernels_that_remain(model, monkeypatch):
    """On a GPU those of norms and head; the references of attention get masks."""
    taken = []

    def add(kernels, device, dtype, requested, /, *, sinks):
        taken.append(sinks)
        return add_decode_kernels(kernels, device, dtype, "triton", sinks=sinks)

    monkeypatch.setattr(fmoe.model, "add_decode_kernels", add)
    monkeypatch.setattr(decode_choice, "probe_triton", lambda device: RUNS)
    with_kernels = fmoe.load(model.folder, compile=False)
    assert taken == [True, True]
    assert with_kernels.eager.masked and with_kernels.graphs.masked
    assert with_kernels.eager.choose is not None and model.eager.choose is None


@pytest.mark.parametrize("variant", ["plain"], scope="module")
def test_its_key_is_its_own(model):
    [key] = [key for key in list_keys(model.params, model.config) if key.operator == "moe"]
    assert str(key) == "moe E7 K3 S0 G0 D36 F28 float32 biased non-SwiGLU"


# Published files

SMALL = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": [S, F] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip
LARGE = SMALL | {"num_hidden_layers": 36, "layer_types": [S, F] * 18, "num_local_experts": 128}


# The model card counts active parameters without the embedding, 0.58e9.
@pytest.mark.parametrize(
    ("raw", "total", "active"),
    [pytest.param(SMALL, 20.91e9, 4.19e9, id="20b"), pytest.param(LARGE, 116.83e9, 5.71e9, id="120b")],
)
def test_flagships(raw, total, active, tmp_path):
    info = check_flagship(raw, tmp_path, total=total, active=active)
    assert "cannot be loaded" not in info.weights
    assert info.stored_dtype == "bfloat16, experts in MXFP4"
    assert [(group.kind, group.experts, group.top_k, group.width) for group in info.groups] == [
        (kind, raw["num_local_experts"], 4, 2880) for kind in (S, F)
    ]
    assert sum(len(group.layers) for group in info.groups) == raw["num_hidden_layers"]
    assert find_architecture(raw) is find_architecture({"model_type": "gpt_oss"}) is gpt_oss


def test_rotation_of_the_published_files():
    rope = gpt_oss.parse_config(SMALL).decoder.rope
    assert (rope.rotary_size, rope.theta, rope.factor, rope.original_context) == (64, 150000.0, 32.0, 4096)
    assert (rope.truncate, rope.beta_fast, rope.beta_slow) == (False, 32.0, 1.0)
    assert rope.attention_factor == pytest.approx(1.3465736)  # 0.1 ln 32 + 1


def test_absent_keys_take_the_familys_defaults():
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_local_experts", "num_experts_per_tok", "max_position_embeddings")
    bare, full = (gpt_oss.parse_config(raw) for raw in ({key: SMALL[key] for key in kept}, SMALL))
    assert bare == full
    nulls = {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "num_attention_heads": 60}
    config = gpt_oss.parse_config(SMALL | nulls)
    assert (config.attention.head_size, config.attention.kv_heads) == (48, 60)
    assert config.decoder.rope == replace(full.decoder.rope, rotary_size=48)
    plain = gpt_oss.parse_config(SMALL | {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}).decoder.rope
    assert (plain.factor, plain.theta) == (1.0, 1e4)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not implemented; implemented: 'silu'"),
        ({"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor=0.5 is not implemented"),
        ({"rope_scaling": {"type": "llama3"}}, NotImplementedError, "rope type 'llama3' is unknown"),
        ({"layer_types": ["chunked"] * 24}, NotImplementedError, r"layer_types \['chunked'\] are unknown; known: full"),
        ({"layer_types": [S, F]}, ValueError, "layer_types must list num_hidden_layers=24 kinds"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be an integer >= 1, got 0"),
        ({"swiglu_limit": 0}, ValueError, r"swiglu_limit must be in 1e-30..1e\+30, got 0"),
        ({"swiglu_alpha": "1.7"}, ValueError, "swiglu_alpha must be a number, got '1.7'"),
        ({"attention_bias": 1}, ValueError, "attention_bias must be true or false, got 1"),
        ({"num_local_experts": 0}, ValueError, "num_local_experts must be an integer >= 1, got 0"),
        ({"num_experts_per_tok": 33}, ValueError, "num_experts_per_tok=33 must be in 1..num_local_experts=32"),
        ({"num_key_value_heads": 5}, ValueError, "num_attention_heads=64 must be a multiple of num_key_value_heads=5"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size must be an integer >= 1, got 0"),
    ],
)
def test_values_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        gpt_oss.parse_config(SMALL | change)
