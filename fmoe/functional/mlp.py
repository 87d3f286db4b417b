"""The gated feed-forward block. Letters: D hidden, F width, P = 2F (gate rows, then up rows)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from .quant import Weight
from .quant import linear as linear_reference


class MLPParams(NamedTuple):
    """One SwiGLU block."""

    w_gate_up_PD: Weight
    w_down_DF: Weight


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between the two projections of an expert: ``(up + shift) * gate * sigmoid(alpha * gate)``.

    alpha: of the sigmoid.
    limit: the gate is clamped to at most that, up to that on both sides; None clamps neither.
    shift: added to up.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit={self.limit} of the activation must be above 0, or None for no clamp")

    @property
    def is_plain(self) -> bool:
        """It is SwiGLU."""
        return self.alpha == 1.0 and self.limit is None and self.shift == 0.0


SWIGLU = Activation()


def swiglu(gate_up_P: Tensor, /) -> Tensor:
    """Split the last dimension into gate and up halves and return ``silu(gate) * up``, [..., F].

    Source: arXiv:2002.05202, section 2.
    """
    gate_F, up_F = gate_up_P.chunk(2, -1)
    return F.silu(gate_F) * up_F


def activate(gate_up_P: Tensor, activation: Activation, /) -> Tensor:
    """Split the last dimension into gate and up halves and join them by ``activation``, [..., F].

    Each operation is rounded to the dtype of its operands; plain SwiGLU is ``swiglu``.

    Source: arXiv:2508.10925, section 2.2 (clamped SwiGLU with a residual connection).
    """
    if activation.is_plain:
        return swiglu(gate_up_P)
    gate_F, up_F = gate_up_P.chunk(2, -1)
    if activation.limit is not None:
        gate_F, up_F = gate_F.clamp(max=activation.limit), up_F.clamp(-activation.limit, activation.limit)
    return (up_F + activation.shift) * (gate_F * (gate_F * activation.alpha).sigmoid())


def mlp_layer(x_TD: Tensor, params: MLPParams, /, *, linear: Callable[..., Tensor] = linear_reference) -> Tensor:
    """Compute ``w_down swiglu(w_gate_up x)``.

    Args:
        x_TD: rows, [..., D].
        params: weights.
        linear: ``Kernels.linear``.

    Returns:
        A tensor like x, [..., D].
    """
    return linear(swiglu(linear(x_TD, params.w_gate_up_PD)), params.w_down_DF)
