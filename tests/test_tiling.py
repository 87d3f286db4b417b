"""fmoe/tiling.py against counting every element of a small tensor."""

import pytest
import torch

from fmoe.tiling import box_shape, count_uncovered, select_box

INTOS = [
    (),
    (1,),
    (-1,),
    (slice(2),),
    (slice(1, None), 2),
    (slice(None), slice(1, 3), -2),
    (slice(None, None, 2),),
    (2, slice(1, None, 3)),
    (slice(3, 1),),
    (slice(-2, 99), slice(0, -1)),
]
SHAPE = (4, 5, 3)


@pytest.mark.parametrize("into", INTOS, ids=str)
def test_select_box_and_its_shape(into):
    numbers = torch.arange(60).reshape(SHAPE)

    box = select_box(SHAPE, into)

    assert box_shape(box, into) == tuple(numbers[into].shape)
    found = [15 * i + 3 * j + k for i in box[0] for j in box[1] for k in box[2]]
    assert found == numbers[into].flatten().tolist()


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ((4,), "index 4 for a dimension of 4"),
        ((0, -6), "index -6 for a dimension of 5"),
        ((0, 0, 0, 0), "4 indices for 3 dimensions"),
        ((slice(None, None, -1),), "step -1; a positive one was expected"),
    ],
    ids=str,
)
def test_select_box_errors(into, message):
    with pytest.raises(IndexError, match=message):
        select_box(SHAPE, into)


def test_count_uncovered_on_random_boxes(rng):
    for _ in range(200):
        some = torch.randperm(len(INTOS), generator=rng)[: int(torch.randint(0, 5, (), generator=rng))]
        intos = [INTOS[int(i)] for i in some]
        times = torch.zeros(SHAPE, dtype=torch.long)
        for into in intos:
            times[into] += 1
        expected = (int((times == 0).sum()), int((times > 1).sum()))
        assert count_uncovered(SHAPE, [select_box(SHAPE, into) for into in intos]) == expected, intos


@pytest.mark.parametrize(
    ("shape", "intos", "expected"),
    [
        ((), [], (1, 0)),
        ((), [()], (0, 0)),
        ((), [(), ()], (0, 1)),
        ((0, 3), [], (0, 0)),
        ((2,), [(0,), (1,)], (0, 0)),
        ((512, 10**6, 10**6), [(e,) for e in range(511)], (10**12, 0)),
    ],
)
def test_count_uncovered_edges(shape, intos, expected):
    assert count_uncovered(shape, [select_box(shape, into) for into in intos]) == expected
