"""Which of AITER's kernels suit a model, decided from what is known of the installation. Pure functions.

Every answer comes with its reason; nothing is found out by calling a kernel and catching what it raises.
Letters: T tokens, E routed experts, S shared slots, K experts per token, D hidden.
"""

from typing import Literal, NamedTuple

import torch

from fmoe.functional.routing import RouterConfig

from .aiter_kernels import (
    BIASED_GROUPED_TOPK,
    FUSED_MOE,
    FUSED_SLOTS,
    GROUPED_TOPK,
    GROUPS,
    MOST_COLUMNS,
    MOST_GROUPED,
    SYMBOLS,
    is_fast,
    reads_shuffled,
)
from .capabilities import AiterRecord


class Choice(NamedTuple):
    """Which form of the softmax top-k runs, and why."""

    path: Literal["fused", "split", "refused"]
    reason: str


def decide_topk(
    record: AiterRecord, /, *, num_experts: int, top_k: int, slots: int, gate_rows: int | None = None
) -> Choice:
    """Choose between one kernel for routed and shared columns and the routed ones alone, the rest in torch.

    Args:
        record: the installation.
        num_experts: E.
        top_k: K.
        slots: S; 0 where shared experts are apart or absent.
        gate_rows: columns of the logits behind the E routed ones; None is one per slot.

    Returns:
        Choice: ``fused``, ``split`` or ``refused``.
    """
    gate_rows = slots if gate_rows is None else gate_rows
    if record.topk_arity == 0:
        return Choice("refused", f"AITER {record.version} has no topk_softmax of 5 or 7 arguments")
    if not 1 <= top_k <= num_experts:
        return Choice("refused", f"top_k={top_k} is not in 1..num_experts={num_experts}")
    if slots == 0:
        return Choice("split", "no shared slots")
    if gate_rows != slots:
        return Choice("split", f"{gate_rows} gate rows for {slots} shared slots")
    if record.topk_arity == 5:
        return Choice("split", f"topk_softmax of AITER {record.version} has no shared columns")
    if slots not in FUSED_SLOTS:
        return Choice("split", f"{slots} shared slots are not one of 1, 2, 4, 8")
    if not is_fast(num_experts) and not record.slow_path_stride_safe:
        return Choice("split", f"AITER {record.version} ignores strides at {num_experts} experts")
    return Choice("fused", "routed and shared columns in one kernel")


def can_route(config: RouterConfig, slots: int, record: AiterRecord, /, *, biased: bool = False) -> tuple[bool, str]:
    """Tell whether AITER has a kernel for a routing rule, and which, or why not.

    What follows the choice (renormalising with an epsilon or a floor, scale, rounding) is ours and never a reason.

    Args:
        config: the rule.
        slots: S.
        record: the installation.
        biased: the family has a correction bias.

    Returns:
        (can, reason).
    """
    if config.scoring.startswith("chosen"):
        return False, f"AITER has no kernel for scoring={config.scoring!r}"
    if config.scoring == "softmax" and biased:
        return False, "AITER has no softmax top-k with a correction bias"
    if config.scoring == "softmax" and config.groups == 1:
        choice = decide_topk(record, num_experts=config.num_experts, top_k=config.top_k, slots=slots)
        return choice.path != "refused", f"topk_softmax, {choice.path}: {choice.reason}"
    return _can_route_grouped(config, record, biased)


def _can_route_grouped(config: RouterConfig, record: AiterRecord, biased: bool) -> tuple[bool, str]:
    top2 = config.scoring == "sigmoid" and (config.groups == 1 or config.group_score == "top2")
    if config.groups not in GROUPS:
        return False, f"AITER's grouped kernels take 1, 2, 4 or 8 groups, not {config.groups}"
    if config.top_k > MOST_GROUPED:
        return False, f"AITER's grouped kernels choose at most {MOST_GROUPED} experts, not {config.top_k}"
    if config.top_k < config.groups:
        return False, f"AITER's grouped kernels are not known to choose top_k={config.top_k} of {config.groups} groups"
    if top2:
        has = BIASED_GROUPED_TOPK in record.symbols
        return has, "biased_grouped_topk_hip" if has else f"AITER {record.version} has no biased_grouped_topk_hip"
    if biased:
        return False, "AITER's kernel with a correction bias scores groups by their two best experts, not by the best"
    if config.group_score == "top2":
        return False, "AITER has no softmax top-k whose groups are scored by their two best experts"
    return (
        GROUPED_TOPK in record.symbols,
        "grouped_topk" if GROUPED_TOPK in record.symbols else f"AITER {record.version} has no grouped_topk",
    )


def can_compute(
    record: AiterRecord, /, *, columns: int, hidden_size: int, dtype: torch.dtype, shuffled: bool = True
) -> tuple[bool, str]:
    """Tell whether AITER's expert compute suits a layer, or why not; any width F can be padded.

    Args:
        record: the installation.
        columns: K + S.
        hidden_size: D.
        dtype: of rows and weights.
        shuffled: the weights will be in AITER's layout.

    Returns:
        (can, reason).
    """
    if not record.fused_moe_params:
        return False, f"AITER {record.version} has no fused_moe"
    first = SYMBOLS[FUSED_MOE].generations[0].parameters
    if record.fused_moe_params[: len(first)] != first:
        return False, f"fused_moe of AITER {record.version} begins with other parameters than fmoe passes"
    if dtype not in (torch.bfloat16, torch.float16):
        return False, f"AITER's fused_moe takes bfloat16 or float16, not {dtype}"
    if hidden_size % 32:
        return False, f"AITER's fused_moe takes hidden sizes that are multiples of 32, not {hidden_size}"
    if columns > MOST_COLUMNS:
        return False, f"AITER's fused_moe takes at most {MOST_COLUMNS} experts per token, not {columns}"
    if not shuffled and not reads_shuffled(record):
        return False, f"AITER {record.version} takes all weights to be shuffled"
    return True, "fused_moe"
