"""The MoE layer in kernels: checks, the three paths, and the whole layer in as few launches as a path needs.

Letters: T tokens, D hidden, E routed experts, R rows of the router, K columns of the routing, S shared slots,
F expert width, P = 2F.
"""

import torch
from torch import Tensor

from fmoe.functional.routing import RouterConfig, Routing

from ..settings import Settings
from .moe_decode import compute_experts_slots, compute_experts_tabled, route_and_gate_up, sum_token_experts
from .moe_prefill import compute_experts_sorted
from .route import route_tokens, tabulate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_GRID = 65535  # programs along the second axis of a grid


def check_stacks(x_TD: Tensor, w_gate_up_EPD: Tensor, w_down_EDF: Tensor, /) -> None:
    """Refuse what the kernels would read wrongly.

    Raises:
        ValueError: shapes that do not fit, mixed dtypes, or a tensor that is not contiguous.
        NotImplementedError: a dtype without kernels.
    """
    experts, hidden, width = w_down_EDF.shape
    if w_gate_up_EPD.shape != (experts, 2 * width, hidden) or x_TD.shape[1:] != (hidden,):
        raise ValueError(
            f"x {tuple(x_TD.shape)}, w_gate_up {tuple(w_gate_up_EPD.shape)} and w_down {tuple(w_down_EDF.shape)} must "
            "be [T, D], [E, 2F, D] and [E, D, F]"
        )
    tensors = (x_TD, w_gate_up_EPD, w_down_EDF)
    if x_TD.dtype not in DTYPES:
        raise NotImplementedError(f"no MoE kernel reads {x_TD.dtype}; use bfloat16, float16 or float32")
    if any(tensor.dtype != x_TD.dtype for tensor in tensors):
        raise ValueError(f"x and the experts must have one dtype, got {[str(tensor.dtype) for tensor in tensors]}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("x and the experts must be contiguous; call .contiguous() once after loading")


def compute_experts_kernels(
    x_TD: Tensor, routing: Routing, w_gate_up_EPD: Tensor, w_down_EDF: Tensor, settings: Settings, /, *, slots: int = 0
) -> Tensor:
    """Run the experts of a routing that is already there; the formula of ``compute_experts_grouped``.

    Args:
        x_TD: rows, T >= 0.
        routing: ids in 0..E+S-1; the last S columns are the shared slots, the same in each row.
        w_gate_up_EPD: gate and up rows of all experts, shared slots last.
        w_down_EDF: down rows of all experts.
        settings: path and blocks.
        slots: S; 0 is right too where shared slots are ordinary columns.

    Returns:
        A tensor like x.
    """
    check_stacks(x_TD, w_gate_up_EPD, w_down_EDF)
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    if settings.path == "sorted":
        return compute_experts_sorted(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
    check_grid(routing.experts_TK.numel())
    if settings.path == "slots":
        return compute_experts_slots(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
    table = tabulate(routing.experts_TK, settings, num_experts=w_down_EDF.shape[0] - slots, slots=slots)
    return compute_experts_tabled(x_TD, routing, table, w_gate_up_EPD, w_down_EDF, settings)


def check_grid(pairs: int) -> None:
    """Refuse more pairs than a grid has rows."""
    if pairs > MAX_GRID:
        raise ValueError(f"{pairs} pairs of token and expert came, at most {MAX_GRID} fit; use path='sorted'")


def run_moe_layer(
    x_TD: Tensor,
    w_router_RD: Tensor,
    bias_E: Tensor | None,
    w_gate_up_EPD: Tensor,
    w_down_EDF: Tensor,
    config: RouterConfig,
    settings: Settings,
    /,
) -> Tensor:
    """Route each token and sum its experts' outputs, shared slots included; ``moe_layer`` with fused shared experts.

    Args:
        x_TD: rows, T >= 0.
        w_router_RD: [E + gate rows, D]; gate rows is 0, 1 or S.
        bias_E: float32, or None.
        w_gate_up_EPD: [E + S, P, D].
        w_down_EDF: [E + S, D, F].
        config: the routing rule.
        settings: path and blocks.

    Returns:
        A tensor like x.
    """
    check_stacks(x_TD, w_gate_up_EPD, w_down_EDF)
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    slots = w_down_EDF.shape[0] - config.num_experts
    if settings.path != "sorted":
        check_grid(x_TD.shape[0] * (config.top_k + slots))
    if settings.path == "slots" and settings.fuse_choice:
        routing, h_NF = route_and_gate_up(x_TD, w_router_RD, bias_E, config, w_gate_up_EPD, settings)
        return sum_token_experts(h_NF, routing, w_down_EDF, settings)
    routing, table = route_tokens(x_TD, w_router_RD, bias_E, config, settings, slots=slots)
    if settings.path == "slots":
        return compute_experts_slots(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
    if settings.path == "grouped":
        return compute_experts_tabled(x_TD, routing, table, w_gate_up_EPD, w_down_EDF, settings)
    return compute_experts_sorted(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
