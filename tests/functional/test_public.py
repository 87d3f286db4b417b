"""The public names of fmoe.functional: each is exported, and each function is called by a test of its own module."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import fmoe.functional

SOURCES = sorted(p for p in Path(fmoe.functional.__file__).parent.glob("*.py") if p.stem != "__init__")
TESTS = Path(__file__).parent
EXPORTED = {
    name: value
    for name, value in vars(fmoe.functional).items()
    if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value))
}
FUNCTIONS = sorted(name for name, value in EXPORTED.items() if inspect.isfunction(value))


def public_definitions(tree):
    """Give the public functions and classes that a module defines itself."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def imported_names(tree, module):
    """Give {local name: public name} of what a test file imports from one module of fmoe.functional."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("fmoe.functional", f"fmoe.functional.{module}"):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
    return names


def used_by_tests(tree):
    """Give the names that test functions reach, through helpers and constants of their file where need be.

    A name counts where it is called or handed on, as in ``torch.compile(name)`` or a list of cases; an assignment to
    it, an import, or a mention in a helper that no test reaches does not.
    """
    reads, tests = {}, []
    for node in tree.body:
        loaded = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            reads[node.name] = loaded
            tests += [node.name] if node.name.lower().startswith("test") else []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                reads[name] = reads.get(name, set()) | loaded
    reached, pending = set(), tests
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += sorted(reads.get(name, ()))
    return reached


def find_tested(module, texts):
    """Give the functions of a module that any of these test files imports and uses."""
    trees = [ast.parse(text) for text in texts]
    return {
        public
        for tree in trees
        for local, public in imported_names(tree, module).items()
        if local in used_by_tests(tree)
    }


def test_there_is_something_to_check():
    assert len(SOURCES) >= 10
    assert len(FUNCTIONS) >= 30


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_public_definition_is_exported(source):
    module = import_module(f"fmoe.functional.{source.stem}")

    names = public_definitions(ast.parse(source.read_text()))

    assert names, f"{source.name} defines nothing public"
    missing = sorted(name for name in names if EXPORTED.get(name) is not getattr(module, name))
    assert not missing, f"add to fmoe/functional/__init__.py: {', '.join(missing)}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_a_test(name):
    module = EXPORTED[name].__module__.rpartition(".")[2]
    files = sorted(TESTS.glob(f"test_{module}*.py"))

    tested = find_tested(module, [path.read_text() for path in files])

    assert name in tested, f"no test in tests/functional/test_{module}.py imports and calls {name}"


def test_no_function_hides_a_module():
    """Exporting ``norm`` from norm.py would replace the module of that name."""
    assert not {path.stem for path in SOURCES} & set(EXPORTED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def test_it():\n    assert rms_norm(1)", True),
        ("def test_it():\n    torch.compile(rms_norm)", True),
        ("CASES = [rms_norm]\n\n@mark('f', CASES)\ndef test_it(f):\n    f()", True),
        ("def helper():\n    return rms_norm(1)\n\ndef test_it():\n    helper()", True),
        ("def helper():\n    return rms_norm(1)\n\ndef test_it():\n    pass", False),
        ("CASES = [rms_norm]\n\ndef test_it():\n    pass", False),
        ("def test_it():\n    rms_norm = 3", False),
        ("def test_it():\n    'rms_norm(1)'", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("module", ["fmoe.functional", "fmoe.functional.norm", "fmoe.other"])
def test_what_counts_as_a_test(module, text, expected):
    tested = find_tested("norm", [f"from {module} import rms_norm\n\n{text}"])

    assert ("rms_norm" in tested) is (expected and module != "fmoe.other")


def test_an_alias_counts():
    text = "from fmoe.functional import rms_norm as norm\n\ndef test_it():\n    norm(1)"

    assert find_tested("norm", [text]) == {"rms_norm"}
