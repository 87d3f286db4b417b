"""Qwen3-Next's MoE layer over weights in FP8 blocks for few tokens: candidates held to the reference, then timed.

    python -m bench.fp8_decode                              8 to 64 tokens
    python -m bench.fp8_decode --tokens 2,4,128 --seconds 40
    python -m bench.fp8_decode --tokens 8 --normed          all candidates behind a norm, as a model runs them

Each figure is the median replay of a CUDA graph over so many weight sets that none is in the cache when it is read.
Candidates are compiled in threads before anything is timed. Those behind a norm norm a residual and a branch first.

Letters: T tokens.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
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
from fmoe.compile.kernels.add_norm import add_rms_norm_rows
from fmoe.compile.kernels.layer import can_norm_layer, run_moe_layer_normed
from fmoe.compile.kernels.normed import Unnormed

LAYERS = 5
GBPS = 4250  # of reading, which the bytes' time rests on
WORST = 4e-3  # error of the layer in bfloat16, its weighted rows rounded before they are summed
THREADS = 14
ROW = Tile(0, 1, 2048, 4, 2)
BY_SIDE = Tile(1, 2, 8192, 4, 1)

INSIDE, APART = " behind a norm", " behind a norm apart"


class Candidate(NamedTuple):
    """Settings, and where the norm in front is made."""

    settings: Settings
    norm: str = ""  # INSIDE: by what a model calls; APART: by its launch alone


Candidates = dict[str, Candidate]


def few() -> Iterator[tuple[str, Settings]]:
    """List candidates for 2 and 4 tokens: vectors, then matrices."""
    base = default_layer(2)
    yield "slots, down side by side", base
    narrow = replace(base, down=Tile(1, 8, 512, 4, 4))
    yield "slots, down 8x512 w4 s4", narrow
    yield "slots, down 8x512 w4 s3", replace(base, down=Tile(1, 8, 512, 4, 3))
    yield "slots, down 4x512 w2 s4", replace(base, down=Tile(1, 4, 512, 2, 4))
    split = replace(default_layer(32), owners=True)
    yield "split", split
    yield "split, router by vectors", replace(split, router=base.router)
    yield "split, down by vectors", replace(split, down=narrow.down, token_down=True)
    yield "split, combine 512", replace(split, combine=512)


def matrices(tokens: int) -> Iterator[tuple[str, Settings]]:
    """List candidates for 8 tokens and more: blocks of gate and up, and of down, whose depth lies in them."""
    base = replace(default_layer(32), owners=tokens * SHAPE.K < SHAPE.E)
    wide = replace(base, gate_up=Tile(16, 128, 128, 8, 3))
    yield "split", base
    yield "gate_up 64x128 w4 s3", replace(base, gate_up=Tile(16, 64, 128, 4, 3))
    # Of 2048 rows of down, blocks of 128 are 16 programs by themselves.
    for part, start, rows, depth, stages, programs in (
        ("", base, 64, 64, 6, 8), ("", base, 64, 64, 6, 16), ("", base, 64, 64, 8, 0),
        ("", base, 128, 64, 6, 0), ("", base, 128, 64, 6, 8), ("", base, 128, 64, 8, 0),
        ("gate_up 128x128 w8 s3, ", wide, 64, 128, 4, 0), ("gate_up 128x128 w8 s3, ", wide, 64, 128, 4, 16),
        ("gate_up 128x128 w8 s3, ", wide, 128, 128, 4, 0), ("gate_up 128x128 w8 s3, ", wide, 128, 128, 4, 8),
    ):  # fmt: skip
        name = f"{part}down {rows}x{depth} w4 s{stages} in {programs}"
        yield name, replace(start, down=Tile(16, rows, depth, 4, stages), programs=programs)
    if tokens < 128:
        yield "combine 512", replace(base, combine=512)
    else:
        yield "quantized", default_layer(2048)


def list_candidates(tokens: int, *, normed: bool) -> Candidates:
    """Name the rule's settings and the candidates of a token count, each once; ``normed``: behind a norm where it can.

    Else the best-known matrices alone are behind a norm, and once more with the norm apart.
    """
    listed = [("rule", default_layer(tokens)), *(few() if tokens < 8 else matrices(tokens))]
    named = {settings: name for name, settings in reversed(listed)}
    found = {named[s]: Candidate(s, INSIDE if normed and can_norm(tokens, s) else "") for _, s in listed}
    base = dict(listed)["split"]
    norms = {f"split{norm}": Candidate(base, norm) for norm in (INSIDE, APART)}
    return {"rule": found["rule"]} | norms | found


def empty_layer() -> MoELayer:
    """Give a layer on the meta device."""
    router = torch.empty(SHAPE.E + SHAPE.gate_rows, SHAPE.D, dtype=DTYPE, device="meta")
    experts = SHAPE.E + SHAPE.S
    stacks = empty_fp8(experts, 2 * SHAPE.F, SHAPE.D, parts=2), empty_fp8(experts, SHAPE.D, SHAPE.F)
    return router, *stacks


def draw_rows(tokens: int, device: str) -> Unnormed:
    """Draw a residual and a branch."""
    x_TD, branch_TD = torch.randn(2, tokens, SHAPE.D, device=device, dtype=DTYPE)
    return Unnormed(x_TD, branch_TD, torch.ones(SHAPE.D, device=device), 1e-6)


def norm_rows(rows: Unnormed, *, pdl: bool) -> Tensor:
    """Norm them in a launch that does nothing else."""
    return add_rms_norm_rows(*rows[:3], eps=rows.eps, pdl=pdl)[0]


def can_norm(tokens: int, settings: Settings) -> bool:
    """Tell whether the norm in front is made in a launch that does more."""
    return can_norm_layer(draw_rows(tokens, "meta").x_TD, *empty_layer()[1:], settings)


def run_candidate(x_TD: Tensor, rows: Unnormed, layer: MoELayer, candidate: Candidate) -> Tensor:
    """Run the layer of x, which is the norm of the rows, or of these."""
    settings, norm = candidate
    if norm == INSIDE:
        router, gate_up, down = layer
        return run_moe_layer_normed(rows, router, None, gate_up, down, SHAPE.config, settings)[2]
    return run_layer(norm_rows(rows, pdl=settings.pdl) if norm == APART else x_TD, layer, settings)


def compile_all(wanted: dict[tuple[int, Candidate], str]) -> set[tuple[int, Candidate]]:
    """Compile candidates in threads, and give those that compile."""
    layer, done = empty_layer(), set()

    def compile_one(case: tuple[int, Candidate]) -> None:
        rows = draw_rows(case[0], "meta")
        run_candidate(rows.x_TD, rows, layer, case[1])

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
    rows = draw_rows(tokens, "cuda")
    x_TD = norm_rows(rows, pdl=False)
    expected, torch_error = expect_layer(x_TD, layers[0], default_layer(tokens))
    bytes_us = layer_bytes(layers, x_TD) / GBPS / 1e3
    print(f"T={tokens}: bytes {bytes_us:.1f} us; torch in bfloat16 errs by {torch_error:.1e}", flush=True)
    print(f"{'us':>8s} {'/bytes':>6s} {'error':>8s}  candidate")
    graphs: dict[str, tuple[float, torch.cuda.CUDAGraph]] = {}
    for name, candidate in found.items():
        if graphs and time.monotonic() > until:
            print(f"    left out: {name}")
            continue
        run: Callable[[MoELayer], Tensor] = partial(run_candidate, x_TD, rows, candidate=candidate)
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
    parser.add_argument("--tokens", default="8,16,32,64")
    parser.add_argument("--normed", action="store_true", help="time all candidates behind a norm")
    parser.add_argument("--seconds", type=float, default=55.0, help="in all")
    arguments = parser.parse_args()
    begin = time.monotonic()
    counts = [int(n) for n in arguments.tokens.split(",")]
    cases = {tokens: list_candidates(tokens, normed=arguments.normed) for tokens in counts}
    wanted = {(tokens, candidate): name for tokens in counts for name, candidate in cases[tokens].items()}
    compiled = compile_all(wanted)
    print(f"{len(compiled)} of {len(wanted)} candidates compiled after {time.monotonic() - begin:.0f} s", flush=True)
    layers = [draw_layer(SEED + i) for i in range(LAYERS)]
    for i, tokens in enumerate(counts):
        now, end = time.monotonic(), begin + arguments.seconds
        found = {name: candidate for name, candidate in cases[tokens].items() if (tokens, candidate) in compiled}
        measure(tokens, found, layers, now + (end - now) / (len(counts) - i))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
