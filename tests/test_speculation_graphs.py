"""Compiled steps with drafts: the tokens of plain steps, and no graph more, however many drafts stay."""

import random

import pytest
import torch

from fmoe.decoding import compute_head, decode_batch, new_state, run
from fmoe.options import Options

from .forced_drafts import force_drafts
from .tiny_drafting import FAMILIES, make_drafting_model

V = 61


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def draw_prompts(lengths, seed=0):
    source = random.Random(seed)
    return [[source.randrange(V - 1) for _ in range(length)] for length in lengths]


def decode(model, steps, prompts, **changes):
    settings = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    settings |= {"max_new_tokens": 9, "stop": (), "eos_ids": (), "logprobs": None}
    turns = decode_batch(model, steps, prompts, Options(**settings | changes))
    return [[token.id for token in row] for row in zip(*turns, strict=True)]


def count_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_and_batches_compile_nothing_anew(family):
    model, drafts = make_drafting_model(family), 2
    patterns = [lambda r, p, n: True, lambda r, p, n: False, lambda r, p, n: n < (r + p) % (drafts + 1)]
    for lengths in ([3], [5, 70]):  # both variants of the batch, and of the slots
        prompts = draw_prompts(lengths)
        plain = decode(model, model.eager, prompts)
        forced, _ = force_drafts(model, plain, patterns[0])
        for drafting in (model, forced):  # a step in larger pieces, and in those that a test can force
            assert decode(drafting, drafting.graphs, prompts, speculate=drafts) == plain
    known = count_graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(([7], [66, 2, 9, 130])):
            prompts = draw_prompts(lengths, seed)
            plain = decode(model, model.eager, prompts)
            assert decode(model, model.graphs, prompts, speculate=drafts) == plain
            for pattern in patterns:
                forced, _ = force_drafts(model, plain, pattern)
                assert decode(forced, forced.graphs, prompts, speculate=drafts) == plain
    assert count_graphs() == known > 0


def enumerate_pairs(model, prompt, vocab):
    """Compute the distribution of the second and third token from passes over every beginning."""

    def predict(ids):
        state = new_state(model, 1, len(ids))
        x_1TD, _ = run(model, model.eager, torch.tensor([ids]), state, visible=len(ids))
        return compute_head(model, model.eager, x_1TD[0, -1:])[0].double().softmax(-1)

    pairs = torch.zeros(vocab, vocab, dtype=torch.float64)
    first = predict(prompt)
    for a in range(vocab):
        second = predict([*prompt, a])
        for b in range(vocab):
            pairs[b] += first[a] * second[b] * predict([*prompt, a, b])
    return pairs


@pytest.mark.parametrize("own", [True, False], ids=["own-drafts", "always-the-same-draft"])
def test_sampled_tokens_have_the_models_distribution(own):
    """Chi-square of 4,096 rows over 25 pairs: 24 degrees of freedom exceed 60 once in 17,000 times."""
    vocab, rows, rounds = 5, 256, 16
    model = make_drafting_model(vocab_size=vocab)
    prompt = [1, 3, 0]
    expected = enumerate_pairs(model, prompt, vocab) * rows * rounds
    if not own:
        model, _ = force_drafts(model, [[0] * 9] * rows, lambda row, place, n: True)
    counts = torch.zeros(vocab, vocab, dtype=torch.float64)
    for n in range(rounds):
        options = {"temperature": 1.0, "seed": n * rows, "max_new_tokens": 3, "speculate": 2}
        for _, b, c in decode(model, model.eager, [prompt] * rows, **options):
            counts[b, c] += 1
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 60
