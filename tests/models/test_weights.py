"""models/weights.py through a real family: layouts on disk, fused shared experts, tied heads, what may stay unread."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3NextConfig

import fmoe
from fmoe.loading import named_tensors

V, D, E, F = 61, 32, 5, 16
SMALL = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": F,
    "shared_expert_intermediate_size": F,
    "max_position_embeddings": 256,
}
IDS = torch.randint(V, (1, 70), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def reference(make_reference):
    return make_reference(Qwen3NextConfig(**SMALL))


@pytest.fixture
def tensors(reference):
    return load_file(reference.folder / "model.safetensors")


@pytest.fixture
def write(reference, tmp_path):
    """Write a checkpoint of other tensors, and of other values in config.json."""

    def write(tensors, **config):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        raw = json.loads((reference.folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write


def load(folder, **options):
    return fmoe.load(folder, compile=False, **options)


def assert_same_params(found, expected):
    pairs = zip(named_tensors(found.params), named_tensors(expected.params), strict=True)
    for (path, tensor), (expected_path, expected_tensor) in pairs:
        assert path == expected_path
        assert torch.equal(tensor, expected_tensor), path


def test_stacked_and_per_expert_layouts_are_one_model(make_reference, reference):
    stacked = make_reference(Qwen3NextConfig(**SMALL), save_original_format=False)
    names = load_file(stacked.folder / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names and not any(".experts.0." in name for name in names)
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in load_file(reference.folder / "model.safetensors")

    found, expected = load(stacked.folder), load(reference.folder)

    assert_same_params(found, expected)
    assert torch.equal(fmoe.logits(found, IDS), fmoe.logits(expected, IDS))
    # and they are the tensors that transformers computes with
    mine = load_file(stacked.folder / "model.safetensors")
    assert torch.equal(expected.params.layers[1].mlp.w_down_EDF[:E], mine["model.layers.1.mlp.experts.down_proj"])


def test_one_layer_stacked_and_one_not(tensors, write, reference):
    prefix = "model.layers.0.mlp.experts"
    parts = [[tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(E)] for part in ("gate", "up", "down")]
    tensors[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], 1)
    tensors[f"{prefix}.down_proj"] = torch.stack(parts[2])
    assert_same_params(load(write(tensors)), load(reference.folder))


@pytest.mark.parametrize("slots", [1, 2])
def test_shared_slots_hold_the_checkpoints_bytes(make_reference, slots):
    reference = make_reference(Qwen3NextConfig(**SMALL | {"shared_expert_intermediate_size": slots * F}))
    model = load(reference.folder, shared_experts="fused")
    tensors = load_file(reference.folder / "model.safetensors")
    for i, layer in enumerate(model.params.layers):
        prefix, moe = f"model.layers.{i}.mlp", layer.mlp
        gate, up, down = (tensors[f"{prefix}.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert moe.w_gate_up_EPD.shape == (E + slots, 2 * F, D) and moe.w_down_EDF.shape == (E + slots, D, F)
        assert moe.shared is None
        for s in range(slots):
            part = slice(s * F, (s + 1) * F)
            assert torch.equal(moe.w_gate_up_EPD[E + s, :F], gate[part])
            assert torch.equal(moe.w_gate_up_EPD[E + s, F:], up[part])
            assert torch.equal(moe.w_down_EDF[E + s], down[:, part])
        assert moe.w_router_ED.shape == (E + 1, D)
        assert torch.equal(moe.w_router_ED[:E], tensors[f"{prefix}.gate.weight"])
        assert torch.equal(moe.w_router_ED[E:], tensors[f"{prefix}.shared_expert_gate.weight"])


def test_a_separate_shared_expert_holds_them_too(reference, tensors):
    for i, layer in enumerate(load(reference.folder, shared_experts="separate").params.layers):
        prefix, moe = f"model.layers.{i}.mlp", layer.mlp
        gate, up, down = (tensors[f"{prefix}.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(moe.shared.mlp.w_gate_up_PD, torch.cat([gate, up]))
        assert torch.equal(moe.shared.mlp.w_down_DF, down)
        assert torch.equal(moe.shared.w_gate_1D, tensors[f"{prefix}.shared_expert_gate.weight"])
        assert (moe.w_router_ED.shape[0], moe.w_down_EDF.shape[0]) == (E, E)


def test_every_tensor_matters(reference, tensors, write):
    """Change one tensor at a time on disk: the logits follow, so each lands where it is used."""
    expected = fmoe.logits(load(reference.folder), IDS)
    for name in [name for name in tensors if ".experts." not in name or ".experts.3." in name]:
        changed = tensors | {name: tensors[name] * 1.5 + 0.1}
        assert not torch.equal(fmoe.logits(load(write(changed)), IDS), expected), name


def test_tied_head(make_reference):
    reference = make_reference(Qwen3NextConfig(**SMALL, tie_word_embeddings=True))
    tensors = load_file(reference.folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    model = load(reference.folder)
    assert model.params.head_VD is model.params.embed_VD
    expected = reference.logits(IDS[0].tolist())
    assert (fmoe.logits(model, IDS)[0] - expected).abs().max() <= 1e-4 * max(1, expected.abs().max())


def test_a_stored_head_outdoes_a_tied_one_as_in_the_reference(tensors, write, reference):
    folder = write(tensors, tie_word_embeddings=True)
    model = load(folder)
    assert torch.equal(model.params.head_VD, tensors["lm_head.weight"])
    assert torch.equal(fmoe.logits(model, IDS), fmoe.logits(load(reference.folder), IDS))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits[0]
    assert (fmoe.logits(model, IDS)[0] - expected).abs().max() <= 1e-4 * max(1, expected.abs().max())


def test_an_untied_head_must_be_there(tensors, write):
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing tensors \(1\): lm_head.weight\n"):
        load(write(tensors))


def test_draft_layers_and_later_layers_stay_unread(tensors, write, reference):
    extra = {"mtp.fc.weight": torch.ones(3, 2), "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(1, 2, 3)}
    extra |= {"model.layers.2.mlp.gate.weight": torch.ones(2, 2), "model.layers.13.anything": torch.ones(1)}
    extra["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    assert_same_params(load(write(tensors | extra)), load(reference.folder))


@pytest.mark.parametrize("layer", [0, 1])
def test_one_tensor_too_many_or_too_few(tensors, write, layer):
    name = f"model.layers.{layer}.mlp.experts.3.down_proj.weight"
    odd = f"model.layers.{layer}.mlp.experts.{E}.down_proj.weight"
    with pytest.raises(ValueError, match=rf"unknown tensors \(1\): {odd}"):
        load(write(tensors | {odd: tensors[name].clone()}))
    kept = tensors.pop(name)
    with pytest.raises(ValueError, match=rf"missing tensors \(1\): {name}"):
        load(write(tensors))
    with pytest.raises(ValueError, match=rf"wrong shapes \(1\): {name} \(expected \[{D}, {F}\], got \[{F}, {D}\]\)"):
        load(write(tensors | {name: kept.T}))


def test_a_pickle_is_refused(tensors, write):
    folder = write(tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds pickles only \(pytorch_model.bin\)"):
        load(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"it is a torch.save archive, that is a pickle; convert it to safetensors"):
        load(folder)


def test_a_shared_expert_of_width_0(make_reference):
    """transformers stores its empty tensors and its gate; the gate weighs nothing and is not kept."""
    reference = make_reference(Qwen3NextConfig(**SMALL | {"shared_expert_intermediate_size": 0}))
    tensors = load_file(reference.folder / "model.safetensors")
    assert tensors["model.layers.0.mlp.shared_expert.gate_proj.weight"].shape == (0, D)
    model = load(reference.folder)
    assert model.params.layers[0].mlp.shared is None
    assert model.params.layers[0].mlp.w_router_ED.shape == (E, D)


def test_a_config_that_forgets_the_shared_expert(tensors, write):
    with pytest.raises(
        ValueError, match=r"wrong shapes \(6\): .*shared_expert.gate_proj.weight \(expected \[0, 32\], got"
    ):
        load(write(tensors, shared_expert_intermediate_size=0))


def test_a_checkpoint_without_the_shared_experts_tensors(tensors, write):
    kept = {name: tensor for name, tensor in tensors.items() if "shared_expert" not in name}
    with pytest.raises(ValueError, match=r"missing tensors \(8\): model.layers.0.mlp.shared_expert_gate.weight"):
        load(write(kept))
    assert load(write(kept, shared_expert_intermediate_size=0)).config.shared.width == 0
    assert load(write(kept, shared_expert_intermediate_size=None)).config.shared.width == 0
