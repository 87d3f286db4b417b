"""Random weights: the same for the same seed, in the layout of a load, and such that a model runs on them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fmoe
from fmoe.architectures import find_architecture
from fmoe.functional.quant import Fp8, dequantize
from fmoe.functional.routing import route_fused, router_logits
from fmoe.loading import count_params, make_meta_params, named_tensors
from fmoe.model import resolve_folder
from fmoe.random_weights import DrawnNames, draw_, fill_params_, make_random_params, quantised_names

PUBLISHED_FP8 = Path(__file__).parents[1] / "bench" / "configs" / "qwen3_next_80b_a3b_fp8" / "config.json"

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 203,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "intermediate_size": 40}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "intermediate_size": 40,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 20, "rope_theta": 1e6},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "qwen3_moe": EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_next": EXPERTS
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "shared_expert_intermediate_size": 20,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"q_lora_rank": None, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a folder that has a config.json and nothing else."""

    def write(family: str, **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(
            json.dumps(BASE | FAMILIES[family] | {"model_type": family, "rope_theta": 1e4} | changes)
        )
        return tmp_path

    return write


def tensors(model: fmoe.Model) -> dict[str, Tensor]:
    return dict(named_tensors(model.params))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_on_random_weights(family: str, write: Any) -> None:
    model = fmoe.load(write(family), weights="random", device="cpu", seed=1)
    assert model.text is None
    drawn = tensors(model)
    assert all(isinstance(tensor, torch.nn.Parameter) and tensor.isfinite().all() for tensor in drawn.values())
    logits = fmoe.logits(model, [list(range(50))])[0]
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2.0
    assert len({tuple(row.topk(2).indices.tolist()) for row in logits}) > 25  # tokens differ in what follows
    done = fmoe.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=4, temperature=0.0)
    assert [len(completion.token_ids) for completion in done] == [4, 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_one_model(family: str, write: Any) -> None:
    folder = write(family)
    first, again = (fmoe.load(folder, weights="random", device="cpu", seed=5) for _ in range(2))
    other = fmoe.load(folder, weights="random", device="cpu", seed=6)
    for name, tensor in tensors(first).items():
        assert torch.equal(tensor, tensors(again)[name])
        assert not torch.equal(tensor, tensors(other)[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_spread_over_the_experts_of_every_layer(family: str, write: Any) -> None:
    model = fmoe.load(write(family), weights="random", device="cpu")
    router = model.config.router
    layers = [layer.mlp for layer in model.params.layers if hasattr(layer.mlp, "w_router_ED")]
    assert layers
    rows_TD = torch.nn.functional.normalize(torch.randn(600, 48, generator=torch.Generator().manual_seed(0))) * 48**0.5
    for mlp in layers:
        logits_TE = router_logits(rows_TD, mlp.w_router_ED, float32=True)
        chosen = route_fused(logits_TE, mlp.bias_E, router, slots=0).experts_TK
        share_E = chosen.flatten().bincount(minlength=router.num_experts) / chosen.numel()
        entropy = -(share_E * share_E.clamp(min=1e-9).log()).sum() / math.log(router.num_experts)
        assert entropy > 0.93
        assert 1.4 < logits_TE[:, : router.num_experts].std() < 2.6


def test_the_layout_is_that_of_a_load() -> None:
    stored, drawn = fmoe.load("demo", device="cpu"), fmoe.load("demo", device="cpu", weights="random")
    ours, theirs = tensors(drawn), tensors(stored)
    layout = {name: (t.shape, t.stride(), t.dtype, t.device) for name, t in theirs.items()}
    assert layout == {name: (t.shape, t.stride(), t.dtype, t.device) for name, t in ours.items()}
    # what a trained model has, too: norms about one, decays below zero
    for name, tensor in ours.items():
        if "norm" in name:
            assert tensor.mean() == pytest.approx(1.0, abs=0.1)
            assert 0.03 < tensor.std() < 0.3
        if name.endswith("decay_H"):
            assert (tensor <= -1).all()
            assert (tensor >= -16).all()
        if name.endswith("dt_bias_H"):
            assert (torch.nn.functional.softplus(tensor) < 0.11).all()
        if name.endswith(("w_in_ND", "w_out_DN", "w_gate_up_EPD", "w_down_EDF", "head_VD")):
            assert tensor.std() == pytest.approx(tensor.shape[-1] ** -0.5, rel=0.05)
    assert ours["embed_VD"].std() == pytest.approx(0.02, rel=0.05)
    assert ours["layers.0.mixer.w_conv_WN"].std() == pytest.approx(0.5, rel=0.1)


def test_shared_experts_lie_as_asked_for(write: Any) -> None:
    folder = write("qwen3_next")
    fused, apart = (
        fmoe.load(folder, weights="random", device="cpu", shared_experts=how) for how in ("fused", "separate")
    )
    assert fused.params.layers[0].mlp.w_down_EDF.shape[0] == 13
    assert apart.params.layers[0].mlp.w_down_EDF.shape[0] == 12
    assert count_params(fused.params)[0] == count_params(apart.params)[0]


def test_a_tied_head_is_drawn_once(write: Any) -> None:
    model = fmoe.load(write("qwen3_moe", tie_word_embeddings=True), weights="random", device="cpu")
    assert model.params.head_VD is model.params.embed_VD
    assert model.params.head_VD.std() == pytest.approx(0.02, rel=0.05)


def test_bfloat16_is_drawn_in_the_dtype_that_is_named(write: Any) -> None:
    model = fmoe.load(write("qwen3_moe", dtype="bfloat16"), weights="random", device="cpu", dtype="bfloat16")
    assert model.params.layers[0].mlp.w_down_EDF.dtype == torch.bfloat16
    assert model.params.layers[0].mlp.w_down_EDF.float().std() == pytest.approx(20**-0.5, rel=0.05)


def test_a_config_without_a_dtype_is_bfloat16_where_memory_is_short(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmoe.placing.available_bytes", lambda: 1)
    folder = write("qwen3_moe", dtype=None)
    assert fmoe.load(folder, weights="random", device="cpu").dtype == torch.bfloat16


def test_stored_weights_are_not_read(tmp_path: Path) -> None:
    demo = resolve_folder("demo")
    shutil.copy(demo / "config.json", tmp_path)
    shutil.copy(demo / "generation_config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors at all")
    model = fmoe.load(tmp_path, weights="random", device="cpu")
    stored = fmoe.load("demo", device="cpu")
    assert (model.defaults.temperature, model.defaults.top_p) == (stored.defaults.temperature, stored.defaults.top_p)
    assert model.params.embed_VD.std() == pytest.approx(0.02, rel=0.05)


class Pair(NamedTuple):
    """A quantised matrix, one whose last block is partial, and its plain rows."""

    w_in_ND: Fp8


def test_blocks_of_fp8_dequantise_to_the_usual_scale() -> None:
    rows, columns = 300, 520
    empty = Fp8(
        torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(3, 5), torch.empty(70, columns).bfloat16()
    )
    params = fill_params_(Pair(empty), seed=3)
    w_ND = dequantize(params.w_in_ND, torch.float32)
    assert w_ND.shape == (370, columns)
    assert w_ND.isfinite().all()
    assert w_ND[:rows].std() == pytest.approx(columns**-0.5, rel=0.1)
    assert w_ND[rows:].std() == pytest.approx(columns**-0.5, rel=0.05)
    assert params.w_in_ND.scale.unique().numel() == 15
    assert params.w_in_ND.w.float().unique().numel() > 100


def build_published(names: Any) -> Any:
    """Give the meta parameters of the FP8 config that bench carries, cut to one period of its layers."""
    raw = json.loads(PUBLISHED_FP8.read_text()) | {"num_hidden_layers": 4}
    family = find_architecture(raw)
    config = family.parse_config(raw)
    return make_meta_params(lambda fill: family.build_params(fill, config), dtype=torch.bfloat16, names=names)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "by rule"])
def test_a_published_config_is_quantised_as_its_checkpoint(listed: bool) -> None:
    raw = json.loads(PUBLISHED_FP8.read_text())
    if not listed:
        del raw["quantization_config"]["modules_to_not_convert"]
    params = build_published(quantised_names(raw))
    plain = build_published(DrawnNames(None))
    assert count_params(plain)[1] > 1.6 * count_params(params)[1]
    delta, attention = params.layers[0].mixer, params.layers[3].mixer
    assert delta.w_in_ND.w.shape == (12288, 2048)
    assert delta.w_in_ND.rest_MD.shape == (64, 2048)  # b and a
    assert attention.w_in_ND.w.shape == (9216, 2048)
    assert attention.w_in_ND.rest_MD is None
    assert all(isinstance(w, Fp8) for w in (delta.w_out_DN, attention.w_out_DN, *params.layers[0].mlp[1:3]))
    assert params.layers[0].mlp.w_down_EDF.w.shape == (513, 2048, 512)  # the shared expert with the routed ones
    kept = (params.head_VD, params.embed_VD, params.layers[0].mlp.w_router_ED, delta.w_conv_WN, attention.norm_HC)
    assert all(isinstance(tensor, Tensor) and tensor.dtype != torch.float8_e4m3fn for tensor in kept)


def test_a_model_in_fp8_is_drawn(write: Any) -> None:
    raw = json.loads((write("qwen3_next", quantization_config={"quant_method": "fp8"}) / "config.json").read_text())
    family = find_architecture(raw)
    config = family.parse_config(raw)
    params = make_random_params(
        lambda fill: family.build_params(fill, config),
        dtype=torch.float32,
        device=torch.device("cpu"),
        names=quantised_names(raw),
        seed=0,
    )
    w_down_EDF = params.layers[0].mlp.w_down_EDF
    assert isinstance(w_down_EDF, Fp8)
    assert dequantize(w_down_EDF, torch.float32).std() == pytest.approx(20**-0.5, rel=0.25)  # of 13 factors
    assert all(tensor.float().isfinite().all() for _, tensor in named_tensors(params))
    # where FP8 is not kept, the same config gives plain numbers
    model = fmoe.load(write("qwen3_next", quantization_config={"quant_method": "fp8"}), weights="random", device="cpu")
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.float32}


def test_what_is_drawn_in_parts_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmoe.random_weights.DRAWN_AT_ONCE", 1000)
    tensor = torch.full((77, 41), float("nan"), dtype=torch.bfloat16)
    draw_(tensor, "layers.0.w_in_ND", seed=0, fan_in=41)
    assert tensor.isfinite().all()
    assert tensor.float().std() == pytest.approx(41**-0.5, rel=0.05)
    assert not torch.equal(tensor.flatten()[:1000], tensor.flatten()[1000:2000])


def test_the_names_that_a_quantised_checkpoint_would_hold() -> None:
    kept = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.3.mlp.down_proj", "k_proj"]}
    raw = {"quantization_config": kept}
    names = quantised_names(raw)
    held = ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.gate_proj.weight", "mlp.experts.down_proj")
    absent = ("mlp.gate", "mlp.down_proj", "self_attn.k_proj", "self_attn.q_norm", "linear_attn.in_proj_ba")
    assert all(f"model.layers.3.{name}_scale_inv" in names for name in held)
    assert not any(f"model.layers.3.{name}.weight_scale_inv" in names for name in absent)
    assert "model.layers.4.mlp.down_proj.weight_scale_inv" in names
    assert "model.layers.3.self_attn.qk_proj.weight_scale_inv" in names  # k_proj is no name's end here
    assert "lm_head.weight_scale_inv" not in names
    assert "model.layers.3.self_attn.q_proj.weight" not in names
    assert "model.layers.3.mlp.experts.gate_up_proj" in names
    assert 7 not in names
    assert not quantised_names({})
    assert not quantised_names({"quantization_config": {"quant_method": "gptq"}})
    assert "model.layers.3.mlp.experts.gate_up_proj" in DrawnNames(None)
    assert "model.layers.3.mlp.experts.gate_up_proj_scale_inv" not in DrawnNames(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "zero"}, "weights='zero' must be one of stored, random"),
        ({"weights": ["random"]}, r"weights=\['random'\] must be one of"),
        ({"seed": -1}, "seed=-1 must be an int in 0"),
        ({"seed": 2**63}, "must be an int in 0"),
        ({"seed": True}, "seed=True must be"),
        ({"seed": 1.0}, r"seed=1\.0 must be"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fmoe.load("demo", **{"weights": "random", **options})


def test_an_unknown_quantisation_is_refused(write: Any) -> None:
    folder = write("qwen3_moe", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match="unknown quant_method 'gptq'"):
        fmoe.load(folder, weights="random", device="cpu")
