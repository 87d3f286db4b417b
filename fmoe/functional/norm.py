"""Root-mean-square norms. Letters: D the normalised channels."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor, /, *, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension, then multiply by the weight.

    ``n = x / sqrt(mean(x^2) + eps)`` in float32, rounded to the weight's dtype, times the weight, rounded to the
    dtype of x. The weight's dtype thus chooses the convention: a weight in the model's dtype gives the standard norm
    (rounded before the product), a float32 weight the late cast, and zero-centred norms pass ``1 + w`` in float32.

    Args:
        x_D: [..., D], any float dtype.
        weight_D: broadcasts against x over all but rows, so [D] or [heads, D].
        eps: added to the mean square.

    Returns:
        A tensor of the shape and dtype of x.

    Source: arXiv:1910.07467, eq. 4.
    """
    if weight_D.dtype == torch.float32 and weight_D.dim() == 1:
        return torch.rms_norm(x_D.float(), x_D.shape[-1:], weight_D, eps).to(x_D.dtype)
    normed_D = torch.rms_norm(x_D.float(), x_D.shape[-1:], None, eps)
    return (normed_D.to(weight_D.dtype) * weight_D).to(x_D.dtype)


def rms_norm_gated(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, /, *, eps: float) -> Tensor:
    """Normalise, weigh, then multiply by ``silu(gate)`` computed in float32.

    Args:
        x_D: [..., D], any float dtype.
        gate_D: same shape as x.
        weight_D: [D].
        eps: added to the mean square.

    Returns:
        A tensor of the shape and dtype of x.

    Source: arXiv:2412.06464, the output norm of Gated DeltaNet.
    """
    return (rms_norm(x_D, weight_D, eps=eps) * F.silu(gate_D.float())).to(x_D.dtype)


def add_rms_norm(x_D: Tensor, branch_D: Tensor, weight_D: Tensor, /, *, eps: float) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream and normalise the sum.

    Args:
        x_D: the residual stream, [..., D].
        branch_D: what a mixer or an MLP gave, same shape.
        weight_D: [D].
        eps: added to the mean square.

    Returns:
        (the normalised sum, the sum), both like x.
    """
    total_D = x_D + branch_D
    return rms_norm(total_D, weight_D, eps=eps), total_D
