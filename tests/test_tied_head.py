"""A head beside a tied embedding: used where it is another tensor, and said."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

import fmoe
from fmoe import tied_head

IDS = [[3, 1, 4, 1, 5]]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("untied")
    AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, tie_word_embeddings=False)).float().save_pretrained(folder)
    return folder


def write_tied(untied: Path, folder: Path, *, same: bool) -> Path:
    shutil.copytree(untied, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    if same:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder):
    return fmoe.load(folder, device="cpu", dtype="float32", compile=False)


def test_a_head_of_its_own_is_used_and_said(untied, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tied_head, "ROWS", 7)  # the last rows are fewer
    folder = write_tied(untied, tmp_path / "tied", same=False)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += 1.0  # the last row alone
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        model = load(folder)
    assert "config.json ties the head to the embedding, but lm_head.weight is another tensor" in caplog.text
    assert torch.equal(model.params.head_VD, head)


def test_the_logits_are_those_of_the_untied_model(untied, tmp_path):
    tied = write_tied(untied, tmp_path / "tied", same=False)
    (expected,), (found,) = (fmoe.logits(load(folder), IDS) for folder in (untied, tied))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_head_that_is_the_embedding_stays_tied(untied, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        model = load(write_tied(untied, tmp_path / "tied", same=True))
    assert model.params.head_VD is model.params.embed_VD
    assert "another tensor" not in caplog.text
