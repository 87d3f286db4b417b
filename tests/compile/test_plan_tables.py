"""Measured entries in files: what is read back, what is left out, and what several processes may do."""

import json
import logging
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmoe.compile import plan_tables
from fmoe.compile.plan import Device, Entry, linear_key, moe_key
from fmoe.compile.plan_tables import (
    export_table,
    format_table,
    read_other_tables,
    read_tables,
    shipped_file,
    slug,
    tuned_file,
    write_entries,
)

ROOT = Path(__file__).parents[2]
DEVICE = Device("cuda", "Some GPU (80GB)", "sm_90", 132, "torch 1, triton 2, kernels abc")
KEY = moe_key(8, 2, 1, 1, 16, 24, torch.float32)
OTHER = linear_key(8, 4, torch.bfloat16)
FAST = Entry("grouped", (), 1.5, (("dense", "not measured: out of time"), ("grouped", 1.5)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_tables, "TABLES", tmp_path / "tables")
    (tmp_path / "tables").mkdir()
    caplog.set_level(logging.INFO, logger="fmoe")
    plan_tables._log_once.cache_clear()
    return tmp_path


def test_nothing_is_there_at_first() -> None:
    assert read_tables(DEVICE) == ({}, {})


def test_entries_are_kept() -> None:
    linear = Entry("triton", (8, 256, 4, 4, 1, 0, 0, 0, 0), 3.0)
    write_entries(DEVICE, KEY, {1: FAST, 16: FAST})
    write_entries(DEVICE, KEY, {2: FAST})
    write_entries(DEVICE, OTHER, {1: linear})
    assert read_tables(DEVICE).tuned == {str(KEY): {1: FAST, 2: FAST, 16: FAST}, str(OTHER): {1: linear}}
    store = json.loads(tuned_file(DEVICE).read_text())
    assert store["device"] == "Some GPU (80GB)"
    assert store["versions"] == DEVICE.versions


@pytest.mark.parametrize("change", [
    {"versions": "torch 1, triton 2, kernels abd"},
    {"name": "Some GPU"},
    {"units": 131},
    {"arch": "sm_91"},
    {"kind": "hip"},
], ids=str)  # fmt: skip
def test_any_other_device_or_version_misses(change: dict) -> None:
    write_entries(DEVICE, KEY, {1: FAST})
    assert read_tables(replace(DEVICE, **change)).tuned == {}


def test_a_file_that_is_no_json_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    write_entries(DEVICE, KEY, {1: FAST})
    path = tuned_file(DEVICE)
    path.write_text(path.read_text()[:-20])
    assert read_tables(DEVICE).tuned == {}
    assert "holds no JSON object" in caplog.text
    write_entries(DEVICE, KEY, {2: FAST})
    assert read_tables(DEVICE).tuned == {str(KEY): {2: FAST}}


BROKEN = [
    None,
    {"implementation": "other", "settings": [], "us": 1},
    {"implementation": "triton", "settings": [1, 2], "us": 1},
    {"implementation": "triton", "settings": [9] + [1] * 24, "us": 1},
    {"implementation": "triton", "settings": [], "us": 1},
]


@pytest.mark.parametrize("entry", BROKEN, ids=repr)
def test_a_broken_operator_is_left_out_with_a_warning(entry: object, caplog: pytest.LogCaptureFixture) -> None:
    write_entries(DEVICE, OTHER, {1: Entry("library", (), 1.0)})
    path = tuned_file(DEVICE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {f"{KEY} | 4": entry}))
    assert set(read_tables(DEVICE).tuned) == {str(OTHER)}
    assert f"ignored '{KEY}' in {path}" in caplog.text
    assert "tune it again" in caplog.text


def test_a_shipped_table_goes_by_the_devices_name(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_entries(DEVICE, KEY, {1: FAST, 2: FAST})
    export_table(DEVICE, shipped_file(DEVICE))
    assert shipped_file(DEVICE) == cache / "tables" / "some_gpu_80gb.json"
    elsewhere = replace(DEVICE, versions="newer", units=100)
    assert read_tables(elsewhere) == ({}, {str(KEY): {1: FAST, 2: FAST}})
    assert "made with torch 1, triton 2, kernels abc" in caplog.text
    assert read_tables(replace(DEVICE, name="Another")).shipped == {}


@pytest.mark.parametrize("store", [{"entries": []}, {}, {"entries": {"moe x": 3}}], ids=repr)
def test_a_broken_shipped_table_is_empty(store: dict) -> None:
    shipped_file(DEVICE).write_text(json.dumps(store))
    assert read_tables(DEVICE).shipped == {}


def test_tables_of_other_devices_are_a_start(cache: Path) -> None:
    write_entries(DEVICE, KEY, {1: FAST, 2: FAST})
    export_table(DEVICE, cache / "tables" / "a.json")
    (cache / "tables" / "b.json").write_text("[]")
    export_table(DEVICE, shipped_file(DEVICE))
    assert read_other_tables(DEVICE) == {str(KEY): {1: FAST, 2: FAST}}
    (cache / "tables" / "a.json").unlink()
    assert read_other_tables(DEVICE) == {}


def test_an_export_keeps_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(format_table("x", "y", {"moe other": {"1": {"us": 1}}, str(KEY): {"8": {"us": 2}}}))
    write_entries(DEVICE, KEY, {16: FAST, 2: FAST})
    write_entries(DEVICE, OTHER, {1: Entry("library", (), 1.0)})
    export_table(DEVICE, path, keys=[KEY])
    store = json.loads(path.read_text())
    assert store["device"] == DEVICE.name
    assert list(store["entries"]) == sorted(["moe other", str(KEY)])
    assert list(store["entries"][str(KEY)]) == ["2", "8", "16"]
    assert len(path.read_text().splitlines()) == 4 + 3 + 5 + 2  # one line for each entry


def test_a_table_may_leave_timings_out(tmp_path: Path) -> None:
    write_entries(DEVICE, KEY, {16: FAST})
    for timings in (True, False):
        export_table(DEVICE, tmp_path / "out.json", timings=timings)
        (entry,) = json.loads((tmp_path / "out.json").read_text())["entries"][str(KEY)].values()
        assert ("timings" in entry, entry["us"]) == (timings, 1.5)


def test_nothing_to_export_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing was measured on Some GPU .* tune first"):
        export_table(DEVICE, tmp_path / "out.json")


def test_what_is_known_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    write_entries(DEVICE, KEY, {1: FAST})
    for _ in range(3):
        read_tables(DEVICE)
    (line,) = [r.message for r in caplog.records if r.levelname == "INFO"]
    assert line.startswith("plans for Some GPU (80GB): 1 operators tuned on this machine, 0 in the table")


def test_names_of_files() -> None:
    assert slug("NVIDIA H200") == "nvidia_h200"
    assert slug("AMD Instinct MI300X (OAM) / 2") == "amd_instinct_mi300x_oam_2"


def test_two_processes_keep_each_others_entries(cache: Path) -> None:
    code = """
        import sys
        import torch
        from fmoe.compile.plan import Device, Entry, moe_key
        from fmoe.compile.plan_tables import write_entries
        device = Device("cuda", "Some GPU (80GB)", "sm_90", 132, "torch 1, triton 2, kernels abc")
        for i in range(20):
            key = moe_key(8, 2, 1, 1, 16, 24 + i % 4, torch.float32)
            write_entries(device, key, {2 * i + int(sys.argv[1]) + 1: Entry("grouped", (), 1.0)})
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code)]
    running = [subprocess.Popen([*arguments, n], cwd=ROOT, stderr=subprocess.PIPE, text=True) for n in "01"]
    assert [(process.communicate()[1], process.returncode) for process in running] == [("", 0), ("", 0)]
    tuned = read_tables(DEVICE).tuned
    assert {tokens for entries in tuned.values() for tokens in entries} == set(range(1, 41))
    assert len(tuned) == 4
