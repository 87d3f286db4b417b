"""What is installed: fmoe.models under one name only, and a wheel that holds all of the package and nothing else."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import fmoe.models

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_files() -> set[str]:
    """List what a wheel must hold, under the names that it has there."""
    paths = [path for top in ("fmoe", "models") for path in (ROOT / top).rglob("*.py")]
    paths += [path for path in (ROOT / "fmoe" / "demo").iterdir() if path.is_file()]
    paths += (ROOT / "fmoe" / "compile" / "tables").glob("*.json")
    names = [path.relative_to(ROOT).as_posix() for path in [*paths, ROOT / "fmoe" / "py.typed"]]
    return {f"fmoe/{name}" if name.startswith("models/") else name for name in names}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the sources: a build leaves files behind that the next one would take up."""
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for top in ("fmoe", "models"):
        shutil.copytree(ROOT / top, copy / top, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    run(*pip, "--no-index", "--no-deps", "--no-build-isolation", "-w", copy / "dist", ".", cwd=copy)
    (built,) = (copy / "dist").iterdir()
    return built


def test_models_has_one_name(tmp_path: Path) -> None:
    assert fmoe.models.__name__ == "fmoe.models"
    assert [name for name in sys.modules if name.split(".")[0] == "models"] == []
    code = "import fmoe.models.weights as w; print(w.__name__, w.Piece.__module__)"
    assert run(sys.executable, "-c", code, cwd=ROOT).split() == ["fmoe.models.weights"] * 2
    assert run(sys.executable, "-c", code, cwd=tmp_path).split() == ["fmoe.models.weights"] * 2


def test_another_name_for_models_is_refused() -> None:
    spec = importlib.util.spec_from_file_location("models", str(fmoe.models.__file__))
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"imported as 'models', but its only name is 'fmoe\.models'.*pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_package_is_declared() -> None:
    folders = {Path(name).parent.as_posix().replace("/", ".") for name in source_files() if name.endswith(".py")}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == source_files()
    assert {"fmoe/models/__init__.py", "fmoe/demo/config.json", "fmoe/demo/tokenizer.json"} <= names


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"fmoe-{PYPROJECT['project']['version']}.dist-info"
        metadata = message_from_bytes(archive.read(f"{folder}/METADATA"))
        commands = archive.read(f"{folder}/entry_points.txt").decode()
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(required) == sorted(PYPROJECT["project"]["dependencies"])
    assert not any(name in text for name in ("aiter", "triton", "transformers") for text in required)
    assert metadata["Requires-Python"] == ">=3.11"
    assert "fmoe = fmoe.cli:main" in commands


def test_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The folder of the wheel comes first on the path, before this checkout's own installation.
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import fmoe, fmoe.models.weights as w; print(w.__file__)"
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == str(site / "fmoe" / "models" / "weights.py")
