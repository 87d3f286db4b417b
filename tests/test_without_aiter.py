"""fmoe without AITER: everything imports, no requirement asks for its namesake, every command knows the way out."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from fmoe.cli import main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted(
    ".".join(("fmoe", *path.relative_to(ROOT / top).with_suffix("").parts))
    if top == "fmoe"
    else f"fmoe.models.{path.stem}"
    for top in ("fmoe", "models")
    for path in (ROOT / top).rglob("*.py")
    if path.stem not in ("__init__", "__main__") and "kernels" not in path.relative_to(ROOT).parts[:-1]
)

HIDE = """
import importlib.util, json, sys

class Hidden:
    def __init__(self, names):
        self.names, self.asked = names, []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            self.asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden = Hidden(("aiter", "triton"))
sys.meta_path.insert(0, hidden)
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in hidden.names else find_spec(name, *rest)
"""


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)


def test_there_are_modules():
    assert {"fmoe.compile.select", "fmoe.doctor", "fmoe.models.mixtral", "fmoe.compile.aiter_ops"} <= set(MODULES)
    assert "fmoe.compile.kernels.route" not in MODULES


def test_every_module_imports_and_none_asks_for_aiter():
    """Nothing tries to import it and catches the failure: what fmoe asks for, it asks ``find_spec`` about first."""
    code = HIDE + (
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print([name for name in hidden.asked if name.startswith('aiter')])\n"
    )
    done = run(code, json.dumps(MODULES))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_finder_hides_what_it_is_to_hide():
    for name in ("aiter", "triton"):
        assert f"No module named '{name}'" in run(HIDE + f"import {name}").stderr


def test_a_model_loads_and_generates():
    code = HIDE + (
        "import fmoe\n"
        "model = fmoe.load('demo', device='cpu', compile=False)\n"
        "print(fmoe.generate(model, 'In the beginning', max_new_tokens=3)[0].token_ids)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.replace("(", "[").replace(")", "]"))) == 3


def distribution(requirement):
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def test_no_requirement_is_the_unrelated_package():
    extras = PROJECT["optional-dependencies"]
    names = {distribution(text) for text in [*PROJECT["dependencies"], *(t for e in extras.values() for t in e)]}
    assert "aiter" not in names
    assert [distribution(text) for text in extras["rocm"]] == ["amd-aiter"]
    assert "amd-aiter" not in {distribution(text) for text in PROJECT["dependencies"]}


def write_wheel(folder, name, version):
    """Write an empty wheel."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.parametrize("version", ["0.1.20", "0.1.7.post2.dev18"])
def test_the_extra_resolves_to_amds_distribution(version, tmp_path):
    write_wheel(tmp_path, "aiter", "0.13.20191203")
    write_wheel(tmp_path, "amd-aiter", version)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--ignore-installed"]
    command = [*pip, "--no-index", "--find-links", str(tmp_path), *PROJECT["optional-dependencies"]["rocm"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Would install amd-aiter-{version}"


def test_every_command_that_loads_a_model_takes_the_options_that_errors_name():
    loading = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in main.commands.items()
        if name not in ("info", "doctor") and any("--model" in parameter.opts for parameter in command.params)
    }
    assert {"generate", "chat", "tune"} <= set(loading)
    for name, options in loading.items():
        assert {"--kernels", "--shared-experts"} <= options, name
