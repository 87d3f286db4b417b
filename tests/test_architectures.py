"""fmoe/architectures.py: which family runs a config.json, and which tensors it may leave unread."""

from types import SimpleNamespace

import pytest

from fmoe.architectures import KNOWN, find_architecture, ignored_tensors
from fmoe.models import qwen3_next


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
        {"model_type": "qwen3_next"},
        {"model_type": "qwen3_next", "architectures": None},
        {"model_type": "qwen3_next", "architectures": []},
        {"model_type": "qwen3_next", "architectures": ["SomethingElse"]},
        {"model_type": "somebody's own", "architectures": ["Qwen3NextForCausalLM"]},
        {"architectures": ["Other", "Qwen3NextForCausalLM"]},
    ],
    ids=str,
)
def test_find_qwen3_next(raw):
    assert find_architecture(raw) is qwen3_next


@pytest.mark.parametrize(
    ("raw", "start"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"'llama' with architectures \['LlamaFor"),
        ({"model_type": "mixtrl"}, r"'mixtrl' with architectures \[\]"),
        ({}, r"None with architectures \[\]"),
        ({"model_type": ["qwen3_next"]}, r"\['qwen3_next'\] with"),
    ],
    ids=str,
)
def test_an_unknown_family_lists_the_known(raw, start):
    with pytest.raises(
        ValueError, match=rf"config.json: model_type {start}.* is unknown; known model types: "
    ) as caught:
        find_architecture(raw)
    listed = str(caught.value).rpartition("known model types: ")[2].split(", ")
    assert listed == sorted(listed)
    assert set(listed) == {name for family in KNOWN for name in family.MODEL_TYPES}
    assert "qwen3_next" in listed


def test_no_name_belongs_to_two_families():
    for names in ([f.MODEL_TYPES for f in KNOWN], [f.ARCHITECTURES for f in KNOWN]):
        flat = [name for group in names for name in group]
        assert len(flat) == len(set(flat))


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("mtp.fc.weight", True),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", True),
        ("model.layers.4.mlp.gate.weight", True),
        ("model.layers.10.mlp.gate.weight", True),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.rotary_emb.inv_freq", True),
        ("model.mtp.weight", False),
        ("model.layers.x.mlp.gate.weight", False),
        ("other.layers.4.weight", False),
        ("lm_head.weight", False),
        ("lm_head.bias", False),
    ],
)
def test_ignored_tensors(name, ignored):
    config = SimpleNamespace(layer_kinds=("a",) * 4, tied=False)
    assert ignored_tensors(config)(name) is ignored


def test_a_tied_head_may_stay_unread():
    tied = ignored_tensors(SimpleNamespace(layer_kinds=("a",) * 4, tied=True))
    assert tied("lm_head.weight") is True
    assert tied("lm_head.bias") is False
