"""Tune layers on this machine, then time what was chosen against the rule's choice, in turns; nothing may be slower.

    python -m bench tuned [--tokens 1,2,8,...] [--budget 60] [--threads N]

Runs on the GPU where there is one. The search writes to a folder of its own and leaves the machine's tables alone.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmoe.compile.plan import moe_key, plan_to_ints, select_implementation
from fmoe.functional.moe import MoEParams
from fmoe.functional.routing import RouterConfig
from fmoe.plan_search import Search, make_run, search_plans
from fmoe.planning import plan_layers

from .tune_layers import RandomLayer, RandomParams

# experts, top_k, slots, gate rows, hidden, width: the demo's layer, and one of many small experts
CPU_SHAPES = ((16, 4, 1, 1, 256, 64), (60, 4, 4, 1, 512, 176))
GPU_SHAPES = ((128, 8, 0, 0, 2048, 768), (64, 6, 2, 0, 2048, 1408))
SETS = 6
ROUNDS = 15


def draw_layers(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[MoEParams]:
    """Draw several layers of one shape."""
    experts, _, slots, gates, hidden, width = sizes
    rng = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device).mul_(shape[-1] ** -0.5).to(dtype)

    shapes = (experts + gates, hidden), (experts + slots, 2 * width, hidden), (experts + slots, hidden, width)
    return [MoEParams(*(draw(*shape) for shape in shapes), None, None) for _ in range(SETS)]


def run_all(run: Callable[..., Tensor], choice: tuple[Any, ...], x_TD: Tensor, layers: list[MoEParams]) -> None:
    """Run every layer in one way."""
    for layer in layers:
        run(*choice, x_TD, layer)


def time_in_turns(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median seconds of each, one after the other in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 2):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Read the command line, tune, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,256")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the search, for each shape")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens, slower = [int(count) for count in arguments.tokens.split(",")], 0
    search = Search(tuple(tokens), max(tokens), arguments.budget, force=True)
    for sizes in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        layers, key = draw_layers(sizes, device, dtype), moe_key(*sizes, dtype)
        config = RouterConfig(sizes[0], sizes[1], renormalize=True)
        params = RandomParams(tuple(RandomLayer(layer) for layer in layers))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FMOE_CACHE_DIR"] = folder
            (tuned,) = search_plans(params, config, [key], device, requested="auto", search=search)
        (rule,) = plan_layers([key], device, requested="auto", tune="off")
        run = make_run(config)
        print(key)
        for count in tokens:
            x_TD = torch.randn(count, sizes[4], device=device).to(dtype)
            choices = {
                name: select_implementation(plan_to_ints(plan), count)
                for name, plan in (("tuned", tuned), ("rule", rule))
            }
            runs = {name: partial(run_all, run, choice, x_TD, layers) for name, choice in choices.items()}
            seconds = time_in_turns(runs, device)
            ratio = seconds["tuned"] / seconds["rule"]
            same = choices["tuned"] == choices["rule"]
            slower += not same and ratio > 1.05
            print(
                f"  {count:5d} tokens  tuned {choices['tuned'][0]:9s} {seconds['tuned'] / SETS * 1e6:9.1f} us   "
                f"rule {choices['rule'][0]:9s} {seconds['rule'] / SETS * 1e6:9.1f} us   x{ratio:.2f}"
                f"{'  (the same)' if same else ''}",
                flush=True,
            )
    print(f"{slower} tuned choices are slower than the rule's by more than 5 %")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
