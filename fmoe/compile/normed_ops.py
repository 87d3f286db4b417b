"""Residual, norm and what reads it in one op: a projection, or a whole MoE layer. They exist where Triton does.

A few rows are normed inside the kernel that reads them, where its settings hold a row in one block; else the norm is a
launch of its own, which may split them into values of FP8 as well. Which of the two is decided here, not where the op
is called: a graph of any batch must not ask how large this one is.

Letters: as in fmoe/functional/experts.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from fmoe.functional.kernels import Kernels
from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import Fp8, Weight, weight_dtype
from fmoe.functional.routing import RouterConfig

from .delta_ops import add_rms_norm_any
from .linear_ops import linear_planned
from .linear_settings import linear_from_ints
from .ops import (
    Plans,
    compute_moe_op,
    find_plan,
    join_scale,
    moe_sizes,
    rule_for_moe,
    rule_from_numbers,
    rule_to_numbers,
    split_scale,
)
from .plan import select_implementation
from .settings import settings_from_ints

if find_spec("triton"):
    from .kernels.layer import run_moe_layer_normed
    from .kernels.linear import can_norm_linear, run_linear_normed
    from .kernels.normed import Unnormed
    from .kernels.route import can_norm_logits

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define(
    "linear_normed(Tensor x, Tensor branch, Tensor norm, float eps, Tensor w, Tensor? bias, int[] plan, "
    "Tensor? scale=None, Tensor? rest=None) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "moe_normed(Tensor x, Tensor branch, Tensor norm, float eps, Tensor w_router, Tensor? bias, Tensor w_gate_up, "
    "Tensor w_down, int[] rule, float[] scales, int[] plan, Tensor? gate_up_scale=None, Tensor? down_scale=None) "
    "-> (Tensor, Tensor, Tensor)"
)


def _linear_normed(
    x: Tensor,
    branch: Tensor,
    norm: Tensor,
    eps: float,
    w: Tensor,
    bias: Tensor | None,
    plan: list[int],
    scale: Tensor | None = None,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    shape = x.numel() // hidden, hidden
    name, values = select_implementation(plan, shape[0])
    settings = linear_from_ints(values) if name == "triton" else None
    if settings is not None:
        x_TD = x.contiguous().view(shape)
        if can_norm_linear(x_TD, w if scale is None else Fp8(w, scale, rest), settings):
            rows = Unnormed(x_TD, branch.contiguous().view(shape), norm.contiguous(), eps)
            weight = w.contiguous() if scale is None else Fp8(w, scale, rest)
            total_TD, y_TN = run_linear_normed(rows, weight, settings, bias_N=bias)
            return total_TD.view(x.shape), y_TN.view(*x.shape[:-1], y_TN.shape[1])
    normed, total = add_rms_norm_any(x, branch, norm, eps=eps)
    return total, torch.ops.fmoe.linear(normed, w, bias, plan, scale, rest)


def _linear_normed_fake(
    x: Tensor,
    branch: Tensor,
    norm: Tensor,
    eps: float,
    w: Tensor,
    bias: Tensor | None,
    plan: list[int],
    scale: Tensor | None = None,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    outputs = w.shape[0] + (0 if rest is None else rest.shape[0])
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], outputs)


def _moe_normed(
    x: Tensor,
    branch: Tensor,
    norm: Tensor,
    eps: float,
    w_router: Tensor,
    bias: Tensor | None,
    w_gate_up: Tensor,
    w_down: Tensor,
    rule: list[int],
    scales: list[float],
    plan: list[int],
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x.shape[0]
    if tokens:
        config = rule_from_numbers(tuple(rule), tuple(scales))
        gate_up, down = join_scale(w_gate_up, gate_up_scale), join_scale(w_down, down_scale)
        if plan:
            name, values = select_implementation(plan, tokens)
        else:
            dtype = str(weight_dtype(down)).removeprefix("torch.")
            name, values = rule_for_moe(moe_sizes(w_router, down, config), dtype, tokens)
        settings = settings_from_ints(values) if name == "triton" else None
        if settings is not None and can_norm_logits(tokens, x.shape[1], settings):
            rows = Unnormed(x.contiguous(), branch.contiguous(), norm.contiguous(), eps)
            return run_moe_layer_normed(rows, w_router.contiguous(), bias, gate_up, down, config, settings)
    normed, total = add_rms_norm_any(x, branch, norm, eps=eps)
    y = torch.ops.fmoe.moe(normed, w_router, bias, w_gate_up, w_down, rule, scales, plan, gate_up_scale, down_scale)
    return total, normed, y


def _moe_normed_fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape)


LIBRARY.impl("linear_normed", _linear_normed, "CompositeExplicitAutograd")
LIBRARY.impl("moe_normed", _moe_normed, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::linear_normed", _linear_normed_fake, lib=LIBRARY)
torch.library.register_fake("fmoe::moe_normed", _moe_normed_fake, lib=LIBRARY)


def linear_normed_planned(
    x: Tensor, branch: Tensor, norm_D: Tensor, w_ND: Weight, bias_N: Tensor | None, /, *, eps: float, plans: Plans
) -> tuple[Tensor, Tensor]:
    """Project the norm of x + branch: ``linear_planned`` behind ``add_rms_norm``.

    Args:
        x: [..., D], one token of each sequence.
        branch: like x.
        norm_D: the norm's weight.
        w_ND, bias_N, plans: as in ``linear_planned``.
        eps: of the norm.

    Returns:
        (x + branch, the projection [..., N]).
    """
    plan = find_plan(plans, w_ND)
    if not plan:
        normed, total = add_rms_norm_any(x, branch, norm_D, eps=eps)
        return total, linear_planned(normed, w_ND, bias_N)
    w, *more = w_ND if isinstance(w_ND, Fp8) else (w_ND, None, None)
    total, y = torch.ops.fmoe.linear_normed(x, branch, norm_D, eps, w, bias_N, list(plan), *more)
    return total, y


def compute_moe_normed_op(
    x_TD: Tensor,
    branch_TD: Tensor,
    norm_D: Tensor,
    params: MoEParams,
    config: RouterConfig,
    /,
    *,
    eps: float,
    plans: Plans = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``compute_moe_op`` on the norm of x + branch.

    Args:
        x_TD: one token of each sequence.
        branch_TD: like x.
        norm_D: the norm's weight.
        params, config, plans: as in ``compute_moe_op``.
        eps: of the norm.

    Returns:
        (x + branch, its norm, the layer's output), each like x.
    """
    rule, scales = rule_to_numbers(config)
    plan = list(find_plan(plans, params.w_down_EDF))
    (w_gate_up, gate_up_scale), (w_down, down_scale) = split_scale(params.w_gate_up_EPD), split_scale(params.w_down_EDF)
    total_TD, normed_TD, y_TD = torch.ops.fmoe.moe_normed(
        x_TD, branch_TD, norm_D, eps, params.w_router_ED, params.bias_E, w_gate_up, w_down, rule, scales, plan,
        gate_up_scale, down_scale,
    )  # fmt: skip
    return total_TD, normed_TD, y_TD


def add_normed_kernels(kernels: Kernels, /) -> Kernels:
    """Put the norm in front of projections and of MoE layers into them, for those that ``choose`` leaves to kernels."""
    linear, moe = _plans_of(kernels.linear, linear_planned), _plans_of(kernels.compute_moe, compute_moe_op)
    return replace(
        kernels,
        linear_normed=None if linear is None else partial(linear_normed_planned, plans=linear),
        compute_moe_normed=None if moe is None else partial(compute_moe_normed_op, plans=moe),
    )


def _plans_of(chosen: Callable[..., object] | None, planned: Callable[..., object]) -> Plans | None:
    """Give the plans that ``planned`` is chosen with; None if something else is."""
    if not isinstance(chosen, partial) or chosen.func is not planned:
        return None
    plans: Plans = chosen.keywords["plans"]
    return plans
