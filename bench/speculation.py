"""Decode the demo with the drafts of its own MTP layer and without, in one process and in turns; tokens must be equal.

    python -m bench speculation [--drafts 1,2,auto] [--modes eager,compiled] [--tokens 96] [--rounds 5] [--threads N]

The prompts are the golden ones of the tests, at batch 1. A turn is some tokens of each contender; a ratio is the
median over turns that stood side by side. The exit status is 1 where tokens differ.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import fmoe
from fmoe.compile.step import Steps
from fmoe.decoding import Token, decode_batch
from fmoe.model import Model
from fmoe.options import Options, Speculate, check_speculate

from .measure import CLOCKS, Clock, median_ratio, spread_of_ratio

GOLDEN = Path(__file__).parents[1] / "tests" / "golden.json"
TURN = 32  # tokens of one turn
PLAIN = "off"
TARGET = 1.10


def start(model: Model, steps: Steps, prompt: list[int], tokens: int, speculate: Speculate) -> Iterator[Token]:
    """Give the tokens of one prompt, greedily."""
    options = Options(tokens, 0.0, 1.0, 0, 0.0, 1.0, 0, (), (), None, speculate)
    return (row for [row] in decode_batch(model, steps, [prompt], options))


def run_turns(
    model: Model, steps: Steps, prompts: list[list[int]], tokens: int, drafts: list[Speculate], clock: Clock
) -> tuple[dict[str, list[float]], dict[str, list[list[Token]]]]:
    """Run each prompt with every contender, a turn of each after the other: seconds of each turn, and the tokens."""
    names: dict[str, Speculate] = {PLAIN: 0, **{str(n): n for n in drafts}}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, list[list[Token]]] = {name: [] for name in names}
    for prompt in prompts:
        running = {name: start(model, steps, prompt, tokens, n) for name, n in names.items()}
        taken = {name: [next(run)] for name, run in running.items()}
        for turn in range((tokens - 1) // TURN):
            for name in list(names) if turn % 2 == 0 else list(names)[::-1]:
                begin = clock()
                taken[name] += [next(running[name]) for _ in range(TURN)]
                seconds[name].append(clock() - begin)
        for name in names:
            found[name].append(taken[name])
    return seconds, found


def describe(tokens: list[list[Token]]) -> tuple[float, float]:
    """Compute acceptance, and the tokens that a step gives."""
    flat = [token for row in tokens for token in row[1:]]
    drafted, accepted = sum(token.drafted for token in flat), sum(token.accepted for token in flat)
    return accepted / max(drafted, 1), len(flat) / max(len(flat) - accepted, 1)


def main() -> int:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench speculation", description=__doc__)
    parser.add_argument("--drafts", default="1,2,auto")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--tokens", type=int, default=97)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    drafts = [check_speculate(n if n == "auto" else int(n)) for n in options.drafts.split(",")]
    prompts = [case["prompt_ids"] for case in json.loads(GOLDEN.read_text())["cases"]]
    model = fmoe.load("demo", device="cpu", speculate=True)
    wrong = False
    print(f"float32, {options.threads} threads, batch 1, {options.clock} time; target {TARGET}x in the faster mode")
    print(
        f"{'mode':10}{'drafts':>7}{'tokens/s':>10}{'acceptance':>12}{'tok/step':>10}{'ms/step':>9}  x off (quartiles)"
    )
    for mode in options.modes.split(","):
        steps = model.graphs if mode == "compiled" else model.eager
        run = partial(run_turns, model, steps, prompts, options.tokens, drafts, CLOCKS[options.clock])
        with torch.inference_mode():
            run()  # compiles
            seconds: dict[str, list[float]] = {}
            for _ in range(options.rounds):
                samples, found = run()
                for name, values in samples.items():
                    seconds.setdefault(name, []).extend(values)
        for name, values in seconds.items():
            same = [[token.id for token in row] for row in found[name]] == [
                [token.id for token in row] for row in found[PLAIN]
            ]
            wrong |= not same
            acceptance, per_step = describe(found[name])
            per_token = statistics.median(values) / TURN
            ratio, (low, high) = median_ratio(values, seconds[PLAIN]), spread_of_ratio(values, seconds[PLAIN])
            print(
                f"{mode:10}{name:>7}{1 / per_token:10.1f}{acceptance:12.3f}{per_step:10.2f}"
                f"{per_token * per_step * 1e3:9.2f}  {ratio:.3f} ({low:.3f}-{high:.3f}){'' if same else '  WRONG'}"
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
