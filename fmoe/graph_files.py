"""Where the compiled graphs of a model are kept, and what they depend on."""

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from fmoe.compile.artefacts import artefact_file, load_artefacts
from fmoe.compile.device import PACKAGE, describe_device, source_hash

from .architectures import KNOWN, Architecture, FamilyConfig


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A file of compiled graphs, which may be there or not."""

    file: Path
    identity: tuple[tuple[str, str], ...]  # what must be equal for the file to be of use
    device: torch.device

    def load(self) -> bool:
        """Put the graphs of the file into torch's caches; whether there were any."""
        return load_artefacts(self.file, dict(self.identity), self.device)


def find_graph_file(
    architecture: Architecture, config: FamilyConfig, dtype: torch.dtype, device: torch.device, kernels: str, /
) -> GraphFile:
    """Name the file of a model's graphs; its name tells models and devices apart, its identity versions."""
    described = describe_device(device)
    model = hashlib.sha256(repr((architecture.MODEL_TYPES, config, dtype, kernels)).encode()).hexdigest()
    identity = {
        "device": f"{described.name} ({described.arch})",
        "versions": described.versions,
        "python": platform.python_version(),
        "functions": source_hash(*_list_sources())[:16],
    }
    return GraphFile(artefact_file(described, model), tuple(identity.items()), device)


def _list_sources() -> list[Path]:
    """List the files whose functions are compiled."""
    models = {Path(str(getattr(family, "__file__", ""))).parent for family in KNOWN}
    folders = (PACKAGE / "functional", PACKAGE / "compile", *sorted(models))
    return [file for folder in folders for file in sorted(folder.glob("*.py"))]
