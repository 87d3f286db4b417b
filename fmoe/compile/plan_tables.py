"""Tables of measured entries: one file per device and versions in the cache folder, and those that come with fmoe.

The file in the cache has one key for each operator and token count, so that processes that tune different ones at the
same time keep each other's. A table that comes with fmoe is chosen by the device's name alone.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .json_store import cache_folder, read_store, update_store
from .linear_settings import linear_from_ints
from .plan import KERNELS, Device, Entry, Key, entries_from_json, entry_to_json
from .settings import settings_from_ints

logger = logging.getLogger("fmoe")

TABLES = Path(__file__).with_name("tables")
SEPARATOR = " | "  # between an operator and a token count

Table = dict[str, dict[int, Entry]]  # str(key) -> token count -> entry


class Tables(NamedTuple):
    """What was measured."""

    tuned: Table  # on this machine, with these versions
    shipped: Table  # on a device of this name, by fmoe's authors


def slug(text: str, /) -> str:
    """Write a name so that it can be a file's."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def tuned_file(device: Device, /) -> Path:
    """Name the file of what was measured on a device with its versions."""
    identity = json.dumps([device.kind, device.name, device.arch, device.units, device.versions])
    return cache_folder() / "plans" / f"{slug(device.name)}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def shipped_file(device: Device, /) -> Path:
    """Name the table that comes with fmoe for a device; it need not exist."""
    return TABLES / f"{slug(device.name)}.json"


def read_tables(device: Device, /) -> Tables:
    """Read both tables of a device; what is broken is left out with a warning."""
    tuned_path, shipped_path = tuned_file(device), shipped_file(device)
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in read_store(tuned_path).items():
        operator, separator, tokens = name.rpartition(SEPARATOR)
        if separator:
            grouped.setdefault(operator, {})[tokens] = value
    store = read_store(shipped_path)
    shipped = store.get("entries", {})
    tables = Tables(_parse(grouped, tuned_path), _parse(shipped if isinstance(shipped, dict) else {}, shipped_path))
    made_with = f" (made with {store['versions']})" if tables.shipped and "versions" in store else ""
    _log_once(
        logging.INFO if tables.tuned or tables.shipped or device.kind != "cpu" else logging.DEBUG,
        f"plans for {device.name}: {len(tables.tuned)} operators tuned on this machine, {len(tables.shipped)} in the "
        f"table that comes with fmoe{made_with}, others by rule",
    )
    return tables


def read_other_tables(device: Device, /) -> Table:
    """Read what comes with fmoe for other devices: nothing to plan by, but a start for measuring."""
    table: Table = {}
    for path in sorted(TABLES.glob("*.json")):
        if path != shipped_file(device):
            entries = read_store(path).get("entries", {})
            for key, by_tokens in _parse(entries if isinstance(entries, dict) else {}, path).items():
                table[key] = by_tokens | table.get(key, {})
    return table


def write_entries(device: Device, key: Key, entries: Mapping[int, Entry], /) -> None:
    """Keep what was measured of one operator; other token counts and operators stay."""
    values: dict[str, Any] = {"device": device.name, "versions": device.versions}
    values |= {f"{key}{SEPARATOR}{tokens}": entry_to_json(entry) for tokens, entry in entries.items()}
    update_store(tuned_file(device), values)


def export_table(device: Device, path: Path, /, *, keys: Iterable[Key] | None = None, timings: bool = True) -> None:
    """Write what was measured on this machine as a table that can come with fmoe.

    Args:
        device: whose.
        path: the file; operators in it that are not measured here stay. ``shipped_file(device)`` is where fmoe looks.
        keys: operators to write; None is all.
        timings: write those of all candidates, too.

    Raises:
        ValueError: nothing was measured.
    """
    wanted = None if keys is None else {str(key) for key in keys}
    measured = {key: entries for key, entries in read_tables(device).tuned.items() if wanted is None or key in wanted}
    if not measured:
        raise ValueError(f"nothing was measured on {device.name} with {device.versions}; tune first")
    kept = read_store(path).get("entries", {})
    if not timings:
        measured = {
            k: {t: replace(entry, timings=()) for t, entry in entries.items()} for k, entries in measured.items()
        }
    new = {key: {str(t): entry_to_json(entry) for t, entry in entries.items()} for key, entries in measured.items()}
    merged = {key: kept.get(key, {}) | new.get(key, {}) for key in sorted({*kept, *new})}
    merged = {key: {t: entries[t] for t in sorted(entries, key=int)} for key, entries in merged.items()}
    part = path.with_name(f"{path.name}.part")
    part.write_text(format_table(device.name, device.versions, merged))
    part.replace(path)


def format_table(device: str, versions: str, entries: Mapping[str, Mapping[str, Any]], /) -> str:
    """Write a table as JSON with one line for each entry, so that a change can be read."""
    operators = []
    for key, by_tokens in entries.items():
        lines = [f"   {json.dumps(str(t))}: {json.dumps(entry)}" for t, entry in by_tokens.items()]
        operators.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n  }")
    head = f' "device": {json.dumps(device)},\n "versions": {json.dumps(versions)},\n "entries": {{\n'
    return "{\n" + head + ",\n".join(operators) + "\n }\n}\n"


def _parse(operators: Mapping[str, Any], path: Path) -> Table:
    table: Table = {}
    for key, values in operators.items():
        try:
            entries = entries_from_json(values)
            for entry in entries.values():
                _check_settings(key, entry)
        except ValueError as error:
            logger.warning("ignored %r in %s (%s); tune it again", key, path, error)
        else:
            table[key] = entries
    return table


def _check_settings(key: str, entry: Entry) -> None:
    """Raise ValueError for settings that the kernels cannot be given."""
    if entry.implementation not in KERNELS:
        return
    read: Callable[[tuple[int, ...]], object] = linear_from_ints if key.startswith("linear") else settings_from_ints
    try:
        read(entry.settings)
    except IndexError as error:
        raise ValueError(f"settings {entry.settings} name no path") from error


@lru_cache(maxsize=64)
def _log_once(level: int, line: str) -> None:
    logger.log(level, line)
