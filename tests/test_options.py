"""fmoe/options.py: what generation_config.json says, and what the caller says over it."""

import math

import numpy as np
import pytest

from fmoe.options import Defaults, Options, is_integer, read_defaults, resolve_options

ARGUMENTS = {
    "vocab_size": 50,
    "max_new_tokens": 4,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "seed": 0,
    "stop": None,
    "ignore_eos": False,
    "logprobs": None,
}
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}


def resolve(defaults=Defaults(), **changes):  # noqa: B008 (a frozen value)
    return resolve_options(defaults, **ARGUMENTS | changes)


def test_no_file_means_greedy():
    assert read_defaults(None, {}, None) == Defaults(0.0, 1.0, 0, 0.0, 1.0, ())


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}], ids=str)
def test_without_do_sample_only_the_penalty_counts(do_sample):
    found = read_defaults({**SAMPLING, **do_sample}, {}, None)
    assert found == Defaults(repetition_penalty=1.05)


def test_do_sample():
    assert read_defaults({"do_sample": True, **SAMPLING}, {}, None) == Defaults(**SAMPLING)
    assert read_defaults({"do_sample": True}, {}, None) == Defaults(temperature=1.0)
    assert read_defaults({"do_sample": True, "temperature": None, "top_k": 5}, {}, None) == Defaults(1.0, top_k=5)


def test_end_of_sequence_ids():
    assert read_defaults({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, None).eos_ids == (7, 9)
    assert read_defaults({}, {"eos_token_id": 3}, None).eos_ids == (3,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": True, "temperature": -1}, r"generation_config.json: temperature=-1 must be"),
        ({"do_sample": True, "top_p": 0}, r"generation_config.json: top_p=0 must be"),
        ({"do_sample": True, "top_k": 2.5}, r"generation_config.json: top_k=2.5 must be"),
        ({"do_sample": "false"}, r"generation_config.json: do_sample must be true or false, got 'false'"),
        ({"do_sample": "x"}, r"generation_config.json: do_sample must be true or false, got 'x'"),
        ({"do_sample": 5}, r"generation_config.json: do_sample must be true or false, got 5"),
        ({"do_sample": []}, r"generation_config.json: do_sample must be true or false, got \[\]"),
        ({"temperature": "0.7"}, r"generation_config.json: temperature='0.7' must be a number"),
        ({"do_sample": False, "top_p": [1]}, r"generation_config.json: top_p=\[1\] must be a number"),
        ({"top_k": 2.5}, r"generation_config.json: top_k=2.5 must be an int"),
        ({"min_p": True}, r"generation_config.json: min_p=True must be a number"),
        ({"eos_token_id": 10**30}, r"eos_token_id in generation_config.json must be below"),
        ({"repetition_penalty": "1"}, r"generation_config.json: repetition_penalty='1' must be"),
    ],
    ids=str,
)
def test_a_bad_file_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        read_defaults(config, {}, None)


def test_arguments_win():
    defaults = Defaults(**SAMPLING, eos_ids=(1, 2))
    assert resolve(defaults) == Options(4, **SAMPLING, seed=0, stop=(), eos_ids=(1, 2), logprobs=None)
    mine = {"temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    found = resolve(defaults, **mine, seed=9, stop=["a", "b"], ignore_eos=True, logprobs=3)
    assert found == Options(4, **mine, seed=9, stop=("a", "b"), eos_ids=(), logprobs=3)
    for name, value in mine.items():
        changed = resolve(defaults, **{name: value})
        assert {key: getattr(changed, key) for key in SAMPLING} == SAMPLING | {name: value}


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ()),
        ([], ()),
        ("ab", ("ab",)),
        (["ab", "c"], ("ab", "c")),
        (("ab",), ("ab",)),
        pytest.param(iter(["a"]), ("a",), id="iterator"),
    ],
    ids=str,
)
def test_stop(stop, expected):
    assert resolve(stop=stop).stop == expected


def test_numpy_numbers_become_plain_ones():
    found = resolve(max_new_tokens=np.int64(3), logprobs=np.int32(0))
    assert (type(found.max_new_tokens), type(found.logprobs)) == (int, int)
    assert (found.max_new_tokens, found.logprobs) == (3, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an int >= 1"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be an int >= 1"),
        ({"max_new_tokens": "8"}, "max_new_tokens='8' must be an int >= 1"),
        ({"logprobs": 51}, r"logprobs=51 must be None or an int in 0..50 \(the vocabulary\)"),
        ({"logprobs": False}, "logprobs=False must be"),
        ({"stop": ""}, "stop='' must be a non-empty string or a list of them"),
        ({"stop": ["a", ""]}, r"stop=\['a', ''\] must be"),
        ({"stop": [b"a"]}, r"stop=\[b'a'\] must be"),
        ({"stop": 0}, "stop=0 must be"),
        ({"temperature": -1}, "temperature=-1 must be a finite number >= 0"),
        ({"temperature": math.nan}, "temperature=nan must be"),
        ({"top_p": 0.0}, r"top_p=0.0 must be a number in \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p=-0.1 must be a number in \[0, 1\]"),
        ({"top_k": 1.0}, r"top_k=1.0 must be an int >= 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf must be a finite number > 0"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be an int in"),
    ],
    ids=str,
)
def test_bad_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(**changes)


def test_is_integer():
    assert all(map(is_integer, (0, -3, 10**30, np.int8(1), np.uint64(2))))
    assert not any(map(is_integer, (True, np.bool_(True), 1.0, np.float32(1), "1", None)))
