"""Kernels over weights in FP8 blocks: held to dequantised weights first, then timed, with a small search of settings.

    python -m bench.fp8_kernels                             Qwen3-Next's MoE layer and its projections
    python -m bench.fp8_kernels --layer 1 --rows "" --seconds 60 --out found.json

Each figure is the median replay of a CUDA graph over so many weight sets that none is in the cache when it is read.

Letters: T tokens, D hidden, E routed experts, K routed experts per token, S shared slots, F expert width, N rows of a
projection, M unquantised rows behind them.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from bench.moe_shapes import SHAPES, capture, time_graph
from bench.tune_layers import draw_fp8
from fmoe.compile.kernels import Settings, Tile, default_settings, route_tokens, run_moe_layer, settings_to_ints
from fmoe.compile.kernels.fp8 import read_fp8
from fmoe.compile.kernels.linear import LinearSettings, default_linear_settings, linear_to_ints, run_linear
from fmoe.compile.settings import find_target
from fmoe.functional.experts import compute_experts_loop
from fmoe.functional.quant import FP8, Fp8, count_blocks, read_experts
from fmoe.functional.routing import Routing

SHAPE = SHAPES["qwen3next"]
# N, M, D
PROJECTIONS = {"delta in": (12288, 64, 2048), "attention in": (9216, 0, 2048), "out": (2048, 0, 4096)}
LAYERS = 6  # weight sets of the MoE layer
CACHE_BYTES = 192_000_000  # three times the L2 cache of an H200
SHARED_BYTES = 227_000
DTYPE = torch.bfloat16
SEED = 1
SAMPLED = 16  # tokens that are held to the reference

S = TypeVar("S")
MoELayer = tuple[Tensor, Fp8, Fp8]


@dataclass(slots=True)
class Result:
    """What was measured of one operator at one token count."""

    name: str
    tokens: int
    error: float  # relative to float32 over the dequantised weights
    torch_error: float  # of torch in bfloat16 over them
    moved_bytes: float
    default: list[int]
    default_us: float = 0.0
    best: list[int] = field(default_factory=list)
    best_us: float = 0.0
    gbps: float = 0.0  # of the best
    tried: dict[str, float] = field(default_factory=dict)


def draw_layer(seed: int) -> MoELayer:
    """Draw a layer whose router spreads the tokens nearly evenly."""
    rng = torch.Generator(device="cuda").manual_seed(seed)
    rows, experts = SHAPE.E + SHAPE.gate_rows, SHAPE.E + SHAPE.S
    router = torch.randn(rows, SHAPE.D, generator=rng, device="cuda", dtype=DTYPE) * (SHAPE.D / 4) ** -0.5
    gate_up = draw_fp8(experts, 2 * SHAPE.F, SHAPE.D, rng=rng, parts=2)
    return router, gate_up, draw_fp8(experts, SHAPE.D, SHAPE.F, rng=rng)


def run_layer(x_TD: Tensor, layer: MoELayer, settings: Settings) -> Tensor:
    """Run the whole layer, router included."""
    router, gate_up, down = layer
    return run_moe_layer(x_TD, router, None, gate_up, down, SHAPE.config, settings)


def relative(y: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    error = ((y.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def check(name: str, run: Callable[[], Tensor], expected: Tensor, torch_error: float) -> float:
    """Hold a result to the expected one, within 1.5 times torch's error in bfloat16, and to itself; give its error.

    Raises:
        ValueError: it is further off, or differs when repeated.
    """
    first = run()
    torch.full_like(first, torch.nan)  # the allocator gives this memory to a result
    error = relative(first[: len(expected)], expected)
    if not error <= 1.5 * torch_error:
        raise ValueError(f"{name}: error {error:.2e} must be at most 1.5 times that of torch, {torch_error:.2e}")
    if not torch.equal(run(), first):
        raise ValueError(f"{name}: a repeated run must be bitwise equal; it is not")
    return error


def expect_layer(x_TD: Tensor, layer: MoELayer, settings: Settings) -> tuple[Tensor, float]:
    """Compute sampled tokens in float32 over dequantised weights, and say how far torch in bfloat16 is from it."""
    router, gate_up, down = layer
    routing, _ = route_tokens(x_TD, router, None, SHAPE.config, settings, slots=SHAPE.S)
    routing = Routing(routing.weights_TK[:SAMPLED], routing.experts_TK[:SAMPLED])
    x_TD = x_TD[:SAMPLED]
    rows = []
    for x_D, weights, ids in zip(x_TD.float(), routing.weights_TK, routing.experts_TK.tolist(), strict=True):
        y_D = torch.zeros_like(x_D)
        for weight, e in zip(weights, ids, strict=True):
            gate, up = (read_experts(gate_up, e, torch.float32, parts=2) @ x_D).chunk(2)
            y_D += weight * (read_experts(down, e, torch.float32) @ (F.silu(gate) * up))
        rows.append(y_D)
    expected = torch.stack(rows)
    return expected, relative(compute_experts_loop(x_TD, routing, gate_up, down), expected)


def default_layer(tokens: int) -> Settings:
    """Give the settings of the rule."""
    major, minor = torch.cuda.get_device_capability()
    target = find_target("hip" if torch.version.hip else "cuda", f"sm_{major}{minor}")
    return default_settings(tokens, SHAPE.E, SHAPE.K, SHAPE.S, SHAPE.D, SHAPE.F, FP8, target=target)


def layer_bytes(layers: Sequence[MoELayer], x_TD: Tensor) -> float:
    """Count the bytes that a layer must read: the experts hit, the router, and x twice."""
    hit = [len((x_TD @ router[: SHAPE.E].T).topk(SHAPE.K).indices.unique()) for router, _, _ in layers]
    experts = statistics.mean(hit) + SHAPE.S
    return experts * 3 * SHAPE.F * SHAPE.D + 2 * SHAPE.D * (SHAPE.E + SHAPE.gate_rows + 2 * x_TD.shape[0])


VECTORS = (
    (2, 1024, 2), (2, 2048, 4), (4, 512, 2), (4, 512, 4), (4, 1024, 4), (4, 2048, 8), (8, 256, 2), (8, 256, 4),
    (8, 512, 2), (8, 512, 4), (8, 512, 8), (8, 1024, 4), (8, 1024, 8), (16, 128, 2), (16, 128, 4), (16, 256, 4),
    (16, 512, 4), (16, 512, 8), (32, 128, 4), (32, 256, 8),
)  # fmt: skip
DOTS = ((32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8))


def layer_tiles(settings: Settings, part: str) -> list[Tile]:
    """List blocks of one kernel, with the stages that the settings have."""
    matrices, columns = (2, SHAPE.D) if part == "gate_up" else (1, SHAPE.F)
    tile: Tile = getattr(settings, part)
    if settings.path == "slots" or (part == "down" and settings.token_down):
        shapes = [(1, *shape) for shape in VECTORS if shape[1] <= columns]
    else:
        blocks = {"grouped": (16,), "sorted": (32, 64, 128)}[settings.path]
        if settings.path == "sorted" and part == "down":
            blocks = (tile.tokens,)
        shapes = [(block, *shape) for block in blocks for shape in DOTS if block < 128 or shape[2] == 8]
    stages = [(tile.stages, shape) for shape in shapes] + [
        (n, (tile.tokens, tile.rows, tile.depth, tile.warps)) for n in (2, 3, 4, 5, 6)
    ]
    found = [Tile(*shape, n) for n, shape in stages]
    return [t for t in found if (matrices * t.rows + 2 * t.tokens) * t.depth * t.stages <= SHARED_BYTES]


def layer_steps(settings: Settings, tokens: int, step: str) -> list[Settings]:
    """List settings that differ in one respect."""
    if step == "gate_up":
        tiles = layer_tiles(settings, "gate_up")
        if settings.path != "sorted":
            return [replace(settings, gate_up=tile) for tile in tiles]
        return [replace(settings, gate_up=t, down=replace(settings.down, tokens=t.tokens)) for t in tiles]
    if step == "down":
        return [replace(settings, down=tile) for tile in layer_tiles(settings, "down")]
    changed = [replace(settings, pdl=not settings.pdl)]
    if settings.path == "slots":
        changed += [replace(settings, fuse_choice=not settings.fuse_choice)] if tokens <= 8 else []
        changed += [replace(settings, router=Tile(0, rows, 2048, 4, 2)) for rows in (1, 2, 4)]
    if settings.path == "grouped":
        changed += [replace(settings, owners=not settings.owners)]
        changed += [replace(settings, token_down=True, down=Tile(1, rows, 512, 4, 4)) for rows in (4, 8)]
    if settings.path == "sorted":
        changed += [replace(settings, group=n) for n in (1, 4, 16)]
        changed += [replace(settings, programs=n) for n in (132, 264)]
    return changed


def other_paths(tokens: int) -> list[Settings]:
    """List the rule's settings of other paths that may win."""
    found = [replace(default_layer(count), fuse_choice=False) for count in (2, 8, 64, 2048)]
    allowed = ["slots"] * (tokens <= 16) + ["grouped"] * (2 <= tokens <= 512) + ["sorted"] * (tokens >= 16)
    return [settings for settings in found if settings.path in allowed]


def compile_only(call: Callable[[], object]) -> None:
    """Compile the kernels that a call would launch, launching none: another process may be measuring."""
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    with patch.object(JITFunction, "run", run):
        call()


def empty_fp8(*shape: int, parts: int = 1) -> Fp8:
    """Give FP8 blocks on the meta device."""
    blocks = (*shape[:-2], count_blocks(shape[-2], parts=parts), count_blocks(shape[-1]))
    return Fp8(torch.empty(shape, dtype=FP8, device="meta"), torch.empty(blocks, device="meta"))


def warm_layer(tokens: int, settings: Settings) -> None:
    """Compile one candidate of the layer."""
    experts = SHAPE.E + SHAPE.S
    router = torch.empty(SHAPE.E + SHAPE.gate_rows, SHAPE.D, dtype=DTYPE, device="meta")
    stacks = empty_fp8(experts, 2 * SHAPE.F, SHAPE.D, parts=2), empty_fp8(experts, SHAPE.D, SHAPE.F)
    x_TD = torch.empty(tokens, SHAPE.D, dtype=DTYPE, device="meta")
    compile_only(lambda: run_layer(x_TD, (router, *stacks), settings))


def warm_linear(shape: tuple[int, int, int], tokens: int, settings: LinearSettings) -> None:
    """Compile one candidate of a projection."""
    outputs, rest, hidden = shape
    w = empty_fp8(outputs, hidden)
    if rest:
        w = w._replace(rest_MD=torch.empty(rest, hidden, dtype=DTYPE, device="meta"))
    compile_only(lambda: run_linear(torch.empty(tokens, hidden, dtype=DTYPE, device="meta"), w, settings))


class Search:
    """Candidates of one operator and the microseconds of those that were measured."""

    def __init__(self, warm: Callable[[Any], Any], run: Callable[[Any], float], seconds: float) -> None:
        self.warm, self.run = warm, run
        self.deadline = time.monotonic() + seconds
        self.times: dict[Any, float] = {}

    def measure(self, candidates: Iterable[Any]) -> Any:
        """Time what is new until the time is over, the first one in any case, and give the best of all."""
        jobs = {c: self.warm(c) for c in dict.fromkeys(candidates) if c not in self.times}
        for candidate, job in jobs.items():
            if self.times and time.monotonic() > self.deadline:
                job.cancel()
                continue
            try:
                job.result()
            except Exception as error:  # what does not compile is no candidate
                print(f"    {candidate}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            self.times[candidate] = self.run(candidate)
        return min(self.times, key=self.times.__getitem__)


def finish(result: Result, search: Search, default: S, best: S, write: Callable[[Any], list[int]]) -> Result:
    """Time the default and the best once more, in turns, and fill the result in."""
    samples: dict[Any, list[float]] = {default: [], best: []}
    for settings in [default, best, best, default] * 2:
        samples[settings].append(search.run(settings))
    result.default_us, result.best_us = (statistics.median(samples[s]) for s in (default, best))
    result.best = write(best)
    result.gbps = result.moved_bytes / result.best_us / 1e3
    result.tried = {",".join(map(str, write(s))): round(us, 2) for s, us in search.times.items()}
    return result


def measure_layer(layers: list[MoELayer], tokens: int, pool: ProcessPoolExecutor, seconds: float) -> Result:
    """Check and time the MoE layer at one token count, and better its settings one kernel after the other."""
    x_TD = torch.randn(tokens, SHAPE.D, device="cuda", dtype=DTYPE)
    default = default_layer(tokens)
    expected, torch_error = expect_layer(x_TD, layers[0], default)

    def check_settings(settings: Settings) -> float:
        run = partial(run_layer, x_TD, layers[0], settings)
        return check(f"layer T={tokens} {settings}", run, expected, torch_error)

    def timed(settings: Settings) -> float:
        check_settings(settings)
        graph = capture(lambda: [run_layer(x_TD, layer, settings) for layer in layers])
        return time_graph(graph, 9) / len(layers)

    error = check_settings(default)
    search = Search(lambda settings: pool.submit(warm_layer, tokens, settings), timed, seconds)
    search.measure([default])
    best = search.measure(other_paths(tokens))
    for step in ("gate_up", "down", "launch", "gate_up"):
        best = search.measure(layer_steps(best, tokens, step))
    moved = layer_bytes(layers, x_TD)
    result = Result("moe layer", tokens, error, torch_error, moved, settings_to_ints(default))
    return finish(result, search, default, best, settings_to_ints)


def linear_candidates(shape: tuple[int, int, int], tokens: int) -> list[LinearSettings]:
    """List blocks of a projection."""
    outputs, _, hidden = shape
    few = outputs * tokens <= 8192
    vectors = [(1, 2048, 4), (1, 4096, 4), *VECTORS]
    found = [
        LinearSettings(rows, depth, warps, stages, 1, dot=False, pdl=False)
        for rows, depth, warps in vectors
        for stages in (1, 3, 5)
        if depth <= hidden and rows * 64 <= outputs and (tokens == 1 or few)
    ]
    if tokens > 1:
        found += [
            LinearSettings(rows, depth, warps, stages, 1, dot=True, pdl=False)
            for rows, depth, warps in ((16, 128, 1), (16, 128, 2), (16, 128, 4), (32, 128, 4), *DOTS[1:])
            for stages in (3, 5)
            if rows * 64 <= outputs
        ]
    return found


def measure_linear(name: str, tokens: int, pool: ProcessPoolExecutor, seconds: float) -> Result:
    """Check and time one projection at one token count, and search its settings."""
    outputs, rest, hidden = shape = PROJECTIONS[name]
    rng = torch.Generator(device="cuda").manual_seed(SEED)
    weights = [draw_fp8(outputs, hidden, rng=rng) for _ in range(max(3, -(-CACHE_BYTES // (outputs * hidden))))]
    if rest:
        rests = torch.randn(len(weights), rest, hidden, generator=rng, device="cuda", dtype=DTYPE) * hidden**-0.5
        weights = [w._replace(rest_MD=rest_MD) for w, rest_MD in zip(weights, rests, strict=True)]
    x_TD = torch.randn(tokens, hidden, generator=rng, device="cuda", dtype=DTYPE)
    expected = x_TD.double() @ read_fp8(weights[0], torch.float32).double().T
    torch_error = relative(F.linear(x_TD, read_fp8(weights[0], DTYPE)), expected)

    def check_settings(settings: LinearSettings) -> float:
        run = partial(run_linear, x_TD, weights[0], settings)
        return check(f"{name} T={tokens} {settings}", run, expected, torch_error)

    def timed(settings: LinearSettings) -> float:
        check_settings(settings)
        return time_graph(capture(lambda: [run_linear(x_TD, w, settings) for w in weights]), 9) / len(weights)

    default = default_linear_settings(tokens, outputs + rest, hidden, FP8, "hip" if torch.version.hip else "cuda")
    error = check_settings(default)
    search = Search(lambda settings: pool.submit(warm_linear, shape, tokens, settings), timed, seconds)
    best = search.measure([default, *linear_candidates(shape, tokens)])
    turned = [replace(best, splits=n) for n in (2, 4)] + [replace(best, pdl=True, ahead=n) for n in (0, 2, 4)]
    best = search.measure([*turned, *(replace(best, stages=n) for n in (2, 4, 6))])
    moved = outputs * hidden + 2 * rest * hidden + 2 * tokens * (hidden + outputs + rest)
    result = Result(name, tokens, error, torch_error, moved, linear_to_ints(default))
    return finish(result, search, default, best, linear_to_ints)


def report(results: list[Result], path: Path) -> None:
    """Print the newest result and write all of them."""
    r = results[-1]
    print(
        f"{r.name:13s} T={r.tokens:<5d} default {r.default_us:8.2f} us   best {r.best_us:8.2f} us  {r.gbps:5.0f} GB/s  "
        f"error {r.error:.1e} (torch {r.torch_error:.1e})  {r.best}",
        flush=True,
    )
    found = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "command": f"python -m bench.fp8_kernels {' '.join(sys.argv[1:])}".strip(),
        "unit": "microseconds, graph replay over weight sets that are not in the cache, activations in bf16",
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", default="1,8,64,2048", help="token counts of the MoE layer")
    parser.add_argument("--rows", default="1,8", help="token counts of the projections")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each search; 0 times the default alone")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--out", type=Path, default=Path("fp8_kernels.json"))
    arguments = parser.parse_args()
    layer_tokens, rows = ([int(n) for n in text.split(",") if n] for text in (arguments.layer, arguments.rows))
    results: list[Result] = []
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        for name in PROJECTIONS:
            for tokens in rows:
                results.append(measure_linear(name, tokens, pool, arguments.seconds))
                report(results, arguments.out)
        layers = [draw_layer(SEED + i) for i in range(LAYERS if layer_tokens else 0)]
        for tokens in layer_tokens:
            results.append(measure_layer(layers, tokens, pool, arguments.seconds))
            report(results, arguments.out)


if __name__ == "__main__":
    main()
