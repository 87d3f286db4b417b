"""Compiled graphs: one per kind of layer and variant, whatever the number of layers.

Bucket policy. Batch, tokens and cache slots are symbolic, so one graph serves every size from 2 up; torch.compile
specialises sizes 0 and 1, which leaves four variants of each layer kind (batch 1 or more, tokens 1 or more). Two
sizes are rounded so that they never are 1 and never meet: a cache holds a multiple of 64 slots plus 64, and a step
looks at a multiple of 64 of them. Prefill runs row by row in chunks, decode in batches.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLOTS = 64
MAX_GRAPHS = 64  # per function; far above what any mix of sizes needs

Layer = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Steps:
    """The functions that a step calls: one per layer kind, and the head."""

    layers: Mapping[str, Layer]
    logits: Callable[..., Tensor]
    compiled: bool


def cache_slots(tokens: int) -> int:
    """Slots that a cache for ``tokens`` positions gets."""
    return visible_slots(tokens) + SLOTS


def visible_slots(tokens: int) -> int:
    """Slots that a step looks at when the longest row will have ``tokens`` positions."""
    return max(-(-tokens // SLOTS), 1) * SLOTS


def compile_steps(
    layers: Mapping[str, Layer],
    logits: Callable[..., Tensor],
    *,
    device: torch.device,
    backend: str = "inductor",
) -> Steps:
    """Compile each function when it is first called; nothing of the compiler is loaded before.

    Args:
        layers: one function per layer kind, ``(x [B, T, D], params, ...)``.
        logits: the head, ``(x [rows, D], ...)``.
        device: where they will run.
        backend: of torch.compile.
    """

    def compiled(name: str, function: Layer) -> Layer:
        return _compile_lazily(name, function, device, backend)

    return Steps({kind: compiled(kind, layer) for kind, layer in layers.items()}, compiled("logits", logits), True)


class _Graphs(NamedTuple):
    """The graphs of one function for one use, and the variants that were traced."""

    get: Callable[[], Callable[..., Tensor]]
    traced: set[tuple[int, ...]]


def _compile_lazily(
    name: str, function: Callable[..., Tensor], device: torch.device, backend: str
) -> Callable[..., Tensor]:
    # On a CPU the small kernels of a decode step cost less than the Python that calls them: C++ calls them there.
    fast = {"cpp_wrapper": True} if backend == "inductor" and device.type == "cpu" else {}
    decode, prefill = _make_graphs(name, function, backend, fast), _make_graphs(name, function, backend, {})

    def call(x: Tensor, params: Any, *arguments: Any) -> Tensor:
        get, traced = decode if x.dim() == 2 or x.shape[1] == 1 else prefill
        variant = (id(params), *(size == 1 for size in x.shape[:-1]))
        if variant in traced:
            return get()(x, params, *arguments)
        # Marks and the limit matter while tracing alone; this may trace. Each dense or sparse layer, dtype and
        # 0/1 variant is one more graph of the same code object, and torch's own limit is 8.
        _mark_sizes(x, arguments)
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            y = get()(x, params, *arguments)
        traced.add(variant)
        return y

    return call


def _make_graphs(name: str, function: Callable[..., Tensor], backend: str, options: dict[str, Any]) -> _Graphs:
    def graph(*arguments: Any) -> Tensor:
        return function(*arguments)

    # Graphs are kept with the code object. A code of its own for each function of each model keeps their graphs
    # apart, so that a call searches only its own.
    graph.__code__ = graph.__code__.replace(co_name=name)

    @functools.cache
    def compiled() -> Callable[..., Tensor]:
        return torch.compile(graph, fullgraph=True, dynamic=False, backend=backend, options=options or None)

    return _Graphs(compiled, set())


# Dimensions whose size changes from step to step, by the letters that end a tensor's name.
_SYMBOLIC = {
    "k_BJMC": (0, 2),
    "v_BJMC": (0, 2),
    "latent_BMR": (0, 1),
    "window_mask_BTM": (0, 1, 2),
    "window_BWN": (0,),
    "state_BHKV": (0,),
    "positions_BT": (0, 1),
    "cos_BTR": (0, 1),
    "sin_BTR": (0, 1),
    "mask_BTM": (0, 1, 2),
}


def _mark_sizes(x: Tensor, arguments: tuple[Any, ...]) -> None:
    for dim in range(x.dim() - 1):
        _mark(x, dim)
    for argument in arguments:
        for name in getattr(argument, "_fields", ()):
            for dim in _SYMBOLIC.get(name, ()):
                _mark(getattr(argument, name), dim)


def _mark(tensor: Tensor | None, dim: int) -> None:
    if tensor is not None and tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)
