"""The choice of implementations, as a value; every default is the reference."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .attention import attend
from .deltanet import delta_mix
from .experts import compute_experts_grouped
from .norm import add_rms_norm
from .quant import linear as linear_reference
from .routing import Routing, route_fused


@dataclass(frozen=True, slots=True)
class Kernels:
    """Functions that a model's forward pass calls; each has the signature of its default.

    compute_moe: router, routing and experts in one, ``(x [T, D], MoEParams, RouterConfig) -> [T, D]``, without a
        separate shared expert; None composes ``route`` and ``compute_experts``.
    """

    route: Callable[..., Routing] = route_fused
    compute_experts: Callable[..., Tensor] = compute_experts_grouped
    compute_experts_decode: Callable[..., Tensor] = compute_experts_grouped
    attend_prefill: Callable[..., Tensor] = attend
    attend_decode: Callable[..., Tensor] = attend
    delta_prefill: Callable[..., Tensor] = delta_mix
    delta_decode: Callable[..., Tensor] = delta_mix
    compute_moe: Callable[..., Tensor] | None = None
    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_rms_norm
    linear: Callable[..., Tensor] = linear_reference  # (x [..., D], w [N, D] or Fp8, bias [N] or None) -> [..., N]
