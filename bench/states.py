"""What a kept state saves: the second turn of a long conversation, and several continuations of one prompt.

    python -m bench states --model bench/configs/qwen3_next_80b_a3b_fp8 --weights random [--json FILE]

Second turn: seconds from a message of a few tokens to the first token of its reply. "kept" is what ``fmoe chat`` does:
``fmoe.prefill`` of the message from the state of what came before, and a reply that goes on from there; "one call" is
``fmoe.generate(model, message, state=state)`` up to its first token; "without" runs the whole conversation again.
Continuations: ``fmoe.prefill`` once and ``fmoe.generate([""] * n, state=state)``, sampled, n of them together and one.
Medians; what compiles runs before the clock starts.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fmoe
from fmoe.benchmark import draw_prompts
from fmoe.benchmark_machine import finish, read_peak_bytes, reset_peak
from fmoe.model import Model
from fmoe.states import State

REPLY = 128  # tokens that a reply may have, as in ``fmoe chat``; the first one is waited for
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.0, "ignore_eos": True, "progress": False}


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that was timed."""

    name: str
    samples_s: tuple[float, ...]
    median_s: float
    peak_bytes: int | None


def time_case(model: Model, name: str, work: Callable[[], object], repetitions: int, /) -> Case:
    """Time some work, which runs once before; the peak is of the timed runs."""
    work()
    reset_peak(model.device)
    samples_s = []
    for _ in range(repetitions):
        finish(model.device)
        begin = time.perf_counter()
        work()
        finish(model.device)
        samples_s.append(time.perf_counter() - begin)
    case = Case(name, tuple(samples_s), statistics.median(samples_s), read_peak_bytes(model.device))
    print(format_case(case), flush=True)
    return case


def format_case(case: Case, /) -> str:
    """Write one line of the table."""
    low, high = min(case.samples_s) * 1e3, max(case.samples_s) * 1e3
    peak = "-" if case.peak_bytes is None else f"{case.peak_bytes / 1e9:.2f} GB"
    return f"{case.name:44} {case.median_s * 1e3:11.2f} ms  ({low:.2f}-{high:.2f})  {peak}"


def answer_first(model: Model, state: State, message: Sequence[int], /) -> int:
    """Run a message behind a state and give the first token of the reply, as a turn of ``fmoe chat``."""
    tokens = fmoe.stream_tokens(model, state=fmoe.prefill(model, message, state=state), max_new_tokens=REPLY, **GREEDY)
    return next(tokens).token_id


def answer_whole(model: Model, ids: Sequence[int], /) -> int:
    """Run a whole conversation and give the first token of the reply."""
    return next(fmoe.stream_tokens(model, ids, max_new_tokens=REPLY, **GREEDY)).token_id


def measure_second_turn(model: Model, options: argparse.Namespace, /) -> list[Case]:
    """Time the first token of a second turn in three ways."""
    [ids] = draw_prompts(model, 1, options.conversation + options.message, 0)
    first, message = ids[: options.conversation], ids[options.conversation :]
    state = fmoe.prefill(model, first)
    what = f"second turn, {options.message} behind {options.conversation} tokens"
    time_ = partial(time_case, model)
    short = {"max_new_tokens": 1, "progress": False, **GREEDY}
    return [
        time_(f"{what}: kept", lambda: answer_first(model, state, message), options.repetitions),
        time_(f"{what}: one call", lambda: fmoe.generate(model, message, state=state, **short), options.repetitions),
        time_(f"{what}: without", lambda: answer_whole(model, ids), options.without_repetitions),
    ]


def measure_continuations(model: Model, options: argparse.Namespace, /) -> list[Case]:
    """Time a prompt and its continuations, together and apart."""
    [ids] = draw_prompts(model, 1, options.prompt, 1)
    kept = fmoe.prefill(model, ids)

    def go_on(count: int, state: State) -> None:
        fmoe.generate(model, [""] * count, state=state, max_new_tokens=options.new_tokens, batch_size=count, **SAMPLED)

    cases = [
        time_case(model, f"prompt of {options.prompt} tokens", lambda: fmoe.prefill(model, ids), options.repetitions)
    ]
    for count in (1, options.continuations):
        what = f"{count} x {options.new_tokens} tokens"
        both = partial(_prefill_and, partial(go_on, count), model, ids)
        cases.append(time_case(model, f"{what} behind its state", partial(go_on, count, kept), options.repetitions))
        cases.append(time_case(model, f"prompt and {what}", both, options.repetitions))
    return cases


def _prefill_and(go_on: Callable[[State], None], model: Model, ids: Sequence[int]) -> None:
    go_on(fmoe.prefill(model, ids))


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, measure, print, and write the samples where asked."""
    options = _parse_arguments(arguments)
    model = fmoe.load(
        options.model, weights=options.weights, device=options.device, dtype=options.dtype, compile=options.compile
    )
    where = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
    head = {"model": model.folder.name, "weights": options.weights, "device": where, "torch": torch.__version__}
    head |= {"dtype": str(model.dtype).removeprefix("torch."), "new_tokens": options.new_tokens}
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    measures = {"turn": measure_second_turn, "continuations": measure_continuations}
    cases = [case for name, measure in measures.items() if name in options.only for case in measure(model, options)]
    if options.json is not None:
        text = json.dumps({**head, "cases": [asdict(case) for case in cases]}, indent=1) + "\n"
        options.json.write_text(text)
    return 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench states", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a checkpoint folder, one with a config.json, or demo")
    parser.add_argument("--weights", choices=("stored", "random"), default="stored")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default="auto")
    parser.add_argument("--conversation", type=int, default=32_768, metavar="TOKENS", help="before the second turn")
    parser.add_argument("--message", type=int, default=32, metavar="TOKENS", help="of the second turn")
    parser.add_argument("--prompt", type=int, default=8192, metavar="TOKENS", help="that is continued")
    parser.add_argument("--continuations", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32, help="of each continuation")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--without-repetitions", type=int, default=1, help="of the conversation that is run again")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["turn", "continuations"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the samples are written")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
