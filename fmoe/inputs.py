"""What the command line is given to read: standard input, files of prompts, arguments."""

import sys
from pathlib import Path


def read_text(file: str) -> str:
    """Read UTF-8 from a file, or from standard input where its name is "-"."""
    if file == "-":
        check_input()
    data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        name = "standard input" if file == "-" else file
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}; convert it") from error


def check_input() -> None:
    """Raise ValueError where standard input is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed; send it a file or a pipe")


def read_prompts(file: str) -> list[str]:
    """Read one prompt per line; empty lines at the end are none."""
    lines = read_text(file).rstrip("\n").split("\n")
    name = "standard input" if file == "-" else file
    if lines == [""]:
        raise ValueError(f"{name} holds no prompt; write one per line")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(f"line {number} of {name} is empty; write one prompt per line")
    return lines


def check_utf8(name: str, text: str) -> None:
    """Refuse an argument of other bytes than UTF-8, which Python keeps as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 at character {error.start}; convert it") from error
