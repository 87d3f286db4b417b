"""From the start of a process to its first tokens: with nothing cached, a second time, and behind ``fmoe warm``.

    python -m bench startup --model bench/configs/qwen3_next_80b_a3b_fp8 --weights random [--json FILE]

Each case is processes of its own, which load the model and stream a few greedy tokens behind a prompt of random ones:

    empty    cache folders of torch, Triton, the driver and fmoe that are new
    cached   the same folders once more
    warmed   new folders of torch, Triton and the driver, and fmoe's as ``fmoe warm`` left it, as on a second machine

A process says when it had loaded, when its first token came and when its last, in seconds since it started, and what
was compiled: graphs that torch's caches did not have, and entries that Triton's folder got. The exit status is 1
where "cached" or "warmed" compiled a graph.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fmoe
from fmoe.benchmark import draw_prompts
from fmoe.benchmark_machine import finish, process_age_s

CASES = ("empty", "cached", "warmed")
FOLDERS = {  # of what is compiled, by the variable that names it
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "driver",
    "FMOE_CACHE_DIR": "fmoe",
}
OWN = "FMOE_CACHE_DIR"
LIMIT_S = 1200.0  # of one process


@dataclass(frozen=True, slots=True)
class Start:
    """What one process says of itself; seconds since it started."""

    loaded_s: float
    first_token_s: float
    last_token_s: float
    graphs_compiled: int
    graphs_found: int
    kernels_compiled: int  # entries that Triton's folder got meanwhile


def make_environment(folder: Path, own: Path | None = None, /) -> dict[str, str]:
    """Give the environment of a process whose caches lie in a folder, fmoe's own in another one where it is named."""
    places = {name: str(folder / part) for name, part in FOLDERS.items()}
    return {**os.environ, **places, **({OWN: str(own)} if own is not None else {})}


def run_start(options: argparse.Namespace, environment: Mapping[str, str], /) -> Start:
    """Start a process that streams tokens, and read what it says.

    Raises:
        RuntimeError: it failed; the message is its last line.
    """
    before = _count_kernels(environment)
    shown = _run([sys.executable, "-m", "bench.startup", "--child", *_list_options(options)], environment)
    return Start(**json.loads(shown.splitlines()[-1]), kernels_compiled=_count_kernels(environment) - before)


def run_warm(options: argparse.Namespace, environment: Mapping[str, str], /) -> float:
    """Let ``fmoe warm`` prepare what the process will need; returns its seconds."""
    sizes = ["--batch-sizes", "1", "--prompt-tokens", str(options.context)]
    words = ["--model", options.model, "--weights", options.weights, "--device", options.device]
    words += ["--kernels", options.kernels]
    begin = time.perf_counter()
    _run([sys.executable, "-m", "fmoe", "warm", *words, *sizes, "--quiet"], environment)
    return time.perf_counter() - begin


def measure(options: argparse.Namespace, folder: Path, /) -> dict[str, list[Start]]:
    """Start the processes of every case, all repetitions of each."""
    found: dict[str, list[Start]] = {case: [] for case in options.cases}

    def note(case: str, start: Start) -> None:
        found[case].append(start)
        print(format_start(case, start), flush=True)

    for n in range(options.repetitions):
        environment = make_environment(folder / f"run{n}")
        if {"empty", "cached"} & set(options.cases):
            start = run_start(options, environment)
            if "empty" in options.cases:
                note("empty", start)
        if "cached" in options.cases:
            note("cached", run_start(options, environment))
    if "warmed" in options.cases:
        seconds = run_warm(options, make_environment(folder / "warm"))
        print(f"fmoe warm took {seconds:.1f} s", flush=True)
        for n in range(options.repetitions):
            fresh = make_environment(folder / f"warmed{n}", folder / "warm" / FOLDERS[OWN])
            note("warmed", run_start(options, fresh))
    return found


def format_start(case: str, start: Start, /) -> str:
    """Write one line of the table."""
    times = (
        f"loaded {start.loaded_s:7.2f} s  first token {start.first_token_s:7.2f} s  last {start.last_token_s:7.2f} s"
    )
    graphs = f"graphs {start.graphs_compiled} compiled, {start.graphs_found} found"
    return f"{case:8} {times}  {graphs}; kernels {start.kernels_compiled} compiled"


def find_compiling(found: Mapping[str, Iterable[Start]], /) -> list[str]:
    """Name the cases that compiled a graph although it was kept."""
    return [case for case, starts in found.items() if case != "empty" and any(s.graphs_compiled for s in starts)]


def stream_first(options: argparse.Namespace, /) -> dict[str, Any]:
    """Load and stream in this process, which is a fresh one."""
    model = fmoe.load(
        options.model,
        weights=options.weights,
        device=options.device,
        compile=options.compile,
        kernels=options.kernels,
        progress=False,
    )
    finish(model.device)
    ages = [process_age_s()]
    [ids] = draw_prompts(model, 1, options.context, 0)
    greedy: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    for i, _ in enumerate(fmoe.stream_tokens(model, ids, max_new_tokens=options.new_tokens, **greedy)):
        if i in (0, options.new_tokens - 1):
            ages.append(process_age_s())
    counts = torch._dynamo.utils.counters["inductor"]
    names = ("loaded_s", "first_token_s", "last_token_s")
    graphs = {"graphs_compiled": counts["fxgraph_cache_miss"], "graphs_found": counts["fxgraph_cache_hit"]}
    return {**dict(zip(names, [ages[0], ages[1], ages[-1]], strict=True)), **graphs}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write everything where asked."""
    options = _parse_arguments(arguments)
    if options.child:
        print(json.dumps(stream_first(options)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        found = measure(options, Path(name))
    for case, starts in found.items():
        first, last = (
            statistics.median(getattr(s, field) for s in starts) for field in ("first_token_s", "last_token_s")
        )
        print(f"{case:8} median: first token {first:.2f} s, token {options.new_tokens} {last:.2f} s")
    if options.json is not None:
        head = {"model": Path(options.model).name, "weights": options.weights, "torch": torch.__version__}
        head |= {"context": options.context, "new_tokens": options.new_tokens}
        cases = {case: [asdict(start) for start in starts] for case, starts in found.items()}
        options.json.write_text(json.dumps({**head, "cases": cases}, indent=1) + "\n")
    compiling = find_compiling(found)
    if compiling:
        print(f"compiled again, though kept: {', '.join(compiling)}")
    return int(bool(compiling))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise RuntimeError(f"{' '.join(command[1:4])} ended with status {done.returncode}: {last}")
    sys.stderr.write(done.stderr)  # such as that a file of graphs was ignored, and why
    return done.stdout


def _count_kernels(environment: Mapping[str, str]) -> int:
    folder = Path(environment["TRITON_CACHE_DIR"])
    return sum(entry.is_dir() for entry in folder.iterdir()) if folder.is_dir() else 0


def _list_options(options: argparse.Namespace) -> list[str]:
    """Write what a process of its own needs to know."""
    words = ["--model", options.model, "--weights", options.weights, "--device", options.device]
    words += ["--kernels", options.kernels, "--context", str(options.context), "--new-tokens", str(options.new_tokens)]
    return words if options.compile == "auto" else [*words, "--compile" if options.compile else "--no-compile"]


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a checkpoint folder, one with a config.json, or demo")
    parser.add_argument("--weights", choices=("stored", "random"), default="stored")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default="auto")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens that follow; 20 and more capture a graph")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help=",".join(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="where everything is written")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"unknown cases {unknown}; there are {', '.join(CASES)}")
    if min(options.context, options.new_tokens, options.repetitions) < 1:
        parser.error("--context, --new-tokens and --repetitions must be at least 1")
    if process_age_s() is None:
        parser.error("this system does not tell when a process started")
    return options


if __name__ == "__main__":
    sys.exit(main())
