"""Files of compiled graphs: what was written is found again, and what is stale, foreign or damaged is ignored."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from fmoe.compile import artefacts
from fmoe.compile.artefacts import (
    artefact_file,
    kept_kernels,
    load_artefacts,
    pack_triton,
    read_artefacts,
    save_artefacts,
    triton_folder,
    unpack_triton,
    write_artefacts,
)
from fmoe.compile.plan import Device

IDENTITY = {"device": "A GPU (sm_90)", "versions": "torch 2.13, triton 3.6", "python": "3.11.2"}
PARTS = {"torch/1": b"\x00graphs\n", "keys/1": b"a\nb", "triton/ABC/moe.cubin": b"\x7fELF"}
CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "graphs" / "a.graphs"
    write_artefacts(path, IDENTITY, PARTS)
    return path


@pytest.fixture
def loaded(monkeypatch):
    """Note what torch is given."""
    given = []

    def load(content):
        given.append(content)
        return {"inductor": ["a"]}

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return given


def test_what_was_written_is_found_again(file, caplog):
    assert read_artefacts(file, IDENTITY) == PARTS
    assert {path.name for path in file.parent.iterdir()} <= {"a.graphs", "a.graphs.lock"}
    assert not caplog.messages


@pytest.mark.parametrize("name", ["absent", "a.graphs/below"])
def test_no_file_is_no_news(file, name, caplog, loaded):
    assert read_artefacts(file.parent / name, IDENTITY) == {}
    assert not load_artefacts(file.parent / name, IDENTITY, CPU)
    assert not caplog.messages and not loaded


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"versions": "torch 2.14, triton 3.7"},
            "it was made with versions torch 2.13, triton 3.6, this is torch 2.14,",
        ),
        ({"device": "Another (sm_100)"}, "it was made with device A GPU (sm_90), this is Another (sm_100)"),
        ({"python": "3.12.1"}, "it was made with python 3.11.2, this is 3.12.1"),
        ({"functions": "abc"}, "it was made with functions None, this is abc"),
    ],
    ids=["versions", "device", "python", "functions"],
)
def test_a_stale_or_foreign_file_is_ignored_with_a_warning(file, caplog, loaded, change, reason):
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        assert not load_artefacts(file, {**IDENTITY, **change}, CPU)
    [message] = caplog.messages
    assert message.startswith(f"ignored the compiled graphs in {file}: it was made with {next(iter(change))} ")
    assert message.endswith("; run fmoe warm again")
    assert not loaded
    assert reason in message


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"PK" + content, "it is of another format"),
        (lambda content: b"", "it is of another format"),
        (lambda content: content[:-1], "it is damaged"),
        (lambda content: content[:-1] + b"?", "it is damaged"),
        (lambda content: content[:20], "it is damaged"),
        (lambda content: artefacts.MAGIC + b'{"identity": 7}\n', "it is damaged"),
        (lambda content: artefacts.MAGIC + b"[" * 100_000, "it is damaged"),
    ],
    ids=["format", "empty", "cut", "changed", "header", "fields", "nested"],
)
def test_a_damaged_file_is_ignored_with_a_warning(file, caplog, loaded, damage, reason):
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        assert not load_artefacts(file, IDENTITY, CPU)
    assert caplog.messages == [f"ignored the compiled graphs in {file}: {reason}; run fmoe warm again"]
    assert not loaded


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(file, caplog):
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        assert read_artefacts(file.parent, IDENTITY) == {}
    assert "the file cannot be read" in caplog.text


def test_what_torch_cannot_read_is_ignored_with_a_warning(file, caplog, monkeypatch):
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: None)
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        assert not load_artefacts(file, IDENTITY, CPU)

    def fail(content):
        raise AssertionError("not registered")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fail)
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        assert not load_artefacts(file, IDENTITY, CPU)
    assert caplog.messages == [
        f"ignored the compiled graphs in {file}, which torch cannot read; run fmoe warm again",
        f"ignored the compiled graphs in {file} (AssertionError: not registered); run fmoe warm again",
    ]


def test_torch_gets_its_part(file, loaded):
    assert load_artefacts(file, IDENTITY, CPU)
    assert loaded == [PARTS["torch/1"]]


def test_writing_keeps_what_is_not_written_anew(file, loaded):
    more = {"torch/2": b"new", "keys/2": b"b\nc", "triton/DEF/route.cubin": b"2"}
    write_artefacts(file, IDENTITY, more)
    assert read_artefacts(file, IDENTITY) == {**PARTS, **more}
    assert load_artefacts(file, IDENTITY, CPU)
    assert sorted(loaded) == [b"\x00graphs\n", b"new"]
    # graphs that are all in a later part are dropped with it
    write_artefacts(file, IDENTITY, {"torch/3": b"both", "keys/3": b"a\nb\nd"})
    assert sorted(read_artefacts(file, IDENTITY)) == sorted(
        ["torch/2", "keys/2", "torch/3", "keys/3", "triton/ABC/moe.cubin", "triton/DEF/route.cubin"]
    )
    newer = {**IDENTITY, "python": "3.12.0"}
    write_artefacts(file, newer, {"torch/4": b"newest"})
    assert read_artefacts(file, newer) == {"torch/4": b"newest"}


def test_a_writer_waits_for_another(file):
    with FileLock(file.with_name("a.graphs.lock")), pytest.raises(Timeout):
        write_artefacts(file, IDENTITY, PARTS, timeout_s=0.05)
    assert read_artefacts(file, IDENTITY) == PARTS
    assert issubclass(Timeout, OSError)  # as the docstring says


def test_files_are_told_apart_by_device_and_model(monkeypatch, tmp_path):
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path))
    device = Device("cuda", "NVIDIA H200", "sm_90", 132, "torch 2.13")
    names = {
        artefact_file(device, "a"),
        artefact_file(device, "b"),
        artefact_file(Device("cuda", "NVIDIA H100", "sm_90", 132, "torch 2.13"), "a"),
    }
    assert len(names) == 3
    assert artefact_file(Device("cuda", "NVIDIA H200", "sm_90", 132, "torch 2.14"), "a") in names
    assert {name.parent for name in names} == {tmp_path / "graphs"}
    assert artefact_file(device, "a").name.startswith("nvidia_h200_")


# --- Triton's entries


def make_entry(folder, entry, kernel):
    """Write what Triton writes for one kernel."""
    (folder / entry).mkdir(parents=True)
    paths = {f"{kernel}.{end}": folder / entry / f"{kernel}.{end}" for end in ("cubin", "json")}
    for name, path in paths.items():
        path.write_text(name)
    group = {"child_paths": {name: str(path) for name, path in paths.items()}}
    (folder / entry / f"__grp__{kernel}.json").write_text(json.dumps(group))
    (folder / entry / "lock").write_text("")


def test_kernels_of_triton_move_with_their_groups(tmp_path):
    make_entry(tmp_path / "there", "ABC", "decode_moe")
    make_entry(tmp_path / "there", "XYZ", "triton_poi_fused_add_0")
    (tmp_path / "there" / "DEF" / "tmp.pid_1").mkdir(parents=True)
    parts = pack_triton(tmp_path / "there")
    assert sorted(parts) == [
        f"triton/ABC/{name}" for name in ("__grp__decode_moe.json", "decode_moe.cubin", "decode_moe.json", "lock")
    ]
    here = tmp_path / "here"
    (here / "ABC").mkdir(parents=True)
    (here / "ABC" / "decode_moe.json").write_text("mine")

    unpack_triton(parts, here)

    group = json.loads((here / "ABC" / "__grp__decode_moe.json").read_text())["child_paths"]
    assert group == {f"decode_moe.{end}": str(here / "ABC" / f"decode_moe.{end}") for end in ("cubin", "json")}
    assert (here / "ABC" / "decode_moe.cubin").read_text() == "decode_moe.cubin"
    assert (here / "ABC" / "decode_moe.json").read_text() == "mine"
    assert pack_triton(tmp_path / "absent") == {}


@pytest.mark.parametrize("name", ["triton/../x", "triton/A/../../x", "triton/A/.x", "triton//x", "x", "triton/A/B/x"])
def test_nothing_is_written_elsewhere(tmp_path, name):
    unpack_triton({name: b"1"}, tmp_path / "here")
    assert not list(tmp_path.iterdir())


def test_a_gpu_gets_kernels_wherever_triton_looks(file, loaded, monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert load_artefacts(file, IDENTITY, GPU)
    for folder in (tmp_path / "home" / ".triton" / "cache", tmp_path / "inductor" / "triton" / "1"):
        assert (folder / "ABC" / "moe.cubin").read_bytes() == b"\x7fELF"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "named"))
    assert load_artefacts(file, IDENTITY, GPU)
    assert (tmp_path / "named" / "ABC" / "moe.cubin").is_file()
    assert not (tmp_path / "named" / "ABC" / "torch").exists()


def test_triton_keeps_its_kernels_apart_meanwhile(file, monkeypatch):
    for before in ("/there", None):
        if before is None:
            monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TRITON_CACHE_DIR", before)
        with kept_kernels(file):
            assert os.environ["TRITON_CACHE_DIR"] == str(triton_folder(file))
        assert os.environ.get("TRITON_CACHE_DIR") == before


# --- torch's own part


def test_saving_where_torch_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    with pytest.raises(RuntimeError, match="torch has kept no compiled graph; unset what switches its caches off"):
        save_artefacts(tmp_path / "a.graphs", IDENTITY)


SCRIPT = """
import sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from fmoe.compile.artefacts import load_artefacts, save_artefacts

file, identity = Path(sys.argv[2]), {"versions": torch.__version__}
if sys.argv[1] == "load":
    assert load_artefacts(file, identity, torch.device("cpu"))
with torch.inference_mode():
    torch.compile(lambda x: (x + 1).relu() * x, fullgraph=True)(torch.ones(3, 5))
counts = counters["inductor"]
print(counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"], *save_artefacts(file, identity))
"""


def test_another_process_takes_what_one_has_compiled(tmp_path):
    """With caches of its own, and what it takes it can hand on."""

    def run(mode, caches):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / caches), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, mode, str(tmp_path / "a.graphs")]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.split()]

    assert run("compile", "one") == [1, 0, 1, 0]
    assert run("load", "two") == [0, 1, 1, 0]
