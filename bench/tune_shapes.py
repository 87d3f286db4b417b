"""Tune published layer shapes without their weights, and write the table that comes with fmoe for this device.

    python -m bench.tune_shapes                 weights in bfloat16
    python -m bench.tune_shapes --fp8           weights in FP8 blocks: Qwen3-Next's layer and its projections
    python -m bench.tune_shapes --fp8 --shapes "" --seconds 60 --out FILE

It is the search of ``fmoe tune`` over random weights of the same shapes, a second time around what it found first. The
table is where fmoe looks for it, unless --out names another file; what is there of other operators stays. It is
written after each operator, so that a run that is cut short loses only what it was at.
"""

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bench.linear_kernels import PROJECTIONS, unique_shapes
from bench.moe_shapes import SHAPES, Shape
from bench.tune_layers import RandomLayer, RandomParams, draw_experts, draw_matrix
from fmoe.compile.device import describe_device
from fmoe.compile.measure import ENOUGH_BYTES, MOST_SETS
from fmoe.compile.plan import Key, Plan, linear_key, moe_key
from fmoe.compile.plan_tables import export_table, shipped_file
from fmoe.compile.select import Requested
from fmoe.functional.quant import FP8
from fmoe.functional.routing import RouterConfig
from fmoe.plan_search import MAX_TOKENS, Search, list_buckets, search_plans
from fmoe.planning import format_plans

SETS = 8  # layers of one shape, so that none stays in the cache
SET_BYTES = 24 << 30  # of all layers of one shape
# N with the rows that are not quantised, how many these are, and D
FP8_PROJECTIONS = {"qwen3next": ((12352, 64, 2048), (9216, 0, 2048), (2048, 0, 4096))}


class Job(NamedTuple):
    """One operator, and what draws its weights."""

    key: Key
    draw: Callable[[], RandomParams]
    router: RouterConfig | None = None


def list_jobs(
    shapes: Sequence[str], projections: Sequence[str], device: torch.device, /, *, dtype: torch.dtype
) -> list[Job]:
    """List the operators of published models, projections first: they leave time to the layers.

    Args:
        shapes: names of MoE layers.
        projections: models whose projections are tuned.
        device: where the weights are drawn.
        dtype: of the weights.

    Raises:
        ValueError: a name that is not known in this dtype.
    """
    known = FP8_PROJECTIONS if dtype == FP8 else PROJECTIONS
    for names, there in ((shapes, SHAPES), (projections, known)):
        if unknown := [name for name in names if name not in there]:
            raise ValueError(f"unknown {', '.join(unknown)}; there are {', '.join(there)} with weights in {dtype}")
    if dtype == FP8:
        sizes = list(dict.fromkeys(size for name in projections for size in FP8_PROJECTIONS[name]))
    else:
        sizes = [(outputs, 0, hidden) for outputs, hidden in unique_shapes(projections)]
    jobs = [
        Job(linear_key(outputs, hidden, dtype), partial(draw_projection, outputs, rest, hidden, dtype, device))
        for outputs, rest, hidden in sizes
    ]
    return jobs + [make_job(SHAPES[name], device, dtype=dtype) for name in shapes]


def make_job(shape: Shape, device: torch.device, /, *, dtype: torch.dtype) -> Job:
    """Give the job of one MoE layer."""
    key = moe_key(shape.E, shape.K, shape.S, shape.gate_rows, shape.D, shape.F, dtype)
    return Job(key, partial(draw_layers, shape, dtype, device), shape.config)


def draw_layers(shape: Shape, dtype: torch.dtype, device: torch.device) -> RandomParams:
    """Draw as many layers of a shape as it takes, two at least."""
    size = (shape.E + shape.S) * 3 * shape.F * shape.D * dtype.itemsize
    count = max(min(SETS, SET_BYTES // size), 2)
    return RandomParams(
        tuple(RandomLayer(draw_experts(shape, seed, dtype=dtype, device=device)) for seed in range(count))
    )


def draw_projection(outputs: int, rest: int, hidden: int, dtype: torch.dtype, device: torch.device) -> RandomParams:
    """Draw as many matrices as fill the caches, two at least."""
    count = max(min(MOST_SETS, -(-ENOUGH_BYTES // (outputs * hidden * dtype.itemsize))), 2)
    draw = partial(draw_matrix, outputs, hidden, dtype=dtype, device=device, rest=rest)
    return RandomParams(tuple(RandomLayer(draw(seed)) for seed in range(count)))


def tune_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    search: Search,
    /,
    *,
    requested: Requested = "auto",
    keep: Callable[[Plan], object] = lambda plan: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Tune one operator after the other.

    Args:
        jobs: in their order; what one leaves of its time the next ones get.
        device: where the weights are drawn.
        search: ``budget_s`` is for all; each gets a part by its token counts.
        requested: kernels asked for by name.
        keep: called with each plan as soon as it is there.
        clock: seconds.
    """
    deadline = clock() + search.budget_s
    counts = [len(list_buckets(job.key, search)) for job in jobs]
    for i, job in enumerate(jobs):
        left = max(deadline - clock(), 0.0)
        if not left:
            logging.warning("the time is over with %d of %d operators to go", len(jobs) - i, len(jobs))
            return
        part = replace(search, budget_s=left * counts[i] / sum(counts[i:]))
        params = job.draw()
        (plan,) = search_plans(
            params, job.router, [job.key], device, requested=requested, search=part, progress=False, clock=clock
        )
        keep(plan)
        del params
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8", action="store_true", help="weights in FP8 blocks")
    parser.add_argument("--shapes", help="MoE layers; all in bfloat16, qwen3next in FP8")
    parser.add_argument("--projections", help="models whose projections are tuned, likewise")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--seconds", type=float, default=900.0, help="of everything but the start")
    parser.add_argument("--key-budget", type=float, default=4.0, help="seconds of one operator at one token count")
    parser.add_argument("--candidates", type=int, default=36, help="of one operator at one token count")
    parser.add_argument("--rounds", type=int, default=2, help="later ones try the neighbours of what was best")
    parser.add_argument("--out", type=Path, help="the table")
    parser.add_argument("--timings", type=Path, help="a table with the time of every candidate")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    described, known = describe_device(device), FP8_PROJECTIONS if arguments.fp8 else PROJECTIONS
    shapes = ("qwen3next" if arguments.fp8 else ",".join(SHAPES)) if arguments.shapes is None else arguments.shapes
    projections = ",".join(known) if arguments.projections is None else arguments.projections
    names = [[name for name in text.split(",") if name] for text in (shapes, projections)]
    jobs = list_jobs(*names, device, dtype=FP8 if arguments.fp8 else torch.bfloat16)

    def keep(plan: Plan) -> None:
        print(format_plans([plan]), flush=True)
        if not any(row.source.startswith("tuned") for row in plan.rows):
            return
        export_table(described, arguments.out or shipped_file(described), keys=[plan.key], timings=False)
        if arguments.timings is not None:
            export_table(described, arguments.timings, keys=[plan.key])

    search = Search(
        max_tokens=arguments.max_tokens,
        budget_s=arguments.seconds,
        key_budget_s=arguments.key_budget,
        force=True,
        candidates=arguments.candidates,
    )
    tune_jobs(jobs * arguments.rounds, device, search, keep=keep)


if __name__ == "__main__":
    main()
