"""Run the measurements and print them.

    python -m bench                        decode and prefill against transformers
    python -m bench --quick --only tiny    fewer samples, one model
    python -m bench load-memory            peak memory of loading; further arguments are its own
    python -m bench moe-peers              one MoE layer against transformers and plain torch; as above
    python -m bench probe-cost             what the AITER boundary costs without AITER; as above
    python -m bench speculation            the demo with drafts of its own and without; as above
    python -m bench states                 what a kept state saves: a second turn, several continuations; as above
    python -m bench startup                from the start of a process to its first token, cached and not; as above
    python -m bench tuned                  what tuning chose against the rule, in turns; as above

The targets are printed beside the ratios and never asserted. The exit status is 1 where tokens were wrong.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import fmoe

from .decode import FULL, OURS, QUICK, Result, all_cases, run_cases, select_cases
from .measure import CLOCKS

SCRIPTS = {
    "load-memory": "bench.load_memory",
    "moe-peers": "bench.moe_peers",
    "tuned": "bench.tuned",
    "probe-cost": "bench.probe_cost",
    "speculation": "bench.speculation",
    "startup": "bench.startup",
    "states": "bench.states",
}
HEADER = f"{'case':32} {'fmoe':>9} {'peer':>9}  {'ratio (quartiles)':20} {'target':>6}  peer is"


def main() -> int:
    """Parse the arguments, measure, print, and write the samples where asked."""
    if sys.argv[1:2] and (script := SCRIPTS.get(sys.argv[1])):
        return subprocess.run([sys.executable, "-m", script, *sys.argv[2:]], check=False).returncode
    options = _parse_arguments()
    cases = select_cases(all_cases(), options.only)
    if not cases:
        print("no case is named so; there are:", *(case.name for case in all_cases()), sep="\n  ", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    machine = describe_machine(options.threads)
    print(*(f"{key}: {value}" for key, value in machine.items()), sep="\n")
    print(f"\nfloat32, tokens per second, medians; {options.clock} time\n{HEADER}")
    begin = time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for result in run_cases(cases, Path(folder), QUICK if options.quick else FULL, CLOCKS[options.clock]):
            print(format_result(result), flush=True)
            results.append(result)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if options.json is not None:
        report = {**machine, "clock": options.clock, "results": [as_json(result) for result in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(result.wrong for result in results) else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch; all cores by default")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="words of a case's name, such as decode-demo-1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu, with --threads 1, on a machine that is busy"
    )
    options = parser.parse_args()
    if options.threads is None or options.threads < 1:
        parser.error("--threads must be at least 1")
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu adds up the time of all threads; use it with --threads 1")
    return options


def describe_machine(threads: int, /) -> dict[str, Any]:
    """Say what the numbers belong to."""
    return {
        "device": "cpu",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "fmoe": _fmoe_version(),
        },
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"


def _fmoe_version() -> str:
    """Name the commit, where this is a checkout."""
    folder = Path(fmoe.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "installed"


def format_result(result: Result, /) -> str:
    """Write one line of the table."""
    case = result.case
    if result.wrong is not None:
        return f"{case.name:32} NOT MEASURED, wrong tokens: {result.wrong}"
    low, high = result.ratio_range
    ratio = f"{result.ratio:.2f} ({low:.2f}-{high:.2f})"
    mark = "" if result.ratio >= case.target else "  below"
    ours, theirs = result.rate(OURS), result.rate(result.peer)
    return f"{case.name:32} {ours:9.1f} {theirs:9.1f}  {ratio:20} {case.target:6.1f}  {result.peer}{mark}"


def as_json(result: Result, /) -> dict[str, Any]:
    """Give a result as plain values, every sample included."""
    plain: dict[str, Any] = {"case": result.case.name, "target": result.case.target}
    if result.wrong is not None:
        return {**plain, "wrong": result.wrong}
    names: Sequence[str] = list(result.samples_s)
    return {
        **plain,
        "peer": result.peer,
        "ratio": round(result.ratio, 4),
        "ratio_quartiles": [round(x, 4) for x in result.ratio_range],
        "tokens_per_s": {name: round(result.rate(name), 2) for name in names},
        "samples_us": {name: [round(s * 1e6, 1) for s in result.samples_s[name]] for name in names},
    }


if __name__ == "__main__":
    sys.exit(main())
