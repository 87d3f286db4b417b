"""gpt-oss with experts in MXFP4: they become what the format says, and the model what transformers makes of that."""

import json
import logging
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import fmoe
import fmoe.loading
from fmoe.architectures import find_architecture, ignored_tensors
from fmoe.checkpoint import open_checkpoint, read_config
from fmoe.info import describe
from fmoe.loading import check_params, load_params, named_tensors

from .parity import V, assert_equal_logits, draw_ids, in_pieces, one_pass

E, D, F = 5, 64, 96
CONFIG = GptOssConfig(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    num_local_experts=E,
    num_experts_per_tok=2,
    sliding_window=7,
    swiglu_limit=1.5,
    max_position_embeddings=640,
    eos_token_id=None,
)
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FILE = "model.safetensors"


def draw_blocks(rng, rows, columns):
    """Random codes and exponents of about 0.1, and the numbers that they are, [E, rows, columns] in float64."""
    codes = torch.randint(256, (E, rows, columns // 32, 16), generator=rng, dtype=torch.uint8)
    exponents = torch.randint(121, 125, (E, rows, columns // 32), generator=rng, dtype=torch.uint8)
    low, high = VALUES[codes.numpy() % 16], VALUES[codes.numpy() // 16]
    numbers = np.stack((low, high), -1).reshape(E, rows, columns // 32, 32)
    numbers = numbers * 2.0 ** (exponents.numpy().astype(int)[..., None] - 127)
    return codes, exponents, torch.from_numpy(numbers.reshape(E, rows, columns))


def write(folder, tensors, config, *, apart=False):
    """Write one file, or two of which the second has all that belongs to blocks of the first."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if not apart:
        save_file(tensors, folder / FILE)
        return folder
    placed = {name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in tensors}
    for file in set(placed.values()):
        save_file({name: tensor for name, tensor in tensors.items() if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


@pytest.fixture(scope="module")
def folders(make_reference, tmp_path_factory):
    """The experts of a random model in MXFP4, in one file and in two, and the same numbers as transformers has them."""
    reference, rng = make_reference(CONFIG), torch.Generator().manual_seed(3)
    blocks = load_file(reference.folder / FILE)
    plain = dict(blocks)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes, exponents, numbers = draw_blocks(rng, *((2 * F, D) if "gate_up" in name else (D, F)))
        plain[name] = numbers.transpose(1, 2).float().contiguous()
        del blocks[name]
        blocks |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
    folder, config = tmp_path_factory.mktemp("mxfp4"), read_config(reference.folder)
    quantised = config | {"quantization_config": QUANTIZATION}
    return {
        "blocks": write(folder / "blocks", blocks, quantised),
        "apart": write(folder / "apart", blocks, quantised, apart=True),
        "plain": write(folder / "plain", plain, config),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["blocks", "apart"])
def test_the_weights_are_exactly_what_the_format_says(kind, dtype, folders):
    found = dict(named_tensors(fmoe.load(folders[kind], dtype=dtype, compile=False).params))
    stored, width = load_file(folders["plain"] / FILE), F
    for i in range(2):
        gate_up, down = (stored[f"model.layers.{i}.mlp.experts.{name}_proj"].double() for name in ("gate_up", "down"))
        stack = found[f"layers.{i}.mlp.w_gate_up_EPD"]
        assert torch.equal(stack[:, :width].double(), gate_up[..., 0::2].transpose(1, 2))
        assert torch.equal(stack[:, width:].double(), gate_up[..., 1::2].transpose(1, 2))
        assert torch.equal(found[f"layers.{i}.mlp.w_down_EDF"].double(), down.transpose(1, 2))
    for name, tensor in named_tensors(fmoe.load(folders["plain"], dtype=dtype, compile=False).params):
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_logits(folders):
    model = fmoe.load(folders["blocks"], compile=False)
    reference = AutoModelForCausalLM.from_pretrained(folders["plain"], experts_implementation="eager").eval()
    for length in (1, 17, 65):
        ids = draw_ids(length, seed=length)
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0]
        assert 0.1 < expected.std() < 100
        assert_equal_logits(one_pass(model, ids), expected)
    assert_equal_logits(in_pieces(model, ids, [17, *[1] * 48]), expected)


def test_transformers_unpacks_alike(folders):
    """Its function for machines without kernels."""
    blocks, plain = (load_file(folders[kind] / FILE) for kind in ("blocks", "plain"))
    for name in (name for name in plain if name not in blocks):
        theirs = convert_moe_packed_tensors(blocks[f"{name}_blocks"], blocks[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(theirs, plain[name])


# What is said first


def build_and_watch(folder, messages, seen):
    """A family's build_params that notes what was logged when it is asked to allocate."""
    architecture, checkpoint = find_architecture(read_config(folder)), open_checkpoint(folder)
    config = architecture.parse_config(checkpoint.config)

    def build(fill):
        params = architecture.build_params(fill, config)
        seen.append((params.embed_VD.device.type, list(messages)))
        return params

    return build, checkpoint, ignored_tensors(config.decoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_is_said_before_any_of_it_is_taken(dtype, folders, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "fmoe")
    seen, taken = [], []
    build, checkpoint, ignore = build_and_watch(folders["blocks"], caplog.messages, seen)
    allocate = fmoe.loading._Recorder._allocate

    def watched(self, shape, *arguments, **options):
        taken.append((self.device.type, [message for message in caplog.messages if "MXFP4" in message]))
        return allocate(self, shape, *arguments, **options)

    monkeypatch.setattr(fmoe.loading._Recorder, "_allocate", watched)
    monkeypatch.setattr(fmoe.loading, "GIB", 1024)
    params = load_params(build, checkpoint, dtype=dtype, device=torch.device("cpu"), ignore=ignore)

    size = sum(tensor.nbytes for tensor in {id(t): t for _, t in named_tensors(params)}.values())
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    short = str(dtype).removeprefix("torch.")
    said = (
        f"weights in MXFP4 become {short} (no kernel reads MXFP4): the model takes {size / 1024:.1f} GiB, "
        f"its files have {stored / 1024:.1f} GiB"
    )
    assert {device for device, _ in taken} == {"meta", "cpu"}
    assert all(messages == [said] for device, messages in taken if device == "cpu")


def test_nothing_is_said_of_other_files(folders, caplog):
    caplog.set_level(logging.INFO, "fmoe")
    fmoe.load(folders["plain"], compile=False)
    assert "MXFP4" not in caplog.text


def test_info_counts_what_it_becomes(folders):
    blocks, plain = (describe(folders[kind], device="cpu") for kind in ("blocks", "plain"))
    assert (blocks.params, blocks.bytes, blocks.parts) == (plain.params, plain.bytes, plain.parts)
    assert "that agree with config.json" in blocks.weights
    assert "experts in MXFP4" in blocks.stored_dtype and "MXFP4" not in plain.stored_dtype


def test_random_weights_of_its_config(folders, tmp_path):
    shutil.copy(folders["blocks"] / "config.json", tmp_path)
    model = fmoe.load(tmp_path, weights="random", compile=False)
    assert one_pass(model, draw_ids(5)).isfinite().all()
    assert model.params.layers[0].mlp.w_gate_up_EPD.shape == (E, 2 * F, D)


# What is refused


def check(folder, tensors):
    """Check other tensors under the config of a folder."""
    folder.mkdir()
    config = {"model_type": "gpt_oss"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / FILE)
    build = partial(
        find_architecture(config).build_params, config=find_architecture(config).parse_config(CONFIG.to_dict())
    )
    return check_params(build, open_checkpoint(folder), dtype=torch.float32, ignore=lambda name: False)


BASE = "model.layers.1.mlp.experts.down_proj"
FAULTS = {
    "without exponents": (lambda t: t.pop(f"{BASE}_scales"), rf"missing tensors \(1\): {BASE}_scales"),
    "another dtype": (
        lambda t: t.update({f"{BASE}_blocks": t[f"{BASE}_blocks"].to(torch.int8)}),
        rf"wrong dtypes \(1\): {BASE}_blocks \(expected uint8, got int8\)",
    ),
    "exponents as numbers": (
        lambda t: t.update({f"{BASE}_scales": t[f"{BASE}_scales"].float()}),
        rf"wrong dtypes \(1\): {BASE}_scales \(expected uint8, got float32\)",
    ),
    "another shape": (
        lambda t: t.update({f"{BASE}_scales": t[f"{BASE}_scales"][:, :, :1].clone()}),
        rf"wrong shapes \(1\): {BASE}_scales \(expected \[5, 64, 3\], got \[5, 64, 1\]\)",
    ),
    "too many": (
        lambda t: t.update({f"{BASE}_zeros": t[f"{BASE}_scales"].clone()}),
        rf"unknown tensors \(1\): {BASE}_zeros",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit(fault, folders, tmp_path):
    change, match = FAULTS[fault]
    tensors = load_file(folders["blocks"] / FILE)
    assert check(tmp_path / "whole", tensors).mxfp4
    change(tensors)
    with pytest.raises(ValueError, match=match):
        check(tmp_path / "changed", tensors)


def test_widths_that_no_blocks_have(folders, tmp_path, monkeypatch):
    raw = CONFIG.to_dict() | {"intermediate_size": 90}
    monkeypatch.setattr(CONFIG.__class__, "to_dict", lambda self: raw)
    with pytest.raises(ValueError, match=r"(?s)wrong shapes.*parameters not filled exactly once"):
        check(tmp_path / "odd", load_file(folders["blocks"] / FILE))


def test_values_beyond_float16(folders, tmp_path):
    tensors = load_file(folders["blocks"] / FILE)
    tensors[f"{BASE}_blocks"][2, 3], tensors[f"{BASE}_scales"][2, 3] = 0x77, 160
    folder = write(tmp_path / "large", tensors, read_config(folders["blocks"]))
    with pytest.raises(
        ValueError, match=rf"{BASE}_blocks in .* has 96 values beyond 65504, .*; load with dtype bfloat16"
    ):
        fmoe.load(folder, dtype="float16", compile=False)
    fmoe.load(folder, dtype="bfloat16", compile=False)


@pytest.mark.parametrize("method", ["awq", "gptq", "nvfp4", "bitsandbytes"])
def test_other_quantisations_are_refused_by_name(method, folders, tmp_path):
    shutil.copytree(folders["plain"], tmp_path / "other")
    raw = read_config(folders["plain"]) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "other" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"unknown quant_method '{method}'; known are 'fp8', 'mxfp4'; use the unquan"):
        fmoe.load(tmp_path / "other")
