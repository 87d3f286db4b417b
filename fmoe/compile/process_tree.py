"""A process and all that it started: the processor time they used, and their end. Reads Linux's /proc."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class _Entry(NamedTuple):
    pid: int
    ended: bool
    parent: int
    session: int
    ticks: int


def used_s(leader: int, /) -> float | None:
    """Sum the processor time of a session's leader and all below it, ended children included.

    Returns:
        Seconds, or None where the system does not tell.
    """
    entries = _members(leader)
    return sum(entry.ticks for entry in entries) / os.sysconf("SC_CLK_TCK") if entries else None


def end(process: subprocess.Popen[bytes], /, *, patience_s: float = 5.0) -> None:
    """End a process that leads its session, and all that it started, whether or not it lives itself.

    Args:
        process: started with ``start_new_session``.
        patience_s: how long to wait for its end, which a driver can delay without limit.
    """
    for _ in range(20):  # what is started between the listing and its end is found by the next
        members = [entry.pid for entry in _members(process.pid) if not entry.ended]
        if not members:
            break
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def _members(leader: int) -> list[_Entry]:
    """List the processes of a session, and what those started that left it."""
    entries = [entry for pid in _pids() if (entry := _read(pid))]
    inside = {entry.pid for entry in entries if entry.session == leader}
    while grown := {entry.pid for entry in entries if entry.parent in inside} - inside:
        inside |= grown
    return [entry for entry in entries if entry.pid in inside]


def _pids() -> list[str]:
    try:
        return [name for name in os.listdir(_PROC) if name.isdigit()]
    except OSError:
        return []


def _read(pid: str) -> _Entry | None:
    try:
        text = (_PROC / pid / "stat").read_text(errors="replace")
    except OSError:
        return None  # it has ended since
    state, parent, _, session, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return _Entry(int(pid), state in "ZX", int(parent), int(session), sum(map(int, rest[7:11])))
