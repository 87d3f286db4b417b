"""models/settings.py: typed values out of config.json, or an error that names the key."""

import math

import pytest

from fmoe.functional.rotary import RopeConfig
from fmoe.models.settings import (
    read_bool,
    read_eps,
    read_expert_size,
    read_float,
    read_int,
    read_ints,
    read_layers,
    read_partial_rope,
    read_rope,
    read_shared_size,
    read_sparse_layers,
    read_top_k,
    require,
    with_defaults,
)


def test_with_defaults():
    raw = {"a": 0, "b": None, "c": "x", "d": False}
    assert with_defaults(raw, {"a": 1, "b": 2, "d": True, "e": 3}) == {"a": 0, "b": 2, "c": "x", "d": False, "e": 3}
    assert raw["b"] is None


def test_read_int():
    assert read_int({"a": 3}, "a") == 3
    assert read_int({"a": 0}, "a", 5) == 0
    assert read_int({}, "a", 5) == read_int({"a": None}, "a", 5) == 5
    for value in (None, -1, 1.0, "3", True, [3]):
        with pytest.raises(ValueError, match=r"config.json: a must be an integer >= 0, got "):
            read_int({"a": value}, "a")
    with pytest.raises(ValueError, match=r"config.json: a must be an integer >= 0, got None"):
        read_int({}, "a")
    assert read_int({"a": 2**31 - 1}, "a") == 2**31 - 1
    for value in (2**31, 10**19, 10**400):
        with pytest.raises(ValueError, match=r"config.json: a must be an integer <= 2147483647, got \d+") as caught:
            read_int({"a": value}, "a")
        assert len(str(caught.value)) < 150
    assert [read_int({"a": value}, "a", minimum=2, maximum=4) for value in (2, 4)] == [2, 4]
    with pytest.raises(ValueError, match=r"config.json: a must be an integer >= 2, got 1"):
        read_int({"a": 1}, "a", minimum=2, maximum=4)
    with pytest.raises(ValueError, match=r"config.json: a must be an integer <= 4, got 5"):
        read_int({"a": 5}, "a", minimum=2, maximum=4)


def test_read_layers():
    assert read_layers({"num_hidden_layers": 1}) == 1 and read_layers({"num_hidden_layers": 10_000}) == 10_000
    for value, bound in ((0, ">= 1"), (10_001, "<= 10000"), (None, ">= 1")):
        with pytest.raises(ValueError, match=f"num_hidden_layers must be an integer {bound}, got {value}"):
            read_layers({"num_hidden_layers": value})


def test_read_float():
    assert read_float({"a": 3}, "a") == 3.0 and type(read_float({"a": 3}, "a")) is float
    assert read_float({"a": 0.0}, "a", 5.0) == 0.0
    assert read_float({}, "a", 5.0) == read_float({"a": None}, "a", 5.0) == 5.0
    for value in (None, "3", True, [3.0]):
        with pytest.raises(ValueError, match=r"config.json: a must be a number, got "):
            read_float({"a": value}, "a")
    for value in (-1, -1e-9, math.nan, math.inf, -math.inf, 10**400, 2e30):
        with pytest.raises(ValueError, match=r"config.json: a must be in 0\.\.1e\+30, got "):
            read_float({"a": value}, "a")
    assert [read_float({"a": value}, "a", minimum=0.5, maximum=1.0) for value in (0.5, 1)] == [0.5, 1.0]
    for value in (0.4, 1.1):
        with pytest.raises(ValueError, match=rf"config.json: a must be in 0.5\.\.1, got {value}"):
            read_float({"a": value}, "a", minimum=0.5, maximum=1.0)


def test_read_eps():
    assert read_eps({}, 1e-5) == 1e-5 and read_eps({"rms_norm_eps": 0}, 1e-5) == 0.0
    for value in (-1e-6, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"config.json: rms_norm_eps must be in 0\.\.1, got "):
            read_eps({"rms_norm_eps": value}, 1e-5)


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
    assert read_ints({"a": [1, 3]}, "a", minimum=1, maximum=3) == (1, 3)
    with pytest.raises(ValueError, match=r"config.json: a must list integers in 1\.\.3, got \[0, 4\]"):
        read_ints({"a": [0, 1, 4]}, "a", minimum=1, maximum=3)


def test_read_sparse_layers():
    assert read_sparse_layers({}, 3, 8) == (True, True, True)
    assert read_sparse_layers({}, 3, 0) == (False, False, False)
    raw = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read_sparse_layers(raw, 6, 8) == (False, True, False, False, False, True)
    for experts in (0, 8):
        with pytest.raises(ValueError, match="decoder_sparse_step must be an integer >= 1, got 0"):
            read_sparse_layers({"decoder_sparse_step": 0}, 3, experts)
        for wrong in (-1, 3):
            with pytest.raises(ValueError, match=rf"mlp_only_layers must list integers in 0\.\.2, got \[{wrong}\]"):
                read_sparse_layers({"mlp_only_layers": [0, wrong]}, 3, experts)


@pytest.mark.parametrize("key", ["n_routed_experts", "num_local_experts", "num_experts"])
def test_read_top_k(key):
    assert read_top_k({key: 8, "num_experts_per_tok": 8}, 8) == 8
    with pytest.raises(ValueError, match=rf"config.json: num_experts_per_tok=9 must be in 1\.\.{key}=8"):
        read_top_k({key: 8, "num_experts_per_tok": 9}, 8)
    with pytest.raises(ValueError, match=r"config.json: num_experts_per_tok must be an integer >= 1, got 0"):
        read_top_k({key: 8, "num_experts_per_tok": 0}, 8)


def test_widths_of_experts():
    assert read_expert_size({"moe_intermediate_size": 0}, 0) == 0
    with pytest.raises(ValueError, match="moe_intermediate_size must be an integer >= 1, got 0"):
        read_expert_size({"moe_intermediate_size": 0}, 1)
    assert read_shared_size({}, 4) == 0
    assert read_shared_size({"shared_expert_intermediate_size": 24}, 0) == 0
    assert read_shared_size({"shared_expert_intermediate_size": 4096}, 4) == 4096
    assert read_shared_size({"shared_expert_intermediate_size": 2048}, 4, 2) == 2048
    for size, count in ((4097, None), (2049, 2)):
        match = f"shared_expert_intermediate_size={size} must be at most 1024 times moe_intermediate_size=4"
        with pytest.raises(ValueError, match=match):
            read_shared_size({"shared_expert_intermediate_size": size}, 4, count)


def test_require():
    rules = {"act": ("silu", "swish"), "bias": (False,)}
    for raw in ({}, {"act": None}, {"act": "swish", "bias": False}, {"other": 1}):
        require(raw, rules)
    with pytest.raises(
        NotImplementedError, match=r"config.json: act='gelu' is not implemented; implemented: 'silu', 'sw"
    ):
        require({"act": "gelu"}, rules)
    for value in (0, 0.0):
        with pytest.raises(NotImplementedError, match=f"config.json: bias={value} is not implemented"):
            require({"bias": value}, rules)
    require({"part": 1}, {"part": (1.0,)})
    with pytest.raises(NotImplementedError, match=r"part=True is not implemented; implemented: 1.0"):
        require({"part": True}, {"part": (1.0,)})
    with pytest.raises(NotImplementedError, match=r"config.json: bias=True is not implemented; implemented: False"):
        require({"bias": True}, rules)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": None, "type": None}},
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


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        ({}, 10),
        ({"partial_rotary_factor": None}, 10),
        ({"partial_rotary_factor": 0.75}, 30),
        ({"partial_rotary_factor": 0.75, "rope_parameters": {"partial_rotary_factor": 0.5}}, 20),
        ({"partial_rotary_factor": 1, "rope_scaling": {"partial_rotary_factor": None}}, 40),
        ({"partial_rotary_factor": 0.16}, 6),
    ],
    ids=str,
)
def test_partial_rope(raw, size):
    """A part of 40 channels, rounded down; rope parameters of their own come first."""
    assert read_partial_rope(raw, 40, part=0.25, theta=500.0) == RopeConfig(size, 500.0)


def test_parts_that_cannot_be():
    for value in (0, 1.5, -1):
        with pytest.raises(ValueError, match=rf"partial_rotary_factor must be in 1e-30..1, got {value}"):
            read_partial_rope({"partial_rotary_factor": value}, 40, part=0.25, theta=500.0)
    with pytest.raises(ValueError, match=r"rotary_size=3 must be even and at least 2; check head_dim and partial_rot"):
        read_partial_rope({"partial_rotary_factor": 0.3}, 10, part=0.25, theta=500.0)


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
    with pytest.raises(NotImplementedError, match=r"config.json: type: rope type 'linear' is unknown"):
        read_rope({"rope_theta": 1.0, "rope_parameters": {"type": "linear"}}, 8)
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match=f"config.json: {key} must be an object, got 3"):
            read_rope({key: 3}, 8)
    with pytest.raises(ValueError, match=r"config.json: factor must be a number, got None"):
        read_rope({"rope_theta": 1.0, "max_position_embeddings": 9, "rope_scaling": {"type": "yarn"}}, 8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rope_theta": 1.0}, r"rope_theta=1.0 must be above 1 with yarn; check the rope parameters"),
        ({"rope_theta": 0}, r"config.json: rope_theta must be in 1e-30\.\.1e\+30, got 0"),
        ({"factor": 0.5}, r"config.json: factor must be in 1\.\.1e\+30, got 0.5"),
        ({"beta_fast": 0}, r"config.json: beta_fast must be in 1e-30\.\.1e\+30, got 0"),
        ({"beta_slow": -1}, r"config.json: beta_slow must be in 1e-30\.\.1e\+30, got -1"),
        ({"attention_factor": 0}, r"config.json: attention_factor must be in 1e-30\.\.1e\+30, got 0"),
        ({"mscale": -1}, r"config.json: mscale must be in 0\.\.1e\+30, got -1"),
        ({"original_max_position_embeddings": 0}, r"original_max_position_embeddings must be an integer >= 1, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_yarn_out_of_range(change, match):
    with pytest.raises(ValueError, match=match):
        read_rope(CONTEXT | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, **change}}, 16)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"theta": 0.0}, r"rope_theta=0.0 must be a finite number above 0; check the rope parameters"),
        ({"theta": math.nan}, r"rope_theta=nan must be a finite number above 0"),
        ({"attention_factor": math.inf}, r"attention_factor=inf must be a finite number above 0"),
        ({"factor": 0.5}, r"factor=0.5 of yarn must be a finite number of at least 1"),
        ({"factor": math.nan}, r"factor=nan of yarn must be a finite number of at least 1"),
        ({"factor": 2.0, "theta": 1.0}, r"rope_theta=1.0 must be above 1 with yarn"),
        ({"factor": 2.0, "beta_fast": 0.0}, r"beta_fast=0.0 of yarn must be a finite number above 0"),
        ({"factor": 2.0, "beta_slow": math.nan}, r"beta_slow=nan of yarn must be a finite number above 0"),
    ],
    ids=str,
)
def test_values_that_no_rotation_has(change, match):
    with pytest.raises(ValueError, match=match):
        RopeConfig(8, **{"theta": 1e4, "original_context": 64} | change)


@pytest.mark.parametrize(("rope", "truncate"), [({}, True), ({"truncate": None}, False), ({"truncate": False}, False)])
def test_a_null_truncate_is_false_as_in_the_reference(rope, truncate):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16} | rope
    raw = {"max_position_embeddings": 64, "rope_parameters": yarn}
    assert read_rope(raw, 8, theta=1e4, apply_mscale=True).truncate is truncate
