"""AITER read without running it: where it is, which release, which names and parameters it has.

Importing AITER runs programs, compiles and may end the process, so everything that its files can tell is read from
them: the syntax trees give the right signatures for every release, which neither ``inspect.signature`` nor the
schemas do.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

from .aiter_kernels import FUSED_MOE, TOPK_SOFTMAX
from .capabilities import AiterRecord

ARCHITECTURES = ("gfx942", "gfx950")
DISTRIBUTIONS = ("amd-aiter", "aiter")  # AMD's releases up to 0.1.7 bore the second name
SHARED_PARAMS = ("num_shared_experts", "shared_expert_scoring_func")

_MARKS = (Path("jit", "core.py"), Path("ops", "moe_op.py"))
_READ = (Path("__init__.py"), *_MARKS, Path("ops", "topk.py"), Path("ops", "enum.py"), Path("fused_moe.py"))
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:(?:a|b|rc|-rc)\d+)?(?:\.post(\d+))?")

VersionKey = tuple[int, int, int, int, int]


class NotReadable(Exception):
    """The installation cannot be used, for the reason that is the message."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function; a ``plain`` one is Python, not a declaration of a compiled op."""

    params: tuple[str, ...]
    required: int
    plain: bool


@dataclass(frozen=True, slots=True)
class Definition:
    """Where a name is defined, the signature of a function and the members of a class."""

    file: Path
    line: int
    signature: Signature | None = None
    members: frozenset[str] | None = None


def find_architecture(device: torch.device, /) -> str:
    """Name the AMD architecture of a device that AITER's kernels run on.

    The variable FMOE_ASSUME_ARCH, meant for tests, is taken at its word.

    Raises:
        NotReadable: it is not an AMD GPU, or one without these kernels.
    """
    arch = os.environ.get("FMOE_ASSUME_ARCH", "")
    if not arch:
        if torch.version.hip is None:
            raise NotReadable(f"aiter needs an AMD GPU; torch {torch.__version__} is not built for ROCm")
        if device.type != "cuda":
            raise NotReadable(f"aiter needs an AMD GPU; the device is {device}")
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    if arch not in ARCHITECTURES:
        raise NotReadable(f"aiter has no kernels for {arch}, only for {' and '.join(ARCHITECTURES)}")
    return arch


def find_package(find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec) -> Path:
    """Find the folder of the installed AITER without executing it.

    Raises:
        NotReadable: there is none, or what bears its name is something else.
    """
    try:
        spec = find("aiter")
    except (ImportError, ValueError, AttributeError) as error:
        raise NotReadable(f"aiter cannot be located ({error})") from error
    if spec is None:
        raise NotReadable("aiter not installed")
    if spec.origin is None:
        raise NotReadable(
            f"aiter not installed: {', '.join(spec.submodule_search_locations or ['a module'])} has its name "
            "and is no package"
        )
    root = Path(spec.origin).parent
    _refuse_others(root, Path(spec.origin))
    return root


def _refuse_others(root: Path, origin: Path) -> None:
    absent = [mark.as_posix() for mark in _MARKS if not (root / mark).is_file()]
    if not absent:
        return
    if origin.name == "__init__.py" and ((root / "jit").is_dir() or (root / "ops").is_dir()):
        raise NotReadable(f"aiter incomplete in {root}: lacks {' and '.join(absent)}; reinstall amd-aiter")
    raise NotReadable(
        f"aiter not AMD's: what is in {root if origin.name == '__init__.py' else origin} only has the same name "
        "(PyPI's 'aiter' handles asynchronous iterators); uninstall it and install AMD's amd-aiter"
    )


def find_version(root: Path, /) -> str:
    """Read the release of an installation from its ``_version.py``, else its distribution's metadata; "" if neither."""
    file = root / "_version.py"
    if file.is_file():
        for statement in _statements(_parse(file).body):
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                names, value = _targets(statement), statement.value
                if (
                    {"version", "__version__"} & names
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                ):
                    return value.value
    for name in DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name != "aiter" or any(path.as_posix() == "aiter/jit/core.py" for path in distribution.files or ()):
            return distribution.version
    return ""


def version_key(version: str, /) -> VersionKey | None:
    """Order releases: a pre-release or development version counts as just before its release.

    Returns:
        A tuple to compare, or None for what is no version.
    """
    match = _VERSION.match(version.removeprefix("v"))
    if match is None:
        return None
    major, minor, patch, post = (int(part or 0) for part in match.groups())
    final = re.search(r"(a|b|rc)\d|dev", version.partition("+")[0]) is None
    return major, minor, patch, post, int(final)


def fingerprint(root: Path, /) -> str:
    """Digest an installation: contents of the files read here, sizes and times of those beside them.

    What AITER compiles into its own folder is left out, since it grows with use.
    """
    digest = hashlib.sha256(str(root.resolve()).encode())
    for folder in (root, root / "ops", root / "jit", root / "jit" / "utils"):
        for file in sorted(folder.glob("*.py")):
            name = file.relative_to(root)
            if name in _READ or name.name == "_version.py":
                digest.update(b"%s %s" % (name.as_posix().encode(), hashlib.sha256(file.read_bytes()).digest()))
            else:
                status = file.stat()
                digest.update(f"{name.as_posix()} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def read_installation(root: Path, symbols: Iterable[str], /, *, version: str, arch: str) -> AiterRecord:
    """Say what an installation has; whether it works is not known yet.

    Args:
        root: the package's folder.
        symbols: names to look for, as ``aiter.fused_moe.fused_moe``.
        version: its release.
        arch: the GPU.

    Raises:
        NotReadable: it has no ``topk_softmax`` of a known form, or a file cannot be parsed.
    """
    key = version_key(version)
    record = AiterRecord(present=False, version=version, arch=arch)
    trees: dict[Path, ast.Module] = {}
    found = {symbol: definition for symbol in symbols if (definition := _resolve(root, symbol, trees))}
    topk = _resolve(root, TOPK_SOFTMAX, trees)
    if topk is None or topk.signature is None:
        raise NotReadable(f"aiter {version or '(unknown version)'} in {root} has no topk_softmax")
    arity = topk_arity(topk.signature)
    if arity == 0:
        raise NotReadable(f"aiter {version} has a topk_softmax of unknown form: {', '.join(topk.signature.params)}")
    fused = _resolve(root, FUSED_MOE, trees)
    return replace(
        record,
        topk_arity=arity,
        gating_stride_safe=arity == 7 or (key is not None and key >= (0, 1, 11, 0, 1)),
        # Only releases that are Python around a compiled op have the repaired kernels.
        slow_path_stride_safe=topk.signature.plain and key is not None and key >= (0, 1, 19, 1, 1),
        symbols=tuple(found),
        fused_moe_params=fused.signature.params if fused and fused.signature else (),
    )


def topk_arity(signature: Signature, /) -> int:
    """Tell the two forms of ``topk_softmax`` apart: 7 positional arguments, 5, or 0 for neither."""
    if signature.params[5:7] == SHARED_PARAMS and signature.required <= 7:
        return 7
    return 5 if len(signature.params) >= 5 and signature.required <= 5 else 0


def check_checkout(root: Path, symbols: Iterable[str], /) -> dict[str, str]:
    """Look for names in a checkout of AITER, installed or not.

    Args:
        root: the checkout, or the package's folder in it.
        symbols: names, as ``aiter.topk_softmax`` or ``aiter.QuantType.No``.

    Returns:
        For each name ``file:line`` of its definition, or "" where there is none.

    Raises:
        FileNotFoundError: there is no AITER at ``root``.
        NotReadable: a file of it cannot be parsed.
    """
    places = [folder for folder in (root, root / "aiter") if all((folder / mark).is_file() for mark in _MARKS)]
    if not places:
        raise FileNotFoundError(
            f"expected a checkout of AITER with aiter/jit/core.py and aiter/ops/moe_op.py, found none in {root}"
        )
    trees: dict[Path, ast.Module] = {}
    found = {symbol: _resolve(places[0], symbol, trees) for symbol in symbols}
    return {
        symbol: f"{at.file.relative_to(places[0]).as_posix()}:{at.line}" if at else "" for symbol, at in found.items()
    }


def _resolve(root: Path, symbol: str, trees: dict[Path, ast.Module]) -> Definition | None:
    """Find where a name is defined, through the imports of the modules on the way.

    A member of a class counts as found where the class is made at run time, as some releases make their enums.
    """
    names, folder = symbol.removeprefix("aiter.").split("."), root
    file = root / "__init__.py"
    while len(names) > 1 and (inner := _module_file(folder / names[0])) is not None:
        file, folder = inner, folder / names.pop(0)
    found = _find(root, file, names[0], trees, set())
    if found is None or len(names) == 1 or found.members is None or names[1] in found.members:
        return found
    return None


def _find(root: Path, file: Path, name: str, trees: dict[Path, ast.Module], seen: set[Path]) -> Definition | None:
    if file in seen:
        return None
    seen.add(file)
    if file not in trees:
        trees[file] = _parse(file)
    starred, found = [], None
    for statement in _statements(trees[file].body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name:
            found = Definition(file, statement.lineno, _read_signature(statement))
        elif isinstance(statement, ast.ClassDef) and statement.name == name:
            members = frozenset().union(*(_targets(inner) for inner in statement.body))
            found = Definition(file, statement.lineno, members=members)
        elif name in _targets(statement):
            found = Definition(file, statement.lineno)
        elif isinstance(statement, ast.ImportFrom):
            base = _imported_file(root, file, statement)
            for alias in statement.names:
                if alias.name == "*" and base is not None:
                    starred.append(base)
                elif (alias.asname or alias.name) == name:
                    inner = _find(root, base, alias.name, trees, seen) if base else None
                    found = inner or Definition(file, statement.lineno)
    if found is not None or name.startswith("_"):
        return found
    mentioning = [
        base for base in reversed(starred) if name.encode() in base.read_bytes() or base.name == "__init__.py"
    ]
    return next((inner for base in mentioning if (inner := _find(root, base, name, trees, seen))), None)


def _parse(file: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file's own, about its escapes
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError) as error:
        raise NotReadable(f"aiter cannot be read: {file}: {error}") from error


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Visit the statements of a module, those inside ``if`` and ``try`` too, but not inside functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = [*getattr(statement, "body", []), *getattr(statement, "orelse", [])]
            handlers = [line for handler in getattr(statement, "handlers", []) for line in handler.body]
            yield from _statements([*inner, *handlers, *getattr(statement, "finalbody", [])])


def _targets(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        return {statement.target.id}
    return set()


def _read_signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    compiled = any("compile_ops" in ast.unparse(decorator) for decorator in function.decorator_list)
    return Signature((*positional, *keywords), len(positional) - len(arguments.defaults), not compiled)


def _module_file(path: Path) -> Path | None:
    return next((file for file in (path / "__init__.py", path.with_name(path.name + ".py")) if file.is_file()), None)


def _imported_file(root: Path, file: Path, statement: ast.ImportFrom) -> Path | None:
    """Find the file that ``from x import ...`` reads, if it is the package's own."""
    parts = statement.module.split(".") if statement.module else []
    if statement.level:
        return _module_file(file.parents[statement.level - 1].joinpath(*parts))
    return _module_file(root.joinpath(*parts[1:])) if parts[:1] == ["aiter"] else None
