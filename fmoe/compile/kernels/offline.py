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

from fmoe.functional.routing import RouterConfig

from ..settings import Settings
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
    """Compile one launch for a target, pointers aligned to 16 bytes as torch allocates them."""
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


def record_layer(
    settings: Settings, config: RouterConfig, /, *, tokens: int, slots: int, hidden: int, width: int, dtype: torch.dtype
) -> list[Launch]:
    """Record the launches of ``run_moe_layer`` for a shape, with one gate row where there are shared slots."""
    experts = config.num_experts + slots

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recorded_launches() as launches:
        run_moe_layer(
            empty(tokens, hidden),
            empty(config.num_experts + min(slots, 1), hidden),
            None,
            empty(experts, 2 * width, hidden),
            empty(experts, hidden, width),
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
