"""Residual and norm with what reads them: the input projection of a mixer, or a mixture of experts.

Both are kernels of their own for few tokens of each sequence, where there are any, and compositions else. They give the
sum first, then what reads its norm.

Letters: B sequences, T tokens, D hidden, N projected columns.
"""

from torch import Tensor

from .kernels import Kernels
from .mlp import SWIGLU, Activation
from .moe import MoEParams, add_shared_expert, is_plain, moe_layer
from .quant import Weight
from .routing import RouterConfig


def add_norm_linear(
    x_BTD: Tensor,
    branch_BTD: Tensor,
    norm_D: Tensor,
    w_ND: Weight,
    bias_N: Tensor | None,
    /,
    *,
    eps: float,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream, norm the sum and project it.

    Args:
        x_BTD: the residual stream.
        branch_BTD: what the block before adds.
        norm_D: the norm's weight.
        w_ND, bias_N: of the projection.
        eps: of the norm.
        kernels: of T up to ``normed_tokens``, ``linear_normed`` if there is one; else ``add_norm`` and ``linear``.

    Returns:
        (the sum, like x; the projection [B, T, N]).
    """
    if x_BTD.shape[1] <= kernels.normed_tokens and kernels.linear_normed is not None:
        return kernels.linear_normed(x_BTD, branch_BTD, norm_D, w_ND, bias_N, eps=eps)
    normed_BTD, total_BTD = kernels.add_norm(x_BTD, branch_BTD, norm_D, eps=eps)
    return total_BTD, kernels.linear(normed_BTD, w_ND, bias_N)


def add_norm_moe(
    x_BTD: Tensor,
    branch_BTD: Tensor,
    norm_D: Tensor,
    params: MoEParams,
    config: RouterConfig,
    /,
    *,
    eps: float,
    kernels: Kernels,
    decode: bool = False,
    activation: Activation = SWIGLU,
) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream, norm the sum and run ``moe_layer`` on it.

    Args:
        x_BTD: the residual stream.
        branch_BTD: what a mixer gave.
        norm_D: the norm's weight.
        params, config, kernels, decode, activation: as in ``moe_layer``; of T up to ``kernels.normed_tokens``, a
            plain layer is left to ``kernels.compute_moe_normed`` if there is one.
        eps: of the norm.

    Returns:
        (the sum, the layer's output), both like x.
    """
    many = x_BTD.shape[1] > kernels.normed_tokens
    if many or kernels.compute_moe_normed is None or not is_plain(params, activation):
        normed_BTD, total_BTD = kernels.add_norm(x_BTD, branch_BTD, norm_D, eps=eps)
        normed_TD = normed_BTD.flatten(0, 1)
        y_TD = moe_layer(normed_TD, params, config, kernels=kernels, decode=decode, activation=activation)
        return total_BTD, y_TD.view_as(x_BTD)
    rows = x_BTD.flatten(0, 1), branch_BTD.flatten(0, 1)
    total_TD, normed_TD, y_TD = kernels.compute_moe_normed(*rows, norm_D, params, config, eps=eps)
    if params.shared is not None:
        y_TD = add_shared_expert(y_TD, normed_TD, params.shared, linear=kernels.linear)
    return total_TD.view_as(x_BTD), y_TD.view_as(x_BTD)
