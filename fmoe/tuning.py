"""``fmoe.tune``: measure a loaded model's operators and give the model with the plans that follow."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fmoe.compile.device import describe_device
from fmoe.compile.plan_tables import export_table, read_tables, tuned_file

from .ambient import check_model
from .model import Model, check_progress, replan
from .plan_search import BATCH_SIZES, BUDGET_S, KEY_BUDGET_S, MAX_TOKENS, Search, search_plans


def tune(
    model: Model,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    max_tokens: int = MAX_TOKENS,
    budget_s: float = BUDGET_S,
    key_budget_s: float = KEY_BUDGET_S,
    progress: bool | None = None,
    force: bool = False,
) -> Model:
    """Choose the implementation and settings of each operator by measuring; nothing is compiled or run afterwards.

    What is found is kept in the cache folder for this device and these versions, and taken from there next time.

    Args:
        model: as loaded.
        batch_sizes: of the decode steps to come.
        max_tokens: of the prompts to come.
        budget_s: seconds for everything; what is not measured by then goes by the tables and the rule as before.
        key_budget_s: seconds for one operator at one token count.
        progress: show a bar; None does so on a terminal only.
        force: measure again what was measured on this machine.

    Returns:
        The model with the new plans; the given one is unchanged, and is returned itself where nothing differs.

    Raises:
        ValueError: no model, or an argument out of its range.
        RuntimeError: called while a graph is captured or traced.
    """
    check_model(model, "tune")
    check_progress(progress)
    # Other things than a sequence go on as they are, to the message that refuses them.
    sizes: Any = tuple(batch_sizes) if isinstance(batch_sizes, Iterable) else batch_sizes
    search = Search(sizes, max_tokens, budget_s, key_budget_s, force)
    plans = search_plans(
        model.params,
        getattr(model.config, "router", None),
        [plan.key for plan in model.plans],
        model.device,
        requested=model.kernels,
        search=search,
        progress=progress,
    )
    return replan(model, plans)


def export_tuned(model: Model, path: str | os.PathLike[str], /) -> None:
    """Write what was measured of a model's operators on this machine as a table that fmoe can be shipped with.

    Args:
        model: as loaded.
        path: the file; other operators in it stay.

    Raises:
        ValueError: no model, nothing was measured, or the file holds another thing than a table of this device.
        FileNotFoundError: the folder of the file is not there.
        RuntimeError: what was measured could not be kept in the cache folder, from where it is written.
    """
    check_model(model, "tuning.export_tuned")
    device, keys = describe_device(model.device), [plan.key for plan in model.plans]
    there = check_export(path).get("device", device.name)
    if there != device.name:
        raise ValueError(
            f"{os.fspath(path)} is a table of {there}, and this device is {device.name}; name another file"
        )
    kept = read_tables(device).tuned
    if not any(str(key) in kept for key in keys) and any(
        row.source.startswith("tuned") for plan in model.plans for row in plan.rows
    ):
        raise RuntimeError(
            f"what was measured could not be kept in {tuned_file(device)}, from where a table is written; "
            "set FMOE_CACHE_DIR to a folder that can be written and tune again"
        )
    export_table(device, Path(path), keys=keys)


def check_export(path: str | os.PathLike[str], /) -> dict[str, Any]:
    """Refuse a place where no table could be written, before time is spent on measuring.

    Returns:
        The table that is there; empty where there is none.

    Raises:
        ValueError: no path, a folder, or a file that holds another thing than a table.
        FileNotFoundError: the folder of the file is not there.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ValueError(f"path={path!r:.80} must name the file of a table, such as 'table.json'")
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder {file.absolute().parent} for the table; make it first")
    if file.is_dir():
        raise ValueError(f"the table's place {file} is a folder; name a file in it, such as {file / 'table.json'}")
    if not file.exists():
        return {}
    try:
        table = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        table = None
    if not _is_table(table):
        raise ValueError(f"{file} holds something else than a table of fmoe's, and is left as it is; name another file")
    found: dict[str, Any] = table
    return found


def _is_table(table: Any) -> bool:
    """Tell a table, to which operators can be added, from other JSON."""
    operators = table.get("entries") if isinstance(table, dict) else None
    return isinstance(operators, dict) and all(
        isinstance(entries, dict) and all(tokens.isdecimal() for tokens in entries) for entries in operators.values()
    )
