"""Tune what runs one token inside a whole decode step, where kernels overlap, and write it into the shipped table.

    python -m bench.tune_steps --model bench/configs/qwen3_30b_a3b
    python -m bench.tune_steps --model bench/configs/qwen3_next_80b_a3b_fp8 --seconds 60 --out FILE

A config is cut to a few layers with random weights. Their layers run as one captured graph; each candidate of each
operator takes the place of the best so far, and stays if the graph is faster by more than MARGIN. Unlike ``fmoe tune``,
which times one operator back to back with itself, this sees what a kernel does while the one in front ends. Only the
choice for one token changes; the first and the last choice are timed in turns at the end, and the table is written if
the last is faster.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

import fmoe
from fmoe.architectures import run_layers
from fmoe.compile.device import describe_device
from fmoe.compile.linear_settings import LinearSettings, linear_from_ints, linear_to_ints
from fmoe.compile.plan import Entry, Plan
from fmoe.compile.plan_tables import export_table, shipped_file, write_entries
from fmoe.compile.settings import Settings, Tile, settings_from_ints, settings_to_ints
from fmoe.decoding import new_state
from fmoe.model import Model, replan

from .moe_shapes import capture, time_graph
from .whole_model import cut_config

CONTEXT = 512
MARGIN = 0.004  # of the time; less is noise
SAMPLES = 30
# rows, depth, warps, stages of matrix-vector products; a depth from the row's length on takes it at once
LOOPS = ((16, 128, 2, 5), (8, 256, 2, 4), (8, 256, 4, 4), (16, 256, 4, 4), (4, 512, 4, 4), (4, 1024, 4, 3))
WHOLE = ((1, 2), (1, 4), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8))  # rows, warps
# rows, warps of programs that stay, for weights in FP8 blocks and for others
STREAMS = {True: ((16, 4), (8, 4), (16, 8)), False: ((2, 4), (4, 4), (4, 8), (8, 8))}


def main() -> int:
    """Load, search, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="a table other than the one that comes with fmoe")
    arguments = parser.parse_args()
    model = load_cut(arguments.model, arguments.layers)
    described = describe_device(model.device)
    first = model.plans
    last = search(model, time.monotonic() + arguments.seconds)
    before, after = compare(model, first, last)
    print(f"{arguments.layers} layers: {before:.1f} us by the plans so far, {after:.1f} us by these", flush=True)
    if after >= before * (1 - MARGIN):
        print("nothing is written")
        return 0
    changed = [new for old, new in zip(first, last, strict=True) if old != new]
    for plan in changed:
        row = plan.rows[0]
        write_entries(described, plan.key, {1: Entry(row.implementation, row.settings, after)})
        print(f"{plan.key}: {row.implementation} {list(row.settings)}")
    export_table(described, arguments.out or shipped_file(described), keys=[p.key for p in changed], timings=False)
    return 0


def load_cut(folder: Path, layers: int) -> Model:
    """Load the first layers of a config, quantised as it is, with random weights."""
    raw = json.loads((folder / "config.json").read_text())
    cut = cut_config(raw, layers) | {key: raw[key] for key in ("quantization_config",) if key in raw}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(cut))
        return fmoe.load(name, weights="random")


class Chain:
    """All layers of a model for one token, as one captured graph."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.state = new_state(model, 1, 2 * CONTEXT)
        self.state.lengths_B.fill_(CONTEXT)
        self.tokens_11 = torch.full((1, 1), 17, device=model.device)

    def record(self, plans: Sequence[Plan]) -> torch.cuda.CUDAGraph:
        """Capture the layers by these plans."""
        model = self.model
        steps = replan(model, tuple(plans)).eager

        def run() -> None:
            run_layers(
                self.tokens_11, model.params, self.state, model.config.decoder, steps.layers, slots=None,
                start=steps.start,
            )  # fmt: skip

        return capture(run)

    def time(self, plans: Sequence[Plan]) -> float:
        """Median microseconds."""
        return time_graph(self.record(plans), SAMPLES)


def search(model: Model, deadline: float) -> tuple[Plan, ...]:
    """Try the candidates of each operator in turn, two rounds if there is time."""
    chain, plans = Chain(model), model.plans
    best_us = chain.time(plans)
    print(f"{best_us:.1f} us by the plans so far", flush=True)
    for _ in range(2):
        improved = False
        for place, plan in enumerate(plans):
            row = plan.rows[0]
            if row.implementation != "triton":
                continue
            for turn in count():
                options = list(candidates(plans[place]))
                if turn >= len(options):
                    break
                if time.monotonic() > deadline:
                    return plans
                settings = options[turn]
                rows = (replace(row, settings=tuple(settings)), *plan.rows[1:])
                tried = (*plans[:place], replace(plan, rows=rows), *plans[place + 1 :])
                try:
                    us = chain.time(tried)
                except Exception as error:  # what does not compile is no candidate
                    print(f"  {plan.key} {settings}: {str(error).splitlines()[0][:80]}", flush=True)
                    continue
                if us < best_us * (1 - MARGIN):
                    best_us, plans, improved = us, tried, True
                    print(f"  {us:.1f} us  {plan.key}: {settings}", flush=True)
        if not improved:
            break
    return plans


def candidates(plan: Plan) -> Iterator[list[int]]:
    """List other settings for one token of an operator, around those that its plan has now."""
    now = plan.rows[0].settings
    quantised = plan.key.dtype == "float8_e4m3fn"
    if plan.key.operator == "linear":
        for settings in linear_candidates(linear_from_ints(now), plan.key.sizes[1], quantised):
            yield linear_to_ints(settings)
        return
    for moe in moe_candidates(settings_from_ints(now), plan.key.sizes):
        yield settings_to_ints(moe)


def linear_candidates(now: LinearSettings, hidden: int, quantised: bool) -> Iterator[LinearSettings]:
    """Vary a projection of ``hidden`` columns."""
    whole = 1 << (hidden - 1).bit_length()
    base = LinearSettings(1, whole, 4, 1, 1, dot=False, pdl=True)
    yield replace(now, pdl=True)
    for rows, depth, warps, stages in LOOPS:
        yield replace(base, rows=rows, depth=depth, warps=warps, stages=stages)
    for rows, warps in WHOLE:
        yield replace(base, rows=rows, warps=warps)
    for rows, warps in STREAMS[quantised] if hidden <= 2048 else ():
        for programs in (132, 192, 264, 396, *(() if quantised else (528,))):
            yield replace(base, rows=rows, warps=warps, programs=programs)


def moe_candidates(now: Settings, sizes: Sequence[int]) -> Iterator[Settings]:
    """Vary one part of a layer at a time; those that follow start from what is best by then."""
    _, top_k, slots, _, hidden, width = sizes
    if now.path != "slots":
        return
    row, columns = 1 << (hidden - 1).bit_length(), 1 << (width * (top_k + slots) - 1).bit_length()
    turned = replace(now, pdl=True)
    yield turned
    yield replace(turned, fuse_choice=not now.fuse_choice)
    if columns <= 8192 and width % 128 == 0:
        for rows, warps in ((1, 4), (2, 4), (2, 8), (4, 8)):
            for fused in (False, True):
                yield replace(turned, down=Tile(1, rows, columns, warps, 1), fuse_choice=fused)
                yield replace(turned, down=Tile(1, rows, columns // 2, warps, 2), fuse_choice=fused)
    for rows, depth, warps, stages in (*LOOPS, (2, row, 4, 1), (4, row, 8, 1)):
        yield replace(turned, gate_up=Tile(1, rows, depth, warps, stages), fuse_choice=False)
    for rows, warps in ((1, 4), (2, 4), (4, 8)):
        yield replace(turned, router=Tile(0, rows, row, warps, 1), fuse_choice=False)


def compare(model: Model, first: Sequence[Plan], last: Sequence[Plan]) -> tuple[float, float]:
    """Time both in turns."""
    chain = Chain(model)
    graphs = chain.record(first), chain.record(last)
    samples: tuple[list[float], list[float]] = ([], [])
    for which in (0, 1, 1, 0, 0, 1):
        samples[which].append(time_graph(graphs[which], SAMPLES))
    return statistics.median(samples[0]), statistics.median(samples[1])


if __name__ == "__main__":
    sys.exit(main())
