"""Compile kernels for a device that is not here, and read what they use: registers, spills, shared memory.

Letters: T tokens, E routed experts, K routed experts per token, S shared slots, D hidden, F expert width.
"""
# mypy: disable-error-code="no-untyped-call, misc"

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fmoe.functional.quant import FP8, Fp8, Weight, count_blocks
from fmoe.functional.routing import RouterConfig

from ..settings import Settings, why_not_fp8
from .layer import run_moe_layer

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED_LIMITS = {"sm_90": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 64 * 1024}
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Launch(NamedTuple):
    """One recorded launch."""

    kernel: Any
    values: dict[str, Any]
    options: dict[str, Any]


class Usage(NamedTuple):
    """What one compiled kernel uses."""

    kernel: str
    registers: int
    spills: int
    shared: int


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches instead of running them; tensors may be on the meta device."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        launches.append(Launch(kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs, options))

    with patch.object(JITFunction, "run", record):
        yield launches


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    return "i32"


def compile_launch(launch: Launch, target: str) -> Usage:
    """Compile one launch for a target, pointers aligned to 16 bytes as torch allocates them.

    Raises:
        NotImplementedError: weights in FP8 for a device without it.
    """
    reads_fp8 = any(isinstance(value, Tensor) and value.dtype == FP8 for value in launch.values.values())
    if reads_fp8 and (reason := why_not_fp8(TARGETS[target].backend, target)):
        raise NotImplementedError(f"{launch.kernel.__name__} does not compile for {target}: {reason}")
    constant = {p.name for p in launch.kernel.params if p.is_constexpr}
    # The launcher, too, makes a constant of an absent tensor and of the number one.
    constant |= {name for name, value in launch.values.items() if value is None or (type(value) is int and value == 1)}
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in constant else _type(launch.values[name]) for name in names}
    aligned = [
        i
        for i, name in enumerate(names)
        if isinstance(value := launch.values[name], Tensor) or (signature[name] == "i32" and value % 16 == 0)
    ]
    source = ASTSource(
        launch.kernel,
        signature,
        {(i,): launch.values[name] for i, name in enumerate(names) if name in constant},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
    name = launch.kernel.__name__
    if target == "sm_90":
        registers, spills = _read_cubin(compiled.asm["cubin"])
    else:
        registers, spills = _read_amdgcn(compiled.asm["amdgcn"])
    return Usage(name, registers, spills, compiled.metadata.shared)


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack: our kernels have no other use of it than spills."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[-1]
    return int(registers), int(stack)


def _read_amdgcn(text: str) -> tuple[int, int]:
    """Vector registers, and spilled vector and scalar registers."""
    counts = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s*(\d+)", text)}
    return counts["vgpr_count"], counts["vgpr_spill_count"] + counts["sgpr_spill_count"]


def empty_weight(
    *shape: int, dtype: torch.dtype, parts: int = 1, rest: int = 0, activations: torch.dtype = torch.bfloat16
) -> Weight:
    """Give a weight on the meta device, in FP8 blocks where that is its dtype.

    Args:
        shape: of the weight.
        dtype: of the weight.
        parts: 2 for gate and up rows.
        rest: of a matrix in FP8 blocks, how many of its rows are not.
        activations: their dtype.
    """
    *outer, rows, columns = shape
    if dtype != FP8:
        return torch.empty(shape, dtype=dtype, device="meta")
    w = torch.empty(*outer, rows - rest, columns, dtype=dtype, device="meta")
    scale = torch.empty(*outer, count_blocks(rows - rest, parts=parts), count_blocks(columns), device="meta")
    return Fp8(w, scale, torch.empty(rest, columns, dtype=activations, device="meta") if rest else None)


def record_layer(
    settings: Settings,
    config: RouterConfig,
    /,
    *,
    tokens: int,
    slots: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    activations: torch.dtype = torch.bfloat16,
) -> list[Launch]:
    """Record the launches of ``run_moe_layer`` for a shape, with one gate row where there are shared slots.

    Args:
        dtype: of the experts.
        activations: dtype of x where that of the experts is FP8.
    """
    experts = config.num_experts + slots
    of_x = activations if dtype == FP8 else dtype
    with recorded_launches() as launches:
        run_moe_layer(
            torch.empty(tokens, hidden, dtype=of_x, device="meta"),
            torch.empty(config.num_experts + min(slots, 1), hidden, dtype=of_x, device="meta"),
            None,
            empty_weight(experts, 2 * width, hidden, dtype=dtype, parts=2),
            empty_weight(experts, hidden, width, dtype=dtype),
            config,
            settings,
        )
    return launches


Compile = Callable[[Launch, str], Usage]


def find_misfits(launches: list[Launch], target: str, compile_one: Compile = compile_launch) -> list[str]:
    """Say of each launch that spills or takes too much shared memory what it uses; an empty list fits."""
    faults = []
    for launch in launches:
        usage = compile_one(launch, target)
        if usage.spills or usage.shared > SHARED_LIMITS[target]:
            faults.append(f"{target}: {usage}")
    return faults
