"""Which implementations run where."""

import torch
from torch import Tensor

from fmoe.functional.cache import DeltaCache
from fmoe.functional.deltanet import DeltaConfig, DeltaParams, delta_mix
from fmoe.functional.kernels import Kernels

from .ops import compute_experts_cpu, compute_experts_few, compute_experts_op, delta_chunked_op


def delta_prefill_op(projected_BTN: Tensor, cache: DeltaCache, params: DeltaParams, config: DeltaConfig, /) -> Tensor:
    """``delta_mix`` with its chunk loop behind an op."""
    return delta_mix(projected_BTN, cache, params, config, chunk_rule=delta_chunked_op)


def choose(device: torch.device, *, compiled: bool) -> Kernels:
    """Choose the implementations for a device: plain functions uncompiled, ops where a graph must not look inside.

    Args:
        device: where the parameters are.
        compiled: the functions will be traced by torch.compile.
    """
    if compiled:
        return Kernels(
            compute_experts=compute_experts_op,
            compute_experts_decode=compute_experts_few,
            delta_prefill=delta_prefill_op,
        )
    if device.type == "cpu":
        return Kernels(compute_experts=compute_experts_cpu, compute_experts_decode=compute_experts_cpu)
    return Kernels()
