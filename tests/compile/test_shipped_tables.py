"""The tables that come with fmoe: each configuration compiles for the devices that kernels are written for.

Settings of one kind of device go through ``adapt_entry`` for another, as they do before the tuner tries them there.
"""

import json
import os
import re
from pathlib import Path

import pytest

from fmoe.compile.adapt import adapt_entry
from fmoe.compile.candidates import Candidate, Inputs
from fmoe.compile.plan import FP8, KERNELS, Device, Key, buckets_of, entries_from_json
from fmoe.compile.plan_tables import TABLES, read_tables, shipped_file
from fmoe.compile.settings import why_not_fp8

FILES = sorted(TABLES.glob("*.json"))
UNITS = {"sm_90": 132, "gfx942": 304, "gfx950": 256}


def parse_key(text: str) -> Key:
    operator, *sizes, dtype = text.split(" ")
    key = Key(operator, tuple(int(re.sub(r"^[A-Z]", "", size)) for size in sizes), dtype)
    assert str(key) == text
    return key


def tables() -> list[tuple[str, Key, dict]]:
    return [
        (file.name, parse_key(text), entries)
        for file in FILES
        for text, entries in json.loads(file.read_text())["entries"].items()
    ]


def test_there_are_tables() -> None:
    assert "nvidia_h200.json" in [file.name for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_table_is_found_by_its_device_and_read_whole(file: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path))
    store = json.loads(file.read_text())
    device = Device("cuda", store["device"], "sm_90", 132, "any")
    assert shipped_file(device) == file
    shipped = read_tables(device).shipped
    assert {key: {str(t) for t in entries} for key, entries in shipped.items()} == {
        key: set(entries) for key, entries in store["entries"].items()
    }
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_token_counts_are_buckets() -> None:
    for name, key, entries in tables():
        assert {int(tokens) for tokens in entries} <= set(buckets_of(key.operator)), (name, str(key))


@pytest.mark.parametrize("arch", UNITS)
@pytest.mark.parametrize(("name", "key"), [pytest.param(n, k, id=f"{n}-{k}") for n, k, _ in tables()])
def test_shipped_settings_compile(name: str, key: Key, arch: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed; it is what compiles the kernels")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter compiles nothing; unset TRITON_INTERPRET")
    kind = "cuda" if arch.startswith("sm_") else "hip"
    if key.dtype == FP8 and (reason := why_not_fp8(kind, arch)):
        pytest.skip(reason)
    from fmoe.compile.kernels.offline import find_misfits
    from fmoe.compile.kernels.prune import identify, record_candidate

    device = Device(kind, "", arch, UNITS[arch], "")
    (entries,) = [entries_from_json(entries) for n, k, entries in tables() if (n, k) == (name, key)]
    launches = {}
    for tokens, shipped in entries.items():
        entry = adapt_entry(shipped, key, tokens, device)
        assert entry == shipped or device.kind == "hip"
        if entry.implementation in KERNELS:
            candidate = Candidate(entry.implementation, entry.settings)
            recorded = record_candidate(key, tokens, candidate, Inputs())
            assert recorded
            launches |= {identify(launch): launch for launch in recorded}
    assert find_misfits(list(launches.values()), arch) == []


def test_adapting_takes_away_what_does_not_fit() -> None:
    key = Key("moe", (8, 2, 0, 0, 4096, 14336), "bfloat16")
    settings = (2, 64, 64, 64, 4, 3, 128, 128, 128, 8, 4, 128, 128, 64, 4, 3, 1, 0, 0, 0, 1024, 0, 8, 1, 1)
    (entry,) = entries_from_json({"4096": {"implementation": "triton", "settings": settings, "us": 1.0}}).values()
    h200, mi300 = Device("cuda", "", "sm_90", 132, ""), Device("hip", "", "gfx942", 304, "")
    assert adapt_entry(entry, key, 4096, h200).settings[6:11] == (128, 128, 128, 8, 2)
    adapted = adapt_entry(entry, key, 4096, mi300)
    assert adapted.settings[6:11] == (128, 64, 128, 8, 1)
    assert adapted.settings[11:16] == (128, 128, 64, 4, 2)
    assert adapted.settings[-2:] == (0, 0)
    grouped = entry.__class__("grouped", (), 1.0)
    assert adapt_entry(grouped, key, 4096, mi300) is grouped


def test_a_projection_is_adapted() -> None:
    key = Key("linear", (4096, 2048), "bfloat16")
    entry = entries_from_json(
        {"1": {"implementation": "triton", "settings": [8, 256, 4, 5, 1, 0, 1, 4, 0], "us": 1.0}}
    )[1]
    assert adapt_entry(entry, key, 1, Device("hip", "", "gfx942", 304, "")).settings == (8, 256, 4, 2, 1, 0, 0, 0, 0)
    assert adapt_entry(entry, key, 1, Device("cuda", "", "sm_90", 132, "")) is entry
