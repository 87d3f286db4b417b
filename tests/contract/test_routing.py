"""Routing through the ops, in every release: equal to the definition, whatever the release does wrong."""

import pytest
import torch

from fmoe.compile.aiter_ops import route_aiter
from fmoe.compile.aiter_rules import decide_topk
from fmoe.functional.routing import RouterConfig

from .oracles import assert_routing, route_by_loop
from .standin.build import VERSIONS

T = 7
SOFTMAX = {
    "mixtral": RouterConfig(8, 2, renormalize=True),
    "qwen2": RouterConfig(60, 4, round_weights=True),
    "qwen3_next": RouterConfig(64, 6, renormalize=True, round_weights=True),
    "deepseek_v2_lite": RouterConfig(64, 6, scale=1.5),
    "floor": RouterConfig(24, 3, renormalize=True, sum_floor=0.75),
    "eps": RouterConfig(24, 3, renormalize=True, sum_eps=0.125),
    "all": RouterConfig(24, 3, renormalize=True, sum_floor=0.5, sum_eps=0.125, scale=2.0, round_weights=True),
}
V3 = {"scoring": "sigmoid", "renormalize": True, "sum_eps": 1e-20, "scale": 2.5}
GROUPED = {
    "deepseek_v3": RouterConfig(64, 8, groups=8, groups_kept=4, group_score="top2", **V3),
    "kimi_k2": RouterConfig(96, 8, **V3),
    "plain": RouterConfig(24, 4, scoring="sigmoid", groups=4, groups_kept=2, group_score="top2", scale=2.0),
    "kernel_renormalizes": RouterConfig(24, 4, scoring="sigmoid", renormalize=True),
}
UNBIASED = {
    "deepseek_v2": RouterConfig(64, 8, groups=8, groups_kept=3, scale=16.0),
    "sigmoid_max": RouterConfig(24, 4, scoring="sigmoid", groups=4, groups_kept=2, renormalize=True),
}


def draw(config, gate_rows, dtype, rng, device, *, tokens=T):
    return torch.randn(tokens, config.num_experts + gate_rows, generator=rng).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("slots", "gate_rows"), [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("version", VERSIONS)
def test_softmax(version, name, slots, gate_rows, dtype, make_backend, register, rng):
    backend, config = make_backend(version), SOFTMAX[name]
    register(backend)
    for tokens in (1, T):
        logits = draw(config, gate_rows, dtype, rng, "cpu", tokens=tokens)

        routing = route_aiter(logits, None, config, slots=slots, record=backend.record)

        assert routing.experts_TK[:, config.top_k :].tolist() == [
            [config.num_experts + s for s in range(slots)] for _ in range(tokens)
        ]
        if config.round_weights:
            routed = routing.weights_TK[:, : config.top_k]
            assert torch.equal(routed, routed.to(dtype).float())
        expected = route_by_loop(logits, None, config, slots=slots)
        assert_routing(routing, expected, tolerance=8e-3 if config.round_weights else 2e-6)
    choice = decide_topk(
        backend.record, num_experts=config.num_experts, top_k=config.top_k, slots=slots, gate_rows=gate_rows
    )
    assert backend.calls[-1] == ("topk_softmax7" if choice.path == "fused" else "topk_softmax5")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("version", ["v0.1.9", "v0.1.12", "v0.1.20"])
def test_sigmoid_with_a_bias(version, name, slots, dtype, make_backend, register, rng):
    backend, config = make_backend(version), GROUPED[name]
    register(backend)
    logits = draw(config, 0, dtype, rng, "cpu")
    # negative where only -inf keeps dropped groups out, and finer than bfloat16 could hold
    bias = torch.rand(config.num_experts, generator=rng) / 7 - 2.0

    for steering in (bias, None):
        routing = route_aiter(logits, steering, config, slots=slots, record=backend.record)

        assert backend.calls[-1] == "biased_grouped_topk_hip"
        assert_routing(routing, route_by_loop(logits, steering, config, slots=slots), tolerance=2e-3)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("version", ["v0.1.9", "v0.1.20"])
def test_groups_without_a_bias(version, name, slots, make_backend, register, rng):
    backend, config = make_backend(version), UNBIASED[name]
    register(backend)
    logits = draw(config, 1 if slots else 0, torch.float32, rng, "cpu")

    routing = route_aiter(logits, None, config, slots=slots, record=backend.record)

    assert backend.calls[-1] == "grouped_topk"
    assert_routing(routing, route_by_loop(logits, None, config, slots=slots), tolerance=2e-3)


@pytest.mark.parametrize("config", [SOFTMAX["qwen3_next"], GROUPED["deepseek_v3"], UNBIASED["deepseek_v2"]])
def test_under_test(config, registered, rng):
    """The AITER under test, the installed one where it works, against the definition."""
    logits = draw(config, 1, torch.float32, rng, registered.device)
    bias = torch.rand(config.num_experts, generator=rng).to(registered.device) if config in GROUPED.values() else None

    routing = route_aiter(logits, bias, config, slots=1, record=registered.record)

    assert_routing(routing, route_by_loop(logits.cpu(), bias, config, slots=1), tolerance=2e-3 * config.scale)


@pytest.mark.parametrize("config", [SOFTMAX["qwen3_next"], GROUPED["deepseek_v3"], UNBIASED["deepseek_v2"]])
def test_no_tokens_launch_nothing(config, make_backend, register):
    backend = make_backend()
    register(backend)
    before = list(backend.calls)

    routing = route_aiter(torch.empty(0, config.num_experts + 1), None, config, slots=1, record=backend.record)

    assert routing.experts_TK.shape == routing.weights_TK.shape == (0, config.top_k + 1)
    assert backend.calls == before


@pytest.mark.parametrize("config", [SOFTMAX["deepseek_v2_lite"], GROUPED["deepseek_v3"], UNBIASED["deepseek_v2"]])
def test_the_scale_multiplies_routed_weights_once_and_shared_ones_never(config, make_backend, register, rng):
    backend = make_backend()
    register(backend)
    logits = draw(config, 1, torch.float32, rng, "cpu")
    settings = {field: getattr(config, field) for field in RouterConfig.__slots__}
    once = RouterConfig(**settings | {"scale": 1.0})

    scaled = route_aiter(logits, None, config, slots=1, record=backend.record)
    plain = route_aiter(logits, None, once, slots=1, record=backend.record)

    torch.testing.assert_close(scaled.weights_TK[:, :-1], plain.weights_TK[:, :-1] * config.scale)
    assert torch.equal(scaled.weights_TK[:, -1], plain.weights_TK[:, -1])


def test_weights_too_small_for_a_plain_sum(make_backend, register):
    """Sigmoids whose sum is of the size of the epsilon, which a kernel would leave out."""
    backend, config = make_backend(), RouterConfig(16, 2, **V3)
    register(backend)
    logits = torch.full((1, 16), -46.0)

    routing = route_aiter(logits, None, config, slots=0, record=backend.record)

    assert_routing(routing, route_by_loop(logits, None, config, slots=0), tolerance=2e-3)
    assert routing.weights_TK.sum() < 0.9 * config.scale
