"""An AITER to test against, with what is known of it and where it runs."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from fmoe.compile.aiter_kernels import SYMBOLS
from fmoe.compile.aiter_selftest import run_selftest
from fmoe.compile.aiter_static import NotReadable, find_architecture, find_package, find_version, read_installation
from fmoe.compile.capabilities import AiterRecord

from .build import load_standin, make_standin


class Backend(NamedTuple):
    module: ModuleType
    record: AiterRecord
    device: torch.device

    @property
    def calls(self) -> list[str]:
        """What a stand-in was asked to run, in order."""
        return self.module.core.MACHINE.calls


def standin_backend(folder: Path, /, *, version: str = "v0.1.20", defects: tuple[str, ...] = ()) -> Backend:
    """Write and import a stand-in, and read its files as an installation's."""
    make_standin(folder, version=version, defects=defects)
    record = read_installation(folder / "aiter", SYMBOLS, version=version.removeprefix("v"), arch="gfx942")
    return Backend(load_standin(folder), record, torch.device("cpu"))


def real_backend(importer: Callable[[str], ModuleType], /) -> Backend | None:
    """Import the installed AITER where there is an AMD GPU and its self-test passes."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    device = torch.device("cuda:0")
    try:
        arch, root = find_architecture(device), find_package()
        record = read_installation(root, SYMBOLS, version=find_version(root), arch=arch)
    except NotReadable:
        return None
    if not run_selftest(record, str(device)).ok:
        return None
    module = importer("aiter")
    importer("aiter.fused_moe")
    return Backend(module, record, device)
