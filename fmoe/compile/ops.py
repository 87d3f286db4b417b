"""The custom-op boundary: what must stay opaque to torch.compile. One op, one fake, one typed wrapper each.

Functional: outputs are new tensors, nothing is mutated or aliased. A plan is a static argument, written as integers.
Registered through ``Library`` and not through the ``custom_op`` decorator, whose first use costs seconds even when
nothing is compiled.

Letters: as in fmoe/functional/experts.py.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import get_args

import torch
from torch import Tensor

from fmoe.functional.experts import (
    ExpertBiases,
    compute_experts_dense,
    compute_experts_grouped,
    compute_experts_loop,
    compute_experts_per_slot,
)
from fmoe.functional.mlp import SWIGLU, Activation
from fmoe.functional.moe import MoEParams, route_and_compute
from fmoe.functional.quant import Fp8, Weight, weight_dtype, weight_shape
from fmoe.functional.routing import GroupScore, RouterConfig, Routing, Scoring

from .plan import (
    Device,
    Implementation,
    Key,
    Operator,
    Plan,
    default_choice,
    default_function,
    plan_to_ints,
    select_implementation,
)
from .settings import settings_from_ints
from .variants import activation_from_numbers, activation_to_numbers

if find_spec("triton"):
    from .kernels import compute_experts_kernels, run_moe_layer, run_moe_layer_apart

LIBRARY = torch.library.Library("fmoe", "DEF")
LIBRARY.define(
    "experts(Tensor x, Tensor weights, Tensor experts, Tensor w_gate_up, Tensor w_down, int[] plan, int slots, "
    "Tensor? gate_up_scale=None, Tensor? down_scale=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, "
    "float[] activation=[]) -> Tensor"
)
LIBRARY.define(
    "moe(Tensor x, Tensor w_router, Tensor? bias, Tensor w_gate_up, Tensor w_down, int[] rule, float[] scales, "
    "int[] plan, Tensor? gate_up_scale=None, Tensor? down_scale=None) -> Tensor"
)

# Up to this many rows of a decode step, reading the matrices of every row anew beat sorting (same machine, compiled:
# 1 row 61 us against 135 us in a loop, 8 rows 255 us against 611 us grouped). Larger batches are one more graph.
SLOT_TOKENS = 16

FUNCTIONS = {
    "per_slot": compute_experts_per_slot,
    "loop": compute_experts_loop,
    "dense": compute_experts_dense,
    "grouped": compute_experts_grouped,
}

# The plans of a model's layers: shape of w_down [E + S, D, F], dtype, and the rows as integers.
Plans = tuple[tuple[tuple[int, ...], torch.dtype, tuple[int, ...]], ...]


def encode_plans(plans: Iterable[Plan], operator: Operator, /) -> Plans:
    """Write the plans of one operator as constants of a graph; of "linear" the shape is that of the weights."""
    encoded = []
    for plan in plans:
        if plan.key.operator == operator:
            sizes = plan.key.sizes
            shape = (sizes[0] + sizes[2], *sizes[4:]) if operator == "moe" else sizes
            encoded.append((shape, getattr(torch, plan.key.dtype), plan_to_ints(plan)))
    return tuple(encoded)


def find_plan(plans: Plans, weights: Weight, /) -> tuple[int, ...]:
    """Find the rows planned for weights of this shape and dtype, or nothing."""
    for shape, dtype, rows in plans:
        if shape == weight_shape(weights) and dtype == weight_dtype(weights):
            return rows
    return ()


def join_scale(w: Tensor, scale: Tensor | None, /) -> Weight:
    """Give the weight that an op got as a tensor with its factors, or without."""
    return w if scale is None else Fp8(w, scale)


def split_scale(w: Weight, /) -> tuple[Tensor, Tensor | None]:
    """Give what an op takes of the weight of a stack: its tensor, and its factors where it is in FP8 blocks."""
    return (w.w, w.scale) if isinstance(w, Fp8) else (w, None)


def compute_experts_planned(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    plans: Plans = (),
    activation: Activation = SWIGLU,
) -> Tensor:
    """Run the function of functional/experts.py that a plan names for this number of tokens.

    Args:
        biases, activation: as in ``compute_experts_grouped``.
        plans: of the model's layers; without one, or with one that names kernels, the rule chooses.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    plan = find_plan(plans, w_down_EDF)
    return _run_function(x_TD, routing, w_gate_up_EPD, w_down_EDF, biases, plan=plan, activation=activation)


def _run_function(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    plan: Sequence[int],
    activation: Activation = SWIGLU,
) -> Tensor:
    tokens, chosen = routing.experts_TK.shape
    name = select_implementation(plan, tokens)[0] if plan else ""
    if name not in FUNCTIONS:
        name = default_function(tokens, chosen, weight_shape(w_down_EDF)[0]) if x_TD.device.type == "cpu" else "grouped"
    stacks = w_gate_up_EPD, w_down_EDF
    if biases is None and activation.is_plain:
        return FUNCTIONS[name](x_TD, routing, *stacks)
    return FUNCTIONS[name](x_TD, routing, *stacks, biases, activation=activation)


def _experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    plan: list[int],
    slots: int,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Sequence[float] = (),
) -> Tensor:
    routing = Routing(weights, experts)
    gate_up, down = join_scale(w_gate_up, gate_up_scale), join_scale(w_down, down_scale)
    biases = None if gate_up_bias is None or down_bias is None else ExpertBiases(gate_up_bias, down_bias)
    if plan and biases is None and not activation:
        name, values = select_implementation(plan, x.shape[0])
        if name in ("triton", "apart", "beside"):
            settings = settings_from_ints(values)
            return compute_experts_kernels(x, routing, gate_up, down, settings, slots=slots)
    described = activation_from_numbers(tuple(activation))
    return _run_function(x, routing, gate_up, down, biases, plan=plan, activation=described)


def _experts_fake(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    plan: list[int],
    slots: int,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Sequence[float] = (),
) -> Tensor:
    return x.new_empty(x.shape)


LIBRARY.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::experts", _experts_fake, lib=LIBRARY)


def compute_experts_op(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    plans: Plans = (),
    slots: int = 0,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Expert compute behind ``fmoe::experts``: free to look at the ids, traceable in every dtype.

    Args:
        biases, activation: as in ``compute_experts_grouped``; no kernel reads them, so functions run with them.
        plans: of the model's layers; a layer that none is of runs by rule.
        slots: S, where the last columns of the routing are shared slots; 0 is right too.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    plan = list(find_plan(plans, w_down_EDF))
    (w_gate_up, gate_up_scale), (w_down, down_scale) = split_scale(w_gate_up_EPD), split_scale(w_down_EDF)
    numbers = activation_to_numbers(activation)
    added = () if biases is None and activation.is_plain else (*(biases or (None, None)), numbers)
    y_TD: Tensor = torch.ops.fmoe.experts(
        x_TD, *routing, w_gate_up, w_down, plan, slots, gate_up_scale, down_scale, *added
    )
    return y_TD


def compute_experts_few(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    plans: Plans = (),
    activation: Activation = SWIGLU,
) -> Tensor:
    """Decode inside a graph: the compiler fuses the gather of each row's matrices with the product.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    stacks = w_gate_up_EPD, w_down_EDF
    if x_TD.shape[0] <= SLOT_TOKENS:
        return compute_experts_per_slot(x_TD, routing, *stacks, biases, activation=activation)
    return compute_experts_op(x_TD, routing, *stacks, biases, plans=plans, activation=activation)


def rule_to_numbers(config: RouterConfig, /) -> tuple[list[int], list[float]]:
    """Write a routing rule as the arguments ``rule`` and ``scales`` of ``fmoe::moe``."""
    return [
        config.num_experts,
        config.top_k,
        get_args(Scoring).index(config.scoring),
        int(config.renormalize),
        config.groups,
        config.groups_kept,
        get_args(GroupScore).index(config.group_score),
        int(config.float32_logits),
        int(config.round_weights),
    ], [config.sum_eps, config.sum_floor, config.scale]


@lru_cache(maxsize=64)
def rule_from_numbers(rule: tuple[int, ...], scales: tuple[float, ...], /) -> RouterConfig:
    """Read what ``rule_to_numbers`` wrote."""
    if len(rule) != 9 or len(scales) != 3:
        raise ValueError(f"rule has {len(rule)} and scales {len(scales)} numbers; rule_to_numbers writes 9 and 3")
    experts, top_k, scoring, renormalize, groups, kept, group_score, float32_logits, round_weights = rule
    return RouterConfig(
        experts,
        top_k,
        scoring=get_args(Scoring)[scoring],
        renormalize=bool(renormalize),
        sum_eps=scales[0],
        sum_floor=scales[1],
        scale=scales[2],
        groups=groups,
        groups_kept=kept,
        group_score=get_args(GroupScore)[group_score],
        float32_logits=bool(float32_logits),
        round_weights=bool(round_weights),
    )


@lru_cache(maxsize=256)
def rule_for_moe(sizes: tuple[int, ...], dtype: str, tokens: int, /) -> tuple[Implementation, tuple[int, ...]]:
    """Choose by rule for a layer without a plan."""
    device = Device("hip" if torch.version.hip else "cuda", "", "", 0, "")
    return default_choice(
        Key("moe", sizes, dtype), device, tokens, ("triton",) if find_spec("triton") else ("grouped",)
    )


def _moe(
    x: Tensor,
    w_router: Tensor,
    bias: Tensor | None,
    w_gate_up: Tensor,
    w_down: Tensor,
    rule: list[int],
    scales: list[float],
    plan: list[int],
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    config = rule_from_numbers(tuple(rule), tuple(scales))
    gate_up, down = join_scale(w_gate_up, gate_up_scale), join_scale(w_down, down_scale)
    if plan:
        name, values = select_implementation(plan, x.shape[0])
    else:
        sizes = moe_sizes(w_router, w_down, config)
        name, values = rule_for_moe(sizes, str(w_down.dtype).removeprefix("torch."), x.shape[0])
    if name in ("triton", "apart", "beside"):
        x, w_router = x.contiguous(), w_router.contiguous()  # no copy on a GPU; a CPU keeps routers by columns
    if name == "triton":
        return run_moe_layer(x, w_router, bias, gate_up, down, config, settings_from_ints(values))
    if name in ("apart", "beside"):
        settings = settings_from_ints(values)
        return run_moe_layer_apart(x, w_router, bias, gate_up, down, config, settings, beside=name == "beside")
    params = MoEParams(w_router, gate_up, down, bias, None)
    return route_and_compute(x, params, config, compute_experts=partial(_run_function, plan=plan))


def _moe_fake(
    x: Tensor,
    w_router: Tensor,
    bias: Tensor | None,
    w_gate_up: Tensor,
    w_down: Tensor,
    rule: list[int],
    scales: list[float],
    plan: list[int],
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape)


LIBRARY.impl("moe", _moe, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::moe", _moe_fake, lib=LIBRARY)


def moe_sizes(w_router_RD: Tensor, w_down_EDF: Weight, config: RouterConfig, /) -> tuple[int, ...]:
    """Give the sizes of a layer's key: E, K, S, gate rows, D, F."""
    stacked, hidden, width = weight_shape(w_down_EDF)
    experts = config.num_experts
    return experts, config.top_k, stacked - experts, w_router_RD.shape[0] - experts, hidden, width


def compute_moe_op(x_TD: Tensor, params: MoEParams, config: RouterConfig, /, *, plans: Plans = ()) -> Tensor:
    """Router, routing and experts behind ``fmoe::moe``.

    Args:
        x_TD: rows, T >= 0, contiguous.
        params: weights; a separate shared expert is not read.
        config: the routing rule.
        plans: of the model's layers; a layer that none is of runs by rule.

    Returns:
        A tensor like x.
    """
    rule, scales = rule_to_numbers(config)
    plan = list(find_plan(plans, params.w_down_EDF))
    w_gate_up, gate_up_scale = split_scale(params.w_gate_up_EPD)
    w_down, down_scale = split_scale(params.w_down_EDF)
    weights = (params.w_router_ED, params.bias_E, w_gate_up, w_down)
    y_TD: Tensor = torch.ops.fmoe.moe(x_TD, *weights, rule, scales, plan, gate_up_scale, down_scale)
    return y_TD
