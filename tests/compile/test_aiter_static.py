"""AITER read from its files: every generation, every look-alike, and nothing executed."""

import importlib
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fmoe.compile.aiter_kernels import SYMBOLS
from fmoe.compile.aiter_static import (
    NotReadable,
    Signature,
    check_checkout,
    find_architecture,
    find_package,
    find_version,
    fingerprint,
    read_installation,
    topk_arity,
    version_key,
)

from .fake_aiter import build, build_impostor, write

CPU = torch.device("cpu")
FIVE = "topk_weights, topk_indices, token_expert_indices, gating_output, need_renorm: bool"
SEVEN = FIVE + ', num_shared_experts: int = 0, shared_expert_scoring_func: str = ""'
OLD_MOE = """
    hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=ActivationType.Silu,
    quant_type=QuantType.No, doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None,
    block_size_M=None, num_local_tokens=None, moe_sorting_dispatch_policy=0, dtype=None
"""
STAR = "from .jit import core\nfrom .ops.enum import *\nfrom .ops.moe_op import *\nfrom .ops.topk import *\n"
TRIED = f"try:\n{textwrap.indent(STAR, '    ')}\nexcept (ImportError, RuntimeError, OSError) as e:\n    print(e)\n"
TOPK_OPS = """
    from ..jit.core import compile_ops

    @compile_ops("module_moe_asm", fc_name="biased_grouped_topk", develop=True)
    def biased_grouped_topk_hip(
        gating_output: Tensor, correction_bias, topk_weights, topk_ids, num_expert_group: int, topk_grp: int,
        need_renorm: bool, routed_scaling_factor: float = 1.0) -> None: ...

    @compile_ops("module_moe_asm")
    def grouped_topk(gating_output, topk_weights, topk_ids, num_expert_group, topk_group, need_renorm,
        is_softmax=True, routed_scaling_factor=1.0): ...
"""
DYNAMIC_ENUMS = """
    from ..jit.core import compile_ops

    @compile_ops("module_aiter_enum", "ActivationType")
    def _ActivationType(dummy): ...

    ActivationType = type(_ActivationType(0))
    QuantType = type(_QuantType(0))
"""
ENUMS = """
    from enum import IntEnum

    class ActivationType(IntEnum):
        No = -1
        Silu = 0

    class QuantType(IntEnum):
        No = 0
"""


def generation(root: Path, topk: str, *, init: str = STAR, enums: str = DYNAMIC_ENUMS, moe: str = OLD_MOE) -> Path:
    """Write a package with one generation's declarations; nothing in it can be executed."""
    bomb = "raise SystemExit('executed')\n"
    files = {
        "__init__.py": bomb + init,
        "jit/core.py": bomb,
        "ops/enum.py": bomb + textwrap.dedent(enums),
        "ops/moe_op.py": bomb + textwrap.dedent(topk),
        "ops/topk.py": bomb + textwrap.dedent(TOPK_OPS),
        "fused_moe.py": f"{bomb}def fused_moe({moe}): ...\n",
    }
    return write(root, files) / "aiter"


def declared(parameters: str) -> str:
    return f'@compile_ops("module_moe_asm")\ndef topk_softmax({parameters}) -> None: ...\n'


PLAIN = f"""
@compile_ops("module_moe_topk", develop=True)
def _topk_softmax(topk_weights, topk_indices, gating_output, softmax_workspace) -> None: ...

def topk_softmax({SEVEN}) -> None:
    _topk_softmax(topk_weights)
"""
OPTIONAL = f"""
try:
    import triton
    {declared(SEVEN).replace(chr(10), chr(10) + "    ")}
except ImportError:
    pass
"""


@pytest.mark.parametrize(
    ("version", "topk", "arity", "fast", "slow"),
    [
        pytest.param("0.1.4", declared(FIVE), 5, False, False, id="0.1.4"),
        pytest.param("0.1.5.post2", declared("arg0, arg1, arg2, arg3, arg4"), 5, False, False, id="0.1.5.post2"),
        pytest.param("0.1.7.post2.dev18", declared(FIVE), 5, False, False, id="wheel"),
        pytest.param("0.1.11", declared(FIVE), 5, True, False, id="0.1.11"),
        pytest.param("0.1.11.post1", declared(FIVE), 5, True, False, id="0.1.11.post1"),
        pytest.param("0.1.12", declared(SEVEN), 7, True, False, id="0.1.12"),
        pytest.param("0.1.18", declared(SEVEN), 7, True, False, id="0.1.18"),
        pytest.param("0.1.18", OPTIONAL, 7, True, False, id="inside-try"),
        pytest.param("0.1.19", PLAIN, 7, True, False, id="0.1.19"),
        pytest.param("0.1.19.post1", PLAIN, 7, True, True, id="0.1.19.post1"),
        pytest.param("0.1.20.post1", PLAIN, 7, True, True, id="0.1.20.post1"),
        pytest.param("0.1.20.post2.dev46+ge4048607a5", PLAIN, 7, True, True, id="head"),
        pytest.param("", PLAIN, 7, True, False, id="unknown-version"),
        pytest.param("", declared(FIVE), 5, False, False, id="unknown-old"),
        # A version that its own files contradict.
        pytest.param("0.1.20", declared(SEVEN), 7, True, False, id="contradiction"),
    ],
)
def test_every_generation(version: str, topk: str, arity: int, fast: bool, slow: bool, tmp_path: Path) -> None:
    record = read_installation(generation(tmp_path, topk), tuple(SYMBOLS), version=version, arch="gfx942")
    assert (record.topk_arity, record.gating_stride_safe, record.slow_path_stride_safe) == (arity, fast, slow)
    assert record.symbols == tuple(SYMBOLS)
    assert record.fused_moe_params[:8] == (
        *("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask", "activation", "quant_type"),
    )
    assert (record.version, record.arch, record.present, record.reason) == (version, "gfx942", False, "")
    assert "aiter" not in sys.modules


def test_names_behind_a_swallowed_import_are_found(tmp_path: Path) -> None:
    root = generation(tmp_path, declared(SEVEN), init=TRIED, enums=ENUMS)
    record = read_installation(root, tuple(SYMBOLS), version="0.1.12", arch="gfx942")
    assert record.symbols == tuple(SYMBOLS)


def test_names_that_are_absent_are_left_out(tmp_path: Path) -> None:
    root = generation(tmp_path, declared(FIVE), enums="ActivationType = 1\n")
    (root / "fused_moe.py").unlink()
    (root / "ops" / "topk.py").write_text("# biased_grouped_topk_hip was here\n")
    record = read_installation(root, tuple(SYMBOLS), version="0.1.6", arch="gfx942")
    assert record.symbols == ("aiter.topk_softmax", "aiter.ActivationType")
    assert record.fused_moe_params == ()


@pytest.mark.parametrize(
    ("topk", "message"),
    [
        ("def moe_sum(a): ...", "has no topk_softmax"),
        ("topk_softmax = 3", "has no topk_softmax"),
        (declared("a, b, c"), "unknown form: a, b, c"),
        (declared(SEVEN.replace(" = 0", "").replace(' = ""', "") + ", eighth"), "unknown form"),
        ("def topk_softmax(:", "cannot be read"),
        ("\0topk_softmax", "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused(topk: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(NotReadable, match=message):
        read_installation(generation(tmp_path, topk), tuple(SYMBOLS), version="0.1.21", arch="gfx942")


def test_arity_allows_for_further_defaults() -> None:
    seven = ("w", "i", "t", "g", "r", "num_shared_experts", "shared_expert_scoring_func")
    assert topk_arity(Signature((*seven, "new"), 5, True)) == 7
    assert topk_arity(Signature((*seven, "new"), 8, True)) == 0
    assert topk_arity(Signature(("w", "i", "t", "g", "r", "other"), 5, True)) == 5
    assert topk_arity(Signature(("w", "i", "t", "g"), 4, True)) == 0


def test_releases_are_ordered() -> None:
    order = [
        *("0.1.7.post2.dev18", "0.1.7.post2", "0.1.9", "v0.1.11rc1", "0.1.11", "0.1.11.post1", "0.1.12.dev3+g12"),
        *("0.1.12", "0.1.14-rc0", "0.1.14", "0.1.19", "0.1.19.post1.dev1", "0.1.19.post1", "0.2", "1.0.0+rocm7.dev"),
    ]
    keys = [version_key(version) for version in order]
    assert keys == sorted(keys, key=lambda key: key or ())
    assert len(set(keys)) == len(keys)
    assert version_key("unknown") is None


def test_a_machine_without_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMOE_ASSUME_ARCH", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(NotReadable, match=r"needs an AMD GPU; torch .* is not built for ROCm"):
        find_architecture(CPU)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NotReadable, match="needs an AMD GPU; the device is cpu"):
        find_architecture(CPU)


def test_the_architecture_of_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMOE_ASSUME_ARCH", raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert find_architecture(torch.device("cuda", 0)) == "gfx950"
    found.gcnArchName = "gfx1201"
    with pytest.raises(NotReadable, match="no kernels for gfx1201, only for gfx942 and gfx950"):
        find_architecture(torch.device("cuda", 0))


def test_the_assumed_architecture_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMOE_ASSUME_ARCH", "gfx942")
    assert find_architecture(CPU) == "gfx942"
    monkeypatch.setenv("FMOE_ASSUME_ARCH", "gfx90a")
    with pytest.raises(NotReadable, match="no kernels for gfx90a"):
        find_architecture(CPU)


def test_an_installation_is_found_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(build(tmp_path, init="raise SystemExit('executed')")))
    assert find_package() == tmp_path / "aiter"
    assert find_version(find_package()) == "0.1.18"
    assert "aiter" not in sys.modules


def test_the_impostor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(build_impostor(tmp_path)))
    with pytest.raises(NotReadable, match=r"not AMD's: .*PyPI's 'aiter'.*install AMD's amd-aiter"):
        find_package()


def test_a_module_of_the_name_is_an_impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aiter.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotReadable, match=r"not AMD's: what is in .*aiter\.py"):
        find_package()


def test_a_checkout_beside_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "aiter")  # the clone's folder is found in place of the package inside
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotReadable, match=r"not installed: .* has its name and is no package"):
        find_package()


def test_an_incomplete_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (build(tmp_path) / "aiter" / "ops" / "moe_op.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotReadable, match=r"incomplete in .*: lacks ops/moe_op\.py; reinstall amd-aiter"):
        find_package()


def test_no_installation() -> None:
    with pytest.raises(NotReadable, match=r"not installed$"):
        find_package(lambda name: None)

    def fail(name: str) -> ModuleSpec | None:
        raise ValueError(f"{name}.__spec__ is None")

    with pytest.raises(NotReadable, match=r"cannot be located \(aiter.__spec__ is None\)"):
        find_package(fail)


def test_the_version_of_the_metadata_must_be_of_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    (root / "aiter" / "_version.py").unlink()
    monkeypatch.syspath_prepend(str(root))
    assert find_version(root / "aiter") == ""
    for name, files, version in (
        ("aiter", "aiter/__init__.py,,", ""),  # the unrelated distribution
        ("aiter", "aiter/jit/core.py,,", "0.1.7"),  # AMD's, under its old name
        ("amd_aiter", "", "0.1.12"),
    ):
        info = root / f"{name}-1.dist-info"
        info.mkdir(exist_ok=True)
        metadata_name = name.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata_name}\nVersion: {version or '0.13'}\n")
        (info / "RECORD").write_text(files + "\n")
        importlib.invalidate_caches()
        assert find_version(root / "aiter") == version


def test_the_fingerprint_follows_the_files_and_not_what_is_compiled(tmp_path: Path) -> None:
    root = build(tmp_path) / "aiter"
    before = fingerprint(root)
    (root / "jit" / "module_moe_asm.so").write_bytes(b"\x7fELF")
    (root / "jit" / "build").mkdir()
    assert fingerprint(root) == before
    seen = {before}
    for name in ("ops/moe_op.py", "_version.py", "ops/new.py", "jit/core.py", "__init__.py"):
        with (root / name).open("a") as file:
            file.write("# changed\n")
        seen.add(fingerprint(root))
    assert len(seen) == 6
    assert fingerprint(build(tmp_path / "elsewhere") / "aiter") not in seen


@pytest.mark.parametrize("inside", [False, True])
def test_a_checkout_is_held_against_the_table(inside: bool, tmp_path: Path) -> None:
    root = generation(tmp_path, PLAIN, enums=ENUMS)
    names = (*SYMBOLS, "aiter.QuantType.No", "aiter.QuantType.per_Moon", "aiter.fused_moe.gone", "aiter.gone.gone")
    found = check_checkout(root if inside else tmp_path, names)
    assert list(found) == list(names)
    assert found["aiter.topk_softmax"] == "ops/moe_op.py:6"
    assert found["aiter.fused_moe.fused_moe"] == "fused_moe.py:2"
    assert found["aiter.QuantType.No"] == "ops/enum.py:9"
    assert [name for name in names if not found[name]] == list(names[-3:])


def test_a_folder_without_aiter_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a checkout of AITER with .*found none in"):
        check_checkout(tmp_path, tuple(SYMBOLS))


def test_the_installed_aiter_has_every_name() -> None:
    try:
        root = find_package()
    except NotReadable as absent:
        pytest.skip(str(absent))
    assert [name for name, place in check_checkout(root, tuple(SYMBOLS)).items() if not place] == []
