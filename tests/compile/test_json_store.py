"""Results kept between runs: what is read back, and what a broken file, folder or neighbour may do."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from filelock import FileLock

from fmoe.compile.json_store import cache_folder, read_store, update_store

ROOT = Path(__file__).parents[2]


def test_an_absent_file_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_store(tmp_path / "none" / "a.json") == {}
    assert not caplog.records


def test_keys_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.json"
    update_store(path, {"a": 1, "b": [1, {"c": None}]})
    update_store(path, {"a": "two", "d": True})
    assert read_store(path) == {"a": "two", "b": [1, {"c": None}], "d": True}
    assert sorted(p.name for p in path.parent.iterdir() if p.suffix != ".lock") == ["a.json"]


def test_what_json_cannot_hold_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    update_store(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        update_store(tmp_path / "a.json", {"a": object()})
    assert read_store(tmp_path / "a.json") == {"a": 1}


@pytest.mark.parametrize("content", [b"", b'{"a": 1, "b"', b"[1]", b"\xff\xfe{}", b"null", b"[" * 100_000])
def test_a_broken_file_is_ignored_then_set_aside(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert read_store(path) == {}
    assert len(caplog.records) == 1
    assert "holds no JSON object" in caplog.text
    update_store(path, {"b": 2})
    assert read_store(path) == {"b": 2}
    assert (tmp_path / "a.json.corrupt").read_bytes() == content


def test_a_file_that_cannot_be_read_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.json").mkdir()
    assert read_store(tmp_path / "a.json") == {}
    assert "cannot be read" in caplog.text
    update_store(tmp_path / "a.json", {"a": 1})
    assert "could not keep results" in caplog.text


def test_a_folder_below_a_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    update_store(tmp_path / "file" / "a.json", {"a": 1})
    assert "set FMOE_CACHE_DIR" in caplog.text
    assert read_store(tmp_path / "file" / "a.json") == {}


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_read_only_folder_is_a_warning() -> None:
    code = """
        import os, sys
        from pathlib import Path
        from fmoe.compile.json_store import read_store, update_store
        if os.geteuid() == 0:
            os.setuid(65534)  # to root no folder is read-only
        update_store(Path(sys.argv[1], "a.json"), {"a": 1})
        assert read_store(Path(sys.argv[1], "a.json")) == {}
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), folder], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert "could not keep results" in done.stderr
        assert os.listdir(folder) == []
        os.chmod(folder, 0o755)


def test_a_lock_held_too_long_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FileLock(tmp_path / "a.json.lock"):
        code = """
            import sys
            from pathlib import Path
            from fmoe.compile.json_store import update_store
            update_store(Path(sys.argv[1]), {"a": 1}, timeout_s=0.1)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), tmp_path / "a.json"], capture_output=True, text=True, cwd=ROOT
        )
    assert done.returncode == 0, done.stderr
    assert "could not keep results" in done.stderr
    assert not (tmp_path / "a.json").exists()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    update_store(path, {"a": 1})

    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", fail)
    update_store(path, {"a": 2})
    assert "No space left" in caplog.text
    assert read_store(path) == {"a": 1}
    assert not list(tmp_path.glob("*.part"))


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from fmoe.compile.json_store import read_store, update_store
        path = Path(sys.argv[1])
        for i in range(60):
            update_store(path, {f"{sys.argv[2]}{i}": i})
            assert f"{sys.argv[2]}{i}" in read_store(path)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a.json")]
    running = [subprocess.Popen([*arguments, name], cwd=ROOT, stderr=subprocess.PIPE, text=True) for name in "xy"]
    outcomes = [(process.communicate()[1], process.returncode) for process in running]
    assert outcomes == [("", 0), ("", 0)]
    assert read_store(tmp_path / "a.json") == {f"{name}{i}": i for name in "xy" for i in range(60)}


def test_the_folder_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FMOE_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("FMOE_CACHE_DIR", "")
    assert cache_folder().name == "fmoe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "fmoe"


@pytest.fixture(autouse=True)
def hear_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fmoe")
