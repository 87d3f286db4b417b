"""AITER's kernels compared with the reference on small shapes; run in the self-test's own process.

Letters: T tokens, E routed experts, G groups, K experts per token, D hidden, F expert width, P = 2F.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fmoe.functional.experts import compute_experts_grouped
from fmoe.functional.routing import RouterConfig, Routing, route, route_fused

from .aiter_kernels import (
    BIASED_GROUPED_TOPK,
    FUSED_MOE,
    GROUPED_TOPK,
    TOPK_SOFTMAX,
    find_symbol,
    fused_experts,
    grouped_topk_,
    is_fast,
    shuffle_weights,
    topk_softmax_,
)
from .capabilities import AiterRecord

TOKENS = 7


class Disagreement(Exception):
    """A kernel computed something else than the reference; the message says which."""


def import_submodules(symbols: tuple[str, ...], importer: Callable[[str], ModuleType], /) -> None:
    """Import the modules that hold the names, since ``import aiter`` brings not all of them.

    Args:
        symbols: the names found.
        importer: ``importlib.import_module``; only few files may import AITER.
    """
    for name in sorted({symbol.rpartition(".")[0] for symbol in symbols}):
        importer(name)


def absent_symbols(module: ModuleType, symbols: tuple[str, ...], /) -> tuple[str, ...]:
    """List the names that the imported AITER lacks, though its files define them."""
    return tuple(symbol for symbol in symbols if find_symbol(module, symbol) is None)


def check_kernels(module: ModuleType, record: AiterRecord, device: torch.device, /) -> tuple[str, ...]:
    """Compare every kernel that the record names with the reference.

    Args:
        module: AITER, its submodules imported.
        record: its names and forms.
        device: where the kernels run.

    Returns:
        The names that agreed.

    Raises:
        Disagreement: one did not.
    """
    checks: dict[str, Callable[[ModuleType, AiterRecord, torch.device], None]] = {
        TOPK_SOFTMAX: _check_topk,
        BIASED_GROUPED_TOPK: _check_biased,
        GROUPED_TOPK: _check_grouped,
        FUSED_MOE: _check_experts,
    }
    known = tuple(symbol for symbol in checks if symbol in record.symbols)
    for symbol in known:
        checks[symbol](module, record, device)
    return known


def _check_topk(module: ModuleType, record: AiterRecord, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    for experts, top_k in ((8, 2), (128, 8), (60, 4)):
        strided = record.topk_arity == 7 and (is_fast(experts) or record.slow_path_stride_safe)
        for slots in (0, 1) if strided else (0,):
            for dtype in (torch.bfloat16, torch.float32):
                for renormalize in (False, True):
                    # Rounded, so that many are equal: the lowest id must win.
                    logits_TE = (torch.randn(TOKENS, experts + slots, generator=rng) * 4).round() / 4
                    config = RouterConfig(experts, top_k, renormalize=renormalize)
                    _compare_topk(module, record, logits_TE.to(device, dtype), config, slots)


def _compare_topk(module: ModuleType, record: AiterRecord, logits_TE: Tensor, config: RouterConfig, slots: int) -> None:
    routing = _empty_routing(config, logits_TE.device, slots=slots)
    topk_softmax_(module, record, *routing, logits_TE, renormalize=config.renormalize, slots=slots)
    expected = route_fused(logits_TE, None, config, slots=slots)
    what = f"topk_softmax at {config.num_experts} experts, {slots} shared, {logits_TE.dtype}"
    if not torch.equal(routing.experts_TK, expected.experts_TK[:, : config.top_k]):
        raise Disagreement(f"{what}: wrong ids")
    _compare_weights(routing.weights_TK, expected.weights_TK, 1e-5, what)


def _check_biased(module: ModuleType, record: AiterRecord, device: torch.device) -> None:
    config = RouterConfig(64, 8, scoring="sigmoid", renormalize=True, groups=8, groups_kept=4, group_score="top2")
    _compare_grouped(module, config, torch.linspace(-0.1, 0.1, 64).to(device, torch.bfloat16), device)


def _check_grouped(module: ModuleType, record: AiterRecord, device: torch.device) -> None:
    _compare_grouped(module, RouterConfig(64, 8, renormalize=True, groups=8, groups_kept=4), None, device)


def _compare_grouped(module: ModuleType, config: RouterConfig, bias_E: Tensor | None, device: torch.device) -> None:
    routing, logits_TE = _empty_routing(config, device), _distinct_logits(config, device)
    grouped_topk_(
        module,
        *routing,
        logits_TE,
        bias_E,
        groups=config.groups,
        groups_kept=config.groups_kept,
        softmax=config.scoring == "softmax",
        renormalize=config.renormalize,
    )
    expected = route(logits_TE, None if bias_E is None else bias_E.float(), config)
    _compare_unordered(routing, expected, "grouped_topk" if bias_E is None else "biased_grouped_topk_hip")


def _check_experts(module: ModuleType, record: AiterRecord, device: torch.device) -> None:
    experts, top_k, hidden, width = 8, 2, 256, 128
    rng = torch.Generator().manual_seed(0)
    x_TD, w_gate_up_EPD, w_down_EDF = (
        (torch.randn(shape, generator=rng) * scale).to(device, torch.bfloat16)
        for shape, scale in (
            ((TOKENS, hidden), 1.0),
            ((experts, 2 * width, hidden), hidden**-0.5),
            ((experts, hidden, width), width**-0.5),
        )
    )
    routing = route(torch.randn(TOKENS, experts, generator=rng).to(device), None, RouterConfig(experts, top_k))
    routing = Routing(*(table_TK.contiguous() for table_TK in routing))
    stacks = shuffle_weights(w_gate_up_EPD), shuffle_weights(w_down_EDF)  # every release reads this layout
    output_TD = fused_experts(module, record, x_TD, *routing, *stacks, shuffled=True)
    expected_TD = compute_experts_grouped(x_TD.float(), routing, w_gate_up_EPD.float(), w_down_EDF.float())
    error = ((output_TD.float() - expected_TD).norm() / expected_TD.norm()).item()
    if not error < 0.02:  # NaN fails too
        raise Disagreement(f"fused_moe: relative error {error:.2g}, at most 0.02 was expected")


def _distinct_logits(config: RouterConfig, device: torch.device) -> Tensor:
    """Make rows without equal logits, since grouped kernels promise nothing about ties."""
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randperm(config.num_experts, generator=rng) for _ in range(TOKENS)]
    return (torch.stack(rows) / 16 - 2).to(device, torch.bfloat16)


def _empty_routing(config: RouterConfig, device: torch.device, *, slots: int = 0) -> Routing:
    """Make outputs that no kernel has written: NaN weights of K + S columns, ids -1 of K."""
    weights_TK = torch.full((TOKENS, config.top_k + slots), torch.nan, device=device)
    return Routing(weights_TK, torch.full((TOKENS, config.top_k), -1, dtype=torch.int32, device=device))


def _compare_unordered(routing: Routing, expected: Routing, what: str) -> None:
    (experts_TK, order_TK), (ids_TK, expected_order_TK) = routing.experts_TK.sort(-1), expected.experts_TK.sort(-1)
    if not torch.equal(experts_TK, ids_TK):
        raise Disagreement(f"{what}: wrong ids")
    expected_TK = expected.weights_TK.gather(-1, expected_order_TK)
    _compare_weights(routing.weights_TK.gather(-1, order_TK), expected_TK, 2e-3, what)


def _compare_weights(weights_TK: Tensor, expected_TK: Tensor, tolerance: float, what: str) -> None:
    error = (weights_TK - expected_TK).abs().max().item()
    if not error <= tolerance:  # NaN fails too
        raise Disagreement(f"{what}: weights differ by {error:.2g}, at most {tolerance:g} was expected")
