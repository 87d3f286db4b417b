"""The custom-op boundary: what must stay opaque to torch.compile. One op, one fake, one typed wrapper each.

Functional: outputs are new tensors, nothing is mutated or aliased. Registered through ``Library`` and not through
the ``custom_op`` decorator, whose first use costs seconds even when nothing is compiled.

Letters: as in fmoe/functional/experts.py and deltanet.py.
"""

import torch
from torch import Tensor

from fmoe.functional.deltanet import delta_chunked
from fmoe.functional.experts import (
    compute_experts_dense,
    compute_experts_grouped,
    compute_experts_loop,
    compute_experts_per_slot,
)
from fmoe.functional.routing import Routing

LIBRARY = torch.library.Library("fmoe", "DEF")
LIBRARY.define("experts(Tensor x, Tensor weights, Tensor experts, Tensor w_gate_up, Tensor w_down) -> Tensor")
LIBRARY.define("delta_chunked(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state) -> (Tensor, Tensor)")

# Up to this many tokens, one row after the other is fastest (float32, one core, 17 experts of 64 x 256, weights not in
# the cache: 2 tokens 222 us, grouped 294 us, dense 340 us).
LOOP_TOKENS = 2

# Up to this many tokens, when every expert is hit about twice, running all experts densely is at least as fast as
# sorting on one core (8 tokens 570 us, grouped 583 us), and faster on two, which share its products.
DENSE_TOKENS = 32

# Up to this many rows of a decode step, reading the matrices of every row anew beat sorting (same machine, compiled:
# 1 row 61 us against 135 us in a loop, 8 rows 255 us against 611 us grouped). Larger batches are one more graph.
SLOT_TOKENS = 16


def compute_experts_cpu(x_TD: Tensor, routing: Routing, w_gate_up_EPD: Tensor, w_down_EDF: Tensor, /) -> Tensor:
    """Pick by the number of tokens: one by one, all experts densely, or sorted and grouped.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    tokens, chosen = routing.experts_TK.shape
    if tokens <= LOOP_TOKENS:
        return compute_experts_loop(x_TD, routing, w_gate_up_EPD, w_down_EDF)
    if tokens <= DENSE_TOKENS and tokens * chosen >= 2 * w_down_EDF.shape[0]:
        return compute_experts_dense(x_TD, routing, w_gate_up_EPD, w_down_EDF)
    return compute_experts_grouped(x_TD, routing, w_gate_up_EPD, w_down_EDF)


def _experts(x: Tensor, weights: Tensor, experts: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    routing = Routing(weights, experts)
    if x.device.type == "cpu":
        return compute_experts_cpu(x, routing, w_gate_up, w_down)
    return compute_experts_grouped(x, routing, w_gate_up, w_down)


def _experts_fake(x: Tensor, weights: Tensor, experts: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    return x.new_empty(x.shape)


LIBRARY.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::experts", _experts_fake, lib=LIBRARY)


def compute_experts_op(x_TD: Tensor, routing: Routing, w_gate_up_EPD: Tensor, w_down_EDF: Tensor, /) -> Tensor:
    """Expert compute behind ``fmoe::experts``: free to look at the ids, traceable in every dtype."""
    y_TD: Tensor = torch.ops.fmoe.experts(x_TD, *routing, w_gate_up_EPD, w_down_EDF)
    return y_TD


def compute_experts_few(x_TD: Tensor, routing: Routing, w_gate_up_EPD: Tensor, w_down_EDF: Tensor, /) -> Tensor:
    """Decode inside a graph: the compiler fuses the gather of each row's matrices with the product.

    Returns:
        A tensor like x; the formula of ``compute_experts_grouped``.
    """
    if x_TD.shape[0] <= SLOT_TOKENS:
        return compute_experts_per_slot(x_TD, routing, w_gate_up_EPD, w_down_EDF)
    return compute_experts_op(x_TD, routing, w_gate_up_EPD, w_down_EDF)


def _delta_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    o, new_state = delta_chunked(q, k, v, g, beta, state)
    return o.contiguous(), new_state.clone() if new_state is state else new_state


def _delta_chunked_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


LIBRARY.impl("delta_chunked", _delta_chunked, "CompositeExplicitAutograd")
torch.library.register_fake("fmoe::delta_chunked", _delta_chunked_fake, lib=LIBRARY)


def delta_chunked_op(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor, /
) -> tuple[Tensor, Tensor]:
    """The chunk rule behind ``fmoe::delta_chunked``: its loop over chunks would give one graph per chunk count."""
    o_BTHV, new_BHKV = torch.ops.fmoe.delta_chunked(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    return o_BTHV, new_BHKV
