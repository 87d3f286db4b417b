"""The op of a chunk's attention: schema, fake and body agree, and one graph serves chunks of any size and place."""

import pytest
import torch
from torch.library import opcheck

from fmoe.compile.causal_ops import attend_causal_op, takes_flash
from fmoe.functional.attention import attend_causal

SIZES = [(1, 1), (5, 5), (5, 11), (1, 4), (64, 64), (7, 70)]


def draw(tokens, slots, rng, *, room=3, dtype=torch.float32):
    """Slots are those of a larger cache."""
    q = torch.randn(1, tokens, 6, 8, generator=rng).to(dtype)
    k, v = (torch.randn(1, 3, slots + room, size, generator=rng).to(dtype)[:, :, :slots] for size in (8, 10))
    return q, k, v


@pytest.mark.parametrize(("tokens", "slots"), SIZES)
def test_opcheck(tokens, slots, rng):
    opcheck(torch.ops.fmoe.attend_causal.default, (*draw(tokens, slots, rng), 0.3))


def test_one_graph_serves_all_places(rng):
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    run = torch.compile(attend_causal_op, fullgraph=True, dynamic=False, backend=count)
    for tokens, slots in SIZES[1:3] + SIZES[4:]:
        q, k, v = draw(tokens, slots, rng)
        for part, dim in ((q, 1), (k, 2), (v, 2)):  # as fmoe/compile/step.py marks them
            torch._dynamo.mark_dynamic(part, dim)
        out = run(q, k, v, scale=0.3)
        torch.testing.assert_close(out, attend_causal(q, k, v, scale=0.3))
        assert out.is_contiguous()
    assert len(graphs) == 1


def test_flash_attention_takes_half_precision_with_equal_channels(rng):
    q, k, v = draw(5, 11, rng)
    assert not takes_flash(q, k, k)
    assert not takes_flash(q.half(), k.half(), v.half())
