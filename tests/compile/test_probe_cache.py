"""What is kept of a probe: for what it counts, for how long, and what a broken file does."""

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from fmoe.compile.capabilities import AiterRecord
from fmoe.compile.probe_cache import FAILURE_KEPT_S, cache_file, cache_key, keep_record, recall_record

WORKS = AiterRecord(True, "", "0.1.20", "gfx942", 7, True, True, ("aiter.topk_softmax",), ("hidden_states", "w1"))
FAILS = dataclasses.replace(WORKS, present=False, reason="aiter's import raised SystemExit")
ON: dict[str, Any] = {
    "version": "0.1.20",
    "fingerprint": "abc",
    "torch": "2.13",
    "device_type": "cuda",
    "arch": "gfx942",
    "selftest": 1,
    "symbols": ("a", "b"),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.WARNING, logger="fmoe")


def test_a_record_comes_back_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    assert recall_record("key") is None
    keep_record("key", WORKS)
    assert recall_record("key") == WORKS
    assert recall_record("key", now_s=time.time() + 1e9) == WORKS
    assert recall_record("other") is None
    assert not caplog.records


@pytest.mark.parametrize("name", ON)
def test_every_part_of_the_key_counts(name: str) -> None:
    other = {**ON, name: 2 if name == "selftest" else ("a",) if name == "symbols" else "other"}
    assert cache_key(**ON) == cache_key(**ON)
    assert cache_key(**other) != cache_key(**ON)


def test_a_failure_counts_for_a_day_and_says_how_to_try_again() -> None:
    keep_record("key", FAILS)
    now_s = time.time()
    kept = recall_record("key", now_s=now_s + 120)
    assert kept is not None
    assert kept.reason == f"{FAILS.reason} (found 2 min ago; to try again delete {cache_file()})"
    assert dataclasses.replace(kept, reason=FAILS.reason) == FAILS
    assert recall_record("key", now_s=now_s + FAILURE_KEPT_S + 1) is None
    assert recall_record("key", now_s=now_s - 3600) is None  # the clock was set back


@pytest.mark.parametrize(
    "change",
    [
        {"present": "yes"},
        {"topk_arity": "7"},
        {"topk_arity": True},
        {"symbols": "aiter.topk_softmax"},
        {"symbols": [1]},
        {"version": None},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_record_of_other_fields_is_ignored(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    keep_record("key", WORKS)
    store = json.loads(cache_file().read_text())
    store["key"]["record"].update(change)
    cache_file().write_text(json.dumps(store))
    assert recall_record("key") is None
    assert "ignored the record of aiter" in caplog.text


@pytest.mark.parametrize("entry", [3, {}, {"record": []}, {"record": {}, "time": 1}, {"time": "x"}], ids=str)
def test_an_entry_of_another_kind_is_ignored(entry: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache_file().write_text(json.dumps({"key": entry}))
    assert recall_record("key") is None
    assert "ignored the record of aiter" in caplog.text


def test_a_broken_file_is_ignored_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    cache_file().write_text('{"key": {"rec')
    assert recall_record("key") is None
    assert "holds no JSON object" in caplog.text
    keep_record("key", WORKS)
    assert recall_record("key") == WORKS
