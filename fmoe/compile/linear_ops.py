"""Dense projections behind one op: torch's product, or the kernel for few rows, as the plan says.

Letters: T tokens, D hidden, N rows of the weights.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.functional.quant import Fp8, Weight, dequantize
from fmoe.functional.quant import linear as linear_reference

from .linear_settings import FP8_TOKENS, MAX_TOKENS, linear_from_ints
from .ops import Plans, find_plan
from .plan import rows_from_ints, select_implementation

if find_spec("triton"):
    from .kernels.fp8 import read_fp8
    from .kernels.linear import run_linear
    from .kernels.linear_fp8 import can_multiply_quantized, run_linear_quantized

LIBRARY = torch.library.Library("fmoe", "FRAGMENT")
LIBRARY.define("linear(Tensor x, Tensor w, Tensor? bias, int[] plan, Tensor? scale=None, Tensor? rest=None) -> Tensor")


def _linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: list[int],
    scale: Tensor | None = None,
    rest: Tensor | None = None,
) -> Tensor:
    tokens = x.numel() // x.shape[-1]
    name, settings = select_implementation(plan, tokens)
    if name == "triton" and 0 < tokens <= (MAX_TOKENS if scale is None else FP8_TOKENS):
        # No copy on a GPU; a CPU keeps some matrices by columns.
        weight = w.contiguous() if scale is None else Fp8(w, scale, rest)
        rows_TD = x.contiguous().view(tokens, x.shape[-1])
        y_TN = run_linear(rows_TD, weight, linear_from_ints(settings), bias_N=bias)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])
    if scale is not None:
        fp8 = Fp8(w, scale, rest)
        if name == "quantized" and tokens and x.is_cuda and can_multiply_quantized(x, fp8):
            y_TN = run_linear_quantized(x.contiguous().view(tokens, x.shape[-1]), fp8, bias_N=bias)
            return y_TN.view(*x.shape[:-1], y_TN.shape[1])
        w = read_fp8(fp8, x.dtype) if x.is_cuda else dequantize(fp8, x.dtype)
    return F.linear(x, w, bias)


def _linear_fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: list[int],
    scale: Tensor | None = None,
    rest: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0] + (0 if rest is None else rest.shape[0]))


LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::linear", _linear_fake, lib=LIBRARY)


def linear_planned(x: Tensor, w_ND: Weight, bias_N: Tensor | None = None, /, *, plans: Plans = ()) -> Tensor:
    """Compute ``x w^T + bias``: ``fmoe::linear`` where a plan has kernels for these weights, else torch's product.

    Args:
        x: [..., D].
        w_ND: weights; in FP8 blocks they are read as they are by the kernel, and dequantised for torch's product.
        bias_N: or None.
        plans: of the model's projections.

    Returns:
        [..., N].
    """
    plan = find_plan(plans, w_ND)
    if not plan:
        return linear_reference(x, w_ND, bias_N)
    w, *more = w_ND if isinstance(w_ND, Fp8) else (w_ND, None, None)
    y: Tensor = torch.ops.fmoe.linear(x, w, bias_N, list(plan), *more)
    return y


def keep_kernels(plans: Plans, /) -> Plans:
    """Leave out the plans that never name the kernel: torch's product needs no op."""
    return tuple(plan for plan in plans if any(name != "library" for _, name, _ in rows_from_ints(plan[2])))
