"""Our MoE layer for a comparison with peers, and the measurements that its settings come from.

    layer(w, s)                                   one layer from plain weights; the form that peers' scripts load
    python -m bench.moe_kernels ceilings          copy and read rates, and the gap between launches
    python -m bench.moe_kernels time              the layer at each token count, and each kernel's share
    python -m bench.moe_kernels sweep             search settings, one kernel after the other; writes a table

Settings come from the table beside this file where it has the shape and token count, else from the built-in rule.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

# Another script may load this file by its path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.moe_shapes import SHAPES, Layer, Shape, candidate_tiles, capture, default_for, random_layer, time_graph
from fmoe.compile.kernels import Settings, Tile, run_moe_layer, settings_from_ints, settings_to_ints

TABLE = Path(__file__).with_name("moe_settings.json")
SEED = 1


def read_table(path: Path = TABLE) -> dict[str, dict[str, list[int]]]:
    """Read tuned settings: shape, then token count, as integers."""
    return json.loads(path.read_text()) if path.exists() else {}


def settings_for(name: str, shape: Shape, tokens: int, table: Mapping[str, Mapping[str, list[int]]]) -> Settings:
    """Give the tuned settings of a shape and token count, or the built-in ones."""
    values = table.get(name, {}).get(str(tokens))
    return settings_from_ints(values) if values else default_for(shape, tokens)


def stack_layer(w: Mapping[str, Tensor], shape: Shape) -> Layer:
    """Stack a shared expert behind the routed ones, in slots of their width."""
    if not shape.S:
        return Layer(w["gate"], w["w13"], w["w2"])
    gate, up = w["s13"].chunk(2)
    gate_up = torch.cat((gate.view(shape.S, shape.F, -1), up.view(shape.S, shape.F, -1)), 1)
    down = w["s2"].view(shape.D, shape.S, shape.F).transpose(0, 1)
    router = torch.cat((w["gate"], w["sg"])) if "sg" in w else w["gate"]
    return Layer(router, torch.cat((w["w13"], gate_up)), torch.cat((w["w2"], down)))


def layer(w: Mapping[str, Tensor], s: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Prepare one layer; w and s as the peers' script names them."""
    width = s["Fi"]
    shape = Shape(s["E"], s["K"], s["S"] // width, s["D"], width, int(s["gated"]), s["renorm"])
    name = next((known for known, other in SHAPES.items() if other == shape), "")
    table, stacks = read_table(), stack_layer(w, shape)

    def run(x_TD: Tensor) -> Tensor:
        settings = settings_for(name, shape, x_TD.shape[0], table)
        return run_layer(x_TD, stacks, shape, settings)

    return run


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
    """Time the table's settings, and variants of them."""
    table = read_table()
    for name in names:
        shape = SHAPES[name]
        layers = [random_layer(shape, SEED + i) for i in range(sets_of(shape))]
        for count in tokens:
            x_TD = torch.randn(count, shape.D, device="cuda", dtype=torch.bfloat16)
            settings = settings_for(name, shape, count, table)
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


def warm(name: str, tokens: int, values: list[int]) -> None:
    """Compile the kernels of one candidate, launching none: another process may be measuring."""
    shape, launch = SHAPES[name], JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, device="meta", dtype=torch.bfloat16)

    experts = shape.E + shape.S
    stacks = Layer(
        empty(shape.E + shape.gate_rows, shape.D),
        empty(experts, 2 * shape.F, shape.D),
        empty(experts, shape.D, shape.F),
    )
    with patch.object(JITFunction, "run", compile_only):
        run_layer(empty(tokens, shape.D), stacks, shape, settings_from_ints(values))


def starts(shape: Shape, tokens: int) -> list[Settings]:
    """Give settings of each path that may win at a token count."""
    plain = default_for(shape, tokens)
    if tokens <= 2:
        return [plain]
    found = {plain.path: plain}
    for other in (2, 4, 8, 16, 64, 256, 2048):
        settings = default_for(shape, other)
        found.setdefault(settings.path, settings)
    allowed = ["slots"] * (tokens <= 16) + ["grouped"] * (tokens <= 512) + ["sorted"] * (tokens >= 16)
    picked = [replace(s, fuse_choice=False) for path, s in found.items() if path in allowed]
    picked = [s for s in picked if s.path != "sorted" or tokens >= 16]
    described = [replace(s, descriptors=True) for s in picked if s.path == "sorted"]
    if tokens >= 2048 and torch.version.cuda:
        gate_up, down = Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4)
        described += [replace(s, gate_up=gate_up, down=down, programs=132) for s in described]
    picked += described
    grouped = [s for s in picked if s.path == "grouped"]
    turned = [replace(s, owners=not s.owners) for s in grouped if tokens * shape.K <= 2 * shape.E]
    return picked + turned


def neighbours(settings: Settings, shape: Shape, tokens: int, part: str) -> list[Settings]:
    """Give settings that differ in one kernel."""
    path = settings.path
    if part == "flags":
        changed = [replace(settings, pdl=not settings.pdl)]
        changed += [replace(settings, splits=n) for n in (1, 2, 4, 8) if settings.router.tokens]
        if path == "slots" and tokens <= 4:
            changed.append(replace(settings, fuse_choice=not settings.fuse_choice))
        if path == "sorted":
            changed += [replace(settings, group=n) for n in (1, 4, 8, 16)]
            changed += [replace(settings, programs=n) for n in (0, 132, 264, 396)]
            changed += [replace(settings, descriptors=not settings.descriptors)]
        if path == "grouped":
            changed.append(replace(settings, token_down=not settings.token_down, down=candidate_tiles(
                shape, "token" if not settings.token_down else "grouped", tokens, "down")[8]))  # fmt: skip
        if path != "slots":
            changed += [replace(settings, combine=n) for n in (256, 512, 2048)]
        return changed
    kind = "token" if settings.token_down and part == "down" else path
    tiles = candidate_tiles(shape, kind, tokens, part)
    if path == "sorted" and part == "gate_up":
        return [replace(settings, gate_up=tile, down=replace(settings.down, tokens=tile.tokens)) for tile in tiles]
    if path == "sorted" and part == "down":
        tiles = [tile for tile in tiles if tile.tokens == settings.gate_up.tokens]
    return [replace(settings, **{part: tile}) for tile in tiles]


def search(name: str, tokens: int, layers: list[Layer], pool: ProcessPoolExecutor, budget_s: float) -> Settings:
    """Better one kernel after the other, from each start, until the time is over; print what was found."""
    shape = SHAPES[name]
    x_TD = torch.randn(tokens, shape.D, device="cuda", dtype=torch.bfloat16)
    times: dict[Settings, float] = {}
    deadline = time.monotonic() + budget_s

    def measure(candidates: list[Settings]) -> None:
        new = [c for c in dict.fromkeys(candidates) if c not in times]
        jobs = [(c, pool.submit(warm, name, tokens, settings_to_ints(c))) for c in new]
        for candidate, job in jobs:
            if time.monotonic() > deadline:
                job.cancel()
                continue
            try:
                job.result()
                times[candidate] = time_settings(layers, x_TD, shape, candidate, 7)
            except Exception as error:  # a candidate that does not compile or launch is no candidate
                times[candidate] = float("inf")
                print("   failed", settings_to_ints(candidate), str(error)[:90].replace("\n", " "), flush=True)

    measure(starts(shape, tokens))
    ranked = sorted(times, key=times.__getitem__)
    for settings in ranked:
        print(f"   start {settings.path} owners={settings.owners} {times[settings]:.1f}", flush=True)
    best = ranked[0]
    contenders = [s for s in ranked[:3] if times[s] < 1.25 * times[best]]
    results = []
    for current in contenders:
        for part in ("gate_up", "down", "router", "flags"):
            family = [current, *neighbours(current, shape, tokens, part)]
            measure(family)
            current = min((s for s in family if s in times), key=times.__getitem__)
        results.append(current)
    best = min(results, key=times.__getitem__)
    bound = limit(layers, x_TD, shape)
    default = times[default_for(shape, tokens)] if default_for(shape, tokens) in times else float("nan")
    print(f"{name} T={tokens} best {times[best]:.1f} us (default {default:.1f}, limit {bound:.1f}) {best}", flush=True)
    return best


def sweep(names: list[str], tokens: list[int], budget_s: float, out: Path) -> None:
    """Search settings for all shapes and token counts, and write the table after each."""
    table = read_table(out)
    for name in names:
        layers = [random_layer(SHAPES[name], SEED + i) for i in range(sets_of(SHAPES[name]))]
        with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
            for count in tokens:
                best = search(name, count, layers, pool, budget_s)
                table.setdefault(name, {})[str(count)] = settings_to_ints(best)
                out.write_text(json.dumps(table, indent=1))
        del layers
        torch.cuda.empty_cache()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("ceilings", "time", "sweep"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,64,256,2048,16384")
    parser.add_argument("--seconds", type=float, default=20.0, help="sweep: budget of one shape and token count")
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    names = arguments.shapes.split(",")
    tokens = [int(count) for count in arguments.tokens.split(",")]
    if arguments.what == "ceilings":
        print_ceilings()
    elif arguments.what == "time":
        print_times(names, tokens, {"table": lambda s: s, "pdl": lambda s: replace(s, pdl=not s.pdl)})
    else:
        sweep(names, tokens, arguments.seconds, arguments.out)


if __name__ == "__main__":
    main()
