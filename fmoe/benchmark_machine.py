"""What a machine does on its own: how fast it moves memory and multiplies, how much memory and time went by."""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from .byte_limit import Rates

STAT, UPTIME = Path("/proc/self/stat"), Path("/proc/uptime")
STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")
START_TIME = 19  # its place among the fields behind the process's name
GPU_BYTES, CPU_BYTES = 1 << 31, 1 << 28  # moved by one measurement of a rate
GPU_SIDE, CPU_SIDE = 8192, 512  # of the square matrices that are multiplied
RATE_SAMPLES = 9
GPU_CALLS = 8  # of one sample, so that starting and waiting do not count


def measure_rates(device: torch.device, dtype: torch.dtype, /, *, nbytes: int | None = None) -> Rates:
    """Measure how fast a device moves memory and multiplies matrices.

    Args:
        device: CPU or GPU.
        dtype: of the matrices.
        nbytes: size of what is copied or read; None takes what no cache holds.
    """
    on_gpu = device.type == "cuda"
    copy_gbps, read_gbps = _move_memory(device, nbytes or (GPU_BYTES if on_gpu else CPU_BYTES))
    side = GPU_SIDE if on_gpu else CPU_SIDE
    x = torch.ones(side, side, dtype=dtype, device=device)
    tflops = 2 * side**3 / _median_s(partial(torch.mm, x, x), device) / 1e12
    return Rates(copy_gbps, read_gbps, tflops)


def _move_memory(device: torch.device, nbytes: int) -> tuple[float, float | None]:
    """Measure a copy, both of its sides counted, and on a GPU a pure read; a sum on a CPU is no pure read."""
    a = torch.ones(nbytes // 4, device=device)
    copy_gbps = 2 * a.nbytes / _median_s(partial(torch.zeros_like(a).copy_, a), device) / 1e9
    return copy_gbps, a.nbytes / _median_s(a.sum, device) / 1e9 if device.type == "cuda" else None


def process_age_s() -> float | None:
    """Return the seconds since this process started; None where the system does not tell."""
    if not STAT.is_file() or not UPTIME.is_file():
        return None
    ticks = int(STAT.read_text().rpartition(")")[2].split()[START_TIME])
    return float(UPTIME.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    calls = GPU_CALLS if device.type == "cuda" else 1
    samples = []
    for _ in range(2 + RATE_SAMPLES):
        finish(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        finish(device)
        samples.append((time.perf_counter() - begin) / calls)
    return statistics.median(samples[2:])


def finish(device: torch.device, /) -> None:
    """Wait until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device, /) -> None:
    """Forget the most memory that was taken so far, where the system lets one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            REFERENCES.write_text("5")


def read_peak_bytes(device: torch.device, /) -> int | None:
    """Return the most memory taken since the last reset: allocated on a GPU, resident in a CPU's; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not STATUS.is_file():
        return None
    sizes = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(sizes[0]) * 1024 if sizes else None
