"""fmoe/architectures.py: which family runs a config.json, and which tensors it may leave unread."""

from types import SimpleNamespace

import pytest

from fmoe.architectures import KNOWN, REFUSED, find_architecture, ignored_tensors
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


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (
            {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
            "Llama4ForConditionalGeneration",
        ),
        ({"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}, "Llama4ForCausalLM"),
        ({"model_type": "llama4_text"}, "llama4_text"),
        ({"model_type": "llama4", "architectures": ["SomebodysOwn"]}, "llama4"),
    ],
    ids=str,
)
def test_llama4_is_refused_with_the_reason(raw, name):
    with pytest.raises(
        NotImplementedError,
        match=f"{name} is not implemented: a weight multiplies the input of an expert .*, and attention is chunked",
    ):
        find_architecture(raw)


def test_no_family_is_both_known_and_refused():
    known = {name for family in KNOWN for name in (*family.MODEL_TYPES, *family.ARCHITECTURES)}
    assert not known & REFUSED.keys()


@pytest.mark.parametrize("value", [5, 0, True, False, 1.5, "x", "", {}, [5], ["Qwen3NextForCausalLM", None]], ids=repr)
def test_architectures_must_be_a_list_of_names(value):
    with pytest.raises(ValueError, match=r"config.json: architectures must be a list of names, got ") as caught:
        find_architecture({"model_type": "qwen3_next", "architectures": value})
    assert str(caught.value).endswith(repr(value))


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
    config = SimpleNamespace(layer_kinds=("a",) * 4, tied=False, draft_layers=9)
    assert ignored_tensors(config)(name) is ignored


def test_a_tied_head_may_stay_unread():
    tied = ignored_tensors(SimpleNamespace(layer_kinds=("a",) * 4, tied=True, draft_layers=0))
    assert tied("lm_head.weight") is True
    assert tied("lm_head.bias") is False


@pytest.mark.parametrize(
    ("drafts", "quiet", "loud"), [(0, [], [4, 5, 10]), (1, [4], [5, 6]), (2, [4, 5], [6])], ids=["none", "one", "two"]
)
def test_layers_behind_the_draft_layers_are_logged_once(drafts, quiet, loud, caplog):
    ignored = ignored_tensors(SimpleNamespace(layer_kinds=("a",) * 4, tied=False, draft_layers=drafts))
    assert not any(ignored(f"model.layers.{i}.norm.weight") for i in range(4))
    assert all(ignored(f"model.layers.{i}.norm.weight") for i in quiet)
    assert ignored("mtp.layers.7.norm.weight")
    assert caplog.records == []
    assert all(ignored(f"model.layers.{i}.norm.weight") for i in loud)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        f"layers from model.layers.{4 + drafts} on are not read (the checkpoint has model.layers.{loud[0]}.norm.weight)"
        f": config.json says num_hidden_layers=4 and {drafts} draft layers; correct num_hidden_layers if"
    )
