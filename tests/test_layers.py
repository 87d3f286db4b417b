"""The rules of the tree, read from the sources: who may import whom, where imports stand, names and sizes."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.relative_to(ROOT).as_posix() for top in ("fmoe", "models") for path in (ROOT / top).rglob("*.py"))
MAX_LINES = {"fmoe": 400, "models": 250, "bench": 400, "tests": 400}

# What a layer may import besides the standard library; a name stands for all below it.
FUNCTIONAL = {"torch", "einops", "fmoe.functional"}
MODELS = FUNCTIONAL | {"fmoe.models"}
COMPILE = {"torch", "fmoe.functional", "fmoe.compile", "platformdirs", "filelock"}
# The reference functions know neither the environment nor the machine.
UNKNOWN_TO_REFERENCE = {"os", "platform", "subprocess", "torch.cuda", "torch.backends"}

# Each of these is imported in one place.
DOORS = {
    "aiter": ("fmoe/compile/select.py", "fmoe/compile/aiter_selftest.py"),
    "triton": "fmoe/compile/kernels/",
    "fmoe.compile.kernels": (
        "fmoe/compile/ops.py",
        "fmoe/compile/attend_ops.py",
        "fmoe/compile/attend_few_ops.py",
        "fmoe/compile/chunk_ops.py",
        "fmoe/compile/delta_ops.py",
        "fmoe/compile/head_ops.py",
        "fmoe/compile/linear_ops.py",
        "fmoe/compile/normed_ops.py",
        "fmoe/compile/tune_ops.py",
        "fmoe/compile/kernels/",
    ),
    "fmoe.models": ("fmoe/architectures.py", "models/"),
    "matplotlib": "fmoe/benchmark_plot.py",
}


def dependencies() -> set[str]:
    """Read the names of the packages that an installation of fmoe always brings."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {requirement.split(">")[0].split("<")[0].split("=")[0] for requirement in requirements}


def module_name(file: str) -> str:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"fmoe.{name}" if name.split(".")[0] == "models" else name


def imported_names(node: ast.AST, file: str) -> list[str]:
    """List the absolute names that one node imports; of ``from a import b`` it is a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        package = module_name(file).split(".")
        if not file.endswith("/__init__.py"):
            package = package[:-1]
        base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
        start = ".".join(part for part in (base, node.module) if part)
        return [f"{start}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
        first = node.args[0] if node.args else None
        return [first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "(computed)"]
    return []


def is_below(name: str, tops: set[str]) -> bool:
    return any(name == top or name.startswith(top + ".") for top in tops)


def arrow_fault(name: str, file: str) -> str | None:
    """Say what is wrong with ``file`` importing ``name``, or None."""
    for target, door in DOORS.items():
        if is_below(name, {target}) and not file.startswith(door):
            return f"{name} is imported only by {door}"
    reference = file.startswith(("fmoe/functional/", "models/"))
    if reference and is_below(name, UNKNOWN_TO_REFERENCE):
        return f"{name} asks the environment or the machine"
    if name.split(".")[0] in sys.stdlib_module_names or is_below(name, set(DOORS)):
        return None
    if file.startswith("fmoe/functional/"):
        allowed = FUNCTIONAL
    elif file.startswith("models/"):
        allowed = MODELS
    elif file.startswith("fmoe/compile/"):
        allowed = COMPILE
    else:
        allowed = dependencies() | {"fmoe"}
    return None if is_below(name, allowed) else f"{name} is above this layer or is not a dependency"


def import_faults(source: str, file: str) -> list[str]:
    """List the imports of one file that break a rule."""
    tree = ast.parse(source)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {inner for function in functions for inner in ast.walk(function)}
    faults = []
    for node in ast.walk(tree):
        for name in imported_names(node, file):
            if node in inside and (file, name) != ("fmoe/compile/select.py", "aiter"):
                faults.append(f"{file}:{node.lineno}: {name} is imported inside a function")
            elif fault := arrow_fault(name, file):
                faults.append(f"{file}:{node.lineno}: {fault}")
        if isinstance(node, ast.ImportFrom) and file.startswith("models/") and node.level == 0:
            names = imported_names(node, file)
            faults += [f"{file}:{node.lineno}: a sibling is imported with '.'" for n in names if "fmoe.models" in n]
    return faults


def name_faults(source: str, file: str, siblings: set[str]) -> list[str]:
    """List the functions and re-exports that hide a module: it could then no longer be reached by its name."""
    body = ast.parse(source).body
    stem = Path(file).stem
    faults = [
        f"{file}:{node.lineno}: the function {node.name} bears its module's name"
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == stem
    ]
    if stem != "__init__":
        return faults
    package = module_name(file)
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias, name in zip(node.names, imported_names(node, file), strict=True):
                bound = alias.asname or alias.name
                if bound in siblings and name != f"{package}.{bound}":
                    faults.append(f"{file}:{node.lineno}: {bound} hides the module {package}.{bound}")
    return faults


def siblings_of(file: str) -> set[str]:
    package = module_name(file)
    return {name.rpartition(".")[2] for name in map(module_name, FILES) if name.rpartition(".")[0] == package}


def test_there_are_files() -> None:
    assert any(file.startswith("fmoe/") for file in FILES)
    assert any(file.startswith("models/") for file in FILES)


@pytest.mark.parametrize("file", FILES)
def test_no_arrow_points_up(file: str) -> None:
    assert import_faults((ROOT / file).read_text(), file) == []


@pytest.mark.parametrize("file", FILES)
def test_no_name_hides_a_module(file: str) -> None:
    assert name_faults((ROOT / file).read_text(), file, siblings_of(file)) == []


@pytest.mark.parametrize("top", MAX_LINES)
def test_sizes(top: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / top).rglob("*.py")}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MAX_LINES[top]} == {}


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("fmoe/functional/moe.py", "import fmoe.compile", "above this layer"),
        ("fmoe/functional/moe.py", "from fmoe import loading", "above this layer"),
        ("fmoe/functional/moe.py", "from ..loading import load", "above this layer"),
        ("fmoe/functional/moe.py", "import os", "environment"),
        ("fmoe/functional/moe.py", "import numpy", "not a dependency"),
        ("models/mixtral.py", "from fmoe.generation import generate", "above this layer"),
        ("models/mixtral.py", "from fmoe.compile import step", "above this layer"),
        ("models/mixtral.py", "from fmoe.models.weights import Piece", "with '.'"),
        ("fmoe/compile/step.py", "import fmoe.models", "only by"),
        ("fmoe/compile/step.py", "import fmoe.architectures", "above this layer"),
        ("fmoe/compile/step.py", "import triton", "only by"),
        ("fmoe/compile/step.py", "from .kernels import experts", "only by"),
        ("fmoe/generation.py", "import fmoe.models", "only by"),
        ("fmoe/generation.py", "import aiter", "only by"),
        ("fmoe/generation.py", "import transformers", "not a dependency"),
        ("fmoe/generation.py", "def f():\n    import math", "inside a function"),
        ("fmoe/generation.py", "f = lambda: __import__('math')", "inside a function"),
        ("fmoe/generation.py", "class A:\n    def f(self):\n        from torch import nn", "inside a function"),
        ("fmoe/compile/select.py", "def f():\n    import triton", "inside a function"),
        ("fmoe/compile/aiter_kernels.py", "def f():\n    import aiter", "inside a function"),
    ],
)
def test_a_broken_import_rule_is_found(file: str, source: str, fault: str) -> None:
    faults = import_faults(source, file)
    assert faults
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fmoe/functional/moe.py", "import math\nfrom torch import Tensor\nfrom .routing import Routing"),
        ("models/mixtral.py", "from .weights import Piece\nfrom fmoe.functional import moe_layer\nimport einops"),
        ("fmoe/compile/select.py", "def f():\n    import aiter"),
        ("fmoe/compile/select.py", "def f():\n    return importlib.import_module('aiter')"),
        ("fmoe/compile/ops.py", "if find_spec('triton'):\n    from .kernels import experts"),
        ("fmoe/compile/kernels/experts.py", "import triton\nimport triton.language as tl"),
        ("fmoe/architectures.py", "import fmoe.models as models"),
        ("fmoe/cli.py", "import click\nfrom .generation import generate"),
    ],
)
def test_an_allowed_import_is_no_fault(file: str, source: str) -> None:
    assert import_faults(source, file) == []


def test_a_name_that_hides_a_module_is_found() -> None:
    assert name_faults("def stream(): ...", "fmoe/stream.py", set())
    assert name_faults("from .generation import stream as stream", "fmoe/__init__.py", {"stream", "generation"})
    assert not name_faults("from . import stream as stream", "fmoe/__init__.py", {"stream", "generation"})


def test_everything_imports_without_aiter_and_triton() -> None:
    modules = [module_name(file) for file in FILES if not file.startswith("fmoe/compile/kernels/")]
    modules = [name for name in modules if name != "fmoe.__main__"]  # importing that runs the command
    code = (
        "import importlib, sys\n"
        "sys.modules.update(aiter=None, triton=None)\n"  # None makes an import fail as for an absent package
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code, "fmoe", *modules], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
