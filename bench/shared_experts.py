"""What fusing shared experts saves: one layer fused, apart in one stream, apart on a second stream, and as planned.

    python -m bench.shared_experts [--shapes qwen3next,dsv2lite] [--tokens 1,4,8,16,64] [--json FILE]

The routed experts run the same kernels with the same settings in every form. Apart, the shared expert is what a model
loaded with shared_experts="separate" runs: its projections as planned, what is between them compiled. Each form is
captured in a graph over several weight sets; replays are interleaved.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.moe_layer import SHAPES, draw_weights, fused_params, make_layer, router_config, separate_params
from bench.moe_shapes import capture
from fmoe.compile.device import describe_device
from fmoe.compile.linear_ops import keep_kernels, linear_planned
from fmoe.compile.ops import compute_moe_op, encode_plans, moe_sizes
from fmoe.compile.plan import Plan, linear_key, moe_key
from fmoe.functional.moe import MoEParams, add_shared_expert
from fmoe.planning import plan_layers

NAMES = ("qwen3next", "dsv2lite")  # shapes with shared experts
SETS = 6
ROUNDS = 15


def make_forms(s: dict[str, Any], weights: list[dict[str, Tensor]], tokens: int) -> dict[str, Callable[[Tensor], Any]]:
    """Give each form as a function over all weight sets."""
    config, device = router_config(s), torch.device("cuda")
    fused = [fused_params(w, s) for w in weights]
    apart = [separate_params(w, s) for w in weights]
    key = moe_key(*moe_sizes(fused[0].w_router_ED, fused[0].w_down_EDF, config), torch.bfloat16)
    (plan,) = plan_layers([key], device, requested="triton", tune="cached")
    kernels = Plan(key, tuple(row for row in plan.rows if row.implementation == "triton"))
    # The same settings for the routed experts alone: sizes without slots and gate rows.
    alone = Plan(moe_key(*key.sizes[:2], 0, 0, *key.sizes[4:], torch.bfloat16), kernels.rows)
    shared = apart[0].shared
    assert shared is not None
    matrices = {linear_key(*m.shape, m.dtype): None for m in shared.mlp}
    linear = keep_kernels(encode_plans(plan_layers(list(matrices), device, requested="auto", tune="cached"), "linear"))
    fused_plans, alone_plans = encode_plans([kernels], "moe"), encode_plans([alone], "moe")

    def add(y_TD: Tensor, x_TD: Tensor, params: MoEParams) -> Tensor:
        return add_shared_expert(y_TD, x_TD, params.shared, linear=lambda *m: linear_planned(*m, plans=linear))

    torch.compiler.reset()
    compiled = torch.compile(add, fullgraph=True, dynamic=False)
    zeros = torch.zeros(tokens, s["D"], device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def run_beside(x_TD: Tensor, params: MoEParams) -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            shared_TD = compiled(zeros, x_TD, params)
        routed_TD = compute_moe_op(x_TD, params, config, plans=alone_plans)
        main.wait_stream(side)
        return routed_TD + shared_TD

    planned = [make_layer(w, s, "cached") for w in weights]
    return {
        "fused": lambda x: [compute_moe_op(x, p, config, plans=fused_plans) for p in fused],
        "one stream": lambda x: [compiled(compute_moe_op(x, p, config, plans=alone_plans), x, p) for p in apart],
        "two streams": lambda x: [run_beside(x, p) for p in apart],
        "planned": lambda x: [layer(x) for layer in planned],
    }


def time_interleaved(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median microseconds of a replay of each graph, in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 3):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(name: str, tokens: list[int]) -> list[dict[str, Any]]:
    """Measure one shape at each token count; every form must give the same output first."""
    s = SHAPES[name]
    weights = [draw_weights(s, seed, "cuda", torch.bfloat16) for seed in range(SETS)]
    rows = []
    for count in tokens:
        x_TD = torch.randn(count, s["D"], device="cuda", dtype=torch.bfloat16)
        forms = make_forms(s, weights, count)
        outputs = {form: torch.stack(run(x_TD)).float() for form, run in forms.items()}
        norm = outputs["fused"].norm()
        for form, y in outputs.items():
            error = ((y - outputs["fused"]).norm() / norm).item()
            if not error < 1e-2:
                raise RuntimeError(f"{name} at {count} tokens: {form} differs from fused by {error:.1e}")
        graphs = {form: capture(partial(run, x_TD)) for form, run in forms.items()}
        us = {form: total / SETS for form, total in time_interleaved(graphs).items()}
        rows.append({"shape": name, "tokens": count, "us": us})
        line = "  ".join(f"{form} {value:7.1f}" for form, value in us.items())
        print(f"{name:10s} T={count:<4d} {line}   fused saves {1 - us['fused'] / us['one stream']:.1%}", flush=True)
    return rows


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(NAMES))
    parser.add_argument("--tokens", default="1,4,8,16,64")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokens = [int(count) for count in arguments.tokens.split(",")]
    rows = [row for name in arguments.shapes.split(",") for row in measure(name, tokens)]
    if arguments.json:
        device = describe_device(torch.device("cuda"))
        arguments.json.write_text(json.dumps({"device": device.name, "versions": device.versions, "rows": rows}))


if __name__ == "__main__":
    main()
