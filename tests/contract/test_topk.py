"""topk_softmax by the contract's grid: ids, weights, shared columns, and nothing written beside them."""

import pytest
import torch

from fmoe.compile.aiter_kernels import topk_softmax_

CANARY, ID_CANARY = -7.0, -9
CHOICES = [(8, 2), (60, 4), (64, 6), (128, 8), (256, 8), (384, 8), (512, 10)]
TOKENS = (1, 2, 7, 129)
MANY = 4097


def choose_by_stable_sort(routed, k):
    """Ids by a stable sort of the logits, the lowest first among equals, and their softmax in float32."""
    order = routed.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return order.int(), routed.float().softmax(-1).gather(1, order)


def honours_strides(record, experts):
    fast = experts in (8, 64, 128, 256, 512)
    return record.gating_stride_safe if fast else record.slow_path_stride_safe


def draw_logits(tokens, columns, dtype, rng, device):
    return torch.randn(tokens, columns, generator=rng).to(dtype).to(device)


def check(backend, logits, *, experts, k, slots, renormalize):
    """Run on the top left of wider outputs, and compare everything that was and was not written."""
    tokens, safe = len(logits), honours_strides(backend.record, experts)
    if slots and (backend.record.topk_arity != 7 or not safe):
        return  # the split path's, see test_routing.py
    logits = logits if safe else logits.contiguous()
    weights = torch.full((tokens + 2, k + slots + 3), CANARY, device=logits.device)
    ids = torch.full((tokens + 2, k + slots + 1), ID_CANARY, dtype=torch.int32, device=logits.device)
    outputs = (weights[:tokens], ids[:tokens, :k])
    if not safe or backend.record.topk_arity != 7:
        weights, ids = weights[:, :k].contiguous(), ids[:, :k].contiguous()
        outputs = (weights[:tokens], ids[:tokens])

    topk_softmax_(backend.module, backend.record, *outputs, logits, renormalize=renormalize, slots=slots)

    expected_ids, expected = choose_by_stable_sort(logits[:, :experts], k)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    shared = 1 / (1 + torch.exp(-logits[:, experts:].float()))
    assert torch.equal(ids[:tokens, :k], expected_ids)
    torch.testing.assert_close(weights[:tokens, :k], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights[:tokens, k : k + slots], shared, rtol=0, atol=1e-6)
    assert (weights[:tokens, k + slots :] == CANARY).all()
    assert (ids[:tokens, k:] == ID_CANARY).all()
    assert (weights[tokens:] == CANARY).all()
    assert (ids[tokens:] == ID_CANARY).all()


@pytest.mark.parametrize("renormalize", [False, True], ids=["plain", "renormalized"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("experts", "k"), CHOICES)
def test_grid(experts, k, dtype, renormalize, backend, rng):
    for tokens in TOKENS:
        for slots in (0, 1, 2, 4):
            logits = draw_logits(tokens, experts + slots, dtype, rng, backend.device)
            wide = torch.full((tokens, experts + slots + 10), 99.0, dtype=dtype, device=backend.device)
            wide[:, : experts + slots] = logits
            for gating in (logits, wide[:, : experts + slots]):
                check(backend, gating, experts=experts, k=k, slots=slots, renormalize=renormalize)


@pytest.mark.parametrize(("experts", "k"), CHOICES)
def test_many_tokens(experts, k, backend, rng):
    logits = draw_logits(MANY, experts + 1, torch.bfloat16, rng, backend.device)
    check(backend, logits, experts=experts, k=k, slots=1, renormalize=True)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("experts", [8, 60])
def test_no_tokens_launch_nothing(experts, slots, backend):
    # a launch of no blocks raises
    logits = torch.empty(0, experts + slots, device=backend.device)
    check(backend, logits, experts=experts, k=4, slots=slots, renormalize=False)


@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 8), (60, 4), (60, 60), (64, 64)])
def test_adversarial_rows(experts, k, slots, backend, rng):
    equal = torch.zeros(3, experts + slots)
    few_levels = torch.randint(0, 4, (33, experts + slots), generator=rng).float()
    one_missing = torch.randn(5, experts + slots, generator=rng)
    one_missing[:, 3] = -torch.inf
    for logits in (equal, few_levels, one_missing) if k < experts else (equal, few_levels):
        check(backend, logits.to(backend.device), experts=experts, k=k, slots=slots, renormalize=False)


def test_equal_logits_choose_the_lowest_ids(backend):
    weights, ids = torch.empty(2, 4, device=backend.device), torch.empty(2, 4, dtype=torch.int32, device=backend.device)
    logits = torch.zeros(2, 60, device=backend.device)

    topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=True)

    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def test_where_too_few_logits_are_finite_the_rest_weighs_nothing(backend):
    logits = torch.tensor([[0.5, -torch.inf, 0.25, -torch.inf]], device=backend.device)
    weights, ids = torch.empty(1, 4, device=backend.device), torch.empty(1, 4, dtype=torch.int32, device=backend.device)

    topk_softmax_(backend.module, backend.record, weights, ids, logits, renormalize=True)

    assert ids[0, :2].tolist() == [0, 2]
    assert weights[0, 2:].tolist() == [0, 0]
    assert ((ids >= 0) & (ids < 4)).all()
