"""What tuning asks of the kernels' package: drop candidates that do not compile, multiply FP8 blocks out on a GPU."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from fmoe.functional.quant import Weight, read_weight

from .autotune import Task
from .candidates import Inputs
from .plan import Device, Key

if find_spec("triton"):
    from .kernels.fp8 import read_fp8
    from .kernels.prune import prune_tasks


def keep_compiling(
    tasks: Sequence[Task], device: Device, inputs: Mapping[Key, Inputs], /, *, budget_s: float
) -> list[Task]:
    """Compile candidates ahead and drop those that do not fit; without Triton none needs to be compiled.

    Args:
        tasks: each with its default first.
        device: whose architecture counts.
        inputs: what the kernels of a key are compiled for besides it.
        budget_s: of all.

    Returns:
        The tasks with what is left.
    """
    if device.kind == "cpu" or not find_spec("triton"):
        return list(tasks)
    return prune_tasks(tasks, device, inputs, budget_s=budget_s)


def read_plain(w: Weight, dtype: torch.dtype, /, *, parts: int = 1) -> Tensor:
    """Give a weight as a tensor; on a GPU one kernel multiplies FP8 blocks out, with no copy in float32 between.

    Args:
        w: a weight; a tensor is given back as it is.
        dtype: of the result where it is quantised.
        parts: 2 for gate and up rows.
    """
    on_gpu = any(part.is_cuda for part in (w if isinstance(w, tuple) else (w,)) if part is not None)
    return read_fp8(w, dtype, parts=parts) if on_gpu and find_spec("triton") else read_weight(w, dtype, parts=parts)
