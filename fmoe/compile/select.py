"""Which implementations run where: what can run, what is asked for, and the kernels of a model as one value.

``decide`` compares what a model asks for with what a machine can do, as values; ``connect_aiter`` is the one place
that imports AITER; ``choose`` puts the functions together.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Literal, get_args

import torch

from fmoe.functional.deltanet import delta_mix
from fmoe.functional.kernels import Kernels
from fmoe.functional.quant import linear as linear_reference
from fmoe.functional.routing import RouterConfig, route_fused

from .aiter_checks import absent_symbols, import_submodules
from .aiter_ops import compute_experts_aiter, register, route_aiter
from .aiter_rules import can_compute, can_route, decide_topk
from .aiter_selftest import describe
from .capabilities import AiterRecord, Availability, Capabilities
from .causal_ops import attend_causal_op
from .chunk_ops import delta_prefill_op
from .linear_ops import keep_kernels, linear_planned
from .ops import (
    compute_experts_few,
    compute_experts_op,
    compute_experts_planned,
    compute_moe_op,
    encode_plans,
)
from .plan import FP8, Implementation, Key, Plan
from .probing import probe_triton

Requested = Literal["auto", "reference", "triton", "aiter"]
Kind = Literal["reference", "triton", "aiter"]

NO_SINKS = "no kernel of attention has sinks"

# Dtypes that the Triton kernels read. FP8 is kept at loading only where a device has it.
KERNEL_DTYPES = ("bfloat16", "float16", "float32", FP8)


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs the MoE layers of a model; the layout of its weights and their execution both follow it.

    requested: what is left to choose from, for ``list_allowed``: ``aiter`` where the weights get AITER's layout.
    experts, routing: what runs them; ``triton`` runs both in one.
    record: the AITER of either.
    gate_rows: rows that the shared experts' gate gets in the router; 0 leaves them as they are.
    lines: what to tell the user, one line for each operator.
    sinks: the attention has sinks, so that references run it.
    """

    requested: Requested = "auto"
    experts: Kind = "reference"
    routing: Kind = "reference"
    record: AiterRecord | None = None
    gate_rows: int = 0
    lines: tuple[str, ...] = ()
    sinks: bool = False


def check_requested(requested: str, /) -> None:
    """Raise ValueError for an unknown choice of kernels."""
    if requested not in get_args(Requested):
        raise ValueError(f"kernels={requested!r} must be one of {', '.join(get_args(Requested))}")


def decide(
    key: Key | None,
    router: RouterConfig,
    /,
    *,
    biased: bool,
    capabilities: Capabilities,
    requested: Requested,
    sinks: bool = False,
) -> Decision:
    """Decide what runs the MoE layers of a model, and whether kernels run its attention. Pure.

    AITER is taken before Triton where it can compute the experts; what it cannot route, the reference does. Triton
    on a CPU, where it is interpreted, has to be asked for.

    Args:
        key: of the layers, as in the checkpoint; None where the model has none.
        router: their rule.
        biased: they have a correction bias.
        capabilities: of the machine.
        requested: kernels asked for by name.
        sinks: its attention has sinks.

    Returns:
        Decision.

    Raises:
        RuntimeError: what is asked for by name cannot run; the message says why.
    """
    decision = _decide_experts(key, router, biased, capabilities, requested)
    if not sinks:
        return decision
    if requested == "triton":
        raise RuntimeError(f"kernels='triton' cannot run here: {NO_SINKS}; use kernels='auto'")
    return replace(decision, sinks=True, lines=(*decision.lines, f"attention: reference ({NO_SINKS})"))


def _decide_experts(
    key: Key | None, router: RouterConfig, biased: bool, capabilities: Capabilities, requested: Requested
) -> Decision:
    without_triton = why_not_triton(key, capabilities.triton)
    if requested == "triton" and without_triton:
        raise RuntimeError(f"kernels='triton' cannot run here: {without_triton}; use kernels='auto'")
    if key is None:
        if requested == "aiter":
            raise RuntimeError("kernels='aiter' cannot run here: the model has no experts; use kernels='auto'")
        return Decision(requested)
    if requested in ("reference", "triton"):
        return Decision(requested, requested, requested)
    without_aiter, routes, how = _ask_aiter(key, router, biased, capabilities.aiter)
    if requested == "aiter" and (without_aiter or not routes):
        raise RuntimeError(f"kernels='aiter' cannot run here: {without_aiter or how}; use kernels='auto'")
    if not without_aiter:
        record = capabilities.aiter
        routing: Kind = "aiter" if routes else "reference"
        lines = (f"experts: aiter {record.version or '(unknown version)'}", f"routing: {routing} ({how})")
        rows = _replicated_gate(key, router, record) if routes else 0
        return Decision("aiter", "aiter", routing, record, rows, lines)
    if not without_triton and capabilities.device_type != "cpu":
        lines = (f"experts: triton ({without_aiter})", "routing: triton, with the experts")
        return Decision("auto", "triton", "triton", lines=lines)
    reasons = f"{without_aiter}; {without_triton or 'triton interprets its kernels here, slowly'}"
    return Decision(lines=(f"experts: reference ({reasons})", "routing: reference, as the experts"))


def why_not_triton(key: Key | None, triton: Availability, /) -> str:
    """Say why Triton's kernels cannot run an operator; empty where they can."""
    if not triton.can_run:
        return triton.reason
    if key is not None and key.dtype not in KERNEL_DTYPES:
        return f"no Triton kernel reads {key.dtype}; use bfloat16, float16 or float32"
    if key is not None and key.variant:
        return f"no Triton kernel computes {key.variant} experts"
    return ""


def _ask_aiter(key: Key, router: RouterConfig, biased: bool, record: AiterRecord) -> tuple[str, bool, str]:
    """Say why AITER cannot compute the experts, or ""; whether it can route, and how or why not."""
    if not record.present:
        return record.reason, False, record.reason
    if key.variant:
        reason = f"AITER is not asked to compute {key.variant} experts"
        return reason, False, reason
    _, top_k, slots, _, hidden, _ = key.sizes
    dtype: torch.dtype = getattr(torch, key.dtype)
    computes, reason = can_compute(record, columns=top_k + slots, hidden_size=hidden, dtype=dtype)
    return "" if computes else reason, *can_route(router, slots, record, biased=biased)


def _replicated_gate(key: Key, router: RouterConfig, record: AiterRecord) -> int:
    """Give S where one gate serves several slots and the kernel that reads a gate for each can run, else 0."""
    experts, top_k, slots, gate_rows, _, _ = key.sizes
    if router.scoring != "softmax" or router.groups > 1 or gate_rows != 1 or slots == 1:
        return 0
    return slots if decide_topk(record, num_experts=experts, top_k=top_k, slots=slots).path == "fused" else 0


@cache
def import_aiter(symbols: tuple[str, ...], /) -> tuple[ModuleType | None, str]:
    """Import AITER, once in a process whatever happens: a failed import leaves half of it behind.

    Args:
        symbols: names that must be there.

    Returns:
        (module, "") or (None, why not).
    """
    try:
        module = importlib.import_module("aiter")
        import_submodules(symbols, importlib.import_module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, f"aiter passed its self-test, but its import raised {describe(error)}"
    absent = absent_symbols(module, symbols)
    return (None, f"aiter imports without {', '.join(absent)}") if absent else (module, "")


def connect_aiter(capabilities: Capabilities, /) -> Capabilities:
    """Import the AITER that the probe found and give it to the ops.

    Returns:
        The capabilities, without AITER where its import failed.
    """
    module, reason = import_aiter(capabilities.aiter.symbols)
    if module is None:
        return replace(capabilities, aiter=replace(capabilities.aiter, present=False, reason=reason))
    register(module, capabilities.aiter)
    return capabilities


def list_allowed(
    key: Key, device: torch.device, /, *, requested: Requested = "auto", triton: Availability | None = None
) -> tuple[Implementation, ...]:
    """List the implementations of an operator that can run on a device and read the layout of the weights there.

    Args:
        key: the operator.
        device: where it will run.
        requested: ``Decision.requested``, or kernels asked for by name.
        triton: whether Triton's kernels run there; None asks.

    Raises:
        RuntimeError: Triton is asked for and cannot run; the message says why.
    """
    if requested == "aiter" and key.operator == "moe":
        return ("aiter",)
    reason = why_not_triton(key, probe_triton(device) if triton is None else triton)
    if requested == "triton" and reason:
        raise RuntimeError(f"kernels='triton' cannot run here: {reason}; use kernels='auto'")
    wanted = not reason and requested != "reference" and (requested == "triton" or device.type != "cpu")
    if key.operator == "linear":
        return ("library", "triton") if wanted else ("library",)
    if wanted and key.dtype == FP8:
        return ("triton",)  # every other way dequantises whole stacks first
    apart: tuple[Implementation, ...] = ("apart", "beside") if key.sizes[2] else ()
    kernels: tuple[Implementation, ...] = ("triton", *apart) if wanted else ()
    functions: tuple[Implementation, ...] = () if requested == "triton" else ("per_slot", "loop", "dense", "grouped")
    return kernels + functions


def choose(
    device: torch.device, /, *, compiled: bool, plans: Iterable[Plan] = (), decision: Decision | None = None
) -> Kernels:
    """Put together the implementations of a model.

    Args:
        device: where the parameters are.
        compiled: the functions will be traced by torch.compile; ops hide what a graph must not look into.
        plans: of the model's layers; layers without one run by rule.
        decision: what the weights were loaded for; None is anything but AITER.

    Returns:
        Kernels.
    """
    plans = tuple(plans)
    moe, linear = encode_plans(plans, "moe"), keep_kernels(encode_plans(plans, "linear"))
    fused = any(row.implementation in ("triton", "apart", "beside") for plan in plans for row in plan.rows)
    kernels = Kernels(
        compute_moe=partial(compute_moe_op, plans=moe) if fused else None,
        compute_experts=partial(compute_experts_op if compiled else compute_experts_planned, plans=moe),
        compute_experts_decode=partial(compute_experts_few if compiled else compute_experts_planned, plans=moe),
        delta_prefill=delta_prefill_op if compiled else delta_mix,
        attend_causal=attend_causal_op,
        linear=partial(linear_planned, plans=linear) if linear else linear_reference,
    )
    return kernels if decision is None or decision.record is None else _with_aiter(kernels, decision, decision.record)


def _with_aiter(kernels: Kernels, decision: Decision, record: AiterRecord) -> Kernels:
    return replace(
        kernels,
        route=partial(route_aiter, record=record) if decision.routing == "aiter" else route_fused,
        compute_moe=None,
        compute_experts=compute_experts_aiter,
        compute_experts_decode=compute_experts_aiter,
    )
