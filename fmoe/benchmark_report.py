"""A Benchmark as text for a terminal, and as a JSON object."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from .benchmark import Benchmark, DecodeCase, PrefillCase
from .benchmark_drafts import DraftCase
from .benchmark_sweep import Sweep, SweepPoint
from .info import format_bytes
from .report import format_count

UNKNOWN = "unknown"
MISSING = "a plot needs matplotlib, which is not installed; install it with: pip install 'fmoe[plot]'"


def make_record(benchmark: Benchmark, sweep: Sweep | None = None, /) -> dict[str, Any]:
    """Turn everything measured into what json writes."""
    rates = benchmark.rates
    more = {"rates": {**rates._asdict(), "gbps": rates.gbps}, "sweep": None if sweep is None else asdict(sweep)}
    return asdict(benchmark) | more


def format_benchmark(benchmark: Benchmark, sweep: Sweep | None = None, /) -> str:
    """Lay out a table of the cases and, below it, where the time of each decode step goes; then the sweep's tables."""
    lines = [*_format_head(benchmark), ""]
    if benchmark.decode:
        lines += [*_format_decode(benchmark.decode), ""]
    if benchmark.drafts:
        lines += [*_format_drafts(benchmark.drafts), ""]
    if benchmark.prefill:
        lines += [*_format_prefill(benchmark.prefill), ""]
    for case in benchmark.decode:
        lines += [*_format_parts(case), ""]
    if sweep is not None:
        lines += _format_sweep(sweep)
    return "\n".join(lines).rstrip()


def check_plot(file: Path, /) -> None:
    """Refuse what could not be drawn, before minutes are spent on measuring.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: the name is not that of a PNG.
        FileNotFoundError: its folder is not there.
    """
    if not find_spec("matplotlib"):
        raise RuntimeError(MISSING)
    if file.suffix.lower() != ".png":
        raise ValueError(f"the plot is a PNG, but {str(file)!r} ends otherwise; name it .png")
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder {file.absolute().parent} for the plot; make it first")


def _format_head(benchmark: Benchmark) -> Iterable[str]:
    rates = benchmark.rates
    read = "" if rates.read_gbps is None else f", read {rates.read_gbps:.1f} GB/s"
    seconds = {"loaded in": benchmark.load_s, "first token after": benchmark.first_token_s}
    times = [f"{what} {'an unknown time' if s is None else f'{s:.2f} s'}" for what, s in seconds.items()]
    dtypes = ", ".join(benchmark.dtypes)
    yield f"model    {benchmark.model} ({benchmark.family}), {benchmark.weights} weights in {dtypes}"
    yield (
        f"         {format_count(benchmark.params)} parameters, {format_bytes(benchmark.param_bytes)}; "
        f"{benchmark.shared_slots} shared slots; kernels {benchmark.kernels}"
    )
    yield f"device   {benchmark.device}, torch {benchmark.torch}, {benchmark.threads} CPU threads"
    yield f"rates    copy {rates.copy_gbps:.1f} GB/s{read}, product {rates.tflops:.2f} TFLOP/s"
    yield f"time     {', '.join(times)} of the process"
    yield f"memory   {_size(benchmark.peak_bytes)} at the most"


def _format_decode(cases: Iterable[DecodeCase]) -> Iterable[str]:
    header = ("batch", "context", "ms/step", "tokens/s", "GB/s", "limit ms", "x limit", "experts", "kernels")
    yield "decode   " + " ".join(f"{name:>9}" for name in header) + "  memory"
    for case in cases:
        kernels = "-" if case.kernels_per_step is None else f"{case.kernels_per_step:.0f}"
        numbers = (f"{case.batch}", f"{case.context}", f"{case.ms_per_step:.3f}", f"{case.tokens_per_s:.1f}")
        limits = (f"{case.gbps:.1f}", f"{case.limit_ms:.3f}", f"{case.ratio:.2f}", f"{case.experts_counted:.1f}")
        cells = " ".join(f"{cell:>9}" for cell in (*numbers, *limits, kernels))
        yield f"         {cells}  {_size(case.peak_bytes)}"


def _format_drafts(cases: Iterable[DraftCase]) -> Iterable[str]:
    header = ("batch", "context", "drafts", "ms/step", "tok/step", "accepted", "tokens/s", "x plain")
    yield "drafts   " + " ".join(f"{name:>9}" for name in header)
    for case in cases:
        speedup = "-" if case.speedup is None else f"{case.speedup:.2f}"
        numbers = (f"{case.batch}", f"{case.context}", f"{case.speculate}", f"{case.ms_per_step:.3f}")
        found = (f"{case.tokens_per_step:.2f}", f"{case.acceptance:.3f}", f"{case.tokens_per_s:.1f}", speedup)
        yield "         " + " ".join(f"{cell:>9}" for cell in (*numbers, *found))


def _format_prefill(cases: Iterable[PrefillCase]) -> Iterable[str]:
    header = ("tokens", "ms", "tokens/s", "TFLOP/s", "limit ms", "x limit")
    yield "prefill  " + " ".join(f"{name:>9}" for name in header) + "  memory"
    for case in cases:
        numbers = (f"{case.tokens}", f"{case.ms:.2f}", f"{case.tokens_per_s:.1f}", f"{case.tflops:.3f}")
        cells = " ".join(f"{cell:>9}" for cell in (*numbers, f"{case.limit_ms:.2f}", f"{case.ratio:.2f}"))
        yield f"         {cells}  {_size(case.peak_bytes)}"


def _format_parts(case: DecodeCase) -> Iterable[str]:
    yield f"parts    {'ms':>9} {'limit ms':>9} {'x limit':>9} {'kernels':>9}  batch {case.batch}, {case.parts_of}"
    for part in case.parts:
        ratio = f"{part.ms / part.limit_ms:.2f}" if part.limit_ms else "-"
        kernels = "-" if part.kernels is None else f"{part.kernels:.0f}"
        yield f"{part.name:>9}{part.ms:>9.3f} {part.limit_ms:>9.3f} {ratio:>9} {kernels:>9}"
    if case.kernels_per_step is not None:
        yield f"{'gaps':>9}{case.gaps_ms:>9.3f}"


def _format_sweep(sweep: Sweep) -> Iterable[str]:
    for points in (sweep.tokens, sweep.contexts, sweep.batches):
        if points:
            yield from [*_format_points(points), ""]
    if sweep.contexts or sweep.batches:
        yield f"caches   {sweep.caches}"
    for (axis, reason), group in groupby(sweep.left_out, key=lambda left: (left.axis, left.reason)):
        yield f"left out {axis} {', '.join(str(left.size) for left in group)}: {reason}"


def _format_points(points: Sequence[SweepPoint]) -> Iterable[str]:
    axis = points[0].axis
    header = ("ms", "tokens/s", "bytes ms", "ops ms", "x limit", "experts")
    what = "prefill" if axis == "tokens" else "decode"
    yield f"{what:8} {axis:>9} " + " ".join(f"{name:>10}" for name in header) + "  memory"
    for point in points:
        numbers = (f"{point.ms:.3f}", f"{point.tokens_per_s:.1f}", f"{point.bytes_ms:.3f}", f"{point.flops_ms:.4f}")
        cells = " ".join(f"{cell:>10}" for cell in (*numbers, f"{point.ratio:.2f}", f"{point.experts:.1f}"))
        yield f"{'':8} {point.size:>9} {cells}  {_size(point.peak_bytes)}"


def _size(size: int | None) -> str:
    return UNKNOWN if size is None else format_bytes(size)
