"""fmoe/prompts.py: what counts as one prompt, and what becomes token ids."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fmoe
from fmoe.prompts import check_ids, encode_prompt, split_prompts

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def model():
    """All that encode_prompt looks at: a vocabulary of 10, a context of 6, no tokenizer."""
    decoder = SimpleNamespace(vocab_size=10, max_context=6)
    return SimpleNamespace(text=None, folder="some/folder", config=SimpleNamespace(decoder=decoder))


@pytest.mark.parametrize("single", ["", "some text", [1, 2], (1, 2), CHAT, tuple(CHAT), range(3)], ids=repr)
def test_one_prompt_is_a_list_of_one(single):
    (found,) = split_prompts(single)
    assert found == single or found == list(single)


@pytest.mark.parametrize(
    "several",
    [["a", "b"], [[1], [2, 3]], [(1, 2), "b"], [CHAT, "b"], [CHAT], [[]], [[], [1]], ["a", 5], []],
    ids=repr,
)
def test_several_prompts_stay_as_they_are(several):
    assert split_prompts(several) == several
    assert split_prompts(tuple(several)) == several
    assert split_prompts(iter(several)) == several


def test_arrays_and_tensors():
    ids_BT = [[1, 2, 3], [4, 5, 6]]
    for array in (torch.tensor, np.array):
        assert [prompt.tolist() for prompt in split_prompts(array(ids_BT))] == ids_BT
        assert [prompt.tolist() for prompt in split_prompts(array(ids_BT[0]))] == ids_BT[:1]
        assert [prompt.tolist() for prompt in split_prompts([array(ids_BT[0]), array([7])])] == [[1, 2, 3], [7]]
    assert split_prompts(np.array(["a", "bc"])) == ["a", "bc"]
    assert split_prompts(np.array([[1, 2], "x"], dtype=object)) == [[1, 2], "x"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"a", r"a list of these, got bytes; decode them"),
        (bytearray(b"a"), r"got bytearray; decode them"),
        (CHAT[0], r"got dict; put a message in a list"),
        ({1, 2}, r"got set; put them in a list"),
        (3, r"got int; put them in a list"),
        (None, r"got NoneType"),
    ],
    ids=str,
)
def test_what_cannot_be_split(prompts, message):
    with pytest.raises(ValueError, match=message):
        split_prompts(prompts)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 0, 9],
        (1, 0, 9),
        torch.tensor([1, 0, 9]),
        np.array([1, 0, 9], dtype=np.uint16),
        [np.int8(1), 0, np.uint64(9)],
    ],
    ids=repr,
)
def test_token_ids(model, prompt):
    ids = encode_prompt(model, prompt, max_new_tokens=3)
    assert ids == [1, 0, 9]
    assert {type(i) for i in ids} == {int}


def test_the_context_is_filled_to_the_last_token(model):
    assert encode_prompt(model, [1] * 6, max_new_tokens=0) == [1] * 6
    with pytest.raises(ValueError, match=r"x has 6 tokens and max_new_tokens=1; .* context of 6 tokens; shorten one"):
        encode_prompt(model, [1] * 6, max_new_tokens=1, name="x")
    with pytest.raises(ValueError, match="x has 7 tokens, more than the model's context of 6; shorten it"):
        encode_prompt(model, [1] * 7, max_new_tokens=0, name="x")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; give at least one token"),
        ([1, 10], r"the prompt has token id 10; ids must be in 0..9 \(vocabulary 10\)"),
        ([1, -1], "the prompt has token id -1"),
        ("text", r"the prompt is a string, but some/folder has no tokenizer.json; give a list of token ids"),
        (CHAT, r"the prompt is a chat, but some/folder has no tokenizer.json; give a list of token ids"),
        ([1, None], "or a list of chat messages, got a list of NoneType, int"),
        ((1, True), "got a tuple of bool, int"),
        ([1, CHAT[0]], "got a list of dict, int"),
        ([[1], [2]], "got a list of list"),
        (b"ab", "got bytes"),
        (1, "got int"),
        (torch.tensor([[1]]), r"must have one dimension of integers, got Tensor of shape \(1, 1\) and torch.int64"),
        (torch.tensor([1.5]), r"must have one dimension of integers, got Tensor of shape \(1,\) and torch.float32"),
        (np.array([True]), r"must have one dimension of integers, got ndarray of shape \(1,\) and bool"),
        (np.array(1), r"must have one dimension of integers, got ndarray of shape \(\)"),
    ],
    ids=str,
)
def test_bad_prompt(model, prompt, message):
    with pytest.raises(ValueError, match=message):
        encode_prompt(model, prompt, max_new_tokens=1)


def test_check_ids():
    check_ids([], 3, "x")
    check_ids([0, 2], 3, "x")
    with pytest.raises(ValueError, match=r"x has token id 3; ids must be in 0..2 \(vocabulary 3\)"):
        check_ids([0, 3], 3, "x")


def test_encode_and_decode():
    demo = fmoe.load("demo", device="cpu", compile=False)
    ids = fmoe.encode(demo, "In the beginning")
    [done] = fmoe.generate(demo, "In the beginning", max_new_tokens=3)
    assert tuple(ids) == done.prompt_token_ids and {type(i) for i in ids} == {int}
    assert fmoe.decode(demo, done.token_ids) == done.text
    for same in (ids, tuple(ids), np.array(ids), torch.tensor(ids)):
        assert fmoe.decode(demo, same) == "In the beginning"
    assert fmoe.encode(demo, "") == [] and fmoe.decode(demo, []) == ""
    for text, kind in ((5, "int"), ([1, 2], "list"), (b"a", "bytes"), ([], "list"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"text must be a string or a list of chat messages, got {kind}"):
            fmoe.encode(demo, text)
    for bad, message in (
        ("text", "token_ids must be a list of token ids, got str"),
        (CHAT, "token_ids must be a list of token ids, got list"),
        ([1, 4096], "token_ids has token id 4096; ids must be in 0..4095"),
        ([-1], "token_ids has token id -1"),
        ([[1]], "token_ids must be .* got a list of list"),
        (5, "token_ids must be .* got int"),
    ):
        with pytest.raises(ValueError, match=message):
            fmoe.decode(demo, bad)
    textless = replace(demo, text=None)
    with pytest.raises(ValueError, match=r"text is a string, but .* has no tokenizer.json"):
        fmoe.encode(textless, "a")
    with pytest.raises(ValueError, match=r"demo has no tokenizer.json, so there is no text of token ids"):
        fmoe.decode(textless, ids)
