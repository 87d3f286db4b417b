"""Layer shapes, random layers and timing that the scripts of the MoE kernels share.

Letters: T tokens, D hidden, E routed experts, K routed experts per token, S shared slots, F expert width.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fmoe.compile.kernels import Settings, default_settings
from fmoe.compile.settings import find_target
from fmoe.functional.routing import RouterConfig


class Shape(NamedTuple):
    """One MoE layer."""

    E: int
    K: int
    S: int
    D: int
    F: int
    gate_rows: int
    renormalize: bool

    @property
    def config(self) -> RouterConfig:
        return RouterConfig(self.E, self.K, renormalize=self.renormalize)


class Layer(NamedTuple):
    """Weights of one layer, shared slots stacked behind the routed experts."""

    w_router_RD: Tensor
    w_gate_up_EPD: Tensor
    w_down_EDF: Tensor


SHAPES = {
    "qwen3next": Shape(512, 10, 1, 2048, 512, 1, True),
    "qwen3": Shape(128, 8, 0, 2048, 768, 0, True),
    "mixtral": Shape(8, 2, 0, 4096, 14336, 0, True),
    "dsv2lite": Shape(64, 6, 2, 2048, 1408, 0, False),
}


def random_layer(shape: Shape, seed: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Layer:
    """Draw a layer whose router spreads the tokens nearly evenly."""
    rng = torch.Generator(device=device).manual_seed(seed)

    def draw(*sizes: int, fan: float) -> Tensor:
        return torch.randn(*sizes, generator=rng, device=device, dtype=dtype) * fan**-0.5

    experts = shape.E + shape.S
    return Layer(
        draw(shape.E + shape.gate_rows, shape.D, fan=shape.D / 4),
        draw(experts, 2 * shape.F, shape.D, fan=shape.D),
        draw(experts, shape.D, shape.F, fan=shape.F),
    )


def default_for(shape: Shape, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Settings:
    """Read the built-in table for the GPU that torch was built for."""
    major, minor = torch.cuda.get_device_capability()
    target = find_target("hip" if torch.version.hip else "cuda", f"sm_{major}{minor}")
    return default_settings(tokens, shape.E, shape.K, shape.S, shape.D, shape.F, dtype, target=target)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a function in a CUDA graph after three runs on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, samples: int = 20) -> float:
    """Median microseconds of a replay."""
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)
