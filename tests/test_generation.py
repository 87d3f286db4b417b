"""fmoe/generation.py end to end on the demo: golden values, prompts, endings, log-probabilities, errors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fmoe
import fmoe.generation

DEMO = Path(fmoe.__file__).parent / "demo"
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
V, CONTEXT, EOS = 4096, 4096, 0
PROMPTS = [case["prompt"] for case in GOLDEN["cases"]]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False)


@pytest.fixture(scope="module")
def make_demo(tmp_path_factory):
    """Load a copy of the demo without some files and with others written."""

    def make(*, drop=(), **files):
        folder = tmp_path_factory.mktemp("demo")
        for file in DEMO.iterdir():
            if file.name not in drop:
                shutil.copyfile(file, folder / file.name)
        for name, content in files.items():
            target = folder / name.replace("__", ".")
            target.write_text(content if isinstance(content, str) else json.dumps(content))
        return fmoe.load(folder, device="cpu", compile=False)

    return make


@pytest.fixture(scope="module")
def textless(make_demo):
    return make_demo(drop=("tokenizer.json",))


@pytest.fixture
def nothing_runs(monkeypatch):
    def run(*arguments, **options):
        raise AssertionError("something was generated")

    for name in ("decode_batch", "run", "new_state"):
        monkeypatch.setattr(fmoe.generation, name, run)


# --- golden values


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["prompt"])
def test_golden_tokens_and_text(demo, case):
    done = fmoe.generate(demo, case["prompt"], max_new_tokens=32, logprobs=2)[0]

    assert list(done.prompt_token_ids) == case["prompt_ids"]
    gaps = [step.top[0][1] - step.top[1][1] for step in done.logprobs]
    clear = next((n for n, gap in enumerate(gaps) if gap < 1e-3), 32)
    assert clear == 32 or case["smallest_greedy_margin"] < 1e-3
    assert list(done.token_ids[:clear]) == case["greedy_ids"][:clear]
    if clear == 32:
        assert done.text == case["text"]
        assert min(gaps) == pytest.approx(case["smallest_greedy_margin"], abs=1e-3)
    assert done.finish_reason == "length"


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["prompt"])
def test_golden_logits(demo, case):
    logits_1TV = fmoe.logits(demo, torch.tensor([case["prompt_ids"]]))
    top = logits_1TV[0, -1].topk(8)
    assert top.indices.tolist() == case["next_token_top8_ids"]
    assert top.values.tolist() == pytest.approx(case["next_token_top8_logits"], abs=1e-3)


def test_golden_score(demo):
    golden = GOLDEN["score"]
    assert fmoe.score(demo, [golden["text"]]) == pytest.approx([golden["mean_nll"]], abs=1e-4)


# --- batches


def test_a_batch_gives_what_single_calls_give(demo):
    prompts = [*PROMPTS[:2], [7], list(range(100, 164)), *PROMPTS[3:]]
    together = fmoe.generate(demo, prompts, max_new_tokens=12)
    assert together == [fmoe.generate(demo, prompt, max_new_tokens=12)[0] for prompt in prompts]
    assert fmoe.generate(demo, prompts, max_new_tokens=12, batch_size=2) == together
    assert fmoe.generate(demo, iter(prompts), max_new_tokens=12, batch_size=4) == together


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_row_i_is_sampled_with_seed_plus_i(demo, batch_size):
    prompts = [PROMPTS[0], PROMPTS[0], [7], PROMPTS[3]]
    options = {"max_new_tokens": 10, "temperature": 1.2, "top_p": 0.95, "min_p": 0.01}
    rows = fmoe.generate(demo, prompts, seed=5, batch_size=batch_size, **options)
    assert rows == [fmoe.generate(demo, p, seed=5 + i, **options)[0] for i, p in enumerate(prompts)]
    assert rows[0].token_ids != rows[1].token_ids
    assert "".join(fmoe.stream(demo, PROMPTS[3], seed=8, **options)) == rows[3].text


def test_no_prompts(demo, nothing_runs):
    assert fmoe.generate(demo, []) == []
    assert fmoe.generate(demo, ()) == []
    assert fmoe.score(demo, []) == []


# --- prompts


def test_kinds_of_prompts(demo):
    ids = GOLDEN["cases"][0]["prompt_ids"]
    expected = fmoe.generate(demo, [PROMPTS[0]], max_new_tokens=3)
    for prompt in (PROMPTS[0], ids, tuple(ids), [ids], torch.tensor(ids), np.array(ids), torch.tensor([ids])):
        assert fmoe.generate(demo, prompt, max_new_tokens=3) == expected
    assert fmoe.generate(demo, [PROMPTS[0], np.array(ids), ids], max_new_tokens=3) == expected * 3
    assert type(fmoe.generate(demo, np.array(ids), max_new_tokens=1)[0].prompt_token_ids[0]) is int


def test_chat(demo, make_demo):
    messages = [{"role": "user", "content": "Who made the heaven?"}]
    rendered = "<user> Who made the heaven?\n<a>"
    chatty = make_demo(chat_template__jinja=TEMPLATE)
    expected = fmoe.generate(chatty, rendered, max_new_tokens=4)[0]
    assert fmoe.generate(chatty, messages, max_new_tokens=4) == [expected]
    assert fmoe.generate(chatty, [messages, "x", messages], max_new_tokens=4)[::2] == [expected] * 2
    assert "".join(fmoe.stream(chatty, messages, max_new_tokens=4)) == expected.text
    with pytest.raises(ValueError, match=r"no .*chat template"):
        fmoe.generate(demo, messages)


def test_without_a_tokenizer(demo, textless, nothing_runs, monkeypatch):
    with pytest.raises(ValueError, match=r"prompt 1 is a string, but .* has no tokenizer.json; give a list of token"):
        fmoe.generate(textless, [[5], "In the"])
    with pytest.raises(ValueError, match=r"prompt 0 is a chat, but .* has no tokenizer.json"):
        fmoe.generate(textless, [{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match=r"stop=\['x'\] needs text, but .* has no tokenizer.json; drop it"):
        fmoe.generate(textless, [5], stop="x")
    with pytest.raises(ValueError, match=r"no text to stream; use fmoe\.generate or fmoe\.stream_tokens"):
        fmoe.stream(textless, [5])
    with pytest.raises(ValueError, match=r"the prompt is a string, but .* has no tokenizer.json; give a list of token"):
        fmoe.stream_tokens(textless, "In the")
    with pytest.raises(ValueError, match=r"stop=\['x'\] needs text, but .* has no tokenizer.json; drop it"):
        fmoe.stream_tokens(textless, [5], stop="x")
    monkeypatch.undo()
    ids = GOLDEN["cases"][0]["prompt_ids"]
    done = fmoe.generate(textless, ids, max_new_tokens=5)[0]
    assert done.text is None and done.finish_reason == "length"
    assert done == replace(fmoe.generate(demo, ids, max_new_tokens=5)[0], text=None)
    assert fmoe.score(textless, [GOLDEN["score"]["ids"]]) == pytest.approx([GOLDEN["score"]["mean_nll"]], abs=1e-4)


# --- endings


def test_end_of_sequence(make_demo):
    """Several ids from generation_config.json; config.json's own stands back, the tokenizer's is added."""
    case = GOLDEN["cases"][0]
    third, fifth = case["greedy_ids"][2], case["greedy_ids"][4]
    model = make_demo(generation_config__json={"eos_token_id": [fifth, third]})
    assert model.defaults.eos_ids == (fifth, third, EOS)
    done = fmoe.generate(model, case["prompt"], max_new_tokens=9)[0]
    assert list(done.token_ids) == case["greedy_ids"][:3]
    assert done.finish_reason == "eos"
    assert done.text == model.text.tokenizer.decode(case["greedy_ids"][:2])
    assert "".join(fmoe.stream(model, case["prompt"], max_new_tokens=9)) == done.text
    ignoring = fmoe.generate(model, case["prompt"], max_new_tokens=9, ignore_eos=True)[0]
    assert list(ignoring.token_ids) == case["greedy_ids"][:9] and ignoring.finish_reason == "length"
    exact = fmoe.generate(model, case["prompt"], max_new_tokens=3)[0]
    assert exact.finish_reason == "eos"  # an end is an end, at the limit too


def test_end_of_sequence_from_config(make_demo):
    case = GOLDEN["cases"][0]
    config = json.loads((DEMO / "config.json").read_text()) | {"eos_token_id": case["greedy_ids"][0]}
    model = make_demo(drop=("generation_config.json",), config__json=config)
    done = fmoe.generate(model, case["prompt"], max_new_tokens=9, logprobs=0)[0]
    assert (done.text, done.finish_reason, len(done.token_ids), len(done.logprobs)) == ("", "eos", 1, 1)


def test_rows_end_alone(demo):
    """A row that ended neither changes its neighbours nor goes on."""
    stop = [" of", " I am"]
    rows = fmoe.generate(demo, PROMPTS[:4], max_new_tokens=16, stop=stop)
    assert rows == [fmoe.generate(demo, prompt, max_new_tokens=16, stop=stop)[0] for prompt in PROMPTS[:4]]
    assert len({len(row.token_ids) for row in rows}) >= 3


def test_a_row_that_ended_may_break(demo):
    """NaN behind the end of a row is no error: alone, nobody would have computed it."""
    case = GOLDEN["cases"][0]
    first = case["greedy_ids"][0]
    embed_VD = demo.params.embed_VD.clone()
    embed_VD[first] = torch.nan
    params = demo.params._replace(embed_VD=nn.Parameter(embed_VD, requires_grad=False))
    model = replace(demo, params=params, defaults=replace(demo.defaults, eos_ids=(first,)))
    rows = fmoe.generate(model, [case["prompt"], PROMPTS[1]], max_new_tokens=5)
    assert [row.finish_reason for row in rows] == ["eos", "length"]
    with pytest.raises(RuntimeError, match="first shows in the embedding"):
        fmoe.generate(model, [case["prompt"], PROMPTS[1]], max_new_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("stop", ["reign of Jerus", ["zebra", " Jerusalem, and"], "of", [","]])
def test_stop_strings(demo, stop):
    case = GOLDEN["cases"][0]
    stops = [stop] if isinstance(stop, str) else stop
    cut = min(case["text"].find(s) for s in stops if s in case["text"])
    done = fmoe.generate(demo, case["prompt"], max_new_tokens=32, stop=stop)[0]
    assert (done.text, done.finish_reason) == (case["text"][:cut], "stop")
    assert list(done.token_ids) == case["greedy_ids"][: len(done.token_ids)]
    through = demo.text.tokenizer.decode(list(done.token_ids))
    assert any(s in through for s in stops)
    assert not any(s in demo.text.tokenizer.decode(list(done.token_ids[:-1])) for s in stops)
    assert "".join(fmoe.stream(demo, case["prompt"], max_new_tokens=32, stop=stop)) == done.text


def test_a_stop_string_that_does_not_come(demo):
    case = GOLDEN["cases"][0]
    held = case["text"][-6:] + "!"  # its beginning is held back, and given in the end
    done = fmoe.generate(demo, case["prompt"], max_new_tokens=32, stop=[held])[0]
    assert (done.text, done.finish_reason) == (case["text"], "length")
    assert "".join(fmoe.stream(demo, case["prompt"], max_new_tokens=32, stop=[held])) == case["text"]


def test_a_stop_string_that_the_end_completes(demo):
    """The last token leaves half a character; its U+FFFD shows only when nothing more can come."""
    options = {"max_new_tokens": 7, "temperature": 30.0, "seed": 2, "ignore_eos": True}
    text = fmoe.generate(demo, "x", **options)[0].text
    assert text.find("\ufffd") == len(text) - 1
    done = fmoe.generate(demo, "x", stop="\ufffd", **options)[0]
    assert (done.text, done.finish_reason, len(done.token_ids)) == (text[:-1], "stop", 7)


def test_stream_of_wild_text_joins_to_generate(demo):
    """Hot sampling gives broken bytes and characters of several tokens."""
    options = {"max_new_tokens": 120, "temperature": 30.0, "seed": 3, "ignore_eos": True}
    pieces = list(fmoe.stream(demo, "אור 🕯", **options))
    done = fmoe.generate(demo, "אור 🕯", **options)[0]
    assert "".join(pieces) == done.text
    assert all(pieces) and 20 < len(pieces) <= 120
    assert "\ufffd" in done.text or not done.text.isascii()


def test_stream_gives_pieces_early(demo):
    pieces = fmoe.stream(demo, PROMPTS[0], max_new_tokens=CONTEXT - 10)
    assert next(pieces) == " of" and next(pieces) == " the"
    pieces.close()


# --- tokens one by one


def check_tokens(model, prompt, **options):
    """Join the streamed tokens and compare with generate's Completion; gives both."""
    tokens = list(fmoe.stream_tokens(model, prompt, **options))
    done = fmoe.generate(model, prompt, **options)[0]
    assert tuple(token.token_id for token in tokens) == done.token_ids
    assert "".join(token.text for token in tokens) == (done.text or "")
    assert [token.finish_reason for token in tokens] == [None] * (len(tokens) - 1) + [done.finish_reason]
    if options.get("logprobs") is None:
        assert {token.logprobs for token in tokens} == {None}
    else:
        assert tuple(token.logprobs for token in tokens) == done.logprobs
    return tokens, done


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_new_tokens": 1}, "length"),
        ({"max_new_tokens": 9, "logprobs": 3}, "length"),
        ({"max_new_tokens": 9, "logprobs": 0}, "length"),
        ({"max_new_tokens": 9, "temperature": 1.2, "top_p": 0.95, "min_p": 0.01, "seed": 7}, "length"),
        ({"max_new_tokens": 9, "temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3}, "length"),
        ({"max_new_tokens": 32, "stop": "reign of Jerus", "logprobs": 1}, "stop"),
        ({"max_new_tokens": 32, "stop": [GOLDEN["cases"][0]["text"][-6:] + "!"]}, "length"),
        ({"max_new_tokens": 120, "temperature": 30.0, "seed": 3, "ignore_eos": True}, "length"),
    ],
    ids=str,
)
def test_streamed_tokens_join_to_generate(demo, options, reason):
    tokens, done = check_tokens(demo, PROMPTS[0], **options)
    assert done.finish_reason == reason
    assert list(fmoe.stream(demo, PROMPTS[0], **{k: v for k, v in options.items() if k != "logprobs"})) == [
        token.text for token in tokens if token.text
    ]
    if options.get("stop"):
        assert "" in [token.text for token in tokens]  # what is held back has a token all the same


def test_streamed_tokens_end_with_the_end_of_sequence(make_demo):
    case = GOLDEN["cases"][0]
    model = make_demo(generation_config__json={"eos_token_id": case["greedy_ids"][2]})
    tokens, _ = check_tokens(model, case["prompt"], max_new_tokens=9)
    assert [token.finish_reason for token in tokens] == [None, None, "eos"]
    assert tokens[-1].text == ""
    check_tokens(model, case["prompt"], max_new_tokens=9, ignore_eos=True)


def test_streamed_tokens_without_a_tokenizer(textless):
    tokens, done = check_tokens(textless, GOLDEN["cases"][0]["prompt_ids"], max_new_tokens=5, logprobs=2)
    assert [token.text for token in tokens] == [""] * 5 and done.text is None


def test_streamed_tokens_come_early(demo):
    tokens = fmoe.stream_tokens(demo, PROMPTS[0], max_new_tokens=CONTEXT - 10)
    first = next(tokens)
    assert (first.token_id, first.text) == (GOLDEN["cases"][0]["greedy_ids"][0], " of")
    tokens.close()
