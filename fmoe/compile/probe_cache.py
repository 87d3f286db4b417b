"""What the probe found out about AITER, kept between runs: its self-test takes minutes, this takes milliseconds."""

import dataclasses
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from .capabilities import AiterRecord
from .json_store import cache_folder, read_store, update_store

logger = logging.getLogger("fmoe")

FAILURE_KEPT_S = 24 * 3600.0  # what failed may have been repaired elsewhere: a compiler, a library


def cache_file() -> Path:
    """Name the file of the kept records."""
    return cache_folder() / "aiter.json"


def cache_key(
    *, version: str, fingerprint: str, torch: str, device_type: str, arch: str, selftest: int, symbols: Iterable[str]
) -> str:
    """Name what a record depends on; none is used for anything else.

    Args:
        version, fingerprint: of the installation.
        torch: its version.
        device_type, arch: where the self-test ran.
        selftest: version of the self-test.
        symbols: the names that were looked for.
    """
    names = hashlib.sha256(" ".join(sorted(symbols)).encode()).hexdigest()[:8]
    return " | ".join((version, fingerprint, f"torch {torch}", device_type, arch, f"self-test {selftest} {names}"))


def recall_record(key: str, /, *, now_s: float | None = None) -> AiterRecord | None:
    """Give the record kept under a key, or None; a failure counts for a day and names the file to delete.

    Args:
        key: from ``cache_key``.
        now_s: seconds of the system's clock; None asks it.
    """
    entry = read_store(cache_file()).get(key)
    if entry is None:
        return None
    try:
        record, kept_s = _decode(entry["record"]), float(entry["time"])
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("ignored the record of aiter in %s (%s); it is written anew", cache_file(), error)
        return None
    if record.present:
        return record
    age_s = (time.time() if now_s is None else now_s) - kept_s
    if not 0 <= age_s < FAILURE_KEPT_S:
        return None
    hint = f"found {age_s / 60:.0f} min ago; to try again delete {cache_file()}"
    return dataclasses.replace(record, reason=f"{record.reason} ({hint})")


def keep_record(key: str, record: AiterRecord, /) -> None:
    """Keep a record for later runs."""
    update_store(cache_file(), {key: {"time": time.time(), "record": dataclasses.asdict(record)}})


def _decode(values: Mapping[str, Any]) -> AiterRecord:
    """Build a record from JSON; a field that is absent, unknown or of another type is an error."""
    types = get_type_hints(AiterRecord)
    if set(values) != set(types):
        raise ValueError(f"expected the fields {', '.join(types)}, got {', '.join(values)}")
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if types[name] in (bool, int, str):
            fits = type(value) is types[name]
        else:
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not fits:
            raise ValueError(f"{name} cannot be {value!r}")
        fields[name] = tuple(value) if isinstance(value, list) else value
    return AiterRecord(**fields)
