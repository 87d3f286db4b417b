"""What measurements on a device depend on: its name, its size, the versions of the software, the kernels' source."""

import hashlib
import os
import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .plan import Device
from .settings import Target, find_target

PACKAGE = Path(__file__).parents[1]
CPU_NAMES = Path("/proc/cpuinfo")
TRITON_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")


def describe_device(device: torch.device, /) -> Device:
    """Describe a device and the software on it; equal descriptions share measurements.

    Args:
        device: CPU, CUDA or ROCm.

    Raises:
        NotImplementedError: any other kind.
    """
    versions = describe_versions(source_hash(*kernel_sources()))
    if device.type == "cpu":
        arch = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        return Device("cpu", _cpu_name(), arch, torch.get_num_threads(), versions)
    if device.type != "cuda":
        raise NotImplementedError(f"nothing is measured on {device.type!r} devices; use cpu or cuda")
    properties = torch.cuda.get_device_properties(device)
    units = properties.multi_processor_count
    if torch.version.hip:
        return Device("hip", properties.name, properties.gcnArchName.split(":")[0], units, versions)
    return Device("cuda", properties.name, f"sm_{properties.major}{properties.minor}", units, versions)


def target_of(device: torch.device, /) -> Target:
    """Name what kernels are compiled for on a device; a CPU, which interprets them, is the plainest GPU."""
    if torch.version.hip:
        return "hip"
    return _target_of_gpu(device.index) if device.type == "cuda" else "cuda"


@lru_cache(maxsize=64)
def _target_of_gpu(index: int | None) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    return find_target("cuda", f"sm_{major}{minor}")


def kernel_sources(package: Path = PACKAGE, /) -> list[Path]:
    """List the files that decide how fast an implementation is: the kernels, their settings, the plain functions."""
    compile_folder, functional = package / "compile", package / "functional"
    kernels = sorted((compile_folder / "kernels").glob("*.py"))
    settings = [compile_folder / name for name in ("settings.py", "linear_settings.py")]
    return [*kernels, *settings, functional / "experts.py", functional / "mlp.py"]


@lru_cache(maxsize=8)
def source_hash(*files: Path) -> str:
    """Hash names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def describe_versions(source: str, /) -> str:
    """Name the versions of torch, Triton and CUDA or HIP, and the source by the start of its hash."""
    runtime = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda or 'none'}"
    return f"torch {torch.__version__}, triton {_triton_version()}, {runtime}, kernels {source[:16]}"


def _triton_version() -> str:
    for name in TRITON_PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def _cpu_name() -> str:
    if CPU_NAMES.exists():
        for line in CPU_NAMES.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or f"{platform.machine()} with {os.cpu_count()} cores"
