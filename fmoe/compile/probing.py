"""What one device can run, and why not what it cannot: the machine is asked in the order that harms least."""

import importlib.metadata
import importlib.util
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from filelock import FileLock

from .aiter_kernels import SYMBOLS
from .aiter_selftest import LIMIT_S, VERSION, Outcome, run_selftest
from .aiter_static import NotReadable, find_architecture, find_package, find_version, fingerprint, read_installation
from .capabilities import AiterRecord, Availability, Capabilities
from .probe_cache import cache_file, cache_key, keep_record, recall_record

logger = logging.getLogger("fmoe")

SelfTest = Callable[[AiterRecord, str], Outcome]


def probe(
    device: torch.device, /, *, fresh: bool = False, selftest: SelfTest = run_selftest, ask_aiter: bool = True
) -> Capabilities:
    """Find out what a device can run.

    AITER is neither imported here nor looked for where there is no AMD GPU; where there is one, its files are read
    and it is tried out in a process of its own, once: the outcome is kept on disk.

    Args:
        device: where a model's parameters will be.
        fresh: try AITER out again.
        selftest: how to try it out.
        ask_aiter: False leaves AITER alone.
    """
    aiter = AiterRecord(present=False, reason="aiter was not asked for")
    if ask_aiter:
        aiter = probe_aiter(device, fresh=fresh, selftest=selftest)
    kind, name, arch, units = _describe_device(device)
    return Capabilities(
        device_type=kind,
        device_name=name,
        arch=arch,
        units=units,
        torch=str(torch.__version__),
        triton=probe_triton(device),
        aiter=aiter,
        grouped_mm=_probe_grouped_mm(device),
    )


def probe_aiter(device: torch.device, /, *, fresh: bool = False, selftest: SelfTest = run_selftest) -> AiterRecord:
    """Find out whether AITER can be used, and how; the arguments are those of ``probe``."""
    arch = version = ""
    try:
        arch = find_architecture(device)
        root = find_package()
        version = find_version(root)
        key = cache_key(
            version=version,
            fingerprint=fingerprint(root),
            torch=str(torch.__version__),
            device_type=device.type,
            arch=arch,
            selftest=VERSION,
            symbols=tuple(SYMBOLS),
        )
        if not fresh and (kept := recall_record(key)) is not None:
            return kept
        record = read_installation(root, tuple(SYMBOLS), version=version, arch=arch)
    except (NotReadable, OSError) as error:
        return AiterRecord(present=False, reason=str(error), version=version, arch=arch)
    return _try_out(key, record, str(device), fresh, selftest)


def _try_out(key: str, record: AiterRecord, device: str, fresh: bool, selftest: SelfTest) -> AiterRecord:
    """Run the self-test, or wait for another process that does, and keep the outcome."""
    lock = FileLock(cache_file().with_name("aiter-self-test.lock"), timeout=LIMIT_S)
    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        logger.debug("the self-test of AITER runs without a lock (%s)", error)
    try:
        if not fresh and (kept := recall_record(key)) is not None:
            return kept
        outcome = selftest(record, device)
        record = replace(record, present=outcome.ok, reason=outcome.reason)
        keep_record(key, record)
        return record
    finally:
        lock.release()


def _describe_device(device: torch.device) -> tuple[str, str, str, int]:
    """Give type, name, architecture and number of units of a device."""
    if device.type != "cuda":
        name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
        arch = os.environ.get("FMOE_ASSUME_ARCH") or platform.machine()
        return device.type, name, arch, os.cpu_count() or 1
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
    return device.type, properties.name, arch, properties.multi_processor_count


def probe_triton(device: torch.device, /) -> Availability:
    """Find out whether Triton's kernels run on a device; on a CPU only where TRITON_INTERPRET=1 interprets them."""
    version = _triton_version()
    if device.type == "cpu" and version and os.environ.get("TRITON_INTERPRET") == "1":
        return Availability(True, "interpreted, slowly", version)
    if device.type != "cuda":
        return Availability(False, f"triton needs a GPU; the device is {device}", version)
    if not version:
        return Availability(False, "triton not installed; a build of torch for a GPU brings it")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return Availability(False, f"fmoe's kernels need sm_80 or later; {device} is older", version)
    return Availability(True, "", version)


def _triton_version() -> str:
    """Read the version from triton's files: importing it takes a second."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _probe_grouped_mm(device: torch.device) -> Availability:
    """Multiply two small groups: no table says where every release's grouped product runs."""
    rows = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    weights = torch.ones(2, 16, 16, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
    try:
        product = F.grouped_mm(rows, weights, offs=ends)
        right = bool((product == 16).all())
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return Availability(False, f"torch's grouped_mm does not run here ({error})", str(torch.__version__))
    return Availability(right, "" if right else "torch's grouped_mm computes wrong numbers", str(torch.__version__))
