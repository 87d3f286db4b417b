"""Dense projections of few rows: torch's linear against ours, by default settings and by the best of a small search.

    python -m bench.linear_kernels                          all projections at 1, 2, 4 and 8 rows
    python -m bench.linear_kernels --models mixtral --rows 1 --out found.json

Each figure is the median replay of a CUDA graph over so many weight sets that none is in the cache when it is read.
Every candidate's result is held to a float64 product before it is timed.

Letters: T tokens, N rows of the weight matrix, D summed dimension.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.moe_shapes import capture, time_graph
from fmoe.compile.kernels.linear import (
    LinearSettings,
    default_linear_settings,
    linear_from_ints,
    linear_to_ints,
    run_linear,
)

# N, D; "in" is what fmoe holds as one matrix.
PROJECTIONS = {
    "qwen3next": {
        "qkvz": (12288, 2048), "ba": (64, 2048), "delta in": (12352, 2048), "out": (2048, 4096), "q": (8192, 2048),
        "kv": (512, 2048), "in": (9216, 2048), "o": (2048, 4096), "router": (513, 2048), "lm_head": (151936, 2048),
    },
    "qwen3": {
        "q": (4096, 2048), "kv": (512, 2048), "in": (5120, 2048), "o": (2048, 4096), "router": (128, 2048),
        "lm_head": (151936, 2048),
    },
    "mixtral": {"q": (4096, 4096), "kv": (1024, 4096), "in": (6144, 4096), "o": (4096, 4096), "lm_head": (32000, 4096)},
    "dsv2lite": {
        "q": (3072, 2048), "kv_a": (576, 2048), "in": (3648, 2048), "o": (2048, 2048), "gate_up": (21888, 2048),
        "down": (2048, 10944), "lm_head": (102400, 2048),
    },
}  # fmt: skip
CACHE_BYTES = 192_000_000  # three times the L2 cache of an H200
DTYPE = torch.bfloat16
SHARED_BYTES = 227_000
SEED = 1


@dataclass(frozen=True, slots=True)
class Result:
    """One shape at one token count; us and gbps of torch, of the default settings and of the best found."""

    names: list[str]
    outputs: int
    hidden: int
    tokens: int
    sets: int
    us: dict[str, float]
    gbps: dict[str, float]
    default: list[int]
    best: list[int]


def unique_shapes(models: Iterable[str]) -> dict[tuple[int, int], list[str]]:
    """Name every shape once, with all projections that have it."""
    found: dict[tuple[int, int], list[str]] = {}
    for model in models:
        for name, shape in PROJECTIONS[model].items():
            found.setdefault(shape, []).append(f"{model}.{name}")
    return found


def count_sets(outputs: int, hidden: int) -> int:
    """Weight sets to rotate over, so that each has left the cache when its turn comes again."""
    return max(3, -(-CACHE_BYTES // (outputs * hidden * DTYPE.itemsize)))


def moved_bytes(outputs: int, hidden: int, tokens: int) -> int:
    """Bytes that a projection reads and writes at least."""
    return (outputs * hidden + tokens * hidden + tokens * outputs) * DTYPE.itemsize


def candidate_tiles(outputs: int, hidden: int, tokens: int) -> list[LinearSettings]:
    """Blocks worth trying, without dependent launch; few, since all shapes times all row counts are measured."""
    found = []
    for rows, depth, warps in (
        (1, 2048, 4), (2, 1024, 4), (4, 512, 4), (8, 256, 4), (8, 256, 2), (16, 128, 4), (8, 512, 4), (16, 256, 8),
    ):  # fmt: skip
        if depth < 2 * hidden and (tokens == 1 or tokens * outputs <= 8192):
            found += [LinearSettings(rows, depth, warps, s, 1, dot=False, pdl=False) for s in (1, 3, 5)]
    if tokens > 1:
        for rows, depth in ((16, 256), (16, 512), (32, 128), (32, 256), (64, 64), (64, 128), (128, 64)):
            for stages in (3, 5):
                if (rows + 16) * depth * DTYPE.itemsize * stages <= SHARED_BYTES:
                    found.append(LinearSettings(rows, depth, 4, stages, 1, dot=True, pdl=False))
    # Fewer than 64 programs leave most of the GPU idle.
    return [s for s in found if outputs <= 1024 or s.rows * 64 <= outputs]


def draw(outputs: int, hidden: int, sets: int) -> Tensor:
    """Draw weight sets [sets, N, D]."""
    rng = torch.Generator(device="cuda").manual_seed(SEED)
    weights = torch.empty(sets, outputs, hidden, device="cuda", dtype=DTYPE)
    return weights.normal_(0, hidden**-0.5, generator=rng)


def check_linear(run: Callable[[Tensor], Tensor], x_TD: Tensor, w_ND: Tensor) -> None:
    """Hold a product to float64, within 1.5 times the error of torch's own, and to itself.

    Raises:
        ValueError: it is further off, or differs when repeated.
    """
    # The allocator gives this memory to the result.
    torch.full((x_TD.shape[0], w_ND.shape[0]), torch.nan, dtype=x_TD.dtype, device=x_TD.device)
    y_TN = run(w_ND)
    # In slices, since the largest matrix is 2.5 GB in float64.
    exact_TN = torch.cat([x_TD.double() @ part_ND.double().T for part_ND in w_ND.split(16384)], 1)
    error, allowed = ((y.double() - exact_TN).norm().item() for y in (y_TN, F.linear(x_TD, w_ND)))
    if not error <= 1.5 * allowed:
        raise ValueError(f"error {error:.3e} must be at most 1.5 times that of torch's linear, {allowed:.3e}")
    if not torch.equal(run(w_ND), y_TN):
        raise ValueError("a repeated product must be bitwise equal; it is not")


def has_dependent_launch() -> bool:
    """Tell whether the GPU knows programmatic dependent launch."""
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def neighbours(settings: LinearSettings, outputs: int) -> list[LinearSettings]:
    """Give settings that differ in how programs are started: dependent launch, fetching ahead, parts of D."""
    found = [replace(settings, splits=n) for n in (2, 4) if outputs <= 4096]
    if has_dependent_launch():
        found += [replace(s, pdl=True) for s in found]
        found += [replace(settings, pdl=True, ahead=ahead) for ahead in (0, 2, 8)]
    return found


def warm(outputs: int, hidden: int, tokens: int, values: list[int]) -> None:
    """Compile one candidate in another process; what it computes does not matter."""
    x_TD = torch.zeros(tokens, hidden, device="cuda", dtype=DTYPE)
    run_linear(x_TD, torch.zeros(outputs, hidden, device="cuda", dtype=DTYPE), linear_from_ints(values))
    torch.cuda.synchronize()


class Search:
    """Candidates of one projection at one token count, and the microseconds of those that were measured."""

    def __init__(self, x_TD: Tensor, weights: Tensor, pool: ProcessPoolExecutor) -> None:
        self.x_TD, self.weights, self.pool = x_TD, weights, pool
        self.times: dict[LinearSettings, float] = {}

    def bind(self, settings: LinearSettings) -> Callable[[Tensor], Tensor]:
        """Give the product as a function of the weights."""
        return lambda w_ND: run_linear(self.x_TD, w_ND, settings)

    def measure(self, tried: Iterable[LinearSettings], budget_s: float) -> None:
        """Time candidates until the budget is over, the first one in any case."""
        tokens, shape = self.x_TD.shape[0], self.weights.shape[1:]
        jobs = {s: self.pool.submit(warm, *shape, tokens, linear_to_ints(s)) for s in tried if s not in self.times}
        # All of them first: the other processes run what they compiled, which would disturb the clock.
        errors = {settings: job.exception() for settings, job in jobs.items()}
        deadline = time.monotonic() + budget_s
        for settings, error in errors.items():
            if self.times and time.monotonic() > deadline:
                break
            # What cannot be compiled is no candidate; what computes something wrong ends the run.
            if error:
                print(f"    {settings}: {str(error).splitlines()[0]}", flush=True)
                continue
            run = self.bind(settings)
            check_linear(run, self.x_TD, self.weights[0])
            self.times[settings] = self.time(run, 8)

    def time(self, run: Callable[[Tensor], Tensor], samples: int) -> float:
        """Microseconds of one product."""
        graph = capture(lambda: [run(w_ND) for w_ND in self.weights])
        return time_graph(graph, samples) / len(self.weights)


def find_best(search: Search, default: LinearSettings, budget_s: float) -> LinearSettings:
    """Time blocks, then variants of the two best."""
    tokens, (outputs, hidden) = search.x_TD.shape[0], search.weights.shape[1:]
    search.measure([default, *candidate_tiles(outputs, hidden, tokens)], budget_s)
    best_two = sorted(search.times, key=search.times.__getitem__)[:2]
    search.measure(dict.fromkeys(n for s in best_two for n in neighbours(s, outputs)), budget_s)
    return min(search.times, key=search.times.__getitem__)


def measure_projection(
    names: list[str], weights: Tensor, tokens: int, pool: ProcessPoolExecutor, budget_s: float
) -> Result:
    """Search settings of one shape, then time torch and ours in turns."""
    sets, outputs, hidden = weights.shape
    x_TD = torch.randn(tokens, hidden, device="cuda", dtype=DTYPE)
    default = default_linear_settings(tokens, outputs, hidden, DTYPE, "hip" if torch.version.hip else "cuda")
    search = Search(x_TD, weights, pool)
    best = find_best(search, default, budget_s)
    runs = {"torch": lambda w_ND: F.linear(x_TD, w_ND), "default": search.bind(default), "best": search.bind(best)}
    order = [*runs, *reversed(runs)] * 2
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for name in order:
        samples[name].append(search.time(runs[name], 20))
    us = {name: statistics.median(values) for name, values in samples.items()}
    rates = {name: moved_bytes(outputs, hidden, tokens) / value / 1e3 for name, value in us.items()}
    return Result(names, outputs, hidden, tokens, sets, us, rates, linear_to_ints(default), linear_to_ints(best))


def format_result(result: Result) -> str:
    """Write one line of the table."""
    parts = [f"{name} {us:7.2f} us {result.gbps[name]:5.0f} GB/s" for name, us in result.us.items()]
    settings = ",".join(map(str, result.best))
    gain = result.us["torch"] / result.us["best"]
    return (
        f"{result.outputs:6d} x {result.hidden:5d}  T={result.tokens}  {'   '.join(parts)}   x{gain:.2f}  "
        f"[{settings}]  {' '.join(result.names)}"
    )


def write_results(results: list[Result], path: Path) -> None:
    """Write what was found so far, with what it was found on."""
    found = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "command": f"python -m bench.linear_kernels {' '.join(sys.argv[1:])}".strip(),
        "unit": "microseconds of one product in bf16, graph replay over weight sets that are not in the cache",
        "settings": [field.name for field in fields(LinearSettings)],
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(PROJECTIONS))
    parser.add_argument("--rows", default="1,2,4,8", help="token counts")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each half of a search")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path, default=Path("linear_kernels.json"))
    arguments = parser.parse_args()
    results: list[Result] = []
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        for (outputs, hidden), names in unique_shapes(arguments.models.split(",")).items():
            weights = draw(outputs, hidden, count_sets(outputs, hidden))
            for tokens in map(int, arguments.rows.split(",")):
                results.append(measure_projection(names, weights, tokens, pool, arguments.seconds))
                print(format_result(results[-1]), flush=True)
                write_results(results, arguments.out)
            del weights
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
