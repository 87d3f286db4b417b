"""AITER's kernels behind custom ops in the namespace ``fmoe``: one op, one fake each, and the functions of ``Kernels``.

Functional: outputs are new tensors, nothing is mutated or aliased. What a family does to the weights after the choice
(epsilon, scale, rounding) and the shared columns of the split path stay outside the ops, where a compiler fuses them.
Letters: T tokens, E routed experts, S shared slots, K experts per token, D hidden, F expert width, P = 2F.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fmoe.functional.routing import RouterConfig, Routing, inject_shared_experts, weigh_chosen

from .aiter_kernels import WAY_OUT, fused_experts, grouped_topk_, topk_softmax_
from .aiter_rules import can_route, decide_topk
from .capabilities import AiterRecord

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define("aiter_topk(Tensor logits, int num_experts, int top_k, int slots, bool renormalize) -> (Tensor, Tensor)")
LIBRARY.define(
    "aiter_grouped_topk(Tensor logits, Tensor? bias, int top_k, int groups, int groups_kept, bool softmax, "
    "bool renormalize) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "aiter_experts(Tensor x, Tensor weights, Tensor experts, Tensor w_gate_up, Tensor w_down, bool shuffled) -> Tensor"
)


class Registered(NamedTuple):
    """The AITER that the ops call."""

    module: ModuleType
    record: AiterRecord


# An impurity: a graph holds an op by its name, so the module that its body calls has to stand somewhere. Empty, or the
# one that register() was given; written by nothing else.
_REGISTERED: list[Registered] = []


def register(module: ModuleType, record: AiterRecord, /) -> None:
    """Give the ops their AITER, once a probe has said that it works; a later call replaces it.

    Args:
        module: AITER with its submodule fused_moe imported.
        record: the same installation.
    """
    _REGISTERED[:] = [Registered(module, record)]


def unregister() -> None:
    """Take AITER from the ops; they raise from now on."""
    _REGISTERED.clear()


def _registered() -> Registered:
    if not _REGISTERED:
        raise RuntimeError(
            "no AITER is registered in this process, but one of its ops was called; load the model anew, or with "
            "kernels='reference' (--kernels reference)"
        )
    return _REGISTERED[0]


def _empty_routing(logits: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], columns)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _topk(logits: Tensor, num_experts: int, top_k: int, slots: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    module, record = _registered()
    weights, experts = _empty_routing(logits, top_k + slots)
    _check_width(logits, num_experts + slots)
    # A copy only where rows are apart, as the routed columns of wider logits are: not every release reads those.
    rows = logits[:, : num_experts + slots].contiguous()
    topk_softmax_(module, record, weights, experts[:, :top_k], rows, renormalize=renormalize, slots=slots)
    for slot in range(slots):
        experts[:, top_k + slot].fill_(num_experts + slot)  # no release writes the ids of shared columns
    return weights, experts


def _topk_fake(logits: Tensor, num_experts: int, top_k: int, slots: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    return _empty_routing(logits, top_k + slots)


def _check_width(logits: Tensor, columns: int) -> None:
    if logits.shape[1] < columns:
        raise ValueError(f"logits must have at least {columns} columns, one per expert and slot, got {logits.shape[1]}")


def _grouped_topk(
    logits: Tensor, bias: Tensor | None, top_k: int, groups: int, groups_kept: int, softmax: bool, renormalize: bool
) -> tuple[Tensor, Tensor]:
    module, _ = _registered()
    weights, experts = _empty_routing(logits, top_k)
    grouped_topk_(
        module,
        weights,
        experts,
        logits.contiguous(),
        bias,
        groups=groups,
        groups_kept=groups_kept,
        softmax=softmax,
        renormalize=renormalize,
    )
    return weights, experts


def _grouped_topk_fake(
    logits: Tensor, bias: Tensor | None, top_k: int, groups: int, groups_kept: int, softmax: bool, renormalize: bool
) -> tuple[Tensor, Tensor]:
    return _empty_routing(logits, top_k)


def _experts(x: Tensor, weights: Tensor, experts: Tensor, w_gate_up: Tensor, w_down: Tensor, shuffled: bool) -> Tensor:
    module, record = _registered()
    rows = (x.contiguous(), weights.contiguous(), experts.contiguous())
    return fused_experts(module, record, *rows, w_gate_up, w_down, shuffled=shuffled).contiguous()


def _experts_fake(
    x: Tensor, weights: Tensor, experts: Tensor, w_gate_up: Tensor, w_down: Tensor, shuffled: bool
) -> Tensor:
    return x.new_empty(x.shape)


for _name, _body, _fake in (
    ("aiter_topk", _topk, _topk_fake),
    ("aiter_grouped_topk", _grouped_topk, _grouped_topk_fake),
    ("aiter_experts", _experts, _experts_fake),
):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fmoe::{_name}", _fake, lib=LIBRARY)


def route_aiter(
    logits_TE: Tensor, bias_E: Tensor | None, config: RouterConfig, /, *, slots: int, record: AiterRecord
) -> Routing:
    """Route as ``route_fused`` does, the choice by AITER.

    Softmax without groups runs in the form that ``decide_topk`` names; the other rules choose routed columns, and the
    shared ones are injected behind them. ``functools.partial`` over ``record`` has the signature of ``route_fused``.

    Args:
        logits_TE: [T, E + gate rows]; gate rows is 0, 1 or S.
        bias_E: as in ``route``.
        config: the rule of the routed columns.
        slots: S.
        record: the AITER that ``register`` was given.

    Returns:
        Routing of K + S columns.

    Raises:
        ValueError: AITER has no kernel for the rule; ``can_route`` says so beforehand.
    """
    can, reason = can_route(config, slots, record, biased=bias_E is not None)
    if not can:
        raise ValueError(f"{reason}; load with kernels='reference' (--kernels reference)")
    experts, top_k = config.num_experts, config.top_k
    gate_rows = logits_TE.shape[1] - experts
    renormalize = _kernel_renormalizes(config)
    fused = False
    if config.scoring == "softmax" and config.groups == 1:
        choice = decide_topk(record, num_experts=experts, top_k=top_k, slots=slots, gate_rows=gate_rows)
        fused = choice.path == "fused"
        columns = slots if fused else 0
        routing = Routing(*torch.ops.fmoe.aiter_topk(logits_TE, experts, top_k, columns, renormalize))
    else:
        routing = _route_grouped(logits_TE[:, :experts], bias_E, config, renormalize=renormalize)
    routing = _finish_weights(routing, config, renormalized=renormalize, dtype=logits_TE.dtype)
    if slots and not fused:
        gates_TS = logits_TE[:, experts:] if gate_rows else None
        routing = inject_shared_experts(routing, gates_TS, slots=slots, first=experts)
    return _check_columns(routing, top_k + slots)


def _check_columns(routing: Routing, columns: int) -> Routing:
    """Raise RuntimeError unless the routing has K + S columns: fewer would lose the shared experts unseen."""
    widths = {routing.experts_TK.shape[1], routing.weights_TK.shape[1]}
    if widths != {columns}:
        raise RuntimeError(f"a routing must have K + S = {columns} columns, AITER's has {widths}; {WAY_OUT}")
    return routing


def _kernel_renormalizes(config: RouterConfig) -> bool:
    """Tell whether the kernel's division by the plain sum is all that ``weigh_chosen`` would do before rounding."""
    return config.renormalize and config.sum_eps == 0 and config.sum_floor == 0 and config.scale == 1


def _route_grouped(logits_TE: Tensor, bias_E: Tensor | None, config: RouterConfig, *, renormalize: bool) -> Routing:
    softmax = config.scoring == "softmax"
    if not softmax and (config.groups == 1 or config.group_score == "top2"):
        # The kernel takes the bias to be of the dtype of the logits; a rounded bias would choose other experts.
        logits_TE = logits_TE.float()
        bias_E = logits_TE.new_zeros(config.num_experts) if bias_E is None else bias_E.float()
    return Routing(
        *torch.ops.fmoe.aiter_grouped_topk(
            logits_TE, bias_E, config.top_k, config.groups, config.groups_kept, softmax, renormalize
        )
    )


def _finish_weights(routing: Routing, config: RouterConfig, *, renormalized: bool, dtype: torch.dtype) -> Routing:
    """Do to the routed columns what the family does after the choice; shared columns behind them stay."""
    weights_TK, shared_TS = routing.weights_TK[:, : config.top_k], routing.weights_TK[:, config.top_k :]
    if not renormalized:
        weights_TK = weigh_chosen(weights_TK, config, dtype=dtype)
    elif config.round_weights:
        weights_TK = weights_TK.to(dtype).float()
    return routing._replace(weights_TK=torch.cat((weights_TK, shared_TS), 1) if shared_TS.shape[1] else weights_TK)


def compute_experts_aiter(
    x_TD: Tensor, routing: Routing, w_gate_up_EPD: Tensor, w_down_EDF: Tensor, /, *, shuffled: bool = True
) -> Tensor:
    """Expert compute by AITER; the formula of ``compute_experts_grouped``.

    Args:
        x_TD: bfloat16 or float16 rows, T >= 0.
        routing: ids in 0..E+S-1.
        w_gate_up_EPD: padded by ``pad_experts``.
        w_down_EDF: padded by ``pad_experts``.
        shuffled: both went through ``shuffle_weights``.

    Returns:
        A tensor like x.
    """
    y_TD: Tensor = torch.ops.fmoe.aiter_experts(x_TD, *routing, w_gate_up_EPD, w_down_EDF, shuffled)
    return y_TD
