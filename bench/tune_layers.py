"""What the search reads of a model, for layers that were drawn.

Letters: D hidden, E routed experts, S shared slots, F expert width, N rows of a projection, M of them unquantised.
"""

from typing import NamedTuple

import torch

from bench.moe_shapes import Shape, random_layer
from fmoe.functional.moe import MoEParams
from fmoe.functional.quant import FP8, Fp8, Weight, count_blocks

DRAWN = 64  # matrices at once: a whole stack in a wider dtype takes gigabytes
FP8_STD = 32.0  # of the stored values, whose largest is 448


class RandomLayer(NamedTuple):
    """What the search reads of a model's layer."""

    mlp: MoEParams | Weight


class RandomParams(NamedTuple):
    """What the search reads of a model's parameters."""

    layers: tuple[RandomLayer, ...]


def draw_fp8(*shape: int, rng: torch.Generator, parts: int = 1) -> Fp8:
    """Draw values of FP8, and factors that bring them to a deviation of 1 / sqrt(columns)."""
    *outer, rows, columns = shape
    w = torch.empty(shape, dtype=FP8, device=rng.device)
    for part in w.view(-1, rows, columns).split(DRAWN):
        part.copy_(torch.randn(part.shape, generator=rng, device=rng.device, dtype=torch.bfloat16) * FP8_STD)
    blocks = (*outer, count_blocks(rows, parts=parts), count_blocks(columns))
    scale = (torch.rand(blocks, generator=rng, device=rng.device) + 0.5) * columns**-0.5 / FP8_STD
    return Fp8(w, scale)


def draw_experts(shape: Shape, seed: int, *, dtype: torch.dtype, device: torch.device) -> MoEParams:
    """Draw a layer; where its experts are in FP8 blocks, its router is in bfloat16."""
    if dtype != FP8:
        return MoEParams(*random_layer(shape, seed, dtype=dtype, device=str(device)), None, None)
    rng = torch.Generator(device).manual_seed(seed)
    rows, experts = shape.E + shape.gate_rows, shape.E + shape.S
    router = torch.randn(rows, shape.D, generator=rng, device=device, dtype=torch.bfloat16) * (shape.D / 4) ** -0.5
    gate_up = draw_fp8(experts, 2 * shape.F, shape.D, rng=rng, parts=2)
    return MoEParams(router, gate_up, draw_fp8(experts, shape.D, shape.F, rng=rng), None, None)


def draw_matrix(
    outputs: int, hidden: int, seed: int, *, dtype: torch.dtype, device: torch.device, rest: int = 0
) -> Weight:
    """Draw a projection; in FP8 blocks its last ``rest`` rows are bfloat16."""
    rng = torch.Generator(device).manual_seed(seed)
    if dtype != FP8:
        return torch.randn(outputs, hidden, generator=rng, device=device, dtype=dtype)
    w = draw_fp8(outputs - rest, hidden, rng=rng)
    rest_MD = torch.randn(rest, hidden, generator=rng, device=device, dtype=torch.bfloat16) * hidden**-0.5
    return w._replace(rest_MD=rest_MD if rest else None)
