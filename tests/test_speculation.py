"""Decoding with drafts gives what decoding without gives, whatever the drafts are; rejected ones leave no trace."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

import fmoe
from fmoe.capture import DirectMachine
from fmoe.decoding import decode_batch
from fmoe.functional.cache import DeltaCache, KVCache
from fmoe.options import Options

from .forced_drafts import force_drafts
from .test_capture import StandIn

V = 4096
LENGTHS = (1, 5, 63, 17, 64, 5)
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
PATTERNS = {
    "right": lambda row, place, n: True,
    "wrong": lambda row, place, n: False,
    "right-up-to-1": lambda row, place, n: n < 1,
    "right-up-to-2": lambda row, place, n: n < 2,
    "rows-differ": lambda row, place, n: n < row % 4,
    "rows-and-steps-differ": lambda row, place, n: n < (row + place) % 4,
}


@pytest.fixture(scope="module")
def demo():
    return fmoe.load("demo", device="cpu", compile=False, speculate=True)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def empty_shelf(demo):
    demo.shelf.take(lambda kept: False)


def draw_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, V, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [draw_ids(n, seed=n) for n in LENGTHS]


def make_options(**changes):
    settings = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    settings |= {"max_new_tokens": 14, "stop": (), "eos_ids": (), "logprobs": None}
    return Options(**settings | changes)


def decode(model, prompts, *, steps=None, first_row=0, machine=None, **options):
    """Give the tokens of each row."""
    turns = decode_batch(
        model, steps or model.eager, prompts, make_options(**options), first_row=first_row, machine=machine
    )
    return [list(row) for row in zip(*turns, strict=True)]


def ids_of(rows):
    return [[token.id for token in row] for row in rows]


@pytest.fixture(scope="module")
def plain_ids(demo):
    with torch.inference_mode():
        return ids_of(decode(demo, PROMPTS))


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_count_of_right_drafts(demo, plain_ids, pattern, drafts):
    model, forced = force_drafts(demo, plain_ids, pattern)

    rows = decode(model, PROMPTS, speculate=drafts)

    assert ids_of(rows) == plain_ids
    for row in range(len(PROMPTS)):
        place, counts = 1, []
        while place < 14:
            right = next((n for n in range(drafts) if not pattern(row, place + n, n)), drafts)
            counts.append(min(right + 1, 14 - place))
            place += counts[-1]
        found = [step[row] for step in forced.kept]
        assert found[: len(counts)] == counts and not any(found[len(counts) :])
        assert sum(token.accepted for token in rows[row]) == sum(count - 1 for count in counts)
        starts = [1 + sum(counts[:i]) for i in range(len(counts))]
        assert sum(token.drafted for token in rows[row]) == sum(min(drafts, 13 - start) for start in starts)


SETTINGS = [
    {},
    {"logprobs": 2},
    {"temperature": 1.3, "top_p": 0.9, "seed": 7},
    {"temperature": 0.8, "top_k": 5, "min_p": 0.05, "logprobs": 0},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "temperature": 1.0, "logprobs": 1},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("drafts", [1, 3, "auto"])
def test_the_models_own_drafts_change_nothing(demo, options, drafts):
    expected = decode(demo, PROMPTS, **options)
    rows = decode(demo, PROMPTS, speculate=drafts, **options)
    assert ids_of(rows) == ids_of(expected)
    for row, other in zip(rows, expected, strict=True):
        assert [token.logprob for token in row] == pytest.approx([token.logprob for token in other], abs=1e-3)
        assert [[i for i, _ in token.top] for token in row] == [[i for i, _ in token.top] for token in other]
    assert drafts == "auto" or sum(token.drafted for row in rows for token in row) > 0


def test_a_row_does_not_depend_on_its_neighbours(demo):
    sampled = {"temperature": 1.2, "top_p": 0.95, "seed": 3, "speculate": 2, "max_new_tokens": 8}
    rows = decode(demo, PROMPTS[:4], **sampled)
    for i, ids in enumerate(PROMPTS[:4]):
        [alone] = decode(demo, [ids], first_row=i, **sampled)
        assert alone == rows[i]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("right", [True, False])
def test_the_last_step_gives_no_token_too_many(demo, plain_ids, count, right):
    model, _ = force_drafts(demo, plain_ids, lambda row, place, n: right)
    rows = decode(model, PROMPTS, speculate=3, max_new_tokens=count)
    assert ids_of(rows) == [ids[:count] for ids in plain_ids]


def test_drafts_go_past_neither_context_nor_cache(demo):
    """The last token has the model's last position; drafts behind it would have positions that do not exist."""
    limit = 96
    small = replace(demo, config=replace(demo.config, decoder=replace(demo.config.decoder, max_context=limit)))
    prompt = draw_ids(limit - 20)
    [plain] = fmoe.generate(small, [prompt], max_new_tokens=20, ignore_eos=True)
    [found] = fmoe.generate(small, [prompt], max_new_tokens=20, ignore_eos=True, speculate=3)
    assert found.token_ids == plain.token_ids and len(found.token_ids) == 20
    with pytest.raises(ValueError, match="context"):
        fmoe.generate(small, [prompt], max_new_tokens=21, speculate=3)


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_of_the_prompt_change_nothing(demo, chunk):
    prompts = [draw_ids(n, seed=n) for n in (1, 8, 65, 65)]
    options = make_options(speculate=2)
    whole = list(decode_batch(demo, demo.eager, prompts, options))
    parts = list(decode_batch(demo, demo.eager, prompts, options, chunk=chunk))
    assert [[token.id for token in turn] for turn in parts] == [[token.id for token in turn] for turn in whole]
    drafted = [sum(token.accepted for turn in turns for token in turn) for turns in (whole, parts)]
    assert drafted[0] == drafted[1] > 0


@pytest.mark.parametrize("taken", [1, 2, 3, 6, 9])
def test_what_is_kept_of_a_row_is_what_was_given(demo, plain_ids, taken):
    """A stop inside a right draft: the state ends where the tokens that were given end, one aside."""
    model, _ = force_drafts(demo, [plain_ids[3]], lambda row, place, n: place % 5 != 0)
    kept = []

    def keep(state, seen):
        caches = [type(cache)(*(part.clone() for part in cache)) for cache in state.caches]
        kept.append((caches, state.lengths_B.tolist(), seen))

    turns = decode_batch(model, model.eager, [PROMPTS[3]], make_options(speculate=3), keep=keep)
    given = [turn[0].id for turn in islice(turns, taken)]
    turns.close()

    [(caches, [length], [seen])] = kept
    assert given == plain_ids[3][:taken]
    assert seen in ([*PROMPTS[3], *given], [*PROMPTS[3], *given[:-1]]) and length == len(seen)
    expected = fmoe.prefill(demo, seen)
    for cache, right in zip(caches, expected.caches, strict=True):
        assert isinstance(cache, DeltaCache | KVCache)
        for part, right_part in zip(cache, right, strict=True):
            if isinstance(cache, KVCache):
                part, right_part = part[:, :, :length], right_part[:, :, :length]
            assert (part - right_part).abs().max() <= 1e-4 * right_part.abs().max()


@pytest.mark.parametrize("options", SETTINGS[:4], ids=str)
def test_replays_give_the_tokens_of_calls(demo, options):
    expected = decode(demo, PROMPTS, machine=DirectMachine(), speculate=2, **options)
    machine = StandIn()
    for _ in range(2):
        assert ids_of(decode(demo, PROMPTS, machine=machine, speculate=2, **options)) == ids_of(expected)
    assert machine.events.count("capture") == 1 and machine.events.count("replay") > 5


def test_steps_that_adapt_are_captured_by_their_number(demo, plain_ids):
    machine = StandIn()
    for _ in range(3):
        assert ids_of(decode(demo, PROMPTS, machine=machine, speculate="auto", max_new_tokens=14)) == plain_ids
    assert machine.events.count("replay") > 5


def test_the_same_again_and_again(demo):
    """Alternating prompts: tokens, drafts and acceptance are those of the first time."""
    first = [decode(demo, [ids], speculate=2) for ids in PROMPTS[2:4]]
    for _ in range(3):
        assert [decode(demo, [ids], speculate=2) for ids in PROMPTS[2:4]] == first


@pytest.mark.parametrize("right", [True, False])
def test_nan_behind_a_token_is_found_and_that_of_a_dropped_draft_concerns_nobody(demo, plain_ids, right):
    """The token is chosen, or only drafted, before it is looked up."""
    bad = plain_ids[1][5]
    assert bad not in PROMPTS[1] + plain_ids[1][:5]
    assert bad + 1 not in PROMPTS[1] + plain_ids[1]
    embed_VD = demo.params.embed_VD.clone()
    embed_VD[bad if right else bad + 1] = torch.nan
    broken = replace(demo, params=demo.params._replace(embed_VD=nn.Parameter(embed_VD, requires_grad=False)))
    model, forced = force_drafts(broken, [plain_ids[1]], lambda row, place, n: right or place != 5)
    if right:
        with pytest.raises(RuntimeError, match="hold NaN or infinity, which first shows in the embedding"):
            decode(model, [PROMPTS[1]], speculate=2)
    else:
        assert ids_of(decode(model, [PROMPTS[1]], speculate=2)) == [plain_ids[1]]
        assert forced.kept


def test_golden_prompts(demo):
    prompts = [case["prompt_ids"] for case in GOLDEN["cases"]]
    done = fmoe.generate(demo, prompts, max_new_tokens=32, speculate=1)
    assert [list(row.token_ids) for row in done] == [case["greedy_ids"] for case in GOLDEN["cases"]]
    drafted, accepted = sum(row.drafted for row in done), sum(row.accepted for row in done)
    assert accepted > 0.6 * drafted > 0
    assert all(row.drafted == row.accepted == 0 for row in fmoe.generate(demo, prompts, max_new_tokens=3))


def test_a_state_is_gone_on_from(demo):
    state = fmoe.prefill(demo, "In the beginning God created")
    for more in ("", " the heaven"):
        [plain] = fmoe.generate(demo, more, state=state, max_new_tokens=24)
        for found in fmoe.generate(demo, [more] * 2, state=state, max_new_tokens=24, speculate=2):
            assert found.token_ids == plain.token_ids and found.text == plain.text
            assert 0 < found.accepted < found.drafted


def test_streams_and_stops(demo):
    [whole] = fmoe.generate(demo, "In the beginning", max_new_tokens=32, speculate=3)
    assert "".join(fmoe.stream(demo, "In the beginning", max_new_tokens=32, speculate=3)) == whole.text
    for stop in (" Jerusalem", " the son"):
        [plain] = fmoe.generate(demo, "In the beginning", max_new_tokens=32, stop=stop)
        [found] = fmoe.generate(demo, "In the beginning", max_new_tokens=32, stop=stop, speculate=3)
        assert found.finish_reason == "stop"
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)


@pytest.mark.parametrize("value", [-1, 9, True, "on", None, 1.5])
def test_what_cannot_be_speculated(demo, value):
    with pytest.raises(ValueError, match=r"speculate=.* must be 'auto' or an int in 0\.\.8"):
        fmoe.generate(demo, "x", speculate=value)
