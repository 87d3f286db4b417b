"""Expert compute: routing and rows in, weighted sum of expert outputs out.

Four implementations of one function; they differ in speed and rounding alone.
Letters: T tokens, E stacked experts (shared slots last), K experts per token, N = T * K routed rows, D hidden,
F expert width, P = 2F (gate rows, then up rows).

Each takes the biases of both projections and an activation; without them, experts are two matrices around SwiGLU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .mlp import SWIGLU, Activation, activate
from .quant import Weight, read_experts, read_weight, weight_shape
from .routing import Routing

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


class Permutation(NamedTuple):
    """Rows sorted by expert."""

    order_N: Tensor  # int64, the routed row at each place
    offsets_E: Tensor  # int32, inclusive end of each expert's rows


class ExpertBiases(NamedTuple):
    """What the projections of each expert add."""

    bias_gate_up_EP: Tensor
    bias_down_ED: Tensor


def permute_rows(experts_TK: Tensor, num_experts: int, /) -> Permutation:
    """Sort the N routed rows by expert; rows of one expert keep their order.

    Returns:
        Permutation; row n of the N belongs to token ``order_N // K``.
    """
    flat_N = experts_TK.flatten()
    order_N = flat_N.argsort(stable=True)
    bounds_E = torch.arange(num_experts, dtype=flat_N.dtype, device=flat_N.device)
    return Permutation(order_N, torch.searchsorted(flat_N[order_N], bounds_E, right=True, out_int32=True))


def unpermute_rows(rows_ND: Tensor, order_N: Tensor, weights_TK: Tensor, /) -> Tensor:
    """Put sorted rows back in their places and sum the K rows of each token, weighted, in float32.

    Returns:
        float32 [T, D].
    """
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    rows_TKD = rows_ND[inverse_N].view(*weights_TK.shape, rows_ND.shape[1])
    return torch.bmm(weights_TK[:, None], rows_TKD.float()).squeeze(1)


def grouped_mm(rows_NK: Tensor, weights_EKM: Tensor, offsets_E: Tensor, /) -> Tensor:
    """Multiply each expert's rows with its matrix: rows up to ``offsets_E[e]`` (and past e-1's end) use matrix e.

    Falls to one product per expert where torch's grouped product does not run: its strides must be multiples of 16
    bytes and its dtype one of float32, bfloat16, float16.

    Returns:
        [N, M].
    """
    grouped = rows_NK.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if grouped and _has_grouped_strides(rows_NK) and _has_grouped_strides(weights_EKM):
        return F.grouped_mm(rows_NK, weights_EKM, offs=offsets_E)
    ends = [0, *offsets_E.tolist()]
    products = [rows_NK[a:b] @ w_KM for a, b, w_KM in zip(ends, ends[1:], weights_EKM, strict=False) if b > a]
    return torch.cat(products) if products else rows_NK.new_empty(0, weights_EKM.shape[-1])


def _has_grouped_strides(matrices: Tensor) -> bool:
    rows, columns = matrices.shape[-2:]
    *outer, row_stride, column_stride = matrices.stride()
    if row_stride == 1 and column_stride >= max(1, rows):
        outer.append(column_stride)
    elif column_stride == 1 and row_stride >= max(1, columns):
        outer.append(row_stride)
    else:
        return False
    return all(places * matrices.element_size() % 16 == 0 for places in outer)


def compute_experts_grouped(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    activation: Activation = SWIGLU,
    multiply: GroupedMM = grouped_mm,
) -> Tensor:
    """Sort rows by expert, then one grouped product per projection; the reference for many tokens.

    ``y_t = sum_k weights_tk * (w_down_e activate(w_gate_up_e x_t + bias_e) + bias_e)`` with e = experts_tk, summed in
    float32.

    Args:
        x_TD: rows, T >= 0.
        routing: ids in 0..E-1; every column counts, shared ones too.
        w_gate_up_EPD: gate and up rows of all experts; a quantised stack is dequantised whole.
        w_down_EDF: down rows of all experts, likewise.
        biases: of both projections, or None.
        activation: between them.
        multiply: implementation of ``grouped_mm``.

    Returns:
        A tensor like x.

    Source: arXiv:2211.15841 (grouped products without padding or dropping).
    """
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    weights_TK, experts_TK = routing
    order_N, offsets_E = permute_rows(experts_TK, weight_shape(w_down_EDF)[0])
    rows_ND = x_TD[order_N // experts_TK.shape[1]]
    w_EPD = read_weight(w_gate_up_EPD, x_TD.dtype, parts=2)
    gate_up_NP = multiply(rows_ND, w_EPD.transpose(1, 2), offsets_E)
    if biases is not None:
        sorted_N = experts_TK.flatten()[order_N]
        gate_up_NP = gate_up_NP + biases.bias_gate_up_EP[sorted_N]
    hidden_NF = activate(gate_up_NP, activation)
    rows_ND = multiply(hidden_NF, read_weight(w_down_EDF, x_TD.dtype).transpose(1, 2), offsets_E)
    if biases is not None:
        rows_ND = rows_ND + biases.bias_down_ED[sorted_N]
    return unpermute_rows(rows_ND, order_N, weights_TK).to(x_TD.dtype)


def compute_experts_loop(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Visit the routed rows one by one: matrix times vector, nothing gathered or sorted.

    Reads the ids on the host, so it runs on a CPU, uncompiled or behind an op. Fastest for a few tokens.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    ids_TK: list[list[int]] = routing.experts_TK.tolist()
    pairs = [(e, x_D) for x_D, ids in zip(x_TD.unbind(), ids_TK, strict=True) for e in ids]
    dtype = x_TD.dtype
    gate_up = [torch.mv(read_experts(w_gate_up_EPD, e, dtype, parts=2), x_D) for e, x_D in pairs]
    if biases is not None:
        gate_up = [z_P + biases.bias_gate_up_EP[e] for z_P, (e, _) in zip(gate_up, pairs, strict=True)]
    hidden_NF = activate(torch.stack(gate_up), activation)
    rows = [torch.mv(read_experts(w_down_EDF, e, dtype), h_F) for (e, _), h_F in zip(pairs, hidden_NF, strict=True)]
    if biases is not None:
        rows = [y_D + biases.bias_down_ED[e] for y_D, (e, _) in zip(rows, pairs, strict=True)]
    rows_TKD = torch.stack(rows).view(*routing.weights_TK.shape, x_TD.shape[1])
    return (rows_TKD.float() * routing.weights_TK[..., None]).sum(1).to(x_TD.dtype)


def compute_experts_dense(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Run every token through every expert and weigh those not chosen by zero.

    E / K times the arithmetic of the grouped form, but no sorting; the weights are read once. Pays where few tokens
    hit nearly all experts.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    weights_TK, experts_TK = routing
    tokens, experts = x_TD.shape[0], weight_shape(w_down_EDF)[0]
    dense_TE = torch.zeros(tokens, experts, dtype=torch.float32, device=x_TD.device)
    dense_TE = dense_TE.scatter_add(1, experts_TK.long(), weights_TK)
    w_EPD = read_weight(w_gate_up_EPD, x_TD.dtype, parts=2)
    # One product with all gate and up rows, the tokens as columns: half the time of a batch of products.
    gate_up_EPT = torch.mm(w_EPD.flatten(0, 1), x_TD.T).unflatten(0, (experts, -1))
    if biases is not None:
        gate_up_EPT = gate_up_EPT + biases.bias_gate_up_EP[..., None]
    hidden_ETF = activate(gate_up_EPT.transpose(1, 2), activation)
    rows_ETD = torch.bmm(hidden_ETF, read_weight(w_down_EDF, x_TD.dtype).transpose(1, 2))
    if biases is not None:
        rows_ETD = rows_ETD + biases.bias_down_ED[:, None]
    chosen_ETD = torch.where((dense_TE != 0).T[..., None], rows_ETD.float() * dense_TE.T[..., None], 0.0)
    return chosen_ETD.sum(0).to(x_TD.dtype)


def compute_experts_per_slot(
    x_TD: Tensor,
    routing: Routing,
    w_gate_up_EPD: Weight,
    w_down_EDF: Weight,
    biases: ExpertBiases | None = None,
    /,
    *,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Gather the matrices of every routed row and multiply in a batch; no sorting, but weights are copied.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    weights_TK, experts_TK = routing
    ids_N = experts_TK.flatten().long()
    rows_ND1 = x_TD.repeat_interleave(experts_TK.shape[1], 0)[..., None]
    gate_up_NP = torch.bmm(read_experts(w_gate_up_EPD, ids_N, x_TD.dtype, parts=2), rows_ND1).squeeze(-1)
    if biases is not None:
        gate_up_NP = gate_up_NP + biases.bias_gate_up_EP[ids_N]
    hidden_NF = activate(gate_up_NP, activation)
    w_NDF = read_experts(w_down_EDF, ids_N, x_TD.dtype)
    rows_ND = torch.bmm(w_NDF, hidden_NF[..., None]).squeeze(-1)
    if biases is not None:
        rows_ND = rows_ND + biases.bias_down_ED[ids_N]
    rows_TKD = rows_ND.view(*weights_TK.shape, x_TD.shape[1])
    return torch.bmm(weights_TK[:, None], rows_TKD.float()).squeeze(1).to(x_TD.dtype)
