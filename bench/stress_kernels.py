"""Replay MoE layers of random shapes many times on a GPU; every replay must give the bits of the first run.

    python -m bench.stress_kernels [--replays 100000] [--shapes 24] [--seed 0]

Each graph holds four runs on different rows, with memory that was never written filled with NaN; the first run of each
is held against torch. Comparison happens on the device, and is read once for each shape.
"""

import argparse
import random
import time

import torch

from bench.check_kernels import settings_of
from bench.moe_shapes import Shape, capture, random_layer
from fmoe.compile.kernels import run_moe_layer
from fmoe.functional.moe import MoEParams, route_and_compute

INPUTS = 4


def draw_shape(rng: random.Random) -> Shape:
    """Draw sizes, few of them powers of two."""
    experts = rng.choice((2, 5, 8, 24, 60, 61, 128, 130))
    slots = rng.choice((0, 1, 1, 2, 3))
    gates = rng.choice((0, 1, slots)) if slots else 0
    top_k = rng.randint(1, min(experts, 9))
    return Shape(experts, top_k, slots, 8 * rng.randint(6, 40), 8 * rng.randint(3, 24), gates, rng.random() < 0.5)


def stress(shape: Shape, tokens: int, name: str, replays: int, seed: int) -> tuple[int, int]:
    """Replay one layer.

    Returns:
        (runs, values that differed from the first run).

    Raises:
        RuntimeError: the first run does not agree with torch.
    """
    stacks = random_layer(shape, seed, dtype=torch.float32)
    stacks = type(stacks)(*(w.bfloat16() for w in stacks))
    settings = settings_of(shape, tokens)[name]
    pool = torch.randn(INPUTS, tokens, shape.D, device="cuda", dtype=torch.bfloat16)

    def run(x_TD: torch.Tensor) -> torch.Tensor:
        return run_moe_layer(
            x_TD, stacks.w_router_RD, None, stacks.w_gate_up_EPD, stacks.w_down_EDF, shape.config, settings
        )

    expected = torch.stack([run(x_TD) for x_TD in pool])
    params = MoEParams(*stacks, None, None)
    wanted = torch.stack([route_and_compute(x_TD, params, shape.config) for x_TD in pool])
    # A tie or a rounding of the router's logits may send a token elsewhere, which few rows may show.
    off = (expected - wanted).double().norm(dim=-1) > 0.03 * wanted.double().norm(dim=-1)
    if off.double().mean().item() > 0.02 + 1.0 / off.numel() or not expected.isfinite().all():
        raise RuntimeError(f"{shape} T={tokens} {name}: {int(off.sum())} of {off.numel()} rows differ from torch")
    faults = torch.zeros((), dtype=torch.int64, device="cuda")

    def run_all() -> None:
        for i in range(INPUTS):
            faults.add_((run(pool[i]) != expected[i]).sum())

    graph = capture(run_all)
    for _ in range(-(-replays // INPUTS)):
        graph.replay()
    return -(-replays // INPUTS) * INPUTS, int(faults)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=100_000, help="of all shapes together")
    parser.add_argument("--shapes", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    rng, start = random.Random(arguments.seed), time.monotonic()
    total = faulty = 0
    for index in range(arguments.shapes):
        shape, tokens = draw_shape(rng), rng.choice((1, 2, 3, 7, 16, 33, 64, 100, 257, 600))
        name = rng.choice(sorted(settings_of(shape, tokens)))
        runs, faults = stress(shape, tokens, name, -(-arguments.replays // arguments.shapes), arguments.seed + index)
        total, faulty = total + runs, faulty + faults
        print(f"{shape} T={tokens} {name}: {runs} runs, {faults} values differ", flush=True)
    print(f"{total} runs of {arguments.shapes} shapes in {time.monotonic() - start:.0f} s, {faulty} values differ")
    raise SystemExit(faulty > 0)


if __name__ == "__main__":
    main()
