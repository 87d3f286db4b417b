"""Which implementations run where: what can run, what is asked for, and the kernels of a model as one value."""

import os
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.functional.cache import DeltaCache
from fmoe.functional.deltanet import DeltaConfig, DeltaParams, delta_mix
from fmoe.functional.kernels import Kernels

from .linear_ops import keep_kernels, linear_planned
from .ops import (
    compute_experts_few,
    compute_experts_op,
    compute_experts_planned,
    compute_moe_op,
    delta_chunked_op,
    encode_plans,
)
from .plan import Implementation, Key, Plan

Requested = Literal["auto", "reference", "triton", "aiter"]

# Dtypes that the Triton kernels read.
KERNEL_DTYPES = ("bfloat16", "float16", "float32")


def check_requested(requested: str, /) -> None:
    """Raise ValueError for an unknown choice of kernels."""
    if requested not in get_args(Requested):
        raise ValueError(f"kernels={requested!r} must be one of {', '.join(get_args(Requested))}")


def delta_prefill_op(projected_BTN: Tensor, cache: DeltaCache, params: DeltaParams, config: DeltaConfig, /) -> Tensor:
    """``delta_mix`` with its chunk loop behind an op."""
    return delta_mix(projected_BTN, cache, params, config, chunk_rule=delta_chunked_op)


def why_not_triton(device: torch.device, /) -> str:
    """Say why Triton's kernels cannot run on a device; empty where they can."""
    if not find_spec("triton"):
        return "triton is not installed; a build of torch for a GPU brings it"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton's kernels need a GPU; TRITON_INTERPRET=1 interprets them on a CPU, slowly"
    if device.type not in ("cpu", "cuda"):
        return f"Triton's kernels run on CUDA and ROCm devices, this is {device.type!r}"
    return ""


def list_allowed(key: Key, device: torch.device, /, *, requested: Requested = "auto") -> tuple[Implementation, ...]:
    """List the implementations of an operator that can run on a device and are not excluded by the request.

    Raises:
        RuntimeError: what is asked for by name cannot run; the message says why.
    """
    if requested == "aiter":
        raise RuntimeError("kernels='aiter' cannot run here: no AITER is set up; use kernels='auto'")
    reason = why_not_triton(device)
    if not reason and key.dtype not in KERNEL_DTYPES:
        reason = f"no Triton kernel reads {key.dtype}; use bfloat16, float16 or float32"
    if requested == "triton" and reason:
        raise RuntimeError(f"kernels='triton' cannot run here: {reason}")
    wanted = not reason and requested != "reference" and (requested == "triton" or device.type != "cpu")
    if key.operator == "linear":
        return ("library", "triton") if wanted else ("library",)
    apart: tuple[Implementation, ...] = ("apart", "beside") if key.sizes[2] else ()
    kernels: tuple[Implementation, ...] = ("triton", *apart) if wanted else ()
    functions: tuple[Implementation, ...] = () if requested == "triton" else ("per_slot", "loop", "dense", "grouped")
    return kernels + functions


def choose(device: torch.device, /, *, compiled: bool, plans: Iterable[Plan] = ()) -> Kernels:
    """Put together the implementations of a model.

    Args:
        device: where the parameters are.
        compiled: the functions will be traced by torch.compile; ops hide what a graph must not look into.
        plans: of the model's layers; layers without one run by rule.

    Returns:
        Kernels.
    """
    plans = tuple(plans)
    moe, linear = encode_plans(plans, "moe"), keep_kernels(encode_plans(plans, "linear"))
    fused = any(row.implementation in ("triton", "apart", "beside") for plan in plans for row in plan.rows)
    return Kernels(
        compute_moe=partial(compute_moe_op, plans=moe) if fused else None,
        compute_experts=partial(compute_experts_op if compiled else compute_experts_planned, plans=moe),
        compute_experts_decode=partial(compute_experts_few if compiled else compute_experts_planned, plans=moe),
        delta_prefill=delta_prefill_op if compiled else delta_mix,
        linear=partial(linear_planned, plans=linear) if linear else F.linear,
    )
