"""fmoe/inputs.py: bytes that are no text, and the real command with closed streams and on a terminal."""

import os
import pty
import subprocess
import sys

import pytest

from fmoe.inputs import check_input, check_utf8, read_prompts, read_text

GENERATE = ("generate", "--model", "demo", "--max-new-tokens", "3", "--temperature", "0")


def run_in_shell(arguments: str, redirections: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m fmoe {arguments} {redirections}', sys.executable], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "redirections", "message"),
    [
        ("generate --model demo -", "<&-", "standard input is closed; send it a file or a pipe"),
        ("chat --model demo", "<&-", "standard input is closed; send it a file or a pipe"),
        ("generate --model demo hi", ">&-", "standard output is closed; send it to a file or to /dev/null"),
        ("info --model demo", ">&-", "standard output is closed; send it to a file or to /dev/null"),
    ],
)
def test_a_closed_stream_is_one_line(arguments: str, redirections: str, message: str) -> None:
    done = run_in_shell(arguments, redirections)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"Error: {message}\n")


def test_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    check_input()
    monkeypatch.setattr(sys, "stdin", None)
    for read in (check_input, lambda: read_text("-"), lambda: read_prompts("-")):
        with pytest.raises(ValueError, match="standard input is closed"):
            read()


def test_arguments_of_other_bytes() -> None:
    check_utf8("the prompt", "Ünïcode \U0001f600")
    with pytest.raises(ValueError, match="--stop is not UTF-8 at character 2; convert it"):
        check_utf8("--stop", os.fsdecode(b"ab\xff"))


def test_a_terminal_shows_the_prompt_before_its_text() -> None:
    controller, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "fmoe", *GENERATE, "In the beginning"], stdout=terminal, stderr=terminal, check=True
    )
    os.close(terminal)
    assert done.returncode == 0
    shown = os.read(controller, 10_000).decode()
    os.close(controller)
    assert "\x1b[2mIn the beginning\x1b[0m of the" in shown
