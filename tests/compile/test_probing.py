"""The probe as a whole: in the order that harms least, once per installation, and quick ever after."""

import dataclasses
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fmoe.compile import probing
from fmoe.compile.aiter_selftest import Outcome
from fmoe.compile.capabilities import AiterRecord, Capabilities
from fmoe.compile.probe_cache import cache_file
from fmoe.compile.probing import probe, probe_aiter

from .fake_aiter import HANGS, build, build_impostor

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def passes(record: AiterRecord, device: str) -> Outcome:
    return Outcome(True, "", record.symbols)


def fails(record: AiterRecord, device: str) -> Outcome:
    return Outcome(False, "aiter's self-test was killed by signal 11", ())


def never(record: AiterRecord, device: str) -> Outcome:
    raise AssertionError("the self-test ran")


@pytest.fixture(autouse=True)
def assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMOE_ASSUME_ARCH", "gfx942")
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def build_and_find(builder: Callable[..., Path] = build, **options: str) -> Path:
        root = builder(tmp_path / "site", **options)
        monkeypatch.syspath_prepend(str(root))
        return root / "aiter"

    return build_and_find


def test_without_an_amd_gpu_nothing_is_looked_for(
    install: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.delenv("FMOE_ASSUME_ARCH")
    code = """
        import importlib.util, subprocess, sys
        import torch
        from fmoe.compile.probing import probe

        def refuse(*arguments, **options):
            raise AssertionError(arguments)

        subprocess.Popen = refuse
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: refuse() if "aiter" in name else found(name, *rest)
        capabilities = probe(torch.device("cpu"))
        assert not capabilities.aiter.present
        assert "needs an AMD GPU" in capabilities.aiter.reason, capabilities.aiter
        assert not any(name.split(".")[0] == "aiter" for name in sys.modules)
    """
    environment = {"PYTHONPATH": str(tmp_path / "site"), "FMOE_CACHE_DIR": str(tmp_path / "cache"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_cpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMOE_ASSUME_ARCH")
    found = probe(CPU)
    assert isinstance(found, Capabilities)
    assert found.device_type == "cpu"
    assert found.torch == torch.__version__
    assert found.units >= 1
    assert found.grouped_mm.can_run, found.grouped_mm.reason
    assert not found.triton.can_run
    assert found.triton.reason == "triton needs a GPU; the device is cpu"


def test_an_installation_that_works_is_tried_out_once(install: Callable[..., Path]) -> None:
    install()
    record = probe_aiter(CPU, selftest=passes)
    assert record.present
    assert record.reason == ""
    assert (record.version, record.arch, record.topk_arity) == ("0.1.18", "gfx942", 7)
    assert record.symbols == ("aiter.topk_softmax",)
    assert probe_aiter(CPU, selftest=never) == record
    assert probe(CPU, selftest=never).aiter == record
    assert probe(CPU, selftest=never).arch == "gfx942"
    assert not probe_aiter(CPU, fresh=True, selftest=fails).present


def test_a_failure_is_remembered_with_its_reason(install: Callable[..., Path]) -> None:
    install()
    record = probe_aiter(CPU, selftest=fails)
    assert not record.present
    assert record.reason == "aiter's self-test was killed by signal 11"
    again = probe_aiter(CPU, selftest=never)
    assert again.reason.startswith(record.reason)
    assert str(cache_file()) in again.reason


@pytest.mark.parametrize("change", ["files", "torch", "arch", "test"])
def test_a_change_is_tried_out_anew(change: str, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    package = install()
    assert probe_aiter(CPU, selftest=passes).present
    if change == "files":
        (package / "ops" / "topk.py").write_text("")
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9.9")
    elif change == "arch":
        monkeypatch.setenv("FMOE_ASSUME_ARCH", "gfx950")
    else:
        monkeypatch.setattr(probing, "VERSION", 99)
    assert not probe_aiter(CPU, selftest=fails).present


def test_another_that_tries_it_out_is_waited_for(install: Callable[..., Path]) -> None:
    install()

    def slowly(record: AiterRecord, device: str) -> Outcome:
        started.set()
        time.sleep(0.5)
        return passes(record, device)

    started = threading.Event()
    other = threading.Thread(target=probe_aiter, args=(CPU,), kwargs={"selftest": slowly})
    other.start()
    try:
        assert started.wait(10)
        assert probe_aiter(CPU, selftest=never).present
    finally:
        other.join()


def test_the_impostor_is_not_tried_out(install: Callable[..., Path]) -> None:
    install(build_impostor)
    record = probe_aiter(CPU, selftest=never)
    assert not record.present
    assert "not AMD's" in record.reason
    assert not cache_file().exists()


def test_files_that_cannot_be_parsed_are_a_reason(install: Callable[..., Path]) -> None:
    (install() / "ops" / "moe_op.py").write_text("def topk_softmax(:")
    record = probe_aiter(CPU, selftest=never)
    assert "cannot be read" in record.reason
    assert record.version == "0.1.18"


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    install: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path / "file"))
    caplog.set_level(logging.WARNING, logger="fmoe")
    assert probe_aiter(CPU, selftest=passes).present
    assert "could not keep results" in caplog.text


def test_the_real_self_test_is_the_default(install: Callable[..., Path]) -> None:
    install(init="raise RuntimeError('ROCm version file not found')")
    record = probe_aiter(CPU)
    assert not record.present
    assert "ROCm version file not found" in record.reason


def test_a_hanging_import_ends_in_time(install: Callable[..., Path], tmp_path: Path) -> None:
    install(init=HANGS.format(file=str(tmp_path / "pid")))
    start = time.monotonic()
    record = probe_aiter(CPU)
    assert time.monotonic() - start < 25
    assert "hung: it used no processor time for 10 s" in record.reason


def test_a_second_start_is_quick(install: Callable[..., Path]) -> None:
    package = install()
    for name in range(40):  # AITER has some forty files of ops, the largest of a few thousand lines
        (package / "ops" / f"op_{name}.py").write_text("def op(a, b): ...\n" * 200)
    (package / "fused_moe.py").write_text("def fused_moe(hidden_states, w1, w2):\n    return w1 + w2\n" * 1500)
    probe_aiter(CPU, selftest=passes)
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        record = probe_aiter(CPU, selftest=never)
        times_s.append(time.perf_counter() - start)
    assert record.present
    assert min(times_s) < 0.05


def test_the_record_is_frozen(install: Callable[..., Path]) -> None:
    install()
    with pytest.raises(dataclasses.FrozenInstanceError):
        probe_aiter(CPU, selftest=passes).present = False  # type: ignore[misc]
