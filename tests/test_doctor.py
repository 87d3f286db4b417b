"""The diagnosis of a machine: each row and its reason, the levels of plans, a model, a checkout of AITER."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fmoe.doctor
from fmoe.cli_machine import doctor_command
from fmoe.compile.aiter_kernels import SYMBOLS
from fmoe.compile.aiter_selftest import Outcome
from fmoe.compile.device import describe_device
from fmoe.compile.plan import Entry, moe_key
from fmoe.compile.plan_tables import tuned_file, write_entries
from fmoe.doctor import diagnose, format_diagnosis

from .contract.checkpoints import write_checkpoint
from .contract.standin.build import make_standin

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put the stand-in of a release where an installation would be, and assume an MI300X."""

    def put(version="v0.1.20", **options):
        monkeypatch.syspath_prepend(str(make_standin(tmp_path / "site", version=version, **options)))
        monkeypatch.setenv("FMOE_ASSUME_ARCH", "gfx942")

    return put


def invoke(*arguments):
    return CliRunner().invoke(doctor_command, arguments)


def rows_of(found):
    return {(row.operator, row.implementation): row for row in found.rows}


def passes(record, device):
    return Outcome(True, "", record.symbols)


def test_a_cpu_says_what_would_run_on_a_gpu():
    found = diagnose(device="cpu")
    rows = rows_of(found)
    assert rows["experts", "reference"].can_run
    assert not rows["experts", "triton"].can_run
    assert "triton needs a GPU" in rows["experts", "triton"].reason
    assert "aiter needs an AMD GPU" in rows["softmax top-k", "aiter"].reason
    assert ("projections", "aiter") not in rows
    text = format_diagnosis(found)
    for said in (
        "This is a CPU: the reference functions run.",
        "On an NVIDIA GPU of sm_80 or later fmoe's Triton kernels would run",
        "On an AMD GPU of gfx942 or gfx950",
        torch.__version__,
    ):
        assert said in text


@pytest.mark.parametrize(("version", "arity"), [("v0.1.20", 7), ("v0.1.11", 5)])
def test_an_aiter_that_works_is_shown_by_operator(version, arity, install):
    install(version)
    found = diagnose(device="cpu", selftest=passes)
    rows = rows_of(found)
    for operator in ("experts", "softmax top-k", "grouped top-k", "grouped top-k with bias"):
        assert rows[operator, "aiter"].can_run
        assert rows[operator, "aiter"].version == version.removeprefix("v")
    assert rows["softmax top-k", "aiter"].reason.startswith(f"{arity} arguments: shared columns")
    assert found.advice == ()
    assert "aiter" not in sys.modules


def test_a_kernel_that_a_release_lacks(install, tmp_path):
    install()
    topk = tmp_path / "site" / "aiter" / "ops" / "topk.py"
    topk.write_text(topk.read_text().replace("def grouped_topk", "def renamed_topk"))
    row = rows_of(diagnose(device="cpu", selftest=passes))["grouped top-k", "aiter"]
    assert (row.can_run, row.reason) == (False, "this release has no aiter.grouped_topk")


def test_the_self_test_runs_anew_each_time(install):
    install()
    calls = []

    def counts(record, device):
        calls.append(device)
        return Outcome(False, f"failed {len(calls)} times", ())

    for times in (1, 2):
        row = rows_of(diagnose(device="cpu", selftest=counts))["experts", "aiter"]
        assert row.reason == f"failed {times} times"


def test_the_levels_of_plans_are_counted_and_named():
    tuned, shipped, rule = diagnose(device="cpu").levels
    assert (tuned.operators, rule.path) == (0, "")
    described = describe_device(CPU)
    assert tuned.path == str(tuned_file(described))
    assert tuned.versions == described.versions
    assert Path(shipped.path).parent.name == "tables"
    assert "tuned here: no such file" in format_diagnosis(diagnose(device="cpu"))

    write_entries(described, moe_key(6, 2, 1, 1, 24, 20, torch.float32), {1: Entry("loop", (), 1.0)})
    found = diagnose(device="cpu")
    assert found.levels[0].operators == 1
    assert f"tuned here: 1 operators, {tuned.path}" in format_diagnosis(found)


def test_a_model_is_planned_without_its_weights(tmp_path):
    found = diagnose(device="cpu", model="demo")
    assert found.model.dtype == "float32"
    assert found.model.decision[0].startswith("experts: reference (aiter needs an AMD GPU")
    assert [str(plan.key) for plan in found.model.plans] == ["moe E16 K4 S1 G1 D256 F64 float32"]
    assert "up to 2  rule            loop" in format_diagnosis(found)

    folder = write_checkpoint(tmp_path / "model", "qwen2_moe", dtype="bfloat16")
    (folder / "model.safetensors").unlink()
    assert diagnose(device="cpu", dtype="bfloat16", model=folder).model.plans[0].key.dtype == "bfloat16"


def test_a_model_that_aiter_would_run(install, tmp_path):
    install()
    folder = write_checkpoint(tmp_path / "model", "qwen2_moe")
    found = diagnose(device="cpu", dtype="float16", model=folder, selftest=passes)
    assert found.model.decision[0] == "experts: aiter 0.1.20"
    assert {row.implementation for row in found.model.plans[0].rows} == {"aiter"}


def test_json():
    done = invoke("--device", "cpu", "--json", "--model", "demo", "-q")
    found = json.loads(done.stdout)
    assert {"fmoe", "torch", "device", "rows", "levels", "model", "checkout"} <= set(found)
    assert {"operator", "implementation", "can_run", "version", "reason"} == set(found["rows"][0])
    assert found["model"]["plans"][0]["key"]["sizes"] == [16, 4, 1, 1, 256, 64]


def test_a_checkout_with_every_name(tmp_path):
    done = invoke("--device", "cpu", "--check-aiter", str(make_standin(tmp_path / "checkout")))
    assert done.exit_code == 0, done.output
    for name in SYMBOLS:
        assert name in done.stdout
    assert "fused_moe.py:" in done.stdout
    assert "ABSENT" not in done.stdout


def test_a_checkout_that_lacks_a_name(tmp_path):
    root = make_standin(tmp_path / "checkout")
    (root / "aiter" / "fused_moe.py").write_text("def moved(): ...\n")
    done = invoke("--device", "cpu", "--check-aiter", str(root))
    assert done.exit_code == 1
    assert "aiter.fused_moe.fused_moe            ABSENT" in done.stdout
    assert "lacks aiter.fused_moe.fused_moe; fmoe needs another release of AITER" in done.stderr


def test_what_is_no_checkout_or_no_folder(tmp_path):
    done = invoke("--check-aiter", str(tmp_path))
    assert done.exit_code == 1
    assert "expected a checkout of AITER with aiter/jit/core.py" in done.stderr
    with pytest.raises(FileNotFoundError):
        diagnose(device="cpu", model=tmp_path / "nothing")


@pytest.mark.parametrize("options", [{"model": "nothing"}, {"checkout": "nothing"}], ids=str)
def test_wrong_folders_are_named_before_aiter_is_tried_out(options, install):
    def refuse(record, device):
        raise AssertionError("tried out")

    install()
    with pytest.raises(FileNotFoundError, match="nothing"):
        diagnose(device="cpu", selftest=refuse, **options)


def test_no_model_is_loaded_and_no_process_started(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(fmoe.model, "load_params", refuse)
    assert diagnose(device="cpu", model="demo").model is not None
