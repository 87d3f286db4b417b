"""Which drafts stay: counts by loops over lists."""

from itertools import product

import pytest
import torch

from fmoe.functional.sampling import sample, sampling_params
from fmoe.functional.speculate import count_kept, mark_drafts, number_tokens, repeat_sampling, take_last

MODES = ["eager", "aot_eager"]


def in_mode(fn, mode):
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=mode)


def count_by_loop(chosen, drafts, room):
    kept = 1
    for right, draft in zip(chosen, drafts, strict=False):
        if right != draft:
            break
        kept += 1
    return min(kept, room)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_count_kept(drafts, mode):
    """Every pattern of right and wrong drafts, with every room."""
    rows = [(list(right), room) for right in product([True, False], repeat=drafts) for room in range(drafts + 3)]
    chosen_BT = torch.arange(len(rows) * (drafts + 1)).view(len(rows), -1)
    drafts_BN = torch.where(torch.tensor([right for right, _ in rows]), chosen_BT[:, :-1], -7)
    room_B = torch.tensor([room for _, room in rows])

    kept_B = in_mode(count_kept, mode)(chosen_BT, drafts_BN, room_B)

    expected = zip(chosen_BT.tolist(), drafts_BN.tolist(), room_B.tolist(), strict=True)
    assert kept_B.tolist() == [count_by_loop(*row) for row in expected]
    assert set(kept_B.tolist()) == set(range(drafts + 2))


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5)], ids=str)
def test_take_last(shape):
    rows = torch.arange(torch.Size(shape).numel()).view(shape)
    taken = take_last(torch.tensor([0, 1, 2, 3]), rows)
    assert taken.shape == (4, 1, *shape[2:])
    assert taken[:, 0].tolist() == [rows[0, 0].tolist(), rows[1, 0].tolist(), rows[2, 1].tolist(), rows[3, 2].tolist()]


def test_each_token_is_drawn_as_alone(rng):
    """Flattened rows of several tokens give what each gives with its own counter."""
    batch, tokens, vocab = 3, 4, 19
    params = sampling_params(batch, temperature=1.3, top_p=0.9, seed=5)
    logits_BTV = torch.randn(batch, tokens, vocab, generator=rng) * 2
    counters_B = torch.tensor([0, 7, 2])

    drawn = sample(logits_BTV.flatten(0, 1), repeat_sampling(params, tokens), number_tokens(counters_B, tokens)).view(
        batch, tokens
    )

    for t in range(tokens):
        assert torch.equal(drawn[:, t], sample(logits_BTV[:, t], params, counters_B + t))


def test_mark_drafts():
    seen_BV = torch.zeros(2, 6, dtype=torch.bool)
    seen_BV[0, 3] = True
    drafts_BN = torch.tensor([[1, 0], [5, 5]])

    marks_BTV = mark_drafts(seen_BV, drafts_BN)

    found = [[row.nonzero().flatten().tolist() for row in rows] for rows in marks_BTV]
    assert found == [[[3], [1, 3], [0, 1, 3]], [[], [5], [5]]]
    assert seen_BV.sum() == 1
