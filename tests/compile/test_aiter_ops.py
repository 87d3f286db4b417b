"""AITER's ops: schema, fake and body agree; opaque in a graph; without an AITER they say so."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from fmoe.compile import aiter_ops
from fmoe.compile.aiter_kernels import prepare_experts
from fmoe.compile.aiter_ops import compute_experts_aiter, route_aiter
from fmoe.functional import Routing, compute_experts_grouped
from fmoe.functional.routing import RouterConfig, route_fused

from ..contract.standin.backend import standin_backend

T, E, K, S, D, F = 7, 8, 3, 2, 32, 40
V3 = RouterConfig(
    16, 4, scoring="sigmoid", renormalize=True, sum_eps=1e-20, scale=2.5, groups=4, groups_kept=2, group_score="top2"
)
RULES = {
    "fused": (RouterConfig(E, K, renormalize=True, round_weights=True), S, S, False),
    "split": (RouterConfig(E, K, scale=1.5), S, 1, False),
    "biased": (V3, S, 0, True),
    "grouped": (RouterConfig(16, 4, groups=4, groups_kept=2), 1, 1, False),
}


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    return standin_backend(tmp_path_factory.mktemp("aiter"))


@pytest.fixture
def record(backend):
    aiter_ops.register(backend.module, backend.record)
    yield backend.record
    aiter_ops.unregister()


def expert_inputs(tokens, rng):
    x = torch.randn(tokens, D, generator=rng).bfloat16()
    ids = torch.randint(0, E, (tokens, K), generator=rng).int()
    w_gate_up, w_down = torch.randn(E, 2 * F, D, generator=rng) / 8, torch.randn(E, D, F, generator=rng) / 8
    return x, Routing(torch.rand(tokens, K, generator=rng), ids), w_gate_up.bfloat16(), w_down.bfloat16()


@pytest.mark.parametrize("tokens", [0, 1, T])
@pytest.mark.parametrize("slots", [0, S])
def test_topk_check(tokens, slots, record, rng):
    logits = torch.randn(tokens, E + S, generator=rng)
    opcheck(torch.ops.fmoe.aiter_topk.default, (logits, E, K, slots, True))


@pytest.mark.parametrize("tokens", [0, 1, T])
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_topk_check(tokens, biased, record, rng):
    logits = torch.randn(tokens, 17, generator=rng)[:, :16]
    bias = torch.rand(16, generator=rng) if biased else None
    opcheck(torch.ops.fmoe.aiter_grouped_topk.default, (logits, bias, 4, 4, 2, False, True))


@pytest.mark.parametrize("tokens", [0, 1, T])
def test_experts_check(tokens, record, rng):
    x, routing, *stacks = expert_inputs(tokens, rng)
    opcheck(torch.ops.fmoe.aiter_experts.default, (x, *routing, *prepare_experts(*stacks), True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", RULES)
def test_routes_like_the_reference(name, compiled, record, rng):
    config, slots, gate_rows, biased = RULES[name]
    logits = torch.randn(T, config.num_experts + gate_rows, generator=rng)
    bias = torch.rand(config.num_experts, generator=rng) if biased else None
    route = partial(route_aiter, record=record)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    run = torch.compile(route, fullgraph=True, backend=keep) if compiled else route

    routing = run(logits, bias, config, slots=slots)

    expected = route_fused(logits, bias, config, slots=slots)
    assert torch.equal(routing.experts_TK, expected.experts_TK)
    torch.testing.assert_close(routing.weights_TK, expected.weights_TK, rtol=1e-5, atol=1e-6)
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes if "aiter" in str(node.target)]
    assert len(calls) == (1 if compiled else 0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_computes_experts_like_the_reference(compiled, record, rng):
    run = torch.compile(compute_experts_aiter, fullgraph=True, backend="aot_eager") if compiled else None
    x, routing, *stacks = expert_inputs(T, rng)
    y = (run or compute_experts_aiter)(x, routing, *prepare_experts(*stacks), shuffled=True)
    torch.testing.assert_close(y, compute_experts_grouped(x, routing, *stacks), rtol=2e-2, atol=2e-2)


def test_one_graph_serves_any_number_of_tokens(record, rng):
    config = RULES["fused"][0]
    run = torch.compile(partial(route_aiter, record=record), fullgraph=True, backend="aot_eager", dynamic=False)
    for tokens in (2, 7, 33):
        logits = torch.randn(tokens, E + S, generator=rng)
        torch._dynamo.mark_dynamic(logits, 0)
        routing = run(logits, None, config, slots=S)
        assert torch.equal(routing.experts_TK, route_fused(logits, None, config, slots=S).experts_TK)


def test_a_fake_needs_no_aiter():
    with FakeTensorMode():
        weights, experts = torch.ops.fmoe.aiter_topk(torch.empty(T, E + S), E, K, S, True)
        y = torch.ops.fmoe.aiter_experts(
            torch.empty(T, D), weights, experts, torch.empty(E, 128, D), torch.empty(E, D, 64), True
        )
    assert weights.shape == experts.shape == (T, K + S)
    assert (weights.dtype, experts.dtype, y.shape) == (torch.float32, torch.int32, (T, D))


def test_without_an_aiter_the_ops_say_so(rng):
    x, routing, *stacks = expert_inputs(T, rng)
    for call in (
        lambda: torch.ops.fmoe.aiter_topk(torch.zeros(T, E), E, K, 0, True),
        lambda: torch.ops.fmoe.aiter_grouped_topk(torch.zeros(T, E), None, K, 1, 1, True, True),
        lambda: compute_experts_aiter(x, routing, *prepare_experts(*stacks)),
    ):
        with pytest.raises(RuntimeError, match=r"no AITER is registered .* kernels='reference'"):
            call()


def test_a_later_registration_replaces_the_first(backend, record, tmp_path):
    second = standin_backend(tmp_path, version="v0.1.11")
    before = len(backend.calls)
    aiter_ops.register(second.module, second.record)
    torch.ops.fmoe.aiter_topk(torch.zeros(T, E), E, K, 0, True)
    assert (len(backend.calls), second.calls) == (before, ["topk_softmax5"])


def test_a_rule_without_a_kernel_is_refused(record):
    config = RouterConfig(E, K, scoring="chosen_softmax")
    with pytest.raises(ValueError, match="AITER has no kernel for scoring='chosen_softmax'; load with kernels='refer"):
        route_aiter(torch.zeros(T, E), None, config, slots=0, record=record)


def test_logits_narrower_than_the_experts_are_refused(record):
    with pytest.raises(ValueError, match="at least 10 columns, one per expert and slot, got 9"):
        torch.ops.fmoe.aiter_topk(torch.zeros(T, E + 1), E, K, S, True)
