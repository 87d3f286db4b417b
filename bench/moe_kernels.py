"""What bounds a mixture-of-experts layer on a GPU, and where its time goes.

    python -m bench.moe_kernels ceilings          copy and read rates, and the gap between launches
    python -m bench.moe_kernels time              the layer as planned at each token count, and each kernel's share

``python -m bench.tune_shapes`` searches the settings, and ``bench.moe_peers`` compares with other libraries.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.moe_shapes import SHAPES, Layer, Shape, capture, random_layer, time_graph
from fmoe.compile.kernels import Settings, run_moe_layer, settings_from_ints
from fmoe.compile.plan import moe_key, plan_to_ints, select_implementation
from fmoe.planning import plan_layers

SEED = 1


def planned_settings(shape: Shape, tokens: int) -> Settings:
    """Give the settings that the plan of this machine has for a shape and token count."""
    key = moe_key(shape.E, shape.K, shape.S, shape.gate_rows, shape.D, shape.F, torch.bfloat16)
    (plan,) = plan_layers([key], torch.device("cuda"), requested="triton", tune="cached")
    return settings_from_ints(select_implementation(plan_to_ints(plan), tokens)[1])


def run_layer(x_TD: Tensor, stacks: Layer, shape: Shape, settings: Settings) -> Tensor:
    """Run one layer with the given settings."""
    router, gate_up, down = stacks
    return run_moe_layer(x_TD, router, None, gate_up, down, shape.config, settings)


@triton.jit
def read_kernel(p, o, R: tl.constexpr, B: tl.constexpr):
    """Sum R blocks of B values: a pure read."""
    pid = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((B,), tl.float32)
    for i in tl.range(0, R, num_stages=4):
        acc += tl.load(p + (pid * R + i) * B + tl.arange(0, B)).to(tl.float32)
    tl.store(o + pid, tl.sum(acc, 0))


@triton.jit
def gap_kernel(p, PDL: tl.constexpr):
    """Do nothing but wait for the kernel before."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(p + tl.program_id(0), 1.0)


def print_ceilings() -> None:
    """Measure what bounds the layer."""
    a = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    copy = 2 * a.numel() * 2 / time_graph(capture(lambda: b.copy_(a))) / 1e6
    for block, repeats, warps in ((4096, 32, 8), (2048, 32, 4), (8192, 16, 8), (4096, 8, 8)):
        programs = a.numel() // (block * repeats)
        o = torch.empty(programs, device="cuda")
        run = partial(read_kernel[(programs,)], a, o, repeats, block, num_warps=warps)
        read = a.numel() * 2 / time_graph(capture(run)) / 1e6
        print(f"copy {copy:.2f} TB/s   read {read:.2f} TB/s with blocks of {block} x {repeats}", flush=True)
    o = torch.empty(4096, device="cuda")
    for pdl in (False, True):
        for programs in (1, 128, 512):
            options: dict[str, Any] = {"launch_pdl": True} if pdl else {}

            def run_many(programs: int = programs, pdl: bool = pdl, options: dict[str, Any] = options) -> None:
                for _ in range(200):
                    gap_kernel[(programs,)](o, pdl, num_warps=4, **options)

            print(
                f"launch gap, {programs} programs, pdl={pdl}: {time_graph(capture(run_many)) / 200:.2f} us", flush=True
            )


def sets_of(shape: Shape) -> int:
    """Weight sets to rotate over, so that nothing stays in the L2 cache."""
    return 3 if shape.F > 8192 else 6


def time_settings(layers: list[Layer], x_TD: Tensor, shape: Shape, settings: Settings, samples: int = 12) -> float:
    """Microseconds of one layer in a graph over all weight sets."""
    graph = capture(lambda: [run_layer(x_TD, stacks, shape, settings) for stacks in layers])
    return time_graph(graph, samples) / len(layers)


def limit(layers: list[Layer], x_TD: Tensor, shape: Shape) -> float:
    """Microseconds that the bytes or the products need, at 4.3 TB/s and 790 TFLOP/s."""
    hit = 0.0
    for stacks in layers:
        logits = x_TD @ stacks.w_router_RD[: shape.E].T
        hit += len(logits.topk(shape.K).indices.unique()) / len(layers)
    tokens = x_TD.shape[0]
    weights = (hit + shape.S) * 3 * shape.F * shape.D + shape.E * shape.D
    products = 2 * tokens * shape.D * (3 * shape.F * (shape.K + shape.S) + shape.E)
    return max((weights + 2 * tokens * shape.D) * 2 / 4.3e6, products / 790e6)


def print_profile(layers: list[Layer], x_TD: Tensor, shape: Shape, settings: Settings) -> None:
    """Print microseconds of each kernel of one layer."""
    graph = capture(lambda: [run_layer(x_TD, stacks, shape, settings) for stacks in layers])
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    parts = {e.key: e.self_device_time_total / (3 * len(layers)) for e in profile.key_averages()}
    print("    " + "  ".join(f"{key[:24]} {us:.1f}" for key, us in parts.items() if us > 0.05), flush=True)


def print_times(names: list[str], tokens: list[int], variants: Mapping[str, Callable[[Settings], Settings]]) -> None:
    """Time the plan's settings, and variants of them."""
    for name in names:
        shape = SHAPES[name]
        layers = [random_layer(shape, SEED + i) for i in range(sets_of(shape))]
        for count in tokens:
            x_TD = torch.randn(count, shape.D, device="cuda", dtype=torch.bfloat16)
            settings = planned_settings(shape, count)
            bound = limit(layers, x_TD, shape)
            for label, change in variants.items():
                us = time_settings(layers, x_TD, shape, change(settings), 20)
                print(
                    f"{name:10s} T={count:<6d} {label:8s} {us:9.1f} us  limit {bound:8.1f}  x{us / bound:.2f}",
                    flush=True,
                )
            print_profile(layers, x_TD, shape, settings)
        del layers
        torch.cuda.empty_cache()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ceilings", "time"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,64,256,2048,16384")
    arguments = parser.parse_args()
    if arguments.what == "ceilings":
        print_ceilings()
        return
    tokens = [int(count) for count in arguments.tokens.split(",")]
    variants = {"planned": lambda s: s, "pdl": lambda s: replace(s, pdl=not s.pdl)}
    print_times(arguments.shapes.split(","), tokens, variants)


if __name__ == "__main__":
    main()
