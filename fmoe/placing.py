"""Where a model is to lie and in which dtype: the caller's words and this machine's memory -> device and dtype."""

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from .checkpoint import MODEL_DTYPES

MEMINFO = Path("/proc/meminfo")
FP8_CAPABILITY = (8, 9)
CONTROL_GROUP = Path("/sys/fs/cgroup")
logger = logging.getLogger("fmoe")


def resolve_device(requested: str | torch.device) -> torch.device:
    """Return the device to load on; "auto" is the current CUDA (or ROCm) device where there is one, else the CPU."""
    if not isinstance(requested, str | torch.device):
        raise ValueError(f"device={requested!r} must be a string or a torch.device; known are auto, cpu, cuda, cuda:N")
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {str(requested)!r}; known are auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device {str(requested)!r} was asked for, but torch finds no GPU; use 'cpu' or 'auto'")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"device {str(requested)!r} was asked for, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def resolve_dtype(
    requested: str | torch.dtype, *, stored: torch.dtype, num_params: int, device: torch.device
) -> torch.dtype:
    """Return the dtype to load in.

    "auto" is the checkpoint's dtype on a GPU. On a CPU it is float32, which is several times faster there than
    bfloat16, unless ``num_params`` of them do not fit in the memory that is free.
    """
    if isinstance(requested, str) and requested != "auto":
        requested = MODEL_DTYPES.get(requested, requested)
    if isinstance(requested, torch.dtype) and requested in MODEL_DTYPES.values():
        return requested
    if requested != "auto":
        raise ValueError(f"unknown dtype {str(requested)!r}; known are auto, {', '.join(MODEL_DTYPES)}")
    if device.type != "cpu" or stored == torch.float32:
        return stored
    needed, free = 4 * num_params, available_bytes()
    if free is not None and needed > free:
        logger.info("dtype: %s (float32 needs %.1f GiB, %.1f GiB are free)", stored, needed / 2**30, free / 2**30)
        return stored
    return torch.float32


def resolve_state_dtype(requested: str | torch.dtype, /, *, recurrent: bool) -> torch.dtype:
    """Return the dtype in which recurrent states are kept; "auto" is float32.

    Raises:
        ValueError: another dtype, or bfloat16 for a model without such states.
    """
    known = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
    dtype = known.get(requested) if isinstance(requested, str) else requested
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state_dtype={str(requested)!r} must be auto, float32 or bfloat16")
    if dtype != torch.float32 and not recurrent:
        raise ValueError(f"state_dtype={str(requested)!r} is for recurrent states, and this model has none; drop it")
    return dtype


def why_not_fp8(device: torch.device, /) -> str:
    """Say why weights in FP8 blocks are not kept on a device; empty where they are."""
    if device.type != "cuda":
        return f"FP8 is kept on GPUs alone, this is {device.type!r}"
    if torch.version.hip:
        return "on ROCm, FP8 is not kept yet"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        return f"FP8 needs a GPU of compute capability 8.9, this has {capability[0]}.{capability[1]}"
    return ""


def available_bytes() -> int | None:
    """Return the memory that this process may still take: the machine's and its control group's; None if unknown."""
    return min(chain(_machine_bytes(), _control_group_bytes()), default=None)


def _machine_bytes() -> Iterator[int]:
    if MEMINFO.is_file():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _control_group_bytes() -> Iterator[int]:
    limit, used = CONTROL_GROUP / "memory.max", CONTROL_GROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        statistics = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
        # cached files count as used but give way
        yield int(text) - int(used.read_text()) + int(statistics.get("inactive_file", 0))
