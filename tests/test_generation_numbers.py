"""fmoe/generation.py: logits, score, log-probabilities, whose settings win, progress, and every refusal."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fmoe
import fmoe.generation
from fmoe.generation import SCORE_CHUNK
from fmoe.options import Defaults

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
V, CONTEXT = 4096, 4096
IDS = GOLDEN["cases"][0]["prompt_ids"]


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture
def nothing_runs(monkeypatch):
    def run(*arguments, **options):
        raise AssertionError("something was computed")

    for name in ("decode_batch", "run", "new_state", "compute_head"):
        monkeypatch.setattr(fmoe.generation, name, run)


def draw_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def log_softmax_by_hand(row: list[float]) -> list[float]:
    largest = max(row)
    total = math.log(math.fsum(math.exp(x - largest) for x in row))
    return [x - largest - total for x in row]


# --- logits


def test_logits_shape_and_kind(demo):
    found = fmoe.logits(demo, torch.tensor([draw_ids(5), draw_ids(5, seed=1), draw_ids(5, seed=2)]))
    assert found.shape == (3, 5, V) and found.dtype == torch.float32
    assert not found.is_inference()  # a user may change it, and put it through autograd
    for row in range(3):
        alone = fmoe.logits(demo, torch.tensor([draw_ids(5, seed=row)]))[0]
        assert (found[row] - alone).abs().max() <= 1e-5 * alone.abs().max()
        assert not torch.allclose(found[row], found[row - 1], atol=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_logits_of_other_integers(demo, dtype):
    ids = torch.tensor([IDS])
    assert torch.equal(fmoe.logits(demo, ids.to(dtype)), fmoe.logits(demo, ids))


def test_logits_of_lists_and_arrays(demo):
    expected = fmoe.logits(demo, torch.tensor([IDS, IDS[::-1]]))
    lists = [IDS, tuple(IDS[::-1])]
    for ids in (lists, tuple(lists), np.array(lists), np.array(lists, dtype=np.uint16)):
        assert torch.equal(fmoe.logits(demo, ids), expected)
    assert fmoe.logits(demo, [[], []]).shape == (2, 0, V)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
def test_logits_of_nothing(demo, shape, nothing_runs):
    assert fmoe.logits(demo, torch.zeros(shape, dtype=torch.int64)).shape == (*shape, V)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 2]), r"integer tensor \[B, T\] or rows of integers of one length, got \(2,\) torch.int64"),
        (
            torch.tensor([[1.0]]),
            r"integer tensor \[B, T\] or rows of integers of one length, got \(1, 1\) torch.float32",
        ),
        (torch.tensor([[True]]), r"integer tensor \[B, T\] or rows of integers of one length, got \(1, 1\) torch.bool"),
        (
            torch.tensor([[1j]]),
            r"integer tensor \[B, T\] or rows of integers of one length, got \(1, 1\) torch.complex64",
        ),
        (np.array([[1.5]]), r"got \(1, 1\) float64"),
        (np.array([1]), r"got \(1,\) int64"),
        ([1, 2], r"got list; put a single row in a list"),
        ([], r"got list; put a single row in a list"),
        ("In the", r"got str; put"),
        (None, r"got NoneType; put"),
        ([[1, 2], [3]], r"got rows of 1 to 2 ids; give them one by one"),
        ([[1, 2.0]], r"got rows of float"),
        ([[True]], r"got rows of bool"),
        ([[[1]]], r"got rows of list"),
        ([[1, V]], r"token id 4096; ids must be in 0..4095"),
        ([[2**70]], r"token id 1180591620717411303424; ids must be in 0..4095"),
        (torch.tensor([[1, V]]), r"token id 4096; ids must be in 0..4095 \(vocabulary 4096\)"),
        (torch.tensor([[-1, 1]]), r"token id -1; ids must be in 0..4095"),
        (torch.zeros(1, CONTEXT + 1, dtype=torch.int64), r"4097 positions; the model's context is 4096"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_refuses(demo, ids, message, nothing_runs):
    with pytest.raises(ValueError, match=message):
        fmoe.logits(demo, ids)


# --- score


@pytest.mark.parametrize("count", [2, 3, SCORE_CHUNK, SCORE_CHUNK + 1, SCORE_CHUNK + 2])
def test_score_is_the_mean_of_its_tokens(demo, count):
    ids = draw_ids(count, seed=count)
    logprobs_TV = fmoe.logits(demo, torch.tensor([ids]))[0].double().log_softmax(-1)
    expected = [-logprobs_TV[t, ids[t + 1]].item() for t in range(count - 1)]
    assert fmoe.score(demo, [ids]) == pytest.approx([math.fsum(expected) / (count - 1)], rel=1e-5)


def test_score_of_several(demo):
    text = GOLDEN["score"]["text"]
    found = fmoe.score(demo, [text, IDS, np.array(IDS), torch.tensor(IDS), text])
    assert found[0] == found[4] == fmoe.score(demo, [text])[0]
    assert found[1] == found[2] == found[3] != found[0]
    assert all(type(value) is float for value in found)
    assert len(fmoe.score(demo, [draw_ids(CONTEXT)])) == 1  # the whole context


def test_score_of_one(demo):
    for one in (GOLDEN["score"]["text"], IDS, torch.tensor(IDS)):
        assert fmoe.score(demo, one) == fmoe.score(demo, [one])
    assert fmoe.score(demo, torch.tensor([IDS, IDS])) == fmoe.score(demo, [IDS, IDS])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("field", "where"), [("embed_VD", "the embedding"), ("head_VD", "the final norm and head")])
def test_score_of_broken_weights(demo, field, where, value):
    """logits gives what the model gives; the one bad row of the table is that of the first, or of no token."""
    table = getattr(demo.params, field).clone()
    table[IDS[0] if field == "embed_VD" else 4000] = value
    model = replace(demo, params=demo.params._replace(**{field: table}))
    with pytest.raises(RuntimeError, match=f"the logits hold NaN or infinity, which first shows in {where}"):
        fmoe.score(model, [IDS])
    assert not fmoe.logits(model, [IDS]).isfinite().all()


def test_score_of_one_logit_that_is_infinite(demo):
    """Minus infinity at a token that was not asked for leaves the score finite, and is an error all the same."""
    head_VD = demo.params.head_VD.clone()
    head_VD[:256] = torch.eye(256)  # the first logits are the normed hidden channels
    hidden_D = fmoe.logits(replace(demo, params=demo.params._replace(head_VD=head_VD)), [IDS])[0, 0, :256]
    head_VD = demo.params.head_VD.clone()
    head_VD[4000] = -3e38 * hidden_D.sign()
    model = replace(demo, params=demo.params._replace(head_VD=head_VD))
    assert fmoe.logits(model, [IDS])[0, 0].isinf().nonzero().tolist() == [[4000]]
    with pytest.raises(RuntimeError, match="first shows in the final norm and head"):
        fmoe.score(model, [IDS[:2]])


def test_score_refuses(demo, nothing_runs):
    for texts, message in [
        (None, "texts must be a string, token ids, chat messages or a list of these, got NoneType"),
        (5, "texts must be .* got int; put them in a list"),
        ({"a": 1}, "texts must be .* got dict; put a message in a list"),
        ({"a"}, "texts must be .* got set; put them in a list"),
        (b"In", "texts must be .* got bytes; decode them"),
        (torch.tensor(5), r"text 0 must have one dimension of integers, got Tensor of shape \(\)"),
        ([1, 2, None], "text 0 must be a string, .* got a list of NoneType, int"),
        ([[5]], "text 0 has 1 token; a score needs two at least"),
        (["In the beginning", ""], "text 1 is empty"),
        ([[1, 2], [3, V]], "text 1 has token id 4096"),
        ([draw_ids(CONTEXT + 1)], "text 0 has 4097 tokens, more than the model's context of 4096; shorten it"),
    ]:
        with pytest.raises(ValueError, match=message):
            fmoe.score(demo, texts)


# --- log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_the_models_own(demo, temperature):
    """Neither temperature, filters nor penalty touch them."""
    options = {"temperature": temperature, "top_k": 20, "repetition_penalty": 1.3, "seed": 4, "max_new_tokens": 5}
    done = fmoe.generate(demo, IDS, logprobs=3, **options)[0]
    whole = fmoe.logits(demo, torch.tensor([IDS + list(done.token_ids)]))[0]
    assert len(done.logprobs) == 5
    for n, step in enumerate(done.logprobs):
        row = log_softmax_by_hand(whole[len(IDS) - 1 + n].tolist())
        best = sorted(range(V), key=row.__getitem__, reverse=True)[:3]
        assert [token for token, _ in step.top] == best
        assert [value for _, value in step.top] == pytest.approx([row[i] for i in best], abs=1e-4)
        assert step.logprob == pytest.approx(row[done.token_ids[n]], abs=1e-4)


def test_how_many_logprobs(demo):
    none, own, every = (fmoe.generate(demo, IDS, logprobs=n, max_new_tokens=1)[0] for n in (None, 0, V))
    assert none.logprobs is None
    assert own.logprobs[0].top == () and own.logprobs[0].logprob < 0
    assert sorted(token for token, _ in every.logprobs[0].top) == list(range(V))
    assert math.fsum(math.exp(value) for _, value in every.logprobs[0].top) == pytest.approx(1, abs=1e-4)


# --- settings


def test_defaults_decide_and_arguments_win(demo):
    sampling = replace(demo, defaults=Defaults(temperature=1.4, top_k=30, repetition_penalty=1.2))
    asked = {"temperature": 1.4, "top_k": 30, "repetition_penalty": 1.2}
    plain = fmoe.generate(demo, IDS, max_new_tokens=12, seed=1)
    expected = fmoe.generate(demo, IDS, max_new_tokens=12, seed=1, **asked)
    assert fmoe.generate(sampling, IDS, max_new_tokens=12, seed=1) == expected != plain
    off = {"temperature": 0, "top_k": 0, "repetition_penalty": 1}
    assert fmoe.generate(sampling, IDS, max_new_tokens=12, seed=1, **off) == plain
    assert fmoe.generate(sampling, IDS, max_new_tokens=12, seed=2) != expected


def test_each_setting_reaches_the_draw(demo):
    """Each filter at its strictest makes sampling greedy; without it, it is not."""
    greedy = fmoe.generate(demo, IDS, max_new_tokens=6)[0].token_ids
    hot = {"max_new_tokens": 6, "temperature": 4.0, "seed": 2}
    assert fmoe.generate(demo, IDS, **hot)[0].token_ids != greedy
    for strict in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert fmoe.generate(demo, IDS, **hot, **strict)[0].token_ids == greedy


def test_progress(demo, capsys):
    fmoe.generate(demo, [IDS, IDS], max_new_tokens=3, progress=True, stop=" of")
    out, err = capsys.readouterr()
    assert out == "" and "generating: 100%" in err and "6/6" in err  # what a stop string saves counts as done
    for silent in (False, None):
        fmoe.generate(demo, IDS, max_new_tokens=3, progress=silent)
    assert capsys.readouterr() == ("", "")


# --- refusals


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", r"prompt 0 is empty; give at least one token"),
        (["In the beginning", ""], r"prompt 1 is empty"),
        ([[5], []], r"prompt 1 is empty"),
        (torch.empty(0, dtype=torch.int64), r"prompt 0 is empty"),
        ([[5], [5, V, 6]], r"prompt 1 has token id 4096; ids must be in 0..4095 \(vocabulary 4096\)"),
        ([5, -1], r"prompt 0 has token id -1; ids must be in 0..4095"),
        ([5, 10**30], r"prompt 0 has token id 10+; ids must"),
        (["In", [5] * 4090], r"prompt 1 has 4090 tokens and max_new_tokens=7; .* context of 4096 tokens; shorten one"),
        ([5] * 4097, r"prompt 0 has 4097 tokens, more than the model's context of 4096; shorten it"),
        ([5, "a"], r"prompt 0 must be a string, .* got a list of int, str"),
        ([5, 1.5], r"got a list of float, int"),
        ([True, False], r"got a list of bool"),
        ([{"role": "user", "content": "x"}, "a"], r"got a list of dict, str"),
        (["a", 5], r"prompt 1 must be .* got int"),
        (["a", None], r"prompt 1 must be .* got NoneType"),
        (["a", b"b"], r"prompt 1 must be .* got bytes"),
        (
            torch.tensor([1.0, 2.0]),
            r"prompt 0 must have one dimension of integers, got Tensor of shape \(2,\) and torch",
        ),
        (np.array([True]), r"one dimension of integers, got ndarray of shape \(1,\) and bool"),
        (torch.tensor(5), r"one dimension of integers, got Tensor of shape \(\) and torch.int64"),
        ([torch.tensor(5), torch.tensor(6)], r"prompt 0 must have one dimension of integers, got Tensor of shape \(\)"),
        (torch.ones(1, 2, 3, dtype=torch.int64), r"one dimension of integers, got Tensor of shape \(1, 2, 3\)"),
        (b"In the", r"prompts must be a string, token ids, chat messages or a list of these, got bytes; decode"),
        (None, r"prompts must be .* got NoneType"),
        (5, r"prompts must be .* got int"),
        ({"role": "user", "content": "x"}, r"prompts must be .* got dict; put a message in a list"),
        ({"a", "b"}, r"prompts must be .* got set; put them in a list"),
    ],
    ids=str,
)
def test_bad_prompts(demo, prompts, message, nothing_runs):
    with pytest.raises(ValueError, match=message):
        fmoe.generate(demo, prompts, max_new_tokens=7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 must be a finite number >= 0"),
        ({"temperature": math.nan}, r"temperature=nan must be"),
        ({"temperature": math.inf}, r"temperature=inf must be"),
        ({"temperature": "0"}, r"temperature='0' must be"),
        ({"top_p": 0}, r"top_p=0 must be a number in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p=1.1 must be"),
        ({"top_p": math.nan}, r"top_p=nan must be"),
        ({"top_k": -1}, r"top_k=-1 must be an int >= 0"),
        ({"min_p": 1.5}, r"min_p=1.5 must be"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0 must be a finite number > 0"),
        ({"seed": 1.5}, r"seed=1.5 must be an int"),
        ({"max_new_tokens": 0}, r"max_new_tokens=0 must be an int >= 1"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens=2.0 must be an int >= 1"),
        ({"max_new_tokens": 5000}, r"max_new_tokens=5000; together they pass the model's context of 4096"),
        ({"stop": ""}, r"stop='' must be a non-empty string or a list of them"),
        ({"stop": ["a", 5]}, r"stop=\['a', 5\] must be"),
        ({"stop": 5}, r"stop=5 must be"),
        ({"ignore_eos": "no"}, r"ignore_eos='no' must be True or False"),
        ({"ignore_eos": None}, r"ignore_eos=None must be"),
    ],
    ids=str,
)
def test_bad_arguments(demo, options, message, nothing_runs):
    """All at the call, of streams too, before anything runs."""
    for function in (fmoe.generate, fmoe.stream, fmoe.stream_tokens):
        with pytest.raises(ValueError, match=message):
            function(demo, "In the beginning", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size=0 must be None or an int >= 1"),
        ({"batch_size": 2.0}, r"batch_size=2.0 must be"),
        ({"batch_size": True}, r"batch_size=True must be"),
        ({"progress": "x"}, r"progress='x' must be True, False or None"),
        ({"progress": 0}, r"progress=0 must be"),
        ({"logprobs": -1}, r"logprobs=-1 must be None or an int in 0..4096 \(the vocabulary\)"),
        ({"logprobs": V + 1}, r"logprobs=4097 must be"),
        ({"logprobs": True}, r"logprobs=True must be"),
    ],
    ids=str,
)
def test_bad_arguments_of_generate(demo, options, message, nothing_runs):
    with pytest.raises(ValueError, match=message):
        fmoe.generate(demo, "In the beginning", **options)


def test_bad_logprobs_of_stream_tokens(demo, nothing_runs):
    with pytest.raises(ValueError, match=r"logprobs=-1 must be None or an int in 0..4096 \(the vocabulary\)"):
        fmoe.stream_tokens(demo, "In the beginning", logprobs=-1)


@pytest.mark.parametrize("function", [fmoe.stream, fmoe.stream_tokens])
def test_a_stream_takes_one_prompt(function, demo, nothing_runs):
    with pytest.raises(ValueError, match=r"the prompt must be a string, .* got a list of str"):
        function(demo, ["In the beginning"])
    with pytest.raises(ValueError, match="the prompt is empty"):
        function(demo, "")


def test_numpy_numbers_are_numbers(demo):
    options = {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.int32(1), "top_p": np.float64(0.5)}
    counts = {"max_new_tokens": np.int64(2), "batch_size": np.int32(1), "logprobs": np.int64(0)}
    assert len(fmoe.generate(demo, [IDS, IDS], **counts, **options)[1].logprobs) == 2
