"""How the tensors of a checkpoint become parameters: values only, nothing is read here.

A family describes each parameter as a shape and the pieces that fill it. Whoever calls the family's
``build_params`` decides what filling means: reading safetensors, counting, or drawing random numbers.

Letters: E experts, S shared slots, D hidden, F expert width, P = 2F.
"""

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fmoe.functional.mlp import MLPParams
from fmoe.functional.moe import MoEParams, SharedParams, SharedPlan, keep_apart
from fmoe.functional.quant import Weight
from fmoe.functional.routing import RouterConfig

SCALE = "_scale_inv"  # added to the name of a tensor in FP8 blocks, that of its factors
DIFFER = "of the shared and the routed experts only one kind is in FP8 blocks"


class Piece(NamedTuple):
    """One checkpoint tensor and the place it takes in a parameter."""

    name: str  # tensor name in the checkpoint
    shape: tuple[int, ...]  # shape it must have there
    into: tuple[int | slice, ...] = ()  # index of the parameter that it fills; () is all of it
    take: Callable[[Tensor], Tensor] | None = None  # pure map from the stored tensor to parameter[into]
    shares: bool = False  # True where several pieces of one load read different parts of the same tensor
    # Where the tensor is a stack in MXFP4, uint8 [E, N, D / 32, 16], the name of its exponents, uint8 [E, N, D / 32];
    # ``take`` then gets the numbers of one matrix [N, D] after the other.
    exponents: str | None = None


class Fill(Protocol):
    """Make one parameter out of its pieces; ``names`` are the tensors that the checkpoint holds."""

    names: Container[str]

    def __call__(
        self,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        /,
        *,
        dtype: torch.dtype | None = None,
        by_columns: bool = False,
    ) -> Tensor:
        """Return a parameter of ``shape``.

        Args:
            shape: of the parameter.
            pieces: what fills it.
            dtype: None is the dtype the model is loaded in.
            by_columns: a matrix that may lie in memory column after column where that multiplies faster.
        """
        ...

    def weight(
        self, shape: Sequence[int], pieces: Sequence[Piece], /, *, parts: int = 1, by_columns: bool = False
    ) -> Weight:
        """Return a matrix or a stack that rows are multiplied with, in FP8 blocks where the pieces are stored so.

        Args:
            shape: of the parameter.
            pieces: what fills it.
            parts: 2 for gate and up rows, whose blocks start anew with the up rows.
            by_columns: as above.
        """
        ...


def plain(fill: Fill, name: str, shape: tuple[int, ...], /, *, dtype: torch.dtype | None = None) -> Tensor:
    """One checkpoint tensor as it is."""
    return fill(shape, [Piece(name, shape)], dtype=dtype)


def matrix(fill: Fill, name: str, shape: tuple[int, int], /) -> Weight:
    """One checkpoint tensor that rows are multiplied with."""
    return fill.weight(shape, [Piece(name, shape)], by_columns=True)


def zero_centred_norm(fill: Fill, name: str, size: int, /) -> Tensor:
    """The weight ``1 + w`` of a zero-centred norm, in float32."""
    return fill((size,), [Piece(name, (size,), take=_add_one)], dtype=torch.float32)


def rows(
    fill: Fill,
    parts: Sequence[Piece],
    columns: int | None = None,
    /,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Stack tensors along their rows."""
    placed, count = _one_below_another(parts, None)
    if columns is None:
        return fill((count,), placed, dtype=dtype)
    return fill((count, columns), placed, dtype=dtype, by_columns=True)


def matrix_rows(fill: Fill, parts: Sequence[Piece], columns: int, /, *, counts: Sequence[int] | None = None) -> Weight:
    """One matrix of several tensors' rows; ``counts`` are those of each part where ``take`` changes their number."""
    placed, count = _one_below_another(parts, counts)
    return fill.weight((count, columns), placed, by_columns=True)


def _one_below_another(parts: Sequence[Piece], counts: Sequence[int] | None) -> tuple[list[Piece], int]:
    placed, start = [], 0
    for part, count in zip(parts, counts or [part.shape[0] for part in parts], strict=True):
        placed.append(part._replace(into=(slice(start, start + count),)))
        start += count
    return placed, start


def gate_and_up(fill: Fill, prefix: str, width: int, hidden: int, /) -> MLPParams:
    """A dense SwiGLU block from ``gate_proj``, ``up_proj`` and ``down_proj``."""
    parts = [Piece(f"{prefix}.{part}_proj.weight", (width, hidden)) for part in ("gate", "up")]
    return MLPParams(matrix_rows(fill, parts, hidden), matrix(fill, f"{prefix}.down_proj.weight", (hidden, width)))


class ExpertNames(NamedTuple):
    """Names of one family's expert tensors below the layer's MoE prefix."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    experts: str = "experts"
    router: str = "gate.weight"
    shared: str = "shared_expert"
    shared_gate: str | None = None
    bias: str | None = None
    bias_is_row: bool = False  # the bias is stored as [1, E]


def expert_stacks(
    fill: Fill, prefix: str, router: RouterConfig, shared: SharedPlan, width: int, hidden: int, names: ExpertNames, /
) -> tuple[Weight, Weight]:
    """The stacks [E + S, P, D] and [E + S, D, F], from per-expert or stacked tensors, shared slots last."""
    count, total = router.num_experts, router.num_experts + shared.slots
    base = f"{prefix}.{names.experts}"
    first, second = slice(0, width), slice(width, 2 * width)
    if f"{base}.gate_up_proj" in fill.names:
        whole = (slice(0, count),)
        gate_up = [Piece(f"{base}.gate_up_proj", (count, 2 * width, hidden), whole)]
        down = [Piece(f"{base}.down_proj", (count, hidden, width), whole)]
    else:
        gate_up, down = [], []
        for e in range(count):
            gate_up.append(Piece(f"{base}.{e}.{names.gate}.weight", (width, hidden), (e, first)))
            gate_up.append(Piece(f"{base}.{e}.{names.up}.weight", (width, hidden), (e, second)))
            down.append(Piece(f"{base}.{e}.{names.down}.weight", (hidden, width), (e,)))
    for slot in range(shared.slots):
        part = slice(slot * width, (slot + 1) * width)
        for name, into in (("gate_proj", first), ("up_proj", second)):
            source = f"{prefix}.{names.shared}.{name}.weight"
            gate_up.append(Piece(source, (shared.width, hidden), (count + slot, into), partial(_take_rows, part), True))
        source = f"{prefix}.{names.shared}.down_proj.weight"
        down.append(Piece(source, (hidden, shared.width), (count + slot,), partial(_take_columns, part), True))
    return fill.weight((total, 2 * width, hidden), gate_up, parts=2), fill.weight((total, hidden, width), down)


def moe_params(
    fill: Fill, prefix: str, router: RouterConfig, shared: SharedPlan, width: int, hidden: int, names: ExpertNames, /
) -> MoEParams:
    """One MoE layer; the shared expert's gate joins the router where the shared expert joins the stacks."""
    kinds = {_is_quantised(fill.names, f"{prefix}.{part}", names) for part in (names.shared, names.experts)}
    if shared.width and len(kinds) > 1:
        shared = keep_apart(shared, DIFFER)
    dtype = torch.float32 if router.float32_logits else None
    parts = [Piece(f"{prefix}.{names.router}", (router.num_experts, hidden))]
    gate = f"{prefix}.{names.shared_gate}"
    if shared.slots and names.shared_gate:
        parts.append(Piece(gate, (1, hidden)))
    w_router_ED = rows(fill, parts, hidden, dtype=dtype)
    w_gate_up_EPD, w_down_EDF = expert_stacks(fill, prefix, router, shared, width, hidden, names)
    bias_E = None
    if names.bias is not None:
        shape = (1, router.num_experts) if names.bias_is_row else (router.num_experts,)
        bias = Piece(f"{prefix}.{names.bias}", shape, take=torch.flatten)
        bias_E = fill((router.num_experts,), [bias], dtype=torch.float32)
    apart = None
    if not shared.width and f"{prefix}.{names.shared}.down_proj.weight" in fill.names:
        # a shared expert of width 0 is stored too: its tensors must have that shape, and nothing of them is kept
        gate_and_up(fill, f"{prefix}.{names.shared}", 0, hidden)
        if names.shared_gate:
            rows(fill, [Piece(gate, (1, hidden))], hidden)
    if shared.width and not shared.slots:
        w_gate_1D = rows(fill, [Piece(gate, (1, hidden))], hidden) if names.shared_gate else None
        apart = SharedParams(gate_and_up(fill, f"{prefix}.{names.shared}", shared.width, hidden), w_gate_1D)
    return MoEParams(w_router_ED, w_gate_up_EPD, w_down_EDF, bias_E, apart)


def _is_quantised(stored: Container[str], prefix: str, names: ExpertNames) -> bool:
    """Tell whether the down projections of experts below ``prefix`` have factors: one, each by number, or stacked."""
    ends = ("down_proj.weight", f"0.{names.down}.weight", "down_proj")
    return any(f"{prefix}.{end}{SCALE}" in stored for end in ends)


def _add_one(w: Tensor) -> Tensor:
    return w.float() + 1.0


def _take_rows(part: slice, w: Tensor) -> Tensor:
    return w[part]


def _take_columns(part: slice, w: Tensor) -> Tensor:
    return w[:, part]
