"""Make a stand-in for AITER on disk: one package per release, with the files, signatures and metadata of that release.

``make_standin(folder, version="v0.1.20", defects=("wrong_ids",))`` writes ``folder/aiter``, to be put on the path of a
process; ``load_standin(folder)`` imports it here under a name of its own, so that several releases live side by side.
In a process where the package is imported as ``aiter``, the variable AITER_STANDIN_DEFECTS adds defects, comma
separated. Kernel defects are listed in machine.py, those of the import in IMPORTS.
"""

import importlib.util
import itertools
import shutil
import sys
from pathlib import Path
from types import ModuleType

from .machine import INJECTED, SINCE, UNTIL, release_key

VERSIONS = ("v0.1.9", "v0.1.11", "v0.1.12", "v0.1.18", "v0.1.19", "v0.1.19.post1", "v0.1.20")

# How an import goes wrong; each runs as the first statement of the package.
IMPORTS = {
    "import_runtime_error": "raise RuntimeError('Get GPU arch from rocminfo failed')",
    "import_assertion": "raise AssertionError('Could not find hipcc')",
    "import_attribute": "raise AttributeError('module enum has no attribute Situv2')",
    "import_exits": "raise SystemExit('[aiter] build [module_aiter_enum] failed !!!!!!')",
    "import_hangs": "import time; time.sleep(3600)",
    "import_kills": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}
TRUNCATED = "truncated"  # imports well, but none of the ops are there

_TOPK = (
    ("topk_weights", "Tensor"),
    ("topk_indices", "Tensor"),
    ("token_expert_indices", "Tensor"),
    ("gating_output", "Tensor"),
    ("need_renorm", "bool"),
)
_GROUPED_OUT = "topk_weights: Tensor, topk_ids: Tensor, num_expert_group: int"

_CORE = '''"""Where AITER compiles; here every op is a method of the machine."""

import functools
import inspect

from ..machine import Machine

MACHINE = Machine({version!r}, {defects!r})


def compile_ops(_md_name, fc_name=None):
    def decorator(func):
        @functools.wraps(func, assigned=("__module__", "__name__", "__doc__"), updated=())
        def wrapper(*args, **kwargs):
            inspect.signature(func).bind(*args, **kwargs)
            return getattr(MACHINE, fc_name or func.__name__)(*args, **kwargs)

        del wrapper.__wrapped__
        return wrapper

    return decorator
'''

_ENUM = """from enum import IntEnum


class ActivationType(IntEnum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(IntEnum):
    No = 0
    per_Tensor = 1
    per_Token = 2
"""

_TOPK_FILE = f"""from torch import Tensor

from ..jit.core import MACHINE, compile_ops


@compile_ops("module_moe_asm")
def biased_grouped_topk_hip(
    gating_output: Tensor, correction_bias: Tensor, {_GROUPED_OUT}, topk_grp: int,
    need_renorm: bool, routed_scaling_factor: float = 1.0,
) -> None: ...


@compile_ops("module_moe_asm")
def grouped_topk(
    gating_output: Tensor, {_GROUPED_OUT}, topk_group: int,
    need_renorm: bool, is_softmax: bool = True, routed_scaling_factor: float = 1.0,
) -> None: ...


@compile_ops("module_moe_asm")
def moe_fused_gate(
    input: Tensor, bias: Tensor, {_GROUPED_OUT}, topk_group: int,
    topk: int, n_share_experts_fusion: int, routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]: ...


def biased_grouped_topk(
    gating_output: Tensor, correction_bias: Tensor, {_GROUPED_OUT}, topk_group: int,
    need_renorm: bool, routed_scaling_factor: float = 1.0,
):
    rule = (num_expert_group, topk_group, need_renorm, routed_scaling_factor)
    return MACHINE.biased_grouped_topk(gating_output, correction_bias, topk_weights, topk_ids, *rule)
"""

_loads = itertools.count()


def make_standin(folder: Path, /, *, version: str = "v0.1.20", defects: tuple[str, ...] = ()) -> Path:
    """Write the package of one release and its metadata.

    Args:
        folder: where; becomes an entry of sys.path.
        version: a release of AITER.
        defects: those to switch on besides the release's own.

    Returns:
        folder.
    """
    unknown = set(defects) - {*UNTIL, *SINCE, *INJECTED, *IMPORTS, TRUNCATED}
    assert not unknown, f"unknown defects {unknown}"
    package = folder / "aiter"
    files = {
        "__init__.py": _package(defects),
        "machine.py": Path(__file__).with_name("machine.py").read_text(),
        "jit/__init__.py": "",
        "jit/core.py": _CORE.format(version=version, defects=tuple(d for d in defects if d not in IMPORTS)),
        "ops/__init__.py": "",
        "ops/enum.py": _ENUM,
        "ops/moe_op.py": _moe_op(version),
        "ops/topk.py": _TOPK_FILE,
        "fused_moe.py": _fused_moe(version),
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    number = version.removeprefix("v")
    info = folder / f"amd_aiter-{number}.dist-info"
    shutil.rmtree(info, ignore_errors=True)
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {number}\n")
    (info / "RECORD").write_text("".join(f"aiter/{name},,\n" for name in files))
    return folder


def make_impostor(folder: Path, /) -> Path:
    """Write the unrelated package of the same name, which handles asynchronous iterators."""
    (folder / "aiter").mkdir(parents=True)
    (folder / "aiter" / "__init__.py").write_text("def map_aiter(function, iterator): ...\n")
    info = folder / "aiter-0.13.20191203.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiter\nVersion: 0.13.20191203\n")
    return folder


def load_standin(folder: Path, /) -> ModuleType:
    """Import the package of a folder, with its submodule fused_moe, under a name that nothing else bears."""
    name = f"aiter_standin_{next(_loads)}"
    init = folder / "aiter" / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(init.parent)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    importlib.import_module(f"{name}.fused_moe")
    return module


def _package(defects: tuple[str, ...]) -> str:
    added = "tuple(os.environ.get('AITER_STANDIN_DEFECTS', '').split(','))"
    lines = ["import os", f"_DEFECTS = {defects!r} + {added}"]
    for name, statement in IMPORTS.items():
        lines += [f"if {name!r} in _DEFECTS:", f"    {statement}"]
    lines.append("from .jit import core as core")
    lines.append(f"if {TRUNCATED!r} not in _DEFECTS:")
    return "\n".join((*lines, *(f"    from .ops.{name} import *" for name in ("enum", "moe_op", "topk")), ""))


def _moe_op(version: str) -> str:
    """Write ``topk_softmax`` in the form of the release."""
    key = release_key(version)
    nameless = (0, 1, 5, 0) <= key <= (0, 1, 5, 2)
    names = [f"arg{i}" if nameless else name for i, (name, _) in enumerate(_TOPK)]
    types = [kind for _, kind in _TOPK]
    parameters = ", ".join(f"{name}: {kind}" for name, kind in zip(names, types, strict=True))
    shared = ', num_shared_experts: int = 0, shared_expert_scoring_func: str = ""' if key >= (0, 1, 12, 0) else ""
    head = "from torch import Tensor\n\nfrom ..jit.core import compile_ops\n\n\n"
    if key < (0, 1, 19, 0):
        return f'{head}@compile_ops("module_moe_asm")\ndef topk_softmax({parameters}{shared}) -> None: ...\n'
    passed = ", ".join((*names, "num_shared_experts", "shared_expert_scoring_func"))
    return (
        f'{head}@compile_ops("module_moe_asm", fc_name="topk_softmax")\n'
        f"def _topk_softmax({parameters}{shared}) -> None: ...\n\n\n"
        f"def topk_softmax({parameters}{shared}) -> None:\n    _topk_softmax({passed})\n"
    )


def _fused_moe(version: str) -> str:
    """Write ``fused_moe`` with the parameters of the release."""
    key = release_key(version)
    parameters = [
        *("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask=None"),
        *("activation=ActivationType.Silu", "quant_type=QuantType.No", "doweight_stage1=False"),
        *("w1_scale=None", "w2_scale=None", "a1_scale=None", "a2_scale=None", "block_size_M=None"),
        *("num_local_tokens=None", "moe_sorting_dispatch_policy=0", "dtype=None"),
    ]
    for first, names in (
        ((0, 1, 7, 0), ("hidden_pad=0", "intermediate_pad=0", "bias1=None", "bias2=None")),
        ((0, 1, 9, 0), ("splitk=0",)),
        ((0, 1, 14, 0), ("swiglu_limit=None",)),
        ((0, 1, 19, 0), ("beta=1.0", "linear_beta=1.0")),
        ((0, 1, 14, 0), ('gate_mode="separated"',)),
        ((0, 1, 19, 2), ("shared_w1=None", "shared_w2=None", "shared_w1_scale=None", "shared_w2_scale=None")),
        ((0, 1, 19, 2), ("shared_expert_id=-1",)),
    ):
        parameters += names if key >= first else ()
    passed = "hidden_states, w1, w2, topk_weight, topk_ids, expert_mask, activation, quant_type, dtype"
    return (
        "from .jit.core import MACHINE\nfrom .ops.enum import ActivationType, QuantType\n\n\n"
        f"def fused_moe(\n    {', '.join(parameters)},\n):\n    return MACHINE.fused_moe({passed})\n"
    )
