"""AITER tried out in a process of its own: it may crash, exit, hang or compute something else.

``python -m fmoe.compile.aiter_selftest REPORT TASK`` is that process. It imports AITER, compares its kernels with the
reference on small shapes and writes the outcome, one line of JSON, to the file REPORT; AITER itself prints at will.
``run_selftest`` starts it and waits.
"""

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import process_tree
from .aiter_checks import Disagreement, absent_symbols, check_kernels, import_submodules
from .aiter_kernels import WAY_OUT
from .capabilities import AiterRecord

logger = logging.getLogger("fmoe")

VERSION = 1  # of this test; raised with every change of what it demands, so that older outcomes count no longer

IDLE_S = 10.0  # AITER compiles for minutes at its first use: it is given up when nothing of it uses the processor ...
LIMIT_S = 600.0  # ... or when this is over
IDLE_SHARE = 0.01  # of one processor; what waits for a lock asks for it now and then
POLL_S = 0.05
LOOK_S = 0.5  # between two looks at all processes
REPORT_EVERY_S = 15.0

# The child gets the paths of this process, but not as PYTHONPATH: what it starts may be another Python.
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "runpy.run_module('fmoe.compile.aiter_selftest', run_name='__main__', alter_sys=True)"
)


class Outcome(NamedTuple):
    """How a self-test ended."""

    ok: bool
    reason: str  # why not
    checked: tuple[str, ...]  # the names whose kernels agreed with the reference


Progress = Callable[[float, str], None]  # seconds so far, last line that AITER printed


def run_selftest(
    record: AiterRecord,
    device: str,
    /,
    *,
    idle_s: float = IDLE_S,
    limit_s: float = LIMIT_S,
    progress: Progress | None = None,
) -> Outcome:
    """Try AITER out in a process of its own.

    Whatever ends that process other than its report counts as a failure. It and all that it started are ended
    when it has reported, when for ``idle_s`` they have used no processor time, or after ``limit_s``.

    Args:
        record: what was read from the installation.
        device: where the kernels run, as ``cuda:0``.
        idle_s, limit_s: the longest waits.
        progress: is called several times a second; None logs a line now and then.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="fmoe-", ignore_cleanup_errors=True) as folder:
            return _run(record, device, Path(folder), idle_s, limit_s, progress or _logged_progress())
    except OSError as error:
        return Outcome(False, f"aiter could not be tried out in a process of its own ({error})", ())


def _run(record: AiterRecord, device: str, folder: Path, idle_s: float, limit_s: float, progress: Progress) -> Outcome:
    report, output = folder / "report.json", folder / "output"
    task = json.dumps({"device": device, "record": asdict(record)})
    paths = json.dumps([path or os.getcwd() for path in sys.path])
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(report), task, paths],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        given_up = _wait(process, output, idle_s, limit_s, progress)
    finally:
        process_tree.end(process)
    return _judge(given_up, process.returncode, report, _last_line(output))


def _wait(process: subprocess.Popen[bytes], output: Path, idle_s: float, limit_s: float, progress: Progress) -> str:
    """Wait for the process; say why it was given up, or ""."""
    start = busy_at = looked_at = time.monotonic()
    used_s = process_tree.used_s(process.pid)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return ""
        now = time.monotonic()
        if now - looked_at < min(LOOK_S, idle_s / 10, limit_s / 10):
            continue
        looked_at = now
        used_now_s = process_tree.used_s(process.pid)
        if used_now_s is None or used_s is None or abs(used_now_s - used_s) > IDLE_SHARE * idle_s:
            busy_at, used_s = now, used_now_s
        if now - busy_at >= idle_s:
            return f"hung: it used no processor time for {idle_s:g} s"
        if now - start >= limit_s:
            return f"was not ready after {limit_s:g} s"
        progress(now - start, _last_line(output))


def _judge(given_up: str, status: int, report: Path, last_line: str) -> Outcome:
    said = f"; it last said: {last_line}" if last_line else ""
    if given_up:
        return Outcome(False, f"aiter's self-test {given_up}{said}", ())
    try:
        line = json.loads(report.read_text(encoding="utf-8"))
        return Outcome(line["ok"] is True, shorten(str(line["reason"])), tuple(map(str, line["checked"])))
    except FileNotFoundError:
        ended = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return Outcome(False, f"aiter's self-test was {ended} before its report{said}", ())
    except (OSError, ValueError, TypeError, KeyError) as error:
        return Outcome(False, f"aiter's self-test wrote no readable report ({error})", ())


def describe(error: BaseException, /) -> str:
    """Name an error in one line."""
    return shorten(f"{type(error).__name__}: {error}".removesuffix(": "))


def shorten(text: str, /, *, width: int = 300) -> str:
    """Bring a text on one line of at most ``width`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _last_line(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 2000))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return shorten(lines[-1], width=160) if lines else ""


def _logged_progress() -> Progress:
    due_s = [REPORT_EVERY_S]

    def log(elapsed_s: float, last_line: str) -> None:
        if elapsed_s >= due_s[0]:
            due_s[0] += REPORT_EVERY_S
            logger.info("trying AITER out, once for this installation: %.0f s; %s", elapsed_s, last_line or "silent")

    return log


def _try_out(module: ModuleType, record: AiterRecord, device: str) -> Outcome:
    """Compare the imported AITER with the reference."""
    absent = absent_symbols(module, record.symbols)
    if absent:
        return Outcome(False, f"aiter {record.version} imports without {', '.join(absent)}, which its files define", ())
    return Outcome(True, "", check_kernels(module, record, torch.device(device)))


def _main(report: Path, task: dict[str, Any], importer: Callable[[str], ModuleType]) -> None:
    """Import, compare, report; the process then ends without the ends of others, which fail in some releases."""
    step = "import"
    try:
        record = AiterRecord(**{**task["record"], "symbols": tuple(task["record"]["symbols"])})
        module = importer("aiter")
        import_submodules(record.symbols, importer)
        step = "self-test"
        outcome = _try_out(module, record, task["device"])
    except Disagreement as error:
        outcome = Outcome(False, f"aiter {task['record']['version']} computes wrong numbers: {error}", ())
    except BaseException as error:
        said = describe(error).removesuffix(f"; {WAY_OUT}")  # advice for those who asked for AITER by name
        outcome = Outcome(False, f"aiter's {step} raised {said}", ())
    part = report.with_suffix(".part")
    part.write_text(json.dumps(outcome._asdict()) + "\n", encoding="utf-8")
    part.replace(report)
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]), importlib.import_module)
