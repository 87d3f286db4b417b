"""Drafts verified through Triton's interpreter, in a process of its own; draft_kernels_interpreted.py has the tests."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("draft_kernels_interpreted.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is what runs the kernels")
def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
