"""The mixture-of-experts layer: router, routing, experts, and the shared expert fused or apart.

Letters: T tokens, D hidden, E routed experts, S shared slots, F expert width, P = 2F.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from .experts import ExpertBiases, compute_experts_grouped
from .kernels import Kernels
from .mlp import SWIGLU, Activation, MLPParams, mlp_layer
from .quant import Weight, weight_shape
from .quant import linear as linear_reference
from .routing import RouterConfig, Routing, route_fused, router_logits

SharedExperts = Literal["auto", "fused", "separate"]


class SharedParams(NamedTuple):
    """A shared expert kept apart from the routed ones."""

    mlp: MLPParams
    w_gate_1D: Tensor | None


class MoEParams(NamedTuple):
    """One layer. What is fused shows in the shapes: S = rows of the stacks - E, gate rows = rows of w_router - E."""

    w_router_ED: Tensor  # [E + gate rows, D]
    w_gate_up_EPD: Weight  # [E + S, P, D], routed experts first
    w_down_EDF: Weight  # [E + S, D, F]
    bias_E: Tensor | None  # float32, steers the choice only
    shared: SharedParams | None  # None where fused or absent
    bias_logits_E: Tensor | None = None  # of the router's linear
    biases: ExpertBiases | None = None  # of the experts


class SharedPlan(NamedTuple):
    """How the shared experts of a layer are run: S slots (0 = apart or absent) and why."""

    slots: int
    width: int  # of all shared experts together; 0 = the layer has none
    reason: str
    required: bool = False  # fused was asked for by name


def plan_shared_experts(
    count: int | None, shared_size: int | None, expert_size: int, /, *, requested: SharedExperts
) -> SharedPlan:
    """Decide whether shared experts become slots of the expert stacks; loading and execution both follow it.

    A shared expert whose width is a multiple of the routed width F is the sum of that many experts of width F, so it
    fits into as many slots. Any other width stays apart.

    Args:
        count: number of shared experts; None is one if ``shared_size`` is set.
        shared_size: width of each; None is F if ``count`` is set.
        expert_size: F.
        requested: ``auto`` fuses where possible, ``fused`` raises where not, ``separate`` never fuses.

    Returns:
        SharedPlan.

    Raises:
        ValueError: an unknown request, or ``fused`` where the widths do not allow it.
    """
    if requested not in ("auto", "fused", "separate"):
        raise ValueError(f"shared_experts={requested!r} must be 'auto', 'fused' or 'separate'")
    count = (1 if shared_size else 0) if count is None else count
    size = expert_size if shared_size is None else shared_size
    if count * size == 0:
        return SharedPlan(0, 0, "no shared expert")
    if requested == "separate":
        return SharedPlan(0, count * size, "separate as requested")
    if size % expert_size:
        reason = f"shared width {size} is not a multiple of the expert width {expert_size}"
        if requested == "fused":
            raise ValueError(f"shared_experts='fused' is not possible: {reason}; use 'auto' or 'separate'")
        return SharedPlan(0, count * size, f"separate: {reason}")
    slots = count * size // expert_size
    reason = f"fused into {slots} slot{'s' if slots > 1 else ''}"
    return SharedPlan(slots, count * size, reason, required=requested == "fused")


def keep_apart(plan: SharedPlan, why: str, /) -> SharedPlan:
    """Take back the fusion of a layer's shared experts where their weights turn out not to fit into the stacks.

    Args:
        plan: with or without slots.
        why: for people.

    Raises:
        ValueError: fused was asked for by name.
    """
    if plan.required:
        raise ValueError(f"shared_experts='fused' is not possible: {why}; use 'auto' or 'separate'")
    return plan._replace(slots=0, reason=f"separate: {why}") if plan.slots else plan


def is_plain(params: MoEParams, activation: Activation, /) -> bool:
    """Tell whether a layer is what every kernel computes: a router and experts without biases, around SwiGLU."""
    return params.bias_logits_E is None and params.biases is None and activation.is_plain


def moe_layer(
    x_TD: Tensor,
    params: MoEParams,
    config: RouterConfig,
    /,
    *,
    kernels: Kernels,
    decode: bool = False,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Route each token and sum its experts' outputs; fused shared experts are columns of the same routing.

    ``y = sum_k weights_tk expert_{experts_tk}(x_t)``, plus the shared expert's output where it is kept apart.

    Args:
        x_TD: rows, T >= 0.
        params: weights; their shapes say what is fused.
        config: the routing rule.
        kernels: implementations of compute_moe, or of route and compute_experts, and of a separate shared expert's
            linear. A layer that is not plain is never left to compute_moe.
        decode: the rows are one token each of several sequences; takes ``compute_experts_decode``.
        activation: of the routed experts and fused shared ones.

    Returns:
        A tensor like x.
    """
    if kernels.compute_moe is not None and is_plain(params, activation):
        y_TD = kernels.compute_moe(x_TD, params, config)
    else:
        compute_experts = kernels.compute_experts_decode if decode else kernels.compute_experts
        y_TD = route_and_compute(
            x_TD, params, config, route=kernels.route, compute_experts=compute_experts, activation=activation
        )
    if params.shared is None:
        return y_TD
    return add_shared_expert(y_TD, x_TD, params.shared, linear=kernels.linear)


def route_and_compute(
    x_TD: Tensor,
    params: MoEParams,
    config: RouterConfig,
    /,
    *,
    route: Callable[..., Routing] = route_fused,
    compute_experts: Callable[..., Tensor] = compute_experts_grouped,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Run the router's linear, the routing and the experts, one after the other.

    Args:
        x_TD: rows, T >= 0.
        params: weights; a separate shared expert is not read.
        config: the routing rule.
        route: of the signature of ``route_fused``.
        compute_experts: of the signature of ``compute_experts_grouped``; of a plain layer it gets neither biases nor
            activation.
        activation: of the experts.

    Returns:
        A tensor like x.
    """
    slots = weight_shape(params.w_down_EDF)[0] - config.num_experts
    logits_TE = router_logits(x_TD, params.w_router_ED, params.bias_logits_E, float32=config.float32_logits)
    routing = route(logits_TE, params.bias_E, config, slots=slots)
    if config.round_weights and config.float32_logits:
        # The float32 logits did not tell route the dtype in which this family multiplies.
        routing = routing._replace(weights_TK=routing.weights_TK.to(x_TD.dtype).float())
    stacks = params.w_gate_up_EPD, params.w_down_EDF
    if params.biases is None and activation.is_plain:
        return compute_experts(x_TD, routing, *stacks)
    return compute_experts(x_TD, routing, *stacks, params.biases, activation=activation)


def add_shared_expert(
    y_TD: Tensor, x_TD: Tensor, params: SharedParams, /, *, linear: Callable[..., Tensor] = linear_reference
) -> Tensor:
    """Add the separate shared expert's output, times the sigmoid of its gate where it has one.

    Args:
        y_TD: output of the routed experts.
        x_TD: input of the layer.
        params: weights of the shared expert.
        linear: ``Kernels.linear``.

    Returns:
        A tensor like y.
    """
    shared_TD = mlp_layer(x_TD, params.mlp, linear=linear)
    if params.w_gate_1D is not None:
        shared_TD = linear(x_TD, params.w_gate_1D).sigmoid() * shared_TD
    return y_TD + shared_TD
