"""The description that measurements are filed under: any change of source or version is another one."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import fmoe
from fmoe.compile import device as module
from fmoe.compile.device import (
    _target_of_gpu,
    describe_device,
    describe_versions,
    kernel_sources,
    source_hash,
    target_of,
)

PACKAGE = Path(fmoe.__file__).parent


def test_a_cpu() -> None:
    found = describe_device(torch.device("cpu"))
    assert found.kind == "cpu"
    assert found.name and found.arch
    assert found.units == torch.get_num_threads()
    assert f"torch {torch.__version__}" in found.versions
    assert source_hash(*kernel_sources())[:16] in found.versions
    assert describe_device(torch.device("cpu")) == found


def test_the_sources_are_all_of_the_kernels() -> None:
    names = {path.relative_to(PACKAGE).as_posix() for path in kernel_sources()}
    assert {
        f"compile/kernels/{name}" for name in os.listdir(PACKAGE / "compile/kernels") if name.endswith(".py")
    } < names
    assert {"compile/settings.py", "compile/linear_settings.py", "functional/experts.py"} < names


@pytest.mark.parametrize("name", [path.relative_to(PACKAGE).as_posix() for path in kernel_sources()])
def test_one_character_of_a_kernel_changes_the_hash(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "fmoe"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    before = source_hash(*kernel_sources(copy))
    assert before == source_hash(*kernel_sources())
    content = (copy / name).read_text()
    middle = len(content) // 2
    (copy / name).write_text(content[:middle] + "#" + content[middle + 1 :])
    source_hash.cache_clear()
    assert source_hash(*kernel_sources(copy)) != before


def test_a_new_kernel_changes_the_hash(tmp_path: Path) -> None:
    copy = tmp_path / "fmoe"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    (copy / "compile/kernels/new.py").write_text("")
    assert source_hash(*kernel_sources(copy)) != source_hash(*kernel_sources())


def test_every_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {describe_versions("a" * 64), describe_versions("b" * 64)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        found.add(describe_versions("a" * 64))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "99.0")
        found.add(describe_versions("a" * 64))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "9.9")
        found.add(describe_versions("a" * 64))
    with monkeypatch.context() as patch:
        patch.setattr(module, "version", lambda name: "99.9")
        found.add(describe_versions("a" * 64))
    assert len(found) == 6


def test_an_installation_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise module.PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", absent)
    assert "triton none" in describe_versions("a")


def test_other_kinds_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="nothing is measured on 'meta' devices; use cpu or cuda"):
        describe_device(torch.device("meta"))


def test_gpus_are_described_by_their_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count, gcnArchName = "A GPU", 9, 0, 132, "gfx942:sramecc+"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = describe_device(torch.device("cuda"))
    assert (found.kind, found.name, found.arch, found.units) == ("cuda", "A GPU", "sm_90", 132)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert describe_device(torch.device("cuda")).arch == "gfx942"
    assert describe_device(torch.device("cuda")).kind == "hip"


@pytest.mark.parametrize(
    ("hip", "capability", "target"), [(None, (9, 0), "hopper"), (None, (8, 9), "cuda"), ("6.4", None, "hip")]
)
def test_the_target_of_a_gpu(hip, capability, target, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    _target_of_gpu.cache_clear()
    assert target_of(torch.device("cuda", 0)) == target
    _target_of_gpu.cache_clear()


def test_a_cpu_interprets_what_is_made_for_any_gpu():
    assert target_of(torch.device("cpu")) == "cuda"
