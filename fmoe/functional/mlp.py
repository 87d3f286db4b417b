"""The gated feed-forward block. Letters: D hidden, F width, P = 2F (gate rows, then up rows)."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from .quant import Weight
from .quant import linear as linear_reference


class MLPParams(NamedTuple):
    """One SwiGLU block."""

    w_gate_up_PD: Weight
    w_down_DF: Weight


def swiglu(gate_up_P: Tensor, /) -> Tensor:
    """Split the last dimension into gate and up halves and return ``silu(gate) * up``, [..., F].

    Source: arXiv:2002.05202, section 2.
    """
    gate_F, up_F = gate_up_P.chunk(2, -1)
    return F.silu(gate_F) * up_F


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
