"""Small results kept between runs: one JSON object per file, safe under several processes at once.

What is kept can be found again by measuring. So a file that cannot be read or written costs a warning and time, and
never ends a run.
"""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

# Every installation has it but those made without dependencies, on machines that bring their own torch.
if find_spec("platformdirs"):
    from platformdirs import user_cache_dir
else:

    def user_cache_dir(appname: str, appauthor: bool) -> str:  # type: ignore[misc]
        """Name the folder as on Linux."""
        return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), appname)


logger = logging.getLogger("fmoe")

LOCK_TIMEOUT_S = 10.0


def cache_folder() -> Path:
    """Name the folder of all kept results: the variable FMOE_CACHE_DIR, else the user's cache folder."""
    return Path(os.environ.get("FMOE_CACHE_DIR") or user_cache_dir("fmoe", appauthor=False))


def read_store(path: Path, /) -> dict[str, Any]:
    """Read one file of results.

    Returns:
        The object in it; empty where there is no file, or, with a logged warning, where it cannot be read.
    """
    try:
        return _parse(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        logger.warning("ignored the cache %s, which cannot be read (%s)", path, error)
    except ValueError as error:
        logger.warning("ignored the cache %s, which holds no JSON object (%s); it is written anew", path, error)
    return {}


def update_store(path: Path, values: Mapping[str, Any], /, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Set the given keys of one file of results and leave its others as they are.

    The file is read again under a lock, and replaced as a whole, so that no reader ever sees half of it and no writer
    loses the keys of another. A file that holds no JSON object is set aside under the ending ``.corrupt``. Where the
    folder cannot be written, or another process holds the lock for ``timeout_s``, a warning is logged.

    Args:
        path: the file; its folder is made.
        values: what JSON can hold.
        timeout_s: the longest wait for other writers.
    """
    json.dumps(dict(values))  # what JSON cannot hold is the caller's fault, and known before anything is touched
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock"), timeout=timeout_s):
            _replace(path, {**_read_or_set_aside(path), **values})
    except (OSError, NotImplementedError) as error:  # the second where a file system has no locks
        logger.warning(
            "could not keep results in %s (%s); set FMOE_CACHE_DIR to a folder that can be written", path, error
        )


def _parse(content: bytes) -> dict[str, Any]:
    try:
        store = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(store, dict):
        raise ValueError(f"expected an object, got {type(store).__name__}")
    return store


def _read_or_set_aside(path: Path) -> dict[str, Any]:
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        aside = path.with_name(path.name + ".corrupt")
        os.replace(path, aside)
        logger.warning("the cache %s holds no JSON object (%s); it is now %s", path, error, aside.name)
        return {}


def _replace(path: Path, store: dict[str, Any]) -> None:
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(store, file, indent=1, sort_keys=True)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
