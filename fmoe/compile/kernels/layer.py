"""The MoE layer in kernels: checks, the three paths, and the whole layer in as few launches as a path needs.

Letters: T tokens, D hidden, E routed experts, R rows of the router, K columns of the routing, S shared slots,
F expert width, P = 2F.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.functional.quant import Fp8, Weight, weight_shape
from fmoe.functional.routing import RouterConfig, Routing

from ..settings import TABLED, TILED, Settings
from .fp8 import check_blocks, check_fp8, read_fp8, take_outer
from .moe_decode import compute_experts_slots, compute_experts_tabled, route_and_gate_up, sum_token_experts
from .moe_prefill_fp8 import compute_experts_tiled
from .normed import Unnormed, check_unnormed
from .route import NORMED_TOKENS, compute_logits_normed, route_tokens, tabulate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_GRID = 65535  # programs along the second axis of a grid


def check_stacks(x_TD: Tensor, w_gate_up_EPD: Weight, w_down_EDF: Weight, /) -> None:
    """Refuse what the kernels would read wrongly.

    Raises:
        ValueError: shapes that do not fit, mixed dtypes, or a tensor that is not contiguous.
        NotImplementedError: a dtype without kernels, or FP8 on a device without it.
    """
    gate_up, down = weight_shape(w_gate_up_EPD), weight_shape(w_down_EDF)
    experts, hidden, width = down
    if gate_up != (experts, 2 * width, hidden) or x_TD.shape[1:] != (hidden,):
        raise ValueError(
            f"x {tuple(x_TD.shape)}, w_gate_up {gate_up} and w_down {down} must be [T, D], [E, 2F, D] and [E, D, F]"
        )
    if x_TD.dtype not in DTYPES:
        raise NotImplementedError(f"no MoE kernel reads {x_TD.dtype}; use bfloat16, float16 or float32")
    tensors = [x_TD, *(w for w in (w_gate_up_EPD, w_down_EDF) if not isinstance(w, Fp8))]
    if any(tensor.dtype != x_TD.dtype for tensor in tensors):
        raise ValueError(f"x and the experts must have one dtype, got {[str(tensor.dtype) for tensor in tensors]}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("x and the experts must be contiguous; call .contiguous() once after loading")
    for name, w, parts in (("w_gate_up", w_gate_up_EPD, 2), ("w_down", w_down_EDF, 1)):
        if isinstance(w, Fp8):
            check_fp8(w, parts=parts, name=name)


def check_tiles(w_gate_up_EPD: Weight, w_down_EDF: Weight, settings: Settings, /) -> None:
    """Refuse blocks of which one would need several factors of FP8 weights at once; products of vectors take any depth.

    Raises:
        ValueError: a block is larger than a block of factors.
    """
    vectors = settings.path == "slots"
    for name, w, tile, any_depth in (
        ("gate_up", w_gate_up_EPD, settings.gate_up, vectors),
        ("down", w_down_EDF, settings.down, vectors or (settings.path in TABLED and settings.token_down)),
    ):
        check_blocks(w, tile.rows, 0 if any_depth else tile.depth, name=name)


def check_router(x_TD: Tensor, w_router_RD: Tensor, bias_E: Tensor | None, config: RouterConfig, slots: int) -> None:
    """Refuse a router that the kernels would read wrongly.

    Raises:
        ValueError: a shape, dtype or layout that does not fit.
    """
    rows, experts = w_router_RD.shape[0] - config.num_experts, config.num_experts
    if w_router_RD.shape[1:] != x_TD.shape[1:] or rows not in (0, 1, slots):
        raise ValueError(
            f"w_router {tuple(w_router_RD.shape)} must be [{experts} experts + 0, 1 or {slots} gates, {x_TD.shape[1]}]"
        )
    if w_router_RD.dtype != x_TD.dtype or not w_router_RD.is_contiguous():
        raise ValueError(
            f"w_router must be contiguous {x_TD.dtype}, got {w_router_RD.dtype} with strides {w_router_RD.stride()}; "
            "call .contiguous() once after loading"
        )
    if bias_E is not None and (
        bias_E.shape != (experts,) or bias_E.dtype != torch.float32 or not bias_E.is_contiguous()
    ):
        raise ValueError(f"bias must be contiguous float32 [{experts}], got {bias_E.dtype} {tuple(bias_E.shape)}")


def compute_experts_kernels(
    x_TD: Tensor, routing: Routing, w_gate_up_EPD: Weight, w_down_EDF: Weight, settings: Settings, /, *, slots: int = 0
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
    check_tiles(w_gate_up_EPD, w_down_EDF, settings)
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    if settings.path in TILED:
        return compute_experts_tiled(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
    check_grid(routing.experts_TK.numel())
    if settings.path == "slots":
        return compute_experts_slots(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)
    table = tabulate(routing.experts_TK, settings, num_experts=weight_shape(w_down_EDF)[0] - slots, slots=slots)
    return compute_experts_tabled(x_TD, routing, table, w_gate_up_EPD, w_down_EDF, settings)


def check_grid(pairs: int) -> None:
    """Refuse more pairs than a grid has rows."""
    if pairs > MAX_GRID:
        raise ValueError(f"{pairs} pairs of token and expert came, at most {MAX_GRID} fit; use path='sorted'")


def run_moe_layer(
    x_TD: Tensor,
    w_router_RD: Tensor,
    bias_E: Tensor | None,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    config: RouterConfig,
    settings: Settings,
    /,
    *,
    computed: tuple[Tensor, ...] | None = None,
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
        computed: what ``compute_logits`` gave, where it ran already.

    Returns:
        A tensor like x.
    """
    check_stacks(x_TD, w_gate_up_EPD, w_down_EDF)
    check_tiles(w_gate_up_EPD, w_down_EDF, settings)
    slots = weight_shape(w_down_EDF)[0] - config.num_experts
    check_router(x_TD, w_router_RD, bias_E, config, slots)
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    if settings.path not in TILED:
        check_grid(x_TD.shape[0] * (config.top_k + slots))
    if settings.path == "slots" and settings.fuse_choice:
        routing, h_NF = route_and_gate_up(x_TD, w_router_RD, bias_E, config, w_gate_up_EPD, settings, computed=computed)
        return sum_token_experts(h_NF, routing, w_down_EDF, settings)
    routing, table = route_tokens(x_TD, w_router_RD, bias_E, config, settings, slots=slots, computed=computed)
    if settings.path == "slots":
        return compute_experts_slots(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings, early=True)
    if settings.path in TABLED:
        return compute_experts_tabled(x_TD, routing, table, w_gate_up_EPD, w_down_EDF, settings)
    return compute_experts_tiled(x_TD, routing, w_gate_up_EPD, w_down_EDF, settings)


def run_moe_layer_normed(
    x: Unnormed,
    w_router_RD: Tensor,
    bias_E: Tensor | None,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    config: RouterConfig,
    settings: Settings,
    /,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``run_moe_layer`` of rows that are yet to be normed, where ``can_norm_logits``.

    Args:
        x: what they are the norm of.
        w_router_RD, bias_E, w_gate_up_EPD, w_down_EDF, config, settings: as there.

    Returns:
        (x + branch, its norm, what ``run_moe_layer`` gives).
    """
    check_unnormed(x, most=NORMED_TOKENS)
    check_stacks(x.x_TD, w_gate_up_EPD, w_down_EDF)
    experts = config.num_experts
    check_router(x.x_TD, w_router_RD, bias_E, config, weight_shape(w_down_EDF)[0] - experts)
    total_TD, normed_TD, computed = compute_logits_normed(x, w_router_RD, settings, num_experts=experts)
    weights = (w_router_RD, bias_E, w_gate_up_EPD, w_down_EDF)
    return total_TD, normed_TD, run_moe_layer(normed_TD, *weights, config, settings, computed=computed)


def run_moe_layer_apart(
    x_TD: Tensor,
    w_router_RD: Tensor,
    bias_E: Tensor | None,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    config: RouterConfig,
    settings: Settings,
    /,
    *,
    beside: bool,
) -> Tensor:
    """Run the shared slots by themselves and add them, for sizes where their own launches cost less than fusing.

    Args:
        x_TD, w_router_RD, bias_E, w_gate_up_EPD, w_down_EDF, config: as in ``run_moe_layer``, S >= 1.
        settings: of the routed experts.
        beside: run them on a second stream, which joins before the sum.

    Returns:
        A tensor like x.
    """
    check_stacks(x_TD, w_gate_up_EPD, w_down_EDF)
    experts = config.num_experts
    if weight_shape(w_down_EDF)[0] == experts:
        raise ValueError(f"the stacks hold {experts} experts and no shared slot; use run_moe_layer")
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    gate_up, down = (take_outer(w, slice(experts)) for w in (w_gate_up_EPD, w_down_EDF))
    slots = [take_outer(w, slice(experts, None)) for w in (w_gate_up_EPD, w_down_EDF)]
    if not beside:
        routed_TD = run_moe_layer(x_TD, w_router_RD[:experts], bias_E, gate_up, down, config, settings)
        return routed_TD + _run_shared_slots(x_TD, w_router_RD[experts:], *slots)
    main, side = torch.cuda.current_stream(x_TD.device), torch.cuda.Stream(x_TD.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        shared_TD = _run_shared_slots(x_TD, w_router_RD[experts:], *slots)
    routed_TD = run_moe_layer(x_TD, w_router_RD[:experts], bias_E, gate_up, down, config, settings)
    main.wait_stream(side)
    # Whatever reuses the memory of shared_TD on the side stream waits for the main stream first.
    shared_TD.record_stream(main)
    return routed_TD + shared_TD


def _run_shared_slots(x_TD: Tensor, w_gate_GD: Tensor, w_gate_up: Weight, w_down: Weight) -> Tensor:
    """Every row through every slot by torch's products, weighted by the sigmoid of its gate where there is one."""
    w_gate_up_SPD, w_down_SDF = read_fp8(w_gate_up, x_TD.dtype, parts=2), read_fp8(w_down, x_TD.dtype)
    slots, _, width = w_down_SDF.shape
    gate_up_TSHF = F.linear(x_TD, w_gate_up_SPD.flatten(0, 1)).view(-1, slots, 2, width)
    h_TSF = F.silu(gate_up_TSHF[:, :, 0]) * gate_up_TSHF[:, :, 1]
    if w_gate_GD.shape[0]:
        h_TSF = h_TSF * F.linear(x_TD, w_gate_GD).sigmoid()[..., None]
    if slots == 1:
        return F.linear(h_TSF[:, 0], w_down_SDF[0])
    return torch.bmm(h_TSF.transpose(0, 1), w_down_SDF.transpose(1, 2)).sum(0)
