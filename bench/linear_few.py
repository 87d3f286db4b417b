"""Projections of few tokens by weights in FP8 blocks: candidates held to float64, then timed; Qwen3-Next's shapes.

    python -m bench.linear_few                              1 to 64 tokens, within 45 seconds
    python -m bench.linear_few --tokens 8,64 --shapes out

Each figure is the median replay of a CUDA graph over so many weight sets that none is in the cache when it is read;
with dependent launch, each starts before the one in front is over. Candidates are compiled in threads before.

Letters: T tokens, N rows of the weights, M unquantised rows behind them, D summed dimension.
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F

from bench.fp8_kernels import CACHE_BYTES, DTYPE, SEED, compile_only, empty_fp8
from bench.moe_shapes import capture, time_graph
from bench.tune_layers import draw_fp8
from fmoe.compile.kernels.fp8 import read_fp8
from fmoe.compile.kernels.linear import (
    LinearSettings,
    can_norm_linear,
    default_linear_settings,
    run_linear,
    run_linear_normed,
)
from fmoe.compile.kernels.normed import Unnormed
from fmoe.compile.kernels.split_rows import split_into_pairs
from fmoe.functional.norm import rms_norm
from fmoe.functional.quant import FP8, Fp8, dequantize

SHAPES = {"in": (12288, 64, 2048), "attention": (9216, 0, 2048), "out": (2048, 0, 4096)}  # N, M, D
TOKENS = "1,2,4,8,16,32,64"
GBPS = 4650  # of reading
WORST = 3e-3  # error of the worst token; bfloat16 alone rounds by 1.7e-3
THREADS = 15

Case = tuple[str, int, LinearSettings]


def steps(rows: int, warps: int, stages: int, splits: int = 1, ahead: int = 2) -> LinearSettings:
    """Matrix instructions over blocks of both operands."""
    return LinearSettings(rows, 128, warps, stages, splits, dot=True, pdl=True, ahead=ahead)


def pairs(rows: int, warps: int, stages: int, splits: int = 1, ahead: int = 2) -> LinearSettings:
    """As ``steps``, but weights stay in FP8, and tokens are sums of two values of it, which the norm in front split."""
    return LinearSettings(rows, 128, warps, stages, splits, dot=2, pdl=True, ahead=ahead)


def vectors(rows: int, depth: int, warps: int, programs: int = 0) -> LinearSettings:
    """Rows held whole, multiplied by each token."""
    return LinearSettings(rows, depth, warps, 1, 1, dot=False, pdl=True, programs=programs)


def list_wide(tokens: int) -> Iterator[LinearSettings]:
    """List candidates of many rows, D 2048."""
    if tokens <= 2:
        yield from [vectors(16, 2048, 4, 264), vectors(16, 2048, 4, 396), vectors(16, 2048, 8, 132)]
        yield from [vectors(8, 2048, 4, 264), vectors(8, 2048, 4, 396), vectors(8, 2048, 4, 528)]
        yield from [vectors(8, 2048, 4, 384), vectors(8, 2048, 8, 264), vectors(4, 2048, 4, 528)]
        yield from [vectors(16, 2048, 8, 264), vectors(32, 2048, 8, 132), vectors(8, 2048, 2, 528)]
    if tokens > 32:
        yield from [steps(64, 4, 4, ahead=4), steps(128, 8, 4)]
    elif tokens > 2:
        yield steps(64, 4, 3, 2)
    if tokens > 1:
        yield from [pairs(64, 4, 4), pairs(64, 4, 6), pairs(64, 4, 8, ahead=4), pairs(64, 4, 4, 2), pairs(64, 4, 6, 2)]
        yield from [pairs(64, 4, 4, 4), pairs(128, 8, 4), pairs(128, 4, 6), pairs(128, 8, 4, 2), pairs(128, 4, 4, 2)]


def list_deep(tokens: int) -> Iterator[LinearSettings]:
    """List candidates of 2048 rows, D 4096, as ``list_wide``."""
    if tokens <= 2:
        yield from [vectors(2, 4096, 4), vectors(1, 4096, 4), vectors(4, 4096, 4), vectors(4, 4096, 8)]
        yield from [vectors(2, 4096, 8), vectors(2, 4096, 2)]
        yield from [vectors(4, 4096, 4, 264), vectors(8, 4096, 8, 256), vectors(2, 4096, 4, 512)]
    if tokens > 2:
        yield from [steps(64, 4, 5, 8), steps(64, 4, 4, 4)]
    if tokens > 1:
        yield from [pairs(64, 4, 4, 4), pairs(64, 4, 4, 8), pairs(64, 4, 6, 2), pairs(128, 8, 4, 8)]


def list_cases(shape: str, tokens: int) -> list[LinearSettings]:
    """List the rule's settings and candidates."""
    rows, rest, hidden = SHAPES[shape]
    rule = default_linear_settings(tokens, rows + rest, hidden, FP8, "hopper")
    return list(dict.fromkeys([rule, *(list_deep(tokens) if shape == "out" else list_wide(tokens))]))


def empty_weight(shape: str) -> Fp8:
    """Give a weight on the meta device."""
    rows, rest, hidden = SHAPES[shape]
    w = empty_fp8(rows, hidden)
    return w._replace(rest_MD=torch.empty(rest, hidden, dtype=DTYPE, device="meta")) if rest else w


def compile_all(cases: list[Case]) -> set[Case]:
    """Compile candidates in threads, and give those that compile."""
    done: set[Case] = set()

    def compile_one(case: Case) -> None:
        shape, tokens, settings = case
        run_linear(torch.empty(tokens, SHAPES[shape][2], dtype=DTYPE, device="meta"), empty_weight(shape), settings)

    def compile_each() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = {case: pool.submit(compile_one, case) for case in cases}
        for case, job in jobs.items():
            if error := job.exception():
                print(f"{describe(case[2])}: {str(error).splitlines()[0][:100]}", flush=True)
            else:
                done.add(case)

    compile_only(compile_each)
    return done


def describe(settings: LinearSettings) -> str:
    """Write settings in a few letters."""
    form = ("vectors", "steps", "pairs")[settings.dot]
    return (
        f"{form} {settings.rows}x{settings.depth} w{settings.warps} s{settings.stages} /{settings.splits} "
        f"ahead{settings.ahead} in {settings.programs}{'' if settings.pdl else ' no pdl'}"
    )


def draw_weights(shape: str) -> list[Fp8]:
    """Draw as many weight sets as the cache does not hold."""
    rows, rest, hidden = SHAPES[shape]
    rng = torch.Generator(device="cuda").manual_seed(SEED)
    sets = [draw_fp8(rows, hidden, rng=rng) for _ in range(max(3, -(-CACHE_BYTES // (rows * hidden))))]
    if not rest:
        return sets
    of_rest = torch.randn(rest, hidden, generator=rng, device="cuda", dtype=DTYPE) * hidden**-0.5
    return [w._replace(rest_MD=of_rest.clone()) for w in sets]


def worst_error(y_TN: torch.Tensor, exact_TN: torch.Tensor) -> float:
    """Give the largest error of a token, relative to its exact result."""
    error = ((y_TN.double() - exact_TN).norm(dim=1) / exact_TN.norm(dim=1)).max().item()
    return error if error == error else float("inf")


def check_normed(x_TD: torch.Tensor, w: Fp8, exact_ND: torch.Tensor, settings: LinearSettings) -> str:
    """Hold the rule's projection with residual and norm in front to float64, and to itself; gives what to print."""
    if not can_norm_linear(x_TD, w, settings):
        return "no norm with it"
    branch_TD, norm_D = torch.randn_like(x_TD), 1 + 0.1 * torch.randn_like(x_TD[0])
    rows = Unnormed(x_TD, branch_TD, norm_D, 1e-6)
    total_TD, y_TN = run_linear_normed(rows, w, settings)
    normed_TD = rms_norm(total_TD, norm_D, eps=1e-6)
    error = worst_error(y_TN, normed_TD.double() @ exact_ND.T)
    right = torch.equal(total_TD, x_TD + branch_TD) and error <= WORST
    alike = torch.equal(y_TN, run_linear_normed(rows, w, settings)[1])
    return f"{'' if right and alike else 'WRONG '}with the norm in front: error {error:.1e}, repeated alike: {alike}"


def measure(shape: str, tokens: int, found: list[LinearSettings], sets: list[Fp8], exact_ND: torch.Tensor) -> str:
    """Check and time the candidates, print each, and give a line of the table."""
    rows, rest, hidden = SHAPES[shape]
    x_TD = torch.randn(tokens, hidden, device="cuda", dtype=DTYPE)
    # Tokens of very different size.
    x_TD *= 2.0 ** torch.arange(tokens, device="cuda").sub(tokens / 2).mul(24 / tokens).round()[:, None].to(DTYPE)
    exact_TN = x_TD.double() @ exact_ND.T
    times: dict[LinearSettings, float] = {}
    for settings in found:
        # The out-projection has no norm in front, so that splitting is a launch of its own there.
        split = split_into_pairs(x_TD, pdl=False) if settings.dot == 2 and shape != "out" else None
        run = partial(run_linear, x_TD, split=split)
        torch.full((tokens, rows + rest), torch.nan, dtype=DTYPE, device="cuda")  # which the result takes
        first, again = run(sets[0], settings), run(sets[0], settings)
        error = worst_error(first, exact_TN)
        if not (error <= WORST and torch.equal(first, again)):
            print(f"  WRONG {error:.1e}, repeated alike: {torch.equal(first, again)}: {describe(settings)}", flush=True)
            continue
        graph = capture(lambda run=run, settings=settings: [run(w, settings) for w in sets])
        times[settings] = time_graph(graph, 9) / len(sets)
        print(f"{times[settings]:8.2f} {error:8.1e}  {describe(settings)}", flush=True)
    print(f"  {check_normed(x_TD, sets[0], exact_ND, found[0])}", flush=True)
    library = capture(lambda: [F.linear(x_TD, read_fp8(w, DTYPE)) for w in sets])
    best = min(times, key=times.__getitem__)
    reading = (rows + 2 * rest) * hidden / GBPS / 1e3
    rule = times.get(found[0], float("nan"))
    return (
        f"{shape:>9s} {tokens:3d} {reading:8.2f} {time_graph(library, 9) / len(sets):8.2f} {rule:8.2f} "
        f"{times[best]:8.2f}  {describe(best)}"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    arguments = parser.parse_args()
    begin = time.monotonic()
    counts, shapes = [int(n) for n in arguments.tokens.split(",")], arguments.shapes.split(",")
    cases = [(shape, tokens, s) for shape in shapes for tokens in counts for s in list_cases(shape, tokens)]
    compiled = compile_all(cases)
    print(f"{len(compiled)} of {len(cases)} candidates compiled after {time.monotonic() - begin:.0f} s", flush=True)
    lines = []
    for shape in shapes:
        sets = draw_weights(shape)
        exact_ND = dequantize(sets[0]._replace(rest_MD=None), torch.float64)
        if sets[0].rest_MD is not None:
            exact_ND = torch.cat((exact_ND, sets[0].rest_MD.double()))
        for tokens in counts:
            print(f"{shape} T={tokens}: us, error of the worst token")
            found = [s for name, n, s in cases if (name, n) == (shape, tokens) and (name, n, s) in compiled]
            lines.append(measure(shape, tokens, found, sets, exact_ND))
    print(f"{'shape':>9s} {'T':>3s} {'reading':>8s} {'library':>8s} {'rule':>8s} {'best':>8s}  us")
    print("\n".join(lines))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
