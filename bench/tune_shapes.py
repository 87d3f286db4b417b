"""Tune published layer shapes without their weights, and write the table that comes with fmoe for this device.

    python -m bench.tune_shapes [--shapes qwen3next,...] [--projections qwen3next,...] [--budget 300] [--out FILE]

It is the search of ``fmoe tune`` over random weights of the same shapes; the table is where fmoe looks for it, unless
--out names another file.
"""

import argparse
import logging
from pathlib import Path

import torch

from bench.linear_kernels import PROJECTIONS, unique_shapes
from bench.moe_shapes import SHAPES, random_layer
from bench.tune_layers import RandomLayer, RandomParams
from fmoe.compile.device import describe_device
from fmoe.compile.plan import Key, linear_key, moe_key
from fmoe.compile.plan_tables import export_table, shipped_file
from fmoe.functional.moe import MoEParams
from fmoe.functional.routing import RouterConfig
from fmoe.plan_search import MAX_TOKENS, Search, search_plans
from fmoe.planning import format_plans

SETS = 8  # weight sets of one shape, so that none stays in the cache
SET_BYTES = 24 << 30  # of all sets of one shape


def draw_shape(name: str) -> tuple[RandomParams, RouterConfig, Key]:
    """Draw the layers of one shape, with its routing rule and key."""
    shape = SHAPES[name]
    size = (shape.E + shape.S) * 3 * shape.F * shape.D * 2
    layers = [random_layer(shape, seed) for seed in range(max(min(SETS, SET_BYTES // size), 2))]
    key = moe_key(shape.E, shape.K, shape.S, shape.gate_rows, shape.D, shape.F, torch.bfloat16)
    return RandomParams(tuple(RandomLayer(MoEParams(*w, None, None)) for w in layers)), shape.config, key


def draw_projection(outputs: int, hidden: int) -> RandomParams:
    """Draw the matrices of one projection."""
    size = outputs * hidden * 2
    count = max(min(64, (1 << 30) // size), 2)
    weights = [torch.randn(outputs, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    return RandomParams(tuple(RandomLayer(w) for w in weights))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--projections", default=",".join(PROJECTIONS))
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of one shape")
    parser.add_argument("--key-budget", type=float, default=2.0, help="seconds of one shape at one token count")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda", torch.cuda.current_device())
    described = describe_device(device)
    search = Search(
        max_tokens=arguments.max_tokens, budget_s=arguments.budget, key_budget_s=arguments.key_budget, force=True
    )
    for name in filter(None, arguments.shapes.split(",")):
        params, router, key = draw_shape(name)
        plans = search_plans(params, router, [key], device, requested="auto", search=search, progress=False)
        print(format_plans(plans), flush=True)
        del params
        torch.cuda.empty_cache()
    for outputs, hidden in unique_shapes([name for name in arguments.projections.split(",") if name]):
        key = linear_key(outputs, hidden, torch.bfloat16)
        params = draw_projection(outputs, hidden)
        plans = search_plans(params, None, [key], device, requested="auto", search=search, progress=False)
        print(format_plans(plans), flush=True)
        del params
    export_table(described, arguments.out or shipped_file(described))


if __name__ == "__main__":
    main()
