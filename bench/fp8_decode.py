"""Qwen3-Next's MoE layer over weights in FP8 blocks for few tokens: candidates held to the reference, then timed.

    python -m bench.fp8_decode                              2 to 512 tokens
    python -m bench.fp8_decode --tokens 8,64 --seconds 20

Each figure is the median replay of a CUDA graph over so many weight sets that none is in the cache when it is read.
Candidates are compiled in threads before anything is timed.

Letters: T tokens.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from bench.fp8_kernels import (
    DTYPE,
    SEED,
    SHAPE,
    MoELayer,
    compile_only,
    default_layer,
    draw_layer,
    empty_fp8,
    expect_layer,
    layer_bytes,
    relative,
    run_layer,
)
from bench.moe_shapes import capture, time_graph
from fmoe.compile.kernels import Settings, Tile

LAYERS = 5
GBPS = 4250  # of reading, which the bytes' time rests on
WORST = 4e-3  # error of the layer in bfloat16, its weighted rows rounded before they are summed
THREADS = 14
ROW = Tile(0, 1, 2048, 4, 2)
BY_SIDE = Tile(1, 2, 8192, 4, 1)

Candidates = dict[str, Settings]


def few(tokens: int) -> Iterator[tuple[str, Settings]]:
    """List candidates for 2 to 8 tokens: vectors, then matrices."""
    base = default_layer(2)
    yield "slots, down side by side", base
    narrow = replace(base, down=Tile(1, 8, 512, 4, 4))
    yield "slots, down 8x512 w4 s4", narrow
    yield "slots, down 8x512 w4 s3", replace(base, down=Tile(1, 8, 512, 4, 3))
    yield "slots, down 4x512 w2 s4", replace(base, down=Tile(1, 4, 512, 2, 4))
    if tokens >= 4:
        split = replace(default_layer(32), owners=True)
        yield "split", split
        yield "split, gate_up 32x128 w4 s6", replace(split, gate_up=Tile(16, 32, 128, 4, 6))
        yield "split, router by vectors", replace(split, router=base.router)
        yield "split, down by vectors", replace(split, down=narrow.down, token_down=True)


def many(tokens: int) -> Iterator[tuple[str, Settings]]:
    """List candidates for 16 tokens and more: blocks of gate and up, then of down; then other paths."""
    base = replace(default_layer(32), owners=tokens * SHAPE.K < SHAPE.E)
    for rows, warps, stages in ((64, 4, 3), (64, 4, 6), (64, 8, 4), (32, 4, 4), (32, 4, 6), (32, 4, 8), (128, 8, 3)):
        yield f"gate_up {rows}x128 w{warps} s{stages}", replace(base, gate_up=Tile(16, rows, 128, warps, stages))
    for rows, warps, stages, programs in (
        (64, 4, 3, 0), (64, 4, 5, 8), (64, 4, 4, 16), (64, 4, 6, 4), (128, 4, 3, 0), (128, 8, 4, 0), (128, 8, 4, 4),
        (128, 4, 4, 8),
    ):  # fmt: skip
        tile = Tile(16, rows, 128, warps, stages)
        yield f"down {rows}x128 w{warps} s{stages} in {programs}", replace(base, down=tile, programs=programs)
    yield "tiles of 32 tokens", replace(base, gate_up=Tile(32, 64, 128, 4, 4), down=Tile(32, 64, 128, 4, 4))
    yield "owners turned", replace(base, owners=not base.owners)
    yield "without dependent launch", replace(base, pdl=False)
    yield "combine 2048", replace(base, combine=2048)
    yield (
        "grouped",
        replace(base, path="grouped", pdl=False, gate_up=Tile(16, 64, 128, 4, 3), down=Tile(16, 64, 128, 4, 3)),
    )
    if tokens >= 128:
        yield "quantized", default_layer(2048)


def list_candidates(tokens: int) -> Candidates:
    """Name the rule's settings and the candidates of a token count."""
    return {"rule": default_layer(tokens)} | dict(few(tokens) if tokens <= 8 else many(tokens))


def empty_layer() -> MoELayer:
    """Give a layer on the meta device."""
    router = torch.empty(SHAPE.E + SHAPE.gate_rows, SHAPE.D, dtype=DTYPE, device="meta")
    experts = SHAPE.E + SHAPE.S
    stacks = empty_fp8(experts, 2 * SHAPE.F, SHAPE.D, parts=2), empty_fp8(experts, SHAPE.D, SHAPE.F)
    return router, *stacks


def compile_all(wanted: dict[tuple[int, Settings], str]) -> set[tuple[int, Settings]]:
    """Compile candidates in threads, and give those that compile."""
    layer, done = empty_layer(), set()

    def compile_one(case: tuple[int, Settings]) -> None:
        run_layer(torch.empty(case[0], SHAPE.D, dtype=DTYPE, device="meta"), layer, case[1])

    def compile_each() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = {case: pool.submit(compile_one, case) for case in wanted}
        for case, job in jobs.items():
            if error := job.exception():
                print(f"T={case[0]} {wanted[case]}: {str(error).splitlines()[0][:100]}", flush=True)
            else:
                done.add(case)

    compile_only(compile_each)
    return done


def name_kernels(graph: torch.cuda.CUDAGraph, layers: int) -> str:
    """Say the microseconds of each kernel in a replay, of one layer; dependent ones count what they wait, too."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / layers for event in seen.key_averages()}
    return ", ".join(f"{name} {us:.1f}" for name, us in times.items() if us > 0.5)


def measure(tokens: int, found: Candidates, layers: list[MoELayer], until: float) -> None:
    """Check and time the candidates of a token count, the rule's first and last."""
    x_TD = torch.randn(tokens, SHAPE.D, device="cuda", dtype=DTYPE)
    expected, torch_error = expect_layer(x_TD, layers[0], found["rule"])
    bytes_us = layer_bytes(layers, x_TD) / GBPS / 1e3
    print(f"T={tokens}: bytes {bytes_us:.1f} us; torch in bfloat16 errs by {torch_error:.1e}", flush=True)
    print(f"{'us':>8s} {'/bytes':>6s} {'error':>8s}  candidate")
    graphs: dict[str, tuple[float, torch.cuda.CUDAGraph]] = {}
    for name, settings in found.items():
        if graphs and time.monotonic() > until:
            print(f"    left out: {name}")
            continue
        run: Callable[[MoELayer], torch.Tensor] = partial(run_layer, x_TD, settings=settings)
        first, again = run(layers[0]), run(layers[0])
        error = relative(first[: len(expected)], expected)
        if not (error <= WORST and torch.equal(first, again)):
            print(f"   WRONG        {error:8.1e}  {name}, repeated alike: {torch.equal(first, again)}")
            continue
        graph = capture(lambda run=run: [run(layer) for layer in layers])
        us = time_graph(graph, 15) / len(layers)
        graphs[name] = us, graph
        print(f"{us:8.1f} {us / bytes_us:6.2f} {error:8.1e}  {name}", flush=True)
    best = min(graphs, key=lambda name: graphs[name][0])
    for name in dict.fromkeys(["rule", best] if "rule" in graphs else [best]):
        graph = graphs[name][1]
        print(f"  again {time_graph(graph, 15) / len(layers):.1f} us, {name}: {name_kernels(graph, len(layers))}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="2,4,8,16,32,64,128,256,512")
    parser.add_argument("--seconds", type=float, default=80.0, help="in all")
    arguments = parser.parse_args()
    begin = time.monotonic()
    counts = [int(n) for n in arguments.tokens.split(",")]
    cases = {tokens: list_candidates(tokens) for tokens in counts}
    wanted = {(tokens, settings): name for tokens in counts for name, settings in cases[tokens].items()}
    compiled = compile_all(wanted)
    print(f"{len(compiled)} of {len(wanted)} candidates compiled after {time.monotonic() - begin:.0f} s", flush=True)
    layers = [draw_layer(SEED + i) for i in range(LAYERS)]
    for i, tokens in enumerate(counts):
        now, end = time.monotonic(), begin + arguments.seconds
        found = {name: settings for name, settings in cases[tokens].items() if (tokens, settings) in compiled}
        measure(tokens, found, layers, now + (end - now) / (len(counts) - i))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
