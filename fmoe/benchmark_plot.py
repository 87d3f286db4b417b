"""Draw what ``fmoe bench --json`` wrote: the parts of each decode step, and all cases below the machine's roofline.

Of a sweep it draws cost against size beside the limits instead, a panel for each axis.

    python -m fmoe.benchmark_plot RESULT.json PICTURE.png

A module apart, run in a process of its own: importing matplotlib takes half a second, which no other command waits for.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .benchmark_report import check_plot

if find_spec("matplotlib"):
    from matplotlib.figure import Figure

SPAN = 30.0  # how far the axes of the roofline reach beyond the cases
PANELS = (  # of a sweep: its list, the axis of what was left out, title, sizes, costs
    ("tokens", "tokens", "prefill of one prompt", "tokens", "ms for the prompt"),
    ("contexts", "context", "decode, batch 1", "tokens of context", "ms per step"),
    ("batches", "batch", "decode at context {context}", "sequences", "ms per step"),
)


def draw_benchmark(record: Mapping[str, Any], file: Path, /) -> None:
    """Draw a record of ``make_record`` into a PNG."""
    check_plot(file)
    sweep = record.get("sweep")
    figure = Figure(figsize=(16 if sweep else 13, 5.2), layout="constrained")
    if sweep:
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            _draw_costs(axes, sweep, *panel)
    else:
        left, right = figure.subplots(1, 2)
        _draw_parts(left, record["decode"])
        _draw_roofline(right, record)
    figure.suptitle(f"{record['model']}, {record['weights']} weights, {record['device']}, torch {record['torch']}")
    figure.savefig(file, dpi=120)


def _draw_costs(axes: Any, sweep: Mapping[str, Any], name: str, axis: str, title: str, sizes: str, costs: str) -> None:
    """Draw the median of each size, all samples' range, and the least time of bytes and of operations."""
    points = sweep[name]
    x = [point["size"] for point in points]
    if points:
        ms = [point["ms"] for point in points]
        below = [point["ms"] - min(point["samples_ms"]) for point in points]
        above = [max(point["samples_ms"]) - point["ms"] for point in points]
        axes.errorbar(x, ms, yerr=[below, above], marker="o", capsize=2, label="measured")
        axes.plot(x, [point["bytes_ms"] for point in points], "k--", label="limit: bytes")
        axes.plot(x, [point["flops_ms"] for point in points], "k:", label="limit: operations")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(x, [str(size) for size in x], rotation=60 if len(x) > 5 else 0)
        axes.set_ylim(bottom=min(point["limit_ms"] for point in points) / 3)
        axes.grid(alpha=0.3)
        axes.legend()
    left = ", ".join(str(left["size"]) for left in sweep["left_out"] if left["axis"] == axis)
    shown = title.format(context=points[0]["context"] if points else "-")
    axes.set_title(f"{shown}\nleft out: {left}" if left else shown)
    axes.set_xlabel(sizes)
    axes.set_ylabel(costs)


def _draw_parts(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """One bar for each decode case, of its parts and gaps, and a line where the limit is."""
    axes.set_title("time of a decode step by part")
    axes.set_ylabel("ms")
    names = [part["name"] for part in cases[0]["parts"]] if cases else []
    bottoms = [0.0] * len(cases)
    for name in [*names, "gaps"]:
        heights = [_part_ms(case, name) for case in cases]
        axes.bar(range(len(cases)), heights, 0.6, bottom=bottoms, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    limits = [case["limit_ms"] for case in cases]
    axes.hlines(limits, [i - 0.4 for i in range(len(cases))], [i + 0.4 for i in range(len(cases))], "black", "--")
    axes.set_xticks(range(len(cases)), [f"batch {case['batch']}" for case in cases])
    axes.plot([], [], "k--", label="limit")
    axes.legend()


def _part_ms(case: Mapping[str, Any], name: str) -> float:
    if name == "gaps":
        return float(case["gaps_ms"])
    return float(next(part["ms"] for part in case["parts"] if part["name"] == name))


def _draw_roofline(axes: Any, record: Mapping[str, Any]) -> None:
    """Operations a second over operations a byte, below what memory and arithmetic allow."""
    gbps, tflops = record["rates"]["gbps"], record["rates"]["tflops"]
    points = [
        (f"decode {c['batch']}", c["flops_per_step"], c["bytes_per_step"], c["ms_per_step"]) for c in record["decode"]
    ]
    points += [(f"prefill {case['tokens']}", case["flops"], case["bytes"], case["ms"]) for case in record["prefill"]]
    ridge = tflops * 1e3 / gbps
    intensities = [ridge, *(flops / size for _, flops, size, _ in points)]
    ends = [min(intensities) / SPAN, ridge, max(intensities) * SPAN]
    axes.loglog(ends, [min(x * gbps / 1e3, tflops) for x in ends], "k-")
    for name, flops, size, ms in points:
        axes.loglog([flops / size], [flops / ms / 1e9], "o", label=name)
    axes.set_title(f"roofline: {gbps:.0f} GB/s, {tflops:.2f} TFLOP/s")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend()


def main(arguments: Sequence[str]) -> int:
    """Draw the file that the first argument names into the second; 2 where there are not two."""
    if len(arguments) != 2:
        print("usage: python -m fmoe.benchmark_plot RESULT.json PICTURE.png", file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    draw_benchmark(json.loads(sys.stdin.read() if str(source) == "-" else source.read_text()), target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
