"""models/settings.py: typed values out of config.json, or an error that names the key."""

import math

import pytest

from fmoe.functional.rotary import RopeConfig
from fmoe.models.settings import read_bool, read_float, read_int, read_ints, read_rope, require


def test_read_int():
    assert read_int({"a": 3}, "a") == 3
    assert read_int({"a": 0}, "a", 5) == 0
    assert read_int({}, "a", 5) == read_int({"a": None}, "a", 5) == 5
    for value in (None, -1, 1.0, "3", True, [3]):
        with pytest.raises(ValueError, match=r"config.json: a must be an integer >= 0, got "):
            read_int({"a": value}, "a")
    with pytest.raises(ValueError, match=r"config.json: a must be an integer >= 0, got None"):
        read_int({}, "a")


def test_read_float():
    assert read_float({"a": 3}, "a") == 3.0 and type(read_float({"a": 3}, "a")) is float
    assert read_float({"a": 0.0}, "a", 5.0) == 0.0
    assert read_float({}, "a", 5.0) == read_float({"a": None}, "a", 5.0) == 5.0
    for value in (None, "3", True, [3.0]):
        with pytest.raises(ValueError, match=r"config.json: a must be a number, got "):
            read_float({"a": value}, "a")


def test_read_bool():
    assert read_bool({"a": False}, "a", True) is False
    assert read_bool({}, "a", True) is read_bool({"a": None}, "a", True) is True
    for value in (0, 1, "true", []):
        with pytest.raises(ValueError, match=r"config.json: a must be true or false, got "):
            read_bool({"a": value}, "a", True)


def test_read_ints():
    assert read_ints({"a": [3, 0]}, "a") == (3, 0)
    assert read_ints({}, "a") == read_ints({"a": None}, "a") == read_ints({"a": []}, "a") == ()
    for value in (3, "3", [1.0], [True], [None], {"b": 1}):
        with pytest.raises(ValueError, match=r"config.json: a must be a list of integers, got "):
            read_ints({"a": value}, "a")


def test_require():
    rules = {"act": ("silu", "swish"), "bias": (False,)}
    for raw in ({}, {"act": None}, {"act": "swish", "bias": False}, {"other": 1}):
        require(raw, rules)
    with pytest.raises(
        NotImplementedError, match=r"config.json: act='gelu' is not implemented; implemented: 'silu', 'sw"
    ):
        require({"act": "gelu"}, rules)
    with pytest.raises(NotImplementedError, match=r"config.json: bias=True is not implemented; implemented: False"):
        require({"bias": True}, rules)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 500000, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling": {"rope_type": "yarn"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_plain_rope(raw):
    assert read_rope(raw, 16) == RopeConfig(16, 5e5)


def test_theta_default():
    assert read_rope({}, 8, theta=123.0) == RopeConfig(8, 123.0)
    with pytest.raises(ValueError, match=r"config.json: rope_theta must be a number, got None"):
        read_rope({}, 8)


YARN = {"factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2, "truncate": False}

CONTEXT = {"max_position_embeddings": 9}


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}, "rope_theta": 5.0},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "old name", "rope_type": "yarn", **YARN}},
    ],
    ids=["new", "old", "oldest", "both-names"],
)
def test_yarn(raw):
    found = read_rope(raw | CONTEXT, 16)
    expected = RopeConfig(16, 1e4, 8.0, 4096, 16.0, 2.0, False, found.attention_factor)
    assert found == expected
    assert found.attention_factor == pytest.approx(0.1 * math.log(8) + 1)


def test_yarn_defaults():
    found = read_rope(
        {"rope_theta": 1e4, "max_position_embeddings": 99, "rope_scaling": {"type": "yarn", "factor": 4}}, 16
    )
    assert (found.original_context, found.beta_fast, found.beta_slow, found.truncate) == (99, 32.0, 1.0, True)


@pytest.mark.parametrize(
    ("keys", "apply", "expected"),
    [
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, True, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, True, (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
        ({"mscale": 1.0}, True, 0.1 * math.log(8) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, False, 0.1 * math.log(8) + 1),
        ({"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5}, True, 1.5),
    ],
    ids=str,
)
def test_yarn_attention_factor(keys, apply, expected):
    raw = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, **keys}}
    assert read_rope(raw | CONTEXT, 16, apply_mscale=apply).attention_factor == pytest.approx(expected)


def test_bad_rope():
    with pytest.raises(NotImplementedError, match="rope type 'llama3' is unknown; known: default, yarn"):
        read_rope({"rope_theta": 1.0, "rope_scaling": {"rope_type": "llama3"}}, 8)
    with pytest.raises(NotImplementedError, match="rope type 'linear' is unknown"):
        read_rope({"rope_theta": 1.0, "rope_parameters": {"type": "linear"}}, 8)
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match=f"config.json: {key} must be an object, got 3"):
            read_rope({key: 3}, 8)
    with pytest.raises(ValueError, match=r"config.json: factor must be a number, got None"):
        read_rope({"rope_theta": 1.0, "max_position_embeddings": 9, "rope_scaling": {"type": "yarn"}}, 8)
