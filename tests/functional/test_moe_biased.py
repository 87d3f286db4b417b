"""The layer with biases of router and experts and another activation: against a loop, and where kernels stop."""

import math

import pytest
import torch

from fmoe.functional.experts import (
    ExpertBiases,
    compute_experts_dense,
    compute_experts_grouped,
    compute_experts_loop,
    compute_experts_per_slot,
)
from fmoe.functional.kernels import Kernels
from fmoe.functional.mlp import SWIGLU, Activation
from fmoe.functional.moe import MoEParams, is_plain, moe_layer, route_and_compute
from fmoe.functional.routing import RouterConfig

E, K, D, WIDTH = 7, 3, 24, 16
FORMS = [compute_experts_grouped, compute_experts_loop, compute_experts_dense, compute_experts_per_slot]
CLAMPED = Activation(1.702, 0.8, 1.0)
CONFIG = RouterConfig(E, K, scoring="chosen_softmax")


def make_params(rng):
    def normal(*shape):
        return torch.randn(shape, generator=rng)

    biases = ExpertBiases(normal(E, 2 * WIDTH), normal(E, D))
    stacks = normal(E, 2 * WIDTH, D) / D**0.5, normal(E, D, WIDTH) / WIDTH**0.5
    return MoEParams(normal(E, D) / D**0.5, *stacks, None, None, normal(E), biases)


def layer_by_loop(x_TD, params, *, logits_bias=True, activation=CLAMPED):
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for t, x_D in enumerate(x_TD.double()):
        logits = params.w_router_ED.double() @ x_D + (params.bias_logits_E.double() if logits_bias else 0.0)
        ids = sorted(range(E), key=lambda e: -logits[e].item())[:K]
        total = sum(math.exp(logits[e]) for e in ids)
        for e in ids:
            z_P = params.w_gate_up_EPD[e].double() @ x_D + params.biases.bias_gate_up_EP[e].double()
            gate_F, up_F = z_P[:WIDTH], z_P[WIDTH:]
            if activation is CLAMPED:
                gate_F, up_F = gate_F.minimum(torch.tensor(0.8)), up_F.clamp(-0.8, 0.8) + 1
            hidden_F = up_F * gate_F / (1 + torch.exp(-activation.alpha * gate_F))
            out_D = params.w_down_EDF[e].double() @ hidden_F + params.biases.bias_down_ED[e].double()
            y_TD[t] += math.exp(logits[e]) / total * out_D
    return y_TD


def assert_near(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("decode", [False, True])
def test_moe_layer(decode, form, rng):
    params, x_TD = make_params(rng), torch.randn(6, D, generator=rng)
    kernels = Kernels(compute_experts_decode=form) if decode else Kernels(compute_experts=form)

    y_TD = moe_layer(x_TD, params, CONFIG, kernels=kernels, decode=decode, activation=CLAMPED)

    assert_near(y_TD, layer_by_loop(x_TD, params))
    assert (layer_by_loop(x_TD, params, logits_bias=False) - y_TD).abs().max() > 0.1


def test_without_another_activation_the_biases_stay(rng):
    params, x_TD = make_params(rng), torch.randn(6, D, generator=rng)
    assert_near(route_and_compute(x_TD, params, CONFIG), layer_by_loop(x_TD, params, activation=SWIGLU))


def test_compiled(rng):
    params = make_params(rng)
    kernels = Kernels(compute_experts=compute_experts_dense)
    compiled = torch.compile(moe_layer, fullgraph=True, backend="aot_eager", dynamic=False)
    for T in (1, 5):
        x_TD = torch.randn(T, D, generator=rng)
        y_TD = compiled(x_TD, params, CONFIG, kernels=kernels, activation=CLAMPED)
        assert_near(y_TD, layer_by_loop(x_TD, params))


def test_only_a_plain_layer_is_plain(rng):
    params = make_params(rng)
    plain = params._replace(bias_logits_E=None, biases=None)
    assert is_plain(plain, SWIGLU)
    assert not is_plain(plain, CLAMPED)
    assert not is_plain(plain._replace(biases=params.biases), SWIGLU)
    assert not is_plain(plain._replace(bias_logits_E=params.bias_logits_E), SWIGLU)


def test_a_kernel_of_whole_layers_gets_plain_layers_alone(rng):
    params, x_TD = make_params(rng), torch.randn(2, D, generator=rng)
    calls = []

    def compute_moe(x_TD, params, config, /):
        calls.append(params)
        return route_and_compute(x_TD, params, config)

    kernels = Kernels(compute_moe=compute_moe)
    y_TD = moe_layer(x_TD, params, CONFIG, kernels=kernels, activation=CLAMPED)
    assert_near(y_TD, layer_by_loop(x_TD, params))
    assert calls == []
    moe_layer(x_TD, params._replace(bias_logits_E=None, biases=None), CONFIG, kernels=kernels)
    assert len(calls) == 1


def test_kernels_of_plain_experts_are_called_as_ever(rng):
    """Nothing but what they know comes to them; and what they do not know is an error, never left out."""
    params, x_TD = make_params(rng), torch.randn(2, D, generator=rng)

    def compute(x_TD, routing, w_gate_up_EPD, w_down_EDF, /):
        return compute_experts_grouped(x_TD, routing, w_gate_up_EPD, w_down_EDF)

    plain = params._replace(biases=None)
    assert torch.equal(
        route_and_compute(x_TD, plain, CONFIG, compute_experts=compute), route_and_compute(x_TD, plain, CONFIG)
    )
    for given, activation in ((params, SWIGLU), (plain, CLAMPED)):
        with pytest.raises(TypeError):
            route_and_compute(x_TD, given, CONFIG, compute_experts=compute, activation=activation)
