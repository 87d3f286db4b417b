"""What names the file of a model's graphs, and when it is taken."""

import logging
from dataclasses import replace

import pytest
import torch

import fmoe
from fmoe import graph_files
from fmoe.compile.artefacts import write_artefacts
from fmoe.graph_files import find_graph_file
from fmoe.model import choose_steps

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path))


def find(model, **changes):
    values = {"config": model.config, "dtype": model.dtype, "kernels": "auto"} | changes
    return find_graph_file(model.architecture, values["config"], values["dtype"], CPU, values["kernels"])


def test_models_have_files_of_their_own():
    demo = fmoe.load("demo", device="cpu")
    half = fmoe.load("demo", device="cpu", state_dtype="bfloat16")
    files = [find(demo), find(half), find(demo, dtype=torch.bfloat16), find(demo, kernels="reference")]
    assert len({found.file for found in files}) == 4
    assert find(fmoe.load("demo", device="cpu")) == files[0]


def test_the_identity_names_what_graphs_depend_on(monkeypatch):
    demo = fmoe.load("demo", device="cpu")
    found = find(demo)
    identity = dict(found.identity)
    assert torch.__version__ in identity["versions"]
    assert list(identity) == ["device", "versions", "python", "functions"]
    names = {path.name for path in graph_files._list_sources()}
    assert {"deltanet.py", "qwen3_next.py", "step.py"} <= names
    monkeypatch.setattr(graph_files, "source_hash", lambda *files: "0" * 64)
    assert find(demo).file == found.file
    assert find(demo).identity != found.identity


def test_compiled_use_takes_the_file_first_and_once(monkeypatch, caplog):
    given = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: given.append(content) or {})
    demo = fmoe.load("demo", device="cpu", compile=True)
    found = find(demo)
    write_artefacts(found.file, dict(found.identity), {"torch/1": b"graphs"})
    with caplog.at_level(logging.INFO, logger="fmoe"):
        for _ in range(3):
            assert choose_steps(demo, 5) is demo.graphs
    assert given == [b"graphs"]
    assert caplog.messages == [f"compiled graphs come from {found.file}"]


def test_plain_use_asks_for_no_file(monkeypatch):
    demo = fmoe.load("demo", device="cpu", compile=False)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", pytest.fail)
    found = find(demo)
    write_artefacts(found.file, dict(found.identity), {"torch/1": b"graphs"})
    assert choose_steps(demo, 10**9) is demo.eager


def test_a_stale_file_is_warned_of_and_graphs_compile(monkeypatch, caplog):
    demo = replace(fmoe.load("demo", device="cpu", compile=True))
    found = find(demo)
    write_artefacts(found.file, {**dict(found.identity), "versions": "torch 1.0"}, {"torch/1": b"graphs"})
    with caplog.at_level(logging.INFO, logger="fmoe"):
        choose_steps(demo, 5)
    assert "it was made with versions torch 1.0, this is torch" in caplog.messages[-2]
    assert caplog.messages[-1] == "compiling graphs (once per process; a minute or more)"
