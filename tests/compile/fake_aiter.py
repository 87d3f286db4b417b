"""Builders of small packages named ``aiter``: one that works, and installations that fail in the known ways."""

import textwrap
from pathlib import Path

FIVE = "topk_weights, topk_indices, token_expert_indices, gating_output, need_renorm"
SEVEN = FIVE + ', num_shared_experts=0, shared_expert_scoring_func=""'

# The softmax top-k as the releases do it, row by row; writes through the tensors it is given.
KERNEL = """
    import math

    def compile_ops(module):
        return lambda declaration: lambda *arguments: kernel(*arguments)

    def kernel(weights, ids, scratch, logits, renorm, shared=0, scoring=""):
        count = logits.shape[1] - shared
        for row, values in enumerate(logits.float().tolist()):
            order = sorted(range(count), key=lambda e: (-values[e], e))[: ids.shape[1]]
            top = max(values[:count])
            total = sum(math.exp(values[e] - top) for e in (order if renorm else range(count)))
            for column, e in enumerate(order):
                weights[row, column] = math.exp(values[e] - top) / total
                ids[row, column] = e
            for slot in range(shared):
                weights[row, ids.shape[1] + slot] = 1 / (1 + math.exp(-values[count + slot]))
"""
WRONG_IDS = KERNEL.replace("= e\n", "= e ^ 1\n")
WRONG_WEIGHTS = KERNEL.replace("/ total", "/ total * 1.01")

DECLARED = """
    from ..jit.core import compile_ops

    @compile_ops("module_moe_asm")
    def topk_softmax({parameters}) -> None: ...
"""
PLAIN = """
    from ..jit.core import compile_ops

    @compile_ops("module_moe_asm")
    def _topk_softmax(*arguments) -> None: ...

    def topk_softmax({parameters}) -> None:
        _topk_softmax({FIVE}, num_shared_experts, shared_expert_scoring_func)
"""


def write(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a package; give the folder to put on the path."""
    for name, text in files.items():
        (root / "aiter" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "aiter" / name).write_text(textwrap.dedent(text))
    return root


def build(
    root: Path, *, version: str = "0.1.18", parameters: str = SEVEN, init: str = "", kernel: str = KERNEL
) -> Path:
    """Build an AITER that has ``topk_softmax`` alone; ``init`` stands before its imports."""
    form = PLAIN if version in ("0.1.19", "0.1.20") else DECLARED
    return write(
        root,
        {
            "__init__.py": textwrap.dedent(init) + "\nfrom .jit import core\nfrom .ops.moe_op import *\n",
            "_version.py": f"__version__ = version = {version!r}\n",
            "jit/__init__.py": "",
            "jit/core.py": kernel,
            "ops/__init__.py": "",
            "ops/moe_op.py": form.format(parameters=parameters, FIVE=FIVE),
        },
    )


def build_impostor(root: Path) -> Path:
    """Build what PyPI calls aiter: it imports, and is something else."""
    return write(root, {"__init__.py": "from .azip import azip\n", "azip.py": "def azip(*iterators): ...\n"})


def build_without_ops(root: Path) -> Path:
    """Build a release that swallows the failed import of its own ops."""
    swallowed = """
        try:
            from .jit.absent import hipcc
            from .ops.moe_op import *
        except ImportError:
            pass
    """
    return write(build(root), {"__init__.py": swallowed})


# What stands first in ``aiter/__init__.py`` of an installation whose import fails, and what the reason then says.
IMPORTS: dict[str, tuple[str, str]] = {
    "RuntimeError": ("raise RuntimeError('ROCm version file not found')", "ROCm version file not found"),
    "AssertionError": ("assert False, 'Could not find hipcc'", "Could not find hipcc"),
    "AttributeError": ("import math; math.Situv2", "has no attribute 'Situv2'"),
    "SystemExit": ("import sys; sys.exit('[aiter] build failed')", "SystemExit: [aiter] build failed"),
    "exit": ("import os; os._exit(0)", "ended with status 0 before its report"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
}

# Imports that hang beside a process of their own session, whose id they write to ``file``.
HANGS = """
    import subprocess, sys, time
    print("waiting for baton", flush=True)
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open({file!r}, "w").write(str(below.pid))
    time.sleep(600)
"""
