"""The self-test of AITER: whatever an installation does, the test ends, and says how."""

import logging
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fmoe.compile import process_tree
from fmoe.compile.aiter_kernels import BIASED_GROUPED_TOPK, FUSED_MOE, GROUPED_TOPK, SYMBOLS, TOPK_SOFTMAX
from fmoe.compile.aiter_selftest import LIMIT_S, Outcome, describe, run_selftest, shorten
from fmoe.compile.aiter_static import find_version, read_installation

from ..contract.standin.build import make_standin
from .fake_aiter import FIVE, HANGS, IMPORTS, KERNEL, SEVEN, WRONG_IDS, WRONG_WEIGHTS, build, build_without_ops


@pytest.fixture(autouse=True)
def quick_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def try_out(root: Path, monkeypatch: pytest.MonkeyPatch, **options: float) -> Outcome:
    """Run the self-test of the package in a folder, and see that this process never imports it."""
    monkeypatch.syspath_prepend(str(root))
    package = root / "aiter"
    record = read_installation(package, tuple(SYMBOLS), version=find_version(package), arch="gfx942")
    outcome = run_selftest(record, "cpu", **options)
    assert "aiter" not in sys.modules
    return outcome


@pytest.mark.parametrize(
    ("version", "parameters"), [("0.1.9", FIVE), ("0.1.18", SEVEN), ("0.1.20", SEVEN)], ids=["old", "declared", "plain"]
)
def test_an_installation_that_works(
    version: str, parameters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = build(tmp_path, version=version, parameters=parameters)
    assert try_out(root, monkeypatch) == Outcome(True, "", (TOPK_SOFTMAX,))


@pytest.mark.parametrize("kind", IMPORTS)
def test_an_import_that_fails(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, reason = IMPORTS[kind]
    outcome = try_out(build(tmp_path, init=code), monkeypatch)
    assert not outcome.ok
    assert reason in outcome.reason
    assert "\n" not in outcome.reason


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        pytest.param(WRONG_IDS, "computes wrong numbers: topk_softmax at 8 experts, 0 shared", id="ids"),
        pytest.param(WRONG_WEIGHTS, "weights differ by", id="weights"),
        pytest.param(KERNEL.replace("for slot in range(shared)", "for slot in ()"), "1 shared", id="shared"),
        pytest.param(KERNEL.replace("(-values[e], e)", "(-values[e], -e)"), "wrong ids", id="ties"),
        pytest.param(KERNEL.replace("import math", "raise SystemExit('no compiler')"), "no compiler", id="late-exit"),
    ],
)
def test_a_kernel_that_is_wrong(kernel: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = try_out(build(tmp_path, kernel=kernel), monkeypatch)
    assert not outcome.ok
    assert reason in outcome.reason
    assert "--kernels" not in outcome.reason


@pytest.mark.parametrize("version", ["v0.1.7", "v0.1.20"])
def test_every_kernel_is_compared(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = try_out(make_standin(tmp_path, version=version), monkeypatch)
    assert outcome == Outcome(True, "", (TOPK_SOFTMAX, BIASED_GROUPED_TOPK, GROUPED_TOPK, FUSED_MOE))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("biased_grouped_topk_hip", "biased_grouped_topk_hip: wrong ids"),
        ("grouped_topk", " grouped_topk: wrong ids"),
        ("fused_moe", "fused_moe: relative error"),
    ],
)
def test_each_kernel_can_be_wrong(name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_standin(tmp_path, version="v0.1.20")
    file = tmp_path / "aiter" / ("fused_moe.py" if name == "fused_moe" else "ops/topk.py")
    spoilt = f"""
        right_{name} = {name}

        def {name}(first, *rest, **options):
            return right_{name}(first + first.roll(1, -1), *rest, **options)
    """
    file.write_text(file.read_text() + textwrap.dedent(spoilt))
    outcome = try_out(tmp_path, monkeypatch)
    assert not outcome.ok
    assert reason in outcome.reason


def test_an_import_that_leaves_the_names_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = try_out(build_without_ops(tmp_path), monkeypatch)
    assert not outcome.ok
    assert f"imports without {TOPK_SOFTMAX}" in outcome.reason


def test_a_hanging_import_is_given_up_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    root = build(tmp_path, init=HANGS.format(file=str(file)))
    outcome = try_out(root, monkeypatch, idle_s=1.0)
    assert not outcome.ok
    assert "hung: it used no processor time for 1 s; it last said: waiting for baton" in outcome.reason
    assert has_ended(int(file.read_text()))


def test_the_whole_time_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = try_out(build(tmp_path, init="while True: pass"), monkeypatch, idle_s=60.0, limit_s=4.0)
    assert not outcome.ok
    assert "was not ready after 4 s" in outcome.reason


def test_work_in_a_process_below_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = """
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import time; e = time.time() + 3\\nwhile time.time() < e: pass"])
    """
    assert try_out(build(tmp_path, init=compiles), monkeypatch, idle_s=1.0).ok


def test_what_it_leaves_behind_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    leaves = f"""
        import subprocess, sys
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(file)!r}, "w").write(str(left.pid))
    """
    assert try_out(build(tmp_path, init=leaves), monkeypatch).ok
    assert has_ended(int(file.read_text()))


def test_an_interrupt_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    root = build(tmp_path, init=HANGS.format(file=str(file)))
    monkeypatch.syspath_prepend(str(root))
    record = read_installation(root / "aiter", tuple(SYMBOLS), version="0.1.18", arch="gfx942")

    def interrupt(elapsed_s: float, last_line: str) -> None:
        if file.exists() and file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_selftest(record, "cpu", progress=interrupt)
    assert has_ended(int(file.read_text()))


def test_progress_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("fmoe.compile.aiter_selftest.REPORT_EVERY_S", 1.0)
    caplog.set_level(logging.INFO, logger="fmoe")
    slow = "import time; print('compiling module_moe_asm', flush=True); time.sleep(2.5)"
    assert try_out(build(tmp_path, init=slow), monkeypatch).ok
    assert "trying AITER out, once for this installation" in caplog.text
    assert "compiling module_moe_asm" in caplog.text


def test_a_report_that_is_cut_counts_as_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = "import os, sys; open(sys.argv[1], 'w').write('{\"ok\": true'); os._exit(0)"
    outcome = try_out(build(tmp_path, init=forged), monkeypatch)
    assert not outcome.ok
    assert "no readable report" in outcome.reason


def test_a_machine_that_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    outcome = try_out(build(tmp_path), monkeypatch)
    assert not outcome.ok
    assert "Cannot allocate memory" in outcome.reason


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads Linux's /proc")
def test_processor_time_of_a_tree_counts_what_has_ended() -> None:
    burn = "import time; e = time.process_time() + 0.3\nwhile time.process_time() < e: pass"
    code = f"""if True:
        import subprocess, sys, time
        subprocess.run([sys.executable, "-c", {burn!r}])
        print(flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        used_s = process_tree.used_s(process.pid)
        assert used_s is not None
        assert used_s >= 0.25
    finally:
        process_tree.end(process)
    assert process.returncode == -9
    assert process_tree.used_s(process.pid) is None
    process.stdout.close()


def test_reasons_are_one_short_line() -> None:
    assert describe(ValueError("a\n b")) == "ValueError: a b"
    assert describe(SystemExit()) == "SystemExit"
    assert len(shorten("word " * 1000)) == 300
    assert LIMIT_S == 600


def has_ended(pid: int) -> bool:
    """Wait a moment for a process that nobody here is the parent of."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
