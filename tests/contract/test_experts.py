"""Expert compute through the op: against the definition, and what must not change it."""

import pytest
import torch

from fmoe.compile.aiter_kernels import pad_experts, prepare_experts
from fmoe.compile.aiter_ops import compute_experts_aiter
from fmoe.functional.routing import Routing, inject_shared_experts

from .oracles import difference, experts_by_loop

D, E, S, K = 64, 6, 2, 3


def draw_routing(tokens, rng, *, experts=E):
    ids = torch.stack([torch.randperm(experts, generator=rng)[:K] for _ in range(tokens)] or [torch.arange(K)])
    return Routing(torch.rand(tokens, K, generator=rng), ids[:tokens].int())


def draw_stacks(width, dtype, rng, *, stacked=E + S):
    w_gate_up = torch.randn(stacked, 2 * width, D, generator=rng) / D**0.5
    w_down = torch.randn(stacked, D, width, generator=rng) / width**0.5
    return w_gate_up.to(dtype), w_down.to(dtype)


def run(backend, x, routing, stacks, *, shuffled=True):
    device = backend.device
    stacks = prepare_experts(*stacks) if shuffled else pad_experts(*stacks)
    on_device = Routing(*(t.to(device) for t in routing))
    return compute_experts_aiter(x.to(device), on_device, *(w.to(device) for w in stacks), shuffled=shuffled).cpu()


@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [24, 64, 100, 192, 200])
def test_equals_the_definition(width, dtype, shuffled, registered, rng):
    stacks = draw_stacks(width, dtype, rng)
    for tokens in (1, 7, 33):
        x = torch.randn(tokens, D, generator=rng).to(dtype)
        gates = torch.randn(tokens, S, generator=rng)
        routing = inject_shared_experts(draw_routing(tokens, rng), gates, slots=S, first=E)
        y = run(registered, x, routing, stacks, shuffled=shuffled)
        assert y.dtype == dtype
        assert difference(y, experts_by_loop(x, routing, *stacks)) < 1e-4


def test_no_tokens_launch_nothing(registered):
    x, routing = torch.empty(0, D, dtype=torch.bfloat16), Routing(torch.empty(0, K), torch.empty(0, K).int())
    y = run(registered, x, routing, draw_stacks(64, torch.bfloat16, torch.Generator()))
    assert y.shape == (0, D)


def test_a_shared_weight_of_zero_equals_the_routed_experts_alone(registered, rng):
    stacks = draw_stacks(64, torch.bfloat16, rng)
    x, routed = torch.randn(7, D, generator=rng).bfloat16(), draw_routing(7, rng)
    silent = inject_shared_experts(routed, torch.full((7, 1), -torch.inf), slots=S, first=E)
    torch.testing.assert_close(run(registered, x, silent, stacks), run(registered, x, routed, stacks))


def test_fused_equals_routed_plus_shared(registered, rng):
    stacks = draw_stacks(64, torch.bfloat16, rng)
    x, routed = torch.randn(7, D, generator=rng).bfloat16(), draw_routing(7, rng)
    fused = inject_shared_experts(routed, torch.randn(7, S, generator=rng), slots=S, first=E)
    shared = Routing(fused.weights_TK[:, K:].contiguous(), fused.experts_TK[:, K:].contiguous())
    apart = run(registered, x, routed, stacks).float() + run(registered, x, shared, stacks).float()
    assert difference(run(registered, x, fused, stacks), apart) < 1e-4


def test_the_order_of_the_experts_does_not_matter(registered, rng):
    stacks = draw_stacks(64, torch.bfloat16, rng)
    x, routing = torch.randn(7, D, generator=rng).bfloat16(), draw_routing(7, rng)
    order = torch.randperm(E + S, generator=rng)
    permuted = routing._replace(experts_TK=order.argsort()[routing.experts_TK.long()].int())
    y = run(registered, x, permuted, tuple(w[order] for w in stacks))
    torch.testing.assert_close(y, run(registered, x, routing, stacks))


def test_zeros_behind_an_aligned_width_change_nothing(registered, rng):
    w_gate_up, w_down = draw_stacks(64, torch.bfloat16, rng)
    x, routing = torch.randn(7, D, generator=rng).bfloat16(), draw_routing(7, rng)
    halves = w_gate_up.unflatten(1, (2, 64))
    wide = torch.nn.functional.pad(halves, (0, 0, 0, 64)).flatten(1, 2), torch.nn.functional.pad(w_down, (0, 64))
    torch.testing.assert_close(run(registered, x, routing, wide), run(registered, x, routing, (w_gate_up, w_down)))
