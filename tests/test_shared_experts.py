"""What fusing shared experts must not change, in loaded layers of every family that has them.

A layer is loaded twice from one checkpoint, with its shared experts as slots of the stacks and apart. Float32; errors
are relative to the largest output.
"""

from functools import partial

import pytest
import torch

import fmoe
from fmoe.compile.select import choose
from fmoe.functional import Kernels, moe_layer
from fmoe.functional.moe import MoEParams, add_shared_expert
from fmoe.functional.routing import route_fused

from .contract.checkpoints import write_checkpoint

FAMILIES = ("demo", "qwen2_moe", "qwen3_next", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3")
GATED = ("demo", "qwen2_moe", "qwen3_next")
TOLERANCE = 1e-6
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def layers(family, tmp_path_factory):
    """Give (fused, separate, rule) of the last layer."""
    folder = "demo" if family == "demo" else write_checkpoint(tmp_path_factory.mktemp(family), family)
    options = {"device": "cpu", "dtype": "float32", "compile": False, "kernels": "reference"}
    models = [fmoe.load(folder, shared_experts=form, **options) for form in ("fused", "separate")]
    fused, separate = (model.params.layers[-1].mlp for model in models)
    assert isinstance(fused, MoEParams) and isinstance(separate, MoEParams)
    return fused, separate, models[0].config.router


def draw(layers, tokens, rng):
    return torch.randn(tokens, layers[0].w_router_ED.shape[1], generator=rng)


def error(found, expected):
    assert found.shape == expected.shape
    assert found.isfinite().all()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def scale_columns(logits_TE, bias_E, config, /, *, slots, routed=1.0, shared=1.0):
    """Route, and multiply the weights of the routed and of the shared columns."""
    routing = route_fused(logits_TE, bias_E, config, slots=slots)
    factors_K = torch.tensor([routed] * config.top_k + [shared] * slots)
    return routing._replace(weights_TK=routing.weights_TK * factors_K)


def run(x_TD, params, router, **factors):
    return moe_layer(x_TD, params, router, kernels=Kernels(route=partial(scale_columns, **factors)))


def shared_alone(x_TD, separate):
    return add_shared_expert(torch.zeros_like(x_TD), x_TD, separate.shared)


def test_the_two_forms_differ_in_their_weights_alone(layers, family):
    fused, separate, router = layers
    slots = fused.w_down_EDF.shape[0] - router.num_experts
    assert slots == {"demo": 1, "qwen2_moe": 4, "qwen3_next": 1}.get(family, 2)
    assert fused.shared is None
    assert separate.shared is not None
    assert (separate.shared.w_gate_1D is not None) == (family in GATED)
    assert fused.w_router_ED.shape[0] == router.num_experts + (family in GATED)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_fused_equals_separate(layers, tokens, rng):
    fused, separate, router = layers
    x_TD = draw(layers, tokens, rng)
    for kernels in (Kernels(), choose(CPU, compiled=False)):
        for decode in (False, True):
            apart_TD = moe_layer(x_TD, separate, router, kernels=kernels, decode=decode)
            joined_TD = moe_layer(x_TD, fused, router, kernels=kernels, decode=decode)
            assert error(joined_TD, apart_TD) < TOLERANCE
            assert error(joined_TD, apart_TD - shared_alone(x_TD, separate)) > 0.01  # there is something to lose


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 16.0])
def test_scaling_the_routed_weights_leaves_the_shared_part_unchanged(layers, scale, rng):
    fused, separate, router = layers
    x_TD = draw(layers, 7, rng)
    shared_TD = shared_alone(x_TD, separate)
    routed_TD = moe_layer(x_TD, separate._replace(shared=None), router, kernels=Kernels())
    for params in (fused, separate):
        y_TD = run(x_TD, params, router, routed=scale)
        expected_TD = scale * routed_TD + shared_TD
        assert error(y_TD, expected_TD) < TOLERANCE


@pytest.mark.parametrize("scale", [0.5, 2.5])
def test_the_rules_own_scale_never_reaches_the_shared_part(layers, scale, rng):
    fused, separate, router = layers
    values = {name: getattr(router, name) for name in type(router).__slots__}
    # Without the rounding of weights, which float32 does not do anyway.
    rule = type(router)(**values | {"scale": scale * router.scale})
    x_TD = draw(layers, 7, rng)
    routed_TD = moe_layer(x_TD, separate._replace(shared=None), router, kernels=Kernels())
    y_TD = moe_layer(x_TD, fused, rule, kernels=Kernels())
    assert error(y_TD, scale * routed_TD + shared_alone(x_TD, separate)) < TOLERANCE


def test_shared_columns_of_weight_zero_equal_the_routed_part(layers, rng):
    fused, separate, router = layers
    x_TD = draw(layers, 7, rng)
    routed_TD = moe_layer(x_TD, separate._replace(shared=None), router, kernels=Kernels())
    assert error(run(x_TD, fused, router, shared=0.0), routed_TD) < TOLERANCE


def test_a_gate_that_is_shut_equals_the_routed_part(layers, family, rng):
    """Shut by its weights: logits so low that the sigmoid is zero."""
    if family not in GATED:
        pytest.skip("the family has no gate: its shared experts always count in full")
    fused, separate, router = layers
    x_TD = draw(layers, 7, rng).abs() + 0.1
    rows = fused.w_router_ED.clone()
    rows[router.num_experts :] = -1e4
    shut = separate.shared._replace(w_gate_1D=torch.full_like(separate.shared.w_gate_1D, -1e4))
    routed_TD = moe_layer(x_TD, separate._replace(shared=None), router, kernels=Kernels())
    for params in (fused._replace(w_router_ED=rows), separate._replace(shared=shut)):
        assert error(moe_layer(x_TD, params, router, kernels=Kernels()), routed_TD) < TOLERANCE


def test_every_token_has_every_shared_slot_once(layers, rng):
    fused, _, router = layers
    slots = fused.w_down_EDF.shape[0] - router.num_experts
    logits_TE = draw(layers, 9, rng) @ fused.w_router_ED.T
    routing = route_fused(logits_TE, fused.bias_E, router, slots=slots)
    assert routing.experts_TK.shape == routing.weights_TK.shape == (9, router.top_k + slots)
    assert (
        routing.experts_TK[:, router.top_k :].tolist()
        == [list(range(router.num_experts, router.num_experts + slots))] * 9
    )
    assert int(routing.experts_TK[:, : router.top_k].max()) < router.num_experts
