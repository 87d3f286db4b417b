"""Dense projections behind one op: torch's product, or the kernel for few rows, as the plan says.

Letters: T tokens, D hidden, N rows of the weights.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.functional.quant import Fp8, Weight
from fmoe.functional.quant import linear as linear_reference

from .linear_settings import MAX_TOKENS, linear_from_ints
from .ops import Plans, find_plan
from .plan import rows_from_ints, select_implementation

if find_spec("triton"):
    from .kernels.linear import run_linear

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define("linear(Tensor x, Tensor w, Tensor? bias, int[] plan) -> Tensor")


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, plan: list[int]) -> Tensor:
    tokens = x.numel() // x.shape[-1]
    name, settings = select_implementation(plan, tokens)
    if name != "triton" or not 0 < tokens <= MAX_TOKENS:
        return F.linear(x, w, bias)
    rows_TD = x.contiguous().view(tokens, x.shape[-1])
    # No copy on a GPU; a CPU keeps some matrices by columns.
    y_TN = run_linear(rows_TD, w.contiguous(), linear_from_ints(settings), bias_N=bias)
    return y_TN.view(*x.shape[:-1], w.shape[0])


def _linear_fake(x: Tensor, w: Tensor, bias: Tensor | None, plan: list[int]) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::linear", _linear_fake, lib=LIBRARY)


def linear_planned(x: Tensor, w_ND: Weight, bias_N: Tensor | None = None, /, *, plans: Plans = ()) -> Tensor:
    """Compute ``x w^T + bias``: ``fmoe::linear`` where a plan has kernels for these weights, else torch's product.

    Args:
        x: [..., D].
        w_ND: weights.
        bias_N: or None.
        plans: of the model's projections.

    Returns:
        [..., N].
    """
    plan = find_plan(plans, w_ND)
    if not plan or isinstance(w_ND, Fp8):
        return linear_reference(x, w_ND, bias_N)
    y: Tensor = torch.ops.fmoe.linear(x, w_ND, bias_N, list(plan))
    return y


def keep_kernels(plans: Plans, /) -> Plans:
    """Leave out the plans that never name the kernel: torch's product needs no op."""
    return tuple(plan for plan in plans if any(name != "library" for _, name, _ in rows_from_ints(plan[2])))
