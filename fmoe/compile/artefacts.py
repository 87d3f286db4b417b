"""Compiled graphs and kernels in one file, which any machine of the same kind can start from.

A file has a line that names the format, a line of JSON (what it was made on and for, the parts and their sum), and the
parts: what torch.compiler gives, and the entries of Triton's cache that hold kernels of fmoe's. Both are programs: a
file is to be taken from machines that are trusted.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .atomic import replacing
from .json_store import LOCK_TIMEOUT_S, cache_folder
from .plan import Device
from .plan_tables import slug

logger = logging.getLogger("fmoe")

MAGIC = b"fmoe graphs 1\n"
TORCH = "torch/"  # what torch.compiler gave of one run, by the hash of its keys
KEYS = "keys/"  # of the same hash: which graphs are in it
TRITON = "triton/"  # entry/file
GROUP = "__grp__"  # begins the name of a file in which Triton lists the others of an entry by their whole paths
ENTRY = re.compile(r"triton/[A-Za-z0-9_=-]+/(?!\.)[A-Za-z0-9_.-]+")
INDUCTOR = "triton_"  # begins the names of Inductor's kernels, which are among torch's own artefacts
AGAIN = "run fmoe warm again"

Parts = Mapping[str, bytes]


def artefact_file(device: Device, model: str, /) -> Path:
    """Name the file of a model on a kind of device; ``model`` is all that its graphs depend on."""
    identity = json.dumps([device.kind, device.name, device.arch, device.units, model])
    name = f"{slug(device.name)}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.graphs"
    return cache_folder() / "graphs" / name


def triton_folder(file: Path, /) -> Path:
    """Name the folder in which Triton keeps its entries while a file is made."""
    return file.with_suffix(".triton")


def write_artefacts(
    file: Path, identity: Mapping[str, str], parts: Parts, /, *, timeout_s: float = LOCK_TIMEOUT_S
) -> None:
    """Write a file whole, and keep of one of the same identity what the parts do not have.

    Args:
        file: from ``artefact_file``; its folder is made.
        identity: what must be equal where it is read.
        parts: by name.
        timeout_s: the longest wait for another writer.

    Raises:
        OSError: the folder cannot be written, or another process writes for longer than ``timeout_s``.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(file.name + ".lock"), timeout=timeout_s):
        before = _read(file, identity)
        merged = {**({} if isinstance(before, str) else _list_others(before, parts)), **parts}
        digest = hashlib.sha256()
        for part in merged.values():
            digest.update(part)
        sizes = [[name, len(part)] for name, part in merged.items()]
        header = {"identity": dict(identity), "parts": sizes, "sha256": digest.hexdigest()}
        with replacing(file) as written, open(written, "wb") as stream:
            stream.write(MAGIC + json.dumps(header).encode() + b"\n")
            stream.writelines(merged.values())


def read_artefacts(file: Path, identity: Mapping[str, str], /) -> Parts:
    """Read the parts of a file.

    Returns:
        The parts by name; empty where there is no file, or, with a logged warning, where it is damaged or was made on
        another kind of machine or with other versions.
    """
    found = _read(file, identity)
    if isinstance(found, str):
        if found:
            logger.warning("ignored the compiled graphs in %s: %s; %s", file, found, AGAIN)
        return {}
    return found


def load_artefacts(file: Path, identity: Mapping[str, str], device: torch.device, /) -> bool:
    """Put what a file holds into the caches of torch and Triton, so that nothing of it is compiled again.

    Args:
        file: from ``artefact_file``.
        identity: of this machine and model.
        device: where the graphs will run.

    Returns:
        Whether there was something to load; a warning is logged where it could not be.
    """
    parts = read_artefacts(file, identity)
    if not parts:
        return False
    try:
        infos = [torch.compiler.load_cache_artifacts(part) for name, part in parts.items() if name.startswith(TORCH)]
        for folder in _find_triton_folders(device):
            unpack_triton(parts, folder)
    except Exception as error:  # torch says nowhere what it raises on artefacts that it cannot read
        logger.warning("ignored the compiled graphs in %s (%s: %s); %s", file, type(error).__name__, error, AGAIN)
        return False
    if None in infos:
        logger.warning("ignored the compiled graphs in %s, which torch cannot read; %s", file, AGAIN)
        return False
    return True


def save_artefacts(file: Path, identity: Mapping[str, str], /) -> tuple[int, int]:
    """Write what was compiled in this process, and the kernels in ``triton_folder``.

    Returns:
        (graphs, kernels).

    Raises:
        RuntimeError: torch has kept nothing.
        OSError: as ``write_artefacts``.
    """
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise RuntimeError(
            "torch has kept no compiled graph; unset what switches its caches off, such as "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE"
        )
    content, info = saved
    graphs = list(info.inductor_artifacts)
    keys = "\n".join(sorted(graphs)).encode()
    digest = hashlib.sha256(keys).hexdigest()[:16]
    kernels = pack_triton(triton_folder(file))
    write_artefacts(file, identity, {TORCH + digest: content, KEYS + digest: keys, **kernels})
    return len(graphs), len({name.split("/")[1] for name in kernels})


@contextlib.contextmanager
def kept_kernels(file: Path, /) -> Iterator[None]:
    """Let Triton keep its kernels in ``triton_folder`` meanwhile, where they are told from those of others."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(triton_folder(file))
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before


def pack_triton(folder: Path, /) -> dict[str, bytes]:
    """Read the entries of a folder of Triton's that hold kernels of fmoe's; Inductor's are among torch's artefacts."""
    parts: dict[str, bytes] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        files = [path for path in sorted(entry.iterdir()) if path.is_file()] if entry.is_dir() else []
        if any(path.name.removeprefix(GROUP).startswith(INDUCTOR) for path in files):
            continue
        names = {f"{TRITON}{entry.name}/{path.name}": path for path in files}
        parts |= {name: path.read_bytes() for name, path in names.items() if ENTRY.fullmatch(name)}
    return parts


def unpack_triton(parts: Parts, folder: Path, /) -> None:
    """Write entries into a folder of Triton's; files that are there stay."""
    for name, part in parts.items():
        if not ENTRY.fullmatch(name):
            continue
        path = folder / name.removeprefix(TRITON)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as written:
            written.write_bytes(_move_group(part, path.parent) if path.name.startswith(GROUP) else part)


def _list_others(before: Parts, parts: Parts) -> Parts:
    """Give what is to be kept of earlier parts: kernels, and graphs of which some are not in the new ones."""
    new = {key for name, keys in parts.items() if name.startswith(KEYS) for key in keys.split(b"\n")}
    known = {
        name.removeprefix(KEYS)
        for name, keys in before.items()
        if name.startswith(KEYS) and new.issuperset(keys.split(b"\n"))
    }
    return {
        name: part for name, part in before.items() if name.startswith(TRITON) or name.partition("/")[2] not in known
    }


def _move_group(content: bytes, folder: Path) -> bytes:
    group: dict[str, Any] = json.loads(content)
    group["child_paths"] = {name: str(folder / Path(path).name) for name, path in group["child_paths"].items()}
    return json.dumps(group).encode()


def _find_triton_folders(device: torch.device) -> list[Path]:
    """List where Triton looks: its own folder, and Inductor's, which replaces it once Inductor has run."""
    if device.type != "cuda":
        return []
    if named := os.environ.get("TRITON_CACHE_DIR"):
        return [Path(named)]
    own = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # set by the artefacts' first use at the latest
    return [own, *([Path(inductor, "triton", str(device.index or 0))] if inductor else [])]


def _read(file: Path, identity: Mapping[str, str]) -> dict[str, bytes] | str:
    """Give the parts of a file, or why there are none; nothing is said of a file that is not there."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"the file cannot be read ({error})"
    if not content.startswith(MAGIC):
        return "it is of another format"
    line, _, payload = content[len(MAGIC) :].partition(b"\n")
    try:
        header = json.loads(line)
        made, parts, digest = (
            dict(header["identity"]),
            [(str(n), int(size)) for n, size in header["parts"]],
            header["sha256"],
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return "it is damaged"
    if made != dict(identity):
        return _explain(made, identity)
    if hashlib.sha256(payload).hexdigest() != digest or sum(size for _, size in parts) != len(payload):
        return "it is damaged"
    found, start = {}, 0
    for name, size in parts:
        found[name] = payload[start : start + size]
        start += size
    return found


def _explain(made: Mapping[str, Any], identity: Mapping[str, str]) -> str:
    for key, here in identity.items():
        if made.get(key) != here:
            return f"it was made with {key} {made.get(key)!s:.200}, this is {here}"
    return "it was made for something else"
