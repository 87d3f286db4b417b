"""The one table of AITER's names: complete, used for every access, true of each release and of the installed one."""

import ast
from pathlib import Path

import pytest
import torch

from fmoe.compile import aiter_kernels
from fmoe.compile.aiter_kernels import FUSED_MOE, SYMBOLS, find_symbol, missing_symbols, topk_softmax_

from .standin.build import VERSIONS, release_key

COMPILE = Path(aiter_kernels.__file__).parent
CONSTANTS = {name: value for name, value in vars(aiter_kernels).items() if isinstance(value, str) and value in SYMBOLS}


def generation_of(name, version):
    key = release_key(version)
    for generation in SYMBOLS[name].generations:
        if release_key(generation.first) <= key and (not generation.last or key <= release_key(generation.last)):
            return generation
    return None


def defined_parameters(file, name):
    """Read a function's parameters, or [] of a class, from a source file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return [argument.arg for argument in node.args.args] if isinstance(node, ast.FunctionDef) else []
    raise AssertionError(f"{file.name} defines no {name}")


def test_every_constant_is_used_and_every_symbol_has_one():
    source = (COMPILE / "aiter_kernels.py").read_text()
    assert sorted(CONSTANTS.values()) == sorted(SYMBOLS)
    tree = ast.parse(source)
    passed = [
        node.args[1].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("_launch", "_resolve") and len(node.args) > 1
        if isinstance(node.args[1], ast.Name)
    ]
    assert set(passed) - {"name"} == set(CONSTANTS)


def test_the_module_is_read_through_the_table_alone():
    for file in ("aiter_kernels.py", "aiter_ops.py", "aiter_rules.py"):
        for node in ast.walk(ast.parse((COMPILE / file).read_text())):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "module"), ast.unparse(node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("aiter."):
                assert node.value in SYMBOLS


def test_every_name_resolves_where_aiter_works(backend):
    assert missing_symbols(backend.module) == ()


def test_a_name_that_is_gone_is_found_and_named(make_backend):
    backend = make_backend("v0.1.20", "truncated")
    assert set(missing_symbols(backend.module)) == set(SYMBOLS) - {FUSED_MOE}
    weights, ids = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"has no aiter\.topk_softmax, which its ops/moe_op\.py should define"):
        topk_softmax_(backend.module, backend.record, weights, ids, torch.zeros(3, 8), renormalize=False)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_is_true_of_the_release(version, make_backend):
    backend = make_backend(version)
    root = Path(backend.module.__file__).parent
    assert backend.record.symbols == tuple(SYMBOLS)
    for name, symbol in SYMBOLS.items():
        expected = generation_of(name, version).parameters
        parameters = defined_parameters(root / symbol.file, name.split(".")[-1])
        assert tuple(parameters[: len(expected)]) == expected
        assert find_symbol(backend.module, name) is not None
